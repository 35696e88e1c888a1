"""A directory of verified slices, named by hash, with a budget of bytes that is never exceeded.

Everything under `DIR/SHA256` is whole and verified: a slice gets its name by a rename, after its hash was
checked. `SHA256.part` is a download under way or broken off, which can be resumed after any kill. Room for a slice
is reserved, and others are evicted, before its first byte is asked for; partial files count in full. Processes
share a directory by file locks: one fetches a slice, the others wait for it or go on with another. Whoever needs
room evicts for all: first what no live process will read again, then what is read last (`room.py`).

The file `verified` records the size, time of change and inode of each verified file. A file that differs from its
record, or has none (after a copy or a restore of the directory), is hashed when it is next asked for: it stays if it is
right, and is deleted only if it is wrong. What changes while it is mapped, below the file system, or with all three
kept is not noticed: that takes hashing it again (Loader's `verify`).

A path handed out by `get` may be evicted before it is opened; `hold` and `pin` say what may not.

What the choice costs: a listing of the directory for each slice fetched (4 ms for 1,000 slices), and a lock
file of no bytes for each slice read, until the next start cleans it away.
"""

from __future__ import annotations

import contextlib
import logging
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
from forebay.dataset.slices import hash_file
from forebay.errors import UsageError
from forebay.files import atomic_write, commit_files, remove_stale
from forebay.storage.locks import SHARED, Lock, acquire, at_fork, try_acquire

_MIN_LINES = 4096  # Fewer are not worth writing anew.
_RAM = Path("/dev/shm")
_USE_NS = 10**9  # The last use is known to a second.
log = logging.getLogger("forebay.cache")


class VerifiedIndex:
    """Which files of a cache directory were verified: a text file to which threads and processes append.

    A line is `SHA256 SIZE MTIME_NS INODE`. What cannot be read as such, as a kill or a full disk may leave it, counts
    as no record: the slice is hashed again. Once most lines are of slices that are gone, the file is written anew.

    Cost: 0.2 KB of memory a slice, a line of 120 bytes a slice fetched; 250,000 lines are read in 0.3 s.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "verified"
        self._marks: dict[bytes, bytes] = {}
        self._inode = self._offset = self._num_lines = 0
        self._max_lines = _MIN_LINES
        self.after_fork()
        at_fork(self)

    def after_fork(self) -> None:
        """A child has a lock of its own."""
        self._lock = threading.Lock()

    def matches(self, sha256: str, found: os.stat_result) -> bool:
        """Whether a file with this status is the one that was verified."""
        name, mark = sha256.encode(), _mark(found)
        if self._marks.get(name) != mark:
            with self._lock:
                self._read()
        return self._marks.get(name) == mark

    def record(self, path: Path) -> None:
        """Record a file that was just verified. Raises FileNotFoundError if it is gone."""
        now = time.time_ns()
        os.utime(path, ns=(now, now - 10**9))  # So that writing to it within this tick of the clock changes the time.
        name, mark = path.name.encode(), _mark(path.stat())
        with self._lock:
            self._marks[name] = mark
            try:
                with acquire(self._path) as lock:
                    os.lseek(lock.descriptor, 0, os.SEEK_END)
                    os.write(lock.descriptor, name + b" " + mark + b"\n")
                    self._num_lines += 1
                    if self._num_lines > self._max_lines:
                        self._compact()
            except OSError as error:
                log.warning("%s: cannot be written (%s); later processes hash %s again.", self._path, error, path.name)

    def _read(self) -> None:
        """The lines that were added since; all of them, if the file was written anew."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset, self._num_lines, self._marks = found.st_ino, 0, 0, {}
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        data = data[: data.rfind(b"\n") + 1]
        lines = data.splitlines()
        self._offset += len(data)
        self._num_lines += len(lines)
        self._marks.update(line.partition(b" ")[::2] for line in lines)

    def _compact(self) -> None:
        """Write the file anew if most of its lines are of slices that are gone."""
        self._read()
        here = {item.name.encode() for item in os.scandir(self._directory)}
        self._max_lines = _MIN_LINES + 2 * len(here)
        if self._num_lines > self._max_lines:
            atomic_write(self._path, (b"%s %s\n" % item for item in self._marks.items() if item[0] in here))


