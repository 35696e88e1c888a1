"""The machines of the simulated network, and fetches of slices between them.

A fetch tries its providers in order: one that is dead refuses at once, one that is cut off or silent times out after
`STALL_S`, and wrong bytes are noticed when all have arrived. Bytes that arrived before a provider died are kept. If no
provider sends the slice, all are tried again, some times, after a back-off.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.network.peer import Provider
from forebay.network.retry import backoff_s
from forebay.simulate.links import Clock, Flow, Links
from forebay.simulate.scenario import Faults, Machine, Scenario

STALL_S = 5.0
_ROUNDS = 4


@dataclass(eq=False)
class SimNode:
    """A machine on the network. `cache`: its slices, the latest used last; an origin has all."""

    provider: Provider
    link: int
    machine: Machine | None = None
    alive: bool = True
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    fetches: set[SimFetch] = field(default_factory=set)  # of other nodes, from this one


class SimNetwork:
    """The machines, the links between them, and their current faults."""

    def __init__(self, settings: Scenario, clock: Clock, faults: Faults) -> None:
        self.settings = settings
        self.clock = clock
        self.links = Links(clock)
        self.faults = faults
        self.nodes: dict[str, SimNode] = {}
        self.counts: Counter[str] = Counter()
        self.retry_chance = self.chance("retries")
        self.origin = self._add(Provider("origin", "origin:1", True), settings.origin_up, 1e12, None)

    def join(self, machine: Machine) -> SimNode:
        """Add a worker's machine."""
        name = f"worker-{machine.index}"
        return self._add(Provider(name, f"{name}:1", False), machine.up, machine.down, machine)

    def _add(self, provider: Provider, up: float, down: float, machine: Machine | None) -> SimNode:
        node = SimNode(provider, self.links.add(up, down), machine)
        self.nodes[provider.peer_id] = node
        return node

    def kill(self, node: SimNode) -> None:
        """End a machine and its uploads. The caller drops its own fetches."""
        node.alive = False
        for fetch in sorted(node.fetches, key=lambda fetch: fetch.number):
            fetch.resume_elsewhere()

    def is_cut(self, node: SimNode) -> bool:
        """Whether a machine is cut off now."""
        return node.machine is not None and self.faults.is_cut(node.machine.index, self.clock.now)

    def chance(self, purpose: str) -> random.Random:
        """A random generator for a purpose."""
        return random.Random(f"{self.settings.seed} {purpose}")

    def origin_bytes(self) -> float:
        """Bytes that the origin has sent, in ended transfers."""
        return self.links.sent[self.origin.link]


class SimFetch:
    """The fetch of a slice by a node.

    Args:
        providers: In the order in which they are tried.
        on_end: Called at the end, with whether the slice arrived.
        on_bad: Called with a provider that sent wrong bytes or none, and the reason.
        rounds: How often all providers are tried.
    """

    def __init__(
        self, net: SimNetwork, asker: SimNode, index: int, providers: Sequence[Provider],
        on_end: Callable[[bool], object], on_bad: Callable[[str, str], object], rounds: int = _ROUNDS,
    ) -> None:  # fmt: skip
        net.counts["fetches"] += 1
        self.number = net.counts["fetches"]
        self._net, self._asker, self.index = net, asker, index
        self._providers, self._on_end, self._on_bad = list(providers), on_end, on_bad
        self._remaining = float(net.settings.slice_bytes)
        self._rounds, self._round, self._position = rounds, 1, 0
        self._flow: Flow | None = None
        self._source: SimNode | None = None
        self.over = False

    def start(self) -> SimFetch:
        """Start. It ends later, never within this call."""
        self._net.clock.call_later(0.0, lambda: None if self.over else self._next())
        return self

    def drop(self) -> None:
        """Cancel it, without a call of `on_end`."""
        self.over = True
        self._release()

    def resume_elsewhere(self) -> None:
        """The provider died: continue with the next one."""
        self._release()
        self._position += 1
        self._next()

    def _release(self) -> None:
        if self._flow is not None:
            self._remaining = max(1.0, self._remaining - self._net.links.cancel(self._flow))
        if self._source is not None:
            self._source.fetches.discard(self)
        self._flow = self._source = None

    def _next(self) -> None:
        if self._position >= len(self._providers):
            if self._round >= self._rounds or not self._providers:
                return self._end(False)
            wait_s = backoff_s(self._round, 0.2, 5.0, chance=self._net.retry_chance)
            self._round, self._position = self._round + 1, 0
            return self._net.clock.call_later(wait_s, self._ask)
        self._net.clock.call_later(self._latency(), self._ask)

    def _latency(self) -> float:
        machine = self._asker.machine
        return self._net.settings.latency_s if machine is None else 2 * machine.latency_s

    def _ask(self) -> None:
        if self.over:
            return
        source = self._net.nodes[self._providers[self._position].peer_id]
        lie = source.machine.lie if source.machine is not None else ""
        if self._net.is_cut(source) or self._net.is_cut(self._asker):
            return self._net.clock.call_later(STALL_S, self._skip)
        if not source.alive or (source.machine and self.index not in source.cache) or lie == "refuse":
            self._net.counts["refused"] += 1
            return self._skip()
        if lie == "silent":
            self._net.counts["stalls"] += 1
            return self._net.clock.call_later(STALL_S, lambda: self._blame("silent"))
        self._source = source
        source.fetches.add(self)
        size = float(self._net.settings.slice_bytes) if lie == "wrong" else self._remaining
        done = (lambda: self._blame("wrong")) if lie == "wrong" else lambda: self._end(True)
        self._flow = self._net.links.start(source.link, self._asker.link, size, done)

    def _skip(self) -> None:
        if not self.over:
            self._position += 1
            self._next()

    def _blame(self, kind: str) -> None:
        if self.over:
            return
        self._release()
        self._net.counts[kind] += 1
        self._on_bad(self._providers.pop(self._position).peer_id, kind)
        self._next()

    def _end(self, arrived: bool) -> None:
        self._release()
        if not self.over:
            self.over = True
            self._on_end(arrived)
