"""Strangers' machines lease slices of one scheduler: the scheduler's own `Desk`, under churn, lies and restarts.

Here the scheduler is the `Desk` and its journal, which a restart replays. The world carries requests and replies over
connections that break, and keeps the record by which scheduler and workers are judged.
"""

import gc
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from forebay.errors import LeaseError
from forebay.scheduler.checks import ProviderFault
from forebay.scheduler.core import SchedulerCore
from forebay.scheduler.events import Event, LeaseCut, LeaseReturned, from_row, to_row
from forebay.scheduler.jobs import JobSource, JobSpec
from forebay.scheduler.messages import ExchangeRequest, ExchangeResult, LeaseGrant
from forebay.simulate.bound import lease_bound
from forebay.simulate.faults import Faults, Machine, draw
from forebay.simulate.links import Clock
from forebay.simulate.nodes import SimNetwork
from forebay.simulate.result import SimulationResult
from forebay.simulate.settings import SimulationSettings
from forebay.simulate.usage_record import UsageRecord, UsedRange
from forebay.simulate.worker import Worker
from forebay.worker.scheduler_client import ANSWER_S

_JOB = "job"
_DATASET = "dataset"
_ORIGINS_S = 5.0
_BREAKS = ("closed", "silent", "late")
"""How an exchange fails: its connection closes before the reply, no reply comes, or the request comes late."""
_MAX_TIMES = 20.0
"""A run that takes so many times its bound hangs."""


def simulate(
    settings: SimulationSettings, on_progress: Callable[[float], object] = lambda done: None
) -> SimulationResult:
    """Runs a world until every sample is acknowledged, or it is clear that this will never be.

    Equal settings give equal results.

    Args:
        on_progress: Told now and then the part of the work that is done, 0 to 1.
    """
    collects = gc.isenabled()
    gc.disable()  # It would look at all that is kept, again and again: a quarter of the time, for next to nothing.
    try:
        return _run(settings, on_progress)
    finally:
        if collects:
            gc.enable()


def _run(settings: SimulationSettings, on_progress: Callable[[float], object]) -> SimulationResult:
    calm_s = lease_bound(settings, draw(replace(settings, churn=0.0), 1.0).machines).seconds
    faults = draw(settings, calm_s)
    bound = lease_bound(settings, faults.machines)
    world = _World(settings, faults)
    world.every(calm_s / 400, lambda: on_progress(world.share_done))
    until = _MAX_TIMES * (bound.seconds if bound.seconds < float("inf") else calm_s) + 1000.0
    ended = world.clock.run(lambda: world.ended_at is not None, until)
    world.close()
    counts = {**world.counts(), "events": world.clock.num_events}
    time_s = world.clock.now if world.ended_at is None else world.ended_at
    verdict = world.book.check(settings.deadline_s)
    return SimulationResult(settings, verdict, time_s, bound, world.net.origin_bytes(), counts, world.fault(ended))


