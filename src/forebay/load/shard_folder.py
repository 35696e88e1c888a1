"""Shards of a bucket in a local directory: pairs of files, fetched, verified, and removed again.

A shard is fetched by one process of the machine, under a lock that the kernel releases if it dies. Its files get their
final names after every sample was verified; a mark file beside them records their sizes and times. A pair without a
mark, or changed since, is verified again before it is used. Only shards that were fetched here are ever removed, and
none that a process uses. Disk: the pairs that are kept and one partial pair.
"""

import errno
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from forebay.dataset.slices import hash_file
from forebay.errors import DatasetError, IntegrityError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.formats.shard_writer import LIST_FILE, LIST_FORMAT
from forebay.load.shard_check import MAX_HEADER_BYTES, SampleCheck
from forebay.storage.base import (
    ChangedError,
    ObjectMeta,
    Origin,
    PermanentError,
    TransientError,
    as_object_origin,
    head_object,
)
from forebay.storage.locks import EXCLUSIVE, SHARED, Lock, acquire, is_locked, try_acquire
from forebay.storage.ranged_download import (
    DownloadResult,
    Workers,
    commit_part,
    download_part,
    part_path,
    plan_download,
)

_MAX_DISCARDED_BYTES = 4 << 30
_MAX_RETRIES = 8
_LOCK_POLL_S = 0.1
_MAX_SHARDS = 100_000
Progress = Callable[[int, int], object]  # Called with bytes received and bytes in all.
log = logging.getLogger("forebay.storage")


@dataclass(frozen=True)
class ShardFiles:
    """A shard's two local files, verified."""

    index: int
    tokens: Path
    ids: Path
    num_bytes: int


class _RemoteFile(NamedTuple):
    name: str
    head: ObjectMeta
    part: Path  # Its local partial file.


