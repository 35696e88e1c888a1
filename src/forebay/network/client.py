"""Requests to peers over mutual TLS 1.3, or over plain HTTP where a caller says so.

Hides: kept connections, when a request is sent again, and every check of what a peer says. A peer may be pinned by
its id, or asked for by role: both are checked, with its revocation, before a byte of the request is sent, on a kept
connection as on a new one. Lengths are checked before bytes are kept, and a peer that drips is dropped.
"""

from __future__ import annotations

import json
import secrets
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from urllib3.util import SKIP_HEADER

from forebay.errors import NetworkError, ProtocolViolation, UsageError
from forebay.network.addresses import parse_address as parse_address
from forebay.network.addresses import peer_address
from forebay.network.http import (
    CHUNK_BYTES as CHUNK_BYTES,
)
from forebay.network.http import (
    FAULTS,
    Answer,
    Connection,
    CutHeadError,
    HTTPException,
    KeptConnections,
    PlainConnection,
    TlsConnection,
    bounded_context,
    exchange,
    left,
)
from forebay.network.peer import Peer
from forebay.network.retry import retry_after_s

if TYPE_CHECKING:
    from forebay.network.pki.identity import Identity  # what proves a peer is needed with one only

MAX_HEAD_BYTES = 32 << 10
MAX_JSON_BYTES = 16 << 20
MAX_IDLE_PER_PEER = 8
MIN_BYTES_PER_S = 4096  # slower than this over a whole time-out is a stall
_MAX_WAIT_S = 3600.0
IDEMPOTENCY_HEADER = "Idempotency-Key"
_NO_HEADERS = {"User-Agent": SKIP_HEADER, "Accept-Encoding": SKIP_HEADER}  # 50 bytes of each request