def _mark(found: os.stat_result) -> bytes:
    return b"%d %d %d" % (found.st_size, found.st_mtime_ns, found.st_ino)


@dataclass(frozen=True)
class NotReserved:
    """Why no room was reserved: the slice is here, another thread or process fetches it, or there is no room."""

    why: Literal["here", "busy", "no room"]
    detail: str = ""


class Reservation:
    """The right to fetch one slice, with room for it. Exactly one of `commit` and `release`, from any thread."""

    def __init__(self, part: Path, verified: VerifiedIndex, lock: Lock, evicted: list[str]) -> None:
        self.part = part
        self.evicted = evicted
        self._verified = verified
        self._lock = lock

    def commit(self) -> Path:
        """Give the verified, synced partial file its name. Raises OSError; the reservation ends either way."""
        final = self.part.with_suffix("")
        try:
            commit_files({self.part: final})
            with contextlib.suppress(FileNotFoundError):  # Evicted already.
                self._verified.record(final)
            return final
        finally:
            self.release()

    def release(self) -> None:
        """Give the room back, except for what is written: it stays, to be resumed or evicted."""
        _clear(self._lock)


def cache_directory(directory: str | Path) -> Path:
    """Where a cache lies: a path, or for `ram` and `ram:NAME` a directory of this user's alone in memory (/dev/shm)."""
    if not isinstance(directory, str) or not re.match(r"ram(:|$)", directory):
        return Path(directory)
    name = directory[4:]
    if ":" in directory and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
        raise UsageError(f"cache: expected ram or ram:NAME of letters, digits, '.', '_' and '-', got {directory!r}.")
    path = _RAM / f"forebay-{os.getuid()}{'-' * bool(name)}{name}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise UsageError(f"cache: cannot make {path} in memory: {error}. Choose a directory on disk.") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(f"cache: {path} is not a directory of this user's alone. Choose another name: ram:NAME.")
    return path


