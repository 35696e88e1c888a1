"""Buckets by arithmetic; shares and bounds on real servers."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration import scaled
from forebay.errors import NetworkError, UsageError
from forebay.network.https import (
    Client,
    RemoteError,
    Request,
    Response,
    Server,
    file_response,
    json_response,
)
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
    for bad in (lambda: TokenBucket(0), lambda: Throttle(requests_per_s=-1), lambda: Bounds(idle_s=0)):
        with pytest.raises(UsageError, match="> 0"):
            bad()


def test_turns_are_a_peers_not_a_connections() -> None:
    """Eight threads of one peer get together what one thread of another gets."""
    throttle, sent, stop = Throttle(upload_bytes_per_s=4e6), {"many": 0, "one": 0}, time.monotonic() + 0.5

    def send(peer: str) -> None:
        while time.monotonic() < stop:
            throttle.pace(peer, 20_000)
            sent[peer] += 20_000

    threads = [threading.Thread(target=send, args=(peer,)) for peer in ["many"] * 8 + ["one"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1e6 < sum(sent.values()) < 3e6
    assert 0.6 < sent["many"] / sent["one"] < 1.8


def test_too_many_requests_are_told_when_to_come_again(make_identity: Make) -> None:
    server = Server(
        make_identity("s"), "127.0.0.1", 0, lambda r: json_response("yes"), throttle=Throttle(requests_per_s=2.0)
    )
    with server, Client(make_identity("eager")) as eager, Client(make_identity("calm")) as calm:
        for _ in range(2):
            eager.request_json(server.address, "GET", "/")
        with pytest.raises(RemoteError, match="ask again in") as caught:
            eager.request_json(server.address, "GET", "/")
        assert (caught.value.status, caught.value.code) == (429, "too_many")
        assert calm.request_json(server.address, "GET", "/")[0] == "yes"


def test_an_upload_cap_holds_and_ends_with_the_server(make_identity: Make, tmp_path: Path) -> None:
    file = tmp_path / "slice"
    file.write_bytes(bytes(400_000))

    def answer(request: Request) -> Response:
        return file_response(request, file, 400_000)

    server = Server(make_identity("s"), "127.0.0.1", 0, answer, throttle=Throttle(upload_bytes_per_s=1e6))
    with server, Client(make_identity("c")) as client:
        begun, into = time.monotonic(), io.BytesIO()
        client.download(server.address, "/", into, 0, 400_000)
        assert 0.2 < time.monotonic() - begun < scaled(2)
        assert into.getbuffer().nbytes == 400_000
        failures: list[NetworkError] = []

        def endless() -> None:
            while not failures:
                try:
                    client.download(server.address, "/", io.BytesIO(), 0, 400_000)
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
