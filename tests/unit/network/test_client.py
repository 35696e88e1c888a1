"""The client against peers that close, lie, drip, ask for time, lack a role or are somebody else."""

import contextlib
import datetime as dt
import email.utils
import itertools
import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.errors import NetworkError, ProtocolError
from forebay.network.client import Client, ConnectionLostError, RemoteError, TruncatedBodyError, WrongPeerError
from forebay.network.peer import Scope
from forebay.network.pki.identity import join, renew
from forebay.storage.connections import StreamedResponse
from support.handlers import PatientClient
from support.rude_peer import RudePeer, http
from support.waiting import until

OK = http(200, {"fine": True})
KEY = "idempotency-key"


@pytest.fixture
def client() -> Iterator[Client]:
    """Over plain HTTP, where certificates are not the point."""
    with PatientClient(None) as client:
        yield client


@pytest.fixture
def member(make_identity) -> Iterator[Client]:
    with PatientClient(make_identity("client")) as client:
        yield client


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The client's clock, of deadlines and of dates."""
    clock = SimpleNamespace(now=1000.0, time=lambda: clock.now, monotonic=lambda: clock.now)
    for module in ("network.client", "storage.connections"):
        monkeypatch.setattr(f"forebay.{module}.time", clock)
    return clock


def get(client: Client, peer: RudePeer) -> object:
    return client.request_json(peer.address, "GET", "/x")[0]


# Whom it asks.


def test_the_wrong_peer_is_asked_nothing(member, network_dir):
    scope = Scope(frozenset({"worker"}))
    worker = join(network_dir, network_dir.parent / "only-worker", "only-worker", scope=scope)
    with RudePeer(worker, lambda asked: OK) as peer:
        for _ in range(2):
            with pytest.raises(WrongPeerError, match=r"role data.*Nothing was sent"):
                member.request_json(peer.address, "GET", "/x", role="data")
            with pytest.raises(WrongPeerError, match=rf"expected {'a' * 32}, got {worker.peer_id}.*Nothing was sent"):
                member.request_json(peer.address, "GET", "/x", expect_peer="a" * 32)
        assert peer.asked == []
        assert member.request_json(peer.address, "GET", "/x", worker.peer_id, role="worker")[0] == {"fine": True}


@pytest.mark.usefixtures("changes_at_once")
def test_an_unreadable_list_of_revoked_peers_trusts_nobody(member, make_identity):
    with RudePeer(make_identity("peer"), lambda asked: OK) as peer:
        get(member, peer)
        (member.identity.node_dir / "revoked.txt").write_text("no peer id\n")
        for _ in range(2):
            with pytest.raises(NetworkError, match="cannot read its revocation lists"):
                get(member, peer)
        assert len(peer.asked) == 1


def test_a_kept_connection_ends_with_its_certificate(member, make_identity, monkeypatch):
    identity = make_identity("peer")
    with RudePeer(identity, lambda asked: OK) as peer:
        get(member, peer)
        clock = SimpleNamespace(time=lambda: identity.expires_at - 1)
        monkeypatch.setattr("forebay.network.pki.identity.time", clock)
        get(member, peer)
        clock.time = lambda: identity.expires_at + 1
        with pytest.raises(NetworkError, match="expired"):
            get(member, peer)
        assert peer.connections == 1 and len(peer.asked) == 2


# What it sends again.


