"""Collators make batches out of open slices; here the base class and the one for consecutive tokens.

A plan keeps the arrays that it reads alive. A page of a mapped file that was truncated, or whose disk fails, kills the
process that reads it, so the kernel copies (`process_vm_writev`, up to 1024 ranges a call) and reports EFAULT instead;
where it cannot (not Linux, a sandbox), `memmove` copies. 8 x 2048 U16 tokens to int64 take `ConcatCollator` 10 us,
`DocumentCollator` some 50 us.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.slices import Slice
from forebay.errors import DatasetError, UsageError
from forebay.load.batch import IGNORE_INDEX
from forebay.load.samples import I64, Array, SampleIndex

_MAX_RANGES = 1024  # IOV_MAX of Linux.
_pid = os.getpid
_Writev = Callable[[int, int, int, Any, int, int], int]


class MappedArray:
    """An array of a mapped file, copied if it is not contiguous; `path` is for error messages."""

    __slots__ = ("address", "array", "path")

    def __init__(self, array: NDArray[Any], path: Path | str) -> None:
        self.array = np.ascontiguousarray(array)
        self.address: int = self.array.ctypes.data
        self.path = path


class RangeCopier:
    """Copies `sizes` bytes from `offsets` of arrays `sources[which]`, which it keeps alive; K ranges.

    Raises:
        DatasetError: If a range is not within its array.
    """

    def __init__(self, sources: Sequence[MappedArray], which: I64, offsets: I64, sizes: I64) -> None:
        self._sources, self._which, self._offsets = sources, which, offsets
        nbytes = np.array([source.array.nbytes for source in sources], np.int64)
        outside = (offsets < 0) | (offsets + sizes > nbytes[which])
        if outside.any():
            i = int(outside.argmax())
            raise DatasetError(
                f"{sources[which[i]].path}: expected {sizes[i]} bytes at {offsets[i]} of a tensor, got one of "
                f"{nbytes[which[i]]} bytes. The dataset changed while it was open; verify it."
            )
        addresses = np.array([source.address for source in sources], np.int64)
        self._vector = np.ascontiguousarray(np.stack([addresses[which] + offsets, sizes], axis=1))  # struct iovec [K]
        self._address: int = self._vector.ctypes.data
        self.edges: list[int] = [0, *np.cumsum(sizes).tolist()]
        self._target = (ctypes.c_int64 * 2)()  # One struct iovec.

    def copy(self, start: int, stop: int, out_address: int) -> None:
        """Copy the ranges [start, stop), concatenated, to an address. Raises DatasetError if a file was truncated."""
        edges, target, call = self.edges, self._target, _writev
        for i in range(start, stop, _MAX_RANGES):
            end = min(stop, i + _MAX_RANGES)
            target[0], target[1] = out_address + edges[i] - edges[start], edges[end] - edges[i]
            if call is None or call(_pid(), self._address + 16 * i, end - i, target, 1, 0) != target[1]:
                self._copy_each(i, end, target[0])

    def _copy_each(self, start: int, stop: int, out_address: int) -> None:
        for i in range(start, stop):
            size = self.edges[i + 1] - self.edges[i]
            source, offset = self._sources[self._which[i]], int(self._offsets[i])
            if _writev is None:
                ctypes.memmove(out_address, source.address + offset, size)
            else:
                self._target[0], self._target[1] = out_address, size
                if _writev(_pid(), self._address + 16 * i, 1, self._target, 1, 0) != size:
                    raise DatasetError(
                        f"{source.path}: expected {size} bytes at {offset} of a mapped tensor, got none: the file was "
                        "truncated while it was read, or its disk fails. Fetch or prepare it again."
                    )
            out_address += size


class TokenCopier:
    """Copies R rows of tokens, each of one or several ranges, and casts them to `dtype`.

    A range is `lengths` tokens from `starts` of `sources[which]`, [G]; `first_ranges` is each row's first, [R + 1].
    """

    def __init__(
        self, sources: Sequence[MappedArray], which: I64, starts: I64, lengths: I64, first_ranges: list[int],
        dtype: np.dtype[Any],
    ) -> None:  # fmt: skip
        types = {source.array.dtype for source in sources} or {dtype}
        if len(types) > 1:
            raise DatasetError(
                f"tokens: expected one type in all slices, got {sorted(map(str, types))} ({sources[0].path}). Prepare "
                "the dataset again."
            )
        (self._stored,) = types
        width = self._stored.itemsize
        self._ranges = RangeCopier(sources, which, starts * width, lengths * width)
        self._first_ranges, self._dtype = first_ranges, dtype

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """The tokens of rows [start, stop), concatenated, in a new array. Raises DatasetError as `RangeCopier.copy`."""
        first, last, edges = self._first_ranges[start], self._first_ranges[stop], self._ranges.edges
        stored = np.empty((edges[last] - edges[first]) // self._stored.itemsize, self._stored)
        self._ranges.copy(first, last, stored.__array_interface__["data"][0])
        return stored.astype(self._dtype)


def copy_array(array: NDArray[Any], path: Path | str) -> NDArray[Any]:
    """Copy an array of a mapped file. Raises DatasetError as `RangeCopier.copy`."""
    source = MappedArray(array, path)
    out = np.empty_like(source.array)
    zero = np.zeros(1, np.int64)
    RangeCopier([source], zero, zero, np.array([out.nbytes])).copy(0, 1, out.ctypes.data)
    return out


def _find_writev() -> _Writev | None:
    try:
        call = ctypes.CDLL(None).process_vm_writev
    except (AttributeError, OSError, TypeError):
        return None
    call.restype = ctypes.c_ssize_t
    vector: list[Any] = [ctypes.c_void_p, ctypes.c_ulong]
    call.argtypes = [ctypes.c_int, *vector, *vector, ctypes.c_ulong]
    source, target = np.array([7], np.uint8), np.zeros(1, np.uint8)
    vectors = np.array([[source.ctypes.data, 1], [target.ctypes.data, 1]], np.int64)
    copied = call(os.getpid(), vectors.ctypes.data, 1, vectors.ctypes.data + 16, 1, 0)
    return call if copied == 1 and target[0] == 7 else None


_writev = _find_writev()


class BatchArrays(NamedTuple):
    """The arrays of a batch; see `TokenBatch` and `RowBatch`."""

    inputs: Array | None
    labels: Array | None
    tensors: Mapping[str, Array]
    document_ids: NDArray[np.int32] | None = None
    position_ids: Array | None = None
    cu_seqlens: NDArray[np.int32] | None = None


class Collator(ABC):
    """Makes batches of samples of open slices.

    A key is the number of a slice among those of all datasets, one dataset after another; `indexes` has one entry for
    each dataset.
    """

    def __init__(self, indexes: Sequence[SampleIndex]) -> None:
        self._indexes = indexes
        self._first_keys = np.cumsum([0, *(len(index.counts) for index in indexes)])
        self._counts = np.concatenate([index.counts for index in indexes])
        offsets = np.concatenate([index.offsets for index in indexes])
        self._offsets = offsets if offsets.any() else None
        self._opened: dict[int, Any] = {}

    def open(self, key: int, slice_index: int, slice_: Slice) -> None:
        """Add slice `slice_index` of its dataset. Raises DatasetError if it has fewer samples than its index says."""
        dataset = int(np.searchsorted(self._first_keys, key, "right")) - 1
        if not 0 <= key < len(self._counts) or key - int(self._first_keys[dataset]) != slice_index:
            raise UsageError(f"slice key: expected one in [0, {len(self._counts)}), got {key} of slice {slice_index}.")
        num_samples, opened = self._open(self._indexes[dataset], slice_index, slice_)
        expected = int(self._counts[key]) + (0 if self._offsets is None else int(self._offsets[key]))
        if num_samples < expected:
            raise DatasetError(
                f"{slice_.path}: expected at least {expected} samples, got {num_samples}. The dataset changed since it "
                "was opened; verify it."
            )
        self._opened[key] = opened

    def close(self, key: int) -> None:
        """Remove a slice. Plans made before remain usable."""
        self._opened.pop(key, None)

    def plan(self, keys: I64, samples: I64) -> Any:
        """Prepare `make` for samples `samples[i]`, as the index counts them, of open slices `keys[i]`; both [K].

        Raises:
            DatasetError: If a slice is not open, or has no such sample.
        """
        outside = (samples < 0) | (samples >= self._counts.take(keys))
        if outside.any():
            i = int(outside.argmax())
            raise DatasetError(
                f"sample of slice {keys[i]}: expected one of {self._counts[keys[i]]}, got {samples[i]}. Open the "
                "dataset again."
            )
        distinct, which = np.unique(keys, return_inverse=True)
        for key in distinct.tolist():
            if key not in self._opened:
                raise DatasetError(f"sample of slice {key}: expected an open slice. Open it first.")
        in_slices = samples if self._offsets is None else samples + self._offsets.take(keys)
        return self._plan([self._opened[key] for key in distinct.tolist()], which, in_slices)

    @abstractmethod
    def _open(self, index: SampleIndex, slice_index: int, slice_: Slice) -> tuple[int, Any]:
        """The number of samples of a slice, and what `_plan` needs of it."""

    @abstractmethod
    def _plan(self, opened: list[Any], which: I64, samples: I64) -> Any:
        """The plan of samples `samples[i]` of slice `opened[which[i]]`."""

    @abstractmethod
    def make(self, plan: Any, start: int, stop: int) -> BatchArrays:
        """The batch of samples [start, stop) of a plan, in new arrays."""


class ConcatCollator(Collator):
    """Consecutive tokens: inputs and labels are two views of one array [B, L + 1], so each token is written once."""

    def __init__(self, indexes: Sequence[SampleIndex], *, dtype: Any = np.int64) -> None:
        super().__init__(indexes)
        assert indexes[0].seq_len is not None
        self._seq_len = indexes[0].seq_len
        self._dtype = np.dtype(dtype)

    def _open(self, index: SampleIndex, slice_index: int, slice_: Slice) -> tuple[int, MappedArray]:
        tokens = slice_.tokens
        return len(tokens) // self._seq_len, MappedArray(tokens, slice_.path)

    def _plan(self, opened: list[MappedArray], which: I64, samples: I64) -> tuple[TokenCopier, list[int]]:
        """The rows, and which of them are at the end of a slice, where the last label is missing."""
        starts = samples * self._seq_len
        remaining = np.array([len(source.array) for source in opened], np.int64)[which] - starts
        at_end = np.flatnonzero(remaining == self._seq_len)
        lengths = np.full(len(which), self._seq_len + 1, np.int64)
        lengths[at_end] -= 1
        # A range of padding follows these rows.
        padding = MappedArray(np.zeros(1, opened[0].array.dtype if opened else self._dtype), "")
        which, starts = np.insert(which, at_end + 1, len(opened)), np.insert(starts, at_end + 1, 0)
        lengths = np.insert(lengths, at_end + 1, 1)
        rows = np.arange(len(samples) + 1)
        first_ranges = (rows + np.searchsorted(at_end, rows)).tolist()
        copier = TokenCopier([*opened, padding], which, starts, lengths, first_ranges, self._dtype)
        return copier, at_end.tolist()

    def make(self, plan: tuple[TokenCopier, list[int]], start: int, stop: int) -> BatchArrays:
        rows = plan[0].read(start, stop).reshape(stop - start, self._seq_len + 1)
        for row in plan[1]:
            if start <= row < stop:
                rows[row - start, -1] = IGNORE_INDEX
        return BatchArrays(rows[:, :-1], rows[:, 1:], {})
