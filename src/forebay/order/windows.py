"""Which slices a node has open, and when: the cache that a run needs, computed before it starts.

Computed per window: a window of a lane is open from the step of its first sample to that of its last, with all slices
that contain its samples; an upper bound of what is read. About 0.5 us a slice and epoch, 100 bytes a span.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.order.epoch import Lanes
from forebay.order.plan import Order, part_of

I64 = NDArray[np.int64]
_Columns = tuple[I64, I64, I64]  # Slices, first steps, last steps.


@dataclass(frozen=True)
class Spans:
    """When a node has slices open: K spans, by first step; those of one slice neither overlap nor touch."""

    slices: I64  # [K]; a slice that lies in several lanes is open more than once an epoch
    first: I64  # [K], steps
    last: I64  # [K], steps, inclusive
    num_steps: int  # of all epochs looked at
    exact: bool  # whether the node reads every slice of a span; if not, nodes that share its lanes may read all of one

    def prefetched(self, num_steps: int) -> Spans:
        """The spans if each slice is fetched so many steps before it is needed."""
        first = np.maximum(0, self.first - num_steps)
        return Spans(*_merged(self.slices, first, self.last), self.num_steps, self.exact)

    def once(self) -> Spans:
        """One span for each slice, from its first use to its last: cached for so long, none is fetched twice."""
        order = np.lexsort((self.first, self.slices))
        slices, first, last = self.slices[order], self.first[order], self.last[order]
        starts = np.flatnonzero(np.diff(slices, prepend=-1))
        if not len(starts):
            return self
        slices, first, last = slices[starts], first[starts], np.maximum.reduceat(last, starts)
        by_first = np.argsort(first, kind="stable")
        return Spans(slices[by_first], first[by_first], last[by_first], self.num_steps, self.exact)

    def peak(self, weights: I64) -> tuple[int, int]:
        """(the most weight that is open at once, the first step at which it is); weights int64 [S]: its bytes, or 1."""
        if not len(self.slices):
            return 0, 0
        weight = weights[self.slices]
        by_last = np.argsort(self.last, kind="stable")
        ended = np.concatenate([[0], np.cumsum(weight[by_last])])
        opened = np.cumsum(weight)
        # The last span that begins at a step has the sum of all that begin there.
        open_weight = opened - ended[np.searchsorted(self.last[by_last], self.first, side="left")]
        peak = int(open_weight.max())
        return peak, int(self.first[int(open_weight.argmax())])


def window_steps(order: Order) -> int:
    """Steps that a window of a lane lasts, rounded up."""
    if not order.shuffle:
        return 1
    return -(-min(order.window_samples * order.num_lanes, max(1, order.num_samples)) // order.global_batch)


def node_spans(
    order: Order, ranks: tuple[int, int], world_size: int, *, first_epoch: int = 0, epochs: int = 1
) -> Spans:
    """The spans of the node that runs ranks [start, stop), whose batches are the order's; steps from `first_epoch`."""
    start, stop = ranks
    if not 0 <= start < stop <= world_size or first_epoch < 0 or epochs < 1:
        raise UsageError(
            f"node: expected 0 <= start < stop <= {world_size} and epochs from 0, got ranks {ranks}, epochs "
            f"{first_epoch} to {first_epoch + epochs - 1}."
        )
    parts: list[_Columns] = []
    exact = True
    for turn in range(epochs):
        columns, is_exact = _shuffled(order, first_epoch + turn, ranks, world_size) if order.shuffle else _plain(
            order, ranks, world_size
        )  # fmt: skip
        offset = turn * order.steps_per_epoch
        parts.append((columns[0], columns[1] + offset, columns[2] + offset))
        exact &= is_exact
    slices, first, last = (np.concatenate(columns) for columns in zip(*parts))
    return Spans(*_merged(slices, first, last), epochs * order.steps_per_epoch, exact)


def lanes_of(
    order: Order, ranks: tuple[int, int], world_size: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], bool]:
    """Lanes that a node reads in full batches, and in an epoch's short last one, bool [C] each; whether no other does.

    Nodes with equal results have the same spans.
    """
    num_lanes, size = order.num_lanes, order.global_batch
    full, rest = divmod(order.num_samples, size)
    period = num_lanes // int(np.gcd(size, num_lanes))
    touched, alone = np.zeros(num_lanes, bool), True
    for step in range(min(full, period)):
        mine, all_of_lane = _shares(step * size, size, num_lanes, ranks, world_size)
        touched |= mine > 0
        alone &= bool(np.all((mine == 0) | (mine == all_of_lane)))
        alone &= step == 0 or bool(np.array_equal(touched, mine > 0))
    at_end = np.zeros(num_lanes, bool)
    if rest and not order.drop_last:
        mine, all_of_lane = _shares(full * size, rest, num_lanes, ranks, world_size)
        at_end = mine > 0
        expected = np.where(touched, all_of_lane, 0) if full else np.where(mine > 0, all_of_lane, 0)
        alone &= bool(np.array_equal(mine, expected))
    return touched, at_end, alone


