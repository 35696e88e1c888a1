"""Crawls: WARC, WET and ARC files as documents.

Hides: the framing of records (lengths, gzip members, line ends), HTTP's transfer and content encodings, and what is
done about damage. Framing is our own, because fastwarc and warcio lose good records, at the price of CPU: fastwarc is
2.7 times as fast (docs/decisions/0004-html-extraction.md). Where a record's length and the beginning of the next record
disagree, the beginning is believed, and after a damaged gzip member reading goes on at the next. Memory: the largest
record, at most max_document_bytes, and 1 MiB.

Requests, metadata, revisits, DNS, images and answers other than `options["statuses"]` (default `[200]`; `[]` is any)
are not documents and not counted.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import BinaryIO

from forebay.prepare.documents import Record
from forebay.prepare.read.base import Format, Piece, ReadOptions, Source
from forebay.prepare.read.fields import integers_of
from forebay.prepare.read.http_message import body_text, http_complete, is_html, parse_http
from forebay.prepare.read.opening import (
    MIN_UNPACKED_BYTES,
    Broken,
    Budget,
    Counted,
    Damaged,
    open_source,
    unpack_gzip,
)

MAX_HEAD_BYTES = 64 << 10
MAX_STRAY_BYTES = 64 << 10
"""A record may run on this far past its length until the next begins; beyond that, what is there is no record."""

_WARC = re.compile(rb"WARC/\d\.\d{1,2}[ \t\r]{0,8}\n(?=[A-Za-z-]{1,64}[ \t]{0,8}:)")
_ARC = re.compile(rb"[a-z][a-z0-9+.-]{1,20}:[^\n]{10,8000}\n")
_NEXT = re.compile(rb"\n(?=" + _WARC.pattern + rb"|" + _ARC.pattern + rb")")
_HEAD_END = re.compile(rb"\n(?:\r{0,4}\n|(?=" + _WARC.pattern + rb"))")
"""An empty line; or the first of another record, where the head has none."""
_DATE = re.compile(rb"\d{8,20}")
_ADDRESS = re.compile(rb"[0-9a-fA-F.:]{2,45}")
_BLANK = b"\r\n"
_FOR_PROGRAMS = re.compile(r"/(robots|ads|app-ads)\.txt$|\.(htc|xspf)$", re.IGNORECASE)
"""URLs of what no person reads, whatever its type says."""
_NO_TEXT = re.compile(
    _FOR_PROGRAMS.pattern + r"|\.(atom|css|ico|js|json|m3u8?|map|mjs|pls|rss|svg|vtt|xml|xsl)$", re.IGNORECASE
)
"""The same of what a server calls plain text."""


@dataclass(frozen=True)
class RawRecord:
    """One record of an archive: its headers with names in lower case and its block, or what is wrong with it."""

    where: str
    headers: dict[str, str]
    block: bytes = b""
    problem: str = ""

    @property
    def kind(self) -> str:
        """`response`, `conversion` …"""
        return self.headers.get("warc-type", "").lower()


def read_raw(source: Source, options: ReadOptions) -> Iterator[RawRecord]:
    """Every record of an archive in order, documents or not, and one with a problem for each damaged place."""
    packed = source.compression == "gz"
    with open_source(replace(source, compression="") if packed else source, options) as stream:
        chunks = _members(stream, options.max_unpacked_ratio) if packed else _plain(stream)
        yield from _Archive(chunks, options.max_document_bytes).records()


def read(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    """The documents of archives, as `Format.read` says."""
    statuses = integers_of(options, "statuses", [200], "Write statuses = [200], HTTP status codes.")
    place = 0
    decoded = Budget(piece, options)
    for source in piece.sources:
        any_document, reasons = False, Counter[str]()
        for raw in read_raw(source, options):
            why = yield from _document(raw, place, statuses, options, decoded)
            any_document = any_document or not why
            if why and (why in reasons or len(reasons) < 100):
                reasons[why] += 1
            place += 1
        if not any_document:
            others = "; ".join(f"{n:,} × {why}" for why, n in reasons.most_common(5)) or "no records at all"
            yield Record(place, problem=f"expected responses of HTML or plain text, got none: {others}", failed=True)


def _document(
    raw: RawRecord, place: int, statuses: frozenset[int], options: ReadOptions, decoded: Budget
) -> Generator[Record, None, str]:
    """The document in a record, or what is wrong with it; if it is no document, nothing, and why is returned."""
    identity = raw.headers.get("warc-record-id", "").strip("<> ")
    url = raw.headers.get("warc-target-uri", "").strip("<> ")
    if raw.problem:
        start = raw.block[:512].decode("utf-8", "replace")
        yield Record(place, identity, start, url, problem=raw.problem, where=raw.where)
        return ""
    mime, charset, body, problem = raw.headers.get("content-type", ""), "", raw.block, ""
    if raw.kind in ("response", "resource"):
        if raw.kind == "response" and body[:5] == b"HTTP/":
            answer = parse_http(body, options.max_document_bytes)
            decoded.spend(len(answer.body) or (options.max_document_bytes if answer.problem else 0))
            if statuses and answer.status not in statuses:
                return f"HTTP status {answer.status}"
            mime, charset, body, problem = answer.mime, answer.charset, answer.body, answer.problem
    elif raw.kind != "conversion":
        return f"{raw.kind[:20] or 'untyped'} record"
    html = is_html(mime, body) if raw.kind != "conversion" else False
    if raw.kind != "conversion":
        kind = mime.partition(";")[0].strip().lower()
        if not html and kind != "text/plain":
            return kind[:40] or "a response without a type"
        if (_FOR_PROGRAMS if html else _NO_TEXT).search(url.partition("?")[0]):
            return "a file for programs, such as robots.txt"
    if url.startswith(("filedesc:", "dns:", "whois:", "metadata:", "warcinfo:")):
        return "a record about the archive"
    text = body_text(body, charset, html)
    yield Record(place, identity, text[:512] if problem else text, url, html, problem, raw.where)
    return ""


@dataclass(frozen=True)
class _ArcHead:
    """A line `URL IP date type length`, or ARC 2's `URL IP date type status checksum location offset file length`."""

    url: str
    mime: str
    size: int  # -1 if it is not a number

    @staticmethod
    def of(line: bytes) -> _ArcHead | None:
        """None if it is no such line. URLs may hold blanks."""
        for fields in (5, 10):
            parts = line.rstrip(b"\r\n").rsplit(b" ", fields - 1)
            if len(parts) == fields and _DATE.fullmatch(parts[2]) and _ADDRESS.fullmatch(parts[1]):
                length = parts[-1]
                size = int(length) if length.isdigit() and len(length) < 16 else -1
                return _ArcHead(parts[0].decode("utf-8", "replace"), parts[3].decode("ascii", "replace"), size)
        return None


