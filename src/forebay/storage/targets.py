"""Where a mirror writes: a directory, or below a prefix of a bucket. What lies under its name there is whole.

A directory gets a file by a rename; a bucket shows an object when its last byte is there. An upload of a bucket that a
kill cuts off is never seen under the object's name, but takes room until the bucket's lifecycle rule ends it.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from forebay.dataset.slices import hash_file
from forebay.errors import ForebayError, UsageError
from forebay.files import atomic_write, commit_files, remove_stale
from forebay.storage.base import PermanentError
from forebay.storage.buckets import BucketOrigin
from forebay.storage.locks import Lock, try_acquire
from forebay.storage.origins import open_origin

_LOCK_FILE = ".mirror.lock"
_HASH = "sha256"  # The name under which an object's hash is kept with it.
_CHUNK_BYTES = 8 << 20
_MOST_CHUNKS = 9000  # A bucket takes 10 000 parts.
_CHUNKS_AT_ONCE = 4


class Target(Protocol):
    """A place for the files of one dataset, locked against other mirrors while it is open. Threads share it."""

    url: str
    _mirror_lock: Lock

    def has(self, name: str, num_bytes: int, sha256: str | None) -> bool:
        """Whether the file is there, of this size; and with this hash, unless that is None."""

    def read_whole(self, name: str) -> bytes | None:
        """A whole small file; None if there is none."""

    def part_of(self, name: str) -> Path:
        """Where to fetch a file to before `place`. On the same disk as the target, if that is a directory."""

    def place(self, name: str, part: Path, sha256: str) -> None:
        """Give a fetched, verified, synced file its name there; `part` is gone then."""

    def write(self, name: str, data: bytes, sha256: str) -> None:
        """Put a small file there, whole or not at all."""

    def free_bytes(self) -> int | None:
        """What may still be written; None for no known limit."""
        return None

    def close(self) -> None:
        """Let go of it. May be called twice."""
        if self._mirror_lock.descriptor >= 0:
            self._mirror_lock.path.unlink(missing_ok=True)
            self._mirror_lock.release()


def open_target(url: str | Path, temporary: Path) -> Target:
    """The target behind a path, `file://`, `s3://`, `r2://`, `gs://` or `az://`; UsageError if another mirror writes
    there. Slices on their way to a bucket lie in `temporary`, made if absent."""
    text = str(url)
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    if scheme in ("", "file"):
        return FolderTarget(Path(open_origin(text).url))
    if scheme in ("s3", "r2", "gs", "az"):
        return BucketTarget(text, temporary)
    raise UsageError(f"mirror: expected a directory, s3://, r2://, gs:// or az:// to write to, got {text!r}.")


class FolderTarget(Target):
    """A directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)
        self._mirror_lock = _lock(folder, self.url)
        remove_stale(folder)

    def has(self, name: str, num_bytes: int, sha256: str | None) -> bool:
        path = self.folder / name
        try:
            if path.stat().st_size != num_bytes:
                return False
            return sha256 is None or hash_file(path) == sha256
        except FileNotFoundError:
            return False

    def read_whole(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def part_of(self, name: str) -> Path:
        path = self.folder / f"{name}.part"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def place(self, name: str, part: Path, sha256: str) -> None:
        commit_files({part: self.folder / name})

    def write(self, name: str, data: bytes, sha256: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, data)

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.folder).free


class BucketTarget(BucketOrigin, Target):
    """Objects below a prefix of a bucket; credentials as for reading, `R2_DATASET_WRITE_*` for `r2://`.

    Each object carries its sha256 as metadata, so that a mirror that goes on need not read what is there.
    Memory: 4 x 8 MiB an upload, more where a slice exceeds 72 GB.
    """

    r2_right = "WRITE"
    max_retries = 10  # for three minutes at most, of one request

    def __init__(self, url: str, temporary: Path) -> None:
        super().__init__(url)
        self._temporary = temporary
        self._mirror_lock = _lock(temporary, str(temporary))

    def has(self, name: str, num_bytes: int, sha256: str | None) -> bool:
        """See Target. An object without its hash is read to be sure."""
        found = self._try(name, lambda: self._head(name))
        if found is None or found[0] != num_bytes:
            return False
        if sha256 is None or found[1]:
            return sha256 is None or found[1] == sha256
        return bool(self._try(name, lambda: self._hash(name, num_bytes)) == sha256)

    def read_whole(self, name: str) -> bytes | None:
        data: bytes | None = self._try(name, lambda: self.get(name, 1 << 30))
        return data

    def part_of(self, name: str) -> Path:
        return self._temporary / f"{name.replace('/', '_')}.part"

    def place(self, name: str, part: Path, sha256: str) -> None:
        self._put(name, part, part.stat().st_size, sha256)
        part.unlink()

    def write(self, name: str, data: bytes, sha256: str) -> None:
        self._put(name, data, len(data), sha256)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):  # Parts to be gone on with stay.
            self._temporary.rmdir()

    def _put(self, name: str, what: Path | bytes, num_bytes: int, sha256: str) -> None:
        obstore, store = self._store()
        chunk = max(_CHUNK_BYTES, -(-num_bytes // _MOST_CHUNKS))
        options = {"attributes": {_HASH: sha256}, "chunk_size": chunk, "max_concurrency": _CHUNKS_AT_ONCE}
        if self._try(name, lambda: obstore.put(store, self._prefix + name, what, **options)) is None:
            raise UsageError(f"{self.url}/{name}: may not be written. Check the bucket and the credentials.")

    def _head(self, name: str) -> tuple[int, str]:
        obstore, store = self._store()
        found = obstore.get(store, self._prefix + name, options={"head": True})
        return int(found.meta["size"]), str(found.attributes.get(_HASH, ""))

    def _hash(self, name: str, num_bytes: int) -> str:
        digest = hashlib.sha256()
        for data in self.read(name, 0, num_bytes):
            digest.update(data)
        return digest.hexdigest()

    def _try(self, name: str, do: Callable[[], Any]) -> Any:
        """What `do` gives, which obstore tries again while faults may pass; None if it is refused."""
        try:
            return do()
        except (PermanentError, FileNotFoundError):
            return None
        except ForebayError:
            raise
        except Exception as error:  # the library's errors share no base
            raise self._told(name, error) from error


def _lock(folder: Path, where: str) -> Lock:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = try_acquire(folder / _LOCK_FILE)
    except OSError as error:
        raise UsageError(f"mirror: cannot write to {where}: {error}. Choose another directory.") from error
    if lock is None:
        raise UsageError(f"mirror: expected {where} for itself, got another mirror writing there. Wait for it to end.")
    return lock
