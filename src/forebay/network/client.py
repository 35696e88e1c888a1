"""HTTP client for peers over mutual TLS 1.3, or over plain HTTP without an identity.

Hides connection pooling, retries, and all checks of responses. The peer's id or role, and its revocation, are checked
before a byte of a request is sent, on new and on pooled connections. Lengths are checked before memory is allocated;
stalled peers are dropped.
"""

import json
import re
import secrets
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from urllib3.util import SKIP_HEADER

from forebay.base import Closing
from forebay.errors import NetworkError, ProtocolError, UsageError, printable
from forebay.network.messages import REFUSED
from forebay.network.peer import Peer
from forebay.network.tracing import client_span
from forebay.storage import connections
from forebay.storage.connections import FAULTS, Connection, StreamedResponse
from forebay.storage.hosts import parse_peer_address
from forebay.storage.retry import retry_after_s

if TYPE_CHECKING:
    from forebay.network.pki.identity import Identity  # its packages are not needed over plain HTTP

MAX_HEAD_BYTES = 32 << 10
MAX_JSON_BYTES = 16 << 20
MAX_IDLE_PER_PEER = 8
MIN_BYTES_PER_S = 4096  # a lower rate over a time-out is a stall
_MAX_WAIT_S = 3600.0
IDEMPOTENCY_HEADER = "Idempotency-Key"
CRLS_HEADER = "Forebay-CRLs"  # see crl_exchange.py
_NO_HEADERS = {"User-Agent": SKIP_HEADER, "Accept-Encoding": SKIP_HEADER}  # saves 50 bytes per request


