"""Before the first batch nothing is read of all slices: manifest, table, and one file of the documents' lengths.

That holds for every packing, filter and source, and the samples are those of the reference.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import Loader
from forebay.load.options import SampleOptions
from forebay.load.packing import DocumentSubset
from support.origin_server import OriginServer
from support.reference_samples import samples_of, to_lists, write_slices

SIZES = np.random.default_rng(0).integers(1, 30, 120).tolist()
SLICES = [(SIZES[12 * i : 12 * i + 12], 2 * (i % 3)) for i in range(10)]  # Some documents continue in the next.


@pytest.mark.parametrize("source", ["local", "http", "bucket"])
@pytest.mark.parametrize(
    "packing, filters, validation",
    [
        ("concat", {}, 0.0), ("concat", {}, 0.25), ("best_fit", {}, 0.0), ("concat", {"min_tokens": 11}, 0.0),
        ("concat", {"exclude": [1, 40, 41, 77]}, 0.0),
    ],
)  # fmt: skip
def test_the_first_batch_needs_its_own_chunks_and_no_more(
    source: str, packing: Any, filters: dict, validation: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, documents = write_slices(tmp_path / "set", SLICES).path, DocumentSubset(**filters) if filters else None
    names = ["manifest.json", "slices.parquet", *(["lengths.zst"] if filters or packing == "best_fit" else [])]
    files = {} if source == "local" else {f"set/{name}": (folder / name).stat().st_size for name in names}
    with OriginServer(tmp_path) as server:
        for name, value in server.s3_environment.items():
            monkeypatch.setenv(name, value)
        base = {"local": tmp_path, "http": server.url, "bucket": server.s3_url}[source]
        loader = Loader(
            f"{base}/set", seq_len=8, batch_size=4, shuffle=False, packing=packing,
            split="train" if validation else None,
            samples=SampleOptions(documents=documents, validation_fraction=validation),
        )  # fmt: skip
        assert server.requests == dict.fromkeys(files, 1) and server.bytes_sent == files
        assert loader.stats().get("fetched_bytes", 0) == files.get("set/lengths.zst", 0)
        read = [(i, row) for batch in loader for i, row in zip(batch.sample_ids.tolist(), batch.inputs.tolist())]
        loader.close()
    samples = samples_of(to_lists(SLICES), 8, packing=packing, **filters)
    assert read == [(i, samples[i].inputs) for i, _ in read]
    assert len(dict(read)) == len(samples) - round(validation * len(samples))
