"""Lines: JSONL and CSV, plain, gzipped or with zstd.

What a line cannot hold is refused: bytes, and in JSON numbers that are not finite; in CSV also lists.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.csv
import zstandard

from forebay.convert.content import Options, Written
from forebay.convert.table_digest import flatten, tensor_shape
from forebay.convert.table_sinks.base import Part, contains, is_beyond_json, refuse_columns, write_parts
from forebay.convert.table_sources.base import TableSource
from forebay.errors import DatasetError, UsageError

_ADVICE = "Write --to parquet, or leave the column out."


class _JsonPart:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, batch: pa.RecordBatch, first_row: int) -> None:
        columns = [_plain(name, column, first_row) for name, column in zip(batch.schema.names, batch.columns)]
        names = batch.schema.names
        self._file.write(b"".join(orjson.dumps(dict(zip(names, row))) + b"\n" for row in zip(*columns)))

    def finish(self) -> None:
        self._file.close()


class _CsvPart:
    def __init__(self, file: Any, schema: pa.Schema) -> None:
        self._file = file
        self._writer = pa.csv.CSVWriter(file, schema)

    def write(self, batch: pa.RecordBatch, first_row: int) -> None:
        self._writer.write_batch(batch)

    def finish(self) -> None:
        self._writer.close()
        self._file.close()


def write_jsonl(source: TableSource, out: Path, options: Options) -> Written:
    """A JSON object a line; `compress`: zstd, gzip or nothing, or as the suffix of `out` says.

    Raises:
        UsageError: If a column holds bytes, times or decimals.
        DatasetError: If a number is not finite.
    """
    refuse_columns(
        source.schema,
        lambda kind: not contains(kind, lambda one: _is_bytes(one) or is_beyond_json(one)),
        "JSONL",
        _ADVICE,
    )
    pack, suffix = _packing(out, options)
    return write_parts(source, out, options, ".jsonl" + suffix, lambda file, _: _JsonPart(pack(file)))


def write_csv(source: TableSource, out: Path, options: Options) -> Written:
    """Comma-separated values with a line of names; text is quoted, what is missing is empty without quotes.

    Raises:
        UsageError: If a column holds bytes or lists.
    """
    refuse_columns(source.schema, lambda kind: not (_is_bytes(kind) or _is_nested(kind)), "CSV", _ADVICE)
    pack, suffix = _packing(out, options)

    def open_part(file: BinaryIO, schema: pa.Schema) -> Part:
        return _CsvPart(pack(file), schema)

    return write_parts(source, out, options, ".csv" + suffix, open_part)


def _packing(out: Path, options: Options) -> tuple[Callable[[BinaryIO], Any], str]:
    """What compresses a file, and its suffix."""
    wanted = options.compress or {".gz": "gzip", ".zst": "zstd"}.get(out.suffix, "none")
    if wanted == "gzip":
        return lambda file: gzip.GzipFile("", "wb", 6, file, mtime=0), ".gz"
    if wanted == "zstd":
        return lambda file: zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False), ".zst"
    if wanted == "none":
        return lambda file: file, ""
    raise UsageError(f"--compress: expected zstd, gzip or none for lines, got {wanted!r}.")


def _plain(name: str, column: pa.Array, first_row: int) -> list[Any]:
    """Values as Python has them; tensors as nested lists."""
    counts, leaves = flatten(column)
    if pa.types.is_floating(leaves.type):
        bad = np.flatnonzero(~np.isfinite(leaves.drop_null().to_numpy(zero_copy_only=False)))
        if len(bad):
            row = int(np.searchsorted(np.cumsum(np.maximum(counts, 0)), bad[0], "right"))
            raise DatasetError(
                f"JSONL: expected finite numbers, got another ({name}, row {first_row + row}). {_ADVICE}"
            )
    shape = tensor_shape(column.type)
    if shape is not None and not column.null_count and not leaves.null_count:
        values = leaves.to_numpy(zero_copy_only=False).reshape(len(column), *shape)
        nested: list[Any] = values.tolist()
        return nested
    if pa.types.is_float16(leaves.type) and not pa.types.is_float16(column.type):
        return [None if row is None else [float(value) for value in row] for row in column.to_pylist()]
    found: list[Any] = (column.cast(pa.float32()) if pa.types.is_float16(column.type) else column).to_pylist()
    return found


def _is_bytes(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _is_nested(kind: Any) -> bool:
    return bool(pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType))
