"""One run on machines that come and go, in virtual time.

Membership is production's: `coordinator.membership` forms generations, `worker.membership_state` decides what a rank
sends and when it stops, `order.run` which samples it reads. Simulated are requests, their waits and losses, steps,
deaths and partitions. The record is the lineage of the weights that the run ends with.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from forebay.arrays import I64
from forebay.coordinator.membership import REQUESTS, apply, config_reply, is_due, reply
from forebay.coordinator.messages import (
    ANSWER_S,
    Disconnect,
    Event,
    Formed,
    Leave,
    MemberMessage,
    PollChange,
    ProposeConfig,
    RankGeneration,
    Refuse,
    Rules,
    RunState,
    Tick,
)
from forebay.errors import NetworkError
from forebay.network.client import RemoteError
from forebay.order.plan import Order
from forebay.order.run import BatchSizes, Run
from forebay.simulate.network import STALL_S, Clock
from forebay.simulate.scenario import REPLACE_S, Machine, Scenario, draw
from forebay.worker.membership_state import (
    DuplicateWorkerError,
    Generation,
    MembershipLostError,
    MembershipState,
    Operation,
    Pause,
    Request,
    T,
)

RESTART_S = 5.0  # after which a process whose worker id was in use is started again
Respond = Callable[[dict | RemoteError], object]


class Coordinator:
    """`coordinator.membership.apply` behind requests that wait, as the HTTP server answers them."""

    def __init__(self, clock: Clock, rules: Rules, on_formed: Callable[[RankGeneration], object]) -> None:
        config = {"batch_size": 8, "lockstep": True}
        self.state = RunState(rules, config, config)
        self._clock, self._on_formed = clock, on_formed
        self._waiting = []
        self._tick()

    def receive(self, request: Request, respond: Respond) -> None:
        """Handle a request; `respond` is called now or later."""
        body = dict(request.body or {})
        if request.path not in REQUESTS:
            self._apply(ProposeConfig(body["settings"]))
            respond(config_reply(self.state, "run"))
            return
        message = TypeAdapter(REQUESTS[request.path]).validate_json(json.dumps(body))
        if (refused := self._apply(message)) is not None:
            respond(_error(refused))
            return
        waiting = message, respond
        self._waiting.append(waiting)
        if isinstance(message, Leave):
            return self._end(waiting)
        self._clock.call_later(message.wait_s, lambda: self._end(waiting))
        self._apply(PollChange(message.worker_id, message.session, +1, message.wait_s))

    def disconnect(self, session: str) -> None:
        """Handle the end of a process's connections."""
        for waiting in list(self._waiting):
            if waiting[0].session == session and waiting in self._waiting:
                self._remove(waiting)
        for worker_id in [name for name, member in self.state.members.items() if member.session == session]:
            self._apply(Disconnect(worker_id, session))

    def _tick(self) -> None:
        self._apply(Tick())
        self._clock.call_later(1.0, self._tick)

    def _apply(self, event: Event) -> Refuse | None:
        self.state, actions = apply(self.state, event, self._clock.now)
        for action in actions:
            if isinstance(action, Formed):
                self._on_formed(action.generation)
        for waiting in [waiting for waiting in self._waiting if is_due(self.state, waiting[0])]:
            self._end(waiting)
        return next((action for action in actions if isinstance(action, Refuse)), None)

    def _end(self, waiting: tuple[MemberMessage, Respond]) -> None:
        if waiting in self._waiting:
            self._remove(waiting)
            answer = reply(self.state, waiting[0], "run")
            waiting[1](_error(answer) if isinstance(answer, Refuse) else answer)

    def _remove(self, waiting: tuple[MemberMessage, Respond]) -> None:
        self._waiting.remove(waiting)
        if not isinstance(waiting[0], Leave):
            self._apply(PollChange(waiting[0].worker_id, waiting[0].session, -1))


def _error(refused: Refuse) -> RemoteError:
    return RemoteError(f"refused with 409 {refused.code}: {refused.message}", 409, refused.code)


@dataclass(frozen=True, eq=False)
class Weights:
    """A model after `step` steps.

    Args:
        before: The weights that the last step began with; None where nothing was learned yet.
        read: Global sample ids of each rank in that step, int64.
    """

    step: int = 0
    before: Weights | None = None
    read: tuple[I64, ...] = ()


