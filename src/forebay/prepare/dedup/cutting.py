"""Cuts repeated lines and spans out of documents, and drops those of which most is cut."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from forebay.arrays import U8
from forebay.errors import PrepareError
from forebay.prepare.dedup.clusters import RETAINED
from forebay.prepare.dedup.methods import CutMethod, Overlap, Substring
from forebay.prepare.dedup.units import mark_units, remove
from forebay.prepare.dedup.word_runs import mark_overlap, mark_spans
from forebay.prepare.documents import part_batches, read_items, text_buffers, text_column
from forebay.storage.store import Store


@dataclass(frozen=True)
class Flags:
    """A byte for each of `count` documents (or rows of a unit) of a split, from byte `start` of an object."""

    store: Store
    name: str
    start: int
    count: int

    def load(self, start: int = 0, count: int | None = None) -> U8:
        """uint8 [count]: those of the split from `start` on, by default all."""
        return read_items(self.store, self.name, np.uint8, self.count if count is None else count, self.start + start)


@dataclass(frozen=True)
class Cut:
    """What to cut out of a split: flags of the rows of `method`; of Substring those of windows in `PREFIX.*`."""

    flags: Flags
    method: CutMethod
    prefix: str


@dataclass
class Cutter:
    """Cuts marked lines and spans out of a split's texts, given in the order in which they were signed. Picklable.

    `cuts` is `DedupResult.cut` of the split. Documents that are dropped are given too: drop them after this.
    """

    cuts: Sequence[Cut]

    def cut(self, texts: pa.LargeStringArray, first_row: int) -> pa.LargeStringArray:
        """The texts of the split's rows from `first_row` without what is marked; one that is empty then is ""."""
        if first_row == 0:
            self._used, self._documents = [0] * len(self.cuts), 0
        offsets, _ = text_buffers(texts)
        removed = np.zeros(int(offsets[-1] - offsets[0]), np.uint8)
        for k, cut in enumerate(self.cuts):
            rows = self._mark(cut, texts, self._used[k], removed)
            self._used[k] += rows
            if self._used[k] > cut.flags.count:
                raise PrepareError(
                    f"{cut.flags.name}: expected the {cut.flags.count} rows that were signed, got more. "
                    "The documents have changed since: run the task that signed them again."
                )
        self._documents += len(texts)
        return text_column(*remove(texts, removed)) if removed.any() else texts

    def _mark(self, cut: Cut, texts: pa.LargeStringArray, used: int, removed: U8) -> int:
        remaining = max(cut.flags.count - used, 0)
        if not isinstance(cut.method, Substring):
            # A text of n bytes has at most n rows.
            flags = cut.flags.load(used, min(remaining, len(removed)))
            if isinstance(cut.method, Overlap):
                return mark_overlap(texts, cut.method, flags, removed)
            return mark_units(texts, cut.method, flags, removed)
        store = cut.flags.store
        counts = store.read_array(f"{cut.prefix}.counts", "<u4", len(texts), self._documents)
        rows = int(counts.sum())
        flags = cut.flags.load(used, min(remaining, rows))
        spans = store.read_array(f"{cut.prefix}.spans", "<u4", 2 * rows, 2 * used).astype(np.int64).reshape(-1, 2)
        if len(counts) == len(texts) and len(flags) == len(spans) == rows:
            mark_spans(text_buffers(texts)[0], counts, spans, flags, removed)
            return rows
        return remaining + 1


@dataclass(frozen=True)
class ShareTask:
    """`NAME`: the drop codes of a split's documents; `code` where more than `max_share` is cut, or all."""

    name: str
    prefix: str
    cuts: tuple[Cut, ...]
    drop: Flags
    max_share: float
    code: int


def drop_mostly_cut(task: ShareTask, scale: int) -> list[int]:
    """Run a ShareTask. Returns the documents of each code."""
    codes, store = task.drop.load(), task.drop.store
    cutter = Cutter(task.cuts)
    for start, batch in part_batches(store, f"{task.prefix}.arrow", ["text"]):
        texts = batch.column("text")
        sizes = (np.diff(text_buffers(column)[0]) for column in (texts, cutter.cut(texts, start)))
        before, after = sizes
        here = codes[start : start + len(batch)]
        mostly = (before - after > task.max_share * before) | ((after == 0) & (before > 0))
        here[(here == RETAINED) & mostly] = task.code
    store.write(task.name, codes.tobytes())
    return [int(count) for count in np.bincount(codes, minlength=task.code + 1)]
