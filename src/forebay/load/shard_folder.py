"""Shards of a bucket in a local directory: pairs of files, fetched, judged, named, and removed again.

Hides: which names a shard has, that two processes of a machine never fetch one twice, and what a kill leaves behind.
A shard is fetched under a lock that the kernel takes back from a dead process; its files get their names when every
byte was judged, and a mark beside them says so, with their sizes and times: a pair without one, or changed since, is
judged again before it is used. Only what was fetched here is ever removed, and nothing that a process uses.

Disk: the pairs that are kept and one partial.
"""

import errno
import json
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forebay.dataset.slices import hash_file
from forebay.errors import DatasetError, IntegrityError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.formats.shard_writer import LIST_FILE, LIST_FORMAT
from forebay.load.shard_check import LEAST_HEAD, SampleCheck
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

_MOST_DROPPED = 4 << 30
_ROUNDS = 8
_WAIT_S = 0.1
_MOST_SHARDS = 100_000
log = logging.getLogger("forebay.storage")


@dataclass(frozen=True)
class Pair:
    """A shard's two local files, judged."""

    index: int
    tokens: Path
    ids: Path
    num_bytes: int


class Marks:
    """Which shards were fetched here, and which pairs were judged and not changed since.

    One small file a shard, `.train_000003.mark`; where none can be written, what this process knows.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder = folder
        self._prefix = prefix
        self._known: dict[int, list[int]] = {}

    def path(self, index: int) -> Path:
        """Of a shard's mark."""
        return self._folder / f".{self._prefix}_{index:06d}.mark"

    def read(self, index: int) -> dict[str, Any]:
        """`fetched`, `judged`; empty if there is none."""
        try:
            found = json.loads(self.path(index).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def begin(self, index: int) -> None:
        """What will lie there was fetched here."""
        atomic_write(self.path(index), json.dumps({"fetched": True}).encode())

    def set_judged(self, index: int, tokens: Path, ids: Path, fetched: bool) -> None:
        """The pair is right. Raises OSError where that cannot be written; it is known even then."""
        self._known[index] = _state(tokens, ids)
        mark = {"fetched": fetched, "judged": self._known[index]}
        atomic_write(self.path(index), json.dumps(mark).encode())

    def is_judged(self, index: int, tokens: Path, ids: Path) -> bool:
        """Whether the pair is there, was judged, and has not changed since."""
        state = _state(tokens, ids)
        return bool(state) and state in (self.read(index).get("judged"), self._known.get(index))


class ShardFolder:
    """A directory of shards and where they come from. Processes share the directory, threads the object.

    Without an origin all there will be is there. Directories are made if absent. `generation`: of the ids' file, or
    `auto` as it is found; `prefix`: `train` or `anneal`.
    """

    def __init__(
        self,
        origin: Origin | None,
        folder: Path,
        sequence_length: int = 0,
        kind: np.dtype[Any] | None = None,
        *,
        tmp_dir: Path | None = None,
        chunk_size: int | None = None,
        max_workers: Workers = None,
        generation: Literal["auto", "bin", "npy"] = "auto",
        prefix: str = "train",
        patience_s: float = 300.0,
    ) -> None:
        plan_download(1, chunk_size, max_workers)  # refuses what cannot be
        self.origin = None if origin is None else as_object_origin(origin)
        self.folder = folder
        self.tmp_dir = tmp_dir or folder
        self._sequence_length, self._kind = sequence_length, kind
        self._chunk_size, self._max_workers = chunk_size, max_workers
        self._prefix = prefix
        self._suffixes = {"auto": ("npy", "bin"), "bin": ("bin",), "npy": ("npy",)}[generation]
        self._patience_s = patience_s
        self._list: dict[int, str] | None = None
        self._marks = Marks(self.folder, prefix)
        try:
            for made in (self.folder, self.tmp_dir):
                made.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def tokens_name(self, index: int) -> str:
        """Of a shard's tokens."""
        return f"{self._prefix}_{index:06d}.npy"

    def ids_name(self, index: int, suffix: str) -> str:
        """Of a shard's sample ids."""
        return f"sample_ids_{'' if self._prefix == 'train' else self._prefix + '_'}{index:06d}.{suffix}"

    def count(self, stop: threading.Event | None = None) -> int:
        """How many shards there are: one more than the last index that is listed, at the origin or here."""
        return self.indexes(stop)[-1] + 1

    def indexes(self, stop: threading.Event | None = None) -> list[int]:
        """Of the shards that are listed, at the origin or here, rising. Errors as of `count`."""
        names: list[str] = [path.name for path in self.folder.glob(f"{self._prefix}_*.npy")]
        if self.origin is not None:
            if listed := self._listed(stop):
                return sorted(listed)
            names += self._names_at(stop)
        found = {int(m[1]) for name in names if (m := re.fullmatch(rf"{self._prefix}_(\d{{6}})\.npy", name))}
        if not found:
            where = self.folder if self.origin is None else self.origin.url
            raise DatasetError(f"{where}: expected shards {self.tokens_name(0)} and on, got none. Check the address.")
        return sorted(found)

    def sizes(self, index: int, stop: threading.Event | None = None) -> int:
        """Bytes of a shard's two files, here or at the origin. Errors as of `fetch`."""
        if (pair := self.ready(index)) is not None:
            return pair.num_bytes
        return sum(head.bytes for _, head in self.heads(index, stop))

    def check(self, index: int, ids: Path, num_bytes: int) -> SampleCheck:
        """What compares the tokens of a shard, a file of so many bytes, with these ids."""
        return SampleCheck(index, ids, num_bytes, self._sequence_length, self._kind)

    def heads(self, index: int, stop: threading.Event | None = None) -> list[tuple[str, ObjectMeta]]:
        """Names and heads of a shard's tokens and ids at the origin. Errors as of `head_object`."""
        if self.origin is None:
            raise DatasetError(
                f"{self.folder}: expected shard {index} ({self.tokens_name(index)} and its ids), got none. Copy it "
                "there, or give a url to fetch it from."
            )
        names = [self.tokens_name(index), *(self.ids_name(index, suffix) for suffix in self._suffixes)]
        found: list[tuple[str, ObjectMeta]] = []
        for name in names:
            try:
                found.append((name, head_object(self.origin, name, timeout_s=self._patience_s, stop=stop)))
            except DatasetError:
                if name in (names[0], names[-1]):
                    raise
            if len(found) == 2:
                break
        return found

    def on_disk(self, index: int) -> int:
        """Bytes of it that lie here by now, partial ones included."""
        names = [self.tokens_name(index), *(self.ids_name(index, suffix) for suffix in ("npy", "bin"))]
        paths = [self.folder / name for name in names]
        paths += [path for name in names for path in self.tmp_dir.glob(f".{name}.*.part")]
        return sum(path.stat().st_blocks * 512 for path in paths if path.exists())

    def ready(self, index: int) -> Pair | None:
        """The pair if it is here, judged, and unchanged since."""
        for suffix in self._suffixes:
            tokens, ids = self.folder / self.tokens_name(index), self.folder / self.ids_name(index, suffix)
            if self._marks.is_judged(index, tokens, ids):
                return Pair(index, tokens, ids, tokens.stat().st_size + ids.stat().st_size)
        return None

    def use(self, index: int) -> Lock:
        """Keep a shard from being removed by any process, until it is released. UsageError if it cannot be written."""
        try:
            return acquire(self._lock(index, "use"), SHARED)
        except OSError as error:
            return self._no_lock(error)

    def obtain(
        self,
        index: int,
        *,
        stop: threading.Event,
        on_progress: Callable[[int, int], object] | None = None,
    ) -> tuple[Pair, DownloadResult | None]:
        """The pair, fetched by one process of the machine while the others wait; None if it was not by this one.

        `stop` gives it up, with TransferCancelledError or UsageError.
        """
        while True:
            if (pair := self.ready(index)) is not None:
                return pair, None
            try:
                lock = try_acquire(self._lock(index, "fetch"))
            except OSError as error:
                lock = self._no_lock(error)
            if lock is not None:
                break
            if stop.wait(_WAIT_S):
                raise UsageError(f"shard {index}: given up while another process fetched it.")
        with lock:
            if (pair := self.ready(index)) is not None:
                return pair, None
            fetched = None if self._judge_local(index) else self._fetch(index, stop, on_progress)
            pair = self.ready(index)
            assert pair is not None
            return pair, fetched

    def remove(self, index: int) -> bool:
        """Remove a pair that was fetched here and that nobody uses; whether nothing of it is left."""
        if not self._marks.read(index).get("fetched"):
            return True
        locks: list[Lock] = []
        try:
            for kind in ("use", "fetch"):
                lock = try_acquire(self._lock(index, kind), EXCLUSIVE)
                if lock is None:
                    return False
                locks.append(lock)
            for suffix in ("npy", "bin"):
                (self.folder / self.ids_name(index, suffix)).unlink(missing_ok=True)
            (self.folder / self.tokens_name(index)).unlink(missing_ok=True)
            self._marks.path(index).unlink(missing_ok=True)
            for lock in locks:
                lock.path.unlink(missing_ok=True)  # Who waits for it takes a new one.
        finally:
            for lock in locks:
                lock.release()
        log.info("shard %d removed from %s", index, self.folder)
        return True

    def clean(self, keep: set[int]) -> None:
        """Remove what earlier runs left: partial files that nobody goes on with, and pairs that are not kept."""
        remove_stale(self.folder)
        for path in [*self.tmp_dir.glob(".*.part"), *self.folder.glob(".*.part")]:
            found = re.search(rf"^\.+(?:{self._prefix}|sample_ids)_(?:{self._prefix}_)?(\d{{6}})\.", path.name)
            if found is None or is_locked(self._lock(int(found[1]), "fetch"), EXCLUSIVE):
                continue
            if not (path.parent == self.tmp_dir and int(found[1]) in keep and self.ready(int(found[1])) is None):
                path.unlink(missing_ok=True)
        for path in self.folder.glob(f".{self._prefix}_*.mark"):
            index = int(path.name.removesuffix(".mark").rpartition("_")[2])
            if index not in keep:
                self.remove(index)

    def _fetch(
        self, index: int, stop: threading.Event, on_progress: Callable[[int, int], object] | None
    ) -> DownloadResult:
        """Fetch the pair; ids or a header that do not fit are fetched again, until they come the same again."""
        wrong: set[str] = set()  # The digests of ids and header that did not fit.
        for left in range(_ROUNDS, -1, -1):
            (name, head), (ids_name, ids_head) = self.heads(index, stop)
            part, ids_part = part_path(self.tmp_dir, name, head), part_path(self.tmp_dir, ids_name, ids_head)
            self._marks.begin(index)
            try:
                return self._fetch_once(index, head, part, ids_name, ids_head, ids_part, stop, on_progress)
            except ChangedError as error:
                if not left:
                    raise
                log.warning("%s; fetching the shard from its start", error)
            except (IntegrityError, DatasetError) as error:
                if not left or not ids_part.exists():
                    raise
                digest, of_header = hash_file(ids_part), isinstance(error, DatasetError) and part.exists()
                if of_header:
                    with part.open("rb") as file:
                        digest += file.read(LEAST_HEAD).hex()
                if digest in wrong:
                    raise
                wrong.add(digest)
                ids_part.unlink()
                if of_header and part.stat().st_blocks * 512 <= _MOST_DROPPED:  # found when the first bytes are there
                    part.unlink(missing_ok=True)
                log.warning("%s Fetching the ids again", error)
        raise AssertionError

    def _fetch_once(
        self,
        index: int,
        head: ObjectMeta,
        part: Path,
        ids_name: str,
        ids_head: ObjectMeta,
        ids_part: Path,
        stop: threading.Event,
        on_progress: Callable[[int, int], object] | None,
    ) -> DownloadResult:
        """The ids first, as nothing can be judged without; then the tokens, judged as they come."""
        assert self.origin is not None
        name = self.tokens_name(index)
        settings: dict[str, Any] = {"timeout_s": self._patience_s, "stop": stop}
        plan = plan_download(ids_head.bytes, None, self._max_workers)
        listed = self._listed(stop).get(index, "")
        download_part(self.origin, ids_name, ids_head, ids_part, plan, sha256=listed, **settings)
        plan = plan_download(head.bytes, self._chunk_size, self._max_workers)
        check = self.check(index, ids_part, head.bytes)
        check.piece_bytes = plan.piece_bytes
        got = download_part(self.origin, name, head, part, plan, check=check, on_progress=on_progress, **settings)
        check.close()
        tokens, ids = self.folder / name, self.folder / ids_name
        commit_part(ids_part, ids)
        commit_part(part, tokens, self.check(index, ids, head.bytes).finish)
        self._set_mark(index, tokens, ids, True)
        for path in [*self.tmp_dir.glob(f".{name}.*.part"), *self.tmp_dir.glob(f".{ids_name}.*.part")]:
            path.unlink(missing_ok=True)  # of a start that was killed between the two names
        return got

    def _judge_local(self, index: int) -> bool:
        """Judge a pair that lies here without a mark that fits; whether there is one."""
        for suffix in self._suffixes:
            tokens, ids = self.folder / self.tokens_name(index), self.folder / self.ids_name(index, suffix)
            if not (tokens.is_file() and ids.is_file()):
                continue
            log.info("shard %d lies in %s already: comparing all its samples with their ids", index, self.folder)
            fetched = bool(self._marks.read(index).get("fetched"))
            try:
                self.check(index, ids, tokens.stat().st_size).finish(tokens)
            except (DatasetError, IntegrityError) as error:
                if not fetched:
                    raise
                log.warning("%s Fetching the shard again", error)
                tokens.unlink()
                ids.unlink()
                return False
            self._set_mark(index, tokens, ids, fetched)
            return True
        return False

    def _names_at(self, stop: threading.Event | None) -> list[str]:
        """What the origin lists; where it cannot list, the names that it has one after the other."""
        names: Any = getattr(self.origin, "names", None)
        assert self.origin is not None
        if names is not None:
            try:
                return list(names(f"{self._prefix}_"))
            except (PermanentError, TransientError) as error:
                log.info("%s cannot be listed (%s); asking for one shard after the other", self.origin.url, error)
        found: list[str] = []
        for index in range(_MOST_SHARDS):
            try:
                head_object(self.origin, self.tokens_name(index), timeout_s=self._patience_s, stop=stop)
            except DatasetError:
                if not found:
                    raise
                break
            found.append(self.tokens_name(index))
        return found

    def _listed(self, stop: threading.Event | None) -> dict[int, str]:
        """The sha256 of each shard's ids, as the list of the bucket says, once read; empty without one."""
        if self._list is None:
            self._list = {}
            assert self.origin is not None
            try:
                head_object(self.origin, LIST_FILE, timeout_s=self._patience_s, stop=stop)
            except DatasetError:
                return self._list
            self._list = read_list(self.origin.get(LIST_FILE, 64 << 20), f"{self.origin.url}/{LIST_FILE}")
        return self._list

    def _set_mark(self, index: int, tokens: Path, ids: Path, fetched: bool) -> None:
        try:
            self._marks.set_judged(index, tokens, ids, fetched)
        except OSError as error:
            self._no_lock(error)

    def _no_lock(self, error: OSError) -> Lock:
        """In a directory that nobody here writes, what lies there is used without; it is judged at each start."""
        if self.origin is None and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return Lock(self.folder, -1)
        raise unwritable(self.folder, error) from error

    def _lock(self, index: int, kind: str) -> Path:
        return self.folder / f".{self._prefix}_{index:06d}.{kind}"


def read_list(data: bytes, where: str) -> dict[int, str]:
    """The sha256 of each shard's ids, from the list that is published with them. DatasetError if it is malformed."""
    try:
        body = json.loads(data)
        if body["format"] != LIST_FORMAT:
            raise ValueError(f"expected format {LIST_FORMAT!r}, got {body['format']!r}")
        rows = [(str(row["tokens"]["name"]), str(row["ids"]["sha256"])) for row in body["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{where}: expected a list of shards, got: {error!r}. Publish the shards again.") from error
    return {int(found[1]): sha256 for name, sha256 in rows if (found := re.search(r"_(\d{6})\.npy$", name))}


def unwritable(folder: Path, error: OSError) -> UsageError:
    """The error of a directory that cannot be written."""
    return UsageError(
        f"{folder}: expected a directory to write shards to, got: {error.strerror}. Choose another folder, or with "
        "shards that lie there already give it as url, too."
    )


def _state(tokens: Path, ids: Path) -> list[int]:
    """Sizes and times of change; empty if one is missing."""
    try:
        found = [tokens.stat(), ids.stat()]
    except OSError:
        return []
    return [number for one in found for number in (one.st_size, one.st_mtime_ns, one.st_ino)]
