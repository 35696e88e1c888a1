"""Columns: Parquet by row groups, Arrow IPC files and streams, Feather.

Hides: which columns are read (those that are asked for, no others), how many rows are held at a time, and how little
a damaged file may be trusted. Memory is about 8 MiB of rows, their pages, and for IPC one record batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from forebay.dataset.parquet_pages import Page, pages
from forebay.prepare.documents import Record
from forebay.prepare.read.base import PIECE_BYTES, Format, Piece, ReadOptions, Source
from forebay.prepare.read.fields import keys_of, to_record
from forebay.prepare.read.ipc import MAX_HELD_BYTES, check_blocks, check_stream, checked_stream
from forebay.prepare.read.opening import Damaged, Unreadable, open_packed, open_source

_BATCH_BYTES = 8 << 20
_BATCH_ROWS = 4096
_RUN_BYTES = 64 << 20
_SHOWN_COLUMNS = 12
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError, EOFError, Damaged)


def _parquet(source: Source) -> pq.ParquetFile:
    if source.compression:
        raise Damaged(f"a Parquet file inside {source.compression} cannot be read at random. Unpack it first.")
    return pq.ParquetFile(
        open_packed(source) if "://" in source.path else source.path,
        buffer_size=1 << 20,  # read pages as they are needed, not whole column chunks
        pre_buffer=False,
        page_checksum_verification=True,
    )


def read_metadata(piece: Piece) -> None:
    """Read what the footer says of the columns of a Parquet piece: the library aborts the process over some damage."""
    with _parquet(piece.sources[0]) as file:
        for group in range(piece.start, piece.stop or file.num_row_groups):
            part = file.metadata.row_group(group)
            for index in range(part.num_columns):
                part.column(index)


def _cut_row_groups(source: Source, options: ReadOptions) -> Iterator[tuple[int, int, int]]:
    try:
        with _parquet(source) as file:
            sizes = [max(0, file.metadata.row_group(i).total_byte_size) for i in range(file.num_row_groups)]
    except _DAMAGE:
        yield 0, 0, source.bytes  # the reader says what is wrong
        return
    start, held = 0, 0
    for index, size in enumerate(sizes):
        held += size
        if held >= PIECE_BYTES or index == len(sizes) - 1:
            yield start, index + 1, source.bytes * held // max(1, sum(sizes))
            start, held = index + 1, 0


def _read_parquet(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    source = piece.sources[0]
    place = -1
    try:
        with _parquet(source) as file:
            found = _chosen(file.schema_arrow, options, source)
            for group in range(piece.start, piece.stop or file.num_row_groups):
                try:
                    start = group
                    for row in _group_rows(file, source, group, list(found)):
                        place += 1
                        yield to_record(place, row, options, start=start)
                        start = -1
                except _DAMAGE as error:
                    place += 1
                    rows = file.metadata.row_group(group).num_rows
                    problem = f"damaged Parquet: {_said(error)}"
                    yield Record(place, problem=problem, where=f"row group {group}, of {rows} rows")
    except Damaged as error:
        yield Record(place + 1, problem=str(error))
    except _DAMAGE as error:
        yield Record(place + 1, problem=f"damaged Parquet: {_said(error)}")


def _group_rows(file: pq.ParquetFile, source: Source, group: int, keys: list[str]) -> Iterator[dict[str, object]]:
    part = file.metadata.row_group(group)
    columns = [part.column(i) for i in range(part.num_columns)]
    columns = [column for column in columns if column.path_in_schema.startswith(tuple(keys))]
    size = sum(max(0, column.total_uncompressed_size) for column in columns)
    batch_rows = min(_BATCH_ROWS, _BATCH_BYTES * max(1, part.num_rows) // max(1, size))
    dictionaries = [field.name for field in file.schema_arrow if pa.types.is_dictionary(field.type)]
    for column in columns:
        batch_rows = min(batch_rows, _rows_at_once(source, column, column.path_in_schema in dictionaries))
    for batch in file.iter_batches(max(1, batch_rows), row_groups=[group], columns=keys, use_threads=False):
        yield from _rows(batch, keys)


def _rows_at_once(source: Source, column: Any, stays_dictionary: bool) -> int:
    """How many rows of a column chunk may be held at once; each may be the largest value of its dictionary.

    If the column is read as a dictionary, that is there once for all rows of a batch, and anew for each batch.
    """
    start, size = column.data_page_offset, column.total_compressed_size
    if column.has_dictionary_page and column.dictionary_page_offset:
        start = min(start, column.dictionary_page_offset)
    with open_packed(source) as file:
        found = list(pages(file, start, start + size))
    for page in found:
        held = page.packed_bytes + page.bytes * (2 if page.is_dictionary else 1)
        if held > MAX_HELD_BYTES:
            raise Damaged(
                f"a page of {page.bytes} bytes ({page.packed_bytes} packed) is larger than can be held: at most "
                f"{MAX_HELD_BYTES} bytes with both. Write the file with smaller pages: fewer rows in each"
            )
    if stays_dictionary:
        return _BATCH_ROWS
    largest = max((page.bytes for page in found if page.is_dictionary), default=1)
    return min(most_rows(found, _RUN_BYTES, _BATCH_ROWS), _RUN_BYTES // max(1, largest))


def most_rows(found: Sequence[Page], budget_bytes: int, most: int) -> int:
    """How many rows, a power of two up to `most`, may be read at once so that no run has more bytes; at least 1.

    All values of a page but one may be small: a run is given all bytes of each page that it touches. The one that
    touches most begins with the last value of a page.
    """
    data = [page for page in found if not page.is_dictionary]
    stops = np.cumsum([page.values for page in data])
    totals = np.cumsum([0, *(page.bytes for page in data)])
    rows = most
    while rows > 1 and data:
        last = np.minimum(np.searchsorted(stops, stops + rows - 2, "right"), len(data) - 1)
        if (totals[last + 1] - totals[:-1]).max() <= budget_bytes:
            break
        rows //= 2
    return rows


def _chosen(schema: pa.Schema, options: ReadOptions, source: Source) -> dict[str, pa.DataType]:
    """The columns to read, by key; those that are needed must be there."""
    needed, wanted = keys_of(options)
    found = {key: kind for key in needed + wanted if (kind := _type_of(schema, key)) is not None}
    for key in needed:
        kind = found.get(key)
        if kind is None or not (_is_text(kind) or key == options.messages_key):
            fields = sorted(schema, key=lambda field: not _is_text(field.type))
            got = ", ".join(f"{field.name}: {str(field.type)[:60]}" for field in fields[:_SHOWN_COLUMNS])
            got += f" and {len(fields) - _SHOWN_COLUMNS} others" if len(fields) > _SHOWN_COLUMNS else ""
            raise Unreadable(
                f"{source.path}: expected a text column {key!r}, got columns {got}. Name it with --text-key."
            )
    return found


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


def _rows(batch: pa.RecordBatch, keys: list[str]) -> Iterator[dict[str, object]]:
    # Giants among others: fewer as Python's objects. A dictionary is the same for every row.
    size = sum(c.indices.nbytes if pa.types.is_dictionary(c.type) else c.nbytes for c in batch.columns)
    if batch.num_rows > 1 and size > 2 * _BATCH_BYTES:
        half = batch.num_rows // 2
        yield from _rows(batch.slice(0, half), keys)
        yield from _rows(batch.slice(half), keys)
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
        words = column.dictionary  # one at a time: each may be large, and few of many be needed
        for index in column.indices.to_pylist():
            yield None if index is None else next(_values(words.slice(index, 1)))
        return
    try:
        yield from column.to_pylist()
    except UnicodeDecodeError:
        if not _is_text(column.type):
            raise
        wide = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
        yield from column.cast(wide).to_pylist()  # row by row: the reader of fields says which are no text


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


@contextmanager
def _open_ipc(source: Source, options: ReadOptions, piece: Piece | None = None) -> Iterator[Any]:
    """A reader of an IPC file, memory-mapped if it can be, or of a stream; with a piece its messages are checked."""
    with ExitStack() as opened:
        if source.compression:
            packed = open_source(source, options)
            yield pa.ipc.open_stream(checked_stream(opened.enter_context(packed)))
            return
        plain = opened.enter_context(open_packed(source))
        magic = plain.read(6)
        plain.seek(0)
        if magic[:4] == b"FEA1":
            raise Damaged("Feather of version 1 is no longer read. Write it again with pyarrow or pandas.")
        remote = "://" in source.path
        if magic == b"ARROW1":
            if piece is not None:
                check_blocks(plain, piece.start, piece.stop)
            yield pa.ipc.open_file(pa.PythonFile(plain) if remote else opened.enter_context(pa.memory_map(source.path)))
        elif remote:
            yield pa.ipc.open_stream(checked_stream(plain))
        else:
            if piece is not None:
                check_stream(plain)
            yield pa.ipc.open_stream(opened.enter_context(pa.memory_map(source.path)))


def _cut_batches(source: Source, options: ReadOptions) -> Iterator[tuple[int, int, int]]:
    number = 0
    with suppress(*_DAMAGE), _open_ipc(source, options) as reader:
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            number = reader.num_record_batches
    if not number:  # a stream, or damaged: the reader says what is wrong
        yield 0, 0, source.bytes
    step = max(1, number * PIECE_BYTES // max(1, source.bytes))
    for start in range(0, number, step):
        stop = min(start + step, number)
        yield start, stop, source.bytes * stop // number - source.bytes * start // number


def _read_arrow(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    source = piece.sources[0]
    place = -1
    try:
        with _open_ipc(source, options, piece) as reader:
            keys = list(_chosen(reader.schema, options, source))
            checked: dict[str, int] = {}
            for start, batch in _ipc_batches(reader, piece):
                for row in _checked_rows(batch, keys, checked):
                    place += 1
                    yield to_record(place, row, options, start=start)
                    start = -1
    except Damaged as error:
        yield Record(place + 1, problem=str(error), where=f"row {place + 1}")
    except _DAMAGE as error:
        yield Record(place + 1, problem=f"damaged Arrow: {_said(error)}", where=f"row {place + 1}")


def _ipc_batches(reader: Any, piece: Piece) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of a file with their numbers; of a stream, which is read from its beginning, with -1."""
    if not isinstance(reader, pa.ipc.RecordBatchFileReader):
        yield from ((-1, batch) for batch in reader)
        return
    for index in range(piece.start, piece.stop or reader.num_record_batches):
        yield index, reader.get_batch(index)


