"""The client of peers against members that close, lie, drip, ask for time or lack a role."""

from __future__ import annotations

import contextlib
import datetime as dt
import email.utils
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.network.addresses import parse_address, parse_peer_address
from forebay.network.client import Client, ConnectionLostError, RemoteError, WrongPeerError
from forebay.network.peer import Scope
from forebay.network.pki.identity import Identity, create_network, join
from forebay.network.retry import backoff_s, retry_after_s
from support.calibration import scaled
from support.rude_peer import Asked, RudePeer, http
from support.wire import until

Make = Callable[[str], Identity]
OK = http(200, {"fine": True})
KEY = "idempotency-key"


@pytest.fixture
def client(make_identity: Make) -> Iterator[Client]:
    with Client(make_identity("client")) as client:
        yield client


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Identity, Identity]:
    """A network's client and server, for laws: made once."""
    folder = tmp_path_factory.mktemp("network")
    create_network(folder / "network", "net")
    return join(folder / "network", folder / "client", "client"), join(folder / "network", folder / "peer", "peer")


def test_a_post_whose_connection_is_lost_is_sent_again_with_its_key(client: Client, make_identity: Make) -> None:
    answers = [None, OK, OK]
    with RudePeer(make_identity("peer"), lambda asked: answers.pop(0)) as peer:
        assert client.request_json(peer.address, "POST", "/x", {"n": 1})[0] == {"fine": True}
        client.request_json(peer.address, "POST", "/x", {"n": 2})
    first, again, second = peer.asked
    assert first == again and first.body == b'{"n":1}'
    assert len(first.headers[KEY]) == 16 and int(first.headers[KEY], 16) != int(second.headers[KEY], 16)


def test_a_post_is_sent_twice_at_most(client: Client, make_identity: Make) -> None:
    with RudePeer(make_identity("peer"), lambda asked: None) as peer:
        with pytest.raises(ConnectionLostError):
            client.request_json(peer.address, "POST", "/x", {})
        assert len(peer.asked) == 2


def test_a_get_is_sent_again_only_where_a_kept_connection_failed(client: Client, make_identity: Make) -> None:
    answers = [None, OK, None, OK]
    with RudePeer(make_identity("peer"), lambda asked: answers.pop(0)) as peer:
        with pytest.raises(ConnectionLostError):
            client.request_json(peer.address, "GET", "/x")
        assert len(peer.asked) == 1
        client.request_json(peer.address, "GET", "/x")
        assert client.request_json(peer.address, "GET", "/x")[0] == {"fine": True}  # the third was lost, the fourth not
        assert len(peer.asked) == 4 and KEY not in peer.asked[0].headers


def test_nothing_is_sent_again_after_a_time_out(client: Client, make_identity: Make) -> None:
    silent = threading.Event()

    def answer(asked: Asked) -> bytes | None:
        if asked.path == "/connect":
            return OK
        silent.wait(60)
        return None

    with RudePeer(make_identity("peer"), answer) as peer:
        for method in ("GET", "POST"):
            client.request_json(peer.address, method, "/connect", timeout_s=scaled(20))
            with pytest.raises(NetworkError, match="no full answer in time") as caught:
                client.request_json(peer.address, method, "/x", timeout_s=scaled(0.5))
            assert not isinstance(caught.value, ConnectionLostError)
        # The time may be over before the peer has read the request.
        until(lambda: len([asked for asked in peer.asked if asked.path == "/x"]) == 2)
        assert len(peer.asked) == 4 and peer.connections == 2
        silent.set()


