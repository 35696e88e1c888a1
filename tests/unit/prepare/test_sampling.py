"""Samples of the input: which splits, how sure rates are, and what the whole run is expected to cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.formats.inputs import InputSplit
from forebay.prepare.sampling import Sampling, interval


@given(st.integers(1, 400), st.floats(0.001, 1))
def test_splits_and_documents_make_the_share(number: int, fraction: float) -> None:
    splits = [InputSplit((), 0, None, 10) for _ in range(number)]
    sampling = Sampling.of(splits, fraction)
    assert len(sampling.splits) * sampling.share == pytest.approx(number * fraction)
    assert sampling.scale == pytest.approx(1 / fraction)
    assert sampling.is_whole == (fraction >= 1) or sampling.share == 1.0


def test_intervals_at_the_ends() -> None:
    assert interval(0, 0, None, 0.1, 1.0) == [0.0, 1.0]
    assert interval(7, 100, 0.0, 1.0, 1.0) == [0.07, 0.07]
    low, high = interval(0, 100, None, 0.1, 0.5)
    assert low == 0.0 and 0.02 < high < 0.06
    assert interval(100, 100, 0.0, 0.1, 0.5)[1] == pytest.approx(1.0)
