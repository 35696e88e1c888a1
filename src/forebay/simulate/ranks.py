"""A simulated rank: joins a run, steps together with the others, and fetches what its next steps read.

Which samples are its is `order.run`'s word for the rank and world size that the coordinator gave it; what it will read
is `store.uses`'s, so it fetches in order of first use and lets go what is read last. It keeps the worker's part of
membership: at a step's end all stop where any of them heard of a change, and where one is gone none goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from forebay.order.run import Run, Steps
from forebay.schedule.members import Event, Generation, Heartbeat, Join, Leave, Ready, Refuse
from forebay.simulate.book import I64, Weights
from forebay.simulate.broadcast import WAIT_S, Reader
from forebay.simulate.nodes import STALL_S, Net
from forebay.store.uses import Uses

_AHEAD = 8
"""Slices that are fetched before they are read."""
_BLOCK = 64
_CALM_S = 2.0
"""Asks again for what is not needed yet after so long."""
_MUST_S = 5.0
"""What a step waits for so long comes from wherever it is, as a loader's reader says."""
ASK_S = 2.0
BEAT_S = 20.0
"""How long a question waits for its answer: that of a joiner or of who stands still, and the heartbeat's."""


class Line(Protocol):
    """What a rank knows of the coordinator."""

    def say(self, rank: Rank, event: Event, hear: Callable[[Refuse | None], object] | None = None) -> None:
        """Carries an event there; `hear` is told of a refusal, or None, if the answer comes back."""

    def done(self, rank: Rank, learned: Weights) -> None:
        """The rank has done all steps."""


class Group:
    """The ranks of one generation, stepping together. What is under way when one is gone nobody finishes any more."""

    def __init__(self, net: Net, number: int, size: int) -> None:
        self.net, self.number, self.size = net, number, size
        self.members: dict[int, Rank] = {}
        self.steps_done = 0
        self.is_broken = False
        self._read: dict[int, I64] = {}
        self._before: set[Weights] = set()
        self._stop = False

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
        for one in self.members.values():
            self.net.clock.after(one.machine.latency_s, lambda one=one: one.finish(self, learned, stop))  # type: ignore[misc]

    def fall(self) -> None:
        """Somebody's connection is gone: the others learn so, each a little later."""
        if not self.is_broken:
            self.is_broken = True
            for one in self.members.values():
                self.net.clock.after(one.machine.latency_s, lambda one=one: one.fail(self))  # type: ignore[misc]


