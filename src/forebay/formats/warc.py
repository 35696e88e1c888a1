"""Crawls: WARC, WET and ARC files as documents.

The framing is our own, because fastwarc and warcio lose good records of damaged archives and read no ARC
(docs/explanation/decisions/0004-html-extraction.md). Where a record's length and the beginning of the next record
disagree, the beginning decides; after a damaged gzip member reading continues at the next. Memory: the largest record,
at most max_document_bytes, and 1 MiB. Requests, metadata, revisits, DNS, images and other statuses are no documents.
"""

import re
import zlib
from collections import Counter, deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import BinaryIO

from forebay.errors import CorruptInputError
from forebay.formats.base import Format
from forebay.formats.encodings import binary_kind
from forebay.formats.http_message import body_text, http_complete, is_html, media_type, parse_headers, parse_http
from forebay.formats.inputs import InputFile, InputSplit, OutputBudget, ReadOptions, open_input
from forebay.formats.records import Record, column_values
from forebay.storage.compression import MIN_UNPACKED_BYTES, CountedReader, unpack_members

MAX_HEAD_BYTES = 64 << 10
MAX_STRAY_BYTES = 64 << 10
"""The next record may begin this far past a record's length; bytes beyond that belong to no record."""

_WARC = re.compile(rb"WARC/\d\.\d{1,2}[ \t\r]{0,8}\n(?=[A-Za-z-]{1,64}[ \t]{0,8}:)")
_ARC = re.compile(rb"[a-z][a-z0-9+.-]{1,20}:[^\n]{10,8000}\n")
_NEXT = re.compile(rb"\n(?=" + _WARC.pattern + rb"|" + _ARC.pattern + rb")")
_HEAD_END = re.compile(rb"\n(?:\r{0,4}\n|(?=" + _WARC.pattern + rb"))")
"""An empty line; or the first of another record, where the head has none."""
_DATE = re.compile(rb"\d{8,20}")
_ADDRESS = re.compile(rb"[0-9a-fA-F.:]{2,45}")
_BLANK = b"\r\n"
_COLUMNS = {"date": "warc-date", "language": "warc-identified-content-language"}
"""Names of columns for headers of a record; any other header is a column under its own name."""
_ABSENT = re.compile("warcinfo|revisit|HTTP status")
"""Records beside those of pages; a crawl may hold no others."""
_FOR_PROGRAMS = re.compile(r"/(robots|ads|app-ads)\.txt$|\.(htc|xspf)$", re.IGNORECASE)
"""URLs of files for programs, whatever their type says."""
_NO_TEXT = re.compile(
    _FOR_PROGRAMS.pattern + r"|\.(atom|css|ico|js|json|m3u8?|map|mjs|pls|rss|svg|vtt|xml|xsl)$", re.IGNORECASE
)
"""The same of files that a server calls plain text."""


_ARC_START = re.compile(rb"[a-z][a-z0-9+.-]{1,20}:[^\n]{1,3000} [0-9a-fA-F.:]{2,45} \d{8,20} [^\n]{1,900}\n")


class Warc(Format):
    """WARC, WET and ARC files."""

    name = "warc"
    suffixes: tuple[str, ...] = (".warc", ".arc")

    def sniff(self, head: bytes) -> bool:
        return _WARC.match(head) is not None or _ARC_START.match(head) is not None

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        index = 0
        budget = OutputBudget(split, options)
        for file in split.files:
            has_document, reasons = False, Counter[str]()
            for raw in read_raw(file, options):
                reason = yield from document_of(raw, index, options, budget)
                has_document = has_document or not reason
                if reason and len(reasons) < 100:
                    reasons[reason] += 1
                index += 1
            if not has_document and not all(map(_ABSENT.match, reasons)):
                problem = (
                    "expected responses of HTML or plain text, got none: "
                    f"{'; '.join(f'{n:,} × {reason}' for reason, n in reasons.most_common(5))}"
                )
                if reasons["metadata record"] and reasons.keys() <= {"metadata record", "warcinfo record"}:
                    problem += ". A WAT file has no text of its pages: name the crawl's WARC or WET file of that number"
                yield Record(index, problem=problem, failed=True)


class Wet(Warc):
    """The same under the name of the suffix: `conversion` records are documents of plain text."""

    name = "wet"
    suffixes = (".warc.wet", ".wet")

    def sniff(self, head: bytes) -> bool:
        return False


