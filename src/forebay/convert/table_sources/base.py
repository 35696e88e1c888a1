"""What the readers of tables share: the table itself, files as streams, rows of arrays as columns.

Hides: how an array of rows becomes a column without a copy, and what a batch may weigh: 16 MiB, or one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.dataset.reader import Dataset
from forebay.errors import DatasetError
from forebay.prepare.read.opening import open_plain

Array: TypeAlias = NDArray[Any]
BATCH_BYTES = 16 << 20
DTYPE_KEY = b"forebay.dtype"
"""Of a field's metadata: the type that bits in the column are of, as `BF16`."""
_MOST_UNPACKED_RATIO = 2000


@dataclass(frozen=True)
class TableSource:
    """Rows to be read from the start, any number of times: text as strings, tensors as `pa.fixed_shape_tensor` or
    list columns.

    Attributes:
        kind: The format's name.
        schema: Of every batch.
        num_rows: None where only reading tells.
        read: What reads the batches.
        facts: What else is known: `classes`, the names behind integer labels.
        dataset: Whose rows they are, if they are of a dataset of Forebay's.
    """

    kind: str
    schema: pa.Schema
    num_rows: int | None
    read: Callable[[], Iterator[pa.RecordBatch]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    dataset: Dataset | None = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, in order. Raises DatasetError where they are damaged."""
        return self.read()

    def changed(self, schema: pa.Schema, columns: Callable[[pa.RecordBatch], list[pa.Array]]) -> TableSource:
        """The table with other columns, made of each batch's."""

        def read() -> Iterator[pa.RecordBatch]:
            return (pa.record_batch(columns(batch), schema=schema) for batch in self.batches())

        return replace(self, schema=schema, read=read)


def open_bytes(path: Path) -> AbstractContextManager[BinaryIO]:
    """A file's bytes, unpacked if it is compressed. Reading raises DatasetError where it is damaged."""
    return open_plain(path, _MOST_UNPACKED_RATIO)


def rows_at_once(row_bytes: float) -> int:
    """Rows of a batch, where a row takes so many bytes."""
    return max(1, min(1 << 16, int(BATCH_BYTES // max(1.0, row_bytes))))


def field_of(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], kind: str = "") -> pa.Field:
    """The column that holds rows of an array: `shape` is a row's, `kind` the type if the array has only its bits."""
    value = pa.from_numpy_dtype(dtype)
    metadata = {DTYPE_KEY: kind.encode()} if kind == "BF16" else None
    return pa.field(name, pa.fixed_shape_tensor(value, shape) if shape else value, metadata=metadata)


def column_of(rows: Array, field: pa.Field) -> pa.Array:
    """Rows [N, …] as a column; no copy if they lie one behind another. Booleans are packed to bits."""
    flat = np.ascontiguousarray(rows).reshape(-1)
    if isinstance(field.type, pa.FixedShapeTensorType):
        values = _values(flat, field.type.value_type)
        lists = pa.FixedSizeListArray.from_arrays(values, max(1, math.prod(field.type.shape)))
        return pa.ExtensionArray.from_storage(field.type, lists)
    return _values(flat, field.type)


def batch_of(arrays: Mapping[str, Array], schema: pa.Schema) -> pa.RecordBatch:
    """Rows of several arrays, in the schema's order."""
    return pa.record_batch([column_of(arrays[one.name], one) for one in schema], schema=schema)


def one_schema(paths: Iterable[Path], schemas: Iterable[pa.Schema]) -> pa.Schema:
    """The schema that all files share.

    Raises:
        DatasetError: If one has other columns, or a column of another type.
    """
    first_path, first = None, None
    for path, schema in zip(paths, schemas):
        if first is None:
            first_path, first = path, schema.remove_metadata()
        elif schema.remove_metadata() != first:
            names = {f.name: f.type for f in first}
            other = [f"{f.name}: {f.type}" for f in schema if names.pop(f.name, None) != f.type] or list(names)
            raise DatasetError(
                f"{path}: expected the columns of {first_path}, got other ones ({', '.join(other)[:300]}). "
                "Convert them as two tables."
            )
    assert first is not None
    return first


def _values(flat: Array, kind: Any) -> pa.Array:
    if flat.dtype == np.bool_:
        return pa.array(flat)
    return pa.Array.from_buffers(kind, len(flat), [None, pa.py_buffer(flat)])
