"""Objects below an http(s) URL: ranges, persistent connections, redirects, proxies; on `storage.connections`.

Cost: urllib3 parses headers in Python (0.1 ms per request). In return, every wait has a limit, Retry-After is known,
and a body goes from the socket into one reused buffer.
"""

from __future__ import annotations

import base64
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Literal
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass  # only the environment's settings, not its client

import urllib3.util
from urllib3.connection import ProxyConfig

from forebay.errors import PrintableUrl, ProtocolError, UsageError, full_url, printable, printable_url
from forebay.storage.base import (
    CHUNK_BYTES,
    ObjectMeta,
    ObjectOrigin,
    PermanentError,
    Timeouts,
    TransientError,
    check_etag,
)
from forebay.storage.connections import (
    FAULTS,
    BlockedAddressError,
    Connection,
    ConnectionPool,
    PlainConnection,
    StreamedResponse,
    TlsConnection,
    bounded_context,
    exchange,
)
from forebay.storage.hosts import is_host, is_public
from forebay.storage.retry import retry_after_s

_KEEP_IDLE_S = 30.0
_MAX_REDIRECTS = 5
_REDIRECT_TTL_S = 120.0  # how long the target of a redirect is reused; signed URLs are valid for longer
_MAX_STORED_REDIRECTS = 1000
_MIN_BYTES_PER_S = 1024
_MAX_HEAD_BYTES = 64 << 10
_TRANSIENT = (408, 423, 425, 429)
_THROTTLED = (429, 503)
_URL_CHARACTERS = "%/:@!$&'()*+,;=~[]|"  # of a path that is sent as it is; others would come back in an error's text


