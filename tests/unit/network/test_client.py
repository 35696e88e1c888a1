"""The client against servers that lie, drip or are somebody else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from forebay.errors import NetworkError, ProtocolError
from forebay.network.app import JsonResponse
from forebay.network.client import Client, TruncatedBodyError
from forebay.network.pki.identity import Identity
from support.calibration import scaled
from support.handlers import Request, serve

Make = Callable[[str], Identity]


@pytest.fixture
def client(make_identity: Make) -> Iterator[Client]:
    with Client(make_identity("client")) as client:
        yield client


def test_the_wrong_peer_is_asked_nothing(client: Client, make_identity: Make) -> None:
    asked: list[str] = []

    def handle(request: Request) -> JsonResponse:
        asked.append(request.path)
        return JsonResponse({})

    identity = make_identity("server")
    with serve(identity, handle) as server:
        with pytest.raises(NetworkError, match="Nothing was sent"):
            client.request_json(server.address, "GET", "/echo", expect_peer="a" * 32)
        assert asked == []
        client.request_json(server.address, "GET", "/echo", expect_peer=identity.peer_id)


def test_an_address_that_is_none(client: Client) -> None:
    with pytest.raises(ProtocolError, match="HOST:PORT"):
        client.request_json("nowhere", "GET", "/echo")


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
        self.thread.join()


RANGE = b"HTTP/1.1 206 OK\r\nContent-Length: 8\r\nContent-Range: bytes 0-7/8\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "Remote end closed connection"),
        (b"HTTP/1.1 206", "closed amid the answer"),
        (b"SSH-2.0-x\r\n\r\n", "expected an HTTP answer"),
        (b"HTTP/1.1 206 OK\r\n\r\n12345678", "Content-Length"),
        (b"HTTP/1.1 206 OK\r\nContent-Length: 9\r\nContent-Range: bytes 0-8/9\r\n\r\n", "expected status 206"),
        (b"HTTP/1.1 206 OK\r\nContent-Length: 8\r\nContent-Range: bytes 1-8/9\r\n\r\n", "expected status 206"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n12345678", "expected status 206"),
        (b"HTTP/1.1 206 OK\r\nContent-Length: 8\r\nContent-Length: 9\r\n\r\n", "Content-Length"),
        (b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 8\r\n\r\n", "Content-Length"),
        (b"HTTP/1.1 206 OK\r\n" + b"A" * 50000, "HTTP head of at most"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 3\r\n\r\n{[}", "refused with 500"),
        (RANGE + b"1234", "broke off at byte 4 of 8"),
    ],
)
def test_lying_servers(answer: bytes, message: str, client: Client, make_identity: Make) -> None:
    liar = Liar(make_identity("liar"), answer)
    into = bytearray(8)
    with pytest.raises(NetworkError, match=message) as caught:
        client.read_range(liar.address, "/x", memoryview(into), 0)
    assert not isinstance(caught.value, TruncatedBodyError) or into[: caught.value.received] == b"1234"
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
    started = time.monotonic()
    with pytest.raises(NetworkError, match=r"stalled|no full answer|more than 100 headers|at most"):
        client.read_range(liar.address, "/x", memoryview(bytearray(99999999)), 0, timeout_s=scaled(2))
    assert time.monotonic() - started < scaled(10)
    liar.stop()
