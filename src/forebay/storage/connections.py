"""HTTP/1.1 client connections to peers and web servers, on urllib3: heads are bounded in bytes and time, stalled
bodies fail, idle connections are pooled.

urllib3 connects, speaks TLS and HTTP and parses heads. Its pools are not used: they do not tell whose certificate a
connection showed or whether it was used before, and both decide here what is sent. A body of known length goes from the
TLS layer into the caller's buffer; urllib3's `read` copies it twice, which costs 10 % of a stream.
"""

import io
import logging
import math
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from urllib3.connection import HTTPConnection, HTTPException, HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.response import HTTPResponse

from forebay.errors import NetworkError, ProtocolError, error_text, printable
from forebay.storage.hosts import is_public

# urllib3 would log bytes of a malformed head as they came.
logging.getLogger("urllib3.connection").addFilter(lambda record: "Failed to parse headers" not in str(record.msg))
# Schedulers close idle connections at 150 s, other servers at 60; closed ones are detected before they are used again.
KEEP_IDLE_S = 140.0
MAX_IDLE_PER_KEY = 64
CHUNK_BYTES = 1 << 16  # fits the processor's cache: 2.3 s of CPU per GB with hashing, 1 MiB took 3.0
_BUFFER_BYTES = io.DEFAULT_BUFFER_SIZE
FAULTS = (OSError, HTTPError, HTTPException)  # what a connection raises, besides our own errors


class BlockedAddressError(NetworkError):
    """A host name resolves to an address that is not public; nothing was sent."""


class TruncatedHeadError(ConnectionError):
    """The server closed the connection within the head of its response."""


class _BoundedSocket:
    """A socket that ends a head which is too long or too slow, between calls of `bound` and `unbound`."""

    _deadline: float | None = None
    _remaining_bytes = _max_bytes = 0
    was_closed = False
    reader: io.BufferedReader | None = None

    def bound(self, deadline: float, max_bytes: int) -> None:
        """Allow at most `max_bytes` until `deadline` (of time.monotonic)."""
        self._deadline, self._max_bytes = deadline, max_bytes
        self._remaining_bytes = max_bytes + _BUFFER_BYTES  # the reader reads ahead

    def unbound(self, stall_s: float) -> None:
        """Allow any number of bytes, with a time-out for each read."""
        self._deadline = None
        self.settimeout(stall_s)  # type: ignore[attr-defined]

    def recv_into(self, buffer: Any, *args: Any) -> int:
        """See socket.socket."""
        receive = super().recv_into  # type: ignore[misc]
        if self._deadline is None:
            return int(receive(buffer, *args))
        self.settimeout(remaining_s(self._deadline))  # type: ignore[attr-defined]
        num_bytes = int(receive(buffer, *args))
        self._remaining_bytes -= num_bytes
        self.was_closed = num_bytes == 0
        if self._remaining_bytes < 0:
            raise ProtocolError(f"expected an HTTP head of at most {self._max_bytes} bytes, got more")
        return num_bytes

    def makefile(self, *args: Any, **kwargs: Any) -> Any:
        """See socket.socket; urllib3 reads the head from it, possibly with the first bytes of the body."""
        self.reader = super().makefile(*args, **kwargs)  # type: ignore[misc]
        return self.reader


class _PlainSocket(_BoundedSocket, socket.socket):
    pass


class _TlsSocket(_BoundedSocket, ssl.SSLSocket):
    pass


class _ConnectionMixin:
    peer: Any = None  # from the server's certificate, set by the client of peers
    key: Any = None  # in a ConnectionPool
    public_only = False  # connect to public addresses only
    was_used = False  # a request was sent before
    idle_since = 0.0

    def _new_conn(self) -> socket.socket:
        connection: Any = self
        return _connect(connection.host, connection.port, connection.timeout, self.public_only)


class PlainConnection(_ConnectionMixin, HTTPConnection):
    """Plain HTTP."""


class TlsConnection(_ConnectionMixin, HTTPSConnection):
    """HTTP over TLS. `ssl_context` must come from `bounded_context`."""


