"""The server and the client on real sockets; liars and strangers on either side."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from calibration import scaled
from forebay.errors import NetworkError, ProtocolViolation, UsageError
from forebay.network.client import BrokenOffError, Client, RemoteError
from forebay.network.exchange import Request, Response, error_response, file_response, json_response
from forebay.network.https import Server
from forebay.network.identity import Identity, create_network, join, revoke

Make = Callable[[str], Identity]
SIZE = 3 * (1 << 20) + 17
CONTENT = bytes(range(251)) * (SIZE // 251 + 1)


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + scaled(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.005)


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
                return json_response({"got": request.json(), "query": request.query, "by": request.method})
            case "/file":
                return file_response(request, self.file, SIZE)
            case "/held":
                self.entered.set()
                assert self.gate.wait(20)
                return json_response("late")
            case "/bug":
                raise RuntimeError("a bug in a handler")
        return error_response(404, "unknown_path", f"no {request.path} here")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    file = tmp_path / "content"
    file.write_bytes(CONTENT[:SIZE])
    return Desk(file)


@pytest.fixture
def server(desk: Desk, make_identity: Make) -> Iterator[Server]:
    with Server(make_identity("server"), "127.0.0.1", 0, desk) as server:
        yield server


@pytest.fixture
def client(make_identity: Make) -> Iterator[Client]:
    with Client(make_identity("client")) as client:
        yield client


def test_json_there_and_back_on_one_connection(server: Server, client: Client, desk: Desk) -> None:
    for number in range(3):
        answer, peer = client.request_json(server.address, "POST", "/echo?a=1&b=", {"n": number})
        assert answer == {"got": {"n": number}, "query": {"a": "1", "b": ""}, "by": "POST"}
        assert (peer.peer_id, peer.name) == (server.identity.peer_id, "server")
    assert set(desk.peers) == {client.identity.peer_id}
    assert server.num_connections == 1


def test_refusals_carry_status_and_code(server: Server, client: Client) -> None:
    with pytest.raises(RemoteError, match="no /nothing here") as caught:
        client.request_json(server.address, "GET", "/nothing")
    assert (caught.value.status, caught.value.code) == (404, "unknown_path")
    with pytest.raises(RemoteError) as caught:
        client.request_json(server.address, "PUT", "/echo")
    assert caught.value.status == 501


def test_a_bug_in_a_handler_is_500_and_the_server_stays(server: Server, client: Client) -> None:
    with pytest.raises(RemoteError) as caught:
        client.request_json(server.address, "GET", "/bug")
    assert caught.value.status == 500
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
    with pytest.raises(ProtocolViolation, match="expected status 206"):
        client.read_range(server.address, "/file", memoryview(bytearray(SIZE + 1)), 0)


def test_bytes_are_counted(desk: Desk, make_identity: Make, client: Client) -> None:
    counted: list[tuple[str, int]] = []
    with Server(
        make_identity("s"), "127.0.0.1", 0, desk, on_bytes=lambda peer, n: counted.append((peer.peer_id, n))
    ) as server:
        client.read_range(server.address, "/file", memoryview(bytearray(SIZE)), 0)
        until(lambda: sum(n for _, n in counted) == SIZE)
    assert {peer for peer, _ in counted} == {client.identity.peer_id}


def test_limits_on_bodies(server: Server, client: Client) -> None:
    with pytest.raises(RemoteError) as caught:
        client.request_json(server.address, "POST", "/echo", "x" * (1 << 20))
    assert caught.value.status == 413
    with pytest.raises(ProtocolViolation, match="at most 10 bytes"):
        client.get_bytes(server.address, "/file", 10)
    with pytest.raises(UsageError, match="printable"):
        client.get_bytes(server.address, "/a b\r\nX: y", 10)


def _raw(server: Server, identity: Identity, data: bytes) -> bytes:
    """What the server answers to these bytes until it closes."""
    host_port = ("127.0.0.1", server.port)
    with socket.create_connection(host_port, 20) as plain, identity.client_context().wrap_socket(plain) as tls:
        tls.sendall(data)
        answer = b""
        while piece := tls.recv(65536):
            answer += piece
        return answer


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /echo HTTP/9.9\r\n\r\n", b"505"),
        (b"POST /echo HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"POST /echo HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n", b"413"),
        (b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", b"400"),
        (b"POST /echo HTTP/1.1\r\nConnection: close\r\nContent-Length: 4\r\n\r\n{\xff\xfe}", b"400"),
        (b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET /echo HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /file HTTP/1.1\r\nConnection: close\r\nRange: bytes=5-2\r\n\r\n", b"416"),
        (b"GET /file HTTP/1.1\r\nConnection: close\r\nRange: bytes=-5\r\n\r\n", b"416"),
        (b"\x00" * 512 + b"\r\n", b"400"),
    ],
)
def test_garbage_from_a_member(server: Server, client: Client, data: bytes, status: bytes) -> None:
    answer = _raw(server, client.identity, data)
    assert status in answer[:20]
    assert client.request_json(server.address, "GET", "/echo")[0]["by"] == "GET"


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


def test_a_revoked_peer_is_refused_without_restart(server: Server, client: Client, make_identity: Make) -> None:
    client.request_json(server.address, "GET", "/echo")
    revoke(server.identity.node_dir, client.identity.peer_id)
    for _ in range(2):
        with pytest.raises(RemoteError, match="revoked") as caught:
            client.request_json(server.address, "GET", "/echo")
        assert caught.value.status == 403
    with Client(make_identity("other")) as other:
        other.request_json(server.address, "GET", "/echo")
        revoke(other.identity.node_dir, server.identity.peer_id)
        with pytest.raises(NetworkError, match="is revoked"):
            other.request_json(server.address, "GET", "/echo")


def test_the_wrong_peer_is_asked_nothing(server: Server, client: Client, desk: Desk) -> None:
    with pytest.raises(NetworkError, match="Nothing was asked"):
        client.request_json(server.address, "GET", "/echo", expect_peer="a" * 32)
    assert desk.peers == []
    client.request_json(server.address, "GET", "/echo", expect_peer=server.identity.peer_id)


def test_port_in_use_and_nobody_there(server: Server, client: Client, desk: Desk) -> None:
    with pytest.raises(NetworkError, match=f"port {server.port} is in use"):
        Server(server.identity, "127.0.0.1", server.port, desk).start()
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(NetworkError, match=address):
            client.request_json(address, "GET", "/echo")
    with pytest.raises(UsageError, match="HOST:PORT"):
        client.request_json("nowhere", "GET", "/echo")


def test_a_restarted_server_is_found_again(desk: Desk, make_identity: Make, client: Client) -> None:
    identity = make_identity("s")
    with Server(identity, "127.0.0.1", 0, desk) as first:
        client.request_json(first.address, "GET", "/echo")
    with Server(identity, "127.0.0.1", first.port, desk) as second:
        assert client.request_json(second.address, "GET", "/echo")[0]["by"] == "GET"


def test_full_house(desk: Desk, make_identity: Make, client: Client) -> None:
    with Server(make_identity("s"), "127.0.0.1", 0, desk, max_connections=1) as server:
        client.request_json(server.address, "GET", "/echo")  # its kept connection holds the one place
        with Client(make_identity("second")) as second:
            with pytest.raises(NetworkError, match="cannot reach"):
                second.request_json(server.address, "GET", "/echo")
            client.close()
            until(lambda: server.num_connections == 0)
            assert second.request_json(server.address, "GET", "/echo")[0]["by"] == "GET"


def test_drain_lets_a_request_finish_and_takes_no_other(server: Server, client: Client, desk: Desk) -> None:
    answers: list[object] = []
    asking = threading.Thread(
        target=lambda: answers.append(client.request_json(server.address, "GET", "/held", timeout_s=30)[0])
    )
    asking.start()
    assert desk.entered.wait(20)
    assert server.drain(0.05) is False
    with pytest.raises(NetworkError, match="cannot reach"):
        client.request_json(server.address, "GET", "/echo")
    desk.gate.set()
    assert server.drain(20) is True
    asking.join(20)
    assert answers == ["late"]


def test_close_cuts_idle_connections_at_once(desk: Desk, make_identity: Make, client: Client) -> None:
    server = Server(make_identity("s"), "127.0.0.1", 0, desk)
    server.start()
    client.request_json(server.address, "GET", "/echo")
    with socket.create_connection(("127.0.0.1", server.port), 20):  # one that never shakes hands
        until(lambda: server.num_connections == 2)
        begun = time.monotonic()
        server.close()
        server.close()
        assert time.monotonic() - begun < scaled(5)
    assert server.num_connections == 0


class Liar:
    """A member that answers every request with the same bytes, then closes or drips on."""

    def __init__(self, identity: Identity, answer: bytes, endless: bytes = b"") -> None:
        self.answer, self.endless = answer, endless
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.context = identity.server_context()
        self.thread = threading.Thread(target=self._lie, daemon=True)
        self.thread.start()

    def _lie(self) -> None:
        while True:
            try:
                plain, _ = self.listener.accept()
            except OSError:
                return
            with plain:
                try:
                    with self.context.wrap_socket(plain, server_side=True) as tls:
                        tls.recv(65536)
                        tls.sendall(self.answer)
                        while self.endless:
                            tls.sendall(self.endless)
                            time.sleep(0.01)
                except OSError:
                    continue

    def stop(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(20)


RANGE = b"HTTP/1.1 206 OK\r\nContent-Length: 8\r\nContent-Range: bytes 0-7/8\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "closed the connection before"),
        (b"HTTP/1.1 206", "amid its answer"),
        (b"SSH-2.0-x\r\n\r\n", "status line"),
        (b"HTTP/1.1 206 OK\r\n\r\n12345678", "Content-Length"),
        (b"HTTP/1.1 206 OK\r\nContent-Length: 9\r\nContent-Range: bytes 0-8/9\r\n\r\n", "expected status 206"),
        (b"HTTP/1.1 206 OK\r\nContent-Length: 8\r\nContent-Range: bytes 1-8/9\r\n\r\n", "expected status 206"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n12345678", "expected status 206"),
        (b"HTTP/1.1 206 OK\r\nContent-Length: 8\r\nContent-Length: 9\r\n\r\n", "repeated header"),
        (b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 8\r\n\r\n", "Content-Length"),
        (b"HTTP/1.1 206 OK\r\n" + b"A" * 40000, "HTTP head of at most"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 3\r\n\r\n{[}", "refused with 500"),
        (RANGE + b"1234", "broke off at byte 4 of 8"),
    ],
)
def test_lying_servers(answer: bytes, message: str, client: Client, make_identity: Make) -> None:
    liar = Liar(make_identity("liar"), answer)
    into = bytearray(8)
    with pytest.raises(NetworkError, match=message) as caught:
        client.read_range(liar.address, "/x", memoryview(into), 0)
    assert not isinstance(caught.value, BrokenOffError) or into[: caught.value.received] == b"1234"
    liar.stop()


def test_more_than_was_asked_for_is_not_kept(client: Client, make_identity: Make) -> None:
    liar = Liar(make_identity("liar"), RANGE + b"12345678" + b"x" * 1000, endless=b"y" * 1000)
    into = bytearray(12)
    client.read_range(liar.address, "/x", memoryview(into)[:8], 0)
    assert into == b"12345678\0\0\0\0"
    liar.stop()


@pytest.mark.parametrize("endless", [b"z", b"A: b\r\n"])
def test_a_dripping_peer_is_dropped(endless: bytes, client: Client, make_identity: Make) -> None:
    body = b"HTTP/1.1 206 OK\r\nContent-Length: 99999999\r\nContent-Range: bytes 0-99999998/99999999\r\n"
    liar = Liar(make_identity("liar"), body + (b"\r\n" if endless == b"z" else b""), endless)
    begun = time.monotonic()
    with pytest.raises(NetworkError, match=r"stalled|no full answer|repeated header|at most"):
        client.read_range(liar.address, "/x", memoryview(bytearray(99999999)), 0, timeout_s=0.5)
    assert time.monotonic() - begun < scaled(10)
    liar.stop()
