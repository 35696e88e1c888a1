"""Leases: who may use which samples of a dataset now, and how far each got.

A plain state with no clock, no disk and no network: every method takes `now`, so that a simulation can run it in
virtual time and a journal can replay it. The promise: in an epoch each sample is used exactly once, whatever workers
join, stall, crash, lie or come back. It holds because no sample is in two live leases, a use begins exactly where its
lease stands, and the epoch moves on only when every sample is used or set aside.

A lease is a slice's samples [start, stop). It may be cut while it lives, for an idle worker: its owner names in each
exchange a horizon, which it does not pass before it hears the answer, and the cut is made then, at the horizon or
behind it. So nobody ever uses what lies behind a cut.

Nothing here takes longer with more slices or more workers, but the beginning of an epoch. Memory: some 25 bytes a
slice, 1.5 KB a worker with two leases.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import LeaseError, UsageError
from forebay.ledger.receipts import Used
from forebay.scheduler.free_ranges import CachedSlices, FreeRanges, SampleRange
from forebay.scheduler.lease_holders import EndedLease, HolderKey, LeaseHolder, LeaseHolders, LiveLease, SpeedEstimate

# Who would finish last, second to last, …: so many are looked at for something to take.
CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class PlannedSteal:
    """A lease should end at `target`, for the sake of `thief`."""

    lease_id: str
    target: int
    thief: HolderKey
    at: float


def plan_steal(
    owners: LeaseHolders, thief: LeaseHolder, wished: dict[str, PlannedSteal], steal_s: float, now: float
) -> PlannedSteal | None:
    """The best piece for an idle owner; None if nobody has enough left to be worth it.

    Args:
        wished: Leases that somebody waits for already.
        steal_s: An owner that needs no longer than this for all it has is left alone.
    """
    speed = owners.speed_of(thief)

    def is_spared(owner: LeaseHolder) -> bool:
        return owner.key == thief.key or any(lease_id in wished for lease_id in owner.leases)

    # Those spared do not count: else, where many are idle, only as many could steal at once as are looked at.
    for victim in islice(owners.slowest(is_spared), CANDIDATES):
        theirs = owners.speed_of(victim)
        left = victim.left
        if left / theirs <= steal_s:
            continue
        share = left * speed / (speed + theirs)
        lease = _choose(victim, share)
        target = lease.start if _is_whole(victim, lease, share) else lease.stop - math.ceil(min(share, lease.left - 1))
        if max(lease.position, lease.horizon if lease.begun else 0, target) < lease.stop:
            return PlannedSteal(lease.lease_id, max(target, lease.start), thief.key, now)
    return None


def _is_whole(victim: LeaseHolder, lease: LiveLease, share: float) -> bool:
    """Whether to take it altogether: not begun, not all that its owner has, not much more than the fair share."""
    return not lease.begun and len(victim.leases) > 1 and lease.left <= 1.5 * share


def _choose(victim: LeaseHolder, share: float) -> LiveLease:
    """The last lease that was not begun, if it may go as a whole; else the one with most left."""
    for lease in reversed(victim.leases.values()):
        if _is_whole(victim, lease, share):
            return lease
    return max(victim.leases.values(), key=lambda lease: lease.left)


# Leases that ended are remembered, so many, to answer what is asked again.
MAX_REMEMBERED = 32_768
# How often owners that wait may ask, over all of them: those for whom a lease is to be cut, and those that only wait.
STEALING_ASKS_PER_S = 400.0
IDLE_ASKS_PER_S = 80.0
IDLE_TICK_S = 0.25  # these ask at multiples of it: a processor that wakes for each costs three times as much an ask
SHORT_WAIT_S = 0.2
LONG_WAIT_S = 1.0


class LeaseLostError(LeaseError):
    """The lease is not live: it expired, was released, or never was this worker's."""


