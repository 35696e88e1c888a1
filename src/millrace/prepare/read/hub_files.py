"""Bytes of the hub's files, by ranges: `open_hub_file("hf://datasets/OWNER/NAME@COMMIT/PATH")`.

Hides: kept connections, the CDN's addresses that run out, retries, reading ahead. Blocks of 256 KiB are shared by all
readers of this process, 32 MiB at most: the footer, the pages' heads and the pages of a Parquet file are read by
several passes, and cost one. A jump asks for 4 blocks; reading on, or leaving out a little, for 8, then 16.
"""

from __future__ import annotations

import io
import re
import threading
import time
from collections import OrderedDict
from functools import lru_cache
from typing import Any, BinaryIO

from millrace.errors import MillraceError, PrepareError
from millrace.prepare.read.hub_api import LONGEST_WAIT_S, Lost, closed, timeout_s, unreachable
from millrace.store.locks import at_fork
from millrace.store.origins import PassingError, Patience, RefusedError
from millrace.store.web import WebOrigin, hub_endpoint, hub_headers

_BLOCK = 256 << 10
_MOST_BLOCKS = 128
_FIRST_AHEAD, _MOST_AHEAD = 4, 16
_NEAR = 16  # blocks that may be left out by one who reads on: the other columns of a row group
_TRIES = 6
_FIRST_WAIT_S = 0.25  # 0.25 to 4: 8 s in all
_URL = re.compile(r"hf://(datasets|models)/([^@]+)@([^/@]+)/(.+)", re.DOTALL)


def file_url(kind: str, name: str, commit: str, path: str) -> str:
    """What names a file of the hub at a commit."""
    return f"hf://{kind}/{name}@{commit}/{path}"


def open_hub_file(url: str, size: int) -> BinaryIO:
    """A buffered, seekable stream of a file of `size` bytes.

    Raises:
        PrepareError: If the URL names none.
    """
    return io.BufferedReader(_File(url, size), _BLOCK)


def hub_origin(url: str) -> tuple[WebOrigin, str, str]:
    """The origin of a file's repository, its path there, and what messages call it."""
    found = _URL.fullmatch(url)
    if found is None:
        raise PrepareError(f"{url}: expected hf://datasets/OWNER/NAME@COMMIT/PATH. Check the input.")
    kind, name, commit, path = found.groups()
    what = f"{'dataset' if kind == 'datasets' else 'tokenizer'} {name!r}"
    headers = tuple(hub_headers().items())
    return _origin(hub_endpoint(), kind, name, commit, headers, timeout_s("HF_HUB_DOWNLOAD_TIMEOUT")), path, what


@lru_cache(8)
def _origin(
    endpoint: str, kind: str, name: str, commit: str, headers: tuple[tuple[str, str], ...], stall_s: float
) -> WebOrigin:
    base = f"{endpoint}/datasets/{name}" if kind == "datasets" else f"{endpoint}/{name}"
    patience = Patience(connect_s=stall_s, stall_s=stall_s)
    return WebOrigin(f"{base}/resolve/{commit}", headers=dict(headers), patience=patience)


def fetch_range(url: str, start: int, stop: int, take: Any) -> None:
    """Give bytes [start, stop) of a file to `take(piece)`, in order; what was given is not asked for again.

    Raises:
        DownloadError: If the hub cannot be reached.
        AccessError, PrepareError: If it does not give the file.
    """
    origin, path, what = hub_origin(url)
    began, tried, at, refused = time.monotonic(), 0, start, False
    while at < stop:
        before, wait_s = at, 0.0
        try:
            for piece in origin.read(path, at, stop):
                take(piece)
                at += len(piece)
            why = f"a connection that was closed {stop - at} bytes before the end"
        except PassingError as error:
            why, wait_s = str(error), error.wait_s
        except RefusedError as error:
            if refused or "HTTP status 403" not in str(error):
                raise _refused(url, what, error) from error
            why, refused = str(error), True  # an address of the CDN that ran out looks like this, too: once
        tried = 1 if at > before else tried + 1
        if at < stop and tried >= _TRIES:
            raise unreachable(what, why, tried, time.monotonic() - began)
        if at < stop:
            time.sleep(min(LONGEST_WAIT_S, max(wait_s, _FIRST_WAIT_S * 2 ** (tried - 1))))


def _refused(url: str, what: str, error: RefusedError) -> MillraceError:
    status = re.search(r"HTTP status (\d+)", str(error))
    if status is not None and status[1] in ("401", "403"):
        return closed(what, f"HTTP status {status[1]}")
    return PrepareError(f"{url}: cannot read input: {error}. Check the name, or try again later.")


class _Blocks:
    """The last blocks that were read, of all files, and how the last of them were read."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._going: OrderedDict[str, tuple[int, int]] = OrderedDict()  # the block after the last, and how many it took
        self._lock = threading.Lock()
        at_fork(self)

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def get(self, url: str, number: int) -> bytes | None:
        with self._lock:
            found = self._held.get((url, number))
            if found is not None:
                self._held.move_to_end((url, number))
            return found

    def count(self, url: str, number: int) -> int:
        """How many blocks to ask for from this one on: none that is held already."""
        with self._lock:
            after, taken = self._going.pop(url, (0, 0))
            near = 0 <= number - after <= _NEAR and taken
            ahead = min(_MOST_AHEAD, 2 * taken) if near else _FIRST_AHEAD
            count = next((n for n in range(1, ahead) if (url, number + n) in self._held), ahead)
            self._going[url] = number + count, ahead
            while len(self._going) > _MOST_BLOCKS:
                self._going.popitem(last=False)
            return count

    def put(self, url: str, number: int, data: bytes) -> None:
        with self._lock:
            self._held[url, number] = data
            self._held.move_to_end((url, number))
            while len(self._held) > _MOST_BLOCKS:
                self._held.popitem(last=False)


_blocks = _Blocks()


class _File(io.RawIOBase):
    """Reads from wherever it is sought to."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._at = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        if self._at >= self._size:
            return 0
        number, skip = divmod(self._at, _BLOCK)
        block = _blocks.get(self._url, number) or self._fetch(number)
        count = min(len(buffer), len(block) - skip)
        buffer[:count] = block[skip : skip + count]
        self._at += count
        return count

    def _fetch(self, number: int) -> bytes:
        start = number * _BLOCK
        stop = min(self._size, start + _blocks.count(self._url, number) * _BLOCK)
        data = bytearray()
        try:
            fetch_range(self._url, start, stop, data.extend)
        except MillraceError as error:
            raise Lost(error) from error
        for index in range(0, len(data), _BLOCK):
            _blocks.put(self._url, number + index // _BLOCK, bytes(data[index : index + _BLOCK]))
        return bytes(data[:_BLOCK])
