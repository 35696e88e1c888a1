"""Parquet: text and rows by row group, page checksums compared, and memory bounded by what the page headers claim."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from forebay.base import Json
from forebay.dataset.parquet_pages import Page, pages
from forebay.errors import CorruptInputError, UsageError, error_text
from forebay.formats.arrow_ipc import MAX_BUFFERED_BYTES
from forebay.formats.columns import (
    BATCH_BYTES,
    READ_ERRORS,
    ColumnFormat,
    GroupBatches,
    GroupRows,
    batch_rows,
    with_lists,
)
from forebay.formats.conversion import ConvertOptions, TableSource, Written
from forebay.formats.inputs import SPLIT_BYTES, Extents, InputFile, InputSplit, ReadOptions, open_stored
from forebay.formats.records import Record, batched
from forebay.formats.tables import rows_at_once, write_parts

_BATCH_ROWS = 4096
_RUN_BYTES = 64 << 20
_GROUP_BYTES = 8 << 20
_CODECS = ("zstd", "snappy", "none")
COLUMNS_KEY = b"forebay.columns"  # Of the metadata of a file that `prepare` wrote: its columns as JSON.
_SETTINGS: Json = {
    "buffer_size": 1 << 20,  # Read pages as they are needed, not whole column chunks.
    "pre_buffer": False,
    "page_checksum_verification": True,
}


class Parquet(ColumnFormat):
    """Parquet files; as a table several of one schema."""

    name = "parquet"
    title = "Parquet"
    suffixes = (".parquet", ".pq", ".parq")
    magics = (b"PAR1", b"PARE")
    is_divisible = True

    def open_file(self, file: InputFile, options: ReadOptions, split: InputSplit | None) -> pq.ParquetFile:
        return _open(file)

    def batches(self, reader: Any, first: int = 0) -> GroupBatches:
        metadata = reader.metadata
        size = sum(max(0, metadata.row_group(i).total_byte_size) for i in range(metadata.num_row_groups))
        num_rows = rows_at_once(size / max(1, metadata.num_rows))
        for group in range(first, metadata.num_row_groups):
            for index, batch in enumerate(reader.iter_batches(num_rows, row_groups=[group], use_threads=False)):
                yield -1 if index else group, batch

    def split(self, file: InputFile, options: ReadOptions) -> Extents:
        try:
            with _open(file) as parquet:
                sizes = [max(0, parquet.metadata.row_group(i).total_byte_size) for i in range(parquet.num_row_groups)]
        except READ_ERRORS:
            yield 0, 0, file.bytes  # Reading it reports what is wrong.
            return
        for groups in batched(range(len(sizes)), sizes.__getitem__, SPLIT_BYTES, len(sizes)):
            size = sum(sizes[group] for group in groups)
            yield groups[0], groups[-1] + 1, file.bytes * size // max(1, sum(sizes))

    def divide(self, file: InputFile, options: ReadOptions, borders: Sequence[int]) -> list[InputSplit | None]:
        """A row group is of the part with its middle byte."""
        try:
            with _open(replace(file, extent=(0, 0))) as parquet:
                metadata = parquet.metadata
                groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
                extents = [
                    (min(map(_first_byte, columns)), max(_first_byte(c) + c.total_compressed_size for c in columns))
                    for columns in ([group.column(i) for i in range(group.num_columns)] for group in groups)
                    if columns
                ]
        except READ_ERRORS:
            extents = []  # Reading it reports what is wrong.
        middles = [(start + stop) // 2 for start, stop in extents]
        first = np.searchsorted(middles, borders).tolist()
        if not extents or sorted(middles) != middles or (first[0], first[-1]) != (0, len(extents)):
            return [InputSplit((file,), bytes=file.bytes), *[None] * (len(borders) - 2)]
        parts = []
        for i, j in pairwise(first):
            start, stop = (extents[i][0], extents[j - 1][1]) if i < j else (0, 0)
            parts.append(InputSplit((replace(file, extent=(start, stop)),), i, j, stop - start) if i < j else None)
        return parts

    def rows(self, reader: Any, split: InputSplit, keys: list[str]) -> GroupRows:
        """A damaged row group costs its own rows."""
        for group in range(split.start, split.stop or reader.num_row_groups):
            row_group, start = reader.metadata.row_group(group), group
            try:
                num_rows = _rows_at_once(reader, split.files[0], row_group, keys) if row_group.num_rows else 0
                options = {"row_groups": [group], "columns": keys, "use_threads": False}
                for batch in reader.iter_batches(num_rows, **options) if num_rows else ():
                    for row in batch_rows(batch, keys):
                        yield start, row
                        start = -1
            except READ_ERRORS as error:
                location = f"row group {group}, of {row_group.num_rows} rows"
                unread = split.bytes // max(1, (split.stop or reader.num_row_groups) - split.start)
                yield -1, Record(0, problem=f"damaged Parquet: {error_text(error)}", location=location, unread=unread)

    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """Row groups of 8 MiB or less; `compress`: zstd (by default), snappy or none."""
        codec = options.compress or "zstd"
        if codec not in _CODECS:
            raise UsageError(f"--set compress: expected one of {', '.join(_CODECS)} for Parquet, got {codec!r}.")
        table = with_lists(source)
        recorded = {name: value for name, value in (source.schema.metadata or {}).items() if name == COLUMNS_KEY}
        schema = table.schema.with_metadata(recorded or None)

        def open_part(file: Any, first_row: int) -> Any:
            try:
                return pq.ParquetWriter(file, schema, compression=codec, write_page_checksum=True)
            except pa.ArrowNotImplementedError as error:
                raise UsageError(
                    f"Parquet: expected columns that it can hold, got: {error}. Leave them out."
                ) from error

        group_bytes = min(_GROUP_BYTES, options.slice_bytes)
        return write_parts(table, out, options, ".parquet", open_part, group_bytes=group_bytes)


def recorded_columns(file: InputFile) -> Json:
    """What `--to parquet` recorded of a file's columns, by name: `kind`, and `scorer` of a score."""
    try:
        with _open(file) as parquet:
            columns = json.loads((parquet.schema_arrow.metadata or {}).get(COLUMNS_KEY, b"{}"))
            names = set(parquet.schema_arrow.names)
    except READ_ERRORS:
        return {}  # Reading it reports what is wrong.
    if not isinstance(columns, dict):
        return {}
    return {name: entry for name, entry in columns.items() if name in names and isinstance(entry, dict)}


