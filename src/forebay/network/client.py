"""One request at a time over mutual TLS 1.3, or over plain HTTP where a caller says so, believing nothing it is told.

Every length is checked before bytes are kept, heads are bounded, a peer that drips is dropped, and a peer may be
pinned by its id: that is checked before the request is sent. Idle connections are kept and shared by all threads.

What the choice costs: a parser of our own for the few heads that our server sends (a status line, headers, a
Content-Length); in return a slice goes from the TLS layer into the caller's buffer, with no copy between.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.errors import ForebayError, NetworkError, ProtocolViolation, UsageError
from forebay.network.peer import Peer

if TYPE_CHECKING:
    from forebay.network.identity import Identity  # what proves a peer is needed with one only

CHUNK_BYTES = 1 << 16  # stays in the processor's cache: 2.3 s of CPU a GB with hashing, where 1 MiB took 3.0
MAX_HEAD_BYTES = 32 << 10
MAX_JSON_BYTES = 16 << 20
MAX_IDLE_PER_PEER = 8
KEEP_IDLE_S = 45.0  # the server cuts at 60
MIN_BYTES_PER_S = 4096  # slower than this over a whole time-out is a stall
_STATUS_LINE = re.compile(r"HTTP/1\.[01] ([1-5][0-9][0-9])( .*)?")


class RemoteError(NetworkError):
    """A peer answered, and its answer is no. `status` is HTTP's; `code` the word which the peer gave for it."""

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def parse_address(address: str) -> tuple[str, int]:
    """`host:port` (IPv6 in brackets) as a pair.

    Raises:
        UsageError: If it is not of this form.
    """
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) < 65536:
        raise UsageError(f"address: expected HOST:PORT, got {address!r}")
    return host, int(port)


@dataclass(frozen=True)
class _Head:
    status: int
    headers: dict[str, str]  # names in lower case
    length: int


@dataclass(eq=False)
class _Connection:
    """One connection; `extra` is what came behind the head that was last read."""

    tls: socket.socket
    peer: Peer
    idle_since: float = 0.0
    used: bool = False
    extra: bytes = b""


