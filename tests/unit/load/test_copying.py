"""Copies out of mapped files: right for any types and ends, and an error, not a signal, where a file was cut."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_rows_slice, write_token_slice
from forebay.errors import DatasetError
from forebay.load import collate as copying
from forebay.load.collate import MappedArray, RangeCopier, copy_array
from forebay.load.loader import Loader


@given(st.sampled_from(["u1", "<u2", "<u4", "<i8"]), st.lists(st.integers(1, 40), min_size=1, max_size=4), st.data())
@pytest.mark.parametrize("plain", [False, True])
def test_ranges_equal_slices_of_the_arrays(plain, dtype, sizes, data):
    raws = [np.random.default_rng(i).integers(0, 100, size).astype(dtype) for i, size in enumerate(sizes)]
    which, starts, lengths = (np.array(column, np.int64) for column in ([], [], []))
    firsts, expected = [0], []
    for _ in range(data.draw(st.integers(1, 5))):  # Rows, each of one source.
        source = data.draw(st.integers(0, len(raws) - 1))
        for _ in range(data.draw(st.integers(0, 3))):
            start = data.draw(st.integers(0, len(raws[source]) - 1))
            length = data.draw(st.integers(0, len(raws[source]) - start))
            which, starts = np.append(which, source), np.append(starts, start)
            lengths = np.append(lengths, length)
            expected.append(raws[source][start : start + length])
        firsts.append(len(which))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_MAX_RANGES", 2)
        if plain:  # As where the system lacks the call.
            patch.setattr(copying, "_writev", None)
        itemsize = raws[0].itemsize
        ranges = RangeCopier([MappedArray(raw, "") for raw in raws], which, starts * itemsize, lengths * itemsize)
        for low in range(len(firsts) - 1):
            high = data.draw(st.integers(low, len(firsts) - 1))
            requested = np.concatenate([np.empty(0, dtype), *expected[firsts[low] : firsts[high]]])
            out = np.zeros_like(requested)
            ranges.copy(firsts[low], firsts[high], out.ctypes.data)
            assert out.tolist() == requested.tolist()


def test_a_range_outside_its_source_is_refused():
    zero, source = np.zeros(1, np.int64), MappedArray(np.zeros(4, np.uint16), "here.safetensors")
    for offset, size in ((-1, 2), (0, 9), (7, 2)):
        with pytest.raises(DatasetError, match=r"here.safetensors: expected .* of a tensor, got one of 8 bytes"):
            RangeCopier([source], zero, zero + offset, zero + size)
    assert copy_array(source).tolist() == [0, 0, 0, 0]


@pytest.mark.skipif(copying._writev is None, reason="this system cannot copy without a signal")
@pytest.mark.parametrize(
    "options",
    [{"seq_len": 2048}, {"seq_len": 2048, "document_masks": True}, {"seq_len": 2048, "packing": "best_fit"}, {}],
)
def test_a_file_that_is_cut_while_it_is_read_is_an_error_that_names_it(tmp_path, options):
    for index in range(2):
        if options:
            tokens = np.arange(1 << 20, dtype=np.uint32)
            stops = np.arange(1000, len(tokens), 1000, dtype=np.uint64)
            write_token_slice(tmp_path / f"{index:03d}.safetensors", tokens, stops)
        else:
            write_rows_slice(tmp_path / f"{index:03d}.safetensors", {"x": np.ones((128, 1024), np.float32)})
    import_slices(tmp_path, "cut")
    with Loader(tmp_path, batch_size=4, shuffle=False, **options) as loader:
        batches = iter(loader)
        next(batches)
        os.truncate(tmp_path / "000.safetensors", 8192)
        with pytest.raises(DatasetError, match=r"000\.safetensors.* was truncated while it was read"):
            for _ in batches:
                pass