class _Scheduler:
    """A desk, and the journal from which a killed one goes on."""

    def __init__(self, spec: JobSpec, net: SimNetwork) -> None:
        self._spec, self._net = spec, net
        self._rows: list[list[Any]] = []
        self.counts: Counter[str] = Counter()
        self.starts = 0
        self.is_up = False
        self._replies: dict[tuple[str, str], tuple[int, ExchangeResult]] = {}
        self.start()

    def start(self) -> None:
        """Begins, or goes on from the journal."""
        self.core = self._replayed()
        self._replies.clear()
        self.starts += 1
        self.is_up = True
        self.meet_origins()

    def _replayed(self) -> SchedulerCore:
        core = SchedulerCore([self._spec], salt=f"{self.starts}-")
        for row in json.loads(json.dumps(self._rows)):
            core.apply(from_row(row), self._net.clock.now)
        core.extend_all(self._net.clock.now)  # The outage was not the workers' doing.
        return core

    def kill(self) -> None:
        """What it had in memory is gone."""
        self.is_up = False

    def meet_origins(self) -> None:
        """Names the data nodes, as discovery does."""
        if self.is_up:
            self.core.add_origins(_DATASET, [node.holder for node in self._net.origins], self._net.clock.now)

    def expire(self) -> None:
        """Looks for what is late, as the service does every second."""
        if self.is_up:
            self._keep(self.core.expire(self._net.clock.now))

    def exchange(self, peer_id: str, ask: ExchangeRequest) -> ExchangeResult:
        """Answers a worker; the events are on record first. An attempt that comes again gets the first reply again.

        Raises:
            LeaseError: As the desk.
        """
        reply = self._repeat(peer_id, ask)
        if reply is None:
            bad = [
                ProviderFault(one.peer_id, _DATASET, int(one.sha256, 16), one.reason, one.wrong) for one in ask.reports
            ]
            reply, events = self.core.exchange(peer_id, ask, self._net.clock.now, faults=bad)
            self._keep(events)
            self._replies[peer_id, ask.session] = ask.attempt, reply
        return reply

    def _repeat(self, peer_id: str, ask: ExchangeRequest) -> ExchangeResult | None:
        """The first reply to an attempt that was answered last."""
        attempt, reply = self._replies.get((peer_id, ask.session), (None, None))
        return reply if attempt == ask.attempt else None

    def _keep(self, events: list[Event]) -> None:
        for event in events:
            self.counts["cuts"] += isinstance(event, LeaseCut)
            if isinstance(event, LeaseReturned):
                self.counts[f"returned {event.reason.partition(' ')[0]}"] += 1
            self._rows.append(to_row(event))

    def fault(self) -> str:
        """What the desk or its journal believes that is not so; "" for nothing."""
        if not self.core.done():
            return "every sample is acknowledged, and the desk does not say that the job is done."
        if not self._replayed().done():
            return "the journal does not lead to the end that the desk came to."
        return ""


