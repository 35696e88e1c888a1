"""The simulation of a scheduler and its workers, with killed machines, liars, restarts and broken connections.

The scheduler is production's `SchedulerCore` with a journal, which a restart replays. `_World` carries requests and
replies, and keeps the record that the result is checked by.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from forebay.errors import LeaseError
from forebay.lease.messages import ExchangeRequest, ExchangeResult, LeaseGrant
from forebay.lease.scheduler_client import ANSWER_S
from forebay.scheduler.core import ProviderFault, SchedulerCore
from forebay.scheduler.events import Event, LeaseCut, LeaseReturned, from_row, to_row
from forebay.scheduler.leases import JobSpec
from forebay.simulate import scenario
from forebay.simulate.network import Clock, SimNetwork
from forebay.simulate.scenario import Scenario, SimulationResult, UsedRange
from forebay.simulate.worker import Worker

_JOB = "job"
_DATASET = "dataset"
_ORIGINS_S = 5.0
_OUTAGE_S = 10.0
_BREAKS = ("closed", "silent", "late")
"""How an exchange fails: its connection closes before the reply, no reply comes, or the request comes late."""
_MAX_TIMES = 20.0
"""A simulation that takes so many times its bound is stopped."""


def simulate(settings: Scenario, on_progress: Callable[[int], object] = lambda num: None) -> SimulationResult:
    """Simulate until every sample is acknowledged, or the time limit is reached.

    Equal scenarios give equal results. `on_progress` is called with numbers of acknowledged samples.
    """
    calm_s = max(
        scenario.lease_bound(settings, scenario.draw(settings.model_copy(update={"churn": 0.0}), 1.0).machines).values()
    )
    faults = scenario.draw(settings, calm_s)
    bound = scenario.lease_bound(settings, faults.machines)
    world = _World(settings, faults, on_progress)
    bound_s = max(bound.values())
    until = _MAX_TIMES * (bound_s if bound_s < float("inf") else calm_s) + 1000.0
    ended = world.clock.run(lambda: world.ended_at is not None, until)
    world.close()
    counts = {**world.counts(), "events": world.clock.num_events}
    time_s = world.clock.now if world.ended_at is None else world.ended_at
    usage = world.record.check()
    return SimulationResult(
        settings, usage, time_s, bound, world.net.links.sent[world.net.origin.link], counts, world.fault(ended)
    )


@dataclass(eq=False)
class _Scheduler:
    """A core, and the journal that restores it after a kill."""

    spec: JobSpec
    net: SimNetwork

    def __post_init__(self) -> None:
        self._rows: list[list[Any]] = []
        self.counts: Counter[str] = Counter()
        self.starts = 0
        self.is_up = False
        self._replies: dict[tuple[str, str], tuple[int, ExchangeResult]] = {}
        self.start()

    def start(self) -> None:
        """Start, or restart from the journal, unless it runs."""
        if self.is_up:
            return
        self.core = self._replayed()
        self._replies.clear()
        self.starts += 1
        self.is_up = True
        self.add_origins()

    def _replayed(self) -> SchedulerCore:
        core = SchedulerCore(self.spec, salt=f"{self.starts}-")
        for row in json.loads(json.dumps(self._rows)):
            core.apply(from_row(row), self.net.clock.now)
        core.table.extend_all(self.net.clock.now)  # the outage was not the workers' fault
        return core

    def add_origins(self) -> None:
        """Add the data nodes, as discovery does."""
        if self.is_up:
            self.core.add_origins([self.net.origin.provider], self.net.clock.now)

    def expire(self) -> None:
        """Take back what is overdue, as the service does every second."""
        if self.is_up:
            self._keep(self.core.expire(self.net.clock.now))

    def exchange(self, peer_id: str, ask: ExchangeRequest) -> ExchangeResult:
        """Answer a worker after the events are stored. A repeated attempt gets the first reply again.

        LeaseError: As SchedulerCore.
        """
        if (reply := self._repeat(peer_id, ask)) is None:
            faults = [ProviderFault(r.peer_id, int(r.sha256, 16), r.reason, r.wrong) for r in ask.reports]
            reply, events = self.core.exchange(peer_id, ask, self.net.clock.now, faults=faults)
            self._keep(events)
            self._replies[peer_id, ask.session] = ask.attempt, reply
        return reply

    def _repeat(self, peer_id: str, ask: ExchangeRequest) -> ExchangeResult | None:
        attempt, reply = self._replies.get((peer_id, ask.session), (None, None))
        return reply if attempt == ask.attempt else None

    def _keep(self, events: list[Event]) -> None:
        for event in events:
            self.counts["cuts"] += isinstance(event, LeaseCut)
            if isinstance(event, LeaseReturned):
                self.counts[f"returned {event.reason.partition(' ')[0]}"] += 1
            self._rows.append(to_row(event))

    def fault(self) -> str:
        """What is wrong with the core or its journal; "" for nothing."""
        if not self.core.table.done:
            return "every sample is acknowledged, but for the core the job is not done."
        if not self._replayed().table.done:
            return "the core restored from the journal is not done."
        return ""


@dataclass(eq=False)
class _World:
    """The machines, the scheduler, the connections between them, and the record."""

    settings: Scenario
    faults: scenario.Faults
    on_progress: Callable[[int], object]

    def __post_init__(self) -> None:
        settings, faults = self.settings, self.faults
        self.clock = Clock()
        self.net = SimNetwork(settings, self.clock, faults)
        samples = np.full(settings.slices, settings.samples, np.int64)
        self.record = scenario.UsageRecord(samples, settings.epochs)
        self.workers: dict[str, Worker] = {}
        self.ended_at: float | None = None
        self.num_remaining = settings.num_samples
        self._grants: dict[str, tuple[LeaseGrant, int]] = {}  # by lease id: the grant, and the offset on record
        self._closed: list[Worker] = []
        self._chance = self.net.chance("answers")
        spec = JobSpec(
            _JOB, dataset_id=_DATASET, samples=samples, seed=settings.seed, epochs=settings.epochs,
            lease_s=settings.lease_s,
        )  # fmt: skip
        self.scheduler = _Scheduler(spec, self.net)
        self.every(1.0, self.scheduler.expire)
        self.every(_ORIGINS_S, self.scheduler.add_origins)
        for machine in faults.machines:
            self._plan(machine)
        for killed_at in faults.restarts:
            self.clock.call_at(killed_at, partial(setattr, self.scheduler, "is_up", False))
            self.clock.call_at(killed_at + _OUTAGE_S, self.scheduler.start)

    def every(self, seconds: float, act: Callable[[], object]) -> None:
        """Call `act` at an interval."""

        def again() -> None:
            act()
            self.clock.call_later(seconds, again)

        self.clock.call_later(seconds, again)

    def _plan(self, machine: scenario.Machine) -> None:
        def join() -> None:
            node = self.net.join(machine)
            self.workers[node.provider.peer_id] = Worker(self.net, node, self.record, _JOB, _DATASET, self._send)

        def die() -> None:
            worker = self.workers.pop(f"worker-{machine.index}")
            worker.die()
            self.net.kill(worker.node)
            self._closed.append(worker)

        self.clock.call_at(machine.joins_at, join)
        if machine.dies_at < float("inf"):
            self.clock.call_at(machine.dies_at, die)

    # Requests of workers.

    def _send(self, worker: Worker, ask: ExchangeRequest, is_repeat: bool = False) -> None:
        """Carry one attempt and its reply over a connection that may break: see `_BREAKS`."""
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

    @property
    def _all_workers(self) -> list[Worker]:
        return [*self._closed, *self.workers.values()]

    def _answer(self, worker: Worker, ask: ExchangeRequest, is_awaited: bool = True) -> ExchangeResult | None:
        if not self.scheduler.is_up:
            return None
        try:
            reply = self.scheduler.exchange(worker.node.provider.peer_id, ask)
        except LeaseError as error:
            if is_awaited:
                worker.refused(ask, str(error))
            return None
        for grant in reply.leases:
            self._grants.setdefault(grant.lease_id, (grant, grant.start))
        for use in reply.uses:
            grant, offset = self._grants[use.lease_id]
            if use.offset <= offset:
                continue
            self._grants[use.lease_id] = (grant, use.offset)
            self.record.acknowledged.append(
                UsedRange(grant.epoch, grant.slice, offset, use.offset, self.clock.now, worker.machine.index)
            )
            self.num_remaining -= use.offset - offset
            self.on_progress(use.offset - offset)
        if self.num_remaining <= 0 and self.ended_at is None:
            self.ended_at = self.clock.now
        return reply

    # Results.

    def close(self) -> None:
        """Record as wasted what was used under a lost lease, or by a killed worker, and not acknowledged."""
        for worker in self._all_workers:
            for lease in worker.all_leases:
                grant = lease.grant
                offset = self._grants[grant.lease_id][1]
                is_lost = lease.ended or grant.lease_id not in self.scheduler.core.table.leases
                if lease.used > offset and (is_lost or not worker.alive):
                    self.record.wasted.append(
                        UsedRange(grant.epoch, grant.slice, offset, lease.used, self.clock.now, worker.machine.index)
                    )

    def fault(self, ended: bool) -> str:
        """What failed apart from samples; "" for nothing."""
        workers = self._all_workers
        if errors := [worker.error for worker in workers if worker.error]:
            return f"{len(errors)} of {len(workers)} workers ended: {errors[0]}"
        if not ended:
            return f"after {self.clock.now:,.0f} virtual seconds samples are left that no worker uses."
        return self.scheduler.fault()

    def counts(self) -> dict[str, float]:
        """Counts of events, by name."""
        workers = self._all_workers
        lost = sum(use.stop - use.start for use in self.record.wasted if f"worker-{use.worker}" in self.workers)
        lived_s = sum(min(self.clock.now, w.machine.dies_at) - w.machine.joins_at for w in workers)
        return {
            "wait_share": sum(w.waited_s for w in workers) / max(1e-9, lived_s),
            "leases_lost": sum(worker.state.num_lost for worker in workers),
            "wasted_by_living": lost,
            "longest_silence_s": max(worker.silence_s for worker in workers),
            "reported": len(self.scheduler.core.swarm.penalties.reported(self.clock.now)),
            **self.net.counts,
            **self.scheduler.counts,
        }
