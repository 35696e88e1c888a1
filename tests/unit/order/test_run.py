"""A run by its steps: the same for every world, found at once, in epochs that changes of batch size do not break."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.order.plan import Order, batch_parts, ranks_of
from forebay.order.run import NEVER, BatchSizes, Run, Steps, Weights

Sample = tuple[int, int, int]  # Source, slice, sample within the slice.

counts = st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any).map(np.array)
sizes = st.dictionaries(st.integers(1, 40), st.integers(1, 30), max_size=3).map(
    lambda later: BatchSizes.of([(0, 1 + len(later)), *sorted(later.items())])
)


@st.composite
def orders(draw: st.DrawFn, batches: BatchSizes) -> Order:
    """An order, or one that grew: whose first epochs are of its first slices in a shape of their own."""
    shapes = st.tuples(st.none() | st.integers(1, 20), st.none() | st.integers(1, 40))
    seed, shuffle = draw(st.integers(0, 2**40)), draw(st.sampled_from([True, True, False]))
    order = Order(draw(counts), seed, batches.largest, *draw(shapes), shuffle)
    smaller = order.reshaped(*draw(shapes), draw(st.integers(1, len(order.samples_per_slice))))
    return order.after([(draw(st.integers(1, 3)), smaller)]) if draw(st.booleans()) and smaller.num_samples else order


@st.composite
def single_runs(draw: st.DrawFn) -> Run:
    batches = draw(sizes)
    order = draw(orders(batches))
    drop = draw(st.booleans()) and min(of.num_samples for _, of in order.phases) >= batches.largest
    return Run([order], batches, epochs=draw(st.integers(1, 4)), drop_last=drop)


@st.composite
def mixed_runs(draw: st.DrawFn) -> Run:
    batches = draw(sizes)
    num_sources = draw(st.integers(1, 3))
    weight = st.lists(st.integers(0, 9), min_size=num_sources, max_size=num_sources).filter(any)
    changes = draw(st.dictionaries(st.integers(1, 40), weight, max_size=2))
    weights = Weights(((0, (1,) * num_sources), *((step, tuple(w)) for step, w in sorted(changes.items()))))
    sources = [draw(orders(batches)) for _ in range(num_sources)]
    return Run(sources, batches, weights=weights, num_steps=draw(st.none() | st.integers(50, 60)))


def batch_lists(steps: Steps) -> list[list[Sample]]:
    taken = list(zip(steps.sources.tolist(), steps.slices.tolist(), steps.samples.tolist()))
    return [taken[a:b] for a, b in itertools.pairwise(steps.bounds.tolist())]


def all_batches(run: Run, stop: int | None = None) -> list[list[Sample]]:
    return batch_lists(run.steps(0, run.num_steps if stop is None else stop, 0, 1))


def all_samples(order: Order, source: int = 0) -> list[Sample]:
    return [(source, i, j) for i, n in enumerate(order.samples_per_slice.tolist()) for j in range(n)]


# One dataset, in epochs.


@given(single_runs())
def test_every_epoch_has_every_sample_once_whatever_the_batch_sizes(run):
    by_epoch = {}
    epochs, in_epoch, taken = run.progress_table(0, run.num_steps)
    for step, batch in enumerate(all_batches(run)):
        position = run.progress(step)
        assert (position.epoch, position.step_in_epoch, position.samples_taken) == (
            epochs[step],
            in_epoch[step],
            taken[step],
        )
        seen = by_epoch.setdefault(position.epoch, [])
        assert len(seen) == position.samples_taken
        seen += batch
        size = [size for first, size in run.batches.changes if first <= step][-1]
        assert len(batch) == size or len(seen) == run.orders[0].epoch_order(position.epoch).num_samples
    assert list(by_epoch) == list(range(len(by_epoch)))
    for epoch, seen in by_epoch.items():
        every = all_samples(run.orders[0].epoch_order(epoch))
        assert len(set(seen)) == len(seen) and set(seen) <= set(every)
        assert len(every) - len(seen) < run.batches.largest
    assert run.progress(run.num_steps).samples_taken == 0 and run.progress(run.num_steps).epoch == len(by_epoch)


def test_drop_last_leaves_out_what_makes_no_batch():
    order = Order(np.array([23]), 3, 9)
    run = Run([order], BatchSizes.of([(0, 2), (10, 5)]), epochs=2, drop_last=True)  # 10 x 2, and 3 of 23 dropped.
    assert [len(batch) for batch in all_batches(run)] == [2] * 10 + [5] * 4
    assert run.progress(10).epoch == 1 and run.epoch_stop(3) == 10
    assert sum(map(len, all_batches(Run([order], run.batches, epochs=3)))) == 3 * 23  # None is left out otherwise.
    assert Run([order], BatchSizes.of([(0, 2), (10, 50)]), epochs=1, drop_last=True).num_steps == 10
    for epochs in (2, None):
        with pytest.raises(UsageError, match="at least one batch"):
            Run([order], BatchSizes.of([(0, 2), (10, 50)]), epochs=epochs, drop_last=True)


# Any run.


@given(single_runs() | mixed_runs(), st.integers(0, 300), st.sampled_from((1, 2, 3, 7, 64)))
def test_steps_read_alone_by_any_world_are_those_of_the_run(run, start, world_size):
    end = 80 if run.num_steps is None else run.num_steps
    start %= end
    stop = min(end, start + 3)
    shares = [batch_lists(run.steps(start, stop, rank, world_size)) for rank in range(world_size)]
    for i, batch in enumerate(all_batches(run, end)[start:stop]):
        lengths = {len(share[i]) for share in shares}
        assert max(lengths) - min(lengths) <= 1
        assert list(itertools.chain(*(share[i] for share in shares))) == batch


@given(single_runs(), st.sampled_from([1, 2, 3, 5]), st.data())
def test_the_next_use_of_a_sample_is_known_within_a_window(run, world_size, data):
    order, end = run.orders[0].epoch_order(1), run.epoch_stop(0)
    if end is None or (run.num_steps is not None and end >= run.num_steps) or len(run.batches.changes) > 1:
        return
    rank = data.draw(st.integers(0, world_size - 1))
    stop = run.epoch_stop(end)
    read = run.steps(end, stop, rank, world_size)
    actual = end + np.repeat(np.arange(stop - end), np.diff(read.bounds))
    expected = run.next_steps(0, read.slices, read.samples, (rank, rank + 1), world_size)
    window = order.window_samples * order.num_lanes // order.global_batch + 2 if order.shuffle else 1
    own = expected < NEVER
    assert (np.abs(expected - actual)[own] <= window).all()
    assert own.all() or order.cycle % order.global_batch


@given(*(st.integers(1, 40) for _ in range(3)), st.integers(0, 90), st.integers(1, 5))
def test_the_rank_of_a_position_is_whose_part_has_it(size: int, cycle: int, world, first, num):
    for rank in range(world):
        parts = batch_parts(first, size, num, cycle, rank, world).reshape(-1)
        assert (ranks_of(first, size, cycle, parts, world) == rank).all()


# Mixtures.


@given(mixed_runs())
def test_every_source_of_a_mixture_has_every_sample_once_an_epoch(run):
    num_samples = run.progress(50).samples_taken
    sources, own = run.mixture.locate(np.arange(num_samples))
    for source, order in enumerate(run.orders):
        (places,) = np.nonzero(sources == source)
        numbers = own[places]
        assert len(set(numbers.tolist())) == len(numbers)  # Each position of each epoch once,
        assert run.mixture.reached(num_samples)[source] == max(numbers, default=-1) + 1
        missing = run.mixture.positions(source, np.setdiff1d(np.arange(max(numbers, default=0)), numbers))
        assert (missing >= num_samples).all() or not run.weights.quotas[-1][source]  # and none is left out.
        assert (run.mixture.positions(source, numbers) == places).all()
        epochs, within = order.passes(numbers)
        for epoch in set(epochs.tolist()):
            slices, samples = order.samples_at(epoch, within[epochs == epoch])
            assert len(set(order.sample_ids_of(slices, samples).tolist())) == (epochs == epoch).sum()


@given(mixed_runs(), st.integers(0, 49), st.integers(0, 2))
def test_the_epoch_of_a_step_is_that_of_all_it_reads(run, step, source):
    first, source = run.progress(step).samples_taken, source % len(run.orders)
    sources, own = run.mixture.locate(np.arange(first, run.progress(step + 1).samples_taken))
    epochs = set(run.orders[source].passes(own[sources == source])[0].tolist())
    assert run.epoch_of(step, source) == (epochs.pop() if len(epochs) == 1 else None, None)


@pytest.mark.parametrize("lanes", [None, 4, 1])
def test_the_window_of_a_sample_in_a_mixture_ends_when_its_last_sample_is_read(lanes):
    orders = [Order(np.array([300, 211]), 3, 8, lanes, 5), Order(np.array([70]), 4, 8, lanes, 5)]
    run = Run(orders, BatchSizes.of(8), weights=Weights(((0, (3, 1)), (20, (1, 1)))), epochs=None)
    sources, own = run.mixture.locate(np.arange(8 * 200))
    for step, (source, order) in itertools.product((0, 13, 19, 40), enumerate(orders)):
        read = run.steps(step, step + 1, 0, 1)
        slices, samples = read.slices[read.sources == source], read.samples[read.sources == source]
        epoch = int(order.passes(np.array([run.mixture.next_own(source, 8 * step)]))[0][0])
        last = order.position(epoch) + order.window_stops(epoch, slices, samples) - 1
        steps = [np.flatnonzero((sources == source) & (own == number))[0] // 8 + 1 for number in last]
        assert run.window_ends(step, source, slices, samples).tolist() == np.maximum(steps, step).tolist()


# Size, and the rest.


def test_limits_of_a_run():
    order = Order(np.array([20]), 0, 4)
    for epochs, num_steps, expected in ((3, 7, 7), (1, 7, 5), (None, 70, 70)):
        assert Run([order], BatchSizes.of(4), epochs=epochs, num_steps=num_steps).num_steps == expected
    endless = Run([order], BatchSizes.of(4), epochs=None)
    assert endless.num_steps is None and endless.progress(10**9).epoch == 2 * 10**8
    assert Run([order], BatchSizes.of(4), weights=Weights(((0, (1,)),)), epochs=1).num_steps is None


def test_wrong_arguments():
    order, empty = Order(np.array([20]), 0, 4), Order(np.array([0]), 0, 4)
    run = Run([order], BatchSizes.of(4), epochs=3)
    for wrong in ("0 16 0 1", "-1 2 0 1", "3 2 0 1", "0 1 1 1", "0 1 0 0"):
        with pytest.raises(UsageError):
            run.steps(*map(int, wrong.split()))
    for changes in ((), ((1, 4),), ((0, 4), (0, 5)), ((0, 0),), ((0, True),), ((0, 4), (2.5, 5))):
        with pytest.raises(UsageError):
            BatchSizes(changes)
    two = Weights(((0, (1, 1)),))
    for sources, weights in (([order, order], None), ([order], two), ([order, empty], two), ([empty], None)):
        with pytest.raises(UsageError):
            Run(sources, BatchSizes.of(4), weights=weights)
    for limits in ({"epochs": 0}, {"num_steps": 0}, {"num_steps": True}, {"epochs": 1.5}):
        with pytest.raises(UsageError):
            Run([order], BatchSizes.of(4), **limits)
    with pytest.raises(UsageError):
        run.progress(16)