def _begins(data: bytes | bytearray, start: int = 0) -> bool:
    """Whether a record begins there."""
    if _WARC.match(data, start):
        return True
    line = _ARC.match(data, start)
    return line is not None and _ArcHead.of(line[0]) is not None


_UNPACKED = 256 << 10
_MAGIC = b"\x1f\x8b\x08"
_TRIM = 1 << 20
_REWIND_FLOOR = 64 << 20


@dataclass(frozen=True)
class _Break:
    """Damage: what follows continues elsewhere. `unsound` is where a member begins whose checksum was wrong, or -1."""

    reason: str
    unsound: int = -1


_Chunk = tuple[int, bytes] | _Break
"""Where the gzip member begins (-1: there are none) and bytes of it, or damage."""


class _Archive:
    """An archive read forward, up to a break that is stepped over: `_data` from `_at` on is what was not read yet."""

    def __init__(self, chunks: Iterator[_Chunk], cap: int) -> None:
        self._chunks = chunks
        self._cap = cap
        self._data, self._at = bytearray(), 0
        self._base = 0  # how many unpacked bytes stood before `_data`
        self._members: deque[tuple[int, int]] = deque()  # where they begin: in the unpacked bytes, in the file
        self._break: _Break | None = None
        self._told = False

    def records(self) -> Iterator[RawRecord]:
        while self._need(1) or self._break is not None:
            while self._need(1) and self._data[self._at] in _BLANK:
                self._at += 1
            if not self._need(MAX_HEAD_BYTES):
                if self._break is not None:
                    told, where, problem = self._told, self._where(), self._mend()
                    if not told:
                        yield RawRecord(where, {}, b"", problem)
            elif _WARC.match(self._data, self._at):
                yield self._warc_record()
            elif _begins(self._data, self._at):
                yield self._arc_record()
            else:
                where, start = self._where(), bytes(self._data[self._at : self._at + 512])
                problem = f"{self._skip_stray()} bytes that begin no record"
                if self._break is not None and not self._need(0):
                    problem = self._mend()
                yield RawRecord(where, {}, start, problem)

    def _need(self, size: int) -> int:
        """How many bytes are there after trying to have `size`; fewer before the end or a break."""
        while len(self._data) - self._at < size and self._break is None:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            if isinstance(chunk, _Break):
                self._break = chunk
                break
            if self._at > _TRIM:
                gone = self._at - 1  # one byte stays, so that a search sees the line end before the next record
                del self._data[:gone]
                self._base, self._at = self._base + gone, 1
            member, data = chunk
            if member >= 0 and (not self._members or self._members[-1][1] != member):
                self._members.append((self._base + len(self._data), member))
            self._data += data
        return len(self._data) - self._at

    def _where(self) -> str:
        """Where the next byte stands in the file: `byte 5120`; in a gzip member, where that begins."""
        here = self._base + self._at
        while len(self._members) > 1 and self._members[1][0] <= here:
            self._members.popleft()
        start, offset = self._members[0] if self._members else (here, here)
        return f"byte {offset}" if here == start else f"byte {offset}, unpacked {here - start}"

    def _mend(self) -> str:
        """Drops what stands before the break and goes on after it; says what was damaged."""
        assert self._break is not None
        reason, self._break, self._told = self._break.reason, None, False
        self._at = len(self._data)
        return reason

    def _take(self, size: int) -> bytes:
        """The next `size` bytes, or as many as are there."""
        self._need(size)
        data = bytes(memoryview(self._data)[self._at : self._at + size])
        self._at += len(data)
        return data

    def _skip_stray(self) -> int:
        """Passes over what stands before the next record, or all; returns how many bytes."""
        passed, margin = 0, 16 << 10
        while there := self._need(4 * margin):
            found = _next_start(self._data, self._at + 1, len(self._data))
            step = found - self._at if found >= 0 else there if there < 4 * margin else there - margin
            self._at += step
            passed += step
            if found >= 0:
                break
        return passed

    def _warc_record(self) -> RawRecord:
        where, there = self._where(), self._need(MAX_HEAD_BYTES)
        found = _HEAD_END.search(self._data, self._at, self._at + min(there, MAX_HEAD_BYTES))
        head = self._take(found.end() - self._at if found else 5)
        if found is None or not _HEAD_END.search(head, len(head) - 6):
            problem = self._mend() if found is None and self._break else "a WARC header that does not end"
            return RawRecord(where, {}, b"", problem)
        headers = _headers(head)
        length = headers.get("content-length", "")
        return self._with_block(where, headers, int(length) if length.isdecimal() and len(length) < 16 else -1)

    def _arc_record(self) -> RawRecord:
        """ARC: a line that says how many bytes follow it (Internet Archive, 1996)."""
        where = self._where()
        line = self._take(self._data.find(b"\n", self._at) + 1 - self._at)
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
            return RawRecord(where, headers, line, "" if first else "an ARC record without a length")
        return self._with_block(where, headers, head.size)

    def _with_block(self, where: str, headers: dict[str, str], size: int) -> RawRecord:
        """The record whose block of `size` bytes is next (-1: of unknown size), cut where the next one begins."""
        if size > self._cap:
            left = size
            while left and (there := min(self._need(1), left)):
                self._at += there
                left -= there
            problem = f"a record of {size} bytes, more than max_document_bytes = {self._cap}"
            return RawRecord(where, headers, b"", self._mend() if self._break and left else problem)
        size = max(size, 0)
        there = min(self._need(size), size)
        if there == size and self._ends_well(size):
            problem = ""
            if self._break is not None and self._break.unsound >= 0:  # the break of the last member that is there
                start, offset = self._members[-1]
                if offset == self._break.unsound and self._base + self._at >= start:
                    problem, self._told = self._break.reason, True
            return RawRecord(where, headers, self._take(size), problem)
        limit = size + MAX_STRAY_BYTES if there == size else there
        ahead = self._need(limit)
        found = _next_start(self._data, self._at, self._at + min(limit, ahead))
        if found < 0 and there == size and ahead < limit:
            found = self._at + ahead
        if found >= 0:
            return RawRecord(where, headers, self._take(found - self._at).rstrip(_BLANK))
        block = self._take(there)
        if there == size or (self._break is None and http_complete(block)):
            return RawRecord(where, headers, block)
        problem = self._mend() if self._break is not None else f"a record that ends after {there} of {size} bytes"
        return RawRecord(where, headers, block, problem)

    def _ends_well(self, size: int) -> bool:
        """Whether a record, or the end, follows at most four line-end bytes after the next `size` bytes."""
        there = self._need(size + 4 + 8192)
        for skipped in range(size, size + 5):
            if skipped >= there or _begins(self._data, self._at + skipped):
                return True
            if self._data[self._at + skipped] not in _BLANK:
                return False
        return False


