"""The target of a mirror: a directory, or a prefix of a bucket. A file with its final name is complete.

A file of a directory is renamed; an object of a bucket is visible after its last byte. An upload that a kill breaks off
is never visible, but takes space until the bucket's lifecycle rule deletes it.
"""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from forebay.dataset.chunks import hash_slice
from forebay.errors import UsageError
from forebay.files import atomic_write, commit_files, remove_stale
from forebay.storage.base import BUCKET_SCHEMES, PermanentError
from forebay.storage.buckets import BucketOrigin
from forebay.storage.locks import Lock, try_acquire
from forebay.storage.origins import open_origin

_LOCK_FILE = ".mirror.lock"
_HASH_KEY = "sha256"  # of the metadata of an object
_CHUNK_BYTES = 8 << 20
_MAX_CHUNKS = 9000  # buckets accept 10,000 parts
_CONCURRENT_CHUNKS = 4
_MAX_SMALL_BYTES = 1 << 30
_T = TypeVar("_T")


class FolderTarget:
    """The files of one dataset in a directory, locked against other mirrors while it is open. Threads share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)
        self._mirror_lock = _lock(folder)
        remove_stale(folder)

    def contains(self, name: str, num_bytes: int, sha256: str | None, chunk_bytes: int = 0) -> bool:
        """Whether the file exists with this size, and with this hash (of a slice its id) unless it is None."""
        path = self.folder / name
        try:
            return path.stat().st_size == num_bytes and (sha256 is None or hash_slice(path, chunk_bytes)[0] == sha256)
        except FileNotFoundError:
            return False

    def load(self, name: str) -> bytes | None:
        """Return a small file; None if it does not exist."""
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def part_path(self, name: str) -> Path:
        """Return where to download a file before `commit`."""
        path = self.folder / f"{name}.part"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, name: str, part: Path, sha256: str) -> None:
        """Move a complete, verified, synced file to its final name."""
        commit_files({part: self.folder / name})

    def write(self, name: str, data: bytes, sha256: str) -> None:
        """Write a small file atomically."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, data)

    def free_bytes(self) -> int | None:
        """Return the free space; None: unlimited."""
        return shutil.disk_usage(self.folder).free

    def close(self) -> None:
        """Release the lock. May be called twice."""
        _unlock(self._mirror_lock)


class BucketTarget(BucketOrigin):
    """As FolderTarget, a prefix of a bucket; credentials as for reading, `R2_DATASET_WRITE_*` for `r2://`.

    The metadata of each object contains its sha256, so that a resumed mirror need not read it.
    Memory: 4 x 8 MiB per upload, more for a slice above 72 GB.
    """

    r2_right = "WRITE"
    max_retries = 10  # three minutes at most per request

    def __init__(self, url: str, temporary: Path) -> None:
        super().__init__(url)
        self._temporary = temporary
        self._mirror_lock = _lock(temporary)

    def contains(self, name: str, num_bytes: int, sha256: str | None, chunk_bytes: int = 0) -> bool:
        """As of FolderTarget. An object without its hash in the metadata is copied again."""

        def compare(obstore: Any, store: Any) -> bool:
            result = obstore.get(store, self._prefix + name, options={"head": True})
            if int(result.meta["size"]) != num_bytes:
                return False
            return sha256 is None or result.attributes.get(_HASH_KEY) == sha256

        return self._call(name, compare) or False

    def load(self, name: str) -> bytes | None:
        return self._call(name, lambda obstore, store: self.get(name, _MAX_SMALL_BYTES))

    def part_path(self, name: str) -> Path:
        return self._temporary / f"{name.replace('/', '_')}.part"

    def commit(self, name: str, part: Path, sha256: str) -> None:
        self._put(name, part, part.stat().st_size, sha256)
        part.unlink()

    def write(self, name: str, data: bytes, sha256: str) -> None:
        self._put(name, data, len(data), sha256)

    def free_bytes(self) -> None:
        """As of FolderTarget: unlimited."""

    def close(self) -> None:
        _unlock(self._mirror_lock)
        with contextlib.suppress(OSError):  # Partial files that can be resumed are kept.
            self._temporary.rmdir()

    def _put(self, name: str, content: Path | bytes, num_bytes: int, sha256: str) -> None:
        chunk = max(_CHUNK_BYTES, -(-num_bytes // _MAX_CHUNKS))
        options = {"attributes": {_HASH_KEY: sha256}, "chunk_size": chunk, "max_concurrency": _CONCURRENT_CHUNKS}
        key = self._prefix + name
        if self._call(name, lambda obstore, store: obstore.put(store, key, content, **options)) is None:
            raise UsageError(f"{self.url}/{name}: cannot be written. Check the bucket and the credentials.")

    def _call(self, name: str, function: Callable[[Any, Any], _T]) -> _T | None:
        """Call a function of obstore, which retries transient faults; None if object or bucket do not exist."""
        try:
            with self._convert_errors(name) as (obstore, store):
                return function(obstore, store)
        except PermanentError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            return None


Target: TypeAlias = FolderTarget | BucketTarget


def open_target(url: str | Path, temporary: Path) -> Target:
    """Open the target at a path, `file://`, `s3://`, `r2://`, `gs://` or `az://`.

    Files on their way to a bucket are in `temporary`, created if absent. UsageError if another mirror uses the target.
    """
    text = str(url)
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    if scheme in ("", "file"):
        return FolderTarget(Path(open_origin(text).url))
    if scheme in BUCKET_SCHEMES:
        return BucketTarget(text, temporary)
    raise UsageError(f"mirror: expected a directory, s3://, r2://, gs:// or az:// to write to, got {text!r}.")


def _unlock(lock: Lock) -> None:
    if lock.descriptor >= 0:
        lock.path.unlink(missing_ok=True)
        lock.release()


def _lock(folder: Path) -> Lock:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = try_acquire(folder / _LOCK_FILE)
    except OSError as error:
        raise UsageError(f"mirror: cannot write to {folder}: {error}. Choose another directory.") from error
    if lock is None:
        raise UsageError(f"mirror: another mirror writes to {folder}. Wait for it to end.")
    return lock
