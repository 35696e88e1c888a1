"""Batches of rows: the same rows of all tensors of a slice, stacked.

Rows of one shape are copied as they are, 1 us a row and tensor and what the memory takes; vectors that differ in length
between slices are padded to the batch's longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forebay.dataset.slices import Slice
from forebay.errors import DatasetError, UsageError
from forebay.load.batch import IGNORE_INDEX
from forebay.load.samples import I64, Array, KeyedViews, Made, View


@dataclass(frozen=True, slots=True)
class _RowPlan:
    keys: list[int]
    samples: list[int]
    slices: dict[int, Mapping[str, Array]]


class RowMaker:
    """Rows of tensors, stacked in new arrays of the tensors' own types.

    Tensors of two dimensions whose rows differ in length are padded to the batch's longest: `input_ids` with pad_id,
    `labels` with -100, all else with 0. Labels that are missing where an attention_mask is there are the inputs, -100
    where masked.
    """

    def __init__(self, views: Sequence[View], *, pad_id: int | None = None, trim: bool = False) -> None:
        self._views = KeyedViews(views)
        self._pads = {"input_ids": views[0].pad_id if pad_id is None else pad_id, "labels": IGNORE_INDEX}
        self._trim = trim
        self._slices: dict[int, Mapping[str, Array]] = {}
        self._none: dict[str, Array] = {}  # What a batch of no rows holds.

    def open(self, key: int, slice_index: int, one: Slice) -> None:
        """As `Maker.open`."""
        self._views.view_of(key, slice_index)
        self._views.check(key, one, one.num_rows)
        if self._trim and "attention_mask" not in one.tensors:
            raise UsageError(f"trim: expected a tensor 'attention_mask', got {sorted(one.tensors)} ({one.path}).")
        self._slices[key] = one.tensors
        self._none = self._none or {name: np.empty((0, *a.shape[1:]), a.dtype) for name, a in one.tensors.items()}

    def close(self, key: int) -> None:
        """As `Maker.close`."""
        self._slices.pop(key, None)

    def plan(self, keys: I64, samples: I64) -> _RowPlan:
        """As `Maker.plan`."""
        samples = self._views.in_slices(keys, samples)
        used = np.unique(keys).tolist()
        for key in used:
            if key not in self._slices:
                raise DatasetError(f"row of slice {key}: expected an open slice. Open it first.")
        return _RowPlan(keys.tolist(), samples.tolist(), {key: self._slices[key] for key in used})

    def make(self, plan: _RowPlan, start: int, stop: int) -> Made:
        """As `Maker.make`."""
        sources = [plan.slices[key] for key in plan.keys[start:stop]]
        tensors = stack_rows(sources, plan.samples[start:stop], self._pads) if sources else dict(self._none)
        mask = tensors.get("attention_mask")
        if self._trim and mask is not None and mask.ndim == 2 and len(mask):
            tensors = _trimmed(tensors, mask)
            mask = tensors["attention_mask"]
        ids, labels = tensors.get("input_ids"), tensors.get("labels")
        if labels is None and ids is not None and mask is not None and ids.shape == mask.shape:
            labels = np.where(mask != 0, ids, np.int64(IGNORE_INDEX))
        return tensors.get("images") if ids is None else ids, labels, tensors, None, None, None


def _trimmed(tensors: dict[str, Array], mask: Array) -> dict[str, Array]:
    """Without the last columns in which the mask is 0 in every row; one column stays."""
    width = mask.shape[1]
    used = np.flatnonzero(mask.any(0))
    kept = max(1, int(used[-1]) + 1 if len(used) else 1)
    if kept >= width:
        return tensors
    return {
        name: np.ascontiguousarray(array[:, :kept]) if array.ndim == 2 and array.shape[1] == width else array
        for name, array in tensors.items()
    }


def stack_rows(
    sources: Sequence[Mapping[str, Array]], rows: Sequence[int], pads: Mapping[str, int] | None = None
) -> dict[str, Array]:
    """Row `rows[i]` of every tensor in `sources[i]`, stacked.

    Args:
        pads: What pads a tensor [N, L] whose L differs, by name; 0 for others.

    Raises:
        DatasetError: If two slices disagree in names or types, or in a row's shape by more than its length.
    """
    if not sources:
        return {}
    first = sources[0]
    for source in sources:
        if source is not first and source.keys() != first.keys():
            raise DatasetError(
                f"rows of a batch: expected tensors {sorted(first)}, got {sorted(source)}. "
                "All slices of a dataset must hold the same tensors."
            )
    return {name: _stacked(name, [source[name] for source in sources], rows, pads or {}) for name in first}


def _stacked(name: str, arrays: list[Array], rows: Sequence[int], pads: Mapping[str, int]) -> Array:
    first = arrays[0]
    shape, dtype = first.shape[1:], first.dtype
    alike = all(array is first or (array.shape[1:] == shape and array.dtype == dtype) for array in arrays)
    if alike:
        out = np.empty((len(arrays), *shape), dtype)
        for i, (array, row) in enumerate(zip(arrays, rows)):
            out[i] = array[row]
        return out
    for array in arrays:
        if array.dtype != dtype or array.ndim != 2 or first.ndim != 2:
            raise DatasetError(
                f"rows of a batch: expected {name} of {dtype} {list(shape)}, got {array.dtype} "
                f"{list(array.shape[1:])}. Make the rows of all slices alike, but for the length of vectors."
            )
    pad = pads.get(name, 0)
    if np.issubdtype(dtype, np.integer) and not np.iinfo(dtype).min <= pad <= np.iinfo(dtype).max:
        raise DatasetError(f"rows of a batch: expected {name} of a type that can hold {pad}, to pad with, got {dtype}.")
    out = np.full((len(arrays), max(array.shape[1] for array in arrays)), pad, dtype)
    for i, (array, row) in enumerate(zip(arrays, rows)):
        out[i, : array.shape[1]] = array[row]
    return out