class RemoteError(NetworkError):
    """A peer refused a request."""

    def __init__(self, message: str, status: int, code: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status  # HTTP
        self.code = code  # the peer's word for its reason
        self.wait_s = wait_s  # seconds that it asks to wait before another try (Retry-After); 0 if it does not


class WrongPeerError(NetworkError):
    """Another peer stands at an address than the one that was asked for, or one without the role."""


class PeerGoneError(NetworkError):
    """The connection was lost before the answer came. What the request was to change may be changed or not."""


class BrokenOffError(NetworkError):
    """A body ended before its announced length; `received` bytes of it came."""

    def __init__(self, message: str, received: int) -> None:
        super().__init__(message)
        self.received = received


T = TypeVar("T")


@dataclass(frozen=True)
class _Request:
    address: str
    method: str
    path: str
    body: bytes
    expect_peer: str | None
    role: str | None
    deadline: float  # of time.monotonic, for the whole of it, or for the head where a long body follows
    headers: Mapping[str, str]

    @property
    def what(self) -> str:
        return f"{self.method} {self.path} at {self.address}"


class Client:
    """Asks peers of one network; without an identity a host that is trusted, by plain HTTP, on a network that is.

    Share it between threads; `close` it, or let it go with the last reference. A GET is sent again, once, on a new
    connection when a kept one fails. A POST carries a key of its own (`Idempotency-Key`) and is sent again, once, with
    the same key when its connection is lost: the server answers a repeated key with its first answer. Nothing is sent
    again after a time-out.
    """

    def __init__(self, identity: Identity | None) -> None:
        self.identity = identity
        self._context = bounded_context(identity.client_context()) if identity is not None else None
        self._kept = KeptConnections(MAX_IDLE_PER_PEER)

    def close(self) -> None:
        """Close the idle connections. The client stays usable."""
        self._kept.close()

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
        *,
        role: str | None = None,
    ) -> tuple[Any, Peer]:
        """Send an object (None: nothing; bytes: as they are), get one, and whose answer it is, all within `timeout_s`.

        `role` is what the peer's certificate must allow; otherwise nothing is sent. An answer that is not 2xx is a
        RemoteError, one that is no JSON, too large or malformed a ProtocolViolation.
        """
        body = (
            b"" if obj is None else obj if isinstance(obj, bytes) else json.dumps(obj, separators=(",", ":")).encode()
        )
        data, peer = self._small(address, method, path, body, max_bytes, expect_peer, timeout_s, role)
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

        `timeout_s` is for each wait; a peer slower than 4 KiB/s over this long counts as stalled. BrokenOffError if it
        stalls or cuts the body short: what it says to have come is there.
        """
        stop = start + len(into)
        request = _Request(address, "GET", path, b"", expect_peer, None, time.monotonic() + timeout_s, {
            "Range": f"bytes={start}-{stop - 1}"
        })  # fmt: skip

        def read(answer: Answer) -> None:
            given = answer.headers.get("content-range", "")
            expected = f"bytes {start}-{stop - 1}/"
            if answer.status != 206 or answer.length != stop - start or not given.startswith(expected):
                raise ProtocolViolation(
                    f"GET {path}: expected status 206 and {stop - start} bytes [{start}, {stop}) from {address}, "
                    f"got {answer.status}, {answer.length} bytes, Content-Range {given[:80]!r}"
                )
            answer.pace(timeout_s, MIN_BYTES_PER_S)
            _fill(answer, into, request.what)

        self._ask(request, read)

    def _small(
        self,
        address: str,
        method: str,
        path: str,
        body: bytes,
        max_bytes: int,
        expect_peer: str | None,
        timeout_s: float,
        role: str | None = None,
    ) -> tuple[bytes, Peer]:
        headers = {"Content-Type": "application/json"} if body else {}
        if method == "POST":
            headers[IDEMPOTENCY_HEADER] = secrets.token_hex(8)  # short: it is a part of every exchange
        deadline = time.monotonic() + timeout_s
        request = _Request(address, method, path, body, expect_peer, role, deadline, headers)

        def read(answer: Answer) -> bytes:
            if answer.status == 206:
                raise ProtocolViolation(f"{method} {path}: expected the whole answer from {address}, got a range of it")
            return _read_body(answer, max_bytes, request)

        return self._ask(request, read)

    def _ask(self, request: _Request, read: Callable[[Answer], T]) -> tuple[T, Peer]:
        """Send a request and read its answer; once more where that is allowed (see Client)."""
        path = request.path
        if not path.startswith("/") or not path.isascii() or any(ord(c) <= 32 or ord(c) == 127 for c in path):
            raise UsageError(f"request: expected a path of printable ASCII from /, got {path[:80]!r}")
        connection = self._kept.take(request.address) or self._connect(request)
        was_kept = connection.was_used
        try:
            return self._ask_once(connection, request, read)
        except PeerGoneError:
            if request.method != "POST" and not (request.method == "GET" and was_kept):
                raise
        return self._ask_once(self._connect(request), request, read)

    def _ask_once(self, connection: Connection, request: _Request, read: Callable[[Answer], T]) -> tuple[T, Peer]:
        answer, keep = None, False
        try:
            self._check_peer(connection.peer, request)
            answer = exchange(
                connection, request.method, request.path, {**_NO_HEADERS, **request.headers},
                request.body or None, request.deadline, MAX_HEAD_BYTES,
            )  # fmt: skip
            _check_head(answer, request.what)
            if answer.status // 100 != 2:
                refusal = _refusal(answer, request)
                keep = answer.can_keep and answer.status < 500
                raise refusal
            result = read(answer)
            keep = answer.can_keep
            return result, connection.peer
        except FAULTS as error:
            raise _fault(request, error) from error
        finally:
            if answer is not None:
                answer.close()
            if keep:
                self._kept.give(request.address, connection)
            else:
                connection.close()

    def _check_peer(self, peer: Peer, request: _Request) -> None:
        """Whether a peer may be asked now: before each request on a connection, be it new or kept."""
        address = request.address
        if request.expect_peer is not None and peer.peer_id != request.expect_peer:
            raise WrongPeerError(
                f"peer at {address}: expected {request.expect_peer}, got {peer.peer_id} ({peer.name}). "
                "Nothing was asked of it; find the provider's address again."
            )
        if request.role is not None and not peer.scope.allows(request.role):
            raise WrongPeerError(
                f"peer at {address}: expected a certificate with the role {request.role}, got {peer.peer_id} "
                f"({peer.name}) with {', '.join(sorted(peer.scope.roles))}. Nothing was asked of it."
            )
        if self.identity is not None and (refusal := self.identity.refusal(peer)) is not None:
            raise NetworkError(f"peer at {address}: {refusal}")

    def _connect(self, request: _Request) -> Connection:
        host, port = peer_address(request.address)
        made: Connection
        if self._context is None:
            made = PlainConnection(host, port)
            made.peer = Peer("", b"", request.address)
        else:
            made = TlsConnection(host, port, ssl_context=self._context, assert_hostname=False)
        try:
            made.timeout = left(request.deadline)
            made.connect()
            if self.identity is not None:
                sock: Any = made.sock
                made.peer = self.identity.peer(sock.getpeercert(binary_form=True))
        except FAULTS as error:
            made.close()
            raise NetworkError(_unreachable("connect", request.address, error)) from error
        except BaseException:
            made.close()
            raise
        return made


def _check_head(answer: Answer, what: str) -> None:
    length = answer.headers.get("content-length", "")
    is_length = length.isascii() and length.isdigit() and len(length) <= 18
    if answer.status != 204 and (not is_length or "transfer-encoding" in answer.headers):
        raise ProtocolViolation(f"{what}: expected a Content-Length, got {length[:40]!r}")


def _fault(request: _Request, error: Exception) -> NetworkError:
    """The network's error for what a connection raised before or within an answer."""
    if isinstance(error, TimeoutError):
        return NetworkError(f"{request.what}: no full answer in time. The peer is slow or gone; ask another.")
    if isinstance(error, CutHeadError):
        return PeerGoneError(f"{request.what}: the peer closed the connection amid its answer")
    if isinstance(error, ConnectionError) and isinstance(error, HTTPException):
        return PeerGoneError(
            f"{request.what}: the peer closed the connection before it answered. It may be stopping or full. "
            "Both sides need a certificate of the same network: see `forebay network join`."
        )
    if isinstance(error, OSError):
        return PeerGoneError(_unreachable(request.what, request.address, error))
    text = f"{type(error).__name__}: {str(error)[:200]}"
    return ProtocolViolation(f"{request.what}: expected an HTTP answer, got {text}")


