"""A stream of bytes that may break and go on: what the reader of archives sees of gzip members and damage.

Hides: buffers, gzip's members, and the search for the next sound member after a damaged one. A member is unpacked once;
a damaged one twice, the second time byte by byte near the damage, so that nothing before it is lost. Memory: what
the reader asks to see at once, and 256 KiB.
"""

import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from forebay.prepare.read.opening import MIN_UNPACKED_BYTES, Damaged

_PACKED = 64 << 10
_UNPACKED = 256 << 10
_MAGIC = b"\x1f\x8b\x08"
_TRIM = 1 << 20
_REWIND_FLOOR = 64 << 20


@dataclass(frozen=True)
class Bytes:
    """Unpacked bytes; `offset` is where in the file they, or the member that holds them, begin."""

    offset: int
    data: bytes
    member: bool = False


@dataclass(frozen=True)
class Break:
    """Damage: what follows continues elsewhere. `unsound` is where a member begins whose checksum was wrong, or -1."""

    reason: str
    unsound: int = -1


Pieces = Iterator[Bytes | Break]


class Flow:
    """Bytes read forward, up to a break that `mend` steps over.

    Args:
        pieces: Where they come from; one after the other.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._buffer = bytearray()
        self._at = 0
        self._base = 0  # how many unpacked bytes stood before the buffer
        self._marks: deque[tuple[int, int, bool]] = deque()  # unpacked offset, offset in the file, whether a member's
        self._break: Break | None = None
        self.told = False
        self.skipped_start = b""

    @property
    def broken(self) -> bool:
        """Whether a break follows the bytes that are there."""
        return self._break is not None

    def need(self, size: int) -> int:
        """How many bytes are there after trying to have `size`; fewer before the end or a break."""
        while len(self._buffer) - self._at < size and self._break is None:
            piece = next(self._pieces, None)
            if piece is None:
                break
            if isinstance(piece, Break):
                self._break = piece
                break
            if self._at > _TRIM:
                self._trim()
            end = self._base + len(self._buffer)
            if not piece.member or not self._marks or self._marks[-1][1] != piece.offset:
                self._marks.append((end, piece.offset, piece.member))
            self._buffer += piece.data
        return len(self._buffer) - self._at

    def _trim(self) -> None:
        gone = self._at - 1  # one byte stays, so that a search sees the line end before the next record
        del self._buffer[:gone]
        self._base += gone
        self._at = 1
        while len(self._marks) > 1 and self._marks[1][0] <= self._base + self._at:
            self._marks.popleft()

    def where(self) -> str:
        """Where the next byte stands in the file: `byte 5120`; in a gzip member, where that begins."""
        here = self._base + self._at
        found = (0, 0, False)
        for mark in self._marks:
            if mark[0] > here:
                break
            found = mark
        start, offset, member = found
        if not member:
            return f"byte {offset + here - start}"
        return f"byte {offset}" if here == start else f"byte {offset}, unpacked {here - start}"

    def unsound(self) -> bool:
        """Whether the next byte is of a member whose checksum was wrong."""
        if self._break is None or self._break.unsound < 0:
            return False
        start, offset, _ = self._marks[-1]
        return offset == self._break.unsound and self._base + self._at >= start

    def tell(self) -> str:
        """What the break is; from now on it is told."""
        self.told = True
        return self._break.reason if self._break else ""

    def mend(self) -> str:
        """Drops what stands before the break and goes on after it; says what was damaged."""
        assert self._break is not None
        reason, self._break, self.told = self._break.reason, None, False
        self._at = len(self._buffer)
        return reason

    def take(self, size: int) -> bytes:
        """The next `size` bytes, or as many as are there."""
        self.need(size)
        data = bytes(memoryview(self._buffer)[self._at : self._at + size])
        self._at += len(data)
        return data

    def skip(self, size: int) -> int:
        """Passes over `size` bytes in bounded memory; returns how many there were."""
        left = size
        while left > 0 and (there := self.need(1)):
            step = min(there, left)
            self._at += step
            left -= step
        return size - left

    def skip_any(self, of: bytes) -> bool:
        """Passes over bytes of this set; whether any other is left."""
        while self.need(1):
            if self._buffer[self._at] not in of:
                return True
            self._at += 1
        return False

    def byte(self, ahead: int) -> int:
        """The byte that stands `ahead` of the next; -1 if there is none."""
        return self._buffer[self._at + ahead] if self.need(ahead + 1) > ahead else -1

    def sees(self, pattern: re.Pattern[bytes]) -> bool:
        """Whether what is buffered matches from the next byte on."""
        return pattern.match(self._buffer, self._at) is not None

    def holds(self, begins: Callable[[bytearray, int], bool], ahead: int = 0) -> bool:
        """Whether `begins(data, start)` says so of what is buffered `ahead` of the next byte."""
        return begins(self._buffer, self._at + ahead)

    def search(self, pattern: re.Pattern[bytes], limit: int) -> int:
        """How many bytes it is to the end of the first match within `limit` bytes; -1 if there is none."""
        limit = min(self.need(limit), limit)
        found = pattern.search(self._buffer, self._at, self._at + limit)
        return found.end() - self._at if found else -1

    def find(self, finder: Callable[[bytearray, int, int], int], start: int, limit: int) -> int:
        """How far ahead `finder(data, start, stop)` sees something in `[start, limit)` of what is buffered; or -1."""
        limit = min(limit, len(self._buffer) - self._at)
        found = finder(self._buffer, self._at + start, self._at + limit)
        return found - self._at if found >= 0 else -1

    def skip_to(self, finder: Callable[[bytearray, int, int], int]) -> int:
        """Passes over what stands before the next thing that `finder` sees, or all; returns how many bytes."""
        passed, margin = 0, 16 << 10
        self.skipped_start = bytes(self._buffer[self._at : self._at + 512])
        while self.need(4 * margin):
            found = self.find(finder, 1, self.need(0))
            if found >= 0:
                self._at += found
                return passed + found
            there = self.need(0)
            step = there if there < 4 * margin else there - margin
            self._at += step
            passed += step
            if step == there:
                break
        return passed


def plain_pieces(stream: BinaryIO) -> Pieces:
    """The bytes of a stream that is read as it is."""
    offset = 0
    while True:
        try:
            data = stream.read(_UNPACKED)
        except Damaged as error:
            yield Break(str(error))
            return
        if not data:
            return
        yield Bytes(offset, data)
        offset += len(data)


def gzip_members(stream: BinaryIO, max_ratio: int, begins: Callable[[bytes], bool]) -> Pieces:
    """The unpacked bytes of a seekable file of gzip members; after a damaged one, of the next that `begins` knows."""
    start, given, rewound, seen = 0, 0, 0, 0
    rest = stream.read(_PACKED)
    while rest:
        member = _Member(stream, start, rest)
        for data in member.unpack():
            given += len(data)
            if given > max(MIN_UNPACKED_BYTES, max_ratio * (start + member.fed)):
                yield Break(f"{start + member.fed} bytes grew to more than {max_ratio} times as many: a bomb")
                return
            yield Bytes(start, data, member=True)
        seen = max(seen, start + member.fed)
        if member.failure:
            yield Break(f"gzip member: {member.failure}", start if member.checksum else -1)
            rewound += member.fed
            # Members within members could be unpacked again and again: past this, what was read is left.
            back = start + 1 if rewound < _REWIND_FLOOR + seen else seen
            start = _next_member(stream, back, begins)
            if start < 0:
                return
            stream.seek(start)
            rest = stream.read(_PACKED)
            continue
        start, rest = start + member.fed - len(member.rest), member.rest
        while True:  # some writers fill up with zeros
            sound = rest.lstrip(b"\0")
            start += len(rest) - len(sound)
            if sound or not (rest := stream.read(_PACKED)):
                rest = sound
                break


class _Member:
    """One gzip member, unpacked; what went wrong stands in `failure`."""

    def __init__(self, stream: BinaryIO, start: int, first: bytes) -> None:
        self._stream = stream
        self._start = start
        self._first = first
        self.fed = len(first)
        self.rest = b""
        self.failure = ""
        self.checksum = False

    def unpack(self) -> Iterator[bytes]:
        decoder, data, given = zlib.decompressobj(31), self._first, 0
        while not decoder.eof:
            try:
                unpacked = decoder.decompress(data, _UNPACKED)
            except zlib.error as error:
                self.failure = str(error).partition(": ")[2] or str(error)
                self.checksum = self.failure in ("incorrect data check", "incorrect length check")
                yield from self._up_to_damage(given)
                return
            if unpacked:
                given += len(unpacked)
                yield unpacked
            data = decoder.unconsumed_tail
            if not data and not decoder.eof:
                data = self._stream.read(_PACKED)
                self.fed += len(data)
                if not data:
                    self.failure = "the file ends in it"
                    return
        self.rest = decoder.unused_data

    def _up_to_damage(self, given: int) -> Iterator[bytes]:
        """What zlib kept to itself when it failed: all that stands before the damage but the first `given` bytes."""
        decoder = zlib.decompressobj(31)
        self._stream.seek(self._start)
        left = self.fed
        while left > 0 and (data := self._stream.read(min(left, _PACKED))):
            left -= len(data)
            parts = [data] if left > 0 else [data[i : i + 1] for i in range(len(data))]
            for part in parts:
                try:
                    unpacked = decoder.decompress(part)
                except zlib.error:
                    return
                fresh = unpacked[given:] if given < len(unpacked) else b""
                given = max(0, given - len(unpacked))
                if fresh:
                    yield fresh


def _next_member(stream: BinaryIO, start: int, begins: Callable[[bytes], bool]) -> int:
    """Where, from `start` on, a gzip member begins whose contents `begins` knows; -1 if none does."""
    stream.seek(start)
    held, offset = b"", start
    while data := stream.read(_PACKED):
        held += data
        at = held.find(_MAGIC)
        while at >= 0:
            if len(held) - at < 2048:
                held += stream.read(2048)
            if _member_begins(held[at : at + 2048], begins):
                return offset + at
            at = held.find(_MAGIC, at + 1)
        offset += len(held) - 2
        held = held[-2:]
    return -1


def _member_begins(data: bytes, begins: Callable[[bytes], bool]) -> bool:
    try:
        return begins(zlib.decompressobj(31).decompress(data, 512))
    except zlib.error:
        return False
