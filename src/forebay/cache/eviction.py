"""The disk budget of a cache directory: reservations, and which slices to evict, decided for all its processes.

The budget holds because bytes are reserved before they are written: a running download writes its size into its lock
file, which counts while its process lives. A partial file of a dead process counts with its length.
"""

import contextlib
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forebay.errors import UsageError
from forebay.storage.locks import EXCLUSIVE, SHARED, Lock, acquire, is_locked, try_acquire
from forebay.storage.part_file import MIN_PIECE_BYTES

_HEADER_BYTES = 96
PlannedUse = tuple[int, int, int | None]  # first and last run step of the next uses, and the first one after them
SHA256 = re.compile(r"[0-9a-f]{64}")
log = logging.getLogger("forebay.cache")
Evict = Literal["unwanted", "later", "any"]


@dataclass
class ProcessPlan:
    """What one live process will read. Steps are counted by that process."""

    birth: int = 0  # lower for older processes
    now: int = 0  # its next step
    version: int = -1
    waiting_since: float = 0.0  # `time.monotonic()` since when it waits for room, or 0
    uses: Mapping[str, PlannedUse] = field(default_factory=dict)  # by sha256

    def steps_to(self, sha256: str) -> float:
        use = self.uses.get(sha256)
        if use is None:
            return math.inf
        first, last, after = use
        if self.now <= last:
            return max(first - self.now, 0)
        return math.inf if after is None else max(after - self.now, 0)


class SharedPlans:
    """The plans that live processes publish to each other through files, so that each can evict for all.

    A process holds the lock of its file `DIR/PID-RANDOM.json` while it lives. The first line has a fixed length and is
    its position, rewritten as it proceeds; the rest is its plan. The rest is read and written under the budget's lock.

    Cost: about 90 bytes per planned slice; a file is parsed again only if its version changed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.birth = time.monotonic_ns()
        self._path: Path | None = None
        self._lock: Lock | None = None
        self._version = 0
        self._position: tuple[int, float] = (0, 0.0)
        self._others: dict[str, ProcessPlan] = {}

    def publish(self, uses: Mapping[str, PlannedUse]) -> None:
        if self._lock is None:
            self._path = self.directory / f"{os.getpid()}-{secrets.token_hex(4)}.json"
            self._lock = acquire(self._path)
        body = json.dumps(uses, separators=(",", ":")).encode()
        os.ftruncate(self._lock.descriptor, _HEADER_BYTES)
        os.pwrite(self._lock.descriptor, body, _HEADER_BYTES)
        self._version += 1
        self.set_position(*self._position)

    def set_position(self, now: int, waiting_since: float = 0.0) -> None:
        self._position = (now, waiting_since)
        if self._lock is not None and self._lock.descriptor >= 0:
            text = f"{self.birth} {now} {self._version} {waiting_since!r}"
            os.pwrite(self._lock.descriptor, text.ljust(_HEADER_BYTES - 1).encode() + b"\n", 0)

    def others(self) -> list[ProcessPlan]:
        """Return the plans of the other live processes, and remove those of dead ones; under the budget's lock."""
        plans = {}
        for item in os.scandir(self.directory):
            path = Path(item.path)
            if path == self._path:
                continue
            try:
                if (dead := try_acquire(path)) is not None:
                    path.unlink(missing_ok=True)
                    dead.release()
                    continue
                plans[item.name] = _read_plan(path, self._others.get(item.name))
            except (OSError, ValueError):
                continue  # removed as its process closed, or read while its first line was written
        self._others = plans
        return list(plans.values())

    def close(self) -> None:
        if self._lock is not None and self._path is not None:
            if self._lock.descriptor >= 0:
                self._path.unlink(missing_ok=True)
            self._lock.release()
        self._lock = self._path = None


def _read_plan(path: Path, last: ProcessPlan | None) -> ProcessPlan:
    with path.open("rb") as file:
        birth, now, version, waiting_since = file.read(_HEADER_BYTES).split()
        if last is not None and last.birth == int(birth) and last.version == int(version):
            last.now, last.waiting_since = int(now), float(waiting_since)
            return last
        body = json.loads(file.read() or b"{}")
    uses = {sha256: (start, stop, after) for sha256, (start, stop, after) in body.items()}
    return ProcessPlan(int(birth), int(now), int(version), float(waiting_since), uses)


@dataclass(slots=True)
class CacheEntry:
    """A slice, a partial file, or a reservation without a file."""

    name: str
    sha256: str
    is_part: bool
    counted: int  # bytes that count against the budget: a reservation in full
    written: int  # bytes on disk
    is_reserved: bool
    used_at: float


