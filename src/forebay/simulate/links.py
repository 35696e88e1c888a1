"""Virtual time, and links with the transfers over them.

Every node has a bandwidth up and one down, and transfers share them max-min fairly: no transfer can be faster without
slowing one that is not faster. This approximates many TCP streams over two access links. When a transfer starts or
ends, all rates are computed again by progressive filling: links that are the bottleneck of all their transfers are
fixed first, the others share the remaining bandwidth.

Cost: 0.1 to 0.4 ms for each start or end among 1,000 transfers (NumPy over all of them).
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class Clock:
    """Virtual time in seconds from the start: events in order of their time, then of their creation.

    A run depends on its arguments only: nothing sleeps or reads a real clock. An event costs some 2 us.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._tie = itertools.count()

    def call_at(self, time: float, act: Callable[[], object]) -> None:
        """Call `act` at a time; if that has passed, now, after the events that are due."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._tie), act))

    def call_later(self, seconds: float, act: Callable[[], object]) -> None:
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


F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_DONE_BYTES = 1e-3  # of a transfer that has ended, by rounding


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
    done: Callable[[], object]
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

    def start(self, source: int, target: int, num_bytes: float, done: Callable[[], object]) -> Flow:
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
