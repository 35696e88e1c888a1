"""Objects below an http(s) address, by the standard library: ranges, kept connections, redirects, proxies.

What the choice costs: heads are parsed in Python (60 us a request); in return every wait has a limit of ours, what a
server asks to wait is known, and a body goes from the socket into one reused buffer.
"""

import contextlib
import http.client
import ipaddress
import os
import re
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from email.message import Message
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from forebay.errors import ProtocolViolation, UsageError
from forebay.store.locks import at_fork
from forebay.store.origins import STEP_BYTES, Head, Origin, PassingError, Patience, RefusedError, check_etag

_MOST_IDLE = 64
_KEEP_IDLE_S = 30.0
_MOST_REDIRECTS = 5
_MOVED_S = 120.0  # how long an object is asked for where a redirect led; signed addresses live for longer
_MOST_MOVED = 1000
_LEAST_BYTES_PER_S = 1024
_PASSING = (408, 423, 425, 429)
_THROTTLED = (429, 503)


class WebOrigin:
    """A directory of a web server. The query of its URL, if any, goes with each request and into no message.

    Args:
        headers: Sent to the URL's own host only, never where a redirect leads.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, patience: Patience | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if not parts.hostname:
            raise UsageError(f"open an origin: expected {parts.scheme}://HOST/PATH, got {url!r}. Check the URL.")
        self._base = parts._replace(path=parts.path.rstrip("/"), fragment="")
        host = parts.netloc.rpartition("@")[2]
        self.url = urllib.parse.urlunsplit((parts.scheme, host, self._base.path, "", ""))
        self._headers = dict(headers or {})
        if parts.username is not None and "Authorization" not in self._headers:
            self._headers["Authorization"] = _basic(parts)
        self._patience = patience or Patience()
        self._pool = _Pool(self._patience)
        self._moved: dict[str, tuple[str, float]] = {}

    def head(self, name: str) -> Head:
        """See HeadOrigin. Asks for one byte, as a signed address often allows nothing but GET."""
        connection, response = self._open(name, {"Range": "bytes=0-0"})
        given = re.fullmatch(r"bytes 0-0/(\d+)", response.headers.get("Content-Range", ""))
        size = int(given[1]) if given else response.length if response.status == 200 else None
        etag = response.headers.get("ETag", "")
        self._pool.put_back(connection, response, False)
        if size is None:
            raise RefusedError(f"{self.url}/{name}: the server does not tell its size")
        return Head(size, etag)

    def read(self, name: str, start: int, stop: int, etag: str = "") -> Iterator[memoryview]:
        """See Origin."""
        connection, response = self._open(name, {"Range": f"bytes={start}-{stop - 1}"})
        keep = False
        try:
            check_etag(f"{self.url}/{name}", etag, response.headers.get("ETag", ""))
            skip = self._check_range(name, response, start, stop)
            body = _Body(connection, response, self._patience.stall_s, f"{self.url}/{name}")
            while skip and (data := body.next(skip)):
                skip -= len(data)
            left = stop - start
            while left and (data := body.next(left)):
                left -= len(data)
                yield data
            keep = left == 0 and response.length == 0 and not response.will_close
        finally:
            self._pool.put_back(connection, response, keep)

    def get(self, name: str, max_bytes: int) -> bytes:
        """See Origin."""
        return self.ask(name, max_bytes)[0]

    def ask(self, name: str, max_bytes: int, address: str = "") -> tuple[bytes, Message]:
        """As `get`, and the answer's headers; from that address, if one is given, in place of the name's own."""
        connection, response = self._open(name, {}, address)
        keep = False
        try:
            what, wanted = f"{self.url}/{name}", response.length
            if wanted is not None and wanted > max_bytes:
                raise RefusedError(f"{what} is larger than {max_bytes} bytes")
            body = _Body(connection, response, self._patience.stall_s, what)
            data = bytearray()
            while piece := body.next(max_bytes + 1 - len(data)):
                data += piece
            if wanted is not None and len(data) < wanted:
                raise PassingError(f"{what}: the body ended at byte {len(data)} of {wanted}")
            if len(data) > max_bytes:
                raise RefusedError(f"{what} is larger than {max_bytes} bytes")
            keep = response.length == 0 and not response.will_close
            return bytes(data), response.headers
        finally:
            self._pool.put_back(connection, response, keep)

    def stream(
        self, address: str, start: int, asked: Mapping[str, str]
    ) -> tuple[bool, Message, Generator[memoryview, None, None]]:
        """What follows byte `start` of the object at an address, whatever its size; `asked` are headers to send too.

        Returns:
            Whether the server knows ranges, as far as this answer shows; its headers; the bytes, in pieces each of
            which is valid until the next is asked for. Close it to give the rest up. Errors as of `read`.
        """
        connection, response = self._open("", {"Range": f"bytes={start}-", **asked} if start else asked, address)

        def pieces() -> Generator[memoryview, None, None]:
            skip = 0 if response.status == 206 else start
            try:
                yield memoryview(b"")
                body = _Body(connection, response, self._patience.stall_s, self.url)
                while piece := body.next(STEP_BYTES):
                    if skip < len(piece):
                        yield piece[skip:]
                    skip = max(0, skip - len(piece))
            finally:
                self._pool.put_back(connection, response, response.length == 0 and not response.will_close)

        found = pieces()
        next(found)  # from now on closing it closes the connection
        return response.status == 206, response.headers, found

    def sources(self) -> Sequence[Origin]:
        """See Origin."""
        return [self]

    def _address(self, name: str) -> str:
        return urllib.parse.urlunsplit(self._base._replace(path=f"{self._base.path}/{urllib.parse.quote(name)}"))

    def _open(
        self, name: str, asked: Mapping[str, str], address: str = ""
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The answer to a GET, redirects followed."""
        address = address or self._address(name)
        moved, until = self._moved.get(name, ("", 0.0))
        known = moved and until > time.monotonic()
        target = moved if known else address
        for _ in range(_MOST_REDIRECTS + 1):
            headers = {"User-Agent": "forebay", "Accept-Encoding": "identity", **asked}
            headers |= self._headers if _host(target) == _host(address) else {}
            connection, response = self._pool.ask(target, headers, self.url)
            if response.status in (200, 206):
                if target != address:
                    if len(self._moved) >= _MOST_MOVED:
                        self._moved.clear()
                    self._moved[name] = (target, time.monotonic() + _MOVED_S)
                return connection, response
            location = response.headers.get("Location")
            fault = _refusal(f"{self.url}/{name}", response)
            self._pool.put_back(connection, response, False)
            if response.status in (301, 302, 303, 307, 308) and location:
                target = urllib.parse.urljoin(target, location)
            elif known:
                known, target = "", address  # a signed address that expired
                self._moved.pop(name, None)
            else:
                raise fault
            check_redirect(address, target)
        raise RefusedError(f"{self.url}/{name}: more than {_MOST_REDIRECTS} redirects")

    def _check_range(self, name: str, response: http.client.HTTPResponse, start: int, stop: int) -> int:
        """How many bytes of the body come before `start`: none, unless the server knows no ranges."""
        what = f"{self.url}/{name}"
        if response.status == 200:
            if response.length is not None and response.length < stop:
                raise RefusedError(f"{what} has {response.length} bytes, fewer than the {stop} of the dataset's table")
            return start
        given = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("Content-Range", ""))
        if given is None or int(given[1]) != start:
            told = response.headers.get("Content-Range")
            raise ProtocolViolation(f"{what}: expected bytes [{start}, {stop}), got Content-Range {told!r}")
        if int(given[2]) != stop - 1:
            raise RefusedError(f"{what} ends at byte {int(given[2]) + 1}, before {stop}")
        return 0


