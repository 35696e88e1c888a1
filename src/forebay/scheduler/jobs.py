"""A job of the desk: its datasets, whose turn it is by weight, what failed, whether it is paused."""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.ledger.receipts import Used
from forebay.scheduler import events
from forebay.scheduler.events import Event
from forebay.scheduler.free_ranges import SampleRange
from forebay.scheduler.lease_holders import EndedLease, LiveLease
from forebay.scheduler.leases import LeaseTable


def save(table: LeaseTable) -> dict[str, Any]:
    """All that replaying events from the beginning would give, as plain values."""
    return {
        "epoch": table.epoch,
        "before": table.before,
        "used": np.packbits(table.used_of >= table.samples).tobytes().hex(),
        "partly": [
            [int(i), int(table.used_of[i])]
            for i in np.flatnonzero((table.used_of > 0) & (table.used_of < table.samples))
        ],
        "fresh": np.packbits(table.parts.fresh).tobytes().hex(),
        "returned": [[i, start, stop] for (i, start), stop in table.parts.returned.items()],
        "aside": [[i, parts] for i, parts in table.aside.items()],
        "leases": [
            [x.lease_id, x.worker, x.session, x.slice_index, x.start, x.stop, x.position] for x in table.leases.values()
        ],
        "remembered": [
            [i, e.worker, e.epoch, e.slice_index, e.start, e.reached, e.whole] for i, e in table.remembered.items()
        ],
    }


def load(table: LeaseTable, saved: dict[str, Any], now: float) -> None:
    """Puts a snapshot back into a new table."""
    table.before = saved["before"]
    if saved["epoch"] > 0:
        table.begin(saved["epoch"])
    whole = _bits(saved["used"], len(table.samples))
    table.used_of = np.where(whole, table.samples, 0)
    for index, num in saved["partly"]:
        table.used_of[index] = num
    table.used = int(table.used_of.sum())
    table.num_used_slices = int(whole.sum())
    table.parts.fresh = _bits(saved["fresh"], len(table.samples))
    for index, start, stop in saved["returned"]:
        table.parts.give(index, start, stop)
    table.aside = {index: [(i, a, b) for i, a, b in parts] for index, parts in saved["aside"]}
    table.num_aside = sum(stop - start for parts in table.aside.values() for _, start, stop in parts)
    for lease_id, worker, session, index, start, stop, position in saved["leases"]:
        owner = table.owners.at((worker, session), table.lease_s, now)
        lease = LiveLease(lease_id, worker, session, table.epoch, index, start, stop, position, position, now)
        table.leases[lease_id] = owner.leases[lease_id] = lease
        table.leased += lease.left
    for lease_id, *values in saved["remembered"]:
        table.remembered[lease_id] = EndedLease(*values)


def _bits(packed: str, count: int) -> NDArray[np.bool_]:
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(packed), np.uint8), count=count)
    return bits.astype(np.bool_)


@dataclass(frozen=True)
class JobSource:
    """A dataset of a job: `samples` is int64 [S], the samples of each slice; `weight` its share in a mixture."""

    name: str
    dataset_id: str
    samples: NDArray[np.int64]
    weight: float = 1.0


@dataclass(frozen=True)
class JobSpec:
    """What a job is.

    Args:
        sources: One dataset, or several as a mixture: weights, in samples, say whose turn it is; each is used
            `epochs` times all the same. One of weight 0 waits until a change gives it some.
        changes: (samples used by the job, weight of each source): weights that hold from there on.
        priority: Workers that name no job get leases of the job with the highest one that has any; among
            equals by `weight`, in samples.
        stall_s: A worker that acknowledges nothing for so long loses its leases, however alive it is.
        max_failures: A slice on which so many different workers failed is set aside.
        steal_s: Leases are cut for an idle worker only if their owner would need longer than this.
    """

    name: str
    sources: tuple[JobSource, ...]
    seed: int = 0
    epochs: int = 1
    lease_s: float = 30.0
    stall_s: float = 600.0
    max_failures: int = 3
    steal_s: float = 2.0
    priority: int = 0
    weight: float = 1.0
    changes: tuple[tuple[int, tuple[float, ...]], ...] = field(default=())

    def __post_init__(self) -> None:
        ids = [source.dataset_id for source in self.sources]
        if not ids or len(set(ids)) != len(ids):
            raise UsageError(f"job {self.name}: expected datasets, each once, got {[s.name for s in self.sources]}.")
        if self.weight <= 0 or self.max_failures < 1:
            raise UsageError(f"job {self.name}: expected weight > 0 and max_failures >= 1.")
        check_weights(self.name, [source.weight for source in self.sources], len(ids))
        for at, weights in self.changes:
            if at < 0:
                raise UsageError(f"job {self.name}: weights change at a sample from 0, got {at}.")
            check_weights(self.name, weights, len(ids))


