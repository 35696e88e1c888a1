"""A job of the scheduler: the lease tables of its datasets, their shares, failed slices, and whether it is paused."""

import bisect
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.ledger.receipts import Used
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
        priority: Workers that name no job get leases of the job with the highest one that has any; among equals by
            `weight`, in samples.
        changes: (samples used by the job, weight of each dataset): weights that hold from there on.
    """

    name: str
    seed: int = field(default=0, kw_only=True)
    epochs: int = field(default=1, kw_only=True)
    lease_s: float = field(default=30.0, kw_only=True)
    stall_s: float = field(default=600.0, kw_only=True)
    max_failures: int = field(default=3, kw_only=True)
    steal_s: float = field(default=2.0, kw_only=True)
    priority: int = field(default=0, kw_only=True)
    weight: float = field(default=1.0, kw_only=True)
    changes: tuple[tuple[int, tuple[float, ...]], ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class JobSource:
    """A dataset of a job: `samples` is int64 [S], the samples of each slice; `weight` its share in a mixture."""

    name: str
    dataset_id: str
    samples: NDArray[np.int64]
    weight: float = 1.0


@dataclass(frozen=True)
class JobSpec(JobSettings):
    """A job with its datasets.

    Args:
        sources: One dataset, or a mixture: the weights, in samples, decide which is leased next; each dataset is used
            `epochs` times. One of weight 0 waits until a change gives it some.
    """

    sources: tuple[JobSource, ...]

    def __post_init__(self) -> None:
        ids = [source.dataset_id for source in self.sources]
        if not ids or len(set(ids)) != len(ids):
            raise UsageError(f"job {self.name}: expected datasets, each once, got {[s.name for s in self.sources]}.")
        if self.weight <= 0 or self.max_failures < 1:
            raise UsageError(f"job {self.name}: expected weight > 0 and max_failures >= 1.")
        self.check_weights([source.weight for source in self.sources])
        for start_sample, weights in self.changes:
            if start_sample < 0:
                raise UsageError(f"job {self.name}: weights change at a sample from 0, got {start_sample}.")
            self.check_weights(weights)

    def check_weights(self, weights: Sequence[float]) -> None:
        """Raise UsageError unless there is a weight for each source, from 0, and one above it."""
        is_valid = all(math.isfinite(w) and w >= 0 for w in weights) and any(weights)
        if len(weights) != len(self.sources) or not is_valid:
            raise UsageError(
                f"job {self.name}: expected {len(self.sources)} weights from 0, one of them above 0, got "
                f"{list(weights)}. Give one for each dataset."
            )


class SchedulerJob:
    """One job's state. `slice_index` counts over all its datasets, as in the ledger."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        timing = {"lease_s": spec.lease_s, "stall_s": spec.stall_s, "steal_s": spec.steal_s}
        self.tables = [LeaseTable(s.samples, seed=spec.seed, epochs=spec.epochs, **timing) for s in spec.sources]
        self.bases = np.cumsum([0, *(len(source.samples) for source in spec.sources)]).tolist()
        self.paused = False
        self.weights: tuple[float, ...] = tuple(source.weight for source in spec.sources)
        self.changes = sorted(spec.changes)
        self._since = [0] * len(self.tables)  # samples assigned of each dataset when the weights changed
        self.failures: dict[int, dict[str, str]] = {}  # slice to worker to the reason
        self.reasons: dict[int, str] = {}  # of slices set aside
        self.enlisted: set[str] = set()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def done(self) -> bool:
        """Whether every dataset that has weight, or will have, is used up."""
        later = [any(weights[i] > 0 for _, weights in self.changes) for i in range(len(self.tables))]
        return all(t.done or (w <= 0 and not is_later) for t, w, is_later in zip(self.tables, self.weights, later))

    @property
    def num_left_out(self) -> int:
        """Samples that epochs ended without: those of slices set aside."""
        return sum(t.epoch * t.num_samples - t.used_before for t in self.tables)

    @property
    def used(self) -> int:
        """Samples used over all epochs."""
        return sum(table.total_used for table in self.tables)

    @property
    def num_assigned(self) -> int:
        """Samples used or leased."""
        return sum(map(self._num_assigned, range(len(self.tables))))

    @property
    def num_samples(self) -> int:
        """Samples of all epochs."""
        return self.spec.epochs * sum(table.num_samples for table in self.tables)

    def locate(self, slice_index: int) -> tuple[int, int]:
        """A slice of the job as (dataset, slice of it)."""
        dataset = bisect.bisect_right(self.bases, slice_index) - 1
        return dataset, slice_index - self.bases[dataset]

    def datasets(self) -> list[int]:
        """The datasets with samples left, the one furthest behind its share since the last change of weights first."""
        if len(self.tables) == 1:
            return [] if self.tables[0].done else [0]
        unfinished = [i for i, (t, w) in enumerate(zip(self.tables, self.weights)) if w > 0 and not t.done]
        return sorted(unfinished, key=lambda i: ((self._num_assigned(i) - self._since[i]) / self.weights[i], i))

    def _num_assigned(self, dataset: int) -> int:
        table = self.tables[dataset]
        return table.total_used + table.leased

    def _is_starved(self) -> bool:
        """Whether the datasets that have weight now are used up."""
        return all(t.done for t, w in zip(self.tables, self.weights) if w > 0)

    def due_change(self) -> Event | None:
        """The change of weights that is due: so many samples are used, or nothing else is left to use."""
        if not self.changes:
            return None
        start_sample, weights = self.changes[0]
        is_due = self.used >= start_sample or self._is_starved()
        return events.WeightsChanged(self.name, start_sample, weights) if is_due else None

    def due_end(self, dataset: int) -> Event | None:
        """The end of a dataset's epoch, if it is due."""
        table = self.tables[dataset]
        if not table.is_covered():
            return None
        return events.EpochEnded(self.name, dataset, table.epoch, table.used, table.ranges_aside())

    def reweighted(self, weights: Mapping[str, float], start_sample: int | None) -> Event:
        """The change of some datasets' weights, by name, from a sample number on; None: from now on."""
        names = [source.name for source in self.spec.sources]
        if set(weights) - set(names):
            raise UsageError(f"job {self.name}: expected weights of {', '.join(names)}, got {', '.join(weights)}.")
        new = tuple(float(weights.get(name, old)) for name, old in zip(names, self.weights))
        self.spec.check_weights(new)
        return events.WeightsChanged(self.name, self.used if start_sample is None else start_sample, new)

    def is_doubtful(self, slice_index: int) -> bool:
        """Whether so many workers could not read a slice that it should be set aside, and is not."""
        return len(self.failures.get(slice_index, ())) >= self.spec.max_failures and slice_index not in self.reasons

    def set_aside(self, slice_index: int, reason: str) -> list[Event]:
        """Events that set aside all free ranges of a slice."""
        dataset, local = self.locate(slice_index)
        table = self.tables[dataset]
        ranges = table.aside[local] if local in table.aside else table.free.of_slice(local)
        return [events.SliceSetAside(self.name, table.epoch, slice_index, *r[1:], reason) for r in ranges]

    def still_aside(self, dataset: int) -> list[Event]:
        """Events that set slices aside again in an epoch that has just started."""
        slices = range(self.bases[dataset], self.bases[dataset + 1])
        return [event for i, reason in self.reasons.items() if i in slices for event in self.set_aside(i, reason)]

    def apply(self, event: Event, now: float) -> None:
        """Change the state by an event of this job."""
        match event:
            case events.WorkerEnlisted(_, worker, _, _):
                self.enlisted.add(worker)
            case events.LeaseGranted(_, lease_id, worker, session, _, index, start, stop):
                dataset, local = self.locate(index)
                self.tables[dataset].grant(lease_id, worker, session, (local, start, stop), now)
            case events.UsesRecorded(_, worker, uses, _):
                self._record(worker, uses, now)
            case events.LeaseCut(_, lease_id, stop):
                self._table_of(lease_id).cut(lease_id, stop, now)
            case events.LeaseReturned(_, lease_id, _):
                self._table_of(lease_id).release(lease_id)
            case events.SliceFailed(_, index, worker, reason):
                self.failures.setdefault(index, {})[worker] = reason
            case events.SliceSetAside(_, _, index, _, _, reason):
                dataset, local = self.locate(index)
                self.tables[dataset].set_aside(local)
                self.reasons[index] = reason
            case events.SliceCleared(_, index):
                self.failures.pop(index, None)
            case events.SliceReadmitted(_, index):
                dataset, local = self.locate(index)
                self.tables[dataset].readmit(local)
                self.failures.pop(index, None)
                self.reasons.pop(index, None)
            case events.EpochEnded(_, dataset, _, _, _):
                self.tables[dataset].end_epoch()
            case events.JobPaused(_, paused):
                self.paused = paused
            case events.WeightsChanged(_, start_sample, weights):
                self._change_weights(start_sample, weights)

    def _record(self, worker: str, uses: Sequence[Used], now: float) -> None:
        by_table: dict[int, list[Used]] = {}
        for used in uses:
            dataset, local = self.locate(used.slice)
            by_table.setdefault(dataset, []).append(used if dataset == 0 else with_slice(used, local))
            self.failures.pop(used.slice, None)
        for dataset, own in by_table.items():
            self.tables[dataset].record(worker, own, now)

    def _change_weights(self, start_sample: int, weights: tuple[float, ...]) -> None:
        """Apply weights now, or keep them until they are due."""
        self.changes = [change for change in self.changes if change != (start_sample, weights)]
        if self.used < start_sample and not self._is_starved():
            others = [change for change in self.changes if change[0] != start_sample]
            self.changes = sorted([*others, (start_sample, weights)])
            return
        self.weights = weights
        self._since = [self._num_assigned(i) for i in range(len(self.tables))]

    def _table_of(self, lease_id: str) -> LeaseTable:
        for table in self.tables:
            if lease_id in table.leases:
                return table
        raise KeyError(lease_id)

    def find(self, lease_id: str) -> tuple[int, LeaseTable] | None:
        """The dataset and table where a lease is live, or ended lately."""
        for dataset, table in enumerate(self.tables):
            if lease_id in table.leases or lease_id in table.ended:
                return dataset, table
        return None

    def snapshot(self) -> dict[str, Any]:
        """The state that replaying all events gives, as plain values."""
        return {
            "tables": [save_table(table) for table in self.tables],
            "paused": self.paused,
            "weights": list(self.weights),
            "changes": [[start_sample, list(weights)] for start_sample, weights in self.changes],
            "since": self._since,
            "failures": [[index, workers] for index, workers in self.failures.items()],
            "reasons": [[index, reason] for index, reason in self.reasons.items()],
            "enlisted": sorted(self.enlisted),
        }

    def restore(self, saved: dict[str, Any], now: float) -> None:
        """Put a snapshot into a new job."""
        for table, state in zip(self.tables, saved["tables"]):
            load_table(table, state, now)
        self.paused = saved["paused"]
        self.weights = tuple(saved["weights"])
        self.changes = [(start_sample, tuple(weights)) for start_sample, weights in saved["changes"]]
        self._since = list(saved["since"])
        self.failures = {index: dict(workers) for index, workers in saved["failures"]}
        self.reasons = dict(saved["reasons"])
        self.enlisted = set(saved["enlisted"])


def with_slice(used: Used, slice_index: int) -> Used:
    """A use with another slice number, as within its dataset."""
    return Used(used.lease_id, used.epoch, slice_index, used.start, used.stop, used.step, used.digest)


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
