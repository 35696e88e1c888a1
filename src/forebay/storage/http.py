"""Objects below an http(s) address: ranges, kept connections, redirects, proxies. On the connections of network.http.

What the choice costs: heads are parsed in Python (0.1 ms a request); in return every wait has a limit of ours, what a
server asks to wait is known, and a body goes from the socket into one reused buffer.
"""

import base64
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Generator, Iterator, Mapping
from typing import Literal
from urllib.request import getproxies, proxy_bypass  # the environment's settings, and nothing of its client

import urllib3.util
from urllib3.connection import ProxyConfig

from forebay.errors import ProtocolViolation, UsageError
from forebay.network.addresses import is_host, is_public
from forebay.network.http import (
    FAULTS,
    Answer,
    BlockedAddressError,
    Connection,
    KeptConnections,
    PlainConnection,
    TlsConnection,
    bounded_context,
    exchange,
)
from forebay.network.retry import retry_after_s
from forebay.storage.base import STEP_BYTES, Head, HeadOrigin, PermanentError, Timeouts, TransientError, check_etag

_KEEP_IDLE_S = 30.0
_MOST_REDIRECTS = 5
_MOVED_S = 120.0  # how long an object is asked for where a redirect led; signed addresses live for longer
_MOST_MOVED = 1000
_LEAST_BYTES_PER_S = 1024
_MAX_HEAD_BYTES = 64 << 10
_PASSING = (408, 423, 425, 429)
_THROTTLED = (429, 503)