def test_a_connection_that_the_peer_closed_meanwhile_is_not_used(client: Client, make_identity: Make) -> None:
    with RudePeer(make_identity("peer"), lambda asked: OK) as peer:
        client.request_json(peer.address, "POST", "/x", {})
        client.request_json(peer.address, "POST", "/x", {})
        assert peer.connections == 1
        peer.cut()
        deadline = time.monotonic() + scaled(5)
        while peer.connections == 1 and time.monotonic() < deadline:
            before = len(peer.asked)
            client.request_json(peer.address, "POST", "/x", {})
            assert len(peer.asked) == before + 1  # not sent on the dead one first
        assert peer.connections == 2


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(-2, len(OK)), method=st.sampled_from(["GET", "POST"]))
def test_closed_at_any_point_is_an_answer_or_a_lost_connection(
    pair: tuple[Identity, Identity], cut: int, method: str
) -> None:
    """-2: at once after the handshake; -1: after the request; then within the answer, byte by byte."""
    if cut == -2:
        listener = socket.create_server(("127.0.0.1", 0))

        def close() -> None:
            with contextlib.suppress(OSError):  # the client may be gone first
                while True:
                    plain, _ = listener.accept()
                    with plain, contextlib.suppress(OSError):
                        pair[1].server_context().wrap_socket(plain, server_side=True).close()

        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        with Client(pair[0]) as client, pytest.raises(NetworkError):
            client.request_json(f"127.0.0.1:{listener.getsockname()[1]}", "GET", "/x", timeout_s=scaled(5))
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        return
    data = None if cut == -1 else OK[:cut]
    with RudePeer(pair[1], lambda asked: data, lambda asked: True) as peer, Client(pair[0]) as client:
        try:
            result, _ = client.request_json(peer.address, method, "/x", {} if method == "POST" else None, timeout_s=30)
            assert result == {"fine": True} and cut == len(OK)
        except ConnectionLostError:
            assert cut < len(OK)
        keys = {asked.headers.get(KEY) for asked in peer.asked}
        assert len(keys) == 1 and len(peer.asked) == (2 if method == "POST" and cut < len(OK) else 1)


def test_a_refusal_that_breaks_off_is_a_lost_answer(client: Client, make_identity: Make) -> None:
    """Its code decides what the caller does next."""
    refused = http(409, {"error": "stale_attempt", "message": "it came before"})
    answers = [refused[:-5], refused]
    with RudePeer(make_identity("peer"), lambda asked: answers.pop(0), lambda asked: True) as peer:
        with pytest.raises(RemoteError) as caught:
            client.request_json(peer.address, "POST", "/x", {})
        assert caught.value.code == "stale_attempt" and peer.asked[0] == peer.asked[1]


def test_a_refusal_says_how_long_to_wait(client: Client, make_identity: Make) -> None:
    began = time.time()
    time_s = email.utils.format_datetime(dt.datetime.fromtimestamp(began + 90, dt.UTC), usegmt=True)
    answers = [http(503, Retry_After="7"), http(429, Retry_After=time_s), http(503), http(503, Retry_After="1e99")]
    with RudePeer(make_identity("peer"), lambda asked: answers.pop(0)) as peer:
        waits = []
        for _ in range(4):
            with pytest.raises(RemoteError) as caught:
                client.request_json(peer.address, "GET", "/x")
            waits.append(caught.value.wait_s)
    assert waits[0] == 7 and 89 - (time.time() - began) <= waits[1] <= 90 and waits[2:] == [0, 0]


def test_a_peer_without_the_role_is_asked_nothing(client: Client, make_identity: Make, tmp_path: Path) -> None:
    network = tmp_path / "network"
    worker = join(network, tmp_path / "only-worker", "only-worker", scope=Scope(frozenset({"worker"})))
    with RudePeer(worker, lambda asked: OK) as peer:
        for _ in range(2):
            with pytest.raises(WrongPeerError, match=r"role data.*Nothing was sent"):
                client.request_json(peer.address, "GET", "/v1/claims", role="data")
        assert peer.asked == []
        assert client.request_json(peer.address, "GET", "/x", role="worker")[0] == {"fine": True}