def lineage_faults(end: Weights, num_samples: int, epochs: I64) -> list[str]:
    """Return the samples of an epoch that were not read once along a lineage, and the steps that are missing.

    Args:
        epochs: int64 [steps], the epoch of each step.
    """
    counts = np.zeros((epochs.max() + 1, num_samples), np.int64)
    faults, expected, weights = [], end.step, end
    while weights.before is not None:
        if weights.step != expected:
            faults.append(f"step {expected} is missing")
        counts[epochs[weights.step - 1]] += np.bincount(np.concatenate(weights.read), minlength=num_samples)
        expected, weights = weights.step - 1, weights.before
    if expected:
        faults.append(f"the lineage begins at step {expected}")
    unequal = np.argwhere(counts != 1).tolist()
    return faults + [f"epoch {epoch}, sample {sample}: read {counts[epoch, sample]} times" for epoch, sample in unequal]


class Group:
    """The ranks of one generation, which step together; none ends a step once one of them is gone."""

    def __init__(self, world: World, generation: RankGeneration) -> None:
        self.world, self.number, self.size = world, generation.number, len(generation.places)
        self.members = {}
        self.is_broken = False
        self._read = {}
        self._stop = False

    def meet(self, rank: Rank, number: int) -> None:
        """Add a rank; with the last one they begin."""
        self.members[number] = rank
        if self.is_broken:
            rank.fail(self, holds=rank.holds)
        elif len(self.members) == self.size:
            self._notify(lambda member: member.begin(self))

    def arrive(self, number: int, read: I64, stop: bool) -> None:
        """A rank has done its part of a step; the last one ends the step for all."""
        self._read[number] = read
        self._stop |= stop
        if len(self._read) < self.size:
            return
        before = {member.weights for member in self.members.values()}
        if len(before) > 1:
            self.world.faults.add("the ranks of a step had different weights")
        weights = before.pop()
        learned = Weights(weights.step + 1, weights, tuple(self._read[i] for i in range(self.size)))
        stop, self._read, self._stop = self._stop, {}, False
        self._notify(lambda member: member.finish(self, learned, stop))

    def fall(self) -> None:
        """One connection is gone: the others learn of it, each a little later."""
        if not self.is_broken:
            self.is_broken = True
            self._notify(lambda member: member.fail(self, holds=member.holds))

    def _notify(self, act: Callable[[Rank], object]) -> None:
        for member in self.members.values():
            self.world.clock.call_later(member.machine.latency_s, lambda member=member: act(member))


