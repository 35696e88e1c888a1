"""The partial file of one download: which pieces are complete, which source sent which bytes, and the hash so far.

The file is `num_bytes` long plus a trailer: one byte with the log2 of the piece size, then one byte per piece, 1 when
the piece is complete. A piece is marked after it is written, so a killed process loses incomplete pieces only. After a
power failure a mark can be wrong; the final hash detects that.
"""

import errno
import hashlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forebay.dataset.chunks import ChunkHasher, root_of
from forebay.errors import UsageError

EARLIER_RUN = "an earlier run"  # the source of bytes that were in the file when it was opened
MIN_PIECE_BYTES = 1 << 20  # of a slice
_READ_BYTES = 256 << 10
_MIN_CHECK_BYTES = 1 << 20
_MAX_CHECK_BYTES = 64 << 20  # checked per step, so that a closed file is noticed


class Check(Protocol):
    """Verifies the content of a file while it is downloaded."""

    def advance(self, path: Path, start: int, stop: int) -> None:
        """Check bytes [start, stop) of the file; bytes [0, start) were passed before. Calls do not overlap.

        A `start` below the last `stop` means that the bytes from `start` on were downloaded again.
        """

    def wrong(self) -> list[tuple[int, int]]:
        """Return the ranges of the complete file that must be downloaded again; empty if all bytes are right.

        Raises:
            ForebayError: If another download cannot help.
        """
        return []


class Sha256Check(Check):
    """Hashes a slice; the caller compares its id. `chunk_bytes` as of the dataset."""

    def __init__(self, chunk_bytes: int = 0) -> None:
        self._chunk_bytes = chunk_bytes
        self._hasher = ChunkHasher(chunk_bytes)

    def advance(self, path: Path, start: int, stop: int) -> None:
        """Hash bytes [start, stop). Raises OSError."""
        if start == 0:
            self._hasher = ChunkHasher(self._chunk_bytes)
        _hash_range(self._hasher, path, start, stop)

    def hexdigest(self) -> str:
        """Return the id of the slice, whose bytes have all been passed."""
        return root_of(self._hasher.leaves())


class SizeCheck(Check):
    """Accepts any content: nothing but the size of the file is known."""

    def advance(self, path: Path, start: int, stop: int) -> None:
        """Do nothing."""


@dataclass(eq=False, slots=True)
class ByteRange:
    """Bytes [start, stop) that one request downloads, of which [start, offset) are written."""

    start: int
    stop: int
    offset: int
    sources: tuple[str, ...] = ()
    tries: int = 0
    not_before: float = 0.0


