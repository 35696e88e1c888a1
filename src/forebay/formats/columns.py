"""What Parquet, Arrow and ORC share: the columns that are documents, rows of batches, tensors as lists, the check.

Hides: which columns are read (those that the options name), how many rows are in memory at a time, and that the offsets
and indexes of a damaged file could point anywhere in memory. Memory is about 8 MiB of rows and one batch.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from forebay.errors import CorruptInputError, DatasetError, UnreadableInputError
from forebay.formats.conversion import TableSource
from forebay.formats.external import TOKEN_COLUMNS
from forebay.formats.inputs import InputFile, ReadOptions
from forebay.formats.records import keys_of
from forebay.formats.report import Report, Window
from forebay.formats.tables import is_list, tensor_shape

READ_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError, EOFError, CorruptInputError)
"""What pyarrow raises for damaged files."""
BATCH_BYTES = 8 << 20
_SHOWN_COLUMNS = 12


def select_columns(schema: pa.Schema, options: ReadOptions, file: InputFile) -> list[str]:
    """Return the keys of the columns to read. Raises UnreadableInputError where one that is required is missing."""
    required, optional = keys_of(options)
    types = {key: kind for key in required + optional if (kind := _type_of(schema, key)) is not None}
    for key in required:
        kind = types.get(key)
        if kind is None or not (_is_text(kind) or key == options.messages_key):
            fields = sorted(schema, key=lambda field: not _is_text(field.type))
            got = ", ".join(f"{field.name}: {str(field.type)[:60]}" for field in fields[:_SHOWN_COLUMNS])
            got += f" and {len(fields) - _SHOWN_COLUMNS} others" if len(fields) > _SHOWN_COLUMNS else ""
            raise UnreadableInputError(
                f"{file.path}: expected a text column {key!r}, got columns {got}. Name it with --text-key."
            )
    return list(types)


def _type_of(schema: pa.Schema, key: str) -> pa.DataType | None:
    if schema.names.count(key) == 1:
        return schema.field(key).type
    parts = key.split(".")
    if schema.names.count(parts[0]) != 1:
        return None
    kind = schema.field(parts[0]).type
    for part in parts[1:]:
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(part).type
    return kind


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary())


def batch_rows(batch: pa.RecordBatch, keys: list[str]) -> Iterator[dict[str, object]]:
    """Yield the rows of a batch as Python objects, by key; fewer of them at a time where they are large."""
    # A dictionary is the same for every row.
    size = sum(c.indices.nbytes if pa.types.is_dictionary(c.type) else c.nbytes for c in batch.columns)
    if batch.num_rows > 1 and size > 2 * BATCH_BYTES:
        half = batch.num_rows // 2
        yield from batch_rows(batch.slice(0, half), keys)
        yield from batch_rows(batch.slice(half), keys)
        return
    columns = [_values(_column(batch, key)) for key in keys]
    for values in zip(*columns, strict=True):
        yield dict(zip(keys, values))


def _column(batch: pa.RecordBatch, key: str) -> pa.Array:
    if key in batch.schema.names:
        return batch.column(key)
    name, *parts = key.split(".")
    column = batch.column(name)
    for part in parts:
        column = pa.compute.struct_field(column, part)
    return column


def _values(column: pa.Array) -> Iterator[object]:
    if pa.types.is_dictionary(column.type) and _is_text(column.type):
        words = column.dictionary  # One at a time: each may be large, and few of many be needed.
        for index in column.indices.to_pylist():
            yield None if index is None else next(_values(words.slice(index, 1)))
        return
    try:
        yield from column.to_pylist()
    except UnicodeDecodeError:
        if not _is_text(column.type):
            raise
        wide = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
        yield from column.cast(wide).to_pylist()  # Row by row: `to_record` reports those that are not UTF-8.


def checked_rows(batch: pa.RecordBatch, keys: list[str], checked: dict[str, int]) -> Iterator[dict[str, object]]:
    """Yield the rows of a batch of a memory map, whose offsets and indexes are validated first.

    `checked` is the address of the dictionary of each column that was checked last: batches share one.
    """
    batch.validate()
    for key in keys:
        column = _column(batch, key)
        if pa.types.is_dictionary(column.type):
            dictionary, column = column.dictionary, column.indices
            last = pa.compute.max(column).as_py() if len(column) > column.null_count else -1
            if last >= len(dictionary) or (last >= 0 and pa.compute.min(column).as_py() < 0):
                raise CorruptInputError(f"an index beyond the {len(dictionary)} values of a dictionary.")
            address = next((buffer.address for buffer in dictionary.buffers()[::-1] if buffer is not None), 0)
            if checked.get(key) != address:
                _validate(dictionary)
                checked[key] = address
        _validate(column)
    for start in range(0, batch.num_rows, 256):
        yield from batch_rows(batch.slice(start, 256), keys)


def _validate(column: pa.Array) -> None:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.view(pa.binary() if pa.types.is_string(column.type) else pa.large_binary())
    column.validate(full=True)


def error_text(error: BaseException) -> str:
    """Return what a library says is wrong, in one line."""
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


def damaged_table(path: Path, what: str, error: BaseException) -> DatasetError:
    """Return the error for a file of a table that cannot be read."""
    if isinstance(error, DatasetError):
        return error
    return DatasetError(f"{path}: expected {what}, got: {error_text(error)}. Write or fetch it again.")


def common_schema(paths: Sequence[Path], schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the schema that all files share. Raises DatasetError if they differ."""
    first = schemas[0].remove_metadata()
    for path, schema in zip(paths, schemas):
        if schema.remove_metadata() != first:
            names = {field.name: field.type for field in first}
            other = [f"{f.name}: {f.type}" for f in schema if names.pop(f.name, None) != f.type] or list(names)
            raise DatasetError(
                f"{path}: expected the columns of {paths[0]}, got other ones ({', '.join(other)[:300]}). "
                "Convert them as two tables."
            )
    return first


