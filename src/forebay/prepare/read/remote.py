"""Files by URL: http and https, and object stores (s3, gs, az), by the clients of `store`.

Hides: retries with back-off, resuming where a connection was dropped, servers that know no ranges or send too slowly. A
file is read under the version (ETag or time) with which it was listed: each request asks for that version, and each
answer's is compared, so a file that changes is an error, never a mixture. (A server that tells neither is not checked.)

Object stores take their endpoint, region and credentials from the usual environment variables (`AWS_ENDPOINT_URL`,
`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME` …).
"""

import io
import time
import urllib.parse
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from forebay.errors import PrepareError
from forebay.formats.inputs import MAX_INPUT_BYTES
from forebay.formats.inputs import changed_error as changed
from forebay.network.retry import backoff_s
from forebay.storage.base import ChangedError, PermanentError, Timeouts, TransientError, check_etag
from forebay.storage.buckets import BucketOrigin
from forebay.storage.http import WebOrigin

_TRIES, _BUCKET_TRIES = 6, 10
_FIRST_WAIT_S = 0.25  # 0.25, 0.5, 1, 2, 4: 8 s in all; of a bucket, 92 s
_LONGEST_WAIT_S = 30.0
_TIMEOUT_S = 30.0
_STEP = 256 << 10
_T = TypeVar("_T")
_SCHEMES = ("http", "https", "s3", "gs", "az")


@dataclass(frozen=True)
class Found:
    """A file behind a URL: its size (0 if the origin does not say, or can only send the whole) and version."""

    url: str
    size: int
    version: str


@dataclass
class _Opened:
    """A body from some position on."""

    pieces: Generator[memoryview, None, None]
    size: int
    version: str
    ranges: bool = True


def find_urls(url: str) -> list[Found]:
    """The file at a URL, or for an object store all below it, in sorted order."""
    if urllib.parse.urlsplit(url).scheme not in _SCHEMES:
        raise PrepareError(f"{url}: expected a URL of {', '.join(_SCHEMES)} or hf, or a path. Check the input.")
    if url.startswith("http"):
        opened = _retried(url, lambda: _open_http(url, 0, ""))
        opened.pieces.close()
        return [Found(url, opened.size if opened.ranges else 0, opened.version)]
    return _retried(url, lambda: _list_bucket(url))


def open_url(url: str, size: int = 0, version: str = "") -> BinaryIO:
    """A buffered stream of the file at a URL, at that version; seekable if the origin says how large it is."""
    if url.startswith("hf://"):
        from forebay.prepare.read.hub_files import open_hub_file

        return open_hub_file(url, size)
    return io.BufferedReader(_Remote(url, size, version), _STEP)


def _retried(url: str, attempt: Callable[[], _T], version: str = "") -> _T:
    """What `attempt` gives; asked again where it raises TransientError, then PrepareError."""
    tries = _TRIES if url.startswith("http") else _BUCKET_TRIES
    for tried in range(1, tries + 1):
        try:
            return attempt()
        except TransientError as error:
            if tried == tries:
                raise PrepareError(
                    f"{url}: cannot read input after {tries} tries: {_reason(error, url)}. Try again later."
                ) from error
            time.sleep(min(_LONGEST_WAIT_S, backoff_s(tried, _FIRST_WAIT_S, _LONGEST_WAIT_S, error.wait_s)))
        except PermanentError as error:
            if isinstance(error, ChangedError) or error.status == 412 or (error.status == 416 and version):
                raise changed(url) from error
            told = "expected a file, got" if error.status else "cannot read input:"
            raise PrepareError(f"{url}: {told} {_reason(error, url)}. Check the URL and the credentials.") from error
    raise AssertionError


class _Remote(io.RawIOBase):
    """Reads from wherever it is sought to; opens anew there when a connection fails."""

    def __init__(self, url: str, size: int, version: str) -> None:
        self._url = url
        self._size = size
        self._at = 0
        self._version = version
        self._body: Generator[memoryview, None, None] | None = None
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
            self._held = memoryview(_retried(self._url, self._next, self._version))
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
                if self._url.startswith("http"):
                    opened = _open_http(self._url, self._at, self._version)
                else:
                    (origin, path), etag = _bucket(self._url), self._version.removeprefix("etag:")
                    if not self._size:
                        check_etag(self._url, etag, origin.head(path).etag)
                        return b""
                    opened = _Opened(origin.read(path, self._at, self._size, etag), self._size, self._version)
                if (self._version and opened.version != self._version) or (
                    self._size and opened.size not in (0, self._size)
                ):
                    opened.pieces.close()
                    raise changed(self._url)
                self._body, self._version = opened.pieces, opened.version
                self._size = self._size or opened.size
            chunk = bytes(next(self._body, b""))
        except TransientError:
            self._close_body()
            raise
        if not chunk and self._size and self._at < self._size:
            self._close_body()
            raise TransientError(f"the connection was closed {self._size - self._at} bytes before the end")
        return chunk

    def _close_body(self) -> None:
        if self._body is not None:
            self._body.close()
        self._body, self._held = None, memoryview(b"")

    def close(self) -> None:
        if not self.closed:
            self._close_body()
        super().close()


def _open_http(url: str, position: int, version: str) -> _Opened:
    asked = {}
    kind, _, tag = version.partition(":")
    if kind == "etag" and tag.startswith('"'):  # Weak ETags never match (RFC 9110, 13.1.1); the answer's is compared.
        asked["If-Match"] = tag
    elif kind == "modified":
        asked["If-Unmodified-Since"] = tag
    origin = WebOrigin(url, timeouts=Timeouts(_TIMEOUT_S, _TIMEOUT_S))
    partial, headers, body = origin.stream(url, position, asked)
    length = headers.get("Content-Length") or "0"
    if not (length.isascii() and length.isdigit() and len(length) < 20 and int(length) <= MAX_INPUT_BYTES):
        body.close()
        raise PrepareError(
            f"{url}: expected a Content-Length of at most {MAX_INPUT_BYTES >> 40} TiB, got {length[:40]!r}. "
            "Check the URL."
        )
    size = int(length) + position if partial and int(length) else int(length)
    etag, modified = headers.get("ETag"), headers.get("Last-Modified")
    found = f"etag:{etag}" if etag else f"modified:{modified}" if modified else ""
    ranges = headers.get("Accept-Ranges", "none").lower() == "bytes"
    return _Opened(body, size, found, ranges)


def _reason(error: Exception, url: str) -> str:
    """What an origin says is wrong, without its address."""
    return str(error).removeprefix(url.partition("?")[0].rstrip("/")).lstrip("/: ")


def _bucket(url: str) -> tuple[BucketOrigin, str]:
    parts = urllib.parse.urlsplit(url)
    return BucketOrigin(f"{parts.scheme}://{parts.netloc}"), parts.path.lstrip("/")


def _list_bucket(url: str) -> list[Found]:
    origin, path = _bucket(url)
    found = sorted(origin.find(path), key=lambda one: one[0].split("/"))
    if not found:
        raise PrepareError(f"{url}: expected a file or a prefix with files, got none. Check the URL.")
    return [Found(f"{origin.url}/{name}", head.bytes, f"etag:{head.etag}" if head.etag else "") for name, head in found]
