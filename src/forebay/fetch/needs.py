"""Which chunks of which slices the steps of a plan read, from which step on, and which are fetched a second time."""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from forebay.arrays import I64
from forebay.dataset.chunks import first_chunks
from forebay.dataset.manifest import TOKEN_DTYPES, SliceInfo
from forebay.dataset.reader import Dataset
from forebay.fetch.chunk_file import ChunkFile
from forebay.order.run import Run

_MIN_WARNED_BYTES = 64 << 20
_log = logging.getLogger("forebay")


@dataclass(eq=False)
class ChunkGroup:
    """The chunks of one slice that a plan reads."""

    key: int
    chunks: I64  # rising
    first_steps: I64  # of each, counted from the plan's first
    entry: ChunkFile | None = None  # None: a local slice, whose chunks are to be verified


@dataclass(eq=False)
class PlanNeeds:
    """What a plan of steps needs before it can be made into batches. The reader's lock guards it."""

    first_step: int  # of the run
    next_step: int  # after its last
    num_bytes: int  # that its samples read, about
    run_bytes: int  # of a request that has neighbours of its chunks, too
    on_change: Callable[[], object] | None = None
    """Of a plan that is no part of the run's order: called, without a lock, when a fetch of its chunks ended."""
    groups: list[ChunkGroup] = field(default_factory=list)
    waiting: list[ChunkGroup] = field(default_factory=list)  # those of `groups` that are not complete
    todo: list[tuple[int, ChunkGroup, int]] = field(default_factory=list)  # (step, group, chunk) to fetch, by step
    position: int = 0  # in `todo`

    def add(self, groups: Sequence[ChunkGroup]) -> None:
        self.groups += groups
        self.waiting += groups
        self.todo += [
            (step, group, chunk)
            for group in groups
            for step, chunk in zip(group.first_steps.tolist(), group.chunks.tolist())
        ]
        self.todo.sort(key=lambda item: item[0])
        self.position = 0


class ChunkTable:
    """The chunks of all datasets of a run: keys are slices, and chunks are numbered over all slices."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self.datasets, tables = datasets, [dataset.table for dataset in datasets]
        self.first_key = np.cumsum([0, *map(len, tables)])
        """[D + 1], the key of slice 0 of each dataset, and their number."""
        self.num_bytes = np.concatenate([table.bytes for table in tables])  # [K]
        self.chunk_bytes = np.repeat([table.chunk_bytes for table in tables], list(map(len, tables)))  # [K]
        counts = [np.diff(first_chunks(table.bytes, table.chunk_bytes)) for table in tables]
        self.first = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)  # [K + 1]
        widths = [TOKEN_DTYPES[d.manifest.dtype].itemsize if d.manifest.layout == "tokens" else 0 for d in datasets]
        self.token_bytes = np.repeat(np.array(widths, np.int64), [len(table) for table in tables])  # [K]
        self.token_starts = self.num_bytes - np.concatenate([table.count for table in tables]) * self.token_bytes
        """[K], where the tokens of a slice begin, if they are its last tensor, as SafeTensors' writers put them."""

    def find(self, key: int) -> tuple[int, int]:
        """Return (index of the dataset, index of the slice in it)."""
        i = int(self.dataset_indexes(key))
        return i, key - int(self.first_key[i])

    def dataset_indexes(self, keys: I64 | int) -> I64:
        indexes: I64 = np.searchsorted(self.first_key, keys, side="right") - 1
        return indexes

    def row(self, key: int) -> SliceInfo:
        """Return what the table of its dataset says of a slice."""
        i, index = self.find(key)
        return self.datasets[i].table.row(index)

    def groups(self, keys: I64, starts: I64, stops: I64, steps: I64) -> list[ChunkGroup]:
        """The chunks of byte ranges [starts, stops) of slices `keys`, read from `steps` on; all [N]."""
        size = self.chunk_bytes[keys]
        first = starts // size
        counts = (np.minimum(stops, self.num_bytes[keys]) - 1) // size - first + 1
        counts = np.maximum(counts, 1)
        if int(counts.max(initial=1)) > 1:
            rows = np.repeat(np.arange(len(keys)), counts)
            offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
            numbers, steps = self.first[keys[rows]] + first[rows] + offsets, steps[rows]
        else:
            numbers = self.first[keys] + first
        order = np.lexsort((steps, numbers))
        numbers, steps = numbers[order], steps[order]
        fresh = np.flatnonzero(np.diff(numbers, prepend=-1))
        numbers, steps = numbers[fresh], steps[fresh]
        own_keys = np.searchsorted(self.first, numbers, side="right") - 1
        edges = [*np.flatnonzero(np.diff(own_keys, prepend=-1)).tolist(), len(numbers)]
        groups = []
        for low, high in itertools.pairwise(edges):
            key = int(own_keys[low])
            groups.append(ChunkGroup(key, numbers[low:high] - int(self.first[key]), steps[low:high]))
        return groups


class Refetches:
    """`counts`: `refetched_chunks` and `refetched_bytes`. Memory: a bit a chunk."""

    def __init__(self, table: ChunkTable, run: Run) -> None:
        self.counts = {"refetched_chunks": 0, "refetched_bytes": 0}
        self._table, self._run = table, run
        self._epochs: dict[int, int] = {}  # The epoch that the bits of each dataset count.
        self._first = table.first[table.first_key].tolist()
        self._bits = [np.zeros(size // 8 + 1, np.uint8) for size in np.diff(self._first).tolist()]
        self._fetched_bytes, self._warned = 0, False

    def add(self, group: ChunkGroup, chunks: I64, step: int, is_own: bool) -> None:
        """Chunks are fetched for a plan from `step` on. `is_own`: this process evicted something."""
        assert group.entry is not None
        source, _ = self._table.find(group.key)
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
