"""Run by an interpreter that has others' libraries, not by pytest: `write DIR`, or `read LIBRARY DIR`; JSON on stdout.

`write` makes what each library that is there writes; `read` gives the rows that a library reads of what Forebay wrote,
arrays as lists and bytes as hexadecimal. A library that is missing is said to be: {"missing": name}.
"""

import importlib
import json
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from support.paths import TESTS

GOLDEN = json.loads((TESTS / "golden" / "foreign" / "stream.json").read_text())
DOCUMENTS = np.split(np.array(GOLDEN["tokens"]), np.cumsum(GOLDEN["lengths"])[:-1])
BLOCK = 16  # Tokens that LitData's TokensLoader reads at once.


def streaming() -> Any:
    """MosaicML's library, without its image datasets: they need a torchvision that fits torch, which formats do not."""
    sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))
    return importlib.import_module("streaming")


def write_mds(out: Path):
    library = streaming()
    for name, encoding, compression in [("mds_u16", "uint16", None), ("mds_i64_zstd", "int64", "zstd:3")]:
        settings = {"compression": compression, "hashes": ["sha1"], "size_limit": 900}
        with library.MDSWriter(out=str(out / name), columns={"tokens": f"ndarray:{encoding}"}, **settings) as writer:
            for document in DOCUMENTS:
                writer.write({"tokens": document.astype(encoding)})


def write_arrow(out: Path):
    from datasets import Dataset

    rows = Dataset.from_dict({"input_ids": [document.tolist() for document in DOCUMENTS]})
    rows.save_to_disk(str(out / "arrow_i64"), num_shards=2)


def write_litdata(out: Path):
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    for name, settings in {
        "litdata_tokens": {"item_loader": TokensLoader()},
        "litdata_dict_zstd": {"compression": "zstd", "compression_level": "chunk"},
    }.items():
        writer = BinaryWriter(str(out / name), chunk_bytes=900, **settings)
        for number, document in enumerate(DOCUMENTS):
            tokens = document.astype(np.int32)
            writer[number] = tokens if name == "litdata_tokens" else {"url": f"u{number}", "tokens": tokens}
        writer.done()
        writer.merge()


def read_mds(folder: Path) -> Iterator[dict]:
    yield from streaming().StreamingDataset(local=str(folder), batch_size=1)


def read_litdata(folder: Path) -> Iterator:
    from litdata import StreamingDataset, TokensLoader

    index = json.loads((folder / "index.json").read_text())
    loader = TokensLoader(block_size=BLOCK) if index["config"]["item_loader"] == "TokensLoader" else None
    dataset = StreamingDataset(str(folder), item_loader=loader)
    yield from (dataset[i] for i in range(len(dataset)))


def fetch_mds(folder: Path) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as local:
        yield from streaming().StreamingDataset(remote=str(folder), local=local, batch_size=1)


def fetch_litdata(folder: Path) -> Iterator:
    from litdata import StreamingDataset

    with tempfile.TemporaryDirectory() as local:
        dataset = StreamingDataset(f"local:{folder}", cache_dir=local)
        yield from (dataset[i] for i in range(len(dataset)))


def read_webdataset(folder: Path) -> Iterator[dict]:
    import webdataset

    files = sorted(str(path) for path in folder.iterdir())
    for sample in webdataset.WebDataset(files, shardshuffle=False).decode():
        in_json = sample.pop("json", {})
        yield {"__key__": sample["__key__"], **in_json, **{k: v for k, v in sample.items() if not k.startswith("__")}}


def read_megatron(folder: Path) -> Iterator:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    (index,) = folder.glob("*.idx")
    dataset = IndexedDataset(str(index.with_suffix("")))
    yield from (dataset[i] for i in range(len(dataset)))


def read_datasets(folder: Path) -> Iterator[dict]:
    from datasets import load_dataset

    suffix = next(folder.iterdir()).name.partition(".")[2]
    kind = {"jsonl": "json", "parquet": "parquet", "arrow": "arrow"}[suffix.partition(".")[0]]
    files = sorted(str(path) for path in folder.iterdir())
    yield from load_dataset(
        kind, data_files=files, split="train", cache_dir=str(folder.parent / f"{folder.name}-cache")
    )


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    return value.tolist() if hasattr(value, "tolist") else value


def main() -> Any:
    _, command, *words = sys.argv
    if command == "read":
        readers = {
            "mds": read_mds, "litdata": read_litdata, "webdataset": read_webdataset, "datasets": read_datasets,
            "megatron": read_megatron, "remote mds": fetch_mds, "remote litdata": fetch_litdata,
        }  # fmt: skip
        return [plain(row) for row in readers[words[0]](Path(words[1]))]
    missing = []
    for write in (write_mds, write_arrow, write_litdata):
        try:
            write(Path(words[0]))
        except (ImportError, RuntimeError, AttributeError) as error:  # There, and not fit for what is beside it.
            missing.append(str(error))
    return {"missing": missing}


if __name__ == "__main__":
    try:
        print("\n" + json.dumps(main()))
    except ImportError as error:
        print("\n" + json.dumps({"missing": str(error)}))
