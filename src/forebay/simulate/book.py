"""The simulator's own record of every sample: who used it when, and what of it was acknowledged.

It is kept by the worlds themselves, not by the code under test, and compared with nothing but itself: each sample of
each epoch must have been acknowledged once, used once beside what was wasted, and in time. What a worker used and
could not acknowledge, because it was killed or had lost the lease, is wasted: the work of others, and no repetition.
Of an elastic run, the ancestors of its last weights count: a step done twice has two records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError

I64 = NDArray[np.int64]


class Range(NamedTuple):
    """Samples [start, stop) of a slice in an epoch, at a moment, by a worker."""

    epoch: int
    slice_index: int
    start: int
    stop: int
    at: float
    worker: int


@dataclass(frozen=True)
class Verdict:
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
class Book:
    """Ranges as they were used, as they were acknowledged, and as they were lost.

    Args:
        samples: int64 [S], of each slice.
        epochs: How many.
    """

    samples: I64
    epochs: int = 1
    trained: list[Range] = field(default_factory=list)
    acknowledged: list[Range] = field(default_factory=list)
    wasted: list[Range] = field(default_factory=list)

    def check(self, deadline: float | None = None, set_aside: frozenset[tuple[int, int]] = frozenset()) -> Verdict:
        """Compares. `set_aside` are (epoch, slice) that need not have been used."""
        total = int(self.samples.sum())
        missing = repeated = 0
        examples: list[str] = []
        for epoch in range(self.epochs):
            acknowledged = self._counts(self.acknowledged, epoch)
            used = self._counts(self.trained, epoch) - self._counts(self.wasted, epoch)
            wanted = np.ones(total, np.int64)
            for _, index in sorted(pair for pair in set_aside if pair[0] == epoch):
                wanted[self._base(index) : self._base(index + 1)] = 0
            lost = (np.minimum(acknowledged, used) < 1) & (wanted == 1)
            twice = np.maximum(acknowledged, used) > 1
            missing += int(lost.sum())
            repeated += int((np.maximum(acknowledged, used)[twice] - 1).sum())
            examples += self._words(epoch, "never used", lost) + self._words(epoch, "used again", twice)
        late = 0
        if deadline is not None:
            late = sum(use.stop - use.start for use in self.acknowledged if use.at > deadline)
        wasted = sum(use.stop - use.start for use in self.wasted)
        return Verdict(total * self.epochs, missing, repeated, late, wasted, tuple(examples[:5]))

    def _base(self, index: int) -> int:
        return int(self.samples[:index].sum())

    def _counts(self, ranges: list[Range], epoch: int) -> I64:
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


@dataclass(frozen=True, eq=False)
class Weights:
    """What a model has learned after so many steps.

    Args:
        before: Those that the last step began with; None where nothing was learned yet.
        read: Global sample ids of each rank in that step, int64.
        generation: In which it was done.
    """

    step: int = 0
    before: Weights | None = None
    read: tuple[I64, ...] = ()
    generation: int = 0


def ancestors(weights: Weights) -> Iterator[Weights]:
    """These, and all that they were made of, the latest first, but for those that have learned nothing."""
    at: Weights | None = weights
    while at is not None and at.before is not None:
        yield at
        at = at.before


def check(end: Weights, num_samples: int, epoch_of: I64, steps_done: int) -> tuple[Verdict, str]:
    """Counts the samples along a lineage; and says where it is torn, "" for nowhere.

    Args:
        num_samples: Of an epoch.
        epoch_of: int64 [steps], the epoch of each step.
        steps_done: Counting those done in vain too: what these read is `wasted`.
    """
    epochs = int(epoch_of.max()) + 1
    counts = np.zeros((epochs, num_samples), np.int64)
    torn, expected, length = "", end.step, 0
    for one in ancestors(end):
        if one.step != expected:
            torn = f"step {expected} of the lineage is missing before generation {one.generation}."
        expected, length = one.step - 1, length + 1
        counts[epoch_of[one.step - 1]] += np.bincount(np.concatenate(one.read), minlength=num_samples)
    examples = [
        f"epoch {epoch}, sample {sample} read {counts[epoch, sample]} times"
        for epoch, sample in np.argwhere(counts != 1)[:5].tolist()
    ]
    missing, repeated = int((counts == 0).sum()), int(np.maximum(counts - 1, 0).sum())
    wasted = (steps_done - length) * (num_samples * epochs // len(epoch_of))
    if expected != 0:
        torn = f"the lineage begins at step {expected}."
    return Verdict(counts.size, missing, repeated, 0, wasted, tuple(examples)), torn
