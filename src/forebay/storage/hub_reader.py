"""Files of the hub as seekable streams that read ahead: `open_hub_file(url, size)`.

All streams of a process share the last 64 MiB of blocks, so that the passes over a Parquet file (footer, heads of
pages, pages) request each byte once. A stream that reads on has up to eight requests of 1 MiB under way, so that
latency does not bound the speed (8 MiB in 50 ms: 160 MB/s).
"""

import io
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any, BinaryIO

from forebay.errors import ForebayError
from forebay.storage.hub import HubReadError, fetch_range
from forebay.storage.locks import at_fork

BLOCK_BYTES = 1 << 20
MAX_BLOCKS = 64
_MAX_AHEAD = 8
_MAX_GAP_BLOCKS = 4  # skipped by a stream that reads on: the other columns of a row group


def open_hub_file(url: str, size: int) -> BinaryIO:
    """A buffered, seekable stream of a file of `size` bytes. A read raises HubReadError where it fails."""
    return io.BufferedReader(HubStream(url, size, _blocks), 256 << 10)


class BlockCache:
    """The last blocks of all files that were read or fetched ahead, and those under way."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        at_fork(self)

    def after_fork(self) -> None:
        """Drop all blocks: the parent's threads do not run here, and one may have held the lock."""
        self._lock = threading.Lock()
        self._blocks.clear()

    def read(self, url: str, size: int, index: int, num_ahead: int) -> bytes:
        """The block of that index of a file of `size` bytes; starts to fetch it and the next `num_ahead` blocks.

        Raises what `fetch_range` raised.
        """
        with self._lock:
            for key in ((url, index + n) for n in range(min(num_ahead + 1, -(-size // BLOCK_BYTES) - index))):
                block = self._blocks.get(key)
                if block is None or (key[1] == index and block.done() and block.exception() is not None):
                    self._blocks[key] = block = Future()
                    thread = threading.Thread(target=_fill, args=(block, *key, size), name="hub-ahead", daemon=True)
                    try:
                        thread.start()
                    except RuntimeError as error:  # no thread can be started now: the reader of the block raises it
                        block.set_exception(error)
                self._blocks.move_to_end(key)
            while len(self._blocks) > MAX_BLOCKS:
                self._blocks.popitem(last=False)
            wanted = self._blocks[url, index]
        return wanted.result()


def _fill(block: Future[bytes], url: str, index: int, size: int) -> None:
    data = bytearray()
    try:
        fetch_range(url, index * BLOCK_BYTES, min(size, (index + 1) * BLOCK_BYTES), data.extend)
        block.set_result(bytes(data))
    except BaseException as error:  # noqa: BLE001  The reader of the block raises it.
        block.set_exception(error)


_blocks = BlockCache()


class RangedStream(io.RawIOBase):
    """A file of known size at a URL; a subclass reads from `_offset` on. `_size` 0: unknown, and no seek."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._offset = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._size > 0

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._offset = offset + (0, self._offset, self._size)[whence]
        return self._offset


class HubStream(RangedStream):
    """A file of the hub; the longer it is read on without a seek, the further ahead it fetches."""

    def __init__(self, url: str, size: int, blocks: BlockCache) -> None:
        super().__init__(url, size)
        self._blocks, self._last_block, self._num_ahead = blocks, 0, 0

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if self._offset >= self._size:
            return 0
        index, skip = divmod(self._offset, BLOCK_BYTES)
        if index != self._last_block:
            is_next = 0 < index - self._last_block <= _MAX_GAP_BLOCKS
            self._num_ahead = min(_MAX_AHEAD, 2 * self._num_ahead + 1) if is_next else 0
            self._last_block = index
        try:
            block = self._blocks.read(self._url, self._size, index, self._num_ahead)
        except ForebayError as error:
            raise HubReadError(error) from error
        count = min(len(buffer), len(block) - skip)
        buffer[:count] = block[skip : skip + count]
        self._offset += count
        return count
