"""Batches of rows: the same rows of all tensors of a slice, stacked.

Rows of one shape are copied as they are, in one call a tensor; vectors that differ in length between slices are padded
to the batch's longest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forebay.dataset.slices import Slice
from forebay.errors import DatasetError, UsageError
from forebay.load.batch import IGNORE_INDEX
from forebay.load.copying import Ranges, Source, open_sources
from forebay.load.samples import I64, Array, KeyedViews, Made, View


@dataclass(frozen=True, slots=True)
class _RowPlan:
    sources: list[Mapping[str, Source]]
    which: list[int]
    ranges: Mapping[str, Ranges]


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
        self._slices: dict[int, Mapping[str, Source]] = {}
        self._none: dict[str, Array] = {}  # What a batch of no rows holds.

    def open(self, key: int, slice_index: int, one: Slice) -> None:
        self._views.view_of(key, slice_index)
        self._views.check(key, one, one.num_rows)
        if self._trim and "attention_mask" not in one.tensors:
            raise UsageError(f"trim: expected a tensor 'attention_mask', got {sorted(one.tensors)} ({one.path}).")
        self._slices[key] = {name: Source(array, one.path) for name, array in one.tensors.items()}
        self._none = self._none or {name: np.empty((0, *a.shape[1:]), a.dtype) for name, a in one.tensors.items()}

    def close(self, key: int) -> None:
        self._slices.pop(key, None)

    def plan(self, keys: I64, samples: I64) -> _RowPlan:
        samples = self._views.in_slices(keys, samples)
        sources, which = open_sources(self._slices, keys)
        return _RowPlan(sources, which.tolist(), row_ranges(sources, which, samples))

    def make(self, plan: _RowPlan, start: int, stop: int) -> Made:
        sources = [plan.sources[at] for at in plan.which[start:stop]]
        tensors = stack_rows(sources, plan.ranges, start, self._pads) if sources else dict(self._none)
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


def row_ranges(sources: Sequence[Mapping[str, Source]], which: I64, rows: I64) -> dict[str, Ranges]:
    """Row `rows[i]` of each tensor that all sources have, of source `which[i]`."""
    names = set(sources[0]).intersection(*sources) if sources else ()
    found = {}
    for name in names:
        arrays = [source[name].array for source in sources]
        sizes = np.array([a.itemsize * int(np.prod(a.shape[1:], dtype=np.int64)) for a in arrays], np.int64)[which]
        found[name] = Ranges([source[name] for source in sources], which, rows * sizes, sizes)
    return found


def stack_rows(
    sources: Sequence[Mapping[str, Source]], ranges: Mapping[str, Ranges], start: int, pads: Mapping[str, int]
) -> dict[str, Array]:
    """The rows of ranges [start, start + len(sources)) of every tensor, stacked; `sources` is that of each row.

    `pads`: what pads a tensor [N, L] whose L differs, by name; 0 for others.
    """
    first = sources[0]
    for source in sources:
        if source is not first and source.keys() != first.keys():
            raise DatasetError(
                f"rows of a batch: expected tensors {sorted(first)}, got {sorted(source)}. "
                "All slices of a dataset must hold the same tensors."
            )
    distinct = list({id(source): source for source in sources}.values())
    found = {}
    for name, one in first.items():
        shape, dtype = one.array.shape[1:], one.array.dtype
        if all(other[name].array.shape[1:] == shape and other[name].array.dtype == dtype for other in distinct):
            found[name] = out = np.empty((len(sources), *shape), dtype)
            ranges[name].copy(start, start + len(sources), out.__array_interface__["data"][0])
        else:
            found[name] = _padded(name, [source[name].array for source in sources], ranges[name], start, pads)
    return found


def _padded(name: str, arrays: list[Array], ranges: Ranges, start: int, pads: Mapping[str, int]) -> Array:
    first = arrays[0]
    shape, dtype = first.shape[1:], first.dtype
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
    for i in range(len(arrays)):
        ranges.copy(start + i, start + i + 1, out.ctypes.data + i * out.strides[0])
    return out
