"""How long fetching takes beside training: a model of one node, one link and one cache. Pure arithmetic.

Slices are fetched one after another at the link's full bandwidth, in order of first use, as soon as the cache has
room, that is when slices of as many bytes were used for the last time; training waits at the step that needs a slice
which is not here yet. What it leaves out: latency, other traffic, and that a slice of a window may not be needed at the
window's first step, so that a real run waits rather less.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.order.windows import Spans

I64 = NDArray[np.int64]
_HALVINGS = 60


@dataclass(frozen=True)
class Flow:
    """Fetches in their order."""

    sizes: I64  # int64 [K], bytes.
    needed: I64  # int64 [K], the step that waits for each; rising.
    # [K], steps that must be over before there is room for it; rising, and not above `needed` where the cache holds
    # what is open.
    free: I64
    num_steps: int  # Of training.


@dataclass(frozen=True)
class Times:
    """Seconds."""

    first_s: float  # Until the slices of the first step's windows are here.
    stall_s: float  # What training waits after that, in all.
    total_s: float  # From the start of fetching to the end of training.


def flow_of(spans: Spans, sizes: I64, budget_bytes: int) -> Flow:
    """The fetches of a node, a span each; `sizes` [S] of the slices; the budget is at least the spans' peak."""
    of_span = sizes[spans.slices]
    by_last = np.argsort(spans.last, kind="stable")
    ended = np.cumsum(of_span[by_last])
    over = np.cumsum(of_span) - budget_bytes
    at = np.minimum(np.searchsorted(ended, over, side="left"), max(0, len(ended) - 1))
    free = np.where(over > 0, spans.last[by_last][at] + 1, 0)
    # Fetches that one step waits for are one.
    starts = np.flatnonzero(np.diff(spans.first, prepend=-1))
    if not len(starts):
        return Flow(of_span, spans.first, free, spans.num_steps)
    grouped = np.add.reduceat(of_span, starts)
    return Flow(grouped, spans.first[starts], np.maximum.reduceat(free, starts), spans.num_steps)


def times_of(flow: Flow, bytes_per_s: float, step_s: float) -> Times:
    """How long it takes at a bandwidth, where a step of training takes `step_s`."""
    arrived = stall = first = 0.0
    history: list[tuple[int, float]] = [(-1, 0.0)]  # (step, the stall up to it)
    at = 0
    for size, needed, free in zip(flow.sizes.tolist(), flow.needed.tolist(), flow.free.tolist()):
        while at + 1 < len(history) and history[at + 1][0] < free:
            at += 1
        room_at = free * step_s + history[at][1] if free else 0.0
        arrived = max(arrived, room_at) + size / bytes_per_s
        late = arrived - (needed * step_s + stall)
        if late > 0:
            stall += late
            history.append((needed, stall))
        if needed == 0:
            first = stall
    return Times(first, stall - first, stall + flow.num_steps * step_s)


def bandwidth_needed(flow: Flow, step_s: float) -> float | None:
    """The least bytes per second at which training never waits after its first step; None if none suffices.

    None means that the cache has no room to fetch ahead: what is needed next can only begin to come when it is needed.
    """
    later = flow.needed > 0
    if not later.any():
        return 0.0
    # The first step is waited for in any case: the clock begins when it begins.
    sizes, needed = flow.sizes[later].astype(float), flow.needed[later] * step_s
    free = np.minimum(flow.free[later], flow.needed[later]) * step_s
    if bool((free >= needed).any()):
        return None
    ends = np.cumsum(sizes)
    begins = ends - sizes

    def suffices(rate: float) -> bool:
        return bool((np.maximum.accumulate(free - begins / rate) + ends / rate <= needed * (1 + 1e-12)).all())

    low = high = float(ends[-1] / needed[-1])
    while not suffices(high):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high
