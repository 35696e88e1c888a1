"""Hash sharding: little moves, nothing is lost, shares are even; ranks that own slices take equally many steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.order.plan import Order
from forebay.order.run import OwnedRun, assign_owners


def hashes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


def names(count: int) -> list[str]:
    return [f"host-{i}" for i in range(count)]


@pytest.mark.parametrize("slack", [None, 0.1])
def test_little_moves(slack):
    """A tenth more data, one worker more, one fewer: at most what they own and two hundredths."""
    slices, workers = hashes(2000), 5
    before = assign_owners(slices, names(workers), slack)
    joined = assign_owners(slices, names(workers + 1), slack)
    assert (before != joined).mean() <= 1 / (workers + 1) + 0.02
    assert slack is not None or set(joined[before != joined].tolist()) == {workers}
    grown = assign_owners(np.concatenate([slices, hashes(200, 1)]), names(workers), slack)[: len(slices)]
    assert (before != grown).mean() <= (0.0 if slack is None else 0.02)
    remaining = assign_owners(slices, names(workers)[1:], slack)
    assert ((before - 1 != remaining) & (before != 0)).mean() <= (0.0 if slack is None else 0.02)


@given(st.integers(1, 12), st.integers(0, 400), st.sampled_from([0.0, 0.05, 0.25]), st.integers(0, 9))
def test_shares_are_bounded_and_names_decide(workers, count, slack, seed):
    slices, who = hashes(count, seed), names(workers)
    homes = assign_owners(slices, who, slack)
    assert np.bincount(homes, minlength=workers).max(initial=0) <= np.ceil((1 + slack) * count / workers)
    turn = np.random.default_rng(seed).permutation(workers)
    other = assign_owners(slices, [who[i] for i in turn], slack)
    assert [who[i] for i in homes] == [who[turn[i]] for i in other]


def test_owners_do_not_change_with_a_version():
    slices = np.arange(10 * 32, dtype=np.uint16).astype(np.uint8).reshape(10, 32)
    assert assign_owners(slices, ["a", "b", "c"]).tolist() == [2, 2, 1, 0, 2, 1, 0, 0, 2, 2]


@pytest.mark.parametrize("workers, slack", [([], None), (["a", "a"], None), (["a"], -0.1)])
def test_what_cannot_be_is_refused(workers, slack):
    with pytest.raises(UsageError, match="rendezvous: expected"):
        assign_owners(hashes(3), workers, slack)


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(1, 9))
def test_ranks_that_own_take_equally_many_steps(slices, batch):
    """Each sample once an epoch, batches of a rank within one sample of each other."""
    owned = [sum(counts) for counts in slices]
    if 0 in owned:
        return
    owners, counts = np.repeat(np.arange(len(slices)), list(map(len, slices))), np.concatenate(slices)
    runs = [
        OwnedRun(Order(np.where(owners == rank, counts, 0), 3, batch), batch, owners, counts, epochs=2)
        for rank in range(len(slices))
    ]
    assert len({run.num_steps for run in runs}) == 1
    for rank, (run, counts) in enumerate(zip(runs, slices)):
        first = int(np.searchsorted(owners, rank))
        full = run.steps(0, run.num_steps, 0, 1)
        sizes = np.diff(full.bounds)
        assert sizes.max() <= batch and sizes.max() - sizes.min() <= 1
        for epoch in range(2):
            part = slice(epoch * sum(counts), (epoch + 1) * sum(counts))
            result = sorted(zip(full.slices[part].tolist(), full.samples[part].tolist()))
            assert result == [(first + i, j) for i, count in enumerate(counts) for j in range(count)]
        for step in range(run.num_steps):
            stop = run.epoch_stop(step)
            assert run.progress(stop - 1).epoch == run.progress(step).epoch
            assert stop == run.num_steps or run.progress(stop).epoch == run.progress(step).epoch + 1
    with pytest.raises(UsageError, match="run steps"):
        runs[0].steps(0, (runs[0].num_steps or 0) + 1, 0, 1)
