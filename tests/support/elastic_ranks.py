"""A simulated rank: a process of the run on its machine, stepping together with the others.

Its membership is production's `MembershipState`; which samples are its is decided by `order.run` for the rank and world
size that the coordinator gave it; what it will read is `store.uses`'s, so it fetches in order of first use and drops
what is read last. As in `worker.distributed`, at a step's end all stop where any of them learned of a change,
and where one is gone none goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from forebay.errors import NetworkError
from forebay.order.run import Run, Steps
from forebay.simulate.network import STALL_S, SimNetwork
from forebay.simulate.scenario import I64, UsageCheck
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
from support.planned_use import PlannedUses
from support.swarm_readers import Reader

_AHEAD = 8
"""Slices that are fetched before they are read."""
_BLOCK = 64
_RESTART_S = 5.0
"""A process that ended as its worker's id was in use is started again after so long."""

Answer = Callable[[Any, NetworkError | None], object]


@dataclass(frozen=True, eq=False)
class Weights:
    """What a model has learned after so many steps.

    Args:
        before: Those that the last step began with; None where nothing was learned yet.
        read: Global sample ids of each rank in that step, int64.
        generation: In which it was done.
    """

    step: int = 0
    before: Weights | None = None
    read: tuple[I64, ...] = ()
    generation: int = 0


def ancestors(weights: Weights) -> Iterator[Weights]:
    """These, and all that they were made of, the latest first, but for those that have learned nothing."""
    index: Weights | None = weights
    while index is not None and index.before is not None:
        yield index
        index = index.before


