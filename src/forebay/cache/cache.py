"""A directory of verified slices, named by hash, with a budget of bytes that is never exceeded.

`DIR/SHA256` is complete and verified; `SHA256.part` is a download, which can be resumed after any kill. Space for a
slice is reserved, and others evicted, before its first byte is requested. Processes share a directory by file locks.
`locks/SHA256.verified` records size, time of change and inode: a file that differs is hashed at its next use. Cost: a
listing of the directory per downloaded slice (4 ms for 1,000 slices), and two small files per slice.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay.cache.eviction import SHA256, DiskBudget, Evict, PlannedUse, SharedPlans
from forebay.dataset.chunks import has_id
from forebay.errors import UsageError
from forebay.files import commit_files, remove_stale
from forebay.storage.locks import SHARED, Lock, acquire, at_fork, try_acquire

_RAM = Path("/dev/shm")
_LAST_USE_NS = 10**9  # resolution of the time of the last use
log = logging.getLogger("forebay.cache")


@dataclass(frozen=True)
class NotReserved:
    """Why space was not reserved: the slice is cached, another thread or process downloads it, or there is no room."""

    reason: Literal["cached", "busy", "no room"]
    detail: str = ""


class Reservation:
    """The right to download one slice, with space for it. Call exactly one of `commit` and `release`, in any thread."""

    def __init__(self, part: Path, lock: Lock, record: Callable[[Path], None], evicted: list[str]) -> None:
        self.part = part
        self.evicted = evicted
        self._lock = lock
        self._record = record

    def commit(self) -> Path:
        """Rename the verified, synced partial file to the slice. Raises OSError; the reservation ends either way."""
        path = self.part.with_suffix("")
        try:
            commit_files({self.part: path})
            with contextlib.suppress(FileNotFoundError):  # evicted already
                self._record(path)
            return path
        finally:
            self.release()

    def release(self) -> None:
        """Return the space, except what is written: the partial file is kept, to be resumed or evicted."""
        _remove_lock(self._lock)


def cache_directory(directory: str | Path) -> Path:
    """Return the directory of a cache; for `ram` a private directory of this user in /dev/shm."""
    if directory != "ram":
        return Path(directory)
    path = _RAM / f"forebay-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise UsageError(f"cache: cannot make {path} in memory: {error}. Choose a directory on disk.") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UsageError(f"cache: {path} is not a directory of this user's alone. Choose a directory on disk.")
    return path


class SliceCache:
    """Slices by hash, within a budget. Safe between threads and processes, and against kills.

    Args:
        directory: Created if absent. Other files in it are ignored. `ram` keeps the slices in memory (/dev/shm): fast,
            shared by the processes of this user, and lost when the machine restarts.
        budget_bytes: For slices and partial files together.

    Raises:
        UsageError: If the budget is not positive or the directory cannot be created.
    """

    def __init__(self, directory: str | Path, budget_bytes: int) -> None:
        if budget_bytes <= 0:
            raise UsageError(f"cache: expected a budget over 0 bytes, got {budget_bytes}.")
        self.directory = cache_directory(directory)
        self.budget_bytes = budget_bytes
        self._budget = DiskBudget(self.directory, budget_bytes)
        self._locks = self._budget.locks
        self._verified: dict[str, bytes] = {}  # fingerprints of verified files, as recorded
        try:
            self._budget.make_directories()
            remove_stale(self.directory)
        except OSError as error:
            raise UsageError(f"cache: cannot make {self.directory}: {error}. Choose another directory.") from error
        self.after_fork()
        at_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.RLock()
        self._pins: Counter[str] = Counter()
        self._pin_locks: dict[str, Lock] = {}
        self._plans = SharedPlans(self._budget.plans)

    def path_of(self, sha256: str) -> Path:
        if not SHA256.fullmatch(sha256):
            raise UsageError(f"cache: expected a sha256 in lower-case hex, got {sha256[:80]!r}.")
        return self.directory / sha256

    def get(self, sha256: str) -> Path | None:
        """Return the verified file of a slice and record the use; None if it is not cached.

        Any process may evict it at any time: pin it first, or use `pin_all`.
        """
        path = self.path_of(sha256)
        return path if self._record_use(path) or self._verify(path) else None

    def list_slices(self) -> set[str]:
        return {item.name for item in os.scandir(self.directory) if SHA256.fullmatch(item.name)}

    def pin_all(self, sha256s: Sequence[str]) -> list[Path] | None:
        """Pin slices and return their files; None, and no pin, if one is not cached."""
        paths = [self.path_of(sha256) for sha256 in sha256s]
        while True:
            with self._lock, self._budget.lock():
                unverified = next((path for path in paths if not self._record_use(path)), None)
                if unverified is None:
                    for sha256 in sha256s:
                        self._pin(sha256)
                    return paths
            if not self._verify(unverified):  # without the locks: it takes a second per gigabyte
                return None

    def pin(self, sha256: str) -> None:
        """Protect a slice from eviction by any process until as many calls of `unpin`, or the end of this process."""
        self.path_of(sha256)
        with self._lock, self._budget.lock():
            self._pin(sha256)

    def unpin(self, sha256: str) -> None:
        """Undo one `pin`. Raises UsageError if there is none."""
        with self._lock:
            if self._pins[sha256] == 0:
                raise UsageError(f"cache: {sha256} is not pinned.")
            self._pins[sha256] -= 1
            if self._pins[sha256] == 0:
                self._pin_locks.pop(sha256).release()

    def used_bytes(self) -> int:
        with self._budget.lock():
            return sum(entry.counted for entry in self._budget.entries())

    def check_space(self, num_bytes: int) -> None:
        """Raise UsageError if disk and cache have no room for `num_bytes`, or for the budget if that is less."""
        with self._budget.lock():
            used = sum(entry.written for entry in self._budget.entries())
        needed, free = min(num_bytes, self.budget_bytes), self._budget.free_bytes()
        if used + free < needed:
            raise UsageError(
                f"cache: {self.directory} needs {needed} bytes, but its disk has {free} free, and {used} are the "
                f"cache's already. Free {needed - used - free} bytes, or lower the cache's budget."
            )

    def clean(self, needed: Collection[str]) -> None:
        """Remove partial files that no process needs, and locks and records of slices that are not cached."""
        with self._budget.lock():
            plans = self._plans.others()
            present = set()
            for entry in self._budget.entries():
                is_needed = entry.sha256 in needed or any(entry.sha256 in plan.uses for plan in plans)
                if entry.is_part and not is_needed and not entry.is_reserved:
                    self._budget.remove(self.directory / entry.name, self._locks / f"{entry.sha256}.fetch")
                else:
                    present.add(entry.sha256)
            for item in os.scandir(self._locks):
                if item.name != "room" and item.name.partition(".")[0] not in present:
                    self._budget.remove(Path(item.path), Path(item.path))

    def try_reserve(
        self, sha256: str, num_bytes: int, *, steps: float = 0.0, next_use: Callable[[str], float] = lambda _: math.inf,
        evict: Evict = "later",
    ) -> Reservation | NotReserved:  # fmt: skip
        """Reserve the download of a slice and evict others for it, without waiting.

        Args:
            num_bytes: Maximum size of its partial file: `part_bytes` of the slice.
            steps: Steps until it is needed; 0 is at once.
            next_use: Steps until this process reads another slice; infinity for never.
            evict: `unwanted`: only slices that no live process will read; `later`: also those that all processes read
                later than this one is needed, the latest first, and those that only younger processes need at once;
                `any`.
        """
        path = self.path_of(sha256)
        if num_bytes > self.budget_bytes:
            raise UsageError(
                f"cache: slice {sha256[:12]}… has {num_bytes} bytes, the budget of {self.directory} is "
                f"{self.budget_bytes}. Raise the cache's budget to a few slices at least."
            )
        lock = try_acquire(self._locks / f"{sha256}.fetch")
        if lock is None:
            return NotReserved("busy")
        try:
            refused = NotReserved("cached") if path.exists() else None
            if refused is None:
                evicted = self._budget.reserve(sha256, num_bytes, lock, self._plans, steps, next_use, evict)
                if not isinstance(evicted, str):
                    return Reservation(path.with_name(f"{sha256}.part"), lock, self._record_verified, evicted)
                refused = NotReserved("no room", evicted)
        except BaseException:
            _remove_lock(lock)
            raise
        _remove_lock(lock)
        return refused

    def discard(self, sha256: str) -> None:
        """Delete a slice whose bytes are wrong, even if it is pinned."""
        with self._budget.lock():
            self._budget.delete(self.path_of(sha256))

    def publish(self, uses: Mapping[str, PlannedUse]) -> None:
        """Publish to the other processes what this one will read, until `unpublish` or the end of this process."""
        with self._lock, self._budget.lock():
            self._plans.publish(uses)

    def set_position(self, now: int, waiting_since: float = 0.0) -> None:
        """Publish the step of this process, and since when (`time.monotonic`) it waits for room; 0: it does not."""
        self._plans.set_position(now, waiting_since)

    def unpublish(self) -> None:
        """Withdraw what was published. May be called twice."""
        with self._lock, contextlib.suppress(UsageError), self._budget.lock():
            self._plans.close()

    def is_stuck(self, since: float) -> bool:
        """Whether every other live process with a plan waits for room since then, and none downloads."""
        with self._budget.lock():
            all_wait = all(0.0 < plan.waiting_since <= since for plan in self._plans.others())
            return all_wait and not self._budget.reservations()

    def _record_use(self, path: Path) -> bool:
        """Whether a slice is cached and verified; records the time of the use."""
        try:
            status = path.stat()
            fingerprint = _fingerprint(status)
            if self._verified.get(path.name) != fingerprint:
                with contextlib.suppress(OSError):
                    self._verified[path.name] = self._budget.record_path(path.name).read_bytes()
                if self._verified.get(path.name) != fingerprint:
                    return False
            if (now := time.time_ns()) - status.st_atime_ns > _LAST_USE_NS:
                os.utime(path, ns=(now, status.st_mtime_ns))
        except FileNotFoundError:
            return False
        return True

    def _verify(self, path: Path) -> bool:
        """Hash a slice whose record is missing or different, once for all processes; delete it if it is wrong."""
        if not path.exists():
            return False
        lock = acquire(self._locks / f"{path.name}.hash")
        try:
            if not self._record_use(path):
                if not has_id(path, path.name):
                    log.warning("%s: expected bytes of that sha256, got others. Deleted; it is fetched again.", path)
                    self.discard(path.name)
                    return False
                self._record_verified(path)
        except FileNotFoundError:
            return False  # evicted meanwhile
        finally:
            _remove_lock(lock)
        return True

    def _record_verified(self, path: Path) -> None:
        """Record a file that was just verified. Raises FileNotFoundError if it does not exist."""
        now = time.time_ns()
        os.utime(path, ns=(now, now - 10**9))  # A write within this tick of the clock then changes the time.
        self._verified[path.name] = fingerprint = _fingerprint(path.stat())
        try:
            self._budget.record_path(path.name).write_bytes(fingerprint)  # A torn record costs another hash.
        except OSError as error:
            log.warning(
                "%s: cannot record that %s is verified (%s); other processes hash it.", self._locks, path, error
            )

    def _pin(self, sha256: str) -> None:
        if self._pins[sha256] == 0:
            self._pin_locks[sha256] = acquire(self._locks / f"{sha256}.pin", SHARED)
        self._pins[sha256] += 1


def _fingerprint(status: os.stat_result) -> bytes:
    return b"%d %d %d" % (status.st_size, status.st_mtime_ns, status.st_ino)


def _remove_lock(lock: Lock) -> None:
    """Release a lock and delete its file. No effect if it was released, or stayed with the parent of a fork."""
    if lock.descriptor >= 0:
        os.ftruncate(lock.descriptor, 0)
        lock.path.unlink(missing_ok=True)  # A process that waits for it notices, and creates another.
        lock.release()
