"""Comma- and tab-separated values, plain or compressed, in the dialects of Excel, PowerShell, MySQL and PostgreSQL.

The delimiter is the one of comma, tab, semicolon and bar that makes most fields of the first line, or as a line `sep=;`
says. Backslashes escape if the first 64 KiB have a field `\\N`, which is a null, or a quote within quotes that only a
backslash explains; else quotes are doubled. The first line names the columns, and is left out where it comes again.

As a table, an empty field without quotes is missing, and nothing else is; a value that comes after the first 16 MiB and
is of another type is an error; bytes and lists are refused.
"""

import csv
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.csv

from forebay.errors import CorruptInputError, DatasetError, UnreadableInputError, error_text
from forebay.formats.base import Format
from forebay.formats.columns import common_schema
from forebay.formats.conversion import ConvertOptions, TableSource
from forebay.formats.detect import SAMPLE_BYTES
from forebay.formats.inputs import ALL_FIELDS, InputFile, InputSplit, ReadOptions
from forebay.formats.jsonl import object_record, parse_json
from forebay.formats.records import Record, has_surrogate, keys_of, shown_text, to_record
from forebay.formats.tables import BATCH_BYTES, open_unpacked
from forebay.formats.text import split_lines

_PREAMBLE = re.compile(r"(?:sep=(.)|#TYPE .*)?(?:\r?\n|$)", re.IGNORECASE)
"""Lines before the first: of Excel, of PowerShell, and empty ones."""
_LONE_CR = re.compile(r"(?<=\r)(?!\n)")
_ESCAPED = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "0": "\0"}
_END_OF_COPY = b"\\."


class Csv(Format):
    """CSV and TSV files; as a table the first line names the columns."""

    name = "csv"
    suffixes = (".csv", ".tsv")
    is_plain_text = True

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        """Quoted fields may hold newlines. A row with more or fewer fields than the first is malformed."""
        csv.field_size_limit(options.max_document_bytes)
        problems: list[tuple[int, str]] = []  # Each problem comes with the number of its line.
        lines = _decoded_lines(split, options, problems)
        head, size = list[str](), 0
        for line in lines:
            head.append(line)
            size += len(line)
            if size > SAMPLE_BYTES:
                break
        rows, num_preambles = _rows(head, lines, split.files[0].path)
        names = None
        positions: dict[str, int] = {}
        index = -1
        while True:
            try:
                row: list[str] = next(rows)
                problem = ""
            except StopIteration:
                break
            except csv.Error as error:
                row, problem = [], f"not CSV: {error}"
            if names is None:
                names, positions, is_header = header([name.strip() for name in row], options, split.files[0])
                if is_header:
                    continue
            index += 1
            line_number = rows.line_num + num_preambles
            location = f"line {line_number}"
            if problem or (problems and problems[0][0] <= line_number):
                unread = -("unexpected end" in problem)  # A quote is not closed.
                yield Record(index, problem=problem or problems[0][1], location=location, unread=unread)
                problems[:] = [entry for entry in problems if entry[0] > line_number]
            elif not row or row == names:
                yield Record(index, problem="blank")
            elif len(row) != len(names):
                yield Record(
                    index,
                    text=shown_text(row[0]),
                    problem=f"expected {len(names)} fields, got {len(row)}",
                    location=location,
                )
            else:
                yield _row_record(index, {key: row[i] for key, i in positions.items()}, options, location)
        if problems:
            yield Record(index + 1, problem=problems[0][1])

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        columns = common_schema(paths[:1], [reader.schema for _, reader in _csv_readers(paths[:1], ())])
        return TableSource(self.name, columns, None, lambda: _read_batches(paths, columns))


def first_row(text: str, path: str) -> list[str]:
    """Return the fields of the first row of a file, by its beginning; none if that is no CSV."""
    with suppress(csv.Error):
        return [name.strip() for name in next(_rows([*io.StringIO(text, newline="")], iter(()), path)[0], ())]
    return []


