"""How full a cache's directory is, who may go, and the reservation of room: under one lock for all processes.

The budget holds because every byte is reserved first: what a fetch under way may come to is written in its lock
file, which counts while its process lives; what a dead one left counts by its length.
"""

import contextlib
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forebay.errors import UsageError
from forebay.storage.locks import EXCLUSIVE, SHARED, Lock, acquire, is_locked, try_acquire
from forebay.storage.part_file import MIN_RANGE_BYTES

_HEADER = 96
PlannedUse = tuple[int, int, int | None]  # First and last run step of the next uses, and the first one after them.
SHA256 = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger("forebay.cache")
Evict = Literal["unwanted", "later", "any"]


@dataclass
class ProcessPlan:
    """What one live process will read. Steps are counted by that process."""

    birth: int = 0  # elder processes have the lower one
    now: int = 0  # the step it stands before
    version: int = -1
    waiting_since: float = 0.0  # `time.monotonic()` since when it waits for room in vain, or 0
    uses: Mapping[str, PlannedUse] = field(default_factory=dict)  # by sha256
    released: Collection[str] = ()  # it does not ask others to keep these, though it may read them again

    def steps_to(self, sha256: str) -> float:
        """Steps from now until it reads a slice; infinite if it does not say that it will."""
        use = self.uses.get(sha256)
        if use is None:
            return math.inf
        first, last, after = use
        if self.now <= last:
            return max(first - self.now, 0)
        return math.inf if after is None else max(after - self.now, 0)

    def keeps(self, sha256: str) -> bool:
        """Whether it asks others not to delete a slice for tidiness."""
        return sha256 not in self.released and self.steps_to(sha256) < math.inf


