"""HTTP/1.1 over mutual TLS 1.3: one server and one client for control messages and for slices.

Without an identity the server speaks plain HTTP and believes whoever asks: for a door on loopback, or one that its
owner opens knowingly. It refuses what a browser sends for a page of another site.

A thread a connection, so that reading, encrypting and sending a slice all run outside the interpreter's lock;
memory is one buffer of 1 MiB a sending connection. The client trusts nothing it is told: sizes are checked
before bytes are kept, a stalled peer is dropped, and a peer may be pinned by its id before a request is sent.

What the choice costs: a connection is a thread (some 50 KiB), so a server takes hundreds of peers, not tens
of thousands.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from millrace.errors import NetworkError
from millrace.network.client import Client, RemoteError, parse_address
from millrace.network.exchange import (
    JSON,
    BadRequestError,
    FileRange,
    Request,
    Response,
    error_response,
    file_response,
    json_response,
)
from millrace.network.limits import Bounds, Throttle
from millrace.network.peer import Peer

if TYPE_CHECKING:
    from millrace.network.identity import Identity  # what proves a peer is needed with one only

__all__ = [
    "BadRequestError",
    "Client",
    "FileRange",
    "RemoteError",
    "Request",
    "Response",
    "Server",
    "error_response",
    "file_response",
    "json_response",
    "parse_address",
]
MAX_BODY_BYTES = 1 << 20
CHUNK_BYTES = 1 << 20
HANDSHAKE_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 60.0
log = logging.getLogger("millrace.network")


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    thread: threading.Thread | None = None
    busy: bool = False


class Server:
    """Answers peers of one network; with identity None whoever asks, over plain HTTP.

    Owns its threads and sockets from `start` to `close`; both may be called from any thread, `close` more than
    once. A revoked peer gets 403 and is cut off; a stranger does not get past the handshake.
    """

    def __init__(
        self,
        identity: Identity | None,
        host: str,
        port: int,
        handle: Callable[[Request], Response],
        max_connections: int = 256,
        on_bytes: Callable[[Peer, int], None] | None = None,
        *,
        bounds: Bounds | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        self.bounds = bounds or Bounds()
        self.throttle = throttle or Throttle()
        self.identity = identity
        self.host = host
        self.port = port
        self.handle = handle
        self.on_bytes = on_bytes
        self.max_connections = max_connections
        self.draining = False
        self.refused_connections = 0
        self._changed = threading.Condition()
        self._connections: set[_Connection] = set()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._context: ssl.SSLContext | None = None

    @property
    def address(self) -> str:
        """`host:port` where it listens; IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def num_connections(self) -> int:
        """Connections open now, those in their handshake included."""
        with self._changed:
            return len(self._connections)

    def start(self) -> None:
        """Listen and answer in background threads.

        Raises:
            NetworkError: If the port is taken or the host is none of this machine's.
        """
        self._context = self.identity.server_context() if self.identity is not None else None
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.host, self.port))
            listener.listen(128)
        except (OSError, OverflowError) as error:
            listener.close()
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise NetworkError(
                    f"server: port {self.port} is in use on {self.host}. "
                    "Stop what holds it, or choose another port (0 takes a free one)."
                ) from error
            raise NetworkError(f"server: cannot listen on {self.host}:{self.port}: {error}") from error
        self._listener = listener
        self.port = listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="https-accept", daemon=True)
        self._acceptor.start()

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Take no more requests; let those being answered finish. Returns whether all did in the time given."""
        with self._changed:
            self.draining = True
        self._stop_listening()
        deadline = time.monotonic() + timeout_s
        with self._changed:
            for connection in self._connections:
                if not connection.busy:
                    _shut(connection.socket)
            return self._changed.wait_for(
                lambda: not any(connection.busy for connection in self._connections),
                max(0.0, deadline - time.monotonic()),
            )

    def close(self) -> None:
        """Stop at once: cut every connection and wait for its thread."""
        with self._changed:
            self.draining = True
            connections = list(self._connections)
        self._stop_listening()
        for connection in connections:
            _shut(connection.socket)
        for connection in connections:
            if connection.thread is not None and connection.thread is not threading.current_thread():
                connection.thread.join(HANDSHAKE_TIMEOUT_S)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            _shut(listener)  # wakes accept
            if self._acceptor is not None and self._acceptor is not threading.current_thread():
                self._acceptor.join(HANDSHAKE_TIMEOUT_S)
            listener.close()

    def _accept(self) -> None:
        listener = self._listener
        while listener is not None:
            try:
                plain, _ = listener.accept()
            except OSError as error:
                if self.draining or error.errno in (errno.EBADF, errno.EINVAL):
                    return
                log.warning("server %s: accept failed, trying again: %s", self.address, error)
                time.sleep(0.1)  # out of descriptors: connections that end give some back
                continue
            connection = _Connection(plain)
            with self._changed:
                if self.draining or len(self._connections) >= self.max_connections:
                    self.refused_connections += 1
                    plain.close()
                    continue
                self._connections.add(connection)
            connection.thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            connection.thread.start()

    def _serve(self, connection: _Connection) -> None:
        try:
            plain = connection.socket
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.settimeout(HANDSHAKE_TIMEOUT_S)
            if self._context is None:
                _Handler(plain, Peer("", b"", str(plain.getpeername()[0])), self, connection)
                return
            tls = self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
            with self._changed:
                connection.socket = tls
                if self.draining:
                    return
            try:
                tls.do_handshake()
            except OSError:
                self.refused_connections += 1
                raise
            der = tls.getpeercert(binary_form=True)
            assert der is not None  # CERT_REQUIRED: no handshake without one
            assert self.identity is not None  # no context without one
            _Handler(tls, self.identity.peer(der), self, connection)
        except NetworkError as error:
            log.warning("server %s: refused a connection: %s", self.address, error)
        except OSError as error:  # ssl.SSLError is one: strangers, resets, time-outs
            log.debug("server %s: connection ended: %s", self.address, error)
        finally:
            connection.socket.close()
            with self._changed:
                self._connections.discard(connection)
                self._changed.notify_all()

    def _begin(self, connection: _Connection) -> bool:
        with self._changed:
            connection.busy = not self.draining
            return connection.busy

    def _end(self, connection: _Connection) -> None:
        with self._changed:
            connection.busy = False
            self._changed.notify_all()

    def _answer(self, request: Request) -> Response:
        """The handler's response; what it raises becomes 400 or 500, and the server stays up."""
        try:
            if self.identity is None and (refused := _refuse_page(request)) is not None:
                return refused
            if self.identity is not None and self.identity.is_revoked(request.peer):
                return error_response(403, "revoked", f"peer {request.peer.peer_id} is revoked in this network")
            return self.handle(request)
        except BadRequestError as error:
            return error_response(400, "bad_request", str(error))
        except Exception:
            log.exception("server %s: %s %s failed", self.address, request.method, request.path)
            return error_response(500, "internal", f"{request.method} {request.path} failed; see the node's log")


