"""Weights to places: every prefix is near its quotas, every place is found alone, digests name what was read."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.order.mixture import PERIOD, Pattern, Weights

weights = st.lists(st.just(0.0) | st.floats(1e-3, 1e3), min_size=1, max_size=6).filter(any)


def make_quotas(given_weights: list[float]) -> np.ndarray:
    assume(min(w for w in given_weights if w) >= sum(given_weights) / PERIOD)
    return Weights(((0, tuple(given_weights)),)).quotas[0]


@given(weights, st.integers(0, 2**40))
def test_every_prefix_is_within_a_few_samples_of_the_weights(given_weights: list[float], start: int) -> None:
    """Bound: a source's turns are half a spacing off, and so are the others' before it: (1 + D) / 2 samples."""
    quotas = make_quotas(given_weights)
    assert int(quotas.sum()) == PERIOD
    exact = np.array(given_weights) / sum(given_weights) * PERIOD
    assert (np.abs(quotas - exact) <= 1 + 1e-6).all()
    assert all(quota == 0 for quota, weight in zip(quotas.tolist(), given_weights) if weight == 0)

    pattern = Pattern(quotas)
    sources, _ = pattern.locate(np.arange(PERIOD))
    seen = np.cumsum(sources[:, None] == np.arange(len(quotas)), axis=0)
    expected = np.arange(1, PERIOD + 1)[:, None] * (quotas / PERIOD)
    assert np.abs(seen - expected).max() <= (1 + len(quotas)) / 2
    counts = pattern.counts(start)
    assert int(counts.sum()) == start
    assert np.abs(counts - start * (quotas / PERIOD)).max() <= (1 + len(quotas)) / 2 + 1e-3  # Of floats near 2**40.


def test_a_pattern_is_spread_evenly() -> None:
    """Golden: it changes only with a version of the order."""
    sources, own = Pattern(Weights(((0, (4, 2, 1, 1)),)).quotas[0]).locate(np.arange(PERIOD - 4, PERIOD + 12))
    assert sources.tolist() == [3, 0, 1, 0, 0, 1, 0, 2, 3, 0, 1, 0, 0, 1, 0, 2]
    assert own[4:].tolist() == [32768, 16384, 32769, 8192, 8192, 32770, 16385, 32771, 32772, 16386, 32773, 8193]


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ((1, (1.0,)),),
        ((0, (1.0,)), (0, (1.0,))),
        ((0, ()),),
        ((0, (0.0, 0.0)),),
        ((0, (1.0, float("nan"))),),
        ((0, (1.0, 1e-9)),),
        ((True, (1.0,)),),
    ],
)
def test_wrong_weights(changes: tuple[tuple[int, tuple[float, ...]], ...]) -> None:
    with pytest.raises(UsageError):
        Weights(changes)