@dataclass(eq=False)
class Rank:
    """One process of the run, on one machine."""

    world: World
    machine: Machine
    worker_id: str
    weights: Weights = field(default_factory=Weights)
    alive: bool = True
    done: bool = False
    holds: bool = False  # has weights that the run may go on with
    group: Group | None = None
    _step: int = 0
    _stands: bool = True

    def __post_init__(self) -> None:
        sessions = iter(range(1000))
        self.membership = MembershipState(
            self.worker_id, "coordinator", settings={}, lockstep=True, step=0, samples=0, patience_s=float("inf"),
            on_note=lambda text: None, clock=lambda: self.world.clock.now,
            new_session=lambda: f"session-{self.machine.index}-{next(sessions)}",
            random=self.world.chance(f"rank {self.machine.index}"),
        )  # fmt: skip

    @property
    def is_cut(self) -> bool:
        """No message reaches or leaves it now."""
        return self.world.schedule.is_cut(self.machine.index, self.world.clock.now)

    def join(self) -> None:
        """Become a member, under a new session."""
        if not self.alive or self.done:
            return
        self.group, self._stands = None, True

        def joined(generation):
            self._drive(self.membership.heartbeats(), lambda _: self._check())
            self._enter(generation)

        self._drive(self.membership.joining(), joined)

    def die(self) -> None:
        self.alive = False
        if self.group is not None and not self._stands:
            self.group.fall()

    def begin(self, group: Group) -> None:
        """All ranks have met: the source sends its weights to the others."""
        generation = self.membership.generation
        if self.alive and self.group is group and not self._stands and generation is not None:
            if generation.rank == generation.source:
                return self._begin_at(generation)
            self.world.clock.call_later(2 * self.machine.latency_s, lambda: self._take_over(generation, group))

    def finish(self, group: Group, learned: Weights, stop: bool) -> None:
        """A step is done, unless this rank already knows that one of them is gone."""
        if not self.alive or self.group is not group or self._stands or group.is_broken:
            return
        if self.is_cut:
            return self.world.clock.call_later(STALL_S, lambda: self.fail(group))
        self.weights, self._step = learned, learned.step
        self._boundary(stop and learned.step != self.world.num_steps)

    def fail(self, group: Group, holds: bool = True) -> None:
        """A step cannot be finished: stop here, and report it."""
        if self.alive and self.group is group and not self._stands and not self.done:
            group.fall()
            self.holds = holds
            self._boundary(True, broken=True)

    def _drive(self, operation: Operation[T], then: Callable[[T], object]) -> None:
        """Do what an operation of the membership yields, until it has its result."""

        def resume(answer=None, error=None):
            if not self.alive:
                return
            try:
                effect = operation.send(answer) if error is None else operation.throw(error)
            except StopIteration as end:
                then(end.value)
                return
            except MembershipLostError:
                self.holds = False
                return self.join()
            except DuplicateWorkerError:
                return self.world.clock.call_later(RESTART_S, self.join)
            self._check()
            if isinstance(effect, Pause):
                self.world.clock.call_later(effect.seconds, resume)
            else:
                self.world.send(self, effect, resume)

        resume()

    def _check(self) -> None:
        """Give up a group that cannot meet, or a step that cannot end, by another rank's report."""
        group = self.group
        if group is None or self._stands:
            return
        is_whole = len(group.members) == group.size
        if self.membership.broken or (self.membership.changing and not is_whole):
            self.fail(group, holds=self.holds)

    def _boundary(self, stop: bool, broken: bool = False) -> None:
        """Go on in the generation that is valid from here."""
        self._stands = stop
        before, group = self.membership.generation, self.group
        operation = self.membership.crossing(self._step, stop=stop, broken=broken, holds=self.holds)

        def go_on(generation):
            self._stands = False
            if generation is not before and generation.number != (group.number if group else 0):
                self._enter(generation)
            elif group is not None and group.is_broken:
                self._boundary(True, broken=True)
            else:
                self._begin_step()

        self._drive(operation, go_on)

    def _enter(self, generation: Generation) -> None:
        """Meet the other ranks of a generation."""
        self._stands, here, self._step = False, self._step, generation.start_step
        self.holds = generation.rank == generation.source or (self.holds and here == generation.start_step)
        self.group = self.world.groups[generation.number - 1]
        self.group.meet(self, generation.rank)

    def _take_over(self, generation: Generation, group: Group) -> None:
        """Take the source's weights, if it is still there."""
        if not self.alive or self.group is not group or self._stands:
            return
        source = group.members[generation.source]
        if not source.alive or source.is_cut or self.is_cut or source.group is not group:
            return self.fail(group, holds=False)
        self.weights = source.weights
        while self.weights.step > generation.start_step and self.weights.before is not None:
            self.weights = self.weights.before
        self._begin_at(generation)

    def _begin_at(self, generation: Generation) -> None:
        self.holds = True
        if self.weights.step != generation.start_step != self.world.num_steps:
            self.world.faults.add("a generation began with weights of another step")
        self._begin_step()

    def _begin_step(self) -> None:
        generation, group = self.membership.generation, self.group
        if self._step >= self.world.num_steps:
            self.done = True
            self._drive(self.membership.leaving(finished=True), lambda _: None)
            return self.world.end(self)
        part = self.world.run.steps(self._step, self._step + 1, generation.rank, generation.world_size)
        read = part.slices * self.world.settings.samples + part.samples

        def end():
            if not self.alive or self.group is not group or self._stands:
                return
            if self.is_cut:
                return self.world.clock.call_later(STALL_S, lambda: self.fail(group))
            if not group.is_broken:
                group.arrive(generation.rank, read, self.membership.changing)

        self.world.clock.call_later(len(read) / self.machine.speed, end)


