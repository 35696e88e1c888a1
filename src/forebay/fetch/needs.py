"""Which chunks of which slices the steps of a plan read, and from which step on: arithmetic on byte ranges."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from forebay.arrays import I64
from forebay.dataset.chunks import first_chunks
from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.dataset.reader import Dataset
from forebay.fetch.chunk_file import ChunkFile


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
        tables = [dataset.table for dataset in datasets]
        self.num_bytes = np.concatenate([table.bytes for table in tables])  # [K]
        self.chunk_bytes = np.repeat([table.chunk_bytes for table in tables], list(map(len, tables)))  # [K]
        counts = [np.diff(first_chunks(table.bytes, table.chunk_bytes)) for table in tables]
        self.first = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)  # [K + 1]
        widths = [TOKEN_DTYPES[d.manifest.dtype].itemsize if d.manifest.layout == "tokens" else 0 for d in datasets]
        self.token_bytes = np.repeat(np.array(widths, np.int64), [len(table) for table in tables])  # [K]
        self.token_starts = self.num_bytes - np.concatenate([table.count for table in tables]) * self.token_bytes
        """[K], where the tokens of a slice begin, if they are its last tensor, as SafeTensors' writers put them."""

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
