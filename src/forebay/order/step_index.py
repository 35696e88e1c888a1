"""Run steps, epochs and batch sizes: where a run stands before each of its steps.

Hides: where epochs end, and what a change of the global batch in the middle of one does to its steps. A calendar is as
long as the list of changes, however long the run, and answers for any step at once.
"""

from __future__ import annotations

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
        changes = tuple((step, size) for step, size in self.changes)
        check_rising("batch sizes", [step for step, _ in changes])
        for _, size in changes:
            check_integer("batch size", size, 1)
        object.__setattr__(self, "changes", tuple((int(step), int(size)) for step, size in changes))

    @classmethod
    def of(cls, sizes: int | Sequence[tuple[int, int]]) -> BatchSizes:
        """One size for the whole run, or (run step, size) for each change."""
        return cls(tuple(sizes) if isinstance(sizes, Sequence) else ((0, sizes),))

    @property
    def largest(self) -> int:
        return max(size for _, size in self.changes)

    def before(self, step: int) -> tuple[tuple[int, int], ...]:
        """The changes that begin before a run step: what the samples until then depend on."""
        return tuple(change for change in self.changes if change[0] < step)


@dataclass(frozen=True)
class Place:
    """Where a run stands before a run step. In a mixture the epoch is 0, and counts go from the run's start."""

    epoch: int
    step_in_epoch: int
    samples_taken: int  # By all ranks, of the epoch.


@dataclass(frozen=True)
class Segment:
    """Run steps one after another, of one epoch and of batches of one size."""

    first: int
    num_steps: int
    size: int  # Samples of each global batch, as it is: an epoch's short last one is a segment of its own.
    place: Place  # Before `first`.


@dataclass(frozen=True)
class _Stretch:
    """Run steps from one change of the batch size to the next."""

    first: int
    size: int
    place: Place  # Before `first`.
    left: int  # Steps to the end of place.epoch, if the stretch goes on for so long.
    per_epoch: int  # Steps of each later epoch.


class Calendar:
    """The places of a run's steps. Immutable.

    An epoch has `num_samples`; None for a single epoch without end. `epochs` and `num_steps` limit the run; None for no
    limit. `drop_last` leaves out the batch that an epoch's end would make short.
    """

    def __init__(
        self,
        batches: BatchSizes,
        num_samples: int | None,
        *,
        epochs: int | None = 1,
        num_steps: int | None = None,
        drop_last: bool = False,
    ) -> None:
        check_integer("epochs", epochs, 1)
        check_integer("num_steps", num_steps, 1)
        self.batches = batches
        self._num_samples = num_samples
        self._drop_last = drop_last
        self._stretches: list[_Stretch] = []
        self._firsts: list[int] = []
        self.num_steps: int | None = self._build(None if num_samples is None else epochs, num_steps)  # None: no end.

    def place(self, step: int) -> Place:
        """Where the run stands before a step in [0, num_steps]: at an epoch's start, never at the end of the last."""
        check_range(step, step, self.num_steps)
        return self._place(step)

    def step_of(self, epoch: int, samples_taken: int) -> int:
        """The step before which the run stands at a place: undoes `place`. UsageError if no step begins there."""
        for i, stretch in enumerate(self._stretches):
            at = stretch.place
            if epoch == at.epoch:
                steps, rest = divmod(samples_taken - at.samples_taken, stretch.size)
                fits = rest == 0 and (0 <= steps < stretch.left or steps == 0)
            else:
                steps, rest = divmod(samples_taken, stretch.size)
                fits = rest == 0 and epoch > at.epoch and (0 <= steps < stretch.per_epoch or steps == 0)
                steps += stretch.left + (epoch - at.epoch - 1) * stretch.per_epoch
            step = stretch.first + steps
            # A change of size may end an epoch at once: the place before it counts too, and is the same step.
            if fits and all(limit is None or step <= limit for limit in (self._stop(i), self.num_steps)):
                return step
        raise UsageError(
            f"run: expected a place at which a step begins, got epoch {epoch}, {samples_taken} samples taken "
            f"(batch sizes by step: {list(self.batches.changes)})."
        )

    def segments(self, start: int, stop: int) -> Iterator[Segment]:
        """Steps [start, stop), within [0, num_steps], in order, as few segments as there can be."""
        while start < stop:
            i = self._index(start)
            size, place = self._stretches[i].size, self._place(start)
            count = min(stop, self._stop(i) or stop) - start
            if self._num_samples is not None:
                rest = self._num_samples - place.samples_taken
                size = min(size, rest)
                count = min(count, rest // size)
            yield Segment(start, count, size, place)
            start += count

    def _build(self, epochs: int | None, limit: int | None) -> int | None:
        """Fills in the stretches that the run reaches. Returns its number of steps."""
        for i, (first, size) in enumerate(self.batches.changes):
            if limit is not None and first >= limit:
                break
            place = self._place(first) if i else Place(0, 0, 0)
            per_epoch, left = self._steps_in(0, size), self._steps_in(place.samples_taken, size)
            if left == 0:
                place, left = Place(place.epoch + 1, 0, 0), per_epoch
            if left == 0 and (i == 0 or epochs is None or place.epoch < epochs):
                raise UsageError(
                    f"run: expected at least one batch an epoch, got {self._num_samples} samples for a global batch "
                    f"of {size} (from step {first}). Ask for shorter samples or smaller batches."
                )
            self._stretches.append(_Stretch(first, size, place, left, per_epoch))
            self._firsts.append(first)
            if epochs is not None:
                end = first + left + (epochs - 1 - place.epoch) * per_epoch
                if i + 1 == len(self.batches.changes) or end <= self.batches.changes[i + 1][0]:
                    return end if limit is None else min(end, limit)
        return limit

    def _steps_in(self, taken: int, size: int) -> int:
        """Steps from a place of an epoch to its end."""
        if self._num_samples is None:
            return _NO_END
        rest = self._num_samples - taken
        return rest // size if self._drop_last else -(-rest // size)

    def _place(self, step: int) -> Place:
        stretch = self._stretches[self._index(step)]
        at, steps = stretch.place, step - stretch.first
        if steps < stretch.left:
            return Place(at.epoch, at.step_in_epoch + steps, at.samples_taken + steps * stretch.size)
        epochs, steps = divmod(steps - stretch.left, max(1, stretch.per_epoch))
        return Place(at.epoch + 1 + epochs, steps, steps * stretch.size)

    def _index(self, step: int) -> int:
        return bisect_right(self._firsts, step) - 1

    def _stop(self, index: int) -> int | None:
        return self._firsts[index + 1] if index + 1 < len(self._firsts) else None


def check_integer(what: str, value: Any, least: int) -> None:
    """Raises UsageError unless a value is None or an integer from `least`."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least):
        raise UsageError(f"{what}: expected an integer from {least}, got {value!r}.")


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
