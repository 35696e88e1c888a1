"""The desk: who gets which lease of which job, and from whom, as a function of what workers say.

Pure: no clock, no disk, no socket, no chance. `exchange` answers one worker and says what happened, as events; the
journal has those on disk before the answer goes out, and `apply` replays them. What only helps to choose well (who is
alive, how fast, what is cached where) is not kept: workers say it again.

What it costs: some 50 us an exchange with a receipt and a lease, whatever the numbers of slices and workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import LeaseError, ProtocolViolation, UsageError
from forebay.network.peer import Provider
from forebay.scheduler import events
from forebay.scheduler.events import Event
from forebay.scheduler.free_ranges import SampleRange
from forebay.scheduler.jobs import JobSpec, SchedulerJob
from forebay.scheduler.lease_holders import HolderKey, LeaseHolder
from forebay.scheduler.leases import LeaseTable
from forebay.scheduler.messages import AcceptedUse, ExchangeRequest, ExchangeResult, FailedLease, LeaseGrant, RefusedUse
from forebay.scheduler.receipts import judge, standing, tell
from forebay.scheduler.sessions import WorkerSession, WorkerSessions
from forebay.swarm.members import Offers, parse_ranges
from forebay.swarm.steering import Swarm


@dataclass(frozen=True)
class LeaseFilter:
    """A question about the slices of one dataset of a job.

    Args:
        avoided: (worker, job, slice of the job) to when it may have that again.
        offers: What the others can give it; None: not known, so all.
    """

    session: WorkerSession
    job: SchedulerJob
    dataset: int
    avoided: Mapping[tuple[str, str, int], float]
    offers: Offers | None
    now: float

    def __call__(self, index: int) -> bool:
        """Whether it is not to have a slice of the dataset."""
        of_job = self.job.bases[self.dataset] + index
        if self.avoided and self.avoided.get((*self._who, of_job), self.now) > self.now:
            return True
        if self.offers is None or self.offers.is_all:
            return False
        return not (self.session.has(self.job.spec.sources[self.dataset].dataset_id, index) or self.offers.has(index))

    @property
    def _who(self) -> tuple[str, str]:
        return self.session.key[0], self.job.name

    def offered(self) -> NDArray[np.bool_] | None:
        """[S] flags: nothing else can be given by anybody; None: all can, or nobody knows."""
        return None if self.offers is None or self.offers.is_all else self.offers.copied()


@dataclass(frozen=True)
class ProviderFault:
    """As `exchange.BadReport`, of slice `index` of a dataset."""

    peer_id: str
    dataset_id: str
    index: int
    reason: str
    wrong: bool = True


@dataclass(frozen=True)
class PendingCheck:
    """What workers say and is to be checked: a slice of a job, or a peer that has slice `index` of a dataset."""

    dataset_id: str
    index: int
    job: str = ""
    slice_index: int = -1
    peer: Provider | None = None


# A session has the lease in use and those it fetches ahead; a peer runs several sessions.
MAX_LEASES = 16
FIRST_LEASES_PER_PEER = 32
MAX_LEASES_PER_PEER = 256
MAX_PROVIDERS = 4


@dataclass(slots=True)
class PeerQuota:
    """What a peer used of what it was leased, over all its sessions.

    Attributes:
        max_leases: It may have so many: 32 at first, one more with each use, 1 after it used none for `stall_s`.
        unused_since: When it was leased something after it last used anything; None: it has used since.
        num_stalls: How often it used nothing for `stall_s`. `barred_until`: it is leased nothing until then.
        has_used: It used something; until then it is a newcomer.
    """

    max_leases: int = FIRST_LEASES_PER_PEER
    unused_since: float | None = None
    num_stalls: int = 0
    barred_until: float = 0.0
    has_used: bool = False

    def stall(self, stall_s: float, now: float) -> None:
        """It held leases for `stall_s` and used nothing of them."""
        self.max_leases, self.unused_since = 1, None
        self.num_stalls += 1
        self.barred_until = now + stall_s * min(64, 2 ** (self.num_stalls - 1))


class StaleAttemptError(LeaseError):
    """An exchange comes again, or after a later one of its session; another attempt is answered."""


class SchedulerCore:
    """Several jobs and their swarms.

    Args:
        salt: Begins the ids of leases: another one after each restart, so that no id is given twice.
        ttl_s: How long a holder of slices is believed to be there after it was heard of; at least a lease's term.
        checks: Whether somebody reads what workers could not, and calls `resolve` for each of `doubts`. Without,
            workers are believed: a slice is set aside after `max_failures` of them, a peer banned after two.
    """

    def __init__(self, jobs: Sequence[JobSpec], *, salt: str = "", ttl_s: float = 30.0, checks: bool = False) -> None:
        self.jobs = {spec.name: SchedulerJob(spec) for spec in jobs}
        if len(self.jobs) != len(jobs) or not jobs:
            raise UsageError(f"desk: expected jobs of different names, got {[spec.name for spec in jobs]}.")
        self.salt = salt
        self.checks = checks
        self.swarms: dict[str, Swarm] = {}
        ttl_s = max(ttl_s, *(spec.lease_s for spec in jobs))
        for spec in jobs:
            for source in spec.sources:
                self.swarms.setdefault(source.dataset_id, Swarm(len(source.samples), ttl_s=ttl_s, checks=checks))
        self.sessions = WorkerSessions(self.swarms, 5 * max(spec.lease_s for spec in jobs))
        # (peer, dataset, slice) to who said that it gave wrong bytes: the reason, and the accuser.
        self.reports: dict[tuple[str, str, int], dict[str, tuple[str, str]]] = {}
        self.banned: dict[str, dict[str, None]] = {}  # by dataset
        self._standings: dict[str, PeerQuota] = {}
        self._newcomers: dict[str, set[str]] = {}  # by organisation
        self._num_slices = sum(len(source.samples) for spec in jobs for source in spec.sources)
        self._num_ids = 0
        self._served: set[str] = set()
        # (worker, job, slice) to when it may have it again after it failed on it.
        self._avoided: dict[tuple[str, str, int], float] = {}

    # What a worker says.

    def exchange(
        self,
        peer_id: str,
        ask: ExchangeRequest,
        now: float,
        *,
        organisation: str = "",
        faults: Sequence[ProviderFault] = (),
    ) -> tuple[ExchangeResult, list[Event]]:
        """Takes what a session of a worker says and answers it; the events belong on disk before the reply goes out.

        Args:
            organisation: Of the worker's certificate; "" if the network's root signed it.
            faults: What `ask.reports` comes to, of slices that are or lately were leased to it.

        Raises:
            LeaseError: If it names a job that is not here, or has slices that a dataset does not have.
            StaleAttemptError: If it comes after a later attempt.
        """
        if ask.job and ask.job not in self.jobs:
            raise LeaseError(f"job {ask.job}: this scheduler has none of that name, but {', '.join(self.jobs)}.")
        done: list[Event] = []
        session = self._session((peer_id, ask.session), now)
        if 0 < ask.attempt <= session.attempt:
            text = f"exchange: attempt {ask.attempt} came after {session.attempt}. It was given up; drop it."
            raise StaleAttemptError(text)
        session.attempt = max(session.attempt, ask.attempt)
        self._hear(session, ask, organisation, now)
        accepted, refused = self._take_uses(peer_id, ask, done, now)
        self._take_back(session, ask, organisation, faults, done, now)
        self._cut(session, ask, done, now)
        for job in self.jobs.values():
            self._settle(job, done, now)
        grants, wait_s = self._grant(session, ask, organisation, done, now)
        live, lost = tell(
            session, session.lease_ids() if ask.known_leases is None else ask.known_leases, self.find, now
        )
        jobs = [self.jobs[ask.job]] if ask.job else list(self.jobs.values())
        unfinished = [job for job in jobs if not job.done]
        reply = ExchangeResult(
            tuple(accepted),
            live,
            tuple(grants),
            wait_s,
            not unfinished,
            tuple(refused),
            tuple(lost),
            bool(unfinished) and all(job.paused for job in unfinished),
            any(s.dataset_id not in session.have for job in unfinished for s in job.spec.sources),
            sum(job.num_left_out for job in jobs),
        )
        session.told_done, session.silent_until = reply.done, now + wait_s
        return reply, done

    def _session(self, key: HolderKey, now: float) -> WorkerSession:
        """Who speaks, alive now; after a restart it finds its leases again."""
        is_new = key not in self.sessions.all
        session = self.sessions.at(key, now)
        if is_new:
            for job in self.jobs.values():
                for dataset, table in enumerate(job.tables):
                    if key in table.owners.all:
                        session.owners[job.name, dataset] = table, table.touch(key, now)
        return session

    def _hear(self, session: WorkerSession, ask: ExchangeRequest, organisation: str, now: float) -> None:
        """What it has and hands on, and how fast it says it is; slices of other datasets do not count."""
        swarms = self.swarms
        try:
            have = {i: parse_ranges(text, swarms[i].num_slices) for i, text in ask.cached.items() if i in swarms}
        except ProtocolViolation as error:
            raise LeaseError(f"cached: {error}") from error
        self.sessions.tell(session, ask.address, have, now, organisation)
        for (job, dataset), (table, owner) in session.owners.items():
            dataset_id = self.jobs[job].spec.sources[dataset].dataset_id
            if dataset_id in have:
                table.know(owner, have[dataset_id])
            if ask.speed is not None:
                owner.speed.told(ask.speed)

    def _take_uses(
        self, peer_id: str, ask: ExchangeRequest, done: list[Event], now: float
    ) -> tuple[list[AcceptedUse], list[RefusedUse]]:
        """Records the batch, or nothing of it unless all of it is new: the receipt is over all of it."""
        batch = judge(self.find, peer_id, ask.uses)
        if not batch.is_whole:
            return list(batch.known.values()), batch.refused + batch.put_off()
        self._note_fetched(peer_id, batch.fresh, now)
        self._do(events.UsesRecorded(batch.job, peer_id, ask.uses, ask.signature, ask.session), done, now)
        standing_of_peer = self._standings.setdefault(peer_id, PeerQuota())
        standing_of_peer.max_leases = min(MAX_LEASES_PER_PEER, standing_of_peer.max_leases + len(ask.uses))
        standing_of_peer.unused_since, standing_of_peer.num_stalls, standing_of_peer.has_used = None, 0, True
        return [standing(table, lease_id) for lease_id, (_, _, table) in batch.fresh.items()], []

    def _note_fetched(self, peer_id: str, fresh: dict[str, tuple[SchedulerJob, int, LeaseTable]], now: float) -> None:
        """Who begins a slice has it."""
        for lease_id, (job, dataset, table) in fresh.items():
            lease = table.leases[lease_id]
            if lease.position == lease.start:
                self.swarms[job.spec.sources[dataset].dataset_id].finished(peer_id, lease.slice_index, now)

    def find(self, lease_id: str) -> tuple[SchedulerJob, int, LeaseTable] | None:
        """Where a lease is live or remembered."""
        for job in self.jobs.values():
            found = job.find(lease_id)
            if found is not None:
                return job, *found
        return None

    def _take_back(
        self,
        session: WorkerSession,
        ask: ExchangeRequest,
        organisation: str,
        faults: Sequence[ProviderFault],
        done: list[Event],
        now: float,
    ) -> None:
        """Failed and released leases, those that it never heard of, and its reports of bad providers."""
        for one in faults:
            key = (one.peer_id, one.dataset_id, one.index)
            swarm = self.swarms.get(one.dataset_id)
            if swarm is None or swarm.knows(one.peer_id) is None:
                continue  # nobody was sent to a peer that is not here; an invented name costs nothing
            if not one.wrong:
                swarm.failed(session.key[0], one.index, one.peer_id, now)
            elif session.key[0] not in self.reports.get(key, ()):
                accuser = organisation or session.key[0]
                self._do(events.ProviderReported(*key, session.key[0], one.reason, accuser), done, now)
        for failed in ask.failed:
            self._fail(session, failed, done, now)
        unheld = [] if ask.known_leases is None else [i for i in session.lease_ids() if i not in ask.known_leases]
        for why, lease_ids in (("released", ask.release), ("unheld", unheld)):
            for lease_id in lease_ids:
                if (own := self._own(session, lease_id)) is not None:
                    job, dataset, table = own
                    index = job.bases[dataset] + table.leases[lease_id].slice_index
                    self._give_back(lease_id, why, done, now)
                    if why == "released":  # others go first
                        self._avoided[session.key[0], job.name, index] = now + job.spec.lease_s / 4

    def _fail(self, session: WorkerSession, failed: FailedLease, done: list[Event], now: float) -> None:
        own = self._own(session, failed.lease_id)
        if own is None:
            return
        job, dataset, table = own
        worker = session.key[0]
        index = job.bases[dataset] + table.leases[failed.lease_id].slice_index
        self._do(events.SliceFailed(job.name, index, worker, failed.reason), done, now)
        self._give_back(failed.lease_id, "failed", done, now)
        self._avoided[worker, job.name, index] = now + job.spec.lease_s
        if not self.checks and job.is_doubtful(index):
            done += self._set_aside(job, index, failed.reason, now)

    def _set_aside(self, job: SchedulerJob, index: int, reason: str, now: float) -> list[Event]:
        done = job.set_aside(index, reason)
        for event in done:
            self.apply(event, now)
        self._settle(job, done, now)
        return done

    # What workers say and nobody has checked yet.

    def pending_checks(self) -> list[PendingCheck]:
        """Slices that several workers could not read, and peers of whom two say that they gave wrong bytes."""
        found = [
            PendingCheck(job.spec.sources[dataset].dataset_id, local, job=job.name, slice_index=index)
            for job in self.jobs.values()
            for index in job.failures
            if job.is_doubtful(index)
            for dataset, local in [job.place(index)]
        ]
        return found + [
            PendingCheck(dataset_id, index, peer=holder)
            for dataset_id, swarm in self.swarms.items()
            for holder, index in swarm.suspects()
        ]

    def resolve(self, doubt: PendingCheck, is_good: bool, now: float) -> list[Event]:
        """A doubt was checked: whether right bytes were read, of the slice from any origin, or from the peer."""
        done: list[Event] = []
        if doubt.peer is not None:
            self._do(events.PeerBanned(doubt.peer.peer_id, doubt.dataset_id, not is_good), done, now)
        elif self.jobs[doubt.job].is_doubtful(doubt.slice_index):
            job = self.jobs[doubt.job]
            if is_good:
                for worker in job.failures[doubt.slice_index]:  # reading costs us a slice: not as often as they like
                    self.bar(worker, now)
                self._do(events.SliceCleared(job.name, doubt.slice_index), done, now)
            else:
                reason = next(iter(job.failures[doubt.slice_index].values()))
                done = self._set_aside(job, doubt.slice_index, reason, now)
        return done

    def pardon(self, peer_id: str) -> list[Event]:
        """What was said against a peer counts no longer; nothing happens where nothing was said."""
        done: list[Event] = []
        said = {key[1] for key in self.reports if key[0] == peer_id}
        for dataset_id in self.swarms:
            if dataset_id in said or peer_id in self.banned.get(dataset_id, ()):
                self._do(events.PeerBanned(peer_id, dataset_id, False), done, 0.0)
        return done

    def _cut(self, session: WorkerSession, ask: ExchangeRequest, done: list[Event], now: float) -> None:
        for lease_id, horizon in ask.declared_until.items():
            own = self._own(session, lease_id)
            if own is None:
                continue
            job, _, table = own
            stop = table.declare(table.leases[lease_id], horizon, now)
            if stop is not None:
                self._do(events.LeaseCut(job.name, lease_id, stop), done, now)

    def _own(self, session: WorkerSession, lease_id: str) -> tuple[SchedulerJob, int, LeaseTable] | None:
        """Where a live lease of this session is."""
        place = session.place_of(lease_id)
        return None if place is None else (self.jobs[place[0]], *place[1:])

    def _give_back(self, lease_id: str, why: str, done: list[Event], now: float) -> None:
        place = self.find(lease_id)
        assert place is not None
        job, dataset, table = place
        lease = table.leases[lease_id]
        index = job.bases[dataset] + lease.slice_index
        self.swarms[job.spec.sources[dataset].dataset_id].dropped(lease.worker, lease.slice_index)
        self._do(events.LeaseReturned(job.name, lease_id, why), done, now)
        if index in job.reasons and lease.left:
            part = (lease.position, lease.stop)
            self._do(events.SliceSetAside(job.name, lease.epoch, index, *part, job.reasons[index]), done, now)

    # What it gets.

    def _grant(
        self, session: WorkerSession, ask: ExchangeRequest, organisation: str, done: list[Event], now: float
    ) -> tuple[list[LeaseGrant], float]:
        """Up to `want` leases, and how long to wait for more, seconds."""
        grants: list[LeaseGrant] = []
        own = self._standings.setdefault(session.key[0], PeerQuota())
        room = MAX_LEASES - session.num_leases() if now >= own.barred_until else 0
        if any(owner.stalled for _, owner in session.owners.values()):
            room = min(room, 1 - session.num_leases())
        room_of_peer = None  # counted only where there is something to lease: that takes all its sessions
        for _ in range(min(ask.want, room)):
            found = self._choose(session, ask.job, now)
            if found is None:
                break
            if room_of_peer is None:
                room_of_peer = self._room_of_peer(session.key[0], own, organisation)
            if len(grants) >= room_of_peer:
                break
            job, dataset, part = found
            lease_id = f"{self.salt}{self._num_ids:x}"
            self._num_ids += 1
            index = job.bases[dataset] + part[0]
            epoch = job.tables[dataset].epoch
            self._do(events.LeaseGranted(job.name, lease_id, *session.key, epoch, index, *part[1:]), done, now)
            for table, owner in session.owners.values():
                table.stop_waiting(owner)
            session.note_lease((job.name, dataset, part[0]))
            own.unused_since = now if own.unused_since is None else own.unused_since
            grants.append(self._describe(session, job, dataset, lease_id, now))
            change = job.due_change()
            if change is not None:
                self._do(change, done, now)
        if len(grants) == ask.want:
            return grants, 0.0
        return grants, self._wait(session, ask.job, now)

    def _room_of_peer(self, peer_id: str, own: PeerQuota, organisation: str) -> int:
        """How many more leases a peer may get, in all its sessions together."""
        room = own.max_leases - self.sessions.num_leases(peer_id)
        return room if own.has_used or not organisation else min(room, self._room_of_newcomers(organisation, peer_id))

    def _room_of_newcomers(self, organisation: str, peer_id: str) -> int:
        """Leases that an organisation's members which used nothing yet may still get: together half of the slices.

        It issues as many certificates as it likes.
        """
        newcomers = self._newcomers.setdefault(organisation, set())
        newcomers.add(peer_id)
        gone = {one for one in newcomers if one not in self.sessions.of_peer or self._standings[one].has_used}
        newcomers -= gone
        return max(1, self._num_slices // 2) - sum(map(self.sessions.num_leases, newcomers))

    def _turns(self, name: str) -> list[SchedulerJob]:
        """The jobs that a worker may get leases of, whose turn it is first."""
        if name:
            return [self.jobs[name]] if not self.jobs[name].paused else []
        jobs = [job for job in self.jobs.values() if not job.paused and not job.done]
        return sorted(jobs, key=lambda job: (-job.spec.priority, job.given / job.spec.weight))

    def _choose(self, session: WorkerSession, name: str, now: float) -> tuple[SchedulerJob, int, SampleRange] | None:
        for job in self._turns(name):
            for dataset in job.turns():
                owner, dataset_id = self._owner(session, job, dataset, now), job.spec.sources[dataset].dataset_id
                swarm = self.swarms[dataset_id] if dataset_id in self._served else None
                offers = swarm.offers(session.key[0], now) if swarm is not None else None
                barred = LeaseFilter(session, job, dataset, self._avoided, offers, now)
                part = job.tables[dataset].choose(owner, barred, now, barred.offered())
                if part is not None:
                    return job, dataset, part
        return None

    def _owner(self, session: WorkerSession, job: SchedulerJob, dataset: int, now: float) -> LeaseHolder:
        """This session's place at a table; a new one knows what the session has cached."""
        at, table = session.owners.get((job.name, dataset)), job.tables[dataset]
        if at is None or table.owners.all.get(session.key) is not at[1]:
            owner = table.touch(session.key, now)
            session.owners[job.name, dataset] = table, owner
            have = session.have.get(job.spec.sources[dataset].dataset_id)
            if have is not None:
                table.know(owner, have)
            return owner
        return at[1]

    def _wait(self, session: WorkerSession, name: str, now: float) -> float:
        waits = [
            job.tables[dataset].wait(self._owner(session, job, dataset, now), now)
            for job in self._turns(name)[:1]
            for dataset in job.turns()
        ]
        return round(min(waits, default=1.0), 3)

    def _describe(
        self, session: WorkerSession, job: SchedulerJob, dataset: int, lease_id: str, now: float
    ) -> LeaseGrant:
        table, dataset_id = job.tables[dataset], job.spec.sources[dataset].dataset_id
        lease = table.leases[lease_id]
        swarm, index = self.swarms[dataset_id], lease.slice_index
        is_cached = session.has(dataset_id, index)
        providers = () if is_cached else tuple(swarm.providers(index, lease.worker, now, MAX_PROVIDERS))
        return LeaseGrant(
            lease_id, job.name, lease.epoch, job.bases[dataset] + index, dataset_id, lease.start, lease.stop,
            int(table.samples[index]), providers, round(table.lease_s, 3), first=job.bases[dataset],
        )  # fmt: skip

    # What happens.

    def _do(self, event: Event, done: list[Event], now: float) -> None:
        self.apply(event, now)
        done.append(event)
        if isinstance(event, events.UsesRecorded | events.SliceSetAside):
            self._settle(self.jobs[event.job], done, now)

    def _settle(self, job: SchedulerJob, done: list[Event], now: float) -> None:
        """Ends epochs that are over, and changes weights that are due."""
        for event in (*map(job.ended, range(len(job.tables))), job.due_change()):
            if event is not None:
                self._do(event, done, now)
            if isinstance(event, events.EpochEnded) and not job.tables[event.dataset].done:
                for kept in job.still_aside(event.dataset):
                    self.apply(kept, now)
                    done.append(kept)

    def settle_all(self, name: str, now: float) -> list[Event]:
        """Applies what follows from a replayed state by itself."""
        done: list[Event] = []
        self._settle(self.jobs[name], done, now)
        return done

    def apply(self, event: Event, now: float = 0.0) -> None:
        """Changes the state by an event: as it happens, or replayed.

        Raises:
            LeaseError: If it contradicts the state.
        """
        match event:
            case events.PeerBanned(peer_id, dataset_id, banned):
                if banned:
                    self.banned.setdefault(dataset_id, {})[peer_id] = None
                else:
                    self.banned.get(dataset_id, {}).pop(peer_id, None)
                    self.reports = {key: said for key, said in self.reports.items() if key[:2] != (peer_id, dataset_id)}
                if (swarm := self.swarms.get(dataset_id)) is not None:
                    (swarm.ban if banned else swarm.pardon)(peer_id)
            case events.ProviderReported(peer_id, dataset_id, index, reporter, reason, accuser):
                self.reports.setdefault((peer_id, dataset_id, index), {})[reporter] = reason, accuser
                if (swarm := self.swarms.get(dataset_id)) is not None:
                    swarm.failed(reporter, index, peer_id, now, wrong=True, accuser=accuser)
            case _:
                self.jobs[event.job].apply(event, now)

    def expire(self, now: float) -> list[Event]:
        """Takes back what is late; call it every second or so."""
        done: list[Event] = []
        for job in self.jobs.values():
            for table in job.tables:
                for lease_id, why in table.late(now):
                    if lease_id in table.leases:
                        self._give_back(lease_id, why, done, now)
        self._end_unused(done, now)
        self.sessions.expire(now)
        for peer_id in [peer_id for peer_id in self._standings if peer_id not in self.sessions.of_peer]:
            if self._standings[peer_id].barred_until <= now:
                del self._standings[peer_id]
        for dataset_id, peer_id in [(i, peer) for i, swarm in self.swarms.items() for peer in swarm.expire(now)]:
            self.sessions.left(dataset_id, peer_id)
        for key in [key for key, until in self._avoided.items() if until <= now]:
            del self._avoided[key]
        return done

    def bar(self, peer_id: str, now: float) -> None:
        """A peer lied: it is leased nothing for a while, as if it had used nothing of what it was leased."""
        stall_s = min(job.spec.stall_s for job in self.jobs.values())
        self._standings.setdefault(peer_id, PeerQuota()).stall(stall_s, now)

    def _end_unused(self, done: list[Event], now: float) -> None:
        """Takes back all leases of a peer that used nothing for `stall_s`, whichever of its sessions has them."""
        stall_s = min(job.spec.stall_s for job in self.jobs.values())
        for peer_id, own in self._standings.items():
            if own.unused_since is None or now - own.unused_since < stall_s:
                continue
            own.stall(stall_s, now)
            for key in self.sessions.of_peer.get(peer_id, ()):
                for lease_id in self.sessions.all[key].lease_ids():
                    self._give_back(lease_id, "stalled", done, now)

    def origins(self, dataset_id: str, holders: Sequence[Provider], now: float) -> None:
        """The data nodes that serve a dataset now; call it within the swarm's time to live.

        Once it was called, a slice is leased only to who has it, or can be told of somebody that has.
        """
        self._served.add(dataset_id)
        for holder in holders:
            self.swarms[dataset_id].join(holder, None, now)

    # What an administrator says.

    def pause(self, name: str, paused: bool) -> list[Event]:
        """No new leases of a job, or again; what is leased is used up."""
        return self._steer(self._job(name).pausing(paused))

    def readmit(self, name: str, slices: Sequence[int] | None = None) -> list[Event]:
        """Leases slices again that were set aside; None for all of them."""
        return self._steer(self._job(name).readmitting(slices))

    def reweight(self, name: str, weights: Mapping[str, float], at: int | None = None) -> list[Event]:
        """Other weights, by dataset name, from the `at`-th sample used on; None: from now on."""
        return self._steer(self._job(name).reweighting(weights, at))

    def _steer(self, said: Sequence[Event]) -> list[Event]:
        done: list[Event] = []
        for event in said:
            self._do(event, done, 0.0)
        return done

    def _job(self, name: str) -> SchedulerJob:
        if name not in self.jobs:
            raise UsageError(f"job {name}: this scheduler has none of that name, but {', '.join(self.jobs)}.")
        return self.jobs[name]

    def done(self) -> bool:
        """Whether every job is done."""
        return all(job.done for job in self.jobs.values())

    def all_told(self, now: float, quiet_s: float) -> bool:
        """Whether every session that is alive was told of the end, and had `quiet_s` to ask again if that was lost."""
        lease_s = max(job.spec.lease_s for job in self.jobs.values())
        return all(
            now >= (session.heard_at + quiet_s if session.told_done else session.silent_until + lease_s)
            for session in self.sessions.all.values()
        )

    # Keeping.

    def extend_all(self, now: float) -> None:
        """A whole term for every lease: after an outage that was not the workers' doing."""
        for table in (table for job in self.jobs.values() for table in job.tables):
            table.extend_all(now)

    def snapshot(self) -> dict[str, Any]:
        """All that replaying every event would give, as plain values."""
        return {
            "jobs": {name: job.snapshot() for name, job in self.jobs.items()},
            "reports": [[*key, reporters] for key, reporters in self.reports.items()],
            "banned": [[dataset_id, peer_id] for dataset_id, peers in self.banned.items() for peer_id in peers],
        }

    def restore(self, saved: Mapping[str, Any], now: float = 0.0) -> None:
        """Puts a snapshot back into a new desk of the same jobs."""
        for name, state in saved["jobs"].items():
            self.jobs[name].restore(state, now)
        for peer_id, dataset_id, index, reporters in saved["reports"]:
            for reporter, (reason, accuser) in reporters.items():
                self.apply(events.ProviderReported(peer_id, dataset_id, index, reporter, reason, accuser), now)
        for dataset_id, peer_id in saved["banned"]:
            self.apply(events.PeerBanned(peer_id, dataset_id), now)
