"""JSON lines, plain or compressed: one object a line.

As a table, a value that comes after the first 64 MiB and is of another type, or a field of its own, is an error that
names the line, never left out; bytes and numbers that are not finite are refused.

JSON is parsed by orjson, because the reader as a whole is 1.7 times as fast as with `json`; what orjson refuses is
parsed again by `json`, which also reads NaN and integers of any length, and whose messages are better.
"""

import codecs
import gzip
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import orjson
import pyarrow as pa
import zstandard

from forebay.errors import CorruptInputError, DatasetError, ForebayError, UsageError
from forebay.formats.base import Format
from forebay.formats.conversion import ConvertOptions, TableSource, Written
from forebay.formats.detect import HEAD_BYTES
from forebay.formats.external import TOKEN_COLUMNS, read_tail
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
from forebay.formats.records import Record, batched, has_surrogate, shown, shown_text, to_record
from forebay.formats.report import CERTAIN, POSSIBLE, HashSet, Report, Window
from forebay.formats.tables import (
    BATCH_BYTES,
    BATCH_ROWS,
    Encoded,
    Rows,
    contains,
    flatten,
    infer_schema,
    is_beyond_json,
    is_bytes,
    open_for_check,
    open_unpacked,
    refuse_columns,
    rows_batch,
    tensor_shape,
    write_parts,
)
from forebay.formats.text import BOM, split_bytes, split_lines

LINES_ADVICE = "Write --to parquet, or leave the column out."
MAX_VALUES = 2_000_000
_BIG_JSON = 4 << 20
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[,{\[]', re.DOTALL)
_MAX_LINE = 1 << 30
_TAIL_BYTES = 1 << 20
_MIN_TEXT = 64  # Bytes of a line, below which a second line with the same text says nothing.


class Jsonl(Format):
    """Files of JSON lines."""

    name = "jsonl"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".jsonlines")
    is_plain_text = True

    def sniff(self, head: bytes) -> bool:
        line, newline, _ = head.removeprefix(BOM).lstrip(b"\r\n").partition(b"\n")
        if not line.startswith(b"{"):
            return False
        if not newline and len(head) >= HEAD_BYTES:
            return re.match(rb'\{\s*"[^"\\]*"\s*:', line) is not None
        try:
            return isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            return False

    def split(self, file: InputFile, options: ReadOptions) -> Iterator[tuple[int, int, int]]:
        return split_bytes(file)

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        for index, (offset, line, problem) in enumerate(split_lines(split, options)):
            if problem:
                yield Record(index, text=shown(line), problem=problem, location=f"byte {offset}", start=offset)
            else:
                yield parse_line(index, line, options, offset, offset)

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        schema = infer_schema(_line_batches(paths))
        if schema is None:
            raise DatasetError(f"{paths[0]}: expected lines of JSON, got none.")
        columns = schema
        return TableSource(
            self.name, columns, None, lambda: (rows_batch(rows, columns, at) for at, rows, _ in _line_batches(paths))
        )

    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """`compress`: zstd, gzip or nothing, or as the suffix of `out` says."""
        refuse_columns(
            source.schema,
            lambda kind: not contains(kind, lambda inner: is_bytes(inner) or is_beyond_json(inner)),
            "JSONL",
            LINES_ADVICE,
        )
        compressor, suffix = line_compressor(out, options)
        return write_parts(
            source,
            out,
            options,
            ".jsonl" + suffix,
            lambda file, row: Encoded(file, _json_lines, row),
            compressor=compressor,
        )

    def check(self, path: Path, report: Report) -> None:
        """Parse every line, or of a large file the first ones and the last."""
        report.is_rows = True
        num_lines = offset = 0
        hashes = HashSet()
        with open_for_check(path, report) as file:
            for line in _checked_lines(report, file):
                start, offset = offset, offset + len(line)
                text = line.strip()
                if not text:
                    continue
                num_lines += 1
                _check_line(report, line, start, num_lines)
                if len(text) >= _MIN_TEXT:
                    hashes.add(np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), "<u8"))
                if report.is_enough(offset):
                    _check_last_line(report)
                    break
        report.read_bytes = offset
        report.metadata.update(lines=num_lines)
        if not num_lines and not report.findings:
            report.add_finding("empty", "byte 0", "expected lines, got none")
        same, total = hashes.repeated()
        if same:
            evidence = f"{same} of {total} lines repeat an earlier one, byte for byte"
            report.add_finding("duplicate-lines", "lines", evidence, CERTAIN if same * 100 >= total else POSSIBLE)


def parse_line(index: int, line: bytes, options: ReadOptions, offset: int = 0, start: int = -1) -> Record:
    """Return the document in the JSON object of a line at a byte offset."""
    location = f"byte {offset}"
    if too_many_values(line):
        problem = f"more than {MAX_VALUES} values in one object"
        return Record(index, text=shown(line), problem=problem, location=location, start=start)
    try:
        value = orjson.loads(line)
    except ValueError:
        if not line.strip():
            return Record(index, problem="blank", start=start)
        value, problem = parse_slowly(line)
        if problem:
            return Record(index, text=shown(line), problem=problem, location=location, start=start)
    return object_record(index, value, options, location, start)


def too_many_values(data: bytes) -> bool:
    """Return whether JSON holds more values than memory should: each is an object of Python, of 8 to 200 bytes."""
    if len(data) < _BIG_JSON or data.count(b",") + data.count(b"{") + data.count(b"[") <= MAX_VALUES:
        return False
    return next(itertools.islice(_TOKEN.finditer(data), MAX_VALUES, None), None) is not None


