"""The server on real sockets: answers, ranges, refusals, strangers, limits, drain and close."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.network.app import ApiError, JsonResponse, file_response, make_app, peer_of, role
from forebay.network.client import Client, RemoteError
from forebay.network.limits import ServerLimits
from forebay.network.peer import Scope
from forebay.network.pki.identity import Identity, create_network, create_organisation, join, revoke
from forebay.network.server import Server
from support.calibration import scaled
from support.handlers import Request, app_of, serve
from support.wire import connect, read_answers, until

Make = Callable[[str], Identity]
SIZE = 3 * (1 << 20) + 17
CONTENT = bytes(range(251)) * (SIZE // 251 + 1)


class Desk:
    """A handler with a few routes, a gate that holds a request, and a record of who asked."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.peers: list[str] = []
        self.entered = threading.Event()
        self.gate = threading.Event()

    def __call__(self, request: Request) -> Response:
        self.peers.append(request.peer.peer_id)
        match request.path:
            case "/echo":
                return JsonResponse({"got": request.json(), "query": request.query, "by": request.method})
            case "/file":
                return file_response(request.http, self.file, self.file.stat().st_size)
            case "/held":
                self.entered.set()
                assert self.gate.wait(20)
                return JsonResponse({"answer": "late"})
            case "/bug":
                raise RuntimeError("a bug in a handler")
        raise ApiError(404, "unknown_path", f"no {request.path} here")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    file = tmp_path / "content"
    file.write_bytes(CONTENT[:SIZE])
    return Desk(file)


@pytest.fixture
def server(desk: Desk, make_identity: Make) -> Iterator[Server]:
    with serve(make_identity("server"), desk) as server:
        yield server


@pytest.fixture
def client(make_identity: Make) -> Iterator[Client]:
    with Client(make_identity("client")) as client:
        yield client


def test_json_there_and_back_on_one_connection(server: Server, client: Client, desk: Desk) -> None:
    for number in range(3):
        answer, peer = client.request_json(server.address, "POST", "/echo?a=1&b=", {"n": number})
        assert answer == {"got": {"n": number}, "query": {"a": "1", "b": ""}, "by": "POST"}
        assert server.identity is not None
        assert (peer.peer_id, peer.name) == (server.identity.peer_id, "server")
    assert client.identity is not None and set(desk.peers) == {client.identity.peer_id}
    assert server.num_connections == 1


def test_the_application_sees_the_certificate_of_the_client(network_dir: Path, tmp_path: Path) -> None:
    """uvicorn hands it to no application: ours does, through the protocol's state. An upgrade may break that."""
    scope = Scope(frozenset({"worker"}), ("c4-*",))
    org = create_organisation(network_dir, tmp_path / "org", "acme")
    member = join(tmp_path / "org", tmp_path / "member", "member", scope=scope)
    seen: list[object] = []

    def handle(request: Request) -> Response:
        assert request.http.state.peer is peer_of(request.http) is request.peer
        assert request.http.scope["client"][0] == "127.0.0.1" and request.http.scope["scheme"] == "https"
        seen.append(request.peer)
        return JsonResponse({})

    with serve(join(network_dir, tmp_path / "server", "server"), handle) as server, Client(member) as client:
        client.request_json(server.address, "GET", "/")
    (peer,) = seen
    assert peer == member.as_peer
    assert (member.peer_id, member.org, member.scope) == (member.as_peer.peer_id, org, member.as_peer.scope)


def test_refusals_carry_status_and_code(server: Server, client: Client) -> None:
    with pytest.raises(RemoteError, match="no /nothing here") as caught:
        client.request_json(server.address, "GET", "/nothing")
    assert (caught.value.status, caught.value.code) == (404, "unknown_path")
    with pytest.raises(RemoteError) as caught:
        client.request_json(server.address, "PUT", "/echo")
    assert (caught.value.status, caught.value.code) == (405, "method_not_allowed")