def _shares(first: int, size: int, num_lanes: int, ranks: tuple[int, int], world_size: int) -> tuple[I64, I64]:
    low, high = part_of(size, ranks[0], world_size)[0], part_of(size, ranks[1] - 1, world_size)[1]
    turns, more = divmod(size, num_lanes)
    of_lane = np.full(num_lanes, turns, np.int64)
    of_lane[(first + np.arange(more)) % num_lanes] += 1
    stops = np.cumsum(of_lane)
    return np.maximum(0, np.minimum(stops, high) - np.maximum(stops - of_lane, low)), of_lane


def _shuffled(order: Order, epoch: int, ranks: tuple[int, int], world_size: int) -> tuple[_Columns, bool]:
    tables = order.epoch_at(epoch)
    touched, at_end, exact = lanes_of(order, ranks, world_size)
    num_steps, size = order.steps_per_epoch, order.global_batch
    lane, low, high = _windows(tables.lanes, np.flatnonzero(touched | at_end))
    # Sample j of lane l is read at position (number of the lane's positions in the head + j) * C + l.
    before = tables.lanes.in_head(lane)
    first = ((before + low) * order.num_lanes + lane) // size
    last = ((before + high - 1) * order.num_lanes + lane) // size
    first = np.where(touched[lane], first, np.maximum(first, num_steps - 1))
    is_read = (first < num_steps) & (first <= last)
    lane, low, high, first, last = (column[is_read] for column in (lane, low, high, first, last))
    start = tables.lanes.start(lane)
    places, of_window = tables.places_under(start + low, start + high)
    slices, first, last = tables.slices[places], first[of_window], np.minimum(last[of_window], num_steps - 1)
    head = tables.lanes.head
    if head and (touched.any() or at_end.any()):
        slices = np.append(slices, tables.slices[0])
        first, last = np.append(first, 0), np.append(last, min(num_steps - 1, (head - 1) // size))
    of_head = not head or ranks == (0, world_size) or (head % size == 0 and bool(touched.any()))
    is_exact = exact and of_head and not (order.drop_last and order.num_samples % size)
    return (slices, first, last), is_exact


def _windows(lanes: Lanes, read: I64) -> _Columns:
    counts = lanes.num_windows(read)
    lane = np.repeat(read, counts)
    window = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return lane, lanes.window_start(lane, window), lanes.window_stop(lane, window)


def _plain(order: Order, ranks: tuple[int, int], world_size: int) -> tuple[_Columns, bool]:
    size = order.global_batch
    full, rest = divmod(order.num_samples, size)
    used = np.flatnonzero(order.samples_per_slice)
    stops = np.cumsum(order.samples_per_slice)[used]
    starts = stops - order.samples_per_slice[used]
    parts: list[_Columns] = []
    for steps, of_step, offset in ((full, size, 0), (int(rest > 0 and not order.drop_last), rest, full)):
        low, high = part_of(of_step, ranks[0], world_size)[0], part_of(of_step, ranks[1] - 1, world_size)[1]
        if not steps or low == high:
            continue
        starts_in_steps, until = starts - offset * size, stops - offset * size
        first = np.maximum(0, (starts_in_steps - high) // size + 1)
        last = np.minimum(steps - 1, -(-(until - low) // size) - 1)
        is_read = (first <= last) & (until > 0)
        parts.append((used[is_read], first[is_read] + offset, last[is_read] + offset))
    if not parts:
        return (np.empty(0, np.int64),) * 3, True
    slices, first, last = (np.concatenate(columns) for columns in zip(*parts))
    return (slices, first, last), True


def _merged(slices: I64, first: I64, last: I64) -> _Columns:
    """Merge spans of one slice that overlap or touch; sorted by first step."""
    if not len(slices):
        return slices, first, last
    order = np.lexsort((first, slices))
    slices, first, last = slices[order], first[order], last[order]
    other = np.diff(slices, prepend=-1) != 0
    # The latest end so far within the slice: groups are kept apart by more than any step.
    group = np.cumsum(other) * (int(last.max()) + 2)
    reached = np.maximum.accumulate(group + last) - group
    fresh = other.copy()
    fresh[1:] |= first[1:] > reached[:-1] + 1
    starts = np.flatnonzero(fresh)
    merged = slices[starts], first[starts], np.maximum.reduceat(last, starts)
    by_first = np.argsort(merged[1], kind="stable")
    return merged[0][by_first], merged[1][by_first], merged[2][by_first]
