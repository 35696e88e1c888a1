"""Answers kept for repeats, over real connections and by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

import orjson
import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from forebay.network import limits
from forebay.network.app import ApiError, JsonResponse
from forebay.network.limits import ReplyCache
from forebay.network.pki.identity import Identity
from forebay.network.server import Server
from support.handlers import Request, serve
from support.wire import connect, until

Make = Callable[[str], Identity]


class Counting:
    """Answers with the number of the request; `/held` waits at a gate, others end as their name says."""

    def __init__(self) -> None:
        self.num = itertools.count(1)
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.fails = True

    def __call__(self, request: Request) -> Response:
        number = next(self.num)
        if request.path == "/held":
            self.entered.release()
            assert self.gate.wait(20)
        if request.path in ("/500", "/503", "/429") and self.fails:
            raise ApiError(int(request.path[1:]), "again", "later", 1.0)
        if request.path == "/bug" and self.fails:
            raise RuntimeError("a bug")
        if request.path == "/409":
            raise ApiError(409, "refused", f"request {number} contradicts it")
        if request.path == "/large":
            return JsonResponse({"number": number, "x": "x" * (300 << 10)})
        return JsonResponse({"number": number, "got": request.json()}, headers={"X-Number": str(number)})


@pytest.fixture
def handler() -> Counting:
    return Counting()


@pytest.fixture
def server(handler: Counting, make_identity: Make) -> Iterator[Server]:
    with serve(make_identity("server"), handler) as server:
        yield server


def post(
    server: Server, identity: Identity, path: str, key: str = "", body: bytes = b"{}", method: str = "POST"
) -> bytes:
    line = f"Idempotency-Key: {key}\r\n" if key else ""
    head = f"{method} {path} HTTP/1.1\r\n{line}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with connect(server, identity) as tls:
        tls.sendall(head.encode() + body)
        answer = b""
        with contextlib.suppress(OSError):
            while piece := tls.recv(1 << 16):
                answer += piece
    return answer


def number(answer: bytes) -> int:
    return int(orjson.loads(answer.partition(b"\r\n\r\n")[2])["number"])


def test_a_repeat_gets_the_first_answer_byte_for_byte(server: Server, make_identity: Make) -> None:
    item, two = make_identity("one"), make_identity("two")
    first = post(server, item, "/a", "k1", b'{"a":1}')
    assert first.startswith(b"HTTP/1.1 200") and b"x-number: 1\r\n" in first
    assert post(server, item, "/a", "k1", b'{"a":2}') == first
    assert number(post(server, item, "/a", "k2")) == 2  # another key
    assert number(post(server, item, "/a")) == 3  # none
    assert number(post(server, two, "/a", "k1")) == 4  # another peer
    assert number(post(server, item, "/b", "k1")) == 5  # another request
    assert number(post(server, item, "/a", "k1", b"", "GET")) == 6  # nothing that changes anything
    assert post(server, item, "/a", "k1") == first
    refused = post(server, item, "/409", "k3")
    assert b"request 7" in refused and post(server, item, "/409", "k3") == refused


@pytest.mark.parametrize("path", ["/500", "/503", "/429", "/bug"])
def test_an_answer_that_says_again_later_is_not_kept(
    server: Server, handler: Counting, make_identity: Make, path: str
) -> None:
    member = make_identity("m")
    assert post(server, member, path, "k")[9:12] in (b"500", b"503", b"429")
    handler.fails = False
    answer = post(server, member, path, "k")
    assert number(answer) == 2 and post(server, member, path, "k") == answer


def test_what_is_too_large_is_not_kept(server: Server, make_identity: Make) -> None:
    member = make_identity("m")
    assert [number(post(server, member, "/large", "k")) for _ in range(2)] == [1, 2]
    assert [number(post(server, member, "/a", "k" * 65)) for _ in range(2)] == [3, 4]


def test_a_repeat_waits_while_the_first_is_answered(server: Server, handler: Counting, make_identity: Make) -> None:
    """Also where the first one's connection is gone: what it began is not begun again."""
    member, answers = make_identity("m"), list[bytes]()
    with connect(server, member) as tls:
        tls.sendall(b"POST /held HTTP/1.1\r\nIdempotency-Key: k\r\nContent-Length: 2\r\n\r\n{}")
        assert handler.entered.acquire()
    threads = [threading.Thread(target=lambda: answers.append(post(server, member, "/held", "k"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: server._core.requests.num_active == 4)
    assert not answers
    handler.gate.set()
    for thread in threads:
        thread.join()
    assert [number(answer) for answer in answers] == [1, 1, 1] and len(set(answers)) == 1


def test_a_body_that_broke_off_is_no_first_answer(server: Server, make_identity: Make) -> None:
    member = make_identity("m")
    with connect(server, member) as tls:
        tls.sendall(b"POST /a HTTP/1.1\r\nIdempotency-Key: k\r\nContent-Length: 20\r\n\r\n{")
    until(lambda: server._core.requests.num_active == 0 and server.num_connections == 0)
    assert number(post(server, member, "/a", "k")) == 1


class App:
    """Counts how often it ran and what ran at the same time; its answers are taken from a list."""

    def __init__(self, *statuses: int, num_bytes: int = 10) -> None:
        self.statuses, self.num_bytes = list(statuses), num_bytes
        self.num_calls = self.num_running = self.most_running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_calls += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0.01)
        self.num_running -= 1
        status = self.statuses.pop(0) if self.statuses else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % self.num_calls + bytes(self.num_bytes)})


async def ask(cache: ReplyCache, app: App, peer: str, key: str) -> int:
    """The number of the call that answered."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing to read")

    await cache.answer((peer, key), app, {}, receive, send)
    return int(messages[1]["body"].rstrip(b"\0"))


def test_after_a_failure_those_that_wait_ask_anew_one_at_a_time() -> None:
    async def run() -> list[int]:
        return await asyncio.gather(*(ask(cache, app, "p", "k") for _ in range(5)))

    cache, app = ReplyCache(), App(503, 429)
    assert sorted(asyncio.run(run())) == [1, 2, 3, 3, 3]
    assert (app.num_calls, app.most_running) == (3, 1)


def test_bounds_of_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_REPLIES_PER_PEER", 4)
    monkeypatch.setattr(limits, "MAX_REPLIES_BYTES", 1000)

    async def run() -> None:
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
        monkeypatch.setattr(limits, "REPLY_TTL_S", 0.2)  # Not before: what was kept above may be older by then.
        await asyncio.sleep(0.3)
        await ask(cache, app, "s", "k")
        assert len(cache._replies) == 1 and cache._num_bytes < 100 and sum(cache._by_peer.values()) == 1
        # What is being answered is never dropped: a flood of keys does not make a repeat run twice.
        slow = asyncio.create_task(ask(cache, app, "p", "slow"))
        await asyncio.sleep(0)
        quick = [asyncio.create_task(ask(cache, app, "p", f"x{i}")) for i in range(20)]
        again = asyncio.create_task(ask(cache, app, "p", "slow"))
        await asyncio.gather(*quick)
        assert await slow == await again

    asyncio.run(run())