def test_a_bug_in_a_handler_is_500_and_the_server_stays(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RemoteError) as caught:
        client.request_json(server.address, "GET", "/bug")
    assert (caught.value.status, caught.value.code) == (500, "internal")
    until(lambda: "a bug in a handler" in caplog.text)
    assert "a bug" not in str(caught.value)
    assert client.request_json(server.address, "GET", "/echo")[0]["by"] == "GET"


@pytest.mark.parametrize(("start", "stop"), [(0, SIZE), (5, 6), (1 << 20, SIZE), (SIZE - 1, SIZE)])
def test_ranges(server: Server, client: Client, start: int, stop: int) -> None:
    into = bytearray(stop - start)
    client.read_range(server.address, "/file", memoryview(into), start)
    assert into == CONTENT[start:stop]
    assert client.get_bytes(server.address, "/file", SIZE) == CONTENT[:SIZE]


def test_a_range_beyond_the_end(server: Server, client: Client) -> None:
    with pytest.raises(RemoteError) as caught:
        client.read_range(server.address, "/file", memoryview(bytearray(1)), SIZE)
    assert caught.value.status == 416
    with pytest.raises(ProtocolError, match="expected status 206"):
        client.read_range(server.address, "/file", memoryview(bytearray(SIZE + 1)), 0)


