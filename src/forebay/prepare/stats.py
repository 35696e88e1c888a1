"""Statistics of a preparation: counts by stage and reason, distributions, samples of what was dropped; CPU and memory.

Bounded whatever is counted. Adding is independent of the order of the tasks, so that the report is the same for any
number of processes.

Rules with thresholds have a histogram of what they measured, and the documents nearest to it: the same for any cut of
batches. Histograms are counts of fine bins, from which a few bars are drawn.
"""

import heapq
import math
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import unwrap
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict, TypeAdapter

from forebay.arrays import BOOL, F64, I64, U64
from forebay.base import Json
from forebay.errors import PrepareError
from forebay.order import bijection
from forebay.prepare.compiled import work_time
from forebay.prepare.documents import Measure, StageResult, text_buffers

NEAREST = 3  # Examples on each side of a threshold.
NEAREST_CHARACTERS = 300
_MAX_THRESHOLDS = 1000
_FINE_SHIFT = np.uint64(64 - 12 - 5)  # A bin is a sign, an exponent and five bits: 3 % wide at most.
_MAX_BARS = 40
_FACTORS = (0.5, 0.75, 0.9, 1.1, 1.25, 1.5)

Rows = NDArray[np.intp]
Name = tuple[str, int, str, str, float]
"""Stage, number of the reason in it, reason, `low` or `high`, and the threshold."""


@dataclass(frozen=True, order=True)
class Example:
    """A document near a threshold; those at the smallest distances are kept."""

    distance: float
    key: int
    location: str
    value: float
    url: str
    text: str


@dataclass
class ThresholdStats:
    """Of the documents that reached a rule and have a number: sides are `kept` and `dropped`.

    `failing`: how many would fail at each of `neighbours`.
    """

    failing: list[int]
    bins: dict[str, Counter[int]] = field(default_factory=lambda: {"kept": Counter(), "dropped": Counter()})
    nearest: dict[str, list[Example]] = field(default_factory=lambda: {"kept": [], "dropped": []})
    is_whole: bool = True  # All are whole numbers.

    def add(self, other: "ThresholdStats") -> None:
        self.failing = [a + b for a, b in zip(self.failing, other.failing, strict=True)]
        for side, bins in other.bins.items():
            self.bins[side].update(bins)
            self.nearest[side] = heapq.nsmallest(NEAREST, [*self.nearest[side], *other.nearest[side]])
        self.is_whole &= other.is_whole


def neighbours(limit: float) -> list[float]:
    """A threshold and others around it, ascending: multiples, whole numbers near a whole one; of a share up to 1."""
    near = {float(f"{limit * factor:.2g}") for factor in _FACTORS} if limit else {-1.0, -0.5, -0.1, 0.1, 0.5, 1.0}
    if limit == int(limit):
        near |= {limit - 1, limit + 1, *(float(round(limit * factor)) for factor in _FACTORS)}
    return sorted(value for value in {*near, limit} if not 0 < limit < 1 < value)


class ThresholdTable:
    """The statistics of each threshold of a recipe."""

    def __init__(self, entries: Iterable[tuple[Name, ThresholdStats]] = ()) -> None:
        self.entries = dict(entries)

    def add_measure(
        self,
        rule: tuple[str, int, str],
        measure: Measure,
        reached: BOOL,
        batch: pa.RecordBatch,
        keys: U64,
        position: Callable[[int], str],
    ) -> None:
        """Add what a rule (stage, number of the reason, reason) measured of the rows of a batch that reached it."""
        values = np.asarray(measure.values, np.float64)
        reached = reached & ~np.isnan(values)
        offsets, data = text_buffers(batch.column("text"))
        for kind, limits in (("low", measure.low), ("high", measure.high)):
            of_rows = np.broadcast_to(np.asarray(limits, np.float64), values.shape)
            distinct = np.unique(of_rows[reached])
            for limit in distinct[np.isfinite(distinct)].tolist():
                rows = np.flatnonzero(reached & (of_rows == limit))
                stats, nearest = _stats_of(values[rows], kind, limit, keys[rows])
                for side, number in nearest:
                    row = int(rows[number])
                    head = data[offsets[row] : offsets[row + 1]][: 4 * NEAREST_CHARACTERS]
                    text = head.tobytes().decode("utf-8", "ignore")[:NEAREST_CHARACTERS]
                    value, url = float(values[row]), batch.column("url")[row].as_py()
                    example = Example(abs(value - limit), int(keys[row]), position(row), value, url, text)
                    stats.nearest[side].append(example)
                self._add((*rule, kind, limit), stats)

    def add(self, other: "ThresholdTable") -> None:
        for name, stats in other.entries.items():
            self._add(name, stats)

    def _add(self, name: Name, stats: ThresholdStats) -> None:
        self.entries.setdefault(name, ThresholdStats([0] * len(stats.failing))).add(stats)
        if len(self.entries) > _MAX_THRESHOLDS:
            raise PrepareError(
                f"stage {name[0]}: expected at most {_MAX_THRESHOLDS} thresholds, got more ({name[2]}). Measure what "
                "is compared with one number."
            )

    def report(self, stages: Sequence[str]) -> list[Json]:
        """What the report has of each, in the order of the stages; not of a minimum of 0 that drops none.

        A document counts as dropped where its number fails the rule.
        """
        entries = []
        for name in sorted(self.entries, key=lambda name: (stages.index(name[0]), *name[1:])):
            (stage, _, reason, kind, limit), stats = name, self.entries[name]
            dropped = stats.bins["dropped"].total()
            documents = stats.bins["kept"].total() + dropped
            if kind == "low" and limit == 0 and not dropped:
                continue
            near = [(t, n) for t, n in zip(neighbours(limit), stats.failing) if not stats.is_whole or t == int(t)]
            entries.append({
                "stage": stage, "reason": reason, "kind": kind, "threshold": limit, "documents": documents,
                "dropped": dropped, "histogram": bars(stats.bins),
                "neighbours": [{"threshold": t, "dropped": n} for t, n in near],
                "nearest": {
                    side: [_shown(example) for example in sorted(examples)] for side, examples in stats.nearest.items()
                },
            })  # fmt: skip
        return entries


