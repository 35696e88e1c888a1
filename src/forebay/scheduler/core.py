"""The scheduler as a pure state machine: which worker gets which lease of which job, and from which providers.

No clock, disk, socket or randomness. `exchange` answers a worker and returns events; the journal writes them before the
response is sent, and `apply` replays them. State that only improves choices (which workers are alive, their speed and
caches) is not persisted: workers report it again.

Cost: some 50 us an exchange with a receipt and a lease, independent of the numbers of slices and workers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forebay.errors import ForebayError, LeaseError, ProtocolError, UsageError
from forebay.network.peer import Provider
from forebay.scheduler import events
from forebay.scheduler.checks import PendingCheck, ProviderFault, check_known, check_uses, progress
from forebay.scheduler.events import Event
from forebay.scheduler.free_ranges import SampleRange
from forebay.scheduler.jobs import JobSpec, SchedulerJob
from forebay.scheduler.lease_holders import HolderKey, LeaseHolder
from forebay.scheduler.messages import AcceptedUse, ExchangeRequest, ExchangeResult, LeaseGrant, RefusedUse
from forebay.scheduler.sessions import PeerQuotas, WorkerSession, WorkerSessions
from forebay.swarm.members import Offers, parse_ranges
from forebay.swarm.steering import Swarm

MAX_LEASES = 16  # of a session: the lease in use and those it prefetches
MAX_PROVIDERS = 4


class StaleAttemptError(LeaseError):
    """An exchange was repeated, or came after a later one of its session."""


class SchedulerCore:
    """Several jobs and their swarms.

    Args:
        salt: Prefix of lease ids; another one after each restart, so that no id is given twice.
        ttl_s: A peer that sent nothing for so long does not count as a provider; at least a lease's term.
        checks: Whether the caller reads what workers could not, and calls `resolve` for each of `pending_checks`. If
            not, workers are believed: a slice is set aside after `max_failures` of them, a peer banned after two.
    """

    def __init__(self, jobs: Sequence[JobSpec], *, salt: str = "", ttl_s: float = 30.0, checks: bool = False) -> None:
        self.jobs = {spec.name: SchedulerJob(spec) for spec in jobs}
        if len(self.jobs) != len(jobs) or not jobs:
            raise UsageError(f"scheduler: expected jobs of different names, got {[spec.name for spec in jobs]}.")
        self.salt = salt
        self.checks = checks
        self.swarms: dict[str, Swarm] = {}
        ttl_s = max(ttl_s, *(spec.lease_s for spec in jobs))
        for spec in jobs:
            self.swarms.setdefault(spec.dataset_id, Swarm(len(spec.samples), ttl_s=ttl_s, checks=checks))
        self.sessions = WorkerSessions(self.swarms, 5 * max(spec.lease_s for spec in jobs))
        # (peer, dataset, slice) to the reporters of wrong bytes, each with the reason and the accuser.
        self.reports: dict[tuple[str, str, int], dict[str, tuple[str, str]]] = {}
        self.banned: dict[str, dict[str, None]] = {}  # dataset to peers
        self._quotas = PeerQuotas(self.sessions, sum(len(spec.samples) for spec in jobs))
        self._min_stall_s = min(spec.stall_s for spec in jobs)
        self._num_ids = 0
        self._served: set[str] = set()  # datasets of which the origins are known
        # (worker, job, slice) to when the worker may have it again, after it failed on it or released it.
        self._avoided: dict[tuple[str, str, int], float] = {}
        self._events: list[Event] = []  # of the call in progress

    # Exchanges.

    def exchange(
        self, peer_id: str, request: ExchangeRequest, now: float, *, organisation: str = "",
        faults: Sequence[ProviderFault] = (),
    ) -> tuple[ExchangeResult, list[Event]]:  # fmt: skip
        """Apply a worker's request and answer it; the events must be on disk before the response is sent.

        Args:
            organisation: Of the worker's certificate; "" if the network's root signed it.
            faults: `request.reports` of slices that are or lately were leased to it.

        Raises:
            LeaseError: If it names an unknown job, or slices that a dataset does not have.
            StaleAttemptError: If it comes after a later attempt.
        """
        jobs = [self._job(request.job, LeaseError)] if request.job else list(self.jobs.values())
        session = self._session((peer_id, request.session), now)
        if 0 < request.attempt <= session.attempt:
            raise StaleAttemptError(
                f"exchange: attempt {request.attempt} is not newer than the last one, {session.attempt}. Drop it."
            )
        session.attempt = max(session.attempt, request.attempt)
        self._update_session(session, request, organisation, now)
        accepted, refused = self._record_uses(peer_id, request, now)
        self._apply_faults(session, organisation, faults, now)
        self._return_leases(session, request, now)
        for lease_id, until in request.declared_until.items():
            if (name := session.find_job(lease_id)) is not None:
                table = self.jobs[name].table
                if (stop := table.declare(table.leases[lease_id], until)) is not None:
                    self._emit(events.LeaseCut(name, lease_id, stop), now)
        for job in self.jobs.values():
            self._advance(job, now)
        grants, wait_s = self._grant(session, request, organisation, now)
        lease_ids = session.lease_ids() if request.known_leases is None else request.known_leases
        active, lost = check_known(session, lease_ids, self.find, now)
        unfinished = [job for job in jobs if not job.done]
        result = ExchangeResult(
            tuple(accepted), active, tuple(grants), wait_s, not unfinished, tuple(refused), tuple(lost),
            paused=bool(unfinished) and all(job.paused for job in unfinished),
            report_cached=any(job.dataset_id not in session.cached for job in unfinished),
            num_left_out=sum(job.num_left_out for job in jobs),
        )  # fmt: skip
        session.knows_done, session.silent_until = result.done, now + wait_s
        return result, self._take_events()

    def _session(self, key: HolderKey, now: float) -> WorkerSession:
        """The session, alive now; after a restart it gets its leases again."""
        is_new = key not in self.sessions.all
        session = self.sessions.touch(key, now)
        if is_new:
            for job in self.jobs.values():
                if key in job.table.holders.all:
                    session.holders[job.name] = job.table, job.table.touch(key, now)
        return session

    def _update_session(self, session: WorkerSession, request: ExchangeRequest, organisation: str, now: float) -> None:
        """Store what the session has cached and where it serves that; unknown datasets are ignored."""
        swarms = self.swarms
        try:
            cached = {i: parse_ranges(text, swarms[i].num_slices) for i, text in request.cached.items() if i in swarms}
        except ProtocolError as error:
            raise LeaseError(f"cached: {error}") from error
        self.sessions.update_cached(session, request.address, cached, now, organisation)
        for name, (table, holder) in session.holders.items():
            if (dataset_id := self.jobs[name].dataset_id) in cached:
                table.set_cached(holder, cached[dataset_id])

    def _record_uses(
        self, peer_id: str, request: ExchangeRequest, now: float
    ) -> tuple[list[AcceptedUse], list[RefusedUse]]:
        """Record the uses, or none of them unless all are new: the receipt is over all."""
        new, accepted, refused = check_uses(self.find, peer_id, request.uses)
        if not new:
            return accepted, refused
        for lease_id, job in new.items():
            lease = job.table.leases[lease_id]
            if lease.position == lease.start:  # a worker that starts to use a slice has it
                self.swarms[job.dataset_id].finished(peer_id, lease.slice_index, now)
        self._emit(events.UsesRecorded(job.name, peer_id, request.uses, request.signature, request.session), now)
        self._quotas.of(peer_id).add_uses(len(request.uses))
        return [progress(job.table, lease_id) for lease_id, job in new.items()], []

    def find(self, lease_id: str) -> SchedulerJob | None:
        """The job of which a lease is live, or ended lately."""
        jobs = (job for job in self.jobs.values() if lease_id in job.table.leases or lease_id in job.table.ended)
        return next(jobs, None)

    def _apply_faults(
        self, session: WorkerSession, organisation: str, faults: Sequence[ProviderFault], now: float
    ) -> None:
        worker = session.key[0]
        for fault in faults:
            key = (fault.peer_id, fault.dataset_id, fault.index)
            swarm = self.swarms.get(fault.dataset_id)
            if swarm is None or swarm.get(fault.peer_id) is None:
                continue  # no worker was sent to an unknown peer; an invented name costs nothing
            if not fault.wrong:
                swarm.failed(worker, fault.index, fault.peer_id, now)
            elif worker not in self.reports.get(key, ()):
                self._emit(events.ProviderReported(*key, worker, fault.reason, organisation or worker), now)

    def _return_leases(self, session: WorkerSession, request: ExchangeRequest, now: float) -> None:
        """Take back failed and released leases, and those of which the session does not know."""
        worker, lease_ids = session.key[0], request.known_leases
        for failed in request.failed:
            if (name := session.find_job(failed.lease_id)) is None:
                continue
            job, index = self.jobs[name], self._take_back(failed.lease_id, "failed", now)
            self._emit(events.SliceFailed(name, index, worker, failed.reason), now)
            self._avoided[worker, name, index] = now + job.spec.lease_s
            if not self.checks and job.is_doubtful(index):
                self._set_aside(job, index, failed.reason, now)
        for lease_id in request.release:
            if (name := session.find_job(lease_id)) is not None:
                index = self._take_back(lease_id, "released", now)
                # Other workers go first.
                self._avoided[worker, name, index] = now + self.jobs[name].spec.lease_s / 4
        for lease_id in [] if lease_ids is None else [i for i in session.lease_ids() if i not in lease_ids]:
            self._take_back(lease_id, "unheld", now)

    def _take_back(self, lease_id: str, reason: str, now: float) -> int:
        """End a live lease; its slice."""
        job = self.find(lease_id)
        assert job is not None
        lease = job.table.leases[lease_id]
        index = lease.slice_index
        self.swarms[job.dataset_id].dropped(lease.worker, index)
        self._emit(events.LeaseReturned(job.name, lease_id, reason), now)
        if index in job.reasons and lease.remaining:
            unused = (lease.position, lease.stop)
            self._emit(events.SliceSetAside(job.name, lease.epoch, index, *unused, job.reasons[index]), now)
        return index

    # Granting leases.

    def _grant(
        self, session: WorkerSession, request: ExchangeRequest, organisation: str, now: float
    ) -> tuple[list[LeaseGrant], float]:
        """Up to `want` leases, and how long to wait for more, seconds."""
        grants: list[LeaseGrant] = []
        quota = self._quotas.of(session.key[0])
        max_grants = MAX_LEASES - session.num_leases() if now >= quota.barred_until else 0
        of_peer = None  # computed only where there is something to lease: it counts all sessions of the peer
        for _ in range(min(request.want, max_grants)):
            choice = self._choose(session, request.job, now)
            if choice is None:
                break
            if of_peer is None:
                of_peer = self._quotas.num_free(session.key[0], organisation)
            if len(grants) >= of_peer:
                break
            job, samples = choice
            lease_id = f"{self.salt}{self._num_ids:x}"
            self._num_ids += 1
            self._emit(events.LeaseGranted(job.name, lease_id, *session.key, job.table.epoch, *samples), now)
            for table, holder in session.holders.values():
                table.stop_waiting(holder)
            session.recent.append((job.name, samples[0]))
            quota.unused_since = now if quota.unused_since is None else quota.unused_since
            grants.append(self._describe(session, job, lease_id, now))
        return grants, 0.0 if len(grants) == request.want else self._wait(session, request.job, now)

    def _open_jobs(self, name: str) -> list[SchedulerJob]:
        """The jobs that a worker may get leases of, in the order in which they are tried."""
        if name:
            return [self.jobs[name]] if not self.jobs[name].paused else []
        jobs = [job for job in self.jobs.values() if not job.paused and not job.done]
        return sorted(jobs, key=lambda job: (-job.spec.priority, job.table.total_used + job.table.leased))

    def _choose(self, session: WorkerSession, name: str, now: float) -> tuple[SchedulerJob, SampleRange] | None:
        for job in self._open_jobs(name):
            offers = self.swarms[job.dataset_id].offers(session.key[0], now) if job.dataset_id in self._served else None
            offers = None if offers is not None and offers.is_all else offers
            is_avoided = self._lease_filter(session, job, offers, now)
            offered = offers.copied() if offers is not None else None
            samples = job.table.choose(self._holder(session, job, now), is_avoided, now, offered)
            if samples is not None:
                return job, samples
        return None

    def _lease_filter(
        self, session: WorkerSession, job: SchedulerJob, offers: Offers | None, now: float
    ) -> Callable[[int], bool]:
        """Tells whether a session is not to get a slice of a job now; `offers` is None if all can be provided."""
        worker, name, dataset_id = session.key[0], job.name, job.dataset_id

        def is_avoided(index: int) -> bool:
            if self._avoided and self._avoided.get((worker, name, index), now) > now:
                return True
            return offers is not None and not (session.has_cached(dataset_id, index) or offers.includes(index))

        return is_avoided

    def _holder(self, session: WorkerSession, job: SchedulerJob, now: float) -> LeaseHolder:
        """This session's holder in a job's table; a new one learns what the session has cached."""
        table, holder = session.holders.get(job.name, (job.table, None))
        if holder is None or table.holders.all.get(session.key) is not holder:
            holder = table.touch(session.key, now)
            session.holders[job.name] = table, holder
            if (cached := session.cached.get(job.dataset_id)) is not None:
                table.set_cached(holder, cached)
        return holder

    def _wait(self, session: WorkerSession, name: str, now: float) -> float:
        waits_s = [
            job.table.wait(self._holder(session, job, now), now) for job in self._open_jobs(name)[:1] if not job.done
        ]
        return round(min(waits_s, default=1.0), 3)

    def _describe(self, session: WorkerSession, job: SchedulerJob, lease_id: str, now: float) -> LeaseGrant:
        lease = job.table.leases[lease_id]
        index, providers = lease.slice_index, tuple[Provider, ...]()
        if not session.has_cached(job.dataset_id, index):
            providers = tuple(self.swarms[job.dataset_id].providers(index, lease.worker, now, MAX_PROVIDERS))
        return LeaseGrant(
            lease_id, job.name, lease.epoch, index, job.dataset_id, lease.start, lease.stop,
            int(job.table.samples[index]), providers, round(job.table.lease_s, 3),
        )  # fmt: skip

    # Checks of what workers report.

    def pending_checks(self) -> list[PendingCheck]:
        """Slices that several workers could not read, and peers of which two say that they sent wrong bytes."""
        checks = [
            PendingCheck(job.dataset_id, index, job=job.name)
            for job in self.jobs.values()
            for index in filter(job.is_doubtful, job.failures)
        ]
        for dataset_id, swarm in self.swarms.items():
            checks += [PendingCheck(dataset_id, index, peer=provider) for provider, index in swarm.suspects()]
        return checks

    def resolve(self, check: PendingCheck, is_good: bool, now: float) -> list[Event]:
        """Apply the result of a check: whether right bytes were read, from any origin or from the peer."""
        if check.peer is not None:
            self._emit(events.PeerBanned(check.peer.peer_id, check.dataset_id, not is_good), now)
        elif (job := self.jobs[check.job]).is_doubtful(check.index):
            failures = job.failures[check.index]
            if is_good:
                for worker in failures:  # each check costs the scheduler a slice: workers cannot ask for many
                    self.bar(worker, now)
                self._emit(events.SliceCleared(job.name, check.index), now)
            else:
                self._set_aside(job, check.index, next(iter(failures.values())), now)
        return self._take_events()

    def _set_aside(self, job: SchedulerJob, index: int, reason: str, now: float) -> None:
        for event in job.set_aside(index, reason):
            self._emit(event, now, is_final=False)
        self._advance(job, now)

    def bar(self, peer_id: str, now: float) -> None:
        """Grant a peer no leases for a while: it sent false messages."""
        self._quotas.of(peer_id).bar(self._min_stall_s, now)

    # Events.

    def _emit(self, event: Event, now: float, is_final: bool = True) -> None:
        """Apply an event and return it from the call in progress; `is_final`: with what follows from it."""
        self.apply(event, now)
        self._events.append(event)
        if is_final and isinstance(event, events.UsesRecorded | events.SliceSetAside):
            self._advance(self.jobs[event.job], now)

    def _take_events(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def _advance(self, job: SchedulerJob, now: float) -> None:
        if (event := job.due_end()) is not None:
            self._emit(event, now)
            for index, reason in [] if job.done else list(job.reasons.items()):
                for aside in job.set_aside(index, reason):
                    self._emit(aside, now, is_final=False)

    def advance(self, name: str, now: float) -> list[Event]:
        """End a job's epoch if it is due, after a replay."""
        self._advance(self.jobs[name], now)
        return self._take_events()

    def apply(self, event: Event, now: float = 0.0) -> None:
        """Change the state by an event, a new one or a replayed one.

        Raises:
            LeaseError: If it contradicts the state.
        """
        match event:
            case events.PeerBanned(peer_id, dataset_id, banned):
                if banned:
                    self.banned.setdefault(dataset_id, {})[peer_id] = None
                else:
                    self.banned.get(dataset_id, {}).pop(peer_id, None)
                    self.reports = {k: v for k, v in self.reports.items() if k[:2] != (peer_id, dataset_id)}
                if (swarm := self.swarms.get(dataset_id)) is not None:
                    (swarm.ban if banned else swarm.pardon)(peer_id)
            case events.ProviderReported(peer_id, dataset_id, index, reporter, reason, accuser):
                self.reports.setdefault((peer_id, dataset_id, index), {})[reporter] = reason, accuser
                if (swarm := self.swarms.get(dataset_id)) is not None:
                    swarm.failed(reporter, index, peer_id, now, wrong=True, accuser=accuser)
            case _:
                self.jobs[event.job].apply(event, now)

    # Time.

    def expire(self, now: float) -> list[Event]:
        """Take back overdue leases and remove silent sessions and peers; call it about every second."""
        for job in self.jobs.values():
            for lease_id, reason in job.table.overdue_leases(now):
                if lease_id in job.table.leases:
                    self._take_back(lease_id, reason, now)
        for peer_id in self._quotas.bar_unused(self._min_stall_s, now):
            for key in self.sessions.of_peer.get(peer_id, ()):
                for lease_id in self.sessions.all[key].lease_ids():
                    self._take_back(lease_id, "stalled", now)
        self.sessions.expire(now)
        self._quotas.expire(now)
        for dataset_id, swarm in self.swarms.items():
            for peer_id in swarm.expire(now):
                self.sessions.remove_share(dataset_id, peer_id)
        self._avoided = {key: until for key, until in self._avoided.items() if until > now}
        return self._take_events()

    def add_origins(self, dataset_id: str, origins: Sequence[Provider], now: float) -> None:
        """The data nodes that serve a dataset now; call it within the swarm's time to live.

        After the first call a slice is leased only to workers that have it, or that can be sent to a provider of it.
        """
        self._served.add(dataset_id)
        for origin in origins:
            self.swarms[dataset_id].join(origin, None, now)

    def extend_all(self, now: float) -> None:
        """Give every lease a whole term: after an outage of the scheduler."""
        for job in self.jobs.values():
            job.table.extend_all(now)

    def done(self) -> bool:
        """Whether every job is done."""
        return all(job.done for job in self.jobs.values())

    def all_know_done(self, now: float, quiet_s: float) -> bool:
        """Whether every live session knows that all is done, and had `quiet_s` to repeat a request after a fault."""
        lease_s = max(job.spec.lease_s for job in self.jobs.values())
        return all(
            now >= (session.requested_at + quiet_s if session.knows_done else session.silent_until + lease_s)
            for session in self.sessions.all.values()
        )

    # Administration.

    def pause(self, name: str, paused: bool) -> list[Event]:
        """Grant no new leases of a job, or grant them again; live leases are used up."""
        if self._job(name).paused != paused:
            self._emit(events.JobPaused(name, paused), 0.0)
        return self._take_events()

    def readmit(self, name: str, slices: Sequence[int] | None = None) -> list[Event]:
        """Lease slices again that were set aside; None: all of them."""
        reasons = self._job(name).reasons
        for index in [i for i in (list(reasons) if slices is None else slices) if i in reasons]:
            self._emit(events.SliceReadmitted(name, index), 0.0)
        return self._take_events()

    def pardon(self, peer_id: str) -> list[Event]:
        """Drop the reports about a peer, and lift its bans; no event if there are none."""
        reported = {dataset_id for peer, dataset_id, _ in self.reports if peer == peer_id}
        for dataset_id in self.swarms:
            if dataset_id in reported or peer_id in self.banned.get(dataset_id, ()):
                self._emit(events.PeerBanned(peer_id, dataset_id, False), 0.0)
        return self._take_events()

    def _job(self, name: str, error: type[ForebayError] = UsageError) -> SchedulerJob:
        if name not in self.jobs:
            raise error(f"job {name}: this scheduler has none of that name, but {', '.join(self.jobs)}.")
        return self.jobs[name]

    # Persistence.

    def snapshot(self) -> dict[str, Any]:
        """The state that replaying every event gives, as plain values."""
        return {
            "jobs": {name: job.snapshot() for name, job in self.jobs.items()},
            "reports": [[*key, reporters] for key, reporters in self.reports.items()],
            "banned": [[dataset_id, peer_id] for dataset_id, peers in self.banned.items() for peer_id in peers],
        }

    def restore(self, saved: Mapping[str, Any], now: float = 0.0) -> None:
        """Put a snapshot into a new core of the same jobs."""
        for name, state in saved["jobs"].items():
            self.jobs[name].restore(state, now)
        for peer_id, dataset_id, index, reporters in saved["reports"]:
            for reporter, (reason, accuser) in reporters.items():
                self.apply(events.ProviderReported(peer_id, dataset_id, index, reporter, reason, accuser), now)
        for dataset_id, peer_id in saved["banned"]:
            self.apply(events.PeerBanned(peer_id, dataset_id), now)