def test_an_empty_file_is_an_answer(
    server: Server, client: Client, desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.file.write_bytes(b"")
    for _ in range(2):
        assert client.get_bytes(server.address, "/file", SIZE) == b""
    assert server.num_connections == 1 and "ASGI" not in caplog.text


def test_a_file_that_became_shorter_breaks_the_connection_not_the_server(
    make_identity: Make, client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "short"
    file.write_bytes(bytes(100))
    with serve(make_identity("s"), lambda request: file_response(request.http, file, SIZE)) as server:
        with pytest.raises(NetworkError, match="broke off at byte 100"):
            client.read_range(server.address, "/", memoryview(bytearray(SIZE)), 0)
        file.unlink()
        with pytest.raises(RemoteError) as caught:
            client.read_range(server.address, "/", memoryview(bytearray(SIZE)), 0)
        assert (caught.value.status, caught.value.code) == (500, "unreadable")


def test_bytes_are_counted(desk: Desk, make_identity: Make, client: Client) -> None:
    counted: list[tuple[str, int]] = []
    with serve(make_identity("s"), desk, on_bytes=lambda peer, n: counted.append((peer.peer_id, n))) as server:
        client.read_range(server.address, "/file", memoryview(bytearray(SIZE)), 0)
        until(lambda: sum(n for _, n in counted) == SIZE)
    assert client.identity is not None and {peer for peer, _ in counted} == {client.identity.peer_id}


def test_limits_on_bodies(server: Server, client: Client) -> None:
    with pytest.raises(RemoteError) as caught:
        client.request_json(server.address, "POST", "/echo", "x" * (1 << 20))
    assert caught.value.status == 413
    with pytest.raises(ProtocolError, match="at most 10 bytes"):
        client.get_bytes(server.address, "/file", 10)
    with pytest.raises(UsageError, match="printable"):
        client.get_bytes(server.address, "/a b\r\nX: y", 10)


def test_strangers_get_nothing(server: Server, client: Client, desk: Desk, tmp_path: Path) -> None:
    create_network(tmp_path / "elsewhere", "test-network")
    stranger = join(tmp_path / "elsewhere", tmp_path / "stranger", "client")
    with Client(stranger) as other, pytest.raises(NetworkError, match="certificate of the same network"):
        other.request_json(server.address, "GET", "/echo")  # the client refuses the server
    trusting = stranger.client_context()
    trusting.verify_mode = ssl.CERT_NONE
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.verify_mode = ssl.CERT_NONE
    for context in (trusting, bare):  # the server refuses: another network's certificate, and none
        # How the refusal arrives is a race (an alert, a reset, an end); that nothing was answered is not.
        plain = socket.create_connection(("127.0.0.1", server.port), 20)
        with context.wrap_socket(plain) as tls, pytest.raises(OSError):
            tls.sendall(b"GET /echo HTTP/1.1\r\n\r\n")
            assert tls.recv(100) == b"", "a stranger was answered"
            raise ConnectionResetError("refused with no word")
    with socket.create_connection(("127.0.0.1", server.port), 20) as plain:  # no TLS at all
        plain.sendall(b"GET /echo HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in plain.recv(1000)
    until(lambda: server.refused_connections >= 4)
    assert desk.peers == []
    assert client.request_json(server.address, "GET", "/echo")[0]["by"] == "GET"


@pytest.mark.usefixtures("changes_at_once")
def test_a_revoked_peer_is_refused_without_restart(server: Server, client: Client, make_identity: Make) -> None:
    client.request_json(server.address, "GET", "/echo")
    assert server.identity is not None and client.identity is not None
    revoke(server.identity.node_dir, client.identity.peer_id)
    with pytest.raises(NetworkError) as caught:  # on the open connection, which may be cut first
        client.request_json(server.address, "GET", "/echo")
    assert not isinstance(caught.value, RemoteError) or caught.value.status == 403
    until(lambda: server.num_connections == 0)  # what is open is cut, asked or not
    with pytest.raises(NetworkError):
        client.request_json(server.address, "GET", "/echo")
    with Client(make_identity("other")) as other:
        other.request_json(server.address, "GET", "/echo")
        assert other.identity is not None
        revoke(other.identity.node_dir, server.identity.peer_id)
        with pytest.raises(NetworkError, match="is revoked"):
            other.request_json(server.address, "GET", "/echo")


def test_port_in_use_and_nobody_there(server: Server, client: Client, desk: Desk) -> None:
    with pytest.raises(NetworkError, match=f"port {server.port} is in use"):
        serve(server.identity, desk, port=server.port).start()
    with socket.socket() as current:
        current.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{current.getsockname()[1]}"
        with pytest.raises(NetworkError, match=address):
            client.request_json(address, "GET", "/echo")
    with pytest.raises(NetworkError, match="cannot listen"):
        serve(server.identity, desk, host="192.0.2.1").start()


def test_a_restarted_server_is_found_again(desk: Desk, make_identity: Make, client: Client) -> None:
    identity = make_identity("s")
    with serve(identity, desk) as first:
        client.request_json(first.address, "GET", "/echo")
    with serve(identity, desk, port=first.port) as second:
        assert client.request_json(second.address, "GET", "/echo")[0]["by"] == "GET"


# Roles.


def test_a_role_is_asked_for_before_the_body_is_read(network_dir: Path, tmp_path: Path, make_identity: Make) -> None:
    app, called = make_app("test"), list[bytes]()

    async def take(request: HttpRequest) -> Response:
        called.append(await request.body())
        return JsonResponse({})

    app.post("/work", openapi_extra=role("worker"))(take)
    reader = join(network_dir, tmp_path / "reader", "reader", scope=Scope(frozenset({"data"})))
    worker = join(network_dir, tmp_path / "worker", "worker", scope=Scope(frozenset({"worker"})))
    with Server(app, make_identity("s"), "127.0.0.1", 0) as server:
        started = time.monotonic()
        with connect(server, reader) as tls:
            tls.sendall(b"POST /work HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n")
            (answer,) = read_answers(tls)
            assert (answer.status, answer.json()["error"]) == (403, "not_worker")
            assert answer.headers["connection"] == "close"  # the rest of its body is nobody's next request
        assert time.monotonic() - started < scaled(3) and called == []
        with connect(server, reader) as tls:
            tls.sendall(b"POST /work HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
            assert read_answers(tls)[0].status == 403
        with Client(worker) as client:
            client.request_json(server.address, "POST", "/work", {"n": 1})
    assert called == [b'{"n":1}']


# Limits.


def test_in_a_full_house_members_with_one_connection_keep_it(desk: Desk, make_identity: Make, client: Client) -> None:
    with serve(make_identity("s"), desk, limits=ServerLimits(connections=1)) as server:
        client.request_json(server.address, "GET", "/echo")  # its kept connection holds the one place
        with Client(make_identity("second")) as second:
            with pytest.raises(NetworkError, match="cannot reach"):
                second.request_json(server.address, "GET", "/echo")
            client.close()
            until(lambda: server.num_connections == 0)
            assert second.request_json(server.address, "GET", "/echo")[0]["by"] == "GET"


def test_in_a_full_house_the_peer_with_most_makes_room(desk: Desk, make_identity: Make) -> None:
    many, other = make_identity("many"), make_identity("other")
    with serve(make_identity("s"), desk, limits=ServerLimits(connections=4)) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server, many)) for _ in range(3)]
        item = stack.enter_context(connect(server, other))
        until(lambda: server.num_connections == 4)
        idle[0].sendall(b"GET /held HTTP/1.1\r\n\r\n")  # the oldest, but it does not rest
        assert desk.entered.wait()
        with Client(make_identity("third")) as third:
            assert third.request_json(server.address, "GET", "/echo")[0]["by"] == "GET"
        idle[1].settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert idle[1].recv(1) == b"", "the one that rested for longest was cut"
        for sock in (item, idle[2]):
            sock.sendall(b"GET /echo HTTP/1.1\r\n\r\n")
            assert read_answers(sock)[0].status == 200
        desk.gate.set()
        assert read_answers(idle[0])[0].json() == {"answer": "late"}


def test_connections_of_a_peer(desk: Desk, make_identity: Make) -> None:
    many, other = make_identity("many"), make_identity("other")
    with serve(make_identity("s"), desk, limits=ServerLimits(connections_per_peer=2)) as server:
        busy = [connect(server, many) for _ in range(2)]
        for tls in busy:
            tls.sendall(b"GET /held HTTP/1.1\r\n\r\n")
        until(lambda: desk.peers.count(many.peer_id) == 2)
        with Client(many) as client, pytest.raises(NetworkError):
            client.request_json(server.address, "GET", "/echo")
        with Client(other) as client:
            client.request_json(server.address, "GET", "/echo")
        desk.gate.set()
        for tls in busy:
            assert read_answers(tls)[0].status == 200
        with Client(many) as client:  # one of its own that rests makes room
            client.request_json(server.address, "GET", "/echo")
        until(lambda: server.num_connections <= 2)
        for tls in busy:
            tls.close()


@pytest.fixture
def acme(network_dir: Path, tmp_path: Path) -> Callable[[str], Identity]:
    """Members of one organisation, by name."""
    create_organisation(network_dir, tmp_path / "acme", "acme")
    return lambda name: join(tmp_path / "acme", tmp_path / f"acme-{name}", name)


def test_connections_of_an_organisation(
    desk: Desk, make_identity: Make, acme: Make, network_dir: Path, tmp_path: Path
) -> None:
    with (
        serve(make_identity("s"), desk, limits=ServerLimits(connections_per_organisation=2)) as server,
        contextlib.ExitStack() as stack,
    ):
        first, second, third = (stack.enter_context(Client(acme(name))) for name in "abc")
        for item in (first, second):
            item.request_json(server.address, "GET", "/echo")
        with pytest.raises(NetworkError):
            third.request_json(server.address, "GET", "/echo")
        create_organisation(network_dir, tmp_path / "other-org", "other")
        for own in (make_identity("root-1"), join(tmp_path / "other-org", tmp_path / "o", "o")):
            stack.enter_context(Client(own)).request_json(server.address, "GET", "/echo")
        for i in range(3):  # members of the root share no limit
            stack.enter_context(Client(make_identity(f"r{i}"))).request_json(server.address, "GET", "/echo")
        first.close()
        until(lambda: server.num_connections == 6)
        third.request_json(server.address, "GET", "/echo")


@pytest.mark.parametrize("own", [True, False])
def test_requests_in_flight(desk: Desk, make_identity: Make, acme: Make, own: bool) -> None:
    """Of a peer, and of an organisation whose members are several."""
    limits = ServerLimits(requests_per_peer=2) if own else ServerLimits(requests_per_organisation=2)
    names = ["a", "a", "a"] if own else ["a", "b", "c"]
    members = {name: acme(name) for name in dict.fromkeys(names)}
    with serve(make_identity("s"), desk, limits=limits) as server, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(server, members[name])) for name in names]
        for tls in socks[:2]:
            tls.sendall(b"GET /held HTTP/1.1\r\n\r\n")
        until(lambda: len(desk.peers) == 2)
        socks[2].sendall(b"GET /echo HTTP/1.1\r\n\r\n")
        (refused,) = read_answers(socks[2])
        assert (refused.status, refused.json()["error"]) == (429, "busy")
        assert int(refused.headers["retry-after"]) >= 1
        whose = f"peer {members['a'].peer_id}" if own else f"organisation {members['a'].org}"
        assert whose in refused.json()["message"] and "at most 2 requests" in refused.json()["message"]
        with Client(make_identity("elsewhere")) as other:
            assert other.request_json(server.address, "GET", "/echo")[0]["by"] == "GET"
        assert metric(server, "forebay_limited_requests_total", "busy") == 1
        desk.gate.set()
        for tls in socks[:2]:
            read_answers(tls)
        socks[2].sendall(b"GET /echo HTTP/1.1\r\n\r\n")
        assert read_answers(socks[2])[0].status == 200


