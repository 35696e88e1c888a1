"""Chunks of local slices whose bytes matched their hashes, recorded in the user's cache directory.

The file has a mark for each slice (a hash of its id and of its file's inode, size and times) and a byte for each chunk,
1 if it was verified; a slice with another mark is hashed again. Threads and processes share it without locks: a lost or
torn byte costs one more hash. It is sparse: 16 bytes a slice and a byte a chunk that was read.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from forebay.arrays import U8
from forebay.dataset.chunks import HASH_BYTES, consecutive_runs, first_chunks, wrong_chunks
from forebay.dataset.manifest import SliceInfo, SliceTable
from forebay.errors import DatasetError
from forebay.files import open_below
from forebay.machine import hint_directory, open_own
from forebay.maps import map_file

_MARK_BYTES = 16
_READ_BYTES = 1 << 18  # At once: more are slower.
_MAX_LEAVES = 64  # Slices whose leaves are kept while they are verified part by part.


class VerifiedChunks:
    """The verified chunks of the dataset in one directory. Threads may share it."""

    def __init__(self, folder: Path, dataset_id: str, table: SliceTable) -> None:
        folder_hash = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        self._name = f"{dataset_id[:32]}-{folder_hash}-2"
        self._folder = folder
        self._first = first_chunks(table.bytes, table.chunk_bytes)
        self._bytes: U8 | None = None
        self._leaves: dict[int, bytes] = {}

    def is_verified(self, index: int, row: SliceInfo) -> bool:
        """Whether all chunks of a slice are. Raises DatasetError if its file is missing."""
        with self._open_slice(row) as file:
            return bool(self._flags(index, file, row).all())

    def verify(
        self, index: int, row: SliceInfo, leaves: Callable[[], bytes], first: int = 0, last: int | None = None
    ) -> None:
        """Hash chunks [first, last) that were not verified since their file changed.

        Args:
            leaves: Returns the leaves of the slice's tree.

        Raises:
            DatasetError: If a chunk has other bytes, or the file cannot be read.
        """
        with self._open_slice(row) as file:
            flags = self._flags(index, file, row)
            missing = first + np.flatnonzero(flags[first:last] == 0)
            if not len(missing):
                return
            path = self._folder / row.name
            expected, size = self._leaves.get(index) or leaves(), row.chunk_bytes
            if len(self._leaves) >= _MAX_LEAVES:
                self._leaves.clear()
            self._leaves[index] = expected
            for run in consecutive_runs(missing):
                count = max(1, _READ_BYTES // size)
                for start in range(0, len(run), count):
                    low, high = int(run[start]), int(run[min(len(run), start + count) - 1]) + 1
                    file.seek(low * size)
                    data = memoryview(file.read(min(row.bytes, high * size) - low * size))
                    if low * size + len(data) < min(row.bytes, high * size):
                        raise DatasetError(
                            f"{path}: expected {row.bytes:,} bytes, got {low * size + len(data):,}: it was truncated "
                            "while it was read. Fetch or prepare this slice again."
                        )
                    if wrong := wrong_chunks(data, expected[low * HASH_BYTES : high * HASH_BYTES], row.chunk_bytes):
                        begin = (low + wrong[0]) * size
                        raise DatasetError(
                            f"{path}: bytes [{begin}, {min(row.bytes, begin + size)}) are not the dataset's (slice "
                            f"{row.sha256[:12]}…). It was changed, or its disk fails. Fetch or prepare it again."
                        )
                    flags[low:high] = 1
            if flags.all():
                self._leaves.pop(index, None)

    @contextmanager
    def _open_slice(self, row: SliceInfo) -> Iterator[BinaryIO]:
        try:
            with open_below(self._folder, row.name) as file:
                yield file
        except OSError as error:
            path = self._folder / row.name
            raise DatasetError(f"{path}: cannot be read: {error.strerror or error}. Fetch it again.") from error

    def _flags(self, index: int, file: BinaryIO, row: SliceInfo) -> U8:
        """The flags of a slice's chunks, cleared if its file changed."""
        data, mark = self._open(), _mark_of(file, row.sha256)
        stored = data[index * _MARK_BYTES : (index + 1) * _MARK_BYTES]
        base = (len(self._first) - 1) * _MARK_BYTES
        flags = data[base + int(self._first[index]) : base + int(self._first[index + 1])]
        if stored.tobytes() != mark:
            flags[:] = 0
            stored[:] = np.frombuffer(mark, np.uint8)
        return flags

    def _open(self) -> U8:
        if self._bytes is None:
            size = (len(self._first) - 1) * _MARK_BYTES + int(self._first[-1])
            try:
                with open(hint_directory("verified") / self._name, "a+b", opener=open_own) as file:
                    if file.seek(0, os.SEEK_END) != size:
                        file.truncate(size)
                    self._bytes = map_file(file, is_writable=True)
            except (OSError, ValueError):  # read-only, full or of another user: this process remembers them alone
                self._bytes = np.zeros(size, np.uint8)
        return self._bytes


def _mark_of(file: BinaryIO, sha256: str) -> bytes:
    """The mark of a file, computed before hashing it: a file modified meanwhile gets other times."""
    stat = os.fstat(file.fileno())
    identity = struct.pack("<4q", stat.st_ino & (1 << 63) - 1, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return hashlib.blake2b(bytes.fromhex(sha256) + identity, digest_size=_MARK_BYTES).digest()
