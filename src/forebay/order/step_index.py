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

_NO_END = 1 << 62  # Samples of an epoch that never ends.


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
    num_samples: int  # In an epoch.


class StepIndex:
    """From run steps to epochs and samples, and back. Immutable.

    Args:
        batches: The global batch sizes.
        num_samples: (epoch, samples of each epoch from there on), epochs rising from 0; none for an epoch without end.
        epochs, num_steps: Limits of the run; None for no limit.
        drop_last: Leave out the short last batch of an epoch.
    """

    def __init__(
        self, batches: BatchSizes, num_samples: Sequence[tuple[int, int]], *, epochs: int | None,
        num_steps: int | None, drop_last: bool,
    ) -> None:  # fmt: skip
        check_integer("epochs", epochs, 1)
        check_integer("num_steps", num_steps, 1)
        self.batches = batches
        self._num_samples = num_samples or [(0, _NO_END)]
        self._drop_last = drop_last
        self._stretches: list[_Stretch] = []
        self._firsts: list[int] = []
        self.num_steps: int | None = self._build(epochs if num_samples else None, num_steps)  # None: no end.

    def progress(self, step: int) -> RunProgress:
        """The progress before a step in [0, num_steps]: at an epoch's start, never at the end of the one before."""
        check_range(step, step, self.num_steps)
        return self._progress(step)

    def epoch_stop(self, step: int) -> int | None:
        """The step at which the epoch of a step in [0, num_steps) ends; None without an end."""
        if self._num_samples[0][1] == _NO_END:
            return None
        epoch = self._progress(step).epoch
        segments = self.segments(step, self.num_steps or _NO_END)
        return next((segment.first for segment in segments if segment.before.epoch != epoch), self.num_steps)

    def segments(self, start: int, stop: int) -> Iterator[Segment]:
        """Steps [start, stop), within [0, num_steps], in order, in as few segments as possible."""
        while start < stop:
            i = self._index(start)
            before = self._progress(start)
            rest = self._stretches[i].num_samples - before.samples_taken
            size = min(self._stretches[i].size, rest)
            count = min(min(stop, self._stop(i) or stop) - start, rest // size)
            yield Segment(start, count, size, before)
            start += count

    def _build(self, epochs: int | None, limit: int | None) -> int | None:
        first: int | None = 0
        while first is not None and (limit is None or first < limit):
            size = [size for step, size in self.batches.changes if step <= first][-1]
            stretch = self._stretch(first, size, self._progress(first) if first else RunProgress(0, 0, 0))
            if stretch.steps_left == 0:
                stretch = self._stretch(first, size, RunProgress(stretch.before.epoch + 1, 0, 0))
            epoch, end = stretch.before.epoch, first + stretch.steps_left
            if stretch.steps_left == 0 and (first == 0 or epochs is None or epoch < epochs):
                raise UsageError(
                    f"run: expected at least one batch an epoch, got {stretch.num_samples} samples for a global batch "
                    f"of {size} (from step {first}). Ask for shorter samples or smaller batches."
                )
            self._stretches.append(stretch)
            self._firsts.append(first)
            later = [step for step, _ in self.batches.changes if step > first]
            later += [end + (other - 1 - epoch) * stretch.per_epoch for other, _ in self._num_samples if other > epoch]
            first = min(later, default=None)
            if epochs is not None:
                end += (epochs - 1 - epoch) * stretch.per_epoch
                if first is None or end <= first:
                    return end if limit is None else min(end, limit)
        return limit

    def _stretch(self, first: int, size: int, before: RunProgress) -> _Stretch:
        number = [number for epoch, number in self._num_samples if epoch <= before.epoch][-1]
        steps_left = self._steps_in(number - before.samples_taken, size)
        return _Stretch(first, size, before, steps_left, self._steps_in(number, size), number)

    def _steps_in(self, num_samples: int, size: int) -> int:
        return num_samples // size if self._drop_last else -(-num_samples // size)

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
