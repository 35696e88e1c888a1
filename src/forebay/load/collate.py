"""Collators make batches out of open slices; here the base class and the one for consecutive tokens.

A collator plans many samples at once and makes batches of runs of them. A plan keeps the arrays that it reads alive:
slices may be closed before all its batches are made. Not thread-safe.

Cost of a batch, 8 x 2048 U16 tokens to int64 on one core: `ChunkCollator` 10 us, `DocumentCollator` some 50 us.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.slices import Slice
from forebay.errors import DatasetError, UsageError
from forebay.load.batch import IGNORE_INDEX
from forebay.load.copying import MappedArray, TokenCopier
from forebay.load.samples import I64, Array, SampleIndex


class BatchArrays(NamedTuple):
    """The arrays of a batch; see `Batch`."""

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


class ChunkCollator(Collator):
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
