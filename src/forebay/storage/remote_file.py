"""Input files by URL as streams: http and https, objects of buckets (s3, gs, az), files of the hub.

Hides retries with back-off, a resume where a connection was cut, servers that know no ranges or send too slowly. A file
is read at the version (ETag or time) with which it was listed: each response is compared, so that a file that changes
is an error, never a mixture. (A server that sends neither is not checked.)

Files of the hub, and those that are read at random, share the last 64 MiB of blocks (8 MiB for each that is open, if
that is more), so that the passes over a Parquet
file (footer, heads of pages, pages) request each byte once. A stream that reads on has up to eight requests of 1 MiB
under way, so that latency does not bound the speed (8 MiB in 50 ms: 160 MB/s).

Buckets take endpoint, region and credentials from the usual environment variables (`AWS_ENDPOINT_URL`,
`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME` …).

Files that a list names are downloaded whole (`RemoteFolder`): a download that ends early, also by a kill, is continued
at its last byte on disk.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, TypeVar

from forebay.errors import BUCKET_SCHEMES, ForebayError, PrepareError, PrintableUrl
from forebay.storage.addresses import bucket_address, fixed_folder, glob_matcher, is_bucket, join_url, location
from forebay.storage.base import (
    ChangedError,
    ObjectMeta,
    Patience,
    PermanentError,
    PinnedOrigin,
    Timeouts,
    TransientError,
    as_object_origin,
    download,
    log,
    read_range,
    read_whole,
)
from forebay.storage.buckets import BucketOrigin, is_missing, shared_bucket
from forebay.storage.digests import ReadDigest
from forebay.storage.http import WebOrigin
from forebay.storage.hub import MAX_FILE_BYTES, HubReadError, fetch_range
from forebay.storage.locks import at_fork, holder, try_acquire
from forebay.storage.origins import open_origin
from forebay.storage.retry import log_while_waiting

MAX_CONNECTIONS = 8  # of one run to the server of a list
_OF_LISTED = Patience(tries=12, max_wait_s=60.0)  # four minutes in all
_OF_HTTP, _OF_BUCKET = Patience(tries=6, max_wait_s=30.0), Patience(tries=10, max_wait_s=30.0)  # 8 s; 92 s
_ONCE = Patience(tries=1)
_TIMEOUTS = Timeouts(30.0, 30.0)
_BUFFER_BYTES = 256 << 10
_OUTSIDE_BYTES = 64 << 10  # of a request for bytes that are not of the part that is read
BLOCK_BYTES = 1 << 20
MAX_BLOCKS, _STREAM_BLOCKS = 64, 8  # in all, or for each stream that is open if that is more
_MAX_AHEAD = 8
_MAX_GAP_BLOCKS = 4  # skipped by a stream that reads on: the other columns of a row group
_SCHEMES = ("http", "https", *BUCKET_SCHEMES)
Extent: TypeAlias = tuple[int, int] | None
"""Bytes of a file that are read ahead; None: all of it."""
_T = TypeVar("_T")


class RemoteFile(NamedTuple):
    """A file at a URL: its size and version, "" if the origin sends none."""

    url: PrintableUrl
    size: int
    version: str


def find_urls(url: PrintableUrl) -> tuple[str, list[RemoteFile]]:
    """The files at a URL, sorted by the parts of their paths: one, all below a prefix, or those of a pattern; and the
    location of that file, of the prefix, or of the folder before the pattern.

    A pattern (`data/*/part-?.parquet`, `**`) names files of a bucket; an object or a prefix of that very name comes
    first.
    """
    scheme = url.partition("://")[0].lower()
    if scheme not in _SCHEMES:
        raise PrepareError(
            f"{url}: cannot read input: expected a path or a URL of {', '.join(_SCHEMES)} or hf. "
            "Download the files, and name their path."
        )
    folder = location(url).rstrip("/")
    if scheme in BUCKET_SCHEMES:
        address = bucket_address(url)
        origin = shared_bucket(address._replace(key=""), BucketOrigin)
        objects, above = _ask(url, lambda: origin.find(address.key)), fixed_folder(address.key)
        if not objects and above is not None:
            matches, folder = glob_matcher(address.key), address._replace(key=above).location
            listed = _ask(url, lambda: origin.objects(f"{above}/" if above else ""))
            objects = [entry for entry in listed if matches(entry[0])]
        files = [
            _listed(PrintableUrl(address._replace(key=key), address._replace(key=key).location), meta)
            for key, meta in sorted(objects, key=lambda entry: entry[0].split("/"))
        ]
    else:
        web, name = _open(url)
        meta = _ask(url, lambda: web.head(name))
        files = [_listed(url, meta)]
    if not files:
        raise PrepareError(f"{url}: expected a file, a prefix with files or a pattern, got none. Check the URL.")
    if (size := max(file.size for file in files)) > MAX_FILE_BYTES:
        raise PrepareError(f"{url}: expected at most {MAX_FILE_BYTES >> 40} TiB, got {size} bytes. Check the URL.")
    return folder, files


def open_url(url: str, size: int, version: str = "", extent: Extent = None, *, is_random: bool = False) -> BinaryIO:
    """A buffered, seekable stream of the file of `size` bytes at a URL, at that version.

    Bytes outside `extent` (None: the file) are requested by 64 KiB, those inside are read ahead, to its end. With
    `is_random`, and of the hub, they come in blocks, else in one response until the reader seeks.

    A read raises PrepareError if the file changed, or cannot be read after all retries.
    """
    blocks = _blocks if is_random or url.startswith("hf://") else None
    return io.BufferedReader(RemoteStream(PrintableUrl(url), size, version, extent, blocks), _BUFFER_BYTES)


class RemoteStream(io.RawIOBase):
    """A file of known size at a URL, of one version: in blocks, or without `blocks` in one response until a seek.

    The longer it is read on in blocks, the further ahead it fetches.
    """

    def __init__(
        self, url: PrintableUrl, size: int, version: str, extent: Extent, blocks: BlockCache | None
    ) -> None:  # fmt: skip
        self._url, self._size, self._version, self._blocks, self._offset = url, size, version, blocks, 0
        self._start, self._stop = (0, size) if extent is None else (extent[0], min(extent[1], size))
        self._digest = ReadDigest(url, version, size)
        self._body: Iterator[memoryview] = iter(())
        self._pending = memoryview(b"")
        self._last_block = self._num_ahead = 0
        if blocks is not None:
            blocks.num_streams += 1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        before, self._offset = self._offset, offset + (0, self._offset, self._size)[whence]
        if self._offset != before:
            self._body, self._pending = iter(()), memoryview(b"")
        return self._offset

    def readinto(self, buffer: Any, /) -> int:
        if self._offset >= self._size:
            return 0
        if not self._pending:
            # The extent, or a little that begins here.
            start, stop = self._start, self._stop
            if not start <= self._offset < stop:
                start, stop = self._offset, min(self._size, self._offset + _OUTSIDE_BYTES)
            self._pending = memoryview(self._next_chunk(stop) if self._blocks is None else self._block(start, stop))
        count = min(len(self._pending), len(buffer))
        buffer[:count] = self._pending[:count]
        if self._blocks is None:
            self._digest.update(self._offset, self._pending[:count])
        self._pending = self._pending[count:]
        self._offset += count
        return count

    def close(self) -> None:
        self._body = iter(())  # The end of its generator closes the connection.
        if self._blocks is not None:
            self._blocks.num_streams -= not self.closed
        super().close()

    def _next_chunk(self, stop: int) -> memoryview:
        if (chunk := next(self._body, None)) is None:
            self._body = _read(self._url, self._version, self._offset, stop)
            chunk = next(self._body)
        return chunk

    def _block(self, start: int, stop: int) -> memoryview:
        assert self._blocks is not None
        index, skip = divmod(self._offset - start, BLOCK_BYTES)
        if index != self._last_block:
            is_next = 0 < index - self._last_block <= _MAX_GAP_BLOCKS
            self._num_ahead = min(_MAX_AHEAD, 2 * self._num_ahead + 1) if is_next else 0
            self._last_block = index
        try:
            block = self._blocks.read(self._url, self._version, start, stop, index, self._num_ahead)
        except ForebayError as error:
            raise HubReadError(error) from error
        return memoryview(block)[skip:]


def _read(url: PrintableUrl, version: str, start: int, stop: int) -> Iterator[memoryview]:
    """Yield bytes [start, stop) of a file at a version; raises PrepareError, or a failure of the hub."""
    if url.startswith("hf://"):
        yield from fetch_range(url, start, stop)
        return
    origin, name = _open(url)
    with _input_errors(url):
        pinned = PinnedOrigin(origin, version.removeprefix("etag:"))
        yield from read_range(pinned, name, start, stop, _patience(url), url)


def _open(url: PrintableUrl) -> tuple[BucketOrigin | WebOrigin, str]:
    if is_bucket(url):
        address = bucket_address(url)
        return shared_bucket(address._replace(key=""), BucketOrigin), address.key
    return _open_web(url, os.getpid()), ""


_open_web = lru_cache(8)(lambda url, process_id: WebOrigin(url, timeouts=_TIMEOUTS, is_file=True))


def _listed(url: PrintableUrl, meta: ObjectMeta) -> RemoteFile:
    return RemoteFile(url, meta.bytes, f"etag:{meta.etag}" if meta.etag else "")


def _patience(url: str) -> Patience:
    return _OF_HTTP if url.startswith("http") else _OF_BUCKET


def _ask(url: PrintableUrl, attempt: Callable[[], _T], patience: Patience | None = None) -> _T:
    with _input_errors(url):
        return (patience or _patience(url)).retry(attempt, url)


@contextmanager
def _input_errors(url: PrintableUrl) -> Iterator[None]:
    """Convert the errors of an origin in a block to PrepareError."""
    try:
        yield
    except ChangedError as error:
        raise PrepareError(f"{url}: the input changed while it was read. Start again.") from error
    except (PermanentError, TransientError) as error:
        reason = str(error).removeprefix(url.rstrip("/")).lstrip("/: ")
        if isinstance(error, TransientError):
            raise PrepareError(
                f"{url}: cannot read input after {error.tries} tries: {reason}. Try again later."
            ) from error
        problem = "expected a file, got" if error.status else "cannot read input:"
        raise PrepareError(f"{url}: {problem} {reason}. Check the URL and the credentials.") from error


class RemoteFolder:
    """Files below a URL or a directory, which a list names; over connections that are kept. Threads share it.

    A server that is overloaded is asked again for four minutes, or when it says (at most a minute later each time).
    403 counts as overload: CommonCrawl's servers send it to clients that ask too often.
    """

    def __init__(self, url: str) -> None:
        self.url = PrintableUrl(url)
        self._origin = as_object_origin(open_origin(url, timeouts=_TIMEOUTS))

    def find(self, name: str) -> RemoteFile | None:
        """Return the size and version of a file; None if there is none."""

        def attempt() -> ObjectMeta | None:
            try:
                with _overload():
                    return self._origin.head(name)
            except PermanentError as error:
                if is_missing(error):
                    return None
                raise

        url = join_url(self.url, name)
        meta = _ask(url, attempt, _OF_LISTED)
        return None if meta is None else _listed(url, meta)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file, all of one response."""
        origin = _PatientOrigin(self._origin, "")
        return _ask(join_url(self.url, name), lambda: read_whole(origin, name, start, stop), _OF_LISTED)

    def fetch(self, name: str, file: RemoteFile, path: Path) -> None:
        """Download the file of that name to `path`, or what is missing of it there.

        At most MAX_CONNECTIONS are open at once for the directory of `path`.
        A file without a version cannot be continued: two versions of it might be mixed.
        """
        size, resumes = file.size, bool(file.version)
        origin = _PatientOrigin(self._origin, file.version.removeprefix("etag:"))
        of_file, of_chunk = (_ONCE, _OF_LISTED) if resumes else (_OF_LISTED, _ONCE)

        def attempt() -> int:
            return download(lambda start: read_range(origin, name, start, size, of_chunk), size, path, resumes=resumes)

        if resumes and path.exists() and path.stat().st_size == size:
            return
        with (
            _connection(path.parent),
            path.open("ab"),  # it has a size
            log_while_waiting(log, lambda: f"{file.url}: {path.stat().st_size:,} of {size:,} bytes"),
        ):
            _ask(file.url, attempt, of_file)


