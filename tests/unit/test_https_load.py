"""The server beside clients that rest, drip, flood or send several requests at once."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from calibration import scaled
from forebay.errors import NetworkError
from forebay.network.client import Client
from forebay.network.exchange import Request, Response, file_response, json_response
from forebay.network.https import Server
from forebay.network.identity import Identity
from forebay.network.limits import Bounds

Make = Callable[[str], Identity]


def echo(request: Request) -> Response:
    return json_response({"path": request.path, "bytes": len(request.body)})


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + scaled(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.005)


def open_tls(server: Server, identity: Identity) -> socket.socket:
    return identity.client_context().wrap_socket(socket.create_connection(("127.0.0.1", server.port), 20))


def answers(tls: socket.socket, num: int) -> bytes:
    data = b""
    while data.count(b"HTTP/1.1 ") < num or not data.endswith(b"}"):
        piece = tls.recv(65536)
        assert piece, data
        data += piece
    return data


def test_requests_sent_at_once_are_all_answered(make_identity: Make) -> None:
    """In one TLS record, in records of a byte, and with a body that ends beside the next head."""
    one = b"POST /%d HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
    with Server(make_identity("s"), "127.0.0.1", 0, echo) as server, open_tls(server, make_identity("c")) as tls:
        tls.sendall(b"".join(one % i for i in range(50)))
        data = answers(tls, 50)
        assert [data.index(b'"/%d"' % i) for i in range(50)] == sorted(data.index(b'"/%d"' % i) for i in range(50))
        for byte in one % 7:
            tls.sendall(bytes([byte]))
        assert b'"/7"' in answers(tls, 1)
        tls.sendall(one[:-1] % 8)
        time.sleep(0.05)
        tls.sendall(b"c" + one % 9)
        assert answers(tls, 2).count(b'"bytes":3') == 2


def test_who_drips_costs_no_thread_and_is_cut(make_identity: Make) -> None:
    bounds = Bounds(head_s=0.3, handshake_s=0.3, body_bytes_per_s=1e6)
    identity = make_identity("c")
    with Server(make_identity("s"), "127.0.0.1", 0, echo, bounds=bounds) as server, Client(identity) as client:
        client.request_json(server.address, "GET", "/")
        before = threading.active_count()
        head, body = open_tls(server, identity), open_tls(server, identity)
        half_open = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(20)]
        begun = time.monotonic()
        body.sendall(b"POST / HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
        with contextlib.suppress(OSError):
            while time.monotonic() < begun + 5:
                head.sendall(b"G" if time.monotonic() < begun + 0.05 else b"E")
                body.sendall(b"x")
                time.sleep(0.05)
                if time.monotonic() < begun + 0.2:
                    assert client.request_json(server.address, "GET", "/")[0]["path"] == "/"
                    assert threading.active_count() <= before + 4  # of those that shake hands
        assert time.monotonic() < begun + scaled(3)
        until(lambda: server.num_connections == 1)
        for sock in (head, body, *half_open):
            sock.close()


def test_strangers_make_room_for_members(make_identity: Make) -> None:
    with Server(make_identity("s"), "127.0.0.1", 0, echo, max_connections=8) as server:
        flood = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(40)]
        with Client(make_identity("c")) as client:
            assert client.request_json(server.address, "GET", "/")[0]["path"] == "/"
        until(lambda: server.num_connections <= 8)
        assert server.refused_connections >= 32
        for sock in flood:
            sock.close()


def test_one_peer_and_one_address_get_no_more_than_their_share(make_identity: Make) -> None:
    many, other = make_identity("many"), make_identity("other")
    with Server(make_identity("s"), "127.0.0.1", 0, echo, bounds=Bounds(per_peer=2)) as server:
        held = [open_tls(server, many) for _ in range(2)]
        for tls in held:
            tls.sendall(b"GET / HTTP/1.1\r\n\r\n")
            answers(tls, 1)
        with Client(many) as client, pytest.raises(NetworkError):
            client.request_json(server.address, "GET", "/")
        with Client(other) as client:
            client.request_json(server.address, "GET", "/")
        held.pop().close()
        until(lambda: server.num_connections == 1)
        with Client(many) as client:
            client.request_json(server.address, "GET", "/")
        held.pop().close()
    with (
        Server(make_identity("t"), "127.0.0.1", 0, echo, bounds=Bounds(per_address=1)) as server,
        Client(many) as first,
        Client(other) as second,
    ):
        first.request_json(server.address, "GET", "/")
        with pytest.raises(NetworkError):
            second.request_json(server.address, "GET", "/")


def test_idle_connections_share_one_thread_and_end_in_time(make_identity: Make) -> None:
    identity = make_identity("c")
    with Server(make_identity("s"), "127.0.0.1", 0, echo, bounds=Bounds(idle_s=0.6)) as server:
        before = threading.active_count()
        held = [open_tls(server, identity) for _ in range(30)]
        until(lambda: server.num_connections == 30)
        assert threading.active_count() <= before + 4
        until(lambda: server.num_connections == 0, 5)
        for tls in held:
            tls.close()


def test_slow_readers_and_long_polls_hold_up_nobody(make_identity: Make, tmp_path: Path) -> None:
    file, gate = tmp_path / "slice", threading.Event()
    file.write_bytes(bytes(8 << 20))

    def answer(request: Request) -> Response:
        if request.path == "/file":
            return file_response(request, file, 8 << 20)
        if request.path == "/wait":
            gate.wait(20)
        return echo(request)

    identity = make_identity("c")
    with Server(make_identity("s"), "127.0.0.1", 0, answer) as server, Client(identity) as client:
        stuck = [open_tls(server, identity) for _ in range(12)]
        for number, tls in enumerate(stuck):
            tls.sendall(b"GET /%s HTTP/1.1\r\n\r\n" % (b"file" if number % 2 else b"wait"))
        until(lambda: server._roll.num_busy == 12)
        begun = time.monotonic()
        for _ in range(20):
            client.request_json(server.address, "GET", "/")
        assert time.monotonic() - begun < scaled(5)
        gate.set()
        for tls in stuck:
            tls.close()
