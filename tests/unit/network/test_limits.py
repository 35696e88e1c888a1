"""Token buckets by arithmetic, and the upload limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.network.limits import ServerLimits, TokenBucket

amounts = st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 5)), max_size=50)


@given(amounts, st.floats(0.1, 100), st.floats(5, 50))
def test_a_bucket_never_gives_more_than_rate_and_burst(asks, rate, burst):
    bucket, now, taken = TokenBucket(rate, burst), 0.0, 0.0
    for pause, amount in asks:
        now += pause
        wait_s = bucket.try_take(amount, now)
        taken += amount if wait_s == 0 else 0
        assert taken <= (burst + rate * now) * (1 + 1e-9) + 1e-6
        if wait_s:
            assert bucket.try_take(amount, now + wait_s * 0.9) > 0
            now += wait_s + 1e-6
            assert bucket.try_take(amount, now) == 0
            taken += amount


@given(amounts, st.floats(0.1, 100))
def test_debt_is_paid_in_order(asks, rate):
    bucket, now, until, total = TokenBucket(rate, 1.0), 0.0, 0.0, 0.0
    for pause, amount in asks:
        now += pause
        total += amount
        ready = now + bucket.take(amount, now)
        assert ready >= until - 1e-6
        assert total <= 1.0 + rate * ready + 1e-6
        until = ready


def test_bad_limits_are_told():
    for invalid in (
        lambda: ServerLimits(upload_bytes_per_s=-1),
        lambda: ServerLimits(idle_s=0),
        lambda: ServerLimits(connections=-1),
    ):
        with pytest.raises(UsageError, match="> 0"):
            invalid()
