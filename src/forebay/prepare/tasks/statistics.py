"""STATISTICS tasks: what is kept of a split, and the sum of the statistics of many tasks.

Each leaves an object of statistics. They are added in groups, so that no process reads those of all tasks.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.arrays import BOOL, I64, U8, U64
from forebay.formats.inputs import InputSplit
from forebay.prepare.documents import Map, file_batches
from forebay.prepare.sources import row_position
from forebay.prepare.stats import SAMPLES, StageStats, mix64
from forebay.prepare.tasks.keys import hash_json
from forebay.storage.store import Store

if TYPE_CHECKING:
    from forebay.prepare.dedup.cutting import Cutter, Flags

_VERSION = 2  # Changed when the same split would have other statistics.
_GROUP = 256  # Tasks whose statistics are added by one.
COLUMNS = ("place", "id", "where", "text_bytes", "language", "subset")


@dataclass(frozen=True)
class FilteredPart:
    """The documents of a split that passed its stages, and what deduplication does with them.

    Args:
        arrow, key: The documents, and the key of random choices.
        first_row: As of `sources.first_rows`.
        drop: A byte a document, 0 for those to keep, else 1 + the index of the method. None keeps all.
        cut: Cuts duplicated lines out, if given.
        dedup_name: A hash of all that `drop` and `cut` depend on.
    """

    arrow: str
    key: str
    documents: int
    split: InputSplit
    first_row: int
    drop: "Flags | None" = None
    cut: "Cutter | None" = None
    dedup_name: str = ""

    def drop_codes(self) -> U8:
        """Return `drop` in memory."""
        return self.drop.load() if self.drop is not None else np.zeros(self.documents, np.uint8)


@dataclass(frozen=True)
class ExamineTask:
    """The documents of a split that deduplication keeps: their distributions; and samples of these and of copies.

    Args:
        reasons: (stage, reason) by the byte of `part.drop`.
        columns: Of numbers, that have distributions.
    """

    part: FilteredPart
    reasons: tuple[tuple[str, str], ...]
    columns: tuple[str, ...]
    store: Store

    @cached_property
    def name(self) -> str:
        """A hash of all that the result depends on."""
        part, paths = self.part, [file.path for file in self.split.files]
        fields = [_VERSION, part.arrow, part.key, paths, part.first_row, part.dedup_name, self.reasons, self.columns]
        return hash_json(fields)

    @property
    def split(self) -> InputSplit:
        return self.part.split

    @property
    def label(self) -> str:
        return f"what is kept of {self.split.files[0].path}"


def examine(task: ExamineTask, scale: int) -> int:
    """Run the task. Returns the UTF-8 bytes of text that are kept."""
    stats, kept_bytes, part = StageStats(), 0, task.part
    codes = part.drop_codes()
    keys = mix64(np.arange(len(codes), dtype=np.uint64), np.uint64(int(part.key[:16], 16)))
    with task.store.local(part.arrow) as path:
        for start, batch in file_batches(path, [*COLUMNS, *task.columns]):
            retained = batch.filter(pa.array(codes[start : start + batch.num_rows] == 0))
            stats.add_batch("kept", retained)
            kept_bytes += pc.sum(retained.column("text_bytes")).as_py() or 0
        chosen = [_smallest(keys, codes == code) for code in range(len(task.reasons))]
        rows = np.concatenate([np.empty(0, np.int64), *chosen])
        for start, batch in file_batches(path) if len(rows) else ():
            for (stage, reason), mine in zip(task.reasons, chosen):
                here = mine[(mine >= start) & (mine < start + batch.num_rows)] - start
                if len(here):

                    def position(row: int, batch: pa.RecordBatch = batch) -> str:
                        return row_position(part.split, batch, row, part.first_row)

                    stats.add_samples(stage, reason, batch, here, keys[start : start + batch.num_rows], position)
    write_stats(task.store, stats_name(task), stats)
    return kept_bytes


def _smallest(keys: U64, of: BOOL) -> I64:
    rows = np.flatnonzero(of)
    return rows[np.argsort(keys[rows], kind="stable")[:SAMPLES]]


def stats_name(task: "ExamineTask | _AddTask") -> str:
    """The name of the statistics that a task leaves."""
    return f"stats/{task.name}.stats"


def write_stats(store: Store, name: str, stats: StageStats) -> None:
    """Write statistics to an object."""
    store.write(name, zlib.compress(stats.to_json(), 1))


def read_stats(store: Store, name: str) -> StageStats:
    """The statistics of an object."""
    return StageStats.from_json(zlib.decompress(store.read(name)))


@dataclass(frozen=True)
class _AddTask:
    store: Store
    names: tuple[str, ...]

    @cached_property
    def name(self) -> str:
        return hash_json([_VERSION, self.names])


def _add(task: _AddTask, scale: int) -> bool:
    write_stats(task.store, stats_name(task), _sum(task.store, task.names))
    return True


def _sum(store: Store, names: Sequence[str]) -> StageStats:
    total = StageStats()
    for name in names:
        total.add(read_stats(store, name))
    return total


def add_stats(store: Store, names: Sequence[str], map: Map) -> StageStats:
    """The sum of the statistics of objects, in their order; those of many by tasks."""
    while len(names) > _GROUP:
        groups = [tuple(names[start : start + _GROUP]) for start in range(0, len(names), _GROUP)]
        tasks = [_AddTask(store, group) for group in groups]
        map(_add, tasks)
        names = [stats_name(task) for task in tasks]
    return _sum(store, names)
