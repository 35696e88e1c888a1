"""Everybody wants everything: readers of one dataset, steered by the swarm of its data node, pass slices on.

Which slice from whom is the `Swarm`'s word alone. A reader has some downloads at once, tells what came of each and asks
for more in one exchange with the data node; with nothing to fetch it asks again a little later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from forebay.network.swarm import Assignment, Swarm
from forebay.simulate.book import Verdict
from forebay.simulate.bound import swarm_bound
from forebay.simulate.clock import Clock, Progress, Trace
from forebay.simulate.faults import Faults, Machine, draw
from forebay.simulate.nodes import Fetch, Net, Node
from forebay.simulate.result import Result
from forebay.simulate.settings import Settings

DOWNLOADS = 4
WAIT_S = 0.5
_HEARTBEAT_S = 10.0


@dataclass(frozen=True)
class _Word:
    """What a reader tells: slices that came, (slice, from whom, whether with wrong bytes) that did not, and wishes."""

    finished: tuple[int, ...]
    failed: tuple[tuple[int, str, bool], ...]
    num: int


@dataclass(eq=False)
class Reader:
    """One that wants slices. `wanted` are flags [slices] of those that it lacks.

    Args:
        tell: Carries a word to the tracker; it calls `hear` with the assignments, or with None if none came back.
        on_slice: Told of each slice that came.
    """

    net: Net
    node: Node
    wanted: np.ndarray[tuple[int], np.dtype[np.bool_]]
    tell: Callable[[Reader, _Word], object]
    on_slice: Callable[[Reader, int], object]
    downloads: int = DOWNLOADS
    alive: bool = True
    flying: dict[int, Fetch] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    failed: list[tuple[int, str, bool]] = field(default_factory=list)
    asking: _Word | None = None
    told_at: float = float("-inf")
    waits: bool = False
    must: set[int] = field(default_factory=set)  # Of what it wants, what it cannot go on without: asked for first.
    wait_s: float = WAIT_S
    is_late: bool = False  # These are to come from wherever they are.

    def wishes(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """int64, what it lacks and is not fetching."""
        wanted = self.wanted.copy()
        wanted[list(self.flying)] = False
        return np.flatnonzero(wanted)

    def speak(self) -> None:
        """Tells what there is to tell, and asks for as much as it has room for."""
        if not self.alive or self.asking is not None:
            return
        num = self.downloads - len(self.flying)
        if not (self.finished or self.failed or (num > 0 and self.wanted.any())):
            return
        self.asking = _Word(tuple(self.finished), tuple(self.failed), num)
        self.told_at = self.net.clock.now
        self.net.counts["exchanges"] += 1
        self.tell(self, self.asking)

    def hear(self, assigned: list[Assignment] | None) -> None:
        """The answer; None: there was none, and the same is said again."""
        if not self.alive or self.asking is None:
            return
        word, self.asking = self.asking, None
        if assigned is None:
            return self._later()
        del self.finished[: len(word.finished)], self.failed[: len(word.failed)]
        for one in assigned:
            if one.index not in self.flying and self.wanted[one.index]:
                self._fetch(one)
        if len(self.flying) < self.downloads and self.wanted.any():
            self._later()
        if self.finished or self.failed:
            self.speak()

    def die(self) -> None:
        """It is killed."""
        self.alive = False
        for fetch in self.flying.values():
            fetch.drop()

    def _later(self) -> None:
        if not self.waits:
            self.waits = True
            self.net.clock.after(self.wait_s, self._again)

    def _again(self) -> None:
        self.waits = False
        self.speak()

    def _fetch(self, one: Assignment) -> None:
        blamed: list[str] = []

        def end(came: bool) -> None:
            del self.flying[one.index]
            if came:
                self.wanted[one.index] = False
                self.node.cache[one.index] = None
                self.finished.append(one.index)
                self.on_slice(self, one.index)
            else:
                self.failed.append((one.index, one.holder.peer_id, "wrong" in blamed))
            self.speak()

        def note(_: str, why: str) -> None:
            blamed.append(why)

        self.flying[one.index] = Fetch(self.net, self.node, one.index, [one.holder], end, note, rounds=1).start()


class Tracker:
    """The swarm of a data node, behind the latency of those who speak with it."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.swarm = Swarm(net.settings.slices)
        self._meet()

    def _meet(self) -> None:
        """Origins are here; who is silent goes."""
        now = self.net.clock.now
        for node in self.net.origins:
            self.swarm.join(node.holder, None, now)
        self.swarm.expire(now)
        self.net.clock.after(1.0, self._meet)

    def tell(self, reader: Reader, word: _Word) -> None:
        """Carries a reader's word here and the answer back."""
        machine = reader.node.machine
        assert machine is not None

        def arrive() -> None:
            if self.net.is_cut(reader.node):
                return self.net.clock.after(5.0, lambda: reader.hear(None))
            assigned = self._answer(reader, word)
            self.net.clock.after(machine.latency_s, lambda: reader.hear(assigned))

        self.net.clock.after(machine.latency_s, arrive)

    def heartbeat(self, reader: Reader) -> None:
        """Says that a reader is here, with what it has."""
        if reader.alive:
            if not self.net.is_cut(reader.node):
                have = np.zeros(self.net.settings.slices, np.bool_)
                have[list(reader.node.cache)] = True
                self.swarm.join(reader.node.holder, have, self.net.clock.now)
            self.net.clock.after(_HEARTBEAT_S, lambda: self.heartbeat(reader))

    def _answer(self, reader: Reader, word: _Word) -> list[Assignment]:
        now, peer_id = self.net.clock.now, reader.node.holder.peer_id
        self.swarm.join(reader.node.holder, None, now)
        for index in word.finished:
            self.swarm.finished(peer_id, index, now)
        for index, source, wrong in word.failed:
            self.swarm.failed(peer_id, index, source, now, wrong)
        wishes, given = reader.wishes(), list[Assignment]()
        must = reader.must.intersection(wishes.tolist()) if reader.must else set()
        if must and reader.is_late:
            for index in sorted(must)[: word.num]:
                given += [Assignment(index, holder) for holder in self.swarm.providers(index, peer_id, now, 1)]
            must.difference_update(one.index for one in given)
        for some in (np.array(sorted(must), np.int64), wishes):
            if given:
                some = some[~np.isin(some, [one.index for one in given])]
            if word.num > len(given) and len(some):
                given += self.swarm.assign(peer_id, some, word.num - len(given), now)
        return given