def parse_slowly(line: bytes) -> tuple[object, str]:
    """Parse JSON by the standard library: return the value, and what is wrong with the text."""
    try:
        return json.loads(line.decode()), ""
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: {error.reason} at byte {error.start} of the line"
    except RecursionError:
        return None, "not JSON: nested too deeply"
    except ValueError as error:
        return None, f"not JSON: {error}"


def object_record(index: int, value: object, options: ReadOptions, location: str, start: int = -1) -> Record:
    """Return the document in a parsed JSON value."""
    if not isinstance(value, dict):
        problem = f"expected an object, got {type(value).__name__}"
        return Record(index, text=shown_text(str(value)), problem=problem, location=location, start=start)
    record = to_record(index, value, options, start=start)
    if record.problem or (not record.text.isascii() and has_surrogate(record.text)):
        problem = record.problem or "half a surrogate pair in the text"
        return Record(index, record.id, shown_text(record.text), problem=problem, location=location, start=start)
    return record


def _line_batches(paths: Sequence[Path]) -> Iterator[tuple[str, Rows, int]]:
    """The location of the first line, rows, bytes."""
    for path in paths:
        with closing(open_unpacked(path)) as file:
            for batch in batched(_numbered_lines(file, path), lambda entry: len(entry[1]), BATCH_BYTES, BATCH_ROWS):
                rows = [_parse_row(line, path, number) for number, line in batch]
                yield f"{path}, line {batch[0][0]}", rows, sum(len(line) for _, line in batch)


def _numbered_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers."""
    try:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except CorruptInputError as error:
        raise DatasetError(f"{path}: expected complete lines, got: {error}.") from error


def _parse_row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except ValueError as error:
        raise DatasetError(f"{path}, line {number}: expected JSON, got: {error}. Fix or remove the line.") from error
    if not isinstance(row, dict):
        raise DatasetError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}.")
    return row


def line_compressor(out: Path, options: ConvertOptions) -> tuple[Callable[[BinaryIO], Any], str]:
    """Return what compresses a file of lines, and its suffix."""
    name = options.compress or {".gz": "gzip", ".zst": "zstd"}.get(out.suffix, "none")
    if name == "gzip":
        return lambda file: gzip.GzipFile("", "wb", 6, file, mtime=0), ".gz"
    if name == "zstd":
        return lambda file: zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False), ".zst"
    if name == "none":
        return nullcontext, ""
    raise UsageError(f"--compress: expected zstd, gzip or none for lines, got {name!r}.")


def _json_lines(batch: pa.RecordBatch, first_row: int) -> bytes:
    names = batch.schema.names
    columns = [_json_values(name, column, first_row) for name, column in zip(names, batch.columns)]
    return b"".join(orjson.dumps(dict(zip(names, row))) + b"\n" for row in zip(*columns))


def _json_values(name: str, column: pa.Array, first_row: int) -> list[Any]:
    """Values as Python has them; tensors as nested lists."""
    counts, leaves = flatten(column)
    if pa.types.is_floating(leaves.type):
        infinite = np.flatnonzero(~np.isfinite(leaves.drop_null().to_numpy(zero_copy_only=False)))
        if len(infinite):
            row = int(np.searchsorted(np.cumsum(np.maximum(counts, 0)), infinite[0], "right"))
            raise DatasetError(
                f"JSONL: expected finite numbers, got another ({name}, row {first_row + row}). {LINES_ADVICE}"
            )
    shape = tensor_shape(column.type)
    if shape is not None and not column.null_count and not leaves.null_count:
        nested: list[Any] = leaves.to_numpy(zero_copy_only=False).reshape(len(column), *shape).tolist()
        return nested
    if pa.types.is_float16(leaves.type) and not pa.types.is_float16(column.type):
        return [None if row is None else [float(value) for value in row] for row in column.to_pylist()]
    values: list[Any] = (column.cast(pa.float32()) if pa.types.is_float16(column.type) else column).to_pylist()
    return values


def _checked_lines(report: Report, file: BinaryIO) -> Iterator[bytes]:
    offset = 0
    try:
        while line := file.readline(_MAX_LINE):
            offset += len(line)
            yield line
    except ForebayError as error:
        report.add_finding("truncated", f"byte {offset}", str(error))


def _check_line(report: Report, line: bytes, start: int, number: int) -> None:
    if not start and line.startswith(BOM):
        evidence = "expected JSON, got a byte-order mark, which many readers refuse"
        report.add_finding("byte-order-mark", "byte 0", evidence)
        return
    try:
        row = orjson.loads(line)
    except ValueError as error:
        fault = "damaged" if line.endswith(b"\n") else "truncated"
        reason = "zero bytes" if not line.strip(b"\0\n") else str(error)
        evidence = f"expected a JSON value, got {line[:60]!r}: {reason}"
        report.add_finding(fault, f"line {number} (byte {start})", evidence)
        return
    if isinstance(row, dict):
        for name in TOKEN_COLUMNS:
            ids = row.get(name)
            if isinstance(ids, list) and ids and all(type(token) is int and abs(token) < 1 << 62 for token in ids):
                report.add_tokens(Window(str(report.path), 0, np.array(ids, np.int64)))


def _check_last_line(report: Report) -> None:
    """The last line of a plain file that is not read to its end."""
    if "compression" in report.metadata:
        return
    tail = read_tail(report.path, _TAIL_BYTES).rstrip(b"\n")
    line = tail[tail.rfind(b"\n") + 1 :]
    try:
        if len(line) < _TAIL_BYTES - 1:
            orjson.loads(line)
    except ValueError as error:
        offset = report.path.stat().st_size - len(line)
        report.add_finding("truncated", f"byte {offset}", f"the last line is no JSON value: {error}")
