"""Who talks to the desk: sessions of workers, what they have cached, and whom they hand it on from."""

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forebay.network.peer import Provider
from forebay.scheduler.lease_holders import HolderKey, LeaseHolder
from forebay.scheduler.leases import LeaseTable
from forebay.swarm.steering import Swarm

MAX_SESSIONS_PER_PEER = 256
# What all sessions of a peer say that they have cached; more is left out, and those slices count as not cached.
MAX_HAVE_BYTES_PER_PEER, MAX_HAVE_BYTES_PER_ORGANISATION = 16 << 20, 256 << 20
# Leases that a session is remembered to have had, for what it says of their providers afterwards.
_PAST = 32


@dataclass(slots=True, eq=False)
class WorkerSession:
    """One process of a worker.

    Attributes:
        attempt: The latest attempt of an exchange that was heard.
        have: Dataset id to the slices it has, int64, rising.
        owners: (job, dataset) to the table and its place there.
        announced_at: When the swarms last heard of it.
        past: (job, dataset, slice of it) of its last leases.
        heard_at: When it spoke last. `silent_until`: when it was told to ask again.
        told_done: The last answer said that nothing is left to lease.
    """

    key: HolderKey
    deadline: float
    address: str = ""
    attempt: int = 0
    have: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    owners: dict[tuple[str, int], tuple[LeaseTable, LeaseHolder]] = field(default_factory=dict)
    announced_at: dict[str, float] = field(default_factory=dict)
    past: deque[tuple[str, int, int]] | None = None
    heard_at: float = 0.0
    silent_until: float = 0.0
    told_done: bool = False
    organisation: str = ""

    @property
    def have_bytes(self) -> int:
        return sum(indexes.nbytes for indexes in self.have.values())

    def num_leases(self) -> int:
        return sum(len(owner.leases) for _, owner in self.owners.values())

    def lease_ids(self) -> list[str]:
        return [lease_id for _, owner in self.owners.values() for lease_id in owner.leases]

    def leased(self) -> Iterator[tuple[str, int, int]]:
        """(job, dataset, slice of it) of what it is leased, and lately was."""
        yield from self.past or ()
        for place, (_, owner) in self.owners.items():
            yield from ((*place, lease.slice_index) for lease in owner.leases.values())

    def note_lease(self, place: tuple[str, int, int]) -> None:
        """It gets a lease."""
        self.past = deque(maxlen=_PAST) if self.past is None else self.past
        self.past.append(place)

    def place_of(self, lease_id: str) -> tuple[str, int, LeaseTable] | None:
        """The job, dataset and table of one of its live leases."""
        for (job, dataset), (table, owner) in self.owners.items():
            if lease_id in owner.leases:
                return job, dataset, table
        return None

    def has(self, dataset_id: str, index: int) -> bool:
        """Whether it has a slice cached, as far as it said."""
        have = self.have.get(dataset_id)
        if have is None:
            return False
        at = int(np.searchsorted(have, index))
        return at < len(have) and int(have[at]) == index


class WorkerSessions:
    """The sessions heard of lately, and their part in the swarms."""

    def __init__(self, swarms: dict[str, Swarm], patience_s: float) -> None:
        self.all: dict[HolderKey, WorkerSession] = {}
        self.of_peer: dict[str, set[HolderKey]] = {}
        self._swarms = swarms
        self._patience_s = patience_s
        self._have_bytes: Counter[str] = Counter()  # by organisation
        self._due: list[tuple[float, HolderKey]] = []
        # A peer is in a swarm once: by the session of it that came first.
        self._sharing: dict[tuple[str, str], HolderKey] = {}

    def at(self, key: HolderKey, now: float) -> WorkerSession:
        """The session, alive now; a new one if need be."""
        session = self.all.get(key)
        if session is None:
            session = self.all[key] = WorkerSession(key, now + self._patience_s)
            self.of_peer.setdefault(key[0], set()).add(key)
            heapq.heappush(self._due, (session.deadline, key))
        session.deadline = max(session.deadline, now + self._patience_s)
        session.heard_at = max(session.heard_at, now)
        for table, owner in session.owners.values():
            owner.deadline = max(owner.deadline, now + table.lease_s)
        return session

    def num_leases(self, peer_id: str) -> int:
        """Leases of all sessions of a peer."""
        return sum(self.all[key].num_leases() for key in self.of_peer.get(peer_id, ()))

    def tell(
        self,
        session: WorkerSession,
        address: str,
        have: dict[str, NDArray[np.int64]],
        now: float,
        organisation: str = "",
    ) -> None:
        """What a session says it has and hands on; the swarms hear of it."""
        moved = address != session.address
        session.address = address
        self._have_bytes[session.organisation] -= session.have_bytes
        session.organisation = organisation
        of_org = self._have_bytes[organisation] if organisation else 0
        for dataset_id, indexes in have.items():
            others = sum(known.nbytes for name, known in session.have.items() if name != dataset_id)
            others += sum(self.all[key].have_bytes for key in self.of_peer[session.key[0]] if key != session.key)
            is_room = of_org + others + indexes.nbytes <= MAX_HAVE_BYTES_PER_ORGANISATION
            if is_room and others + indexes.nbytes <= MAX_HAVE_BYTES_PER_PEER:
                session.have[dataset_id] = indexes
            else:
                session.have[dataset_id] = indexes[:0].copy()
        self._have_bytes[organisation] += session.have_bytes
        for dataset_id, known in session.have.items():
            at = session.announced_at.get(dataset_id)
            if moved or at is None or dataset_id in have:
                self._share(session, dataset_id, known, now)
            elif now - at > self._swarms[dataset_id].ttl_s / 3:
                self._share(session, dataset_id, None, now)

    def left(self, dataset_id: str, peer_id: str) -> None:
        """A swarm let a peer go: if it speaks again, the swarm hears all that it has."""
        key = self._sharing.pop((dataset_id, peer_id), None)
        if key is not None and key in self.all:
            self.all[key].announced_at.pop(dataset_id, None)

    def _share(self, session: WorkerSession, dataset_id: str, have: NDArray[np.int64] | None, now: float) -> None:
        peer_id = session.key[0]
        if self._sharing.setdefault((dataset_id, peer_id), session.key) != session.key:
            return
        swarm = self._swarms[dataset_id]
        flags: NDArray[np.bool_] | None = None
        if have is not None:
            flags = np.zeros(swarm.num_slices, np.bool_)
            flags[have] = True
        swarm.join(Provider(peer_id, session.address, False), flags, now)
        session.announced_at[dataset_id] = now

    def expire(self, now: float) -> None:
        """Forgets the sessions that were silent for long; their leases are long gone."""
        while self._due and self._due[0][0] <= now:
            _, key = heapq.heappop(self._due)
            session = self.all.get(key)
            if session is None:
                continue
            if session.deadline > now:
                heapq.heappush(self._due, (session.deadline, key))
                continue
            del self.all[key]
            self._have_bytes[session.organisation] -= session.have_bytes
            peers = self.of_peer[key[0]]
            peers.discard(key)
            if not peers:
                del self.of_peer[key[0]]
            for dataset_id in session.announced_at:
                if self._sharing.get((dataset_id, key[0])) == key:
                    del self._sharing[dataset_id, key[0]]
                    self._swarms[dataset_id].leave(key[0])
