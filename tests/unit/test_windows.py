"""What windows keep open: against every sample of small runs, read one by one."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.order.plan import Order
from forebay.order.run import BatchSizes, Run
from forebay.order.windows import Spans, node_spans, window_steps


@st.composite
def cases(draw):
    counts = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any))
    batch = draw(st.integers(1, 12))
    order = Order(
        np.array(counts),
        draw(st.integers(0, 5)),
        batch,
        lanes=draw(st.integers(1, 6)),
        window=draw(st.integers(1, 40)),
        shuffle=draw(st.booleans() | st.just(True)),
        drop_last=draw(st.booleans()),
        head=draw(st.none() | st.integers(0, 20)),
    )
    world = draw(st.integers(1, 6))
    start = draw(st.integers(0, world - 1))
    return order, (start, draw(st.integers(start + 1, world))), world, draw(st.integers(1, 3))


def read_by(order: Order, ranks: tuple[int, int], world: int, epochs: int):
    """(run step, slice, window) of each sample that the node reads, and the windows' slices, sample by sample."""
    result = []
    per_epoch = order.steps_per_epoch
    for epoch in range(epochs):
        for step in range(per_epoch):
            for rank in range(*ranks):
                positions = order.positions(step, rank, world)
                slices, _ = order.samples_at(epoch, positions)
                for position, index in zip(positions.tolist(), slices.tolist()):
                    head = order.head_samples if epoch == 0 else 0
                    if not order.shuffle:
                        window = ("slice", index)
                    elif position < head:
                        window = ("head",)
                    else:
                        lane = position % order.num_lanes
                        before = len(range(head + (lane - head) % order.num_lanes, position, order.num_lanes))
                        # Lanes begin in turn within a window, unless a lane is one window.
                        full = order.window_samples * order.num_lanes >= order.num_samples
                        phase = 0 if full else lane * order.window_samples // order.num_lanes
                        window = (lane, (before + phase) // order.window_samples)
                    result.append((epoch * per_epoch + step, index, (epoch, *window)))
    return result


@settings(max_examples=150, deadline=None)
@given(cases())
def test_spans_are_those_of_the_windows(case):
    order, ranks, world, epochs = case
    spans = node_spans(order, ranks, world, epochs=epochs)
    result = read_by(order, ranks, world, epochs)
    windows: dict[object, tuple[set[int], set[int]]] = {}
    for step, index, window in result:
        steps, slices = windows.setdefault(window, (set(), set()))
        steps.add(step)
        slices.add(index)
    opened = {
        (step, s) for steps, slices in windows.values() for step in range(min(steps), max(steps) + 1) for s in slices
    }
    reported = {
        (step, s)
        for s, low, high in zip(spans.slices.tolist(), spans.first.tolist(), spans.last.tolist())
        for step in range(low, high + 1)
    }
    assert opened <= reported
    if spans.exact:
        assert opened == reported
    # Spans of a slice neither overlap nor touch, and go by first step.
    assert len(reported) == int((spans.last - spans.first + 1).sum()) and (np.diff(spans.first) >= 0).all()
    for index in set(spans.slices.tolist()):
        mine = sorted((int(a), int(b)) for s, a, b in zip(spans.slices, spans.first, spans.last) if s == index)
        assert all(later[0] > earlier[1] + 1 for earlier, later in itertools.pairwise(mine))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_no_slice_is_read_outside_its_span(case):
    order, ranks, world, epochs = case
    if not order.steps_per_epoch:
        return
    spans = node_spans(order, ranks, world, epochs=epochs)
    run = Run([order], BatchSizes.of(order.global_batch), epochs=epochs, drop_last=order.drop_last)
    uses = {
        (int(step), int(index))
        for rank in range(*ranks)
        for step, _, index in zip(*run.uses(0, run.num_steps, rank, world))
    }
    reported = {
        (step, s)
        for s, low, high in zip(spans.slices.tolist(), spans.first.tolist(), spans.last.tolist())
        for step in range(low, high + 1)
    }
    assert uses <= reported
    if spans.exact:
        assert {s for _, s in uses} == set(spans.slices.tolist())


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 9))
def test_peaks_are_sums_of_what_is_open(case, lead):
    order, ranks, world, epochs = case
    spans = node_spans(order, ranks, world, epochs=epochs)
    weights = np.arange(1, len(order.samples_per_slice) + 1)

    def brute(retained: Spans, early: int, once: bool) -> int:
        max_value = 0
        for step in range(spans.num_steps):
            current = set()
            for s in set(retained.slices.tolist()):
                mine = retained.slices == s
                low, high = retained.first[mine] - early, retained.last[mine]
                inside = low.min() <= step <= high.max() if once else ((low <= step) & (step <= high)).any()
                current |= {s} if inside else set()
            max_value = max(max_value, sum(int(weights[s]) for s in current))
        return max_value

    assert spans.peak(weights)[0] == brute(spans, 0, False)
    assert spans.prefetched(lead).peak(weights)[0] == brute(spans, lead, False)
    assert spans.once().peak(weights)[0] == brute(spans, 0, True)


def test_a_quarter_of_a_million_slices_take_no_time():
    counts = np.full(250_000, 30_000)
    began = time.process_time()
    order = Order(counts, 7, 1024)
    spans = node_spans(order, (0, 8), 64, epochs=2)
    assert spans.peak(counts)[0] > 0 and time.process_time() - began < 2
    assert len(set(spans.slices.tolist())) > 250_000 // 8


def test_one_lane_of_whole_slices_opens_one_at_a_time():
    order = Order(np.full(10, 100), 3, 5, lanes=1, window=100, head=100)
    spans = node_spans(order, (0, 1), 1)
    ones = np.ones(10, np.int64)
    assert spans.peak(ones)[0] == 1
    assert spans.prefetched(window_steps(order)).peak(ones)[0] == 2
    assert sorted(spans.slices.tolist()) == list(range(10))


def test_a_thousand_ranks_have_a_slice_each():
    order = Order(np.full(1000, 64), 3, 1000, lanes=1000, head=0)
    seen = [node_spans(order, (rank, rank + 1), 1000).slices.tolist() for rank in range(1000)]
    assert sorted(s for item in seen for s in item) == list(range(1000))
    assert {len(item) for item in seen} == {1}


def test_ranks_outside_the_world_are_refused():
    with pytest.raises(UsageError, match="ranks"):
        node_spans(Order(np.array([5]), 0, 1), (0, 2), 1)