def _stats_of(values: F64, kind: str, limit: float, keys: U64) -> tuple[ThresholdStats, list[tuple[str, int]]]:
    """The statistics of the values at a threshold, without examples; and of the nearest the side and the index."""
    ordered, near = np.sort(values), neighbours(limit)
    below = np.searchsorted(ordered, near, "left" if kind == "low" else "right")
    stats = ThresholdStats((below if kind == "low" else len(ordered) - below).tolist())
    fails = values < limit if kind == "low" else values > limit
    stats.bins = {"kept": Counter(count_bins(values[~fails])), "dropped": Counter(count_bins(values[fails]))}
    stats.is_whole = bool((values == np.floor(values)).all())
    order = np.lexsort((keys, np.abs(values - limit)))
    sides = (("kept", order[~fails[order]]), ("dropped", order[fails[order]]))
    return stats, [(side, index) for side, indices in sides for index in indices[:NEAREST].tolist()]


def _shown(example: Example) -> Json:
    value = example.value if math.isfinite(example.value) else str(example.value)
    return {"value": value, "url": example.url, "text": example.text, "where": example.location}


def float_keys(values: F64) -> U64:
    """uint64 in the order of the numbers, one for each; -0.0 is 0.0."""
    bits = (np.asarray(values, np.float64) + 0.0).view(np.uint64)
    return np.where(bits >> np.uint64(63), ~bits, bits | np.uint64(1 << 63))


def float_of(keys: U64) -> F64:
    """The inverse of `float_keys`."""
    return np.where(keys >> np.uint64(63), keys & np.uint64((1 << 63) - 1), ~keys).view(np.float64)


def count_bins(values: ArrayLike) -> dict[int, int]:
    """How many numbers are in each fine bin; NaN is none."""
    numbers = np.asarray(values, np.float64)
    bins, counts = np.unique(float_keys(numbers[~np.isnan(numbers)]) >> _FINE_SHIFT, return_counts=True)
    return dict(zip(bins.tolist(), counts.tolist()))


def bars(sides: Mapping[str, Mapping[int, int]]) -> Json:
    """A histogram to draw: `edges` [bars + 1], `log`, and the counts of each side, of at most 40 bars.

    Numbers of one sign up to 100 get bars of equal width, others of equal ratio. Infinite ones are in the last bar.
    """
    bins = np.array(sorted({index for counts in sides.values() for index in counts}), np.uint64)
    low, high = float_of(bins << _FINE_SHIFT), float_of(((bins + np.uint64(1)) << _FINE_SHIFT) - np.uint64(1))
    middle = np.where(np.isfinite(low), np.where(np.isfinite(high), low / 2 + high / 2, low), np.nan)
    finite = middle[np.isfinite(middle)]
    first, last = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    is_log = first >= 0 and last > 100
    if is_log:
        edges = 2.0 ** np.linspace(np.floor(np.log2(max(first, 1.0))), np.ceil(np.log2(last)), _MAX_BARS + 1)
        edges[0] = min(edges[0], first)
    else:
        step = (last - first) / (_MAX_BARS - 2)
        power = 10.0 ** np.floor(np.log10(step)) if step > 0 else 0.1
        step = float(next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step))
        start = np.floor(first / step) * step
        edges = start + step * np.arange(int((last - start) / step) + 2)
    edges = np.unique(np.round(edges, 10))
    if len(edges) == 1:
        edges = edges + [0, 1]  # noqa: RUF005 - the sum of arrays
    bar = np.clip(np.searchsorted(edges, np.nan_to_num(middle, nan=edges[-1]), "right") - 1, 0, len(edges) - 2)
    out: Json = {"edges": edges.tolist(), "log": bool(is_log)}
    for side, counts in sides.items():
        values = [counts.get(int(index), 0) for index in bins]
        out[side] = np.bincount(bar, values, len(edges) - 1).astype(np.int64).tolist()
    return out


