"""Input files by URL as streams: http and https, objects of buckets (s3, gs, az), files of the hub.

Hides retries with back-off, a resume where a connection was cut, servers that know no ranges or send too slowly. A file
is read at the version (ETag or time) with which it was listed: each request asks for that version and each response is
compared, so that a file that changes is an error, never a mixture. (A server that sends neither is not checked.)

Buckets take endpoint, region and credentials from the usual environment variables (`AWS_ENDPOINT_URL`,
`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME` …).
"""

import io
import urllib.parse
from collections.abc import Callable, Generator
from typing import Any, BinaryIO, NamedTuple, TypeVar

from forebay.errors import PrepareError
from forebay.storage.base import ChangedError, PermanentError, Timeouts, TransientError, check_etag, retry_transient
from forebay.storage.buckets import BucketOrigin
from forebay.storage.http import WebOrigin
from forebay.storage.hub import MAX_FILE_BYTES
from forebay.storage.hub_reader import RangedStream, open_hub_file

_HTTP_TRIES, _BUCKET_TRIES = 6, 10  # 8 s in all; of a bucket, 92 s
_MAX_WAIT_S = 30.0
_TIMEOUT_S = 30.0
_BUFFER_BYTES = 256 << 10
_SCHEMES = ("http", "https", "s3", "gs", "az")
_T = TypeVar("_T")


class RemoteFile(NamedTuple):
    """A file at a URL: its size (0 if the origin does not send one, or knows no ranges) and version."""

    url: str
    size: int
    version: str


def find_urls(url: str) -> list[RemoteFile]:
    """The file at a URL; of a bucket all objects below it, in sorted order."""
    if urllib.parse.urlsplit(url).scheme not in _SCHEMES:
        raise PrepareError(f"{url}: expected a URL of {', '.join(_SCHEMES)} or hf, or a path. Check the input.")
    if not url.startswith("http"):
        return _retry(url, lambda: _list_bucket(url))
    response = _retry(url, lambda: _request_http(url, 0, ""))
    response.body.close()
    return [RemoteFile(url, response.size if response.has_ranges else 0, response.version)]


def open_url(url: str, size: int = 0, version: str = "") -> BinaryIO:
    """A buffered stream of the file at a URL, at that version; seekable if its size is known.

    A read raises PrepareError if the file changed, or cannot be read after all retries.
    """
    if url.startswith("hf://"):
        return open_hub_file(url, size)
    return io.BufferedReader(_RemoteStream(url, size, version), _BUFFER_BYTES)


class _Response(NamedTuple):
    """The body from some offset on, and what the head says of the whole file."""

    body: Generator[memoryview, None, None]
    size: int
    version: str
    has_ranges: bool = True


class _RemoteStream(RangedStream):
    """Reads one response to its end; requests the rest after a seek, or when a connection fails."""

    def __init__(self, url: str, size: int, version: str) -> None:
        super().__init__(url, size)
        self._version = version
        self._body: Generator[memoryview, None, None] | None = None
        self._pending = memoryview(b"")

    def seek(self, offset: int, whence: int = 0, /) -> int:
        before = self._offset
        if super().seek(offset, whence) != before:
            self._close_body()
        return self._offset

    def readinto(self, buffer: Any, /) -> int:
        if not self._pending:
            self._pending = memoryview(_retry(self._url, self._next_chunk, self._version))
        count = min(len(self._pending), len(buffer))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        self._offset += count
        return count

    def close(self) -> None:
        self._close_body()
        super().close()

    def _next_chunk(self) -> bytes:
        if self._size and self._offset >= self._size:
            return b""
        try:
            if self._body is None:
                self._request()
            chunk = bytes(next(self._body, b"")) if self._body is not None else b""
        except TransientError:
            self._close_body()
            raise
        if not chunk and self._offset < self._size:
            self._close_body()
            raise TransientError(f"the connection was closed {self._size - self._offset} bytes before the end")
        return chunk

    def _request(self) -> None:
        if self._url.startswith("http"):
            response = _request_http(self._url, self._offset, self._version)
            changed = self._size and response.size not in (0, self._size)
            if changed or (self._version and response.version != self._version):
                response.body.close()
                raise ChangedError(self._url)
            self._body, self._version, self._size = response.body, response.version, self._size or response.size
            return
        (origin, path), etag = _bucket(self._url), self._version.removeprefix("etag:")
        if self._size:
            self._body = origin.read(path, self._offset, self._size, etag)
        else:
            check_etag(self._url, etag, origin.head(path).etag)  # an empty object has no range

    def _close_body(self) -> None:
        if self._body is not None:
            self._body.close()
        self._body, self._pending = None, memoryview(b"")


def _retry(url: str, attempt: Callable[[], _T], version: str = "") -> _T:
    """The result of `attempt`, which is repeated after a TransientError; other failures are a PrepareError."""
    tries = _HTTP_TRIES if url.startswith("http") else _BUCKET_TRIES
    try:
        return retry_transient(attempt, tries, _MAX_WAIT_S)
    except TransientError as error:
        raise PrepareError(
            f"{url}: cannot read input after {tries} tries: {_reason(error, url)}. Try again later."
        ) from error
    except PermanentError as error:
        if isinstance(error, ChangedError) or error.status == 412 or (error.status == 416 and version):
            raise PrepareError(f"{url}: the input changed while it was read. Start again.") from error
        problem = "expected a file, got" if error.status else "cannot read input:"
        raise PrepareError(f"{url}: {problem} {_reason(error, url)}. Check the URL and the credentials.") from error


def _reason(error: Exception, url: str) -> str:
    """An origin's message without its address, which may hold a secret in its query."""
    return str(error).removeprefix(url.partition("?")[0].rstrip("/")).lstrip("/: ")


def _request_http(url: str, offset: int, version: str) -> _Response:
    conditions = {}
    kind, _, tag = version.partition(":")
    if kind == "etag" and tag.startswith('"'):  # Weak ETags never match (RFC 9110, 13.1.1); the response is compared.
        conditions["If-Match"] = tag
    elif kind == "modified":
        conditions["If-Unmodified-Since"] = tag
    origin = WebOrigin(url, timeouts=Timeouts(_TIMEOUT_S, _TIMEOUT_S))
    is_partial, headers, body = origin.stream(url, offset, conditions)
    length = headers.get("Content-Length") or "0"
    if not (length.isascii() and length.isdigit() and len(length) < 20 and int(length) <= MAX_FILE_BYTES):
        body.close()
        raise PrepareError(
            f"{url}: expected a Content-Length of at most {MAX_FILE_BYTES >> 40} TiB, got {length[:40]!r}. "
            "Check the URL."
        )
    size = int(length) + offset if is_partial and int(length) else int(length)
    etag, modified = headers.get("ETag"), headers.get("Last-Modified")
    version = f"etag:{etag}" if etag else f"modified:{modified}" if modified else ""
    return _Response(body, size, version, headers.get("Accept-Ranges", "none").lower() == "bytes")


def _bucket(url: str) -> tuple[BucketOrigin, str]:
    parts = urllib.parse.urlsplit(url)
    return BucketOrigin(f"{parts.scheme}://{parts.netloc}"), parts.path.lstrip("/")


def _list_bucket(url: str) -> list[RemoteFile]:
    origin, path = _bucket(url)
    objects = sorted(origin.find(path), key=lambda entry: entry[0].split("/"))
    if not objects:
        raise PrepareError(f"{url}: expected a file or a prefix with files, got none. Check the URL.")
    return [
        RemoteFile(f"{origin.url}/{name}", head.bytes, f"etag:{head.etag}" * bool(head.etag)) for name, head in objects
    ]
