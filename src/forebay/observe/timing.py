"""A model of fetching during training: one node, one link, one cache. Pure arithmetic.

Slices are fetched one after another at the link's full bandwidth, in order of first use, as soon as the cache has
space, that is when slices of as many bytes were used for the last time; training waits at a step whose slice has not
arrived. Not modelled: latency, other traffic, and that a slice of a window may be needed later than the window's first
step, so a real run waits a little less.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.order.windows import Spans

I64 = NDArray[np.int64]
_HALVINGS = 60


@dataclass(frozen=True)
class Fetches:
    """The fetches of a node, in their order."""

    sizes: I64  # int64 [K], bytes.
    needed: I64  # int64 [K], the step that waits for each; rising.
    # [K], steps that must end before there is space for it; rising, and at most `needed` if the cache holds all open
    # slices.
    free: I64
    num_steps: int  # Of training.


@dataclass(frozen=True)
class Times:
    """Seconds."""

    first_s: float  # Until the slices of the first step have arrived.
    stall_s: float  # Total time that training waits after that.
    total_s: float  # From the start of fetching to the end of training.


def fetches_of(spans: Spans, sizes: I64, budget_bytes: int) -> Fetches:
    """The fetches of a node, one per span; `sizes` [S] of the slices; the budget is at least the spans' peak."""
    of_span = sizes[spans.slices]
    by_last = np.argsort(spans.last, kind="stable")
    ended = np.cumsum(of_span[by_last])
    over = np.cumsum(of_span) - budget_bytes
    last_use = np.minimum(np.searchsorted(ended, over, side="left"), max(0, len(ended) - 1))
    free = np.where(over > 0, spans.last[by_last][last_use] + 1, 0)
    # Fetches for the same step are merged.
    starts = np.flatnonzero(np.diff(spans.first, prepend=-1))
    if not len(starts):
        return Fetches(of_span, spans.first, free, spans.num_steps)
    grouped = np.add.reduceat(of_span, starts)
    return Fetches(grouped, spans.first[starts], np.maximum.reduceat(free, starts), spans.num_steps)


def times_of(fetches: Fetches, bytes_per_s: float, step_s: float) -> Times:
    """The times at a bandwidth, if a step of training takes `step_s`."""
    arrived = stall = first = 0.0
    history: list[tuple[int, float]] = [(-1, 0.0)]  # (step, the stall up to it)
    index = 0
    for size, needed, free in zip(fetches.sizes.tolist(), fetches.needed.tolist(), fetches.free.tolist()):
        while index + 1 < len(history) and history[index + 1][0] < free:
            index += 1
        free_at = free * step_s + history[index][1] if free else 0.0
        arrived = max(arrived, free_at) + size / bytes_per_s
        late = arrived - (needed * step_s + stall)
        if late > 0:
            stall += late
            history.append((needed, stall))
        if needed == 0:
            first = stall
    return Times(first, stall - first, stall + fetches.num_steps * step_s)


def bandwidth_needed(fetches: Fetches, step_s: float) -> float | None:
    """The lowest bandwidth in bytes per second at which training never waits after its first step.

    None if no bandwidth suffices: the cache has no space to prefetch, so each fetch starts when its slice is needed.
    """
    later = fetches.needed > 0
    if not later.any():
        return 0.0
    # Time is counted from the start of the first step.
    sizes, needed = fetches.sizes[later].astype(float), fetches.needed[later] * step_s
    free = np.minimum(fetches.free[later], fetches.needed[later]) * step_s
    if bool((free >= needed).any()):
        return None
    stops = np.cumsum(sizes)
    starts = stops - sizes

    def suffices(rate: float) -> bool:
        return bool((np.maximum.accumulate(free - starts / rate) + stops / rate <= needed * (1 + 1e-12)).all())

    low = high = float(stops[-1] / needed[-1])
    while not suffices(high):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high
