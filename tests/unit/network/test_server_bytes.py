"""Bytes that are no request, or a hostile one, from a member on a real connection.

Whatever comes: no 5xx, no wait without end, bounded memory, no second answer to one request, and the next honest
request is answered.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.responses import Response

from forebay.network.app import JsonResponse, file_response
from forebay.network.client import Client
from forebay.network.pki.identity import create_network, join
from forebay.network.server_connections import MAX_HEAD_BYTES
from support.calibration import scaled
from support.handlers import Request, serve
from support.wire import Answer, connect, read_answers, send_all, until

MIB = 1 << 20


class World:
    """A server, a member, and what the server's handler was asked."""

    def __init__(self, folder: Path) -> None:
        create_network(folder / "network", "net")
        self.asked: list[tuple[str, str, bytes]] = []
        self.file = folder / "file"
        self.file.write_bytes(bytes(1000))
        self.member = join(folder / "network", folder / "member", "member")
        # Its own time-outs are longer than what a test waits for: what ends sooner was refused, not late.
        self.server = serve(join(folder / "network", folder / "server", "server"), self.handle)

    def handle(self, request: Request) -> Response:
        self.asked.append((request.method, request.path, request.body))
        if request.path == "/file":
            return file_response(request.http, self.file, 1000)
        return JsonResponse({"bytes": len(request.body), "got": request.json() if request.path == "/json" else None})

    def send(self, *pieces: bytes, end: bool = True) -> list[Answer]:
        """What is answered to these pieces until the server closes, or is done with them."""
        self.asked.clear()
        with connect(self.server, self.member) as tls:
            for piece in pieces:
                if not send_all(tls, piece):
                    break
            if end:
                send_all(tls, b"GET /last HTTP/1.1\r\nConnection: close\r\n\r\n")
            answers = read_answers(tls, 10_000)
        assert all(answer.status < 500 for answer in answers), answers
        return answers

    def check(self) -> None:
        """An honest request is answered, and nothing of the hostile one is left."""
        with Client(self.member) as client:
            assert client.request_json(self.server.address, "POST", "/json", {"n": 1})[0]["got"] == {"n": 1}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("bytes"))
    with world.server:
        yield world


SMUGGLED = b"GET /smuggled HTTP/1.1\r\n\r\n"
POST = b"POST / HTTP/1.1\r\n"


@pytest.mark.parametrize(
    "data",
    [
        POST + b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
        POST + b"Content-Length: %d\r\nContent-Length: 0\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: identity\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 0, 0\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: +0\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 0x0\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: -5\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: \r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 1 0\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 99999999999999999999999\r\n\r\n" + SMUGGLED,
        POST + b"A: b\r\n Transfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
        POST + b"A: b\r\n\tfolded\r\n\r\n" + SMUGGLED,
        POST + b"A: b\x00c\r\n\r\n" + SMUGGLED,
        POST + b"A\x00: b\r\n\r\n" + SMUGGLED,
        POST + b"A: b\rc\r\n\r\n" + SMUGGLED,
        POST + b"no colon\r\n\r\n" + SMUGGLED,
        POST + b": no name\r\n\r\n" + SMUGGLED,
        b"POST / HTTP/1.1\nContent-Length: 0\n\n" + SMUGGLED,
        b"POST / HTTP/1.1\r\nA: b\nC: d\r\n\r\n" + SMUGGLED,
        b"POST\x00/ HTTP/1.1\r\n\r\n" + SMUGGLED,
        b"POST / HTTP/9.9\r\n\r\n" + SMUGGLED,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED,
        b"nonsense\r\n\r\n" + SMUGGLED,
        b"\x00" * 512 + b"\r\n" + SMUGGLED,
        b"\x16\x03\x01\x02\x00" + bytes(100) + SMUGGLED,
    ],
)
def test_what_is_ambiguous_is_refused_and_ends_the_connection(world: World, data: bytes) -> None:
    """Two readers of it could find different requests in it: nothing behind it is read as one."""
    answers = world.send(data)
    assert [answer.status for answer in answers if answer.status != 200] == [400]
    assert answers[-1].status == 400 and answers[-1].headers["connection"] == "close"
    assert [path for _, path, _ in world.asked if path in ("/smuggled", "/last")] == []
    world.check()


