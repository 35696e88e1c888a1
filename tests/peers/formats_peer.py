"""Run by an interpreter that has others' libraries, not by pytest: `write DIR`, JSON on stdout.

It makes what each library that is there writes. A library that is missing is said to be: {"missing": name}.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "foreign" / "stream.json").read_text())
DOCUMENTS = np.split(np.array(GOLDEN["tokens"]), np.cumsum(GOLDEN["lengths"])[:-1])


def streaming() -> Any:
    """MosaicML's library, without its image datasets: they need a torchvision that fits torch, which formats do not."""
    sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))
    return importlib.import_module("streaming")


def write_mds(out: Path) -> None:
    library = streaming()
    for name, encoding, compression in [("mds_u16", "uint16", None), ("mds_i64_zstd", "int64", "zstd:3")]:
        settings = {"compression": compression, "hashes": ["sha1"], "size_limit": 900}
        with library.MDSWriter(out=str(out / name), columns={"tokens": f"ndarray:{encoding}"}, **settings) as writer:
            for document in DOCUMENTS:
                writer.write({"tokens": document.astype(encoding)})


def write_arrow(out: Path) -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"input_ids": [document.tolist() for document in DOCUMENTS]})
    rows.save_to_disk(str(out / "arrow_i64"), num_shards=2)


def main() -> Any:
    _, *value = sys.argv[1:]
    missing = []
    for write in (write_mds, write_arrow):
        try:
            write(Path(value[0]))
        except (ImportError, RuntimeError, AttributeError) as error:  # There, and not fit for what is beside it.
            missing.append(str(error))
    return {"missing": missing}


if __name__ == "__main__":
    try:
        print("\n" + json.dumps(main()))
    except (ImportError, RuntimeError, AttributeError) as error:
        print("\n" + json.dumps({"missing": str(error)}))
