"""The simulator's own record of every sample: when a worker used it, and when it was acknowledged; and the result.

The record is kept outside the code under test: each sample of each epoch must be acknowledged once, and used once apart
from wasted uses. What a worker used and could not acknowledge, because it was killed or lost the lease, is wasted:
another worker uses it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.simulate.scenario import Bound, Scenario

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
    """Numbers of samples. `wasted`: used and not acknowledged."""

    samples: int
    missing: int
    repeated: int
    wasted: int
    examples: tuple[str, ...]  # of missing and repeated samples, at most five

    @property
    def ok(self) -> bool:
        """Whether every sample was used exactly once."""
        return self.missing == self.repeated == 0


@dataclass
class UsageRecord:
    """The ranges that were used, acknowledged and wasted. `samples`: int64 [S], of each slice."""

    samples: I64
    epochs: int = 1
    trained: list[UsedRange] = field(default_factory=list)
    acknowledged: list[UsedRange] = field(default_factory=list)
    wasted: list[UsedRange] = field(default_factory=list)

    def check(self) -> UsageCheck:
        """Compare the ranges with the samples of the dataset."""
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
        wasted = sum(use.stop - use.start for use in self.wasted)
        return UsageCheck(int(self.samples.sum()) * self.epochs, missing, repeated, wasted, tuple(examples[:5]))

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


@dataclass(frozen=True)
class SimulationResult:
    """The figures of a simulation.

    Attributes:
        time_s: When the last sample was acknowledged, in virtual seconds.
        origin_bytes: Bytes sent by the origin.
        counts: Counts of waits, steals, bans and so on, by name.
        fault: What failed beside `usage`; "" if nothing.
    """

    scenario: Scenario
    usage: UsageCheck
    time_s: float
    bound: Bound
    origin_bytes: float
    counts: Mapping[str, float] = field(default_factory=dict)
    fault: str = ""

    @property
    def ok(self) -> bool:
        """Whether every sample was used exactly once, and the simulation ended."""
        return self.usage.ok and not self.fault

    @property
    def origin_ratio(self) -> float:
        """Bytes that the origin sent, in sizes of the dataset."""
        return self.origin_bytes / (self.scenario.slices * self.scenario.slice_bytes)

    @property
    def time_ratio(self) -> float:
        """Time taken, in lower bounds."""
        return self.time_s / self.bound.seconds

    def to_json(self) -> dict[str, Any]:
        """The result as plain values: equal for equal scenarios and code."""
        return {
            "ok": self.ok, "missing": self.usage.missing, "repeated": self.usage.repeated, "wasted": self.usage.wasted,
            "origin_ratio": round(self.origin_ratio, 4), "time_ratio": round(self.time_ratio, 4),
            "samples": self.usage.samples, "time_s": round(self.time_s, 3), "bound_s": round(self.bound.seconds, 3),
            "bound": self.bound.limit, **{name: round(value, 3) for name, value in self.counts.items()},
            "fault": self.fault, "examples": list(self.usage.examples), "scenario": self.scenario.model_dump(),
        }  # fmt: skip
