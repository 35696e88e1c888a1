"""JSON: lines, plain or compressed, one object a line; and files of a list of objects, or of one after the other.

As a table, a value that comes after the first 64 MiB and is of another type, or a field of its own, is an error that
names the line, never left out; bytes and numbers that are not finite are refused. What orjson refuses is parsed again
by `json`, which also reads NaN and integers of any length, and whose messages are better.

Also TOML files that describe requests to a JSON API: `forebay prepare` fetches what they name as JSON lines.
"""

import codecs
import io
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from forebay.errors import CorruptInputError, DatasetError, ForebayError, UsageError
from forebay.formats import tables
from forebay.formats.base import Format
from forebay.formats.conversion import ConvertOptions, Position, Positioned, TableSource, Written
from forebay.formats.detect import HEAD_BYTES
from forebay.formats.inputs import InputSplit, ReadOptions, open_input
from forebay.formats.records import Record, batched, has_surrogate, malformed, shown_text, to_record
from forebay.formats.report import Report
from forebay.formats.text import BOM, LineFormat, split_lines

_ADVICE = "Write --to parquet, or leave the column out."
MAX_VALUES = 2_000_000
_BIG_JSON = 4 << 20
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[,{\[]', re.DOTALL)
_MAX_LINE = 1 << 30
_decode = json.JSONDecoder().raw_decode
_STEP = 1 << 20
_BETWEEN = re.compile(r"[\s,\x1e\ufeff]*")
_SEVERAL = "not JSON: Extra data"
_BEFORE = "\ufeff\x1e"  # A mark of byte order where files were joined, and what begins a record of RFC 7464.


class Jsonl(LineFormat):
    """Files of JSON lines."""

    name = "jsonl"
    suffixes: tuple[str, ...] = (".jsonl", ".ndjson", ".jsonlines")

    def sniff(self, head: bytes) -> bool:
        text = head.removeprefix(BOM).lstrip(b"\r\n").decode("utf-8", "replace")
        line, newline, _ = text.partition("\n")
        if not re.match(r"\{\s*[\"}]", line):
            return False
        if not newline and len(head) >= HEAD_BYTES:
            return re.match(r'\{\s*"[^"\\]*"\s*:', line) is not None
        try:
            return _decode(text)[1] == len(line.rstrip())
        except json.JSONDecodeError as error:
            return bool(newline) and error.pos <= len(line)  # A damaged line, and no object of several lines.
        except RecursionError:
            return bool(newline)

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        for index, (offset, line, problem) in enumerate(split_lines(split, options)):
            location = f"byte {offset}"
            record = None if problem else parse_line(index, line, options, offset, offset)
            if record is None:
                yield malformed(index, line, problem, location, offset)
            elif not record.problem.startswith(_SEVERAL):
                yield record
            else:  # Several objects, or lines that end in CR alone.
                try:
                    for value in values(io.BytesIO(line), options.max_document_bytes):
                        yield object_record(index, value, options, location, offset)
                        offset = -1
                except (ValueError, RecursionError) as error:
                    yield malformed(index, line, f"a line of several values: {error}", location)

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        schema = tables.infer_schema((lines.location, lines.rows, lines.num_bytes) for lines in _line_batches(paths))
        if schema is None:
            raise DatasetError(f"{paths[0]}: expected lines of JSON, got none.")
        columns = schema

        def read(position: Position | None) -> Positioned[pa.RecordBatch]:
            for lines in _line_batches(paths, position):
                yield lines.position, tables.rows_batch(lines.rows, columns, lines.location)

        return TableSource(self.name, columns, None, lambda: (batch for _, batch in read(None)), batches_from=read)

    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """`compress`: zstd, gzip or nothing, or as the suffix of `out` says."""
        tables.refuse_columns(
            source.schema, lambda kind: tables.is_bytes(kind) or tables.is_beyond_json(kind), "JSONL", _ADVICE
        )
        return tables.write_parts(
            source, out, options, ".jsonl", partial(tables.Encoded, encode=_json_lines), packs=True
        )

    def check(self, path: Path, report: Report) -> None:
        """Parse every line, or of a large file the first ones."""
        num_lines = offset = 0
        try:
            with tables.open_for_check(path, report) as file:
                while (line := file.readline(_MAX_LINE)) and not report.is_enough(offset):
                    num_lines += bool(line.strip())
                    if line.strip() and (problem := parse_json(line if offset else line.removeprefix(BOM))[1]):
                        fault = "damaged" if line.endswith(b"\n") else "truncated"
                        report.add_finding(fault, f"line {num_lines} (byte {offset})", problem)
                    offset += len(line)
        except ForebayError as error:
            report.add_finding("truncated", f"byte {offset}", str(error))
        report.read_bytes = offset
        report.add_count("lines", num_lines)


def parse_line(index: int, line: bytes, options: ReadOptions, offset: int = 0, start: int = -1) -> Record:
    """Return the document in the JSON object of a line at a byte offset."""
    location = f"byte {offset}"
    is_large = too_many_values(line)
    value, problem = (None, f"more than {MAX_VALUES} values in one object") if is_large else parse_json(line)
    if problem and not line.strip():
        return Record(index, problem="blank", start=start)
    if problem:
        return malformed(index, line, problem, location, start)
    if isinstance(value, dict) and isinstance(value.get(options.id_key), float):
        digits = json.loads(line, parse_float=str, parse_int=str)[options.id_key]  # A large integer is a float, too.
        value[options.id_key] = digits
    return object_record(index, value, options, location, start)


def values(file: BinaryIO, limit: int) -> Iterator[object]:
    """Yield the values of JSON one after the other, and those in its lists. Raises ValueError where it is damaged."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text, offset, is_started, is_ended, in_list, failure = "", 0, False, False, False, ""
    while True:
        between = _BETWEEN.match(text, offset)
        assert between is not None  # It may be empty.
        offset = between.end()
        if not is_started and offset < len(text):
            is_started, in_list = True, text[offset] == "["
            offset += in_list
            continue
        if in_list and text[offset : offset + 1] == "]":
            is_started, in_list, offset = False, False, offset + 1
            continue
        if offset < len(text) and (is_ended or text[offset] in '{["'):
            try:
                value, offset = _decode(text, offset)
                yield value
                continue
            except ValueError as error:
                failure = f"not JSON: {error}"
        elif offset < len(text) and len(text) - offset > 64:
            raise ValueError(f"not JSON: expected an object, got {text[offset : offset + 20]!r}")
        if is_ended:
            if (failure and offset < len(text)) or in_list:
                raise ValueError(failure or "not JSON: it ends early")
            return
        if failure and too_many_values(text[offset:].encode("utf-8", "replace")):
            raise ValueError(f"more than {MAX_VALUES} values in one object")
        if len(text) - offset > limit:
            raise ValueError(f"{failure}; or a value longer than max_document_bytes, {limit}")
        data = file.read(max(_STEP, len(text) - offset))
        is_ended = not data
        text, offset = text[offset:] + decoder.decode(data, is_ended), 0


def too_many_values(data: bytes) -> bool:
    """Return whether JSON holds more values than memory should: each is an object of Python, of 8 to 200 bytes."""
    if len(data) < _BIG_JSON or data.count(b",") + data.count(b"{") + data.count(b"[") <= MAX_VALUES:
        return False
    return next(itertools.islice(_TOKEN.finditer(data), MAX_VALUES, None), None) is not None


def parse_json(line: bytes) -> tuple[object, str]:
    """Return the value of JSON, and what is wrong with the text."""
    try:
        return orjson.loads(line), ""
    except ValueError:
        pass  # `json` reads more, and its messages are better.
    try:
        return json.loads(line.decode().lstrip(_BEFORE)), ""
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: {error.reason} at byte {error.start} of the line"
    except RecursionError:
        return None, "not JSON: nested too deeply"
    except ValueError as error:
        return None, f"not JSON: {error}"


def object_record(index: int, value: object, options: ReadOptions, location: str, start: int = -1) -> Record:
    """Return the document in a parsed JSON value."""
    if not isinstance(value, dict):
        return Record(
            index,
            text=shown_text(str(value)),
            problem=f"expected an object, got {type(value).__name__}",
            location=location,
            start=start,
        )
    record = to_record(index, value, options, start=start)
    if record.missing:
        return replace(record, location=location)
    if record.problem or has_surrogate(record.text):
        problem = record.problem or "half a surrogate pair in the text"
        return Record(index, record.id, shown_text(record.text), problem=problem, location=location, start=start)
    return record


class _Lines(NamedTuple):
    location: str
    rows: tables.Rows
    num_bytes: int
    position: Position | None  # The number of the file, a byte in it, and the number of the line that begins there.


def _line_batches(paths: Sequence[Path], position: Position | None = None) -> Iterator[_Lines]:
    first_file, first_byte, first_line = position or (0, 0, 1)
    for index, path in enumerate(paths[first_file:], first_file):
        start, line = (first_byte, first_line) if index == first_file else (0, 1)
        with closing(tables.open_unpacked(path)) as file:
            is_seekable = file.seekable()
            if start:
                file.seek(start)
            lines = _numbered_lines(file, start, line)
            try:
                for batch in batched(lines, lambda entry: len(entry[2]), tables.BATCH_BYTES, tables.BATCH_ROWS):
                    offset, number, _ = batch[0]
                    rows = [_parse_row(line, path, number) for _, number, line in batch]
                    slot = [index, offset, number] if is_seekable or not offset else None
                    yield _Lines(f"{path}, line {number}", rows, sum(len(line) for _, _, line in batch), slot)
            except CorruptInputError as error:
                raise DatasetError(f"{path}: expected complete lines, got: {str(error).rstrip('.')}.") from error


def _numbered_lines(file: BinaryIO, offset: int, first: int) -> Iterator[tuple[int, int, bytes]]:
    for number, line in enumerate(file, first):
        if line.strip():
            yield offset, number, line.removeprefix(BOM) if number == 1 else line
        offset += len(line)


def _parse_row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except ValueError as error:
        raise DatasetError(f"{path}, line {number}: expected JSON, got: {error}. Fix or remove the line.") from error
    if not isinstance(row, dict):
        raise DatasetError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}.")
    return row


def _json_lines(batch: pa.RecordBatch, first_row: int) -> bytes:
    names = batch.schema.names
    columns = [json_values(name, column, first_row) for name, column in zip(names, batch.columns)]
    return b"".join(orjson.dumps(dict(zip(names, row))) + b"\n" for row in zip(*columns))


def json_values(name: str, column: pa.Array, first_row: int) -> list[Any]:
    """Return the values of a column that JSON has. Raises DatasetError for numbers that are not finite."""
    counts, leaves = tables.flatten(column)
    if pa.types.is_floating(leaves.type):
        infinite = np.flatnonzero(~np.isfinite(leaves.drop_null().to_numpy(zero_copy_only=False)))
        if len(infinite):
            row = int(np.searchsorted(np.cumsum(np.maximum(counts, 0)), infinite[0], "right"))
            position = f"{name}, row {first_row + row}"
            raise DatasetError(f"JSON: expected finite numbers, got infinity or NaN ({position}). {_ADVICE}")
    shape = tables.tensor_shape(column.type)
    if shape is not None and not column.null_count and not leaves.null_count:
        nested: list[Any] = leaves.to_numpy(zero_copy_only=False).reshape(len(column), *shape).tolist()
        return nested
    if pa.types.is_float16(leaves.type) and not pa.types.is_float16(column.type):
        return [None if row is None else [float(value) for value in row] for row in column.to_pylist()]
    values: list[Any] = (column.cast(pa.float32()) if pa.types.is_float16(column.type) else column).to_pylist()
    return values


class Json(Format):
    """Files of JSON that are not lines."""

    name = "json"
    suffixes = (".json",)
    is_plain_text = True

    def sniff(self, head: bytes) -> bool:
        is_object = re.match(rb'[\s\x1e]*(\[\s*)?\{\s*("|$)', head.removeprefix(BOM)) is not None
        return is_object and not Jsonl().sniff(head)

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        """What cannot be parsed ends a file: nothing tells where the next object begins."""
        index = -1
        with open_input(split.files[0], options) as file:
            try:
                for index, value in enumerate(values(file, options.max_document_bytes)):
                    yield object_record(index, value, options, f"value {index}")
            except (ValueError, RecursionError, CorruptInputError) as error:
                reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                yield Record(index + 1, problem=reason, location=f"value {index + 1}", unread=-1)


class ApiRequest(Format):
    """A request to a JSON API. Reading it as text raises: it has to be fetched first."""

    name = "api"
    suffixes = (".api.toml",)

    def sniff(self, head: bytes) -> bool:
        # A text may show such a file; this one begins as TOML does, after comments.
        return (
            re.match(rb"(?:[ \t\r]*(?:#[^\n]*)?\n)*[ \t]*(?:\[|[\w.-]+\s*=)", head.removeprefix(BOM)) is not None
            and re.search(rb"(?m)^(?:url|preset)\s*=\s*\"", head) is not None
            and re.search(rb"(?m)^(?:preset|items|next)\s*=\s*\"", head) is not None
        )

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        path = split.files[0].path
        raise UsageError(f"{path}: describes an API. Name it NAME.api.toml and run `forebay prepare` on it.")