@dataclass(frozen=True)
class RawRecord:
    """One record of an archive: its headers with names in lower case and its block, or what is wrong with it."""

    location: str
    headers: dict[str, str]
    block: bytes
    problem: str = ""

    @property
    def kind(self) -> str:
        """`response`, `conversion` …"""
        return self.headers.get("warc-type", "").lower()


def read_raw(file: InputFile, options: ReadOptions) -> Iterator[RawRecord]:
    """Yield every record of an archive in order, and one with a problem for each damaged place."""
    is_gzip = file.compression == "gz"
    with open_input(replace(file, compression="") if is_gzip else file, options) as stream:
        chunks = _members(stream, options.max_unpacked_ratio) if is_gzip else _plain(stream)
        yield from _Archive(chunks, options.max_document_bytes).records()


def document_of(raw: RawRecord, index: int, options: ReadOptions, budget: OutputBudget) -> Generator[Record, None, str]:
    """Yield the document in a record, or what is wrong with it; return the reason if it is no document."""
    identity = raw.headers.get("warc-record-id", "").strip("<> ")
    url = raw.headers.get("warc-target-uri", "").strip("<> ")
    if raw.problem:
        start = raw.block[:512].decode("utf-8", "replace")
        is_cut = raw.problem.endswith("it ends early") or raw.problem.startswith(_CUT)
        yield Record(index, identity, start, url, problem=raw.problem, location=raw.location, is_cut=is_cut)
        return ""
    mime, charset, body, problem, cut = raw.headers.get("content-type", ""), "", raw.block, "", ""
    if raw.kind in ("response", "resource"):
        if raw.kind == "response" and body[:5] == b"HTTP/":
            response = parse_http(body, options.max_document_bytes)
            budget.spend(len(response.body) or (options.max_document_bytes if response.problem else 0))
            if response.status != 200:
                return f"HTTP status {response.status}"
            mime, charset, body = response.mime, response.charset, response.body
            problem, cut = response.problem, response.cut
    elif raw.kind != "conversion":
        return f"{raw.kind[:20] or 'untyped'} record"
    html = False
    if raw.kind != "conversion":
        html = is_html(mime, body)
        kind = media_type(mime)
        if not html and kind != "text/plain":
            return kind[:100] or "a response without a type"
        if (_FOR_PROGRAMS if html else _NO_TEXT).search(url.partition("?")[0]):
            return "a file for programs, such as robots.txt"
        if not problem and not charset.lower().startswith(("utf-16", "utf-32")) and (other := binary_kind(body[:4096])):
            problem = f"expected {kind or 'HTML'}, got {other}"
    if url.startswith(("filedesc:", "dns:", "whois:", "metadata:", "warcinfo:")):
        return "a record about the archive"
    text = body_text(body, charset, html)
    values = column_values(options, lambda name: raw.headers.get(_COLUMNS.get(name, name.lower())))
    yield Record(index, identity, text[:512] if problem else text, url, html, problem, raw.location, values=values)
    if cut and "warc-truncated" not in raw.headers:
        yield Record(index, identity, "", url, problem=f"{cut}; its beginning is kept", location=raw.location)
    return ""


@dataclass(frozen=True)
class _ArcHead:
    """A line `URL IP date type length`, or ARC 2's `URL IP date type status checksum location offset file length`."""

    url: str
    mime: str
    size: int  # -1 if it is not a number

    @staticmethod
    def of(line: bytes) -> "_ArcHead | None":
        """None if it is no such line. URLs may hold blanks."""
        for fields in (5, 10):
            parts = line.rstrip(b"\r\n").rsplit(b" ", fields - 1)
            if len(parts) == fields and _DATE.fullmatch(parts[2]) and _ADDRESS.fullmatch(parts[1]):
                length = parts[-1]
                size = int(length) if length.isdigit() and len(length) < 16 else -1
                return _ArcHead(parts[0].decode("utf-8", "replace"), parts[3].decode("ascii", "replace"), size)
        return None


def _begins(data: bytes | bytearray, start: int = 0) -> bool:
    if _WARC.match(data, start):
        return True
    line = _ARC.match(data, start)
    return line is not None and _ArcHead.of(line[0]) is not None


_CUT = "a record that ends after"
_UNPACKED = 256 << 10
_MAGIC = b"\x1f\x8b\x08"
_TRIM = 1 << 20
_REWIND_FLOOR = 64 << 20


