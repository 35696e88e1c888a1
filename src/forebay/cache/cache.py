"""A directory of verified slices, named by hash, with a budget of bytes that is never exceeded.

`DIR/SHA256` is complete and verified: a slice gets its name by a rename after its hash was checked. `SHA256.part` is a
download, running or broken off; it can be resumed after any kill. Space for a slice is reserved, and other slices are
evicted, before its first byte is requested. Processes share a directory by file locks: one downloads a slice, the
others wait for it. Eviction takes the plans of all processes into account (`eviction.py`).

Damage of a file in the directory is found only by hashing it again (Loader's `verify`). A path returned by `get` may be
evicted before it is opened; `pin` and `pin_all` prevent that.

Cost: a listing of the directory per downloaded slice (4 ms for 1,000 slices).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay.cache.eviction import SHA256, DiskBudget, Evict, PlannedUse, SharedPlans
from forebay.errors import UsageError
from forebay.files import commit_files, remove_stale
from forebay.storage.locks import SHARED, Lock, acquire, at_fork, try_acquire

_RAM = Path("/dev/shm")
_LAST_USE_NS = 10**9  # resolution of the time of the last use


@dataclass(frozen=True)
class NotReserved:
    """Why space was not reserved: the slice is cached, another thread or process downloads it, or there is no room."""

    reason: Literal["cached", "busy", "no room"]
    detail: str = ""


class Reservation:
    """The right to download one slice, with space for it. Call exactly one of `commit` and `release`, in any thread."""

    def __init__(self, part: Path, lock: Lock, evicted: list[str]) -> None:
        self.part = part
        self.evicted = evicted
        self._lock = lock

    def commit(self) -> Path:
        """Rename the verified, synced partial file to the slice. Raises OSError; the reservation ends either way."""
        path = self.part.with_suffix("")
        try:
            commit_files({self.part: path})
            return path
        finally:
            self.release()

    def release(self) -> None:
        """Return the space, except what is written: the partial file is kept, to be resumed or evicted."""
        _remove_lock(self._lock)


def cache_directory(directory: str | Path) -> Path:
    """Return the directory of a cache; for `ram` and `ram:NAME` a private directory of this user in /dev/shm."""
    if not isinstance(directory, str) or not re.match(r"ram(:|$)", directory):
        return Path(directory)
    name = directory[4:]
    if ":" in directory and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
        raise UsageError(f"cache: expected ram or ram:NAME of letters, digits, '.', '_' and '-', got {directory!r}.")
    path = _RAM / f"forebay-{os.getuid()}{'-' * bool(name)}{name}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise UsageError(f"cache: cannot make {path} in memory: {error}. Choose a directory on disk.") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UsageError(f"cache: {path} is not a directory of this user's alone. Choose another name: ram:NAME.")
    return path


class SliceCache:
    """Slices by hash, within a budget. Safe between threads and processes, and against kills.

    Args:
        directory: Created if absent. Other files in it are ignored. `ram` or `ram:NAME` keeps the slices in memory
            (/dev/shm): fast, shared by the processes of this user, and lost when the machine restarts.
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
        try:
            self._budget.make_directories()
            remove_stale(self.directory)
        except OSError as error:
            raise UsageError(f"cache: cannot make {self.directory}: {error}. Choose another directory.") from error
        self.after_fork()
        at_fork(self)

    def after_fork(self) -> None:
        """A forked child starts without pins and without a published plan."""
        self._lock = threading.RLock()
        self._pins: Counter[str] = Counter()
        self._pin_locks: dict[str, Lock] = {}
        self._plans = SharedPlans(self._budget.plans)

    def path_of(self, sha256: str) -> Path:
        """Return the path of a slice, cached or not."""
        if not SHA256.fullmatch(sha256):
            raise UsageError(f"cache: expected a sha256 in lower-case hex, got {sha256[:80]!r}.")
        return self.directory / sha256

    def get(self, sha256: str) -> Path | None:
        """Return the verified file of a slice and record the use; None if it is not cached.

        Any process may evict it at any time: pin it first, or use `pin_all`.
        """
        path = self.path_of(sha256)
        return path if _record_use(path) else None

    def list_slices(self) -> set[str]:
        """Return the hashes of the slices in the directory at this moment."""
        return {item.name for item in os.scandir(self.directory) if SHA256.fullmatch(item.name)}

    def pin_all(self, sha256s: Sequence[str]) -> list[Path] | None:
        """Pin slices and return their files; None, and no pin, if one is not cached."""
        paths = [self.path_of(sha256) for sha256 in sha256s]
        with self._lock, self._budget.lock():
            if not all(map(_record_use, paths)):
                return None
            for sha256 in sha256s:
                self._pin(sha256)
            return paths

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
        """Return the bytes of slices and reservations, which count against the budget."""
        with self._budget.lock():
            return sum(entry.counted for entry in self._budget.entries())

    def check_space(self, num_bytes: int) -> None:
        """Raise UsageError if disk and cache have no room for `num_bytes`, or for the budget if that is less."""
        needed = min(num_bytes, self.budget_bytes)
        with self._budget.lock():
            used = sum(entry.written for entry in self._budget.entries())
            free = self._budget.free_bytes()
        if used + free < needed:
            raise UsageError(
                f"cache: {self.directory} needs {needed} bytes (budget {self.budget_bytes}, slices {num_bytes}), but "
                f"its disk has {free} free, and {used} are the cache's already. Free {needed - used - free} bytes, "
                "lower the cache's budget, or choose another directory."
            )

    def clean(self, needed: Collection[str]) -> None:
        """Remove partial files that no process needs, and locks of slices that are not cached."""
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
        self,
        sha256: str,
        num_bytes: int,
        *,
        steps: float = 0.0,
        next_use: Callable[[str], float] = lambda _: math.inf,
        evict: Evict = "later",
    ) -> Reservation | NotReserved:
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
                    return Reservation(path.with_name(f"{sha256}.part"), lock, evicted)
                refused = NotReserved("no room", evicted)
        except BaseException:
            _remove_lock(lock)
            raise
        _remove_lock(lock)
        return refused

    def drop(self, sha256s: Collection[str]) -> list[str]:
        """Delete the slices that no other live process asks to keep and none has pinned; return those deleted."""
        with self._budget.lock():
            plans = self._plans.others()
            return [
                sha256
                for sha256 in sha256s
                if not any(plan.keeps(sha256) for plan in plans)
                and self._budget.remove(self.path_of(sha256), self._locks / f"{sha256}.pin")
            ]

    def discard(self, sha256: str) -> None:
        """Delete a slice whose bytes are wrong, even if it is pinned."""
        with self._budget.lock():
            self.path_of(sha256).unlink(missing_ok=True)

    def publish(self, uses: Mapping[str, PlannedUse], released: Collection[str] = ()) -> None:
        """Publish to the other processes what this one will read, until `unpublish` or the end of this process.

        They need not keep the slices in `released` for it.
        """
        with self._lock, self._budget.lock():
            self._plans.publish(uses, released)

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

    def _pin(self, sha256: str) -> None:
        if self._pins[sha256] == 0:
            self._pin_locks[sha256] = acquire(self._locks / f"{sha256}.pin", SHARED)
        self._pins[sha256] += 1


def _record_use(path: Path) -> bool:
    """Whether a slice is cached; records the time of the use."""
    try:
        status = path.stat()
        if (now := time.time_ns()) - status.st_atime_ns > _LAST_USE_NS:
            os.utime(path, ns=(now, status.st_mtime_ns))
    except FileNotFoundError:
        return False
    return True


def _remove_lock(lock: Lock) -> None:
    """Release a lock and delete its file. No effect if it was released, or stayed with the parent of a fork."""
    if lock.descriptor >= 0:
        os.ftruncate(lock.descriptor, 0)
        lock.path.unlink(missing_ok=True)  # A process that waits for it notices, and creates another.
        lock.release()
