"""Limits of a server per member and organisation: settings, token buckets, current use, cached replies; uploads.

Shares of an upload are per connection; `connections_per_peer` and `bytes_per_s` bound a peer.
"""

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.errors import UsageError
from forebay.network.peer import Peer
from forebay.recent import RecentDict
from forebay.units import parse_size

BURST_S = 0.05  # burst of the upload to all, in seconds of its rate
MAX_BUCKETS = 16_384  # members with a request rate in memory; the least recent is dropped first
REPLY_TTL_S = 120.0
MAX_REPLY_BYTES = 256 << 10
MAX_REPLIES_BYTES = 64 << 20
MAX_REPLIES_PER_PEER = 64


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one server, by `Peer.party` and `Peer.group`; the root's own members have no group.

    Without certificates a "peer" is an IP address (IPv6: a /64), an "organisation" a /24 (IPv6: a /48).
    """

    connections: int = 256  # concurrent, handshakes included
    connections_per_peer: int = 64
    connections_per_organisation: int = 192
    handshakes_per_address: int = 128  # unfinished, per IP address or /64
    requests_per_peer: int = 64  # concurrent, long polls included
    requests_per_organisation: int = 192
    requests_per_s: float = 2000.0  # the burst is twice as many
    organisation_requests_per_s: float = 8000.0
    bytes_per_s: float = 4e9  # of slices and files; sending waits beyond it
    organisation_bytes_per_s: float = 16e9
    upload_bytes_per_s: float = math.inf  # to all together
    refusals_per_s: float = 100.0  # per peer; further ones are answered later, the burst is twice as many
    body_bytes: int = 1 << 20  # per request
    body_bytes_per_s: float = 4 << 20  # per peer, as reading them is work; the burst is twice as many
    idle_s: float = 60.0  # of a connection between requests
    handshake_s: float = 5.0  # for the client to complete it; likewise for a request's head and body
    head_s: float = 10.0
    body_s: float = 60.0
    send_s: float = 60.0  # for the client to read one piece of a response (1 MiB at most)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"limits: expected {name} > 0, got {value}")


def parse_limits(limits: ServerLimits, items: Iterable[str]) -> ServerLimits:
    """Replace limits by those of `NAME=NUMBER` items. Raises UsageError."""
    changes: dict[str, float] = {}
    for item in items:
        name, _, text = item.partition("=")
        if name not in vars(limits):
            raise UsageError(f"--limit: expected NAME=NUMBER of {', '.join(vars(limits))}, got {item!r}")
        try:
            changes[name] = type(vars(limits)[name])(
                parse_size(text) if name.endswith(("bytes", "bytes_per_s")) else float(text)
            )
        except ValueError as error:
            raise UsageError(f"--limit {name}: expected a number, got {text!r}") from error
    return replace(limits, **changes)  # type: ignore[arg-type]


class TokenBucket:
    """`rate` tokens a second, at most `burst` saved. Pure: the caller passes `now` (s). Not thread-safe."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate = rate
        self.burst = burst
        self._level = self.burst
        self._filled_at = -math.inf

    def take(self, amount: float, now: float) -> float:
        """Take tokens, into debt if needed; return the seconds to wait before using them."""
        self._fill(now)
        self._level -= amount
        return max(0.0, -self._level / self.rate)

    def try_take(self, amount: float, now: float) -> float:
        """Take tokens if available and return 0, otherwise the seconds until they could be taken."""
        self._fill(now)
        missing = min(amount, self.burst) - self._level
        if missing > 1e-9 * amount:
            return missing / self.rate
        self._level -= amount
        return 0.0

    def _fill(self, now: float) -> None:
        if now > self._filled_at:
            self._level = min(self.burst, self._level + (now - self._filled_at) * self.rate)
            self._filled_at = now


class RequestTable:
    """Requests in progress, and request rates, by peer and organisation. For one event loop."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        rate = limits.upload_bytes_per_s
        self._upload = TokenBucket(rate, rate * BURST_S) if rate < math.inf else None
        self.num_active = 0
        self._active = Counter[str]()  # by peer and by organisation
        self._buckets = RecentDict[str, TokenBucket](MAX_BUCKETS)

    def begin(self, peer: Peer, has_body: bool, now: float) -> tuple[str, str, float] | None:
        """Count a request, or return (code, reason, seconds) over a limit."""
        limits = self.limits
        keys = _keys(peer)
        bounds = (
            (limits.requests_per_peer, limits.requests_per_s),
            (limits.requests_per_organisation, limits.organisation_requests_per_s),
        )
        for key, (max_num, rate) in zip(keys, bounds, strict=False):
            if self._active[key] >= max_num:
                return "busy", f"{key}: expected at most {max_num} requests at once. Wait for their answers.", 1.0
            if (wait_s := self.bucket(key, rate).try_take(1.0, now)) > 0:
                return "rate", f"{key}: expected at most {rate:g} requests a second. Ask less often.", wait_s
        rate = limits.body_bytes_per_s
        if has_body and (wait_s := self.bucket(f"bodies {peer.party}", rate).try_take(1.0, now)) > 0:
            return "rate", f"{keys[0]}: expected at most {rate:g} bytes of bodies a second. Send less.", wait_s
        self.num_active += 1
        self._active.update(keys)
        return None

    def finish(self, peer: Peer) -> None:
        """End a request that `begin` counted."""
        self.num_active -= 1
        for key in _keys(peer):
            decrease(self._active, key)

    def wait_for_bytes(self, peer: Peer, num_bytes: int, now: float) -> float:
        """Count bytes to send to a peer; return the seconds to wait before sending them."""
        buckets = [self.bucket(f"bytes {peer.party}", self.limits.bytes_per_s)]
        if peer.group:
            buckets.append(self.bucket(f"bytes of {peer.group}", self.limits.organisation_bytes_per_s))
        if self._upload is not None:
            buckets.append(self._upload)
        return max(bucket.take(num_bytes, now) for bucket in buckets)

    def bucket(self, key: str, rate: float) -> TokenBucket:
        """Return the bucket of this key."""
        self._buckets[key] = bucket = self._buckets.get(key) or TokenBucket(rate, 2 * rate)
        return bucket


def _keys(peer: Peer) -> list[str]:
    """The peer and its organisation; members of the root itself share no limits."""
    return [f"peer {peer.party}"] + ([f"organisation {peer.group}"] if peer.group else [])


@dataclass(slots=True)
class _Reply:
    created_at: float
    done: asyncio.Future[bool]  # whether the messages can be reused
    messages: list[Message] = field(default_factory=list)
    num_bytes: int = 0


class ReplyCache:
    """Replies by (peer, path and Idempotency-Key): a repeated request gets the first reply.

    A repeat during the first request waits for it. Replies with status 429 and 5xx are not cached. Bounds: 2 minutes,
    256 KiB per reply, 64 replies per peer, 64 MiB in all; the oldest are dropped first.
    """

    def __init__(self) -> None:
        self._replies = OrderedDict[tuple[str, str], _Reply]()
        self._by_peer = Counter[str]()
        self._num_bytes = 0

    async def answer(self, key: tuple[str, str], app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply to a request from the cache, or by the application."""
        while (reply := self._replies.get(key)) is not None:  # if it cannot be reused, one waiter at a time retries
            if await asyncio.shield(reply.done):
                for message in reply.messages:
                    await send(message)
                return
        loop = asyncio.get_running_loop()
        reply = _Reply(loop.time(), loop.create_future())
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
