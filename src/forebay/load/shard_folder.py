"""Shards of a bucket in a local directory: pairs of files, fetched, verified, and removed again.

A shard is fetched by one process of the machine, under a lock that the kernel releases if it dies. Its tokens get their
final name after every sample was verified; a mark file beside them records sizes and times. A pair without a mark, or
changed since, is verified again before it is used. Only shards that were fetched here are ever removed, and none that a
process uses. Disk: the pairs that are kept and one partial pair.
"""

import contextlib
import errno
import itertools
import json
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.dataset.slices import hash_file
from forebay.errors import DatasetError, IntegrityError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.formats.external import read_head
from forebay.load.shard_check import MAX_HEADER_BYTES, SampleCheck
from forebay.storage.base import ObjectMeta, Origin, PermanentError, TransientError, as_object_origin, head_object
from forebay.storage.locks import EXCLUSIVE, SHARED, Lock, acquire, is_locked, try_acquire
from forebay.storage.ranged_download import DownloadResult, Progress, Workers, download_object, plan_download

_MAX_RETRIES = 8
_LOCK_POLL_S = 0.1
log = logging.getLogger("forebay.storage")


@dataclass(frozen=True)
class ShardFiles:
    """A shard's two local files, verified."""

    index: int
    tokens: Path
    ids: Path

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return self.tokens.stat().st_size + self.ids.stat().st_size


