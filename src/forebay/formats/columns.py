"""What Parquet and Arrow share: documents and rows of batches, tensors as lists, the check.

Hides: which columns are read (those that the options name), how many rows are in memory at a time, and that the offsets
and indexes of a damaged file could point anywhere in memory. Memory is about 8 MiB of rows and one batch.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute

from forebay.errors import CorruptInputError, DatasetError, UnreadableInputError, error_text, listed
from forebay.formats.base import Format
from forebay.formats.conversion import ConvertOptions, Position, Positioned, TableSource
from forebay.formats.inputs import ALL_FIELDS, InputFile, InputSplit, ReadOptions
from forebay.formats.records import Record, key_advice, keys_of, to_record
from forebay.formats.report import Report, check_rows
from forebay.formats.tables import contains, input_of, rows_at_once, tensor_shape

READ_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError, EOFError, CorruptInputError)
"""What pyarrow raises for damaged files."""
BATCH_BYTES = 8 << 20
GroupRows: TypeAlias = Iterator[tuple[int, dict[str, object] | Record]]
GroupBatches: TypeAlias = Iterator[tuple[int, pa.RecordBatch]]


class ColumnFormat(Format):
    """A format of tables whose rows come in groups: row groups or batches."""

    title: str  # The name of the format in messages.

    @abstractmethod
    def open_file(self, file: InputFile, options: ReadOptions, split: InputSplit | None) -> AbstractContextManager[Any]:
        """Open pyarrow's reader of an input. With a split its groups are validated as far as memory is at risk."""

    @abstractmethod
    def rows(self, reader: Any, split: InputSplit, keys: list[str]) -> GroupRows:
        """Yield the rows of a split, each with the number of its group if it is its first, else -1; or damage."""

    @abstractmethod
    def batches(self, reader: Any, first: int = 0) -> GroupBatches:
        """Yield the batches of a file from group `first` on, each with the number of the group that it begins or -1."""

    def open_path(self, path: Path) -> AbstractContextManager[Any]:
        """Open pyarrow's reader of a file, all groups of which are validated."""
        file = input_of(path, self.name)
        return self.open_file(file, ReadOptions(), InputSplit((file,)))

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        file, number = split.files[0], -1
        if not file.bytes:
            return
        try:
            with self.open_file(file, options, split) as reader:
                keys = select_columns(reader_schema(reader), options, file)
                for start, row in self.rows(reader, split, keys):
                    number += 1
                    if isinstance(row, Record):
                        yield replace(row, index=number)
                    else:
                        yield to_record(number, row, options, start=start)
        except READ_ERRORS as error:
            is_clear = isinstance(error, CorruptInputError)
            problem = str(error) if is_clear else f"damaged {self.title}: {error_text(error)}"
            yield Record(number + 1, problem=problem, location=f"row {number + 1}", unread=max(1, split.bytes))

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        schemas = []
        for path in paths:
            try:
                with self.open_path(path) as reader:
                    schemas.append(reader_schema(reader))
            except READ_ERRORS as error:
                raise damaged_table(path, self.title, error) from error
        schema = common_schema(paths, schemas)
        read = partial(self._read_batches, paths, schema)
        return TableSource(self.name, schema, None, lambda: (batch for _, batch in read(None)), batches_from=read)

    def check(self, path: Path, report: Report) -> None:
        """Read every batch, or as many as the options allow."""
        check_rows(report, lambda: self.open_rows([path], ConvertOptions()))

    def _read_batches(
        self, paths: Sequence[Path], schema: pa.Schema, position: Position | None
    ) -> Positioned[pa.RecordBatch]:
        """A position is the number of a file and of a group in it."""
        first_file, first = position or (0, 0)
        for number, path in enumerate(paths[first_file:], first_file):
            try:
                with self.open_path(path) as reader:
                    for group, batch in self.batches(reader, first if number == first_file else 0):
                        batch.validate(full=True)  # A damaged file's offsets could point anywhere.
                        step = rows_at_once(batch.nbytes / max(1, batch.num_rows))
                        for start in range(0, batch.num_rows, step):
                            columns = batch.slice(start, step).select(schema.names).columns
                            stored = [c.storage if isinstance(c.type, pa.ExtensionType) else c for c in columns]
                            rows = pa.RecordBatch.from_arrays(stored, schema=schema)
                            yield ([number, group] if group >= 0 and not start else None), rows
            except READ_ERRORS as error:
                raise damaged_table(path, self.title, error) from error