class ShardFolder:
    """A directory of shards, created if absent, and their origin. Processes share the directory, threads the object.

    Without `origin` all shards are in the directory. `sequence_length` 0 and `dtype` None: as the files have them;
    `generation`: of the ids' file, `auto` as found; `prefix`: `train` or `anneal`; `tmp_dir`: for partial files.
    """

    def __init__(
        self,
        origin: Origin | None,
        folder: Path,
        sequence_length: int = 0,
        dtype: np.dtype[Any] | None = None,
        *,
        tmp_dir: Path | None = None,
        chunk_size: int | None = None,
        max_workers: Workers = None,
        generation: Literal["auto", "bin", "npy"] = "auto",
        prefix: str = "train",
        timeout_s: float = 300.0,
    ) -> None:
        plan_download(1, chunk_size, max_workers)  # Checks them.
        self.origin = None if origin is None else as_object_origin(origin)
        self.folder = folder
        self.tmp_dir = tmp_dir or folder
        self._sequence_length, self._dtype = sequence_length, dtype
        self._chunk_size, self._max_workers = chunk_size, max_workers
        self._prefix = prefix
        self._suffixes = {"auto": ("npy", "bin"), "bin": ("bin",), "npy": ("npy",)}[generation]
        self._timeout_s = timeout_s
        self._hashes: dict[int, str] | None = None
        self._verified: dict[int, list[int]] = {}  # By this process; see `_mark`.
        try:
            for directory in (self.folder, self.tmp_dir):
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def tokens_name(self, index: int) -> str:
        """File name of a shard's tokens."""
        return f"{self._prefix}_{index:06d}.npy"

    def ids_name(self, index: int, suffix: str) -> str:
        """File name of a shard's sample ids."""
        return f"sample_ids_{'' if self._prefix == 'train' else self._prefix + '_'}{index:06d}.{suffix}"

    def count(self, stop: threading.Event | None = None) -> int:
        """The number of shards: the last index at the origin or here, plus one."""
        return self.indexes(stop)[-1] + 1

    def indexes(self, stop: threading.Event | None = None) -> list[int]:
        """The indexes of the shards at the origin or here, ascending. Raises DatasetError if there are none."""
        names: list[str] = [path.name for path in self.folder.glob(f"{self._prefix}_*.npy")]
        if self.origin is not None:
            if hashes := self._id_hashes(stop):
                return sorted(hashes)
            names += self._list_origin(stop)
        indexes = {int(m[1]) for name in names if (m := re.fullmatch(rf"{self._prefix}_(\d{{6}})\.npy", name))}
        if not indexes:
            location = self.folder if self.origin is None else self.origin.url
            raise DatasetError(
                f"{location}: expected shards {self.tokens_name(0)} and on, got none. Check the address."
            )
        return sorted(indexes)

    def sizes(self, index: int, stop: threading.Event | None = None) -> int:
        """Bytes of a shard's two files, here or at the origin. Raises DatasetError or NetworkError."""
        if (files := self.ready(index)) is not None:
            return files.num_bytes
        return sum(head.bytes for _, head in self.heads(index, stop))

    def check(self, index: int, ids: Path, num_bytes: int) -> SampleCheck:
        """The check of a shard's tokens, a file of `num_bytes`, against its ids."""
        return SampleCheck(index, ids, num_bytes, self._sequence_length, self._dtype)

    def heads(self, index: int, stop: threading.Event | None = None) -> list[tuple[str, ObjectMeta]]:
        """Names and heads of a shard's tokens and ids at the origin. Raises DatasetError or NetworkError."""
        if self.origin is None:
            raise DatasetError(
                f"{self.folder}: expected shard {index} ({self.tokens_name(index)} and its ids), got none. Copy it "
                "there, or give a url to fetch it from."
            )
        names = [self.tokens_name(index), *(self.ids_name(index, suffix) for suffix in self._suffixes)]
        heads: list[tuple[str, ObjectMeta]] = []
        for name in names:
            try:
                heads.append((name, self._head(name, stop)))
            except DatasetError:
                if name in (names[0], names[-1]):
                    raise
            if len(heads) == 2:
                break
        return heads

    def on_disk(self, index: int) -> int:
        """Bytes of a shard on this disk, partial files included."""
        names = [self.tokens_name(index), *(self.ids_name(index, suffix) for suffix in ("npy", "bin"))]
        paths = [self.folder / name for name in names]
        paths += [path for name in names for path in self.tmp_dir.glob(f".{name}.*.part")]
        return sum(path.stat().st_blocks * 512 for path in paths if path.exists())

    def ready(self, index: int) -> ShardFiles | None:
        """The shard's files, if they are here, verified, and unchanged since."""
        for tokens, ids in self._pairs(index):
            state = _file_state(tokens, ids)
            if state and state in (self._read_mark(index).get("verified"), self._verified.get(index)):
                return ShardFiles(index, tokens, ids, tokens.stat().st_size + ids.stat().st_size)
        return None

    def use(self, index: int) -> Lock:
        """Lock a shard: no process removes it until the lock is released. Raises UsageError if it cannot be written."""
        try:
            return acquire(self._path(index, "use"), SHARED)
        except OSError as error:
            return self._without_lock(error)

    def obtain(
        self, index: int, *, stop: threading.Event, on_progress: Progress | None = None
    ) -> tuple[ShardFiles, DownloadResult | None]:
        """The shard's files, fetched by one process of the machine while the others wait; None if not by this one.

        Raises:
            UsageError: If `stop` is set (or TransferCancelledError), or the directory cannot be written.
            DatasetError, IntegrityError, NetworkError: If it cannot be fetched or verified.
        """
        while True:
            if (files := self.ready(index)) is not None:
                return files, None
            try:
                lock = try_acquire(self._path(index, "fetch"))
            except OSError as error:
                lock = self._without_lock(error)
            if lock is not None:
                break
            if stop.wait(_LOCK_POLL_S):
                raise UsageError(f"shard {index}: cancelled while another process fetched it.")
        with lock:
            if (files := self.ready(index)) is not None:
                return files, None
            fetched = None if self._verify_local(index) else self._fetch(index, stop, on_progress)
            files = self.ready(index)
            assert files is not None
            return files, fetched

    def remove(self, index: int) -> bool:
        """Remove a shard that was fetched here, unless it is used; whether it is gone, or was not fetched here."""
        if not self._read_mark(index).get("fetched"):
            return True
        locks: list[Lock] = []
        try:
            for kind in ("use", "fetch"):
                lock = try_acquire(self._path(index, kind), EXCLUSIVE)
                if lock is None:
                    return False
                locks.append(lock)
            names = [*(self.ids_name(index, suffix) for suffix in ("npy", "bin")), self.tokens_name(index)]
            for path in [*(self.folder / name for name in names), self._path(index, "mark")]:
                path.unlink(missing_ok=True)
            for lock in locks:
                lock.path.unlink(missing_ok=True)  # A process that waits for it takes a new one.
        finally:
            for lock in locks:
                lock.release()
        log.info("shard %d removed from %s", index, self.folder)
        return True

    def clean(self, keep: set[int]) -> None:
        """Remove what earlier runs left: unused partial files, and shards that were fetched here, except `keep`."""
        remove_stale(self.folder)
        for path in [*self.tmp_dir.glob(".*.part"), *self.folder.glob(".*.part")]:
            match = re.search(rf"^\.+(?:{self._prefix}|sample_ids)_(?:{self._prefix}_)?(\d{{6}})\.", path.name)
            if match is None or is_locked(self._path(int(match[1]), "fetch"), EXCLUSIVE):
                continue
            if not (path.parent == self.tmp_dir and int(match[1]) in keep and self.ready(int(match[1])) is None):
                path.unlink(missing_ok=True)
        for path in self.folder.glob(f".{self._prefix}_*.mark"):
            index = int(path.name.removesuffix(".mark").rpartition("_")[2])
            if index not in keep:
                self.remove(index)

    def _pairs(self, index: int) -> Iterator[tuple[Path, Path]]:
        """The paths that a shard's tokens and ids may have."""
        for suffix in self._suffixes:
            yield self.folder / self.tokens_name(index), self.folder / self.ids_name(index, suffix)

    def _path(self, index: int, kind: str) -> Path:
        """The path of a shard's `use` or `fetch` lock, or its `mark`."""
        return self.folder / f".{self._prefix}_{index:06d}.{kind}"

    def _head(self, name: str, stop: threading.Event | None) -> ObjectMeta:
        assert self.origin is not None
        return head_object(self.origin, name, timeout_s=self._timeout_s, stop=stop)

    def _fetch(self, index: int, stop: threading.Event, on_progress: Progress | None) -> DownloadResult:
        """Fetch the pair. Ids or a header that do not fit are fetched again, until they are the same as before."""
        wrong: set[str] = set()  # The digests of ids and header that did not fit.
        for retries in range(_MAX_RETRIES, -1, -1):
            tokens, ids = (
                _RemoteFile(name, head, part_path(self.tmp_dir, name, head)) for name, head in self.heads(index, stop)
            )
            atomic_write(self._path(index, "mark"), json.dumps({"fetched": True}).encode())
            try:
                return self._fetch_once(index, tokens, ids, stop, on_progress)
            except ChangedError as error:
                if not retries:
                    raise
                log.warning("%s; fetching the shard from its start", error)
            except (IntegrityError, DatasetError) as error:
                if not retries or not ids.part.exists():
                    raise
                digest, in_header = hash_file(ids.part), isinstance(error, DatasetError) and tokens.part.exists()
                if in_header:
                    with tokens.part.open("rb") as file:
                        digest += file.read(MAX_HEADER_BYTES).hex()
                if digest in wrong:
                    raise
                wrong.add(digest)
                ids.part.unlink()
                if in_header and tokens.part.stat().st_blocks * 512 <= _MAX_DISCARDED_BYTES:
                    tokens.part.unlink(missing_ok=True)
                log.warning("%s Fetching the ids again", error)
        raise AssertionError

    def _fetch_once(
        self, index: int, tokens: _RemoteFile, ids: _RemoteFile, stop: threading.Event, on_progress: Progress | None
    ) -> DownloadResult:
        """Fetch the ids first, by which the tokens are verified while they are received."""
        assert self.origin is not None
        settings: dict[str, Any] = {"timeout_s": self._timeout_s, "stop": stop}
        plan = plan_download(ids.head.bytes, None, self._max_workers)
        download_part(self.origin, *ids, plan, sha256=self._id_hashes(stop).get(index, ""), **settings)
        plan = plan_download(tokens.head.bytes, self._chunk_size, self._max_workers)
        check = self.check(index, ids.part, tokens.head.bytes)
        check.piece_bytes = plan.piece_bytes
        fetched = download_part(self.origin, *tokens, plan, check=check, on_progress=on_progress, **settings)
        check.close()
        tokens_path, ids_path = self.folder / tokens.name, self.folder / ids.name
        commit_part(ids.part, ids_path)
        commit_part(tokens.part, tokens_path, self.check(index, ids_path, tokens.head.bytes).finish)
        self._mark(index, tokens_path, ids_path, True)
        for name in (tokens.name, ids.name):  # Of a process that was killed between the two.
            for path in self.tmp_dir.glob(f".{name}.*.part"):
                path.unlink(missing_ok=True)
        return fetched

    def _verify_local(self, index: int) -> bool:
        """Verify a local pair without a valid mark; whether there is one."""
        for tokens, ids in self._pairs(index):
            if not (tokens.is_file() and ids.is_file()):
                continue
            log.info("shard %d is already in %s: comparing all its samples with their ids", index, self.folder)
            fetched = bool(self._read_mark(index).get("fetched"))
            try:
                self.check(index, ids, tokens.stat().st_size).finish(tokens)
            except (DatasetError, IntegrityError) as error:
                if not fetched:
                    raise
                log.warning("%s Fetching the shard again", error)
                tokens.unlink()
                ids.unlink()
                return False
            self._mark(index, tokens, ids, fetched)
            return True
        return False

    def _read_mark(self, index: int) -> dict[str, Any]:
        """The fields `fetched` and `verified` of a shard's mark; empty without one."""
        try:
            mark = json.loads(self._path(index, "mark").read_bytes())
        except (OSError, ValueError):
            return {}
        return mark if isinstance(mark, dict) else {}

    def _mark(self, index: int, tokens: Path, ids: Path, fetched: bool) -> None:
        """Record that a pair is verified, in a file beside it; if none can be written, in this process."""
        self._verified[index] = _file_state(tokens, ids)
        mark = {"fetched": fetched, "verified": self._verified[index]}
        try:
            atomic_write(self._path(index, "mark"), json.dumps(mark).encode())
        except OSError as error:
            self._without_lock(error)

    def _without_lock(self, error: OSError) -> Lock:
        """Use a read-only directory without an origin without lock files; its shards are verified at every start."""
        if self.origin is None and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return Lock(self.folder, -1)
        raise _unwritable(self.folder, error) from error

    def _list_origin(self, stop: threading.Event | None) -> list[str]:
        """The names at the origin; if it cannot list them, each name is requested in turn."""
        list_names: Any = getattr(self.origin, "names", None)
        assert self.origin is not None
        if list_names is not None:
            try:
                return list(list_names(f"{self._prefix}_"))
            except (PermanentError, TransientError) as error:
                log.info("%s cannot be listed (%s); requesting one shard after the other", self.origin.url, error)
        names: list[str] = []
        for index in range(_MAX_SHARDS):
            try:
                self._head(self.tokens_name(index), stop)
            except DatasetError:
                if not names:
                    raise
                break
            names.append(self.tokens_name(index))
        return names

    def _id_hashes(self, stop: threading.Event | None) -> dict[int, str]:
        """The sha256 of each shard's ids, from the bucket's list, read once; empty without a list."""
        if self._hashes is None:
            self._hashes = {}
            assert self.origin is not None
            try:
                self._head(LIST_FILE, stop)
            except DatasetError:
                return self._hashes
            self._hashes = read_list(self.origin.get(LIST_FILE, 64 << 20), f"{self.origin.url}/{LIST_FILE}")
        return self._hashes


def read_list(data: bytes, location: str) -> dict[int, str]:
    """The sha256 of each shard's ids, from the published list. Raises DatasetError if it is malformed."""
    try:
        body = json.loads(data)
        if body["format"] != LIST_FORMAT:
            raise ValueError(f"expected format {LIST_FORMAT!r}, got {body['format']!r}")
        rows = [(str(row["tokens"]["name"]), str(row["ids"]["sha256"])) for row in body["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(
            f"{location}: expected a list of shards, got: {error!r}. Publish the shards again."
        ) from error
    return {int(match[1]): sha256 for name, sha256 in rows if (match := re.search(r"_(\d{6})\.npy$", name))}


def _unwritable(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{folder}: expected a directory to write shards to, got: {error.strerror}. Choose another folder, or give a "
        "folder that has the shards as url, too."
    )


def _file_state(tokens: Path, ids: Path) -> list[int]:
    """Sizes, times of change and inodes; empty if a file is missing."""
    try:
        stats = [tokens.stat(), ids.stat()]
    except OSError:
        return []
    return [number for stat in stats for number in (stat.st_size, stat.st_mtime_ns, stat.st_ino)]
