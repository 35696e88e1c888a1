"""Counts what is fetched a second time in an epoch of its dataset, and says why."""

import logging

import numpy as np

from forebay.arrays import I64
from forebay.fetch.needs import ChunkGroup, ChunkTable
from forebay.order.run import Run

_MIN_WARNED_BYTES = 64 << 20
_log = logging.getLogger("forebay")


class Refetches:
    """`counts`: `refetched_chunks` and `refetched_bytes`. Memory: a bit a chunk."""

    def __init__(self, table: ChunkTable, first_key: I64, run: Run) -> None:
        self.counts = {"refetched_chunks": 0, "refetched_bytes": 0}
        self._table, self._first_key, self._run = table, first_key, run
        self._epochs: dict[int, int] = {}  # By dataset: the epoch of its bits.
        self._first = table.first[first_key].tolist()  # Of each dataset's chunk 0.
        self._bits = [np.zeros(size // 8 + 1, np.uint8) for size in np.diff(self._first).tolist()]
        self._fetched_bytes, self._warned = 0, False

    def add(self, group: ChunkGroup, chunks: I64, step: int, is_own: bool) -> None:
        """Chunks are fetched for a plan from `step` on. `is_own`: this process evicted something."""
        assert group.entry is not None
        source = int(np.searchsorted(self._first_key, group.key, side="right")) - 1
        epoch, size = self._run.epoch_of(step, source)[0], group.entry.bytes_of(chunks)
        self._fetched_bytes += size
        if epoch is None:
            return
        if epoch != self._epochs.get(source):
            self._epochs[source] = epoch
            self._bits[source][:] = 0
        numbers, flags = int(self._table.first[group.key]) - self._first[source] + chunks, self._bits[source]
        places, bits = numbers >> 3, np.left_shift(1, numbers & 7).astype(np.uint8)
        again = (flags[places] & bits) > 0
        np.bitwise_or.at(flags, places, bits)
        if not again.any():
            return
        self.counts["refetched_chunks"] += int(again.sum())
        self.counts["refetched_bytes"] += group.entry.bytes_of(chunks[again])
        if not self._warned and self.counts["refetched_bytes"] > max(_MIN_WARNED_BYTES, self._fetched_bytes // 20):
            self._warned = True
            _log.warning(
                "cache: %d bytes were fetched a second time in epoch %d: %s evicted them before they were read. Raise "
                "cache_bytes, or lower OrderOptions.lanes.", self.counts["refetched_bytes"], epoch,
                "this run" if is_own else "other processes",
            )  # fmt: skip