class _World:
    """The machines, the scheduler, what goes between them, and the record."""

    def __init__(self, settings: SimulationSettings, faults: Faults) -> None:
        self.settings = settings
        self.clock = Clock()
        self.net = SimNetwork(settings, self.clock, faults)
        samples = np.full(settings.slices, settings.samples, np.int64)
        self.book = UsageRecord(samples, settings.epochs)
        self.workers: dict[str, Worker] = {}
        self.ended_at: float | None = None
        self._left = int(samples.sum()) * settings.epochs
        self._all = self._left
        self._grants: dict[str, tuple[LeaseGrant, int]] = {}  # By lease id: the grant, and the offset on record.
        self._closed: list[Worker] = []
        self._chance = self.net.chance("answers")
        spec = JobSpec(
            _JOB, (JobSource(_DATASET, _DATASET, samples),), seed=settings.seed, epochs=settings.epochs,
            lease_s=settings.lease_s, stall_s=settings.stall_s, steal_s=settings.steal_s,
        )  # fmt: skip
        self.scheduler = _Scheduler(spec, self.net)
        self.every(1.0, self.scheduler.expire)
        self.every(_ORIGINS_S, self.scheduler.meet_origins)
        for machine in faults.machines:
            self._plan(machine)
        for at in faults.restarts:
            self.clock.call_at(at, self.scheduler.kill)
            self.clock.call_at(at + settings.outage_s, self._restart)

    def every(self, seconds: float, act: Callable[[], object]) -> None:
        """Does something again and again."""

        def again() -> None:
            act()
            self.clock.call_later(seconds, again)

        self.clock.call_later(seconds, again)

    def _restart(self) -> None:
        if not self.scheduler.is_up:
            self.scheduler.start()

    def _plan(self, machine: Machine) -> None:
        def join() -> None:
            node = self.net.join(machine)
            self.workers[node.holder.peer_id] = Worker(self.net, node, self.book, _JOB, _DATASET, self._send)

        def die() -> None:
            worker = self.workers.pop(f"worker-{machine.index}")
            worker.die()
            self.net.kill(worker.node)
            self._closed.append(worker)

        self.clock.call_at(machine.joins_at, join)
        if machine.dies_at < float("inf"):
            self.clock.call_at(machine.dies_at, die)

    # What goes between workers and the scheduler.

    def _send(self, worker: Worker, ask: ExchangeRequest, is_repeat: bool = False) -> None:
        """Carries one attempt and its reply over a connection that may break: see `_BREAKS`."""
        latency_s = worker.machine.latency_s
        breaks = self._chance.choice(_BREAKS) if self._chance.random() < self.settings.lost else ""

        def later(act: Callable[..., object], *args: object, after_s: float = latency_s) -> None:
            self.clock.call_later(after_s, lambda: act(*args))

        def arrive() -> None:
            if self.net.is_cut(worker.node):
                later(worker.unanswered, ask, after_s=ANSWER_S)
            elif not self.scheduler.is_up:
                later(worker.unanswered, ask)
            elif breaks == "late" or (reply := self._answer(worker, ask)) is None:
                later(worker.unanswered, ask, after_s=ANSWER_S)
                if breaks == "late":
                    later(self._answer, worker, ask, False, after_s=2 * ANSWER_S)
            elif breaks == "silent":
                later(worker.unanswered, ask, after_s=ANSWER_S)
            elif breaks == "closed":
                # The transport sends the same bytes again on another connection, once.
                later(worker.unanswered, ask) if is_repeat else later(self._send, worker, ask, True)
            else:
                later(worker.receive, ask, reply)

        self.clock.call_later(latency_s, arrive)

    def _answer(self, worker: Worker, ask: ExchangeRequest, is_awaited: bool = True) -> ExchangeResult | None:
        """The scheduler's reply; None for a refusal."""
        if not self.scheduler.is_up:
            return None
        try:
            reply = self.scheduler.exchange(worker.node.holder.peer_id, ask)
        except LeaseError as error:
            if is_awaited:
                worker.refused(ask, str(error))
            return None
        self._note(worker, reply)
        return reply

    def _note(self, worker: Worker, reply: ExchangeResult) -> None:
        """Puts on record what the scheduler took, from its answer as it left."""
        for grant in reply.leases:
            self._grants.setdefault(grant.lease_id, (grant, grant.start))
        for use in reply.uses:
            grant, offset = self._grants[use.lease_id]
            if use.offset <= offset:
                continue
            self._grants[use.lease_id] = (grant, use.offset)
            self.book.acknowledged.append(
                UsedRange(grant.epoch, grant.slice, offset, use.offset, self.clock.now, worker.machine.index)
            )
            self._left -= use.offset - offset
        if self._left <= 0 and self.ended_at is None:
            self.ended_at = self.clock.now

    # What is told.

    @property
    def share_done(self) -> float:
        return 1 - max(0, self._left) / self._all

    def close(self) -> None:
        """Counts as wasted what was used under a lost lease, whether its worker knows or not, or by a killed worker."""
        for worker in [*self._closed, *self.workers.values()]:
            for lease in worker.all_leases:
                grant = lease.grant
                offset = self._grants[grant.lease_id][1]
                found = self.scheduler.core.find(grant.lease_id)
                is_lost = lease.ended or found is None or grant.lease_id not in found[2].leases
                if lease.used > offset and (is_lost or not worker.alive):
                    self.book.wasted.append(
                        UsedRange(grant.epoch, grant.slice, offset, lease.used, self.clock.now, worker.machine.index)
                    )

    def fault(self, ended: bool) -> str:
        """What went wrong beside the samples; "" for nothing."""
        workers = [*self._closed, *self.workers.values()]
        if errors := [worker.error for worker in workers if worker.error]:
            return f"{len(errors)} of {len(workers)} workers ended: {errors[0]}"
        if not ended:
            return f"after {self.clock.now:,.0f} virtual seconds samples are left: nobody can or will use them."
        return self.scheduler.fault()

    def counts(self) -> dict[str, float]:
        """What happened, by name."""
        workers = [*self._closed, *self.workers.values()]
        lost = sum(use.stop - use.start for use in self.book.wasted if f"worker-{use.worker}" in self.workers)
        facts = self.scheduler.core.swarms[_DATASET].status()
        return {
            "killed": len(self._closed),
            "joined_later": sum(worker.machine.joins_at > 0 for worker in workers),
            "wait_share": sum(w.state.counts.waited_s for w in workers) / max(1e-9, sum(w.lived_s() for w in workers)),
            "exchanges": self.net.counts["exchanges"],
            "steals": self.scheduler.counts["cuts"],
            "expired": self.scheduler.counts["returned expired"],
            "leases_lost": sum(worker.state.counts.lost for worker in workers),
            "wasted_by_living": lost,
            "longest_silence_s": max(worker.silence_s for worker in workers),
            "fetches": self.net.counts["fetches"],
            "wrong_bytes": self.net.counts["wrong"],
            "stalls": self.net.counts["silent"],
            "refused": self.net.counts["refused"],
            "failed": self.net.counts["failed"],
            "bans": len(facts["banned"]),
            "restarts": self.scheduler.starts - 1,
        }