class World:
    """The machines, the coordinator, the groups, and the requests between them.

    Attributes:
        faults: Broken promises besides those of the lineage.
    """

    def __init__(self, settings: Scenario) -> None:
        batch = settings.workers * settings.batch
        sizes = np.full(settings.slices, settings.samples, np.int64)
        self.settings, self.clock, self.faults = settings, Clock(), set()
        self.run = Run([Order(sizes, settings.seed, batch)], BatchSizes.of(batch), epochs=settings.epochs)
        self.num_steps = self.run.num_steps or 0
        slowest = min(machine.speed for machine in draw(settings, 1.0).machines)
        self.about_s = self.num_steps * settings.batch / slowest
        self.schedule = draw(settings, self.about_s)
        self.ranks = {}  # those that live, by worker id
        self.groups = []
        self.finals = []
        self._order = []  # worker ids of the last generation, by rank
        self._chance = self.chance("answers")
        first = sum(machine.joins_at == 0.0 < 1.0 < machine.dies_at for machine in self.schedule.machines)
        self.coordinator = Coordinator(self.clock, Rules(min_workers=max(1, first)), self._form)
        ids = {}
        died = {machine.dies_at + REPLACE_S: machine.index for machine in self.schedule.machines}
        for machine in self.schedule.machines:  # every second one that comes is one that is back
            before = died.get(machine.joins_at) if machine.index % 2 else None
            ids[machine.index] = f"worker-{machine.index}" if before is None else ids[before]
            self._plan(machine, ids[machine.index])

    def run_to_end(self) -> list[str]:
        """Run until all who live have done the last step; return what was wrong."""
        is_done = self.clock.run(self._is_over, 20 * self.about_s + 1000.0)
        end = max(self.finals or [rank.weights for rank in self.ranks.values()], key=lambda weights: weights.step)
        faults = sorted(self.faults) + ["the workers ended with different weights"] * (len(set(self.finals)) > 1)
        if not is_done:
            faults.append(f"after {self.clock.now:,.0f} virtual seconds the run is at step {end.step}")
        epochs = self.run.progress_table(0, self.num_steps)[0]
        return faults + lineage_faults(end, self.run.orders[0].num_samples, epochs)

    def chance(self, purpose: str) -> random.Random:
        return random.Random(f"{self.settings.seed} {purpose}")

    def send(self, rank: Rank, request: Request, answer: Callable[[Any, NetworkError | None], object]) -> None:
        """Carry a request to the coordinator; the request or its answer may be lost."""
        latency_s, gives_up_at = rank.machine.latency_s, self.clock.now + request.wait_s + ANSWER_S
        is_over = False

        def end(result=None, error=None):
            nonlocal is_over
            if not is_over:
                is_over = True
                answer(result, error)

        def respond(result):
            is_lost = self._chance.random() < self.settings.lost
            if rank.is_cut or (is_lost and self._chance.random() < 0.5):
                return
            error = result if isinstance(result, RemoteError) else None
            if is_lost:
                error = NetworkError("the connection closed before the answer")
            self.clock.call_later(latency_s, lambda: end(result, error))

        def arrive():
            if not rank.is_cut and rank.alive:
                self.coordinator.receive(request, respond)

        self.clock.call_later(latency_s, arrive)
        self.clock.call_at(gives_up_at, lambda: end(None, NetworkError("no answer")))

    def end(self, rank: Rank) -> None:
        """Note that a rank has done all steps."""
        if rank.weights.step == self.num_steps:
            self.finals.append(rank.weights)

    def _is_over(self) -> bool:
        """All who live know that the run has ended, but for those that come when all others have left."""
        return bool(self.finals) and all(rank.done or rank.group is None for rank in self.ranks.values())

    def _form(self, generation: RankGeneration) -> None:
        order = [position.worker_id for position in generation.places]
        if [name for name in order if name in self._order] != [name for name in self._order if name in order]:
            self.faults.add("workers that stayed changed their order among the ranks")
        self._order = order
        self.groups.append(Group(self, generation))

    def _plan(self, machine: Machine, worker_id: str) -> None:
        rank = Rank(self, machine, worker_id)

        def join():
            self.ranks[worker_id] = rank
            rank.join()

        def die():
            del self.ranks[worker_id]
            rank.die()
            if not rank.is_cut:
                session = rank.membership.session
                self.clock.call_later(machine.latency_s, lambda: self.coordinator.disconnect(session))

        self.clock.call_at(machine.joins_at, join)
        if machine.dies_at < float("inf"):
            self.clock.call_at(machine.dies_at, die)
