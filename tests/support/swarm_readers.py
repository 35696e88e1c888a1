"""Everybody wants everything: readers of one dataset, steered by the swarm of its data node, pass slices on.

A reader is production's `SwarmReaderState`, its tracker production's `steer`; here are the requests between them and
the fetches, in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from forebay.errors import IntegrityError, NetworkError
from forebay.network.messages import SwarmRequest
from forebay.network.peer import Provider
from forebay.simulate.network import Clock, SimFetch, SimNetwork, SimNode
from forebay.simulate.scenario import Faults, Machine, Scenario, SimulationResult, UsageCheck, draw
from forebay.swarm.reader_state import REQUEST_TIMEOUT_S, Body, SwarmReaderState
from forebay.swarm.steering import Swarm
from forebay.swarm.tracker import steer


class Reader:
    """A process on a node that fetches slices and shares them.

    Args:
        on_slice: Called with each slice that came.
    """

    def __init__(
        self, net: SimNetwork, node: SimNode, tracker: Tracker, on_slice: Callable[[Reader, int], object]
    ) -> None:
        assert node.machine is not None
        self.net, self.node, self.machine, self.alive = net, node, node.machine, True
        self._tracker, self._on_slice = tracker, on_slice
        self._fetches: dict[int, SimFetch] = {}
        self._body: Body | None = None  # of the request under way
        self._timer = 0
        self._state = SwarmReaderState(net.clock.now, address=node.provider.address, patience_s=float("inf"))

    @property
    def asked_for(self) -> set[int]:
        """Slices that are wanted or on their way."""
        return self._state.missing.keys() | self._state.running.keys()

    def want(self, index: int) -> None:
        """Fetch a slice; `ask` follows."""
        if index not in self.asked_for:
            self._state.want(index, self.net.clock.now)

    def want_nothing(self) -> None:
        """What is not on its way is wanted no longer."""
        for index in list(self._state.missing):
            self._state.withdraw(index)

    def drop(self, index: int) -> None:
        """Make room: a slice is here no longer."""
        del self.node.cache[index]

    def ask(self) -> None:
        """Send a request to the tracker, if none is under way."""
        if not self.alive or self._body is not None:
            return
        current = None
        if self._state.is_have_due(self.net.clock.now):
            current = np.zeros(self.net.settings.slices, np.bool_)
            current[list(self.node.cache)] = True
        self._body = self._state.request(self.net.clock.now, current)
        self.net.counts["exchanges"] += 1
        self._tracker.send(self, self._body)

    def receive(self, reply: Body | None) -> None:
        """The tracker's reply; None: there was none."""
        body, self._body = self._body, None
        if not self.alive or body is None:
            return
        if reply is None:
            wait_s = self._state.unanswered(body)
        else:
            assigned, _, wait_s = self._state.receive(reply, self.net.clock.now)
            for index, holder in assigned:
                self._fetch(index, holder)
        if self._state.is_request_due:
            return self.ask()
        self._timer += 1
        number = self._timer
        self.net.clock.call_later(wait_s, lambda: self.ask() if number == self._timer else None)

    def die(self) -> None:
        """It is killed."""
        self.alive = False
        for fetch in self._fetches.values():
            fetch.drop()

    def _fetch(self, index: int, holder: Provider) -> None:
        wrong: list[str] = []

        def end(came: bool) -> None:
            del self._fetches[index]
            error = None if came else IntegrityError("wrong bytes") if "wrong" in wrong else NetworkError("no bytes")
            if came:
                self.node.cache[index] = None
            self._state.ended(index, holder, error, self.net.clock.now)
            if came:
                self._on_slice(self, index)
            self.ask()

        fetch = SimFetch(self.net, self.node, index, [holder], end, lambda _, reason: wrong.append(reason), rounds=1)
        self._fetches[index] = fetch.start()


