"""Leases: who may use which slice now, and how far each slice got.

A plain state with no clock, no disk and no network: every method takes `now` and changes the state in
memory, so that a simulation can run it in virtual time and a journal can replay it. The promise: in an
epoch each sample is used exactly once, whatever workers join, stall, crash or come back. It holds
because a slice has at most one live lease, a use must begin exactly where the slice's offset stands,
and the epoch moves on only when every offset is at its slice's end.

Which slice a worker gets: one that it has cached; then one that somebody left half used; then the next in
the epoch's order, a keyed permutation. Memory: 8 bytes a slice and the order, 2 MB for 250 000 slices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from millrace.errors import LeaseError, UsageError
from millrace.order.bijection import derive_key, permute

# Answers to a repeated receipt are remembered for this many leases.
MAX_REMEMBERED = 65_536


@dataclass(frozen=True)
class Lease:
    """A worker's right to use a slice's samples from `start` on until `deadline` (in the clock of `now`)."""

    lease_id: str
    worker: str
    session: str
    epoch: int
    slice_index: int
    start: int
    deadline: float


@dataclass(frozen=True)
class Use:
    """One acknowledged use: samples [start, stop) of a slice in an epoch."""

    lease_id: str
    worker: str
    epoch: int
    slice_index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Waiting:
    """No lease just now: ask again after this many seconds."""

    wait_s: float


class LeaseLostError(LeaseError):
    """The lease is not live: it expired, was released, or never was this worker's."""


