"""Replies kept for repeats: through a server in memory, and by the cache itself."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay.network import limits
from forebay.network.app import ApiError, JsonResponse
from forebay.network.limits import ReplyCache
from support.handlers import Request
from support.memory_server import Members, MemoryServer, VirtualLoop
from support.wire import Answer, request_bytes


class Counting:
    """Answers with the number of the request; `/held` waits at a gate, others end as their name says."""

    def __init__(self):
        self.num = itertools.count(1)
        self.gate = asyncio.Event()
        self.fails = True

    async def __call__(self, request: Request) -> Response:
        number = next(self.num)
        if request.path == "/held":
            await self.gate.wait()
        if request.path in ("/500", "/503", "/429") and self.fails:
            raise ApiError(int(request.path[1:]), "again", "later", 1.0)
        if request.path == "/bug" and self.fails:
            raise RuntimeError("a bug")
        if request.path == "/409":
            raise ApiError(409, "refused", f"request {number} contradicts it")
        if request.path == "/large":
            return JsonResponse({"number": number, "x": "x" * (300 << 10)})
        return JsonResponse({"number": number, "by": request.peer.name}, headers={"X-Number": str(number)})


@pytest.fixture
def handler() -> Counting:
    return Counting()


@pytest.fixture
def server(handler) -> Iterator[MemoryServer]:
    with MemoryServer(handler, Members()) as server:
        yield server


def post(server: MemoryServer, path: str, key: str = "k", member: str = "one", body: Any = None) -> Answer:
    return server.ask("POST", path, body, member, Idempotency_Key=key)


def number(answer: Answer) -> int:
    return int(answer.json()["number"])


def test_a_repeat_gets_the_first_answer_byte_for_byte(server):
    first = post(server, "/a", body={"a": 1})
    assert first.status == 200 and first.headers["x-number"] == "1"
    assert post(server, "/a", body={"a": 2}) == first
    assert number(post(server, "/a", "k2")) == 2  # another key
    assert number(server.ask("POST", "/a", member="one")) == 3  # none
    assert number(post(server, "/a", member="two")) == 4  # another peer
    assert number(post(server, "/b")) == 5  # another request
    assert number(server.ask("GET", "/a", member="one", Idempotency_Key="k")) == 6  # changes nothing
    assert [number(post(server, "/a", "k" * 65)) for _ in range(2)] == [7, 8]  # too long a key
    assert post(server, "/a") == first
    refused = post(server, "/409", "k3")
    assert b"request 9" in refused.body and post(server, "/409", "k3") == refused
    assert [number(post(server, "/large")) for _ in range(2)] == [10, 11]  # too large an answer


@pytest.mark.parametrize("identity", [Members(), None])
def test_an_answer_kept_for_a_repeat_is_its_members_alone(handler, identity):
    """Against another member's key, or a path that ends like one; over plain HTTP the address tells clients apart."""
    with MemoryServer(handler, identity) as server:
        honest, evil = server.connect("honest"), server.connect("evil", "127.0.0.2")
        first = honest.ask("/a", "POST", Idempotency_Key="k")
        for path, key in (("/a", "k"), ("/a%20k", ""), ("/", "a k"), ("/a", "k "), ("/a", "K")):
            assert number(evil.ask(path, "POST", Idempotency_Key=key)) > 1
        assert honest.ask("/a", "POST", Idempotency_Key="k") == first


@pytest.mark.parametrize("path", ["/500", "/503", "/429", "/bug"])
def test_an_answer_that_says_again_later_is_not_kept(server, handler, path):
    assert post(server, path).status in (500, 503, 429)
    handler.fails = False
    answer = post(server, path)
    assert number(answer) == 2 and post(server, path) == answer


def test_a_repeat_waits_while_the_first_is_answered(server, handler):
    """Also where the first one's connection is gone: what it began is not begun again."""
    connections = [server.connect("m") for _ in range(4)]
    for connection in connections:
        connection.send(request_bytes("POST", "/held", Idempotency_Key="k"))
    connections[0].hang_up()
    handler.gate.set()
    server.loop.run_ready()
    assert [number(answer) for connection in connections[1:] for answer in connection.answers()] == [1, 1, 1]


def test_a_body_that_broke_off_is_no_first_answer(server):
    broken = server.connect("one")
    broken.send(b"POST /a HTTP/1.1\r\nIdempotency-Key: k\r\nContent-Length: 20\r\n\r\n{")
    broken.hang_up()
    assert number(post(server, "/a")) == 1


class App:
    """Counts how often it ran and what ran at the same time; its answers are taken from a list."""

    def __init__(self, *statuses: int, num_bytes: int = 10):
        self.statuses, self.num_bytes = list(statuses), num_bytes
        self.num_calls = self.num_running = self.most_running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        self.num_calls += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(1.0)
        self.num_running -= 1
        status = self.statuses.pop(0) if self.statuses else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % self.num_calls + bytes(self.num_bytes)})


async def ask(cache: ReplyCache, app: App, peer: str, key: str) -> int:
    """The number of the call that answered."""
    messages = []

    async def send(message):
        messages.append(message)

    async def receive():
        raise AssertionError("nothing to read")

    await cache.answer((peer, key), app, {}, receive, send)
    return int(messages[1]["body"].rstrip(b"\0"))


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def test_after_a_failure_those_that_wait_ask_anew_one_at_a_time(loop):
    async def run():
        return await asyncio.gather(*(ask(cache, app, "p", "k") for _ in range(5)))

    cache, app = ReplyCache(), App(503, 429)
    assert sorted(loop.run_until_complete(run())) == [1, 2, 3, 3, 3]
    assert (app.num_calls, app.most_running) == (3, 1)


def test_bounds_of_what_is_kept(loop, monkeypatch):
    monkeypatch.setattr(limits, "MAX_REPLIES_PER_PEER", 4)
    monkeypatch.setattr(limits, "MAX_REPLIES_BYTES", 1000)

    async def run():
        cache, app = ReplyCache(), App()
        for i in range(6):
            await ask(cache, app, "p", f"k{i}")
        await ask(cache, app, "q", "k0")
        assert await ask(cache, app, "p", "k5") == 6 and await ask(cache, app, "q", "k0") == 7  # kept
        assert await ask(cache, app, "p", "k0") == 8  # the oldest of this peer were dropped
        large = App(num_bytes=400)
        for i in range(6):
            await ask(cache, large, f"r{i}", "k")
        assert await ask(cache, large, "r5", "k") == 6 and await ask(cache, large, "r0", "k") == 7
        assert cache._num_bytes <= 1000
        await asyncio.sleep(limits.REPLY_TTL_S)
        await ask(cache, app, "s", "k")
        assert len(cache._replies) == 1 and cache._num_bytes < 100 and sum(cache._by_peer.values()) == 1
        # What is being answered is never dropped: a flood of keys does not make a repeat run twice.
        slow = asyncio.create_task(ask(cache, app, "p", "slow"))
        await asyncio.sleep(0)
        quick = [asyncio.create_task(ask(cache, app, "p", f"x{i}")) for i in range(20)]
        again = asyncio.create_task(ask(cache, app, "p", "slow"))
        await asyncio.gather(*quick)
        assert await slow == await again

    loop.run_until_complete(run())
