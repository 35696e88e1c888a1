"""The leases of one dataset: which worker may use which samples now, and how far each got.

Pure: no clock, disk or network; every method takes `now`. The guarantee: in an epoch each sample is used exactly once,
whatever workers join, stall, crash, lie or come back. No sample is in two live leases, a use starts exactly where its
lease stands, and the epoch ends only when every sample is used or set aside.

A lease covers samples [start, stop) of a slice. It may be cut while it is live, for an idle worker: its holder declares
in each exchange a limit that it does not pass before it has the response, and the cut is made then, at the limit or
behind it. So no worker uses samples behind a cut.

Cost: independent of the numbers of slices and workers, except at the start of an epoch. Memory: some 25 bytes a slice,
1.5 KB a worker with two leases.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from forebay.errors import LeaseError, UsageError
from forebay.ledger.receipts import Used
from forebay.scheduler.free_ranges import CachedSlices, FreeRanges, SampleRange
from forebay.scheduler.lease_holders import EndedLease, HolderKey, LeaseHolder, LeaseHolders, LiveLease, SpeedEstimate

MAX_VICTIMS = 8  # of the holders that would finish last, so many are considered for a steal
MAX_ENDED = 32_768  # ended leases that are remembered, to answer repeated uses
# How often waiting holders may ask, all together: those for which a lease is to be cut, and the others.
STEALING_ASKS_PER_S = 400.0
IDLE_ASKS_PER_S = 80.0
IDLE_TICK_S = 0.25  # the others ask at multiples of it: one wake-up for each ask would cost three times the CPU
SHORT_WAIT_S = 0.2
LONG_WAIT_S = 1.0


class LeaseLostError(LeaseError):
    """The lease is not live: it expired, was released, or never was this worker's."""


@dataclass(frozen=True, slots=True)
class PlannedSteal:
    """A lease is to be cut at `target`, for an idle holder."""

    lease_id: str
    target: int
    thief: HolderKey
    planned_at: float


def plan_steal(
    holders: LeaseHolders, thief: LeaseHolder, steals: dict[str, PlannedSteal], steal_s: float, now: float
) -> PlannedSteal | None:
    """The best part of another holder's leases for an idle one; None if no holder has enough left.

    Args:
        steals: The planned ones, by lease id.
        steal_s: A holder that needs no longer than this for all it has is spared.
    """
    speed = holders.speed_of(thief)

    def is_spared(holder: LeaseHolder) -> bool:
        return holder.key == thief.key or any(lease_id in steals for lease_id in holder.leases)

    # Spared holders do not count as considered: else, with many idle, only MAX_VICTIMS could steal at once.
    for victim in islice(holders.slowest(is_spared), MAX_VICTIMS):
        victims_speed, remaining = holders.speed_of(victim), victim.remaining
        if remaining / victims_speed <= steal_s:
            continue
        share = remaining * speed / (speed + victims_speed)
        # The newest lease that may go as a whole: not started, not the only one, not much more than the fair share.
        unstarted = [] if len(victim.leases) < 2 else [x for x in victim.leases.values() if not x.is_started]
        if fitting := [lease for lease in unstarted if lease.remaining <= 1.5 * share]:
            lease = fitting[-1]
            target = lease.start
        else:
            lease = max(victim.leases.values(), key=lambda lease: lease.remaining)
            target = max(lease.start, lease.stop - math.ceil(min(share, lease.remaining - 1)))
        if max(lease.position, lease.declared_until, target) < lease.stop:
            return PlannedSteal(lease.lease_id, target, thief.key, now)
    return None


