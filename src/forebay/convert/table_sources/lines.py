"""Lines of text as rows: JSONL, CSV and TSV, plain or compressed.

Types of columns are inferred from the first 64 MiB; what comes later and is of another type, or a field of its own, is
an error that names the line, never left out. In CSV an empty field without quotes is missing, and nothing else is.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.csv

from forebay.convert.table_sources.base import BATCH_BYTES, TableSource, open_bytes
from forebay.errors import DatasetError
from forebay.prepare.read.opening import Damaged

_INFERRED_BYTES = 64 << 20
_BATCH_ROWS = 4096


def open_jsonl(paths: Sequence[Path]) -> TableSource:
    """Files of one JSON object a line, one after another."""
    schema: pa.Schema | None = None
    seen = 0
    for path, line, rows, size in _line_batches(paths):
        found = infer(rows, f"{path}, line {line}")
        schema = found if schema is None else merge(schema, found, f"{path}, line {line}")
        seen += size
        if seen >= _INFERRED_BYTES:
            break
    if schema is None:
        raise DatasetError(f"{paths[0]}: expected lines of JSON, got none.")
    whole = schema
    return TableSource("jsonl", whole, None, lambda: _read_jsonl(paths, whole))


def open_csv(paths: Sequence[Path], schema: pa.Schema | None = None) -> TableSource:
    """Files of comma- or tab-separated values whose first line names the columns.

    Args:
        schema: Types of columns by name; others are inferred.
    """
    found = schema
    for _, one in _csv_readers(paths[:1], schema):
        found = one.schema
    assert found is not None
    whole = found
    return TableSource("csv", whole, None, lambda: _read_csv(paths, whole))


def infer(rows: list[dict[str, object]], where: str) -> pa.Schema:
    """The columns of some rows. Raises DatasetError if a field has values of several types."""
    try:
        return pa.schema(pa.array(rows).type.fields)
    except (pa.ArrowException, OverflowError) as error:
        raise DatasetError(f"{where} and after: expected fields of one type each, got: {error}.") from error


def merge(first: pa.Schema, second: pa.Schema, where: str) -> pa.Schema:
    """Columns of both, each of a type that holds both."""
    try:
        return pa.unify_schemas([first, second], promote_options="permissive")
    except pa.ArrowException as error:
        raise DatasetError(f"{where} and after: expected fields of the types before, got: {error}.") from error


def rows_batch(rows: list[dict[str, object]], schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Rows in these columns. Raises DatasetError if they have others, or do not fit."""
    found = infer(rows, where)
    if found != schema and merge(schema, found, where) != schema:
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


def _read_jsonl(paths: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for path, line, rows, _ in _line_batches(paths):
        yield rows_batch(rows, schema, f"{path}, line {line}")


def _line_batches(paths: Sequence[Path]) -> Iterator[tuple[Path, int, list[dict[str, object]], int]]:
    """File, number of the first line, rows, bytes."""
    for path in paths:
        with open_bytes(path) as file:
            numbered = enumerate(_checked(file, path), 1)
            while True:
                rows: list[dict[str, object]] = []
                size, first = 0, 0
                for number, line in numbered:
                    if line.strip():
                        first = first or number
                        rows.append(_row(line, path, number))
                        size += len(line)
                    if len(rows) >= _BATCH_ROWS or size >= BATCH_BYTES:
                        break
                if not rows:
                    break
                yield path, first, rows, size


def _checked(file: Iterator[bytes], path: Path) -> Iterator[bytes]:
    try:
        yield from file
    except Damaged as error:
        raise DatasetError(f"{path}: expected whole lines, got: {error}.") from error


def _row(line: bytes, path: Path, number: int) -> dict[str, object]:
    try:
        row = orjson.loads(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
    except ValueError as error:
        raise DatasetError(f"{path}, line {number}: expected JSON, got: {error}. Mend or remove the line.") from error
    if not isinstance(row, dict):
        raise DatasetError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}.")
    return row


def _csv_readers(paths: Sequence[Path], schema: pa.Schema | None) -> Iterator[tuple[Path, pa.csv.CSVStreamingReader]]:
    kinds = {}
    for one in schema or ():
        kinds[one.name] = pa.float32() if pa.types.is_float16(one.type) else one.type
    for path in paths:
        with open_bytes(path) as file:
            head = file.readline()
        delimiter = "\t" if head.count(b"\t") > head.count(b",") else ","
        try:
            with open_bytes(path) as file:
                yield (
                    path,
                    pa.csv.open_csv(
                        file,
                        pa.csv.ReadOptions(block_size=BATCH_BYTES, use_threads=False),
                        pa.csv.ParseOptions(
                            # An empty line is a row of one column without a value.
                            delimiter=delimiter,
                            newlines_in_values=True,
                            ignore_empty_lines=delimiter.encode() in head,
                        ),
                        pa.csv.ConvertOptions(
                            column_types=kinds,
                            null_values=[""],
                            strings_can_be_null=True,
                            quoted_strings_can_be_null=False,
                        ),
                    ),
                )
        except (pa.ArrowException, Damaged) as error:
            told = " ".join(str(error).split())[:300].rstrip(".")
            raise DatasetError(
                f"{path}: expected values of the types that the first {BATCH_BYTES >> 20} MiB have, got: {told}."
            ) from error


def _read_csv(paths: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for path, reader in _csv_readers(paths, schema):
        if reader.schema.names != schema.names:
            raise DatasetError(f"{path}: expected columns {schema.names}, got {reader.schema.names}.")
        yield from itertools.filterfalse(lambda batch: not batch.num_rows, reader)