def metric(server: Server, name: str, label: str = "") -> float:
    """The value of a figure of the server; 0 if it has none."""
    for family in server._core.metrics():
        for sample in family.samples:
            if sample.name == name and (not label or label in sample.labels.values()):
                return float(sample.value)
    return 0.0


@pytest.mark.parametrize("own", [True, False])
def test_rate_of_requests(desk: Desk, make_identity: Make, acme: Make, own: bool) -> None:
    limits = ServerLimits(requests_per_s=2) if own else ServerLimits(organisation_requests_per_s=2)
    with serve(make_identity("s"), desk, limits=limits) as server, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(server, acme(name))) for name in ("a", "b")]
        taken, started = 0, time.monotonic()
        while True:
            sock = socks[0 if own else taken % 2]
            sock.sendall(b"GET /echo HTTP/1.1\r\n\r\n")
            (refused,) = read_answers(sock)
            if refused.status != 200:
                break
            taken += 1
        # The burst is twice the rate; more is saved up while the machine stands still.
        assert 4 <= taken <= 4 + 2 * (time.monotonic() - started) and refused.status == 429
        assert (refused.json()["error"], refused.headers["retry-after"]) == ("rate", "1")
        assert ("peer" if own else "organisation") in refused.json()["message"] and "2 requests" in refused.json()[
            "message"
        ]
        if own:
            socks[1].sendall(b"GET /echo HTTP/1.1\r\n\r\n")
            assert read_answers(socks[1])[0].status == 200
        started = time.monotonic()
        while True:
            time.sleep(0.1)
            socks[0].sendall(b"GET /echo HTTP/1.1\r\n\r\n")
            if read_answers(socks[0])[0].status == 200:
                break
            assert time.monotonic() - started < scaled(10)