def reader_schema(reader: Any) -> pa.Schema:
    """Return the schema of a pyarrow reader."""
    return reader.schema_arrow if hasattr(reader, "schema_arrow") else reader.schema


def select_columns(schema: pa.Schema, options: ReadOptions, file: InputFile) -> list[str]:
    """Return the keys of the columns to read. Raises UnreadableInputError where one that is required is missing."""
    required, optional = keys_of(options)
    if options.text_keys and required == list(options.text_keys):
        names = required
        if ALL_FIELDS in required:
            names = [f.name for f in schema if contains(f.type, is_text) and schema.names.count(f.name) == 1]
        if not any(_type_of(schema, key) is not None for key in names):
            raise UnreadableInputError(f"{file.path}: expected columns with text, got {listed(schema)}. Name them.")
        required, optional = [], [*names, *optional]
    types = {key: kind for key in required + optional if (kind := _type_of(schema, key)) is not None}
    for key in required:
        kind = types.get(key)
        if kind is None or not (is_text(kind) or kind == pa.null() or key == options.messages_key):
            fields = sorted(schema, key=lambda field: not is_text(field.type))
            raise UnreadableInputError(
                f"{file.path}: expected a text column {key!r}, got columns {listed(fields)}. "
                f"{key_advice(options, schema.names)}"
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


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is that of texts, or of bytes that may be."""
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
    if pa.types.is_dictionary(column.type) and is_text(column.type):
        words = column.dictionary  # One at a time: each may be large, and few of many be needed.
        for index in column.indices.to_pylist():
            yield None if index is None else next(_values(words.slice(index, 1)))
        return
    if pa.types.is_timestamp(column.type):  # Nanoseconds need pandas.
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    try:
        yield from column.to_pylist()
    except UnicodeDecodeError:
        if not is_text(column.type):
            raise
        wide = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
        yield from column.cast(wide).to_pylist()  # Row by row: `to_record` reports those that are not UTF-8.


def checked_rows(batch: pa.RecordBatch, keys: list[str], checked: dict[str, pa.Array]) -> Iterator[dict[str, object]]:
    """Yield the rows of a batch of a memory map, whose offsets and indexes are validated first.

    `checked` has the dictionary of each column that was checked last: batches share one. While it is in `checked`, no
    other can lie at its address.
    """
    batch.validate()
    for key in keys:
        column = _column(batch, key)
        if pa.types.is_dictionary(column.type):
            dictionary, column = column.dictionary, column.indices
            last = pa.compute.max(column).as_py() if len(column) > column.null_count else -1
            if last >= len(dictionary) or (last >= 0 and pa.compute.min(column).as_py() < 0):
                raise CorruptInputError(f"an index beyond the {len(dictionary)} values of a dictionary.")
            if key not in checked or _address(checked[key]) != _address(dictionary):
                _validate(dictionary)
                checked[key] = dictionary
        _validate(column)
    for start in range(0, batch.num_rows, 256):
        yield from batch_rows(batch.slice(start, 256), keys)


def _address(array: pa.Array) -> int:
    return next((buffer.address for buffer in array.buffers()[::-1] if buffer is not None), 0)


def _validate(column: pa.Array) -> None:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.view(pa.binary() if pa.types.is_string(column.type) else pa.large_binary())
    column.validate(full=True)


def damaged_table(path: Path, what: str, error: BaseException) -> DatasetError:
    """Return the error for a file of a table that cannot be read."""
    if isinstance(error, DatasetError) and not isinstance(error, CorruptInputError):
        return error
    return DatasetError(f"{path}: expected {what}, got: {error_text(error)}. Write or fetch it again.")


def common_schema(paths: Sequence[Path], schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the schema that all files share, in the order of the first. Raises DatasetError if they differ.

    Types that Python code registered, such as arrays of `datasets`, are those of their storage.
    """
    for path, schema in zip(paths, schemas):
        names = {field.name: field.type for field in schemas[0]}
        other = [field for field in schema if names.pop(field.name, None) != field.type] or list(names)
        if other:
            raise DatasetError(
                f"{path}: expected the columns of {paths[0]}, each once, got a difference in {listed(other)}. "
                "Rename them, or convert two tables."
            )
    stored = (
        [f.with_type(f.type.storage_type) if isinstance(f.type, pa.ExtensionType) else f for f in schema]
        for schema in schemas
    )
    return pa.unify_schemas([pa.schema(fields) for fields in stored])


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
