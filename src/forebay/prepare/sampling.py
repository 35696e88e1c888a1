"""Runs on a share of the input: which documents are read, how sure their rates are, and what the whole run will cost.

Splits (files, parts of large ones) are taken evenly over the input, and of these a share of the documents, by a hash of
their position. Source of the intervals: Cochran 1977, "Sampling Techniques", section 11 (two-stage samples); Wilson
1927.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.formats.inputs import InputSplit
from forebay.prepare.engines.local import cores
from forebay.prepare.stats import StageStats, Usage
from forebay.prepare.tasks.statistics import Map, add_stats, read_stats
from forebay.prepare.tasks.text import TextResult
from forebay.storage.store import Store

SECONDS = "seconds"
_Z = 1.96  # Of an interval of 95 %.
_CLOCK_ERROR = 0.2  # By which CPU times of the same work differ between runs and machines alike.
_CORPUS_STAGES = ("dedup", "tokenize", "text")


@dataclass(frozen=True)
class Sampling:
    """The splits that are read, of how many, and the share of their documents."""

    splits: list[InputSplit]
    share: float
    num_splits: int
    num_bytes: int
    counts: list[Counter[str]] = field(default_factory=list)
    """Of each split: documents dropped, by stage and reason, and microseconds."""

    @classmethod
    def of(cls, splits: list[InputSplit], fraction: float, scale: float = 1.0) -> Sampling:
        """About that share of the splits, and the share of their documents that makes it exact.

        The whole input is `scale` times the splits. Splits are taken evenly over their formats and sizes, and over the
        input where these are alike.
        """
        number = len(splits)
        total = round(number * scale), round(sum(split.bytes for split in splits) * scale)
        if fraction >= 1 or not splits:
            return cls(splits, 1.0, *total)
        count = min(number, max(1, round(number * fraction + 0.5)))
        order = sorted(
            range(number), key=lambda index: (kind_of(splits[index]), splits[index].bytes.bit_length(), index)
        )
        chosen = [splits[index] for index in sorted(order[(2 * i + 1) * number // (2 * count)] for i in range(count))]
        return cls(chosen, min(1.0, fraction * number / count), *total)

    @property
    def is_whole(self) -> bool:
        """Whether all of the input is read."""
        return self.share >= 1 and len(self.splits) == self.num_splits

    def count(self, texts: Sequence[TextResult], store: Store, total: StageStats, map: Map) -> None:
        """Add the statistics of some stages, by split, to `counts` and to `total`."""
        total.add(add_stats(store, [text.stats for text in texts], map))
        for index, text in enumerate(texts if not self.is_whole else ()):
            stats = read_stats(store, text.stats)
            while len(self.counts) <= index:
                self.counts.append(Counter())
            for stage, counted in stats.funnel.items():
                self.counts[index].update({f"{stage}\n{reason}": n for reason, n in counted.dropped.items()})
            seconds = sum(seconds for name, seconds in stats.usage.seconds.items() if name != "start")
            self.counts[index][SECONDS] += round(1e6 * seconds)

    @property
    def read_bytes(self) -> int:
        return sum(split.bytes for split in self.splits)

    @property
    def read_scale(self) -> float:
        """How many times what is read the whole input is."""
        return self.num_bytes / self.read_bytes if self.read_bytes else 1.0

    @property
    def scale(self) -> float:
        """How many times the documents that are processed there are in the whole input."""
        return self.read_scale / self.share


def kind_of(split: InputSplit) -> str:
    """Return the format of a split, and its compression: what its pace and its documents depend on."""
    return f"{split.format} {split.files[0].compression}".strip()


class SplitSums:
    """Sums over splits of what was counted in each, from which follows how much the rates of splits differ."""

    def __init__(self) -> None:
        self._splits = self._total = self._total_squares = 0.0
        self._sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    def add(self, total: float, counts: Mapping[str, float]) -> None:
        """Add a split: a total, and counts of which the rates to it are wanted."""
        self._splits += 1
        self._total += total
        self._total_squares += total * total
        for name, count in counts.items():
            sums = self._sums[name]
            for index, value in enumerate((count, count * count, count * total)):
                sums[index] += value

    def relative(self, name: str) -> float:
        """The standard error in proportion to the ratio; 0 if it is not known."""
        return (self.error(name) or 0.0) * self._total / self._sums[name][0] if self._sums[name][0] else 0.0

    @property
    def quantile(self) -> float:
        """Standard errors from the middle of an interval of 95 % to its ends: Student's t.

        Source: Abramowitz and Stegun 1964, 26.7.5.
        """
        n, z = self._splits - 1, _Z
        if n < 2:
            return 12.7 if n == 1 else z
        return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n * n)

    def error(self, name: str) -> float | None:
        """The standard error of the ratio of a count to the total; None for one split."""
        if self._splits < 2 or not self._total:
            return None
        count, squares, products = self._sums[name]
        rate = count / self._total
        between = max(squares - 2 * rate * products + rate * rate * self._total_squares, 0.0)
        return math.sqrt(between * self._splits / (self._splits - 1)) / self._total


def interval(
    dropped: int, documents: int, error: float | None, splits: float, documents_share: float, z: float = _Z
) -> list[float]:
    """The interval of 95 % of the rate `dropped / documents` in the whole input.

    Args:
        error: Of `SplitSums`: the standard error of the rate between splits.
        splits, documents_share: The share of splits that was read, and of their documents.
        z: Standard errors of the interval.
    """
    if not documents:
        return [0.0, 1.0]
    rate = dropped / documents
    within = rate * (1 - rate) / documents
    between = within if error is None else error * error
    variance = (1 - splits) * between + splits * (1 - documents_share) * within
    if splits >= 1 and documents_share >= 1:
        return [rate, rate]
    number = min(rate * (1 - rate) / variance, 1e15) if variance else float(documents)
    center = (rate + z**2 / (2 * number)) / (1 + z**2 / number)
    half = z / (1 + z**2 / number) * math.sqrt(rate * (1 - rate) / number + z**2 / (4 * number * number))
    return [max(0.0, center - half), min(1.0, center + half)]


def describe_sample(
    sampling: Sampling, texts: Sequence[TextResult], stats: StageStats, usage: Usage, figures: Mapping[str, float]
) -> dict[str, Any]:
    """What the report has of a sample: `sample` and `estimate`, and `cost`, which alone differs between runs.

    Args:
        texts: The results of the splits.
        figures: Of the sample: `documents_in`, `documents_out`, and others that are in proportion to these.
    """
    documents = sum(text.documents_in for text in texts)
    by_documents, by_bytes = SplitSums(), SplitSums()
    for split, text, counts in zip(sampling.splits, texts, sampling.counts):
        by_documents.add(text.documents_in, counts)
        sizes = {"documents_in": text.documents_in, "documents_out": text.documents_out, SECONDS: counts[SECONDS]}
        by_bytes.add(split.bytes, sizes)
    share = len(sampling.splits) / sampling.num_splits
    rates = []
    for stage, count in stats.funnel.items():
        for reason, dropped in sorted(count.dropped.items()):
            # What deduplication drops depends on documents that are not in the sample: its rates have no interval.
            error = by_documents.error(f"{stage}\n{reason}")
            bounds = None
            if stage not in _CORPUS_STAGES:
                z = by_documents.quantile if share < 1 else _Z
                bounds = interval(dropped, documents, error, share, sampling.share, z)
            rates.append({"stage": stage, "reason": reason, "dropped": dropped, "interval": bounds})
    return {
        "sample": {
            "splits": len(sampling.splits), "of_splits": sampling.num_splits, "bytes": sampling.read_bytes,
            "of_bytes": sampling.num_bytes, "share_of_documents": sampling.share, "documents": documents,
            "rates": rates,
        },
        "estimate": {name: _estimate(sampling, by_bytes, name, figures) for name in figures},
        "cost": _cost(sampling, by_bytes, usage),
    }  # fmt: skip


def _estimate(sampling: Sampling, sums: SplitSums, name: str, figures: Mapping[str, float]) -> list[float]:
    """A figure for the whole input: expected; and the interval of 95 % if there are two splits or more."""
    expected = figures[name] * sampling.scale
    kind = "documents_in" if name == "documents_in" else "documents_out"
    count, unread = figures[kind], 1 - len(sampling.splits) / sampling.num_splits
    if not count or (unread and sums.error(kind) is None):
        return [round(expected)]
    variance = unread * sums.relative(kind) ** 2 + (1 - sampling.share) / count
    half = (sums.quantile if unread else _Z) * expected * math.sqrt(variance)
    return [round(expected), round(max(0.0, expected - half)), round(expected + half)]


def _cost(sampling: Sampling, sums: SplitSums, usage: Usage) -> dict[str, Any]:
    """CPU seconds by stage, of the sample and of the whole input; and its time with a process a core.

    What a process needs once (`start`: imports, models, compiled code) is not multiplied; nor is `hash`, the hashing of
    what is not in the sample, as reading has that of what is.
    """
    scales = {"start": 0.0, "read": sampling.read_scale, "hash": 0.0}
    processes = min(cores(), sampling.num_splits)
    stages = {
        name: [round(seconds, 4), round(seconds * scales.get(name, sampling.scale), 2)]
        for name, seconds in usage.seconds.items()
    }
    total_s, start = sum(seconds for _, seconds in stages.values()), usage.seconds.get("start", 0.0)
    expected = total_s / processes + start
    error = math.hypot(_CLOCK_ERROR, sums.quantile * sums.relative(SECONDS))
    return {
        "cpu_s": stages, "whole_cpu_s": round(total_s, 2), "processes": processes,
        "wall_s": [round(value, 2) for value in (expected, expected / (1 + error), expected * (1 + error))],
        "peak_bytes": usage.peak_bytes,
    }  # fmt: skip
