"""Batches of layout `rows`: the same rows of all tensors of a slice, stacked.

Integers are int64, whatever their stored type, as in layout `tokens`: ids, labels, masks. U64 is not widened, nor is
what only looks like integers: pixels and other bytes of a shape of their own, numbers of `q8`, bits of BF16 and F8.
Vectors whose length differs between slices are padded to the longest of the batch. `dequantize(batch.tensors,
tensor_dtypes(loader.dataset))` turns I8 with a scale, and bits of BF16, into F32.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forebay.arrays import I64, Array
from forebay.dataset.manifest import SliceInfo
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import Slice
from forebay.errors import DatasetError, UsageError
from forebay.load.batch import IGNORE_INDEX
from forebay.load.collate import BatchArrays, Collator, MappedArray, RangeCopier
from forebay.load.samples import SampleIndex
from forebay.maps import map_offset

SCALE_SUFFIX = ".scale"
_LINEAGES = ("converted", "imported")  # Entries of a manifest's lineage that may have the types of tensors.
_HEAD_BYTES = 64 << 10  # A header of rows is shorter, unless it has much metadata.
_FLOATS = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_Tensors = Mapping[str, MappedArray]


class RowPlan(NamedTuple):
    """The planned rows: the tensors of each row's slice, and a copier for each tensor that all slices have."""

    sources: Sequence[_Tensors]
    which: list[int]
    copiers: Mapping[str, RangeCopier]


class RowCollator(Collator):
    """Rows of tensors, stacked in new arrays; integers as int64.

    Tensors of two dimensions whose rows differ in length are padded to the longest of the batch: `input_ids` with
    pad_id, `labels` with -100, others with 0. Without a tensor `labels` but with an attention_mask, labels are the
    inputs, -100 where masked.
    """

    def __init__(self, indexes: Sequence[SampleIndex], *, pad_id: int | None) -> None:
        super().__init__(indexes)
        self._pads = {"input_ids": indexes[0].pad_id if pad_id is None else pad_id, "labels": IGNORE_INDEX}
        self._empty: dict[str, Array] = {}  # The tensors of a batch without rows.
        self._dtypes: dict[str, str] = {}  # As they are stored.

    def num_open_bytes(self, key: int, row: SliceInfo, itemsize: int) -> int:
        return min(row.bytes, _HEAD_BYTES)

    def _open(self, key: int, index: SampleIndex, slice_index: int, slice_: Slice) -> tuple[int, _Tensors]:
        tensors = slice_.tensors
        self._dtypes |= slice_.dtypes
        self._empty = self._empty or {name: np.empty((0, *a.shape[1:]), a.dtype) for name, a in tensors.items()}
        return slice_.num_rows, {name: MappedArray(array, slice_.path) for name, array in tensors.items()}

    def _plan(self, opened: list[_Tensors], which: I64, samples: I64) -> RowPlan:
        return plan_rows(opened, which, samples)

    def _byte_ranges(self, opened: _Tensors, samples: I64) -> tuple[I64, I64]:
        arrays = [source.array for source in opened.values()]
        starts = np.concatenate([map_offset(array) + samples * _row_bytes(array) for array in arrays])
        return starts, starts + np.repeat([_row_bytes(array) for array in arrays], len(samples))

    def make(self, plan: RowPlan, start: int, stop: int) -> BatchArrays:
        tensors = stack_rows(plan, start, stop, self._pads) if stop > start else dict(self._empty)
        mask = tensors.get("attention_mask")
        tensors = {name: self._widened(name, array, tensors) for name, array in tensors.items()}
        ids, labels = tensors.get("input_ids"), tensors.get("labels")
        if labels is None and ids is not None and mask is not None and ids.shape == mask.shape:
            labels = np.where(mask != 0, ids, np.int64(IGNORE_INDEX))
        return BatchArrays(tensors.get("images") if ids is None else ids, labels, tensors)

    def _widened(self, name: str, array: Array, tensors: Mapping[str, Array]) -> Array:
        ids, stored = tensors.get("input_ids"), self._dtypes[name]
        is_number = array.ndim == 1 or name == "labels" or (ids is not None and array.shape == ids.shape)
        is_wide = stored in ("U16", "I16", "U32", "I32") or (stored in ("U8", "I8") and is_number)
        return array.astype(np.int64) if is_wide and name + SCALE_SUFFIX not in tensors else array


def plan_rows(sources: Sequence[_Tensors], which: I64, rows: I64) -> RowPlan:
    """The plan of rows `rows[i]` of slices `sources[which[i]]`."""
    copiers = {}
    for name in set(sources[0]).intersection(*sources) if sources else ():
        arrays = [source[name] for source in sources]
        sizes = np.array([_row_bytes(source.array) for source in arrays], np.int64)
        copiers[name] = RangeCopier(arrays, which, rows * sizes[which], sizes[which])
    return RowPlan(sources, which.tolist(), copiers)


def _row_bytes(array: Array) -> int:
    return array.itemsize * math.prod(array.shape[1:])


