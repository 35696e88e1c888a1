"""Buckets by arithmetic; shares and bounds on real servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration import scaled
from forebay.errors import NetworkError, UsageError
from forebay.network.client import Client
from forebay.network.exchange import Request, Response, file_response
from forebay.network.https import Server
from forebay.network.identity import Identity
from forebay.network.limits import Bounds, Throttle, TokenBucket

Make = Callable[[str], Identity]
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
    for bad in (lambda: TokenBucket(0), lambda: Throttle(-1), lambda: Bounds(idle_s=0)):
        with pytest.raises(UsageError, match="> 0"):
            bad()


def test_turns_are_a_peers_not_a_connections() -> None:
    """Eight threads of one peer get together what two of another get: two, so that one waits while the other sends."""
    throttle, sent, stop = Throttle(upload_bytes_per_s=2e6), {"many": 0, "few": 0}, time.monotonic() + 1.0

    def send(peer: str) -> None:
        while time.monotonic() < stop:
            throttle.pace(peer, 20_000)
            sent[peer] += 20_000

    threads = [threading.Thread(target=send, args=(peer,)) for peer in ["many"] * 8 + ["few"] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1e6 < sum(sent.values()) < 3e6
    assert 0.6 < sent["many"] / sent["few"] < 1.8


def test_an_upload_cap_holds_and_ends_with_the_server(make_identity: Make, tmp_path: Path) -> None:
    file = tmp_path / "slice"
    file.write_bytes(bytes(400_000))

    def answer(request: Request) -> Response:
        return file_response(request, file, 400_000)

    server = Server(make_identity("s"), "127.0.0.1", 0, answer, throttle=Throttle(upload_bytes_per_s=1e6))
    with server, Client(make_identity("c")) as client:
        begun, into = time.monotonic(), memoryview(bytearray(400_000))
        client.read_range(server.address, "/", into, 0)
        assert 0.2 < time.monotonic() - begun < scaled(2)
        failures: list[NetworkError] = []

        def endless() -> None:
            while not failures:
                try:
                    client.read_range(server.address, "/", into, 0)
                except NetworkError as error:
                    failures.append(error)

        asking = threading.Thread(target=endless)
        asking.start()
        time.sleep(0.05)
        begun = time.monotonic()
        server.close()
        assert time.monotonic() - begun < scaled(2)
        asking.join(10)
        assert failures
