"""Who holds leases: what each has left, how fast it is, when it is late, and who would finish last."""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from forebay.scheduler.free_ranges import CachedSlices

# After this long, what was seen before counts 1/e.
MEMORY_S = 30.0
# Times nearer to each other than this say little.
SHORTEST_S = 0.01


@dataclass(slots=True)
class SpeedEstimate:
    """Samples a second as a mean that forgets; None before anything is known."""

    value: float | None = None
    since: float | None = None

    def begin(self, now: float) -> None:
        """The owner has something to use from now on; what it waited before says nothing of it."""
        if self.since is None:
            self.since = now

    def rest(self) -> None:
        """It has nothing to use."""
        self.since = None

    def used(self, num_samples: int, now: float) -> None:
        """It acknowledged samples."""
        since, self.since = self.since, now
        if since is None:
            return
        lasted = max(now - since, SHORTEST_S)
        seen = num_samples / lasted
        keep = math.exp(-lasted / MEMORY_S) if self.value is not None else 0.0
        self.value = keep * (self.value or 0.0) + (1.0 - keep) * seen

    def told(self, value: float) -> None:
        """What the owner says of itself, believed until something is seen."""
        if self.value is None and math.isfinite(value) and value > 0:
            self.value = value


HolderKey = tuple[str, str]  # (worker, session)


@dataclass(slots=True)
class LiveLease:
    """An owner's right to samples [position, stop) of a slice; it began at `start`.

    `horizon` is the highest that the owner ever named: it may have used all before it.
    """

    lease_id: str
    worker: str
    session: str
    epoch: int
    slice_index: int
    start: int
    stop: int
    position: int
    horizon: int
    moved_at: float = 0.0

    @property
    def key(self) -> HolderKey:
        return self.worker, self.session

    @property
    def left(self) -> int:
        return self.stop - self.position

    @property
    def begun(self) -> bool:
        return max(self.position, self.horizon) > self.start


@dataclass(frozen=True, slots=True)
class EndedLease:
    """A lease that is no more: [start, reached) of its slice was used under it; `whole`: it was used to its end."""

    worker: str
    epoch: int
    slice_index: int
    start: int
    reached: int
    whole: bool


@dataclass(slots=True, eq=False)
class LeaseHolder:
    """One session of a worker at a table.

    Attributes:
        moved_at: When it last acknowledged something, or got its first lease.
        due_s: When the heap of deadlines looks at it next.
        stalled: It lost its leases for acknowledging nothing, and has not acknowledged anything since.
        wish: The lease that it waits to be given a piece of.
    """

    key: HolderKey
    deadline: float
    moved_at: float
    leases: dict[str, LiveLease] = field(default_factory=dict)
    speed: SpeedEstimate = field(default_factory=SpeedEstimate)
    cached: CachedSlices | None = None
    stalled: bool = False
    wish: str | None = None
    finish: float = 0.0

    @property
    def left(self) -> int:
        """Samples of all its leases."""
        return sum(lease.left for lease in self.leases.values())


class LeaseHolders:
    """The owners of a table, by who is late and by who would finish last. O(log n) a call."""

    def __init__(self) -> None:
        self.all: dict[HolderKey, LeaseHolder] = {}
        self.mean_speed: float | None = None
        self._due: list[tuple[float, HolderKey]] = []
        self._finish: list[tuple[float, HolderKey]] = []

    def at(self, key: HolderKey, lease_s: float, now: float) -> LeaseHolder:
        """The owner, whose deadline moves; a new one if need be."""
        owner = self.all.get(key)
        if owner is None:
            owner = self.all[key] = LeaseHolder(key, now + lease_s, now)
            heapq.heappush(self._due, (owner.deadline, key))
        owner.deadline = max(owner.deadline, now + lease_s)
        return owner

    def drop(self, key: HolderKey) -> None:
        """Forgets one that has no leases."""
        self.all.pop(key, None)

    def late(self, now: float, patience_s: float) -> Iterator[tuple[LeaseHolder, bool]]:
        """Owners due for a look: (owner, whether its deadline passed); each is looked at again by itself.

        Args:
            patience_s: An owner is looked at that often at least, for those who live and do nothing.
        """
        while self._due and self._due[0][0] <= now:
            _, key = heapq.heappop(self._due)
            owner = self.all.get(key)
            if owner is None:
                continue
            dead = owner.deadline <= now
            if not dead:
                heapq.heappush(self._due, (min(owner.deadline, now + patience_s), key))
            yield owner, dead

    def saw(self, owner: LeaseHolder, now: float) -> None:
        """Something of its leases or speed changed: when would it finish?"""
        speed = self.speed_of(owner)
        owner.finish = now + owner.left / speed
        if owner.leases:
            heapq.heappush(self._finish, (-owner.finish, owner.key))
            if len(self._finish) > 64 + 4 * len(self.all):
                self._finish = [(-o.finish, key) for key, o in self.all.items() if o.leases]
                heapq.heapify(self._finish)

    def speed_of(self, owner: LeaseHolder) -> float:
        """Its speed in samples a second; where it is not known that of the others; never 0."""
        return max(owner.speed.value or self.mean_speed or 1.0, 1e-9)

    def learned(self, owner: LeaseHolder) -> None:
        """Its speed was measured: so moves the mean."""
        value = owner.speed.value
        if value is not None:
            self.mean_speed = value if self.mean_speed is None else 0.98 * self.mean_speed + 0.02 * value

    def slowest(self, skip: Callable[[LeaseHolder], bool]) -> Iterator[LeaseHolder]:
        """The owners that hold leases, who would finish last first, but for those to skip."""
        kept: list[tuple[float, HolderKey]] = []
        seen: set[HolderKey] = set()
        try:
            while self._finish:
                item = heapq.heappop(self._finish)
                owner = self.all.get(item[1])
                # Entries that something happened to since are stale, and there is a newer one.
                if owner is None or not owner.leases or -item[0] != owner.finish or owner.key in seen:
                    continue
                seen.add(owner.key)
                kept.append(item)
                if not skip(owner):
                    yield owner
        finally:
            for item in kept:
                heapq.heappush(self._finish, item)