class PartFile:
    """The partial file of one download. Threads share it; after `close` nothing is written.

    An existing file of the same size and pieces is resumed; any other is overwritten.

    Args:
        piece_bytes: What is resumed as a whole; a power of two.
        range_bytes: What one request downloads; a multiple of `piece_bytes`.
        check: Verifies the bytes in place of the sha256, which is then not computed.
    """

    def __init__(
        self, path: Path, num_bytes: int, piece_bytes: int, *, range_bytes: int = 0, check: Check | None = None
    ) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self.lock = threading.Lock()
        self.received = 0  # bytes written, those of earlier runs included
        self.checked = 0
        self.check = check or Sha256Check()
        self.piece_bytes = piece_bytes
        self._range_bytes = max(range_bytes, piece_bytes)
        self._file = -1
        self._first_open = 0
        self._is_checking = False
        self.ranges: list[ByteRange] = []  # all, by start; those of complete pieces are complete. `forget` makes others
        self._current: set[ByteRange] = set()

    def open(self) -> None:
        """Create or resume the file. Raises OSError."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        num_pieces, bits = -(-self.num_bytes // self.piece_bytes), bytes([self.piece_bytes.bit_length() - 1])
        trailer = os.pread(self._file, num_pieces + 2, self.num_bytes)
        if trailer[:1] == bits and len(trailer) == 1 + num_pieces and set(trailer[1:]) <= {0, 1}:
            return self._make_ranges(trailer[1:])
        # Without a trailer it is complete: the process was killed after `finish`.
        is_complete = os.fstat(self._file).st_size == self.num_bytes > 0
        if not is_complete:
            os.ftruncate(self._file, 0)
        marks = bytes([is_complete]) * num_pieces
        self._write_all(bits + marks, self.num_bytes)
        self._make_ranges(marks)

    def forget(self, ranges: list[tuple[int, int]]) -> None:
        """Discard the pieces of a complete file that contain these bytes, or all; earlier ranges are no longer current.

        Raises OSError.
        """
        size = self.piece_bytes
        pieces = {piece for start, stop in ranges for piece in range(start // size, -(-stop // size))}
        with self.lock:
            if self._file >= 0:
                marks = bytes(piece not in pieces for piece in range(-(-self.num_bytes // size)))
                self._write_all(marks, self.num_bytes + 1)
                self._make_ranges(marks)
                self.checked = min(pieces, default=0) * size

    def _make_ranges(self, marks: bytes) -> None:
        """Build the ranges from the marks of the pieces: neighbours of one state are joined up to `range_bytes`."""
        self.ranges, self._first_open, self.received = [], 0, 0
        is_previous_complete = 2
        for piece, is_complete in enumerate(marks):
            start, stop = piece * self.piece_bytes, min((piece + 1) * self.piece_bytes, self.num_bytes)
            if is_complete != is_previous_complete or start % self._range_bytes == 0:
                self.ranges.append(ByteRange(start, stop, start, (EARLIER_RUN,) if is_complete else ()))
            self.ranges[-1].stop = stop
            if is_complete:
                self.ranges[-1].offset = stop
                self.received += stop - start
            is_previous_complete = is_complete
        self._current = set(self.ranges)

    def write(self, byte_range: ByteRange, data: memoryview, source: str) -> bool:
        """Append to a range; False if the file is closed or the range is no longer current. Raises OSError."""
        with self.lock:
            if self._file < 0 or not self.is_current(byte_range):
                return False
            self._write_all(data, byte_range.offset)
            first = byte_range.offset // self.piece_bytes
            byte_range.offset += len(data)
            self.received += len(data)
            if source not in byte_range.sources:
                byte_range.sources = (*byte_range.sources, source)
            is_end = byte_range.offset == self.num_bytes
            completed = -(-byte_range.offset // self.piece_bytes) if is_end else byte_range.offset // self.piece_bytes
            if completed > first:
                self._write_all(b"\1" * (completed - first), self.num_bytes + 1 + first)
            return True

    def is_current(self, byte_range: ByteRange) -> bool:
        """Whether a range was not replaced by `forget`."""
        return byte_range in self._current

    def contiguous(self) -> int:
        """Return the number of bytes from 0 without a gap. The caller holds the lock."""
        while self._first_open < len(self.ranges):
            byte_range = self.ranges[self._first_open]
            if byte_range.offset < byte_range.stop:
                return byte_range.offset
            self._first_open += 1
        return self.num_bytes

    def advance_check(self) -> bool:
        """Hash or check the contiguous bytes, unless another thread does; True once, when all are. Raises OSError."""
        with self.lock:
            if self._is_checking or (
                self.contiguous() - self.checked < _MIN_CHECK_BYTES and self.contiguous() < self.num_bytes
            ):
                return False
            self._is_checking = True
        while True:
            with self.lock:
                ranges, start, stop = self.ranges, self.checked, min(self.contiguous(), self.checked + _MAX_CHECK_BYTES)
                if self._file < 0 or start == stop:
                    self._is_checking = False
                    return False
            self.check.advance(self.path, start, stop)
            with self.lock:
                if self.ranges is ranges:
                    self.checked = stop
                    if stop == self.num_bytes:
                        self._is_checking = False
                        return self._file >= 0

    def digest_of(self, start: int, stop: int) -> bytes:
        """Return the sha256 of bytes [start, stop) as they are in the file now. Raises OSError."""
        digest = hashlib.sha256()
        _hash_range(digest, self.path, start, stop)
        return digest.digest()

    def finish(self) -> None:
        """Remove the trailer and flush the file to disk. Raises OSError."""
        with self.lock:
            os.ftruncate(self._file, self.num_bytes)
            os.fsync(self._file)

    def close(self) -> None:
        """Write nothing more. May be called twice."""
        with self.lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _write_all(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while len(view):
            done = os.pwrite(self._file, view, offset)
            view, offset = view[done:], offset + done


def _hash_range(digest: "hashlib._Hash | ChunkHasher", path: Path, start: int, stop: int) -> None:
    buffer = memoryview(bytearray(min(_READ_BYTES, stop - start)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < stop:
            if not (count := file.readinto(buffer[: stop - start])):
                raise OSError(f"{path} was truncated to {start} bytes by another process")
            digest.update(buffer[:count])
            start += count


def disk_error(part: Path, num_bytes: int, error: OSError) -> UsageError:
    """Return the UsageError for a disk fault; the written bytes are kept and resumed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UsageError(
            f"{part}: expected room for {num_bytes} bytes, got: {error.strerror}. Free space there, lower the "
            "cache's budget, or choose another directory; the downloaded bytes are kept and resumed."
        )
    return UsageError(f"{part}: cannot be written: {error}. Check the directory and its permissions.")