class ShardFolder:
    """A directory of shards, created if absent, and their origin. Processes share the directory, threads the object.

    Args:
        origin: None if all shards are in the directory.
        sequence_length: Tokens of a sample; 0: as the files have them.
        tmp_dir: Directory of partial files; by default `folder`.
        chunk_size, max_workers: See `plan_download`.
    """

    def __init__(
        self,
        origin: Origin | None,
        folder: Path,
        sequence_length: int = 0,
        *,
        tmp_dir: Path | None = None,
        chunk_size: int | None = None,
        max_workers: Workers = None,
        timeout_s: float = 300.0,
    ) -> None:
        plan_download(1, chunk_size, max_workers)  # Checks them.
        self.origin = None if origin is None else as_object_origin(origin)
        self.folder, self.tmp_dir = folder, tmp_dir or folder
        self._sequence_length, self._timeout_s = sequence_length, timeout_s
        self._chunk_size, self._max_workers = chunk_size, max_workers
        self._verified: dict[int, list[int]] = {}  # By this process; see `_mark`.
        try:
            for directory in (self.folder, self.tmp_dir):
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def indexes(self) -> list[int]:
        """The indexes of the shards at the origin or here, ascending. Raises DatasetError if there are none."""
        names = [path.name for path in self.folder.glob("train_*.npy")] + self._list_origin()
        indexes = {int(match[1]) for name in names if (match := re.fullmatch(r"train_(\d{6})\.npy", name))}
        if not indexes:
            location = self.folder if self.origin is None else self.origin.url
            raise DatasetError(f"{location}: expected shards {_tokens_name(0)} and on, got none. Check the address.")
        return sorted(indexes)

    def num_bytes(self, index: int) -> int:
        """Bytes of a shard's two files, here or at the origin. Raises DatasetError or NetworkError."""
        files = self.ready(index)
        return files.num_bytes if files is not None else sum(head.bytes for head in self.heads(index).values())

    def check(self, index: int, tokens: Path, ids: Path) -> None:
        """Verify each sample of a pair of local files. Raises DatasetError or IntegrityError."""
        SampleCheck(index, ids, tokens.stat().st_size, self._sequence_length).finish(tokens)

    def heads(self, index: int, stop: threading.Event | None = None) -> dict[str, ObjectMeta]:
        """The heads of a shard's tokens and ids at the origin, by name. Raises DatasetError or NetworkError."""
        if self.origin is None:
            raise DatasetError(
                f"{self.folder}: expected shard {index} ({_tokens_name(index)} and its ids), got none. Copy it there, "
                "or give a url to fetch it from."
            )
        tokens, npy_ids, bin_ids = _names(index)
        heads = {tokens: self._head(tokens, stop)}
        try:
            return heads | {npy_ids: self._head(npy_ids, stop)}
        except DatasetError:
            return heads | {bin_ids: self._head(bin_ids, stop)}

    def on_disk(self, index: int) -> int:
        """Bytes of a shard on this disk, partial files included."""
        paths = [path for name in _names(index) for path in (self.folder / name, *self._parts(name))]
        return sum(path.stat().st_blocks * 512 for path in paths if path.exists())

    def ready(self, index: int) -> ShardFiles | None:
        """The shard's files, if they are here, verified, and unchanged since."""
        for files in self._pairs(index):
            if _state(files) in (self._read_mark(index).get("verified"), self._verified.get(index)):
                return files
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
            UsageError: If `stop` is set, or the directory cannot be written.
            DatasetError, IntegrityError, NetworkError: If it cannot be fetched or verified.
        """
        lock: Lock | None = None
        while lock is None:
            if (files := self.ready(index)) is not None:
                return files, None
            try:
                lock = try_acquire(self._path(index, "fetch"))
            except OSError as error:
                lock = self._without_lock(error)
            if lock is None and stop.wait(_LOCK_POLL_S):
                raise UsageError(f"shard {index}: cancelled while another process fetched it.")
        with lock:
            if (files := self.ready(index)) is not None:
                return files, None
            fetched = None
            if (files := self._verify_local(index)) is None:
                files, fetched = self._fetch(index, stop, on_progress)
            self._verified[index] = _state(files)
            mark = {"fetched": fetched is not None or self._is_fetched(index), "verified": _state(files)}
            try:
                atomic_write(self._path(index, "mark"), json.dumps(mark).encode())
            except OSError as error:
                self._without_lock(error)
            return files, fetched

    def remove(self, index: int) -> bool:
        """Remove a shard that was fetched here, unless it is used; whether it is gone, or was not fetched here."""
        if not self._is_fetched(index):
            return True
        with contextlib.ExitStack() as stack:
            locks = []
            for kind in ("use", "fetch"):
                lock = try_acquire(self._path(index, kind), EXCLUSIVE)
                if lock is None:
                    return False
                locks.append(stack.enter_context(lock))
            for name in reversed(_names(index)):
                (self.folder / name).unlink(missing_ok=True)
            for path in (self._path(index, "mark"), *(lock.path for lock in locks)):
                path.unlink(missing_ok=True)  # A process that waits for a lock creates a new one.
        log.info("shard %d removed from %s", index, self.folder)
        return True

    def clean(self, keep: set[int]) -> None:
        """Remove what earlier runs left: unused partial files, and shards that were fetched here, except `keep`."""
        remove_stale(self.folder)
        for path in [*self.tmp_dir.glob(".*.part"), *self.folder.glob(".*.part")]:
            match = re.match(r"\.(?:train|sample_ids)_(\d{6})\.", path.name)
            if match is None or is_locked(self._path(int(match[1]), "fetch"), EXCLUSIVE):
                continue
            if not (path.parent == self.tmp_dir and int(match[1]) in keep and self.ready(int(match[1])) is None):
                path.unlink(missing_ok=True)
        for path in self.folder.glob(".train_*.mark"):
            if (index := int(path.stem[-6:])) not in keep:
                self.remove(index)

    def _pairs(self, index: int) -> list[ShardFiles]:
        tokens, *ids = (self.folder / name for name in _names(index))
        return [ShardFiles(index, tokens, path) for path in ids if tokens.is_file() and path.is_file()]

    def _parts(self, name: str) -> list[Path]:
        return list(self.tmp_dir.glob(f".{name}.*.part"))

    def _path(self, index: int, kind: str) -> Path:
        """The path of a shard's `use` or `fetch` lock, or its `mark`."""
        return self.folder / f".train_{index:06d}.{kind}"

    def _head(self, name: str, stop: threading.Event | None = None) -> ObjectMeta:
        assert self.origin is not None
        return head_object(self.origin, name, timeout_s=self._timeout_s, stop=stop)

    def _fetch(
        self, index: int, stop: threading.Event, on_progress: Progress | None
    ) -> tuple[ShardFiles, DownloadResult]:
        """Fetch the ids, then the tokens, which they verify. Ids or a header that do not fit are fetched once more."""
        assert self.origin is not None
        settings: dict[str, Any] = {"timeout_s": self._timeout_s, "stop": stop, "max_workers": self._max_workers}
        failed: set[str] = set()  # Digests of ids and headers.
        while True:
            tokens, ids = (self.folder / name for name in self.heads(index, stop))
            atomic_write(self._path(index, "mark"), json.dumps({"fetched": True}).encode())
            download_object(self.origin, ids.name, ids, self.tmp_dir, **settings)
            try:
                fetched = download_object(
                    self.origin, tokens.name, tokens, self.tmp_dir, chunk_size=self._chunk_size,
                    on_progress=on_progress, **settings,
                    make_check=lambda plan, ids=ids: SampleCheck(  # type: ignore[misc]
                        index, ids, plan.num_bytes, self._sequence_length, plan.piece_bytes
                    ),
                )  # fmt: skip
                return ShardFiles(index, tokens, ids), fetched
            except (IntegrityError, DatasetError) as error:
                parts = self._parts(tokens.name) if isinstance(error, DatasetError) else []
                digest = hash_file(ids) + "".join(read_head(part, MAX_HEADER_BYTES).hex() for part in parts)
                if digest in failed or len(failed) == _MAX_RETRIES:
                    raise
                failed.add(digest)
                for part in parts:
                    part.unlink()
                log.warning("%s Fetching the ids again", error)

    def _verify_local(self, index: int) -> ShardFiles | None:
        """Verify a local pair without a valid mark; None if there is none."""
        for files in self._pairs(index):
            log.info("shard %d is already in %s: comparing all its samples with their ids", index, self.folder)
            try:
                self.check(index, files.tokens, files.ids)
                return files
            except (DatasetError, IntegrityError) as error:
                if not self._is_fetched(index):
                    raise
                log.warning("%s Fetching the shard again", error)
                files.tokens.unlink()
                files.ids.unlink()
        return None

    def _read_mark(self, index: int) -> dict[str, Any]:
        """The fields `fetched` and `verified` of a shard's mark; empty without one."""
        try:
            mark = json.loads(self._path(index, "mark").read_bytes())
        except (OSError, ValueError):
            return {}
        return mark if isinstance(mark, dict) else {}

    def _is_fetched(self, index: int) -> bool:
        return bool(self._read_mark(index).get("fetched"))

    def _without_lock(self, error: OSError) -> Lock:
        """Use a read-only directory without an origin without lock files; its shards are verified at every start."""
        if self.origin is None and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return Lock(self.folder, -1)
        raise _unwritable(self.folder, error) from error

    def _list_origin(self) -> list[str]:
        """The names at the origin; if it cannot list them, each name is requested in turn."""
        if self.origin is None:
            return []
        list_names: Callable[[str], list[str]] | None = getattr(self.origin, "names", None)
        if list_names is not None:
            with contextlib.suppress(PermanentError, TransientError):
                return list_names("train_")
        names: list[str] = []
        for index in itertools.count():
            try:
                self._head(_tokens_name(index))
            except DatasetError:
                if not names:
                    raise
                break
            names.append(_tokens_name(index))
        return names


def _tokens_name(index: int) -> str:
    return f"train_{index:06d}.npy"


def _names(index: int) -> tuple[str, str, str]:
    """The names of a shard's tokens, and of its ids in both formats."""
    return _tokens_name(index), f"sample_ids_{index:06d}.npy", f"sample_ids_{index:06d}.bin"


def _unwritable(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{folder}: expected a directory to write shards to, got: {error.strerror}. Choose another folder, or give a "
        "folder that has the shards as url, too."
    )


def _state(files: ShardFiles) -> list[int]:
    stats = [files.tokens.stat(), files.ids.stat()]
    return [number for stat in stats for number in (stat.st_size, stat.st_mtime_ns, stat.st_ino)]