def with_lists(source: TableSource) -> TableSource:
    """Return the table with tensors as nested lists of fixed size, which other tools read too. No copy."""
    kinds = [_list_type(field.type) for field in source.schema]
    schema = pa.schema([field.with_type(kind) for field, kind in zip(source.schema, kinds)])
    return source.with_columns(
        schema, lambda batch: [_as_lists(column, kind) for column, kind in zip(batch.columns, kinds)]
    )


def _list_type(kind: Any) -> Any:
    if not isinstance(kind, pa.FixedShapeTensorType) or 0 in kind.shape:
        return kind
    nested = kind.value_type
    for size in reversed(kind.shape):
        nested = pa.list_(nested, size)
    return nested


def _as_lists(column: pa.Array, kind: Any) -> pa.Array:
    if kind == column.type:
        return column
    if column.null_count:
        raise DatasetError("tensors: expected one in every row, got none in some. Fill or drop these rows.")
    values, sizes = column.storage.flatten(), tensor_shape(kind)
    for size in reversed(sizes or ()):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values


def check_batch(report: Report, batch: Any) -> None:
    """Add the tokens of a batch to a report, if it has a column of them."""
    report.is_rows = True
    for name in TOKEN_COLUMNS:
        index = batch.schema.get_field_index(name)
        if index < 0:
            continue
        column = batch.column(index)
        if is_list(column.type):
            values = column.flatten()
            if pa.types.is_integer(values.type) and len(values) and not values.null_count:
                tokens = np.asarray(values.to_numpy(zero_copy_only=False))
                if tokens.dtype.itemsize > 1:
                    if tokens.dtype.itemsize > 2:  # Columns of 8-byte integers are how tables keep tokens.
                        report.ignored_faults.add("wrong-dtype")
                    report.add_tokens(Window(str(report.path), report.metadata.get("tokens", 0), tokens))
                    report.metadata["tokens"] = report.metadata.get("tokens", 0) + len(tokens)
            return


def check_has_rows(report: Report) -> None:
    """Add a finding if a table without other faults has no rows."""
    report.is_sequential = True
    if not report.findings and not report.metadata.get("rows"):
        report.add_finding("empty", "byte 0", "expected rows, got none")


def columns_text(schema: pa.Schema) -> str:
    """Return the names and types of columns, for a report."""
    return ", ".join(f"{field.name} {field.type}" for field in schema)[:500]