def check_weights(job: str, weights: Sequence[float], num_sources: int) -> None:
    """Raises UsageError unless there is a weight for each source, from 0, and one above it."""
    good = all(math.isfinite(w) and w >= 0 for w in weights) and any(weights)
    if len(weights) != num_sources or not good:
        raise UsageError(
            f"job {job}: expected {num_sources} weights from 0, one of them above 0, got {list(weights)}. "
            "Give one for each dataset."
        )


class SchedulerJob:
    """One job's state. `slice_index` counts over all its datasets, as in the ledger."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.tables = [
            LeaseTable(
                source.samples,
                seed=spec.seed,
                epochs=spec.epochs,
                lease_s=spec.lease_s,
                stall_s=spec.stall_s,
                steal_s=spec.steal_s,
            )
            for source in spec.sources
        ]
        self.bases = [0]
        for source in spec.sources:
            self.bases.append(self.bases[-1] + len(source.samples))
        self.paused = False
        self.weights: tuple[float, ...] = tuple(source.weight for source in spec.sources)
        self.changes = sorted(spec.changes)
        self._since = [0] * len(self.tables)
        # slice -> worker -> why it could not have it
        self.failures: dict[int, dict[str, str]] = {}
        self.reasons: dict[int, str] = {}  # Of slices set aside.
        self.enlisted: set[str] = set()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def done(self) -> bool:
        """Whether every dataset that has weight, or will have, is used up."""
        if any(not t.done for t, w in zip(self.tables, self.weights) if w > 0):
            return False
        return not any(not t.done and any(w[i] > 0 for _, w in self.changes) for i, t in enumerate(self.tables))

    @property
    def num_left_out(self) -> int:
        """Samples that epochs ended without: those of slices set aside."""
        return sum(t.epoch * t.num_samples - t.before for t in self.tables)

    @property
    def used(self) -> int:
        """Samples used over all epochs."""
        return sum(table.total_used for table in self.tables)

    @property
    def given(self) -> int:
        """Samples used or leased."""
        return sum(self._given(i) for i in range(len(self.tables)))

    @property
    def num_samples(self) -> int:
        """Samples of all epochs."""
        return self.spec.epochs * sum(table.num_samples for table in self.tables)

    def place(self, slice_index: int) -> tuple[int, int]:
        """A slice of the job as (dataset, slice of it)."""
        dataset = bisect.bisect_right(self.bases, slice_index) - 1
        return dataset, slice_index - self.bases[dataset]

    def has(self, slice_index: int) -> bool:
        return 0 <= slice_index < self.bases[-1]

    def turns(self) -> list[int]:
        """The datasets with work left, whose turn it is first: by samples given since the weights changed, over weight.

        No chance in it: after n samples each has its share to within a slice or two of each.
        """
        if len(self.tables) == 1:
            return [] if self.tables[0].done else [0]
        open_now = [i for i, (t, w) in enumerate(zip(self.tables, self.weights)) if w > 0 and not t.done]
        return sorted(open_now, key=lambda i: ((self._given(i) - self._since[i]) / self.weights[i], i))

    def _given(self, dataset: int) -> int:
        table = self.tables[dataset]
        return table.total_used + table.leased

    def due_change(self) -> Event | None:
        """The change of weights whose time has come: so many samples are used, or nothing else is left to use."""
        if not self.changes:
            return None
        at, weights = self.changes[0]
        starved = all(t.done for t, w in zip(self.tables, self.weights) if w > 0)
        return events.WeightsChanged(self.name, at, weights) if self.used >= at or starved else None

    def pausing(self, paused: bool) -> list[Event]:
        """What pauses or resumes it; nothing, if it is so."""
        return [] if self.paused == paused else [events.JobPaused(self.name, paused)]

    def readmitting(self, slices: Sequence[int] | None) -> list[Event]:
        """What readmits slices, of those set aside; None: all."""
        wanted = list(self.reasons) if slices is None else slices
        return [events.SliceReadmitted(self.name, index) for index in wanted if index in self.reasons]

    def reweighting(self, weights: Mapping[str, float], at: int | None) -> list[Event]:
        """What gives its datasets other weights, by name, from the `at`-th sample used on."""
        names = [source.name for source in self.spec.sources]
        if set(weights) - set(names):
            raise UsageError(f"job {self.name}: expected weights of {', '.join(names)}, got {', '.join(weights)}.")
        given = tuple(float(weights.get(name, old)) for name, old in zip(names, self.weights))
        check_weights(self.name, given, len(names))
        return [events.WeightsChanged(self.name, self.used if at is None else at, given)]

    def ended(self, dataset: int) -> Event | None:
        """The end of a dataset's epoch, if it is there."""
        table = self.tables[dataset]
        if not table.covered():
            return None
        return events.EpochEnded(self.name, dataset, table.epoch, table.used, table.parts_aside())

    def is_doubtful(self, slice_index: int) -> bool:
        """Whether so many workers could not read a slice that it should be set aside, and is not."""
        failures = self.failures.get(slice_index, ())
        return len(failures) >= self.spec.max_failures and slice_index not in self.reasons

    def set_aside(self, slice_index: int, reason: str) -> list[Event]:
        """A slice is poisoned: what of it is to be had is set aside."""
        dataset, local = self.place(slice_index)
        table = self.tables[dataset]
        parts = table.parts.of_slice(local) if local not in table.aside else table.aside[local]
        return [events.SliceSetAside(self.name, table.epoch, slice_index, *part[1:], reason) for part in parts]

    def still_aside(self, dataset: int) -> list[Event]:
        """What is set aside of an epoch that has just begun."""
        here = range(self.bases[dataset], self.bases[dataset + 1])
        return [event for i, why in self.reasons.items() if i in here for event in self.set_aside(i, why)]

    def apply(self, event: Event, now: float) -> None:
        """Changes the state by an event of this job."""
        match event:
            case events.WorkerEnlisted(_, worker, _, _):
                self.enlisted.add(worker)
            case events.LeaseGranted(_, lease_id, worker, session, _, index, start, stop):
                dataset, local = self.place(index)
                part: SampleRange = (local, start, stop)
                self.tables[dataset].grant(lease_id, worker, session, part, now)
            case events.UsesRecorded(_, worker, uses, _):
                self._record(worker, uses, now)
            case events.LeaseCut(_, lease_id, stop):
                self.table_of(lease_id).cut(lease_id, stop, now)
            case events.LeaseReturned(_, lease_id, _):
                self.table_of(lease_id).give_back(lease_id)
            case events.SliceFailed(_, index, worker, reason):
                self.failures.setdefault(index, {})[worker] = reason
            case events.SliceSetAside(_, _, index, _, _, reason):
                dataset, local = self.place(index)
                self.tables[dataset].set_aside(local)
                self.reasons[index] = reason
            case events.SliceCleared(_, index):
                self.failures.pop(index, None)
            case events.SliceReadmitted(_, index):
                dataset, local = self.place(index)
                self.tables[dataset].readmit(local)
                self.failures.pop(index, None)
                self.reasons.pop(index, None)
            case events.EpochEnded(_, dataset, _, _, _):
                self.tables[dataset].end_epoch()
            case events.JobPaused(_, paused):
                self.paused = paused
            case events.WeightsChanged(_, at, weights):
                self._reweight(at, weights)

    def _record(self, worker: str, uses: Sequence[Used], now: float) -> None:
        by_table: dict[int, list[Used]] = {}
        for used in uses:
            dataset, local = self.place(used.slice)
            by_table.setdefault(dataset, []).append(used if dataset == 0 else at_index(used, local))
            self.failures.pop(used.slice, None)
        for dataset, own in by_table.items():
            self.tables[dataset].record(worker, own, now)

    def _reweight(self, at: int, weights: tuple[float, ...]) -> None:
        """Weights that hold from the `at`-th sample used on: now, or kept until then."""
        self.changes = [change for change in self.changes if change != (at, weights)]
        if self.used < at and not all(t.done for t, w in zip(self.tables, self.weights) if w > 0):
            self.changes = sorted([change for change in self.changes if change[0] != at] + [(at, weights)])
            return
        self.weights = weights
        self._since = [self._given(i) for i in range(len(self.tables))]

    def table_of(self, lease_id: str) -> LeaseTable:
        """The table that has a live lease; KeyError if none has."""
        for table in self.tables:
            if lease_id in table.leases:
                return table
        raise KeyError(lease_id)

    def find(self, lease_id: str) -> tuple[int, LeaseTable] | None:
        """The dataset and table where a lease is live or remembered."""
        for dataset, table in enumerate(self.tables):
            if lease_id in table.leases or lease_id in table.remembered:
                return dataset, table
        return None

    def snapshot(self) -> dict[str, Any]:
        """All that replaying would give, as plain values."""
        return {
            "tables": [save(table) for table in self.tables],
            "paused": self.paused,
            "weights": list(self.weights),
            "changes": [[at, list(weights)] for at, weights in self.changes],
            "since": self._since,
            "failures": [[index, workers] for index, workers in self.failures.items()],
            "reasons": [[index, reason] for index, reason in self.reasons.items()],
            "enlisted": sorted(self.enlisted),
        }

    def restore(self, saved: dict[str, Any], now: float) -> None:
        """Puts a snapshot back into a new job."""
        for table, state in zip(self.tables, saved["tables"]):
            load(table, state, now)
        self.paused = saved["paused"]
        self.weights = tuple(saved["weights"])
        self.changes = [(at, tuple(weights)) for at, weights in saved["changes"]]
        self._since = list(saved["since"])
        self.failures = {index: dict(workers) for index, workers in saved["failures"]}
        self.reasons = dict(saved["reasons"])
        self.enlisted = set(saved["enlisted"])


def at_index(used: Used, local: int) -> Used:
    """A use with the slice's index within its dataset."""
    return Used(used.lease_id, used.epoch, local, used.start, used.stop, used.step, used.digest)
