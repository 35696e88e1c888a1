"""The simulator's own record of every sample: who used it when, and what of it was acknowledged.

It is kept by the worlds themselves, not by the code under test, and compared with nothing but itself: each sample of
each epoch must have been acknowledged once, used once beside what was wasted, and in time. What a worker used and
could not acknowledge, because it was killed or had lost the lease, is wasted: the work of others, and no repetition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError

I64 = NDArray[np.int64]


class UsedRange(NamedTuple):
    """Samples [start, stop) of a slice in an epoch, at a moment, by a worker."""

    epoch: int
    slice_index: int
    start: int
    stop: int
    at: float
    worker: int


@dataclass(frozen=True)
class UsageCheck:
    """What the record says. `late` were acknowledged after the deadline; `wasted` are samples used for nothing."""

    samples: int
    missing: int
    repeated: int
    late: int
    wasted: int
    examples: tuple[str, ...]  # Of what is wrong, at most five.

    @property
    def ok(self) -> bool:
        """Whether every sample was used exactly once, and in time."""
        return self.missing == self.repeated == self.late == 0


@dataclass
class UsageRecord:
    """Ranges as they were used, as they were acknowledged, and as they were lost.

    Args:
        samples: int64 [S], of each slice.
        epochs: How many.
    """

    samples: I64
    epochs: int = 1
    trained: list[UsedRange] = field(default_factory=list)
    acknowledged: list[UsedRange] = field(default_factory=list)
    wasted: list[UsedRange] = field(default_factory=list)

    def check(self, deadline: float | None = None) -> UsageCheck:
        """Compares what was acknowledged and used with what there was."""
        total = int(self.samples.sum())
        missing = repeated = 0
        examples: list[str] = []
        for epoch in range(self.epochs):
            acknowledged = self._counts(self.acknowledged, epoch)
            used = self._counts(self.trained, epoch) - self._counts(self.wasted, epoch)
            lost = np.minimum(acknowledged, used) < 1
            twice = np.maximum(acknowledged, used) > 1
            missing += int(lost.sum())
            repeated += int((np.maximum(acknowledged, used)[twice] - 1).sum())
            examples += self._words(epoch, "never used", lost) + self._words(epoch, "used again", twice)
        late = 0
        if deadline is not None:
            late = sum(use.stop - use.start for use in self.acknowledged if use.at > deadline)
        wasted = sum(use.stop - use.start for use in self.wasted)
        return UsageCheck(total * self.epochs, missing, repeated, late, wasted, tuple(examples[:5]))

    def _counts(self, ranges: list[UsedRange], epoch: int) -> I64:
        """How often each sample of an epoch lies in a range: int64 [samples]."""
        bases = np.concatenate(([0], np.cumsum(self.samples)))
        changes = np.zeros(bases[-1] + 1, np.int64)
        if ranges:
            rows = np.array([use[:4] for use in ranges], np.int64)
            rows = rows[rows[:, 0] == epoch]
            if (rows[:, 2] < 0).any() or (rows[:, 3] > self.samples[rows[:, 1]]).any():
                raise UsageError("simulate: a use goes beyond its slice. This is a fault of the simulated code.")
            np.add.at(changes, bases[rows[:, 1]] + rows[:, 2], 1)
            np.add.at(changes, bases[rows[:, 1]] + rows[:, 3], -1)
        return np.cumsum(changes)[:-1]

    def _words(self, epoch: int, what: str, which: NDArray[np.bool_]) -> list[str]:
        bases = np.concatenate(([0], np.cumsum(self.samples)))
        found = []
        for sample in np.flatnonzero(which)[:3].tolist():
            index = int(np.searchsorted(bases, sample, side="right")) - 1
            at = int(sample - bases[index])
            who = [
                f"worker {use.worker} at {use.at:.1f} s"
                for use in self.trained
                if use.epoch == epoch and use.slice_index == index and use.start <= at < use.stop
            ]
            found.append(f"epoch {epoch}, slice {index}, sample {at} {what} ({', '.join(who) or 'nobody'})")
        return found
