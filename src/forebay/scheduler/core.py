"""The scheduler as a pure state machine: which worker gets which lease of a job, and from which providers.

No clock, disk, socket or randomness. `exchange` answers a worker and returns events; the journal writes them before the
response is sent, and `apply` replays them. State that only improves choices (which workers are alive, their speed and
caches) is not persisted: workers report it again.

Cost: some 50 us an exchange with a receipt and a lease, independent of the numbers of slices and workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.errors import LeaseError, ProtocolError
from forebay.lease.messages import AcceptedUse, ExchangeRequest, ExchangeResult, LeaseGrant, LeaseStatus, RefusedUse
from forebay.network.peer import Provider
from forebay.scheduler import events
from forebay.scheduler.events import Event
from forebay.scheduler.free_ranges import SampleRange
from forebay.scheduler.leases import JobSpec, LeaseLostError, LeaseTable
from forebay.scheduler.sessions import PeerQuotas, SessionCaches, WorkerSession
from forebay.swarm.members import parse_ranges
from forebay.swarm.steering import Swarm
from forebay.units import numbered

MAX_LEASES = 16  # of a session: the lease in use and those it prefetches
_RESIGN = "the rest of this receipt was not recorded: sign the uses again, from the offsets given here"


class StaleAttemptError(LeaseError):
    """An exchange was repeated, or came after a later one of its session."""


@dataclass(frozen=True)
class ProviderFault:
    """A `ProviderReport` about a slice."""

    peer_id: str
    index: int
    reason: str
    wrong: bool = True


class SchedulerCore:
    """A job and its swarm.

    Args:
        salt: Prefix of lease ids; another one after each restart, so that no id is given twice.
        ttl_s: A peer that sent nothing for so long does not count as a provider; at least a lease's term.
        checks: Whether the caller reads what workers could not, and calls `resolve` for each of `pending_checks`. If
            not, workers are believed: a slice is set aside after `max_failures` of them.
    """

    def __init__(self, spec: JobSpec, *, salt: str = "", ttl_s: float = 30.0, checks: bool = False) -> None:
        self.spec = spec
        self.table = LeaseTable(spec)
        self.sessions = self.table.sessions
        self.swarm = Swarm(len(spec.samples), ttl_s=max(ttl_s, spec.lease_s))
        self.paused = False
        self.failures: dict[int, dict[str, str]] = {}  # slice to worker to the reason
        self.reasons: dict[int, str] = {}  # of slices set aside
        # (peer, slice) to the reporters of wrong bytes, each with the reason; they count for the reporters alone.
        self.reports: dict[tuple[str, int], dict[str, str]] = {}
        self._salt = salt
        self._checks = checks
        self._quotas = PeerQuotas(self.sessions, len(spec.samples))
        self._caches = SessionCaches(self.sessions, self.table.free, self.swarm)
        self._num_ids = 0
        self._served_at: float | None = None  # when a data node was seen last; None: not yet
        self._is_served: bool | None = None  # whether one is here; None: the caller names none
        self._others: Sequence[str] = ()  # ids of other datasets of this name
        # (worker, slice) to when the worker may have it again, after it failed on it or released it.
        self._avoided: dict[tuple[str, int], float] = {}
        self._events: list[Event] = []  # of the call in progress

    @property
    def num_left_out(self) -> int:
        """Samples that epochs ended without: those of slices set aside."""
        return self.table.epoch * self.table.num_samples - self.table.used_before

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
            LeaseError: If it names another job, or slices that the dataset does not have.
            StaleAttemptError: If it comes after a later attempt.
        """
        if request.job not in ("", self.spec.name):
            raise LeaseError(f"job {request.job}: this scheduler has the job {self.spec.name}.")
        session = self.sessions.touch((peer_id, request.session), now)
        if 0 < request.attempt <= session.attempt:
            raise StaleAttemptError(
                f"exchange: attempt {request.attempt} is not newer than the last one, {session.attempt}. Drop it."
            )
        session.attempt = max(session.attempt, request.attempt)
        session.requested_at = max(session.requested_at, now)
        cached = None
        if (text := request.cached.get(self.spec.dataset_id)) is not None:
            try:
                cached = parse_ranges(text, len(self.spec.samples))
            except ProtocolError as error:
                raise LeaseError(f"cached: {error}") from error
        self._caches.update(session, request.address, organisation, cached, now)
        accepted, refused = self._record_uses(peer_id, request, now)
        self._apply_faults(session, faults, now)
        self._return_leases(session, request, {use.lease_id for use in refused}, now)
        for lease_id, until in request.declared_until.items():
            lease = session.leases.get(lease_id)
            if lease is not None and (stop := self.table.declare(lease, until)) is not None:
                self._emit(events.LeaseCut(lease_id, stop), now)
        self._advance(now)
        grants, wait_s = self._grant(session, request.want, organisation, now)
        lease_ids = tuple(session.leases) if request.known_leases is None else request.known_leases
        active, lost = self._check_known(session, lease_ids, now)
        done = self.table.done
        session.knows_done = done
        session.silent_until = now + wait_s
        cause, reason = self._explain(session, now) if len(grants) < request.want and not done else ("", "")
        result = ExchangeResult(
            tuple(accepted), active, tuple(grants), wait_s, done, tuple(refused), tuple(lost),
            paused=self.paused and not done, report_cached=session.cached is None and not done,
            num_left_out=self.num_left_out, cause=cause, reason=reason,
        )  # fmt: skip
        return result, self._take_events()

    def _record_uses(
        self, peer_id: str, request: ExchangeRequest, now: float
    ) -> tuple[list[AcceptedUse], list[RefusedUse]]:
        """Record the uses of one receipt, those of a lease in their order, or none unless all are new.

        The signature is over all of them.

        Returns:
            The uses that are on record now, and the others refused.
        """
        stops: dict[str, int] = {}
        accepted: dict[str, AcceptedUse] = {}
        refused: list[RefusedUse] = []
        leases = self.table.leases
        for used in request.uses:
            lease_id = used.lease_id
            try:
                if self.table.check_use(peer_id, used, stops.get(lease_id)):
                    stops[lease_id] = used.stop
                else:
                    accepted[lease_id] = self._progress(lease_id)
            except LeaseLostError as error:
                refused.append(RefusedUse(lease_id, "lost", str(error), 0))
            except LeaseError as error:
                refused.append(RefusedUse(lease_id, "range", str(error), leases[lease_id].position))
        if accepted or refused:
            refused += [RefusedUse(lease_id, "range", _RESIGN, leases[lease_id].position) for lease_id in stops]
        elif stops:
            for lease in [leases[lease_id] for lease_id in stops]:
                if lease.position == lease.start:  # a worker that starts to use a slice has it
                    self.swarm.finished(peer_id, lease.slice_index, now)
            self._emit(events.UsesRecorded(peer_id, request.uses, request.signature, request.session), now)
            self._quotas.of(peer_id).add_uses(len(request.uses))
            accepted = {lease_id: self._progress(lease_id) for lease_id in stops}
        return list(accepted.values()), refused

    def _progress(self, lease_id: str) -> AcceptedUse:
        """How far a lease is used that is live or ended lately."""
        if (lease := self.table.leases.get(lease_id)) is not None:
            return AcceptedUse(lease_id, lease.position, lease.stop)
        reached = self.table.ended[lease_id].reached
        return AcceptedUse(lease_id, reached, reached)

    def _check_known(
        self, session: WorkerSession, lease_ids: Sequence[str], now: float
    ) -> tuple[dict[str, LeaseStatus], list[str]]:
        """Of the leases that a session knows: those that are live or were used to their end, and those lost."""
        active: dict[str, LeaseStatus] = {}
        lost: list[str] = []
        for lease_id in lease_ids:
            ended = self.table.ended.get(lease_id)
            if (lease := session.leases.get(lease_id)) is not None:
                active[lease_id] = LeaseStatus(lease.stop, round(session.deadline - now, 3))
            elif ended is not None and ended.is_complete and ended.worker == session.worker:
                active[lease_id] = LeaseStatus(ended.reached, 0.0)
            else:
                lost.append(lease_id)
        return active, lost

    def _apply_faults(self, session: WorkerSession, faults: Sequence[ProviderFault], now: float) -> None:
        worker = session.worker
        for fault in faults:
            key = (fault.peer_id, fault.index)
            if self.swarm.get(fault.peer_id) is None:
                continue  # no worker was sent to an unknown peer; an invented name costs nothing
            if not fault.wrong:
                self.swarm.failed(worker, fault.index, fault.peer_id, now)
            elif worker not in self.reports.get(key, ()):
                self._emit(events.ProviderReported(*key, worker, fault.reason), now)

    def _return_leases(self, session: WorkerSession, request: ExchangeRequest, refused: set[str], now: float) -> None:
        """Take back failed and released leases, and those of which the session does not know.

        Leases with a use in `refused` stay until that use is sent again: its samples must not be leased to others.
        """
        worker = session.worker
        for failed in request.failed:
            if failed.lease_id not in session.leases or failed.lease_id in refused:
                continue
            index = self._take_back(failed.lease_id, "failed", now)
            self._emit(events.SliceFailed(index, worker, failed.reason), now)
            self._avoided[worker, index] = now + self.spec.lease_s
            if not self._checks and self._is_doubtful(index):
                self._set_aside(index, failed.reason, now)
                self._advance(now)
        released = [
            self._take_back(lease_id, "released", now)
            for lease_id in request.release
            if lease_id in session.leases and lease_id not in refused
        ]
        if session.leases or request.want:  # else it ends: when it starts again, it may go on where it was
            self._avoided |= {(worker, i): now + self.spec.lease_s / 4 for i in released}  # other workers go first
        if request.known_leases is not None:
            for lease_id in [i for i in session.leases if i not in request.known_leases]:
                self._take_back(lease_id, "unheld", now)

    def _take_back(self, lease_id: str, reason: str, now: float) -> int:
        """End a live lease; its slice."""
        lease = self.table.leases[lease_id]
        index = lease.slice_index
        self.swarm.end(lease.worker, index)
        self._emit(events.LeaseReturned(lease_id, reason), now)
        if index in self.reasons and lease.remaining:
            self._emit(events.SliceSetAside(lease.epoch, index, lease.position, lease.stop, self.reasons[index]), now)
        return index

    # Granting leases.

    def _grant(
        self, session: WorkerSession, num_wanted: int, organisation: str, now: float
    ) -> tuple[list[LeaseGrant], float]:
        """Up to so many leases, and how long to wait for more, seconds."""
        grants: list[LeaseGrant] = []
        quota = self._quotas.of(session.worker)
        max_grants = MAX_LEASES - len(session.leases) if now >= quota.barred_until else 0
        of_peer = None  # computed only where there is something to lease: it counts all sessions of the peer
        for _ in range(min(num_wanted, max_grants)):
            samples = self._choose(session, now)
            if samples is None:
                break
            if of_peer is None:
                of_peer = self._quotas.num_free(session.worker, organisation)
            if len(grants) >= of_peer:
                break
            lease_id = f"{self._salt}{self._num_ids:x}"
            self._num_ids += 1
            self._emit(events.LeaseGranted(lease_id, *session.key, self.table.epoch, *samples), now)
            session.recent.append(samples[0])
            if quota.unused_since is None:
                quota.unused_since = now
            lease, (index, start, stop) = self.table.leases[lease_id], samples
            providers = () if session.has_cached(index) else tuple(self.swarm.providers(index, lease.worker, now))
            grants.append(LeaseGrant(
                lease_id, self.spec.name, lease.epoch, index, self.spec.dataset_id, start, stop,
                int(self.table.samples[index]), providers, round(self.table.lease_s, 3),
            ))  # fmt: skip
        if len(grants) == num_wanted:
            return grants, 0.0
        return grants, 1.0 if self.paused or self.table.done else round(self.table.wait(session, now), 3)

    def _explain(self, session: WorkerSession, now: float) -> tuple[str, str]:
        """Why a session gets no more leases now: `ExchangeResult.cause` and `reason`."""
        table = self.table
        if self.paused:
            return "paused", "the job is paused (`forebay job resume`)"
        if (barred_s := self._quotas.of(session.worker).barred_until - now) > 0:
            return "barred", f"this node did not use its leases, and gets none for {barred_s:.0f} s"
        if table.used + table.leased + table.num_aside == table.num_samples:
            return (
                "leased",
                f"other workers have the rest ({numbered(len(table.leases) - len(session.leases), 'lease')})",
            )
        if text := self.unserved(now):
            return "unserved", text
        return "avoided", "what is left was tried here in vain; it is tried again soon"

    def unserved(self, now: float) -> str:
        """That no data node serves the dataset, as text; "" if one does, or none is needed."""
        if self._is_served is not False or self.table.done:
            return ""
        seen = "none was seen since the scheduler started"
        if self._served_at is not None:
            seen = f"last seen {now - self._served_at:.0f} s ago"
        others = f" of the id {self.spec.dataset_id}, only of {', '.join(self._others)}" if self._others else ""
        return f"no data node serves {self.spec.name!r}{others}; {seen}"

    def _choose(self, session: WorkerSession, now: float) -> SampleRange | None:
        if self.paused:
            return None
        worker = session.worker
        is_offered = self.swarm.offers(worker, now) if self._is_served is not None else None

        def is_avoided(index: int) -> bool:
            is_available = is_offered is None or session.has_cached(index) or is_offered(index)
            return not is_available or self._avoided.get((worker, index), now) > now

        # Without an origin only slices with copies are offered.
        return self.table.choose(session, is_avoided, now, self.swarm.copies() > 0 if is_offered is not None else None)

    # Checks of what workers report.

    def _is_doubtful(self, index: int) -> bool:
        """Whether so many workers could not read a slice that it should be set aside, and is not."""
        return len(self.failures.get(index, ())) >= self.spec.max_failures and index not in self.reasons

    def pending_checks(self) -> list[int]:
        """Slices that several workers could not read."""
        return list(filter(self._is_doubtful, self.failures))

    def resolve(self, index: int, is_good: bool, now: float) -> list[Event]:
        """Apply the result of a check of a slice: whether right bytes were read from any origin."""
        if self._is_doubtful(index):
            failures = self.failures[index]
            if is_good:
                for worker in failures:  # each check costs the scheduler a slice: workers cannot ask for many
                    self.bar(worker, now)
                self._emit(events.SliceCleared(index), now)
            else:
                self._set_aside(index, next(iter(failures.values())), now)
                self._advance(now)
        return self._take_events()

    def _set_aside(self, index: int, reason: str, now: float) -> None:
        """Set aside all free ranges of a slice; in a new epoch, record again those that are set aside."""
        table = self.table
        for start, stop in list(table.aside.get(index) or table.free.of_slice(index)):
            self._emit(events.SliceSetAside(table.epoch, index, start, stop, reason), now, is_final=False)

    def bar(self, peer_id: str, now: float) -> None:
        """Grant a peer no leases for a while: it sent false messages."""
        self._quotas.of(peer_id).bar(self.spec.stall_s, now)

    # Events.

    def _emit(self, event: Event, now: float, is_final: bool = True) -> None:
        """Apply an event and return it from the call in progress; `is_final`: with what follows from it."""
        self.apply(event, now)
        self._events.append(event)
        if is_final and isinstance(event, events.UsesRecorded | events.SliceSetAside):
            self._advance(now)

    def _take_events(self) -> list[Event]:
        taken = self._events
        self._events = []
        return taken

    def _advance(self, now: float) -> None:
        if self.table.is_covered():
            self._emit(events.EpochEnded(self.table.epoch, self.table.used), now)
            for index, reason in [] if self.table.done else list(self.reasons.items()):
                self._set_aside(index, reason, now)

    def advance(self, now: float) -> list[Event]:
        """End the epoch if it is due, after a replay."""
        self._advance(now)
        return self._take_events()

    def apply(self, event: Event, now: float = 0.0) -> None:
        """Change the state by an event, a new one or a replayed one. LeaseError if it contradicts the state."""
        table = self.table
        match event:
            case events.LeaseGranted(lease_id, worker, session, _, index, start, stop):
                table.grant(lease_id, (worker, session), (index, start, stop), now)
            case events.UsesRecorded(worker, uses, _):
                for used in uses:
                    self.failures.pop(used.slice, None)
                table.record(worker, uses, now)
            case events.LeaseCut(lease_id, stop):
                table.cut(lease_id, stop, now)
            case events.LeaseReturned(lease_id, _):
                table.release(lease_id)
            case events.SliceFailed(index, worker, reason):
                self.failures.setdefault(index, {})[worker] = reason
            case events.SliceSetAside(_, index, _, _, reason):
                table.set_aside(index)
                self.reasons[index] = reason
            case events.SliceCleared(index):
                self.failures.pop(index, None)
            case events.SliceReadmitted(index):
                table.readmit(index)
                self.failures.pop(index, None)
                self.reasons.pop(index, None)
            case events.EpochEnded(epoch):
                if not table.is_covered():
                    raise LeaseError(f"epoch {epoch} ends before its samples are used")
                table.end_epoch()
            case events.JobPaused(paused):
                self.paused = paused
            case events.ProviderReported(peer_id, index, reporter, reason):
                self.reports.setdefault((peer_id, index), {})[reporter] = reason
                self.swarm.failed(reporter, index, peer_id, now, wrong=True)

    # Time.

    def expire(self, now: float) -> list[Event]:
        """Take back overdue leases and remove silent sessions and peers; call it about every second."""
        for lease_id, reason in self.table.overdue_leases(now):
            if lease_id in self.table.leases:
                self._take_back(lease_id, reason, now)
        for peer_id in self._quotas.bar_unused(self.spec.stall_s, now):
            for session in self.sessions.of_peer.get(peer_id, ()):
                for lease_id in list(session.leases):
                    self._take_back(lease_id, "stalled", now)
        self._caches.expire(now)
        self._quotas.expire(now)
        self._avoided = {key: until for key, until in self._avoided.items() if until > now}
        return self._take_events()

    def add_origins(self, origins: Sequence[Provider], now: float, others: Sequence[str] = ()) -> None:
        """The data nodes that serve the dataset now; call it within the swarm's time to live.

        `others`: ids of other datasets of its name that are served. After the first call a slice is leased only to
        workers that have it, or that can be sent to a provider of it.
        """
        self._is_served, self._others = bool(origins), others
        if origins:
            self._served_at = now
        else:
            self.swarm.leave_origins()
        for origin in origins:
            self.swarm.join(origin, None, now)

    def all_know_done(self, now: float, quiet_s: float) -> bool:
        """Whether every live session knows that all is done, and had `quiet_s` to repeat a request after a fault."""
        return all(
            now >= (s.requested_at + quiet_s if s.knows_done else s.silent_until + self.spec.lease_s)
            for s in self.sessions.all.values()
        )

    # Administration.

    def pause(self, paused: bool) -> list[Event]:
        """Grant no new leases, or grant them again; live leases are used up."""
        if self.paused != paused:
            self._emit(events.JobPaused(paused), 0.0)
        return self._take_events()

    def readmit(self, slices: Sequence[int] | None = None) -> list[Event]:
        """Lease slices again that were set aside; None: all of them."""
        for index in [i for i in (list(self.reasons) if slices is None else slices) if i in self.reasons]:
            self._emit(events.SliceReadmitted(index), 0.0)
        return self._take_events()

    # Persistence.

    def snapshot(self) -> dict[str, Any]:
        """The state that replaying every event gives, as plain values."""
        return {
            "table": self.table.snapshot(),
            "paused": self.paused,
            "failures": list(self.failures.items()),
            "reasons": list(self.reasons.items()),
            "reports": [[*key, reporters] for key, reporters in self.reports.items()],
        }

    def restore(self, saved: Mapping[str, Any], now: float = 0.0) -> None:
        """Put a snapshot into a new core of the same job."""
        self.table.restore(saved["table"], now)
        self.paused = saved["paused"]
        self.failures = {index: dict(workers) for index, workers in saved["failures"]}
        self.reasons = dict(saved["reasons"])
        for peer_id, index, reporters in saved["reports"]:
            for reporter, reason in reporters.items():
                self.apply(events.ProviderReported(peer_id, index, reporter, reason), now)