class WebOrigin(ObjectOrigin):
    """A directory of a web server. The query of its URL is sent with each request.

    Args:
        headers: Sent to the URL's own host only, not to the targets of redirects.
        same_host: Refuse redirects to other hosts.
        is_file: The URL is of one file, requested as it is, by the name "".
        untrusted: The URL came from the network: proxies of the environment are not used. `public`:
            connect to addresses of the public internet only, also after redirects, and refuse redirects to http.
    """

    def __init__(
        self, url: str, *, headers: Mapping[str, str] | None = None, timeouts: Timeouts | None = None,
        same_host: bool = False, untrusted: Literal["", "public", "any"] = "", is_file: bool = False,
    ) -> None:  # fmt: skip
        parts = urlsplit(full_url(url))
        if not parts.hostname:
            raise UsageError(
                f"open an origin: expected {parts.scheme}://HOST/PATH, got {printable_url(url)!r}. Check the URL."
            )
        self._base = parts._replace(path=parts.path.rstrip("/"), fragment="")
        self.url: str = PrintableUrl(urlunsplit(self._base))
        path = quote(parts.path, safe=_URL_CHARACTERS)
        self._file = urlunsplit(parts._replace(path=path, fragment="")) if is_file else ""
        self._headers = dict(headers or {})
        if parts.username is not None and "Authorization" not in self._headers:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        self._same_host, self._untrusted = same_host, untrusted
        self._timeouts, self._idle = timeouts or Timeouts(), ConnectionPool(keep_s=_KEEP_IDLE_S)
        self._redirects: dict[str, tuple[str, float]] = {}  # target and deadline by name

    def head(self, name: str) -> ObjectMeta:
        """See ObjectOrigin. Requests one byte, as signed URLs often allow only GET."""
        try:
            return self._head(name, {"Range": "bytes=0-0"})
        except PermanentError as error:
            if error.status != 416:
                raise
            return self._head(name, {})  # An empty object has no first byte.

    def _head(self, name: str, headers: Mapping[str, str]) -> ObjectMeta:
        with self._open(name, headers) as answer:
            content_range = re.fullmatch(r"bytes 0-0/([0-9]{1,18})", answer.headers.get("Content-Range", ""))
            size = int(content_range[1]) if content_range else answer.length if answer.status == 200 else None
            if size is None:
                raise PermanentError(f"{self.url}/{name}: the server sends no size")
            if answer.length == 1:
                list(self._body(name, answer, 2))  # To its end, so that the connection is kept.
            return ObjectMeta(size, _version(answer))

    def read(self, name: str, start: int, stop: int, etag: str = "") -> Iterator[memoryview]:
        with self._open(name, {"Range": f"bytes={start}-{stop - 1}"}) as answer:
            check_etag(f"{self.url}/{name}", etag, _version(answer))
            what, skip = f"{self.url}/{name}", 0  # `skip`: bytes before `start`, of a server that ignores ranges.
            header = answer.headers.get("Content-Range")  # rclone's server sends it with status 200.
            match = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]+|\*)", header or "")
            first, last = (int(match[1]), int(match[2])) if match else (-1, -1)
            if answer.status == 200 and (first, last) != (start, stop - 1):
                if answer.length is not None and answer.length < stop:
                    raise PermanentError(
                        f"{what} has {answer.length} bytes, fewer than the {stop} of the dataset's table"
                    )
                skip = start
            elif first != start:
                raise ProtocolError(f"{what}: expected bytes [{start}, {stop}), got Content-Range {header!r}")
            elif last != stop - 1:
                raise PermanentError(f"{what} ends at byte {last + 1}, before {stop}")
            for _ in self._body(name, answer, skip):
                pass
            yield from self._body(name, answer, stop - start)

    def get(self, name: str, max_bytes: int) -> bytes:
        return self.get_with_headers(name, max_bytes)[0]

    def get_with_headers(self, name: str, max_bytes: int, address: str = "") -> tuple[bytes, Mapping[str, str]]:
        """Like `get`, with the headers of the response; from `address` in place of the name's own, if given."""
        with self._open(name, {}, address) as answer:
            what, length, data = f"{self.url}/{name}", answer.length, bytearray()
            for chunk in self._body(name, answer, max_bytes + 1) if (length or 0) <= max_bytes else ():
                data += chunk
            if max(length or 0, len(data)) > max_bytes:
                raise PermanentError(f"{what} is larger than {max_bytes} bytes")
            if length is not None and len(data) < length:
                raise TransientError(f"{what}: the body ended at byte {len(data)} of {length}")
            return bytes(data), answer.headers

    @contextmanager
    def _open(self, name: str, request_headers: Mapping[str, str], address: str = "") -> Iterator[StreamedResponse]:
        """Send a GET and follow redirects."""
        own = self._base._replace(path=f"{self._base.path}/{quote(name)}")
        address = address or self._file or urlunsplit(own)
        redirect, deadline = self._redirects.get(name, ("", 0.0))
        is_stored, was_refused = bool(redirect) and deadline > time.monotonic(), False
        target = redirect if is_stored else address
        for _ in range(_MAX_REDIRECTS + 1):
            headers = {"User-Agent": "forebay", "Accept-Encoding": "identity", **request_headers}
            headers |= self._headers if _host(target) == _host(address) else {}
            try:
                connection, answer = self._send(target, headers)
            except TransientError:
                self._redirects.pop(name, None)  # The next try asks the origin, which may redirect elsewhere by now.
                raise
            try:
                if answer.status in (200, 206):
                    if target != address:
                        if len(self._redirects) >= _MAX_STORED_REDIRECTS:
                            self._redirects.clear()
                        self._redirects[name] = (target, time.monotonic() + _REDIRECT_TTL_S)
                    yield answer
                    return
                location, refusal = (
                    answer.headers.get("Location"),
                    partial(_status_error, f"{self.url}/{name}".rstrip("/"), answer),
                )
            finally:
                self._close(connection, answer)
            if answer.status in (301, 302, 303, 307, 308) and location:
                try:
                    target = urljoin(target, location)
                    _ = urlsplit(target).port
                except ValueError as cause:
                    raise refusal() from cause
                if self._same_host and _host(target) != _host(address):
                    raise refusal()
            elif is_stored or (target != address and answer.status == 403 and not was_refused):
                is_stored, was_refused, target = False, True, address  # a signed URL that expired
                self._redirects.pop(name, None)
            else:
                raise refusal()
            check_redirect(address, target, https_only=self._untrusted == "public")
        raise PermanentError(f"{self.url}/{name}: more than {_MAX_REDIRECTS} redirects")

    def _send(self, target: str, headers: dict[str, str]) -> tuple[Connection, StreamedResponse]:
        """Send a GET and read the head of the response; repeat it if a persistent connection was closed."""
        parts = urlsplit(target)
        path = quote(urlunsplit(("", "", parts.path or "/", parts.query, "")), safe=f"{_URL_CHARACTERS}?")
        stall_s = self._timeouts.stall_s
        while True:
            connection = self._idle.acquire(_host(target))
            is_reused = connection is not None
            connection = connection or self._connection(parts)
            connection.key = _host(target)
            try:
                if not is_reused:
                    connection.timeout = waits_s = self._timeouts.connect_s
                    connection.connect()
                if connection.proxy is not None and parts.scheme == "http":
                    path = f"http://{parts.netloc.rpartition('@')[2]}{path}"
                    headers = {**headers, **_proxy_headers(connection.proxy)}
                waits_s = stall_s
                deadline = time.monotonic() + stall_s
                answer = exchange(connection, "GET", path, headers, None, deadline, _MAX_HEAD_BYTES)
                return connection, answer
            except ssl.SSLCertVerificationError as error:
                connection.close()
                raise PermanentError(f"{self.url}: its certificate is not trusted: {error.verify_message}") from error
            except BlockedAddressError as error:
                raise PermanentError(f"{self.url}: {error}") from error
            except (*FAULTS, ValueError, ProtocolError) as error:
                connection.close()
                if is_reused and not isinstance(error, (TimeoutError, ProtocolError)):
                    continue
                location = f"{connection.host}:{connection.port}"
                text = f"{self.url}: cannot be reached at {location}: {type(error).__name__}: {error}"
                if isinstance(error, TimeoutError):
                    text = f"{self.url}: no answer from {location} in {waits_s:g} s"
                raise TransientError(text) from error
            except BaseException:
                connection.close()
                raise

    def _body(self, name: str, answer: StreamedResponse, num_bytes: int) -> Iterator[memoryview]:
        """Yield `num_bytes` of a body by 256 KiB in one buffer; fewer where it ends. A dripping server is a fault."""
        what, stall_s = f"{self.url}/{name}".rstrip("/"), self._timeouts.stall_s
        buffer = memoryview(bytearray(min(num_bytes, CHUNK_BYTES)))
        answer.pace(stall_s, _MIN_BYTES_PER_S)
        while num_bytes:
            filled, limit, began = 0, min(num_bytes, CHUNK_BYTES), time.monotonic()
            try:
                while filled < limit and (count := answer.readinto(buffer[filled:limit])):
                    filled += count
                    if time.monotonic() - began > stall_s:
                        break
            except TimeoutError as error:
                reason = str(error) if "stalled" in str(error) else f"no byte for {stall_s:g} s"
                raise TransientError(f"{what}: {reason}") from error
            except (*FAULTS, ValueError) as error:
                raise TransientError(f"{what}: the connection failed: {type(error).__name__}: {error}") from error
            if not filled:
                return
            num_bytes -= filled
            yield buffer[:filled]

    def _close(self, connection: Connection, answer: StreamedResponse) -> None:
        """Keep the connection if the body was read to its end, else close it."""
        can_keep = answer.can_keep
        answer.close()
        if can_keep:
            self._idle.release(connection.key, connection)
        else:
            connection.close()

    def _connection(self, parts: SplitResult) -> Connection:
        try:
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise PermanentError(f"{parts.scheme}: expected a URL with HOST or HOST:PORT") from None
        if not is_host(host):
            raise PermanentError(f"{parts.scheme}://{host[:300]}: expected a host name")
        proxy = None if self._untrusted else _proxy_of(parts)
        peer_host, peer_port = (proxy.host or "", proxy.port) if proxy else (host, port)
        config = ProxyConfig(None, False, None, None) if proxy else None
        connection: Connection
        if parts.scheme != "https":
            connection = PlainConnection(peer_host, peer_port or 80, proxy=proxy, proxy_config=config)
        else:
            peer_port = peer_port or (443 if proxy is None else 80)
            connection = TlsConnection(
                peer_host, peer_port, ssl_context=self._context, proxy=proxy, proxy_config=config
            )
            if proxy is not None:
                connection.set_tunnel(host, port or 443, _proxy_headers(proxy), proxy.scheme or "http")
        connection.public_only = self._untrusted == "public"
        return connection

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return bounded_context(ssl.create_default_context())