class Client:
    """Asks peers of one network. Share it between threads; `close` it, or let it go with the last reference.

    Args:
        identity: None speaks plain HTTP: to a host that is trusted on a network that is.
    """

    def __init__(self, identity: Identity | None) -> None:
        self.identity = identity
        self._context = identity.client_context() if identity is not None else None
        self._lock = threading.Lock()
        self._idle: dict[str, list[_Connection]] = {}
        self._closer = weakref.finalize(self, _close_all, self._idle)

    def close(self) -> None:
        """Close the idle connections. The client stays usable."""
        with self._lock:
            _close_all(self._idle)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def request_json(
        self,
        address: str,
        method: str,
        path: str,
        obj: Any = None,
        expect_peer: str | None = None,
        timeout_s: float = 10.0,
        max_bytes: int = MAX_JSON_BYTES,
    ) -> tuple[Any, Peer]:
        """Send an object (none: no body), get one, and whose answer it is.

        Args:
            timeout_s: For the whole exchange.

        Raises:
            NetworkError: If the peer cannot be reached, or is not `expect_peer`.
            RemoteError: If it answers other than 2xx.
            ProtocolViolation: If the answer is no JSON, too large or malformed.
        """
        body = b"" if obj is None else json.dumps(obj, separators=(",", ":")).encode()
        data, peer = self._small(address, method, path, body, max_bytes, expect_peer, timeout_s)
        try:
            return json.loads(data), peer
        except (ValueError, RecursionError) as error:
            raise ProtocolViolation(
                f"{method} {path}: expected JSON from {address}, got {data[:80]!r}: {error}"
            ) from error

    def get_bytes(
        self, address: str, path: str, max_bytes: int, expect_peer: str | None = None, timeout_s: float = 60.0
    ) -> bytes:
        """The body at a path, at most `max_bytes`; errors as of `request_json`."""
        return self._small(address, "GET", path, b"", max_bytes, expect_peer, timeout_s)[0]

    def read_range(
        self,
        address: str,
        path: str,
        into: memoryview,
        start: int,
        expect_peer: str | None = None,
        timeout_s: float = 20.0,
    ) -> None:
        """Fill `into` with the bytes from `start` on of what is at a path.

        Args:
            timeout_s: For each wait; a peer slower than 4 KiB/s over this long counts as stalled.

        Raises:
            BrokenOffError: If the peer stalls or cuts the body short; what it says to have come is there.
            NetworkError: If the peer cannot be reached, or is not `expect_peer`.
            RemoteError: If it answers other than 2xx.
            ProtocolViolation: If it answers without the range that was asked for.
        """
        stop = start + len(into)
        deadline = time.monotonic() + timeout_s
        headers = f"Range: bytes={start}-{stop - 1}\r\n"
        connection, head = self._exchange(address, "GET", path, headers, b"", expect_peer, deadline)
        keep = False
        try:
            if head.status // 100 != 2:
                refusal = self._refusal(connection, head, address, "GET", path, deadline)
                keep = _keeps(head) and head.status < 500 and refusal.code != ""  # then its body was read whole
                raise refusal
            given = head.headers.get("content-range", "")
            wanted = f"bytes {start}-{stop - 1}/"
            if head.status != 206 or head.length != stop - start or not given.startswith(wanted):
                raise ProtocolViolation(
                    f"GET {path}: expected status 206 and {stop - start} bytes [{start}, {stop}) from {address}, "
                    f"got {head.status}, {head.length} bytes, Content-Range {given[:80]!r}"
                )
            _receive_into(connection, into, timeout_s, f"GET {path} at {address}")
            keep = _keeps(head)
        finally:
            self._put_back(address, connection, keep)

    def _small(
        self,
        address: str,
        method: str,
        path: str,
        body: bytes,
        max_bytes: int,
        expect_peer: str | None,
        timeout_s: float,
    ) -> tuple[bytes, Peer]:
        deadline = time.monotonic() + timeout_s
        connection, head = self._exchange(address, method, path, "", body, expect_peer, deadline)
        keep = False
        try:
            if head.status // 100 != 2:
                refusal = self._refusal(connection, head, address, method, path, deadline)
                keep = _keeps(head) and head.status < 500 and refusal.code != ""  # then its body was read whole
                raise refusal
            if head.status == 206:
                raise ProtocolViolation(f"{method} {path}: expected the whole answer from {address}, got a range of it")
            data = _read_body(connection, head.length, max_bytes, deadline, f"{method} {path} at {address}")
            keep = _keeps(head)
            return data, connection.peer
        finally:
            self._put_back(address, connection, keep)

    def _refusal(
        self, connection: _Connection, head: _Head, address: str, method: str, path: str, deadline: float
    ) -> RemoteError:
        what = f"{method} {path} at {address}"
        code, message = "", ""
        try:
            body = json.loads(_read_body(connection, head.length, 1 << 16, deadline, what))
            code, message = str(body["error"])[:80], str(body["message"])[:1000]
        except (ValueError, KeyError, TypeError, RecursionError, NetworkError) as error:
            message = f"(its explanation cannot be read: {type(error).__name__})"
        return RemoteError(f"{what}: refused with {head.status} {code}: {message}", head.status, code)

    def _exchange(
        self,
        address: str,
        method: str,
        path: str,
        headers: str,
        body: bytes,
        expect_peer: str | None,
        deadline: float,
    ) -> tuple[_Connection, _Head]:
        """Send a request and read the answer's head; once more if a kept connection turns out to be dead."""
        if not path.startswith("/") or not path.isascii() or any(ord(c) <= 32 or ord(c) == 127 for c in path):
            raise UsageError(f"request: expected a path of printable ASCII from /, got {path[:80]!r}")
        lead = f"{method} {path} HTTP/1.1\r\nHost: {address}\r\n{headers}"
        lead += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n" if body else "\r\n"
        while True:
            connection = self._take(address, deadline)
            kept = connection.used
            try:
                self._check_peer(address, connection, expect_peer)
                connection.used = True
                connection.tls.settimeout(_left(deadline, f"{method} {path} at {address}"))
                connection.tls.sendall(lead.encode("ascii") + body)
                return connection, _read_head(connection, deadline, f"{method} {path} at {address}")
            except ForebayError as error:
                connection.tls.close()
                if kept and isinstance(error, PeerGoneError):
                    continue
                raise
            except OSError as error:
                connection.tls.close()
                if kept and not isinstance(error, TimeoutError):
                    continue
                raise _unreachable(f"{method} {path}", address, error) from error
            except BaseException:
                connection.tls.close()
                raise

    def _check_peer(self, address: str, connection: _Connection, expect_peer: str | None) -> None:
        peer_id = connection.peer.peer_id
        if expect_peer is not None and peer_id != expect_peer:
            raise WrongPeerError(
                f"peer at {address}: expected {expect_peer}, got {peer_id} ({connection.peer.name}). "
                "Nothing was asked of it; find the provider's address again."
            )
        if self.identity is not None and self.identity.is_revoked(connection.peer):
            raise NetworkError(f"peer at {address}: {peer_id} ({connection.peer.name}) is revoked in this network")

    def _take(self, address: str, deadline: float) -> _Connection:
        """A kept connection that is still young, or a new one."""
        oldest = time.monotonic() - KEEP_IDLE_S
        with self._lock:
            idle = self._idle.get(address, [])
            while idle:
                connection = idle.pop()
                if connection.idle_since >= oldest:
                    return connection
                connection.tls.close()
        return self._connect(address, deadline)

    def _connect(self, address: str, deadline: float) -> _Connection:
        plain: socket.socket | None = None
        try:
            plain = socket.create_connection(parse_address(address), timeout=_left(deadline, address))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is None:
                return _Connection(plain, Peer("", b"", address))
            tls = self._context.wrap_socket(plain)
        except OSError as error:
            if plain is not None:
                plain.close()
            raise _unreachable("connect", address, error) from error
        der = tls.getpeercert(binary_form=True)
        assert der is not None  # CERT_REQUIRED
        assert self.identity is not None  # no context without one
        try:
            return _Connection(tls, self.identity.peer(der))
        except ProtocolViolation:
            tls.close()
            raise

    def _put_back(self, address: str, connection: _Connection, keep: bool) -> None:
        if keep and not connection.extra:
            connection.idle_since = time.monotonic()
            with self._lock:
                idle = self._idle.setdefault(address, [])
                if len(idle) < MAX_IDLE_PER_PEER:
                    idle.append(connection)
                    return
        connection.tls.close()


