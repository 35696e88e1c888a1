"""The objects of a run by name, in a directory or below a prefix of a bucket: what its tasks read and write.

An object is complete or absent. In a bucket it is put once, in one request that fails where the name exists
(`If-None-Match: *`), so that of several machines that make the same object one wins and the others take it as theirs.
Files on their way are in the scratch directory of this machine (TMPDIR), and gone afterwards: nothing is shared but the
bucket. Memory: of one request; of a file that is moved, 4 x 8 MiB, more above 72 GB. An upload in parts that a kill
breaks off is never visible, but takes space until the bucket's lifecycle rule deletes it.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from forebay.arrays import Array
from forebay.dataset.chunks import hash_slice
from forebay.dataset.reader import local_path
from forebay.errors import DatasetError, UsageError, full_url, printable_url
from forebay.files import (
    atomic_write,
    commit_files,
    open_atomic,
    remove_stale,
    sync_file,
    temporary_directory,
    temporary_path,
)
from forebay.machine import own_directory
from forebay.maps import map_file
from forebay.storage.addresses import BucketAddress, bucket_address, is_bucket, is_url, join_url
from forebay.storage.base import read_whole
from forebay.storage.buckets import NOT_PARTIAL, PartsBucket, PatientBucket, shared_bucket
from forebay.storage.locks import Lock, locked_error

_PIECE = 8 << 20
_MAX_PARTS, _UPLOADS = 9000, 4  # of an object, of which buckets accept 10,000; and at once
_HASH_KEY = "sha256"  # of the metadata of an object
_MAX_PUT_BYTES = 4 << 30  # of one request; S3 takes 5 GiB
_REMOVED_AT_ONCE = 1000
_READERS = 32
BUCKET_WRITE_S = 10.0
_T = TypeVar("_T")
_I = TypeVar("_I")


def open_store(url: str | os.PathLike[str]) -> "Store":
    """The store at a path, `file://`, `s3://`, `r2://`, `gs://` or `az://`."""
    text = full_url(url)
    if is_bucket(text):
        return BucketStore(text)
    if is_url(text):
        raise UsageError(
            f"expected a directory, s3://, r2://, gs:// or az:// to write to, got {printable_url(text)!r}."
        )
    return FolderStore(str(local_path(text)))


@dataclass(frozen=True)
class FolderStore:
    """Objects by name in a directory, which is made with its first; names have `/`. Picklable, used by any process.

    Raises FileNotFoundError for a missing object, OSError where the directory cannot be read or written.
    """

    url: str  # for messages: without a secret
    write_pause_s = 0.0  # between writes of an object that changes all the time

    @property
    def folder(self) -> Path:
        """The directory of this machine that holds the objects as files; None of a bucket."""
        return Path(self.url)

    def as_uri(self) -> str:
        """Return the URL for people: of a directory `file:///`."""
        return self.folder.resolve().as_uri()

    @contextmanager
    def locked(self, *, shared: bool) -> Iterator[None]:
        """Keep other runs out of a directory, but for those that share it; see that a bucket can be shared."""
        folder = self.folder
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"expected a directory to write to, got {folder}, which is a file. Name another.")
        folder.mkdir(parents=True, exist_ok=True)
        # The directory itself is locked: a lock file would have to stay, or be removed while another waits for it.
        with Lock(folder, os.open(folder, os.O_RDONLY)) as lock:
            try:
                fcntl.flock(lock.descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise locked_error(folder, str(folder)) from error
            yield

    def child(self, name: str) -> "FolderStore":
        """The objects below a name."""
        return FolderStore(f"{self.url}/{name}")

    @contextmanager
    def open(self, name: str, *, replace: bool = False) -> Iterator[BinaryIO]:
        """A file of this machine that becomes the object when the block ends without an exception.

        In a bucket an object that exists must have the same bytes, unless it may be replaced.
        """
        with open_atomic(self._path(name)) as file:
            yield file

    def write(self, name: str, data: bytes | Iterable[bytes], *, flush: bool = True) -> None:
        """Write an object, or replace it. `flush`: after a crash of the machine it is there."""
        atomic_write(self._path(name), data, flush=flush)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small object unless it exists; whether it is new."""
        path = self._path(name)
        temporary = temporary_path(path)
        try:
            temporary.write_bytes(data)
            sync_file(temporary)
            _link(temporary, path)
            sync_file(path.parent)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def put(self, name: str, path: Path, sha256: str = "") -> None:
        """Move a file of this machine to an object. Its hash, of a slice its id, is stored with one in a bucket."""
        commit_files({path: self._path(name)})

    def contains(self, name: str, num_bytes: int, sha256: str = "", chunk_bytes: int = 0) -> bool:
        """Whether an object has this size, and this hash unless it is empty; in a bucket the one stored with it."""
        try:
            has_size = self.size(name) == num_bytes
            return has_size and (not sha256 or hash_slice(self.folder / name, chunk_bytes)[0] == sha256)
        except FileNotFoundError:
            return False

    def copy(self, name: str, path: Path) -> bool:
        """Make an object of a file that stays: a link to it where there are links; whether bytes were copied."""
        temporary = temporary_path(self._path(name))
        try:
            os.link(path, temporary)
            commit_files({temporary: self.folder / name})
        except OSError:  # another file system, or one without links
            return _copy(self, name, path)
        finally:
            temporary.unlink(missing_ok=True)
        return False

    def read(self, name: str) -> bytes:
        """The bytes of an object."""
        return (self.folder / name).read_bytes()

    def read_array(self, name: str, dtype: DTypeLike, count: int = -1, start: int = 0) -> Array:
        """Items [start, start + count) of an object, -1 for all; fewer where it ends."""
        return np.fromfile(self.folder / name, dtype, count, offset=start * np.dtype(dtype).itemsize)

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """A file of this machine with the bytes of the object, for the time of the block."""
        yield self.folder / name

    def directory(self, name: str) -> Path:
        """A directory of this machine for files that no other needs; it stays until the run ends."""
        return own_directory(self.folder / name)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty directory of this machine, on the disk where objects are written; removed with the block."""
        with temporary_directory(self._path("scratch")) as folder:
            yield folder

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """The objects whose names begin with `prefix` (`slices/`, `done/encode-`), and their bytes.

        A listing of a bucket may be late; a request for one object is not.
        """
        folder, _, start = prefix.rpartition("/")
        top = self.folder / folder
        sizes: dict[str, int] = {}
        with suppress(FileNotFoundError), os.scandir(top) as entries:
            for entry in entries:
                if not entry.name.startswith(start) or entry.name.endswith(".tmp"):
                    continue
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir():
                    sizes |= self.sizes(f"{name}/")
                else:
                    sizes[name] = entry.stat().st_size
        return sizes

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; one that is missing is none."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def size(self, name: str) -> int:
        """The bytes of an object."""
        return (self.folder / name).stat().st_size

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        return (self.folder / name).exists()

    def each(self, function: Callable[[_I], _T], items: Iterable[_I]) -> Iterator[_T]:
        """`function(item)` of each item, in order, for functions that read objects: in a bucket many at once."""
        return map(function, items)

    def remove_stale(self) -> None:
        """Remove what killed processes of this machine left on their way."""
        for folder, _, _ in os.walk(self.folder):
            remove_stale(Path(folder))

    def remove_all(self) -> None:
        """Remove all objects, and the directories of this machine."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _copy(store: "Store", name: str, path: Path) -> bool:
    with store.open(name) as file, path.open("rb") as source:
        shutil.copyfileobj(source, file, _PIECE)
    return True


