"""The simulated network: virtual time, links with the transfers over them, machines, and fetches of slices.

Every node has a bandwidth up and one down, and transfers share them max-min fairly: no transfer can be faster without
slowing one that is not faster. This approximates many TCP streams over two access links.

A fetch tries its providers in order: one that is dead refuses at once, one that is cut off or silent times out after
`STALL_S`, and wrong bytes are noticed when all have arrived. Bytes that arrived before a provider died are kept. If no
provider sends the slice, all are tried again, some times, after a back-off.

Cost: 0.1 to 0.4 ms for each start or end among 1,000 transfers (NumPy over all of them).
"""

import heapq
import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from forebay.arrays import F64, I64
from forebay.network.peer import Provider
from forebay.simulate.scenario import Faults, Machine, Scenario
from forebay.storage.retry import backoff_s

Action: TypeAlias = Callable[[], object]
STALL_S = 5.0
_ROUNDS = 4  # how often all providers of a fetch are tried
_DONE_BYTES = 1e-3  # of a transfer that has ended, by rounding


class Clock:
    """Virtual time in seconds from the start: events in order of their time, then of their creation.

    A run depends on its arguments only: nothing sleeps or reads a real clock. An event costs some 2 us.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._queue: list[tuple[float, int, Action]] = []
        self._tie = itertools.count()

    def call_at(self, time: float, act: Action) -> None:
        """Call `act` at a time; if that has passed, now, after the events that are due."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._tie), act))

    def call_later(self, seconds: float, act: Action) -> None:
        """Call `act` after some seconds."""
        self.call_at(self.now + seconds, act)

    def run(self, is_over: Callable[[], bool], until: float) -> bool:
        """Process events until `is_over`, the queue is empty, or a time is reached; whether it is over."""
        while not is_over():
            if not self._queue or self._queue[0][0] > until:
                return False
            self.now, _, act = heapq.heappop(self._queue)
            self.num_events += 1
            act()
        return True


def fair_rates(sources: I64, targets: I64, up: F64, down: F64) -> F64:
    """The max-min fair rate of each transfer, float64 [K] in bytes/s.

    Args:
        sources, targets: int64 [K], nodes.
        up, down: float64 [N], bytes/s of each node.

    Source: Bertsekas and Gallager, Data Networks, 6.5.2 (progressive filling). Cost: O((K + N) rounds), mostly 1 to 4.
    """
    num = len(up)
    capacity = np.concatenate((up, down))
    rates = np.zeros(len(sources))
    open_ = np.arange(len(sources))
    a, b = sources, targets + num
    while len(open_):
        counts = np.bincount(a, minlength=2 * num) + np.bincount(b, minlength=2 * num)
        share = capacity / np.maximum(counts, 1)
        rate = np.minimum(share[a], share[b])
        min_rate = np.full(2 * num, np.inf)
        np.minimum.at(min_rate, a, rate)
        np.minimum.at(min_rate, b, rate)
        narrow = min_rate >= share * (1 - 1e-12)  # none of its transfers has a narrower link
        fixed = (narrow[a] & (share[a] <= rate)) | (narrow[b] & (share[b] <= rate))
        rates[open_[fixed]] = rate[fixed]
        capacity -= np.bincount(a[fixed], rate[fixed], 2 * num) + np.bincount(b[fixed], rate[fixed], 2 * num)
        np.maximum(capacity, 0.0, out=capacity)
        open_, a, b = open_[~fixed], a[~fixed], b[~fixed]
    return rates


@dataclass(eq=False)
class Flow:
    """A running transfer. `row` is its row in the arrays, -1 after its end."""

    source: int
    target: int
    num_bytes: float
    done: Action
    row: int = -1


