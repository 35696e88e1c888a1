"""Files by URL: http and https with the standard library, object stores (s3, gs, az) with obstore.

Hides: retries with back-off, resuming where a connection was dropped, servers that know no ranges or send too slowly. A
file is read under the version (ETag or time) with which it was listed: each request asks for that version, and each
answer's is compared, so a file that changes is an error, never a mixture. (A server that tells neither is not checked.)

Object stores take their endpoint, region and credentials from the usual environment variables (`AWS_ENDPOINT_URL`,
`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME` …).
"""

import http.client
import io
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from forebay.errors import PrepareError
from forebay.extras import install_command
from forebay.prepare.read.base import MAX_SOURCE_BYTES
from forebay.prepare.read.opening import Changed
from forebay.store.origins import RefusedError
from forebay.store.web import CheckedRedirects, wait_told

_TRIES = 6
_FIRST_WAIT_S = 0.25  # 0.25, 0.5, 1, 2, 4: 8 s in all
_LONGEST_WAIT_S = 30.0
_TIMEOUT_S = 30.0
_STEP = 256 << 10
_MIN_BYTES_PER_S = 1024
_T = TypeVar("_T")
_SCHEMES = ("http", "https", "s3", "gs", "az")


@dataclass(frozen=True)
class Found:
    """A file behind a URL: its size (0 if the origin does not say, or can only send the whole) and version."""

    url: str
    size: int
    version: str


