"""Marks of slices whose files matched their hashes, kept in the user's cache directory.

A mark (16 bytes a slice) is a hash of the slice's SHA-256 and its file's inode, size and times, so a modified file is
hashed again. Threads and processes share a file of marks without locks: a lost or torn mark costs one more hash.
"""

import contextlib
import hashlib
import os
import struct
from pathlib import Path
from typing import Any

from forebay.dataset.slices import hash_file
from forebay.errors import DatasetError

_MARK_BYTES = 16


def user_cache() -> Path:
    """The user's cache directory: `$FOREBAY_CACHE`, or `forebay` in `$XDG_CACHE_HOME` or `~/.cache`."""
    configured = os.environ.get("FOREBAY_CACHE")
    return (
        Path(configured) if configured else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay"
    )


class VerifiedMarks:
    """The marks of the dataset in one directory."""

    def __init__(self, folder: Path, dataset_id: str) -> None:
        folder_hash = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        self._path = user_cache() / "verified" / f"{dataset_id[:32]}-{folder_hash}"
        self._marks: dict[int, bytes] = {}  # By slice, of this process.

    def verify(self, index: int, path: Path, sha256: str) -> None:
        """Hash a slice's file if it changed since it was last hashed. Raises DatasetError if it is damaged."""
        try:
            mark = _mark_of(path, sha256)
            if mark in (self._marks.get(index), self._on_disk(index)):
                return
            got = hash_file(path)
        except OSError as error:
            raise DatasetError(f"{path}: cannot be read: {error.strerror or error}. Fetch it again.") from error
        if got != sha256:
            raise DatasetError(
                f"{path}: expected bytes of sha256 {sha256}, got {got}. The dataset was changed, or its disk fails. "
                "Fetch or prepare this slice again."
            )
        self._marks[index] = mark
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _opened(self._path, os.O_RDWR | os.O_CREAT) as file:
                os.pwrite(file, mark, index * _MARK_BYTES)

    def _on_disk(self, index: int) -> bytes:
        with contextlib.suppress(OSError), _opened(self._path, os.O_RDONLY) as file:
            return os.pread(file, _MARK_BYTES, index * _MARK_BYTES)
        return b""


def _mark_of(path: Path, sha256: str) -> bytes:
    """The mark of a file, computed before hashing it: a file modified meanwhile gets other times."""
    stat = path.stat()
    identity = struct.pack("<4q", stat.st_ino & (1 << 63) - 1, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return hashlib.blake2b(bytes.fromhex(sha256) + identity, digest_size=_MARK_BYTES).digest()


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Any:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