class WebOrigin(HeadOrigin):
    """A directory of a web server. The query of its URL, if any, goes with each request and into no message.

    Args:
        headers: Sent to the URL's own host only, never where a redirect leads.
        same_host: A redirect to another host is refused.
        foreign: The URL is a stranger's (see store.foreign): no proxy of the environment is used. `public`: only
            addresses of the public internet are connected to, also where a redirect leads, and none leads to http.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        patience: Timeouts | None = None,
        same_host: bool = False,
        foreign: Literal["", "public", "any"] = "",
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if not parts.hostname:
            raise UsageError(f"open an origin: expected {parts.scheme}://HOST/PATH, got {url!r}. Check the URL.")
        self._base = parts._replace(path=parts.path.rstrip("/"), fragment="")
        host = parts.netloc.rpartition("@")[2]
        self.url = urllib.parse.urlunsplit((parts.scheme, host, self._base.path, "", ""))
        self._headers = dict(headers or {})
        if parts.username is not None and "Authorization" not in self._headers:
            pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        self._patience = patience or Timeouts()
        self._same_host, self._foreign = same_host, foreign
        self._pool = _Pool(self._patience, foreign)
        self._moved: dict[str, tuple[str, float]] = {}

    def head(self, name: str) -> Head:
        """See HeadOrigin. Asks for one byte, as a signed address often allows nothing but GET."""
        connection, answer = self._open(name, {"Range": "bytes=0-0"})
        given = re.fullmatch(r"bytes 0-0/([0-9]{1,18})", answer.headers.get("Content-Range", ""))
        size = int(given[1]) if given else answer.length if answer.status == 200 else None
        etag = answer.headers.get("ETag", "")
        self._pool.put_back(connection, answer)
        if size is None:
            raise PermanentError(f"{self.url}/{name}: the server does not tell its size")
        return Head(size, etag)

    def read(self, name: str, start: int, stop: int, etag: str = "") -> Iterator[memoryview]:
        connection, answer = self._open(name, {"Range": f"bytes={start}-{stop - 1}"})
        try:
            check_etag(f"{self.url}/{name}", etag, answer.headers.get("ETag", ""))
            skip = self._check_range(name, answer, start, stop)
            body = _Body(answer, self._patience.stall_s, f"{self.url}/{name}")
            while skip and (data := body.next(skip)):
                skip -= len(data)
            left = stop - start
            while left and (data := body.next(left)):
                left -= len(data)
                yield data
        finally:
            self._pool.put_back(connection, answer)

    def get(self, name: str, max_bytes: int) -> bytes:
        return self.ask(name, max_bytes)[0]

    def ask(self, name: str, max_bytes: int, address: str = "") -> tuple[bytes, Mapping[str, str]]:
        """As `get`, and the answer's headers; from that address, if one is given, in place of the name's own."""
        connection, answer = self._open(name, {}, address)
        try:
            what, expected = f"{self.url}/{name}", answer.length
            if expected is not None and expected > max_bytes:
                raise PermanentError(f"{what} is larger than {max_bytes} bytes")
            body = _Body(answer, self._patience.stall_s, what)
            data = bytearray()
            while piece := body.next(max_bytes + 1 - len(data)):
                data += piece
            if expected is not None and len(data) < expected:
                raise TransientError(f"{what}: the body ended at byte {len(data)} of {expected}")
            if len(data) > max_bytes:
                raise PermanentError(f"{what} is larger than {max_bytes} bytes")
            return bytes(data), answer.headers
        finally:
            self._pool.put_back(connection, answer)

    def stream(
        self, address: str, start: int, asked: Mapping[str, str]
    ) -> tuple[bool, Mapping[str, str], Generator[memoryview, None, None]]:
        """What follows byte `start` of the object at an address, whatever its size; `asked` are headers to send too.

        Whether the server knows ranges, as far as this answer shows; its headers; the bytes, in pieces each of which is
        valid until the next is asked for. Close it to give the rest up. Errors as of `read`.
        """
        connection, answer = self._open("", {"Range": f"bytes={start}-", **asked} if start else asked, address)

        def pieces() -> Generator[memoryview, None, None]:
            skip = 0 if answer.status == 206 else start
            try:
                yield memoryview(b"")
                body = _Body(answer, self._patience.stall_s, self.url)
                while piece := body.next(STEP_BYTES):
                    if skip < len(piece):
                        yield piece[skip:]
                    skip = max(0, skip - len(piece))
            finally:
                self._pool.put_back(connection, answer)

        opened = pieces()
        next(opened)  # from now on closing it closes the connection
        return answer.status == 206, answer.headers, opened

    def _open(self, name: str, asked: Mapping[str, str], address: str = "") -> tuple[Connection, Answer]:
        """The answer to a GET, redirects followed."""
        own = self._base._replace(path=f"{self._base.path}/{urllib.parse.quote(name)}")
        address = address or urllib.parse.urlunsplit(own)
        moved, until = self._moved.get(name, ("", 0.0))
        known = moved and until > time.monotonic()
        target = moved if known else address
        for _ in range(_MOST_REDIRECTS + 1):
            headers = {"User-Agent": "forebay", "Accept-Encoding": "identity", **asked}
            headers |= self._headers if _host(target) == _host(address) else {}
            connection, answer = self._pool.ask(target, headers, self.url)
            if answer.status in (200, 206):
                if target != address:
                    if len(self._moved) >= _MOST_MOVED:
                        self._moved.clear()
                    self._moved[name] = (target, time.monotonic() + _MOVED_S)
                return connection, answer
            location = answer.headers.get("Location")
            fault = _refusal(f"{self.url}/{name}", answer)
            self._pool.put_back(connection, answer)
            if answer.status in (301, 302, 303, 307, 308) and location:
                target = _joined(target, location, fault)
                if self._same_host and _host(target) != _host(address):
                    raise fault
            elif known:
                known, target = "", address  # a signed address that expired
                self._moved.pop(name, None)
            else:
                raise fault
            check_redirect(address, target, https_only=self._foreign == "public")
        raise PermanentError(f"{self.url}/{name}: more than {_MOST_REDIRECTS} redirects")

    def _check_range(self, name: str, answer: Answer, start: int, stop: int) -> int:
        """How many bytes of the body come before `start`: none, unless the server knows no ranges."""
        what = f"{self.url}/{name}"
        if answer.status == 200:
            if answer.length is not None and answer.length < stop:
                raise PermanentError(f"{what} has {answer.length} bytes, fewer than the {stop} of the dataset's table")
            return start
        given = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]+|\*)", answer.headers.get("Content-Range", ""))
        if given is None or int(given[1]) != start:
            told = answer.headers.get("Content-Range")
            raise ProtocolViolation(f"{what}: expected bytes [{start}, {stop}), got Content-Range {told!r}")
        if int(given[2]) != stop - 1:
            raise PermanentError(f"{what} ends at byte {int(given[2]) + 1}, before {stop}")
        return 0


class _Body:
    """The body of an answer, through one buffer; a server that drips is a fault."""

    def __init__(self, answer: Answer, stall_s: float, what: str) -> None:
        self._answer = answer
        self._stall_s = stall_s
        self._what = what
        self._buffer = memoryview(bytearray(STEP_BYTES))
        answer.pace(stall_s, _LEAST_BYTES_PER_S)

    def next(self, most: int) -> memoryview:
        """Up to 256 KiB; empty at the end or where the connection was closed."""
        filled, limit, began = 0, min(most, STEP_BYTES), time.monotonic()
        try:
            while filled < limit and (got := self._answer.readinto(self._buffer[filled:limit])):
                filled += got
                if time.monotonic() - began > self._stall_s:
                    break
        except TimeoutError as error:
            told = str(error) if "stalled" in str(error) else f"no byte for {self._stall_s:g} s"
            raise TransientError(f"{self._what}: {told}") from error
        except (*FAULTS, ValueError) as error:
            raise TransientError(f"{self._what}: the connection failed: {type(error).__name__}: {error}") from error
        return self._buffer[:filled]


class _Pool:
    """Kept connections, by scheme and host; a proxy of the environment is used where it says so."""

    def __init__(self, patience: Timeouts, foreign: str) -> None:
        self._patience = patience
        self._foreign = foreign
        self._kept = KeptConnections(keep_s=_KEEP_IDLE_S)
        self._context: ssl.SSLContext | None = None

    def ask(self, target: str, headers: dict[str, str], what: str) -> tuple[Connection, Answer]:
        """Send a GET, and the answer's head; once more if a kept connection turns out to be dead."""
        parts = urllib.parse.urlsplit(target)
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        key = _host(target)
        while True:
            connection = self._kept.take(key)
            kept = connection is not None
            connection = connection or self._make(parts)
            connection.key = key
            try:
                if not kept:
                    connection.timeout = self._patience.connect_s
                    connection.connect()
                if connection.proxy is not None and parts.scheme == "http":
                    path, headers = target, {**headers, **_proxy_headers(connection.proxy)}
                deadline = time.monotonic() + self._patience.stall_s
                return connection, exchange(connection, "GET", path, headers, None, deadline, _MAX_HEAD_BYTES)
            except ssl.SSLCertVerificationError as error:
                connection.close()
                raise PermanentError(f"{what}: its certificate is not trusted: {error.verify_message}") from error
            except BlockedAddressError as error:
                raise PermanentError(f"{what}: {error}") from error
            except (*FAULTS, ValueError, ProtocolViolation) as error:
                connection.close()
                if kept and not isinstance(error, (TimeoutError, ProtocolViolation)):
                    continue
                raise TransientError(_why(what, connection, error, self._patience)) from error
            except BaseException:
                connection.close()
                raise

    def put_back(self, connection: Connection, answer: Answer) -> None:
        """Keep a connection whose body was read to its end, or close it."""
        keep = answer.can_keep
        answer.close()
        if keep:
            self._kept.give(connection.key, connection)
        else:
            connection.close()

    def _make(self, parts: urllib.parse.SplitResult) -> Connection:
        try:
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise PermanentError(f"{parts.scheme}: no such address: {error}") from error
        if not is_host(host):
            raise PermanentError(f"{parts.scheme}://{host[:300]}: expected a host, got no name of one")
        proxy = None if self._foreign else _proxy_of(parts)
        at_host, at_port = (proxy.host or "", proxy.port) if proxy else (host, port)
        config = ProxyConfig(None, False, None, None) if proxy else None
        made: Connection
        if parts.scheme != "https":
            made = PlainConnection(at_host, at_port or 80, proxy=proxy, proxy_config=config)
        else:
            if self._context is None:
                self._context = bounded_context(ssl.create_default_context())
            made = TlsConnection(
                at_host, at_port or (443 if proxy is None else 80), ssl_context=self._context, proxy=proxy,
                proxy_config=config,
            )  # fmt: skip
            if proxy is not None:
                made.set_tunnel(host, port or 443, _proxy_headers(proxy), proxy.scheme or "http")
        made.public_only = self._foreign == "public"
        return made


