"""Blocks of remote files that readers of this process share, fetched ahead of whoever reads on.

Hides: what is held, what is on its way, and how far ahead to ask. A jump asks for 4 blocks of 256 KiB; reading on, or
leaving out a little, for 8, then 16; from there on requests of 16 blocks run at the same time, up to 16 MiB ahead of
the reader, so that a request's latency bounds nothing (16 MiB in 50 ms: 330 MB/s). Memory: 64 MiB of blocks, and one
block for each of at most 4 requests and those that readers wait for. A block is given as soon as it is whole.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TypeAlias

from forebay.store.locks import at_fork

BLOCK = 256 << 10
_MOST_BLOCKS = 256  # twice the window, so that what was fetched ahead outlives what is read meanwhile
_FIRST_AHEAD, _MOST_AHEAD = 4, 16
_NEAR = 16  # blocks that may be left out by one who reads on: the other columns of a row group

_WINDOW = 64  # blocks asked for ahead of all readers together
_BEHIND = _WINDOW + 2 * _NEAR
_MOST_FLIGHTS = 4

Fetch: TypeAlias = Callable[[str, int, int, Callable[[memoryview], object]], None]
"""Gives bytes [start, stop) of a URL to a function, in order; raises where it cannot."""


class _Flight:
    """A request under way; `error` if it ended before its time."""

    def __init__(self, blocks: range) -> None:
        self.blocks = blocks
        self.ended = False
        self.error: BaseException | None = None


class Blocks:
    """The last blocks that were read or fetched ahead, of all files."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._flights: dict[tuple[str, int], _Flight] = {}
        self._going: OrderedDict[str, tuple[int, int]] = OrderedDict()  # the block to ask for next, and how many
        self._open: Counter[str] = Counter()
        self._under_way = 0
        self._changed = threading.Condition()
        at_fork(self)

    def after_fork(self) -> None:
        """Threads stay the parent's, and another of them may have held the lock."""
        self._changed = threading.Condition()
        self._flights.clear()
        self._under_way = 0

    def opened(self, url: str) -> None:
        """One more reader of a file: those there are share the window."""
        with self._changed:
            self._open[url] += 1

    def closed(self, url: str) -> None:
        """One reader fewer."""
        with self._changed:
            self._open[url] -= 1
            if self._open[url] <= 0:
                del self._open[url]

    def read(self, url: str, size: int, number: int, fetch: Fetch) -> bytes:
        """A block of a file of `size` bytes; waits for it, and raises what `fetch` raised of it."""
        key = (url, number)
        with self._changed:
            while key not in self._held:
                flight = self._flights.get(key)
                if flight is None:
                    flight = self._send(url, size, number, self._count(url, size, number), fetch)
                self._look_ahead(url, size, number, fetch)
                while key not in self._held and not flight.ended:
                    self._changed.wait()
                if key not in self._held and flight.error is not None:
                    raise flight.error
            self._held.move_to_end(key)
            self._look_ahead(url, size, number, fetch)
            return self._held[key]

    def _count(self, url: str, size: int, number: int) -> int:
        """How many blocks to ask for from this one on: none that is held or on its way already."""
        after, taken = self._going.pop(url, (0, 0))
        if taken and 0 < after - number <= _BEHIND:  # what was left out, by one who comes back for it
            self._going[url] = after, taken
            return self._free(url, size, number, _MOST_AHEAD)
        near = 0 <= number - after <= _NEAR and taken
        ahead = min(_MOST_AHEAD, 2 * taken) if near else _FIRST_AHEAD
        count = self._free(url, size, number, ahead)
        self._going[url] = number + count, ahead
        while len(self._going) > _MOST_BLOCKS:
            self._going.popitem(last=False)
        return count

    def _free(self, url: str, size: int, number: int, most: int) -> int:
        """Blocks from this one on, at least it, up to the first that is here or on its way."""
        most = min(most, -(-size // BLOCK) - number)
        there = (n for n in range(1, most) if (url, number + n) in self._held or (url, number + n) in self._flights)
        return next(there, max(1, most))

    def _look_ahead(self, url: str, size: int, number: int, fetch: Fetch) -> None:
        """Keep requests under way for what comes after a block that was wanted in full stride."""
        reached, taken = self._going.get(url, (0, 0))
        window = _WINDOW // max(1, len(self._open))
        if taken < _MOST_AHEAD or number >= reached:
            return
        while reached - number < window and reached * BLOCK < size and self._under_way < _MOST_FLIGHTS:
            count = 1
            if (url, reached) not in self._held and (url, reached) not in self._flights:
                count = self._free(url, size, reached, taken)
                self._send(url, size, reached, count, fetch)
            reached += count
        self._going[url] = reached, taken

    def _send(self, url: str, size: int, number: int, count: int, fetch: Fetch) -> _Flight:
        flight = _Flight(range(number, number + count))
        self._flights.update({(url, n): flight for n in flight.blocks})
        self._under_way += 1
        threading.Thread(
            target=self._fly, args=(url, size, flight, fetch), name="forebay-hub-ahead", daemon=True
        ).start()
        return flight

    def _fly(self, url: str, size: int, flight: _Flight, fetch: Fetch) -> None:
        data, at = bytearray(), flight.blocks.start

        def take(piece: memoryview) -> None:
            nonlocal at
            data.extend(piece)
            while len(data) >= BLOCK:
                self._put(url, at, bytes(memoryview(data)[:BLOCK]))
                del data[:BLOCK]
                at += 1

        try:
            fetch(url, at * BLOCK, min(size, flight.blocks.stop * BLOCK), take)
            if data:
                self._put(url, at, bytes(data))
        except BaseException as error:  # noqa: BLE001  Whoever waits for the blocks raises it.
            flight.error = error
        with self._changed:
            flight.ended = True
            self._under_way -= 1
            for number in flight.blocks:
                if self._flights.get((url, number)) is flight:
                    del self._flights[url, number]
            self._changed.notify_all()

    def _put(self, url: str, number: int, data: bytes) -> None:
        with self._changed:
            self._held[url, number] = data
            self._held.move_to_end((url, number))
            self._flights.pop((url, number), None)
            while len(self._held) > _MOST_BLOCKS:
                self._held.popitem(last=False)
            self._changed.notify_all()
