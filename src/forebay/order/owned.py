"""A run in which every rank has slices of its own, the same in all epochs: hash sharding.

Hides how ranks that own unequal numbers of samples take equally many steps: of an epoch's S steps a rank takes its
samples evenly, so its batches differ by at most one sample, and the rank that owns most has batches of the size asked
for.
What a rank reads depends on who else is in the world; whoever wants batches that do not, takes `Run`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.order.calendar import BatchSizes, Place
from forebay.order.plan import Order
from forebay.order.run import Run, Steps

I64 = NDArray[np.int64]


class OwnedRun(Run):
    """As `Run`, for one rank: rank and world size of its methods are unused.

    Args:
        order: Of this rank's samples: slices of others count 0.
        batch_size: The most samples of any rank's batch.
        num_samples: Of every rank, int64 [W]; they fix the steps of an epoch.

    Raises:
        UsageError: If this rank owns no samples, or a limit is out of range.
    """

    def __init__(
        self,
        order: Order,
        batch_size: int,
        num_samples: Sequence[int] | I64,
        *,
        epochs: int | None = 1,
        num_steps: int | None = None,
    ) -> None:
        super().__init__([order], BatchSizes.of(batch_size), epochs=epochs)
        self._of_ranks = np.array(num_samples, np.int64)
        self._per_epoch = -(-int(np.max(num_samples)) // batch_size)
        limits = [limit for limit in (None if epochs is None else epochs * self._per_epoch, num_steps) if limit]
        self._end = min(limits) if limits else None

    @property
    def num_steps(self) -> int | None:
        """Run steps in all, the same for every rank. None: no end."""
        return self._end

    @property
    def steps_per_epoch(self) -> int:
        """The same for every rank."""
        return self._per_epoch

    def place(self, step: int) -> Place:
        """Where this rank stands before a step; samples are its own."""
        self._check(step, step)
        epoch, within = divmod(step, self._per_epoch)
        return Place(epoch, within, self._taken(within))

    def step_of(self, epoch: int, samples_taken: int) -> int:
        """The first step before which this rank stands at a place. UsageError if none does."""
        within = -(-samples_taken * self._per_epoch // self.orders[0].num_samples)
        step = epoch * self._per_epoch + within
        past = self._end is not None and step > self._end
        if min(epoch, samples_taken) < 0 or within > self._per_epoch or self._taken(within) != samples_taken or past:
            raise UsageError(
                f"run: expected a place at which a step begins, got epoch {epoch}, {samples_taken} samples taken."
            )
        return step

    def places(self, start: int, stop: int) -> tuple[I64, I64, I64]:
        """As `Run.places`."""
        self._check(start, stop)
        epochs, within = np.divmod(np.arange(start, stop, dtype=np.int64), self._per_epoch)
        return epochs, within, within * self.orders[0].num_samples // self._per_epoch

    def batch_lens(self, start: int, stop: int) -> I64:
        """As `Run.batch_lens`."""
        self._check(start, stop)
        within = np.arange(start, stop, dtype=np.int64)[:, None] % self._per_epoch
        taken = (within + 1) * self._of_ranks // self._per_epoch - within * self._of_ranks // self._per_epoch
        total: I64 = taken.sum(axis=1, dtype=np.int64)
        return total

    def steps(self, start: int, stop: int, rank: int, world_size: int) -> Steps:
        """This rank's samples of run steps [start, stop)."""
        self._check(start, stop)
        order, num_samples = self.orders[0], self.orders[0].num_samples
        edges = np.arange(start, stop + 1, dtype=np.int64)
        epochs, within = np.divmod(edges, self._per_epoch)
        taken = epochs * num_samples + within * num_samples // self._per_epoch
        slices, samples = np.empty((2, int(taken[-1] - taken[0])), np.int64)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            low, high = np.clip(taken[[0, -1]] - epoch * num_samples, 0, num_samples).tolist()
            into = slice(epoch * num_samples + low - int(taken[0]), epoch * num_samples + high - int(taken[0]))
            slices[into], samples[into] = order.places_at(epoch, np.arange(low, high, dtype=np.int64))
        return Steps(start, taken - taken[0], np.zeros_like(slices), slices, samples)

    def _taken(self, within: int) -> int:
        return within * self.orders[0].num_samples // self._per_epoch

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop or (self._end is not None and stop > self._end):
            end = "" if self._end is None else f" <= {self._end}"
            raise UsageError(f"run steps: expected 0 <= start <= stop{end}, got [{start}, {stop}).")
