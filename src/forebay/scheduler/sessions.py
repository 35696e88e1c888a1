"""The sessions of workers: what they have cached and serve to others, and how many leases their peers may have."""

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forebay.network.peer import Provider
from forebay.scheduler.free_ranges import contains
from forebay.scheduler.lease_holders import HolderKey, LeaseHolder
from forebay.scheduler.leases import LeaseTable
from forebay.swarm.steering import Swarm

MAX_SESSIONS_PER_PEER = 256
# Index arrays of cached slices, all sessions together; beyond that a session's slices count as not cached.
MAX_CACHED_BYTES_PER_PEER, MAX_CACHED_BYTES_PER_ORGANISATION = 16 << 20, 256 << 20
FIRST_LEASES_PER_PEER = 32
MAX_LEASES_PER_PEER = 256
_NUM_RECENT = 32  # former leases of a session that are remembered, for its reports about their providers


@dataclass(slots=True, eq=False)
class WorkerSession:
    """One process of a worker.

    Attributes:
        attempt: The latest attempt of an exchange that was answered.
        cached: Dataset id to the slices it has, int64, rising.
        holders: Job to its table, and this session's lease holder there.
        announced_at: Dataset id to when the swarm was last updated.
        recent: (job, slice) of its last leases.
        requested_at: Time of its last request. `silent_until`: when it was told to ask again.
        knows_done: The last response said that nothing is left to lease.
    """

    key: HolderKey
    deadline: float
    address: str = ""
    attempt: int = 0
    cached: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    holders: dict[str, tuple[LeaseTable, LeaseHolder]] = field(default_factory=dict)
    announced_at: dict[str, float] = field(default_factory=dict)
    recent: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))
    requested_at: float = 0.0
    silent_until: float = 0.0
    knows_done: bool = False
    organisation: str = ""

    @property
    def cached_bytes(self) -> int:
        return sum(indexes.nbytes for indexes in self.cached.values())

    def num_leases(self) -> int:
        return sum(len(holder.leases) for _, holder in self.holders.values())

    def lease_ids(self) -> list[str]:
        return [lease_id for _, holder in self.holders.values() for lease_id in holder.leases]

    def leased(self) -> Iterator[tuple[str, int]]:
        """(job, slice) of its live and recent leases."""
        yield from self.recent
        for job, (_, holder) in self.holders.items():
            yield from ((job, lease.slice_index) for lease in holder.leases.values())

    def find_job(self, lease_id: str) -> str | None:
        """The job of one of its live leases."""
        return next((job for job, (_, holder) in self.holders.items() if lease_id in holder.leases), None)

    def has_cached(self, dataset_id: str, index: int) -> bool:
        """Whether it reported a slice as cached."""
        cached = self.cached.get(dataset_id)
        return cached is not None and contains(cached, index)