def test_a_get_is_sent_again_only_where_a_kept_connection_failed(client):
    answers = [None, OK, None, OK]
    with RudePeer(None, lambda asked: answers.pop(0)) as peer:
        with pytest.raises(ConnectionLostError):
            get(client, peer)
        assert len(peer.asked) == 1
        get(client, peer)
        assert get(client, peer) == {"fine": True}  # the third was lost, the fourth not
        assert len(peer.asked) == 4 and KEY not in peer.asked[0].headers


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nothing_is_sent_again_after_a_time_out(client, clock, method):
    """An answer is read by its deadline, however its bytes come."""
    ended = threading.Event()

    def drip(asked):
        for byte in OK[:-1]:
            clock.now += 1.0
            yield bytes([byte])
        if asked.path == "/late":
            ended.wait()
        yield OK[-1:]

    with RudePeer(None, drip) as peer, contextlib.ExitStack() as stack:
        stack.callback(ended.set)
        assert client.request_json(peer.address, method, "/x", timeout_s=1000.0)[0] == {"fine": True}
        with pytest.raises(NetworkError, match=r"no full answer in time.*ask another") as caught:
            client.request_json(peer.address, method, "/late", timeout_s=9.0)
        assert not isinstance(caught.value, ConnectionLostError)
        assert len(peer.asked) == 2 and peer.connections == 1


def test_a_renewed_certificate_has_connections_of_its_own(member, network_dir, make_identity):
    """The earlier ones go on with the certificate that they began with, and are refused once it has expired."""
    with RudePeer(make_identity("server"), lambda asked: OK) as peer:
        assert get(member, peer) == get(member, peer) and peer.connections == 1
        renew(network_dir, member.identity.node_dir, valid_days=99)
        assert member.identity.refresh() and get(member, peer) and peer.connections == 2


def test_a_connection_that_the_peer_closed_meanwhile_is_not_used(client, clock):
    with RudePeer(None, lambda asked: OK) as peer:
        for _ in range(2):
            client.request_json(peer.address, "POST", "/x", {})
        assert peer.connections == 1
        (connection,) = client._pool._idle[peer.address, None]
        peer.cut()
        until(lambda: not connection.is_connected)
        client.request_json(peer.address, "POST", "/x", {})
        assert len(peer.asked) == 3 and peer.connections == 2  # not sent on the dead one first
        clock.now += 200.0  # nor is one that is older than servers keep them
        client.request_json(peer.address, "POST", "/x", {})
        assert len(peer.asked) == 4 and peer.connections == 3


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(-1, len(OK)), method=st.sampled_from(["GET", "POST"]))
def test_closed_at_any_point_is_an_answer_or_a_lost_connection(client, cut, method):
    """-1: after the request; then within the answer, byte by byte."""
    data = None if cut == -1 else OK[:cut]
    with RudePeer(None, lambda asked: data, lambda asked: True) as peer:
        try:
            result, _ = client.request_json(peer.address, method, "/x", {} if method == "POST" else None)
            assert result == {"fine": True} and cut == len(OK)
        except ConnectionLostError:
            assert cut < len(OK)
        keys = {asked.headers.get(KEY) for asked in peer.asked}
        assert len(keys) == 1 and len(peer.asked) == (2 if method == "POST" and cut < len(OK) else 1)


def test_a_refusal_that_breaks_off_is_a_lost_answer(client):
    """Its code decides what the caller does next."""
    refused = http(409, {"error": "stale_attempt", "message": "it came before"})
    answers = [refused[:-5], refused, OK]
    with RudePeer(None, lambda asked: answers.pop(0), lambda asked: True) as peer:
        with pytest.raises(RemoteError, match="refused with 409 stale_attempt: it came before") as caught:
            client.request_json(peer.address, "POST", "/x", {})
        client.request_json(peer.address, "POST", "/x", {})
    first, again, second = peer.asked
    assert caught.value.code == "stale_attempt" and first == again and first.headers[KEY] != second.headers[KEY]


@pytest.mark.parametrize("code, advice", [("expired", "renew ISSUER"), ("revoked", "Ask the issuer why")])
def test_who_is_refused_is_told_what_to_do(member, make_identity, code, advice):
    refused = http(403, {"error": code, "message": "no"})
    with RudePeer(make_identity("peer"), lambda asked: refused) as peer, pytest.raises(RemoteError, match=advice):
        get(member, peer)