class WrongPeerError(NetworkError):
    """Another peer stands at an address than the one that was asked for."""


class PeerGoneError(NetworkError):
    """The peer closed the connection before it answered a byte."""


def _close_all(idle: dict[str, list[_Connection]]) -> None:
    for connections in idle.values():
        for connection in connections:
            connection.tls.close()
    idle.clear()


def _keeps(head: _Head) -> bool:
    return head.headers.get("connection", "").lower() != "close"


def _left(deadline: float, what: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise NetworkError(f"{what}: no full answer in time. The peer is slow or gone; ask another.")
    return left


def _unreachable(what: str, address: str, error: OSError) -> NetworkError:
    text = str(error)
    hint = "Is the peer running, and the address right?"
    if isinstance(error, (ssl.SSLError, ConnectionResetError, BrokenPipeError)):
        hint = "It may be stopping or full. "
        hint += "Both sides need a certificate of the same network: see `forebay network join`."
    return NetworkError(f"{what}: cannot reach {address}: {type(error).__name__}: {text}. {hint}")


def _receive(connection: _Connection, deadline: float, what: str) -> bytes:
    try:
        connection.tls.settimeout(_left(deadline, what))
        return connection.tls.recv(16384)
    except TimeoutError as error:
        raise NetworkError(f"{what}: no full answer in time. The peer is slow or gone; ask another.") from error


def _read_head(connection: _Connection, deadline: float, what: str) -> _Head:
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) > MAX_HEAD_BYTES:
            raise ProtocolViolation(f"{what}: expected an HTTP head of at most {MAX_HEAD_BYTES} bytes")
        piece = _receive(connection, deadline, what)
        if not piece:
            if data:
                raise ProtocolViolation(f"{what}: the peer closed the connection amid its answer")
            raise PeerGoneError(
                f"{what}: the peer closed the connection before it answered. It may be stopping or full. "
                "Both sides need a certificate of the same network: see `forebay network join`."
            )
        data += piece
    connection.extra = bytes(data[end + 4 :])
    status_line, *lines = data[:end].decode("latin-1").split("\r\n")
    match = _STATUS_LINE.fullmatch(status_line)
    if match is None:
        raise ProtocolViolation(f"{what}: expected an HTTP status line, got {status_line[:80]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name.lower() in headers:
            raise ProtocolViolation(f"{what}: a malformed or repeated header, {line[:80]!r}")
        headers[name.lower()] = value.strip()
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdigit() and len(length) <= 18) or "transfer-encoding" in headers:
        raise ProtocolViolation(f"{what}: expected a Content-Length, got {length[:40]!r}")
    return _Head(int(match.group(1)), headers, int(length))