SAMPLES = 5  # Samples of each stage and reason, and of what is kept.
SAMPLE_CHARACTERS = 600

LENGTH = "length (UTF-8 bytes)"
_NO_SCORES = frozenset(("place", "text_bytes", "copies"))

Keys = U64
Position = Callable[[int], str]  # Describes where the document of a row is.
_LABELS = {
    "lineage": "hash", "tasks.percentile": "percentiles", "tasks.encode": "tokenize", "tasks.slicing": "slice",
    "outputs.text": "write", "outputs.tokens": "write",
}  # fmt: skip
_DETAILED = ("process_split", "process_segment")  # Count the seconds of their stages themselves.


@dataclass
class Usage:
    """CPU seconds by stage, and the largest memory of a process in bytes."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0

    def count(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def add(self, other: "Usage") -> None:
        for stage, seconds in other.seconds.items():
            self.count(stage, seconds)
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)


def peak_bytes() -> int:
    """The largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def timed(run: Callable[[Any, int], Any], task: Any, scale: int) -> tuple[Any, Usage, Any]:
    """The result of a task, what it used in this process, and its `counts` for the record, taken out of the result."""
    started = work_time()
    result = run(task, scale)
    if (counts := getattr(result, "counts", None)) is not None:
        result = replace(result, counts=None)
    function: Any = unwrap(run)
    module = function.__module__.removeprefix("forebay.prepare.")
    label = "dedup" if module.startswith("dedup.") else _LABELS.get(module, module.rpartition(".")[2])
    seconds = {} if function.__name__ in _DETAILED else {label: work_time() - started}
    return result, Usage(seconds, peak_bytes()), counts


@dataclass
class StageCount:
    """One stage of the funnel. Bytes are UTF-8 bytes of text."""

    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)

    def add(self, other: "StageCount") -> None:
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
    location: str
    url: str
    text: str


