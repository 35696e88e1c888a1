"""Crawls: WARC, WET and ARC files as documents.

Hides: the framing of records (lengths, gzip members, line ends), HTTP's transfer and content encodings, and what is
done about damage. Framing is our own, because both libraries measured lose good records: on the 62 sample files
fastwarc stops at the first record whose length is wrong, cannot read ARC, and ends a whole archive at one bad HTTP
chunk; warcio refuses archives that are one gzip member. Where a record's length and the beginning of the next record
disagree, the beginning is believed, and after a damaged gzip member reading goes on at the next. The price is CPU:
fastwarc is 2.7 times as fast at framing (docs/decisions/0004-html-extraction.md).

Requests, metadata, revisits, DNS, images and answers other than `options["statuses"]` (default `[200]`; `[]` is any)
are not documents and not counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

from forebay.prepare.documents import Record
from forebay.prepare.read.base import Format, Piece, ReadOptions, Source
from forebay.prepare.read.fields import integers_of
from forebay.prepare.read.flow import Flow, gzip_members, plain_pieces
from forebay.prepare.read.http_message import body_text, http_complete, is_html, parse_http
from forebay.prepare.read.opening import Budget, open_source

MAX_HEAD_BYTES = 64 << 10
MAX_STRAY_BYTES = 64 << 10
"""A record may run on this far past its length until the next begins; beyond that, what is there is no record."""

_WARC = re.compile(rb"WARC/\d\.\d{1,2}[ \t\r]{0,8}\n(?=[A-Za-z-]{1,64}[ \t]{0,8}:)")
_ARC = re.compile(rb"[a-z][a-z0-9+.-]{1,20}:[^\n]{10,8000}\n")
_NEXT = re.compile(rb"\n(?=" + _WARC.pattern + rb"|" + _ARC.pattern + rb")")
_HEAD_END = re.compile(rb"\n(?:\r{0,4}\n|(?=" + _WARC.pattern + rb"))")
"""An empty line; or the first of another record, where the head has none."""
_LINE_END = re.compile(rb"\n")
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
    if source.compression == "gz":
        with open_source(
            replace(source, compression=""), options.max_unpacked_ratio, options.max_window_bytes
        ) as stream:
            yield from _records(Flow(gzip_members(stream, options.max_unpacked_ratio, _begins)), options)
    else:
        with open_source(source, options.max_unpacked_ratio, options.max_window_bytes) as stream:
            yield from _records(Flow(plain_pieces(stream)), options)


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


def _records(flow: Flow, options: ReadOptions) -> Iterator[RawRecord]:
    while flow.need(1) or flow.broken:
        if not flow.skip_any(_BLANK):
            if flow.broken:
                told, where, problem = flow.told, flow.where(), flow.mend()
                if not told:
                    yield RawRecord(where, {}, b"", problem)
            continue
        flow.need(MAX_HEAD_BYTES)
        if flow.sees(_WARC):
            yield from _warc_record(flow, options.max_document_bytes)
        elif flow.holds(_begins):
            yield from _arc_record(flow, options.max_document_bytes)
        else:
            where, stray = flow.where(), flow.skip_to(_next_start)
            start = flow.skipped_start
            problem = flow.mend() if flow.broken and not flow.need(0) else f"{stray} bytes that begin no record"
            yield RawRecord(where, {}, start, problem)


def _next_start(data: bytearray, start: int, stop: int) -> int:
    """Where the next record begins at a line of data[start:stop]; or -1."""
    for found in _NEXT.finditer(data, max(0, start - 1), stop):
        if _begins(data, found.end()):
            return found.end()
    return -1


def _warc_record(flow: Flow, cap: int) -> Iterator[RawRecord]:
    where = flow.where()
    end = flow.search(_HEAD_END, MAX_HEAD_BYTES)
    head = flow.take(end if end >= 0 else 5)
    if end < 0 or not _HEAD_END.search(head, len(head) - 6):
        problem = flow.mend() if end < 0 and flow.broken else "a WARC header that does not end"
        yield RawRecord(where, {}, b"", problem)
        return
    headers = _headers(head)
    length = headers.get("content-length", "")
    size = int(length) if length.isdecimal() and len(length) < 16 else -1
    yield from _with_block(flow, where, headers, size, cap)


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


def _arc_record(flow: Flow, cap: int) -> Iterator[RawRecord]:
    """ARC: a line that says how many bytes follow it (Internet Archive, 1996)."""
    where = flow.where()
    line = flow.take(flow.search(_LINE_END, MAX_HEAD_BYTES))
    head = _ArcHead.of(line)
    assert head is not None
    first = line.startswith(b"filedesc:")
    headers = {
        "warc-target-uri": head.url,
        "warc-type": "warcinfo" if first else "response",
        "content-type": head.mime,
    }
    if head.size < 0:
        flow.skip_to(_next_start)
        yield RawRecord(where, headers, line, "" if first else "an ARC record without a length")
        return
    yield from _with_block(flow, where, headers, head.size, cap)


def _with_block(flow: Flow, where: str, headers: dict[str, str], size: int, cap: int) -> Iterator[RawRecord]:
    """The record whose block of `size` bytes is next (-1: of unknown size), cut where the next one begins."""
    if size > cap:
        there = flow.skip(size)
        problem = f"a record of {size} bytes, more than max_document_bytes = {cap}"
        yield RawRecord(where, headers, b"", flow.mend() if flow.broken and there < size else problem)
        return
    size = max(size, 0)
    there = min(flow.need(size), size)
    if there == size and _ends_well(flow, size):
        problem = flow.tell() if flow.unsound() else ""
        yield RawRecord(where, headers, flow.take(size), problem)
        return
    limit = size + MAX_STRAY_BYTES if there == size else there
    ahead = flow.need(limit)
    end = flow.find(_next_start, 0, limit)
    if end < 0 and there == size and ahead < limit:
        end = ahead
    if end >= 0:
        yield RawRecord(where, headers, flow.take(end).rstrip(_BLANK))
        return
    block = flow.take(there)
    if there < size and not flow.broken and http_complete(block):
        yield RawRecord(where, headers, block)
        return
    problem = flow.mend() if flow.broken else f"a record that ends after {there} of {size} bytes"
    yield RawRecord(where, headers, block, problem if there < size else "")


def _ends_well(flow: Flow, size: int) -> bool:
    """Whether a record, or the end, follows at most four line-end bytes after the next `size` bytes."""
    flow.need(size + 4 + 8192)
    for skipped in range(size, size + 5):
        if flow.need(skipped + 1) <= skipped or flow.holds(_begins, skipped):
            return True
        if flow.byte(skipped) not in _BLANK:
            return False
    return False


WARC = Format("warc", read)
WET = Format("wet", read)
"""The same reader under the name that users force: `conversion` records are documents of plain text."""
