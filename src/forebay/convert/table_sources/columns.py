"""Columns as they lie: Parquet, Arrow files and streams, Feather, and what Hugging Face's save_to_disk wrote.

Arrow files that are not compressed are memory-mapped: a batch is a view of the map, and no byte is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.convert.table_sources.base import TableSource, one_schema, rows_at_once
from forebay.errors import DatasetError
from forebay.formats.arrow import ipc_batches, open_ipc
from forebay.prepare.read.ipc import check_ipc

_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError)


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
                    yield _fitted(batch, schema)
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
                        yield _fitted(batch.slice(start, step), schema)
        except _DAMAGE as error:
            raise _damaged(path, "Arrow", error) from error


def _fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _damaged(path: Path, what: str, error: BaseException) -> DatasetError:
    if isinstance(error, DatasetError):
        return error
    told = " ".join(str(error).split())[:300].rstrip(".")
    return DatasetError(f"{path}: expected {what}, got: {told}. Write or fetch it again.")
