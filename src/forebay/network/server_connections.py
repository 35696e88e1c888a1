"""Connections and requests of a server: uvicorn's protocol behind limits by member and organisation.

The order of a request: authenticate (certificate of the network, valid and not revoked, checked for each request),
bound (rate and requests in flight, by certificate and organisation), authorize (the route's role), bound the body,
parse. Nothing of a body is read before its sender is authorized. A client without a certificate counts for its IP
address, and its request once the body is here.

The bytes that the parser was given and has not handed on are bounded in each of its states.

Everything runs in the server's loop; there is no lock.
"""

import asyncio
import ipaddress
import logging
import math
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from forebay.errors import NetworkError
from forebay.network import log
from forebay.network.app import JSON, ApiError, Metric, counter, gauge
from forebay.network.client import CRLS_HEADER
from forebay.network.crl_exchange import CRLS
from forebay.network.limits import ReplyCache, RequestTable, ServerLimits, decrease
from forebay.network.peer import Peer, network_prefix
from forebay.network.pki.identity import Identity
from forebay.recent import RecentDict
from forebay.storage.hosts import is_loopback
from forebay.threads import failures as thread_failures

MIN_PIECE_BYTES = 4096
PIECE_BYTES = 256 << 10
PIECE_S = 0.1  # maximum wait for a piece under a limit of the upload
MAX_PIPELINED = 16
MAX_HEAD_BYTES = 32 << 10
SLOW_S = 2.0
MAX_DELAY_S = 5.0
MAX_MEMBER_HOSTS = 4096
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".localdomain", ".home.arpa", ".lan", ".svc")
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings of malformed requests could fill a disk


