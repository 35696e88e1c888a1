"""Plain text: one document a file (`text`), or one a line (`lines`); and the lines of any file, for other formats.

Hides: which split a line belongs to that crosses its border, lines longer than memory should hold, byte-order marks,
and bytes that are not UTF-8.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import BinaryIO

from forebay.errors import CorruptInputError, UnreadableInputError
from forebay.formats.base import Format
from forebay.formats.encodings import find_encoding
from forebay.formats.inputs import (
    MAX_SPLITS,
    SPLIT_BYTES,
    Extents,
    InputFile,
    InputSplit,
    ReadOptions,
    open_input,
    skip_to,
)
from forebay.formats.records import SHOWN_CHARS, Record, malformed, strip_turn_marks

BOM = b"\xef\xbb\xbf"
_STEP = 1 << 20


class Text(Format):
    """Files of plain text, each a document."""

    name = "text"
    suffixes = (".txt", ".text", ".md", ".rst")
    is_plain_text = True
    is_grouped = True

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        for index, file in enumerate(split.files):
            yield read_document(index, file, options)[1]


class LineFormat(Format):
    """A format of text whose documents are lines: a line is of the part in which it begins."""

    is_plain_text = True
    is_divisible = True

    def split(self, file: InputFile, options: ReadOptions) -> Extents:
        return split_bytes(file)

    def divide(self, file: InputFile, options: ReadOptions, borders: Sequence[int]) -> list[InputSplit | None]:
        return [
            InputSplit((replace(file, extent=(max(0, start - 1), stop)),), start, stop, stop - start)
            for start, stop in pairwise(borders)
        ]


class Lines(LineFormat):
    """Files of plain text, each line a document; only used where a user forces it."""

    name = "lines"

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        for index, (offset, line, problem) in enumerate(split_lines(split, options)):
            location = f"byte {offset}"
            line = line.rstrip(b"\r\n")
            if problem:
                yield malformed(index, line, problem, location, offset)
            elif not line.strip():
                yield Record(index, problem="blank", start=offset)
            else:
                yield document_of(index, line, location, start=offset)


def split_bytes(file: InputFile) -> Extents:
    """Yield splits of a file that may be divided at any byte, of `SPLIT_BYTES`, but at most `MAX_SPLITS` of them."""
    step = max(SPLIT_BYTES, -(-file.bytes // MAX_SPLITS))
    for start in range(0, file.bytes, step):
        stop = min(start + step, file.bytes)
        yield start, stop, stop - start


def split_lines(split: InputSplit, options: ReadOptions) -> Iterator[tuple[int, bytes, str]]:
    """Yield the lines that begin in a split, as `lines_of` does."""
    with open_input(split.files[0], options) as file:
        yield from lines_of(file, options, split.start, split.stop)


def lines_of(file: BinaryIO, options: ReadOptions, offset: int = 0, stop: int = 0) -> Iterator[tuple[int, bytes, str]]:
    """Yield (offset, line, problem) of each line that begins in `[offset, stop)` (stop 0: to the end).

    A line with a problem, as it is too long or cut off, is its beginning.
    """
    if offset:  # The line that crosses the border is of the split before.
        skip_to(file, offset - 1)
        offset += skip_line(file) - 1
    while not stop or offset < stop:
        line, size, problem, is_last = _next_line(file, options.max_document_bytes)
        if size or problem:
            yield offset, line.removeprefix(BOM) if offset == 0 else line, problem
        offset += size
        if is_last:
            return


def _next_line(file: BinaryIO, limit: int) -> tuple[bytes, int, str, bool]:
    """The next line (its beginning if it is too long), its size, what is wrong with it, whether it is the last."""
    line, size = b"", 0
    try:
        line = file.readline(limit + 1)
        size = len(line)
        if line.endswith(b"\n"):
            return line, size, "", False
        size += skip_line(file)  # Nothing after the last line of a file; after damage it raises.
    except CorruptInputError as error:
        return line[:SHOWN_CHARS], size, str(error), True
    if size > limit:
        return line[:SHOWN_CHARS], size, f"a line of {size} bytes is longer than max_document_bytes, {limit}", False
    return line, size, "", not line


def skip_line(file: BinaryIO) -> int:
    """Skip the rest of a line; returns its size."""
    size = 0
    while part := file.readline(_STEP):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def read_document(index: int, file: InputFile, options: ReadOptions, html: bool = False) -> tuple[bytes, Record]:
    """Return the bytes of a file that is one document, and its record; no bytes where they cannot be read."""
    data, fault = read_data(index, file, options)
    return data, fault or decoded_document(index, data, options, "", html)


def decoded_document(index: int, data: bytes, options: ReadOptions, location: str, html: bool) -> Record:
    """Return `document_of` bytes that may be in an encoding without a label."""
    record = document_of(index, data, location, html)
    if record.problem and not html and options.encoding == "auto" and (encoding := find_encoding(data)):
        return document_of(index, data.decode(encoding, "replace").encode())
    return record


def read_data(index: int, file: InputFile, options: ReadOptions) -> tuple[bytes, Record | None]:
    """Return the bytes of a file that is one document, or no bytes and a record that says what is wrong."""
    limit = options.max_document_bytes
    try:
        with open_input(file, options) as stream:
            data = stream.read(limit + 1)
            if len(data) <= limit:
                data += stream.read(1)  # Nothing, or the damage that ended it.
    except (CorruptInputError, UnreadableInputError) as error:
        failed = isinstance(error, UnreadableInputError)
        return b"", Record(index, problem=str(error), location=file.name, failed=failed)
    if len(data) > limit:
        problem = f"larger than max_document_bytes, {limit}"
        problem += ". For one document a line force the format `lines`" if file.format == "text" else ""
        return b"", malformed(index, data, problem, file.name)
    return data, None


def document_of(index: int, data: bytes, location: str = "", html: bool = False, start: int = -1) -> Record:
    """Return the document that these bytes are; malformed, with `location`, if they are not UTF-8."""
    if b"\n" + BOM in data:  # Files were joined.
        data = data.replace(b"\n" + BOM, b"\n")
    try:
        text = strip_turn_marks(data.decode("utf-8-sig"))
        if "\0" in text[:1] and not text.strip("\0 \t\r\n"):
            return Record(index, problem="NUL bytes alone", location=location, start=start)
        return Record(index, text=text, html=html, start=start)
    except UnicodeDecodeError as error:
        return malformed(index, data, f"not UTF-8: {error.reason} at byte {error.start}", location, start)
