"""Several datasets by weights that may change at a step: whose sample each place of the run is.

Hides: weights become quotas of a period of 65 536 places, and a period is spread evenly, so that every prefix of the
run is within a few samples of the quotas, whatever the batch size. A place is found by one look into the period's
table: nothing is drawn, nothing is kept, any place is reached at once.

What it costs: a weight is a multiple of 1/65 536 of the whole (a source of one part in ten thousand is off by up to
eight per cent of itself), and 6 bytes a place of the period: 400 KB for each change of weights.

Source: Hamilton's largest remainder for the quotas; the r-th of q at (r + 0.5) / q, as in Bresenham's line.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.order.step_index import check_rising

I64 = NDArray[np.int64]

PERIOD = 1 << 16  # Places after which the pattern of sources repeats.


@dataclass(frozen=True)
class Weights:
    """The weight of each source, and the run steps at which weights change. Only the ratios of weights matter.

    One above zero and yet less than about 1/131 072 of the whole is refused.
    """

    changes: tuple[tuple[int, tuple[float, ...]], ...]  # (run step, weights), steps rising from 0
    quotas: tuple[I64, ...] = field(init=False, repr=False, compare=False)  # Of each change, int64 [D], sum PERIOD.

    def __post_init__(self) -> None:
        check_rising("weights", [step for step, _ in self.changes])
        changes = tuple((int(step), tuple(map(float, given))) for step, given in self.changes)
        if len({len(given) for _, given in changes}) != 1:
            raise UsageError("weights: expected as many at each change, one for each dataset.")
        object.__setattr__(self, "changes", changes)
        object.__setattr__(self, "quotas", tuple(_quotas(step, given) for step, given in changes))

    @property
    def num_sources(self) -> int:
        return len(self.changes[0][1])

    def digest(self, up_to_step: int) -> str:
        """A hash of the changes that begin before a run step: equal where the samples until then are.

        A state taken at a step may so be loaded by a mixture that differs only later.
        """
        spelled = [(step, q.tolist()) for (step, _), q in zip(self.changes, self.quotas) if step < up_to_step]
        return hashlib.sha256(f"forebay-weights-v1;{spelled}".encode()).hexdigest()


class Pattern:
    """A period of one change: at place t stands source `sources[t % PERIOD]`, for its own sample `index(t)`.

    Immutable; [D] sources, PERIOD places.
    """

    def __init__(self, quotas: I64) -> None:
        self.quotas = quotas
        at = [(np.arange(q) + 0.5) / q for q in quotas.tolist()]
        # Sources in order, sorted stably: ties go by source. Quotients of different fractions differ in 64 bits.
        turn = np.argsort(np.concatenate(at), kind="stable")
        self.sources: NDArray[np.uint16] = np.repeat(np.arange(len(quotas), dtype=np.uint16), quotas)[turn]
        own = np.concatenate([np.arange(q, dtype=np.int32) for q in quotas.tolist()])
        self._own: NDArray[np.int32] = own[turn]

    def counts(self, num_places: int) -> I64:
        """How many of the first `num_places` places each source has, int64 [D]."""
        periods, rest = divmod(num_places, PERIOD)
        part = np.bincount(self.sources[:rest], minlength=len(self.quotas)).astype(np.int64)
        return periods * self.quotas + part

    def at(self, places: I64) -> tuple[I64, I64]:
        """Places since the change, any shape, to (source, which of the source's own since the change)."""
        period, rest = places >> 16, places & (PERIOD - 1)
        sources = self.sources[rest].astype(np.int64)
        return sources, period * self.quotas[sources] + self._own[rest]


class Mixture:
    """Where each place of a run reads, for weights that change at given places. Safe to share between threads.

    `quotas` are int64 [D], of each change; each begins at the place `starts`, in samples of the run, rising from 0. A
    change's pattern is built when it is first needed, in about 5 ms.
    """

    def __init__(self, quotas: Sequence[I64], starts: Sequence[int]) -> None:
        self._quotas = list(quotas)
        self._starts = list(starts)
        self._patterns: dict[int, Pattern] = {}
        self._bases: dict[int, I64] = {0: np.zeros(len(self._quotas[0]), np.int64)}

    def at(self, start: int, stop: int) -> tuple[I64, I64]:
        """Places [start, stop) to (source, position among its own, rising by one), both int64 [stop - start]."""
        found = []
        for i, first in enumerate(self._starts):
            last = self._starts[i + 1] if i + 1 < len(self._starts) else stop
            low, high = max(first, start), min(last, stop)
            if low < high:
                sources, own = self._pattern(i).at(np.arange(low - first, high - first, dtype=np.int64))
                found.append((sources, own + self._base(i)[sources]))
        if len(found) == 1:
            return found[0]
        none = np.empty(0, np.int64)
        return np.concatenate([none, *(s for s, _ in found)]), np.concatenate([none, *(p for _, p in found)])

    def _pattern(self, change: int) -> Pattern:
        pattern = self._patterns.get(change)
        if pattern is None:
            pattern = self._patterns[change] = Pattern(self._quotas[change])
        return pattern

    def _base(self, change: int) -> I64:
        """What each source has given before a change, int64 [D]."""
        for i in range(change):
            if i + 1 not in self._bases:
                length = self._starts[i + 1] - self._starts[i]
                self._bases[i + 1] = self._bases[i] + self._pattern(i).counts(length)
        return self._bases[change]


def _quotas(step: int, weights: Sequence[float]) -> I64:
    """Weights to places of a period by largest remainder, ties by source: exact, so the same everywhere."""
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
