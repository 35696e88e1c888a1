"""Promises of the order, each as a property, and golden vectors. Locality: tests/unit/observe/test_plan.py."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.order.bijection import (
    derive_key,
    inverse,
    permute,
    random_words,
)
from forebay.order.plan import (
    Order,
    SampleSize,
    default_lanes,
    default_window,
    lease_order,
    samples_per_slice,
)
from forebay.order.run import Run
from forebay.order.step_index import BatchSizes
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


def read(order: Order, epoch: int, step: int) -> list[int]:
    """The sample ids of a step of an epoch."""
    step += epoch * order.steps_per_epoch
    steps = Run([order], BatchSizes.of(order.global_batch), epochs=None).steps(step, step + 1, 0, 1)
    return order.sample_ids_of(steps.slices, steps.samples).tolist()


# The bijection.


def vectors() -> dict:
    """Return what tests/golden/order_v5.json holds of one dataset. It changes only with a new version of the order."""
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
        "global_batches": [read(some, e, s) for e in (0, 1) for s in (0, 7, 13)],
        "default_shape": [[default_lanes(b, n, SampleSize()), default_window(b, n, SampleSize())] for b, n in shapes],
        "default_order": read(Order(np.full(9, 50), 3, 96), 2, 1),
        "lease_order": lease_order(5, 1, 3, 100, 90, 100).tolist(),
    }


def test_golden_vectors():
    golden = json.loads((GOLDEN / "order_v5.json").read_text())
    assert {**vectors(), "mixture": golden["mixture"]} == golden


@given(st.integers(1, 3000), st.integers())
def test_permute_is_a_bijection_and_inverse_undoes_it(n, seed):
    index = np.arange(n, dtype=np.uint64)
    key = derive_key(seed)
    sent = permute(index, n, key)
    assert np.array_equal(np.sort(sent), index)
    assert np.array_equal(inverse(sent, n, key), index)


def test_shapes_and_wrong_arguments():
    key = derive_key(0)
    assert permute(np.zeros((2, 3), np.uint64), 1, key).shape == (2, 3)
    assert permute(np.empty(0, np.uint64), 5, key).shape == (0,)
    for index, n, wrong_key in ((5, 5, key), (0, 0, key), (0, 2**62 + 1, key), (0, 5, b"short")):
        with pytest.raises(UsageError):
            permute(np.array([index], np.uint64), n, wrong_key)
    keys = {derive_key(1), derive_key(2), derive_key(1, 2), derive_key(12), derive_key(1, "2"), derive_key(1, "2", "")}
    assert len(keys) == 6


# The promises.


@given(orders, st.integers(0, 3))
def test_promise_bounded(order, epoch):
    """A sample is read within a window of where its lane comes to it."""
    positions = np.arange(order.num_samples)
    slices, samples = order.samples_at(epoch, positions)
    if order.shuffle:
        near = order.positions_near(epoch, slices, samples)
        assert (near % order.num_lanes == positions % order.num_lanes).all()
        assert (np.abs(near - positions) < order.window_samples * order.num_lanes).all()


# The rest.


def test_drop_last_and_default_lanes():
    assert Order(np.array([11]), 0, 4, drop_last=True).steps_per_epoch == 2
    large, small, format1 = 10**9, 10**5, SampleSize(4096.0, 64 << 20)
    batches = (7, 512, 4096, 5000, 97 * 89)
    assert [default_lanes(b, large, SampleSize()) for b in batches] == [511, 512, 4096, 2500, 4096]
    assert [default_lanes(b, small, SampleSize()) for b in (1, 7, 64)] == [9, 7, 64]
    # Of format 1, whose chunks are whole slices: as many as leave a lane four of them.
    assert [default_lanes(b, 16384 * 100, format1) for b in (1, 16, 64, 1024)] == [1, 16, 16, 16]


def test_samples_per_slice():
    assert samples_per_slice(np.array([7, 8, 17]), 8).tolist() == [0, 1, 2]
    assert samples_per_slice(np.array([7, 8]), None, "rows").tolist() == [7, 8]
    for seq_len, layout in ((0, "tokens"), (None, "tokens"), (True, "tokens"), (4, "other")):
        with pytest.raises(UsageError):
            samples_per_slice(np.array([7]), seq_len, layout)


@given(st.integers(1, 500), st.data())
def test_lease_order_goes_on_where_another_stopped(num_samples, data):
    cut = data.draw(st.integers(0, num_samples))
    parts = [lease_order(1, 2, 3, num_samples, 0, cut), lease_order(1, 2, 3, num_samples, cut, num_samples)]
    full = lease_order(1, 2, 3, num_samples, 0, num_samples)
    assert np.array_equal(np.concatenate(parts), full)
    assert np.array_equal(np.sort(full), np.arange(num_samples))
    with pytest.raises(UsageError):
        lease_order(1, 2, 3, num_samples, 0, num_samples + 1)


def test_wrong_arguments():
    with pytest.raises(UsageError):
        Order(np.array([10]), 0, 4).epoch_at(-1)
    for batch, lanes in ((0, None), (4, 0)):
        with pytest.raises(UsageError):
            Order(np.array([10]), 0, batch, lanes)
    with pytest.raises(UsageError):
        Order(np.array([-1]), 0, 4)
