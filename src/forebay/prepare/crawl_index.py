"""Results of CommonCrawl's index as an input: a JSON object a line, each the location of one record in a WARC file.

The records are fetched one by one with range requests, those that are neighbours together, from `crawl_server()`. A
record that is not the one that the index describes is malformed. Used only where a user forces the format
(`--format cdx`): a line of an unknown file must not send requests.

Source: https://github.com/webrecorder/pywb/wiki/CDX-Server-API, fields `filename`, `offset`, `length`, `url`, `digest`.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.errors import PrepareError
from forebay.formats.base import Format
from forebay.formats.inputs import InputFile, InputSplit, OutputBudget, ReadOptions
from forebay.formats.jsonl import parse_json
from forebay.formats.records import SHOWN_CHARS, Record, batched, shown
from forebay.formats.text import split_lines
from forebay.formats.warc import document_of, raw_records
from forebay.network.retry import log_while_waiting
from forebay.prepare.path_lists import crawl_server, is_path_below
from forebay.storage.base import PermanentError

if TYPE_CHECKING:
    from forebay.storage.remote_file import RemoteFolder

log = logging.getLogger("forebay.prepare")
SPLIT_BYTES = 256 << 10  # Of lines: some 500 records, which an interrupted task fetches again.
MAX_GAP_BYTES = 64 << 10  # Fetched in vain rather than sending another request.
MAX_REQUEST_BYTES = 8 << 20
_BATCH_BYTES, _BATCH_LINES = 64 << 20, 1000


@dataclass(frozen=True)
class _Entry:
    """A line, and the record that it names; `problem` if it names none."""

    index: int
    location: str
    line: bytes
    problem: str = ""
    filename: str = ""
    start: int = 0
    stop: int = 0
    digest: str = ""


class CrawlIndex(Format):
    """Lines of CommonCrawl's index: CDX in JSON, or CDXJ."""

    name = "cdx"

    def split(self, file: InputFile, options: ReadOptions) -> Iterator[tuple[int, int, int]]:
        for start in range(0, file.bytes, SPLIT_BYTES):
            stop = min(start + SPLIT_BYTES, file.bytes)
            yield start, stop, stop - start

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        from forebay.storage.remote_file import RemoteFolder

        folder = RemoteFolder(crawl_server())
        entries = _entries(split, options)
        reason = f"records of CommonCrawl from {folder.url}"
        for batch in batched(entries, lambda entry: entry.stop - entry.start, _BATCH_BYTES, _BATCH_LINES):
            with log_while_waiting(log, lambda: reason):
                packed = dict(_fetched([entry for entry in batch if not entry.problem], folder))
            for entry in batch:
                yield from _documents(entry, packed.pop(entry.index, entry.problem or b""), options)


CRAWL_INDEX = CrawlIndex()


def _entries(split: InputSplit, options: ReadOptions) -> Iterator[_Entry]:
    for index, (offset, line, problem) in enumerate(split_lines(split, options)):
        location = f"byte {offset}"
        shown_line = line[:SHOWN_CHARS]
        if problem or not line.strip():
            yield _Entry(index, location, shown_line, problem or "blank")
            continue
        value, problem = parse_json(line[max(0, line.find(b"{")) :])
        try:
            fields = value if isinstance(value, dict) else {}
            filename, start, length = str(fields["filename"]), int(fields["offset"]), int(fields["length"])
            is_valid = is_path_below(filename) and start >= 0 and length > 0 and start + length < 1 << 50
        except (KeyError, TypeError, ValueError):
            is_valid = False
        if not is_valid:
            problem = problem or "expected a filename below crawl-data, an offset and a length, got none or others"
        elif length > options.max_document_bytes:
            problem = f"a record of {length} bytes, more than max_document_bytes = {options.max_document_bytes}"
        if problem:
            yield _Entry(index, location, shown_line, problem)
        else:
            digest = str(fields.get("digest", "")).removeprefix("sha1:")
            yield _Entry(index, location, shown_line, "", filename, start, start + length, digest)


def merged(entries: Iterable[_Entry]) -> Iterator[list[_Entry]]:
    """Yield the entries of each request: of one file, in order, with gaps of at most MAX_GAP_BYTES."""
    group: list[_Entry] = []
    stop = 0
    for entry in sorted(entries, key=lambda entry: (entry.filename, entry.start)):
        is_near = group and entry.filename == group[0].filename and entry.start <= stop + MAX_GAP_BYTES
        if group and not (is_near and max(stop, entry.stop) - group[0].start <= MAX_REQUEST_BYTES):
            yield group
            group, stop = [], 0
        group.append(entry)
        stop = max(stop, entry.stop)
    if group:
        yield group


def _fetched(entries: Sequence[_Entry], folder: RemoteFolder) -> Iterator[tuple[int, bytes | str]]:
    """Yield the number of each entry with its packed record, or with what is wrong."""
    for group in merged(entries):
        start = group[0].start
        try:
            data: bytes | str = folder.read(group[0].filename, start, max(entry.stop for entry in group))
        except PrepareError as error:
            cause = error.__cause__
            if not isinstance(cause, PermanentError):
                raise
            if len(group) > 1:  # One of them may lie beyond the end of the file.
                for entry in group:
                    yield from _fetched([entry], folder)
                continue
            data = str(cause)
        for entry in group:
            yield entry.index, data if isinstance(data, str) else data[entry.start - start : entry.stop - start]


def _documents(entry: _Entry, data: bytes | str, options: ReadOptions) -> Iterator[Record]:
    """Yield the documents of a packed record; or what is wrong with it, or with `data` if that is a problem."""
    raw = next(raw_records(io.BytesIO(data), options), None) if isinstance(data, bytes) else None
    digest = raw.headers.get("warc-payload-digest", "").removeprefix("sha1:") if raw is not None else ""
    if isinstance(data, str):
        problem = data
    elif raw is None or raw.problem:
        problem = "expected a WARC record, got " + (raw.problem if raw is not None else "nothing")
    elif digest and entry.digest and digest != entry.digest:
        problem = f"expected the record with the digest {entry.digest}, as in the index, got {digest}"
    else:
        budget = OutputBudget(InputSplit(()), options)
        yield from document_of(replace(raw, location=entry.location), entry.index, options, budget)
        return
    yield Record(entry.index, text=shown(entry.line), problem=problem, location=entry.location)
