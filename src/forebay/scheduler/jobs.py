"""A job of the scheduler: the lease table of its dataset, failed slices, and whether it is paused."""

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.scheduler import events
from forebay.scheduler.events import Event
from forebay.scheduler.lease_holders import EndedLease, LiveLease
from forebay.scheduler.leases import LeaseTable


@dataclass(frozen=True)
class JobSettings:
    """A job's name and rules.

    Args:
        epochs: How many times every sample is used.
        lease_s: How long a lease lives without contact.
        stall_s: A worker that acknowledges nothing for so long loses its leases, even if it is alive.
        max_failures: A slice that so many different workers could not read is set aside.
        steal_s: Leases are cut for an idle worker only if their holder would need longer than this.
        priority: Workers that name no job get leases of the job with the highest one that has any; among equals of the
            one with the fewest samples assigned.
    """

    name: str
    seed: int = field(default=0, kw_only=True)
    epochs: int = field(default=1, kw_only=True)
    lease_s: float = field(default=30.0, kw_only=True)
    stall_s: float = field(default=600.0, kw_only=True)
    max_failures: int = field(default=3, kw_only=True)
    steal_s: float = field(default=2.0, kw_only=True)
    priority: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.max_failures < 1:
            raise UsageError(f"job {self.name}: expected max_failures from 1, got {self.max_failures}.")


@dataclass(frozen=True)
class JobSpec(JobSettings):
    """A job with its dataset; `samples` is int64 [S], the samples of each slice."""

    dataset_id: str
    samples: NDArray[np.int64]


class SchedulerJob:
    """One job's state."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.dataset_id = spec.dataset_id
        self.table = LeaseTable(
            spec.samples, seed=spec.seed, epochs=spec.epochs, lease_s=spec.lease_s, stall_s=spec.stall_s,
            steal_s=spec.steal_s,
        )  # fmt: skip
        self.paused = False
        self.failures: dict[int, dict[str, str]] = {}  # slice to worker to the reason
        self.reasons: dict[int, str] = {}  # of slices set aside
        self.enlisted: set[str] = set()

    @property
    def done(self) -> bool:
        """Whether every epoch has ended."""
        return self.table.done

    @property
    def num_left_out(self) -> int:
        """Samples that epochs ended without: those of slices set aside."""
        return self.table.epoch * self.table.num_samples - self.table.used_before

    @property
    def num_samples(self) -> int:
        """Samples of all epochs."""
        return self.spec.epochs * self.table.num_samples

    def due_end(self) -> Event | None:
        """The end of the epoch, if it is due."""
        table = self.table
        if not table.is_covered():
            return None
        return events.EpochEnded(self.name, table.epoch, table.used, table.ranges_aside())

    def is_doubtful(self, index: int) -> bool:
        """Whether so many workers could not read a slice that it should be set aside, and is not."""
        return len(self.failures.get(index, ())) >= self.spec.max_failures and index not in self.reasons

    def set_aside(self, index: int, reason: str) -> list[Event]:
        """Events that set aside all free ranges of a slice."""
        table = self.table
        ranges = table.aside[index] if index in table.aside else table.free.of_slice(index)
        return [events.SliceSetAside(self.name, table.epoch, index, *r[1:], reason) for r in ranges]

    def apply(self, event: Event, now: float) -> None:
        """Change the state by an event of this job."""
        table = self.table
        match event:
            case events.WorkerEnlisted(_, worker, _, _):
                self.enlisted.add(worker)
            case events.LeaseGranted(_, lease_id, worker, session, _, index, start, stop):
                table.grant(lease_id, worker, session, (index, start, stop), now)
            case events.UsesRecorded(_, worker, uses, _):
                for used in uses:
                    self.failures.pop(used.slice, None)
                table.record(worker, uses, now)
            case events.LeaseCut(_, lease_id, stop):
                table.cut(lease_id, stop, now)
            case events.LeaseReturned(_, lease_id, _):
                table.release(lease_id)
            case events.SliceFailed(_, index, worker, reason):
                self.failures.setdefault(index, {})[worker] = reason
            case events.SliceSetAside(_, _, index, _, _, reason):
                table.set_aside(index)
                self.reasons[index] = reason
            case events.SliceCleared(_, index):
                self.failures.pop(index, None)
            case events.SliceReadmitted(_, index):
                table.readmit(index)
                self.failures.pop(index, None)
                self.reasons.pop(index, None)
            case events.EpochEnded():
                table.end_epoch()
            case events.JobPaused(_, paused):
                self.paused = paused

    def snapshot(self) -> dict[str, Any]:
        """The state that replaying all events gives, as plain values."""
        return {
            "table": save_table(self.table),
            "paused": self.paused,
            "failures": [[index, workers] for index, workers in self.failures.items()],
            "reasons": [[index, reason] for index, reason in self.reasons.items()],
            "enlisted": sorted(self.enlisted),
        }

    def restore(self, saved: dict[str, Any], now: float) -> None:
        """Put a snapshot into a new job."""
        load_table(self.table, saved["table"], now)
        self.paused = saved["paused"]
        self.failures = {index: dict(workers) for index, workers in saved["failures"]}
        self.reasons = dict(saved["reasons"])
        self.enlisted = set(saved["enlisted"])


def save_table(table: LeaseTable) -> dict[str, Any]:
    """The state of a table that replaying all events gives, as plain values."""
    return {
        "epoch": table.epoch,
        "before": table.used_before,
        "used": _pack(table.used_of),
        "fresh": _pack(table.free.fresh),
        "returned": [[i, start, stop] for (i, start), stop in table.free.returned.items()],
        "aside": [[i, ranges] for i, ranges in table.aside.items()],
        "leases": [
            [x.lease_id, x.worker, x.session, x.slice_index, x.start, x.stop, x.position] for x in table.leases.values()
        ],
        "ended": [
            [i, e.worker, e.epoch, e.slice_index, e.start, e.reached, e.is_complete] for i, e in table.ended.items()
        ],
    }


def load_table(table: LeaseTable, saved: dict[str, Any], now: float) -> None:
    """Put a snapshot into a new table."""
    table.used_before = saved["before"]
    if saved["epoch"] > 0:
        table.start_epoch(saved["epoch"])
    table.used_of = _unpack(saved["used"], np.int64)
    table.used = int(table.used_of.sum())
    table.num_used_slices = int((table.used_of == table.samples).sum())
    table.free.fresh = _unpack(saved["fresh"], np.bool_)
    for index, start, stop in saved["returned"]:
        table.free.add(index, start, stop)
    table.aside = {index: [(i, a, b) for i, a, b in ranges] for index, ranges in saved["aside"]}
    table.num_aside = sum(stop - start for ranges in table.aside.values() for _, start, stop in ranges)
    for lease_id, worker, session, index, start, stop, position in saved["leases"]:
        holder = table.touch((worker, session), now)
        lease = LiveLease(lease_id, worker, session, table.epoch, index, start, stop, position, position, now)
        table.leases[lease_id] = holder.leases[lease_id] = lease
        table.leased += lease.remaining
    for lease_id, *values in saved["ended"]:
        table.ended[lease_id] = EndedLease(*values)


def _pack(array: NDArray[Any]) -> str:
    return zlib.compress(array.tobytes(), 1).hex()


def _unpack(packed: str, dtype: type[Any]) -> NDArray[Any]:
    return np.frombuffer(zlib.decompress(bytes.fromhex(packed)), dtype).copy()
