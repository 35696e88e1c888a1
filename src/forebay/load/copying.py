"""Copies out of mapped files that fail with an error where a plain copy would end the process.

A file that is cut while it is mapped, or whose disk fails, makes every read of its lost pages a SIGBUS. Here the
kernel copies (`process_vm_writev` from this process to itself), many ranges in one call, and reports EFAULT instead;
it is 1 us a call dearer than NumPy for 8 rows of 2,048 tokens, and no dearer for 32. Where the call is missing (not
Linux) or forbidden (a sandbox), NumPy copies, and a file that is cut ends the process as any mapped file does.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from forebay.errors import DatasetError

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

_MOST_RANGES = 1024  # IOV_MAX of Linux.
S = TypeVar("S")
_pid = os.getpid
_Writev = Callable[[int, int, int, Any, int, int], int]
_SCRATCH_BYTES = 1 << 17  # Small batches are copied so many bytes at a time, which stay in the processor's cache.


class Source:
    """An array in a mapped file, copied unless it is contiguous; the path is for errors."""

    __slots__ = ("address", "array", "data", "path")

    def __init__(self, array: NDArray[Any], path: Path | str) -> None:
        self.array = np.ascontiguousarray(array)
        self.data: U8 = self.array.reshape(-1).view(np.uint8)
        self.address: int = self.array.ctypes.data
        self.path = path


class Ranges:
    """Byte ranges [K] of sources, which it holds, to be copied: `sizes` bytes from `offsets` on of source `which`."""

    def __init__(self, sources: Sequence[Source], which: I64, offsets: I64, sizes: I64) -> None:
        self._sources, self._which = sources, which
        nbytes = np.array([source.data.nbytes for source in sources], np.int64)
        outside = (offsets < 0) | (offsets + sizes > nbytes[which])
        if outside.any():
            at = int(outside.argmax())
            raise DatasetError(
                f"{sources[which[at]].path}: expected {sizes[at]} bytes at {offsets[at]} of a tensor, got one of "
                f"{nbytes[which[at]]} bytes. The dataset changed while it was open; verify it."
            )
        addresses = np.array([source.address for source in sources], np.int64)
        self._vector = np.ascontiguousarray(np.stack([addresses[which] + offsets, sizes], axis=1))  # struct iovec [K]
        self._address: int = self._vector.ctypes.data
        self._offsets = offsets
        self.edges: list[int] = [0, *np.cumsum(sizes).tolist()]
        self._target = (ctypes.c_int64 * 2)()  # One struct iovec.

    def copy(self, start: int, stop: int, out_address: int) -> None:
        """Copy the ranges [start, stop), one after another, to memory that the caller owns and that holds them."""
        edges, target, call = self.edges, self._target, _writev
        for at in range(start, stop, _MOST_RANGES):
            end = min(stop, at + _MOST_RANGES)
            target[0], target[1] = out_address + edges[at] - edges[start], edges[end] - edges[at]
            if call is None or call(_pid(), self._address + 16 * at, end - at, target, 1, 0) != target[1]:
                self._copy_each(at, end, target[0])

    def _copy_each(self, start: int, stop: int, out_address: int) -> None:
        """One range a call: what names the file that cannot be read."""
        for at in range(start, stop):
            size = self.edges[at + 1] - self.edges[at]
            source, offset = self._sources[self._which[at]], int(self._offsets[at])
            if _writev is None:
                ctypes.memmove(out_address, source.address + offset, size)
            else:
                self._target[0], self._target[1] = out_address, size
                if _writev(_pid(), self._address + 16 * at, 1, self._target, 1, 0) != size:
                    raise DatasetError(
                        f"{source.path}: expected {size} bytes at {offset} of a mapped tensor, got none: the file was "
                        "cut while it was read, or its disk fails. Fetch or prepare it again."
                    )
            out_address += size


class TokenRows:
    """Rows of tokens, each one or several ranges; the tokens of all sources may differ in type.

    A range [G] is `lengths` tokens from `starts` on of source `which`; `firsts` [R + 1] is the first of each row.
    """

    def __init__(
        self, sources: Sequence[Source], which: I64, starts: I64, lengths: I64, firsts: list[int], dtype: np.dtype[Any]
    ) -> None:
        widths = np.array([source.array.itemsize for source in sources], np.int64)[which]
        self._ranges = Ranges(sources, which, starts * widths, lengths * widths)
        self._firsts, self._dtype = firsts, dtype
        self._kinds = [source.array.dtype for source in sources]
        self._which = which if len(set(self._kinds)) > 1 else None
        self._scratch = np.empty(0, np.uint8)
        self._scratch_address = self._first = self._last = 0  # Which ranges are there.

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """The tokens of rows [start, stop), one after another, in a new array. DatasetError as `Ranges.copy`."""
        first, last = self._firsts[start], self._firsts[stop]
        if first == last:
            return np.empty(0, self._dtype)
        if self._which is None:
            return self._read(first, last, self._kinds[0])
        kinds = self._which[first:last].tolist()
        return np.concatenate([self._read(first + i, first + i + 1, self._kinds[kind]) for i, kind in enumerate(kinds)])

    def _read(self, first: int, last: int, kind: np.dtype[Any]) -> NDArray[Any]:
        edges = self._ranges.edges
        if not self._first <= first <= last <= self._last:
            self._fill(first, last)
        start = edges[self._first]
        return self._scratch[edges[first] - start : edges[last] - start].view(kind).astype(self._dtype)

    def _fill(self, first: int, last: int) -> None:
        """Copy these ranges to the scratch, and those that follow while they fit it."""
        edges = self._ranges.edges
        beyond = max(last, bisect_right(edges, edges[first] + _SCRATCH_BYTES) - 1)
        if edges[beyond] - edges[first] > len(self._scratch):
            self._scratch = np.empty(edges[beyond] - edges[first], np.uint8)
            self._scratch_address = self._scratch.ctypes.data
        self._first = self._last = 0
        try:
            self._ranges.copy(first, beyond, self._scratch_address)
        except DatasetError:
            beyond = last  # Raised when the rows that cannot be read are asked for, not before.
            self._ranges.copy(first, beyond, self._scratch_address)
        self._first, self._last = first, beyond


def open_sources(opened: Mapping[int, S], keys: I64) -> tuple[list[S], I64]:
    """What is open of slices, by key, and which of them each key means. DatasetError if one is not open."""
    distinct, which = np.unique(keys, return_inverse=True)
    for key in distinct.tolist():
        if key not in opened:
            raise DatasetError(f"sample of slice {key}: expected an open slice. Open it first.")
    return [opened[key] for key in distinct.tolist()], which


def copy_of(array: NDArray[Any], path: Path | str) -> NDArray[Any]:
    """A copy of an array in a mapped file. DatasetError as `Ranges.copy`."""
    source = Source(array, path)
    out = np.empty_like(source.array)
    zero = np.zeros(1, np.int64)
    Ranges([source], zero, zero, np.array([out.nbytes])).copy(0, 1, out.ctypes.data)
    return out


def _find_writev() -> _Writev | None:
    """`process_vm_writev`, if this system has it and lets a process use it on itself."""
    try:
        call = ctypes.CDLL(None).process_vm_writev
    except (AttributeError, OSError, TypeError):
        return None
    call.restype = ctypes.c_ssize_t
    vector: list[Any] = [ctypes.c_void_p, ctypes.c_ulong]
    call.argtypes = [ctypes.c_int, *vector, *vector, ctypes.c_ulong]
    given, got = np.array([7], np.uint8), np.zeros(1, np.uint8)
    vectors = np.array([[given.ctypes.data, 1], [got.ctypes.data, 1]], np.int64)
    done = call(os.getpid(), vectors.ctypes.data, 1, vectors.ctypes.data + 16, 1, 0)
    return call if done == 1 and got[0] == 7 else None


_writev = _find_writev()
