"""Mixtures of datasets by weights that may change at a step: the dataset of each sample of a run, and its number there.

Position p of a run belongs to stream p mod G, of which it is turn p div G. A batch is read in order of stream, so a
rank always reads the same streams, and a stream always the same lanes of every dataset. Weights become quotas of a
period of 65 536 turns, spread evenly over it; the streams begin at points of the period that are evenly spread, too. So
each batch, each stream and each prefix is within a few samples of its quotas. The k-th sample of a dataset in a stream
is number k G + c of the dataset, c in [0, G) of the stream alone: all streams together read each sample once an epoch.

No random numbers, no state, any position in constant time. A weight is a multiple of 1/65 536 of the whole; a change
of weights costs 1 MB and 8 bytes for each stream and dataset.
Source: Hamilton's largest remainder for the quotas; Weyl's equidistribution for their places.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from forebay.arrays import I32, I64, U16
from forebay.errors import UsageError
from forebay.order.step_index import check_rising

PERIOD = 1 << 16  # Turns after which the pattern of sources repeats.
_GOLDEN_RATIO = (1 + 5**0.5) / 2
_STRIDE = 40245  # Odd, near PERIOD / golden ratio: its multiples are spread evenly modulo all powers of two.


@dataclass(frozen=True)
class Weights:
    """The weight of each source, and the run steps at which weights change. Only the ratios of weights matter.

    One above zero and yet less than about 1/131 072 of the whole is refused.
    """

    changes: tuple[tuple[int, tuple[float, ...]], ...]  # (run step, weights), steps rising from 0
    quotas: tuple[I64, ...] = field(
        init=False, repr=False, compare=False
    )  # One for each change: int64 [D], whose sum is PERIOD.

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
    """The period of one set of weights: turn t belongs to source `sources[t % PERIOD]`. Immutable."""

    def __init__(self, quotas: I64) -> None:
        self.quotas = quotas
        places = np.arange(PERIOD) * _STRIDE % PERIOD
        self.sources: U16 = np.repeat(np.arange(len(quotas), dtype=np.uint16), quotas)[places]
        turns = np.argsort(self.sources, kind="stable")
        self._first = np.cumsum(quotas) - quotas
        self._turns = turns  # Those of source 0, rising, then those of source 1, ...
        self._own: I32 = np.empty(PERIOD, np.int32)
        self._own[turns] = np.arange(PERIOD) - np.repeat(self._first, quotas)

    def counts(self, turns: I64, sources: slice = slice(None)) -> I64:
        """How many of the turns [0, t) belong to each of some sources, int64 [K, D], for each of `turns` [K]."""
        periods, rest = turns >> 16, turns & (PERIOD - 1)
        firsts, quotas = self._first[sources], self.quotas[sources]
        within = [np.searchsorted(self._turns[first : first + quota], rest) for first, quota in zip(firsts, quotas)]
        counts: I64 = periods[:, None] * quotas + np.stack(within, axis=1)
        return counts

    def locate(self, turns: I64) -> tuple[I64, I64]:
        """Turns, int64 [K], to (source, number among the source's own from turn 0 on)."""
        period, rest = turns >> 16, turns & (PERIOD - 1)
        sources = self.sources[rest].astype(np.int64)
        return sources, period * self.quotas[sources] + self._own[rest]

    def turns(self, source: int, own: I64) -> I64:
        """The turns of a source's own numbers, int64 [K]: the inverse of `locate`, for a source with a quota."""
        period, rest = np.divmod(own, self.quotas[source])
        turns: I64 = period * PERIOD + self._turns[self._first[source] + rest]
        return turns


class MixtureOrder:
    """From positions of a run to numbers of datasets' samples and back. Safe to share between threads.

    Args:
        quotas: int64 [D], of each change.
        starts: The position at which each change begins, in samples of the run, rising from 0.
        num_streams: G.
        cycles: Of each dataset, [D]: its own numbers that are equal modulo gcd(G, cycle) are of neighbouring streams.

    Cost: 5 ms for each change.
    """

    def __init__(self, quotas: Sequence[I64], starts: Sequence[int], num_streams: int, cycles: Sequence[int]) -> None:
        self.num_streams, self._starts = num_streams, list(starts)
        self._patterns = [Pattern(of_change) for of_change in quotas]
        streams = np.arange(num_streams)
        self._blocks = np.gcd(num_streams, np.array(cycles, np.int64))
        sharing = num_streams // self._blocks
        self._numbers = streams[:, None] // sharing + streams[:, None] % sharing * self._blocks  # [G, D], in [0, G).
        stride = coprime_stride(num_streams)
        self._phases = (streams * stride % num_streams * PERIOD // num_streams) * pow(_STRIDE, -1, PERIOD) % PERIOD
        # Beside a pattern's own numbers: how many more a stream has read of each source, [G, D], of each change.
        self._more, counts = list[I64](), np.zeros_like(self._numbers)
        for pattern, first in zip(self._patterns, starts):
            if self._more:
                counts = self._counts(len(self._more) - 1, first)
            self._more.append(counts - pattern.counts(self._turns_before(first) + self._phases))

    def _turns_before(self, position: int) -> I64:
        """How many turns of each stream lie before a position, [G]."""
        turns: I64 = (position - np.arange(self.num_streams) + self.num_streams - 1) // self.num_streams
        return turns

    def _counts(self, change: int, position: int) -> I64:
        return self._more[change] + self._patterns[change].counts(self._turns_before(position) + self._phases)

    def next_own(self, source: int, position: int) -> int:
        """The number of the first sample of a source that stream 0 reads from a position of the run on."""
        change = int(np.searchsorted(self._starts, position, side="right")) - 1
        turns = np.array([-(-position // self.num_streams)])
        count = self._more[change][0, source] + self._patterns[change].counts(turns, slice(source, source + 1))
        return int(count[0, 0]) * self.num_streams

    def reached(self, position: int) -> I64:
        """A number above each dataset's own numbers that lie before a position of the run, int64 [D]; 0 without one."""
        change = int(np.searchsorted(self._starts, position, side="right")) - 1
        counts = self._counts(change, position)
        above: I64 = np.where(counts, (counts - 1) * self.num_streams + self._numbers + 1, 0).max(axis=0)
        return above

    def locate(self, positions: I64) -> tuple[I64, I64]:
        """Positions of the run, int64 [K], to (source, the source's own number)."""
        turns, streams = np.divmod(positions, self.num_streams)
        turns += self._phases[streams]
        sources, own = self._locate(0, turns, streams)
        for i in range(1, len(self._starts)):
            later = np.flatnonzero(positions >= self._starts[i])
            if not len(later):
                break
            sources[later], own[later] = self._locate(i, turns[later], streams[later])
        return sources, own * self.num_streams + self._numbers[streams, sources]

    def _locate(self, change: int, turns: I64, streams: I64) -> tuple[I64, I64]:
        sources, own = self._patterns[change].locate(turns)
        return sources, own + self._more[change][streams, sources]

    def positions(self, source: int, own: I64) -> I64:
        """The positions of the run at which a source's own numbers lie, int64 [K]: the inverse of `locate`.

        Of those that are never read, as the last weight is 0: a position near that change.
        """
        counts, number = np.divmod(own, self.num_streams)
        block = self._blocks[source]
        streams = number % block * (self.num_streams // block) + number // block
        turns = np.full(len(own), self._starts[-1] // self.num_streams + 1)
        for first, pattern, more in zip(self._starts, self._patterns, self._more):
            if pattern.quotas[source]:
                of_change = pattern.turns(source, counts - more[streams, source]) - self._phases[streams]
                turns = np.where(of_change >= self._turns_before(first)[streams], of_change, turns)
        positions: I64 = turns * self.num_streams + streams
        return positions


def coprime_stride(size: int) -> int:
    """A number near size / golden ratio without a common divisor: its multiples are spread evenly modulo `size`."""
    return next(i for i in range(int(size / _GOLDEN_RATIO), size + 1) if math.gcd(i, size) == 1)


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
