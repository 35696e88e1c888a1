"""Run steps, epochs and batch sizes: the epoch and the samples taken before each step of a run.

Handles the ends of epochs and changes of the global batch within an epoch. Memory and time depend on the number of
changes, not on the length of the run.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.errors import UsageError

_NO_END = 1 << 62  # Steps of an epoch that never ends.


@dataclass(frozen=True)
class BatchSizes:
    """The global batch, and the run steps at which it changes."""

    changes: tuple[tuple[int, int], ...]  # (run step, samples of a global batch), steps rising from 0

    def __post_init__(self) -> None:
        check_rising("batch sizes", [step for step, _ in self.changes])
        for _, size in self.changes:
            check_integer("batch size", size, 1)
        object.__setattr__(self, "changes", tuple((int(step), int(size)) for step, size in self.changes))

    @classmethod
    def of(cls, sizes: int | Sequence[tuple[int, int]]) -> "BatchSizes":
        """One size for the whole run, or (run step, size) for each change."""
        return cls(tuple(sizes) if isinstance(sizes, Sequence) else ((0, sizes),))

    @property
    def largest(self) -> int:
        return max(size for _, size in self.changes)

    def before(self, step: int) -> tuple[tuple[int, int], ...]:
        """The changes that begin before a run step: the samples of earlier steps depend on no others."""
        return tuple(change for change in self.changes if change[0] < step)


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run before a run step. In a mixture the epoch is 0, and counts begin at the run's start."""

    epoch: int
    step_in_epoch: int
    samples_taken: int  # By all ranks, of the epoch.


@dataclass(frozen=True)
class Segment:
    """Consecutive run steps of one epoch with batches of one size."""

    first: int
    num_steps: int
    size: int  # Samples of each global batch; an epoch's short last batch is a segment of its own.
    before: RunProgress  # Before `first`.


@dataclass(frozen=True)
class _Stretch:
    first: int
    size: int
    before: RunProgress  # Before `first`.
    steps_left: int  # Steps to the end of `before.epoch`, if the stretch is that long.
    per_epoch: int  # Steps of each later epoch.


class StepIndex:
    """From run steps to epochs and samples, and back. Immutable.

    Args:
        batches: The global batch sizes.
        num_samples: Of an epoch; None for a single epoch without end.
        epochs, num_steps: Limits of the run; None for no limit.
        drop_last: Leave out the short last batch of an epoch.
    """

    def __init__(
        self, batches: BatchSizes, num_samples: int | None, *, epochs: int | None, num_steps: int | None,
        drop_last: bool,
    ) -> None:  # fmt: skip
        check_integer("epochs", epochs, 1)
        check_integer("num_steps", num_steps, 1)
        self.batches = batches
        self._num_samples = num_samples
        self._drop_last = drop_last
        self._stretches: list[_Stretch] = []
        self._firsts: list[int] = []
        self.num_steps: int | None = self._build(None if num_samples is None else epochs, num_steps)  # None: no end.

    def progress(self, step: int) -> RunProgress:
        """The progress before a step in [0, num_steps]: at an epoch's start, never at the end of the one before."""
        check_range(step, step, self.num_steps)
        return self._progress(step)

    def epoch_stop(self, step: int) -> int | None:
        """The step at which the epoch of a step in [0, num_steps) ends; None without an end."""
        epoch = self._progress(step).epoch
        for i in range(self._index(step), len(self._stretches)):
            before = self._progress(step)
            if before.epoch != epoch:
                return step  # A change of size ended the epoch.
            stop = step + self._steps_in(before.samples_taken, self._stretches[i].size)
            step = min(stop, self._stop(i) or stop)
            if step == stop:
                break
        if self._num_samples is None:
            return None
        return step if self.num_steps is None else min(step, self.num_steps)

    def segments(self, start: int, stop: int) -> Iterator[Segment]:
        """Steps [start, stop), within [0, num_steps], in order, in as few segments as possible."""
        while start < stop:
            i = self._index(start)
            size, before = self._stretches[i].size, self._progress(start)
            count = min(stop, self._stop(i) or stop) - start
            if self._num_samples is not None:
                rest = self._num_samples - before.samples_taken
                size = min(size, rest)
                count = min(count, rest // size)
            yield Segment(start, count, size, before)
            start += count

    def _build(self, epochs: int | None, limit: int | None) -> int | None:
        for i, (first, size) in enumerate(self.batches.changes):
            if limit is not None and first >= limit:
                break
            before = self._progress(first) if i else RunProgress(0, 0, 0)
            per_epoch, steps_left = self._steps_in(0, size), self._steps_in(before.samples_taken, size)
            if steps_left == 0:
                before, steps_left = RunProgress(before.epoch + 1, 0, 0), per_epoch
            if steps_left == 0 and (i == 0 or epochs is None or before.epoch < epochs):
                raise UsageError(
                    f"run: expected at least one batch an epoch, got {self._num_samples} samples for a global batch "
                    f"of {size} (from step {first}). Ask for shorter samples or smaller batches."
                )
            self._stretches.append(_Stretch(first, size, before, steps_left, per_epoch))
            self._firsts.append(first)
            if epochs is not None:
                end = first + steps_left + (epochs - 1 - before.epoch) * per_epoch
                if i + 1 == len(self.batches.changes) or end <= self.batches.changes[i + 1][0]:
                    return end if limit is None else min(end, limit)
        return limit

    def _steps_in(self, taken: int, size: int) -> int:
        if self._num_samples is None:
            return _NO_END
        rest = self._num_samples - taken
        return rest // size if self._drop_last else -(-rest // size)

    def _progress(self, step: int) -> RunProgress:
        stretch = self._stretches[self._index(step)]
        before, steps = stretch.before, step - stretch.first
        if steps < stretch.steps_left:
            return RunProgress(before.epoch, before.step_in_epoch + steps, before.samples_taken + steps * stretch.size)
        epochs, steps = divmod(steps - stretch.steps_left, max(1, stretch.per_epoch))
        return RunProgress(before.epoch + 1 + epochs, steps, steps * stretch.size)

    def _index(self, step: int) -> int:
        return bisect_right(self._firsts, step) - 1

    def _stop(self, index: int) -> int | None:
        return self._firsts[index + 1] if index + 1 < len(self._firsts) else None


def check_integer(what: str, value: Any, minimum: int) -> None:
    """Raises UsageError unless a value is None or an integer from `minimum`."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum):
        raise UsageError(f"{what}: expected an integer from {minimum}, got {value!r}.")


def check_rising(what: str, steps: Sequence[int]) -> None:
    """Raises UsageError unless run steps rise from 0."""
    for step in steps:
        check_integer(f"{what}, a run step", step, 0)
    if not steps or steps[0] != 0 or any(a >= b for a, b in itertools.pairwise(steps)):
        raise UsageError(f"{what}: expected changes at run steps that rise from 0, got steps {list(steps)}.")


def check_range(start: int, stop: int, num_steps: int | None) -> None:
    """Raises UsageError unless [start, stop) are steps of a run of so many; None: without end."""
    if not 0 <= start <= stop or (num_steps is not None and stop > num_steps):
        end = "" if num_steps is None else f" <= {num_steps}"
        raise UsageError(f"run steps: expected 0 <= start <= stop{end}, got [{start}, {stop}).")
