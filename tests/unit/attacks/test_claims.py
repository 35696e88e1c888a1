"""A table claims more bytes, tokens or documents than there can be: opening says so before anything is allocated."""

from dataclasses import replace

import numpy as np
import pytest

import forebay
from forebay.dataset.import_slices import import_slices
from forebay.dataset.manifest import Manifest, SliceTable
from forebay.dataset.slices import write_token_slice
from forebay.errors import DatasetError

PB = 1 << 50
CLAIMS = [{"bytes": PB}, {"bytes": PB, "count": PB // 2}, {"count": PB}, {"bytes": 1 << 47}, {"count": 1 << 62}]


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("more", [{}, {"packing": "best_fit"}, {"shuffle": False}])
def test_a_loader_on_a_table_of_lies(tmp_path, claim, more):
    for i in range(3):
        write_token_slice(tmp_path / f"{i}.safetensors", np.arange(200, dtype=np.uint16), np.array([200], np.uint64))
    dataset = import_slices(tmp_path)
    rows = [replace(dataset.table.row(i), **(claim if i == 1 else {})) for i in range(3)]
    table, m = SliceTable.from_rows(rows, dataset.table.chunk_bytes), dataset.manifest
    lied = Manifest.of(table, m.lineage, name=m.name, layout=m.layout, dtype=m.dtype)
    (tmp_path / "slices.parquet").write_bytes(table.to_parquet())
    (tmp_path / "manifest.json").write_bytes(
        replace(lied, lengths_sha256=m.lengths_sha256, lengths_bytes=m.lengths_bytes).to_json()
    )
    with pytest.raises(DatasetError, match="expected at most 2147483648 chunks and a token a byte"):
        forebay.Loader(tmp_path, seq_len=16, batch_size=1, **more)
