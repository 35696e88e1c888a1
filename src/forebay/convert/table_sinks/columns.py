"""Columns: Parquet, compressed with zstd or snappy, and Arrow IPC files. Tensors are lists of fixed size."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from forebay.convert.content import Options, Written
from forebay.convert.table_sinks.base import Part, with_lists, write_parts
from forebay.convert.table_sources.base import TableSource
from forebay.errors import UsageError

_GROUP_BYTES = 8 << 20
_GROUP_ROWS = 1 << 16
_CODECS = ("zstd", "snappy", "none")


class _ParquetPart:
    def __init__(self, file: BinaryIO, schema: pa.Schema, codec: str, group_bytes: int) -> None:
        self._group_bytes = min(_GROUP_BYTES, group_bytes)
        self._writer = pq.ParquetWriter(file, schema, compression=codec, write_page_checksum=True)
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = self._rows = 0

    def write(self, batch: pa.RecordBatch, first_row: int) -> None:
        self._waiting.append(batch)
        self._bytes += batch.nbytes
        self._rows += batch.num_rows
        if self._bytes >= self._group_bytes or self._rows >= _GROUP_ROWS:
            self._flush()

    def finish(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting, self._schema), row_group_size=1 << 20)
            self._waiting, self._bytes, self._rows = [], 0, 0


def write_parquet(source: TableSource, out: Path, options: Options) -> Written:
    """Parquet files in row groups of 8 MiB or less; `compress`: zstd (by default), snappy or none.

    Raises:
        UsageError: If a column's type is none of Parquet's.
    """
    codec = options.compress or "zstd"
    if codec not in _CODECS:
        raise UsageError(f"--compress: expected one of {', '.join(_CODECS)} for Parquet, got {codec!r}.")

    def open_part(file: BinaryIO, schema: pa.Schema) -> Part:
        try:
            return _ParquetPart(file, schema, codec, options.slice_bytes)
        except pa.ArrowNotImplementedError as error:
            raise UsageError(f"Parquet: expected columns that it can hold, got: {error}. Leave them out.") from error

    return write_parts(with_lists(source), out, options, ".parquet", open_part)


class _FeatherPart:
    def __init__(self, file: BinaryIO, schema: pa.Schema, codec: str | None) -> None:
        self._writer = pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression=codec))

    def write(self, batch: pa.RecordBatch, first_row: int) -> None:
        self._writer.write_batch(batch)

    def finish(self) -> None:
        self._writer.close()


def write_feather(source: TableSource, out: Path, options: Options) -> Written:
    """Arrow IPC files, which others call Feather: rows are read where they lie; `compress`: zstd or nothing."""
    codec = options.compress or None

    def open_part(file: BinaryIO, schema: pa.Schema) -> Part:
        return _FeatherPart(file, schema, codec)

    return write_parts(with_lists(source), out, options, ".arrow", open_part)
