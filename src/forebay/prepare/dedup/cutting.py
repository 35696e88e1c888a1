"""Cuts repeated lines and spans out of documents, and drops those of which most is cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.errors import PrepareError
from forebay.files import atomic_write
from forebay.prepare.dedup import pairs
from forebay.prepare.dedup.clusters import RETAINED
from forebay.prepare.dedup.methods import Overlap, Unit
from forebay.prepare.dedup.overlap import mark_overlap
from forebay.prepare.dedup.substring import mark_spans
from forebay.prepare.dedup.units import mark_units, remove
from forebay.prepare.documents import part_batches, text_buffers, text_column


@dataclass(frozen=True)
class Flags:
    """A byte for each of `count` documents (or rows of a unit) of a split, from byte `start` of a file."""

    path: str
    start: int
    count: int

    def load(self) -> NDArray[np.uint8]:
        """uint8 [count]."""
        return pairs.read_flags(self.path, self.start, self.count)


@dataclass(frozen=True)
class Cut:
    """What to cut out of a split: flags of the rows of `unit`; or of the windows of words in the files `PREFIX.*`."""

    flags: Flags
    unit: Unit | Overlap | None
    prefix: str = ""


class Cutter:
    """Cuts marked lines and spans out of a split's texts, given in the order in which they were signed. Picklable.

    `cuts` is `DedupResult.cut` of the split. Documents that are dropped are given too: drop them after this.
    """

    def __init__(self, cuts: Sequence[Cut]) -> None:
        self._cuts = tuple(cuts)
        self._used: list[int] = []
        self._documents = 0

    def __getstate__(self) -> tuple[Cut, ...]:
        return self._cuts

    def __setstate__(self, cuts: tuple[Cut, ...]) -> None:
        self.__init__(cuts)  # type: ignore[misc]

    def cut(self, texts: pa.LargeStringArray, first_row: int) -> pa.LargeStringArray:
        """The texts of the split's rows from `first_row` without what is marked; one that is empty then is ""."""
        if first_row == 0:
            self._used, self._documents = [0] * len(self._cuts), 0
        offsets, _ = text_buffers(texts)
        removed = np.zeros(int(offsets[-1] - offsets[0]), np.uint8)
        for k, cut in enumerate(self._cuts):
            rows = self._mark(cut, texts, self._used[k], removed)
            self._used[k] += rows
            if self._used[k] > cut.flags.count:
                raise PrepareError(
                    f"{cut.flags.path}: expected the {cut.flags.count} rows that were signed, got more. "
                    "The documents have changed since: run the task that signed them again."
                )
        self._documents += len(texts)
        return text_column(*remove(texts, removed)) if removed.any() else texts

    def _mark(self, cut: Cut, texts: pa.LargeStringArray, used: int, removed: NDArray[np.uint8]) -> int:
        remaining = max(cut.flags.count - used, 0)
        if cut.unit is not None:
            # A text of n bytes has at most n rows.
            flags = pairs.read_flags(cut.flags.path, cut.flags.start + used, min(remaining, len(removed)))
            mark = mark_overlap if isinstance(cut.unit, Overlap) else mark_units
            return mark(texts, cut.unit, flags, removed)  # type: ignore[arg-type]
        counts = np.fromfile(f"{cut.prefix}.counts", "<u4", len(texts), offset=4 * self._documents)
        rows = int(counts.sum())
        flags = pairs.read_flags(cut.flags.path, cut.flags.start + used, min(remaining, rows))
        spans = np.fromfile(f"{cut.prefix}.spans", "<u4", 2 * rows, offset=8 * used).astype(np.int64).reshape(-1, 2)
        if len(counts) == len(texts) and len(flags) == len(spans) == rows:
            mark_spans(text_buffers(texts)[0], counts, spans, flags, removed)
            return rows
        return remaining + 1


@dataclass(frozen=True)
class ShareTask:
    """`NAME`: the drop codes of a split's documents; `code` where more than `max_share` is cut, or all."""

    name: str
    folder: str
    prefix: str
    cuts: tuple[Cut, ...]
    drop: str
    start: int
    documents: int
    max_share: float
    code: int


def drop_mostly_cut(task: ShareTask, scale: int) -> str:
    """Run a ShareTask unless its file exists. Returns its name."""
    out = Path(task.folder) / task.name
    if not out.exists():
        codes = pairs.read_flags(task.drop, task.start, task.documents)
        cutter = Cutter(task.cuts)
        for start, batch in part_batches(f"{task.prefix}.arrow", ["text"]):
            texts = batch.column("text")
            sizes = (np.diff(text_buffers(column)[0]) for column in (texts, cutter.cut(texts, start)))
            before, after = sizes
            here = codes[start : start + len(batch)]
            mostly = (before - after > task.max_share * before) | ((after == 0) & (before > 0))
            here[(here == RETAINED) & mostly] = task.code
        atomic_write(out, codes.tobytes())
    return task.name
