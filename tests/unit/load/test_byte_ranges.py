"""Collators read the bytes of a slice's file that they name, and no others."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import open_slice
from forebay.errors import UsageError
from forebay.load import packing
from forebay.load.batch_planner import make_collator
from forebay.load.collate import BatchArrays
from forebay.load.packing import DocumentSubset
from forebay.load.samples import SampleIndex, plan_samples
from support.reference_samples import MANY, write_slices

POISON = 0xA5
SEQ_LEN = 6


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Dataset:
    """Slices of many documents, of one that continues, and of few."""
    return write_slices(tmp_path_factory.mktemp("tokens") / "data", MANY)


def read_twice(
    dataset: Dataset, sample_index: SampleIndex, key: int, samples: Any, path: Path, **settings: Any
) -> tuple[BatchArrays, BatchArrays]:
    """A batch, and that of a copy of the file in which all bytes are poisoned that the collator does not name."""
    slice_, row = dataset.open_slice(key), dataset.table.row(key)
    collators = [make_collator([sample_index], **settings) for _ in range(2)]
    collators[0].open(key, key, slice_)
    itemsize = slice_.tensors["tokens"].itemsize if "tokens" in slice_.tensors else 1
    data = np.fromfile(slice_.path, np.uint8)
    copied = np.full_like(data, POISON)
    starts, stops = collators[0].byte_ranges(key, samples)
    assert starts.dtype == stops.dtype == np.int64
    head = collators[0].num_open_bytes(key, row, itemsize)
    for start, stop in [(0, head), *zip(starts.tolist(), stops.tolist())]:
        assert 0 <= start <= stop <= len(data)
        copied[start:stop] = data[start:stop]
    copied.tofile(path)
    collators[1].open(key, key, open_slice(path))
    keys = np.full(len(samples), key)
    first, second = (each.make(each.plan(keys, samples), 0, len(keys)) for each in collators)
    return first, second


@given(
    st.none() | st.builds(DocumentSubset, st.lists(st.integers(0, 380), max_size=60), st.integers(0, 8)),
    st.sampled_from([("concat", False), ("concat", True), ("best_fit", True)]), st.integers(6, 60), st.floats(0, 0.5),
    st.data(),
)  # fmt: skip
def test_token_batches_need_the_named_bytes_only(
    tmp_path_factory, tokens, documents,
    kind, size, validation, data,
):  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_SECTION_ROWS", 0)
        patch.setattr(packing, "_MIN_SECTION_TOKENS", size)
        try:
            sample_index = plan_samples(
                tokens, SEQ_LEN, packing=kind[0], documents=documents, split="train", validation=validation
            )
        except UsageError:
            return
        key = data.draw(st.sampled_from(np.flatnonzero(sample_index.counts).tolist()))
        last = int(sample_index.counts[key]) - 1
        samples = np.array(data.draw(st.lists(st.integers(0, last), max_size=4)), np.int64)
        path = tmp_path_factory.mktemp("sparse") / "0.safetensors"
        first, second = read_twice(tokens, sample_index, key, samples, path, document_masks=kind[1])
    assert first.tensors == second.tensors == {} and (first.masks is not None) == kind[1]
    assert np.array_equal(first.inputs, second.inputs) and np.array_equal(first.labels, second.labels)
    for name in ("document_ids", "position_ids", "cu_seqlens") if kind[1] else ():
        assert np.array_equal(getattr(first.masks, name), getattr(second.masks, name))


def test_consecutive_tokens_need_no_document_ends(tokens):
    row = tokens.table.row(0)
    masked, plain = (make_collator([plan_samples(tokens, SEQ_LEN)], document_masks=masks) for masks in (True, False))
    assert masked.num_open_bytes(0, row, 2) == plain.num_open_bytes(0, row, 2) + 8 * 300 == row.bytes - 2 * row.count
    plain.open(0, 0, tokens.open_slice(0))
    starts, stops = plain.byte_ranges(0, np.array([2, 3]))
    first = row.bytes - 2 * row.count
    assert (starts - first).tolist() == [24, 36] and (stops - first).tolist() == [38, 50]  # With the last label.


def test_row_batches_need_the_named_bytes_only(tmp_path):
    arrays = {"x": np.arange(40, dtype=np.float32).reshape(10, 4), "y": np.arange(10), "z": np.zeros((10, 0, 2))}
    save_file(arrays | {"wide": np.zeros((10, 1 << 14))}, tmp_path / "0.safetensors")
    rows = import_slices(tmp_path, "rows")
    sample_index = plan_samples(rows, None, split="train", validation=0.2)
    first, second = read_twice(rows, sample_index, 0, np.array([1, 7, 1]), tmp_path / "sparse")
    assert (np.fromfile(tmp_path / "sparse", np.uint8) == POISON).sum() > 900_000
    assert second.tensors["y"].tolist() == [3, 9, 3] and first.tensors.keys() == {*arrays, "wide"}
    assert all(np.array_equal(array, second.tensors[name]) for name, array in first.tensors.items())
