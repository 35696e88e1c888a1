"""Formats that are read from front to back: tar, TFRecord, JSONL; plain or compressed.

Hides: nothing of the formats, which `forebay.prepare.read` knows; here their problems become findings, and what is
whole is copied. Of a large file the first part is read unless all is asked for; of plain JSONL the end too.
"""

import bz2
import gzip
import hashlib
import lzma
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import orjson
import zstandard

from forebay.doctor.passages import Held
from forebay.doctor.report import CERTAIN, POSSIBLE, Options
from forebay.doctor.tokens import TokenCounts, Window
from forebay.doctor.verdicts import Look, judge
from forebay.errors import ForebayError, UsageError
from forebay.formats.compression import sniff_compression
from forebay.formats.foreign import TOKEN_COLUMNS, head_of
from forebay.prepare.read.base import ReadOptions
from forebay.prepare.read.opening import open_plain
from forebay.prepare.read.tar import Members
from forebay.prepare.read.tfrecord import frames
from forebay.storage.atomic import atomic_write

_RATIO = 100_000  # A file of zeros is for the examiner to see.
_MOST_LINE = 1 << 30
_TAIL_BYTES = 1 << 20
_FEWEST_TEXT = 64  # Bytes of a line, below which the same line twice says nothing.
_LINES = ("jsonl", "reddit")


@dataclass
class Walk(Look):
    """Result of a walk through a file; `good` are the bytes [a, b) of the unpacked file that are whole."""

    good: list[tuple[int, int]] = field(default_factory=list)

    @property
    def mend(self) -> str:
        """The command that mends it."""
        return f"forebay doctor {self.path} --mend OUT (which keeps what is whole), or fetch it again"

    def say(self, fault: str, place: str, evidence: str, mend: str = "", sure: str = CERTAIN) -> None:
        """Add a finding, of at most 100."""
        if len(self.findings) < 100:
            super().say(fault, place, evidence, mend, sure)


def open_unpacked(path: Path) -> BinaryIO:
    """The unpacked bytes of a file; damage raises where it stands."""
    return open_plain(path, _RATIO)


def walk(kind: str, path: Path, options: Options) -> Walk:
    """Read a file of `kind`, one of `WALKERS`, to its end or to the bound of the options."""
    found = Walk(path)
    compression = sniff_compression(head_of(path, 16))
    if compression:
        found.facts["compression"] = compression
    with closing(open_unpacked(path)) as file:
        WALKERS[kind](found, file, options)
    if compression:
        found.total_bytes = max(path.stat().st_size, found.read_bytes)
    return found


def _tar(found: Walk, file: BinaryIO, options: Options) -> None:
    members = samples = 0
    key, last = "", (-1, "", False)
    reading = ReadOptions(max_document_bytes=1 << 62, max_unpacked_ratio=_RATIO)
    counting = _Counting(file)
    for one in Members(cast(BinaryIO, counting), reading, 0, kinds=()).all():
        _close(found, last, one.start if one.start >= 0 else one.position)
        if one.problem:
            cut_off = "ends within" in one.problem or "ends early" in one.problem
            found.say("truncated" if cut_off else "damaged", f"byte {one.position}", one.problem)
            if one.name:  # Its sample lacks a member: the others of it go, too.
                while last[2] and last[1] == one.key and found.good:
                    found.good.pop()
                    last = (-1, "", False)
            last = (-1, one.key, False)
            continue
        members += 1
        samples += one.key != key
        key, last = one.key, (one.start, one.key, True)
        if not options.full and one.position > options.most_bytes:
            break
    _close(found, last, counting.count)
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


def _close(found: Walk, last: tuple[int, str, bool], end: int) -> None:
    if last[2] and last[0] >= 0:
        found.good.append((last[0], end))


def _tfrecord(found: Walk, file: BinaryIO, options: Options) -> None:
    records = 0
    for position, data, problem in frames(file, _MOST_LINE, 0):
        if problem:
            found.say("truncated" if "file ends" in problem else "damaged", f"byte {position}", problem)
            continue
        records += 1
        end = position + 16 + len(data)
        found.good.append((position, end))
        found.read_bytes = end
        if not options.full and end > options.most_bytes:
            break
    found.facts["records"] = records
    if not records and not found.findings:
        found.say("empty", "byte 0", "expected records, got none")