def test_a_refusal_says_how_long_to_wait(client, clock):
    date = email.utils.format_datetime(dt.datetime.fromtimestamp(clock.now + 90, dt.UTC), usegmt=True)
    answers = [
        http(503, Retry_After="7"),
        http(429, Retry_After=date),
        http(503, Retry_After="Mon, 1 Jan 99999"),
        http(503, Retry_After="9999999"),
    ]
    waits = []
    with RudePeer(None, lambda asked: answers.pop(0)) as peer:
        for _ in range(4):
            with pytest.raises(RemoteError) as caught:
                get(client, peer)
            waits.append(caught.value.wait_s)
    assert waits == [7, 90, 0, 3600]


# What it takes for an answer.

RANGE = b"HTTP/1.1 206 OK\r\nContent-Length: 8\r\nContent-Range: bytes 0-7/8\r\n\r\n"


@pytest.mark.parametrize(
    "answer, message",
    [
        (b"", "Remote end closed connection"),
        (b"HTTP/1.1 206", "closed amid the answer"),
        (b"SSH-2.0-x\r\n\r\n", "expected an HTTP answer"),
        (b"HTTP/1.1 206 OK\r\n\r\n12345678", "Content-Length"),
        (b"HTTP/1.1 206 OK\r\nContent-Length: 9\r\nContent-Range: bytes 0-8/9\r\n\r\n", "expected status 206"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n12345678", "expected status 206"),
        (b"HTTP/1.1 206 OK\r\n" + b"A" * 50000, "HTTP head of at most"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 3\r\n\r\n{[}", "refused with 500"),
        (http(307, b"", Location="https://127.0.0.1:1/x"), "refused with 307"),  # not followed
        (b"HTTP/1.1 206 OK\r\n\x1b[31mno header\r\nContent-Length: 8\r\n\r\n12345678", "expected"),
        (RANGE + b"1234", "broke off at byte 4 of 8"),
    ],
)
def test_lying_servers(answer, message, client, caplog):
    into = bytearray(8)
    with RudePeer(None, lambda asked: answer, lambda asked: True) as peer:
        with pytest.raises(NetworkError, match=message) as caught:
            client.read_range(peer.address, "/x", memoryview(into), 0)
        assert len(peer.asked) == 1 and "no header" not in caplog.text
    assert not isinstance(caught.value, TruncatedBodyError) or into[: caught.value.received] == b"1234"


@pytest.mark.parametrize("body", [b"[1]", b"nonsense", b"[" * 100_000])
def test_an_answer_is_a_json_object(client, body):
    with (
        RudePeer(None, lambda asked: http(200, body)) as peer,
        pytest.raises(ProtocolError, match="expected JSON from"),
    ):
        get(client, peer)


def test_more_than_was_asked_for_is_not_kept(client):
    into = bytearray(12)
    with RudePeer(None, lambda asked: itertools.chain([RANGE + b"12345678"], itertools.repeat(b"y" * 1000))) as peer:
        client.read_range(peer.address, "/x", memoryview(into)[:8], 0)
    assert into == b"12345678\0\0\0\0"


@pytest.mark.parametrize("num_bytes, is_slow", [(4095, True), (4096, False)])
def test_a_body_below_the_least_rate_is_a_stall(clock, num_bytes, is_slow):
    """So a peer that gives a byte now and then holds up no other, whatever each of its reads takes."""

    def readinto(view):
        clock.now += 1.0
        return min(num_bytes, len(view))

    sock = SimpleNamespace(unbound=lambda stall_s: None, reader=SimpleNamespace(readinto1=readinto))
    head = SimpleNamespace(status=200, reason="", headers={}, chunked=False, length_remaining=1 << 20)
    connection = SimpleNamespace(is_closed=False)
    response = StreamedResponse(connection, sock, head)
    response.pace(10.0, 4096)
    started, view = clock.now, memoryview(bytearray(1 << 16))
    try:
        while response.readinto(view):
            assert clock.now - started < 10.0 or not is_slow
    except TimeoutError as error:
        assert is_slow and "stalled, under 4096 bytes/s for 10 s" in str(error)
    assert response.received == (10 * num_bytes if is_slow else 1 << 20)
    assert math.isclose(clock.now - started, 10.0 if is_slow else 256.0)
