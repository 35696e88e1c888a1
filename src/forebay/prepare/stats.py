"""What became of the documents: counts by stage and reason, distributions, samples of what was dropped.

Hides: how tallies of tasks add up. A tally is bounded whatever it counts, and adding is independent of the order of the
tasks, so that the report is the same for any number of processes.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from forebay.prepare.documents import StageResult, text_buffers

SAMPLES = 5
"""Samples kept of each stage and reason, and of what is kept."""
SAMPLE_CHARACTERS = 600

LENGTH, PERPLEXITY, CLUSTER = "length (UTF-8 bytes)", "perplexity", "duplicate cluster size"
EDGES: dict[str, NDArray[Any]] = {
    LENGTH: np.round(2.0 ** np.arange(0, 32.5, 0.5)),
    PERPLEXITY: np.round(2.0 ** np.arange(0, 24.125, 0.125), 4),
    CLUSTER: 2.0 ** np.arange(0, 33),
}

Keys = NDArray[np.uint64]


@dataclass
class StageCount:
    """One stage of the funnel. Bytes are UTF-8 bytes of text."""

    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)

    def add(self, other: StageCount) -> None:
        self.documents_in += other.documents_in
        self.documents_out += other.documents_out
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out
        self.dropped.update(other.dropped)
        self.changed.update(other.changed)


@dataclass(frozen=True, order=True)
class Sample:
    """A document to look at; those with the smallest keys are kept."""

    key: int
    where: str
    url: str
    text: str


class Tally:
    """Counts of one task, or the sum of many."""

    def __init__(self) -> None:
        self.funnel: dict[str, StageCount] = {}
        self.histograms: dict[str, dict[str, NDArray[np.int64]]] = {}
        self.languages: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.samples: dict[tuple[str, str], list[Sample]] = {}

    def stage(self, name: str) -> StageCount:
        """The count of a stage, made when first asked for: the funnel is in that order."""
        return self.funnel.setdefault(name, StageCount())

    def see(self, side: str, batch: pa.RecordBatch) -> None:
        """Take the distributions of a batch; `side` is `read` or `kept`."""
        names = batch.schema.names
        if "text_bytes" in names:
            self.observe(LENGTH, side, batch.column("text_bytes").to_numpy())
        if "perplexity" in names:
            self.observe(PERPLEXITY, side, batch.column("perplexity").to_numpy(zero_copy_only=False))
        if "language" in names:
            for row in pc.value_counts(batch.column("language")).to_pylist():
                self.languages[row["values"] or "unknown"][side] += row["counts"]

    def observe(self, name: str, side: str, values: ArrayLike, times: int = 1) -> None:
        """Add values, each so many times, to the histogram of that name."""
        edges = EDGES[name]  # What lies beyond them is counted in the first and last bin.
        counts, _ = np.histogram(np.clip(np.asarray(values, np.float64), edges[0], edges[-1]), bins=edges)
        self._histogram(name, side)[:] += counts * times

    def _histogram(self, name: str, side: str) -> NDArray[np.int64]:
        sides = self.histograms.setdefault(name, {})
        if side not in sides:
            sides[side] = np.zeros(len(EDGES[name]) - 1, np.int64)
        return sides[side]

    def judge(
        self,
        stage: str,
        reasons: tuple[str, ...],
        before: pa.RecordBatch,
        verdict: StageResult,
        keys: Keys,
        where: Where,
        alive: NDArray[np.bool_] | None = None,
    ) -> None:
        """Count a stage's verdict on a batch, and keep samples of what it drops as it was before.

        Rows that are not `alive` were dropped by an earlier stage, and do not count.
        """
        count = self.stage(stage)
        seen = np.ones(before.num_rows, bool) if alive is None else alive
        dropped = (verdict.drop >= 0) & seen
        sizes_in, sizes_out = text_bytes(before), text_bytes(verdict.batch)
        count.documents_in += int(seen.sum())
        count.documents_out += int(seen.sum() - dropped.sum())
        count.bytes_in += int(sizes_in[seen].sum())
        count.bytes_out += int(sizes_out[seen & ~dropped].sum())
        count.changed.update({kind: int(n) for kind, n in verdict.counts.items()})
        if not dropped.any():
            return
        per_reason = np.bincount(verdict.drop[dropped], minlength=len(reasons))
        for index in np.flatnonzero(per_reason).tolist():
            count.dropped[reasons[index]] += int(per_reason[index])
            rows = np.flatnonzero(dropped & (verdict.drop == index))
            self.sample(stage, reasons[index], before, rows, keys, where)

    def sample(
        self, stage: str, reason: str, batch: pa.RecordBatch, rows: NDArray[np.intp], keys: Keys, where: Where
    ) -> None:
        """Keep the rows with the smallest keys as samples."""
        held = self.samples.setdefault((stage, reason), [])
        for row in rows[np.argsort(keys[rows], kind="stable")[:SAMPLES]].tolist():
            key = int(keys[row])
            if len(held) >= SAMPLES and key >= held[-1].key:
                break
            text = batch.column("text")[row].as_py()[:SAMPLE_CHARACTERS]
            held.append(Sample(key, where(row), batch.column("url")[row].as_py(), text))
            held.sort()
            del held[SAMPLES:]

    def add(self, other: Tally) -> None:
        for name, count in other.funnel.items():
            self.stage(name).add(count)
        for name, sides in other.histograms.items():
            for side, counts in sides.items():
                self._histogram(name, side)[:] += counts
        for language, by_side in other.languages.items():
            self.languages[language].update(by_side)
        for key, samples in other.samples.items():
            self.samples[key] = heapq.nsmallest(SAMPLES, [*self.samples.get(key, ()), *samples])

    def dropped(self) -> dict[str, int]:
        """Documents dropped by all stages, by reason."""
        return dict(sorted(sum((count.dropped for count in self.funnel.values()), Counter[str]()).items()))

    def to_json(self) -> dict[str, Any]:
        """For a task's result; `from_json` takes it back."""
        return {
            "funnel": {name: vars(count) for name, count in self.funnel.items()},
            "histograms": {n: {s: c.tolist() for s, c in sides.items()} for n, sides in self.histograms.items()},
            "languages": self.languages,
            "samples": [[*key, [asdict(s) for s in samples]] for key, samples in self.samples.items()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tally:
        tally = cls()
        for name, count in data["funnel"].items():
            counters = {key: Counter(count[key]) for key in ("dropped", "changed")}
            tally.funnel[name] = StageCount(**{**count, **counters})
        tally.histograms = {
            n: {s: np.array(c, np.int64) for s, c in sides.items()} for n, sides in data["histograms"].items()
        }
        tally.languages.update({language: Counter(sides) for language, sides in data["languages"].items()})
        tally.samples = {(stage, reason): [Sample(**s) for s in held] for stage, reason, held in data["samples"]}
        return tally


Where = Callable[[int], str]


def text_bytes(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """UTF-8 bytes of each row's text, int64 [rows]."""
    return np.diff(text_buffers(batch.column("text"))[0])


def percentile_threshold(counts: NDArray[np.int64], percentile: float) -> float:
    """The edge of the perplexity histogram below which at least `percentile` per cent of the documents lie."""
    edges = EDGES[PERPLEXITY]
    total = int(counts.sum())
    if percentile <= 0 or not total:
        return 0.0
    if percentile >= 100:
        return float("inf")
    index = int(np.searchsorted(np.cumsum(counts), percentile / 100 * total))
    return float(edges[min(index + 1, len(edges) - 1)])
