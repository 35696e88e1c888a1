"""Lines of text as rows, plain or compressed: JSONL, CSV and TSV.

A value that comes after the first 64 MiB (of CSV: 16) and is of another type, or a field of its own, is an error that
names the line, never left out. In CSV an empty field without quotes is missing, and nothing else is. What a line cannot
hold is refused: bytes, and in JSON numbers that are not finite; in CSV also lists.
"""

from __future__ import annotations

import codecs
import gzip
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.csv
import zstandard

from forebay.convert.content import Options, TableSource, Written
from forebay.convert.table import (
    BATCH_BYTES,
    BATCH_ROWS,
    Encoded,
    Rows,
    inferred,
    open_bytes,
    refuse_columns,
    rows_batch,
    write_parts,
)
from forebay.convert.values import contains, flatten, is_beyond_json, is_bytes, tensor_shape
from forebay.errors import DatasetError, UsageError
from forebay.prepare.documents import batched
from forebay.prepare.read.opening import Damaged

_ADVICE = "Write --to parquet, or leave the column out."


def open_jsonl(paths: Sequence[Path]) -> TableSource:
    """Files of one JSON object a line, one after another."""
    schema = inferred(_line_batches(paths))
    if schema is None:
        raise DatasetError(f"{paths[0]}: expected lines of JSON, got none.")
    whole = schema
    return TableSource(
        "jsonl", whole, None, lambda: (rows_batch(rows, whole, where) for where, rows, _ in _line_batches(paths))
    )


def _line_batches(paths: Sequence[Path]) -> Iterator[tuple[str, Rows, int]]:
    """The place of the first line, rows, bytes."""
    for path in paths:
        with open_bytes(path) as file:
            for some in batched(_lines(file, path), lambda one: len(one[1]), BATCH_BYTES, BATCH_ROWS):
                rows = [_row(line, path, number) for number, line in some]
                yield f"{path}, line {some[0][0]}", rows, sum(len(line) for _, line in some)


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers."""
    try:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except Damaged as error:
        raise DatasetError(f"{path}: expected whole lines, got: {error}.") from error


def _row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except ValueError as error:
        raise DatasetError(f"{path}, line {number}: expected JSON, got: {error}. Mend or remove the line.") from error
    if not isinstance(row, dict):
        raise DatasetError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}.")
    return row


def open_csv(paths: Sequence[Path], schema: pa.Schema | None = None) -> TableSource:
    """Files of comma- or tab-separated values whose first line names the columns; what `schema` lacks is inferred."""
    if schema is None:
        (schema,) = (reader.schema for _, reader in _csv_readers(paths[:1], ()))
    whole = schema
    return TableSource("csv", whole, None, lambda: _read_csv(paths, whole))


def _read_csv(paths: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for path, reader in _csv_readers(paths, schema):
        if reader.schema.names != schema.names:
            raise DatasetError(f"{path}: expected columns {schema.names}, got {reader.schema.names}.")
        yield from (batch for batch in reader if batch.num_rows)


def _csv_readers(paths: Sequence[Path], schema: Any) -> Iterator[tuple[Path, pa.csv.CSVStreamingReader]]:
    kinds = {one.name: pa.float32() if pa.types.is_float16(one.type) else one.type for one in schema}
    for path in paths:
        with open_bytes(path) as file:
            head = file.readline()
        delimiter = "\t" if head.count(b"\t") > head.count(b",") else ","
        # An empty line is a row of one column without a value.
        parse = pa.csv.ParseOptions(
            delimiter=delimiter, newlines_in_values=True, ignore_empty_lines=delimiter.encode() in head
        )
        values = pa.csv.ConvertOptions(
            column_types=kinds, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        )
        try:
            with open_bytes(path) as file:
                read = pa.csv.ReadOptions(block_size=BATCH_BYTES, use_threads=False)
                yield path, pa.csv.open_csv(file, read, parse, values)
        except (pa.ArrowException, Damaged) as error:
            told = " ".join(str(error).split())[:300].rstrip(".")
            raise DatasetError(
                f"{path}: expected values of the types that the first {BATCH_BYTES >> 20} MiB have, got: {told}."
            ) from error


def write_jsonl(source: TableSource, out: Path, options: Options) -> Written:
    """A JSON object a line; `compress`: zstd, gzip or nothing, or as the suffix of `out` says."""
    refuse_columns(
        source.schema,
        lambda kind: not contains(kind, lambda one: is_bytes(one) or is_beyond_json(one)),
        "JSONL",
        _ADVICE,
    )
    pack, suffix = _packing(out, options)
    return write_parts(
        source, out, options, ".jsonl" + suffix, lambda file, row: Encoded(file, _json_lines, row), pack=pack
    )


def write_csv(source: TableSource, out: Path, options: Options) -> Written:
    """Comma-separated values with a line of names; text is quoted, what is missing is empty without quotes."""
    refuse_columns(source.schema, lambda kind: not (is_bytes(kind) or _is_nested(kind)), "CSV", _ADVICE)
    pack, suffix = _packing(out, options)
    return write_parts(
        source, out, options, ".csv" + suffix, lambda file, _: pa.csv.CSVWriter(file, source.schema), pack=pack
    )


def _packing(out: Path, options: Options) -> tuple[Callable[[BinaryIO], Any], str]:
    """What compresses a file, and its suffix."""
    wanted = options.compress or {".gz": "gzip", ".zst": "zstd"}.get(out.suffix, "none")
    if wanted == "gzip":
        return lambda file: gzip.GzipFile("", "wb", 6, file, mtime=0), ".gz"
    if wanted == "zstd":
        return lambda file: zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False), ".zst"
    if wanted == "none":
        return nullcontext, ""
    raise UsageError(f"--compress: expected zstd, gzip or none for lines, got {wanted!r}.")


def _json_lines(batch: pa.RecordBatch, first_row: int) -> bytes:
    names = batch.schema.names
    columns = [_plain(name, column, first_row) for name, column in zip(names, batch.columns)]
    return b"".join(orjson.dumps(dict(zip(names, row))) + b"\n" for row in zip(*columns))


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


def _is_nested(kind: Any) -> bool:
    return bool(pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType))