def read_metadata(split: InputSplit) -> None:
    """Read what the footer tells of the columns of a split: the library aborts the process over some damage."""
    with _open(split.files[0]) as file:
        for group in range(split.start, split.stop or file.num_row_groups):
            row_group = file.metadata.row_group(group)
            for index in range(row_group.num_columns):
                row_group.column(index)


def _open(file: InputFile) -> pq.ParquetFile:
    if file.compression:
        raise CorruptInputError(f"a Parquet file inside {file.compression} cannot be read at random. Unpack it first.")
    stream = open_stored(file, is_random=True)
    stream.seek(max(0, file.bytes - 9))
    tail = stream.read(9)
    is_signed = tail.endswith(b"PAR1") and tail[0] > 0  # Another footer ends with a byte of zero.
    is_remote, is_encrypted = "://" in file.path, is_signed or tail.endswith(b"PARE")
    if is_encrypted or not is_remote:
        stream.close()
    if is_encrypted:
        raise CorruptInputError("an encrypted Parquet file, or one with a damaged footer. Decrypt it first")
    return pq.ParquetFile(stream if is_remote else file.path, **_SETTINGS)


def _rows_at_once(parquet: pq.ParquetFile, file: InputFile, row_group: Any, keys: list[str]) -> int:
    columns = [row_group.column(i) for i in range(row_group.num_columns)]
    columns = [column for column in columns if column.path_in_schema.startswith(tuple(keys))]
    size = sum(max(0, column.total_uncompressed_size) for column in columns)
    num_rows: int = min(_BATCH_ROWS, BATCH_BYTES * max(1, row_group.num_rows) // max(1, size))
    dictionaries = [field.name for field in parquet.schema_arrow if pa.types.is_dictionary(field.type)]
    for column in columns:
        num_rows = min(num_rows, _max_column_rows(file, column, column.path_in_schema in dictionaries))
    return max(1, num_rows)


def _first_byte(column: Any) -> int:
    start = int(column.data_page_offset)
    has_dictionary = column.has_dictionary_page and column.dictionary_page_offset
    return min(start, int(column.dictionary_page_offset)) if has_dictionary else start


def _max_column_rows(file: InputFile, column: Any, stays_dictionary: bool) -> int:
    start, size = _first_byte(column), column.total_compressed_size
    with open_stored(file, is_random=True) as stream:
        headers = list(pages(stream, start, start + size))
    for page in headers:
        if page.packed_bytes + page.bytes * (2 if page.is_dictionary else 1) > MAX_BUFFERED_BYTES:
            raise CorruptInputError(
                f"a page of {page.bytes} bytes ({page.packed_bytes} packed) is larger than can be held: at most "
                f"{MAX_BUFFERED_BYTES} bytes with both. Write the file with smaller pages: fewer rows in each"
            )
    if stays_dictionary:
        return _BATCH_ROWS
    largest = max((page.bytes for page in headers if page.is_dictionary), default=1)
    return min(max_rows(headers, _RUN_BYTES, _BATCH_ROWS), _RUN_BYTES // max(1, largest))


def max_rows(headers: Sequence[Page], budget_bytes: int, limit: int) -> int:
    """Return how many rows, a power of two up to `limit`, may be read at once within a budget; at least 1.

    All values of a page but one may be small: a run counts all bytes of each page that it touches. The run that touches
    most begins with the last value of a page.
    """
    data = [page for page in headers if not page.is_dictionary]
    stops = np.cumsum([page.values for page in data])
    totals = np.cumsum([0, *(page.bytes for page in data)])
    rows = limit
    while rows > 1 and data:
        last = np.minimum(np.searchsorted(stops, stops + rows - 2, "right"), len(data) - 1)
        if (totals[last + 1] - totals[:-1]).max() <= budget_bytes:
            break
        rows //= 2
    return rows
