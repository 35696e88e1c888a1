"""Input files by URL as streams: http and https, objects of buckets (s3, gs, az), files of the hub.

Hides retries with back-off, a resume where a connection was cut, servers that know no ranges or send too slowly. A file
is read at the version (ETag or time) with which it was listed: each response is compared, so that a file that changes
is an error, never a mixture. (A server that sends neither is not checked.)

Buckets take endpoint, region and credentials from the usual environment variables (`AWS_ENDPOINT_URL`,
`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME` …).
"""

import io
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, TypeVar

from forebay.errors import PrepareError
from forebay.storage.base import ChangedError, ObjectMeta, PermanentError, Timeouts, TransientError, retry_transient
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
    """A file at a URL: its size and version, "" if the origin sends none."""

    url: str
    size: int
    version: str


def find_urls(url: str) -> list[RemoteFile]:
    """The file at a URL; of a bucket all objects below it, in sorted order."""
    if urllib.parse.urlsplit(url).scheme not in _SCHEMES:
        raise PrepareError(f"{url}: expected a URL of {', '.join(_SCHEMES)} or hf, or a path. Check the input.")
    origin, name = _open(url)
    if isinstance(origin, BucketOrigin):
        objects = sorted(_retry(url, lambda: origin.find(name)), key=lambda entry: entry[0].split("/"))
        files = [RemoteFile(f"{origin.url}/{name}", meta.bytes, _version(meta)) for name, meta in objects]
    else:
        meta = _retry(url, lambda: origin.head(name))
        files = [RemoteFile(url, meta.bytes, _version(meta))]
    if not files:
        raise PrepareError(f"{url}: expected a file or a prefix with files, got none. Check the URL.")
    if (size := max(file.size for file in files)) > MAX_FILE_BYTES:
        raise PrepareError(f"{url}: expected at most {MAX_FILE_BYTES >> 40} TiB, got {size} bytes. Check the URL.")
    return files


def open_url(url: str, size: int, version: str = "") -> BinaryIO:
    """A buffered, seekable stream of the file of `size` bytes at a URL, at that version.

    A read raises PrepareError if the file changed, or cannot be read after all retries.
    """
    if url.startswith("hf://"):
        return open_hub_file(url, size)
    return io.BufferedReader(_RemoteStream(url, size, version), _BUFFER_BYTES)


class _RemoteStream(RangedStream):
    """Reads one response to its end; requests the rest after a seek, or when a connection fails."""

    def __init__(self, url: str, size: int, version: str) -> None:
        super().__init__(url, size)
        self._etag = version.removeprefix("etag:")
        self._origin, self._name = _open(url)
        self._body: Iterator[memoryview] | None = None
        self._pending = memoryview(b"")

    def seek(self, offset: int, whence: int = 0, /) -> int:
        before = self._offset
        if super().seek(offset, whence) != before:
            self._close_body()
        return self._offset

    def readinto(self, buffer: Any, /) -> int:
        if not self._pending and self._offset < self._size:
            self._pending = memoryview(_retry(self._url, self._next_chunk))
        count = min(len(self._pending), len(buffer))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        self._offset += count
        return count

    def close(self) -> None:
        self._close_body()
        super().close()

    def _next_chunk(self) -> bytes:
        try:
            if self._body is None:
                self._body = self._origin.read(self._name, self._offset, self._size, self._etag)
            if chunk := bytes(next(self._body, b"")):
                return chunk
            raise TransientError(f"the connection was closed {self._size - self._offset} bytes before the end")
        except TransientError:
            self._close_body()
            raise

    def _close_body(self) -> None:
        if self._body is not None:
            self._body.close()  # type: ignore[attr-defined]  # a generator
        self._body, self._pending = None, memoryview(b"")


def _open(url: str) -> tuple[BucketOrigin | WebOrigin, str]:
    parts = urllib.parse.urlsplit(url)
    if not url.startswith("http"):
        return BucketOrigin(f"{parts.scheme}://{parts.netloc}"), parts.path.lstrip("/")
    folder, _, name = parts.path.rpartition("/")
    address = urllib.parse.urlunsplit(parts._replace(path=folder))
    return WebOrigin(address, timeouts=Timeouts(_TIMEOUT_S, _TIMEOUT_S)), urllib.parse.unquote(name)


def _version(meta: ObjectMeta) -> str:
    return f"etag:{meta.etag}" if meta.etag else ""


def _retry(url: str, attempt: Callable[[], _T]) -> _T:
    """The result of `attempt`, which is repeated after a TransientError; other failures are a PrepareError."""
    tries = _HTTP_TRIES if url.startswith("http") else _BUCKET_TRIES
    try:
        return retry_transient(attempt, tries, _MAX_WAIT_S)
    except TransientError as error:
        raise PrepareError(
            f"{url}: cannot read input after {tries} tries: {_reason(error, url)}. Try again later."
        ) from error
    except PermanentError as error:
        if isinstance(error, ChangedError):
            raise PrepareError(f"{url}: the input changed while it was read. Start again.") from error
        problem = "expected a file, got" if error.status else "cannot read input:"
        raise PrepareError(f"{url}: {problem} {_reason(error, url)}. Check the URL and the credentials.") from error


def _reason(error: Exception, url: str) -> str:
    """An origin's message without its address, which may hold a secret in its query."""
    return str(error).removeprefix(url.partition("?")[0].rstrip("/")).lstrip("/: ")
