"""Bytes that are no request, or a hostile one, from a member: in memory, so that each byte is accounted for.

Whatever comes: no 5xx, bounded memory, no second answer to one request, and the next honest request is answered.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response

from forebay.network.app import JsonResponse, file_response
from forebay.network.server_connections import MAX_HEAD_BYTES
from support.handlers import Request
from support.memory_server import Members, MemoryConnection, MemoryServer
from support.wire import Answer

MIB = 1 << 20


class World:
    """A server, and the requests that its handler got."""

    def __init__(self, folder: Path):
        self.requests = []
        self.file = folder / "file"
        self.file.write_bytes(bytes(1000))
        self.server = MemoryServer(self.handle, Members())

    async def handle(self, request: Request) -> Response:
        self.requests.append((request.method, request.path, request.body))
        if request.path == "/file":
            return file_response(request.http, self.file, 1000)
        return JsonResponse({"bytes": len(request.body), "got": request.json() if request.path == "/json" else None})

    def connect(self) -> MemoryConnection:
        self.requests.clear()
        return self.server.connect("member")

    def send(self, *pieces: bytes) -> list[Answer]:
        """The answers to these pieces and a last request; then an honest one is answered, and nothing is left."""
        connection = self.connect()
        connection.send(*pieces, b"GET /last HTTP/1.1\r\nConnection: close\r\n\r\n")
        answers = connection.answers()
        paths = [path for _, path, _ in self.requests]
        self.check(connection)
        assert all(answer.status < 500 for answer in answers), answers
        assert len(answers) >= len(paths)
        self.requests[:] = [("", path, b"") for path in paths]
        return answers

    def check(self, connection: MemoryConnection):
        connection.hang_up()
        assert self.server.ask("POST", "/json", {"n": 1}, "member").json()["got"] == {"n": 1}
        assert self.server.server.num_connections == 0 and self.server.core.requests.num_active == 0

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _ in self.requests]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("bytes"))
    with world.server:
        yield world


SMUGGLED = b"GET /smuggled HTTP/1.1\r\n\r\n"  # 26 bytes


@pytest.mark.parametrize(
    "data",
    [
        b"POST / HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 26\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: identity\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: +0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nA: b\r\n Transfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nA: b\x00c\r\n\r\n",
        b"POST / HTTP/1.1\nContent-Length: 0\n\n",
        b"POST / HTTP/9.9\r\n\r\n",
        b"nonsense\r\n\r\n",
        # Chunks that are none: the request before them may have been answered.
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\nx",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello!!\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nTrailer: x\r\n\r\n",
    ],
)
def test_what_is_ambiguous_is_refused_and_ends_the_connection(world, data, caplog):
    """Two readers of it could find different requests in it: nothing behind it is read as one, nor logged."""
    answers = world.send(data + SMUGGLED)
    assert [answer.status for answer in answers if answer.status != 200] == [400]
    assert answers[-1].status == 400 and answers[-1].headers["connection"] == "close"
    assert not {"/smuggled", "/last"} & set(world.paths)
    assert [record.getMessage() for record in caplog.records if record.levelno >= 30] == []


@pytest.mark.parametrize(
    "data, status",
    [
        (b"POST /json HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n[1,2,\r\n2\r\n3]\r\n0\r\n\r\n", 200),
        (b"POST /json HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\n[1]\r\n0\r\n\r\n", 200),
        (b"POST /json HTTP/1.1\r\nContent-Length: 4\r\n\r\n{\xff\xfe}", 400),
        (b"POST /json HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000, 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1048577\r\n\r\n", 413),
        (b"PUT / HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n", 405),
        (b"GET /file HTTP/1.1\r\nRange: bytes=5-2\r\n\r\n", 416),
        (b"GET /file HTTP/1.1\r\nRange: bytes=0-1,3-4\r\n\r\n", 416),
        (b"GET /file HTTP/1.1\r\nRange: bytes=" + b"9" * 5000 + b"-\r\n\r\n", 416),
        (b"GET /file HTTP/1.1\r\nRange: bytes=0-\r\n\r\n", 206),
        (b"TRACE / HTTP/1.1\r\n\r\n", 405),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET * HTTP/1.1\r\n\r\n", 404),
        (b"GET http://elsewhere.example/file HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /%00%ff%0a/../%2e%2e/etc HTTP/1.1\r\n\r\n", 404),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: \xff\xfe\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n\r\n", 200),
        (b"POST / HTTP/1.1\r\nExpect: nonsense\r\nContent-Length: 1\r\n\r\nx", 200),
        (b"GET / HTTP/1.0\r\n\r\n", 200),
    ],
)
def test_what_is_odd_has_one_answer(world, data, status, caplog):
    answers = world.send(data)
    assert answers[0].status == status
    assert [answer.status for answer in answers[1:]] in ([], [200])
    assert [record.getMessage() for record in caplog.records if record.levelno >= 30] == []


def test_a_client_that_waits_for_100_is_told_to_go_on(world):
    connection = world.connect()
    connection.send(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")
    assert connection.answers()[0].status == 100
    connection.send(b"abc")
    assert connection.answers()[0].json()["bytes"] == 3
    world.check(connection)


CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "first, more",
    [
        (b"GET /", b"a" * 10_000),
        (b"GET / HTTP/1.1\r\nA: ", b"b" * 10_000),
        (b"GET / HTTP/1.1\r\n", b"A" * 10_000),
        (b"GET / HTTP/1.1\r\n", b"A: b\r\n" * 1000),
        (b"", b"\r\n" * 5000),
        (CHUNKED, b"0" * 10_000),
        (CHUNKED + b"1;", b"a" * 10_000),
        (CHUNKED + b"1;a=", b"b" * 10_000),
        (CHUNKED + b'1;a="', b"b" * 10_000),
        (CHUNKED + b"0\r\n", b"A" * 10_000),
        (CHUNKED + b"0\r\nA: ", b"b" * 10_000),
        (CHUNKED + b"2\r\n{}\r\n0\r\nA: ", b"b" * 10_000),
        (CHUNKED + b"0\r\n", b"Trailer: b\r\n" * 1000),
    ],
)
def test_what_does_not_end_is_bounded_in_each_state_of_the_parser(world, first, more):
    """In one piece, and going on without end; blank lines before a request count, too."""
    for pieces in ([first + more * 7 + b"\r\n\r\n"], [first] + [more] * 20):
        connection = world.connect()
        connection.send(*pieces)
        assert not connection.is_open and connection.num_consumed <= 2 * MAX_HEAD_BYTES + 20_000
        assert [answer.status for answer in connection.answers()] == [400] and world.requests == []
        world.check(connection)


def test_an_upgrade_is_not_taken_and_ends_the_connection(world):
    """The parser reads nothing after such a request."""
    connection = world.connect()
    connection.send(b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + SMUGGLED)
    (answer,) = connection.answers()
    assert (answer.status, answer.headers["connection"], connection.is_open) == (200, "close", False)
    assert world.paths == ["/"]
    world.check(connection)


def test_a_head_up_to_the_bound_is_read_however_it_is_cut(world):
    head = b"GET / HTTP/1.1\r\nA: " + b"b" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n"
    for size in (len(head), 16_000, 1000):
        connection = world.connect()
        connection.send(*(head[start : start + size] for start in range(0, len(head), size)))
        assert [answer.status for answer in connection.answers()] == [200]
        world.check(connection)


@pytest.mark.parametrize("is_sized", [True, False])
def test_bodies_are_bounded(world, is_sized):
    """A body that never ends is refused once it is too long, whatever its head says; no more of it is read."""
    length = b"Content-Length: 1000000000" if is_sized else b"Transfer-Encoding: chunked"
    piece = b"x" * 65536 if is_sized else b"10000\r\n" + b"x" * 65536 + b"\r\n"
    connection = world.connect()
    connection.send(b"POST / HTTP/1.1\r\n" + length + b"\r\n\r\n", *[piece] * 100)
    assert connection.num_consumed < 2 * MIB and not connection.is_open
    assert [answer.status for answer in connection.answers()] == [413] and world.requests == []
    world.check(connection)


def test_thousands_of_requests_at_once(world):
    """A few are answered, in order; who sends without reading is refused, and costs no memory."""
    connection = world.connect()
    connection.is_reading = False
    connection.send(b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % i for i in range(20_000)))
    connection.read()
    statuses = [answer.status for answer in connection.answers()]
    assert statuses[-1] == 400 and set(statuses[:-1]) <= {200} and len(statuses) < 1000
    world.check(connection)


_WORDS = st.sampled_from(
    [
        b"GET ", b"POST ", b"/", b"/file", b" HTTP/1.1", b"\r\n", b"\r\n\r\n", b"Content-Length: ", b"5", b"-1",
        b"Transfer-Encoding: chunked", b"Connection: close", b"Range: bytes=", b"0-5", b"\x00", b"a" * 9000, b"\n",
        b"Expect: 100-continue", b"Upgrade: websocket\r\nConnection: upgrade", b"0\r\n\r\n", b"{}",
        b"Idempotency-Key: k",
    ]
)  # fmt: skip


@given(st.lists(_WORDS | st.binary(max_size=20), max_size=30).map(b"".join))
def test_any_bytes(world, data):
    assert world.send(data + b"\r\n\r\n")