def test_strangers_make_room_for_members(make_identity: Make, desk: Desk) -> None:
    with serve(make_identity("s"), desk, limits=ServerLimits(connections=8)) as server:
        flood = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(40)]
        with Client(make_identity("c")) as client:
            assert client.request_json(server.address, "GET", "/echo")[0]["by"] == "GET"
        until(lambda: server.num_connections <= 8)
        assert server.refused_connections >= 32
        for sock in flood:
            sock.close()


def test_handshakes_of_an_address(make_identity: Make, desk: Desk) -> None:
    """They are bounded for each address, and a new one takes the place of the oldest."""
    with serve(make_identity("s"), desk, limits=ServerLimits(handshakes_per_address=2)) as server:
        flood = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(10)]
        until(lambda: server.refused_connections >= 8 and server.num_connections <= 2)
        with Client(make_identity("c")) as client:
            assert client.request_json(server.address, "GET", "/echo")[0]["by"] == "GET"
        for sock in flood:
            sock.close()


def test_a_server_that_was_slow_itself_cuts_no_client(make_identity: Make, desk: Desk) -> None:
    """Its loop stands still for longer than a handshake and a head may take, while their rest is in the socket."""
    identity, is_still = make_identity("c"), threading.Event()
    with serve(make_identity("s"), desk, limits=ServerLimits(handshake_s=1.5, head_s=1.5)) as server:

        def stand_still() -> None:
            is_still.set()
            time.sleep(2.5)

        with connect(server, identity) as tls, socket.create_connection(("127.0.0.1", server.port), 20) as sock:
            tls.sendall(b"GET /echo HTTP/1.1\r\n")
            until(lambda: server.num_connections == 2)
            server.run_soon(stand_still)
            assert is_still.wait()
            tls.sendall(b"\r\n")
            with identity.client_context().wrap_socket(sock) as late:  # waits for the server's part
                for one in (tls, late):
                    one.sendall(b"GET /echo HTTP/1.1\r\n\r\n" if one is late else b"")
                    assert read_answers(one)[0].status == 200