def _joined(target: str, location: str, fault: Exception) -> str:
    try:
        joined = urllib.parse.urljoin(target, location)
        _ = urllib.parse.urlsplit(joined).port
    except ValueError as error:
        raise fault from error
    return joined


def _host(address: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(address)
    return parts.scheme, parts.netloc


def _proxy_of(parts: urllib.parse.SplitResult) -> urllib3.util.Url | None:
    address = getproxies().get(parts.scheme)
    if not address or proxy_bypass(parts.hostname or ""):
        return None
    return urllib3.util.parse_url(address if "://" in address else f"http://{address}")


def _proxy_headers(proxy: urllib3.util.Url) -> dict[str, str]:
    return dict(urllib3.util.make_headers(proxy_basic_auth=urllib.parse.unquote(proxy.auth))) if proxy.auth else {}


def _refusal(what: str, answer: Answer) -> TransientError | PermanentError:
    status = answer.status
    text = f"{what}: HTTP status {status} {answer.reason}"
    if status in _PASSING or status >= 500:
        wait_s = asked_wait_s(answer.headers)
        return TransientError(text, wait_s=wait_s, throttled=status in _THROTTLED or wait_s > 0)
    return PermanentError(text, status=status, code=answer.headers.get("X-Error-Code", ""))


def asked_wait_s(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait: Retry-After, or until its rate limit begins anew (`RateLimit:
    "api";r=0;t=55`, or X-RateLimit-Reset in seconds or Unix time); at most an hour, and 0 if it does not ask."""
    now = time.time()
    told = re.search(r"\bt\s*=\s*(\d{1,9})", headers.get("RateLimit", ""))
    reset = headers.get("X-RateLimit-Reset") or headers.get("X-Rate-Limit-Reset") or ""
    wait_s = retry_after_s(headers.get("Retry-After") or (told[1] if told else "") or reset, now) or 0.0
    return min(3600.0, max(0.0, wait_s - now) if wait_s > 1e9 else wait_s)


def check_redirect(origin: str, target: str, *, https_only: bool = False) -> None:
    """Refuse a redirect to anything but http and https, and from a public address to one inside: this machine, its
    networks, a cloud's metadata; with `https_only` also one to http."""
    was, goes = urllib.parse.urlsplit(origin), urllib.parse.urlsplit(target)
    if goes.scheme not in ("http", "https") or (https_only and goes.scheme != "https"):
        expected = "https" if https_only else "http or https"
        raise PermanentError(f"{was.hostname}: expected a redirect to {expected}, got one to {goes.scheme!r}")
    if _is_inside(goes.hostname) and not _is_inside(was.hostname):
        raise PermanentError(f"{was.hostname}: expected a redirect to a public address, got one to {goes.hostname}")


def _is_inside(host: str | None) -> bool:
    """Whether a host has an address that is not of the public internet; False if it has none that is known."""
    try:
        return not all(is_public(str(entry[4][0])) for entry in socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False


def _why(what: str, connection: Connection, error: Exception, patience: Timeouts) -> str:
    where = f"{connection.host}:{connection.port}"
    if isinstance(error, TimeoutError):
        waited = patience.connect_s if connection.sock is None else patience.stall_s
        return f"{what}: no answer from {where} in {waited:g} s"
    return f"{what}: cannot be reached at {where}: {type(error).__name__}: {error}"
