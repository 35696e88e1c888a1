"""Collators make batches out of open slices; here the base class, and copies out of mapped files.

A plan keeps the arrays that it reads alive. A page of a mapped file that was truncated, or whose disk fails, kills the
process that reads it, so the kernel copies (`process_vm_writev`, up to 1024 ranges a call) and reports EFAULT instead;
where it cannot (not Linux, a sandbox), `memmove` copies.
"""

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forebay.arrays import I64, Array
from forebay.dataset.manifest import SliceInfo
from forebay.dataset.slices import Slice
from forebay.errors import DatasetError, UsageError
from forebay.load.batch import DocumentMasks
from forebay.load.samples import SampleIndex

_MAX_RANGES = 1024  # IOV_MAX of Linux.
_pid = os.getpid
_Writev = Callable[[int, int, int, Any, int, int], int]


class MappedArray:
    """An array of a mapped file, copied if it is not contiguous; `path` is for error messages."""

    __slots__ = ("address", "array", "path")

    def __init__(self, array: Array, path: Path | str) -> None:
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
        self._edges = np.append(0, np.cumsum(sizes))
        self._target = (ctypes.c_int64 * 2)()  # One struct iovec.

    def copy(self, start: int, stop: int, out_address: int) -> None:
        """Copy the ranges [start, stop), concatenated, to an address. Raises DatasetError if a file was truncated."""
        target, call = self._target, _writev
        for i in range(start, stop, _MAX_RANGES):
            end = min(stop, i + _MAX_RANGES)
            size = int(self._edges[end] - self._edges[i])
            target[0], target[1] = out_address, size
            if call is None or call(_pid(), self._address + 16 * i, end - i, target, 1, 0) != size:
                self._copy_each(i, end, out_address)
            out_address += size

    def _copy_each(self, start: int, stop: int, out_address: int) -> None:
        for i in range(start, stop):
            size = int(self._edges[i + 1] - self._edges[i])
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


def copy_array(source: MappedArray) -> Array:
    """Copy an array of a mapped file. Raises DatasetError as `RangeCopier.copy`."""
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
    masks: DocumentMasks | None = None


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
        """Add slice `slice_index` of its dataset; reads the file's first `num_open_bytes` only.

        Raises:
            DatasetError: If it has fewer samples than its index says, or its document ends are damaged.
            UsageError: If it is not the slice of this key.
        """
        dataset = self._dataset(key)
        if not 0 <= key < len(self._counts) or key - int(self._first_keys[dataset]) != slice_index:
            raise UsageError(f"slice key: expected one in [0, {len(self._counts)}), got {key} of slice {slice_index}.")
        num_samples, opened = self._open(key, self._indexes[dataset], slice_index, slice_)
        expected = int(self._counts[key]) + (0 if self._offsets is None else int(self._offsets[key]))
        if num_samples < expected:
            raise DatasetError(
                f"{slice_.path}: expected at least {expected} samples, got {num_samples}. The dataset changed since it "
                "was opened; verify it."
            )
        self._opened[key] = opened

    def _dataset(self, key: int) -> int:
        return int(np.searchsorted(self._first_keys, key, "right")) - 1

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
        in_slices = samples if self._offsets is None else samples + self._offsets.take(keys)
        return self._plan([self._get(key) for key in distinct.tolist()], which, in_slices)

    def _get(self, key: int) -> Any:
        if key not in self._opened:
            raise DatasetError(f"sample of slice {key}: expected an open slice. Open it first.")
        return self._opened[key]

    def byte_ranges(self, key: int, samples: I64) -> tuple[I64, I64]:
        """The bytes [starts[i], stops[i]) of an open slice's file that its samples are made of, int64 [G]; may overlap.

        `samples` [K] as in `plan`, which reads the file's first `num_open_bytes` besides; so does this. Raises
        DatasetError as `plan` does.
        """
        return self._byte_ranges(self._get(key), samples if self._offsets is None else samples + self._offsets[key])

    @abstractmethod
    def num_open_bytes(self, key: int, row: SliceInfo, itemsize: int) -> int:
        """How many first bytes of a slice's file `open` and `plan` read; `itemsize` bytes a token.

        For files with `document_ends` before `tokens`, as Forebay and safetensors write them, and for headers of layout
        `rows` of at most 64 KiB.
        """

    @abstractmethod
    def _open(self, key: int, index: SampleIndex, slice_index: int, slice_: Slice) -> tuple[int, Any]:
        """The number of samples of a slice, and what `_plan` needs of it."""

    @abstractmethod
    def _byte_ranges(self, opened: Any, samples: I64) -> tuple[I64, I64]:
        """As `byte_ranges`, of samples as they are counted in the slice."""

    @abstractmethod
    def _plan(self, opened: list[Any], which: I64, samples: I64) -> Any:
        """The plan of samples `samples[i]` of slice `opened[which[i]]`."""

    @abstractmethod
    def make(self, plan: Any, start: int, stop: int) -> BatchArrays:
        """The batch of samples [start, stop) of a plan, in new arrays."""