class _Handler(BaseHTTPRequestHandler):
    """The stdlib's parser of requests, bound to one connection."""

    protocol_version = "HTTP/1.1"
    server_version = "millrace"
    sys_version = ""
    timeout = IDLE_TIMEOUT_S

    def __init__(self, tls: socket.socket, peer: Peer, owner: Server, connection: _Connection) -> None:
        self._tls = tls
        self._peer = peer
        self._owner = owner
        self._connection = connection
        super().__init__(tls, peer.peer_id, owner)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self._exchange()

    def do_POST(self) -> None:
        self._exchange()

    def handle(self) -> None:
        try:
            super().handle()
        finally:
            self._owner._end(self._connection)

    def finish(self) -> None:
        if not self.wfile.closed:
            self.wfile.close()
        self.rfile.close()

    def _exchange(self) -> None:
        body = self._read_body()
        if body is None:
            return
        if not self._owner._begin(self._connection):
            self.close_connection = True
            return
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        request = Request(self.command, url.path, query, self.headers, body, self._peer, self._is_gone)
        response = self._owner._answer(request)
        if response.status == 403 or self._owner.draining:
            self.close_connection = True
        self._send(response)
        self._owner._end(self._connection)

    def _is_gone(self) -> bool:
        """Whether the peer closed its end: an answer would reach nobody."""
        poll = select.poll()
        poll.register(self._tls, select.POLLIN)
        if not poll.poll(0):
            return False
        try:
            # The bare socket, under TLS: what is peeked at stays there.
            return socket.socket.recv(self._tls, 1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _read_body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            self.send_error(400, "bad_length")
            return None
        if len(length) > 12 or int(length) > MAX_BODY_BYTES:
            self.send_error(413, "too_large")
            self._discard(int(length[:12]))
            return None
        body = self.rfile.read(int(length))
        if len(body) != int(length):
            self.close_connection = True
            return None
        return body

    def _discard(self, length: int) -> None:
        """Read a refused body, up to 8 MiB: closing on unread bytes resets the connection before the peer knows why."""
        self._tls.settimeout(1.0)  # one that sends nothing more has seen the answer, or never will
        left = min(length, 8 * MAX_BODY_BYTES)
        while left > 0 and (piece := self.rfile.read1(min(left, 65536))):
            left -= len(piece)

    def _send(self, response: Response) -> None:
        body = response.body
        length = len(body) if isinstance(body, bytes) else body.stop - body.start
        descriptor = -1
        if isinstance(body, FileRange):
            try:
                descriptor = os.open(body.path, os.O_RDONLY)
            except OSError:
                log.exception("server %s: cannot open %s", self._owner.address, body.path)
                self._send(error_response(500, "unreadable", "the node cannot read this file; see its log"))
                return
        try:
            head = [f"HTTP/1.1 {response.status} {self.responses.get(response.status, ('',))[0]}"]
            head += [f"Content-Type: {response.content_type}", f"Content-Length: {length}"]
            head += [f"{name}: {value}" for name, value in response.headers.items()]
            head += ["Connection: close"] if self.close_connection else []
            lead = "\r\n".join([*head, "", ""]).encode("latin-1")
            if isinstance(body, bytes):
                self._tls.sendall(lead + body)
                self._count(length)
            else:
                self._tls.sendall(lead)
                self._send_file(descriptor, body)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _send_file(self, descriptor: int, body: FileRange) -> None:
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(1, body.stop - body.start))))
        at = body.start
        while at < body.stop:
            # Read, not mapped: a file truncated under a mapping would kill the node by SIGBUS.
            count = os.preadv(descriptor, [buffer[: body.stop - at]], at)
            if count == 0:
                log.error("server %s: %s ends at %d of %d", self._owner.address, body.path, at, body.stop)
                self.close_connection = True  # the length is promised: only a cut tells the peer
                return
            self._tls.sendall(buffer[:count])
            at += count
            self._count(count)

    def _count(self, num_bytes: int) -> None:
        if self._owner.on_bytes is not None:
            self._owner.on_bytes(self._peer, num_bytes)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The stdlib's own refusals (a malformed line, an unknown method), as JSON; the connection ends."""
        self.close_connection = True
        text = f"{message or ''} {explain or ''}".strip()[:200]
        self._send(error_response(int(code), message if code in (400, 413) and message else "refused", text))

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s %s: " + format, self._owner.address, self._peer.peer_id, *args)


def _refuse_page(request: Request) -> Response | None:
    """Refuses what a web page can make a browser send here; None for a program's request."""
    kind = request.headers.get("Content-Type", JSON).partition(";")[0].strip().lower()
    if "Origin" not in request.headers and (request.method == "GET" or kind == JSON):
        return None
    return error_response(
        403,
        "cross_site",
        f"request: expected Content-Type {JSON} and no Origin, got {kind[:80]!r}. Ask with a program.",
    )


def _shut(sock: socket.socket) -> None:
    try:
        # Not SSLSocket.shutdown: that drops the TLS layer under the thread which is using it.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.EBADF):
            raise