def _version(answer: StreamedResponse) -> str:
    return printable(answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "")


def _host(address: str) -> tuple[str, str]:
    parts = urlsplit(address)
    return parts.scheme, parts.netloc


def _proxy_of(parts: SplitResult) -> urllib3.util.Url | None:
    address = getproxies().get(parts.scheme)
    if not address or proxy_bypass(parts.hostname or ""):
        return None
    return urllib3.util.parse_url(address if "://" in address else f"http://{address}")


def _proxy_headers(proxy: urllib3.util.Url) -> dict[str, str]:
    return dict(urllib3.util.make_headers(proxy_basic_auth=unquote(proxy.auth))) if proxy.auth else {}


def _status_error(what: str, answer: StreamedResponse) -> TransientError | PermanentError:
    status = answer.status
    text = f"{what}: HTTP status {status} {answer.reason}"
    text += ", so it has fewer bytes than expected" if status == 416 else ""
    if status in _TRANSIENT or status >= 500:
        wait_s = retry_delay_s(answer.headers)
        return TransientError(text, wait_s=wait_s, throttled=status in _THROTTLED or wait_s > 0)
    return PermanentError(text, status=status, code=answer.headers.get("X-Error-Code", ""))


def retry_delay_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that a server asks to wait, at most an hour; 0 if it does not.

    Read from Retry-After, `RateLimit: "api";r=0;t=55`, or X-RateLimit-Reset (seconds or Unix time).
    """
    now = time.time()
    limit = re.search(r"\bt\s*=\s*(\d{1,9})", headers.get("RateLimit", ""))
    reset = headers.get("X-RateLimit-Reset") or headers.get("X-Rate-Limit-Reset") or ""
    wait_s = retry_after_s(headers.get("Retry-After") or (limit[1] if limit else "") or reset, now) or 0.0
    return min(3600.0, max(0.0, wait_s - now) if wait_s > 1e9 else wait_s)


def check_redirect(origin: str, target: str, *, https_only: bool) -> None:
    """Refuse a redirect to other schemes than http and https (`https_only`: than https), and from a public address to
    one of this machine, its networks or a cloud's metadata. Raises PermanentError."""
    source, destination = urlsplit(origin), urlsplit(target)
    if destination.scheme not in ("http", "https") or (https_only and destination.scheme != "https"):
        expected = "https" if https_only else "http or https"
        raise PermanentError(f"{source.hostname}: expected a redirect to {expected}, got one to {destination.scheme!r}")
    if _is_private(destination.hostname) and not _is_private(source.hostname):
        raise PermanentError(
            f"{source.hostname}: expected a redirect to a public address, got one to {destination.hostname}"
        )


def _is_private(host: str | None) -> bool:
    """Whether a host has an address that is not of the public internet; False if no address is known."""
    try:
        return not all(is_public(str(entry[4][0])) for entry in socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False
