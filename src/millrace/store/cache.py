"""A directory of verified slices, named by hash, with a budget of bytes that is never exceeded.

Everything under `DIR/SHA256` is whole and verified: a slice gets its name by a rename, after its hash was
checked. `SHA256.part` is a download under way or broken off, which can be resumed after any kill. Room for a slice
is reserved, and others are evicted, before its first byte is asked for; partial files count in full. Processes
share a directory by file locks: one fetches a slice, the others wait for it or go on with another. Whoever needs
room evicts for all: first what no live process will read again, then what is read last (`futures.py`).

A path handed out by `get` may be evicted before it is opened; `hold` and `pin` say what may not.

What the choice costs: a listing of the directory for each slice fetched (3 ms for 1,000 slices), and two lock
files of no bytes a slice, until the next start cleans them away.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from millrace.errors import UsageError
from millrace.store.futures import Future, Futures, Use
from millrace.store.locks import EXCLUSIVE, SHARED, Lock, at_fork, is_locked, take, try_take

_SHA256 = re.compile(r"[0-9a-f]{64}")
_RAM = Path("/dev/shm")
_PIECE_BYTES = 8 << 20

Evict = Literal["none", "unwanted", "later", "any"]


@dataclass(frozen=True)
class Refusal:
    """Why no room was reserved: the slice is here, another thread or process fetches it, or there is no room."""

    why: Literal["here", "busy", "no room"]
    detail: str = ""


class Reservation:
    """The right to fetch one slice, with room for it. Exactly one of `commit` and `release`, from any thread."""

    def __init__(self, cache: SliceCache, sha256: str, lock: Lock, evicted: list[str]) -> None:
        self.part = cache.path_of(sha256).with_name(f"{sha256}.part")
        self.evicted = evicted
        self._cache = cache
        self._sha256 = sha256
        self._lock = lock

    def commit(self) -> Path:
        """Give the verified, synced partial file its name. Raises OSError; the reservation ends either way."""
        try:
            return self._cache.commit(self._sha256)
        finally:
            self.release()

    def release(self) -> None:
        """Give the room back, except for what is written: it stays, to be resumed or evicted."""
        _clear(self._lock)


@dataclass(slots=True)
class _Entry:
    path: Path
    sha256: str
    is_part: bool
    counted: int  # Bytes that count against the budget: a reservation in full.
    written: int  # Bytes of the disk that it takes.
    reserved: bool
    used_at: float


def part_bytes(num_bytes: int) -> int:
    """What to reserve for a slice whose partial file says at its end which pieces of 8 MiB are there."""
    return num_bytes + -(-num_bytes // _PIECE_BYTES) + 1


def cache_directory(directory: str | Path) -> Path:
    """Where a cache lies: a path, or for the texts `ram` and `ram:NAME` a directory of this user's in memory.

    Raises:
        UsageError: If memory is asked for and there is no /dev/shm, or the directory there is another user's.
    """
    if not isinstance(directory, str) or not re.match(r"ram(:|$)", directory):
        return Path(directory)
    name = directory[4:]
    if ":" in directory and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
        raise UsageError(f"cache: expected ram or ram:NAME of letters, digits, '.', '_' and '-', got {directory!r}.")
    path = _RAM / f"millrace-{os.getuid()}{'-' * bool(name)}{name}"
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
        self._locks = self.directory / "locks"
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            (self.directory / "futures").mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"cache: cannot make {self.directory}: {error}. Choose another directory.") from error
        self.after_fork()
        at_fork(self)

    def after_fork(self) -> None:
        """A child begins with nothing pinned and nothing published."""
        self._lock = threading.RLock()
        self._pins: Counter[str] = Counter()
        self._pin_locks: dict[str, Lock] = {}
        self._futures = Futures(self.directory / "futures")

    def path_of(self, sha256: str) -> Path:
        """Where a slice lies, or would."""
        if not _SHA256.fullmatch(sha256):
            raise UsageError(f"cache: expected a sha256 in lower-case hex, got {sha256[:80]!r}")
        return self.directory / sha256

    def get(self, sha256: str) -> Path | None:
        """The verified file of a slice, marked as used now; None if it is not held.

        It may be evicted at any time, by another process too: pin it first, or `hold` it.
        """
        path = self.path_of(sha256)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def held(self) -> set[str]:
        """The slices that are here at this moment: one listing, no waiting."""
        return {item.name for item in os.scandir(self.directory) if _SHA256.fullmatch(item.name)}

    def hold(self, sha256s: Sequence[str]) -> list[Path] | None:
        """Pin slices and give their files, which can then be opened until `unpin`; None, and no pin, if one is absent.

        All or none: who waits for the missing one keeps nothing from the others meanwhile.
        """
        paths = [self.path_of(sha256) for sha256 in sha256s]
        with self._lock, self._room():
            try:
                for path in paths:
                    os.utime(path)
            except FileNotFoundError:
                return None
            for sha256 in sha256s:
                self._pin(sha256)
        return paths

    def pin(self, sha256: str) -> None:
        """Keep a slice from eviction by any process until as many `unpin`, or this process's end."""
        self.path_of(sha256)
        with self._lock, self._room():
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
        return sum(entry.counted for entry in self._entries())

    def check_space(self, num_bytes: int) -> None:
        """Refuse at the start what could not end well.

        Args:
            num_bytes: All that will be read; more than the budget counts as the budget.

        Raises:
            UsageError: If the disk has no room for it, with what the cache holds already.
        """
        needed = min(num_bytes, self.budget_bytes)
        there = sum(entry.written for entry in self._entries())
        free = self._free_bytes()
        if there + free < needed:
            raise UsageError(
                f"cache: {self.directory} needs {needed} bytes (budget {self.budget_bytes}, slices {num_bytes}), but "
                f"its disk has {free} free, and {there} are the cache's already. Free {needed - there - free} bytes, "
                "lower the cache's budget, or choose another directory."
            )

    def clean(self, wanted: Collection[str]) -> None:
        """Remove what killed processes left: partial files that nobody will go on with, locks of absent slices.

        Args:
            wanted: Slices whose partial files stay, to be resumed.
        """
        with self._room():
            futures = self._futures.others()
            here = set()
            for entry in self._entries():
                wants = entry.sha256 in wanted or any(entry.sha256 in future.uses for future in futures)
                if entry.is_part and not wants and not entry.reserved:
                    self._remove(entry.path, self._locks / f"{entry.sha256}.fetch")
                else:
                    here.add(entry.sha256)
            for item in os.scandir(self._locks):
                if item.name != "room" and item.name.partition(".")[0] not in here:
                    self._remove(Path(item.path), Path(item.path))

    @contextlib.contextmanager
    def fetching(self, sha256: str, num_bytes: int) -> Iterator[Path]:
        """The right to fetch a slice, with room made for it: yields its partial file's path.

        Waits while another thread or process fetches the same slice; look again with `get` once inside.

        Raises:
            UsageError: If the slice cannot fit, because of the budget or of what is pinned or being fetched.
        """
        final = self.path_of(sha256)
        self._check_size(sha256, num_bytes)
        lock = take(self._locks / f"{sha256}.fetch")
        try:
            if not final.exists():
                made = self._make_room(sha256, num_bytes, lock, 0.0, _never, "any")
                if isinstance(made, str):
                    raise UsageError(f"cache: {made} Raise the budget.")
            yield final.with_name(f"{sha256}.part")
        finally:
            _clear(lock)

    def try_reserve(
        self,
        sha256: str,
        num_bytes: int,
        *,
        steps: float = 0.0,
        next_use: Callable[[str], float] | None = None,
        evict: Evict = "later",
    ) -> Reservation | Refusal:
        """The right to fetch a slice, with room made for it, without waiting.

        Args:
            num_bytes: What its partial file takes at most: `part_bytes` of the slice.
            steps: How soon it is needed, in steps from now; 0 is at once.
            next_use: How soon this process will read another one, infinite for never; by default never.
            evict: `unwanted`: only what no live process will read again; `later`: also what all read later than
                this one is needed, the latest first, and what only younger processes need at once; `none`; `any`.

        Raises:
            UsageError: If the slice is larger than the budget.
        """
        final = self.path_of(sha256)
        self._check_size(sha256, num_bytes)
        lock = try_take(self._locks / f"{sha256}.fetch")
        if lock is None:
            return Refusal("busy")
        try:
            if final.exists():
                _clear(lock)
                return Refusal("here")
            made = self._make_room(sha256, num_bytes, lock, steps, next_use or _never, evict)
        except BaseException:
            _clear(lock)
            raise
        if isinstance(made, str):
            _clear(lock)
            return Refusal("no room", made)
        return Reservation(self, sha256, lock, made)

    def commit(self, sha256: str) -> Path:
        """Give a verified partial file its name. Call inside `fetching`, after its bytes were synced."""
        final = self.path_of(sha256)
        final.with_name(f"{sha256}.part").replace(final)
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return final

    def drop(self, sha256s: Collection[str]) -> list[str]:
        """Delete slices which no other live process will read in its epoch and nobody has pinned: those deleted."""
        gone = []
        with self._room():
            futures = self._futures.others()
            for sha256 in sha256s:
                if not any(future.wants_in_pass(sha256) for future in futures) and self._remove(
                    self.path_of(sha256), self._locks / f"{sha256}.pin"
                ):
                    gone.append(sha256)
        return gone

    def publish(self, uses: Mapping[str, Use], pass_end: int | None = None) -> None:
        """Tell the other processes what this one will read: (first, last) steps of the next uses, and the one after.

        It holds until this process ends or calls `retire`.
        """
        with self._lock, self._room():
            self._futures.publish(uses, pass_end)

    def stand(self, now: int, starved_at: float = 0.0) -> None:
        """Tell them at which step this process is, and since when (`time.monotonic`) it waits for room in vain."""
        self._futures.stand(now, starved_at)

    def retire(self) -> None:
        """Take back what was published. May be called twice."""
        with self._lock, self._room():
            self._futures.close()

    def has_others(self) -> bool:
        """Whether another live process has published what it will read."""
        with self._room():
            return bool(self._futures.others())

    def is_stuck(self, since: float) -> bool:
        """Whether every other live process that published waits for room since then, and nobody is fetching."""
        with self._room():
            starved = all(0.0 < future.starved_at <= since for future in self._futures.others())
            return starved and not self._reservations()

    def _check_size(self, sha256: str, num_bytes: int) -> None:
        if num_bytes > self.budget_bytes:
            raise UsageError(
                f"cache: slice {sha256[:12]}… has {num_bytes} bytes, the budget of {self.directory} is "
                f"{self.budget_bytes}. Raise the cache's budget to a few slices at least."
            )

    def _room(self) -> Lock:
        return take(self._locks / "room")

    def _pin(self, sha256: str) -> None:
        if self._pins[sha256] == 0:
            self._pin_locks[sha256] = take(self._locks / f"{sha256}.pin", SHARED)
        self._pins[sha256] += 1

    def _remove(self, path: Path, guard: Path) -> bool:
        """Delete a file of the cache's unless its guard is locked; under the room lock, which every pin takes too."""
        if is_locked(guard, EXCLUSIVE):
            return False
        path.unlink(missing_ok=True)
        return True

    def _free_bytes(self) -> int:
        disk = os.statvfs(self.directory)
        return disk.f_bavail * disk.f_frsize

    def _entries(self) -> list[_Entry]:
        """The cache's files, and the reservations of which no byte is written yet."""
        reserved = self._reservations()
        entries = []
        for item in os.scandir(self.directory):
            sha256 = item.name.removesuffix(".part")
            if not _SHA256.fullmatch(sha256):
                continue
            try:
                found = item.stat()
            except FileNotFoundError:
                continue  # evicted or renamed by another process meanwhile
            is_part = item.name.endswith(".part")
            room = reserved.pop(sha256, 0)
            size = max(found.st_size, room) if is_part else found.st_size
            written = found.st_blocks * 512
            entries.append(_Entry(Path(item.path), sha256, is_part, size, written, room > 0, found.st_mtime))
        for sha256, size in reserved.items():
            entries.append(_Entry(self.directory / f"{sha256}.part", sha256, True, size, 0, True, math.inf))
        return entries

    def _reservations(self) -> dict[str, int]:
        """What fetches under way have reserved; one whose process died holds no lock and counts no more."""
        found = {}
        for item in os.scandir(self._locks):
            if item.name.endswith(".fetch") and item.stat().st_size:
                path = Path(item.path)
                if is_locked(path, SHARED) and (text := path.read_bytes()):
                    found[item.name.removesuffix(".fetch")] = int(text)
        return found

    def _make_room(
        self, sha256: str, num_bytes: int, lock: Lock, steps: float, next_use: Callable[[str], float], evict: Evict
    ) -> list[str] | str:
        """Evict until a slice fits, and reserve its bytes in its lock file: what was evicted, or why not."""
        with self._room():
            entries = self._entries()
            own = sum(entry.written for entry in entries if entry.sha256 == sha256)
            entries = [entry for entry in entries if entry.sha256 != sha256]
            over = sum(entry.counted for entry in entries) + num_bytes - self.budget_bytes
            unwritten = sum(max(0, entry.counted - entry.written) for entry in entries if entry.reserved)
            short = unwritten + max(0, num_bytes - own) - self._free_bytes()
            chosen: list[_Entry] = []
            if over > 0 or short > 0:
                for entry in self._victims(entries, steps, next_use, evict):
                    guard = self._locks / f"{entry.sha256}.{'fetch' if entry.is_part else 'pin'}"
                    if not is_locked(guard, EXCLUSIVE):
                        chosen.append(entry)
                        over, short = over - entry.counted, short - entry.written
                        if over <= 0 and short <= 0:
                            break
            if over > 0:
                used = self.budget_bytes + over - num_bytes
                return (
                    f"no room for {num_bytes} bytes in {self.directory}: budget {self.budget_bytes}, "
                    f"{used} in use by slices that are pinned or being fetched, or needed sooner."
                )
            if short > 0:
                return f"no room for {num_bytes} bytes in {self.directory}: its disk is full, {short} bytes short."
            for entry in chosen:
                entry.path.unlink(missing_ok=True)
            part = self.directory / f"{sha256}.part"
            with contextlib.suppress(FileNotFoundError):
                if part.stat().st_size > num_bytes:
                    os.truncate(part, 0)  # Not one of a download of these bytes.
            # Reserved before the room is let go, so that no other process takes it.
            os.ftruncate(lock.descriptor, 0)
            os.pwrite(lock.descriptor, str(num_bytes).encode(), 0)
            return [entry.sha256 for entry in chosen if not entry.is_part]

    def _victims(
        self, entries: list[_Entry], steps: float, next_use: Callable[[str], float], evict: Evict
    ) -> list[_Entry]:
        """What may go, in order: broken-off downloads and slices that nobody wants, longest unused first; then what
        is read last."""
        futures = [] if evict == "none" else self._futures.others()
        ranked = []
        for entry in entries:
            own = next_use(entry.sha256)
            soonest = min([own, *(future.steps_to(entry.sha256) for future in futures)])
            allowed = evict == "any" or soonest == math.inf or (evict == "later" and soonest > steps)
            if evict == "later" and steps <= 0.0 < own and not allowed:
                allowed = not any(self._defers_to(future, entry.sha256) for future in futures)
            if allowed and evict != "none":
                ranked.append((-soonest, not entry.is_part, entry.used_at, entry))
        ranked.sort(key=lambda rank: rank[:3])
        return [rank[3] for rank in ranked]

    def _defers_to(self, future: Future, sha256: str) -> bool:
        """Whether an elder process needs a slice at once. Of two that cannot both go on, the elder does."""
        return future.birth < self._futures.birth and future.steps_to(sha256) <= 0.0


def _never(sha256: str) -> float:
    del sha256
    return math.inf


def _clear(lock: Lock) -> None:
    """End a reservation. Nothing, if it has ended or a fork left it with the parent."""
    if lock.descriptor >= 0:
        os.ftruncate(lock.descriptor, 0)
        lock.release()
