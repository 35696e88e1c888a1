"""Mixtures of datasets by weights that may change at a step: the dataset of each sample of a run.

Weights become quotas of a period of 65 536 samples, spread evenly over it, so that every prefix of the run is within a
few samples of the quotas. No random numbers, no state, any position in constant time. A weight is a multiple of
1/65 536 of the whole; each change of weights costs 400 KB.
Source: Hamilton's largest remainder for the quotas; the r-th of q at (r + 0.5) / q, as in Bresenham's line.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from forebay.arrays import I32, I64, U16
from forebay.errors import UsageError
from forebay.order.step_index import check_rising

PERIOD = 1 << 16  # Samples after which the pattern of sources repeats.


@dataclass(frozen=True)
class Weights:
    """The weight of each source, and the run steps at which weights change. Only the ratios of weights matter.

    One above zero and yet less than about 1/131 072 of the whole is refused.
    """

    changes: tuple[tuple[int, tuple[float, ...]], ...]  # (run step, weights), steps rising from 0
    quotas: tuple[I64, ...] = field(init=False, repr=False, compare=False)  # Of each change, int64 [D], sum PERIOD.

    def __post_init__(self) -> None:
        check_rising("weights", [step for step, _ in self.changes])
        changes = tuple((int(step), tuple(map(float, weights))) for step, weights in self.changes)
        if len({len(weights) for _, weights in changes}) != 1:
            raise UsageError("weights: expected as many at each change, one for each dataset.")
        object.__setattr__(self, "changes", changes)
        object.__setattr__(self, "quotas", tuple(_quotas(step, weights) for step, weights in changes))

    @property
    def num_sources(self) -> int:
        return len(self.changes[0][1])

    def digest(self, up_to_step: int) -> str:
        """A hash of the changes that begin before a run step: equal where the samples until then are.

        So a state taken at a step can be loaded by a mixture that differs only later.
        """
        spelled = [(step, q.tolist()) for (step, _), q in zip(self.changes, self.quotas) if step < up_to_step]
        return hashlib.sha256(f"forebay-weights-v1;{spelled}".encode()).hexdigest()


class Pattern:
    """The period of one set of weights: position t belongs to source `sources[t % PERIOD]`. Immutable."""

    def __init__(self, quotas: I64) -> None:
        self.quotas = quotas
        turns = [(np.arange(q) + 0.5) / q for q in quotas.tolist()]
        # Sources in order, sorted stably: ties go by source. Quotients of different fractions differ in 64 bits.
        turn = np.argsort(np.concatenate(turns), kind="stable")
        self.sources: U16 = np.repeat(np.arange(len(quotas), dtype=np.uint16), quotas)[turn]
        own = np.concatenate([np.arange(q, dtype=np.int32) for q in quotas.tolist()])
        self._own: I32 = own[turn]

    def counts(self, num_places: int) -> I64:
        """How many of the first `num_places` positions belong to each source, int64 [D]."""
        periods, rest = divmod(num_places, PERIOD)
        part = np.bincount(self.sources[:rest], minlength=len(self.quotas)).astype(np.int64)
        return periods * self.quotas + part

    def locate(self, places: I64) -> tuple[I64, I64]:
        """Positions since the change, any shape, to (source, index among the source's own since the change)."""
        period, rest = places >> 16, places & (PERIOD - 1)
        sources = self.sources[rest].astype(np.int64)
        return sources, period * self.quotas[sources] + self._own[rest]


class MixtureOrder:
    """From positions of a run to datasets, for weights that change. Safe to share between threads.

    `quotas` are int64 [D], of each change; each begins at a position in `starts`, in samples of the run, rising from 0.
    Cost: 5 ms for each change.
    """

    def __init__(self, quotas: Sequence[I64], starts: Sequence[int]) -> None:
        self._starts = list(starts)
        self._patterns = [Pattern(of_change) for of_change in quotas]
        self._bases = [np.zeros(len(quotas[0]), np.int64)]  # Samples taken of each source before a change.
        for pattern, (first, last) in zip(self._patterns, itertools.pairwise(starts)):
            self._bases.append(self._bases[-1] + pattern.counts(last - first))

    def counts(self, stop: int) -> I64:
        """How many of the positions [0, stop) are of each dataset, int64 [D]."""
        i = max(i for i, first in enumerate(self._starts) if first <= stop)
        return self._bases[i] + self._patterns[i].counts(stop - self._starts[i])

    def locate(self, start: int, stop: int) -> tuple[I64, I64]:
        """Positions [start, stop) to (source, index among its own, rising by one), both int64 [stop - start]."""
        parts = []
        for i, first in enumerate(self._starts):
            last = self._starts[i + 1] if i + 1 < len(self._starts) else stop
            low, high = max(first, start), min(last, stop)
            if low < high:
                sources, own = self._patterns[i].locate(np.arange(low - first, high - first, dtype=np.int64))
                parts.append((sources, own + self._bases[i][sources]))
        if len(parts) == 1:
            return parts[0]
        none = np.empty(0, np.int64)
        return np.concatenate([none, *(s for s, _ in parts)]), np.concatenate([none, *(p for _, p in parts)])


def _quotas(step: int, weights: Sequence[float]) -> I64:
    """Weights to samples of a period by largest remainder, ties by source: exact, so the same everywhere."""
    if len(weights) > PERIOD or not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
        raise UsageError(f"weights at step {step}: expected numbers from 0, one above 0, got {list(weights)}.")
    total = sum(map(Fraction, weights))
    exact = [Fraction(w) * PERIOD / total for w in weights]
    quotas = [math.floor(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (quotas[i] - exact[i], i))
    for i in by_rest[: PERIOD - sum(quotas)]:
        quotas[i] += 1
    for source, (weight, quota) in enumerate(zip(weights, quotas)):
        if weight > 0 and quota == 0:
            raise UsageError(
                f"weights at step {step}: expected 0 or at least 1/{2 * PERIOD} of the whole, got {weight!r} for "
                f"dataset {source} of a sum of {float(total)!r}. It would never be read. Give it more, or leave it out."
            )
    return np.array(quotas, np.int64)