class _Body:
    """The body of an answer, through one buffer; a server that drips is a fault."""

    def __init__(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, stall_s: float, what: str
    ) -> None:
        self._response = response
        self._stall_s = stall_s
        self._what = what
        self._buffer = memoryview(bytearray(STEP_BYTES))
        self._since, self._since_bytes, self._total = time.monotonic(), 0, 0

    def next(self, most: int) -> memoryview:
        """Up to 256 KiB; empty at the end or where the connection was closed."""
        filled, limit = 0, min(most, STEP_BYTES)
        while filled < limit:
            got = self._some(self._buffer[filled:limit])
            if got == 0:
                break
            filled += got
            self._total += got
            if self._look() and filled:
                break
        return self._buffer[:filled]

    def _some(self, into: memoryview) -> int:
        response = self._response
        try:
            if response.length is None or response.fp is None:  # chunked, or to the connection's end
                return response.readinto(into)
            got: int = response.fp.readinto1(into[: response.length])
            response.length -= got
            return got
        except TimeoutError as error:
            raise PassingError(f"{self._what}: no byte for {self._stall_s:g} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PassingError(f"{self._what}: the connection failed: {type(error).__name__}: {error}") from error

    def _look(self) -> bool:
        now = time.monotonic()
        if now - self._since < self._stall_s:
            return False
        if self._total - self._since_bytes < _LEAST_BYTES_PER_S * self._stall_s:
            raise PassingError(f"{self._what}: stalled, under {_LEAST_BYTES_PER_S} bytes/s for {self._stall_s:g} s")
        self._since, self._since_bytes = now, self._total
        return True


class _Pool:
    """Kept connections, by scheme and host; a proxy of the environment is used where it says so."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], list[tuple[http.client.HTTPConnection, float]]] = {}
        self._context: ssl.SSLContext | None = None
        weakref.finalize(self, _close_all, self._idle)
        at_fork(self)

    def after_fork(self) -> None:
        """What is open stays the parent's: two processes that read one connection take each other's bytes."""
        self._lock = threading.Lock()
        self._idle.clear()

    def ask(
        self, target: str, headers: dict[str, str], what: str
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a GET, and the answer's head; once more if a kept connection turns out to be dead."""
        parts = urllib.parse.urlsplit(target)
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        while True:
            connection, kept, prefix = self._take(parts)
            try:
                if not kept:
                    connection.timeout = self._patience.connect_s
                    connection.connect()  # sets TCP_NODELAY
                    sock: Any = connection.sock
                    sock.settimeout(self._patience.stall_s)
                connection.request("GET", prefix + path, headers=headers)
                return connection, connection.getresponse()
            except ssl.SSLCertVerificationError as error:
                connection.close()
                raise RefusedError(f"{what}: its certificate is not trusted: {error.verify_message}") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                if kept and not isinstance(error, TimeoutError):
                    continue
                raise PassingError(_why(what, connection, error, self._patience)) from error
            except BaseException:
                connection.close()
                raise

    def put_back(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, keep: bool) -> None:
        """Keep a connection whose body was read whole, or close it."""
        response.close()
        key: Any = getattr(connection, "forebay_key", None)
        with self._lock:
            idle = self._idle.setdefault(key, [])
            if keep and key is not None and len(idle) < _MOST_IDLE:
                idle.append((connection, time.monotonic()))
                return
        connection.close()

    def _take(self, parts: urllib.parse.SplitResult) -> tuple[http.client.HTTPConnection, bool, str]:
        key = (parts.scheme, parts.netloc.rpartition("@")[2])
        proxy = _proxy_of(parts)
        prefix = f"http://{key[1]}" if proxy is not None and parts.scheme == "http" else ""
        with self._lock:
            idle = self._idle.get(key, [])
            while idle:
                connection, since = idle.pop()
                if since > time.monotonic() - _KEEP_IDLE_S:
                    return connection, True, prefix
                connection.close()
        try:
            made = self._make(parts, proxy)
        except (ValueError, http.client.InvalidURL) as error:
            raise RefusedError(f"{parts.scheme}://{key[1]}: no such address: {error}") from error
        made.forebay_key = key  # type: ignore[attr-defined]
        return made, False, prefix

    def _make(
        self, parts: urllib.parse.SplitResult, proxy: urllib.parse.SplitResult | None
    ) -> http.client.HTTPConnection:
        host, port = parts.hostname or "", parts.port
        at_host, at_port = (proxy.hostname or "", proxy.port or 80) if proxy else (host, port)
        if parts.scheme != "https":
            return http.client.HTTPConnection(at_host, at_port)
        if self._context is None:
            self._context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(at_host, at_port, context=self._context)
        if proxy is not None:
            connection.set_tunnel(host, port or 443, {"Proxy-Authorization": _basic(proxy)} if proxy.username else {})
        return connection


def hub_address(url: str) -> tuple[str, dict[str, str]]:
    """Where the hub keeps the files of `hf://datasets/OWNER/NAME[@REVISION][/PATH]`, and the headers to send.

    Raises:
        UsageError: If the URL lacks a part.
    """
    found = re.fullmatch(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?", url)
    if found is None:
        raise UsageError(f"open an origin: expected hf://datasets/OWNER/NAME[@REVISION][/PATH], got {url!r}.")
    revision = urllib.parse.quote(urllib.parse.unquote(found[2] or "main"), safe="")
    address = f"{hub_endpoint()}/datasets/{found[1]}/resolve/{revision}/{urllib.parse.quote(found[3] or '')}"
    return address, hub_headers()


def hub_endpoint() -> str:
    """Where the hub is: HF_ENDPOINT, or huggingface.co."""
    return os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"


def hub_home() -> Path:
    """Where the hub's own library keeps token and cache: HF_HOME, or `huggingface` in XDG_CACHE_HOME or ~/.cache."""
    told = os.environ.get("HF_HOME")
    return Path(told) if told else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"


def hub_headers() -> dict[str, str]:
    """The header that says who asks: HF_TOKEN, or the token that `hf auth login` wrote; empty if there is neither."""
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not token:
        with contextlib.suppress(OSError, ValueError):
            token = Path(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token").read_text("utf-8")
    token = "".join(token.split())
    return {"Authorization": f"Bearer {token}"} if token else {}


def _close_all(idle: dict[tuple[str, str], list[tuple[http.client.HTTPConnection, float]]]) -> None:
    for connections in idle.values():
        for connection, _ in connections:
            connection.close()


def _basic(parts: urllib.parse.SplitResult) -> str:
    import base64

    pair = f"{urllib.parse.unquote(parts.username or '')}:{urllib.parse.unquote(parts.password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode()


def _host(address: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(address)
    return parts.scheme, parts.netloc


def _proxy_of(parts: urllib.parse.SplitResult) -> urllib.parse.SplitResult | None:
    address = urllib.request.getproxies().get(parts.scheme)
    if not address or urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    return urllib.parse.urlsplit(address if "://" in address else f"http://{address}")


def _refusal(what: str, response: http.client.HTTPResponse) -> PassingError | RefusedError:
    status = response.status
    text = f"{what}: HTTP status {status} {response.reason}"
    if status in _PASSING or status >= 500:
        wait_s = wait_told(response.headers)
        return PassingError(text, wait_s=wait_s, throttled=status in _THROTTLED or wait_s > 0)
    return RefusedError(text, status=status, code=response.headers.get("X-Error-Code", ""))


def wait_told(headers: Message) -> float:
    """Seconds that a server asks to wait: Retry-After, or where the hub's `RateLimit: "api";r=0;t=55` begins anew; at
    most an hour, and 0 if it does not ask."""
    told = re.search(r"\bt\s*=\s*(\d{1,9})", headers.get("RateLimit", ""))
    return min(3600.0, retry_after_s(headers.get("Retry-After") or (told[1] if told else ""), time.time()) or 0.0)


def retry_after_s(text: str, now: float) -> float | None:
    """Seconds that a Retry-After header asks to wait, given as seconds or as a date (RFC 9110, 10.2.3); None if it is
    neither. `now` is Unix time."""
    if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text, re.ASCII):
        return float(text)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    return None


def check_redirect(origin: str, target: str) -> None:
    """Refuse a redirect to anything but http and https, and from a public address to one inside: this machine, its
    networks, a cloud's metadata.

    Raises:
        RefusedError: If it must not be followed.
    """
    was, goes = urllib.parse.urlsplit(origin), urllib.parse.urlsplit(target)
    if goes.scheme not in ("http", "https"):
        raise RefusedError(f"{was.hostname}: expected a redirect to http or https, got one to {goes.scheme!r}")
    if _is_inside(goes.hostname) and not _is_inside(was.hostname):
        raise RefusedError(f"{was.hostname}: expected a redirect to a public address, got one to {goes.hostname}")


def _is_inside(host: str | None) -> bool:
    """Whether a host has an address that is private, loopback or link-local; False if it has none that is known."""
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    addresses = [ipaddress.ip_address(one) for one in found]
    return any(not (getattr(one, "ipv4_mapped", None) or one).is_global for one in addresses)


def _why(what: str, connection: http.client.HTTPConnection, error: Exception, patience: Patience) -> str:
    where = f"{connection.host}:{connection.port}"
    if isinstance(error, TimeoutError):
        waited = patience.connect_s if connection.sock is None else patience.stall_s
        return f"{what}: no answer from {where} in {waited:g} s"
    return f"{what}: cannot be reached at {where}: {type(error).__name__}: {error}"