def _read_body(connection: _Connection, length: int, max_bytes: int, deadline: float, what: str) -> bytes:
    if length > max_bytes:
        raise ProtocolViolation(f"{what}: expected at most {max_bytes} bytes, got {length} announced")
    data = bytearray(connection.extra[:length])
    connection.extra = connection.extra[length:]
    while len(data) < length:
        try:
            piece = _receive(connection, deadline, what)
        except OSError as error:
            raise NetworkError(f"{what}: broke off at byte {len(data)} of {length}: {error}") from error
        if not piece:
            raise NetworkError(f"{what}: the peer closed at byte {len(data)} of {length}")
        data += piece
    if len(data) > length:
        raise ProtocolViolation(f"{what}: expected {length} bytes as announced, got more")
    return bytes(data)


def _receive_into(connection: _Connection, into: memoryview, timeout_s: float, what: str) -> None:
    """Fill `into` from the connection, with pieces of up to CHUNK_BYTES."""
    first = connection.extra[: len(into)]
    connection.extra = connection.extra[len(into) :]
    moved = len(first)
    into[:moved] = first
    connection.tls.settimeout(timeout_s)
    since, since_bytes, fault = time.monotonic(), 0, ""
    while moved < len(into) and not fault:
        try:
            got = connection.tls.recv_into(into[moved : moved + CHUNK_BYTES])
        except OSError as error:
            got, fault = 0, f"{type(error).__name__}: {error}"
        if not got:
            fault = fault or "the peer closed the connection"
        moved += got
        if (now := time.monotonic()) - since >= timeout_s:
            if moved - since_bytes < MIN_BYTES_PER_S * timeout_s:
                fault = fault or f"stalled: under {MIN_BYTES_PER_S} bytes/s for {timeout_s:g} s"
            since, since_bytes = now, moved
    if moved < len(into):
        text = f"{what}: broke off at byte {moved} of {len(into)}: {fault}. Resume from another peer."
        raise BrokenOffError(text, moved)


class BrokenOffError(NetworkError):
    """A body ended before its announced length; `received` bytes of it came."""

    def __init__(self, message: str, received: int) -> None:
        super().__init__(message)
        self.received = received