class _Passing(Exception):  # noqa: N818 - a fault that may pass
    """Worth another try, after so many seconds if the server said so."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


@dataclass
class _Opened:
    """A body from some position on."""

    chunks: Generator[Any, None, None]
    size: int
    version: str
    ranges: bool = True


def find_urls(url: str) -> list[Found]:
    """The file at a URL, or for an object store all below it, in sorted order.

    Raises:
        PrepareError: If there is none, or it cannot be read.
    """
    if urllib.parse.urlsplit(url).scheme not in _SCHEMES:
        raise PrepareError(f"{url}: expected a URL of {', '.join(_SCHEMES)} or hf, or a path. Check the input.")
    if url.startswith("http"):
        opened = _retried(url, lambda: _open_http(url, 0, ""))
        opened.chunks.close()
        return [Found(url, opened.size if opened.ranges else 0, opened.version)]
    return _retried(url, lambda: _list_store(url))


def open_url(url: str, size: int = 0, version: str = "") -> BinaryIO:
    """A buffered stream of the file at a URL, as it was at that version; seekable if the origin says how large it is.

    Raises:
        Changed: When read, if the origin has another version.
    """
    if url.startswith("hf://"):
        from forebay.prepare.read.hub_files import open_hub_file

        return open_hub_file(url, size)
    return io.BufferedReader(_Remote(url, size, version), _STEP)


def _retried(url: str, attempt: Callable[[], _T]) -> _T:
    for tried in range(_TRIES):
        try:
            return attempt()
        except _Passing as error:
            if tried == _TRIES - 1:
                raise PrepareError(
                    f"{url}: cannot read input after {_TRIES} tries: {error}. Try again later."
                ) from error
            time.sleep(min(_LONGEST_WAIT_S, max(error.wait_s, _FIRST_WAIT_S * 2**tried)))
    raise AssertionError


class _Remote(io.RawIOBase):
    """Reads from wherever it is sought to; opens anew there when a connection fails."""

    def __init__(self, url: str, size: int, version: str) -> None:
        self._url = url
        self._size = size
        self._at = 0
        self._version = version
        self._waited_s, self._came, self._stalls = 0.0, 0, 0
        self._body: Generator[Any, None, None] | None = None
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._size > 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        target = offset + (0, self._at, self._size)[whence]
        if target != self._at:
            self._close_body()
            self._at = target
        return target

    def readinto(self, buffer: Any, /) -> int:
        if not self._held:
            self._held = memoryview(_retried(self._url, self._next))
        size = min(len(self._held), len(buffer))
        buffer[:size] = self._held[:size]
        self._held = self._held[size:]
        self._at += size
        return size

    def _next(self) -> bytes:
        if self._size and self._at >= self._size:
            return b""
        try:
            if self._body is None:
                opened = (_open_http if self._url.startswith("http") else _open_store)(
                    self._url, self._at, self._version
                )
                if (self._version and opened.version != self._version) or (
                    self._size and opened.size not in (0, self._size)
                ):
                    opened.chunks.close()
                    raise Changed(self._url)
                self._body, self._version = opened.chunks, opened.version
                self._size = self._size or opened.size
            began = time.monotonic()
            chunk = bytes(next(self._body, b""))
            self._check_rate(time.monotonic() - began, len(chunk))
        except _Passing:
            self._close_body()
            raise
        if not chunk and self._size and self._at < self._size:
            self._close_body()
            raise _Passing(f"the connection was closed {self._size - self._at} bytes before the end")
        return chunk

    def _check_rate(self, waited_s: float, size: int) -> None:
        """Give up on an origin that sends less than 1 KiB a second over several waits, whatever connection it is."""
        self._waited_s, self._came = self._waited_s + waited_s, self._came + size
        if self._waited_s < _TIMEOUT_S:
            return
        self._stalls = self._stalls + 1 if self._came < _MIN_BYTES_PER_S * self._waited_s else 0
        if self._stalls >= 3:
            raise PrepareError(
                f"{self._url}: cannot read input: expected at least {_MIN_BYTES_PER_S} bytes/s, got {self._came} bytes "
                f"in {self._waited_s:.0f} s. Try again later."
            )
        self._waited_s, self._came = 0.0, 0

    def _close_body(self) -> None:
        if self._body is not None:
            self._body.close()
        self._body, self._held = None, memoryview(b"")

    def close(self) -> None:
        if not self.closed:
            self._close_body()
        super().close()


def _open_http(url: str, position: int, version: str) -> _Opened:
    headers = {"User-Agent": "forebay", "Accept-Encoding": "identity"}
    if position:
        headers["Range"] = f"bytes={position}-"
    kind, _, tag = version.partition(":")
    if kind == "etag" and tag.startswith('"'):  # Weak ETags never match (RFC 9110, 13.1.1); the answer's is compared.
        headers["If-Match"] = tag
    elif kind == "modified":
        headers["If-Unmodified-Since"] = tag
    try:
        opener = urllib.request.build_opener(CheckedRedirects)
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (408, 425, 429) or error.code >= 500:
                raise _Passing(f"HTTP status {error.code}", wait_told(error.headers)) from error
            if error.code == 412 or (error.code == 416 and version):
                raise Changed(url) from error
            raise PrepareError(
                f"{url}: expected a file, got HTTP status {error.code} {error.reason}. Check the URL."
            ) from error
    except RefusedError as error:
        raise PrepareError(f"{url}: cannot read input: {error}. Check the URL.") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Passing(str(error)) from error
    length = _length(url, response)
    partial = response.status == 206
    size = length + position if partial and length else length
    etag, modified = response.headers.get("ETag"), response.headers.get("Last-Modified")
    found = f"etag:{etag}" if etag else f"modified:{modified}" if modified else ""
    ranges = response.headers.get("Accept-Ranges", "none").lower() == "bytes"
    return _Opened(_http_chunks(response, 0 if partial else position), size, found, ranges)


def _length(url: str, response: Any) -> int:
    length = response.headers.get("Content-Length") or "0"
    if length.isascii() and length.isdigit() and len(length) < 20 and int(length) <= MAX_SOURCE_BYTES:
        return int(length)
    response.close()
    raise PrepareError(
        f"{url}: expected a Content-Length of at most {MAX_SOURCE_BYTES >> 40} TiB, got {length[:40]!r}. Check the URL."
    )


def _http_chunks(response: Any, skip: int) -> Generator[bytes, None, None]:
    """The body; of one that begins at 0 although it should not, what was read before is passed over."""
    with response:
        while True:
            try:
                data = response.read1(_STEP)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise _Passing(f"the connection failed: {error}") from error
            if not data:
                return
            if skip < len(data):
                yield data[skip:]
            skip = max(0, skip - len(data))


def _store(url: str) -> tuple[Any, Any, str]:
    try:
        import obstore
        from obstore.store import from_url
    except ImportError as error:
        raise PrepareError(
            f"{url}: reading from an object store needs the package obstore. Install it with: "
            f"{install_command('remote')}"
        ) from error
    parts = urllib.parse.urlsplit(url)
    plain = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", "")).startswith("http://")
    options: Any = {"allow_http": True} if plain else {}
    return obstore, from_url(f"{parts.scheme}://{parts.netloc}", client_options=options), parts.path.lstrip("/")


def _list_store(url: str) -> list[Found]:
    obstore, store, path = _store(url)
    base = url[: len(url) - len(path)]
    try:
        if path and not path.endswith("/"):
            try:
                meta = obstore.head(store, path)
                return [Found(url, int(meta["size"]), _version(meta))]
            except FileNotFoundError:
                pass  # a prefix
        found = [meta for part in obstore.list(store, path.rstrip("/") or None) for meta in part]
    except Exception as error:  # the library's errors share no base
        raise _told(url, error) from error
    if not found:
        raise PrepareError(f"{url}: expected a file or a prefix with files, got none. Check the URL.")
    found.sort(key=lambda meta: str(meta["path"]).split("/"))
    return [Found(base + str(meta["path"]), int(meta["size"]), _version(meta)) for meta in found]


def _version(meta: Any) -> str:
    tag = meta.get("e_tag")
    return f"etag:{tag}" if tag else f"modified:{meta.get('last_modified')}"


def _open_store(url: str, position: int, version: str) -> _Opened:
    obstore, store, path = _store(url)
    try:
        options: Any = {"range": {"offset": position}} if position else {}
        if version.startswith('etag:"'):
            options["if_match"] = version.removeprefix("etag:")
        result = obstore.get(store, path, options=options)
        size = int(result.meta["size"])
        if size > MAX_SOURCE_BYTES:
            raise PrepareError(
                f"{url}: expected at most {MAX_SOURCE_BYTES >> 40} TiB, got {size} bytes. Check the URL."
            )
        return _Opened(_store_chunks(result, url), size, _version(result.meta))
    except PrepareError:
        raise
    except Exception as error:  # the library's errors share no base
        raise _told(url, error) from error


def _store_chunks(result: Any, url: str) -> Generator[Any, None, None]:
    stream = iter(result.stream(min_chunk_size=_STEP))
    while True:
        try:
            chunk = next(stream)
        except StopIteration:
            return
        except Exception as error:  # the library's errors share no base
            raise _Passing(str(error).split("\n")[0]) from error
        yield chunk


def _told(url: str, error: Exception) -> Exception:
    """A library's error as ours: what will not pass is told at once."""
    why = " ".join(str(error).split())[:300]
    lasting = ("NotFound", "Unauthenticated", "PermissionDenied", "InvalidPath", "NotSupported")
    name = type(error).__name__
    if name.startswith("Precondition"):
        return Changed(url)
    if (
        isinstance(error, FileNotFoundError)
        or name.startswith(lasting)
        or "credential" in why.lower()
        or re.search(r": 40[0134] ", why)
    ):
        return PrepareError(f"{url}: cannot read input: {why}. Check the URL and the credentials.")
    return _Passing(f"{name}: {why}")
