"""Bytes of the hub's files, by ranges: `open_hub_file("hf://datasets/OWNER/NAME@COMMIT/PATH")`.

Hides: kept connections, the CDN's addresses that run out, retries, reading ahead (`hub_blocks`). Blocks of 256 KiB are
shared by all readers of this process, 64 MiB at most: the footer, the pages' heads and the pages of a Parquet file are
read by several passes, and cost one.
"""

from __future__ import annotations

import io
import re
import time
from functools import lru_cache
from typing import Any, BinaryIO

from forebay.errors import ForebayError, PrepareError
from forebay.prepare.read.hub_api import LONGEST_WAIT_S, Lost, closed, timeout_s, unreachable
from forebay.prepare.read.hub_blocks import BLOCK, Blocks
from forebay.store.origins import PassingError, Patience, RefusedError
from forebay.store.web import WebOrigin, hub_endpoint, hub_headers

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
    return io.BufferedReader(_File(url, size), BLOCK)


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


def _refused(url: str, what: str, error: RefusedError) -> ForebayError:
    status = re.search(r"HTTP status (\d+)", str(error))
    if status is not None and status[1] in ("401", "403"):
        return closed(what, f"HTTP status {status[1]}")
    return PrepareError(f"{url}: cannot read input: {error}. Check the name, or try again later.")


_blocks = Blocks()


class _File(io.RawIOBase):
    """Reads from wherever it is sought to."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._at = url, size, 0
        _blocks.opened(url)

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
        number, skip = divmod(self._at, BLOCK)
        try:
            block = _blocks.read(self._url, self._size, number, fetch_range)
        except ForebayError as error:
            raise Lost(error) from error
        count = min(len(buffer), len(block) - skip)
        buffer[:count] = block[skip : skip + count]
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            _blocks.closed(self._url)
        super().close()
