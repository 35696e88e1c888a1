"""HTTP/1.1 over urllib3's connections, for peers and for web servers: the head of an answer is bounded in bytes and
time, a body that drips is a fault, and idle connections are kept.

urllib3 connects, speaks TLS and HTTP and parses heads. Its pools are not used: they hand out a connection without
saying whose certificate it showed or whether it was used before, and both decide here what is sent. The body of known
length goes from the TLS layer into the caller's buffer: urllib3's `read` copies it twice, which costs 10 % of a stream.
"""

from __future__ import annotations

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

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connection import HTTPException as HTTPException
from urllib3.exceptions import HTTPError
from urllib3.response import HTTPResponse

from forebay.errors import NetworkError, ProtocolViolation
from forebay.network.addresses import is_public
from forebay.network.peer import Peer

# It would log what the other side sent in place of headers, as it came; who reads the headers notices what is missing.
logging.getLogger("urllib3.connection").addFilter(lambda record: "Failed to parse headers" not in str(record.msg))
# Schedulers close at 150, other servers at 60. What was closed meanwhile is noticed before it is used again.
KEEP_IDLE_S = 140.0
MAX_IDLE_PER_KEY = 64
CHUNK_BYTES = 1 << 16  # stays in the processor's cache: 2.3 s of CPU a GB with hashing, where 1 MiB took 3.0
_BUFFER_BYTES = io.DEFAULT_BUFFER_SIZE
FAULTS = (OSError, HTTPError, HTTPException)  # what a connection raises, beside errors of our own


class BlockedAddressError(NetworkError):
    """A host name led to an address that is not of the public internet; nothing was sent there."""


class CutHeadError(ConnectionError):
    """The other side closed the connection within the head of its answer."""


class _Bounded:
    """A socket that ends a head which is too long or too slow. Between `bound` and `unbound` only."""

    _deadline: float | None = None
    _left = _max_bytes = 0
    was_cut = False
    reader: io.BufferedReader | None = None

    def bound(self, deadline: float, max_bytes: int) -> None:
        """From now on: so many bytes at most, all by `deadline` (of time.monotonic)."""
        self._deadline, self._max_bytes = deadline, max_bytes
        self._left = max_bytes + _BUFFER_BYTES  # the reader reads ahead

    def unbound(self, stall_s: float) -> None:
        """From now on: any number of bytes, and so long for each wait."""
        self._deadline = None
        self.settimeout(stall_s)  # type: ignore[attr-defined]

    def recv_into(self, buffer: Any, *args: Any) -> int:
        """See socket.socket."""
        receive = super().recv_into  # type: ignore[misc]
        if self._deadline is None:
            return int(receive(buffer, *args))
        self.settimeout(left(self._deadline))  # type: ignore[attr-defined]
        got = int(receive(buffer, *args))
        self._left -= got
        self.was_cut = got == 0
        if self._left < 0:
            raise ProtocolViolation(f"expected an HTTP head of at most {self._max_bytes} bytes, got more")
        return got

    def makefile(self, *args: Any, **kwargs: Any) -> Any:
        """See socket.socket; urllib3 reads the head from it, and may read the beginning of the body with it."""
        self.reader = super().makefile(*args, **kwargs)  # type: ignore[misc]
        return self.reader


class _PlainSocket(_Bounded, socket.socket):
    pass


class _TlsSocket(_Bounded, ssl.SSLSocket):
    pass


class _Kept:
    """What both kinds of connection have beside urllib3's."""

    peer = Peer("", b"", "")  # whose certificate the other side showed; empty where nobody asked for it
    key: Any = None  # what it is kept under, for those who keep it
    public_only = False  # connect to addresses of the public internet only
    was_used = False  # a request was sent before
    idle_since = 0.0
    _gathered: bytearray | None = None

    def send(self, data: Any) -> None:
        """See http.client.HTTPConnection; `request_at_once` gathers what is sent."""
        if self._gathered is None:
            super().send(data)  # type: ignore[misc]
        else:
            self._gathered += data

    def request_at_once(self, *args: Any, **kwargs: Any) -> None:
        """As `request`, with head and body in one packet and one TLS record."""
        self._gathered = bytearray()
        try:
            self.request(*args, **kwargs)  # type: ignore[attr-defined]
        finally:
            data, self._gathered = self._gathered, None
        self.send(data)

    def _new_conn(self) -> socket.socket:
        connection: Any = self
        return _connect(connection.host, connection.port, connection.timeout, self.public_only)


class PlainConnection(_Kept, HTTPConnection):
    """Plain HTTP."""


