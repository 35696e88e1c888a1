"""Weights to places: every prefix is near its quotas, every place is found alone, digests name what was read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.order.mixture import PERIOD, MixtureOrder, Pattern, Weights

weights = st.lists(st.just(0.0) | st.floats(1e-3, 1e3), min_size=1, max_size=6).filter(any)


def make_quotas(given_weights: list[float]) -> np.ndarray:
    assume(min(w for w in given_weights if w) >= sum(given_weights) / PERIOD)
    return Weights(((0, tuple(given_weights)),)).quotas[0]


@given(weights)
def test_quotas_sum_to_the_period_and_are_within_one_of_the_weights(given_weights: list[float]) -> None:
    quotas = make_quotas(given_weights)
    assert int(quotas.sum()) == PERIOD
    exact = np.array(given_weights) / sum(given_weights) * PERIOD
    assert (np.abs(quotas - exact) <= 1 + 1e-6).all()
    assert all(quota == 0 for quota, weight in zip(quotas.tolist(), given_weights) if weight == 0)


@given(weights, st.integers(0, 2**40))
def test_every_prefix_is_within_a_few_samples_of_its_quotas(given_weights: list[float], start: int) -> None:
    """Bound: a source's turns are half a spacing off, and so are the others' before it: (1 + D) / 2 samples."""
    quotas = make_quotas(given_weights)
    pattern = Pattern(quotas)
    sources, _ = pattern.locate(np.arange(PERIOD))
    seen = np.cumsum(sources[:, None] == np.arange(len(quotas)), axis=0)
    expected = np.arange(1, PERIOD + 1)[:, None] * (quotas / PERIOD)
    assert np.abs(seen - expected).max() <= (1 + len(quotas)) / 2
    counts = pattern.counts(start)
    assert int(counts.sum()) == start
    assert np.abs(counts - start * (quotas / PERIOD)).max() <= (1 + len(quotas)) / 2 + 1e-3  # Of floats near 2**40.


@given(st.lists(st.tuples(st.integers(1, 100_000), weights.filter(lambda w: len(w) > 2)), min_size=1, max_size=3))
def test_sources_go_on_where_the_change_before_left_them(parts: list[tuple[int, list[float]]]) -> None:
    parts = [(length, (given_weights + [1.0] * 6)[:6]) for length, given_weights in parts]
    quotas = [make_quotas(given_weights) for _, given_weights in parts]
    starts = np.cumsum([0, *(length for length, _ in parts)]).tolist()
    mixture = MixtureOrder(quotas, starts[:-1])
    sources, own = mixture.locate(0, starts[-1])
    for source in range(6):
        mine = own[sources == source]
        assert np.array_equal(mine, np.arange(len(mine)))
    fresh = MixtureOrder(quotas, starts[:-1])
    low = max(0, starts[-2] - 5)
    seen = fresh.locate(low, starts[-1])
    assert np.array_equal(seen[0], sources[low:]) and np.array_equal(seen[1], own[low:])
    none = fresh.locate(7, 7)
    assert len(none[0]) == len(none[1]) == 0


def test_a_pattern_is_spread_evenly() -> None:
    """Golden: it changes only with a version of the order."""
    sources, own = Pattern(Weights(((0, (4, 2, 1, 1)),)).quotas[0]).locate(np.arange(PERIOD - 4, PERIOD + 12))
    assert sources.tolist() == [3, 0, 1, 0, 0, 1, 0, 2, 3, 0, 1, 0, 0, 1, 0, 2]
    assert own[4:].tolist() == [32768, 16384, 32769, 8192, 8192, 32770, 16385, 32771, 32772, 16386, 32773, 8193]


def test_the_digest_names_what_was_read_before_a_step() -> None:
    item = Weights(((0, (1, 2)), (100, (2, 1))))
    other = Weights(((0, (0.5, 1.0)), (100, (3, 1)), (200, (1, 1))))
    assert item.digest(100) == other.digest(100) == Weights(((0, (1, 2)),)).digest(10**9)
    assert item.digest(101) != other.digest(101)
    assert other.digest(200) != other.digest(201)
    assert item.digest(0) == Weights(((0, (9, 1)),)).digest(0)
    assert item.num_sources == 2


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ((1, (1.0,)),),
        ((0, (1.0,)), (0, (1.0,))),
        ((0, (1.0,)), (5, (1.0, 2.0))),
        ((0, ()),),
        ((0, (0.0, 0.0)),),
        ((0, (1.0, -1.0)),),
        ((0, (1.0, float("nan"))),),
        ((0, (1.0, float("inf"))),),
        ((0, (1.0, 1e-9)),),
        ((True, (1.0,)),),
    ],
)
def test_wrong_weights(changes: tuple[tuple[int, tuple[float, ...]], ...]) -> None:
    with pytest.raises(UsageError):
        Weights(changes)