def check(end: Weights, num_samples: int, epoch_of: I64, steps_done: int) -> tuple[UsageCheck, str]:
    """Counts the samples along a lineage; and says where it is torn, "" for nowhere.

    Args:
        num_samples: Of an epoch.
        epoch_of: int64 [steps], the epoch of each step.
        steps_done: Counting those done in vain too: what these read is `wasted`.
    """
    epochs = int(epoch_of.max()) + 1
    counts = np.zeros((epochs, num_samples), np.int64)
    torn, expected, length = "", end.step, 0
    for item in ancestors(end):
        if item.step != expected:
            torn = f"step {expected} of the lineage is missing before generation {item.generation}."
        expected, length = item.step - 1, length + 1
        counts[epoch_of[item.step - 1]] += np.bincount(np.concatenate(item.read), minlength=num_samples)
    examples = [
        f"epoch {epoch}, sample {sample} read {counts[epoch, sample]} times"
        for epoch, sample in np.argwhere(counts != 1)[:5].tolist()
    ]
    missing, repeated = int((counts == 0).sum()), int(np.maximum(counts - 1, 0).sum())
    wasted = (steps_done - length) * (num_samples * epochs // len(epoch_of))
    if expected != 0:
        torn = f"the lineage begins at step {expected}."
    return UsageCheck(counts.size, missing, repeated, wasted, tuple(examples)), torn


class World(Protocol):
    """What a rank knows of the others."""

    def send(self, rank: Rank, request: Request, answer: Answer) -> None:
        """Carries a request to the coordinator; `answer` is called with the answer, or with why there is none."""

    def group(self, number: int) -> Group:
        """The group of a generation."""

    def done(self, rank: Rank, learned: Weights) -> None:
        """The rank has done all steps."""


class Group:
    """The ranks of one generation, stepping together. What is under way when one is gone nobody finishes any more."""

    def __init__(self, net: SimNetwork, number: int, size: int) -> None:
        self.net, self.number, self.size = net, number, size
        self.members: dict[int, Rank] = {}
        self.steps_done = 0
        self.is_broken = False
        self._read: dict[int, I64] = {}
        self._before: set[Weights] = set()
        self._stop = False

    @property
    def is_whole(self) -> bool:
        """Whether all ranks are here; no step begins before."""
        return len(self.members) == self.size

    def meet(self, rank: Rank, number: int) -> None:
        """A rank comes; with the last one they begin."""
        self.members[number] = rank
        if self.is_broken:
            rank.fail(self, holds=rank.holds)
        elif self.is_whole:
            self._tell(lambda one: one.begin(self))

    def arrive(self, rank: Rank, number: int, read: I64, stop: bool) -> None:
        """A rank has done its part of a step; the last one to come ends it for all."""
        self._read[number] = read
        self._before.add(rank.learned)
        self._stop = self._stop or stop
        if len(self._read) < self.size:
            return
        if len(self._before) > 1:
            self.net.counts["unequal weights"] += 1
        parts = tuple(self._read[i] for i in range(self.size))
        learned = Weights(rank.learned.step + 1, rank.learned, parts, self.number)
        stop, self._read, self._before, self._stop = self._stop, {}, set(), False
        self.steps_done += 1
        self._tell(lambda one: one.finish(self, learned, stop))

    def fall(self) -> None:
        """Somebody's connection is gone: the others learn so, each a little later."""
        if not self.is_broken:
            self.is_broken = True
            self._tell(lambda one: one.fail(self, holds=one.holds))

    def _tell(self, act: Callable[[Rank], object]) -> None:
        for one in self.members.values():
            self.net.clock.call_later(one.machine.latency_s, lambda one=one: act(one))  # type: ignore[misc]


@dataclass(eq=False)
class Rank:
    """One process of the run, on one machine.

    Args:
        worker_id: Its name; a machine that comes back has the one it had.
        learned: The weights that it has.
    """

    net: SimNetwork
    reader: Reader
    run: Run
    world: World
    worker_id: str
    learned: Weights = field(default_factory=Weights)
    alive: bool = True
    group: Group | None = None
    done: bool = False
    holds: bool = False
    _step: int = 0
    _sessions: int = 0
    _stands: bool = True
    _uses: PlannedUses | None = None
    _queue: deque[tuple[int, int]] = field(default_factory=deque)
    _block: Steps | None = None
    _needs: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.machine = self.reader.machine
        self.membership = MembershipState(
            self.worker_id,
            "coordinator",
            settings={},
            lockstep=True,
            step=0,
            samples=0,
            patience_s=float("inf"),
            on_note=lambda text: None,
            clock=lambda: self.net.clock.now,
            new_session=self._new_session,
            random=self.net.chance(f"rank {self.machine.index}"),
        )

    @property
    def is_cut(self) -> bool:
        """Whether nobody hears it now."""
        return self.net.is_cut(self.reader.node)

    # Membership.

    def join(self) -> None:
        """Becomes a member, under a new session, and steps with the others."""
        if not self.alive or self.done:
            return
        self.group, self._stands = None, True

        def joined(generation: Generation) -> None:
            self._drive(self.membership.heartbeats(), lambda _: self._look())
            self._enter(generation)

        self._drive(self.membership.join(), joined)

    def die(self) -> None:
        """It is killed."""
        self.alive = False
        self.reader.die()
        if self.group is not None and not self._stands:
            self.group.fall()

    def finish(self, group: Group, learned: Weights, stop: bool) -> None:
        """A step is done, unless one of its ranks was gone before this one heard so."""
        if not self.alive or self.group is not group or self._stands or group.is_broken:
            return
        if self.is_cut:
            return self.net.clock.call_later(STALL_S, lambda: self.fail(group))
        self.learned, self._step = learned, learned.step
        self._boundary(stop and learned.step != self.run.num_steps)

    def fail(self, group: Group, holds: bool = True) -> None:
        """A step cannot be finished: stands where it is, and says so."""
        if self.alive and self.group is group and not self._stands and not self.done:
            group.fall()
            self.holds = holds
            self._boundary(True, broken=True)

    def _new_session(self) -> str:
        self._sessions += 1
        return f"session-{self.machine.index}-{self._sessions}"

    def _drive(self, operation: Operation[T], then: Callable[[T], object]) -> None:
        """Sends what an operation of the membership asks for, until it has its result."""

        def resume(answer: Any = None, error: NetworkError | None = None) -> None:
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
                return self.net.clock.call_later(_RESTART_S, self.join)
            self._look()
            if isinstance(effect, Pause):
                self.net.clock.call_later(effect.seconds, resume)
            else:
                self.world.send(self, effect, resume)

        resume()

    def _look(self) -> None:
        """Gives up a group that cannot meet, or a step that another rank says cannot end."""
        group = self.group
        if group is None or self._stands:
            return
        if self.membership.broken or (self.membership.changing and not group.is_whole):
            self.fail(group, holds=self.holds)

    def _boundary(self, stop: bool, broken: bool = False) -> None:
        """Goes on in the generation that holds from here."""
        self._stands = stop
        before, group = self.membership.generation, self.group
        operation = self.membership.boundary(self._step, stop=stop, broken=broken, holds=self.holds)

        def go_on(generation: Generation) -> None:
            self._stands = False
            if generation is not before and generation.number != (group.number if group else 0):
                self._enter(generation)
            elif group is not None and group.is_broken:
                self._boundary(True, broken=True)
            else:
                self._begin_step()

        self._drive(operation, go_on)

    def _enter(self, generation: Generation) -> None:
        """Meets the others of a generation."""
        self._stands, here, self._step = False, self._step, generation.start_step
        self.holds = generation.rank == generation.source or (self.holds and here == generation.start_step)
        self.group = self.world.group(generation.number)
        self.group.meet(self, generation.rank)

    def begin(self, group: Group) -> None:
        """All ranks are here: the source's weights go to all."""
        generation = self.membership.generation
        if self.alive and self.group is group and not self._stands and generation is not None:
            if generation.rank == generation.source:
                return self._begin_at(generation)
            self.net.clock.call_later(2 * self.machine.latency_s, lambda: self._take_over(generation, group))

    def _take_over(self, generation: Generation, group: Group) -> None:
        """The source's weights, if it is still there."""
        if not self.alive or self.group is not group or self._stands:
            return
        source = group.members[generation.source]
        if not source.alive or source.is_cut or self.is_cut or source.group is not group:
            return self.fail(group, holds=False)
        self.learned = source.held_at(generation.start_step)
        self._begin_at(generation)

    def held_at(self, step: int) -> Weights:
        """The weights of a step that it stood at when its generation began."""
        result = self.learned
        while result.step > step and result.before is not None:
            result = result.before
        return result

    # Steps.

    def _begin_at(self, generation: Generation) -> None:
        self.holds = True
        step = generation.start_step
        if self.learned.step != step and step != self.run.num_steps:
            self.net.counts["wrong start"] += 1
        world_size, number = generation.world_size, generation.rank
        self._uses = PlannedUses(lambda a, b: self.run.uses(a, b, number, world_size)[::2], self.run.num_steps, step)
        self._queue, self._block = deque(), None
        self.reader.want_nothing()
        self._begin_step()

    def _begin_step(self) -> None:
        generation = self.membership.generation
        assert generation is not None and self._uses is not None and self.run.num_steps is not None
        if self._step >= self.run.num_steps:
            self.done = True
            self._drive(self.membership.leave(finished=True), lambda _: None)
            return self.world.done(self, self.learned)
        block, step = self._block, self._step
        if block is None or step >= block.first + len(block.bounds) - 1:
            stop = min(step + _BLOCK, self.run.num_steps)
            block = self._block = self.run.steps(step, stop, generation.rank, generation.world_size)
        slices = block.slices[slice(*block.bounds[step - block.first : step - block.first + 2])]
        self._needs = set(slices.tolist()).difference(self.reader.node.cache)
        self._look_ahead()
        if not self._needs:
            self._compute()

    def _look_ahead(self) -> None:
        """Wants what this step lacks, and the next slices in order of first use."""
        uses, asked_for = self._uses, self.reader.asked_for
        assert uses is not None
        lacks, prefetch = self._needs - asked_for, len(asked_for)
        for index in sorted(self._needs):
            self.reader.want(index)
        while prefetch < _AHEAD:
            if not self._queue:
                if uses.is_full(self._step):
                    break
                self._queue.extend(uses.extend())
                continue
            _, index = self._queue.popleft()
            if index not in self.reader.node.cache and index not in asked_for and index not in lacks:
                self.reader.want(index)
                asked_for.add(index)
                prefetch += 1
        self.reader.ask()

    def came(self, index: int) -> None:
        """A slice is here: makes room, and goes on if it was the last that a step lacked."""
        cache, uses = self.reader.node.cache, self._uses
        if len(cache) > self.net.settings.cache and uses is not None:
            later = {key: uses.next_use(key, self._step) for key in cache}
            out = max(cache, key=lambda key: float("inf") if later[key] is None else float(later[key] or 0))
            self.reader.drop(out)
        if index in self._needs:
            self._needs.discard(index)
            if not self._needs and self.alive and not self._stands:
                self._compute()
        if not self._stands:
            self._look_ahead()

    def _compute(self) -> None:
        block, step, group = self._block, self._step, self.group
        generation = self.membership.generation
        assert block is not None and group is not None and generation is not None
        part = slice(*block.bounds[step - block.first : step - block.first + 2])
        read = block.slices[part] * self.net.settings.samples + block.samples[part]

        def end() -> None:
            if not self.alive or self.group is not group or self._stands:
                return
            if self.is_cut:
                return self.net.clock.call_later(STALL_S, lambda: self.fail(group))
            if not group.is_broken:
                group.arrive(self, generation.rank, read, self.membership.changing)

        self.net.clock.call_later(len(read) / self.machine.speed, end)