def _rows(head: list[str], lines: Iterator[str], path: str) -> tuple[Any, int]:
    """Return a reader of the rows of lines, the first of which, `head`, tell the dialect; how many are before them."""
    delimiter, num_preambles = "\t" if ".tsv" in path.lower() else "", 0
    while head and (match := _PREAMBLE.match(head[0])):
        delimiter = match[1] or delimiter
        num_preambles += 1
        del head[0]
    first, sample = head[0] if head else "", "".join(head)
    delimiter = delimiter or max(",\t;|", key=lambda char: len(next(csv.reader([first], delimiter=char), ())))
    border = re.escape(delimiter)
    null = re.compile(rf"(?<![^{border}])\\N(?={border}|\r?\n|$)")
    if not null.search(sample.replace("\n", f"\n{delimiter}")) and not re.search(rf'\\"(?![{border}"\r\n])', sample):
        return csv.reader(itertools.chain(head, lines), delimiter=delimiter, strict=True), num_preambles

    def unescape(match: re.Match[str]) -> str:
        if delimiter == "\t":
            return "\\" + _ESCAPES.get(match[1], match[1])
        return match[0] if match[1] in f'"\\{delimiter}' else "\\" + match[0]

    escaped = (_ESCAPED.sub(unescape, null.sub("", line)) for line in itertools.chain(head, lines))
    # MySQL and PostgreSQL quote no tab-separated values.
    quoting: Literal[0, 3] = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    return csv.reader(escaped, delimiter=delimiter, escapechar="\\", quoting=quoting, strict=True), num_preambles


def _decoded_lines(split: InputSplit, options: ReadOptions, problems: list[tuple[int, str]]) -> Iterator[str]:
    number = 0
    for _, line, problem in split_lines(split, options):
        number += 1
        if problem:
            problems.append((number, problem))
            yield "\n"
        elif line.rstrip() != _END_OF_COPY:
            text = line.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
            pieces = _LONE_CR.split(text) if "\r" in text[:-2] else [text]
            number += len(pieces) - 1
            yield from pieces


def header(row: list[str], options: ReadOptions, file: InputFile) -> tuple[list[str], dict[str, int], bool]:
    """Return the names of the columns, the positions of those to read, and whether the row has the names.

    Raises UnreadableInputError where a column that is required is missing.
    """
    required, optional = keys_of(options)
    if options.text_keys and required == list(options.text_keys):
        keys = row if ALL_FIELDS in required else [key for key in required if key in row]
        required, optional = keys or required, optional
    is_numbered = set(required) <= set(row) and all(name.isdigit() for name in row if name)  # pandas numbers columns.
    if all(key.isdigit() for key in required) and not is_numbered:
        positions = {key: int(key) for key in required + [key for key in optional if key.isdigit()]}
        if max(positions.values()) < len(row):
            return [str(index) for index in range(len(row))], positions, False
    missing = [key for key in required if row.count(key) != 1]
    if missing and missing[0] in row:
        raise UnreadableInputError(f"{file.path}: expected one column {missing[0]!r}, got {row.count(missing[0])}.")
    if missing:
        raise UnreadableInputError(
            f"{file.path}: expected a column {missing[0]!r}, got columns {shown_text(', '.join(row))}. Name it with "
            "text_key (--set read.text_key=NAME); by its number from 0 if the file has no header."
        )
    return row, {key: row.index(key) for key in required + optional if key in row}, True


def _row_record(index: int, row: dict[str, str], options: ReadOptions, location: str) -> Record:
    if options.messages_key in row:
        cell = row[options.messages_key].strip() or "null"
        value, problem = parse_json(cell.encode("utf-8", "surrogateescape"))
        if problem:
            return Record(index, problem=problem, location=location)
        return object_record(index, {**row, options.messages_key: value}, options, location)
    record = to_record(index, row, options)
    if has_surrogate(record.text):
        return Record(index, record.id, shown_text(record.text), problem="not UTF-8", location=location)
    return record


def _read_batches(paths: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for path, reader in _csv_readers(paths, schema):
        if reader.schema.names != schema.names:
            raise DatasetError(f"{path}: expected columns {schema.names}, got {reader.schema.names}.")
        yield from (batch for batch in reader if batch.num_rows)


def _csv_readers(paths: Sequence[Path], schema: Any) -> Iterator[tuple[Path, pa.csv.CSVStreamingReader]]:
    types = {field.name: field.type for field in schema}
    for path in paths:
        with closing(open_unpacked(path)) as file:
            head = file.readline()
        delimiter = "\t" if head.count(b"\t") > head.count(b",") else ","
        # An empty line is a row of one column without a value.
        parse = pa.csv.ParseOptions(
            delimiter=delimiter, newlines_in_values=True, ignore_empty_lines=delimiter.encode() in head
        )
        convert = pa.csv.ConvertOptions(
            column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        )
        try:
            with closing(open_unpacked(path)) as file:
                read = pa.csv.ReadOptions(block_size=BATCH_BYTES, use_threads=False)
                yield path, pa.csv.open_csv(file, read, parse, convert)
        except (pa.ArrowException, CorruptInputError) as error:
            raise DatasetError(
                f"{path}: expected values of the types that the first {BATCH_BYTES >> 20} MiB have, got: "
                f"{error_text(error)}."
            ) from error
