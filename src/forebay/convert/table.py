"""What the readers and writers of tables share: arrays as columns, columns by inference, parts of a bounded size.

Hides: how an array of rows becomes a column without a copy; what a batch may weigh (16 MiB, or one row); that types are
inferred from the first 64 MiB; and when a part ends: `out` with a suffix is one file, otherwise a directory of
`part-00000.parquet` and so on, each begun anew once the one before holds `slice_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.convert.content import Options, TableSource, Written
from forebay.convert.values import TableDigest, is_number
from forebay.errors import DatasetError, UsageError
from forebay.prepare.documents import batched
from forebay.prepare.read.opening import open_plain

Array: TypeAlias = NDArray[Any]
Rows: TypeAlias = list[dict[str, Any]]
BATCH_BYTES = 16 << 20
BATCH_ROWS = 4096  # Of a batch that is made of rows as Python has them.
DTYPE_KEY = b"forebay.dtype"  # Of a field's metadata: the type that bits in the column are of, as `BF16`.
INFERRED_BYTES = 64 << 20
_MOST_UNPACKED_RATIO = 2000
_STEP_ROWS = 1024  # A part is looked at after so many rows, or fewer if they weigh more than an eighth of it.
_GROUP_ROWS = 1 << 16


def open_bytes(path: Path) -> AbstractContextManager[BinaryIO]:
    """A file's bytes, unpacked if it is compressed. Reading raises DatasetError where it is damaged."""
    return open_plain(path, _MOST_UNPACKED_RATIO)


# Arrays.


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


def _values(flat: Array, kind: Any) -> pa.Array:
    if flat.dtype == np.bool_:
        return pa.array(flat)
    return pa.Array.from_buffers(kind, len(flat), [None, pa.py_buffer(flat)])


def batch_of(arrays: Mapping[str, Array], schema: pa.Schema) -> pa.RecordBatch:
    """Rows of several arrays, in the schema's order."""
    return pa.record_batch([column_of(arrays[one.name], one) for one in schema], schema=schema)


def list_column(vectors: Sequence[Any], kind: Any) -> pa.Array:
    """Vectors of numbers or lists of bytes, None where one is missing, as a column of lists."""
    offsets = pa.array(np.cumsum([0, *(0 if one is None else len(one) for one in vectors)], dtype=np.int32))
    there = [one for one in vectors if one is not None]
    if is_number(kind.value_type):
        leaves = pa.array(np.concatenate([np.empty(0, kind.value_type.to_pandas_dtype()), *there]))
    else:
        leaves = pa.array([value for one in there for value in one], pa.binary()).cast(kind.value_type)
    mask = pa.array([one is None for one in vectors]) if len(there) < len(vectors) else None
    return pa.ListArray.from_arrays(offsets, leaves, type=kind, mask=mask)


# Columns by inference.


def one_schema(paths: Iterable[Path], schemas: Iterable[pa.Schema]) -> pa.Schema:
    """The schema that all files share."""
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


def inferred(batches: Iterable[tuple[str, Rows, int]]) -> pa.Schema | None:
    """The columns of (place, rows, bytes) up to the first 64 MiB, of types that hold all values; None of none."""
    schema: pa.Schema | None = None
    seen = 0
    for where, rows, size in batches:
        found = _infer(rows, where)
        schema = found if schema is None else _merge(schema, found, where)
        seen += size
        if seen >= INFERRED_BYTES:
            break
    return schema


