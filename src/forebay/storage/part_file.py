"""A slice on its way to disk: which bytes are there, who sent them, and its hash as far as they are contiguous.

The partial file is `num_bytes` long plus a trailer: one byte that says the size of a piece (its power of two) and
one a piece, 1 when the piece is complete. A piece is marked after it was written, so that whatever is killed, what
is marked is there; where a power cut breaks that promise, the hash at the end tells.
"""

import errno
import hashlib
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from forebay.errors import UsageError

EARLIER = "an earlier run"
_READ_BYTES = 256 << 10
_STEP_BYTES = 64 << 20  # between two looks at whether the file was closed


class Check(Protocol):
    """What says of a file whether its bytes are right."""

    def advance(self, path: Path, start: int, stop: int) -> None:
        """Bytes [0, stop) lie in the file now, of which it was told of [0, start). From one thread at a time.

        A lower `start` than the last `stop`: bytes from there on were fetched anew.
        """

    def wrong(self) -> list[tuple[int, int]]:
        """Of the whole file, the bytes to be fetched again; empty if it is right. ForebayError: it is no use."""
        return []


class Sha256Check(Check):
    """Hashes a file; what is wrong is found out by whoever knows the hash."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def advance(self, path: Path, start: int, stop: int) -> None:
        """Raises OSError."""
        if start == 0:
            self._digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(_READ_BYTES, stop - start)))
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while start < stop:
                got = file.readinto(buffer[: stop - start])
                if not got:
                    raise OSError(f"{path} was cut at byte {start} by another")
                self._digest.update(buffer[:got])
                start += got

    def hexdigest(self) -> str:
        """The sha256 of the bytes so far."""
        return self._digest.hexdigest()


class SizeOnly(Check):
    """The check of a file of which nothing but its size is known."""

    def advance(self, path: Path, start: int, stop: int) -> None:
        """Nothing to look at."""


@dataclass(eq=False, slots=True)
class ByteRange:
    """What one connection fetches: bytes [start, stop) from `piece` on, of which [start, at) are written."""

    start: int
    stop: int
    piece: int
    at: int
    sources: tuple[str, ...] = ()
    tries: int = 0
    not_before: float = 0.0
    byte_at: float = 0.0
    taken_over: bool = False


class PartFile:
    """The partial file of one slice. One lock: nobody writes after `close`.

    One that fits is resumed, any other begun anew. `piece_bytes` is a power of two. At least `num_spans` spans are made
    of it, so that all connections have work, if they can be of `min_range_bytes`; or spans of `span_bytes`, a multiple
    of `piece_bytes`. `check` judges the bytes in place of the hash, which is not computed then.
    """

    def __init__(
        self,
        path: Path,
        num_bytes: int,
        piece_bytes: int,
        num_spans: int,
        min_range_bytes: int = 1 << 20,
        *,
        span_bytes: int = 0,
        check: Check | None = None,
    ) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self.lock = threading.Lock()
        self.received = 0  # bytes written, those that were there included
        self.checked = 0
        self._piece_bytes = piece_bytes
        self._num_pieces = -(-num_bytes // piece_bytes)
        self.check = check or Sha256Check()
        self._times_begun = 0
        self._span_bytes = span_bytes or piece_bytes
        while not span_bytes and self._span_bytes > min_range_bytes and num_bytes < num_spans * self._span_bytes:
            self._span_bytes //= 2
        self._file = -1
        self._left: list[int] = []
        self._first_open = 0
        self.spans: list[ByteRange] = []  # all, by start; those of pieces that were there already are complete
        self._index_of: dict[int, int] = {}  # by start

    def open(self) -> None:
        """Make or resume it. Raises OSError."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        trailer = bytes([self._piece_bytes.bit_length() - 1]) + bytes(self._num_pieces)
        held = os.pread(self._file, len(trailer) + 1, self.num_bytes)
        if os.fstat(self._file).st_size == self.num_bytes > 0:  # killed after the trailer was cut off
            held = trailer[:1] + b"\1" * self._num_pieces
            self._write_all(held, self.num_bytes)
        if len(held) != len(trailer) or held[:1] != trailer[:1] or not set(held[1:]) <= {0, 1}:
            os.ftruncate(self._file, 0)
            self._write_all(trailer, self.num_bytes)
            held = trailer
        self._make_spans(held[1:])

    def restart(self) -> None:
        """Forget every byte: all spans anew. Those handed out before write no more. Raises OSError."""
        with self.lock:
            if self._file >= 0:
                self._write_all(bytes(self._num_pieces), self.num_bytes + 1)
                self._make_spans(bytes(self._num_pieces))
                self.checked = 0

    def forget(self, ranges: list[tuple[int, int]]) -> None:
        """Of a whole file, forget the pieces that touch these bytes: spans anew. Raises OSError."""
        size = self._piece_bytes
        pieces = {piece for start, stop in ranges for piece in range(start // size, -(-stop // size))}
        with self.lock:
            if self._file >= 0:
                complete = bytes(piece not in pieces for piece in range(self._num_pieces))
                self._write_all(complete, self.num_bytes + 1)
                self._make_spans(complete)
                self.checked = min(pieces) * size

    def _make_spans(self, complete: bytes) -> None:
        self.spans, self._left, self._first_open, self.received = [], [], 0, 0
        self._times_begun += 1
        step = max(1, self._span_bytes // self._piece_bytes)
        for first in range(0, self._num_pieces, step):
            last = min(first + step, self._num_pieces)
            while first < last:  # what is there and what is not, in turn
                piece, there = first, complete[first]
                while first < last and complete[first] == there:
                    first += 1
                self._make_run(piece, first, bool(there))
        self._index_of = {span.start: index for index, span in enumerate(self.spans)}

    def _make_run(self, piece: int, end: int, there: bool) -> None:
        """The spans of pieces [piece, end), all there or all not."""
        first, last = piece * self._piece_bytes, min(end * self._piece_bytes, self.num_bytes)
        starts = range(first, last, self._span_bytes)
        self._left += [0 if there else -(-len(starts) // (end - piece))] * (end - piece)
        for start in starts:
            stop = min(start + self._span_bytes, last)
            self.spans.append(ByteRange(start, stop, piece, stop if there else start, (EARLIER,) if there else ()))
        self.received += last - first if there else 0

    def write(self, span: ByteRange, data: memoryview, source: str) -> bool:
        """Put what came next of a span in its place; False if it is wanted no more. Raises OSError."""
        with self.lock:
            if self._file < 0 or not self.is_current(span):
                return False
            self._write_all(data, span.at)
            before, span.at = span.at, span.at + len(data)
            self.received += len(data)
            if source not in span.sources:
                span.sources = (*span.sources, source)
            for piece in range(before // self._piece_bytes, -(-span.at // self._piece_bytes)):
                if before < min(span.stop, (piece + 1) * self._piece_bytes) <= span.at:
                    self._left[piece] -= 1
                    if self._left[piece] == 0:
                        self._write_all(b"\1", self.num_bytes + 1 + piece)
            return True

    def is_current(self, span: ByteRange) -> bool:
        """Whether it was not forgotten by `restart`."""
        index = self._index_of.get(span.start)
        return index is not None and self.spans[index] is span

    def contiguous(self) -> int:
        """Bytes from 0 on without a gap. Call with the lock held."""
        while self._first_open < len(self.spans):
            span = self.spans[self._first_open]
            if span.at < span.stop:
                return span.at
            self._first_open += 1
        return self.num_bytes

    def check_on(self) -> bool:
        """Hash or check what is contiguous by now; whether all is. One thread at a time. Raises OSError."""
        while True:
            with self.lock:
                if self._file < 0:
                    return False
                begun, at = self._times_begun, self.checked
                stop = min(self.contiguous(), at + _STEP_BYTES)
            if at < stop:
                self.check.advance(self.path, at, stop)
            with self.lock:
                if self._file < 0:
                    return False
                if self._times_begun != begun:
                    continue  # begun anew meanwhile
                self.checked = stop
                if stop == self.num_bytes:
                    return True
                if self.contiguous() - stop < _READ_BYTES:
                    return False

    def digest_of(self, start: int, stop: int) -> bytes:
        """A digest of bytes [start, stop) as they lie there now. Raises OSError."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            file.seek(start)
            while start < stop and (data := file.read(min(_READ_BYTES, stop - start))):
                digest.update(data)
                start += len(data)
        return digest.digest()

    def finish(self) -> None:
        """Cut the trailer off and make the bytes last. Raises OSError."""
        with self.lock:
            os.ftruncate(self._file, self.num_bytes)
            os.fsync(self._file)

    def take_over(self, span: ByteRange) -> ByteRange | None:
        """The rest of a span for somebody else: whoever has it now writes no more. None if it is complete or old."""
        with self.lock:
            if self._file < 0 or not self.is_current(span) or span.at == span.stop:
                return None
            rest = replace(span, taken_over=True)
            self.spans[self._index_of[span.start]] = rest
            return rest

    @property
    def is_open(self) -> bool:
        """Whether it may still be written."""
        return self._file >= 0

    def close(self) -> None:
        """Write no more, whoever holds a span. May be called twice."""
        with self.lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _write_all(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while len(view):
            done = os.pwrite(self._file, view, offset)
            view, offset = view[done:], offset + done


def disk_error(part: Path, num_bytes: int, error: OSError) -> UsageError:
    """A fault of the disk as ours; what was written stays for a later run."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UsageError(
            f"{part}: expected room for {num_bytes} bytes, got: {error.strerror}. Free space there, lower the "
            "cache's budget, or choose another directory; what was fetched is kept and resumed."
        )
    return UsageError(f"{part}: cannot be written: {error}. Check the directory and its permissions.")