Connection = PlainConnection | TlsConnection


def bounded_context(context: ssl.SSLContext) -> ssl.SSLContext:
    """The same context, set to create bounded sockets."""
    context.sslsocket_class = _TlsSocket
    return context


def remaining_s(deadline: float) -> float:
    """Seconds until a deadline (of time.monotonic). TimeoutError if it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("no full answer in time")
    return seconds


def _connect(host: str, port: int, timeout_s: float, public_only: bool) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    fault: Exception = OSError(f"{host}: no address is known")
    for family, kind, protocol, _, sockaddr in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        # Checked where the connection is made: a second look-up could have another result.
        if public_only and not is_public(str(sockaddr[0])):
            fault = BlockedAddressError(f"{host}: expected a public address, got {sockaddr[0]}")
            continue
        sock = _PlainSocket(family, kind, protocol)
        try:
            sock.settimeout(remaining_s(deadline))
            sock.connect(sockaddr)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError as error:
            sock.close()
            fault = error
    raise fault


class StreamedResponse:
    """The head of a response, and a reader of its body."""

    def __init__(self, connection: Connection, sock: Any, response: HTTPResponse) -> None:
        self.status = response.status
        self.reason = printable(response.reason or "", 300)
        self.headers: Mapping[str, str] = response.headers
        self.length = None if response.chunked else response.length_remaining  # of the body; None: unknown
        self.received = 0  # bytes of the body
        self._sock, self._response = sock, response
        self._is_direct = self.length is not None
        self._stays_open = not connection.is_closed  # urllib3 closes it if the head says so
        self._stall_s, self._min_bytes_per_s, self._since, self._since_bytes = math.inf, 0.0, 0.0, 0

    def pace(self, stall_s: float, min_bytes_per_s: float) -> None:
        """Replace the deadline: each read, and the rate over `stall_s`, is bounded from now on."""
        self._stall_s, self._min_bytes_per_s = stall_s, min_bytes_per_s
        self._since, self._since_bytes = time.monotonic(), self.received
        self._sock.unbound(stall_s)

    def bound(self, deadline: float, max_bytes: int) -> None:
        """Bound the rest of the body: at most `max_bytes` until `deadline` (of time.monotonic)."""
        self._sock.bound(deadline, max_bytes)

    def readinto(self, view: memoryview) -> int:
        """Read some bytes of the body; return their number, 0 at its end or if the connection was closed.

        Raises TimeoutError if it stalls, one of FAULTS if it fails; `received` bytes are then in the views.
        """
        if self._is_direct:
            assert self.length is not None
            remaining = self.length - self.received
            num_bytes: int = self._sock.reader.readinto1(view[:remaining]) if remaining else 0
        else:
            data = self._response.read1(min(len(view), CHUNK_BYTES), decode_content=False) or b""
            num_bytes = len(data)
            view[:num_bytes] = data
        self.received += num_bytes
        if (now := time.monotonic()) - self._since >= self._stall_s:
            if self.received - self._since_bytes < self._min_bytes_per_s * self._stall_s:
                raise TimeoutError(f"stalled, under {self._min_bytes_per_s:g} bytes/s for {self._stall_s:g} s")
            self._since, self._since_bytes = now, self.received
        return num_bytes

    def read(self, max_bytes: int, deadline: float) -> bytes:
        """The whole body, by `deadline` (of time.monotonic). ProtocolError above `max_bytes`, at once if announced."""
        limit = max_bytes if self.length is None else self.length
        if limit > max_bytes:
            raise ProtocolError(f"expected at most {max_bytes} bytes, got {limit} announced")
        self.bound(deadline, limit)
        data, buffer = bytearray(), memoryview(bytearray(min(limit + 1, CHUNK_BYTES)))
        while len(data) <= limit and (num_bytes := self.readinto(buffer)):
            data += buffer[:num_bytes]
        if len(data) > limit:
            raise ProtocolError(f"expected at most {max_bytes} bytes, got more")
        if self.length is not None and len(data) < self.length:
            raise ConnectionError(f"the other side closed at byte {len(data)} of {self.length}")
        return bytes(data)

    @property
    def can_keep(self) -> bool:
        """Whether exactly the body was read, so that the connection can take another request."""
        if self._is_direct:
            return self._stays_open and self.received == self.length and not self._has_more()
        return self._stays_open and self._response.closed

    def _has_more(self) -> bool:
        """Whether bytes follow the body."""
        self._sock.unbound(0)
        try:
            return bool(self._sock.reader.peek(1))
        except OSError:  # nothing, in TLS
            return False

    def close(self) -> None:
        """Release the response; the connection stays open. May be repeated."""
        self._response.close()
        if self._is_direct:
            self._sock.reader = None  # it refers to the socket, too


def exchange(
    connection: Connection, method: str, target: str, headers: Mapping[str, str], body: bytes | None, deadline: float,
    max_head_bytes: int,
) -> StreamedResponse:  # fmt: skip
    """Send a request over an open connection and read the head of the response by `deadline` (of time.monotonic).

    Raises TruncatedHeadError if the server closed within the head, one of FAULTS if the connection fails or the
    response is not HTTP.
    """
    sock = connection.sock
    if not isinstance(sock, _BoundedSocket):
        raise ProtocolError("proxy: expected one at http://, got one at https://")
    connection.was_used = True
    connection.timeout = remaining_s(deadline)
    sock.was_closed = False
    sock.bound(deadline, max_head_bytes)
    connection.request(method, target, body=body, headers=headers, preload_content=False, decode_content=False)
    connection.timeout = remaining_s(deadline)
    try:
        response = connection.getresponse()
    except (HTTPException, HTTPError) as error:
        error_text(error)  # It has bytes of the head as they came.
        if sock.was_closed and not isinstance(error, ConnectionError):
            raise TruncatedHeadError("the connection was closed amid the answer") from error
        raise
    if sock.was_closed:
        response.close()
        raise TruncatedHeadError("the connection was closed amid the answer")
    return StreamedResponse(connection, sock, response)


class ConnectionPool:
    """Idle connections by key, for all threads. A forked child starts empty: it must not read its parent's bytes."""

    def __init__(self, max_per_key: int = MAX_IDLE_PER_KEY, keep_s: float = KEEP_IDLE_S) -> None:
        self._max_per_key, self._keep_s = max_per_key, keep_s
        self._lock = threading.Lock()
        self._idle: dict[Any, list[Connection]] = {}
        self._swept_at = time.monotonic()
        self._finalizer = weakref.finalize(self, _close_all, self._idle)
        _pools.add(self)

    def acquire(self, key: Any) -> Connection | None:
        """A connection that is recent and not closed by the server; None if there is none."""
        while True:
            with self._lock:
                idle = self._idle.get(key)
                if not idle:
                    return None
                connection = idle.pop()
            if connection.idle_since >= time.monotonic() - self._keep_s and connection.is_connected:
                return connection
            connection.close()

    def release(self, key: Any, connection: Connection) -> None:
        """Keep a connection whose last response was read completely, or close it if the pool is full."""
        now = connection.idle_since = time.monotonic()
        with self._lock:
            closing = []
            if now - self._swept_at > self._keep_s:
                self._swept_at = now
                for old in [
                    key for key, idle in self._idle.items() if not idle or idle[-1].idle_since < now - self._keep_s
                ]:
                    closing += self._idle.pop(old)
            idle = self._idle.setdefault(key, [])
            (idle if len(idle) < self._max_per_key else closing).append(connection)
        for connection in closing:
            connection.close()

    def close(self) -> None:
        """Close all idle connections; the pool stays usable."""
        with self._lock:
            _close_all(self._idle)


_pools: weakref.WeakSet[ConnectionPool] = weakref.WeakSet()


def _close_all(idle: dict[Any, list[Connection]]) -> None:
    for connections in idle.values():
        for connection in connections:
            connection.close()
    idle.clear()


def _after_fork() -> None:
    for pool in list(_pools):
        pool._lock = threading.Lock()
        pool._idle.clear()


os.register_at_fork(after_in_child=_after_fork)
