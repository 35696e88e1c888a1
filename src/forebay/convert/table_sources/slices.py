"""Rows of tensors in SafeTensors files: a dataset of layout `rows`, or files of others. Batches are views of the maps.

Vectors of integers that differ in length between files become a column of lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.convert.table_sources.base import DTYPE_KEY, Array, Table, column_of, field_of, rows_at_once
from forebay.dataset.slices import Slice, open_slice
from forebay.errors import DatasetError

_BITS = ("BF16", "F8_E4M3", "F8_E5M2")


def open_rows(paths: Sequence[Path], facts: Mapping[str, Any] | None = None) -> Table:
    """SafeTensors files whose tensors share their first dimension, one after another.

    Raises:
        DatasetError: If one is damaged, or has other tensors, types or shapes than the first.
    """
    fields: dict[str, pa.Field] = {}
    rows = 0
    for path in paths:
        one = open_slice(path)
        rows += one.num_rows
        found = {name: _field(one, name) for name in sorted(one.tensors)}
        fields = fields or found
        for name in sorted(fields.keys() | found.keys()):
            fields[name] = _joined(fields.get(name), found.get(name), name, path, paths[0])
    schema = pa.schema(list(fields.values()))
    return Table("safetensors", schema, rows, lambda: _read(paths, schema), facts or {})


def _field(one: Slice, name: str) -> pa.Field:
    array, kind = one.tensors[name], one.dtypes[name]
    found = field_of(name, array.dtype, array.shape[1:])
    return found.with_metadata({DTYPE_KEY: kind.encode()}) if kind in _BITS else found


def _joined(first: pa.Field | None, second: pa.Field | None, name: str, path: Path, before: Path) -> pa.Field:
    if first == second and first is not None:
        return first
    if first is not None and second is not None:
        values = [f.type.value_type if not pa.types.is_integer(f.type) else f.type for f in (first, second)]
        vectors = all(pa.types.is_list(f.type) or len(getattr(f.type, "shape", ())) == 1 for f in (first, second))
        if vectors and values[0] == values[1] and pa.types.is_integer(values[0]):
            return pa.field(name, pa.list_(values[0]))
    told = [f.type if f is not None else "none" for f in (first, second)]
    raise DatasetError(
        f"{path}: expected tensor {name!r} as {told[0]}, as in {before}, got {told[1]}. Convert them as two tables."
    )


def _read(paths: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for path in paths:
        one = open_slice(path)
        size = sum(array.nbytes for array in one.tensors.values())
        step = rows_at_once(size / max(1, one.num_rows))
        for start in range(0, one.num_rows, step):
            rows = {name: array[start : start + step] for name, array in one.tensors.items()}
            yield pa.record_batch([_column(rows[field.name], field) for field in schema], schema=schema)


def _column(rows: Array, field: pa.Field) -> pa.Array:
    if not pa.types.is_list(field.type):
        return column_of(rows, field)
    width = math.prod(rows.shape[1:])
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(width)
    values = pa.array(np.ascontiguousarray(rows).reshape(-1))
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=field.type)