def test_an_unreadable_list_of_revoked_peers_trusts_nobody(client: Client, make_identity: Make) -> None:
    with RudePeer(make_identity("peer"), lambda asked: OK) as peer:
        client.request_json(peer.address, "GET", "/x")
        assert client.identity is not None
        (client.identity.node_dir / "revoked.txt").write_text("no peer id\n")
        deadline = time.monotonic() + scaled(60)  # files are looked at once a second
        with pytest.raises(NetworkError, match="cannot read its revocation lists"):
            while time.monotonic() < deadline:
                client.request_json(peer.address, "GET", "/x")
                time.sleep(0.05)
        asked = len(peer.asked)
        with pytest.raises(NetworkError):
            client.request_json(peer.address, "GET", "/x")
        assert len(peer.asked) == asked


def test_a_kept_connection_ends_with_its_certificate(
    client: Client, make_identity: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RudePeer(make_identity("peer"), lambda asked: OK) as peer:
        client.request_json(peer.address, "GET", "/x")
        clock = SimpleNamespace(time=lambda: peer.identity.expires_at - 1)
        monkeypatch.setattr("forebay.network.pki.identity.time", clock)
        client.request_json(peer.address, "GET", "/x")
        clock.time = lambda: peer.identity.expires_at + 1
        with pytest.raises(NetworkError, match="expired"):
            client.request_json(peer.address, "GET", "/x")
        assert peer.connections == 1 and len(peer.asked) == 2


def test_a_head_that_is_no_http_leaves_no_line_of_its_own_in_the_log(
    client: Client, make_identity: Make, caplog: pytest.LogCaptureFixture
) -> None:
    invalid = b"HTTP/1.1 200 OK\r\n\x1b[31mno header\r\nContent-Length: 2\r\n\r\n{}"
    with (
        RudePeer(make_identity("peer"), lambda asked: invalid, lambda asked: True) as peer,
        pytest.raises(NetworkError),
    ):
        client.request_json(peer.address, "GET", "/x")
    assert "no header" not in caplog.text


@pytest.mark.parametrize(
    "address",
    ["a..b:1", "nonsense", "", ":1", "h:0", "h:65536", "h:１", "h:1x", "h h:1", "::g:1", "a" * 64 + ":1", "-a:1",
     "a\x1b:1", "user@host:1", "a/b:1", f"{'a.' * 130}b:1", "ü..de:1"],
)  # fmt: skip
def test_addresses_that_are_none(address: str, client: Client) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(address)
    with pytest.raises(ProtocolError, match="HOST:PORT"):
        parse_peer_address(address)
    with pytest.raises(ProtocolError, match="HOST:PORT"):
        client.request_json(address, "GET", "/x")


@given(st.one_of(st.text(max_size=40), st.from_regex(r"[a-z.\[\]:_-]{0,20}:[0-9]{1,6}", fullmatch=True)))
def test_an_address_is_one_that_sockets_take_or_a_violation(text: str) -> None:
    try:
        host, port = parse_peer_address(text)
    except ProtocolError:
        return
    assert 0 < port < 65536
    host.encode("idna")  # what getaddrinfo does first: UnicodeError would pass handlers of OSError


DATES = st.from_regex(
    r"(Mon, )?[0-9]{1,9} [A-Z][a-z]{2} [0-9]{1,12} [0-9:]{0,12}( GMT| [+-][0-9]{1,9})?", fullmatch=True
)


@given(st.one_of(st.text(max_size=40), DATES, st.datetimes().map(lambda at: email.utils.format_datetime(at))))
def test_a_wait_that_is_asked_for_is_seconds_or_none(text: str) -> None:
    wait_s = retry_after_s(text, time.time())
    assert wait_s is None or 0 <= wait_s < 1e13


@given(st.integers(1, 10_000), st.floats(0.01, 5), st.floats(5, 60), st.floats(0, 100))
def test_waits_grow_to_a_bound_and_heed_what_was_asked(tried: int, first: float, most: float, asked: float) -> None:
    wait_s = backoff_s(tried, first, most, asked)
    planned = min(most, first * 2.0 ** min(tried - 1, 60))
    assert max(asked, planned / 2) <= wait_s <= max(asked, planned * 1.5)