class LeaseTable:
    """The leases of one dataset over its epochs.

    Args:
        samples_per_slice: int64 [S]; a slice of 0 samples counts as used from the start.
        seed: Determines the order of slices.
        epochs: How many times every sample is used.
        lease_s: How long a holder's leases live without contact.
        stall_s: How long they live without a use.
        steal_s: A holder that would finish sooner than this is not stolen from.
    """

    def __init__(
        self, samples_per_slice: NDArray[np.int64], *, seed: int, epochs: int, lease_s: float, stall_s: float = 600.0,
        steal_s: float = 2.0,
    ) -> None:  # fmt: skip
        if len(samples_per_slice) == 0 or int(samples_per_slice.sum()) == 0:
            raise UsageError(
                "scheduler: expected a dataset with at least one sample, got none. "
                "Every slice may be shorter than seq_len: choose a smaller seq_len."
            )
        if epochs < 1 or lease_s <= 0 or stall_s <= 0:
            raise UsageError(f"scheduler: expected epochs, lease_s, stall_s > 0, got {epochs}, {lease_s}, {stall_s}.")
        self.samples = samples_per_slice.astype(np.int64)
        self.num_samples = int(self.samples.sum())
        self.epochs, self.lease_s, self.stall_s, self.steal_s = epochs, lease_s, stall_s, steal_s
        self.holders = LeaseHolders()
        self.leases: dict[str, LiveLease] = {}
        self.aside: dict[int, list[SampleRange]] = {}
        self.ended: OrderedDict[str, EndedLease] = OrderedDict()
        self.steals: dict[str, PlannedSteal] = {}
        self.waiting: set[HolderKey] = set()
        self.idle: dict[HolderKey, float] = {}  # those of them without leases, and when they last asked, latest last
        self.next_ask = -math.inf  # when the last of the waiting holders without a steal was told to ask again
        self.free = FreeRanges(self.samples, seed)
        self.used_before = 0  # samples of earlier epochs
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Start an epoch of which nothing is used; slices that were set aside stay so."""
        if epoch > 0:
            self.free.start_epoch(epoch)
        self.epoch, self.used, self.leased, self.num_aside = epoch, 0, 0, 0
        self.used_of: NDArray[np.int64] = np.zeros(len(self.samples), np.int64)
        self.num_used_slices = int((self.samples == 0).sum())
        for holder in self.holders.all.values():
            if holder.cached is not None:
                holder.cached.cursor = 0
        for index in list(self.aside):
            del self.aside[index]
            self.set_aside(index)

    @property
    def done(self) -> bool:
        """Whether every epoch has ended."""
        return self.epoch >= self.epochs

    @property
    def total_used(self) -> int:
        """Samples used over all epochs, without those set aside."""
        return self.used_before + self.used

    # Requests of holders.

    def touch(self, key: HolderKey, now: float) -> LeaseHolder:
        """Extend a holder's leases by `lease_s` from now."""
        return self.holders.touch(key, self.lease_s, now)

    def choose(
        self, holder: LeaseHolder, is_avoided: Callable[[int], bool], now: float,
        offered: NDArray[np.bool_] | None = None,
    ) -> SampleRange | None:  # fmt: skip
        """The range that a holder should get next; None if there is none now. See `FreeRanges.choose`.

        While a holder is idle, those that have leases get no more; else they would take back what was cut from them.
        """
        newest = next(reversed(self.idle.values()), -math.inf)
        if self.done or (holder.leases and now - newest <= 2 * LONG_WAIT_S):
            return None
        return self.free.choose(holder.cached, is_avoided, offered)

    def wait(self, holder: LeaseHolder, now: float) -> float:
        """Record that a holder waits, and plan a steal for an idle one. Seconds until it should ask again."""
        self.waiting.add(holder.key)
        if not holder.leases:
            self.idle.pop(holder.key, None)
            self.idle[holder.key] = now
        if holder.steals_from not in self.steals:
            steal = None if holder.leases else plan_steal(self.holders, holder, self.steals, self.steal_s, now)
            holder.steals_from = steal.lease_id if steal is not None else None
            if steal is not None:
                self.steals[steal.lease_id] = steal
        min_s = min(LONG_WAIT_S, self.lease_s / 4)
        if holder.steals_from is not None:
            # The longer it waits the less often it asks: its victim may have died.
            waited_s = min((now - self.steals[holder.steals_from].planned_at) / 4, 2 * LONG_WAIT_S)
            wait_s = max(min(SHORT_WAIT_S, self.lease_s / 4), waited_s, len(self.steals) / STEALING_ASKS_PER_S)
            return min(wait_s, self.lease_s / 2)
        max_s = max(min_s, 1.5 * len(self.waiting) / IDLE_ASKS_PER_S)
        # A few at each tick, so that holders that came together do not all ask together again.
        self.next_ask = min(max(self.next_ask + 1 / IDLE_ASKS_PER_S, now + min_s), now + max_s)
        wait_s = max(self.next_ask // IDLE_TICK_S * IDLE_TICK_S - now, min_s)
        return min(wait_s, self.lease_s / 2 if holder.leases else 4 * self.lease_s)

    def stop_waiting(self, holder: LeaseHolder) -> None:
        """A holder has samples to use, or is gone: no lease has to be cut for it."""
        self.waiting.discard(holder.key)
        self.idle.pop(holder.key, None)
        if holder.steals_from is not None:
            self.steals.pop(holder.steals_from, None)
            holder.steals_from = None

    def declare(self, lease: LiveLease, until: int) -> int | None:
        """The holder uses nothing from `until` on before it has the response. Where to cut its lease now; None: no."""
        lease.declared_until = max(lease.declared_until, min(until, lease.stop))
        steal = self.steals.get(lease.lease_id)
        if steal is None:
            return None
        stop = max(lease.declared_until, lease.position, steal.target)
        return stop if stop < lease.stop else None

    def check_use(self, worker: str, used: Used, position: int | None = None) -> bool:
        """Whether a use is new; False if it is on record.

        Args:
            position: Where the lease will stand after earlier uses of the same request; None: where it stands now.

        Raises:
            LeaseLostError: If the lease is not live and not this worker's.
            LeaseError: If the range does not continue the lease.
        """
        lease = self.leases.get(used.lease_id)
        if lease is None or lease.worker != worker:
            ended = self.ended.get(used.lease_id)
            if ended is not None and ended.worker == worker and _is_inside(used, ended.start, ended.reached, ended):
                return False
            raise LeaseLostError(
                f"lease {used.lease_id}: it is not live for worker {worker}; it expired or was released. "
                "Drop the rest of its slice and ask for another lease."
            )
        if _is_inside(used, lease.start, lease.position, lease):
            return False
        position = lease.position if position is None else position
        is_same = (used.epoch, used.slice) == (lease.epoch, lease.slice_index)
        if not is_same or used.start != position or not used.start < used.stop <= lease.stop:
            raise LeaseError(
                f"use under lease {used.lease_id}: expected samples of slice {lease.slice_index} in epoch "
                f"{lease.epoch} from {position} to at most {lease.stop}, got [{used.start}, {used.stop}) of slice "
                f"{used.slice} in epoch {used.epoch}. Continue from {position}."
            )
        return True

    # Changes; the journal replays them.

    def grant(self, lease_id: str, worker: str, session: str, samples: SampleRange, now: float) -> LiveLease:
        """Lease a free range."""
        index, start, stop = samples
        self.free.take(index, start, stop)
        lease = LiveLease(lease_id, worker, session, self.epoch, index, start, stop, start, start, now)
        holder = self.touch((worker, session), now)
        if not holder.leases:
            holder.progress_at = now
            holder.speed.start(now)
        self.leases[lease_id] = holder.leases[lease_id] = lease
        self.leased += stop - start
        self.stop_waiting(holder)
        self.holders.update_finish(holder, now)
        return lease

    def record(self, worker: str, uses: Iterable[Used], now: float) -> None:
        """Apply uses that `check_use` allowed, or that the ledger has.

        A use under an unknown lease, as after the journal was lost, is taken from the free samples.

        Raises:
            LeaseError: If a sample is used again: the record is of another job, or corrupt.
        """
        progress: dict[HolderKey, int] = {}
        for used in uses:
            lease = self.leases.get(used.lease_id)
            if lease is None:
                self._record_unknown(worker, used)
                continue
            if used.start != lease.position or not used.start < used.stop <= lease.stop or used.epoch != self.epoch:
                raise LeaseError(f"recorded {used}: it does not continue its lease at {lease.position}.")
            lease.position, lease.progress_at = used.stop, now
            lease.declared_until = max(lease.declared_until, used.stop)
            self.leased -= used.stop - used.start
            progress[lease.key] = progress.get(lease.key, 0) + used.stop - used.start
            self._count(used)
            if lease.position == lease.stop:
                self._end(lease)
        for key, num_samples in progress.items():
            holder = self.holders.all[key]
            holder.progress_at = now
            holder.speed.add(num_samples, now)
            if not holder.leases:
                holder.speed.since = None
            if (speed := holder.speed.value) is not None:
                mean = self.holders.mean_speed
                self.holders.mean_speed = speed if mean is None else 0.98 * mean + 0.02 * speed
            self.holders.update_finish(holder, now)

    def _record_unknown(self, worker: str, used: Used) -> None:
        if used.epoch != self.epoch or not 0 <= used.slice < len(self.samples):
            raise LeaseError(f"recorded {used}: it is not of epoch {self.epoch} of this dataset.")
        for lease in [lease for lease in self.leases.values() if lease.slice_index == used.slice]:
            if lease.position < used.stop and used.start < lease.stop:
                self.release(lease.lease_id)
        if not self._take_aside(used):
            self.free.take(used.slice, used.start, used.stop)
        self._count(used)
        before = self.ended.get(used.lease_id)
        start = before.start if before is not None else used.start
        self._remember(used.lease_id, EndedLease(worker, used.epoch, used.slice, start, used.stop, False))

    def _take_aside(self, used: Used) -> bool:
        """Take samples out of a slice set aside, as they were used after all; False if they are not there."""
        for samples in self.aside.get(used.slice, ()):
            index, start, stop = samples
            if start <= used.start and used.stop <= stop:
                self.aside[index].remove(samples)
                self.aside[index] += [(index, a, b) for a, b in ((start, used.start), (used.stop, stop)) if a < b]
                self.num_aside -= used.stop - used.start
                return True
        return False

    def _count(self, used: Used) -> None:
        num = used.stop - used.start
        self.used += num
        self.used_of[used.slice] += num
        self.num_used_slices += bool(self.used_of[used.slice] == self.samples[used.slice])

    def cut(self, lease_id: str, stop: int, now: float) -> None:
        """Move a lease's stop nearer; one that is used up to there is over."""
        lease = self.leases[lease_id]
        self.free.add(lease.slice_index, stop, lease.stop)
        self.leased -= lease.stop - stop
        lease.stop = stop
        self.steals.pop(lease_id, None)
        if lease.remaining == 0:
            self._end(lease)
        self.holders.update_finish(self.holders.all[lease.key], now)

    def release(self, lease_id: str) -> None:
        """End a lease: its unused samples are free again, or set aside with their slice."""
        lease = self.leases[lease_id]
        self.leased -= lease.remaining
        self._end(lease)
        if lease.slice_index in self.aside:
            self.aside[lease.slice_index].append((lease.slice_index, lease.position, lease.stop))
            self.num_aside += lease.remaining
        else:
            self.free.add(lease.slice_index, lease.position, lease.stop)

    def _end(self, lease: LiveLease) -> None:
        del self.leases[lease.lease_id]
        self.steals.pop(lease.lease_id, None)
        holder = self.holders.all.get(lease.key)
        if holder is not None:
            holder.leases.pop(lease.lease_id, None)
        used = (lease.worker, lease.epoch, lease.slice_index, lease.start, lease.position)
        self._remember(lease.lease_id, EndedLease(*used, lease.position == lease.stop))

    def _remember(self, lease_id: str, ended: EndedLease) -> None:
        self.ended[lease_id] = ended
        self.ended.move_to_end(lease_id)
        while len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)

    def set_aside(self, index: int) -> None:
        """Withdraw a slice: its free samples, and any that are returned later, are not leased again."""
        if index not in self.aside:
            self.aside[index] = self.free.take_slice(index)
            self.num_aside += sum(stop - start for _, start, stop in self.aside[index])

    def readmit(self, index: int) -> None:
        """Free the samples of a slice that was set aside."""
        for samples in self.aside.pop(index, ()):
            self.num_aside -= samples[2] - samples[1]
            self.free.add(*samples)

    def ranges_aside(self) -> tuple[SampleRange, ...]:
        """The ranges set aside, rising, adjacent ones joined."""
        joined: list[SampleRange] = []
        for index, start, stop in sorted(samples for ranges in self.aside.values() for samples in ranges):
            if joined and joined[-1][0] == index and joined[-1][2] == start:
                start = joined.pop()[1]
            joined.append((index, start, stop))
        return tuple(joined)

    def is_covered(self) -> bool:
        """Whether the epoch can end: every sample is used or set aside."""
        return not self.done and self.used + self.num_aside == self.num_samples

    def end_epoch(self) -> None:
        """Start the next epoch; slices that were set aside stay so."""
        self.used_before += self.used
        self.start_epoch(self.epoch + 1)

    # Time.

    def overdue_leases(self, now: float) -> list[tuple[str, str]]:
        """The leases to take back, each with the reason. Removes holders whose deadline passed."""
        overdue: list[tuple[str, str]] = []
        for holder, is_expired in self.holders.due(now, self.stall_s / 4):
            if is_expired:
                overdue += [(lease_id, "expired") for lease_id in holder.leases]
                self.stop_waiting(holder)
                self.set_cached(holder, None)
                holder.leases.clear()
                del self.holders.all[holder.key]
            elif holder.leases and now - holder.progress_at >= self.stall_s:
                overdue += [(lease_id, "stalled") for lease_id in holder.leases]
            else:
                # A lease that an idle holder waits for, and that its own neither starts nor lets be cut.
                overdue += [
                    (lease.lease_id, "clutched")
                    for lease in holder.leases.values()
                    if lease.lease_id in self.steals and now - lease.progress_at >= self.stall_s
                ]
        return overdue

    def set_cached(self, holder: LeaseHolder, cached: NDArray[np.int64] | None) -> None:
        """The slices that a holder has cached, int64, rising; None: none."""
        if holder.cached is not None:
            self.free.cached_by[holder.cached.indexes] -= 1
        holder.cached = CachedSlices(cached) if cached is not None else None
        if cached is not None:
            self.free.cached_by[cached] += 1

    def extend_all(self, now: float) -> None:
        """Give every holder a whole term from now: after an outage of the scheduler."""
        self.holders.mean_speed = None
        for key in list(self.holders.all):
            holder = self.touch(key, now)
            holder.progress_at, holder.speed = now, SpeedEstimate()
            if holder.leases:
                holder.speed.start(now)
            self.holders.update_finish(holder, now)
        for lease in self.leases.values():
            lease.progress_at = now


def _is_inside(used: Used, start: int, stop: int, lease: LiveLease | EndedLease) -> bool:
    return (used.epoch, used.slice) == (lease.epoch, lease.slice_index) and start <= used.start < used.stop <= stop
