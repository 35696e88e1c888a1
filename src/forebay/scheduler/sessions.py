"""The sessions of workers: their leases, speed and caches, and how many leases their peers may have."""

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from forebay.arrays import I64
from forebay.network.peer import Provider
from forebay.scheduler.free_ranges import CachedSlices, FreeRanges, contains
from forebay.swarm.steering import Swarm

MAX_SESSIONS_PER_PEER = 256
# Index arrays of cached slices, all sessions together; beyond that a session's slices count as not cached.
MAX_CACHED_BYTES_PER_PEER = 16 << 20
MAX_CACHED_BYTES_PER_ORGANISATION = 256 << 20
FIRST_LEASES_PER_PEER = 32
MAX_LEASES_PER_PEER = 256
MEMORY_S = 30.0  # the weight of an older measurement falls to 1/e in this time
SHORTEST_S = 0.01  # intervals below this count as this long
_NUM_RECENT = 32  # former leases of a session that are remembered, for its reports about their providers


@dataclass(slots=True)
class SpeedEstimate:
    """Samples a second as an exponentially weighted mean; None before the first measurement."""

    value: float | None = None
    since: float | None = None  # when the work began that the next measurement is of; None while there is none

    def start(self, now: float) -> None:
        """The session has samples to use from now on."""
        if self.since is None:
            self.since = now

    def add(self, num_samples: int, now: float) -> None:
        """Add a measurement: samples acknowledged since the last one."""
        since = self.since
        self.since = now
        if since is None:
            return
        lasted = max(now - since, SHORTEST_S)
        keep = math.exp(-lasted / MEMORY_S) if self.value is not None else 0.0
        self.value = keep * (self.value or 0.0) + (1.0 - keep) * (num_samples / lasted)


SessionKey: TypeAlias = tuple[str, str]
"""(worker, name of the session)"""


@dataclass(slots=True)
class LiveLease:
    """The exclusive use of samples [position, stop) of a slice; those from `start` on are used and recorded.

    `declared_until` is the highest limit that the worker declared: all samples before it may be in use.
    """

    lease_id: str
    key: SessionKey
    epoch: int
    slice_index: int
    start: int
    stop: int
    position: int
    declared_until: int
    progress_at: float = 0.0

    @property
    def worker(self) -> str:
        return self.key[0]

    @property
    def remaining(self) -> int:
        return self.stop - self.position

    @property
    def is_started(self) -> bool:
        return max(self.position, self.declared_until) > self.start


class EndedLease(NamedTuple):
    """A lease that ended: [start, reached) of its slice was used under it; `is_complete`: it was used to its stop."""

    worker: str
    epoch: int
    slice_index: int
    start: int
    reached: int
    is_complete: bool


@dataclass(slots=True, eq=False)
class WorkerSession:
    """One process of a worker.

    Attributes:
        deadline: When its leases expire. `fault`: why they do.
        progress_at: When it last acknowledged samples, or got its first lease.
        cached: The slices it has; None if it did not say so yet.
        steals_from: The lease that is to be cut for it.
        finish_at: When it will have used all its leases, by its speed.
        attempt: The latest attempt of an exchange that was answered.
        announced_at: When the swarm was last updated.
        recent: Slices of its last leases.
        requested_at: Time of its last request. `silent_until`: when it was told to ask again.
        knows_done: The last response said that nothing is left to lease.
    """

    key: SessionKey
    deadline: float
    progress_at: float
    leases: dict[str, LiveLease] = field(default_factory=dict)
    speed: SpeedEstimate = field(default_factory=SpeedEstimate)
    cached: CachedSlices | None = None
    steals_from: str | None = None
    finish_at: float = 0.0
    address: str = ""
    organisation: str = ""
    attempt: int = 0
    announced_at: float | None = None
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))
    requested_at: float = -math.inf
    silent_until: float = -math.inf
    knows_done: bool = False
    fault: str = "expired"

    @property
    def worker(self) -> str:
        return self.key[0]

    @property
    def cached_bytes(self) -> int:
        return 0 if self.cached is None else self.cached.indexes.nbytes

    @property
    def remaining(self) -> int:
        """Samples of all its leases."""
        return sum(lease.remaining for lease in self.leases.values())

    def leased(self) -> Iterator[int]:
        """The slices of its live and recent leases."""
        yield from self.recent
        yield from (lease.slice_index for lease in self.leases.values())

    def has_cached(self, index: int) -> bool:
        """Whether it reported a slice as cached."""
        return self.cached is not None and contains(self.cached.indexes, index)


