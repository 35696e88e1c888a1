"""Bytes of the hub's files, by ranges: `open_hub_file("hf://datasets/OWNER/NAME@COMMIT/PATH")`.

Hides: the CDN's addresses that run out, and reading ahead. Blocks of 256 KiB are shared by all readers of this process,
64 MiB at most: the footer, the pages' heads and the pages of a Parquet file are read by several passes, and cost one.
A jump asks for 4 blocks, reading on for 8, then 16; from there on requests of 16 blocks run at the same time, up to
16 MiB ahead of the readers, so that a request's latency bounds nothing (16 MiB in 50 ms: 330 MB/s). A block is given as
soon as it is whole.
"""

from __future__ import annotations

import io
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, BinaryIO, TypeAlias

from forebay.errors import ForebayError, PrepareError
from forebay.prepare.read.hub_api import Lost, called, hub_origin, pause, refusal, retried
from forebay.storage.base import PermanentError, TransientError
from forebay.storage.locks import at_fork

_TRIES = 6  # 8 s in all
_URL = re.compile(r"hf://(datasets|models)/([^@]+)@([^/@]+)/(.+)", re.DOTALL)
BLOCK = 256 << 10
_MOST_BLOCKS = 256  # four times the window, so that what was fetched ahead outlives what is read meanwhile
_FIRST, _STRIDE = 4, 16
_FULL = 28  # blocks read on, after requests of 4, 8 and 16, from which on several are under way
_WINDOW = 64  # blocks ahead of all readers together
_NEAR = 16  # blocks that may be left out by one who reads on: the other columns of a row group

Fetch: TypeAlias = Callable[[str, int, int, Callable[[memoryview], object]], None]
"""Gives bytes [start, stop) of a URL to a function, in order; raises where it cannot."""


def file_url(kind: str, name: str, commit: str, path: str) -> str:
    """What names a file of the hub at a commit."""
    return f"hf://{kind}/{name}@{commit}/{path}"


def open_hub_file(url: str, size: int) -> BinaryIO:
    """A buffered, seekable stream of a file of `size` bytes."""
    return io.BufferedReader(HubFileReader(url, size, fetch_range, _blocks), BLOCK)


def fetch_range(url: str, start: int, stop: int, take: Callable[[memoryview], object]) -> None:
    """Give bytes [start, stop) of a file to `take(piece)`, in order; what was given is not asked for again."""
    found = _URL.fullmatch(url)
    if found is None:
        raise PrepareError(f"{url}: expected hf://datasets/OWNER/NAME@COMMIT/PATH. Check the input.")
    kind, name, commit, path = found.groups()
    address, what = f"{'datasets/' * (kind == 'datasets')}{name}/resolve/{commit}/{path}", called(kind, name)
    at, refused = start, False

    def attempt() -> None:
        nonlocal at, refused
        before = at
        try:
            for piece in hub_origin("HF_HUB_DOWNLOAD_TIMEOUT").read(address, at, stop):
                take(piece)
                at += len(piece)
            if at < stop:
                raise TransientError(f"a connection that was closed {stop - at} bytes before the end")
        except TransientError as error:
            if at == before:
                raise
            pause(error)  # and the tries begin anew
        except PermanentError as error:
            if refused or error.status != 403:
                raise refusal(what, error) from error
            refused = True  # an address of the CDN that ran out looks like this, too: once
            raise TransientError(str(error)) from error

    while at < stop:
        retried(what, attempt, _TRIES)


class Blocks:
    """The last blocks that were read or fetched ahead, of all files, and those on their way.

    The files of the `readers`, which are those that are open, share the window.
    """

    def __init__(self) -> None:
        self.readers: weakref.WeakSet[HubFileReader] = weakref.WeakSet()
        self._blocks: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        at_fork(self)

    def after_fork(self) -> None:
        """Threads stay the parent's, and another of them may have held the lock."""
        self._lock = threading.Lock()
        self._blocks.clear()

    def read(self, url: str, size: int, number: int, ahead: int, fetch: Fetch) -> bytes:
        """A block of a file of `size` bytes; `ahead` are wanted from it on. Waits; raises what `fetch` raised."""
        with self._lock:
            found = self._blocks.get((url, number))
            if found is None or (found.done() and found.exception() is not None):
                self._blocks.pop((url, number), None)
                self._send(url, size, number, min(ahead, _STRIDE), fetch)
            self._blocks.move_to_end((url, number))
            found = self._blocks[url, number]
            ahead = min(ahead, _WINDOW // max(1, len({reader.url for reader in self.readers})))
            next_one = number + 1
            while next_one + _STRIDE <= number + ahead and next_one * BLOCK < size:
                if (url, next_one) in self._blocks:
                    next_one += 1
                else:
                    next_one += self._send(url, size, next_one, _STRIDE, fetch)
        return found.result()

    def _send(self, url: str, size: int, number: int, most: int, fetch: Fetch) -> int:
        """Ask for this block and those after it up to the first that is here or on its way; how many that are."""
        most = max(1, min(most, -(-size // BLOCK) - number))
        count = next((n for n in range(1, most) if (url, number + n) in self._blocks), most)
        asked = [Future[bytes]() for _ in range(count)]
        self._blocks.update({(url, number + n): block for n, block in enumerate(asked)})
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)
        start, stop = number * BLOCK, min(size, (number + count) * BLOCK)
        thread = threading.Thread(
            target=_fill, args=(asked, url, start, stop, fetch), name="forebay-hub-ahead", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # no thread now: whoever waits for the blocks raises it
            for block in asked:
                block.set_exception(error)
        return count


def _fill(blocks: list[Future[bytes]], url: str, start: int, stop: int, fetch: Fetch) -> None:
    """Fetch a range and give each of its blocks its bytes, or what went wrong."""
    data, left = bytearray(), iter(blocks)

    def take(piece: memoryview) -> None:
        data.extend(piece)
        while len(data) >= BLOCK:
            next(left).set_result(bytes(memoryview(data)[:BLOCK]))
            del data[:BLOCK]

    try:
        fetch(url, start, stop, take)
        if data:
            next(left).set_result(bytes(data))
    except BaseException as error:  # noqa: BLE001  Whoever waits for the blocks raises it.
        for block in left:
            block.set_exception(error)


_blocks = Blocks()


class HubFileReader(io.RawIOBase):
    """Reads from wherever it is sought to, `ahead` the further the longer it reads on."""

    def __init__(self, url: str, size: int, fetch: Fetch, blocks: Blocks) -> None:
        self.url, self._size, self._fetch, self._blocks = url, size, fetch, blocks
        self._at, self._furthest, self._run = 0, 0, 0
        blocks.readers.add(self)

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
        if -_WINDOW <= number - self._furthest <= _NEAR:  # also one who comes back for what was left out
            self._run += max(0, number - self._furthest)
            self._furthest = max(number, self._furthest)
        else:
            self._run, self._furthest = 0, number
        ahead = min(_STRIDE, _FIRST + self._run) if self._run < _FULL else _WINDOW
        try:
            block = self._blocks.read(self.url, self._size, number, ahead, self._fetch)
        except ForebayError as error:
            raise Lost(error) from error
        count = min(len(buffer), len(block) - skip)
        buffer[:count] = block[skip : skip + count]
        self._at += count
        return count

    def close(self) -> None:
        self._blocks.readers.discard(self)
        super().close()
