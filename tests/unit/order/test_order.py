"""The six promises of the order, each as a property; the bijection's golden vectors and statistics."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.order.bijection import (
    derive_key,
    inverse,
    permute,
    permute_each,
    random_words,
    subkeys,
)
from forebay.order.plan import (
    MAX_LANES,
    Order,
    SampleSize,
    default_lanes,
    default_window,
    lease_order,
    samples_per_slice,
)
from forebay.order.run import BatchSizes, Run
from support.paths import GOLDEN

counts = st.lists(st.integers(0, 40), min_size=1, max_size=10).filter(lambda c: sum(c) > 0)
orders = st.builds(
    Order,
    counts.map(np.array),
    st.integers(-(2**70), 2**70),
    st.integers(1, 150),
    lanes=st.none() | st.integers(1, 90),
    window=st.none() | st.integers(1, 70),
    shuffle=st.booleans(),
)


def fresh_copy(order: Order) -> Order:
    """The same order, with no table of an epoch yet."""
    return Order(
        order.samples_per_slice, order.seed, order.global_batch, order.num_lanes, order.window_samples,
        order.shuffle, order.drop_last,
    )  # fmt: skip


def whole_epoch(order: Order, epoch: int) -> list[int]:
    return [int(i) for step in range(order.steps_per_epoch) for i in order.share(epoch, step, 0, 1)]


def first_uses(order: Order, epoch: int, rank: int, world_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The slices that a rank reads in an epoch, by first use, and the step of each, counted in the epoch."""
    if not order.steps_per_epoch:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    run = Run([order], BatchSizes.of(order.global_batch), epochs=None, drop_last=order.drop_last)
    start = epoch * order.steps_per_epoch
    steps, _, slices = run.uses(start, start + order.steps_per_epoch, rank, world_size)
    firsts = np.sort(np.unique(slices, return_index=True)[1])
    return slices[firsts], steps[firsts] - start


# The bijection.