class ConnectionTable:
    """Open connections of a server, and the choice of those that end to make room for others.

    Before the end of its handshake a connection counts for its address, afterwards for `Peer.party` and `Peer.group`.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.num_refused = 0
        self._handshakes: dict[asyncio.Task[None], tuple[str, float]] = {}  # address and start; the oldest first
        self._connections: dict[PeerProtocol, None] = {}
        self._by_peer = Counter[str]()
        self._by_org = Counter[str]()
        self._member_hosts = RecentDict[str, None](MAX_MEMBER_HOSTS)  # addresses of members that completed a handshake

    def __len__(self) -> int:
        return len(self._handshakes) + len(self._connections)

    def all(self) -> "list[PeerProtocol]":
        """Connections after their handshake."""
        return list(self._connections)

    def has_room(self, address: str) -> bool:
        """Whether a handshake may start; ends another connection for it where that is fair.

        First ends the oldest handshake of the address that has most, those of members last; then a connection of the
        peer that has most, or of the group, which waits for its client. Strangers thus take no place from members.
        """
        address = network_prefix(address, 32, 64)
        by_address = Counter(host for host, _ in self._handshakes.values())
        is_crowded = by_address[address] >= self.limits.handshakes_per_address
        if not is_crowded and len(self) < self.limits.connections:
            return True
        others = [host for host in by_address if host not in self._member_hosts] or by_address
        busiest = address if is_crowded else max(others, key=by_address.__getitem__, default="")
        oldest = next((task for task, (host, _) in self._handshakes.items() if host == busiest), None)
        if oldest is not None:
            self._refuse(oldest)
            return True
        for attribute, counts in (("party", self._by_peer), ("group", self._by_org)):
            num, name = max(((num, name) for name, num in counts.items() if name), default=(0, ""))
            # Members with one connection each keep it.
            if num > 1 and self._end_idle(c for c in self._connections if getattr(c.peer, attribute) == name):
                return True
        self.num_refused += 1
        return False

    def add_handshake(self, task: asyncio.Task[None], address: str, now: float) -> None:
        """Count a connection whose handshake runs in a task."""
        self._handshakes[task] = network_prefix(address, 32, 64), now
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    def cancel_handshakes(self, before: float = math.inf) -> None:
        """End all connections in a handshake that started before a time."""
        for task in [task for task, (_, started) in self._handshakes.items() if started < before]:
            self._refuse(task)

    def _refuse(self, handshake: asyncio.Task[None]) -> None:
        del self._handshakes[handshake]
        handshake.cancel()
        self.num_refused += 1

    def add(self, connection: "PeerProtocol") -> bool:
        """Count a connection after its handshake; False if its peer or group has too many, none of them idle."""
        party = connection.peer.party
        group = connection.peer.group
        limits = self.limits
        own = (c for c in self._connections if c.peer.party == party)
        is_over = self._by_peer[party] >= limits.connections_per_peer
        is_full = bool(group) and self._by_org[group] >= limits.connections_per_organisation
        if (is_over and not self._end_idle(own)) or (is_full and not self._end_idle(self._busiest(group))):
            self.num_refused += 1
            return False
        self._connections[connection] = None
        if connection.peer.peer_id:
            self._member_hosts[network_prefix(connection.address, 32, 64)] = None
        self._by_peer[party] += 1
        self._by_org[group] += 1
        return True

    def _busiest(self, group: str) -> "list[PeerProtocol]":
        """Return the connections of the peer that has most of a group, if it has several."""
        grouped = [c for c in self._connections if c.peer.group == group]
        ((party, num),) = Counter(c.peer.party for c in grouped).most_common(1)
        return [c for c in grouped if c.peer.party == party and num > 1]

    def remove(self, connection: "PeerProtocol") -> None:
        """Remove an ended connection. May be repeated."""
        if connection in self._connections:
            del self._connections[connection]
            decrease(self._by_peer, connection.peer.party)
            decrease(self._by_org, connection.peer.group)

    def _end_idle(self, connections: "Iterable[PeerProtocol]") -> bool:
        """End the connection that waits longest for its client; whether there was one.

        It is idle, has sent a part of a request, or has read nothing of its response for SLOW_S.
        """
        idle = list[PeerProtocol]()
        slow = list[PeerProtocol]()
        for connection in connections:
            if not connection.num_active or connection.phase == "body":
                idle.append(connection)
            elif connection.flow.write_paused and connection.core.time() - connection.sent_at >= SLOW_S:
                slow.append(connection)
        oldest = min(idle, key=lambda c: c.since, default=None) or min(slow, key=lambda c: c.sent_at, default=None)
        if oldest is None:
            return False
        oldest.abort()
        self.remove(oldest)
        return True


class PeerProtocol(HttpToolsProtocol):
    """One connection, created after the TLS handshake."""

    def __init__(self, core: "ServerCore", address: str) -> None:
        super().__init__(core.config, core.state, {}, core.loop)
        self.core = core
        self.address = address
        self.peer = Peer("", b"", address)
        self.phase = "idle"  # waits for: "idle" (a request), "head", "body"
        self.since = self.sent_at = core.time()  # start of the phase; when the client last took a piece
        self.head_bytes = 0
        self.parser_bytes = 0  # that the parser was given and has not handed on
        self.num_active = 0  # requests
        self.lost: asyncio.Future[None] = core.loop.create_future()  # done when the connection has ended

    @property
    def piece_bytes(self) -> int:
        """Maximum bytes sent in one turn: fewer where a low limit of the upload would make waits long."""
        return max(MIN_PIECE_BYTES, int(min(PIECE_BYTES, self.core.limits.upload_bytes_per_s * PIECE_S)))

    async def wait_for_turn(self, num_bytes: int) -> None:
        """Wait until the limits of the upload, the peer and its organisation allow so many bytes."""
        core = self.core
        if (wait_s := core.requests.wait_for_bytes(self.peer, num_bytes, core.loop.time())) > 0:
            await asyncio.sleep(wait_s)

    async def sent(self, num_bytes: int) -> None:
        """Wait until a piece has left its buffer, and count it."""
        await self.flow.drain()
        self.core.num_bytes += num_bytes
        if self.core.on_bytes is not None:
            self.core.on_bytes(self.peer, num_bytes)

    def record_refusal(self, route: str, error: ApiError) -> None:
        """Write a refusal of the peer to the audit log."""
        if self.core.identity is not None:
            self.core.identity.record_event(
                "refused", peer=self.peer.peer_id, route=route, code=error.code, reason=str(error)
            )

    def abort(self) -> None:
        """End the connection now."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.core.admit(self):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self.lost.done():
            self.lost.set_result(None)
        self.core.connections.remove(self)

    def data_received(self, data: bytes) -> None:
        started = self.core.loop.time()
        self.parser_bytes += len(data)
        super().data_received(data)
        if self.parser_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"expected at most {MAX_HEAD_BYTES} bytes of a head or between pieces of a body")
        self.since -= self.core.loop.time() - started  # the time of a client that keeps the loop busy goes on

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"].update(peer=self.peer, connection=self)
        self.phase, self.since = "head", self.core.time()
        self.head_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")  # answered with 400; the connection ends

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase == "body":
            raise ValueError("trailers are not accepted")  # as above
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.phase, self.since = "body", self.core.time()
        self.parser_bytes = max(0, self.parser_bytes - self.head_bytes)
        super().on_headers_complete()
        self.scope["state"]["cycle"] = self.cycle
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # the parser reads nothing after it

    def on_body(self, body: bytes) -> None:
        self.parser_bytes = max(0, self.parser_bytes - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.phase, self.since = "idle", self.core.time()
        self.parser_bytes = 0
        super().on_message_complete()

    def _count_head(self, num_bytes: int) -> None:
        self.head_bytes += num_bytes
        if self.head_bytes > MAX_HEAD_BYTES:
            raise ValueError("head too large")  # as above

    def end_if_unread(self) -> None:
        """End the connection after the next response if the rest of a body would stay unread."""
        if self.phase == "body":
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # `is_late` checks idle connections

    def forget_request(self) -> None:
        """Release uvicorn's objects of the last request: 8 of the 33 KiB of an idle connection."""
        if self.cycle is not None and self.cycle.response_complete and not self.pipeline:
            self.cycle = None  # type: ignore[assignment]
            self.scope = self.headers = None  # type: ignore[assignment]

    def is_late(self, now: float, limits: ServerLimits) -> bool:
        """Whether the client is slower than the limits allow."""
        if self.num_active and self.phase != "body":
            return self.flow.write_paused and now - self.sent_at > limits.send_s
        if self.phase == "idle":
            return now - self.since > limits.idle_s
        return now - self.since > limits.head_s + (limits.body_s if self.phase == "body" else 0.0)


@dataclass(eq=False)
class ServerCore:
    """State shared by a server's connections, and its ASGI entry point; runs in the server's loop."""

    app: ASGIApp
    identity: Identity | None
    limits: ServerLimits
    on_bytes: Callable[[Peer, int], None] | None
    host: str

    def __post_init__(self) -> None:
        self.is_draining = False
        self.connections = ConnectionTable(self.limits)
        self.num_bytes = 0
        self.stalled_s = 0.0
        self.answers = Counter[int]()
        self.limited = Counter[str]()
        self.task_failures = Counter[str]()
        self.config = uvicorn.Config(
            self, http=PeerProtocol, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False,
            server_header=False, date_header=False, interface="asgi3",
            timeout_keep_alive=max(1, int(self.limits.idle_s)),
        )  # fmt: skip
        self.config.load()

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start in a loop; ends connections of a previous loop that failed."""
        self.loop = loop
        for connection in self.connections.all():
            connection.transport.get_extra_info("socket").close()
        self.connections = ConnectionTable(self.limits)
        self.requests = RequestTable(self.limits)
        self.replies = ReplyCache()
        self.state = ServerState()
        self._name_crls()

    def _name_crls(self) -> None:
        """Say in each response from now on which CRLs this node has."""
        if self.identity is not None:
            self.state.default_headers[:] = [
                (CRLS_HEADER.lower().encode(), self.identity.revocations.digest().encode())
            ]

    def time(self) -> float:
        """The clock of clients' time limits, in seconds: what the loop itself was late by does not count."""
        return self.loop.time() - self.stalled_s

    def admit(self, connection: PeerProtocol) -> bool:
        """Authenticate a connection after its TLS handshake; whether it may stay."""
        if self.identity is not None:
            tls = connection.transport.get_extra_info("ssl_object")
            try:
                connection.peer = self.identity.peer(tls.getpeercert(binary_form=True))
            except NetworkError as error:
                log.warning("server: refused a connection from %s: %s", connection.address, error)
                self.connections.num_refused += 1
                return False
            log.debug("connected: peer_id=%s from=%s", connection.peer.peer_id, connection.address)
        return not self.is_draining and self.connections.add(connection)

    def refusal(self, peer: Peer) -> tuple[str, str] | None:
        """Code and reason why a connected peer is refused; None if it may go on."""
        return self.identity.refusal(peer) if self.identity is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request; answer it from the reply cache or by the application."""
        connection: PeerProtocol = scope["state"]["connection"]
        connection.num_active += 1
        try:
            if not connection.peer.peer_id and _declared_bytes(scope) <= self.limits.body_bytes:
                await _wait_for_body(scope["state"]["cycle"])
            refused = self._check(scope, connection)
            if refused is not None:
                self.answers[refused.status] += 1
                self.limited[refused.code] += 1
                connection.end_if_unread()
                await self._delay(connection)
                await refused.response()(scope, receive, send)
                return
            try:
                await self._answer(scope, receive, send, connection)
            finally:
                self.requests.finish(connection.peer)
        except asyncio.CancelledError:  # the server closes; uvicorn would log an error of an open connection
            connection.abort()
            await connection.lost
        finally:
            connection.num_active -= 1
            connection.since = self.time()
            connection.forget_request()

    def _check(self, scope: Scope, connection: PeerProtocol) -> ApiError | None:
        peer = connection.peer
        if self.identity is None and (refused := _refuse_page(scope, self.host)) is not None:
            return refused
        # CRLs are signed and for all: a revoked member learns of it from the list itself.
        is_public = scope["method"] == "GET" and scope["path"].startswith(CRLS)
        if not is_public and (refusal := self.refusal(peer)) is not None:
            error = ApiError(403, *refusal)
            connection.record_refusal(f"{scope['method']} {scope['path']}", error)
            return error
        if self.is_draining:
            return ApiError(503, "stopping", "this process is stopping; retry after its restart", 1.0)
        limited = self.requests.begin(peer, scope["method"] != "GET", self.loop.time())
        return None if limited is None else ApiError(429, *limited)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, connection: PeerProtocol) -> None:
        started = False
        max_body = self.limits.body_bytes
        num_body = 0

        async def bounded_receive() -> Message:
            nonlocal num_body
            if _declared_bytes(scope) <= max_body:
                message = await receive()
                num_piece = len(message.get("body", b""))
                bucket = self.requests.bucket(f"bodies {connection.peer.party}", self.limits.body_bytes_per_s)
                bucket.take(num_piece, self.loop.time())
                num_body += num_piece
                if num_body <= max_body:
                    return message
            raise HTTPException(413, f"expected a body of at most {max_body} bytes")

        async def counted_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.answers[message["status"]] += 1
                connection.end_if_unread()
                if 400 <= message["status"] < 500:
                    await self._delay(connection)
            await send(message)
            connection.sent_at = self.time()

        key = _header(scope, b"idempotency-key") if scope["method"] == "POST" else None
        try:
            if key is None or len(key) > 64:
                await self.app(scope, bounded_receive, counted_send)
            else:
                entry = connection.peer.party, f"{scope['path']} {key}"
                await self.replies.answer(entry, self.app, scope, bounded_receive, counted_send)
        except Exception:  # noqa: BLE001 - logged with its traceback
            log.exception("server: %s %s failed", scope["method"], scope["path"][:300])
            if not started:
                await ApiError(500, "internal", "the request failed; see the node's log").response()(
                    scope, receive, counted_send
                )
            else:
                connection.abort()

    async def _delay(self, connection: PeerProtocol) -> None:
        """Wait where a peer is refused too often: what is answered with an error costs its sender time."""
        bucket = self.requests.bucket(f"refusals {connection.peer.party}", self.limits.refusals_per_s)
        if (wait_s := bucket.take(1.0, self.loop.time())) > 0:
            await asyncio.sleep(min(MAX_DELAY_S, wait_s))

    def sweep(self) -> None:
        """End connections that are late, expired or revoked."""
        self._name_crls()
        now = self.time()
        refusals = dict[str, tuple[str, str] | None]()
        self.connections.cancel_handshakes(now - self.limits.handshake_s)
        for connection in self.connections.all():
            peer = connection.peer
            if peer.peer_id not in refusals:
                refusals[peer.peer_id] = self.refusal(peer)
            if (refusal := refusals.get(peer.peer_id)) is not None:
                log.warning("connection cut: %s", refusal[1])
                connection.abort()
            elif connection.is_late(now, self.limits):
                log.debug("connection cut: address=%s too slow in phase=%s", connection.address, connection.phase)
                connection.abort()
        if num := sum(refusal is not None for refusal in refusals.values()):
            assert self.identity is not None
            self.identity.record_event("cut", connections=num, reason="revoked")

    def metrics(self) -> list[Metric]:
        """Metrics of the server."""
        answers = {str(status): num for status, num in self.answers.items()}
        return [
            gauge("forebay_connections", "Open connections.", len(self.connections)),
            gauge("forebay_requests_in_progress", "Requests being answered.", self.requests.num_active),
            counter("forebay_requests_total", "Requests answered, by HTTP status.", answers, "status"),
            counter(
                "forebay_limited_requests_total", "Requests refused before a handler, by code.", self.limited, "code"
            ),
            counter(
                "forebay_refused_connections_total", "Connections without a certificate, or over a limit.",
                self.connections.num_refused,
            ),
            counter("forebay_sent_bytes_total", "Bytes of slices and files sent.", self.num_bytes),
            counter(
                "forebay_task_failures_total", "Failures of background tasks; they restart.", self.task_failures, "task"
            ),
            counter("forebay_thread_failures_total", "Failures of background threads.", thread_failures(), "thread"),
        ]  # fmt: skip


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _declared_bytes(scope: Scope) -> int:
    digits = _header(scope, b"content-length") or "0"  # checked by the parser
    return int(digits) if len(digits) <= 18 else 1 << 63


async def _wait_for_body(cycle: RequestResponseCycle) -> None:
    """Wait until a request's body is here or fills its buffer, or its client is gone."""
    if cycle.waiting_for_100_continue:
        cycle.waiting_for_100_continue = False
        cycle.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    while cycle.more_body and len(cycle.body) <= HIGH_WATER_LIMIT and not cycle.disconnected:
        cycle.message_event.clear()
        await cycle.message_event.wait()


def is_own_host(host: str, listens_at: str) -> bool:
    """Whether a Host header names this machine as only its own network does; no name of the public DNS is taken.

    Taken are IP addresses, names without a dot and `listens_at`; beyond loopback also names of private networks and
    this machine's own.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        if "." not in name or name == listens_at:
            return True
        return not is_loopback(listens_at) and (name.endswith(_PRIVATE_SUFFIXES) or name == _own_name())


@lru_cache
def _own_name() -> str:
    return socket.getfqdn().lower()


def _refuse_page(scope: Scope, listens_at: str) -> ApiError | None:
    """Refuse requests that a web page can make a browser send; None for a program's request."""
    host = _header(scope, b"host") or ""
    if scope["scheme"] == "http" and host and not is_own_host(host, listens_at):
        text = f"request: expected a Host that names this machine, got {host[:80]!r}. Use its IP address."
        return ApiError(403, "unknown_host", text)
    kind = (_header(scope, b"content-type") or JSON).partition(";")[0].strip().lower()
    if _header(scope, b"origin") is None and (scope["method"] == "GET" or kind == JSON):
        return None
    text = f"request: expected Content-Type {JSON} and no Origin, got {kind[:80]!r}. Ask with a program."
    return ApiError(403, "cross_site", text)