class WorkerSessions:
    """The sessions that sent requests lately, and their memberships in the swarms."""

    def __init__(self, swarms: dict[str, Swarm], timeout_s: float) -> None:
        self.all: dict[HolderKey, WorkerSession] = {}
        self.of_peer: dict[str, set[HolderKey]] = {}
        self._swarms = swarms
        self._timeout_s = timeout_s
        self._cached_bytes: Counter[str] = Counter()  # by organisation
        self._due: list[tuple[float, HolderKey]] = []
        # (dataset, peer) to the session that shares: a peer is in a swarm once, by its first session.
        self._sharing: dict[tuple[str, str], HolderKey] = {}

    def touch(self, key: HolderKey, now: float) -> WorkerSession:
        """The session, created if need be; its deadline and those of its leases are extended."""
        session = self.all.get(key)
        if session is None:
            session = self.all[key] = WorkerSession(key, now + self._timeout_s)
            self.of_peer.setdefault(key[0], set()).add(key)
            heapq.heappush(self._due, (session.deadline, key))
        session.deadline = max(session.deadline, now + self._timeout_s)
        session.requested_at = max(session.requested_at, now)
        for table, holder in session.holders.values():
            holder.deadline = max(holder.deadline, now + table.lease_s)
        return session

    def num_leases(self, peer_id: str) -> int:
        """Leases of all sessions of a peer."""
        return sum(self.all[key].num_leases() for key in self.of_peer.get(peer_id, ()))

    def update_cached(
        self, session: WorkerSession, address: str, cached: dict[str, NDArray[np.int64]], now: float, organisation: str
    ) -> None:
        """Store what a session has cached and where it serves that, and update the swarms."""
        is_moved = address != session.address
        session.address = address
        self._cached_bytes[session.organisation] -= session.cached_bytes
        session.organisation = organisation
        of_organisation = self._cached_bytes[organisation] if organisation else 0
        for dataset_id, indexes in cached.items():
            others = sum(array.nbytes for name, array in session.cached.items() if name != dataset_id)
            others += sum(self.all[key].cached_bytes for key in self.of_peer[session.key[0]] if key != session.key)
            size = others + indexes.nbytes
            is_too_much = size > MAX_CACHED_BYTES_PER_PEER or of_organisation + size > MAX_CACHED_BYTES_PER_ORGANISATION
            session.cached[dataset_id] = indexes[:0].copy() if is_too_much else indexes
        self._cached_bytes[organisation] += session.cached_bytes
        for dataset_id, indexes in session.cached.items():
            announced_at = session.announced_at.get(dataset_id)
            if is_moved or announced_at is None or dataset_id in cached:
                self._share(session, dataset_id, indexes, now)
            elif now - announced_at > self._swarms[dataset_id].ttl_s / 3:
                self._share(session, dataset_id, None, now)

    def remove_share(self, dataset_id: str, peer_id: str) -> None:
        """A swarm removed a peer: with its next request all that it has is announced again."""
        key = self._sharing.pop((dataset_id, peer_id), None)
        if key is not None and key in self.all:
            self.all[key].announced_at.pop(dataset_id, None)

    def _share(self, session: WorkerSession, dataset_id: str, cached: NDArray[np.int64] | None, now: float) -> None:
        peer_id = session.key[0]
        if self._sharing.setdefault((dataset_id, peer_id), session.key) != session.key:
            return
        swarm = self._swarms[dataset_id]
        flags: NDArray[np.bool_] | None = None
        if cached is not None:
            flags = np.zeros(swarm.num_slices, np.bool_)
            flags[cached] = True
        swarm.join(Provider(peer_id, session.address, False), flags, now)
        session.announced_at[dataset_id] = now

    def expire(self, now: float) -> None:
        """Remove the sessions that were silent for long; their leases expired before."""
        while self._due and self._due[0][0] <= now:
            _, key = heapq.heappop(self._due)
            session = self.all.get(key)
            if session is None:
                continue
            if session.deadline > now:
                heapq.heappush(self._due, (session.deadline, key))
                continue
            del self.all[key]
            self._cached_bytes[session.organisation] -= session.cached_bytes
            self.of_peer[key[0]].discard(key)
            if not self.of_peer[key[0]]:
                del self.of_peer[key[0]]
            for dataset_id in session.announced_at:
                if self._sharing.get((dataset_id, key[0])) == key:
                    del self._sharing[dataset_id, key[0]]
                    self._swarms[dataset_id].leave(key[0])


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
        self.max_leases, self.unused_since = 1, None
        self.num_stalls += 1
        self.barred_until = now + stall_s * min(64, 2 ** (self.num_stalls - 1))

    def add_uses(self, num_uses: int) -> None:
        """It used samples of its leases."""
        self.max_leases = min(MAX_LEASES_PER_PEER, self.max_leases + num_uses)
        self.unused_since, self.num_stalls, self.has_used = None, 0, True


class PeerQuotas:
    """The quotas of peers that have sessions, or are barred."""

    def __init__(self, sessions: WorkerSessions, num_slices: int) -> None:
        self._sessions = sessions
        self._num_slices = num_slices
        self._quotas: dict[str, PeerQuota] = {}
        self._newcomers: dict[str, set[str]] = {}  # by organisation

    def of(self, peer_id: str) -> PeerQuota:
        return self._quotas.setdefault(peer_id, PeerQuota())

    def num_free(self, peer_id: str, organisation: str) -> int:
        """How many more leases a peer may get.

        The newcomers of an organisation together get half of the slices: it issues as many certificates as it likes.
        """
        quota = self.of(peer_id)
        num = quota.max_leases - self._sessions.num_leases(peer_id)
        if quota.has_used or not organisation:
            return num
        newcomers = self._newcomers.setdefault(organisation, set())
        newcomers.add(peer_id)
        newcomers -= {p for p in newcomers if p not in self._sessions.of_peer or self._quotas[p].has_used}
        return min(num, max(1, self._num_slices // 2) - sum(map(self._sessions.num_leases, newcomers)))

    def bar_unused(self, stall_s: float, now: float) -> Iterator[str]:
        """Bar the peers that used nothing of their leases for `stall_s`; they are yielded."""
        for peer_id, quota in self._quotas.items():
            if quota.unused_since is not None and now - quota.unused_since >= stall_s:
                quota.bar(stall_s, now)
                yield peer_id

    def expire(self, now: float) -> None:
        """Remove the quotas of peers without sessions, unless they are barred."""
        for peer_id in [peer_id for peer_id in self._quotas if peer_id not in self._sessions.of_peer]:
            if self._quotas[peer_id].barred_until <= now:
                del self._quotas[peer_id]
