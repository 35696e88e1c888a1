"""The leases of one dataset: which worker may use which samples now, and how far each got.

Pure: no clock, disk or network; every method takes `now`. The guarantee: in an epoch each sample is used exactly once,
whatever workers join, stall, crash, lie or come back. No sample is in two live leases, a use starts exactly where its
lease stands, and the epoch ends only when every sample is used or set aside.

A lease covers samples [start, stop) of a slice. It may be cut while it is live, for an idle worker: its session
declares in each exchange a limit that it does not pass before it has the response, and the cut is made then, at the
limit or behind it. So no worker uses samples behind a cut.

Cost: independent of the numbers of slices and workers, except at the start of an epoch. Memory: some 25 bytes a slice,
1.5 KB a worker with two leases.
"""

import math
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from forebay.arrays import BOOL, I64, Array
from forebay.base import Json
from forebay.errors import LeaseError, UsageError
from forebay.ledger.chain import Used
from forebay.recent import RecentDict
from forebay.scheduler.free_ranges import FreeRanges, IsAvoided, SampleRange
from forebay.scheduler.sessions import EndedLease, LiveLease, SessionKey, SpeedEstimate, WorkerSession, WorkerSessions

MAX_VICTIMS = 8  # of the sessions that would finish last, so many are considered for a steal
MAX_ENDED = 32_768  # ended leases that are remembered, to answer repeated uses
# How often waiting sessions may ask, all together: those for which a lease is to be cut, and the others.
STEALING_ASKS_PER_S = 400.0
IDLE_ASKS_PER_S = 80.0
IDLE_TICK_S = 0.25  # the others ask at multiples of it: one wake-up for each ask would cost three times the CPU
SHORT_WAIT_S = 0.2
LONG_WAIT_S = 1.0


class LeaseLostError(LeaseError):
    """The lease is not live: it expired, was released, or never was this worker's."""


@dataclass(frozen=True)
class JobSpec:
    """A job: a dataset, and how its samples are leased.

    Args:
        name: Of the dataset, and of the job.
        samples: int64 [S], the samples of each slice.
        seed: Determines the order of slices and samples.
        epochs: How many times every sample is used.
        lease_s: How long a lease lives without contact.
        stall_s: A worker that acknowledges nothing for so long loses its leases, even if it is alive.
        max_failures: A slice that so many different workers could not read is set aside.
        steal_s: Leases are cut for an idle worker only if their worker would need longer than this.
    """

    name: str
    dataset_id: str
    samples: I64
    seed: int = 0
    epochs: int = 1
    lease_s: float = 30.0
    stall_s: float = 600.0
    max_failures: int = 3
    steal_s: float = 2.0


class PlannedSteal(NamedTuple):
    """A lease is to be cut at `target`, for an idle session."""

    lease_id: str
    target: int
    planned_at: float


