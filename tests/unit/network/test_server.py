"""The server on real sockets: TLS, answers, files, strangers, drain and close. Limits: test_server_limits.py."""

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.network.app import ApiError, JsonResponse, file_response, peer_of
from forebay.network.audit import AuditLog
from forebay.network.client import Client, RemoteError
from forebay.network.peer import Scope
from forebay.network.pki.identity import create_network, create_organisation, join, revoke
from forebay.network.server import Server
from support.handlers import PatientClient, Request, application, patient, serve
from support.waiting import until
from support.wire import connect

SIZE = 3 * (1 << 20) + 17
CONTENT = (bytes(range(251)) * (SIZE // 251 + 1))[:SIZE]


class Handler:
    """A few routes, a gate that holds a request, and a record of who sent them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.peers, self.sent = [], []  # `sent`: each peer and number of bytes that the server counts
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()

    def __call__(self, request: Request) -> Response:
        self.peers.append(request.peer.peer_id)
        match request.path:
            case "/echo":
                return JsonResponse({"got": request.json(), "query": request.query, "by": request.method})
            case "/file" | "/empty" | "/short" | "/gone":
                size = 0 if request.path == "/empty" else SIZE
                return file_response(request.http, self.folder / request.path[1:], size)
            case "/held":
                self.entered.release()
                self.gate.wait()
                return JsonResponse({"answer": "late"})
            case "/bug":
                raise RuntimeError("a bug in a handler")
        raise ApiError(404, "unknown_path", f"no {request.path} here")


@pytest.fixture(autouse=True)
def patient_close(monkeypatch):
    monkeypatch.setattr("forebay.network.server.THREAD_JOIN_S", 3600.0)


@pytest.fixture
def handler(tmp_path) -> Iterator[Handler]:
    for name, data in (("file", CONTENT), ("empty", b""), ("short", bytes(100))):
        (tmp_path / name).write_bytes(data)
    handler = Handler(tmp_path)
    yield handler
    handler.gate.set()


@pytest.fixture
def server(handler, make_identity) -> Iterator[Server]:
    with serve(make_identity("server"), handler, on_bytes=lambda *sent: handler.sent.append(sent)) as server:
        yield server


@pytest.fixture
def client(make_identity) -> Iterator[Client]:
    with PatientClient(make_identity("client")) as client:
        yield client


def is_served(client: Client, server: Server) -> bool:
    return bool(client.request_json(server.address, "GET", "/echo")[0]["by"] == "GET")


def test_json_there_and_back_on_one_connection(server, client, handler, caplog):
    for number in range(3):
        answer, peer = client.request_json(server.address, "POST", "/echo?a=1&b=", {"n": number})
        assert answer == {"got": {"n": number}, "query": {"a": "1", "b": ""}, "by": "POST"}
    assert (peer.peer_id, peer.name) == (server.identity.peer_id, "server")
    with pytest.raises(RemoteError, match="refused with 405 method_not_allowed: PUT /echo: Method Not Allowed"):
        client.request_json(server.address, "PUT", "/echo")
    assert set(handler.peers) == {client.identity.peer_id} and server.num_connections == 1
    with pytest.raises(RemoteError) as caught:
        client.request_json(server.address, "GET", "/bug")
    assert (caught.value.status, caught.value.code) == (500, "internal") and "a bug" not in str(caught.value)
    until(lambda: "a bug in a handler" in caplog.text)
    assert is_served(client, server)


def test_the_application_sees_the_certificate_of_the_client(network_dir, tmp_path):
    """uvicorn hands it to no application: ours does, through the protocol's state. An upgrade may break that."""
    scope = Scope(frozenset({"worker"}), ("c4-*",))
    org = create_organisation(network_dir, tmp_path / "org", "acme")
    member = join(tmp_path / "org", tmp_path / "member", "member", scope=scope)
    seen = []

    def handle(request):
        assert request.http.state.peer is peer_of(request.http) is request.peer
        assert request.http.scope["client"][0] == "127.0.0.1" and request.http.scope["scheme"] == "https"
        seen.append(request.peer)
        return JsonResponse({})

    with serve(join(network_dir, tmp_path / "server", "server"), handle) as server, PatientClient(member) as client:
        client.request_json(server.address, "GET", "/")
    assert seen == [member.as_peer] and (member.as_peer.peer_id, member.as_peer.org) == (member.peer_id, org)


def test_files_and_ranges(server, client, handler, caplog):
    for _ in range(2):
        assert client.get_bytes(server.address, "/empty", SIZE) == b""
    assert "ASGI" not in caplog.text
    for start, stop in [(0, SIZE), (5, 6), (1 << 20, SIZE), (SIZE - 1, SIZE)]:
        into = bytearray(stop - start)
        client.read_range(server.address, "/file", memoryview(into), start)
        assert into == CONTENT[start:stop]
    until(lambda: sum(n for _, n in handler.sent) == 2 * SIZE + 2 - (1 << 20))
    assert {peer.peer_id for peer, _ in handler.sent} == {client.identity.peer_id}
    assert client.get_bytes(server.address, "/file", SIZE) == CONTENT
    with pytest.raises(ProtocolError, match="expected status 206"):
        client.read_range(server.address, "/file", memoryview(bytearray(SIZE + 1)), 0)
    with pytest.raises(NetworkError, match="broke off at byte 100"):  # the connection, not the server
        client.read_range(server.address, "/short", memoryview(bytearray(SIZE)), 0)
    with pytest.raises(RemoteError, match="refused with 500 unreadable"):
        client.get_bytes(server.address, "/gone", SIZE)


def test_limits_on_bodies(server, client):
    with pytest.raises(ProtocolError, match="at most 10 bytes"):
        client.get_bytes(server.address, "/file", 10)
    with pytest.raises(UsageError, match="printable"):
        client.get_bytes(server.address, "/a b\r\nX: y", 10)


def test_strangers_get_nothing(server, client, handler, tmp_path):
    server.identity.audit = AuditLog(tmp_path / "audit.log")
    create_network(tmp_path / "elsewhere", "test-network")
    stranger = join(tmp_path / "elsewhere", tmp_path / "stranger", "client")
    contexts = [stranger.client_context(), *(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(2))]
    for context in contexts:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    home = client.identity.node_dir
    contexts[2].load_cert_chain(home / "node-cert.pem", home / "node-key.pem")
    contexts[2].maximum_version = ssl.TLSVersion.TLSv1_2
    for context in contexts:  # the server refuses: another network's certificate, none, and a member by TLS 1.2
        # How the refusal arrives is a race (an alert, a reset, an end); that nothing was answered is not.
        plain = socket.create_connection(("127.0.0.1", server.port))
        with plain, pytest.raises(OSError), context.wrap_socket(plain) as tls:
            tls.sendall(b"GET /echo HTTP/1.1\r\n\r\n")
            assert tls.recv(100) == b"", "a stranger was answered"
            raise ConnectionResetError("refused with no word")
    with socket.create_connection(("127.0.0.1", server.port)) as plain:  # no TLS at all
        plain.sendall(b"GET /echo HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in plain.recv(1000)
    until(lambda: server.refused_connections >= 4)
    assert handler.peers == [] and is_served(client, server)
    server.identity.audit.close()
    events = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert {event["kind"] for event in events} == {"stranger"} and events[0]["facts"]["address"] == "127.0.0.1"


@pytest.mark.usefixtures("changes_at_once")
def test_a_revoked_peer_is_refused_without_restart(server, client, make_identity):
    is_served(client, server)
    revoke(server.identity.node_dir, client.identity.peer_id)
    with pytest.raises(NetworkError) as caught:  # on the open connection, which may be cut first
        is_served(client, server)
    assert not isinstance(caught.value, RemoteError) or caught.value.status == 403
    until(lambda: server.num_connections == 0)  # what is open is cut, also without a request
    with pytest.raises(NetworkError):
        is_served(client, server)
    with PatientClient(make_identity("other")) as other:
        is_served(other, server)
        revoke(other.identity.node_dir, server.identity.peer_id)
        with pytest.raises(NetworkError, match="is revoked"):
            is_served(other, server)


def test_port_in_use_and_nobody_there(server, client, handler):
    with pytest.raises(NetworkError, match=f"port {server.port} is in use"):
        serve(server.identity, handler, port=server.port).start()
    with socket.socket() as current:
        current.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{current.getsockname()[1]}"
        with pytest.raises(NetworkError, match=address):
            client.request_json(address, "GET", "/echo")
    with pytest.raises(NetworkError, match="cannot listen"):
        serve(server.identity, handler, host="192.0.2.1").start()


def test_a_loop_that_fails_begins_again_on_the_same_port(server, client, monkeypatch, caplog):
    is_served(client, server)

    def select(timeout=None):
        raise OSError("a fault of the system")

    monkeypatch.setattr(server._loop._selector, "select", select)  # type: ignore[attr-defined]
    server.run_soon(lambda: None)
    until(lambda: "a fault of the system" in caplog.text)

    def is_served_again():
        with contextlib.suppress(NetworkError):
            return is_served(client, server)
        return False

    until(is_served_again)
    assert server.num_connections == 1 and server.drain(3600.0)


def test_drain_lets_a_request_finish_and_takes_no_other(server, client, handler):
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(client.request_json(server.address, "GET", "/held")[0]))
    waiting.start()
    handler.entered.acquire()
    assert server.drain(0.01) is False
    with pytest.raises(NetworkError, match="cannot reach"):
        is_served(client, server)
    handler.gate.set()
    assert server.drain(3600.0) is True
    waiting.join()
    assert answers == [{"answer": "late"}]


def test_close_ends_answers_under_way(make_identity, client, handler, caplog):
    """A file half sent, a request whose body does not come, waits for news, a handshake: without an error."""
    app, entered = application(handler), threading.Event()

    async def wait_for_news(request: HttpRequest) -> Response:
        entered.set()
        while True:
            await asyncio.get_running_loop().run_in_executor(None, int)

    app.router.routes.insert(0, Route("/news", wait_for_news))
    server = Server(app, make_identity("s"), "127.0.0.1", 0, limits=patient(upload_bytes_per_s=1.0)).start()
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        socks = [stack.enter_context(connect(client.identity, server.address)) for _ in range(8)]
        socks[0].sendall(b"GET /file HTTP/1.1\r\n\r\n")
        socks[1].sendall(b"POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\nx")
        for tls in socks[2:]:
            tls.sendall(b"GET /news HTTP/1.1\r\n\r\n")
        entered.wait()
        until(lambda: server._core.requests.num_active == len(socks))
        server.close()
        server.close()
        assert server.num_connections == 0
        for tls in socks:
            with contextlib.suppress(OSError):
                while tls.recv(1 << 20):
                    pass
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_who_hangs_up_amid_its_body_or_closes_one_half_is_no_error_of_ours(server, client, caplog):
    for half in (True, False):
        with connect(client.identity, server.address) as tls:
            tls.sendall(b"POST /echo HTTP/1.1\r\nContent-Length: 100\r\n\r\nx")
            if half:
                socket.socket.shutdown(tls, socket.SHUT_WR)
                until(lambda: server.num_connections == 0)
    until(lambda: server.num_connections == 0 and server._core.requests.num_active == 0)
    assert is_served(client, server) and server._core.answers[500] == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
