"""Token buckets by arithmetic, and the upload limit."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.network.limits import ServerLimits, Throttle, TokenBucket

amounts = st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 5)), max_size=50)


@settings(max_examples=40)
@given(amounts, st.floats(0.1, 100), st.floats(5, 50))
def test_a_bucket_never_gives_more_than_rate_and_burst(
    asks: list[tuple[float, float]], rate: float, burst: float
) -> None:
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


@settings(max_examples=40)
@given(amounts, st.floats(0.1, 100))
def test_debt_is_paid_in_order(asks: list[tuple[float, float]], rate: float) -> None:
    bucket, now, until, total = TokenBucket(rate, 1.0), 0.0, 0.0, 0.0
    for pause, amount in asks:
        now += pause
        total += amount
        ready = now + bucket.take(amount, now)
        assert ready >= until - 1e-6
        assert total <= 1.0 + rate * ready + 1e-6
        until = ready


def test_bad_limits_are_told() -> None:
    for invalid in (
        lambda: TokenBucket(0),
        lambda: Throttle(-1),
        lambda: ServerLimits(idle_s=0),
        lambda: ServerLimits(connections=-1),
    ):
        with pytest.raises(UsageError, match="> 0"):
            invalid()


def test_pieces_are_short_where_the_limit_is_slow() -> None:
    assert Throttle().piece_bytes(1 << 20) == 1 << 20
    assert Throttle(1e6).piece_bytes(1 << 20) == 100_000
    assert Throttle(10).piece_bytes(1 << 20) == 4096


def test_one_throttle_for_servers_in_loops_of_their_own() -> None:
    throttle = Throttle(upload_bytes_per_s=1000)
    started = time.monotonic()
    for _ in range(2):
        asyncio.run(throttle.pace(100))
    assert time.monotonic() - started > 0.14  # 200 bytes less what a bucket saves up
