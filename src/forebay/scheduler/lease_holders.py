"""The holders of leases: what each has left to use, its speed, when it expires, and which would finish last."""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from forebay.scheduler.free_ranges import CachedSlices

MEMORY_S = 30.0  # the weight of an older measurement falls to 1/e in this time
SHORTEST_S = 0.01  # intervals below this count as this long


@dataclass(slots=True)
class SpeedEstimate:
    """Samples a second as an exponentially weighted mean; None before the first measurement."""

    value: float | None = None
    since: float | None = None  # when the work began that the next measurement is of; None while there is none

    def start(self, now: float) -> None:
        """The holder has samples to use from now on."""
        if self.since is None:
            self.since = now

    def add(self, num_samples: int, now: float) -> None:
        """Add a measurement: samples acknowledged since the last one."""
        since, self.since = self.since, now
        if since is None:
            return
        lasted = max(now - since, SHORTEST_S)
        keep = math.exp(-lasted / MEMORY_S) if self.value is not None else 0.0
        self.value = keep * (self.value or 0.0) + (1.0 - keep) * (num_samples / lasted)


HolderKey: TypeAlias = tuple[str, str]
"""(worker, session)"""


@dataclass(slots=True)
class LiveLease:
    """The exclusive use of samples [position, stop) of a slice; those from `start` on are used and recorded.

    `declared_until` is the highest limit that the holder declared: all samples before it may be in use.
    """

    lease_id: str
    worker: str
    session: str
    epoch: int
    slice_index: int
    start: int
    stop: int
    position: int
    declared_until: int
    progress_at: float = 0.0

    @property
    def key(self) -> HolderKey:
        return self.worker, self.session

    @property
    def remaining(self) -> int:
        return self.stop - self.position

    @property
    def is_started(self) -> bool:
        return max(self.position, self.declared_until) > self.start


@dataclass(frozen=True, slots=True)
class EndedLease:
    """A lease that ended: [start, reached) of its slice was used under it; `is_complete`: it was used to its stop."""

    worker: str
    epoch: int
    slice_index: int
    start: int
    reached: int
    is_complete: bool


@dataclass(slots=True, eq=False)
class LeaseHolder:
    """One session of a worker, for one dataset.

    Attributes:
        progress_at: When it last acknowledged samples, or got its first lease.
        steals_from: The lease that is to be cut for it.
        finish_at: When it will have used all its leases, by its speed.
    """

    key: HolderKey
    deadline: float
    progress_at: float
    leases: dict[str, LiveLease] = field(default_factory=dict)
    speed: SpeedEstimate = field(default_factory=SpeedEstimate)
    cached: CachedSlices | None = None
    steals_from: str | None = None
    finish_at: float = 0.0

    @property
    def remaining(self) -> int:
        """Samples of all its leases."""
        return sum(lease.remaining for lease in self.leases.values())


class LeaseHolders:
    """The holders of a table, in order of deadline and of finish. O(log n) a call."""

    def __init__(self) -> None:
        self.all: dict[HolderKey, LeaseHolder] = {}
        self.mean_speed: float | None = None
        self._due: list[tuple[float, HolderKey]] = []
        self._finish: list[tuple[float, HolderKey]] = []

    def touch(self, key: HolderKey, lease_s: float, now: float) -> LeaseHolder:
        """The holder, created if need be, its deadline moved."""
        holder = self.all.get(key)
        if holder is None:
            holder = self.all[key] = LeaseHolder(key, now + lease_s, now)
            heapq.heappush(self._due, (holder.deadline, key))
        holder.deadline = max(holder.deadline, now + lease_s)
        return holder

    def due(self, now: float, interval_s: float) -> Iterator[tuple[LeaseHolder, bool]]:
        """The holders to check now, and whether their deadlines passed; each is due again after `interval_s`."""
        while self._due and self._due[0][0] <= now:
            _, key = heapq.heappop(self._due)
            holder = self.all.get(key)
            if holder is None:
                continue
            is_expired = holder.deadline <= now
            if not is_expired:
                heapq.heappush(self._due, (min(holder.deadline, now + interval_s), key))
            yield holder, is_expired

    def update_finish(self, holder: LeaseHolder, now: float) -> None:
        """Recompute `finish_at`, after a change of the holder's leases or speed."""
        holder.finish_at = now + holder.remaining / self.speed_of(holder)
        if holder.leases:
            heapq.heappush(self._finish, (-holder.finish_at, holder.key))
            if len(self._finish) > 64 + 4 * len(self.all):
                self._finish = [(-other.finish_at, key) for key, other in self.all.items() if other.leases]
                heapq.heapify(self._finish)

    def speed_of(self, holder: LeaseHolder) -> float:
        """Samples a second; the mean of the others where it is unknown; above 0."""
        return max(holder.speed.value or self.mean_speed or 1.0, 1e-9)

    def slowest(self, skip: Callable[[LeaseHolder], bool]) -> Iterator[LeaseHolder]:
        """The holders that have leases, the last to finish first, without those to skip."""
        popped: dict[HolderKey, tuple[float, HolderKey]] = {}
        try:
            while self._finish:
                item = heapq.heappop(self._finish)
                holder = self.all.get(item[1])
                # An entry is stale once something happened to its holder; a newer one is in the heap.
                if holder is None or not holder.leases or -item[0] != holder.finish_at or holder.key in popped:
                    continue
                popped[holder.key] = item
                if not skip(holder):
                    yield holder
        finally:
            for item in popped.values():
                heapq.heappush(self._finish, item)