def _link(source: Path, path: Path) -> None:
    try:
        os.link(source, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links, where the last of two writers wins
        if path.exists():
            raise FileExistsError(path) from None
        commit_files({source: path})


@dataclass(frozen=True)
class BucketStore:
    """A FolderStore's objects below a prefix of a bucket, with NetworkError if it does not answer, DatasetError if it
    refuses.

    `address` is its URL with the options of the query; credentials are the environment's.
    """

    address: str
    write_pause_s, folder = BUCKET_WRITE_S, None
    copy = _copy

    @property
    def url(self) -> str:
        return self._parsed.location.rstrip("/")

    def as_uri(self) -> str:
        return self.url

    def child(self, name: str) -> "BucketStore":
        return BucketStore(join_url(str(self._parsed), name))

    @contextmanager
    def locked(self, *, shared: bool) -> Iterator[None]:
        # In a bucket that overwrites what exists, two runs could destroy each other's work.
        name = f"probe-{secrets.token_hex(8)}"
        try:
            self.write(name, b"")
            if self.create(name, b""):
                raise UsageError(
                    f"{self.url}: expected a bucket that refuses to overwrite (If-None-Match: *), got one that does "
                    "not. Update its server, or write to a directory and copy that with `forebay mirror`."
                )
        finally:
            self.remove([name])
        yield

    @contextmanager
    def open(self, name: str, *, replace: bool = False) -> Iterator[BinaryIO]:
        with tempfile.TemporaryFile(dir=self.directory("")) as file:
            yield file
            file.flush()
            data: Any = map_file(file)
            is_ours = self._put(name, data, "overwrite" if replace else "create")
            if not is_ours and self._digest(name) != hashlib.sha256(data).digest():
                raise DatasetError(
                    f"{self.url}/{name}: expected what this run writes, got other bytes: another run writes here. "
                    "Wait until it ends, then run the same command again."
                )

    def write(self, name: str, data: bytes | Iterable[bytes], *, flush: bool = True) -> None:
        if isinstance(data, bytes):
            self._put(name, data, "overwrite")
            return
        with self.open(name, replace=True) as file:
            file.writelines(data)

    def create(self, name: str, data: bytes) -> bool:
        return self._put(name, data)

    def put(self, name: str, path: Path, sha256: str = "") -> None:
        options = {"chunk_size": max(_PIECE, -(-path.stat().st_size // _MAX_PARTS)), "max_concurrency": _UPLOADS}
        attributes = {_HASH_KEY: sha256} if sha256 else {}
        shared_bucket(self._parsed, PartsBucket).call(
            name, lambda obstore, store, key: obstore.put(store, key, path, attributes=attributes, **options)
        )
        path.unlink()

    def contains(self, name: str, num_bytes: int, sha256: str = "", chunk_bytes: int = 0) -> bool:
        def request(obstore: Any, store: Any, key: str) -> bool:
            result = obstore.get(store, key, options={"head": True})
            return num_bytes in (-1, int(result.meta["size"])) and sha256 in ("", result.attributes.get(_HASH_KEY))

        try:
            return self._call(name, request)
        except FileNotFoundError:
            return False

    def exists(self, name: str) -> bool:
        return self.contains(name, -1)

    def read(self, name: str) -> bytes:
        return self._call(name, lambda obstore, store, key: bytes(obstore.get(store, key).bytes()))

    def read_array(self, name: str, dtype: DTypeLike, count: int = -1, start: int = 0) -> Array:
        size = np.dtype(dtype).itemsize
        if count == 0:
            return np.empty(0, dtype)
        if count < 0 and not start:
            return np.frombuffer(self.read(name), dtype).copy()
        if count < 0:
            count = self.size(name) // size - start

        first, stop = start * size, (start + count) * size

        def request(obstore: Any, store: Any, key: str) -> Any:
            try:
                return memoryview(obstore.get_range(store, key, start=first, length=stop - first))
            except Exception as error:
                if NOT_PARTIAL not in str(error):
                    raise
                end = min(stop, int(obstore.head(store, key)["size"]))
                return read_whole(self._bucket, name, first, end)

        return np.frombuffer(self._call(name, request), dtype).copy()

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        def request(obstore: Any, store: Any, key: str) -> None:
            file.seek(0)
            file.truncate()
            for chunk in obstore.get(store, key).stream(min_chunk_size=_PIECE):
                file.write(chunk)
            file.flush()

        with self.scratch() as folder, (folder / "object").open("wb") as file:
            self._call(name, request)
            yield folder / "object"

    def directory(self, name: str) -> Path:
        root = own_directory(Path(tempfile.gettempdir(), f"forebay-{os.getuid()}"), "TMPDIR")
        path = root / hashlib.sha256(self.url.encode()).hexdigest()[:16] / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.directory("")) as folder:
            yield Path(folder)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        folder = prefix.rpartition("/")[0]

        listed = self._bucket.retry(folder, lambda: self._bucket.objects(f"{folder}/" if folder else ""))
        return {name: meta.bytes for name, meta in listed if name.startswith(prefix)}

    def remove(self, names: Iterable[str]) -> None:
        names = list(names)
        for start in range(0, len(names), _REMOVED_AT_ONCE):
            keys = [self._bucket.key(name) for name in names[start : start + _REMOVED_AT_ONCE]]
            with suppress(FileNotFoundError):
                self._call(names[start], partial(_delete, keys))

    def size(self, name: str) -> int:
        return self._call(name, lambda obstore, store, key: int(obstore.head(store, key)["size"]))

    def remove_stale(self) -> None:
        """None: files on their way have no name."""

    def remove_all(self) -> None:
        self.remove(self.sizes())
        shutil.rmtree(self.directory(""), ignore_errors=True)

    def each(self, function: Callable[[_I], _T], items: Iterable[_I]) -> Iterator[_T]:
        remaining = iter(items)
        with ThreadPoolExecutor(_READERS) as pool:
            while batch := list(islice(remaining, 4 * _READERS)):
                yield from pool.map(function, batch)

    @property
    def _parsed(self) -> BucketAddress:
        return bucket_address(self.address)

    @property
    def _bucket(self) -> PatientBucket:
        return shared_bucket(self._parsed, PatientBucket)

    def _call(self, name: str, request: Callable[[Any, Any, str], _T]) -> _T:
        return self._bucket.call(name, request)

    def _put(self, name: str, data: Any, mode: str = "create") -> bool:
        def request(obstore: Any, store: Any, key: str) -> bool:
            try:
                obstore.put(store, key, data, mode=mode, use_multipart=len(data) > _MAX_PUT_BYTES)
            except obstore.exceptions.AlreadyExistsError:
                return False
            return True

        return self._call(name, request)

    def _digest(self, name: str) -> bytes:
        with self.local(name) as path, path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()


def _delete(keys: list[str], obstore: Any, store: Any, _: str) -> None:
    obstore.delete(store, keys)


Store: TypeAlias = FolderStore | BucketStore
