"""Columns as they lie: Parquet; Arrow files and streams, Feather, and what Hugging Face's save_to_disk wrote.

Arrow files that are not compressed are memory-mapped: a batch is a view of the map, and no byte is copied. Tensors are
written as lists of fixed size, which others read, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from forebay.convert.content import Options, TableSource, Written
from forebay.convert.table import Part, one_schema, rows_at_once, write_parts
from forebay.convert.values import tensor_shape
from forebay.errors import DatasetError, UsageError
from forebay.formats.arrow import ipc_batches, open_ipc
from forebay.prepare.read.ipc import check_ipc

_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError)
_GROUP_BYTES = 8 << 20
_CODECS = ("zstd", "snappy", "none")


def open_parquet(paths: Sequence[Path]) -> TableSource:
    """Parquet files of one schema, one after another. Raises DatasetError where one is damaged."""
    files = [_parquet(path) for path in paths]
    schema = one_schema(paths, (file.schema_arrow for file in files))
    rows = sum(file.metadata.num_rows for file in files)
    for file in files:
        file.close()
    return TableSource("parquet", schema, rows, lambda: _read_parquet(paths, schema))


def open_arrow(paths: Sequence[Path], kind: str = "arrow") -> TableSource:
    """Arrow IPC files or streams of one schema, one after another."""
    schemas = []
    for path in paths:
        try:
            check_ipc(path)
            with open_ipc(path) as reader:
                schemas.append(reader.schema)
        except _DAMAGE as error:
            raise _damaged(path, "Arrow", error) from error
    schema = one_schema(paths, schemas)
    return TableSource(kind, schema, None, lambda: _read_arrow(paths, schema))


def _parquet(path: Path) -> Any:
    try:
        return pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
    except _DAMAGE as error:
        raise _damaged(path, "Parquet", error) from error


def _read_parquet(paths: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for path in paths:
        with _parquet(path) as file:
            meta = file.metadata
            size = sum(max(0, meta.row_group(i).total_byte_size) for i in range(meta.num_row_groups))
            try:
                for batch in file.iter_batches(rows_at_once(size / max(1, meta.num_rows)), use_threads=False):
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
            except _DAMAGE as error:
                raise _damaged(path, "Parquet", error) from error


def _read_arrow(paths: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for path in paths:
        try:
            with open_ipc(path) as reader:
                for batch in ipc_batches(reader):
                    batch.validate()
                    for column in batch.columns:
                        if not pa.types.is_primitive(column.type):
                            column.validate(full=True)  # A damaged file's offsets could point anywhere.
                    step = rows_at_once(batch.nbytes / max(1, batch.num_rows))
                    for start in range(0, batch.num_rows, step):
                        yield pa.RecordBatch.from_arrays(batch.slice(start, step).columns, schema=schema)
        except _DAMAGE as error:
            raise _damaged(path, "Arrow", error) from error


def _damaged(path: Path, what: str, error: BaseException) -> DatasetError:
    if isinstance(error, DatasetError):
        return error
    told = " ".join(str(error).split())[:300].rstrip(".")
    return DatasetError(f"{path}: expected {what}, got: {told}. Write or fetch it again.")


def write_parquet(source: TableSource, out: Path, options: Options) -> Written:
    """Parquet files in row groups of 8 MiB or less; `compress`: zstd (by default), snappy or none."""
    codec = options.compress or "zstd"
    if codec not in _CODECS:
        raise UsageError(f"--compress: expected one of {', '.join(_CODECS)} for Parquet, got {codec!r}.")
    table = _with_lists(source)

    def open_part(file: Any, first_row: int) -> Part:
        try:
            part: Part = pq.ParquetWriter(file, table.schema, compression=codec, write_page_checksum=True)
            return part
        except pa.ArrowNotImplementedError as error:
            raise UsageError(f"Parquet: expected columns that it can hold, got: {error}. Leave them out.") from error

    return write_parts(table, out, options, ".parquet", open_part, group_bytes=min(_GROUP_BYTES, options.slice_bytes))


def write_feather(source: TableSource, out: Path, options: Options) -> Written:
    """Arrow IPC files, which others call Feather: rows are read where they lie; `compress`: zstd or nothing."""
    table, codec = _with_lists(source), pa.ipc.IpcWriteOptions(compression=options.compress or None)
    return write_parts(
        table, out, options, ".arrow", lambda file, _: pa.ipc.new_file(file, table.schema, options=codec)
    )


def _with_lists(source: TableSource) -> TableSource:
    """The table with tensors as lists of fixed size in lists of fixed size. No copy."""
    kinds = [_list_type(field.type) for field in source.schema]
    schema = pa.schema([field.with_type(kind) for field, kind in zip(source.schema, kinds)])
    return source.changed(schema, lambda batch: [_listed(column, kind) for column, kind in zip(batch.columns, kinds)])


def _list_type(kind: Any) -> Any:
    if not isinstance(kind, pa.FixedShapeTensorType) or 0 in kind.shape:
        return kind
    found = kind.value_type
    for size in reversed(kind.shape):
        found = pa.list_(found, size)
    return found


def _listed(column: pa.Array, kind: Any) -> pa.Array:
    if kind == column.type:
        return column
    if column.null_count:
        raise DatasetError("tensors: expected one in every row, got none in some. Fill or drop these rows.")
    values, sizes = column.storage.flatten(), tensor_shape(kind)
    for size in reversed(sizes or ()):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values
