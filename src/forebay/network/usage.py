"""What each member and each organisation uses of a server now: connections, requests, answers kept for repeats.

No sockets here and no lock: everything is called in the server's loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.network.limits import Limits, TokenBucket
from forebay.network.peer import Peer

if TYPE_CHECKING:
    from forebay.network.server import PeerProtocol

MAX_BUCKETS = 16_384  # members whose request rate is known; the one seen longest ago is forgotten first
SLOW_S = 2.0
REPLY_TTL_S = 120.0
MAX_REPLY_BYTES = 256 << 10
MAX_REPLIES_BYTES = 64 << 20
MAX_REPLIES_PER_PEER = 64


class ConnectionTable:
    """The open connections of a server, and who makes room for another.

    Before its handshake is finished a connection counts for its address, afterwards for its peer and organisation.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.num_refused = self.num_added = 0
        self._handshakes: dict[asyncio.Task[None], str] = {}  # the oldest first
        self._connections: dict[PeerProtocol, None] = {}
        self._by_peer: Counter[str] = Counter()
        self._by_org: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._handshakes) + len(self._connections)

    def all(self) -> list[PeerProtocol]:
        """Those whose handshake is finished."""
        return list(self._connections)

    def has_room(self, address: str) -> bool:
        """Whether one more may begin its handshake; makes room for it where that is fair.

        A handshake makes room first, the oldest one of the address that has most; then a connection that rests, or
        whose client has read nothing for SLOW_S, of the peer that has most. Who only opens connections takes no place
        from a member.
        """
        by_address = Counter(self._handshakes.values())
        is_crowded = by_address[address] >= self.limits.handshakes_per_address
        if not is_crowded and len(self) < self.limits.connections:
            return True
        busiest = address if is_crowded else max(by_address, key=by_address.__getitem__, default="")
        oldest = next((task for task, host in self._handshakes.items() if host == busiest), None)
        if oldest is not None:
            del self._handshakes[oldest]
            oldest.cancel()
            self.num_refused += 1
            return True
        if self._end_idle(self._largest_peer()):
            return True
        self.num_refused += 1
        return False

    def add_handshake(self, task: asyncio.Task[None], address: str) -> None:
        """A connection begins its handshake in this task."""
        self._handshakes[task] = address
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    def cancel_handshakes(self) -> None:
        """Ends all connections that are in their handshake."""
        for task in list(self._handshakes):
            task.cancel()

    def add(self, connection: PeerProtocol) -> bool:
        """A handshake is finished: whether the peer may have one more connection. Its own idle one makes room."""
        peer, limits = connection.peer, self.limits
        if peer.peer_id and self._by_peer[peer.peer_id] >= limits.connections_per_peer and not self._end_idle(peer):
            self.num_refused += 1
            return False
        if peer.org and self._by_org[peer.org] >= limits.connections_per_organisation:
            self.num_refused += 1
            return False
        self._connections[connection] = None
        self.num_added += 1
        self._by_peer[peer.peer_id] += 1
        self._by_org[peer.org] += 1
        return True

    def remove(self, connection: PeerProtocol) -> None:
        """It has ended. May be repeated."""
        if connection in self._connections:
            del self._connections[connection]
            _decrease(self._by_peer, connection.peer.peer_id)
            _decrease(self._by_org, connection.peer.org)

    def _largest_peer(self) -> Peer | None:
        # Members that have one connection each owe nobody a place.
        peer_id, num = max(self._by_peer.items(), key=lambda item: item[1], default=("", 0))
        return next((c.peer for c in self._connections if c.peer.peer_id == peer_id), None) if num > 1 else None

    def _end_idle(self, peer: Peer | None) -> bool:
        """Ends the connection of a peer that rests for longest, or does not read its answer; whether there was one."""
        if peer is None:
            return False
        own = [c for c in self._connections if c.peer.peer_id == peer.peer_id]
        idle = [c for c in own if not c.num_active]
        slow = [c for c in own if c.num_active and c.flow.write_paused]
        if not idle and not slow:
            return False
        oldest = min(idle, key=lambda c: c.since) if idle else min(slow, key=lambda c: c.sent_at)
        if not idle and oldest.core.loop.time() - oldest.sent_at < SLOW_S:
            return False
        oldest.abort()
        self.remove(oldest)
        return True


