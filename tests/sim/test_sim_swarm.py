"""Readers that all want everything: each gets every slice, and the origin sends each about once.

A reader is production's `SwarmReaderState`, its tracker production's `steer`; here are the requests between them and
the fetches, in virtual time.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from forebay.errors import IntegrityError, NetworkError
from forebay.network.messages import SwarmRequest
from forebay.network.peer import Provider
from forebay.simulate import Scenario
from forebay.simulate.network import Clock, SimFetch, SimNetwork
from forebay.simulate.scenario import Machine, draw
from forebay.swarm.reader_state import Body, SwarmReaderState
from forebay.swarm.steering import Swarm
from forebay.swarm.tracker import steer


class Reader:
    """A process on a machine that fetches slices and shares them."""

    def __init__(self, world: Broadcast, machine: Machine) -> None:
        self.world, self.machine, self.node = world, machine, world.net.join(machine)
        self._body: Body | None = None  # of the request under way
        self._timer = 0
        self._state = SwarmReaderState(world.clock.now, address=self.node.provider.address, patience_s=float("inf"))
        for index in range(world.settings.slices):
            self._state.want(index, world.clock.now)
        self.ask()

    def ask(self) -> None:
        """Send a request to the tracker, if none is under way."""
        if self._body is not None:
            return
        clock, current = self.world.clock, None
        if self._state.is_have_due(clock.now):
            current = np.zeros(self.world.settings.slices, np.bool_)
            current[list(self.node.cache)] = True
        self._body = self._state.request(clock.now, current)
        clock.call_later(self.machine.latency_s, self._arrive)

    def _arrive(self) -> None:
        clock, message = self.world.clock, SwarmRequest.model_validate(self._body, strict=False)
        reply = steer(self.world.swarm, self.node.provider, message, clock.now)
        clock.call_later(self.machine.latency_s, lambda: self._receive(reply))

    def _receive(self, reply: Body) -> None:
        clock, self._body = self.world.clock, None
        assigned, _, wait_s = self._state.receive(reply, clock.now)
        for index, holder in assigned:
            self._fetch(index, holder)
        if self._state.is_request_due:
            return self.ask()
        self._timer += 1
        number = self._timer
        clock.call_later(wait_s, lambda: self.ask() if number == self._timer else None)

    def _fetch(self, index: int, holder: Provider) -> None:
        wrong: list[str] = []

        def end(came: bool) -> None:
            error = None if came else IntegrityError("wrong bytes") if "wrong" in wrong else NetworkError("no bytes")
            if came:
                self.node.cache[index] = None
                self.world.arrivals[self.machine.index, index] += 1
            self._state.ended(index, holder, error, self.world.clock.now)
            self.ask()

        SimFetch(
            self.world.net, self.node, index, [holder], end, lambda _, reason: wrong.append(reason), rounds=1
        ).start()


class Broadcast:
    """Readers and their tracker, a data node's swarm."""

    def __init__(self, settings: Scenario) -> None:
        self.settings, self.clock = settings, Clock()
        faults = draw(settings, 1000.0)
        self.net, self.swarm = SimNetwork(settings, self.clock, faults), Swarm(settings.slices)
        self.arrivals: Counter[tuple[int, int]] = Counter()  # of a slice at a machine
        self._refresh()
        for machine in faults.machines:
            self.clock.call_at(machine.joins_at, lambda machine=machine: Reader(self, machine))

    def _refresh(self) -> None:
        """The origin is here; who is silent goes."""
        self.swarm.join(self.net.origin.provider, None, self.clock.now)
        self.swarm.expire(self.clock.now)
        self.clock.call_later(1.0, self._refresh)


@pytest.mark.parametrize("seed", range(2))
def test_a_broadcast_reaches_all_and_the_origin_sends_again_only_what_was_given_up_for_lost(seed: int) -> None:
    """A download of more than a minute, over a slow link, is taken for lost: its slice may be sent again."""
    settings = Scenario(workers=8, slices=12, churn=0.0, seed=seed)
    world = Broadcast(settings)
    assert world.clock.run(lambda: len(world.arrivals) == 8 * settings.slices, 1e6)
    assert set(world.arrivals.values()) == {1}
    ratio = world.net.origin_bytes() / (settings.slices * settings.slice_bytes)
    assert 1.0 - 1e-9 <= ratio <= 1.0 + world.swarm.status()["overdue"] / settings.slices + 1e-9
