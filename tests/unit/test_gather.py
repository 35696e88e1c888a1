"""The gather against a plain loop, whatever the alignment, type and tail; and nothing is read outside an array."""

from __future__ import annotations

import copy
import ctypes
import gc
import mmap
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from forebay.errors import DatasetError
from forebay.load import gather as module
from forebay.load.gather import Flat, Gather, Span, array_at

law = settings(deadline=None, max_examples=150)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[NDArray[np.uint64]], NDArray[np.int64], NDArray[np.int64], type]:
    seq_len = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(lambda n: max(n) >= seq_len))
    one_type = draw(st.sampled_from([np.uint16, np.uint32, None]))
    arrays = []
    for i, length in enumerate(lengths):
        dtype = np.dtype(one_type or draw(st.sampled_from([np.uint8, np.uint16, np.uint32, np.int32, np.int64])))
        odd = draw(st.integers(0, 9))  # Bytes before the first token: any alignment.
        raw = np.empty(odd + length * dtype.itemsize, np.uint8)
        arrays.append(raw[odd:].view(dtype))
        arrays[-1][...] = np.random.default_rng(i).integers(0, 120, length)
    places = [(key, n) for key, length in enumerate(lengths) for n in range(length // seq_len)]
    chosen = draw(st.lists(st.sampled_from(places), min_size=0, max_size=12))
    keys, samples = (np.array([place[i] for place in chosen], np.int64) for i in (0, 1))
    return seq_len, arrays, keys, samples, draw(st.sampled_from([np.int64, np.int32]))


def plain(
    arrays: list[NDArray[np.uint64]], seq_len: int, keys: NDArray[np.int64], samples: NDArray[np.int64]
) -> list[list[int]]:
    rows = []
    for key, sample in zip(keys.tolist(), samples.tolist()):
        row = arrays[key][sample * seq_len : (sample + 1) * seq_len + 1].tolist()
        rows.append(row if len(row) > seq_len else [*row, -100])
    return rows


@law
@given(cases(), st.booleans(), st.booleans())
def test_equals_the_plain_loop(case: tuple, far: bool, given_out: bool) -> None:
    seq_len, arrays, keys, samples, dtype = case
    with pytest.MonkeyPatch.context() as patch:
        if far:  # No array but the first is within reach of the view.
            patch.setattr(module, "_MOST_BYTES", 64 * (seq_len + 1) * 8)
        gather = Gather(seq_len, dtype)
        for key, tokens in enumerate(arrays):
            gather.add(key * 50, tokens)
        out = np.empty((len(keys), seq_len + 1), dtype) if given_out else None
        indexes = gather.indexes(keys * 50, samples)
        got = gather.take(indexes, out)
    assert got.dtype == dtype and got.shape == (len(keys), seq_len + 1)
    assert got is out or out is None
    assert got.tolist() == plain(arrays, seq_len, keys, samples)


def test_a_sample_outside_its_slice_is_refused() -> None:
    gather = Gather(4)
    gather.add(3, np.arange(11, dtype=np.uint16))
    for key, sample in ((3, 2), (3, -1), (3, 1 << 62), (2, 0), (-1, 0), (10**6, 0)):
        with pytest.raises(DatasetError, match=f"sample {sample} of slice {key}"):
            gather.indexes(np.array([3, key]), np.array([0, sample]))
    gather.drop(3)
    gather.drop(3)
    with pytest.raises(DatasetError, match="expected an open slice"):
        gather.indexes(np.array([3]), np.array([0]))
    for bad in (np.zeros((2, 2), np.uint16), np.zeros(3, np.float32), np.zeros(3, ">u2")):
        with pytest.raises(DatasetError, match="expected integers"):
            gather.add(0, bad)


def test_a_key_may_be_added_again() -> None:
    gather = Gather(2)
    gather.add(0, np.arange(9, dtype=np.uint16))
    gather.add(0, np.arange(100, 103, dtype=np.uint16))
    assert gather.take(gather.indexes(np.array([0]), np.array([0]))).tolist() == [[100, 101, 102]]
    with pytest.raises(DatasetError):
        gather.indexes(np.array([0]), np.array([3]))


def test_whoever_holds_the_arrays_may_read_after_dropping() -> None:
    gather = Gather(4)
    for key in range(20):
        gather.add(key, np.full(1 << 16, key, np.uint16))  # 128 KiB each: given back to the system when freed.
    indexes, held = gather.indexes(np.arange(20), np.arange(20)), gather.arrays
    for key in range(20):
        gather.drop(key)
    gc.collect()
    assert gather.arrays == () and len(held) == 20
    assert gather.take(indexes)[:, 0].tolist() == list(range(20))


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_nothing_before_or_after_an_array_is_read(dtype: type) -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for at in (start, start + 2 * page):
        assert protect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0) == 0
    tokens = array_at(start + page, page // np.dtype(dtype).itemsize, np.dtype(dtype))
    seq_len = 8
    gather = Gather(seq_len)
    gather.add(0, tokens)
    samples = np.arange(len(tokens) // seq_len)
    got = gather.take(gather.indexes(np.zeros_like(samples), samples))  # A read outside would end the process.
    assert got[:-1].max() == 0 and got[-1].tolist() == [0] * seq_len + [-100]
    for at in (start, start + 2 * page):
        assert protect(ctypes.c_void_p(at), ctypes.c_size_t(page), 3) == 0


@law
@given(st.sampled_from([np.uint8, np.uint16, np.uint32]), st.integers(0, 7), st.lists(st.integers(0, 19), max_size=30))
def test_single_items_by_address(dtype: type, odd: int, which: list[int]) -> None:
    raw = np.random.default_rng(odd).integers(0, 256, 20 * np.dtype(dtype).itemsize + odd, dtype=np.uint8)
    items = raw[odd:].view(dtype)
    flat = Flat(items.dtype)
    addresses = items.ctypes.data + np.array(which, np.int64) * items.itemsize
    for aligned in {False, flat.aligned(addresses)}:
        assert flat.take(flat.places(addresses, aligned), aligned).tolist() == items[which].tolist()
    assert flat.aligned(addresses) == all(int(address) % items.itemsize == 0 for address in addresses)


def test_a_view_of_memory_is_never_copied() -> None:
    for view in (Span(1 << 30, 4, np.dtype(np.uint16)), Flat(np.dtype(np.uint16))):
        with pytest.raises(TypeError, match="stay in its process"):
            pickle.dumps(view)
        with pytest.raises(TypeError, match="stay in its process"):
            copy.deepcopy(view)