@pytest.mark.parametrize(
    "data",
    [
        POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\nx",
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello!!\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n",
    ],
)
def test_chunks_that_are_none(world: World, data: bytes) -> None:
    answers = world.send(data)
    assert all(answer.status == 400 for answer in answers)
    assert "/last" not in [path for _, path, _ in world.asked]
    world.check()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST /json HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n[1,2,\r\n2\r\n3]\r\n0\r\n\r\n", 200),
        (b"POST /json HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\n[1]\r\n0\r\nTrailer: x\r\n\r\n", 200),
        (b"POST /json HTTP/1.1\r\nContent-Length: 4\r\n\r\n{\xff\xfe}", 400),
        (b"POST /json HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000, 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nContent-Length: 1048577\r\n\r\n", 413),
        (b"PUT / HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n", 405),
        (b"GET /file HTTP/1.1\r\nRange: bytes=5-2\r\n\r\n", 416),
        (b"GET /file HTTP/1.1\r\nRange: bytes=-5\r\n\r\n", 416),
        (b"GET /file HTTP/1.1\r\nRange: bytes=0-1,3-4\r\n\r\n", 416),
        (b"GET /file HTTP/1.1\r\nRange: lines=0-1\r\n\r\n", 416),
        (b"GET /file HTTP/1.1\r\nRange: bytes=" + b"9" * 5000 + b"-\r\n\r\n", 416),
        (b"GET /file HTTP/1.1\r\nRange: bytes=\xb2-\r\n\r\n", 416),
        (b"GET /file HTTP/1.1\r\nRange: bytes=0-\r\n\r\n", 206),
        (b"OPTIONS / HTTP/1.1\r\n\r\n", 405),
        (b"TRACE / HTTP/1.1\r\n\r\n", 405),
        (b"DELETE / HTTP/1.1\r\n\r\n", 405),
        (b"PROPFIND / HTTP/1.1\r\n\r\n", 405),
        (b"GET http://elsewhere.example/file HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /%00%ff%0a/../%2e%2e/etc HTTP/1.1\r\n\r\n", 404),
        (b"GET /?a=%ff&b=%00&%=%zz HTTP/1.1\r\n\r\n", 200),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: \xff\xfe\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAA\r\n\r\n", 200),
        (b"POST / HTTP/1.1\r\nExpect: nonsense\r\nContent-Length: 1\r\n\r\nx", 200),
        (b"GET / HTTP/1.0\r\n\r\n", 200),
        (b"GET / HTTP/2.0\r\n\r\n", 200),
    ],
)
def test_what_is_odd_has_one_answer(world: World, data: bytes, status: int) -> None:
    answers = world.send(data)
    assert answers[0].status == status
    assert [answer.status for answer in answers[1:]] in ([], [200])
    world.check()


@pytest.mark.parametrize("target", [b"x:443", b"/", b"*", b"[::1]:1", b""])
@pytest.mark.parametrize("method", [b"CONNECT", b"OPTIONS", b"TRACE", b"GET"])
def test_targets_that_are_none_of_ours(world: World, method: bytes, target: bytes) -> None:
    answers = world.send(method + b" " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    if target != b"/" or method != b"GET":
        assert answers[0].status in (400, 404, 405)
    world.check()


def test_a_client_that_waits_for_100_is_told_to_go_on(world: World) -> None:
    with connect(world.server, world.member) as tls:
        tls.sendall(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\nConnection: close\r\n\r\n")
        assert read_answers(tls)[0].status == 100
        tls.sendall(b"abc")
        assert read_answers(tls)[0].json()["bytes"] == 3


def memory() -> int:
    return psutil.Process().memory_info().rss


@contextlib.contextmanager
def grows_at_most(num_bytes: int) -> Iterator[None]:
    before = memory()
    yield
    assert memory() - before < num_bytes


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\n\r\n", b""),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * 60_000 + b"\r\n\r\n", b""),
        (b"GET / HTTP/1.1\r\n" + b"A" * 60_000 + b": b\r\n\r\n", b""),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000 + b"\r\n", b""),
        (b"GET /", b"a" * 10_000),
        (b"GET / HTTP/1.1\r\nA: ", b"b" * 10_000),
        (b"GET / HTTP/1.1\r\n", b"A" * 10_000),
        (b"GET / HTTP/1.1\r\n", b"A: b\r\n" * 1000),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"Trailer: b\r\n" * 1000),
        (b"G", b"E" * 10_000),
    ],
)
def test_heads_are_bounded(world: World, first: bytes, more: bytes) -> None:
    """In one piece, and going on without end."""
    world.asked.clear()
    with connect(world.server, world.member) as tls, grows_at_most(16 * MIB):
        sent = len(first) if send_all(tls, first) else 0
        while more and sent < 32 * MIB and send_all(tls, more):
            sent += len(more)
        answers = read_answers(tls, 10)
    assert [answer.status for answer in answers if answer.status != 200] in ([400], [])
    assert sent < 24 * MIB  # no further than what the sockets hold, and what is read to no purpose
    assert world.asked == []
    world.check()