class StageStats:
    """Statistics of one task, or the sum of many."""

    def __init__(self) -> None:
        self.funnel: dict[str, StageCount] = {}
        self.histograms: dict[str, dict[str, Counter[int]]] = {}
        self.thresholds: list[Json] = []  # Chosen by percentiles.
        self.measured = ThresholdTable()
        self.usage = Usage()
        self.languages: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.subsets: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.samples: dict[tuple[str, str], list[Sample]] = {}
        self.hits: list[Json] = []  # Of one task, and not in its JSON: they go to a file of their own.

    def stage(self, name: str) -> StageCount:
        """The count of a stage. The funnel is in the order of the first calls."""
        return self.funnel.setdefault(name, StageCount())

    @property
    def last(self) -> StageCount:
        """The count of the last stage."""
        return next(reversed(self.funnel.values()))

    def following(self, name: str) -> StageCount:
        """The count of a new stage, which takes what the last one left."""
        last, count = self.last, self.stage(name)
        count.documents_in, count.bytes_in = last.documents_out, last.bytes_out
        return count

    def add_batch(self, side: str, batch: pa.RecordBatch) -> None:
        """Add a batch to the distributions; `side` is `read` or `kept`."""
        for name, column in zip(batch.schema.names, batch.columns):
            if name == "text_bytes":
                self.add_values(LENGTH, side, column.to_numpy())
            elif is_score(batch.schema.field(name)):
                self.add_values(name, side, column.to_numpy(zero_copy_only=False))
            elif name in ("language", "subset"):
                counts = self.languages if name == "language" else self.subsets
                for row in pc.value_counts(column).to_pylist():
                    counts[row["values"] or "unknown"][side] += row["counts"]

    def add_values(self, name: str, side: str, values: ArrayLike) -> None:
        """Add numbers to a histogram of fine bins; NaN is none."""
        self.histograms.setdefault(name, {}).setdefault(side, Counter()).update(count_bins(values))

    def add_result(
        self,
        stage: str,
        reasons: tuple[str, ...],
        before: pa.RecordBatch,
        result: StageResult,
        keys: Keys,
        position: Position,
        alive: BOOL,
    ) -> None:
        """Count a stage's result on a batch, and keep samples of what it drops, as it was `before`.

        Rows that are not `alive` were dropped by an earlier stage and do not count.
        """
        count = self.stage(stage)
        dropped = (result.drop >= 0) & alive
        sizes_in, sizes_out = text_bytes(before), text_bytes(result.batch)
        stays = alive & ~dropped
        changed = Counter({kind: int(n) for kind, n in result.counts.items()})
        bytes_in, bytes_out = int(sizes_in[alive].sum()), int(sizes_out[stays].sum())
        count.add(StageCount(int(alive.sum()), int(stays.sum()), bytes_in, bytes_out, changed=changed))
        for row, hit in result.hits:
            if alive[row]:
                position_of = {name: before.column(name)[row].as_py() for name in ("place", "where", "id")}
                self.hits.append({**position_of, **hit})
        for index in np.unique(result.drop[dropped]).tolist():
            rows = np.flatnonzero(dropped & (result.drop == index))
            count.dropped[reasons[index]] += len(rows)
            self.add_samples(stage, reasons[index], before, rows, keys, position)
        for reason, measure in result.measures.items():
            number = reasons.index(reason)
            reached = alive & ((result.drop < 0) | (result.drop >= number))
            self.measured.add_measure((stage, number, reason), measure, reached, before, keys, position)

    def add_samples(
        self, stage: str, reason: str, batch: pa.RecordBatch, rows: NDArray[np.intp], keys: Keys, position: Position
    ) -> None:
        """Keep the rows with the smallest keys as samples."""
        samples = self.samples.setdefault((stage, reason), [])
        for row in rows[np.argsort(keys[rows], kind="stable")[:SAMPLES]].tolist():
            key = int(keys[row])
            if len(samples) >= SAMPLES and key >= samples[-1].key:
                break
            text = batch.column("text")[row].as_py()[:SAMPLE_CHARACTERS]
            samples.append(Sample(key, position(row), batch.column("url")[row].as_py(), text))
            samples.sort()
            del samples[SAMPLES:]

    def add(self, other: "StageStats") -> None:
        for name, count in other.funnel.items():
            self.stage(name).add(count)
        for name, sides in other.histograms.items():
            for side, counts in sides.items():
                self.histograms.setdefault(name, {}).setdefault(side, Counter()).update(counts)
        for own, theirs in ((self.languages, other.languages), (self.subsets, other.subsets)):
            for value, by_side in theirs.items():
                own[value].update(by_side)
        self.hits += other.hits
        self.measured.add(other.measured)
        self.usage.add(other.usage)
        for key, samples in other.samples.items():
            self.samples[key] = heapq.nsmallest(SAMPLES, [*self.samples.get(key, ()), *samples])

    def dropped(self) -> dict[str, int]:
        """Documents dropped by all stages, by reason."""
        return dict(sorted(sum((count.dropped for count in self.funnel.values()), Counter[str]()).items()))

    def to_json(self) -> bytes:
        """For a task's result; `from_json` reads it."""
        samples, measured = list(self.samples.items()), list(self.measured.entries.items())
        values = (self.funnel, self.histograms, self.languages, self.subsets, samples, measured, self.usage)
        return _STATS.dump_json(values)

    @classmethod
    def from_json(cls, data: bytes) -> "StageStats":
        stats = cls()
        *counts, samples, measured, stats.usage = _STATS.validate_json(data)
        stats.funnel, stats.histograms, stats.languages, stats.subsets = counts
        stats.samples, stats.measured = dict(samples), ThresholdTable(measured)
        return stats


_Counts = defaultdict[str, Counter[str]]
_STATS: TypeAdapter[Any] = TypeAdapter(
    tuple[
        dict[str, StageCount],
        dict[str, dict[str, Counter[int]]],
        _Counts,
        _Counts,
        list[tuple[tuple[str, str], list[Sample]]],
        list[tuple[Name, ThresholdStats]],
        Usage,
    ],
    config=ConfigDict(ser_json_inf_nan="constants"),
)
"""The statistics of a task: those of a `StageStats`, without what has a file of its own."""


def text_bytes(batch: pa.RecordBatch) -> I64:
    """UTF-8 bytes of each row's text, int64 [rows]."""
    return np.diff(text_buffers(batch.column("text"))[0])


def mix64(values: U64, seed: np.uint64) -> U64:
    """SplitMix64's finaliser over seed + values. Source: Steele, Lea, Flood 2014."""
    return bijection.mix64((values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + seed)


def is_score(field: pa.Field) -> bool:
    """Whether a column is of numbers that the report shows."""
    is_number = pa.types.is_floating(field.type) or pa.types.is_integer(field.type)
    return is_number and field.name not in _NO_SCORES
