"""One run on machines that come and go: fenced generations of ranks, each with its part of every global batch.

Who is in the run, and where the next generation begins, is decided by `schedule.membership`, and each rank's part in it
by `worker.membership_state`; a rank's samples are `order.run`'s; slices go round by the `Swarm`. A step is as slow as
its slowest rank. The record is the lineage of the weights that the run ends with.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.coordinator.messages import ANSWER_S, RankGeneration, Rules
from forebay.errors import NetworkError
from forebay.network.client import RemoteError
from forebay.order.plan import Order
from forebay.order.run import BatchSizes, Run
from forebay.simulate.network import Clock, SimNetwork
from forebay.simulate.scenario import REPLACE_S, Faults, Machine, Scenario, SimulationResult, draw, filling, work_done_s
from forebay.worker.membership_state import Request
from support.elastic_coordinator import Coordinator
from support.elastic_ranks import Answer, Group, Rank, Weights, check
from support.swarm_readers import Reader, Tracker

_MAX_TIMES = 20.0


def order_bound(settings: Scenario, machines: Sequence[Machine]) -> dict[str, float]:
    """The least time for all steps, where everybody alive has a part of each and parts differ by one sample at most."""
    size, origin_up = settings.slice_bytes, settings.origin_up
    batch = settings.workers * settings.batch
    first = [item for item in machines if item.joins_at == 0.0]
    begins_at = max(filling(settings, first)[-1], *(4 * item.latency_s + size / item.down for item in first))
    moments = sorted(
        {begins_at, *(index for item in machines for index in (item.joins_at, item.dies_at) if index < float("inf"))}
    )
    supply = [(0.0, 0.0)]
    for moment in moments:
        speeds = [item.speed for item in machines if item.joins_at <= moment < item.dies_at]
        if speeds and moment >= begins_at:
            supply.append((moment, batch / _step_s(batch, speeds)))
    work = float(settings.slices * settings.samples * settings.epochs)
    sending_s = settings.slices * size / origin_up + 2 * settings.latency_s
    return {"slowest rank": work_done_s(work, supply), "origin": sending_s}


def _step_s(batch: int, speeds: Sequence[float]) -> float:
    """A step of all, if the larger parts are those of the fastest."""
    min_value, more = divmod(batch, len(speeds))
    ordered = sorted(speeds, reverse=True)
    return max(min_value / ordered[-1], (min_value + 1) / ordered[more - 1] if more else 0.0)


def elastic(settings: Scenario) -> SimulationResult:
    """Runs until all who live have done the last step, or it is clear that they never will."""
    calm = order_bound(settings, draw(settings.model_copy(update={"churn": 0.0}), 1.0).machines)
    faults = draw(settings, max(calm.values()))
    bound = order_bound(settings, faults.machines)
    world = _World(settings, faults)
    until = _MAX_TIMES * (max(bound.values()) if max(bound.values()) < float("inf") else max(calm.values())) + 1000.0
    ended = world.clock.run(world.is_over, until)
    end = max(world.ends or [rank.learned for rank in world.ranks.values()], key=lambda one: one.step)
    steps = world.run.num_steps or 0
    epoch_of = world.run.progress_table(0, steps)[0]
    verdict, torn = check(end, world.run.orders[0].num_samples, epoch_of, world.steps_done())
    fault = torn or world.fault()
    if not ended:
        fault = f"after {world.clock.now:,.0f} virtual seconds the run stands at step {end.step} of {steps}."
    counts = {"generations": len(world.groups), "events": world.clock.num_events}
    return SimulationResult(settings, verdict, world.clock.now, bound, world.net.origin_bytes(), counts, fault)


class _World:
    """The machines, the coordinator, the groups, and what goes between them."""

    def __init__(self, settings: Scenario, faults: Faults) -> None:
        self.settings = settings
        self.clock = Clock()
        self.net = SimNetwork(settings, self.clock, faults)
        self.tracker = Tracker(self.net)
        samples = np.full(settings.slices, settings.samples, np.int64)
        batch = settings.workers * settings.batch
        self.run = Run([Order(samples, settings.seed, batch)], BatchSizes.of(batch), epochs=settings.epochs)
        self.ranks: dict[str, Rank] = {}  # Who lives, by worker id.
        self.groups: list[Group] = []
        self.ends: list[Weights] = []
        self.out_of_order = 0
        self._last: RankGeneration | None = None
        self._chance = self.net.chance("answers")
        first = sum(item.joins_at == 0.0 < 1.0 < item.dies_at for item in faults.machines)
        config = {"batch_size": settings.batch, "lockstep": True}
        self.coordinator = Coordinator(self.clock, Rules(min_workers=max(1, first)), config, self._form)
        self._ids = _worker_ids(settings, faults)
        for machine in faults.machines:
            self._plan(machine)

    def _plan(self, machine: Machine) -> None:
        worker_id, caches = self._ids[machine.index]

        def join() -> None:
            node = self.net.join(machine)
            if caches is not None:  # Its disk came back with it.
                node.cache.update(self.net.nodes[f"worker-{caches}"].cache)
            reader = Reader(self.net, node, self.tracker, lambda _, index: rank.came(index))
            rank = self.ranks[worker_id] = Rank(self.net, reader, self.run, self, worker_id)
            reader.ask()
            rank.join()

        def die() -> None:
            rank = self.ranks.pop(worker_id)
            rank.die()
            self.net.kill(rank.reader.node)
            session = rank.membership.session
            self.clock.call_later(
                machine.latency_s, lambda: None if rank.is_cut else self.coordinator.disconnect(session)
            )

        self.clock.call_at(machine.joins_at, join)
        if machine.dies_at < float("inf"):
            self.clock.call_at(machine.dies_at, die)

    # What goes between ranks and the coordinator.

    def _form(self, generation: RankGeneration) -> None:
        registered = (
            {position.worker_id: i for i, position in enumerate(self._last.places)} if self._last is not None else {}
        )
        stays = [registered[position.worker_id] for position in generation.places if position.worker_id in registered]
        self.out_of_order += stays != sorted(stays)
        self._last = generation
        self.groups.append(Group(self.net, generation.number, len(generation.places)))

    def group(self, number: int) -> Group:
        """As `World.group`; generations are numbered from 1."""
        return self.groups[number - 1]

    def send(self, rank: Rank, request: Request, answer: Answer) -> None:
        """As `World.send`: the request, or its answer, may be lost."""
        latency_s, gives_up_at = rank.machine.latency_s, self.clock.now + request.wait_s + ANSWER_S
        is_over = False

        def end(result: Any = None, error: NetworkError | None = None) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                answer(result, error)

        def respond(result: dict[str, Any] | RemoteError) -> None:
            is_lost = self._chance.random() < self.settings.lost
            if rank.is_cut or (is_lost and self._chance.random() < 0.5):
                return  # Nothing comes: given up in time.
            error: NetworkError | None = result if isinstance(result, RemoteError) else None
            if is_lost:
                error = NetworkError("the connection closed before the answer")
            self.clock.call_later(latency_s, lambda: end(result, error))

        def arrive() -> None:
            if not rank.is_cut and rank.alive:
                self.coordinator.receive(request, respond)

        self.clock.call_later(latency_s, arrive)
        self.clock.call_at(gives_up_at, lambda: end(None, NetworkError("no answer")))

    def done(self, rank: Rank, learned: Weights) -> None:
        """As `World.done`."""
        if learned.step == self.run.num_steps:
            self.ends.append(learned)

    def is_over(self) -> bool:
        """Whether the run has ended and all who live know it, but for those that come when all others have left."""
        return bool(self.ends) and all(rank.done or rank.group is None for rank in self.ranks.values())

    # What is told.

    def steps_done(self) -> int:
        """By all generations, those in vain too."""
        return sum(group.steps_done for group in self.groups)

    def fault(self) -> str:
        """What broke a promise beside the samples; "" for nothing."""
        if len(set(map(id, self.ends))) > 1:
            return "workers ended with different weights."
        if self.out_of_order:
            return "workers that stayed changed their order among the ranks."
        for name in ("unequal weights", "wrong start"):
            if self.net.counts[name]:
                return f"{name}, {self.net.counts[name]} times: a generation's ranks did not begin alike."
        return ""


def _worker_ids(settings: Scenario, faults: Faults) -> dict[int, tuple[str, int | None]]:
    """Of each machine the worker's name, and the machine whose disk it has: every second that comes is one back."""
    ids: dict[int, tuple[str, int | None]] = {}
    died = {item.dies_at + REPLACE_S: item.index for item in faults.machines if item.dies_at < float("inf")}
    for item in faults.machines:
        before = died.get(item.joins_at) if item.index % 2 else None
        ids[item.index] = (f"worker-{item.index}", None) if before is None else (ids[before][0], before)
    return ids