class LeaseTable:
    """The leases of one dataset over its epochs.

    Args:
        samples_per_slice: int64 [S]; a slice of 0 samples counts as used from the start.
        seed: Another seed, another order of slices.
        epochs: How many times every sample is used.
        lease_s: How long an owner's leases live without a word of it.
        stall_s: How long without a use, however many words.
        steal_s: An owner that would be done sooner than this is not stolen from.
    """

    def __init__(
        self,
        samples_per_slice: NDArray[np.int64],
        *,
        seed: int,
        epochs: int,
        lease_s: float,
        stall_s: float = 600.0,
        steal_s: float = 2.0,
    ) -> None:
        if len(samples_per_slice) == 0 or int(samples_per_slice.sum()) == 0:
            raise UsageError(
                "schedule: expected a dataset with at least one sample, got none. "
                "Every slice may be shorter than seq_len: choose a smaller seq_len."
            )
        if epochs < 1 or lease_s <= 0 or stall_s <= 0:
            raise UsageError(f"schedule: expected epochs, lease_s, stall_s > 0, got {epochs}, {lease_s}, {stall_s}.")
        self.samples = samples_per_slice.astype(np.int64)
        self.num_samples = int(self.samples.sum())
        self.epochs, self.lease_s, self.stall_s, self.steal_s = epochs, lease_s, stall_s, steal_s
        self.owners = LeaseHolders()
        self.leases: dict[str, LiveLease] = {}
        self.aside: dict[int, list[SampleRange]] = {}
        self.remembered: OrderedDict[str, EndedLease] = OrderedDict()
        self.wishes: dict[str, PlannedSteal] = {}
        self.waiting: set[HolderKey] = set()
        # Those of them who have nothing to use, and when they last asked, the latest last.
        self.idle: dict[HolderKey, float] = {}
        self.next_ask = -math.inf  # when the last of those that only wait was told to ask again
        self.parts = FreeRanges(self.samples, seed)
        self.before = 0
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """An epoch of which nothing is used; what was set aside stays so."""
        if epoch > 0:
            self.parts.begin(epoch)
        self.epoch, self.used, self.leased, self.num_aside = epoch, 0, 0, 0
        self.used_of: NDArray[np.int64] = np.zeros(len(self.samples), np.int64)
        self.num_used_slices = int((self.samples == 0).sum())
        for owner in self.owners.all.values():
            if owner.cached is not None:
                owner.cached.at = 0
        for index in list(self.aside):
            self.aside[index] = self.parts.take_slice(index)
            self.num_aside += sum(stop - start for _, start, stop in self.aside[index])

    @property
    def done(self) -> bool:
        """Whether every epoch is used up."""
        return self.epoch >= self.epochs

    @property
    def total_used(self) -> int:
        """Samples used over all epochs, those set aside not counted."""
        return self.before + self.used

    # Asking.

    def touch(self, key: HolderKey, now: float) -> LeaseHolder:
        """A sign of life of an owner: its leases live another `lease_s`."""
        return self.owners.at(key, self.lease_s, now)

    def choose(
        self, owner: LeaseHolder, avoided: Any, now: float, offered: NDArray[np.bool_] | None = None
    ) -> SampleRange | None:
        """What an owner should get next; None if nothing is to be had now.

        While somebody is idle, who has something to do gets nothing more: it would take back what was cut from it.
        """
        newest = next(reversed(self.idle.values()), -math.inf)
        if self.done or (owner.leases and now - newest <= 2 * LONG_WAIT_S):
            return None
        return self.parts.choose(owner.cached, avoided, offered)

    def wait(self, owner: LeaseHolder, now: float) -> float:
        """Notes that an owner is idle, and whom it waits for; how long until it should ask again, seconds."""
        self.waiting.add(owner.key)
        if not owner.leases:
            self.idle.pop(owner.key, None)
            self.idle[owner.key] = now
        if owner.wish not in self.wishes:
            wish = plan_steal(self.owners, owner, self.wishes, self.steal_s, now) if not owner.leases else None
            owner.wish = wish.lease_id if wish is not None else None
            if wish is not None:
                self.wishes[wish.lease_id] = wish
        if owner.wish is not None:
            # Who has waited for long asks less often: its victim may not be heard of again.
            patient_s = min((now - self.wishes[owner.wish].at) / 4, 2 * LONG_WAIT_S)
            wait_s = max(min(SHORT_WAIT_S, self.lease_s / 4), patient_s, len(self.wishes) / STEALING_ASKS_PER_S)
            return min(wait_s, self.lease_s / 2)
        least_s = min(LONG_WAIT_S, self.lease_s / 4)
        most_s = max(least_s, 1.5 * len(self.waiting) / IDLE_ASKS_PER_S)
        # Four times a second a few, so that those who came together do not all ask together again.
        self.next_ask = min(max(self.next_ask + 1 / IDLE_ASKS_PER_S, now + least_s), now + most_s)
        wait_s = max(self.next_ask // IDLE_TICK_S * IDLE_TICK_S - now, least_s)
        # Who has leases must be heard of before they expire.
        return min(wait_s, self.lease_s / 2 if owner.leases else 4 * self.lease_s)

    def stop_waiting(self, owner: LeaseHolder) -> None:
        """An owner has something to do, or is gone: nobody needs to cut a lease for it."""
        self.waiting.discard(owner.key)
        self.idle.pop(owner.key, None)
        if owner.wish is not None:
            self.wishes.pop(owner.wish, None)
            owner.wish = None

    def declare(self, lease: LiveLease, horizon: int, now: float) -> int | None:
        """An owner uses nothing from `horizon` on before it hears more: where to cut its lease now, if wished."""
        lease.horizon = max(lease.horizon, min(horizon, lease.stop))
        wish = self.wishes.get(lease.lease_id)
        if wish is None:
            return None
        stop = max(lease.horizon, lease.position, wish.target)
        return stop if stop < lease.stop else None

    def check_use(self, worker: str, used: Used, position: int | None = None) -> bool:
        """Whether a use is new; False if it is on record.

        Args:
            position: Where the lease will stand, if more uses of it come before this one.

        Raises:
            LeaseLostError: If the lease is not live and not this worker's.
            LeaseError: If the range does not continue the lease.
        """
        lease = self.leases.get(used.lease_id)
        if lease is None or lease.worker != worker:
            ended = self.remembered.get(used.lease_id)
            if ended is not None and ended.worker == worker and _inside(used, ended.start, ended.reached, ended):
                return False
            raise LeaseLostError(
                f"lease {used.lease_id}: it is not live for worker {worker}; it expired or was released. "
                "Drop the rest of its slice and ask for another lease."
            )
        if _inside(used, lease.start, lease.position, lease):
            return False
        position = lease.position if position is None else position
        same = (used.epoch, used.slice) == (lease.epoch, lease.slice_index)
        if not same or used.start != position or not used.start < used.stop <= lease.stop:
            raise LeaseError(
                f"use under lease {used.lease_id}: expected samples of slice {lease.slice_index} in epoch "
                f"{lease.epoch} from {position} to at most {lease.stop}, got [{used.start}, {used.stop}) of slice "
                f"{used.slice} in epoch {used.epoch}. Continue from {position}."
            )
        return True

    # Changing; all of it is replayed from the journal.

    def grant(self, lease_id: str, worker: str, session: str, part: SampleRange, now: float) -> LiveLease:
        """Takes a part that is to be had, and leases it."""
        index, start, stop = part
        self.parts.take(index, start, stop)
        lease = LiveLease(lease_id, worker, session, self.epoch, index, start, stop, start, start, now)
        owner = self.owners.at((worker, session), self.lease_s, now)
        if not owner.leases:
            owner.moved_at = now
            owner.speed.begin(now)
        self.leases[lease_id] = owner.leases[lease_id] = lease
        self.leased += stop - start
        self.stop_waiting(owner)
        self.owners.saw(owner, now)
        return lease

    def record(self, worker: str, uses: Iterable[Used], now: float) -> None:
        """Applies uses that `check_use` allowed, or that the ledger holds.

        A use under a lease that is not known, as after the journal was lost, is taken from what is to be had.

        Raises:
            LeaseError: If one of them uses a sample again: the record is of another job, or broken.
        """
        moved: dict[HolderKey, int] = {}
        for used in uses:
            lease = self.leases.get(used.lease_id)
            if lease is None:
                self._record_unknown(worker, used)
                continue
            if used.start != lease.position or not used.start < used.stop <= lease.stop or used.epoch != self.epoch:
                raise LeaseError(f"recorded {used}: it does not continue its lease at {lease.position}.")
            lease.position, lease.moved_at = used.stop, now
            lease.horizon = max(lease.horizon, used.stop)
            self.leased -= used.stop - used.start
            moved[lease.key] = moved.get(lease.key, 0) + used.stop - used.start
            self._count(used)
            if lease.position == lease.stop:
                self._end(lease)
        for key, num_samples in moved.items():
            owner = self.owners.all[key]
            owner.moved_at, owner.stalled = now, False
            owner.speed.used(num_samples, now)
            if not owner.leases:
                owner.speed.rest()
            self.owners.learned(owner)
            self.owners.saw(owner, now)

    def _record_unknown(self, worker: str, used: Used) -> None:
        if used.epoch != self.epoch or not 0 <= used.slice < len(self.samples):
            raise LeaseError(f"recorded {used}: it is not of epoch {self.epoch} of this dataset.")
        for lease in [lease for lease in self.leases.values() if lease.slice_index == used.slice]:
            if lease.position < used.stop and used.start < lease.stop:
                self.give_back(lease.lease_id)
        if not self._take_aside(used):
            self.parts.take(used.slice, used.start, used.stop)
        self._count(used)
        before = self.remembered.get(used.lease_id)
        start = before.start if before is not None else used.start
        self._remember(used.lease_id, EndedLease(worker, used.epoch, used.slice, start, used.stop, whole=False))

    def _take_aside(self, used: Used) -> bool:
        """Takes samples out of a slice set aside, as they were used after all; False if they are not there."""
        for part in self.aside.get(used.slice, ()):
            index, start, stop = part
            if start <= used.start and used.stop <= stop:
                self.aside[index].remove(part)
                rest = [(index, start, used.start), (index, used.stop, stop)]
                self.aside[index] += [piece for piece in rest if piece[1] < piece[2]]
                self.num_aside -= used.stop - used.start
                return True
        return False

    def _count(self, used: Used) -> None:
        num = used.stop - used.start
        self.used += num
        self.used_of[used.slice] += num
        if self.used_of[used.slice] == self.samples[used.slice]:
            self.num_used_slices += 1

    def cut(self, lease_id: str, stop: int, now: float) -> LiveLease:
        """Moves a lease's end nearer; one that stands there already is over."""
        lease = self.leases[lease_id]
        self.parts.give(lease.slice_index, stop, lease.stop)
        self.leased -= lease.stop - stop
        lease.stop = stop
        self.wishes.pop(lease_id, None)
        owner = self.owners.all[lease.key]
        if lease.left == 0:
            self._end(lease)
        self.owners.saw(owner, now)
        return lease

    def give_back(self, lease_id: str) -> LiveLease:
        """Ends a lease: what it did not use is to be had again, or set aside with its slice."""
        lease = self.leases[lease_id]
        part = (lease.slice_index, lease.position, lease.stop)
        self.leased -= lease.left
        self._end(lease)
        if lease.slice_index in self.aside:
            self.aside[lease.slice_index].append(part)
            self.num_aside += part[2] - part[1]
        else:
            self.parts.give(*part)
        return lease

    def _end(self, lease: LiveLease) -> None:
        del self.leases[lease.lease_id]
        self.wishes.pop(lease.lease_id, None)
        owner = self.owners.all.get(lease.key)
        if owner is not None:
            owner.leases.pop(lease.lease_id, None)
        place = (lease.worker, lease.epoch, lease.slice_index, lease.start, lease.position)
        self._remember(lease.lease_id, EndedLease(*place, whole=lease.position == lease.stop))

    def _remember(self, lease_id: str, ended: EndedLease) -> None:
        self.remembered[lease_id] = ended
        self.remembered.move_to_end(lease_id)
        while len(self.remembered) > MAX_REMEMBERED:
            self.remembered.popitem(last=False)

    def set_aside(self, index: int) -> None:
        """What nobody holds or used of a slice is not leased again; nor what comes back of it."""
        if index not in self.aside:
            self.aside[index] = self.parts.take_slice(index)
            self.num_aside += sum(stop - start for _, start, stop in self.aside[index])

    def readmit(self, index: int) -> None:
        """Undoes `set_aside`, as far as the epoch of then is still under way."""
        for part in self.aside.pop(index, ()):
            self.num_aside -= part[2] - part[1]
            self.parts.give(*part)

    def parts_aside(self) -> tuple[SampleRange, ...]:
        """What is set aside, rising, pieces that touch as one."""
        found: list[SampleRange] = []
        for index, start, stop in sorted(part for parts in self.aside.values() for part in parts):
            if found and found[-1][0] == index and found[-1][2] == start:
                found[-1] = (index, found[-1][1], stop)
            else:
                found.append((index, start, stop))
        return tuple(found)

    def covered(self) -> bool:
        """Whether the epoch is over: every sample is used or set aside."""
        return not self.done and self.used + self.num_aside == self.num_samples

    def end_epoch(self) -> None:
        """Begins the next epoch; what was set aside stays so."""
        self.before += self.used
        self.begin(self.epoch + 1)

    # Time.

    def late(self, now: float) -> list[tuple[str, str]]:
        """Leases to take back, each with the reason; owners without leases that are gone are forgotten."""
        found: list[tuple[str, str]] = []
        for owner, dead in self.owners.late(now, self.stall_s / 4):
            if dead:
                found += [(lease_id, "expired") for lease_id in owner.leases]
                self.forget(owner)
            elif owner.leases and now - owner.moved_at >= self.stall_s:
                owner.stalled = True
                found += [(lease_id, "stalled") for lease_id in owner.leases]
            else:
                # A lease that others wait for, which its owner neither begins nor lets be cut.
                found += [
                    (lease.lease_id, "clutched")
                    for lease in owner.leases.values()
                    if lease.lease_id in self.wishes and now - lease.moved_at >= self.stall_s
                ]
        return found

    def forget(self, owner: LeaseHolder) -> None:
        """An owner is gone; its leases are given back by the caller."""
        self.stop_waiting(owner)
        self.know(owner, None)
        owner.leases.clear()
        self.owners.drop(owner.key)

    def know(self, owner: LeaseHolder, cached: NDArray[np.int64] | None) -> None:
        """What an owner has cached; int64, rising; None: nothing."""
        if owner.cached is not None:
            self.parts.cached_by[owner.cached.indexes] -= 1
        owner.cached = CachedSlices(cached) if cached is not None else None
        if cached is not None:
            self.parts.cached_by[cached] += 1

    def extend_all(self, now: float) -> None:
        """Gives every owner a whole term from now: after an outage that was not the workers' doing."""
        self.owners.mean_speed = None
        for key in list(self.owners.all):
            owner = self.touch(key, now)
            owner.moved_at, owner.speed = now, SpeedEstimate()
            if owner.leases:
                owner.speed.begin(now)
            self.owners.saw(owner, now)
        for lease in self.leases.values():
            lease.moved_at = now


def _inside(used: Used, start: int, stop: int, of: LiveLease | EndedLease) -> bool:
    """Whether a use lies in what a lease has on record."""
    same = (used.epoch, used.slice) == (of.epoch, of.slice_index)
    return same and start <= used.start < used.stop <= stop