def part_bytes(num_bytes: int) -> int:
    """Return the maximum size of the partial file of a slice, whose trailer has a byte per piece."""
    return num_bytes + -(-num_bytes // MIN_PIECE_BYTES) + 1


class DiskBudget:
    """The budget of a directory. Its lock excludes all who reserve, evict or pin."""

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self.directory = directory
        self.budget_bytes = budget_bytes
        self.locks = directory / "locks"
        self.plans = directory / "futures"

    def make_directories(self) -> None:
        """Create the directories. Raises OSError."""
        self.locks.mkdir(parents=True, exist_ok=True)
        self.plans.mkdir(exist_ok=True)

    def lock(self) -> Lock:
        """Wait for the lock of the budget. A directory that was deleted meanwhile is created again, empty."""
        try:
            try:
                return acquire(self.locks / "room")
            except FileNotFoundError:
                log.warning("%s was deleted while it was in use. Created again.", self.directory)
                self.make_directories()
                return acquire(self.locks / "room")
        except OSError as error:
            raise UsageError(
                f"cache: cannot write in {self.directory}: {error.strerror or error}. Check its permissions and its "
                "disk, or choose another directory."
            ) from error

    def free_bytes(self) -> int:
        disk = os.statvfs(self.directory)
        return disk.f_bavail * disk.f_frsize

    def record_path(self, sha256: str) -> Path:
        return self.locks / f"{sha256}.verified"

    def delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.record_path(path.name).unlink(missing_ok=True)

    def remove(self, path: Path, guard: Path) -> bool:
        """Delete a file unless its guard is locked; True if it was deleted. Under the lock, as every pin is."""
        if is_locked(guard, EXCLUSIVE) or not path.exists():
            return False
        self.delete(path)
        return True

    def entries(self) -> list[CacheEntry]:
        reserved = self.reservations()
        entries: dict[str, CacheEntry] = {}
        for item in os.scandir(self.directory):
            sha256 = item.name.removesuffix(".part")
            if not SHA256.fullmatch(sha256):
                continue
            try:
                status = item.stat()
            except FileNotFoundError:
                continue  # evicted or renamed by another process meanwhile
            is_part = item.name.endswith(".part")
            num_reserved = reserved.pop(sha256, 0)
            counted = max(status.st_size, num_reserved) if is_part else status.st_size
            if sha256 in entries and entries[sha256].counted > counted:
                continue  # renamed meanwhile, and listed under both names
            entries[sha256] = CacheEntry(
                item.name, sha256, is_part, counted, status.st_blocks * 512, num_reserved > 0, status.st_atime
            )
        for sha256, counted in reserved.items():
            entries.setdefault(sha256, CacheEntry(f"{sha256}.part", sha256, True, counted, 0, True, math.inf))
        return list(entries.values())

    def reservations(self) -> dict[str, int]:
        """Return the bytes reserved by running downloads; a dead process holds no lock and counts no more."""
        reserved = {}
        for item in os.scandir(self.locks):
            if item.name.endswith(".fetch"):
                path = Path(item.path)
                with contextlib.suppress(FileNotFoundError):
                    if (text := path.read_bytes()) and is_locked(path, SHARED):
                        reserved[item.name.removesuffix(".fetch")] = int(text)
        return reserved

    def reserve(
        self, sha256: str, num_bytes: int, lock: Lock, plans: SharedPlans, steps: float,
        next_use: Callable[[str], float], evict: Evict,
    ) -> list[str] | str:  # fmt: skip
        """Evict until a slice fits, and write its size into its lock file; return the evicted slices, or why not."""
        with self.lock():
            entries = self.entries()
            own = sum(entry.written for entry in entries if entry.sha256 == sha256)
            entries = [entry for entry in entries if entry.sha256 != sha256]
            over = sum(entry.counted for entry in entries) + num_bytes - self.budget_bytes
            unwritten = sum(max(0, entry.counted - entry.written) for entry in entries if entry.is_reserved)
            short = unwritten + max(0, num_bytes - own) - self.free_bytes()
            chosen: list[CacheEntry] = []
            if over > 0 or short > 0:
                for entry in self._rank_victims(entries, plans, steps, next_use, evict):
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
                self.delete(self.directory / entry.name)
            part = self.directory / f"{sha256}.part"
            with contextlib.suppress(FileNotFoundError):
                if part.stat().st_size > num_bytes:
                    os.truncate(part, 0)  # not of a download of these bytes
            # Written before the lock is released, so that no other process takes the room.
            os.ftruncate(lock.descriptor, 0)
            os.pwrite(lock.descriptor, str(num_bytes).encode(), 0)
            return [entry.sha256 for entry in chosen if not entry.is_part]

    def _rank_victims(
        self, entries: list[CacheEntry], plans: SharedPlans, steps: float, next_use: Callable[[str], float],
        evict: Evict,
    ) -> list[CacheEntry]:  # fmt: skip
        others = plans.others()
        ranked = []
        for entry in entries:
            if entry.is_reserved:
                continue  # It may have its final name by now.
            own = next_use(entry.sha256)
            soonest = min([own, *(plan.steps_to(entry.sha256) for plan in others)])
            allowed = evict == "any" or soonest == math.inf or (evict == "later" and soonest > steps)
            if evict == "later" and steps <= 0.0 < own and not allowed:
                # If two processes cannot both go on, the older one does: what it needs at once stays.
                older = [plan for plan in others if plan.birth < plans.birth]
                allowed = all(plan.steps_to(entry.sha256) > 0.0 for plan in older)
            if allowed:
                ranked.append((-soonest, not entry.is_part, entry.used_at, entry))
        ranked.sort(key=lambda rank: rank[:3])
        return [rank[3] for rank in ranked]