def _next_start(data: bytearray, start: int, stop: int) -> int:
    """Where the next record begins at a line of data[start:stop]; or -1."""
    for found in _NEXT.finditer(data, max(0, start - 1), stop):
        if _begins(data, found.end()):
            return found.end()
    return -1


def _headers(head: bytes) -> dict[str, str]:
    """Names in lower case; the first of several is kept; a line that begins blank continues the one before."""
    headers: dict[str, str] = {}
    name = ""
    for line in head.decode("utf-8", "replace").split("\n")[1:]:
        line = line.rstrip("\r")
        if line[:1] in (" ", "\t") and name:
            headers[name] += " " + line.strip()
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            headers.setdefault(name, value.strip())
    return headers


def _plain(stream: BinaryIO) -> Iterator[_Chunk]:
    """The bytes of a stream that is read as it is."""
    try:
        while data := stream.read(_UNPACKED):
            yield -1, data
    except Damaged as error:
        yield _Break(str(error))


def _members(stream: BinaryIO, max_ratio: int) -> Iterator[_Chunk]:
    """The unpacked bytes of a seekable file of gzip members; after a damaged one, of the next that holds a record."""
    start = given = rewound = seen = 0
    while start >= 0:
        stream.seek(start)
        packed = Counted(stream)
        try:
            for data in unpack_gzip(packed):
                given += len(data)
                if given > max(MIN_UNPACKED_BYTES, max_ratio * (start + packed.count)):
                    yield _Break(f"{start + packed.count} bytes grew to more than {max_ratio} times as many: a bomb")
                    return
                yield start + packed.member, data
            return
        except (zlib.error, Broken) as error:
            why = str(error).rpartition(": ")[2]
        seen = max(seen, start + packed.count)
        unsound = why in ("incorrect data check", "incorrect length check")
        yield _Break(f"gzip member: {why}", start + packed.member if unsound else -1)
        rewound += packed.count - packed.member
        # Members within members could be unpacked again and again: past this, what was read is left.
        start = _next_member(stream, start + packed.member + 1 if rewound < _REWIND_FLOOR + seen else seen)


def _next_member(stream: BinaryIO, start: int) -> int:
    """Where, from `start` on, a gzip member begins that holds a record; -1 if none does."""
    stream.seek(start)
    held, offset = b"", start
    while data := stream.read(_UNPACKED):
        held += data
        at = held.find(_MAGIC)
        while at >= 0:
            if len(held) - at < 2048:
                held += stream.read(2048)
            with suppress(zlib.error):
                if _begins(zlib.decompressobj(31).decompress(held[at : at + 2048], 512)):
                    return offset + at
            at = held.find(_MAGIC, at + 1)
        offset += len(held) - 2
        held = held[-2:]
    return -1


WARC = Format("warc", read)
WET = Format("wet", read)
"""The same reader under the name that users force: `conversion` records are documents of plain text."""