def vectors() -> dict[str, object]:
    """Return what tests/golden/order_v4.json holds. It changes only with a new version of the order."""
    big = (1 << 62, (1 << 62) - 1, (1 << 40) + 15)
    shapes = [(8, 10**4), (512, 10**6), (512, 10**9), (4096, 10**9), (6000, 10**9)]
    some = Order(np.array([30, 0, 17, 64, 5, 41]), 11, 12, lanes=5, window=9)
    return {
        "derive_key": {"1,a,2": derive_key(1, "a", 2).hex(), "-5,12": derive_key(-5, "12").hex()},
        "random_words": [int(w) for w in random_words(bytes(range(16)), np.arange(4, dtype=np.uint64))],
        "permute": {
            str(n): permute(np.arange(n, dtype=np.uint64), n, derive_key(7)).tolist() for n in (1, 2, 3, 10, 37)
        },
        "permute_big": {
            str(n): permute(np.array([0, 1, n // 2, n - 1], np.uint64), n, derive_key(7)).tolist() for n in big
        },
        "global_batches": [some.share(e, s, 0, 1).tolist() for e in (0, 1) for s in (0, 7, 13)],
        "default_shape": [[default_lanes(b, n, SampleSize()), default_window(b, n, SampleSize())] for b, n in shapes],
        "default_order": Order(np.full(9, 50), 3, 96).share(2, 1, 0, 1).tolist(),
        "lease_order": lease_order(5, 1, 3, 100, 90, 100).tolist(),
    }


def test_golden_vectors() -> None:
    assert vectors() == json.loads((GOLDEN / "order_v4.json").read_text())


@given(st.integers(1, 3000), st.integers())
def test_permute_is_a_bijection_and_inverse_undoes_it(n: int, seed: int) -> None:
    index = np.arange(n, dtype=np.uint64)
    key = derive_key(seed)
    sent = permute(index, n, key)
    assert np.array_equal(np.sort(sent), index)
    assert np.array_equal(inverse(sent, n, key), index)
    one_by_one = [int(permute(index[i : i + 1], n, key)[0]) for i in range(min(n, 5))]
    assert one_by_one == sent[:5].tolist()


@given(st.lists(st.integers(1, 60) | st.integers(2**40, 2**62), min_size=1, max_size=10), st.integers(0, 9))
def test_permute_each_is_a_bijection_for_every_domain_and_key(sizes: list[int], a: int) -> None:
    index = [np.arange(min(n, 60), dtype=np.uint64) for n in sizes]
    which = np.repeat(np.arange(len(sizes)), [len(i) for i in index]).astype(np.uint64)
    n = np.array(sizes, np.uint64)[which]
    sent = permute_each(np.concatenate(index), n, subkeys(derive_key(1), np.full(len(n), a, np.uint64), which))
    assert (sent < n).all()
    for i, size in enumerate(sizes):
        mine = sent[which == i]
        assert len(np.unique(mine)) == len(mine)
        assert size > 60 or np.array_equal(np.sort(mine), index[i])


def test_shapes_and_wrong_arguments() -> None:
    key = derive_key(0)
    assert permute(np.zeros((2, 3), np.uint64), 1, key).shape == (2, 3)
    assert permute(np.empty(0, np.uint64), 5, key).shape == (0,)
    for index, n, wrong_key in ((5, 5, key), (0, 0, key), (0, 2**62 + 1, key), (0, 5, b"short")):
        with pytest.raises(UsageError):
            permute(np.array([index], np.uint64), n, wrong_key)
    keys = {derive_key(1), derive_key(2), derive_key(1, 2), derive_key(12), derive_key(1, "2"), derive_key(1, "2", "")}
    assert len(keys) == 6


def _chi_square(seen: np.ndarray, expected: float) -> float:
    return float(((seen - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("n", [2, 5, 16])
def test_every_position_and_pair_of_neighbours_is_as_likely(n: int) -> None:
    """Chi-square over 20 000 keys, within five standard deviations of its mean. The seed is fixed."""
    trials = 20_000
    index = np.tile(np.arange(n, dtype=np.uint64), trials)
    key_number = np.repeat(np.arange(trials, dtype=np.uint64), n)
    keys = subkeys(derive_key(5), key_number, key_number)
    sent = permute_each(index, np.full(len(index), n, np.uint64), keys).reshape(trials, n).astype(np.int64)
    position = sum(_chi_square(np.bincount(sent[:, i], minlength=n), trials / n) for i in range(n))
    degrees = (n - 1) ** 2
    assert abs(position - degrees) < 5 * (2 * degrees) ** 0.5
    pairs = np.bincount(sent[:, 0] * n + sent[:, 1], minlength=n * n).reshape(n, n)
    pairs = pairs[~np.eye(n, dtype=bool)]
    degrees = len(pairs) - 1
    assert abs(_chi_square(pairs, trials / len(pairs)) - degrees) < 5 * (2 * degrees) ** 0.5


# The six promises.


@given(orders, st.integers(0, 5))
def test_promise_bijection(order: Order, epoch: int) -> None:
    assert sorted(whole_epoch(order, epoch)) == list(range(order.num_samples))


@given(orders, st.integers(0, 3), st.sampled_from((1, 2, 3, 7, 64, 4096)), st.data())
def test_promise_elastic(order: Order, epoch: int, world_size: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, order.steps_per_epoch - 1))
    batch = order.share(epoch, step, 0, 1)
    ranks = range(world_size) if world_size <= 100 else [0, 1, world_size // 2, world_size - 1]
    shares = [order.share(epoch, step, rank, world_size) for rank in ranks]
    lengths = {len(share) for share in shares}
    assert max(lengths) - min(lengths) <= 1
    assert lengths <= {len(batch) // world_size, -(-len(batch) // world_size)}
    if world_size <= 100:
        assert np.array_equal(np.concatenate(shares), batch)
    for rank, share in zip(ranks, shares):
        start = rank * len(batch) // world_size
        assert np.array_equal(share, batch[start : start + len(share)])


@given(st.integers(0, 500), st.integers(1, 40), st.integers(0, 9), st.integers(1, 20), st.integers(1, 9), st.data())
def test_shares_of_many_steps_are_sorted_by_lane(
    first: int, size: int, num_steps: int, lanes: int, world_size: int, data: st.DataObject
) -> None:
    order = Order(np.full(10, 100), 1, size, lanes=lanes)
    rank = data.draw(st.integers(0, world_size - 1))
    shares = order.shares_of(first, size, num_steps, rank, world_size)
    for step, share in enumerate(shares.tolist()):
        positions = range(first + step * size, first + (step + 1) * size)
        by_lane = sorted(positions, key=lambda position: (position % lanes, position))
        assert share == by_lane[rank * size // world_size : (rank + 1) * size // world_size]
    assert len(shares) == num_steps


@given(
    st.integers(1, 60),
    st.integers(1, 50),
    st.sampled_from([(64, 64), (96, 48), (24, 24), (8, 4), (128, 64)]),
    st.sampled_from([1, 2, 3, 7, 8, 64, 100]),
)
def test_promise_local(num_slices: int, size: int, shape: tuple[int, int], world_size: int) -> None:
    """Where the lanes divide the batch, a rank reads its lanes only, every step.

    Bound: a rank's run of ceil(b / W) slots covers at most ceil((ceil(b / W) - 1) / k) + 1 lanes of k = b / C slots,
    and a lane of n samples lies in at most (n - 2) // m + 2 slices of m samples. The short last batch is left out.
    """
    batch, lanes = shape
    order = Order(np.full(num_slices, size), 4, batch, lanes=lanes, drop_last=True)
    run, slots = -(-batch // world_size), batch // lanes
    most_lanes = min(lanes, -(-(run - 1) // slots) + 1)
    lane = -(-order.num_samples // lanes)
    bound = most_lanes * max(1, (lane - 2) // size + 2)
    for rank in {0, world_size // 2, world_size - 1}:
        for epoch in (0, 1):
            slices, _ = first_uses(order, epoch, rank, world_size)
            assert len(slices) <= min(num_slices, bound)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 300), st.integers(1000, 10**5))
def test_any_number_of_ranks_has_lanes_of_its_own_by_default(
    batch: int, world_size: int, num_slices: int, size: int
) -> None:
    """So all ranks together read each slice about once, whatever their number and the batch are."""
    order = Order(np.full(num_slices, size), 4, batch)
    assert order.num_lanes % batch == 0 or batch > MAX_LANES
    if batch > MAX_LANES or world_size > batch:
        return
    owners: dict[int, int] = {}
    for step in range(min(order.num_samples // batch, order.num_lanes // batch + 1)):
        for rank in {0, world_size // 2, world_size - 1}:
            for lane in (order.positions(step, rank, world_size) % order.num_lanes).tolist():
                assert owners.setdefault(lane, rank) == rank


@pytest.mark.parametrize("num_bytes", [10**9, 10**11, 3 * 10**13])
@pytest.mark.parametrize("batch", [1, 8, 100, 512, 1000, 4096])
def test_the_windows_of_the_default_order_are_small(num_bytes: int, batch: int) -> None:
    """Together with what lies between them and chunks' edges, half of a cache of 2 % or 1 GiB; a few chunks a lane."""
    size = SampleSize(4096.0, 1 << 16)
    num_samples = num_bytes // 4096
    lanes = default_lanes(batch, num_samples, size)
    open_bytes = lanes * (default_window(lanes, num_samples, size) * 4096 + 2 * size.chunk_bytes)
    assert lanes % batch == 0
    assert open_bytes <= max(min(num_bytes // 50, 1 << 30), lanes * 4 * size.chunk_bytes)


@given(orders, st.integers(0, 3))
def test_promise_bounded(order: Order, epoch: int) -> None:
    """A sample is read within a window of where its lane comes to it."""
    positions = np.arange(order.num_samples)
    slices, samples = order.samples_at(epoch, positions)
    if order.shuffle:
        near = order.epoch_at(epoch).positions_near(slices, samples)
        assert (near % order.num_lanes == positions % order.num_lanes).all()
        assert (np.abs(near - positions) < order.window_samples * order.num_lanes).all()
    assert np.array_equal(order.sample_ids_of(slices, samples), order.sample_ids_at(epoch, positions))


@given(orders, st.integers(0, 2), st.integers())
def test_positions_read_together_or_alone_are_the_same(order: Order, epoch: int, seed: int) -> None:
    full = np.array(order.samples_at(epoch, np.arange(order.num_samples)))
    some = random_words(derive_key(seed), np.arange(9, dtype=np.uint64)) % np.uint64(order.num_samples)
    index = some.astype(np.int64)
    fresh = fresh_copy(order)
    assert np.array_equal(np.array(fresh.samples_at(epoch, index)), full[:, index])
    assert np.array_equal(np.array(fresh.samples_at(epoch, index[:1])), full[:, index[:1]])


def test_threads_may_share_an_order() -> None:
    order = Order(np.full(100, 64), 3, 48, window=70)
    blocks = [(epoch, start) for epoch in range(4) for start in range(0, order.num_samples - 2000, 1000)]

    def read(turn: int) -> dict[tuple[int, int], np.ndarray]:
        mine = blocks[turn * 7 :] + blocks[: turn * 7]
        return {(e, s): order.sample_ids_at(e, np.arange(s, s + 2000)) for e, s in mine}

    with ThreadPoolExecutor(4) as pool:
        result = list(pool.map(read, range(4)))
    for item in result[1:]:
        assert all(np.array_equal(item[block], result[0][block]) for block in blocks)


# The rest.


def test_over_an_epoch_few_slices_are_open_at_once() -> None:
    """A slice is needed while its windows are open; only those cut by a lane's edge (one an edge) are needed twice."""
    order = Order(np.full(1500, 50), 2, 32, lanes=32, window=100)
    slices, _ = order.samples_at(0, np.arange(order.num_samples))
    steps = np.arange(order.num_samples) // 32
    first, last = np.full(1500, order.steps_per_epoch), np.zeros(1500, np.int64)
    np.minimum.at(first, slices, steps)
    np.maximum.at(last, slices, steps)
    opened, closed = (np.bincount(moments, minlength=order.steps_per_epoch + 1) for moments in (first, last + 1))
    assert np.cumsum(opened - closed).max() <= 4 * order.num_lanes
    assert np.count_nonzero(last - first > 2 * order.window_samples) <= order.num_lanes - 1


def test_another_epoch_or_seed_is_another_order() -> None:
    epochs = [whole_epoch(Order(np.full(12, 30), seed, 40), epoch) for seed, epoch in ((3, 0), (3, 1), (3, 2), (4, 0))]
    assert len(set(map(tuple, epochs))) == 4 and epochs[1] == whole_epoch(Order(np.full(12, 30), 3, 40), 1)


def test_locate_skips_slices_without_samples() -> None:
    order = Order(np.array([0, 2, 0, 0, 3, 0]), 0, 2)
    slices, within = order.locate(np.arange(5))
    assert slices.tolist() == [1, 1, 4, 4, 4] and within.tolist() == [0, 1, 0, 1, 2]
    assert sorted(whole_epoch(order, 0)) == [0, 1, 2, 3, 4]


def test_without_shuffle_the_ranks_read_the_datasets_own_order() -> None:
    order = Order(np.array([5, 6]), 0, 4, shuffle=False)
    assert whole_epoch(order, 3) == list(range(11))
    assert order.share(0, 1, 1, 2).tolist() == [6, 7]


def test_drop_last_and_default_lanes() -> None:
    assert Order(np.array([11]), 0, 4, drop_last=True).steps_per_epoch == 2
    large, small, whole = 10**9, 10**5, SampleSize(4096.0, 64 << 20)
    batches = (1, 7, 64, 100, 512, 1024, 4096, 5000, 8192, 97 * 89)
    assert [default_lanes(b, large, SampleSize()) for b in batches] == [
        512, 511, 512, 500, 512, 1024, 4096, 2500, 4096, 4096
    ]  # fmt: skip
    assert [default_lanes(b, small, SampleSize()) for b in (1, 7, 64)] == [9, 7, 64]
    # Of format 1, whose chunks are whole slices: as many as leave a lane four of them.
    assert [default_lanes(b, 16384 * 100, whole) for b in (1, 16, 64, 1024)] == [1, 16, 16, 16]


def test_samples_per_slice() -> None:
    assert samples_per_slice(np.array([7, 8, 17]), 8).tolist() == [0, 1, 2]
    assert samples_per_slice(np.array([7, 8]), None, "rows").tolist() == [7, 8]
    for seq_len, layout in ((0, "tokens"), (None, "tokens"), (True, "tokens"), (4, "other")):
        with pytest.raises(UsageError):
            samples_per_slice(np.array([7]), seq_len, layout)


@given(st.integers(1, 500), st.data())
def test_lease_order_goes_on_where_another_stopped(num_samples: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, num_samples))
    parts = [lease_order(1, 2, 3, num_samples, 0, cut), lease_order(1, 2, 3, num_samples, cut, num_samples)]
    full = lease_order(1, 2, 3, num_samples, 0, num_samples)
    assert np.array_equal(np.concatenate(parts), full)
    assert np.array_equal(np.sort(full), np.arange(num_samples))
    with pytest.raises(UsageError):
        lease_order(1, 2, 3, num_samples, 0, num_samples + 1)


def test_wrong_arguments() -> None:
    order = Order(np.array([10]), 0, 4)
    for wrong in ((0, 3, 0, 1), (0, -1, 0, 1), (-1, 0, 0, 1), (0, 0, 1, 1), (0, 0, 0, 0)):
        with pytest.raises(UsageError):
            order.share(*wrong)
    for batch, lanes in ((0, None), (True, None), (4, 0)):
        with pytest.raises(UsageError):
            Order(np.array([10]), 0, batch, lanes)
    with pytest.raises(UsageError):
        Order(np.array([-1]), 0, 4)