def _unreachable(what: str, address: str, error: Exception) -> str:
    hint = "Is the peer running, and the address right?"
    if isinstance(error, (ssl.SSLError, ConnectionResetError, BrokenPipeError)):
        hint = "It may be stopping or full. "
        hint += "Both sides need a certificate of the same network: see `forebay network join`."
    return f"{what}: cannot reach {address}: {type(error).__name__}: {error}. {hint}"


def _refusal(answer: Answer, request: _Request) -> RemoteError:
    code, message = "", ""
    try:
        body = json.loads(_read_body(answer, 1 << 16, request))
        code, message = str(body["error"])[:80], str(body["message"])[:1000]
    except PeerGoneError:
        raise  # a refusal without its reason is a lost answer, and repeated like one
    except (ValueError, KeyError, TypeError, RecursionError, NetworkError) as error:
        message = f"(its explanation cannot be read: {type(error).__name__})"
    wait_s = retry_after_s(answer.headers.get("retry-after", ""), time.time()) or 0.0
    text = f"{request.what}: refused with {answer.status} {code}: {message}"
    return RemoteError(text, answer.status, code, min(_MAX_WAIT_S, wait_s))


def _read_body(answer: Answer, max_bytes: int, request: _Request) -> bytes:
    try:
        return answer.read(max_bytes, request.deadline)
    except ProtocolViolation as error:
        raise ProtocolViolation(f"{request.what}: {error}") from error
    except TimeoutError:
        raise
    except FAULTS as error:
        text = f"{request.what}: broke off at byte {answer.received} of {answer.length}: {error}"
        raise PeerGoneError(text) from error


def _fill(answer: Answer, into: memoryview, what: str) -> None:
    fault = ""
    while answer.received < len(into) and not fault:
        try:
            if not answer.readinto(into[answer.received :]):
                fault = "the peer closed the connection"
        except FAULTS as error:
            fault = f"{type(error).__name__}: {error}"
    if fault:
        text = f"{what}: broke off at byte {answer.received} of {len(into)}: {fault}. Resume from another peer."
        raise BrokenOffError(text, answer.received)