def _jsonl(found: Walk, file: BinaryIO, options: Options) -> None:
    lines = position = blank = 0
    seen, counts = Held(), TokenCounts(options, rows=True)
    for line in _lines(found, file):
        start, position = position, position + len(line)
        text = line.strip()
        if not text:
            blank += 1
            continue
        lines += 1
        problem = _line_problem(found, line, start, lines, counts)
        if not problem:
            found.good.append((start, position))
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
    found.findings.extend(judge(counts, str(found.path), "", "tokenize the text again"))


def _lines(found: Walk, file: BinaryIO) -> Iterator[bytes]:
    position = 0
    try:
        while line := file.readline(_MOST_LINE):
            position += len(line)
            yield line
    except ForebayError as error:
        found.say("truncated", f"byte {position}", str(error))


def _line_problem(found: Walk, line: bytes, start: int, number: int, counts: TokenCounts) -> str:
    if not start and line.startswith(b"\xef\xbb\xbf"):
        found.say("byte-order-mark", "byte 0", "expected JSON, got a byte-order mark, which many readers refuse")
        return "mark"
    try:
        row = orjson.loads(line)
    except ValueError as error:
        ended = not line.endswith(b"\n")
        what = "zero bytes" if not line.strip(b"\0\n") else str(error)
        where = f"line {number} (byte {start})"
        found.say("truncated" if ended else "damaged", where, f"expected a JSON value, got {line[:60]!r}: {what}")
        return what
    if isinstance(row, dict):
        for name in TOKEN_COLUMNS:
            ids = row.get(name)
            if isinstance(ids, list) and ids and all(type(one) is int and abs(one) < 1 << 62 for one in ids):
                counts.feed(Window(str(found.path), 0, np.array(ids, np.int64)))
    return ""


def _jsonl_end(found: Walk) -> None:
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


WALKERS: Mapping[str, Callable[[Walk, BinaryIO, Options], None]] = {
    "webdataset": _tar,
    "tfrecord": _tfrecord,
    **dict.fromkeys(_LINES, _jsonl),
}


def mend_stream(path: Path, kind: str, out: Path, options: Options) -> list[Path]:
    """Write what is whole of a tar, TFRecord or JSONL file to directory `out`, compressed as it was.

    Raises:
        UsageError: If nothing of it is whole.
    """
    found = walk(kind, path, options)
    if not found.good:
        raise UsageError(f"{path}: expected something whole in it, got nothing. Fetch or write it again.")
    compression = str(found.facts.get("compression", ""))
    atomic_write(out / path.name, _packed(_copied(found, kind), compression))
    return [out / path.name]


def _copied(found: Walk, kind: str) -> Iterator[bytes]:
    with closing(open_unpacked(found.path)) as file:
        at = 0
        for start, stop in found.good:
            _pass(file, start - at)
            at, left = start, stop - start
            if kind in _LINES:
                line = file.readline(_MOST_LINE)
                yield line if line.endswith(b"\n") else line + b"\n"
                at += len(line)
                continue
            while left and (data := file.read(min(left, 1 << 20))):
                yield data
                left -= len(data)
            at = stop
            if kind == "webdataset":
                yield bytes(left + -(stop - start) % 512)
    if kind == "webdataset":
        yield bytes(1024)


def _pass(file: BinaryIO, num_bytes: int) -> None:
    while num_bytes > 0 and (data := file.read(min(num_bytes, 1 << 20))):
        num_bytes -= len(data)


def _packed(chunks: Iterator[bytes], compression: str) -> Iterator[bytes]:
    """Chunks compressed as a file was; each as a member or frame of 1 MiB and more, which all readers join."""
    packers: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        "gz": gzip.compress,
        "zst": zstandard.ZstdCompressor().compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
    }
    pack = packers.get(compression)
    if pack is None:
        raise UsageError(f"mend: expected gz, zst, bz2 or xz, got {compression}. Unpack the file first.")
    held: list[bytes] = []
    for chunk in chunks:
        held.append(chunk)
        if sum(map(len, held[-64:])) >= 1 << 20 or len(held) >= 4096:
            yield pack(b"".join(held))
            held = []
    if held:
        yield pack(b"".join(held))
