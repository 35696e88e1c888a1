"""Runs on a share of the input: which documents are read, how sure their rates are, and what the whole run will cost.

Of each kind of split (format, compression) at least two are taken, evenly over sizes, and of these a share of the
documents, by a hash of their position: so of each kind the share of the input's bytes. Source of the intervals: Cochran
1977, "Sampling Techniques", section 6.10 (ratios of stratified samples); Wilson 1927.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forebay.base import Json
from forebay.formats.inputs import InputSplit
from forebay.machine import num_cores
from forebay.prepare.documents import Map
from forebay.prepare.stats import StageStats, Usage
from forebay.prepare.tasks.statistics import add_stats, read_stats
from forebay.prepare.tasks.text import TextResult
from forebay.prepare.tokenize.tokenizers import SAMPLE_BYTES
from forebay.storage.store import Store

READ_US, OTHER_US = "reading", "other"
TRAINING = "train tokenizer"
_Z = 1.96  # Of an interval of 95 %.
_CLOCK_ERROR = 0.2  # By which CPU times of the same work differ between runs and machines alike.
_CORPUS_STAGES = ("dedup", "tokenize", "text")


@dataclass(frozen=True)
class Sampling:
    """The splits that are read, the share of the documents of each, and how many splits there are of each kind."""

    splits: list[InputSplit]
    shares: list[float]
    kinds: Counter[str]
    fraction: float
    num_splits: int
    num_bytes: int
    counts: list[Counter[str]] = field(default_factory=list)
    """Of each split: documents dropped, by stage and reason, and microseconds: of reading, and all others."""

    @classmethod
    def of(cls, splits: list[InputSplit], fraction: float, scale: float = 1.0) -> "Sampling":
        """About that share of the splits of each kind, two at least, and the share of their documents that is exact.

        The whole input is `scale` times the splits. Splits are taken evenly over their sizes, and over the input where
        these are alike.
        """
        total = round(len(splits) * scale), round(sum(split.bytes for split in splits) * scale)
        by_kind: dict[str, list[int]] = {}
        for index in sorted(range(len(splits)), key=lambda index: (splits[index].bytes.bit_length(), index)):
            by_kind.setdefault(splits[index].kind, []).append(index)
        kinds = Counter({kind: round(len(order) * scale) for kind, order in by_kind.items()})
        if fraction >= 1 or not splits:
            return cls(splits, [1.0] * len(splits), kinds, 1.0, *total)
        shares: dict[int, float] = {}
        for order in by_kind.values():
            number = len(order)
            count = min(number, max(2, round(number * fraction + 0.5)))
            chosen = [order[(2 * i + 1) * number // (2 * count)] for i in range(count)]
            sizes = [max(1, splits[index].bytes) for index in order], [max(1, splits[index].bytes) for index in chosen]
            shares |= dict.fromkeys(chosen, min(1.0, fraction * sum(sizes[0]) / sum(sizes[1])))
        return cls([splits[i] for i in sorted(shares)], [shares[i] for i in sorted(shares)], kinds, fraction, *total)

    @property
    def is_whole(self) -> bool:
        """Whether all of the input is read."""
        return self.fraction >= 1

    def count(self, texts: Sequence[TextResult], store: Store, total: StageStats, map: Map) -> None:
        """Add the statistics of some stages, by split, to `counts` and to `total`."""
        total.add(add_stats(store, [text.stats for text in texts], map))
        for index, text in enumerate(texts if not self.is_whole else ()):
            stats = read_stats(store, text.stats)
            while len(self.counts) <= index:
                self.counts.append(Counter())
            for stage, counted in stats.funnel.items():
                self.counts[index].update({f"{stage}\n{reason}": n for reason, n in counted.dropped.items()})
            seconds = {name: round(1e6 * seconds) for name, seconds in stats.usage.seconds.items() if name != "start"}
            self.counts[index][READ_US] += seconds.pop("read", 0)
            self.counts[index][OTHER_US] += sum(seconds.values())

    @property
    def read_bytes(self) -> int:
        """The size of the splits that are read."""
        return sum(split.bytes for split in self.splits)

    @property
    def documents_share(self) -> float:
        """The share of the documents that are processed, of those that are read."""
        return min(1.0, self.num_bytes / self.scale / max(1, self.read_bytes))

    @property
    def scale(self) -> float:
        """How many times the documents that are processed there are in the whole input."""
        processed = sum(split.bytes * share for split, share in zip(self.splits, self.shares))
        return self.num_bytes / processed if processed else 1 / self.fraction

    @property
    def read_scales(self) -> list[float]:
        """For each split how many times the bytes of its kind that are read there are of that kind."""
        return [share / self.fraction for share in self.shares]

    @property
    def chosen(self) -> Counter[str]:
        """How many splits of each kind are read."""
        return Counter(split.kind for split in self.splits)

    @property
    def quantile(self) -> float | None:
        """Standard errors from the middle of an interval of 95 % to its ends: Student's t; None if it is not known.

        It is not where of a kind with several splits one was read. Source: Abramowitz and Stegun 1964, 26.7.5.
        """
        if any(number == 1 < self.kinds[kind] for kind, number in self.chosen.items()):
            return None
        n, z = sum(number - 1 for kind, number in self.chosen.items() if number < self.kinds[kind]), _Z
        if n < 2:
            return 12.7 if n == 1 else z
        return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n * n)

    def error(self, totals: Sequence[float], counts: Sequence[float]) -> float:
        """Return the standard error, between splits, of the ratio of the sum of counts to that of totals."""
        sum_of_totals = sum(totals)
        ratio = sum(counts) / sum_of_totals if sum_of_totals else 0.0
        rest: dict[str, list[float]] = {}
        for split, total, count in zip(self.splits, totals, counts):
            rest.setdefault(split.kind, []).append(count - ratio * total)
        variance = 0.0
        for kind, values in rest.items():
            mean, number = sum(values) / len(values), len(values)
            unread = 1 - number / self.kinds[kind]
            variance += unread * number / max(1, number - 1) * sum((value - mean) ** 2 for value in values)
        return math.sqrt(variance) / sum_of_totals if sum_of_totals else 0.0

    def relative_error(self, scales: Sequence[float], counts: Sequence[float]) -> float:
        """Return the standard error of the sum of counts, as a share of it; splits count by their sizes and scales."""
        sizes = [split.bytes * scale for split, scale in zip(self.splits, scales)]
        return self.error(sizes, counts) * sum(sizes) / sum(counts) if sum(counts) else 0.0


def interval(dropped: int, documents: int, error: float, documents_share: float, z: float) -> list[float]:
    """The interval of 95 % of the rate `dropped / documents` in the whole input.

    Args:
        error: The standard error of the rate between splits.
        documents_share: The share of the documents of the splits that was read.
        z: Standard errors of the interval.
    """
    if not documents:
        return [0.0, 1.0]
    rate = dropped / documents
    if documents_share >= 1 and not error:
        return [rate, rate]
    variance = error * error + (1 - documents_share) * rate * (1 - rate) / documents
    number = min(rate * (1 - rate) / variance, 1e15) if variance else float(documents)
    center = (rate + z**2 / (2 * number)) / (1 + z**2 / number)
    half = z / (1 + z**2 / number) * math.sqrt(rate * (1 - rate) / number + z**2 / (4 * number * number))
    return [max(0.0, center - half), min(1.0, center + half)]


def describe_sample(
    sampling: Sampling, texts: Sequence[TextResult], stats: StageStats, usage: Usage, figures: Mapping[str, float]
) -> Json:
    """What the report has of a sample: `sample` and `estimate`, and `cost`, which alone differs between runs.

    Args:
        texts: The results of the splits.
        figures: Of the sample: `documents_in`, `documents_out`, and others that are in proportion to these.
    """
    sizes, share, z = [text.documents_in for text in texts], sampling.documents_share, sampling.quantile
    rates = []
    for stage, count in stats.funnel.items():
        for reason, dropped in sorted(count.dropped.items()):
            # What deduplication drops depends on documents that are not in the sample: its rates have no interval.
            bounds = None
            if stage not in _CORPUS_STAGES and z is not None:
                error = sampling.error(sizes, [counts[f"{stage}\n{reason}"] for counts in sampling.counts])
                bounds = interval(dropped, sum(sizes), error, share, z)
            rates.append({"stage": stage, "reason": reason, "dropped": dropped, "interval": bounds})
    chosen = sampling.chosen
    return {
        "sample": {
            "splits": len(sampling.splits), "of_splits": sampling.num_splits, "bytes": sampling.read_bytes,
            "of_bytes": sampling.num_bytes, "share_of_documents": share, "documents": sum(sizes), "rates": rates,
            "kinds": {kind: [chosen[kind], number] for kind, number in sorted(sampling.kinds.items())},
        },
        "estimate": {name: _estimate(sampling, texts, name, figures) for name in figures},
        "cost": _cost(sampling, usage, stats.last.bytes_out),
    }  # fmt: skip


def _estimate(sampling: Sampling, texts: Sequence[TextResult], name: str, figures: Mapping[str, float]) -> list[float]:
    """A figure for the whole input: expected; and the interval of 95 % if it is known."""
    expected, z = figures[name] * sampling.scale, sampling.quantile
    kind = "documents_in" if name == "documents_in" else "documents_out"
    counts: list[float] = [getattr(text, kind) for text in texts]
    if not figures[kind] or not sum(counts) or z is None:
        return [round(expected)]
    relative = sampling.relative_error(sampling.shares, counts)
    half = z * expected * math.hypot(relative, math.sqrt((1 - sampling.documents_share) / figures[kind]))
    return [round(expected), round(max(0.0, expected - half)), round(expected + half)]


def _cost(sampling: Sampling, usage: Usage, text_bytes: int) -> Json:
    """CPU seconds by stage, of the sample and of the whole input; and its time with a process a core.

    What a process needs once (`start`: imports, models, compiled code) is not multiplied; nor is `hash`, the hashing of
    what is not in the sample, as reading has that of what is. A tokenizer is trained on so much text at most.
    """
    read = [counts[READ_US] * scale for counts, scale in zip(sampling.counts, sampling.read_scales)]
    read_us = sum(counts[READ_US] for counts in sampling.counts)
    trained = min(SAMPLE_BYTES, text_bytes * sampling.scale) / max(1, min(SAMPLE_BYTES, text_bytes))
    scales = {
        "start": 0.0,
        "kernels": 0.0,
        "read": sum(read) / read_us if read_us else 1.0,
        "hash": 0.0,
        TRAINING: trained,
    }
    processes = min(num_cores(), sampling.num_splits)
    stages = {
        name: [round(seconds, 4), round(seconds * scales.get(name, sampling.scale), 2)]
        for name, seconds in usage.seconds.items()
    }
    total_s, start = sum(seconds for _, seconds in stages.values()), usage.seconds.get("start", 0.0)
    training = stages.get(TRAINING, [0.0, 0.0])[1]  # By one process.
    expected, z = (total_s - training) / processes + training + start, sampling.quantile
    wall_s = [expected]
    if z is not None:
        spent = [us + counts[OTHER_US] * sampling.scale for us, counts in zip(read, sampling.counts)]
        error = math.hypot(_CLOCK_ERROR, z * sampling.relative_error(sampling.read_scales, spent))
        wall_s += [expected / (1 + error), expected * (1 + error)]
    return {
        "cpu_s": stages, "whole_cpu_s": round(total_s, 2), "processes": processes,
        "wall_s": [round(value, 2) for value in wall_s], "peak_bytes": usage.peak_bytes,
    }  # fmt: skip
