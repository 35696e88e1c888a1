"""Percentiles of columns over the whole corpus, and SEGMENT tasks: the stages that follow, over what is kept.

Percentiles are exact for any numbers: four passes count 16 bits each of the numbers' order-preserving bits, and look
closer only where a percentile lies. A pass reads 8 bytes a document; memory is a few MiB. Segments run before
deduplication, so that a document that is dropped here does not stand for its copies.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from forebay.base import Json
from forebay.prepare.documents import Map, Stage, part_batches
from forebay.prepare.scores.base import number_column
from forebay.prepare.stats import StageStats, float_keys, float_of
from forebay.prepare.tasks.encode import TextPart
from forebay.prepare.tasks.keys import hash_json
from forebay.prepare.tasks.stages import Rejects, StagesTask, run_stages
from forebay.prepare.tasks.text import TextResult, conclude_task, open_documents
from forebay.storage.store import Store

SEGMENT_VERSION = 4
_MAX_TASKS = 256  # Of a pass: each returns up to 2^16 counts for each percentile.
_BITS = 16


@dataclass(frozen=True)
class _CountTask:
    store: Store
    arrows: tuple[str, ...]
    column: str
    shift: int
    prefixes: tuple[int, ...]  # of the bits above those that this pass counts

    @cached_property
    def name(self) -> str:
        return hash_json([self.arrows, self.column, self.shift, self.prefixes])

    @property
    def label(self) -> str:
        return f"percentiles of {self.column}"


def _count(task: _CountTask, scale: int) -> dict[int, int]:
    """How many numbers begin with each run of bits, of those that begin with one of the prefixes; and -1: all."""
    counts: Counter[int] = Counter()
    shift, prefixes = np.uint64(task.shift), np.array(task.prefixes, np.uint64)
    for arrow in task.arrows:
        for _, batch in part_batches(task.store, arrow, [task.column]):
            if not batch.num_rows:
                continue
            values = number_column(batch, task.column, "percentile")
            keys = float_keys(values[~np.isnan(values)])
            counts[-1] += len(keys)
            if task.shift + _BITS < 64:
                keys = keys[np.isin(keys >> np.uint64(task.shift + _BITS), prefixes)]
            prefixed, numbers = np.unique(keys >> shift, return_counts=True)
            counts.update(dict(zip(prefixed.tolist(), numbers.tolist())))
    return dict(counts)


def column_percentiles(
    store: Store, arrows: Sequence[str], column: str, percentiles: Sequence[float], map_tasks: Map
) -> tuple[float, ...]:
    """The numbers at percentiles of a column: with n numbers in order that of index floor(n * percentile / 100).

    That is infinite for 100, and minus infinite for 0. Exact, whatever the number of tasks. NaN is no number.
    """
    step = -(-len(arrows) // _MAX_TASKS) or 1
    groups = [tuple(arrows[start : start + step]) for start in range(0, len(arrows), step)]
    inner = [p for p in dict.fromkeys(percentiles) if 0 < p < 100]
    prefixes, ranks = [0] * len(inner), [0] * len(inner)
    for shift in range(64 - _BITS, -1, -_BITS) if inner else ():
        counts: Counter[int] = Counter()
        before = tuple(sorted(set(prefixes)))
        for part in map_tasks(_count, [_CountTask(store, group, column, shift, before) for group in groups]):
            counts.update(part)
        total = counts.pop(-1, 0)
        if not total:
            return tuple(-math.inf for _ in percentiles)
        keys = np.array(sorted(counts), np.uint64)
        numbers = np.array([counts[int(key)] for key in keys], np.int64)
        for index, percentile in enumerate(inner):
            if shift == 64 - _BITS:
                ranks[index], below = int(Fraction(str(percentile)) * total / 100), np.ones(len(keys), bool)
            else:
                below = keys >> np.uint64(_BITS) == prefixes[index]
            totals = np.cumsum(numbers[below])
            position = int(np.searchsorted(totals, ranks[index], "right"))
            prefixes[index] = int(keys[below][position])
            ranks[index] -= int(totals[position - 1]) if position else 0
    values = dict(zip(inner, float_of(np.array(prefixes, np.uint64)).tolist()))
    return tuple(values.get(p, -math.inf if p <= 0 else math.inf) for p in percentiles)


@dataclass(frozen=True)
class SegmentTask(StagesTask):
    """Stages over the documents of a part."""

    part: TextPart
    text: TextResult

    @cached_property
    def name(self) -> str:
        """A hash of all that the result depends on."""
        signature = self.dedup.signature() if self.dedup else {}
        return hash_json([SEGMENT_VERSION, self.text.name, self.recipe_key, signature, repr(self.limits)])

    @property
    def label(self) -> str:
        return f"{self.stages[0].name} of {self.split.files[0].path}"


def process_segment(task: SegmentTask, scale: int) -> TextResult:
    """Run the stages over the part, and sign what is kept. `scale` is not used: batches stay as they are."""
    stats, rejects = StageStats(), Rejects(task.split)
    with open_documents(task.store, f"tasks/{task.name}", task.dedup) as out:
        for _, batch in part_batches(task.store, task.part.arrow):
            for kept_rows in run_stages(task, batch, stats, rejects):
                out.add(kept_rows)
    stats.usage.count("dedup", out.signing_s)
    earlier = task.text
    result = replace(
        earlier, name=task.name, documents_out=out.documents, bytes_out=out.bytes, signed=out.signed,
        malformed=earlier.malformed + rejects.malformed, hits=earlier.hits + len(stats.hits),
    )  # fmt: skip
    return conclude_task(task.store, task.split, stats, rejects.rejects, result, earlier)


def thresholds_of(store: Store, stage: Any, arrows: Sequence[str], map_tasks: Map) -> tuple[Stage, list[Json]]:
    """The stage with the percentiles that it needs, and a description of each for the report."""
    column, percentiles = stage.percentiles
    values = column_percentiles(store, arrows, column, percentiles, map_tasks)
    chosen = [
        {"stage": stage.name, "column": column, "percentile": percentile, "value": value}
        for percentile, value in zip(percentiles, values)
        if math.isfinite(value)
    ]
    return stage.with_thresholds(values), chosen
