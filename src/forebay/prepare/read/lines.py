"""Text by lines and as a whole: JSONL, JSON, CSV and TSV, plain text, HTML pages.

Hides: where a line that crosses the border of two pieces belongs, lines and values longer than memory should hold,
marks of byte order, and what is done about bytes that are no UTF-8.

JSON is parsed by orjson, because the reader as a whole is 1.7 times as fast as with `json`; what orjson refuses is
shown to `json`, which also reads NaN and integers of any length, and says better what is wrong.
"""

import codecs
import csv
import itertools
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

import orjson

from forebay.formats.detect import find_encoding
from forebay.prepare.documents import Record, strip_turn_marks
from forebay.prepare.read.base import MAX_PIECES, PIECE_BYTES, Format, Piece, ReadOptions, Source
from forebay.prepare.read.fields import keys_of, surrogate_in, to_record
from forebay.prepare.read.http_message import body_text
from forebay.prepare.read.opening import Damaged, Unreadable, open_source, skip_to

_BOM = b"\xef\xbb\xbf"
_SHOWN = 200
_STEP = 1 << 20


def _cut_bytes(source: Source, options: ReadOptions) -> Iterator[tuple[int, int, int]]:
    """A source that may be cut at any byte, in pieces of `PIECE_BYTES`, but at most `MAX_PIECES` of them."""
    step = max(PIECE_BYTES, -(-source.bytes // MAX_PIECES))
    for start in range(0, source.bytes, step):
        stop = min(start + step, source.bytes)
        yield start, stop, stop - start


def _lines(piece: Piece, options: ReadOptions) -> Iterator[tuple[int, bytes, str]]:
    with open_source(piece.sources[0], options) as file:
        yield from lines_of(file, options, piece.start, piece.stop)


def lines_of(
    file: BinaryIO, options: ReadOptions, position: int = 0, stop: int = 0
) -> Iterator[tuple[int, bytes, str]]:
    """Where each line that begins in `[position, stop)` begins (stop 0: to the end), the line, and what is wrong with
    it if it is too long or cut off: then it is its beginning."""
    if position:  # the line that crosses the border is the other piece's
        skip_to(file, position - 1)
        position += _rest_of_line(file) - 1
    while not stop or position < stop:
        line, size, problem, ended = _next_line(file, options.max_document_bytes)
        if size or problem:
            yield position, line.removeprefix(_BOM) if position == 0 else line, problem
        position += size
        if ended:
            return


def _next_line(file: BinaryIO, limit: int) -> tuple[bytes, int, str, bool]:
    """The next line (its beginning if it is too long), its size, what is wrong with it, whether it is the last."""
    line, size = b"", 0
    try:
        line = file.readline(limit + 1)
        size = len(line)
        if line.endswith(b"\n"):
            return line, size, "", False
        size += _rest_of_line(file)  # of the last line of a file there is none; of one that damage cut it raises
    except Damaged as error:
        return line[:_SHOWN], size, str(error), True
    if size > limit:
        problem = f"a line of {size} bytes is longer than max_document_bytes, {limit}"
        return line[:_SHOWN], size, problem, False
    return line, size, "", not line


def _rest_of_line(file: BinaryIO) -> int:
    size = 0
    while part := file.readline(_STEP):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _read_jsonl(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    for place, (position, line, problem) in enumerate(_lines(piece, options)):
        if problem:
            yield Record(place, text=_shown(line), problem=problem, where=f"byte {position}", start=position)
        else:
            yield _parse(place, position, line, options, position)


def _parse(place: int, position: int, line: bytes, options: ReadOptions, start: int = -1) -> Record:
    if too_many_values(line):
        problem = f"more than {_MAX_VALUES} values in one object"
        return Record(place, text=_shown(line), problem=problem, where=f"byte {position}", start=start)
    try:
        value = orjson.loads(line)
    except ValueError:
        if not line.strip():
            return Record(place, problem="blank", start=start)
        value, problem = _parse_slowly(line)
        if problem:
            return Record(place, text=_shown(line), problem=problem, where=f"byte {position}", start=start)
    return _object(place, value, options, f"byte {position}", start)


_BIG_JSON = 4 << 20
_MAX_VALUES = 2_000_000
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[,{\[]', re.DOTALL)


def too_many_values(data: bytes) -> bool:
    """Whether JSON holds more values than memory should: each is an object of Python, of 8 to 200 bytes."""
    if len(data) < _BIG_JSON or data.count(b",") + data.count(b"{") + data.count(b"[") <= _MAX_VALUES:
        return False
    return next(itertools.islice(_TOKEN.finditer(data), _MAX_VALUES, None), None) is not None


def parse_line(place: int, line: bytes, options: ReadOptions) -> Record:
    """The document in one JSON object that stands alone."""
    return _parse(place, 0, line.removeprefix(_BOM), options)


def _parse_slowly(line: bytes) -> tuple[object, str]:
    try:
        text = line.decode()
        return json.loads(text), ""
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: {error.reason} at byte {error.start} of the line"
    except RecursionError:
        return None, "not JSON: nested too deeply"
    except ValueError as error:
        return None, f"not JSON: {error}"


def _object(place: int, value: object, options: ReadOptions, where: str, start: int = -1) -> Record:
    if not isinstance(value, dict):
        problem = f"expected an object, got {type(value).__name__}"
        return Record(place, text=_plain(str(value)), problem=problem, where=where, start=start)
    record = to_record(place, value, options, start=start)
    if record.problem or (not record.text.isascii() and surrogate_in(record.text)):
        problem = record.problem or "half a surrogate pair in the text"
        return Record(place, record.id, _plain(record.text), problem=problem, where=where, start=start)
    return record


def _plain(text: str) -> str:
    """The beginning of a text as something that can be written down."""
    return text[:_SHOWN].encode("utf-8", "replace").decode()


def _shown(line: bytes) -> str:
    return line[:_SHOWN].decode("utf-8", "replace")


def _read_lines(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    for place, (position, line, problem) in enumerate(_lines(piece, options)):
        line = line.rstrip(b"\r\n")
        if not problem and not line.strip():
            yield Record(place, problem="blank", start=position)
        elif problem:
            yield Record(place, text=_shown(line), problem=problem, where=f"byte {position}", start=position)
        else:
            yield whole_record(place, line, f"byte {position}", start=position)


def _read_json(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    """The objects of a list, or one after the other; memory is bounded by the largest.

    What cannot be parsed ends it: nothing says where the next object begins.
    """
    place = -1
    with open_source(piece.sources[0], options) as file:
        try:
            for place, value in enumerate(_values(file, options.max_document_bytes)):
                yield _object(place, value, options, f"value {place}")
        except (ValueError, RecursionError, Damaged) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            yield Record(place + 1, problem=reason, where=f"value {place + 1}")


_BETWEEN = re.compile(r"[\s,]*")


def _values(file: BinaryIO, limit: int) -> Iterator[object]:
    decode, text_of = json.JSONDecoder().raw_decode, codecs.getincrementaldecoder("utf-8-sig")()
    text, at, started, ended, in_list, failure = "", 0, False, False, False, ""
    while True:
        between = _BETWEEN.match(text, at)
        assert between is not None  # it may be empty
        at = between.end()
        if not started and at < len(text):
            started, in_list = True, text[at] == "["
            at += in_list
            continue
        if in_list and text[at : at + 1] == "]":
            return
        if at < len(text) and (ended or text[at] in '{["'):
            try:
                value, at = decode(text, at)
                yield value
                continue
            except ValueError as error:
                failure = f"not JSON: {error}"
        elif at < len(text) and len(text) - at > 64:
            raise ValueError(f"not JSON: expected an object, got {text[at : at + 20]!r}")
        if ended:
            if (failure and at < len(text)) or in_list:
                raise ValueError(failure or "not JSON: it ends early")
            return
        if failure and too_many_values(text[at:].encode("utf-8", "replace")):
            raise ValueError(f"more than {_MAX_VALUES} values in one object")
        if len(text) - at > limit:
            raise ValueError(f"{failure}; or a value longer than max_document_bytes, {limit}")
        data = file.read(max(_STEP, len(text) - at))
        ended = not data
        text, at = text[at:] + text_of.decode(data, ended), 0


def _read_csv(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    """Rows; quoted fields may hold newlines. A row with more or fewer fields than the first is a problem."""
    csv.field_size_limit(options.max_document_bytes)
    wrong: list[str] = []
    lines = _decoded(piece, options, wrong)
    first = next(lines, "")
    rows = csv.reader(itertools.chain([first] if first else [], lines), _dialect(piece.sources[0], options, first))
    names: list[str] | None = None
    places: dict[str, int] = {}
    place = -1
    while True:
        try:
            row: list[str] = next(rows)
            problem = ""
        except StopIteration:
            break
        except csv.Error as error:
            row, problem = [], f"not CSV: {error}"
        if names is None:
            names, places, is_header = _header(row, options, piece.sources[0])
            if is_header:
                continue
        place += 1
        where = f"line {rows.line_num}"
        if wrong or problem:
            yield Record(place, problem=problem or wrong[0], where=where)
            wrong.clear()
        elif not row:
            yield Record(place, problem="blank")
        elif len(row) != len(names):
            problem = f"expected {len(names)} fields, got {len(row)}"
            yield Record(place, text=_plain(row[0]), problem=problem, where=where)
        else:
            yield _row(place, {key: row[index] for key, index in places.items()}, options, where)
    if wrong:
        yield Record(place + 1, problem=wrong[0])


def _decoded(piece: Piece, options: ReadOptions, wrong: list[str]) -> Iterator[str]:
    """Lines as text; what is too long or cut off is left out, and told through `wrong`."""
    for _, line, problem in _lines(piece, options):
        if problem:
            wrong.append(problem)
            yield "\n"
        else:
            yield line.decode("utf-8", "surrogateescape")


def _dialect(source: Source, options: ReadOptions, first: str) -> type[csv.Dialect]:
    told, quote = options.options.get("delimiter"), options.options.get("quote", '"')
    guess = "\t" if ".tsv" in source.path.lower() else max(",\t;|", key=first.count)

    class Dialect(csv.excel):
        delimiter = told if isinstance(told, str) else guess
        quotechar = quote if isinstance(quote, str) and quote else None
        quoting = csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE

    return Dialect


def _header(row: list[str], options: ReadOptions, source: Source) -> tuple[list[str], dict[str, int], bool]:
    """The names of the columns, where those that are wanted stand, and whether the first row is a header."""
    needed, wanted = keys_of(options)
    if all(key.isdigit() for key in needed) and not set(needed) <= set(row):
        places = {key: int(key) for key in needed + [key for key in wanted if key.isdigit()]}
        if max(places.values()) < len(row):
            return [str(index) for index in range(len(row))], places, False
    missing = [key for key in needed if key not in row]
    if missing:
        raise Unreadable(
            f"{source.path}: expected a column {missing[0]!r}, got columns {_plain(', '.join(row))}. Name it with "
            "--text-key; by its number from 0 if the file has no header."
        )
    return row, {key: row.index(key) for key in needed + wanted if key in row}, True


def _row(place: int, row: dict[str, str], options: ReadOptions, where: str) -> Record:
    if options.messages_key in row:
        value, problem = _parse_slowly(row[options.messages_key].encode("utf-8", "surrogateescape"))
        if problem:
            return Record(place, problem=problem, where=where)
        return _object(place, {**row, options.messages_key: value}, options, where)
    record = to_record(place, row, options)
    if not record.text.isascii() and surrogate_in(record.text):
        return Record(place, record.id, _plain(record.text), problem="not UTF-8", where=where)
    return record


def _read_files(piece: Piece, options: ReadOptions, html: bool = False) -> Iterator[Record]:
    yield from (_file(place, source, options, html) for place, source in enumerate(piece.sources))


def _file(place: int, source: Source, options: ReadOptions, html: bool) -> Record:
    limit = options.max_document_bytes
    try:
        with open_source(source, options) as file:
            data = file.read(limit + 1)
            if len(data) <= limit:
                data += file.read(1)  # nothing, or the damage that ended it
    except (Damaged, Unreadable) as error:
        return Record(place, problem=str(error), where=source.name, failed=isinstance(error, Unreadable))
    if len(data) > limit:
        problem = f"larger than max_document_bytes, {limit}. For one document a line force the format `lines`"
        return Record(place, text=_shown(data), problem=problem, where=source.name)
    record = whole_record(place, data, "", html)
    if not record.problem or options.encoding != "auto":
        return record
    if html:
        return Record(place, text=strip_turn_marks(body_text(data, "", True)), html=True)
    encoding = find_encoding(data)
    return whole_record(place, data.decode(encoding, "replace").encode(), "") if encoding else record


def whole_record(place: int, data: bytes, where: str, html: bool = False, start: int = -1) -> Record:
    """The document that these bytes are; `where` is said of what is no UTF-8."""
    try:
        return Record(place, text=strip_turn_marks(data.decode("utf-8-sig")), html=html, start=start)
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: {error.reason} at byte {error.start}"
        return Record(place, text=_shown(data), problem=problem, where=where, start=start)


JSONL = Format("jsonl", _read_jsonl, _cut_bytes)
JSON = Format("json", _read_json)
CSV = Format("csv", _read_csv)
HTML = Format("html", partial(_read_files, html=True), grouped=True)
TEXT = Format("text", _read_files, grouped=True)
LINES = Format("lines", _read_lines, _cut_bytes)
LINE_FORMATS = (JSONL, JSON, HTML, CSV, TEXT, LINES)