def stack_rows(plan: RowPlan, start: int, stop: int, pads: Mapping[str, int]) -> dict[str, Array]:
    """Stack the rows [start, stop) of every tensor.

    Args:
        plan: The rows.
        start, stop: A range that is not empty.
        pads: By tensor, the value that pads vectors of different length; 0 for other tensors.

    Raises:
        DatasetError: If slices differ in their tensors, types or shapes.
    """
    which = plan.which[start:stop]
    first = plan.sources[which[0]]
    distinct = [plan.sources[i] for i in dict.fromkeys(which)]
    for source in distinct:
        if source.keys() != first.keys():
            raise DatasetError(
                f"rows of a batch: expected tensors {sorted(first)}, got {sorted(source)}. All slices of a dataset "
                "must have the same tensors; prepare it again."
            )
    tensors = {}
    for name, mapped in first.items():
        shape, dtype = mapped.array.shape[1:], mapped.array.dtype
        if all(other[name].array.shape[1:] == shape and other[name].array.dtype == dtype for other in distinct):
            tensors[name] = out = np.empty((stop - start, *shape), dtype)
            plan.copiers[name].copy(start, stop, out.__array_interface__["data"][0])
        else:
            arrays = [plan.sources[i][name].array for i in which]
            tensors[name] = _stack_padded(name, arrays, plan.copiers[name], start, pads.get(name, 0))
    return tensors


def _stack_padded(name: str, arrays: list[Array], copier: RangeCopier, start: int, pad: int) -> Array:
    first = arrays[0]
    dtype = first.dtype
    for array in arrays:
        if array.dtype != dtype or array.ndim != 2 or first.ndim != 2:
            raise DatasetError(
                f"rows of a batch: expected {name} of {dtype} {list(first.shape[1:])}, got {array.dtype} "
                f"{list(array.shape[1:])}. Only the length of vectors may differ between slices; prepare them again."
            )
    if np.issubdtype(dtype, np.integer) and not np.iinfo(dtype).min <= pad <= np.iinfo(dtype).max:
        raise DatasetError(
            f"rows of a batch: expected {name} of a type that can hold the padding {pad}, got {dtype}. Store it in a "
            "wider type."
        )
    out = np.full((len(arrays), max(array.shape[1] for array in arrays)), pad, dtype)
    for i in range(len(arrays)):
        copier.copy(start + i, start + i + 1, out.ctypes.data + i * out.strides[0])
    return out


def tensor_dtypes(dataset: Dataset) -> dict[str, str]:
    """The SafeTensors type of each tensor of layout `rows`, from the manifest, else from the first slice; {} if empty.

    `forebay convert` and `forebay import` write the types into the manifest.
    """
    for entry in _LINEAGES:
        lineage = dataset.manifest.lineage.get(entry)
        if isinstance(lineage, dict) and isinstance(lineage.get("tensors"), dict):
            return {name: str(dtype) for name, (dtype, *_) in lineage["tensors"].items()}
    return dict(dataset.open_slice(0).dtypes) if dataset.num_slices else {}


def float_types(loader: Any) -> dict[str, str]:
    """The types that NumPy lacks, as PyTorch and JAX name them, of the tensors that come as their bits."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None or not dataset.manifest.lineage.keys() & {*_LINEAGES}:
        return {}
    return {name: _FLOATS[kind] for name, kind in tensor_dtypes(dataset).items() if kind in _FLOATS}


def dequantize(
    tensors: Mapping[str, Array], dtypes: Mapping[str, str] | None = None, names: Iterable[str] | None = None
) -> dict[str, Array]:
    """The tensors of a batch with quantized ones as F32, without scales; other tensors unchanged.

    Args:
        tensors: By name, each [B, ...]: those of a Batch, or of a slice.
        dtypes: The types from `tensor_dtypes`; without them BF16 stays bits, as its arrays do not tell.
        names: The tensors to dequantize; by default every I8 tensor with a scale beside it, and every BF16.

    Raises:
        UsageError: If a named tensor is missing, or is neither quantized nor BF16.
    """
    dtypes = dtypes or {}
    quantized = {name for name, array in tensors.items() if array.dtype == np.int8 and name + SCALE_SUFFIX in tensors}
    possible = quantized | {name for name in tensors if dtypes.get(name) == "BF16"}
    chosen = possible if names is None else set(names)
    if not chosen <= possible:
        raise UsageError(f"dequantize: expected some of {sorted(possible)}, got {sorted(chosen - possible)}.")
    scales = {name + SCALE_SUFFIX for name in quantized & chosen}
    out: dict[str, Array] = {}
    for name, array in tensors.items():
        if name in quantized & chosen:
            out[name] = array.astype(np.float32) * tensors[name + SCALE_SUFFIX].reshape(-1, *[1] * (array.ndim - 1))
        elif name in chosen:
            out[name] = (array.astype(np.uint32) << 16).view(np.float32)
        elif name not in scales:
            out[name] = array
    return out