class Links:
    """The links of all nodes. Nodes are numbered from 0 in the order in which they were added."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._up: list[float] = []
        self._down: list[float] = []
        self._caps: tuple[F64, F64] = (np.empty(0), np.empty(0))
        self.sent: list[float] = []  # bytes that each node has sent, in ended transfers
        self._flows: list[Flow] = []
        self._sources, self._targets = np.empty(16, np.int64), np.empty(16, np.int64)
        self._remaining, self._rates = np.empty(16), np.empty(16)
        self._moved_at = 0.0
        self._version = 0
        self._is_due = False

    def add(self, up: float, down: float) -> int:
        """Add a node with these bandwidths in bytes/s; its number."""
        self._up.append(up)
        self._down.append(down)
        self.sent.append(0.0)
        self._caps = (np.array(self._up), np.array(self._down))
        return len(self._up) - 1

    def start(self, source: int, target: int, num_bytes: float, done: Action) -> Flow:
        """Start a transfer; `done` is called when its last byte has arrived."""
        flow = Flow(source, target, float(num_bytes), done)
        self._move_bytes()
        if len(self._flows) == len(self._remaining):
            self._sources, self._targets = np.tile(self._sources, 2), np.tile(self._targets, 2)
            self._remaining, self._rates = np.tile(self._remaining, 2), np.tile(self._rates, 2)
        flow.row = len(self._flows)
        self._flows.append(flow)
        self._sources[flow.row], self._targets[flow.row] = source, target
        self._remaining[flow.row], self._rates[flow.row] = flow.num_bytes, 0.0
        self._change()
        return flow

    def cancel(self, flow: Flow) -> float:
        """End a transfer; the bytes that were sent, 0 if it had ended."""
        if flow.row < 0:
            return 0.0
        self._move_bytes()
        moved = flow.num_bytes - float(self._remaining[flow.row])
        self._remove(flow, moved)
        self._change()
        return moved

    def _move_bytes(self) -> None:
        if self._clock.now > self._moved_at:
            n = len(self._flows)
            self._remaining[:n] -= self._rates[:n] * (self._clock.now - self._moved_at)
            self._moved_at = self._clock.now

    def _remove(self, flow: Flow, moved: float) -> None:
        row, last = flow.row, len(self._flows) - 1
        moving = self._flows.pop()
        if moving is not flow:
            self._flows[row] = moving
            moving.row = row
            for array in (self._sources, self._targets, self._remaining, self._rates):
                array[row] = array[last]
        flow.row = -1
        self.sent[flow.source] += moved

    def _change(self) -> None:
        """Compute the rates again, once for all changes at this time."""
        if not self._is_due:
            self._is_due = True
            self._clock.call_at(self._clock.now, self._share_out)

    def _share_out(self) -> None:
        self._is_due = False
        self._move_bytes()
        n = len(self._flows)
        self._version += 1
        if not n:
            return
        self._rates[:n] = fair_rates(self._sources[:n], self._targets[:n], *self._caps)
        rates = self._rates[:n]
        going = rates > 0
        if going.any():
            soonest = float(np.min(self._remaining[:n][going] / rates[going]))
            version = self._version
            self._clock.call_later(max(0.0, soonest), lambda: self._end(version))

    def _end(self, version: int) -> None:
        """End the transfers that are complete, unless the rates changed since this call was scheduled."""
        if version != self._version:
            return
        self._move_bytes()
        n = len(self._flows)
        limit = np.maximum(_DONE_BYTES, self._rates[:n] * 1e-9)
        ended = [self._flows[i] for i in np.flatnonzero(self._remaining[:n] <= limit)]
        for flow in ended:
            self._remove(flow, flow.num_bytes)
        self._change()
        for flow in ended:
            flow.done()


@dataclass(eq=False)
class SimNode:
    """A machine on the network. `cache`: its slices, the latest used last; an origin has all."""

    provider: Provider
    link: int
    machine: Machine | None
    alive: bool = True
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    fetches: "set[SimFetch]" = field(default_factory=set)  # of other nodes, from this one


@dataclass(eq=False)
class SimNetwork:
    """The machines, the links between them, and their current faults."""

    settings: Scenario
    clock: Clock
    faults: Faults

    def __post_init__(self) -> None:
        self.links = Links(self.clock)
        self.nodes: dict[str, SimNode] = {}
        self.counts: Counter[str] = Counter()
        self.retry_chance = self.chance("retries")
        self.origin = self._add(Provider("origin", "origin:1", True), self.settings.origin_up, 1e12, None)

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


@dataclass(eq=False)
class SimFetch:
    """The fetch of a slice by a node.

    Args:
        providers: In the order in which they are tried.
        on_end: Called at the end, with whether the slice arrived.
        on_bad: Called with a provider that sent wrong bytes or none, and the reason.
    """

    net: SimNetwork
    asker: SimNode
    index: int
    providers: Sequence[Provider]
    on_end: Callable[[bool], object]
    on_bad: Callable[[str, str], object]

    def __post_init__(self) -> None:
        self.net.counts["fetches"] += 1
        self.number = self.net.counts["fetches"]
        self._untried = list(self.providers)
        self._remaining = float(self.net.settings.slice_bytes)
        self._round, self._position = 1, 0
        self._flow: Flow | None = None
        self._source: SimNode | None = None
        self.over = False

    def start(self) -> "SimFetch":
        """Start. It ends later, never within this call."""
        self.net.clock.call_later(0.0, lambda: None if self.over else self._next())
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
            self._remaining = max(1.0, self._remaining - self.net.links.cancel(self._flow))
        if self._source is not None:
            self._source.fetches.discard(self)
        self._flow = self._source = None

    def _next(self) -> None:
        if self._position >= len(self._untried):
            if self._round >= _ROUNDS or not self._untried:
                return self._end(False)
            wait_s = backoff_s(self._round, 0.2, 5.0, chance=self.net.retry_chance)
            self._round, self._position = self._round + 1, 0
            return self.net.clock.call_later(wait_s, self._ask)
        machine = self.asker.machine
        latency_s = self.net.settings.latency_s if machine is None else 2 * machine.latency_s
        self.net.clock.call_later(latency_s, self._ask)

    def _ask(self) -> None:
        if self.over:
            return
        source = self.net.nodes[self._untried[self._position].peer_id]
        lie = source.machine.lie if source.machine is not None else ""
        if self.net.is_cut(source) or self.net.is_cut(self.asker):
            return self.net.clock.call_later(STALL_S, self._skip)
        if not source.alive or (source.machine and self.index not in source.cache) or lie == "refuse":
            self.net.counts["refused"] += 1
            return self._skip()
        if lie == "silent":
            self.net.counts["stalls"] += 1
            return self.net.clock.call_later(STALL_S, lambda: self._blame("silent"))
        self._source = source
        source.fetches.add(self)
        size = float(self.net.settings.slice_bytes) if lie == "wrong" else self._remaining
        done = (lambda: self._blame("wrong")) if lie == "wrong" else lambda: self._end(True)
        self._flow = self.net.links.start(source.link, self.asker.link, size, done)

    def _skip(self) -> None:
        if not self.over:
            self._position += 1
            self._next()

    def _blame(self, kind: str) -> None:
        if self.over:
            return
        self._release()
        self.net.counts[kind] += 1
        self.on_bad(self._untried.pop(self._position).peer_id, kind)
        self._next()

    def _end(self, arrived: bool) -> None:
        self._release()
        if not self.over:
            self.over = True
            self.on_end(arrived)
