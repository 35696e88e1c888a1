"""Who stands where on the simulated network, and how one slice comes from there to here.

A fetch asks the providers that it was told of, in their order, as the store does: whoever is gone refuses at once, who
is cut off or says nothing is given up after `STALL_S`, and wrong bytes are known when all are there. What came before
a provider died is kept. When nobody gave the slice the round is repeated, some times, after the store's back-off.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.network.peer import Provider
from forebay.network.retry import backoff_s
from forebay.simulate.faults import Faults, Machine
from forebay.simulate.links import Clock, Flow, Links
from forebay.simulate.settings import SimulationSettings

STALL_S = 5.0
_ROUNDS = 4


@dataclass(eq=False)
class SimNode:
    """A machine on the network. `cache` are the slices that it holds, the latest used last; an origin has all."""

    holder: Provider
    link: int
    machine: Machine | None = None
    alive: bool = True
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    fetches: set[SimFetch] = field(default_factory=set)  # Of others, from here.

    def has(self, index: int) -> bool:
        """Whether it holds a slice."""
        return self.machine is None or index in self.cache


class SimNetwork:
    """The machines, the links between them, and what is wrong with them now."""

    def __init__(self, settings: SimulationSettings, clock: Clock, faults: Faults) -> None:
        self.settings = settings
        self.clock = clock
        self.links = Links(clock)
        self.faults = faults
        self.nodes: dict[str, SimNode] = {}
        self.counts: Counter[str] = Counter()
        self.retry_chance = self.chance("retries")
        self.origins = [self._origin(i) for i in range(settings.origins)]

    def _origin(self, number: int) -> SimNode:
        return self._add(Provider(f"origin-{number}", f"origin-{number}:1", True), self.settings.origin_up, 1e12, None)

    def join(self, machine: Machine) -> SimNode:
        """A worker's machine comes up."""
        name = f"worker-{machine.index}"
        return self._add(Provider(name, f"{name}:1", False), machine.up, machine.down, machine)

    def _add(self, holder: Provider, up: float, down: float, machine: Machine | None) -> SimNode:
        node = SimNode(holder, self.links.add(up, down), machine)
        self.nodes[holder.peer_id] = node
        return node

    def kill(self, node: SimNode) -> None:
        """A machine ends; what it was giving breaks off. Its own fetches are the caller's to drop."""
        node.alive = False
        for fetch in sorted(node.fetches, key=lambda fetch: fetch.number):
            fetch.broke()

    def is_cut(self, node: SimNode) -> bool:
        """Whether nobody hears a machine now."""
        return node.machine is not None and self.faults.is_cut(node.machine.index, self.clock.now)

    def chance(self, purpose: str) -> random.Random:
        """A generator of its own for a purpose."""
        return random.Random(f"{self.settings.seed} {purpose}")

    def origin_bytes(self) -> float:
        """What origins have sent of ended transfers."""
        return sum(self.links.sent[node.link] for node in self.origins)


class SimFetch:
    """One slice on its way to a node.

    Args:
        providers: Whom to ask, in this order.
        on_end: Told whether it came, or not.
        on_bad: Told of a provider that gave wrong bytes or none, and why.
        rounds: How often all are asked.
    """

    def __init__(
        self,
        net: SimNetwork,
        asker: SimNode,
        index: int,
        providers: Sequence[Provider],
        on_end: Callable[[bool], object],
        on_bad: Callable[[str, str], object],
        rounds: int = _ROUNDS,
    ) -> None:
        net.counts["fetches"] += 1
        self.number = net.counts["fetches"]
        self._net, self._asker, self.index = net, asker, index
        self._providers, self._on_end, self._on_bad = list(providers), on_end, on_bad
        self._left = float(net.settings.slice_bytes)
        self._rounds, self._round, self._at = rounds, 1, 0
        self._flow: Flow | None = None
        self._source: SimNode | None = None
        self.over = False

    def start(self) -> SimFetch:
        """Begins. It ends later, never within this call."""
        self._net.clock.call_later(0.0, self._begin)
        return self

    def _begin(self) -> None:
        if not self.over:
            self._next()

    def drop(self) -> None:
        """Gives it up; nobody is told."""
        self.over = True
        self._let_go()

    def broke(self) -> None:
        """The provider ended; another goes on where it stopped."""
        self._let_go()
        self._at += 1
        self._next()

    def _let_go(self) -> None:
        if self._flow is not None:
            self._left = max(1.0, self._left - self._net.links.cancel(self._flow))
        if self._source is not None:
            self._source.fetches.discard(self)
        self._flow = self._source = None

    def _next(self) -> None:
        if self._at >= len(self._providers):
            if self._round >= self._rounds or not self._providers:
                return self._end(False)
            wait_s = backoff_s(self._round, 0.2, 5.0, chance=self._net.retry_chance)
            self._round, self._at = self._round + 1, 0
            return self._net.clock.call_later(wait_s, self._ask)
        self._net.clock.call_later(self._latency(), self._ask)

    def _latency(self) -> float:
        machine = self._asker.machine
        return self._net.settings.latency_s if machine is None else 2 * machine.latency_s

    def _ask(self) -> None:
        if self.over:
            return
        holder = self._providers[self._at]
        source = self._net.nodes[holder.peer_id]
        lie = source.machine.lie if source.machine is not None else ""
        if self._net.is_cut(source) or self._net.is_cut(self._asker):
            return self._net.clock.call_later(STALL_S, self._skip)
        if not source.alive or not source.has(self.index):
            self._net.counts["refused"] += 1
            return self._skip()
        if lie == "refuse":
            self._net.counts["refused"] += 1
            return self._skip()
        if lie == "silent":
            self._net.counts["stalls"] += 1
            return self._net.clock.call_later(STALL_S, lambda: self._blame("silent"))
        self._source = source
        source.fetches.add(self)
        if lie == "wrong":
            size = float(self._net.settings.slice_bytes)
            self._flow = self._net.links.start(source.link, self._asker.link, size, lambda: self._blame("wrong"))
        else:
            self._flow = self._net.links.start(source.link, self._asker.link, self._left, lambda: self._arrive())

    def _skip(self) -> None:
        if not self.over:
            self._at += 1
            self._next()

    def _blame(self, kind: str) -> None:
        """Nothing true came of this one: it is not asked again."""
        if self.over:
            return
        self._let_go()
        self._net.counts[kind] += 1
        self._on_bad(self._providers.pop(self._at).peer_id, kind)
        self._next()

    def _arrive(self) -> None:
        self._let_go()
        self._end(True)

    def _end(self, came: bool) -> None:
        if not self.over:
            self.over = True
            self._on_end(came)