class RemoteError(NetworkError):
    """A peer refused a request.

    Attributes:
        status: HTTP status. `code`: the peer's error code.
        wait_s: Seconds of its Retry-After header; 0 without one.
    """

    def __init__(self, message: str, status: int, code: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.wait_s = wait_s


class WrongPeerError(NetworkError):
    """The peer at an address has another id than expected, or lacks the role."""


class ConnectionLostError(NetworkError):
    """The connection was lost before the whole response was received; the request may have taken effect."""


class TruncatedBodyError(NetworkError):
    """A body ended before its announced length, after `received` bytes."""

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
    deadline: float  # of time.monotonic, for the whole request, or for its head if a long body follows
    headers: dict[str, str]

    @property
    def what(self) -> str:
        return f"{self.method} {self.path} at {self.address}"


class Client(Closing):
    """Sends requests to peers of one network; without an identity to a trusted host by plain HTTP. Thread-safe.

    A GET is repeated once, on a new connection, if a pooled connection fails. A POST carries an `Idempotency-Key` and
    is repeated once with the same key if its connection is lost: the server returns its first response for a repeated
    key. Nothing is repeated after a time-out. A response whose sender has other CRLs may take some seconds more.

    Args:
        identity: The node that sends; None for plain HTTP.
        context, read_peer: TLS without an identity, for joining a network: the context, and the function that
            parses the server's DER certificate. Use them with `expect_peer`.
    """

    def __init__(
        self, identity: "Identity | None", *, context: ssl.SSLContext | None = None,
        read_peer: Callable[[bytes], Peer] | None = None,
    ) -> None:  # fmt: skip
        self.identity = identity
        if identity is not None:
            context = identity.client_context()
            read_peer = identity.peer
        self._context = connections.bounded_context(context) if context is not None else None
        self._read_peer = read_peer
        self._pool = connections.ConnectionPool(MAX_IDLE_PER_PEER)

    def close(self) -> None:
        """Close the idle connections; the client stays usable."""
        self._pool.close()

    def request_json(
        self, address: str, method: str, path: str, obj: Any = None, expect_peer: str | None = None,
        timeout_s: float = 10.0, max_bytes: int = MAX_JSON_BYTES, *, role: str | None = None,
    ) -> tuple[dict[str, Any], Peer]:  # fmt: skip
        """Send an object as JSON (bytes unchanged, None as no body); return the object of the response, and its sender.

        Args:
            expect_peer: The id that the peer must have.
            timeout_s: For the whole request.
            role: The role that the peer's certificate must have.

        Raises:
            WrongPeerError: The peer has another id or lacks the role; nothing was sent.
            RemoteError: The status is not 2xx.
            ProtocolError: The response is not a JSON object, too large or malformed.
            NetworkError: The peer cannot be reached, is revoked, or does not answer in time.
        """
        body = b"" if obj is None else obj
        if not isinstance(body, bytes):
            body = json.dumps(obj, separators=(",", ":")).encode()
        data, peer = self._send_small(address, method, path, body, max_bytes, expect_peer, timeout_s, role)
        try:
            answer = json.loads(data)
            if not isinstance(answer, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"{method} {path}: expected JSON from {address}, got {data[:80]!r}: {error}") from error
        return answer, peer

    def get_bytes(
        self, address: str, path: str, max_bytes: int, expect_peer: str | None = None, timeout_s: float = 60.0
    ) -> bytes:
        """The body at a path, at most `max_bytes`; errors as of `request_json`."""
        return self._send_small(address, "GET", path, b"", max_bytes, expect_peer, timeout_s)[0]

    def read_range(
        self, address: str, path: str, into: memoryview, start: int, expect_peer: str | None = None,
        timeout_s: float = 20.0,
    ) -> int:  # fmt: skip
        """Read bytes [start, start + len(into)) of the resource at a path into `into`; return its size.

        `timeout_s` is for each wait; a peer slower than 4 KiB/s over this time counts as stalled. TruncatedBodyError if
        it stalls or ends the body early: its `received` bytes are in `into`.
        """
        stop = start + len(into)
        deadline = time.monotonic() + timeout_s
        request = _Request(
            address, "GET", path, b"", expect_peer, None, deadline, {"Range": f"bytes={start}-{stop - 1}"}
        )

        def read(response: StreamedResponse) -> int:
            content_range = response.headers.get("content-range", "")
            match = re.fullmatch(rf"bytes {start}-{stop - 1}/([0-9]{{1,18}})", content_range)
            if response.status != 206 or response.length != stop - start or match is None:
                raise ProtocolError(
                    f"expected status 206 and {stop - start} bytes [{start}, {stop}), got {response.status}, "
                    f"{response.length} bytes, Content-Range {content_range[:80]!r}"
                )
            response.pace(timeout_s, MIN_BYTES_PER_S)
            reason = ""
            while response.received < len(into) and not reason:
                try:
                    if not response.readinto(into[response.received :]):
                        reason = "the peer closed the connection"
                except FAULTS as error:
                    reason = f"{type(error).__name__}: {error}"
            if reason:
                raise TruncatedBodyError(
                    f"{request.what}: broke off at byte {response.received} of {len(into)}: {reason}. "
                    "Resume from another peer.",
                    response.received,
                )
            return int(match[1])

        return self._send(request, read)[0]

    def _send_small(
        self, address: str, method: str, path: str, body: bytes, max_bytes: int, expect_peer: str | None,
        timeout_s: float, role: str | None = None,
    ) -> tuple[bytes, Peer]:  # fmt: skip
        headers = {"Content-Type": "application/json"} if body else {}
        if method == "POST":
            headers[IDEMPOTENCY_HEADER] = secrets.token_hex(8)  # short: every exchange of a worker carries one
        deadline = time.monotonic() + timeout_s
        request = _Request(address, method, path, body, expect_peer, role, deadline, headers)

        def read(response: StreamedResponse) -> bytes:
            if response.status == 206:
                raise ProtocolError("expected the whole answer, got a range of it")
            return response.read(max_bytes, deadline)

        return self._send(request, read)

    def _send(self, request: _Request, read: Callable[[StreamedResponse], T]) -> tuple[T, Peer]:
        """Send a request and read its response; repeat it once where that is allowed (see Client)."""
        path = request.path
        if not re.fullmatch("/[!-~]*", path):
            raise UsageError(f"request: expected a path of printable ASCII from /, got {path[:80]!r}")
        with client_span(request.method, path, request.address, request.headers):
            connection = self._pool.acquire(self._key(request)) or self._connect(request)
            was_pooled = connection.was_used
            try:
                return self._send_once(connection, request, read)
            except ConnectionLostError:
                if request.method != "POST" and not (request.method == "GET" and was_pooled):
                    raise
            return self._send_once(self._connect(request), request, read)

    def _send_once(
        self, connection: Connection, request: _Request, read: Callable[[StreamedResponse], T]
    ) -> tuple[T, Peer]:
        response = None
        can_keep = False
        try:
            self._check_peer(connection.peer, request)
            response = connections.exchange(
                connection, request.method, request.path, {**_NO_HEADERS, **request.headers},
                request.body or None, request.deadline, MAX_HEAD_BYTES,
            )  # fmt: skip
            length = response.headers.get("content-length", "")
            is_length = re.fullmatch("[0-9]{1,18}", length)
            if response.status != 204 and (not is_length or "transfer-encoding" in response.headers):
                raise ProtocolError(f"expected a Content-Length, got {length[:40]!r}")
            if response.status // 100 != 2:
                refusal = self._refusal(response, request)
                can_keep = response.can_keep and response.status < 500
                raise refusal
            result = read(response)
            can_keep = response.can_keep
            return result, connection.peer
        except (ProtocolError, *FAULTS) as error:
            if self.identity is not None and (own := self.identity.refusal(self.identity.as_peer)) is not None:
                # It ended the handshake with an alert.
                raise RemoteError(f"{request.what}: {own[1]}. {self.identity.remedy(own[0])}", 403, own[0]) from error
            raise _fault(request, response, error) from error
        finally:
            if response is not None:
                response.close()
            if can_keep:
                self._pool.release(connection.key, connection)
            else:
                connection.close()
            digest = response.headers.get(CRLS_HEADER, "") if response is not None else ""
            if digest and self.identity is not None:
                self.identity.contacts.add(request.address)
                if digest != self.identity.revocations.digest():
                    from forebay.network.crl_exchange import exchange_crls

                    exchange_crls(self, self.identity, request.address)

    def _refusal(self, response: StreamedResponse, request: _Request) -> RemoteError:
        code = "unknown"
        try:
            body = json.loads(response.read(1 << 16, request.deadline))
            code = printable(str(body["error"]), 80)
            message = printable(str(body["message"]), 1000)
        except (ValueError, KeyError, TypeError, RecursionError, ProtocolError):
            message = "its answer is not one of Forebay. Is another program at this address?"
        if code in REFUSED and self.identity is not None:
            message += f". {self.identity.remedy(code)}"
        wait_s = retry_after_s(response.headers.get("retry-after", ""), time.time()) or 0.0
        return RemoteError(
            f"{request.what}: refused with {response.status} {code}: {message}",
            response.status,
            code,
            min(_MAX_WAIT_S, wait_s),
        )

    def _check_peer(self, peer: Peer, request: _Request) -> None:
        """Check before each request, on new and pooled connections, that it may be sent to the peer."""
        address = request.address
        if request.expect_peer not in (None, peer.peer_id):
            raise WrongPeerError(
                f"peer at {address}: expected {request.expect_peer}, got {peer.peer_id} ({peer.name}). "
                "Nothing was sent to it; look up the provider's address again."
            )
        if request.role is not None and not peer.scope.allows(request.role):
            raise WrongPeerError(
                f"peer at {address}: expected a certificate with the role {request.role}, got {peer.peer_id} "
                f"({peer.name}) with {', '.join(sorted(peer.scope.roles))}. Nothing was sent to it."
            )
        if self.identity is not None and (refusal := self.identity.refusal(peer)) is not None:
            raise NetworkError(f"peer at {address}: {refusal[1]}")

    def _key(self, request: _Request) -> tuple[str, Any]:
        """Return the pool's key: a connection goes on with the certificate that it began with, which may expire."""
        return request.address, self.identity and self.identity.certificate

    def _connect(self, request: _Request) -> Connection:
        host, port = parse_peer_address(request.address)
        connection: Connection
        if self._context is None:
            connection = connections.PlainConnection(host, port)
            connection.peer = Peer("", b"", request.address)
        else:
            connection = connections.TlsConnection(host, port, ssl_context=self._context, assert_hostname=False)
        connection.key = self._key(request)
        try:
            connection.timeout = connections.remaining_s(request.deadline)
            connection.connect()
            if self._read_peer is not None:
                sock: Any = connection.sock
                connection.peer = self._read_peer(sock.getpeercert(binary_form=True) or b"")
        except BaseException as error:
            connection.close()
            if isinstance(error, FAULTS):
                raise NetworkError(_unreachable("connect", request.address, error)) from error
            raise
        return connection


def _fault(request: _Request, response: StreamedResponse | None, error: Exception) -> NetworkError:
    if isinstance(error, TimeoutError):
        return NetworkError(f"{request.what}: no full answer in time. The peer is slow or unreachable; ask another.")
    if isinstance(error, ProtocolError):
        return ProtocolError(f"{request.what}: {error}")
    if response is not None:
        return ConnectionLostError(
            f"{request.what}: broke off at byte {response.received} of {response.length}: {error}"
        )
    if isinstance(error, OSError):  # also where the peer closed the connection before its answer
        return ConnectionLostError(_unreachable(request.what, request.address, error))
    return ProtocolError(f"{request.what}: expected an HTTP answer, got {type(error).__name__}: {str(error)[:200]}")


def _unreachable(what: str, address: str, error: Exception) -> str:
    reason, hint = f"{type(error).__name__}: {error}", "Is the peer running, and the address right?"
    if isinstance(error, ssl.SSLCertVerificationError):
        is_stranger = error.verify_code in (18, 19, 20)  # OpenSSL: the issuer is unknown.
        reason = "its certificate is of another network" if is_stranger else f"its {error.verify_message}"
        hint = "Compare its certificate with yours, and the clocks: forebay network show DIR."
    elif isinstance(error, (ssl.SSLError, ConnectionResetError, BrokenPipeError, connections.TruncatedHeadError)):
        hint = (
            f"It is full, stops, refuses this certificate or speaks otherwise: TLS (https://{address}, --identity), "
            f"plain HTTP (http://{address}), or it is a DHT node (udp://{address})."
        )
    return f"{what}: cannot reach {address}: {reason}. {hint}"