@dataclass(frozen=True)
class _Damage:
    """Damage; the next chunk continues elsewhere. `unsound` is the offset of a member with a wrong checksum, or -1."""

    reason: str
    unsound: int = -1


_Chunk = tuple[int, bytes] | _Damage  # The offset of a gzip member (-1: no gzip) and bytes of it, or damage.


class _Archive:
    """An archive, read forward over damage: `_data` from `_offset` on was not parsed yet."""

    def __init__(self, chunks: Iterator[_Chunk], max_bytes: int) -> None:
        self._chunks = chunks
        self._max_bytes = max_bytes
        self._data, self._offset = bytearray(), 0
        self._base = 0  # Unpacked bytes before `_data`.
        self._members: deque[tuple[int, int]] = deque()  # Their offsets in the unpacked bytes, in the file.
        self._damage: _Damage | None = None
        self._is_reported = False

    def records(self) -> Iterator[RawRecord]:
        while self._need(1) or self._damage is not None:
            while self._need(1) and self._data[self._offset] in _BLANK:
                self._offset += 1
            if not self._need(MAX_HEAD_BYTES):
                if self._damage is not None:
                    is_reported, location, problem = self._is_reported, self._location(), self._skip_damage()
                    if not is_reported:
                        yield RawRecord(location, {}, b"", problem)
            elif _WARC.match(self._data, self._offset):
                yield self._warc_record()
            elif _begins(self._data, self._offset):
                yield self._arc_record()
            else:
                location, start = self._location(), bytes(self._data[self._offset : self._offset + 512])
                problem = f"{self._skip_stray()} bytes that begin no record"
                if self._damage is not None and not self._need(0):
                    problem = self._skip_damage()
                yield RawRecord(location, {}, start, problem)

    def _need(self, size: int) -> int:
        """Read until `size` bytes are buffered; return how many are, fewer before the end or damage."""
        while len(self._data) - self._offset < size and self._damage is None:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            if isinstance(chunk, _Damage):
                self._damage = chunk
                break
            if self._offset > _TRIM:
                parsed = self._offset - 1  # One byte stays, so that a search sees the line end before the next record.
                del self._data[:parsed]
                self._base, self._offset = self._base + parsed, 1
            member, data = chunk
            if member >= 0 and (not self._members or self._members[-1][1] != member):
                self._members.append((self._base + len(self._data), member))
            self._data += data
        return len(self._data) - self._offset

    def _location(self) -> str:
        here = self._base + self._offset
        while len(self._members) > 1 and self._members[1][0] <= here:
            self._members.popleft()
        start, offset = self._members[0] if self._members else (here, here)
        return f"byte {offset}" if here == start else f"byte {offset}, unpacked {here - start}"

    def _skip_damage(self) -> str:
        assert self._damage is not None
        reason, self._damage, self._is_reported = self._damage.reason, None, False
        self._offset = len(self._data)
        return reason

    def _take(self, size: int) -> bytes:
        self._need(size)
        data = bytes(memoryview(self._data)[self._offset : self._offset + size])
        self._offset += len(data)
        return data

    def _skip_stray(self) -> int:
        skipped, margin = 0, 16 << 10
        while buffered := self._need(4 * margin):
            start = _next_start(self._data, self._offset + 1, len(self._data))
            step = start - self._offset if start >= 0 else buffered if buffered < 4 * margin else buffered - margin
            self._offset += step
            skipped += step
            if start >= 0:
                break
        return skipped

    def _warc_record(self) -> RawRecord:
        location, buffered = self._location(), self._need(MAX_HEAD_BYTES)
        match = _HEAD_END.search(self._data, self._offset, self._offset + min(buffered, MAX_HEAD_BYTES))
        head = self._take(match.end() - self._offset if match else 5)
        if match is None or not _HEAD_END.search(head, len(head) - 6):
            problem = self._skip_damage() if match is None and self._damage else "a WARC header that does not end"
            return RawRecord(location, {}, b"", problem)
        headers = parse_headers(head.decode("utf-8", "replace"))
        length = headers.get("content-length", "")
        return self._with_block(location, headers, int(length) if length.isdecimal() and len(length) < 16 else -1)

    def _arc_record(self) -> RawRecord:
        """ARC: a line that tells how many bytes follow it (Internet Archive, 1996)."""
        location = self._location()
        line = self._take(self._data.find(b"\n", self._offset) + 1 - self._offset)
        head = _ArcHead.of(line)
        assert head is not None
        first = line.startswith(b"filedesc:")
        headers = {
            "warc-target-uri": head.url,
            "warc-type": "warcinfo" if first else "response",
            "content-type": head.mime,
        }
        if head.size < 0:
            self._skip_stray()
            return RawRecord(location, headers, line, "" if first else "an ARC record without a length")
        return self._with_block(location, headers, head.size)

    def _with_block(self, location: str, headers: dict[str, str], size: int) -> RawRecord:
        """The record whose block of `size` bytes is next (-1: of unknown size), cut where the next one begins."""
        if size > self._max_bytes:
            remaining = size
            while remaining and (buffered := min(self._need(1), remaining)):
                self._offset += buffered
                remaining -= buffered
            problem = f"a record of {size} bytes, more than max_document_bytes = {self._max_bytes}"
            return RawRecord(location, headers, b"", self._skip_damage() if self._damage and remaining else problem)
        size = max(size, 0)
        buffered = min(self._need(size), size)
        if buffered == size and self._ends_well(size):
            problem = ""
            if self._damage is not None and self._damage.unsound >= 0:  # Of the last member that was read.
                start, offset = self._members[-1]
                if offset == self._damage.unsound and self._base + self._offset >= start:
                    problem, self._is_reported = self._damage.reason, True
            return RawRecord(location, headers, self._take(size), problem)
        limit = size + MAX_STRAY_BYTES if buffered == size else buffered
        searched = self._need(limit)
        next_record = _next_start(self._data, self._offset, self._offset + min(limit, searched))
        if next_record < 0 and buffered == size and searched < limit:
            next_record = self._offset + searched
        if next_record >= 0:
            return RawRecord(location, headers, self._take(next_record - self._offset).rstrip(_BLANK))
        block = self._take(buffered)
        if buffered == size or (self._damage is None and http_complete(block)):
            return RawRecord(location, headers, block)
        return RawRecord(
            location,
            headers,
            block,
            self._skip_damage() if self._damage is not None else f"{_CUT} {buffered} of {size} bytes",
        )

    def _ends_well(self, size: int) -> bool:
        """Whether a record, or the end, follows at most four line-end bytes after the next `size` bytes."""
        buffered = self._need(size + 4 + 8192)
        for skipped in range(size, size + 5):
            if skipped >= buffered or _begins(self._data, self._offset + skipped):
                return True
            if self._data[self._offset + skipped] not in _BLANK:
                return False
        return False