class WorkerSessions:
    """The sessions that sent requests lately or have leases, in the order of their finish. O(log n) a call."""

    def __init__(self, lease_s: float) -> None:
        self.all: dict[SessionKey, WorkerSession] = {}
        self.of_peer: dict[str, list[WorkerSession]] = {}
        self.mean_speed: float | None = None
        self._lease_s = lease_s
        self._finish: list[tuple[float, SessionKey]] = []

    def touch(self, key: SessionKey, now: float) -> WorkerSession:
        """The session, created if need be, its deadline moved."""
        session = self.all.get(key)
        if session is None:
            session = self.all[key] = WorkerSession(key, now + self._lease_s, now)
            self.of_peer.setdefault(key[0], []).append(session)
        session.deadline = max(session.deadline, now + self._lease_s)
        return session

    def num_leases(self, peer_id: str) -> int:
        """Leases of all sessions of a peer."""
        return sum(len(session.leases) for session in self.of_peer.get(peer_id, ()))

    def remove_silent(self, now: float) -> list[WorkerSession]:
        """Remove and return the sessions without a request for five terms; their leases were taken back before."""
        silent = [s for s in self.all.values() if s.deadline + 4 * self._lease_s <= now and not s.leases]
        for session in silent:
            del self.all[session.key]
            sessions = self.of_peer[session.worker]
            sessions.remove(session)
            if not sessions:
                del self.of_peer[session.worker]
        return silent

    def update_finish(self, session: WorkerSession, now: float) -> None:
        """Recompute `finish_at`, after a change of the session's leases or speed."""
        session.finish_at = now + session.remaining / self.speed_of(session)
        if session.leases:
            heapq.heappush(self._finish, (-session.finish_at, session.key))
            if len(self._finish) > 64 + 4 * len(self.all):
                self._finish = [(-other.finish_at, key) for key, other in self.all.items() if other.leases]
                heapq.heapify(self._finish)

    def speed_of(self, session: WorkerSession) -> float:
        """Samples a second; the mean of the others where it is unknown; above 0."""
        return max(session.speed.value or self.mean_speed or 1.0, 1e-9)

    def slowest(self) -> Iterator[WorkerSession]:
        """The sessions that have leases, the last to finish first."""
        popped: dict[SessionKey, tuple[float, SessionKey]] = {}
        try:
            while self._finish:
                item = heapq.heappop(self._finish)
                session = self.all.get(item[1])
                # An entry is stale once something happened to its session; a newer one is in the heap.
                if session is None or not session.leases or -item[0] != session.finish_at or session.key in popped:
                    continue
                popped[session.key] = item
                yield session
        finally:
            for item in popped.values():
                heapq.heappush(self._finish, item)


