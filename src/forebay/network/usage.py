"""Current use of a server by member and organisation: requests, bytes, and replies cached for repeated requests.

No sockets and no lock: everything runs in the server's loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.network.limits import ServerLimits, TokenBucket
from forebay.network.peer import Peer

MAX_BUCKETS = 16_384  # members with a request rate in memory; the least recent is dropped first
REPLY_TTL_S = 120.0
MAX_REPLY_BYTES = 256 << 10
MAX_REPLIES_BYTES = 64 << 20
MAX_REPLIES_PER_PEER = 64


class RequestTable:
    """Requests in progress, and request rates, by peer and organisation."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.num_active = 0
        self._by_peer: Counter[str] = Counter()
        self._by_org: Counter[str] = Counter()
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def begin(self, peer: Peer, now: float) -> tuple[str, str, float] | None:
        """Count a request, or return (code, reason, seconds) over a limit. Anonymous clients are one peer."""
        limits = self.limits
        bounds = [("peer", peer.peer_id, self._by_peer, limits.requests_per_peer, limits.requests_per_s)]
        if peer.org:  # members of the root itself share no limits
            max_num, rate = limits.requests_per_organisation, limits.organisation_requests_per_s
            bounds.append(("organisation", peer.org, self._by_org, max_num, rate))
        for kind, key, counts, max_num, rate in bounds:
            if counts[key] >= max_num:
                return (
                    "busy",
                    f"{kind} {key}: expected at most {max_num} requests at once. Wait for their answers.",
                    1.0,
                )
            if (wait_s := self._bucket(f"{kind} {key}", rate).try_take(1.0, now)) > 0:
                return "rate", f"{kind} {key}: expected at most {rate:g} requests a second. Ask less often.", wait_s
        self.num_active += 1
        self._by_peer[peer.peer_id] += 1
        self._by_org[peer.org] += 1
        return None

    def finish(self, peer: Peer) -> None:
        """End a request that `begin` counted."""
        self.num_active -= 1
        decrease(self._by_peer, peer.peer_id)
        decrease(self._by_org, peer.org)

    def wait_for_bytes(self, peer: Peer, num_bytes: int, now: float) -> float:
        """Count bytes to send to a peer; return the seconds to wait before sending them."""
        wait_s = self._bucket(f"bytes {peer.peer_id}", self.limits.bytes_per_s).take(num_bytes, now)
        if peer.org:
            of_org = self._bucket(f"bytes of {peer.org}", self.limits.organisation_bytes_per_s)
            wait_s = max(wait_s, of_org.take(num_bytes, now))
        return wait_s

    def _bucket(self, key: str, rate: float) -> TokenBucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(rate, 2 * rate)
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return bucket


class _Reply:
    """The application's messages for one request; `done` tells whether they can be reused."""

    __slots__ = ("created_at", "done", "messages", "num_bytes")

    def __init__(self, created_at: float) -> None:
        self.created_at = created_at
        self.messages: list[Message] = []
        self.num_bytes = 0
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class ReplyCache:
    """Replies by (peer, path and Idempotency-Key): a repeated request gets the first reply.

    A repeat during the first request waits for it. Replies with status 429 and 5xx are not cached. Bounds: 2 minutes,
    256 KiB per reply, 64 replies per peer, 64 MiB in all; the oldest are dropped first.
    """

    def __init__(self) -> None:
        self._replies: OrderedDict[tuple[str, str], _Reply] = OrderedDict()
        self._by_peer: Counter[str] = Counter()
        self._num_bytes = 0

    async def answer(self, key: tuple[str, str], app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply to a request from the cache, or by the application."""
        while (reply := self._replies.get(key)) is not None:  # if it cannot be reused, one waiter at a time retries
            if await asyncio.shield(reply.done):
                for message in reply.messages:
                    await send(message)
                return
        reply = _Reply(asyncio.get_running_loop().time())
        self._put(key, reply)

        async def keep(message: Message) -> None:
            reply.num_bytes += len(message.get("body", b""))
            if reply.num_bytes <= MAX_REPLY_BYTES:
                reply.messages.append(message)
            await send(message)

        is_cached = False
        try:
            await app(scope, receive, keep)
            status = reply.messages[0].get("status", 500) if reply.messages else 500
            is_cached = status < 500 and status != 429 and reply.num_bytes <= MAX_REPLY_BYTES
        finally:
            reply.done.set_result(is_cached)
            if not is_cached:
                self._drop(key, reply)
            elif self._replies.get(key) is reply:
                self._num_bytes += reply.num_bytes
                while self._num_bytes > MAX_REPLIES_BYTES:
                    self._drop(*next(item for item in self._replies.items() if item[1].done.done()))

    def _put(self, key: tuple[str, str], reply: _Reply) -> None:
        while self._replies:
            oldest_key, oldest = next(iter(self._replies.items()))
            if reply.created_at - oldest.created_at < REPLY_TTL_S or not oldest.done.done():
                break
            self._drop(oldest_key, oldest)
        if self._by_peer[key[0]] >= MAX_REPLIES_PER_PEER:
            mine = next((item for item in self._replies.items() if item[0][0] == key[0] and item[1].done.done()), None)
            if mine is not None:
                self._drop(*mine)
        self._replies[key] = reply
        self._by_peer[key[0]] += 1

    def _drop(self, key: tuple[str, str], reply: _Reply) -> None:
        if self._replies.get(key) is reply:
            del self._replies[key]
            decrease(self._by_peer, key[0])
            if reply.done.done() and reply.done.result():
                self._num_bytes -= reply.num_bytes


def decrease(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if counts[key] <= 0:
        del counts[key]
