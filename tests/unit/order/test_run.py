"""A run by its steps: the same for every world, found at once, in epochs that changes of batch size do not break."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.load.resources import lanes_of_nodes
from forebay.order.plan import Order
from forebay.order.run import NEVER, BatchSizes, Run, Steps, Weights

Sample = tuple[int, int, int]  # Source, slice, sample within the slice.

counts = st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any).map(np.array)
sizes = st.dictionaries(st.integers(1, 40), st.integers(1, 30), max_size=3).map(
    lambda later: BatchSizes.of([(0, 1 + len(later)), *sorted(later.items())])
)


@st.composite
def orders(draw: st.DrawFn, batches: BatchSizes) -> Order:
    return Order(
        draw(counts),
        draw(st.integers(0, 2**40)),
        batches.largest,
        lanes=draw(st.none() | st.integers(1, 20)),
        window=draw(st.none() | st.integers(1, 40)),
        shuffle=draw(st.sampled_from([True, True, False])),
    )


@st.composite
def single_runs(draw: st.DrawFn) -> Run:
    batches = draw(sizes)
    order = draw(orders(batches))
    drop = draw(st.booleans()) and order.num_samples >= batches.largest
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
def test_every_epoch_has_every_sample_once_whatever_the_batch_sizes(run: Run) -> None:
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
        assert len(batch) == size or len(seen) == run.orders[0].num_samples
    every = all_samples(run.orders[0])
    assert list(by_epoch) == list(range(len(by_epoch)))
    for seen in by_epoch.values():
        assert len(set(seen)) == len(seen) and set(seen) <= set(every)
        assert len(every) - len(seen) < run.batches.largest
    assert run.progress(run.num_steps).samples_taken == 0 and run.progress(run.num_steps).epoch == len(by_epoch)


def test_drop_last_leaves_out_what_makes_no_batch() -> None:
    order = Order(np.array([23]), 3, 9)
    run = Run([order], BatchSizes.of([(0, 2), (10, 5)]), epochs=2, drop_last=True)  # 10 x 2, and 3 of 23 dropped.
    assert [len(batch) for batch in all_batches(run)] == [2] * 10 + [5] * 4
    assert run.progress(10).epoch == 1 and run.epoch_stop(3) == 10
    assert sum(map(len, all_batches(Run([order], run.batches, epochs=3)))) == 3 * 23  # None is left out otherwise.
    assert Run([order], BatchSizes.of([(0, 2), (10, 50)]), epochs=1, drop_last=True).num_steps == 10
    for epochs in (2, None):
        with pytest.raises(UsageError, match="at least one batch"):
            Run([order], BatchSizes.of([(0, 2), (10, 50)]), epochs=epochs, drop_last=True)


def test_one_batch_size_is_the_orders_own_global_batch() -> None:
    order = Order(np.full(20, 50), 5, 24)
    run = Run([order], BatchSizes.of(24), epochs=2)
    per_epoch = order.steps_per_epoch
    for step in (0, 3, per_epoch - 1, per_epoch, 2 * per_epoch - 1):
        ids = order.share(step // per_epoch, step % per_epoch, 0, 1)
        (batch,) = batch_lists(run.steps(step, step + 1, 0, 1))
        assert [50 * i + j for _, i, j in batch] == ids.tolist()


# Any run.


@given(single_runs() | mixed_runs(), st.integers(0, 300), st.sampled_from((1, 2, 3, 7, 64)))
def test_steps_read_alone_by_any_world_are_those_of_the_run(run: Run, start: int, world_size: int) -> None:
    end = 80 if run.num_steps is None else run.num_steps
    start %= end
    stop = min(end, start + 3)
    shares = [batch_lists(run.steps(start, stop, rank, world_size)) for rank in range(world_size)]
    for i, batch in enumerate(all_batches(run, end)[start:stop]):
        lengths = {len(share[i]) for share in shares}
        assert max(lengths) - min(lengths) <= 1
        assert list(itertools.chain(*(share[i] for share in shares))) == batch
    for rank, share in enumerate(shares):
        read = [{(start + i, source, index): None for source, index, _ in batch} for i, batch in enumerate(share)]
        uses = zip(*(column.tolist() for column in run.uses(start, stop, rank, world_size)))
        assert list(uses) == list(itertools.chain(*read))


@given(single_runs(), st.sampled_from([1, 2, 3, 5]), st.data())
def test_the_next_use_of_a_sample_is_known_within_a_window(run: Run, world_size: int, data: st.DataObject) -> None:
    order = run.orders[0]
    end = run.epoch_stop(0)
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


# Mixtures.


@given(mixed_runs())
def test_every_source_of_a_mixture_has_every_sample_once_an_epoch(run: Run) -> None:
    flat = [sample for batch in all_batches(run, 50) for sample in batch]
    assert len(flat) == run.progress(50).samples_taken
    for source, order in enumerate(run.orders):
        read = [sample for sample in flat if sample[0] == source]
        epochs, rest = divmod(len(read), order.num_samples)
        times = dict.fromkeys(all_samples(order, source), 0)
        for sample in read:
            times[sample] += 1
        assert set(times.values()) <= {epochs, epochs + 1}
        assert sum(n == epochs + 1 for n in times.values()) == rest


@given(mixed_runs() | single_runs(), st.integers(0, 59), st.integers(0, 3))
def test_the_epoch_of_a_step_is_that_of_all_it_reads(run: Run, step: int, source: int) -> None:
    end = 60 if run.num_steps is None else run.num_steps
    source, step = source % len(run.orders), step % end
    read = [[sample for sample in batch if sample[0] == source] for batch in all_batches(run, end)]
    before = sum(map(len, read[:step]))
    epochs = {position // run.orders[source].num_samples for position in range(before, before + len(read[step]))}
    if run.weights is None:
        later = [other for other in range(step, end) if run.progress(other).epoch > run.progress(step).epoch]
        assert run.epoch_of(step, source) == (run.progress(step).epoch, later[0] if later else end)
    else:
        assert run.epoch_of(step, source) == (epochs.pop() if len(epochs) == 1 else None, None)


def test_a_node_of_a_mixture_reads_few_lanes_beside_its_own() -> None:
    chance, orders = np.random.default_rng(5), [Order(np.full(300, 4000), seed, 512) for seed in range(3)]
    for nodes, max_ratio in ((2, 1.1), (64, 4.0)):
        for _ in range(2):
            weights = Weights(((0, tuple(chance.dirichlet(np.ones(3)).tolist())),))
            run = Run(orders, BatchSizes.of(512), weights=weights, epochs=None)
            assert 1 <= np.mean(lanes_of_nodes(run, 8 * nodes, 8)) * nodes <= max_ratio


# Size, and the rest.


def test_limits_of_a_run() -> None:
    order = Order(np.array([20]), 0, 4)
    assert Run([order], BatchSizes.of(4), epochs=3, num_steps=7).num_steps == 7
    assert Run([order], BatchSizes.of(4), epochs=1, num_steps=7).num_steps == 5
    assert Run([order], BatchSizes.of(4), epochs=None, num_steps=70).num_steps == 70
    endless = Run([order], BatchSizes.of(4), epochs=None)
    assert endless.num_steps is None and endless.progress(10**9).epoch == 2 * 10**8
    assert Run([order], BatchSizes.of(4), weights=Weights(((0, (1,)),)), epochs=1).num_steps is None


def test_wrong_arguments() -> None:
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