class Tracker:
    """The swarm of a data node, behind the latency of those who speak with it."""

    def __init__(self, net: SimNetwork) -> None:
        self.net = net
        self.swarm = Swarm(net.settings.slices)
        self._refresh()

    def send(self, reader: Reader, body: Body) -> None:
        """Carry a reader's request here and the reply back."""
        latency_s, clock = reader.machine.latency_s, self.net.clock

        def arrive() -> None:
            if self.net.is_cut(reader.node):
                return clock.call_later(REQUEST_TIMEOUT_S, lambda: reader.receive(None))
            message = SwarmRequest.model_validate(body, strict=False)
            reply = steer(self.swarm, reader.node.provider, message, clock.now)
            clock.call_later(latency_s, lambda: reader.receive(reply))

        clock.call_later(latency_s, arrive)

    def _refresh(self) -> None:
        """Origins are here; who is silent goes."""
        now = self.net.clock.now
        for node in [self.net.origin]:
            self.swarm.join(node.provider, None, now)
        self.swarm.expire(now)
        self.net.clock.call_later(1.0, self._refresh)


def swarm_bound(settings: Scenario, machines: Sequence[Machine]) -> dict[str, float]:
    """The least time in which every machine that lives to the end can have every slice.

    Source: Kumar and Ross 2006, Peer-assisted file distribution, theorem 1.
    """
    staying = [item for item in machines if item.dies_at == float("inf")]
    everything = float(settings.slices * settings.slice_bytes)
    origin_up = settings.origin_up
    all_up = origin_up + sum(item.up for item in machines)
    narrowest_s = max((item.joins_at + everything / item.down for item in staying), default=0.0)
    all_s = len(staying) * everything / all_up
    return {"origin": everything / origin_up, "narrowest link": narrowest_s, "all links": all_s}


def broadcast(settings: Scenario) -> SimulationResult:
    """Runs until every reader that lives has every slice."""
    calm = swarm_bound(settings, draw(settings.model_copy(update={"churn": 0.0}), 1.0).machines)
    faults = draw(settings, max(calm.values()))
    bound = swarm_bound(settings, faults.machines)
    world = World(settings, faults)
    ended = world.clock.run(lambda: world.left == 0, 20 * max(bound.values()) + 1000.0)
    missing = sum(settings.slices - len(item.node.cache) for item in world.readers.values() if item.alive)
    repeated = sum(max(0, count - 1) for count in world.arrivals.values())
    verdict = UsageCheck(len(world.staying) * settings.slices, missing, repeated, 0, ())
    counts = {"overdue": world.tracker.swarm.status()["overdue"]}
    fault = "" if ended else f"after {world.clock.now:,.0f} virtual seconds slices are missing."
    return SimulationResult(settings, verdict, world.clock.now, bound, world.net.origin_bytes(), counts, fault)


class World:
    """Readers that all want every slice, and their tracker."""

    def __init__(self, settings: Scenario, faults: Faults) -> None:
        self.clock = Clock()
        self.net = SimNetwork(settings, self.clock, faults)
        self.tracker = Tracker(self.net)
        self.readers: dict[int, Reader] = {}
        self.arrivals: dict[tuple[int, int], int] = {}
        self.staying = {machine.index for machine in faults.machines if machine.dies_at == float("inf")}
        self.left = len(self.staying) * settings.slices
        for machine in faults.machines:
            self._plan(machine)

    def _plan(self, machine: Machine) -> None:
        def join() -> None:
            self.readers[machine.index] = reader = Reader(self.net, self.net.join(machine), self.tracker, self._arrived)
            for index in range(self.net.settings.slices):
                reader.want(index)
            reader.ask()

        def die() -> None:
            reader = self.readers[machine.index]
            reader.die()
            self.net.kill(reader.node)

        self.clock.call_at(machine.joins_at, join)
        if machine.dies_at < float("inf"):
            self.clock.call_at(machine.dies_at, die)

    def _arrived(self, reader: Reader, index: int) -> None:
        key = reader.machine.index, index
        self.arrivals[key] = self.arrivals.get(key, 0) + 1
        self.left -= reader.machine.index in self.staying