def test_a_head_up_to_the_bound_is_read_however_it_is_cut(world: World) -> None:
    head = b"GET / HTTP/1.1\r\nConnection: close\r\nA: " + b"b" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n"
    for size in (len(head), 16_000, 1000):
        with connect(world.server, world.member) as tls:
            for start in range(0, len(head), size):
                tls.sendall(head[start : start + size])
            assert [answer.status for answer in read_answers(tls, 2)] == [200]


@pytest.mark.parametrize("sized", [True, False])
def test_bodies_are_bounded(world: World, sized: bool) -> None:
    """A body that never ends is refused once it is too long, whatever its head says."""
    length = b"Content-Length: 1000000000" if sized else b"Transfer-Encoding: chunked"
    piece = b"x" * 65536 if sized else b"10000\r\n" + b"x" * 65536 + b"\r\n"
    world.asked.clear()
    with connect(world.server, world.member) as tls, grows_at_most(24 * MIB):
        tls.sendall(b"POST / HTTP/1.1\r\n" + length + b"\r\n\r\n")
        sent = 0
        while sent < 200 * MIB and send_all(tls, piece):
            sent += len(piece)
        answers = read_answers(tls, 10)
    assert sent < 24 * MIB, "the server goes on reading"
    assert [answer.status for answer in answers] in ([413], [])  # a reset may overtake the answer
    assert world.asked == []
    world.check()


def test_thousands_of_requests_at_once(world: World) -> None:
    """A few are answered, in order; who sends without reading is refused, and costs no memory."""
    data = b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % i for i in range(20_000))
    with connect(world.server, world.member) as tls, grows_at_most(24 * MIB):
        tls.settimeout(scaled(20))
        send_all(tls, data)
        answers = read_answers(tls, 20_000)
    assert {answer.status for answer in answers} <= {200, 400}
    assert len(answers) < 20_000 and all(answer.status == 200 for answer in answers[:-1])
    world.check()


def test_garbage_does_not_fill_the_log(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for data in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", b"\x00"):
        world.send(data)
    assert [record.getMessage() for record in caplog.records if record.levelno >= 30] == []


_WORDS = st.sampled_from(
    [
        b"GET ", b"POST ", b"/", b"/file", b" HTTP/1.1", b"\r\n", b"\r\n\r\n", b"Content-Length: ", b"5", b"-1",
        b"Transfer-Encoding: chunked", b"Connection: close", b"Range: bytes=", b"0-5", b"\x00", b"a" * 9000, b"\n",
        b"Expect: 100-continue", b"Upgrade: websocket\r\nConnection: upgrade", b"0\r\n\r\n", b"{}",
        b"Idempotency-Key: k",
    ]
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_WORDS | st.binary(max_size=20), max_size=30).map(b"".join))
def test_any_bytes(world: World, data: bytes) -> None:
    """What is answered is HTTP without a 5xx; what goes on waiting for more does so within the bounds of time."""
    with connect(world.server, world.member) as tls:
        send_all(tls, data + b"\r\n\r\nGET /last HTTP/1.1\r\nConnection: close\r\n\r\n")
        tls.settimeout(0.3)
        try:
            answers = read_answers(tls, 50)
        except TimeoutError:  # it waits for the rest of a body
            answers = []
    assert all(answer.status < 500 for answer in answers)
    world.check()


def test_a_silent_member_costs_its_place_and_no_more(world: World) -> None:
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(world.server, world.member)).sendall(b"POST / HTTP/1.1\r\nContent-Le")
        world.check()
    until(lambda: world.server.num_connections == 0)
    assert time.monotonic() - started < scaled(10)
