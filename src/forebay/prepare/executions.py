"""What the tasks of a preparation took, by step: times, retries, stragglers. Bounded, whatever the number of tasks.

A step is a function of tasks (`process_split`, `encode_part`): of its tasks the times can be compared. Those of several
processes add up, so that the times of a job array are those of its members.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.files import HOST

STRAGGLER_FACTOR, STRAGGLER_MIN_TASKS, STRAGGLER_MIN_S = 3.0, 8, 5.0
_PER_OCTAVE = 8  # Bins of times for each power of two: a quantile is right within 5 %.
_MIN_S = 0.001
_MAX_SLOWEST = 5
_MAX_STRAGGLERS = 20
_COUNTS = ("tasks", "task_s", "cpu_s", "retries", "losses", "smaller_batches")


def label(task: Any) -> str:
    """The task's `label`, else its `name`, else its repr; at most 120 characters."""
    text = str(getattr(task, "label", None) or getattr(task, "name", None) or task)
    return text if len(text) <= 120 else text[:119] + "…"


def name_of(task: Any) -> str:
    """The task's `name` without a folder; "" without one."""
    return str(getattr(task, "name", "")).rpartition("/")[2]


@dataclass(frozen=True)
class Execution:
    """A task that a process has finished."""

    label: str
    seconds: float
    host: str = HOST
    pid: int = field(default_factory=os.getpid)


@dataclass
class StepTimes:
    """The tasks of a step that are finished, and the attempts that failed.

    Args:
        task_s, cpu_s, max_s: Seconds of all tasks by the clock, CPU seconds of all, the longest task.
        retries: Attempts that died, ran out of memory or lost their machine; `losses` are the last of these,
            `smaller_batches` the others.
        bins: Tasks by the logarithm of their seconds.
    """

    stage: str
    step: str
    tasks: int = 0
    task_s: float = 0.0
    cpu_s: float = 0.0
    max_s: float = 0.0
    retries: int = 0
    losses: int = 0
    smaller_batches: int = 0
    bins: Counter[int] = field(default_factory=Counter)
    slowest: list[dict[str, Any]] = field(default_factory=list)

    def add(self, execution: Execution) -> None:
        """Count a finished task."""
        seconds = execution.seconds
        self.tasks += 1
        self.task_s += seconds
        self.max_s = max(self.max_s, seconds)
        self.bins[math.ceil(_PER_OCTAVE * math.log2(max(seconds, _MIN_S)))] += 1
        entry = {
            "task": execution.label, "host": execution.host, "pid": execution.pid, "seconds": round(seconds, 3),
        }  # fmt: skip
        self._keep_slowest([*self.slowest, entry])

    def add_failure(self, kind: str) -> None:
        """Count an attempt that is repeated: `died`, `memory` or `lost`."""
        self.retries += 1
        self.losses += kind == "lost"
        self.smaller_batches += kind != "lost"

    def merge(self, other: StepTimes) -> None:
        """Add the tasks of another process."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_s = max(self.max_s, other.max_s)
        self.bins.update(other.bins)
        self._keep_slowest([*self.slowest, *other.slowest])

    def _keep_slowest(self, entries: list[dict[str, Any]]) -> None:
        self.slowest = sorted(entries, key=lambda entry: -entry["seconds"])[:_MAX_SLOWEST]

    def quantile(self, share: float) -> float | None:
        """The seconds within which a share of the tasks was finished; None without tasks."""
        rank, counted = share * self.tasks, 0
        for number in sorted(self.bins):
            counted += self.bins[number]
            if counted >= rank:
                return min(self.max_s, 2 ** ((number - 0.5) / _PER_OCTAVE))
        return None

    @property
    def straggler_s(self) -> float:
        """A task that takes longer is a straggler; infinite until enough are finished."""
        if self.tasks < STRAGGLER_MIN_TASKS:
            return math.inf
        return max(STRAGGLER_MIN_S, STRAGGLER_FACTOR * (self.quantile(0.5) or 0.0))

    @property
    def stragglers(self) -> int:
        """How many of the finished tasks took longer."""
        limit_s = self.straggler_s
        return sum(n for number, n in self.bins.items() if 2 ** ((number - 0.5) / _PER_OCTAVE) > limit_s)

    def to_json(self) -> dict[str, Any]:
        quantiles = {name: self.quantile(share) for name, share in (("p50_s", 0.5), ("p95_s", 0.95))}
        return {
            "stage": self.stage, "step": self.step, "tasks": self.tasks, "task_s": round(self.task_s, 3),
            "cpu_s": round(self.cpu_s, 3), **{n: s if s is None else round(s, 3) for n, s in quantiles.items()},
            "max_s": round(self.max_s, 3), "retries": self.retries, "losses": self.losses,
            "smaller_batches": self.smaller_batches, "stragglers": self.stragglers, "slowest": self.slowest,
            "histogram": [[round(2 ** (n / _PER_OCTAVE), 4), count] for n, count in sorted(self.bins.items())],
        }  # fmt: skip

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> StepTimes:
        """Of what `to_json` returned."""
        bins = Counter({round(_PER_OCTAVE * math.log2(stop_s)): count for stop_s, count in entry["histogram"]})
        return cls(
            entry["stage"], entry["step"], max_s=entry["max_s"], bins=bins, slowest=list(entry["slowest"]),
            **{name: entry[name] for name in _COUNTS},
        )  # fmt: skip


def merged_steps(entries: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], StepTimes]:
    """The steps of several records by stage and step: the tasks of one add to those of the other."""
    steps: dict[tuple[str, str], StepTimes] = {}
    for entry in entries:
        key = (entry["stage"], entry["step"])
        steps.setdefault(key, StepTimes(*key)).merge(StepTimes.from_json(entry))
    return steps


def find_stragglers(
    workers: Iterable[Mapping[str, Any]], steps: Mapping[tuple[str, str], StepTimes]
) -> list[dict[str, Any]]:
    """The running tasks that have taken three times the median of the finished ones of their step, longest first."""
    now = time.time()
    limits = {step: (times.straggler_s, times.quantile(0.5) or 0.0) for (_, step), times in steps.items()}
    stragglers = []
    for worker in workers:
        running_s = now - worker.get("started_at", now)
        limit_s, median_s = limits.get(worker["step"], (math.inf, 0.0))
        if running_s > limit_s:
            stragglers.append({**worker, "running_s": round(running_s, 3), "median_s": round(median_s, 3)})
    return sorted(stragglers, key=lambda entry: -entry["running_s"])[:_MAX_STRAGGLERS]
