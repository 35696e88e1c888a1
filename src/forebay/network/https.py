"""HTTP/1.1 over mutual TLS 1.3: one server for control messages and for slices.

Without an identity it believes whoever asks, over plain HTTP or over TLS that asks for no certificate: for a door on
loopback, or one that its owner opens knowingly. It refuses what a browser sends for a page of another site.

One thread waits for all connections and reads their requests; a thread answers one from its last byte on. So a
connection that rests, drips or never shakes hands costs memory (some 30 KiB with TLS) and no thread; one that is
answered costs a thread, and a buffer while a file goes out, however slowly it is read.

What the choice costs: reading is one thread's work, some 20,000 small requests a second at most.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.errors import NetworkError
from forebay.network.exchange import (
    BadRequestError,
    Pending,
    Request,
    Response,
    error_response,
    refuse_page,
)
from forebay.network.heads import Head, RefusedError
from forebay.network.limits import Bounds, Throttle
from forebay.network.metrics import Metric, counter, gauge
from forebay.network.parking import READ, WRITE, Connection, Lot, Pool, listen
from forebay.network.peer import Peer
from forebay.network.roll import Roll
from forebay.network.sending import Sender

if TYPE_CHECKING:
    from forebay.network.identity import Identity  # what proves a peer is needed with one only

BURST = 32  # requests that one thread answers together
SHAKERS = 4  # handshakes computed at once
CLOSE_S = 10.0
ENDING_S = 2.0  # how long a client that was refused may go on sending
PIECE_BYTES = 64 << 10
SHORT_BYTES = 8 << 10  # an answer that goes into a socket with room at once
Asked = tuple[Head, bytes] | RefusedError
_Guard = Callable[[Request, Callable[[], Response | Pending]], Response | Pending]
log = logging.getLogger("forebay.network")


class Server:
    """Answers peers of one network; with identity None whoever asks.

    Owns its threads and sockets from `start` to `close`; both may be called from any thread, `close` more than
    once. A revoked peer gets 403 and is cut off; a stranger does not get past the handshake, and makes room for
    others when the house is full.

    Args:
        max_connections: At once, those in their handshake included; further ones are closed.
        on_bytes: Told of each piece of a body that was sent.
        bounds: What one client may hold. Of one peer, unless said: a quarter of `max_connections`, at least 8.
        throttle: Of the upload; may be shared with other servers.
        tls: Without an identity: speak TLS by this, and ask for no certificate.
    """

    def __init__(
        self,
        identity: Identity | None,
        host: str,
        port: int,
        handle: Callable[[Request], Response | Pending],
        max_connections: int = 256,
        on_bytes: Callable[[Peer, int], None] | None = None,
        *,
        bounds: Bounds | None = None,
        throttle: Throttle | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.identity = identity
        self.host = host
        self.port = port
        self.handle = handle
        self.bounds = bounds or Bounds()
        self.throttle = throttle or Throttle()
        self.max_connections = max_connections
        self.draining = False
        self._roll = Roll(max_connections, self.bounds, has_peers=identity is not None)
        self._changed = threading.Condition()
        self._answers: Counter[int] = Counter()
        self._closing = threading.Event()
        self._sender = Sender(self.throttle, self._closing, self.bounds.send_s, on_bytes)
        self._shakers = Pool(SHAKERS, "https-handshake")
        self._answerers = Pool(self.bounds.busy or max_connections, "https-answer")
        self._context = tls
        self._lot: Lot | None = None
        self._burst: list[tuple[Connection, Asked]] = []
        self._revoked = identity.revocations.stamp() if identity is not None else None

    @property
    def address(self) -> str:
        """`host:port` where it listens; IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def num_connections(self) -> int:
        """Connections open now, those in their handshake included."""
        return len(self._roll)

    @property
    def refused_connections(self) -> int:
        """Connections that were closed for want of a certificate or of room."""
        return self._roll.num_refused

    def metrics(self) -> list[Metric]:
        """Its figures for `GET /metrics`."""
        with self._changed:
            answers = {str(status): float(num) for status, num in self._answers.items()}
        return [
            gauge("forebay_connections", "Connections open now.", self.num_connections),
            gauge("forebay_requests_in_progress", "Requests being answered.", self._roll.num_busy),
            counter("forebay_requests_total", "Requests answered, by status.", answers, "status"),
            counter("forebay_refused_connections_total", "Without certificate or room.", self.refused_connections),
            counter("forebay_sent_bytes_total", "Bytes of bodies sent.", self._sender.num_bytes),
        ]

    def start(self) -> None:
        """Listen and answer in background threads.

        Raises:
            NetworkError: If the port is taken or the host is none of this machine's.
        """
        if self.identity is not None:
            self._context = self.identity.server_context()
        listener = listen(self.host, self.port)
        self.port = listener.getsockname()[1]
        bounds = self.bounds
        shortest = min(bounds.idle_s, bounds.handshake_s, bounds.head_s)
        self._lot = Lot(
            self._ready, self._end, self._check, min(1.0, shortest / 4), self._flush, bounds.gather_s or 0.0
        )
        self._lot.start(listener, self._arrived)
        log.info("listening: address=%s tls=%s", self.address, "yes" if self._context is not None else "no")

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Take no more requests; let those being answered finish. Returns whether all did in the time given."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self.draining = True
        if self._lot is not None:
            self._lot.deafen()
        with self._changed:
            for connection in self._roll.all():
                if not connection.busy:
                    connection.shut()
            return self._changed.wait_for(lambda: self._roll.num_busy == 0, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Stop at once: cut every connection and wait until its thread has let go of it."""
        with self._changed:
            self.draining = True
        self._closing.set()
        if self._lot is None:
            return
        self._lot.deafen()
        for connection in self._roll.all():
            connection.shut()
        self._lot.stop()
        with self._changed:
            self._changed.wait_for(lambda: len(self._roll) == 0, CLOSE_S)

    def cut(self, is_refused: Callable[[Peer], bool]) -> int:
        """End the connections of these peers now, whatever they are doing. Returns how many."""
        found = [c for c in self._roll.all() if c.peer is not None and is_refused(c.peer)]
        for connection in found:
            connection.shut()
        return len(found)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # The lot's thread: none of these blocks.

    def _arrived(self, sock: socket.socket, address: str) -> None:
        connection = Connection(sock, address, time.monotonic() + self.bounds.handshake_s)
        with contextlib.suppress(OSError):  # gone again
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        admitted, evicted = self._roll.admit(connection)
        if not admitted or self.draining:
            self._roll.remove(connection)
            sock.close()
            return
        assert self._lot is not None
        if evicted is not None:
            self._lot.evict(evicted)
        if self._context is None:
            connection.peer = Peer("", b"", address)
            self._roll.prove(connection)
            connection.deadline = time.monotonic() + self.bounds.idle_s
        self._lot.park(connection)

    def _ready(self, connection: Connection) -> Callable[[], None] | None:
        if connection.peer is None:
            connection.ready_at = time.monotonic()
            return functools.partial(self._shakers.run, functools.partial(self._shake, connection))
        try:
            asked = read_request(connection, self.bounds)
        except OSError as error:
            log.debug("server %s: connection ended: %s", self.address, error)
            return functools.partial(self._end, connection)
        if asked is None:
            return None
        if self.bounds.gather_s is not None:
            return functools.partial(self._burst.append, (connection, asked))
        return functools.partial(self._answerers.run, functools.partial(self._serve, connection, asked))

    def _flush(self) -> bool:
        """Hands over what was gathered."""
        burst = self._burst[:]
        self._burst.clear()
        for at in range(0, len(burst), BURST):
            self._answerers.run(functools.partial(self._serve_burst, burst[at : at + BURST]))
        return bool(burst)

    def _check(self) -> None:
        """Cuts off whom a revocation names that has come since."""
        if self.identity is not None and (stamp := self.identity.revocations.stamp()) != self._revoked:
            self._revoked = stamp
            if num := self.cut(self.identity.is_revoked):
                log.warning("server %s: cut %d connections of revoked peers", self.address, num)
                self.identity.note("cut", connections=num, reason="revoked")

    def _end(self, connection: Connection) -> None:
        """Close a connection that the caller holds."""
        connection.socket.close()
        self._roll.remove(connection)
        with self._changed:
            self._changed.notify_all()

    # Whoever holds the connection.

    def _shake(self, connection: Connection) -> None:
        """One step of a handshake."""
        assert self._context is not None and self._lot is not None
        try:
            if not isinstance(connection.socket, ssl.SSLSocket):
                connection.socket = self._context.wrap_socket(
                    connection.socket, server_side=True, do_handshake_on_connect=False
                )
            connection.socket.do_handshake()
            if self.identity is None:
                connection.peer = Peer("", b"", connection.address)
            else:
                der = connection.socket.getpeercert(binary_form=True)
                assert der is not None  # CERT_REQUIRED: no handshake without one
                connection.peer = self.identity.peer(der)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanted:
            connection.events = READ if isinstance(wanted, ssl.SSLWantReadError) else WRITE
            connection.deadline += time.monotonic() - connection.ready_at  # our time, not the client's
        except (NetworkError, OSError) as error:  # ssl.SSLError is one: strangers, resets
            level = logging.WARNING if isinstance(error, NetworkError) else logging.DEBUG
            log.log(level, "server %s: refused a connection: %s", self.address, error)
            if self.identity is not None and isinstance(error, ssl.SSLError):
                self.identity.note("stranger", address=connection.address, reason=str(error))
            self._roll.refuse()
            self._end(connection)
            return
        else:
            log.debug("connected: peer_id=%s from=%s", connection.peer.peer_id, connection.address)
            if not self._roll.prove(connection):
                self._end(connection)
                return
            set_deadline(connection, self.bounds)
        self._lot.park(connection)

    def _serve(self, connection: Connection, asked: Asked) -> None:
        """Answer what was asked, and what was sent behind it; then let it wait, or end."""
        if (heard := self._hear(connection, asked)) is not None:
            self._tell(connection, heard)

    def _serve_burst(self, burst: list[tuple[Connection, Asked]]) -> None:
        """Answer several that asked at once: all are heard, then all are told; who reads slowly holds up nobody."""
        heard = [(connection, self._hear(connection, asked)) for connection, asked in burst]
        for connection, one in heard:
            if one is None:
                continue
            one.wait(self._guard)
            if one.is_short and connection.has_room():
                self._tell(connection, one)
            else:
                self._answerers.run(functools.partial(self._tell, connection, one))

    def _begin(self, connection: Connection) -> bool:
        with self._changed:
            if not self.draining:
                self._roll.begin(connection)
            return not self.draining

    def _hear(self, connection: Connection, asked: Asked) -> Heard | None:
        """What a request is answered; None: the connection has ended."""
        if not self._begin(connection):
            self._end(connection)
            return None
        if isinstance(asked, RefusedError):
            refused = error_response(asked.status, asked.code, str(asked))
            return Heard(None, refused, False, PIECE_BYTES + asked.discard)
        head, body = asked
        assert connection.peer is not None
        request = Request(head.method, head.path, head.query, head.headers, body, connection.peer, connection.is_gone)
        answer = self._guard(request, functools.partial(self._answer, request))
        return Heard(request, answer, head.keep, PIECE_BYTES)

    def _tell(self, connection: Connection, heard: Heard | None) -> None:
        """Send an answer, then go on with what the client sent behind its question."""
        assert self._lot is not None
        try:
            while heard is not None:
                heard.wait(self._guard)
                self._send(connection, heard)
                asked = read_request(connection, self.bounds)
                if asked is None:
                    self._lot.park(connection)
                    return
                heard = self._hear(connection, asked)
        except OSError as error:
            log.debug("server %s: connection ended: %s", self.address, error)
            self._end(connection)
        except BaseException:
            log.exception("server %s: a connection failed", self.address)
            self._end(connection)

    def _send(self, connection: Connection, heard: Heard) -> None:
        response = heard.answer
        assert isinstance(response, Response)
        keep = heard.keep and response.status != 403 and not self.draining
        try:
            keep = self._sender.send(connection, response, keep)
        finally:
            with self._changed:
                self._answers[response.status] += 1
                self._roll.finish(connection)
                self._changed.notify_all()
        connection.phase = ""
        if (request := heard.request) is not None:
            who = request.peer.peer_id or connection.address
            log.debug("answered: %s %s peer=%s status=%d", request.method, request.path, who, response.status)
        if not keep:
            # Our half is closed; what still comes is dropped: closing on unread bytes would reset the answer away.
            socket.socket.shutdown(connection.socket, socket.SHUT_WR)
            connection.ending, connection.to_discard = True, heard.discard
            connection.deadline = time.monotonic() + ENDING_S

    def _answer(self, request: Request) -> Response | Pending:
        """The handler's response, if the peer may ask at all."""
        if self.identity is None and (refused := refuse_page(request)) is not None:
            return refused
        if self.identity is not None and self.identity.is_revoked(request.peer):
            return error_response(403, "revoked", f"peer {request.peer.peer_id} is revoked in this network")
        return self.handle(request)

    def _guard(self, request: Request, work: Callable[[], Response | Pending]) -> Response | Pending:
        """What `work` answers; what it raises becomes 400 or 500, and the server stays up."""
        try:
            return self._noted(request, work())
        except BadRequestError as error:
            return error_response(400, "bad_request", str(error))
        except Exception:
            log.exception("server %s: %s %s failed", self.address, request.method, request.path)
            return error_response(500, "internal", f"{request.method} {request.path} failed; see the node's log")

    def _noted(self, request: Request, response: Response | Pending) -> Response | Pending:
        """The response, noted if it is a refusal."""
        if isinstance(response, Pending) or response.status != 403 or self.identity is None:
            return response
        if isinstance(response.body, bytes):
            door, reason = f"{request.method} {request.path}", response.body.decode()
            self.identity.note("refused", peer=request.peer.peer_id, door=door, reason=reason)
        return response


@dataclass
class Heard:
    """A request that was handed over, and its answer. `request`: None if it was none.

    Attributes:
        keep: Whether the client may ask again.
        discard: Bytes that it may go on sending if not.
    """

    request: Request | None
    answer: Response | Pending
    keep: bool
    discard: int

    @property
    def is_short(self) -> bool:
        """Whether the answer is there, and small."""
        body = self.answer.body if isinstance(self.answer, Response) else None
        return isinstance(body, bytes) and len(body) <= SHORT_BYTES

    def wait(self, guard: _Guard) -> None:
        """Wait for the answer, if it is still to come."""
        while isinstance(self.answer, Pending):
            assert self.request is not None  # what was none is refused at once
            self.answer = guard(self.request, self.answer.wait)


def read_request(connection: Connection, bounds: Bounds) -> Asked | None:
    """The next whole request, or what is wrong with it; None: not yet, and it may wait until its deadline.

    Reads until nothing is left, in the TLS layer's buffer neither: the selector would not tell of that.

    Raises:
        OSError: If the connection has ended.
    """
    connection.events = READ
    try:
        while True:
            if connection.ending:
                piece = connection.socket.recv(PIECE_BYTES)
                connection.to_discard -= len(piece)
                if not piece or connection.to_discard < 0:
                    raise ConnectionResetError("ended after its last answer")
                continue
            if (whole := connection.incoming.next()) is not None:
                return whole
            set_deadline(connection, bounds)
            piece = connection.socket.recv(PIECE_BYTES)
            if not piece:
                raise ConnectionResetError("the peer closed")
            connection.incoming.feed(piece)
    except RefusedError as error:
        return error
    except (ssl.SSLWantReadError, BlockingIOError):
        return None
    except ssl.SSLWantWriteError:
        connection.events = WRITE
        return None


def set_deadline(connection: Connection, bounds: Bounds) -> None:
    """Once for each thing it waits for: a first byte, the rest of a head, a body."""
    phase = connection.incoming.phase
    if phase != connection.phase:
        rest_s = bounds.head_s + connection.incoming.missing_bytes / bounds.body_bytes_per_s
        connection.deadline = time.monotonic() + (bounds.idle_s if phase == "rest" else rest_s)
        connection.phase = phase