class TlsConnection(_Kept, HTTPSConnection):
    """HTTP over TLS. `ssl_context` is to be of `bounded_context`."""


Connection = PlainConnection | TlsConnection


def bounded_context(context: ssl.SSLContext) -> ssl.SSLContext:
    """The context, whose sockets are bounded from now on."""
    context.sslsocket_class = _TlsSocket
    return context


def left(deadline: float) -> float:
    """Seconds until a deadline; TimeoutError if there are none."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no full answer in time")
    return left_s


def _connect(host: str, port: int, timeout_s: float, public_only: bool) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    fault: Exception = OSError(f"{host}: no address is known")
    for family, kind, protocol, _, at in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        # Looked at here, where the connection is made: a second look-up could have another answer.
        if public_only and not is_public(str(at[0])):
            fault = BlockedAddressError(f"{host}: expected a public address, got {at[0]}")
            continue
        made = _PlainSocket(family, kind, protocol)
        try:
            made.settimeout(left(deadline))
            made.connect(at)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        except OSError as error:
            made.close()
            fault = error
    raise fault


class Answer:
    """The answer to a request: its head, and its body, which is read from here."""

    def __init__(self, connection: Connection, sock: Any, response: HTTPResponse) -> None:
        self.status = response.status
        self.reason = response.reason or ""
        self.headers: Mapping[str, str] = response.headers
        # Of the body as announced; None: until its end is seen.
        self.length = None if response.chunked else response.length_remaining
        self.received = 0  # bytes of the body that came so far
        self._sock, self._response = sock, response
        self._is_direct = self.length is not None and isinstance(sock, _Bounded)
        self._first: bytes | None = None  # what came with the head
        self._has_begun = False  # all that came with the head was given, and more is to come
        self._receive: Any = sock.recv_into
        self._stays_open = not connection.is_closed  # urllib3 closed it if the head said so
        self._stall_s, self._min_bytes_per_s, self._since, self._since_bytes = math.inf, 0.0, 0.0, 0

    def pace(self, stall_s: float, min_bytes_per_s: float) -> None:
        """From now on there is no deadline for the whole body, but it may neither wait nor drip for so long."""
        self._stall_s, self._min_bytes_per_s = stall_s, min_bytes_per_s
        self._since, self._since_bytes = time.monotonic(), self.received
        if isinstance(self._sock, _Bounded):
            self._sock.unbound(stall_s)
            self._receive = super(_Bounded, self._sock).recv_into  # type: ignore[misc]
        else:
            self._sock.settimeout(stall_s)

    def bound(self, deadline: float, max_bytes: int) -> None:
        """From now on the body must come by `deadline` (of time.monotonic), in at most so many bytes."""
        if isinstance(self._sock, _Bounded):
            self._sock.bound(deadline, max_bytes)
        else:
            self._sock.settimeout(left(deadline))

    def readinto(self, view: memoryview) -> int:
        """Some bytes of the body, as they came; 0 at its end, or where the connection was closed.

        TimeoutError if it stalls: what it says to have `received` is in the views given. Of FAULTS if it fails.
        """
        if self._has_begun:  # the usual case, short of calls: it is met 60,000 times a GB
            remaining: int = self.length - self.received  # type: ignore[operator]
            got: int = self._receive(view if len(view) <= remaining else view[:remaining])
        elif self._is_direct:
            got = self._begin(view)
        else:
            data = self._response.read1(min(len(view), CHUNK_BYTES), decode_content=False) or b""
            got = len(data)
            view[:got] = data
        self.received += got
        if (now := time.monotonic()) - self._since >= self._stall_s:
            if self.received - self._since_bytes < self._min_bytes_per_s * self._stall_s:
                raise TimeoutError(f"stalled, under {self._min_bytes_per_s:g} bytes/s for {self._stall_s:g} s")
            self._since, self._since_bytes = now, self.received
        return got

    def _begin(self, view: memoryview) -> int:
        """What came with the head; if nothing did, what comes first."""
        assert self.length is not None
        if self.received == self.length:
            return 0
        if self._first is None:
            self._first = self._sock.reader.read1(_BUFFER_BYTES)  # no more than that is in the reader
        got = min(len(view), len(self._first), self.length - self.received)
        view[:got], self._first = self._first[:got], self._first[got:]
        self._has_begun = not self._first and self.received + got < self.length
        return got

    def read(self, max_bytes: int, deadline: float) -> bytes:
        """The whole body, by `deadline` (monotonic); ProtocolViolation, at once if announced, above `max_bytes`."""
        limit = max_bytes if self.length is None else self.length
        if limit > max_bytes:
            raise ProtocolViolation(f"expected at most {max_bytes} bytes, got {limit} announced")
        self.bound(deadline, limit)
        data, buffer = bytearray(), memoryview(bytearray(min(limit + 1, CHUNK_BYTES)))
        while len(data) <= limit and (got := self.readinto(buffer)):
            data += buffer[:got]
        if len(data) > limit:
            raise ProtocolViolation(f"expected at most {max_bytes} bytes, got more")
        if self.length is not None and len(data) < self.length:
            raise ConnectionError(f"the other side closed at byte {len(data)} of {self.length}")
        return bytes(data)

    @property
    def can_keep(self) -> bool:
        """Whether the body came to its end and no more than it, so that the connection is good for another request."""
        if self._is_direct:
            return self._stays_open and self.received == self.length and not self._first
        return self._stays_open and self._response.closed

    def close(self) -> None:
        """Let go of the answer; the connection stays as it is. May be repeated."""
        self._response.close()
        if self._is_direct:
            self._sock.reader = None  # it refers to the socket, too


def exchange(
    connection: Connection,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes | None,
    deadline: float,
    max_head_bytes: int,
) -> Answer:
    """Send a request over a connection that is open, and read the head of the answer by `deadline` (time.monotonic).

    CutHeadError if the other side closed within the head; of FAULTS if the connection fails, or what came is no HTTP.
    """
    sock: Any = connection.sock
    connection.was_used = True
    connection.timeout = left(deadline)
    if isinstance(sock, _Bounded):
        sock.was_cut = False
        sock.bound(deadline, max_head_bytes)
    connection.request_at_once(method, target, body=body, headers=headers, preload_content=False, decode_content=False)
    connection.timeout = left(deadline)
    try:
        response = connection.getresponse()
    except HTTPException as error:
        if isinstance(sock, _Bounded) and sock.was_cut and not isinstance(error, ConnectionError):
            raise CutHeadError("the connection was closed amid the answer") from error
        raise
    if isinstance(sock, _Bounded) and sock.was_cut:
        response.close()
        raise CutHeadError("the connection was closed amid the answer")
    return Answer(connection, sock, response)


class KeptConnections:
    """Idle connections by key, of all threads. A child made by a fork has none: two processes that read from one
    connection would take each other's bytes."""

    def __init__(self, max_per_key: int = MAX_IDLE_PER_KEY, keep_s: float = KEEP_IDLE_S) -> None:
        self._max_per_key, self._keep_s = max_per_key, keep_s
        self._lock = threading.Lock()
        self._idle: dict[Any, list[Connection]] = {}
        self._swept_at = time.monotonic()
        self._finalizer = weakref.finalize(self, _close_all, self._idle)
        _all.add(self)

    def take(self, key: Any) -> Connection | None:
        """One that is still young, and that the other side has not closed; None if there is none."""
        while True:
            with self._lock:
                idle = self._idle.get(key)
                if not idle:
                    return None
                connection = idle.pop()
            if connection.idle_since >= time.monotonic() - self._keep_s and connection.is_connected:
                return connection
            connection.close()

    def give(self, key: Any, connection: Connection) -> None:
        """Keep a connection whose last answer was read to its end, or close it if enough are kept."""
        now = connection.idle_since = time.monotonic()
        with self._lock:
            old = self._sweep(now) if now - self._swept_at > self._keep_s else []
            idle = self._idle.setdefault(key, [])
            if len(idle) < self._max_per_key:
                idle.append(connection)
            else:
                old.append(connection)
        for one in old:
            one.close()

    def close(self) -> None:
        """Close all; others may be given later."""
        with self._lock:
            _close_all(self._idle)

    def after_fork(self) -> None:
        """What is open stays the parent's."""
        self._lock = threading.Lock()
        self._idle.clear()

    def _sweep(self, now: float) -> list[Connection]:
        self._swept_at = now
        old = [one for idle in self._idle.values() for one in idle if one.idle_since < now - self._keep_s]
        for key in list(self._idle):
            self._idle[key] = [one for one in self._idle[key] if one.idle_since >= now - self._keep_s]
            if not self._idle[key]:
                del self._idle[key]
        return old


_all: weakref.WeakSet[KeptConnections] = weakref.WeakSet()


def _close_all(idle: dict[Any, list[Connection]]) -> None:
    for connections in idle.values():
        for connection in connections:
            connection.close()
    idle.clear()


def _after_fork() -> None:
    for kept in list(_all):
        kept.after_fork()


os.register_at_fork(after_in_child=_after_fork)