class SharedPlans:
    """What live processes will read next, told to each other through files, so that any of them may evict for all.

    A process writes `DIR/PID-RANDOM.json` and holds its lock for as long as it lives. The first line is of fixed length
    and says where the process stands; it is rewritten as it goes. The rest changes as the process looks further ahead.
    Whoever reads does so under the cache's room lock, as does whoever writes the rest.

    What it costs: about 90 bytes a slice told; a reader parses a file again only when its version has changed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.birth = time.monotonic_ns()
        self._own: Path | None = None
        self._lock: Lock | None = None
        self._version = 0
        self._stands: tuple[int, float] = (0, 0.0)
        self._read: dict[str, ProcessPlan] = {}

    def publish(self, uses: Mapping[str, PlannedUse], released: Collection[str]) -> None:
        """Say what this process will read; under the room lock."""
        if self._lock is None:
            self._own = self.directory / f"{os.getpid()}-{secrets.token_hex(4)}.json"
            self._lock = acquire(self._own)
        body = json.dumps({"uses": uses, "released": list(released)}, separators=(",", ":")).encode()
        os.ftruncate(self._lock.descriptor, _HEADER)
        os.pwrite(self._lock.descriptor, body, _HEADER)
        self._version += 1
        self.set_position(*self._stands)

    def set_position(self, now: int, waiting_since: float = 0.0) -> None:
        """Say where this process stands; needs no lock."""
        self._stands = (now, waiting_since)
        if self._lock is not None and self._lock.descriptor >= 0:
            text = f"{self.birth} {now} {self._version} {waiting_since!r}"
            os.pwrite(self._lock.descriptor, text.ljust(_HEADER - 1).encode() + b"\n", 0)

    def others(self) -> list[ProcessPlan]:
        """What the other live processes will read; under the room lock. Files of dead ones are removed."""
        found = {}
        for item in os.scandir(self.directory):
            path = Path(item.path)
            if path == self._own:
                continue
            try:
                gone = try_acquire(path, EXCLUSIVE)
                if gone is not None:
                    path.unlink(missing_ok=True)
                    gone.release()
                    continue
                found[item.name] = _read(path, self._read.get(item.name))
            except (OSError, ValueError):
                continue  # removed as its process closed, or read while its first line was being written
        self._read = found
        return list(found.values())

    def close(self) -> None:
        """Take back what was published. May be called twice."""
        if self._lock is not None and self._own is not None:
            if self._lock.descriptor >= 0:
                self._own.unlink(missing_ok=True)
            self._lock.release()
        self._lock = self._own = None


def _read(path: Path, known: ProcessPlan | None) -> ProcessPlan:
    with path.open("rb") as file:
        birth, now, version, waiting_since = file.read(_HEADER).split()
        if known is not None and known.birth == int(birth) and known.version == int(version):
            known.now, known.waiting_since = int(now), float(waiting_since)
            return known
        told = json.loads(file.read() or b'{"uses": {}, "released": []}')
    uses = {sha256: (first, last, after) for sha256, (first, last, after) in told["uses"].items()}
    return ProcessPlan(int(birth), int(now), int(version), float(waiting_since), uses, set(told["released"]))


@dataclass(slots=True)
class CacheEntry:
    """A slice or partial file, or a reservation of which no byte is written yet."""

    name: str
    sha256: str
    is_part: bool
    counted: int  # Bytes that count against the budget: a reservation in full.
    written: int  # Bytes of the disk that it takes.
    reserved: bool
    used_at: float


def part_bytes(num_bytes: int) -> int:
    """What to reserve for a slice whose partial file says at its end which pieces are there."""
    return num_bytes + -(-num_bytes // MIN_RANGE_BYTES) + 1


class DiskBudget:
    """The room in a directory, with `locks` and `futures` in it. `lock` excludes whoever reserves, evicts or pins."""

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self.directory = directory
        self.budget_bytes = budget_bytes
        self.locks = directory / "locks"

    def lock(self) -> Lock:
        """Wait for the room's lock and hold it. A directory that was deleted meanwhile is made anew, and is empty."""
        try:
            try:
                return acquire(self.locks / "room")
            except FileNotFoundError:
                log.warning("%s was deleted while it was in use. Made anew.", self.directory)
                self.locks.mkdir(parents=True, exist_ok=True)
                (self.directory / "futures").mkdir(exist_ok=True)
                return acquire(self.locks / "room")
        except OSError as error:
            raise UsageError(
                f"cache: cannot write in {self.directory}: {error.strerror or error}. Check its permissions and its "
                "disk, or choose another directory."
            ) from error

    def free_bytes(self) -> int:
        """What the disk has left for this user."""
        disk = os.statvfs(self.directory)
        return disk.f_bavail * disk.f_frsize

    def remove(self, path: Path, guard: Path) -> bool:
        """Delete a file unless its guard is locked; whether it did. Under the room's lock, as every pin is."""
        if is_locked(guard, EXCLUSIVE):
            return False
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            return True
        return False

    def entries(self) -> list[CacheEntry]:
        """The cache's files, and the reservations of which no byte is written yet."""
        reserved = self.reservations()
        entries: dict[str, CacheEntry] = {}
        for item in os.scandir(self.directory):
            sha256 = item.name.removesuffix(".part")
            if not SHA256.fullmatch(sha256):
                continue
            try:
                found = item.stat()
            except FileNotFoundError:
                continue  # evicted or renamed by another process meanwhile
            is_part = item.name.endswith(".part")
            room = reserved.pop(sha256, 0)
            size = max(found.st_size, room) if is_part else found.st_size
            if sha256 in entries and entries[sha256].counted > size:
                continue  # renamed meanwhile, and listed under both names
            written = found.st_blocks * 512
            entries[sha256] = CacheEntry(item.name, sha256, is_part, size, written, room > 0, found.st_atime)
        for sha256, size in reserved.items():
            entries.setdefault(sha256, CacheEntry(f"{sha256}.part", sha256, True, size, 0, True, math.inf))
        return list(entries.values())

    def reservations(self) -> dict[str, int]:
        """What fetches under way have reserved; one whose process died holds no lock and counts no more."""
        found = {}
        for item in os.scandir(self.locks):
            if item.name.endswith(".fetch"):
                path = Path(item.path)
                with contextlib.suppress(FileNotFoundError):
                    if (text := path.read_bytes()) and is_locked(path, SHARED):
                        found[item.name.removesuffix(".fetch")] = int(text)
        return found

    def make(
        self,
        sha256: str,
        num_bytes: int,
        lock: Lock,
        futures: SharedPlans,
        steps: float,
        next_use: Callable[[str], float],
        evict: Evict,
    ) -> list[str] | str:
        """Evict until a slice fits, and reserve its bytes in its lock file: what was evicted, or why not."""
        with self.lock():
            entries = self.entries()
            own = sum(entry.written for entry in entries if entry.sha256 == sha256)
            entries = [entry for entry in entries if entry.sha256 != sha256]
            over = sum(entry.counted for entry in entries) + num_bytes - self.budget_bytes
            unwritten = sum(max(0, entry.counted - entry.written) for entry in entries if entry.reserved)
            short = unwritten + max(0, num_bytes - own) - self.free_bytes()
            chosen: list[CacheEntry] = []
            if over > 0 or short > 0:
                for entry in self._victims(entries, futures, steps, next_use, evict):
                    guard = self.locks / f"{entry.sha256}.{'fetch' if entry.is_part else 'pin'}"
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
                (self.directory / entry.name).unlink(missing_ok=True)
            part = self.directory / f"{sha256}.part"
            with contextlib.suppress(FileNotFoundError):
                if part.stat().st_size > num_bytes:
                    os.truncate(part, 0)  # Not one of a download of these bytes.
            # Reserved before the room is let go, so that no other process takes it.
            os.ftruncate(lock.descriptor, 0)
            os.pwrite(lock.descriptor, str(num_bytes).encode(), 0)
            return [entry.sha256 for entry in chosen if not entry.is_part]

    def _victims(
        self,
        entries: list[CacheEntry],
        futures: SharedPlans,
        steps: float,
        next_use: Callable[[str], float],
        evict: Evict,
    ) -> list[CacheEntry]:
        """What may go, in order: broken-off downloads and what nobody wants, longest unused first; then read last."""
        others = futures.others()
        ranked = []
        for entry in entries:
            if entry.reserved:
                continue  # Under way when it was listed; by now it may have its name, and its partial file none.
            own = next_use(entry.sha256)
            soonest = min([own, *(future.steps_to(entry.sha256) for future in others)])
            allowed = evict == "any" or soonest == math.inf or (evict == "later" and soonest > steps)
            if evict == "later" and steps <= 0.0 < own and not allowed:
                # Of two that cannot both go on, the elder does: what it needs at once stays.
                elder = [future for future in others if future.birth < futures.birth]
                allowed = all(future.steps_to(entry.sha256) > 0.0 for future in elder)
            if allowed:
                ranked.append((-soonest, not entry.is_part, entry.used_at, entry))
        ranked.sort(key=lambda rank: rank[:3])
        return [rank[3] for rank in ranked]
