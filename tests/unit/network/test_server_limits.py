"""Limits of a server by member, organisation, address and time: in memory, on a virtual clock."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import Request as HttpRequest
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forebay.network import app
from forebay.network.app import JsonResponse, file_response, make_app, role
from forebay.network.peer import Peer, Scope
from support.handlers import Request
from support.memory_server import Members, MemoryConnection, MemoryServer

Start = Callable[..., MemoryServer]
WAIT_REQUEST = b"GET /held HTTP/1.1\r\n\r\n"
LARGE = 1 << 20


class Handler:
    """`/held` waits for a gate, `/file` and `/memory` send 4 MiB, `/large` a megabyte of JSON, all else is echoed."""

    def __init__(self, file: Path):
        self.file = file
        self.gate = asyncio.Event()
        self.charged, self.quota = 0, LARGE << 10

    def charge(self, num_bytes: int) -> bool:
        is_left = self.charged + num_bytes <= self.quota
        self.charged += num_bytes * is_left
        return is_left

    async def __call__(self, request: Request) -> Response:
        match request.path:
            case "/held":
                await self.gate.wait()
            case "/file":
                return file_response(request.http, self.file, self.file.stat().st_size)
            case "/charged":
                response = file_response(request.http, self.file, 4 * LARGE)
                response.charge = self.charge
                response.num_charged = 0 if self.file.exists() else self.charged
                return response
            case "/memory":
                return file_response(request.http, bytes(4 * LARGE), 4 * LARGE)
            case "/large":
                return JsonResponse("x" * LARGE)
        return JsonResponse({"path": request.path, "bytes": len(request.body)})


@pytest.fixture
def handler(tmp_path) -> Handler:
    (tmp_path / "file").write_bytes(bytes(4 * LARGE))
    return Handler(tmp_path / "file")


@pytest.fixture
def start(handler) -> Iterator[Start]:
    """Start a server with these limits; `identity` are its members."""
    created = []

    def start(identity=None, **limits):
        created.append(MemoryServer(handler, identity or Members(), **limits))
        return created[-1]

    yield start
    for server in created:
        server.__exit__()


def is_served(server: MemoryServer, member: str) -> bool:
    connection = server.connect(member)
    return connection.is_open and connection.ask("/").status == 200


# Connections.


def test_in_a_full_house_the_peer_with_most_makes_room(start, handler):
    server = start(connections=4)
    idle, other = [server.connect("many") for _ in range(3)], server.connect("other")
    idle[0].send(WAIT_REQUEST)  # the oldest, but it has a request in progress
    server.loop.advance(1.0)
    assert idle[1].ask("/").status == 200  # so that the third has been idle for longest
    assert is_served(server, "third") and [c.is_open for c in idle] == [True, True, False]
    assert other.ask("/").status == idle[1].ask("/").status == 200
    handler.gate.set()
    server.loop.run_ready()
    assert idle[0].answers()[0].status == 200


def test_slow_readers_make_room_after_a_while(start):
    server = start(connections=2)
    slow = [server.connect("many") for _ in range(2)]
    for connection in slow:
        connection.is_reading = False
        connection.send(b"GET /file HTTP/1.1\r\n\r\n")
    assert not is_served(server, "other")
    server.loop.advance(2.5)
    assert is_served(server, "other") and [c.is_open for c in slow] == [False, True]


def test_connections_of_a_peer(start, handler):
    server = start(connections_per_peer=2)
    busy = [server.connect("many") for _ in range(2)]
    for connection in busy:
        connection.send(WAIT_REQUEST)
    assert not server.connect("many").is_open and is_served(server, "other")
    handler.gate.set()
    server.loop.run_ready()
    assert is_served(server, "many")  # an idle one of its own makes room
    assert [connection.is_open for connection in busy] == [False, True]


def test_connections_of_an_organisation(start):
    server = start(connections_per_organisation=2)
    first = server.connect("acme/a")
    assert is_served(server, "acme/b") and not server.connect("acme/c").is_open
    assert is_served(server, "other/a")
    assert all(is_served(server, f"root-{i}") for i in range(3))  # members of the root share no limit
    first.hang_up()
    assert is_served(server, "acme/c")


def test_handshakes_of_an_address(start):
    """They are bounded for each address, and a new one takes the place of the oldest."""
    server = start(handshakes_per_address=2, handshake_s=5.0)
    other = server.knock("10.0.0.2")
    assert [task.cancelled() for task in [server.knock() for _ in range(10)]] == [True] * 8 + [False] * 2
    assert is_served(server, "member") and not other.done()
    server.loop.advance(10.0)  # strangers that say nothing end by themselves
    assert other.cancelled() and server.server.num_connections == 1


def test_a_crowd_of_strangers_ends_no_handshake_of_an_address_of_members(start):
    server = start(connections=8)
    server.connect("member", "10.0.0.1").hang_up()
    member, stranger = server.knock("10.0.0.1"), server.knock("10.0.0.2")
    crowd = [server.knock(f"10.1.0.{number}") for number in range(20)]
    assert stranger.cancelled() and not member.cancelled() and sum(not task.cancelled() for task in crowd) == 7


# Requests.


@pytest.mark.parametrize("own", [True, False])
def test_requests_in_flight(start, handler, own):
    """Of a peer, and of an organisation whose members are several."""
    server = start(**{"requests_per_peer" if own else "requests_per_organisation": 2})
    connections = [server.connect(f"acme/{'a' if own else name}") for name in "abc"]
    for connection in connections[:2]:
        connection.send(WAIT_REQUEST)
    refused = connections[2].ask("/")
    assert refused.refusal == (429, "busy") and refused.headers["retry-after"] == "1"
    assert f"{'peer a' if own else 'organisation acme'}: expected at most 2 requests" in refused.json()["message"]
    assert server.ask("GET", "/", member="elsewhere").status == 200
    assert server.metric("forebay_limited_requests_total", "busy") == 1
    assert server.metric("forebay_requests_in_progress") == 2
    handler.gate.set()
    assert connections[2].ask("/").status == 200 and server.metric("forebay_requests_in_progress") == 0


@pytest.mark.parametrize("own", [True, False])
def test_rate_of_requests(start, own):
    server = start(**{"requests_per_s" if own else "organisation_requests_per_s": 2})
    connections = [server.connect(f"acme/{name}") for name in "ab"]
    asking = [connections[0 if own else number % 2] for number in range(5)]
    assert [connection.ask("/").status for connection in asking] == [200] * 4 + [429]  # the burst is twice the rate
    refused = connections[0].ask("/")
    assert (refused.json()["error"], refused.headers["retry-after"]) == ("rate", "1")
    assert f"{'peer a' if own else 'organisation acme'}: expected at most 2 requests a s" in refused.json()["message"]
    assert connections[1].ask("/").status == (200 if own else 429)
    server.loop.advance(0.5)
    assert connections[0].ask("/").status == 200


@pytest.mark.parametrize("path", ["/nothing/here", "/"])
def test_refusals_beyond_their_rate_are_answered_later(start, path):
    """Those of a handler, and those of a limit; others are served meanwhile."""
    server = start(refusals_per_s=10, **({} if path != "/" else {"requests_per_s": 1e-3}))
    flood = server.connect("flood")
    request = f"PUT {path} HTTP/1.1\r\n\r\n".encode()
    for _ in range(20):
        flood.send(request)
    assert len(flood.answers()) == 20
    flood.send(*[request] * 10)
    assert not flood.answers() and (path == "/" or is_served(server, "member"))
    server.loop.advance(0.55)
    assert len(flood.answers()) == 5
    server.loop.advance(0.6)
    assert len(flood.answers()) == 5


def test_a_role_is_checked_before_the_body_is_read():
    app, bodies = make_app("test"), []

    async def take(request: HttpRequest) -> Response:
        bodies.append(await request.body())
        return JsonResponse({})

    app.post("/work", openapi_extra=role("worker"))(take)
    members = Members()
    members.peer = lambda der: Peer(der.decode(), b"", "", "", Scope(frozenset({der.decode()})))  # type: ignore[method-assign]
    with MemoryServer(app, members) as server:
        for length in (b"Content-Length: 1000000000", b"Transfer-Encoding: chunked"):
            reader = server.connect("data")
            reader.send(b"POST /work HTTP/1.1\r\n%b\r\n\r\n" % length)
            (answer,) = reader.answers()
            assert answer.refusal == (403, "not_worker")
            # The rest of its body is nobody's next request.
            assert answer.headers["connection"] == "close" and not reader.is_open
        assert server.ask("POST", "/work", {"n": 1}, member="worker").status == 200
    assert bodies == [b'{"n":1}'] and [kind for kind, _ in members.events] == ["refused"] * 2


def test_the_revoked_are_refused_and_cut(start):
    members = Members()
    server = start(members)
    connections = [server.connect(name) for name in ("good", "thief")]
    members.refusals["thief"] = "revoked", "thief is revoked"
    refused = connections[1].ask("/")
    assert (refused.status, refused.json()) == (403, {"error": "revoked", "message": "thief is revoked"})
    server.loop.advance(5.0)
    assert [connection.is_open for connection in connections] == [True, False]
    assert [kind for kind, _ in members.events] == ["refused", "cut"]


def test_a_server_that_stops_takes_no_request_and_no_connection(start):
    server = start()
    connection = server.connect("a")
    server.core.is_draining = True
    refused = connection.ask("/")
    assert refused.refusal == (503, "stopping") and refused.headers["retry-after"] == "1"
    assert not server.connect("b").is_open


def test_requests_sent_at_once_are_all_answered(start):
    """In one packet, in packets of a byte, and with a body that ends beside the next head."""
    connection, item = start().connect("a"), b"POST /%d HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
    connection.send(b"".join(item % i for i in range(16)))
    assert [answer.json()["path"] for answer in connection.answers()] == [f"/{i}" for i in range(16)]
    connection.send(*(bytes([byte]) for byte in (item * 2) % (7, 8)))
    assert [answer.json() for answer in connection.answers()] == [{"path": f"/{i}", "bytes": 3} for i in (7, 8)]


# Time.


@pytest.mark.parametrize(
    "head, piece, cut_s",
    [
        (b"", b"", 60.0),  # idle
        (b"GET /", b"a", 10.0),
        (b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n", b"x", 70.0),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", 70.0),
    ],
)
def test_who_rests_or_drips_is_cut(start, head, piece, cut_s):
    server = start()
    slow = server.connect("slow")
    slow.send(head)
    while slow.is_open and server.loop.now < 100.0:
        slow.send(piece)
        assert is_served(server, "honest")
        server.loop.advance(1.0)
    assert cut_s <= server.loop.now <= cut_s + 5.0


@pytest.mark.parametrize("path", [b"file", b"memory", b"large"])
def test_who_reads_nothing_is_cut(start, path):
    """Amid a file, and behind answers to requests that it goes on sending; who reads a little now and then is not."""
    server = start(send_s=8.0)
    nothing, slowly = (server.connect(name) for name in ("nothing", "slowly"))
    for connection in (nothing, slowly):
        connection.is_reading = False
        connection.send(b"GET /%b HTTP/1.1\r\n\r\n" % path * 8)
    server.loop.advance(7.0)
    assert nothing.is_open and (path == b"large" or nothing.num_unread <= 257 << 10)  # a piece of it is in memory
    got = slowly.read()
    server.loop.advance(4.0)
    assert not nothing.is_open and slowly.is_open
    while slowly.is_open and (num := slowly.read()):
        got += num
        server.loop.advance(7.0)
    assert got > 8 * LARGE


def test_bytes_are_charged_as_they_are_sent(start, handler, monkeypatch):
    """Who reads nothing and hangs up is charged for what was sent; where no quota is left the connection ends."""
    monkeypatch.setattr(app, "CHARGE_BYTES", LARGE)
    server = start()
    for _ in range(100):
        connection = server.connect("thief")
        connection.is_reading = False
        connection.send(b"GET /charged HTTP/1.1\r\n\r\n")
        assert handler.charged <= (handler.charged // LARGE + 1) * LARGE
        connection.hang_up()
    sent = handler.charged
    assert 0 < sent <= 100 * (256 << 10)
    assert len(server.connect("reader").ask("/charged").body) == 4 * LARGE and handler.charged == sent + 4 * LARGE
    handler.quota = handler.charged + 2 * LARGE
    connection = server.connect("reader")
    connection.send(b"GET /charged HTTP/1.1\r\n\r\n")
    assert not connection.is_open and 2 * LARGE <= len(connection.received) < 2 * LARGE + 1000
    assert handler.charged == handler.quota


def test_what_cannot_be_opened_is_not_charged(start, handler):
    handler.file.unlink()
    handler.charged = LARGE
    assert start().connect("reader").ask("/charged").status == 500 and handler.charged == 0


def test_a_server_that_was_slow_itself_cuts_no_client(start):
    """Its loop stands still for longer than a handshake and a head may take, while their rest is in the socket."""
    server = start()
    late, stranger = server.connect("late"), server.knock()
    late.send(b"GET / HTTP/1.1\r\n")

    def stand_still():
        server.loop.now += 100.0

    server.loop.call_later(1.0, stand_still)
    server.loop.advance(3.0)
    late.send(b"\r\n")
    assert late.answers()[0].status == 200 and not stranger.done()


def test_the_time_of_a_client_that_keeps_the_loop_busy_goes_on(start, monkeypatch):
    server = start()
    busy, late = server.connect("busy"), server.connect("late")
    late.send(b"GET / HTTP/1.1\r\n")
    receive = HttpToolsProtocol.data_received

    def receive_slowly(self, data):
        receive(self, data)
        server.loop.now += 4.0 * (self.peer.name == "busy")

    monkeypatch.setattr(HttpToolsProtocol, "data_received", receive_slowly)
    busy.send(b"GET / HTTP/1.1\r\n")
    while busy.is_open and server.loop.now < 100.0:
        busy.send(b"A: b\r\n")
        server.loop.advance(1.0)
    assert server.loop.now <= 20.0 and late.is_open


# Clients without a certificate.

UNFINISHED = b"POST / HTTP/1.1\r\nContent-Length: 900\r\n\r\n{"


def open_server(start, **limits):
    server = start(**limits)
    server.core.identity = None
    return server


def test_bodies_that_are_too_long_or_waited_for_are_answered_without_them(start):
    server = open_server(start)
    long, waiting = server.connect(), server.connect()
    for length in (1 << 30, 1 << 63):
        long.send(b"POST / HTTP/1.1\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n{}" % length)
        assert [answer.status for answer in long.answers()] == [413]
        long = server.connect()
    waiting.send(b"POST / HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
    assert [answer.status for answer in waiting.answers()] == [100]
    assert server.metric("forebay_requests_in_progress") == 0
    waiting.send(b"abc")
    assert waiting.answers()[0].json()["bytes"] == 3


def test_requests_without_the_rest_of_their_body_take_no_place_of_others(start):
    server = open_server(start, requests_per_peer=4, connections_per_peer=16)
    unfinished = [server.connect() for _ in range(40)]
    for connection in unfinished:
        connection.send(UNFINISHED)
        server.loop.advance(0.01)
    assert server.metric("forebay_requests_in_progress") == 0
    assert server.ask("POST", "/", {"n": 1}).status == 200
    assert [connection.is_open for connection in unfinished] == [False] * 25 + [True] * 15
    unfinished[-1].send(b"x" * 899)
    assert unfinished[-1].answers()[0].json()["bytes"] == 900


@pytest.mark.parametrize(
    "address, neighbour, other",
    [
        ("10.1.2.3", "10.1.2.4", "10.1.3.3"),
        ("2001:db8:1:1::1", "2001:db8:1:2::1", "2001:db8:2::1"),
        ("::ffff:10.1.2.3", "10.1.2.4", "10.1.3.3"),
    ],
)
def test_limits_of_an_address_and_of_its_network(start, address, neighbour, other):
    server = open_server(start, requests_per_s=2, organisation_requests_per_s=3)

    def num_served(address, num):
        return sum(server.connect(address=address).ask("/").status == 200 for _ in range(num))

    assert [num_served(address, 5), num_served(neighbour, 5), num_served(other, 5)] == [4, 2, 4]


def test_in_a_full_house_the_network_with_most_makes_room(start):
    server = open_server(start, connections=8)
    crowd = [server.connect(address=f"10.0.0.{number}") for number in range(8)]
    others = [server.connect(address=f"10.0.{number}.1") for number in range(1, 5)]
    assert all(connection.is_open for connection in others)
    assert [connection.is_open for connection in crowd] == [False] * 4 + [True] * 4


def test_addresses_of_a_64_share_their_handshakes(start):
    server = start(handshakes_per_address=2)
    tasks = [server.knock(f"2001:db8::{number}") for number in range(1, 5)]
    assert [task.cancelled() for task in tasks] == [True, True, False, False]


@pytest.mark.parametrize("head", [b"Content-Length: 1000000", b"Transfer-Encoding: chunked"])
def test_a_rate_of_bytes_of_bodies(start, head):
    server = start(body_bytes_per_s=1e6)
    body = b"x" * 1_000_000
    if b"chunked" in head:
        body = b"f4240\r\n" + body + b"\r\n0\r\n\r\n"
    statuses = []
    for _ in range(4):
        connection = server.connect("acme/a")
        connection.send(b"POST / HTTP/1.1\r\n" + head + b"\r\n\r\n" + body)
        statuses.append(connection.answers()[0].status)
    assert statuses == [200, 200, 429, 429]
    assert is_served(server, "acme/a") and server.ask("POST", "/", {"n": 1}, "acme/b").status == 200
    server.loop.advance(1.5)
    assert server.ask("POST", "/", {"n": 1}, "acme/a").status == 200


def received_after(server: MemoryServer, connections: list[MemoryConnection], seconds: float) -> int:
    server.loop.advance(seconds)
    return sum(len(connection.received) for connection in connections)


@pytest.mark.parametrize("name", ["upload_bytes_per_s", "bytes_per_s", "organisation_bytes_per_s"])
def test_rates_of_bytes(start, name):
    server = start(**{name: 1e6})
    connections = [server.connect(f"acme/{member}") for member in ("aa" if name == "bytes_per_s" else "ab")]
    for connection in connections:
        connection.send(b"GET /file HTTP/1.1\r\n\r\n")
    burst = 2_000_000 if name != "upload_bytes_per_s" else 50_000
    assert abs(received_after(server, connections, 1.0) - burst - 1e6) < 600_000
    assert abs(received_after(server, connections, 1.0) - burst - 2e6) < 600_000


def test_a_task_that_fails_goes_on(start, caplog):
    server, runs = start(), []

    async def work():
        runs.append(server.loop.now)
        if len(runs) < 3:
            raise RuntimeError("a fault of the disk")

    server.add_task("inventory", work)
    server.loop.advance(10.0)
    assert runs == [0.0, 1.0, 3.0] and server.metric("forebay_task_failures_total", "inventory") == 2
    assert "a fault of the disk" in caplog.text and "name=inventory" in caplog.text