@dataclass(eq=False)
class Rank:
    """One process of the run, on one machine.

    Args:
        worker_id: Its name; a machine that comes back has the one it had.
        learned: The weights that it has.
    """

    net: Net
    reader: Reader
    run: Run
    line: Line
    worker_id: str
    learned: Weights = field(default_factory=Weights)
    alive: bool = True
    session: str = ""
    generation: Generation | None = None
    group: Group | None = None
    changing: bool = False
    done: bool = False
    waited_s: float = 0.0
    stood_s: float = 0.0
    _number: int = 0
    _step: int = 0
    _sessions: int = 0
    _stands: bool = True
    _uses: Uses | None = None
    _queue: deque[tuple[int, int]] = field(default_factory=deque)
    _block: Steps | None = None
    _needs: set[int] = field(default_factory=set)
    _since: float = 0.0

    def __post_init__(self) -> None:
        assert self.reader.node.machine is not None
        self.machine = self.reader.node.machine

    @property
    def is_in_step(self) -> bool:
        """Whether it computes, or waits for others that do; not for a slice or a generation."""
        return not (self._stands or self._needs or self.done)

    @property
    def is_cut(self) -> bool:
        """Whether nobody hears it now."""
        return self.net.is_cut(self.reader.node)

    # Membership.

    def join(self) -> None:
        """Asks to be let in, under a new session."""
        if not self.alive or self.done:
            return
        self._sessions += 1
        self.session = f"{self.machine.index}-{self._sessions}"
        self.generation, self.group, self._stands, self._since = None, None, True, self.net.clock.now
        self._ask(self.session, lambda: self._join_event())

    def _join_event(self) -> Event:
        address = self.reader.node.holder.address
        return Join(self.worker_id, self.session, address, "", self.learned.step, self._samples(self.learned.step))

    def _samples(self, step: int) -> int:
        return step * self.run.batches.largest

    def _ask(self, session: str, event: Callable[[], Event]) -> None:
        """Says the same again and again until a generation begins."""
        if not self.alive or self.session != session or not self._stands or self.done:
            return

        def hear(refused: Refuse | None) -> None:
            if refused is not None and refused.code == "expelled" and self.session == session:
                self.join()

        self.line.say(self, event(), hear)
        self.net.clock.after(ASK_S, lambda: self._ask(session, event))

    def beat(self) -> None:
        """Shows that it lives, for ever."""
        if self.alive and not self.done:
            if self.generation is not None and not self._stands:
                session, step = self.session, self._step

                def hear(refused: Refuse | None) -> None:
                    if refused is not None and self.session == session and not self._stands:
                        self.join()

                self.line.say(self, Heartbeat(self.worker_id, session, self.generation.number, step), hear)
            self.net.clock.after(BEAT_S, self.beat)

    def enter(self, generation: Generation, group: Group, source: Rank | None) -> None:
        """A generation begins, or is told of again."""
        if not self.alive or generation.rank_of(self.session) is None:
            return
        if self.generation is not None and self.generation.number >= generation.number:
            return
        number = generation.rank_of(self.session)
        assert number is not None
        self.generation, self.group, self._number = generation, group, number
        self.changing, self._stands, self._step = False, False, generation.start_step
        group.members[number] = self
        if group.is_broken:
            return self.fail(group)
        if number == generation.source:
            return self._begin_at(generation)
        latency_s = 2 * self.machine.latency_s
        self.net.clock.after(latency_s, lambda: self._take_over(generation, group, source))

    def _take_over(self, generation: Generation, group: Group, source: Rank | None) -> None:
        """The source's weights, if it is still there."""
        if not self.alive or self.group is not group or self._stands:
            return
        if source is None or not source.alive or source.is_cut or self.is_cut or source.group is not group:
            return self.fail(group, holds=False)
        self.learned = source.held_at(generation.start_step)
        self._begin_at(generation)

    def held_at(self, step: int) -> Weights:
        """The weights of a step that it stood at when its generation began."""
        found = self.learned
        while found.step > step and found.before is not None:
            found = found.before
        return found

    def hear_changing(self, number: int) -> None:
        """Another generation is wanted."""
        if self.generation is not None and self.generation.number == number:
            self.changing = True

    def finish(self, group: Group, learned: Weights, stop: bool) -> None:
        """A step is done, unless one of its ranks was gone before this one heard so."""
        if not self.alive or self.group is not group or self._stands or group.is_broken:
            return
        if self.is_cut:
            return self.net.clock.after(STALL_S, lambda: self.fail(group))
        self.learned, self._step = learned, learned.step
        if stop and learned.step != self.run.num_steps:
            return self._stand(broken=False)
        self._begin_step()

    def fail(self, group: Group, holds: bool = True) -> None:
        """A step cannot be finished: stands where it is, and says so."""
        if self.alive and self.group is group and not self._stands and not self.done:
            group.fall()
            self._stand(broken=True, holds=holds)

    def _stand(self, broken: bool, holds: bool = True) -> None:
        assert self.generation is not None
        self._stands, self._since = True, self.net.clock.now
        held = (self.learned.step, self._samples(self.learned.step))
        ready = Ready(self.worker_id, self.session, self.generation.number, self._step, broken, held)
        self._ask(self.session, lambda: ready)

    def die(self) -> None:
        """It is killed."""
        self.alive = False
        self.reader.die()
        if self.group is not None and not self._stands:
            self.group.fall()

    # Steps.

    def _begin_at(self, generation: Generation) -> None:
        self.stood_s += self.net.clock.now - self._since
        step = generation.start_step
        if self.learned.step != step and step != self.run.num_steps:
            self.net.counts["wrong start"] += 1
        world_size, number = len(generation.places), self._number
        self._uses = Uses(lambda a, b: self.run.uses(a, b, number, world_size)[::2], self.run.num_steps, step)
        self._queue, self._block = deque(), None
        self.reader.wanted[:] = False
        self._begin_step()

    def _begin_step(self) -> None:
        assert self.generation is not None and self._uses is not None and self.run.num_steps is not None
        if self._step >= self.run.num_steps:
            self.done = True
            self.line.say(self, Leave(self.worker_id, self.session, self.generation.number, self._step, True))
            return self.line.done(self, self.learned)
        block, step = self._block, self._step
        if block is None or step >= block.first + len(block.bounds) - 1:
            stop = min(step + _BLOCK, self.run.num_steps)
            block = self._block = self.run.steps(step, stop, self._number, len(self.generation.places))
        slices = block.slices[slice(*block.bounds[step - block.first : step - block.first + 2])]
        self._needs = set(slices.tolist()).difference(self.reader.node.cache)
        self._since = self.net.clock.now
        self._look_ahead()
        if not self._needs:
            self._compute()
        else:
            self.reader.is_late = False
            self.net.clock.after(_MUST_S, lambda: self._be_late(step))

    def _be_late(self, step: int) -> None:
        if self._step == step and self._needs and self.alive:
            self.reader.is_late = True
            self.reader.speak()

    def _look_ahead(self) -> None:
        """Wants what this step lacks, and the next slices in order of first use."""
        uses, wanted = self._uses, self.reader.wanted
        assert uses is not None
        lacks = [index for index in self._needs if not wanted[index] and index not in self.reader.flying]
        ahead = int(np.count_nonzero(wanted))
        while ahead < _AHEAD:
            if not self._queue:
                if uses.is_full(self._step):
                    break
                self._queue.extend(uses.extend())
                continue
            _, index = self._queue.popleft()
            if index not in self.reader.node.cache and not wanted[index]:
                wanted[index] = True
                ahead += 1
        wanted[lacks] = True
        self.reader.must, self.reader.wait_s = self._needs, WAIT_S if self._needs else _CALM_S
        if ahead or lacks:
            self.reader.speak()

    def came(self, index: int) -> None:
        """A slice is here: makes room, and goes on if it was the last that a step lacked."""
        cache, uses = self.reader.node.cache, self._uses
        if len(cache) > self.net.settings.cache and uses is not None:
            later = {key: uses.next_use(key, self._step) for key in cache}
            out = max(cache, key=lambda key: float("inf") if later[key] is None else float(later[key] or 0))
            del cache[out]
        if index in self._needs:
            self._needs.discard(index)
            if not self._needs and self.alive and not self._stands:
                self._compute()
        if not self._stands:
            self._look_ahead()

    def _compute(self) -> None:
        block, step, group, at = self._block, self._step, self.group, self.net.clock.now
        assert block is not None and group is not None
        self.waited_s += at - self._since
        part = slice(*block.bounds[step - block.first : step - block.first + 2])
        read = block.slices[part] * self.net.settings.samples + block.samples[part]

        def end() -> None:
            if not self.alive or self.group is not group or self._stands:
                return
            if self.is_cut:
                return self.net.clock.after(STALL_S, lambda: self.fail(group))
            if not group.is_broken:
                group.arrive(self, self._number, read, self.changing)

        self.net.clock.after(len(read) / self.machine.speed, end)