def run(settings: Settings, progress: Progress | None = None) -> Result:
    """Runs until every reader that lives has every slice."""
    calm = swarm_bound(settings, draw(replace(settings, churn=0.0), 1.0).machines)
    faults = draw(settings, calm.seconds)
    bound = swarm_bound(settings, faults.machines)
    world = World(settings, faults)
    trace = Trace()
    trace.follow(world.clock, calm.seconds / 400, world.look, progress)
    ended = world.clock.run(lambda: world.left == 0, 20 * bound.seconds + 1000.0)
    missing = sum(int(reader.wanted.sum()) for reader in world.readers.values() if reader.alive)
    repeated = sum(max(0, count - 1) for count in world.arrivals.values())
    samples = len(world.staying) * settings.slices
    verdict = Verdict(samples, missing, repeated, 0, 0, ())
    facts = world.tracker.swarm.facts()
    counts = {
        "killed": len(world.killed), "exchanges": world.net.counts["exchanges"],
        "fetches": world.net.counts["fetches"], "failed": facts["failed"], "overdue": facts["overdue"],
        "wrong_bytes": world.net.counts["wrong"], "stalls": world.net.counts["silent"], "bans": len(facts["banned"]),
        "events": world.clock.num_events,
    }  # fmt: skip
    fault = "" if ended else f"after {world.clock.now:,.0f} virtual seconds slices are missing."
    return Result(settings, verdict, world.clock.now, bound, world.net.origin_bytes(), counts, fault, trace)


class World:
    """Readers that all want every slice, and their tracker."""

    def __init__(self, settings: Settings, faults: Faults) -> None:
        self.clock = Clock()
        self.net = Net(settings, self.clock, faults)
        self.machines = faults.machines
        self.tracker = Tracker(self.net)
        self.readers: dict[int, Reader] = {}
        self.arrivals: dict[tuple[int, int], int] = {}
        self.staying = {machine.index for machine in faults.machines if machine.dies_at == float("inf")}
        self.killed: list[int] = []
        self.left = len(self.staying) * settings.slices
        self._all = self.left
        for machine in faults.machines:
            self._plan(machine)

    def _plan(self, machine: Machine) -> None:
        def join() -> None:
            wanted = np.ones(self.net.settings.slices, bool)
            reader = Reader(self.net, self.net.join(machine), wanted, self.tracker.tell, self._arrived)
            self.readers[machine.index] = reader
            self.tracker.heartbeat(reader)
            reader.speak()

        def die() -> None:
            reader = self.readers[machine.index]
            reader.die()
            self.net.kill(reader.node)
            self.killed.append(machine.index)

        self.clock.at(machine.joins_at, join)
        if machine.dies_at < float("inf"):
            self.clock.at(machine.dies_at, die)

    def _arrived(self, reader: Reader, index: int) -> None:
        machine = reader.node.machine
        assert machine is not None
        self.arrivals[machine.index, index] = self.arrivals.get((machine.index, index), 0) + 1
        self.left -= machine.index in self.staying

    def look(self) -> dict[str, float]:
        """The curves' values now."""
        origin, peers = self.net.links.rates(len(self.net.origins))
        return {
            "done": 1 - self.left / max(1, self._all),
            "workers alive": sum(reader.alive for reader in self.readers.values()),
            "bytes/s from origins": origin,
            "bytes/s from workers": peers,
        }
