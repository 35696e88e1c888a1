"""What rules with thresholds measured: a histogram of each, and the documents nearest to it.

Bounded, and the same for any number of tasks and any cut of batches: histograms are counts of fine bins, from which a
few bars are drawn.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from forebay.arrays import BOOL, F64, U64
from forebay.errors import PrepareError
from forebay.prepare.documents import Measure, text_buffers
from forebay.prepare.settings import Json

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
    """A threshold and those around it, ascending: its multiples, and whole numbers near a whole one."""
    near = {float(f"{limit * factor:.2g}") for factor in _FACTORS} if limit else {-1.0, -0.5, -0.1, 0.1, 0.5, 1.0}
    if limit == int(limit):
        near |= {limit - 1, limit + 1, *(float(round(limit * factor)) for factor in _FACTORS)}
    return sorted({*near, limit})


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
    bar = np.clip(np.searchsorted(edges, np.nan_to_num(middle, nan=edges[-1]), "right") - 1, 0, len(edges) - 2)
    out: Json = {"edges": edges.tolist(), "log": bool(is_log)}
    for side, counts in sides.items():
        values = [counts.get(int(index), 0) for index in bins]
        out[side] = np.bincount(bar, values, len(edges) - 1).astype(np.int64).tolist()
    return out
