"""Copies byte ranges out of memory-mapped files; a truncated file is a DatasetError, not a SIGBUS.

Reading a page of a mapped file that was truncated, or whose disk fails, kills the process. Here the kernel copies
(`process_vm_writev` from this process to itself), up to 1024 ranges a call, and reports EFAULT instead. Cost: 1 us a
call more than NumPy for 8 rows of 2,048 tokens, the same for 32. Where the call is missing (not Linux) or forbidden (a
sandbox), `memmove` copies, without this protection.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import DatasetError

I64 = NDArray[np.int64]

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
        """Copy with one call a range, which tells the file that cannot be read."""
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
        self,
        sources: Sequence[MappedArray],
        which: I64,
        starts: I64,
        lengths: I64,
        first_ranges: list[int],
        dtype: np.dtype[Any],
    ) -> None:
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
    """`process_vm_writev`, if this system has it and allows a process to use it on itself."""
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