@dataclass(eq=False)
class SessionCaches:
    """What sessions have cached and serve to others; a peer is in the swarm once, by its first session."""

    sessions: WorkerSessions
    free: FreeRanges
    swarm: Swarm

    def __post_init__(self) -> None:
        self._bytes = Counter[str]()  # by organisation
        self._sharing: dict[str, SessionKey] = {}  # peer to the session by which it is in the swarm

    def update(self, session: WorkerSession, address: str, organisation: str, cached: I64 | None, now: float) -> None:
        """Store what a session has cached (None: as before) and where it serves that, and update the swarm."""
        is_moved = address != session.address
        worker = session.worker
        self._bytes[session.organisation] -= session.cached_bytes
        session.address = address
        session.organisation = organisation
        if cached is not None:
            others = (other.cached_bytes for other in self.sessions.of_peer[worker] if other is not session)
            size = cached.nbytes + sum(others)
            of_organisation = self._bytes[organisation] if organisation else 0
            if size > MAX_CACHED_BYTES_PER_PEER or of_organisation + size > MAX_CACHED_BYTES_PER_ORGANISATION:
                cached = cached[:0].copy()
            session.cached = self.free.replace_cached(session.cached, cached)
        self._bytes[organisation] += session.cached_bytes
        if session.cached is None or self._sharing.setdefault(worker, session.key) != session.key:
            return
        is_new = is_moved or session.announced_at is None or cached is not None
        if is_new or now - (session.announced_at or 0.0) > self.swarm.ttl_s / 3:
            flags = np.zeros(self.swarm.num_slices, np.bool_)
            flags[session.cached.indexes] = True
            self.swarm.join(Provider(worker, address, False), flags if is_new else None, now)
            session.announced_at = now

    def expire(self, now: float) -> None:
        """Remove silent sessions, and peers that the swarm knows no longer."""
        for session in self.sessions.remove_silent(now):
            self._bytes[session.organisation] -= session.cached_bytes
            self.free.replace_cached(session.cached, None)
            if self._sharing.get(worker := session.worker) == session.key:
                del self._sharing[worker]
                self.swarm.leave(worker)
        for peer_id in self.swarm.expire(now):  # with its next request all that it has is announced again
            if (key := self._sharing.pop(peer_id, None)) is not None and key in self.sessions.all:
                self.sessions.all[key].announced_at = None


@dataclass(slots=True)
class PeerQuota:
    """How many leases a peer may have in all its sessions, by what it used.

    Attributes:
        max_leases: 32 at first, one more with each use, 1 after it used none for `stall_s`.
        unused_since: When it was granted a lease after its last use; None: it has used samples since.
        num_stalls: How often it used nothing for `stall_s`. `barred_until`: it is granted nothing until then.
        has_used: It used something; until then it is a newcomer.
    """

    max_leases: int = FIRST_LEASES_PER_PEER
    unused_since: float | None = None
    num_stalls: int = 0
    barred_until: float = 0.0
    has_used: bool = False

    def bar(self, stall_s: float, now: float) -> None:
        """It used nothing of its leases for `stall_s`, or sent false messages: no leases for as long, then one."""
        self.max_leases = 1
        self.unused_since = None
        self.num_stalls += 1
        self.barred_until = now + stall_s * min(64, 2 ** (self.num_stalls - 1))

    def add_uses(self, num_uses: int) -> None:
        """It used samples of its leases."""
        self.max_leases = min(MAX_LEASES_PER_PEER, self.max_leases + num_uses)
        self.unused_since = None
        self.num_stalls = 0
        self.has_used = True


@dataclass(eq=False)
class PeerQuotas:
    """The quotas of peers that have sessions, or are barred."""

    sessions: WorkerSessions
    num_slices: int

    def __post_init__(self) -> None:
        self._quotas: dict[str, PeerQuota] = {}
        self._newcomers: dict[str, set[str]] = {}  # by organisation

    def of(self, peer_id: str) -> PeerQuota:
        return self._quotas.setdefault(peer_id, PeerQuota())

    def num_free(self, peer_id: str, organisation: str) -> int:
        """How many more leases a peer may get.

        The newcomers of an organisation together get half of the slices: it issues as many certificates as it likes.
        """
        quota = self.of(peer_id)
        num = quota.max_leases - self.sessions.num_leases(peer_id)
        if quota.has_used or not organisation:
            return num
        newcomers = self._newcomers.setdefault(organisation, set())
        newcomers.add(peer_id)
        newcomers -= {p for p in newcomers if p not in self.sessions.of_peer or self._quotas[p].has_used}
        return min(num, max(1, self.num_slices // 2) - sum(map(self.sessions.num_leases, newcomers)))

    def bar_unused(self, stall_s: float, now: float) -> Iterator[str]:
        """Bar the peers that used nothing of their leases for `stall_s`; they are yielded."""
        for peer_id, quota in self._quotas.items():
            if quota.unused_since is not None and now - quota.unused_since >= stall_s:
                quota.bar(stall_s, now)
                yield peer_id

    def expire(self, now: float) -> None:
        """Remove the quotas of peers without sessions, unless they are barred."""
        self._quotas = {
            peer_id: quota
            for peer_id, quota in self._quotas.items()
            if peer_id in self.sessions.of_peer or quota.barred_until > now
        }