class LeaseTable:
    """The leases of one dataset over its epochs."""

    def __init__(self, spec: JobSpec) -> None:
        if not spec.samples.any():
            raise UsageError(
                "scheduler: expected a dataset with at least one sample, got none. "
                "Every slice may be shorter than seq_len: choose a smaller seq_len."
            )
        self.samples = spec.samples.astype(np.int64)
        self.num_samples = int(self.samples.sum())
        self.epochs = spec.epochs
        self.lease_s = spec.lease_s
        self.stall_s = spec.stall_s
        self.steal_s = spec.steal_s
        self.sessions = WorkerSessions(spec.lease_s)
        self.leases: dict[str, LiveLease] = {}
        self.aside: dict[int, list[tuple[int, int]]] = {}  # (start, stop) by slice
        self.ended = RecentDict[str, EndedLease](MAX_ENDED)
        self.steals: dict[str, PlannedSteal] = {}
        self.waiting: set[SessionKey] = set()
        self.idle: dict[SessionKey, float] = {}  # those of them without leases, and when they last asked, latest last
        self.next_ask = -math.inf  # when the last of the waiting sessions without a steal was told to ask again
        self.free = FreeRanges(self.samples, spec.seed)
        self.used_before = 0  # samples of earlier epochs
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Start an epoch of which nothing is used; slices that were set aside stay so."""
        self.free.start_epoch(epoch)
        self.epoch = epoch
        self.used = 0
        self.leased = 0
        self.num_aside = 0
        self.used_of = np.zeros_like(self.samples)
        self.num_used_slices = int((self.samples == 0).sum())
        for session in self.sessions.all.values():
            if session.cached is not None:
                session.cached.cursor = 0
        for index in list(self.aside):
            del self.aside[index]
            self.set_aside(index)

    @property
    def done(self) -> bool:
        """Whether every epoch has ended."""
        return self.epoch >= self.epochs

    # Requests of sessions.

    def choose(
        self, session: WorkerSession, is_avoided: IsAvoided, now: float, offered: BOOL | None = None
    ) -> SampleRange | None:
        """The range that a session should get next; None if there is none now. See `FreeRanges.choose`.

        While a session is idle, those that have leases get no more; else they would take back what was cut from them.
        """
        newest = next(reversed(self.idle.values()), -math.inf)
        if self.done or (session.leases and now - newest <= 2 * LONG_WAIT_S):
            return None
        return self.free.choose(session.cached, is_avoided, offered)

    def wait(self, session: WorkerSession, now: float) -> float:
        """Record that a session waits, and plan a steal for an idle one. Seconds until it should ask again."""
        self.waiting.add(session.key)
        if not session.leases:
            self.idle.pop(session.key, None)
            self.idle[session.key] = now
        if session.steals_from not in self.steals:
            steal = None if session.leases else self._plan_steal(session, now)
            session.steals_from = steal.lease_id if steal is not None else None
            if steal is not None:
                self.steals[steal.lease_id] = steal
        min_s = min(LONG_WAIT_S, self.lease_s / 4)
        if session.steals_from is not None:
            # The longer it waits the less often it asks: its victim may have died.
            waited_s = min((now - self.steals[session.steals_from].planned_at) / 4, 2 * LONG_WAIT_S)
            wait_s = max(min(SHORT_WAIT_S, self.lease_s / 4), waited_s, len(self.steals) / STEALING_ASKS_PER_S)
            return min(wait_s, self.lease_s / 2)
        max_s = max(min_s, 1.5 * len(self.waiting) / IDLE_ASKS_PER_S)
        # A few at each tick, so that sessions that came together do not all ask together again.
        self.next_ask = min(max(self.next_ask + 1 / IDLE_ASKS_PER_S, now + min_s), now + max_s)
        wait_s = max(self.next_ask // IDLE_TICK_S * IDLE_TICK_S - now, min_s)
        return min(wait_s, self.lease_s / 2 if session.leases else 4 * self.lease_s)

    def _plan_steal(self, thief: WorkerSession, now: float) -> PlannedSteal | None:
        """The best part of another session's leases for an idle one; None if no session has enough left."""
        sessions = self.sessions
        speed = sessions.speed_of(thief)

        # Spared sessions do not count as considered: else, with many idle, only MAX_VICTIMS could steal at once.
        victims = (s for s in sessions.slowest() if s.key != thief.key and not self.steals.keys() & s.leases.keys())
        for victim in islice(victims, MAX_VICTIMS):
            victims_speed = sessions.speed_of(victim)
            remaining = victim.remaining
            if remaining / victims_speed <= self.steal_s:
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
                return PlannedSteal(lease.lease_id, target, now)
        return None

    def stop_waiting(self, session: WorkerSession) -> None:
        """A session has samples to use, or is gone: no lease has to be cut for it."""
        self.waiting.discard(session.key)
        self.idle.pop(session.key, None)
        if session.steals_from is not None:
            self.steals.pop(session.steals_from, None)
            session.steals_from = None

    def declare(self, lease: LiveLease, until: int) -> int | None:
        """The session uses nothing from `until` on before it has the response. Where to cut its lease now; None: no."""
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

    def grant(self, lease_id: str, key: SessionKey, samples: SampleRange, now: float) -> LiveLease:
        """Lease a free range."""
        _, start, stop = samples
        self.free.take(*samples)
        lease = LiveLease(lease_id, key, self.epoch, *samples, start, start, now)
        session = self.sessions.touch(key, now)
        if not session.leases:
            session.progress_at = now
            session.speed.start(now)
        self.leases[lease_id] = session.leases[lease_id] = lease
        self.leased += stop - start
        self.stop_waiting(session)
        self.sessions.update_finish(session, now)
        return lease

    def record(self, worker: str, uses: Iterable[Used], now: float) -> None:
        """Apply uses that `check_use` allowed, or that the ledger has.

        A use under an unknown lease, as after the journal was lost, is taken from the free samples. LeaseError if a
        sample is used again: the record is of another job, or corrupt.
        """
        progress = Counter[SessionKey]()
        for used in uses:
            lease = self.leases.get(used.lease_id)
            if lease is None:
                self._record_unknown(worker, used)
                continue
            if used.start != lease.position or not used.start < used.stop <= lease.stop or used.epoch != self.epoch:
                raise LeaseError(f"recorded {used}: it does not continue its lease at {lease.position}.")
            lease.position = used.stop
            lease.progress_at = now
            lease.declared_until = max(lease.declared_until, used.stop)
            num_samples = self._count(used)
            self.leased -= num_samples
            progress[lease.key] += num_samples
            if lease.position == lease.stop:
                self._end(lease)
        for key, num_samples in progress.items():
            session = self.sessions.all[key]
            session.progress_at = now
            session.speed.add(num_samples, now)
            if not session.leases:
                session.speed.since = None
            if (speed := session.speed.value) is not None:
                mean = self.sessions.mean_speed
                self.sessions.mean_speed = speed if mean is None else 0.98 * mean + 0.02 * speed
            self.sessions.update_finish(session, now)

    def _record_unknown(self, worker: str, used: Used) -> None:
        if used.epoch != self.epoch or not 0 <= used.slice < len(self.samples):
            raise LeaseError(f"recorded {used}: it is not of epoch {self.epoch} of this dataset.")
        for lease in list(self.leases.values()):
            if lease.slice_index == used.slice and lease.position < used.stop and used.start < lease.stop:
                self.release(lease.lease_id)
        if not self._take_aside(used):
            self.free.take(used.slice, used.start, used.stop)
        self._count(used)
        before = self.ended.get(used.lease_id)
        start = before.start if before is not None else used.start
        self.ended[used.lease_id] = EndedLease(worker, used.epoch, used.slice, start, used.stop, False)

    def _take_aside(self, used: Used) -> bool:
        """Take samples out of a slice set aside, as they were used after all; False if they are not there."""
        ranges = self.aside.get(used.slice, [])
        for start, stop in ranges:
            if start <= used.start and used.stop <= stop:
                ranges.remove((start, stop))
                ranges += [(a, b) for a, b in ((start, used.start), (used.stop, stop)) if a < b]
                self.num_aside -= used.stop - used.start
                return True
        return False

    def _count(self, used: Used) -> int:
        """Count the samples of a use; return how many they are."""
        num_samples = used.stop - used.start
        self.used += num_samples
        self.used_of[used.slice] += num_samples
        self.num_used_slices += bool(self.used_of[used.slice] == self.samples[used.slice])
        return num_samples

    def cut(self, lease_id: str, stop: int, now: float) -> None:
        """Move a lease's stop nearer; one that is used up to there is over."""
        lease = self.leases[lease_id]
        self._return(lease.slice_index, stop, lease.stop)
        self.leased -= lease.stop - stop
        lease.stop = stop
        self.steals.pop(lease_id, None)
        if lease.remaining == 0:
            self._end(lease)
        self.sessions.update_finish(self.sessions.all[lease.key], now)

    def release(self, lease_id: str) -> None:
        """End a lease: its unused samples are free again, or set aside with their slice."""
        lease = self.leases[lease_id]
        self.leased -= lease.remaining
        self._end(lease)
        self._return(lease.slice_index, lease.position, lease.stop)

    def _return(self, index: int, start: int, stop: int) -> None:
        if index in self.aside:
            self.aside[index].append((start, stop))
            self.num_aside += stop - start
        else:
            self.free.add(index, start, stop)

    def _end(self, lease: LiveLease) -> None:
        del self.leases[lease.lease_id]
        self.steals.pop(lease.lease_id, None)
        del self.sessions.all[lease.key].leases[lease.lease_id]
        used = (lease.worker, lease.epoch, lease.slice_index, lease.start, lease.position)
        self.ended[lease.lease_id] = EndedLease(*used, lease.position == lease.stop)

    def set_aside(self, index: int) -> None:
        """Withdraw a slice: its free samples, and any that are returned later, are not leased again."""
        if index not in self.aside:
            self.aside[index] = self.free.take_slice(index)
            self.num_aside += sum(stop - start for start, stop in self.aside[index])

    def readmit(self, index: int) -> None:
        """Free the samples of a slice that was set aside."""
        for start, stop in self.aside.pop(index, ()):
            self.num_aside -= stop - start
            self.free.add(index, start, stop)

    def is_covered(self) -> bool:
        """Whether the epoch can end: every sample is used or set aside."""
        return not self.done and self.used + self.num_aside == self.num_samples

    def end_epoch(self) -> None:
        """Start the next epoch; slices that were set aside stay so."""
        self.used_before += self.used
        self.start_epoch(self.epoch + 1)

    # Time.

    def overdue_leases(self, now: float) -> list[tuple[str, str]]:
        """The leases to take back, each with the reason."""
        overdue: list[tuple[str, str]] = []
        for session in self.sessions.all.values():
            if session.deadline <= now:
                overdue += [(lease_id, session.fault) for lease_id in session.leases]
                self.stop_waiting(session)
            elif session.leases and now - session.progress_at >= self.stall_s:
                overdue += [(lease_id, "stalled") for lease_id in session.leases]
        # A lease that an idle session waits for, and that its own neither starts nor lets be cut.
        clutched = (i for i in self.steals if now - self.leases[i].progress_at >= self.stall_s)
        return overdue + [(lease_id, "clutched") for lease_id in clutched]

    def extend_all(self, now: float) -> None:
        """Give every session a whole term from now: after an outage of the scheduler."""
        self.sessions.mean_speed = None
        for key, session in self.sessions.all.items():
            self.sessions.touch(key, now)
            session.progress_at = now
            session.speed = SpeedEstimate()
            if session.leases:
                session.speed.start(now)
            self.sessions.update_finish(session, now)
        for lease in self.leases.values():
            lease.progress_at = now

    def snapshot(self) -> Json:
        """The state that replaying all events gives, as plain values."""
        return {
            "epoch": self.epoch,
            "before": self.used_before,
            "used": _pack(self.used_of),
            "fresh": _pack(self.free.fresh),
            "returned": [[i, *item] for i, ranges in self.free.returned.items() for item in ranges],
            "aside": [[i, [(i, *item) for item in ranges]] for i, ranges in self.aside.items()],
            "leases": [[x.lease_id, x.key, x.slice_index, x.start, x.stop, x.position] for x in self.leases.values()],
            "ended": [[i, *ended] for i, ended in self.ended.items()],
        }

    def restore(self, saved: Json, now: float) -> None:
        """Put a snapshot into a new table."""
        self.used_before = saved["before"]
        if saved["epoch"] > 0:
            self.start_epoch(saved["epoch"])
        self.used_of = _unpack(saved["used"], np.int64)
        self.used = int(self.used_of.sum())
        self.num_used_slices = int((self.used_of == self.samples).sum())
        self.free.fresh = _unpack(saved["fresh"], np.bool_)
        for samples in saved["returned"]:
            self.free.add(*samples)
        self.aside = {index: [(a, b) for _, a, b in ranges] for index, ranges in saved["aside"]}
        self.num_aside = sum(stop - start for ranges in self.aside.values() for start, stop in ranges)
        for lease_id, key, index, start, stop, position in saved["leases"]:
            session = self.sessions.touch(tuple(key), now)
            lease = LiveLease(lease_id, session.key, self.epoch, index, start, stop, position, position, now)
            self.leases[lease_id] = session.leases[lease_id] = lease
            self.leased += lease.remaining
        self.ended.update((lease_id, EndedLease(*values)) for lease_id, *values in saved["ended"])


def _pack(array: Array) -> str:
    return zlib.compress(array.tobytes(), 1).hex()


def _unpack(packed: str, dtype: type[Any]) -> Array:
    return np.frombuffer(zlib.decompress(bytes.fromhex(packed)), dtype).copy()


def _is_inside(used: Used, start: int, stop: int, lease: LiveLease | EndedLease) -> bool:
    return (used.epoch, used.slice) == (lease.epoch, lease.slice_index) and start <= used.start < used.stop <= stop