# Background tasks, drain, close.


def test_a_task_that_fails_once_goes_on(
    make_identity: Make, desk: Desk, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    server, runs = serve(make_identity("s"), desk), list[float]()
    done = threading.Event()

    async def work() -> None:
        runs.append(time.monotonic())
        if len(runs) == 1:
            raise RuntimeError("a fault of the disk")
        done.set()

    server.add_task("inventory", work)
    with server:
        assert done.wait()
        text = client.get_bytes(server.address, "/metrics", 1 << 16).decode()
        assert 'forebay_task_failures_total{task="inventory"} 1.0' in text
        assert "forebay_requests_total" in text and "forebay_connections 1.0" in text
    assert len(runs) == 2 and runs[1] - runs[0] > 0.9
    assert "a fault of the disk" in caplog.text and "inventory" in caplog.text


def test_a_loop_that_fails_begins_again_on_the_same_port(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client.request_json(server.address, "GET", "/echo")

    def select(timeout: float | None = None) -> object:
        raise OSError("a fault of the system")

    monkeypatch.setattr(server._loop._selector, "select", select)  # type: ignore[attr-defined]
    server.run_soon(lambda: None)
    until(lambda: "a fault of the system" in caplog.text)

    def is_served() -> bool:
        with contextlib.suppress(NetworkError):
            return bool(client.request_json(server.address, "GET", "/echo")[0]["by"] == "GET")
        return False

    until(is_served)
    assert server.num_connections == 1 and server.drain(20.0)


def test_drain_lets_a_request_finish_and_takes_no_other(server: Server, client: Client, desk: Desk) -> None:
    answers: list[object] = []
    asking = threading.Thread(
        target=lambda: answers.append(client.request_json(server.address, "GET", "/held", timeout_s=30)[0])
    )
    asking.start()
    assert desk.entered.wait()
    assert server.drain(0.05) is False
    with pytest.raises(NetworkError, match="cannot reach"):
        client.request_json(server.address, "GET", "/echo")
    desk.gate.set()
    assert server.drain(20) is True
    asking.join()
    assert answers == [{"answer": "late"}]


def test_close_cuts_idle_connections_at_once(desk: Desk, make_identity: Make, client: Client) -> None:
    server = serve(make_identity("s"), desk)
    server.start()
    client.request_json(server.address, "GET", "/echo")
    with socket.create_connection(("127.0.0.1", server.port), 20):  # one that never shakes hands
        until(lambda: server.num_connections == 2)
        started = time.monotonic()
        server.close()
        server.close()
        assert time.monotonic() - started < scaled(5)
    assert server.num_connections == 0


def test_close_ends_answers_under_way(
    make_identity: Make, client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file half sent to who reads nothing, a request whose body does not come, a wait for news: without an error."""
    file = tmp_path / "slice"
    file.write_bytes(bytes(16 << 20))
    app = app_of(lambda request: file_response(request.http, file, 16 << 20))
    entered = threading.Event()

    async def wait_for_news(request: HttpRequest) -> Response:
        entered.set()
        await asyncio.sleep(60)
        return JsonResponse({})

    app.router.routes.insert(0, Route("/news", wait_for_news))
    server = Server(app, make_identity("s"), "127.0.0.1", 0)
    server.start()
    assert client.identity is not None
    socks = [connect(server, client.identity) for _ in range(3)]
    for tls, data in zip(
        socks,
        (
            b"GET /f HTTP/1.1\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\nx",
            b"GET /news HTTP/1.1\r\n\r\n",
        ),
        strict=True,
    ):
        tls.sendall(data)
    assert entered.wait()
    until(lambda: metric(server, "forebay_requests_in_progress") == 3)
    started = time.monotonic()
    server.close()
    assert time.monotonic() - started < scaled(5) and server.num_connections == 0
    for tls in socks:
        with contextlib.suppress(OSError):
            while tls.recv(1 << 20):
                pass
        tls.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_who_hangs_up_amid_its_body_is_no_error_of_ours(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    assert client.identity is not None
    for _ in range(3):
        with connect(server, client.identity) as tls:
            tls.sendall(b"POST /echo HTTP/1.1\r\nContent-Length: 100\r\n\r\nx")
    until(lambda: server.num_connections == 0 and metric(server, "forebay_requests_in_progress") == 0)
    assert client.request_json(server.address, "GET", "/echo")[0]["by"] == "GET"
    assert metric(server, "forebay_requests_total", "500") == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_keeps_no_copy_of_the_listener(server: Server, client: Client) -> None:
    """It would take connections in that nobody answers, once the parent is gone."""
    assert client.request_json(server.address, "GET", "/echo")[0]["by"] == "GET"
    mine, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            mine.close()
            its.sendall(b"r")
            its.recv(1)  # until the parent is done
        finally:
            os._exit(0)
    its.close()
    try:
        assert mine.recv(1) == b"r"
        server.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), 5)
    finally:
        mine.close()
        assert os.waitpid(child, 0)[1] == 0


def test_no_free_descriptors_for_a_moment(server: Server, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    # Who cannot read its revocation lists trusts nobody: here nobody looks at them amid the test.
    monkeypatch.setattr("forebay.network.pki.revocation.LOOK_EVERY_S", 600.0)
    client.request_json(server.address, "GET", "/echo")
    assert client.identity is not None
    context = client.identity.client_context()
    waiting = socket.socket()
    waiting.settimeout(20)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = list[int]()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(os.open("/dev/null", os.O_RDONLY), 3) + 40, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        waiting.connect(("127.0.0.1", server.port))  # the kernel takes it in, the server cannot
        time.sleep(0.3)
        assert client.request_json(server.address, "GET", "/echo")[0]["by"] == "GET"  # one that is there is answered
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with context.wrap_socket(waiting) as tls:
        tls.sendall(b"GET /echo HTTP/1.1\r\n\r\n")
        assert read_answers(tls)[0].status == 200
