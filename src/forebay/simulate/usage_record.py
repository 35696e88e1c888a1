"""The simulator's own record of every sample: when a worker used it, and when it was acknowledged.

It is kept outside the code under test: each sample of each epoch must be acknowledged once, used once apart from wasted
uses, and in time. What a worker used and could not acknowledge, because it was killed or lost the lease, is wasted:
another worker uses it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError

I64 = NDArray[np.int64]


class UsedRange(NamedTuple):
    """Samples [start, stop) of a slice in an epoch, used by a worker at `time_s`."""

    epoch: int
    slice_index: int
    start: int
    stop: int
    time_s: float
    worker: int


@dataclass(frozen=True)
class UsageCheck:
    """Numbers of samples. `late`: acknowledged after the deadline. `wasted`: used and not acknowledged."""

    samples: int
    missing: int
    repeated: int
    late: int
    wasted: int
    examples: tuple[str, ...]  # of missing and repeated samples, at most five

    @property
    def ok(self) -> bool:
        """Whether every sample was used exactly once, and in time."""
        return self.missing == self.repeated == self.late == 0


@dataclass
class UsageRecord:
    """The ranges that were used, acknowledged and wasted. `samples`: int64 [S], of each slice."""

    samples: I64
    epochs: int = 1
    trained: list[UsedRange] = field(default_factory=list)
    acknowledged: list[UsedRange] = field(default_factory=list)
    wasted: list[UsedRange] = field(default_factory=list)

    def check(self, deadline: float | None = None) -> UsageCheck:
        """Compare the ranges with the samples of the dataset."""
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
            examples += self._describe(epoch, "never used", lost) + self._describe(epoch, "used again", twice)
        late = 0
        if deadline is not None:
            late = sum(use.stop - use.start for use in self.acknowledged if use.time_s > deadline)
        wasted = sum(use.stop - use.start for use in self.wasted)
        return UsageCheck(total * self.epochs, missing, repeated, late, wasted, tuple(examples[:5]))

    def _counts(self, ranges: list[UsedRange], epoch: int) -> I64:
        """How many ranges contain each sample of an epoch: int64 [samples]."""
        bases = np.concatenate(([0], np.cumsum(self.samples)))
        changes = np.zeros(bases[-1] + 1, np.int64)
        if ranges:
            rows = np.array([use[:4] for use in ranges], np.int64)
            rows = rows[rows[:, 0] == epoch]
            if (rows[:, 2] < 0).any() or (rows[:, 3] > self.samples[rows[:, 1]]).any():
                raise UsageError("simulate: a use goes beyond its slice. This is an error of the simulated code.")
            np.add.at(changes, bases[rows[:, 1]] + rows[:, 2], 1)
            np.add.at(changes, bases[rows[:, 1]] + rows[:, 3], -1)
        return np.cumsum(changes)[:-1]

    def _describe(self, epoch: int, problem: str, samples: NDArray[np.bool_]) -> list[str]:
        bases = np.concatenate(([0], np.cumsum(self.samples)))
        examples = []
        for sample in np.flatnonzero(samples)[:3].tolist():
            index = int(np.searchsorted(bases, sample, side="right")) - 1
            offset = int(sample - bases[index])
            workers = [
                f"worker {use.worker} at {use.time_s:.1f} s"
                for use in self.trained
                if use.epoch == epoch and use.slice_index == index and use.start <= offset < use.stop
            ]
            users = ", ".join(workers) or "no worker"
            examples.append(f"epoch {epoch}, slice {index}, sample {offset} {problem} ({users})")
        return examples