class _PatientOrigin(PinnedOrigin):
    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        with _overload():
            yield from super().read(name, start, stop)


@contextmanager
def _overload() -> Iterator[None]:
    try:
        yield
    except PermanentError as error:
        if error.status != 403:
            raise
        raise TransientError(f"{error} (too many requests, or access is denied)", throttled=True) from error


@contextmanager
def _connection(folder: Path) -> Iterator[None]:
    """Wait for one of the connections that all processes of a run share."""
    paths = [folder / f"connection-{index}.lock" for index in range(MAX_CONNECTIONS)]
    with log_while_waiting(log, lambda: f"a connection of the run; {holder(paths[0])} has one"):
        while (lock := next(filter(None, map(try_acquire, paths)), None)) is None:
            time.sleep(0.1)
    with lock:
        yield


class BlockCache:
    """The last blocks of all files that were read or fetched ahead, and those under way."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[PrintableUrl, str, int, int, int], Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_streams = 0  # That are open: they share the blocks.
        at_fork(self)

    def after_fork(self) -> None:
        """Drop all blocks: the parent's threads do not run here, and one may have held the lock."""
        self._lock = threading.Lock()
        self._blocks.clear()

    def read(self, url: PrintableUrl, version: str, start: int, stop: int, index: int, num_ahead: int) -> bytes:
        """The block of that index of bytes [start, stop) of a file; starts to fetch it and the next `num_ahead` blocks.

        Raises what `_read` raised.
        """
        with self._lock:
            num_blocks = -(-(stop - start) // BLOCK_BYTES)
            for key in ((url, version, start, stop, index + n) for n in range(min(num_ahead + 1, num_blocks - index))):
                block = self._blocks.get(key)
                if block is None or (key[-1] == index and block.done() and block.exception() is not None):
                    self._blocks[key] = block = Future()
                    thread = threading.Thread(target=_fill, args=(block, *key), name="hub-ahead", daemon=True)
                    try:
                        thread.start()
                    except RuntimeError as error:  # no thread can be started now: the reader of the block raises it
                        block.set_exception(error)
                self._blocks.move_to_end(key)
            while len(self._blocks) > max(MAX_BLOCKS, _STREAM_BLOCKS * self.num_streams):
                self._blocks.popitem(last=False)
            requested = self._blocks[url, version, start, stop, index]
        return requested.result()


def _fill(block: Future[bytes], url: PrintableUrl, version: str, start: int, stop: int, index: int) -> None:
    try:
        start += index * BLOCK_BYTES
        block.set_result(b"".join(map(bytes, _read(url, version, start, min(stop, start + BLOCK_BYTES)))))
    except BaseException as error:  # noqa: BLE001  The reader of the block raises it.
        block.set_exception(error)


_blocks = BlockCache()