def _checked_rows(batch: pa.RecordBatch, keys: list[str], checked: dict[str, int]) -> Iterator[dict[str, object]]:
    """Rows of a batch whose offsets were checked: those of a damaged file could point anywhere in memory.

    `checked` is where the dictionary of each column lies that was checked last: batches share one.
    """
    batch.validate()
    for key in keys:
        column = _column(batch, key)
        if pa.types.is_dictionary(column.type):
            dictionary, column = column.dictionary, column.indices
            last = pa.compute.max(column).as_py() if len(column) > column.null_count else -1
            if last >= len(dictionary) or (last >= 0 and pa.compute.min(column).as_py() < 0):
                raise Damaged(f"an index beyond the {len(dictionary)} values of a dictionary.")
            place = next((buffer.address for buffer in dictionary.buffers()[::-1] if buffer is not None), 0)
            if checked.get(key) != place:
                _validate(dictionary)
                checked[key] = place
        _validate(column)
    for start in range(0, batch.num_rows, 256):
        yield from _rows(batch.slice(start, 256), keys)


def _validate(column: pa.Array) -> None:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.view(pa.binary() if pa.types.is_string(column.type) else pa.large_binary())
    column.validate(full=True)


PARQUET = Format("parquet", _read_parquet, _cut_row_groups)
ARROW = Format("arrow", _read_arrow, _cut_batches)
