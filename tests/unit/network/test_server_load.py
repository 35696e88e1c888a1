"""The server beside clients that rest, drip, flood, read nothing or send several requests at once."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.responses import Response

from forebay.errors import NetworkError
from forebay.network.app import JsonResponse, file_response
from forebay.network.client import Client
from forebay.network.limits import ServerLimits
from forebay.network.pki.identity import Identity
from support.calibration import scaled
from support.handlers import Request, serve
from support.wire import connect, read_answers, send_all, until

Make = Callable[[str], Identity]


def echo(request: Request) -> Response:
    return JsonResponse({"path": request.path, "bytes": len(request.body)})


def test_requests_sent_at_once_are_all_answered(make_identity: Make) -> None:
    """In one TLS record, in records of a byte, and with a body that ends beside the next head."""
    item = b"POST /%d HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
    with serve(make_identity("s"), echo) as server, connect(server, make_identity("c")) as tls:
        tls.sendall(b"".join(item % i for i in range(16)))
        assert [answer.json()["path"] for answer in read_answers(tls, 16)] == [f"/{i}" for i in range(16)]
        for byte in item % 7:
            tls.sendall(bytes([byte]))
        assert read_answers(tls)[0].json() == {"path": "/7", "bytes": 3}
        tls.sendall(item[:-1] % 8)
        time.sleep(0.05)
        tls.sendall(b"c" + item % 9)
        assert [answer.json()["bytes"] for answer in read_answers(tls, 2)] == [3, 3]


def test_who_drips_costs_no_thread_and_is_cut(make_identity: Make) -> None:
    limits = ServerLimits(head_s=0.3, handshake_s=1.5, body_s=0.3)
    identity = make_identity("c")
    with serve(make_identity("s"), echo, limits=limits) as server, Client(identity) as client:
        client.request_json(server.address, "GET", "/")
        before = threading.active_count()
        head, body, chunks = (connect(server, identity) for _ in range(3))
        half_open = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(20)]
        body.sendall(b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n")
        chunks.sendall(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        started, cut = time.monotonic(), set[socket.socket]()
        while len(cut) < 3:
            for sock, piece in ((head, b"A"), (body, b"x"), (chunks, b"1\r\nx\r\n")):
                if sock not in cut and not send_all(sock, piece):
                    cut.add(sock)
            time.sleep(0.02)
            assert time.monotonic() - started < scaled(10), "a client that drips was not cut"
            if time.monotonic() < started + 0.2:
                assert client.request_json(server.address, "GET", "/")[0]["path"] == "/"
                assert threading.active_count() <= before + 1
        until(lambda: server.num_connections <= 1)
        for sock in (head, body, chunks, *half_open):
            sock.close()


def test_idle_connections_share_one_thread_and_end_in_time(make_identity: Make) -> None:
    identity = make_identity("c")
    with serve(make_identity("s"), echo) as server:
        before = threading.active_count()
        idle = [connect(server, identity) for _ in range(30)]
        until(lambda: server.num_connections == 30)
        assert threading.active_count() <= before
        for tls in idle:
            tls.close()
    with serve(make_identity("t"), echo, limits=ServerLimits(idle_s=1.2)) as server:
        idle = [connect(server, identity) for _ in range(3)]
        until(lambda: server.num_connections == 0, 5)
        for tls in idle:
            tls.close()


def test_slow_readers_and_long_polls_hold_up_nobody(make_identity: Make, tmp_path: Path) -> None:
    file, gate, entered = tmp_path / "slice", threading.Event(), threading.Semaphore(0)
    file.write_bytes(bytes(8 << 20))

    def answer(request: Request) -> Response:
        if request.path == "/file":
            return file_response(request.http, file, 8 << 20)
        if request.path == "/wait":
            entered.release()
            gate.wait(20)
        return echo(request)

    identity = make_identity("c")
    with serve(make_identity("s"), answer) as server, Client(identity) as client:
        stuck = [connect(server, identity) for _ in range(12)]
        for number, tls in enumerate(stuck):
            tls.sendall(b"GET /%s HTTP/1.1\r\n\r\n" % (b"file" if number % 2 else b"wait"))
        for _ in range(6):
            assert entered.acquire()
        started = time.monotonic()
        for _ in range(20):
            client.request_json(server.address, "GET", "/")
        assert time.monotonic() - started < scaled(5)
        gate.set()
        for tls in stuck:
            tls.close()


@pytest.mark.parametrize("what", [b"file", b"json"])
def test_who_reads_nothing_is_cut(make_identity: Make, tmp_path: Path, what: bytes) -> None:
    """Amid a file, and behind small answers to requests that it goes on sending."""
    file = tmp_path / "slice"
    file.write_bytes(bytes(32 << 20))

    def answer(request: Request) -> Response:
        if request.path == "/file":
            return file_response(request.http, file, 32 << 20)
        return JsonResponse({"answer": "x" * 100_000})

    identity = make_identity("c")
    with serve(make_identity("s"), answer, limits=ServerLimits(send_s=0.5, idle_s=60)) as server:
        with connect(server, identity) as tls:
            tls.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            started = time.monotonic()
            tls.settimeout(1)
            request, sent = b"GET /%s HTTP/1.1\r\n\r\n" % what, 0
            with contextlib.suppress(OSError):  # its requests are not read any more, or it is cut
                while sent < (1 if what == b"file" else 10_000):
                    tls.sendall(request)
                    sent += 1
                    time.sleep(0.001)
            until(lambda: server.num_connections == 0, 10)
        assert time.monotonic() - started < scaled(15)
        with Client(identity) as client:
            assert client.request_json(server.address, "GET", "/x")[0]


def test_a_slow_reader_is_not_cut(make_identity: Make, tmp_path: Path) -> None:
    """The limit is for each piece, not for the whole answer."""
    file = tmp_path / "slice"
    file.write_bytes(bytes(4 << 20))
    identity = make_identity("c")
    with (
        serve(
            make_identity("s"),
            lambda request: file_response(request.http, file, 4 << 20),
            limits=ServerLimits(send_s=2.0, idle_s=2.0),  # It looks at its clients every 0.5 s: see `_sweep`.
        ) as server,
        connect(server, identity) as tls,
    ):
        tls.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        tls.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        got = 0
        while piece := tls.recv(16384):
            got += len(piece)
            time.sleep(0.012)
    assert got > 4 << 20


def test_an_upload_cap_holds_and_ends_with_the_server(make_identity: Make, tmp_path: Path) -> None:
    file = tmp_path / "slice"
    file.write_bytes(bytes(400_000))
    server = serve(
        make_identity("s"),
        lambda request: file_response(request.http, file, 400_000),
        limits=ServerLimits(upload_bytes_per_s=1e6),
    )
    with server, Client(make_identity("c")) as client:
        started, into = time.monotonic(), memoryview(bytearray(400_000))
        client.read_range(server.address, "/", into, 0)
        assert 0.2 < time.monotonic() - started < scaled(2)
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
        started = time.monotonic()
        server.close()
        assert time.monotonic() - started < scaled(2)
        asking.join()
        assert failures