class RequestTable:
    """Requests being answered, and the rate of requests, by peer and by organisation."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.num_active = 0
        self._by_peer: Counter[str] = Counter()
        self._by_org: Counter[str] = Counter()
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def begin(self, peer: Peer, now: float) -> tuple[str, str, float] | None:
        """Count a request that comes in; if it is one too many (code, reason, seconds to wait), not counted.

        Clients without a certificate are one.
        """
        own = self.limits
        bounds = [("peer", peer.peer_id, self._by_peer, own.requests_per_peer, own.requests_per_s)]
        if peer.org:  # members of the root itself share no limits
            most, rate = own.requests_per_organisation, own.organisation_requests_per_s
            bounds.append(("organisation", peer.org, self._by_org, most, rate))
        for kind, key, counts, most, rate in bounds:
            if counts[key] >= most:
                return "busy", f"{kind} {key}: expected at most {most} requests at once. Wait for their answers.", 1.0
            if (wait_s := self._bucket(f"{kind} {key}", rate).try_take(1.0, now)) > 0:
                return "rate", f"{kind} {key}: expected at most {rate:g} requests a second. Ask less often.", wait_s
        self.num_active += 1
        self._by_peer[peer.peer_id] += 1
        self._by_org[peer.org] += 1
        return None

    def finish(self, peer: Peer) -> None:
        """A request that `begin` counted is answered."""
        self.num_active -= 1
        _decrease(self._by_peer, peer.peer_id)
        _decrease(self._by_org, peer.org)

    def wait_for_bytes(self, peer: Peer, num_bytes: int, now: float) -> float:
        """Count bytes that go to a peer; how long to wait before they may, seconds."""
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
    """An answer that is kept: the messages of the application, once it is whole."""

    __slots__ = ("at", "done", "messages", "num_bytes")

    def __init__(self, at: float) -> None:
        self.at = at
        self.messages: list[Message] = []
        self.num_bytes = 0
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class ReplyCache:
    """First answers by (peer, path and Idempotency-Key): a repeat of a request gets the first answer again.

    A repeat that comes while the first is being answered waits for it. Answers that say "again later" (429, 5xx) are
    not kept. Bounded: 2 minutes, 256 KiB an answer, 64 answers a peer, 64 MiB in all, the oldest go first.
    """

    def __init__(self) -> None:
        self._replies: OrderedDict[tuple[str, str], _Reply] = OrderedDict()
        self._by_peer: Counter[str] = Counter()
        self._num_bytes = 0

    async def answer(self, key: tuple[str, str], app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the application, or by what it answered to this key before."""
        while (reply := self._replies.get(key)) is not None:  # of those that wait, one at a time asks anew
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

        is_kept = False
        try:
            await app(scope, receive, keep)
            status = reply.messages[0].get("status", 500) if reply.messages else 500
            is_kept = status < 500 and status != 429 and reply.num_bytes <= MAX_REPLY_BYTES
        finally:
            reply.done.set_result(is_kept)
            if not is_kept:
                self._drop(key, reply)
            elif self._replies.get(key) is reply:
                self._num_bytes += reply.num_bytes
                while self._num_bytes > MAX_REPLIES_BYTES:
                    self._drop(*next(item for item in self._replies.items() if item[1].done.done()))

    def _put(self, key: tuple[str, str], reply: _Reply) -> None:
        while self._replies:
            oldest, held = next(iter(self._replies.items()))
            if reply.at - held.at < REPLY_TTL_S or not held.done.done():
                break
            self._drop(oldest, held)
        if self._by_peer[key[0]] >= MAX_REPLIES_PER_PEER:
            mine = next((item for item in self._replies.items() if item[0][0] == key[0] and item[1].done.done()), None)
            if mine is not None:
                self._drop(*mine)
        self._replies[key] = reply
        self._by_peer[key[0]] += 1

    def _drop(self, key: tuple[str, str], reply: _Reply) -> None:
        if self._replies.get(key) is reply:
            del self._replies[key]
            _decrease(self._by_peer, key[0])
            if reply.done.done() and reply.done.result():
                self._num_bytes -= reply.num_bytes


def _decrease(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if counts[key] <= 0:
        del counts[key]