class SliceCache:
    """Slices by hash, within a budget. Safe between threads and processes, and to kill.

    Args:
        directory: Made if absent. A file in it that is not the cache's own is left alone and not counted.
            `ram` or `ram:NAME` keeps the slices in memory (/dev/shm): fast, shared by this user's processes, and
            lost when the machine restarts.
        budget_bytes: For slices and partial files together.

    Raises:
        UsageError: If the budget is not positive or the directory cannot be made.
    """

    def __init__(self, directory: str | Path, budget_bytes: int) -> None:
        if budget_bytes <= 0:
            raise UsageError(f"cache: expected a budget over 0 bytes, got {budget_bytes}")
        self.directory = cache_directory(directory)
        self.budget_bytes = budget_bytes
        self._room = DiskBudget(self.directory, budget_bytes)
        self._locks = self._room.locks
        self._verified = VerifiedIndex(self.directory)
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            (self.directory / "futures").mkdir(exist_ok=True)
            remove_stale(self.directory)
        except OSError as error:
            raise UsageError(f"cache: cannot make {self.directory}: {error}. Choose another directory.") from error
        self.after_fork()
        at_fork(self)

    def after_fork(self) -> None:
        """A child begins with nothing pinned and nothing published."""
        self._lock = threading.RLock()
        self._pins: Counter[str] = Counter()
        self._pin_locks: dict[str, Lock] = {}
        self._futures = SharedPlans(self.directory / "futures")

    def path_of(self, sha256: str) -> Path:
        """Where a slice lies, or would."""
        if not SHA256.fullmatch(sha256):
            raise UsageError(f"cache: expected a sha256 in lower-case hex, got {sha256[:80]!r}")
        return self.directory / sha256

    def get(self, sha256: str) -> Path | None:
        """The verified file of a slice, marked as used now; None if it is not held.

        It may be evicted at any time, by another process too: pin it first, or `hold` it.
        """
        path = self.path_of(sha256)
        return path if self._use(path) or self._verify(path) else None

    def held(self) -> set[str]:
        """The slices that are here at this moment: one listing, no waiting."""
        return {item.name for item in os.scandir(self.directory) if SHA256.fullmatch(item.name)}

    def hold(self, sha256s: Sequence[str]) -> list[Path] | None:
        """Pin slices and give their files, which can then be opened until `unpin`; None, and no pin, if one is absent.

        All or none: who waits for the missing one keeps nothing from the others meanwhile.
        """
        paths = [self.path_of(sha256) for sha256 in sha256s]
        while True:
            with self._lock, self._room.lock():
                unverified = next((path for path in paths if not self._use(path)), None)
                if unverified is None:
                    for sha256 in sha256s:
                        self._pin(sha256)
                    return paths
            if not self._verify(unverified):  # Outside the locks: it takes a second a gigabyte.
                return None

    def pin(self, sha256: str) -> None:
        """Keep a slice from eviction by any process until as many `unpin`, or this process's end."""
        self.path_of(sha256)
        with self._lock, self._room.lock():
            self._pin(sha256)

    def unpin(self, sha256: str) -> None:
        """Undo one `pin`; one too many is an error of the caller's."""
        with self._lock:
            if self._pins[sha256] == 0:
                raise UsageError(f"cache: {sha256} is not pinned")
            self._pins[sha256] -= 1
            if self._pins[sha256] == 0:
                self._pin_locks.pop(sha256).release()

    def used_bytes(self) -> int:
        """Bytes held and reserved: what counts against the budget."""
        with self._room.lock():
            return sum(entry.counted for entry in self._room.entries())

    def check_space(self, num_bytes: int) -> None:
        """UsageError if the disk, with what the cache holds, has no room for what will be read, the budget at most."""
        needed = min(num_bytes, self.budget_bytes)
        with self._room.lock():
            there = sum(entry.written for entry in self._room.entries())
            free = self._room.free_bytes()
        if there + free < needed:
            raise UsageError(
                f"cache: {self.directory} needs {needed} bytes (budget {self.budget_bytes}, slices {num_bytes}), but "
                f"its disk has {free} free, and {there} are the cache's already. Free {needed - there - free} bytes, "
                "lower the cache's budget, or choose another directory."
            )

    def clean(self, wanted: Collection[str]) -> None:
        """Remove what killed processes left: locks of absent slices, partial files of slices that nobody wants."""
        with self._room.lock():
            futures = self._futures.others()
            here = set()
            for entry in self._room.entries():
                wants = entry.sha256 in wanted or any(entry.sha256 in future.uses for future in futures)
                if entry.is_part and not wants and not entry.reserved:
                    self._room.remove(self.directory / entry.name, self._locks / f"{entry.sha256}.fetch")
                else:
                    here.add(entry.sha256)
            for item in os.scandir(self._locks):
                if item.name != "room" and item.name.partition(".")[0] not in here:
                    self._room.remove(Path(item.path), Path(item.path))

    def try_reserve(
        self,
        sha256: str,
        num_bytes: int,
        *,
        steps: float = 0.0,
        next_use: Callable[[str], float] | None = None,
        evict: Evict = "later",
    ) -> Reservation | NotReserved:
        """The right to fetch a slice, with room made for it, without waiting.

        Args:
            num_bytes: What its partial file takes at most: `part_bytes` of the slice.
            steps: How soon it is needed, in steps from now; 0 is at once.
            next_use: How soon this process will read another one, infinite for never; by default never.
            evict: `unwanted`: only what no live process will read again; `later`: also what all read later than
                this one is needed, the latest first, and what only younger processes need at once; `any`.
        """
        final = self.path_of(sha256)
        if num_bytes > self.budget_bytes:
            raise UsageError(
                f"cache: slice {sha256[:12]}… has {num_bytes} bytes, the budget of {self.directory} is "
                f"{self.budget_bytes}. Raise the cache's budget to a few slices at least."
            )
        lock = try_acquire(self._locks / f"{sha256}.fetch")
        if lock is None:
            return NotReserved("busy")
        try:
            if final.exists():
                _clear(lock)
                return NotReserved("here")
            next_use = next_use or (lambda _: math.inf)
            made = self._room.make(sha256, num_bytes, lock, self._futures, steps, next_use, evict)
        except BaseException:
            _clear(lock)
            raise
        if isinstance(made, str):
            _clear(lock)
            return NotReserved("no room", made)
        return Reservation(final.with_name(f"{sha256}.part"), self._verified, lock, made)

    def drop(self, sha256s: Collection[str]) -> list[str]:
        """Delete slices which no other live process asks to keep and nobody has pinned: those deleted."""
        gone = []
        with self._room.lock():
            futures = self._futures.others()
            for sha256 in sha256s:
                if not any(future.keeps(sha256) for future in futures) and self._room.remove(
                    self.path_of(sha256), self._locks / f"{sha256}.pin"
                ):
                    gone.append(sha256)
        return gone

    def discard(self, sha256: str) -> None:
        """Delete a slice whose bytes turned out to be wrong, whoever uses it."""
        with self._room.lock():
            self.path_of(sha256).unlink(missing_ok=True)

    def publish(self, uses: Mapping[str, PlannedUse], released: Collection[str] = ()) -> None:
        """Tell the other processes what this one will read: (first, last) steps of the next uses, and the one after.

        Those in `released` they need not keep for its sake. It holds until this process ends or calls `retire`.
        """
        with self._lock, self._room.lock():
            self._futures.publish(uses, released)

    def set_position(self, now: int, waiting_since: float = 0.0) -> None:
        """Tell them at which step this process is, and since when (`time.monotonic`) it waits for room in vain."""
        self._futures.set_position(now, waiting_since)

    def unpublish(self) -> None:
        """Take back what was published. May be called twice."""
        with self._lock, contextlib.suppress(UsageError), self._room.lock():
            self._futures.close()

    def is_stuck(self, since: float) -> bool:
        """Whether every other live process that published waits for room since then, and nobody is fetching."""
        with self._room.lock():
            starved = all(0.0 < future.waiting_since <= since for future in self._futures.others())
            return starved and not self._room.reservations()

    def _use(self, path: Path) -> bool:
        """Whether a slice is here and verified; it is then marked as used now."""
        try:
            found = path.stat()
            if not self._verified.matches(path.name, found):
                return False
            if (now := time.time_ns()) - found.st_atime_ns > _USE_NS:
                os.utime(path, ns=(now, found.st_mtime_ns))
        except FileNotFoundError:
            return False
        return True

    def _verify(self, path: Path) -> bool:
        """Hash a slice that has no record or differs from it, once for all processes; delete it if it is wrong."""
        if not path.exists():
            return False
        lock = acquire(self._locks / f"{path.name}.hash")
        try:
            while not self._use(path):
                if hash_file(path) != path.name:
                    log.warning("%s: expected bytes of that sha256, got others. Deleted; it is fetched again.", path)
                    self.discard(path.name)
                    return False
                self._verified.record(path)
        except FileNotFoundError:
            return False  # Evicted meanwhile.
        finally:
            _clear(lock)
        return True

    def _pin(self, sha256: str) -> None:
        if self._pins[sha256] == 0:
            self._pin_locks[sha256] = acquire(self._locks / f"{sha256}.pin", SHARED)
        self._pins[sha256] += 1


def _clear(lock: Lock) -> None:
    """End a reservation. Nothing, if it has ended or a fork left it with the parent."""
    if lock.descriptor >= 0:
        os.ftruncate(lock.descriptor, 0)
        lock.path.unlink(missing_ok=True)  # Whoever waits for it finds out, and makes another.
        lock.release()