class LeaseTable:
    """The leases and offsets of a job.

    Args:
        samples_per_slice: int64 [S]; a slice of 0 samples counts as used from the start.
        seed: Another seed, another order of slices.
        epochs: How many times every sample is used.
        lease_s: How long a lease lives without a use or a renewal.
        max_live: Live leases that one session of a worker may hold: the one in use and the next.
    """

    def __init__(
        self,
        samples_per_slice: NDArray[np.int64],
        *,
        seed: int,
        epochs: int,
        lease_s: float,
        max_live: int = 2,
    ) -> None:
        if len(samples_per_slice) == 0 or int(samples_per_slice.sum()) == 0:
            raise UsageError(
                "schedule: expected a dataset with at least one sample, got none. "
                "Every slice may be shorter than seq_len: choose a smaller seq_len."
            )
        if epochs < 1 or lease_s <= 0:
            raise UsageError(f"schedule: expected epochs >= 1 and lease_s > 0, got {epochs} and {lease_s}.")
        self.samples = samples_per_slice.astype(np.int64)
        self.num_samples = int(self.samples.sum())
        self.seed = seed
        self.epochs = epochs
        self.lease_s = lease_s
        self.max_live = max_live
        self.leases: dict[str, Lease] = {}
        self.remembered: OrderedDict[str, Use] = OrderedDict()
        self._begin(0, np.zeros(len(self.samples), np.int64))

    def _begin(self, epoch: int, offsets: NDArray[np.int64]) -> None:
        """Starts an epoch, or resumes one at the given offsets."""
        self.epoch = epoch
        self.offsets = offsets.astype(np.int64)
        self.used = int(self.offsets.sum())
        self.num_used_slices = int((self.offsets >= self.samples).sum())
        self._holder: dict[int, str] = {}
        # Slices that came back unused or half used; a dict for its order.
        self._returned: dict[int, None] = dict.fromkeys(
            int(i) for i in np.flatnonzero((self.offsets > 0) & (self.offsets < self.samples))
        )
        self._cursor = 0
        if epoch < self.epochs:
            index = np.arange(len(self.samples), dtype=np.uint64)
            key = derive_key(self.seed, "lease slices", epoch)
            self._order = permute(index, len(self.samples), key).astype(np.int64)

    def restore(self, epoch: int, offsets: NDArray[np.int64], leases: Iterable[Lease], uses: Iterable[Use]) -> None:
        """Puts a saved state back: the offsets of an epoch, its live leases and the uses remembered."""
        self.leases.clear()
        self._begin(epoch, offsets)
        for lease in leases:
            if lease.epoch == epoch and lease.slice_index not in self._holder:
                self.leases[lease.lease_id] = lease
                self._holder[lease.slice_index] = lease.lease_id
                self._returned.pop(lease.slice_index, None)
        for use in uses:
            self._remember(use)

    @property
    def done(self) -> bool:
        """Whether every epoch is used up."""
        return self.epoch >= self.epochs

    def live(self, worker: str, session: str | None = None) -> list[Lease]:
        """The live leases of a worker, or of one session of it."""
        return [
            lease
            for lease in self.leases.values()
            if lease.worker == worker and (session is None or lease.session == session)
        ]

    def grant(
        self, worker: str, session: str, lease_id: str, cached: Iterable[int], now: float
    ) -> Lease | Waiting | None:
        """A new lease; or how long to wait; or None when all epochs are done."""
        if self.done:
            return None
        live = self.live(worker, session)
        if len(live) >= self.max_live:
            return Waiting(min(max(0.05, min(lease.deadline for lease in live) - now), 1.0))
        index = self._choose(cached)
        if index is None:
            first = min((lease.deadline for lease in self.leases.values()), default=now)
            return Waiting(min(max(0.05, first - now), self.lease_s, 1.0))
        lease = Lease(lease_id, worker, session, self.epoch, index, int(self.offsets[index]), now + self.lease_s)
        self.leases[lease_id] = lease
        self._holder[index] = lease_id
        self._returned.pop(index, None)
        return lease

    def _is_available(self, index: int) -> bool:
        return bool(self.offsets[index] < self.samples[index]) and index not in self._holder

    def _choose(self, cached: Iterable[int]) -> int | None:
        for index in cached:
            if 0 <= index < len(self.samples) and self._is_available(index):
                return index
        for index in self._returned:
            return index
        while self._cursor < len(self._order):
            index = int(self._order[self._cursor])
            if self._is_available(index):
                return index
            # Held now: if it comes back, it is found among the returned.
            self._cursor += 1
        return None

    def check_use(self, worker: str, lease_id: str, start: int, stop: int) -> Use | None:
        """What a use would record; None when exactly this use is recorded already.

        Raises:
            LeaseLostError: If the lease is not live and not this worker's.
            LeaseError: If the range does not continue the slice.
        """
        before = self.remembered.get(lease_id)
        if before is not None and (before.worker, before.start, before.stop) == (worker, start, stop):
            return None
        lease = self._own(worker, lease_id)
        offset, end = int(self.offsets[lease.slice_index]), int(self.samples[lease.slice_index])
        if start != offset or not start < stop <= end:
            raise LeaseError(
                f"use of slice {lease.slice_index}: expected samples from {offset} to at most {end}, "
                f"got [{start}, {stop}). Continue from {offset}."
            )
        return Use(lease_id, worker, lease.epoch, lease.slice_index, start, stop)

    def record_use(self, use: Use, now: float) -> Lease | None:
        """Applies a use that `check_use` allowed or that the ledger holds; the lease if it lives on.

        Raises:
            LeaseError: If it does not continue the slice: the record is of another job or broken.
        """
        index = use.slice_index
        inside = use.epoch == self.epoch and 0 <= index < len(self.samples) and not self.done
        if not inside or not int(self.offsets[index]) == use.start < use.stop <= int(self.samples[index]):
            raise LeaseError(f"recorded use {use}: it does not continue epoch {self.epoch} of this job.")
        self.offsets[index] = use.stop
        self.used += use.stop - use.start
        self._remember(use)
        lease = self.leases.get(use.lease_id)
        if use.stop == int(self.samples[index]):
            self.num_used_slices += 1
            self._returned.pop(index, None)
            # The holder is another lease only when a use is replayed after the journal was lost.
            self.leases.pop(self._holder.pop(index, ""), None)
            if self.used == self.num_samples:
                self.leases.clear()
                self._begin(self.epoch + 1, np.zeros(len(self.samples), np.int64))
            return None
        if lease is None:
            if index not in self._holder:
                self._returned[index] = None
            return None
        lease = replace(lease, deadline=now + self.lease_s)
        self.leases[lease.lease_id] = lease
        return lease

    def _remember(self, use: Use) -> None:
        self.remembered[use.lease_id] = use
        self.remembered.move_to_end(use.lease_id)
        while len(self.remembered) > MAX_REMEMBERED:
            self.remembered.popitem(last=False)

    def _own(self, worker: str, lease_id: str) -> Lease:
        lease = self.leases.get(lease_id)
        if lease is None or lease.worker != worker:
            raise LeaseLostError(
                f"lease {lease_id}: it is not live for worker {worker}; it expired or was released. "
                "Drop the rest of its slice and ask for another lease."
            )
        return lease

    def renew(self, worker: str, lease_id: str, now: float) -> Lease:
        """Moves a live lease's deadline; raises LeaseLostError."""
        lease = replace(self._own(worker, lease_id), deadline=now + self.lease_s)
        self.leases[lease_id] = lease
        return lease

    def release(self, worker: str, lease_id: str) -> Lease:
        """Gives a lease back: its slice is available from the offset reached; raises LeaseLostError."""
        lease = self._own(worker, lease_id)
        self._drop(lease)
        return lease

    def expire(self, now: float) -> list[Lease]:
        """Drops the leases whose deadline has passed, and returns them."""
        late = [lease for lease in self.leases.values() if lease.deadline <= now]
        for lease in late:
            self._drop(lease)
        return late

    def extend_all(self, now: float) -> None:
        """Gives every live lease a whole term from now: after an outage that was not the workers' doing."""
        for lease_id, lease in self.leases.items():
            self.leases[lease_id] = replace(lease, deadline=now + self.lease_s)

    def _drop(self, lease: Lease) -> None:
        del self.leases[lease.lease_id]
        del self._holder[lease.slice_index]
        if self.offsets[lease.slice_index] < self.samples[lease.slice_index]:
            self._returned[lease.slice_index] = None