def _next_start(data: bytearray, start: int, stop: int) -> int:
    for match in _NEXT.finditer(data, max(0, start - 1), stop):
        if _begins(data, match.end()):
            return match.end()
    return -1


def _plain(stream: BinaryIO) -> Iterator[_Chunk]:
    try:
        while data := stream.read(_UNPACKED):
            yield -1, data
    except CorruptInputError as error:
        yield _Damage(str(error))


def _members(stream: BinaryIO, max_ratio: int) -> Iterator[_Chunk]:
    start = size = rewound = reached = 0
    while start >= 0:
        stream.seek(start)
        packed = CountedReader(stream)
        try:
            for data in unpack_members(packed, "gz", 0):
                size += len(data)
                if size > max(MIN_UNPACKED_BYTES, max_ratio * (start + packed.count)):
                    yield _Damage(f"{start + packed.count} bytes grew to more than {max_ratio} times as many: a bomb")
                    return
                yield start + packed.member, data
            return
        except (zlib.error, EOFError) as error:
            reason = str(error).rpartition(": ")[2]
        reached = max(reached, start + packed.count)
        unsound = reason in ("incorrect data check", "incorrect length check")
        yield _Damage(f"gzip member: {reason}", start + packed.member if unsound else -1)
        rewound += packed.count - packed.member
        # Members within members could be unpacked again and again: past this, continue after what was read.
        start = _next_member(stream, start + packed.member + 1 if rewound < _REWIND_FLOOR + reached else reached)


def _next_member(stream: BinaryIO, start: int) -> int:
    stream.seek(start)
    pending, offset = b"", start
    while data := stream.read(_UNPACKED):
        pending += data
        index = pending.find(_MAGIC)
        while index >= 0:
            if len(pending) - index < 2048:
                pending += stream.read(2048)
            with suppress(zlib.error):
                if _begins(zlib.decompressobj(31).decompress(pending[index : index + 2048], 512)):
                    return offset + index
            index = pending.find(_MAGIC, index + 1)
        offset += len(pending) - 2
        pending = pending[-2:]
    return -1
