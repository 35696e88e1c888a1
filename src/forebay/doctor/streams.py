"""Formats that are read from front to back: tar, TFRecord, JSONL; plain or compressed.

Hides: nothing of the formats, which `forebay.prepare.read` knows; here their problems become findings. Of a
large file the first part is read unless all is asked for; of plain JSONL the end too.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import orjson

from forebay.doctor.passages import Held
from forebay.doctor.report import CERTAIN, POSSIBLE, Options
from forebay.doctor.tokens import TokenCounts, Window
from forebay.doctor.verdicts import Report, judge
from forebay.errors import ForebayError
from forebay.formats.compression import sniff_compression
from forebay.formats.foreign import TOKEN_COLUMNS, head_of
from forebay.prepare.read.base import ReadOptions
from forebay.prepare.read.opening import open_plain
from forebay.prepare.read.tar import Members
from forebay.prepare.read.tfrecord import frames

_RATIO = 100_000  # A file of zeros is for the examiner to see.
_MOST_LINE = 1 << 30
_TAIL_BYTES = 1 << 20
_FEWEST_TEXT = 64  # Bytes of a line, below which the same line twice says nothing.


def walk(kind: str, path: Path, options: Options) -> Report:
    """Read a file of `kind`, one of `WALKERS`, to its end or to the bound of the options."""
    found = Report(path)
    compression = sniff_compression(head_of(path, 16))
    if compression:
        found.facts["compression"] = compression
    with closing(open_plain(path, _RATIO)) as file:
        WALKERS[kind](found, file, options)
    if compression:
        found.total_bytes = max(path.stat().st_size, found.read_bytes)
    return found


def _tar(found: Report, file: BinaryIO, options: Options) -> None:
    members = samples = 0
    key = ""
    reading = ReadOptions(max_document_bytes=1 << 62, max_unpacked_ratio=_RATIO)
    counting = _Counting(file)
    for one in Members(cast(BinaryIO, counting), reading, 0, kinds=()).all():
        if one.problem:
            cut_off = "ends within" in one.problem or "ends early" in one.problem
            found.say("truncated" if cut_off else "damaged", f"byte {one.position}", one.problem)
            continue
        members += 1
        samples += one.key != key
        key = one.key
        if not options.full and one.position > options.most_bytes:
            break
    found.read_bytes = counting.count
    found.facts.update(members=members, samples=samples)
    if not members and not found.findings:
        found.say("empty", "byte 0", "expected members, got none")


class _Counting:
    """A stream that knows how much was read of it; compressed ones do not."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.count = file, 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.count += len(data)
        return data


def _tfrecord(found: Report, file: BinaryIO, options: Options) -> None:
    records = 0
    for position, data, problem in frames(file, _MOST_LINE, 0):
        if problem:
            found.say("truncated" if "file ends" in problem else "damaged", f"byte {position}", problem)
            continue
        records += 1
        found.read_bytes = end = position + 16 + len(data)
        if not options.full and end > options.most_bytes:
            break
    found.facts["records"] = records
    if not records and not found.findings:
        found.say("empty", "byte 0", "expected records, got none")


def _jsonl(found: Report, file: BinaryIO, options: Options) -> None:
    lines = position = blank = 0
    seen, counts = Held(), TokenCounts(options, rows=True)
    for line in _lines(found, file):
        start, position = position, position + len(line)
        text = line.strip()
        if not text:
            blank += 1
            continue
        lines += 1
        _look_at_line(found, line, start, lines, counts)
        if len(text) >= _FEWEST_TEXT:
            seen.add(np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), "<u8"))
        if not options.full and position > options.most_bytes:
            _jsonl_end(found)
            break
    found.read_bytes = position
    found.facts.update(lines=lines)
    if not lines and not found.findings:
        found.say("empty", "byte 0", "expected lines, got none")
    same, total = seen.repeated()
    if same:
        evidence = f"{same} of {total} lines stand there before, byte for byte"
        found.say("duplicate-lines", "lines", evidence, sure=CERTAIN if same * 100 >= total else POSSIBLE)
    found.findings.extend(judge(counts, str(found.path)))


def _lines(found: Report, file: BinaryIO) -> Iterator[bytes]:
    position = 0
    try:
        while line := file.readline(_MOST_LINE):
            position += len(line)
            yield line
    except ForebayError as error:
        found.say("truncated", f"byte {position}", str(error))


def _look_at_line(found: Report, line: bytes, start: int, number: int, counts: TokenCounts) -> None:
    if not start and line.startswith(b"\xef\xbb\xbf"):
        found.say("byte-order-mark", "byte 0", "expected JSON, got a byte-order mark, which many readers refuse")
        return
    try:
        row = orjson.loads(line)
    except ValueError as error:
        ended = not line.endswith(b"\n")
        what = "zero bytes" if not line.strip(b"\0\n") else str(error)
        where = f"line {number} (byte {start})"
        found.say("truncated" if ended else "damaged", where, f"expected a JSON value, got {line[:60]!r}: {what}")
        return
    if isinstance(row, dict):
        for name in TOKEN_COLUMNS:
            ids = row.get(name)
            if isinstance(ids, list) and ids and all(type(one) is int and abs(one) < 1 << 62 for one in ids):
                counts.feed(Window(str(found.path), 0, np.array(ids, np.int64)))


def _jsonl_end(found: Report) -> None:
    """The last line of a plain file that is not read to its end."""
    if "compression" in found.facts:
        return
    size = found.path.stat().st_size
    tail = head_of(found.path, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).rstrip(b"\n")
    line = tail[tail.rfind(b"\n") + 1 :]
    try:
        if len(line) < _TAIL_BYTES - 1:
            orjson.loads(line)
    except ValueError as error:
        found.say("truncated", f"byte {size - len(line)}", f"the last line is no JSON value: {error}")


WALKERS: Mapping[str, Callable[[Report, BinaryIO, Options], None]] = {
    "webdataset": _tar,
    "tfrecord": _tfrecord,
    **dict.fromkeys(("jsonl", "reddit"), _jsonl),
}