def rows_batch(rows: Rows, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Rows in these columns. Raises DatasetError if they have others, or do not fit."""
    found = _infer(rows, where)
    if found != schema and _merge(schema, found, where) != schema:
        names = {field.name: field.type for field in schema}
        new = [f"{f.name}: {f.type}" for f in found if names.get(f.name) != f.type]
        raise DatasetError(
            f"{where} and after: expected columns {', '.join(names)[:300]}, as in the first 64 MiB, got "
            f"{', '.join(new)[:300]}. Put a line with such values first, or make the types alike."
        )
    try:
        return pa.RecordBatch.from_struct_array(pa.array(rows, pa.struct(list(schema))))
    except pa.ArrowException as error:
        raise DatasetError(f"{where} and after: expected {schema.names}, got: {error}.") from error


def _infer(rows: Rows, where: str) -> pa.Schema:
    try:
        return pa.schema(pa.array(rows).type.fields)
    except (pa.ArrowException, OverflowError) as error:
        raise DatasetError(f"{where} and after: expected fields of one type each, got: {error}.") from error


def _merge(first: pa.Schema, second: pa.Schema, where: str) -> pa.Schema:
    """Columns of both, each of a type that holds both."""
    try:
        return pa.unify_schemas([first, second], promote_options="permissive")
    except pa.ArrowException as error:
        raise DatasetError(f"{where} and after: expected fields of the types before, got: {error}.") from error


# Writing.


class Part(Protocol):
    """A file that is being written: one of pyarrow's writers, or `Encoded`."""

    def write(self, table: pa.Table) -> None:
        """The next rows."""

    def close(self) -> None:
        """Write what is left; the file is still open."""


class Encoded:
    """A part to which a function turns batches, given the place of their first row in the whole table."""

    def __init__(self, file: BinaryIO, encode: Callable[[pa.RecordBatch, int], bytes], first_row: int) -> None:
        self._file, self._encode, self._row = file, encode, first_row

    def write(self, table: pa.Table) -> None:
        for batch in table.to_batches():
            self._file.write(self._encode(batch, self._row))
            self._row += batch.num_rows

    def close(self) -> None:
        pass


def write_parts(
    source: TableSource,
    out: Path,
    options: Options,
    suffix: str,
    open_part: Callable[[Any, int], Part],
    *,
    pack: Callable[[BinaryIO], AbstractContextManager[Any]] = nullcontext,
    group_bytes: int = 0,
) -> Written:
    """Write a table to `out`: one file, or a directory of parts with this suffix.

    `open_part` gets a file, which `pack` compresses, and the place of its first row. About `group_bytes`, or 65536
    rows, are written at once.
    """
    digest, files = TableDigest(), list[Path]()
    pieces = _pieces(source, options.slice_bytes, group_bytes)
    ahead = next(pieces, None)  # A part is begun only for rows that are there.
    single = bool(out.suffix)
    if not single:
        out.mkdir()
    while ahead is not None or not files:  # An empty table is one empty part.
        path = out if single else out / f"part-{len(files):05d}{suffix}"
        with path.open("xb") as file, pack(file) as packed:
            part = open_part(packed, digest.num_rows)
            try:
                while ahead is not None and (single or file.tell() < options.slice_bytes):
                    part.write(ahead)
                    for batch in ahead.to_batches():
                        digest.add(batch)
                    options.advance(ahead.num_rows)
                    ahead = next(pieces, None)
            finally:
                part.close()  # Also after an error: a writer that is let go of would write on.
        files.append(Path() if single else path.relative_to(out))
    return Written(tuple(files), None, digest.num_rows, 0, digest.text())


def _pieces(source: TableSource, slice_bytes: int, group_bytes: int) -> Iterator[pa.Table]:
    def slices() -> Iterator[pa.RecordBatch]:
        for batch in source.batches():
            row_bytes = batch.nbytes / max(1, batch.num_rows)
            step = max(1, min(_STEP_ROWS, int(slice_bytes // 8 // max(1.0, row_bytes))))
            for start in range(0, batch.num_rows, step):
                yield batch.slice(start, step)

    for group in batched(slices(), lambda batch: int(batch.nbytes), group_bytes, _GROUP_ROWS // _STEP_ROWS):
        yield pa.Table.from_batches(group, source.schema)


def refuse_columns(schema: pa.Schema, fits: Callable[[Any], bool], what: str, advice: str) -> None:
    """Raise UsageError if a column is of a type that a format does not hold."""
    bad = [f"{field.name}: {field.type}" for field in schema if not fits(field.type)]
    if bad:
        raise UsageError(f"{what}: expected columns that it can hold, got {', '.join(bad)[:300]}. {advice}")
