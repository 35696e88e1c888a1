"""Batches of leased samples: the order is that in which schedulers grant them, and how fast workers are decides it.

A batch takes what it lacks from the next lease, if one is here or being fetched, and is short otherwise; its weight
says so. Samples are taken when a batch is formed, and used when the loop asks for the next one, or at `commit`. A batch
formed ahead whose lease was lost meanwhile is not given: it is formed again, as are those after it.
"""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.arrays import I64
from forebay.dataset.slices import open_slice
from forebay.errors import DatasetError
from forebay.lease.job import LeaseJob
from forebay.lease.session import LeaseSession, SessionSettings
from forebay.lease.state import ActiveLease, LeaseState
from forebay.load.batch import NumpyRows, NumpyTokens, new_batch
from forebay.load.collate import Collator
from forebay.load.samples import SampleIndex
from forebay.network.retry import log_while_waiting
from forebay.order.mixture import MixtureOrder
from forebay.order.plan import lease_order

_CONTINUE_S = (
    2.0  # A batch that has samples waits no longer for the next lease; one without releases later datasets' leases.
)
_YIELD = -1
_log = logging.getLogger("forebay.worker")


class LeaseSessions:
    """A session for each dataset's job: open from the first batch until `close`; the next batch opens others."""

    cached = True

    def __init__(
        self, jobs: Sequence[LeaseJob], settings: Sequence[SessionSettings], stats: Callable[[], Mapping[str, float]]
    ) -> None:
        self.jobs = jobs
        self._settings, self._stats_of_loader = settings, stats
        self._opened: list[LeaseSession] = []
        self._past = Counter[str]()  # Of sessions that were closed.
        self._lock = threading.Lock()
        self.paused = False

    def open(self) -> list[LeaseSession]:
        """The sessions, opened unless they are open."""
        with self._lock:
            if not self._opened:
                with contextlib.ExitStack() as stack:
                    for job, settings in zip(self.jobs, self._settings):
                        self._opened.append(stack.enter_context(LeaseSession(job, settings, self._stats_of_loader)))
                    stack.pop_all()
            return self._opened

    def pause(self) -> None:
        """End the wait for a batch that is formed ahead."""
        self.paused = True
        for session in self._opened:
            with session.leases.locked():
                pass  # Wakes up what waits.

    def close(self) -> None:
        """Acknowledge what was used, and return the leases."""
        sessions, self._opened = self._opened, []
        try:
            for session in sessions:
                session.close()
        finally:
            for session in sessions:
                self._past.update(session.counts())
            for job in self.jobs:
                job.close()

    def stats(self) -> dict[str, Any]:
        """Counts of all sessions; see `LeaseSession.counts`."""
        total = Counter(self._past)
        for session in self._opened:
            total.update(session.counts())
        return dict(total)


@dataclass(eq=False)
class _OpenLease:
    source: int
    key: int
    lease: ActiveLease
    order: I64  # Samples of the slice, from the grant's start on.


@dataclass
class _Part:
    opened: _OpenLease
    start: int
    stop: int

    @property
    def samples(self) -> I64:
        first = self.opened.lease.grant.start
        return self.opened.order[self.start - first : self.stop - first]


class LeasePlanner:
    """The batches of a worker, from any step on. One thread iterates `batches`, another may call all else.

    Args:
        indexes: One a dataset, as sessions.
        mixture: The dataset of each sample of this worker's steps, by the number of samples before; None for one.
    """

    def __init__(
        self, sessions: LeaseSessions, indexes: Sequence[SampleIndex], collator: Collator, batch_size: int,
        mixture: MixtureOrder | None, num_steps: Callable[[], int | None],
    ) -> None:  # fmt: skip
        self.sessions, self._collator, self._batch_size = sessions, collator, batch_size
        self._mixture, self._num_steps = mixture, num_steps
        self._first_key = np.cumsum([0, *(len(index.counts) for index in indexes)])
        self._counts = [index.counts for index in indexes]
        self._first_ids = np.concatenate([index.bases + index.offsets for index in indexes])
        self._open: list[_OpenLease] = []  # In the order of their grants; changed by the thread that iterates.
        self._formed: dict[int, list[_Part]] = {}  # By step: not used.
        self._delivered: int | None = None  # The step of the batch that the loop has.
        self._epoch_starts: dict[int, int] = {}
        self.network_s = self.disk_s = self.scheduler_s = 0.0
        self.num_opened = self.epoch = 0

    def batches(self, step: int) -> Generator[NumpyTokens | NumpyRows, None, None]:
        """The batches from `step` on, until a job has nothing left.

        Raises:
            NetworkError: If a scheduler, or all providers, do not answer for too long.
            UsageError: If a slice does not fit the cache.
        """
        self.sessions.paused = False
        sessions = self.sessions.open()
        while (end := self._num_steps()) is None or step < end:
            parts = self._form(step)
            if parts is None:
                break
            if (batch := self._make(step, parts)) is not None:
                yield batch
                del batch
                step += 1
        for session in sessions:
            if session.failure is not None:
                raise session.failure

    def deliver(self, step: int) -> bool:
        """The loop gets the batch of a step; False if a lease of it was lost: then it does not."""
        parts = self._formed.get(step)
        if parts is None or any(part.opened.lease.ended for part in parts):
            return False
        self._delivered, self.epoch = step, parts[0].opened.lease.grant.epoch
        return True

    def commit(self) -> None:
        """The batch that the loop has was used."""
        step, self._delivered = self._delivered, None
        parts = [] if step is None else self._formed.pop(step, [])
        for source, session in enumerate(self.sessions.open() if parts else ()):
            mine = [(part.opened.lease, part.stop) for part in parts if part.opened.source == source]
            if mine and step is not None:
                session.leases.used(mine, step + 1)

    def close(self) -> None:
        """Forget all batches that were formed and not used: their samples are taken again. Nothing may iterate."""
        self._delivered = None
        steps = sorted(self._formed, reverse=True)
        for step in steps:
            self._give_back(self._formed.pop(step))
        for opened in list(self._open):
            with self._state_of(opened) as state:
                self._close_spent(state, opened)

    def forget(self) -> None:
        """Close all slices; the sessions end."""
        self.close()
        for opened in list(self._open):
            with self._state_of(opened) as state:
                self._finish(state, opened)

    def _state_of(self, opened: _OpenLease) -> contextlib.AbstractContextManager[LeaseState]:
        return self.sessions.open()[opened.source].leases.locked()

    def _give_back(self, parts: Sequence[_Part]) -> None:
        for part in reversed(parts):
            with self._state_of(part.opened) as state:
                state.give_back(part.opened.lease, part.start)

    def _form(self, step: int) -> list[_Part] | None:
        """Take the samples of a batch; None if there are none left, or the wait was interrupted."""
        requested = [self._batch_size]
        if self._mixture is not None:
            first = step * self._batch_size
            sources = self._mixture.locate(first, first + self._batch_size)[0]
            requested = np.bincount(sources, minlength=len(self._counts)).tolist()
        parts: list[_Part] = []
        for source, count in enumerate(requested):
            taken = self._take_of(source, count)
            parts += taken
            if count and not taken:
                self._give_back(parts)
                if self._mixture is not None and self.sessions.open()[source].leases.state.done:
                    _log.info("mixture: nothing is left of %s: the run ends", self.sessions.jobs[source].name)
                return None
        return parts

    def _take_of(self, source: int, count: int) -> list[_Part]:
        """Take so many samples of a dataset, or fewer at the end of its leases here; none at its end."""
        session = self.sessions.open()[source]
        parts: list[_Part] = []
        began, deadline, missing = time.perf_counter(), time.monotonic() + _CONTINUE_S, count
        waits_for_fetch = is_yielding = False

        def get() -> _Part | ActiveLease | int | None:
            """With the lock: the next samples, a lease to open, 0 for a short batch, or _YIELD; None to wait."""
            nonlocal waits_for_fetch
            state, now = session.leases.state, time.monotonic()
            for opened in [opened for opened in self._open if opened.source == source]:
                lease = opened.lease
                if (taken := state.take(lease, now, missing)) is not None:
                    return _Part(opened, *taken)
                if not self._close_spent(state, opened) and not lease.reason and lease.started < lease.stop:
                    return 0 if parts and now > deadline else None  # At the limit, until the scheduler's reply.
            if (lease_to_open := state.next_to_use()) is not None:
                return lease_to_open
            waits_for_fetch = bool(state.fetching())
            if parts and (now > deadline or not waits_for_fetch):
                return 0
            return _YIELD if now > deadline and not waits_for_fetch and not is_yielding else None

        def describe() -> str:
            with session.leases.locked() as state:
                return state.describe_wait()

        while missing:
            with log_while_waiting(_log, describe):
                item = session.leases.wait(get, lambda: self.sessions.paused)
            waited_s, began = time.perf_counter() - began, time.perf_counter()
            self.network_s += waited_s * waits_for_fetch
            self.scheduler_s += waited_s * (not waits_for_fetch)
            if isinstance(item, ActiveLease):
                self._open_lease(source, session, item)
            elif isinstance(item, _Part):
                parts.append(item)
                missing -= item.stop - item.start
            elif item is None:  # Closed or interrupted.
                self._give_back(parts)
                parts = []
                break
            elif item == _YIELD:
                is_yielding = True
                self._yield_after(source, True)
            else:
                break
        if is_yielding:
            self._yield_after(source, False)
        return parts

    def _yield_after(self, source: int, is_yielding: bool) -> None:
        """Release, or lease again, slices of the datasets after `source`: leases are waited for in the order of the
        datasets, so workers cannot deadlock.
        """
        for session in self.sessions.open()[source + 1 :]:
            with session.leases.locked() as state:
                state.yield_leases(is_yielding)

    def _open_lease(self, source: int, session: LeaseSession, lease: ActiveLease) -> None:
        grant, job = lease.grant, session.job
        try:
            row = job.dataset.table.row(grant.slice) if grant.slice < len(job.dataset.table) else None
            if row is None or (grant.dataset_id, grant.sha256) != (job.dataset.id, row.sha256):
                raise DatasetError(f"slice {grant.name}: expected one of the dataset {job.dataset.id}, got another.")
            if grant.count != self._counts[source][grant.slice]:
                expected = self._counts[source][grant.slice]
                raise DatasetError(f"slice {grant.name}: expected {expected} samples, got {grant.count}.")
            assert lease.path is not None
            slice_ = open_slice(lease.path)
            job.dataset.check_slice(row, slice_)
            key = int(self._first_key[source]) + grant.slice
            self._collator.open(key, grant.slice, slice_)
            order = lease_order(grant.seed, grant.epoch, grant.slice, grant.count, grant.start, grant.stop)
        except DatasetError as error:
            self._fail(session, lease, error)
            with session.leases.locked() as state:
                state.finish(lease)
            return
        lease.read_ids = np.empty(grant.stop - grant.start, np.int64)
        self.num_opened += 1
        self._open.append(_OpenLease(source, key, lease, order))

    def _fail(self, session: LeaseSession, lease: ActiveLease, error: DatasetError) -> None:
        _log.warning("slice %s cannot be used; its lease is returned: %s", lease.grant.name, error)
        with session.leases.locked() as state:
            state.fail(lease, str(error))

    def _close_spent(self, state: LeaseState, opened: _OpenLease) -> bool:
        """Close a slice of whose lease nothing is left to take or use. With the lock."""
        if opened.lease.is_spent:
            self._finish(state, opened)
            return True
        return False

    def _finish(self, state: LeaseState, opened: _OpenLease) -> None:
        self._open.remove(opened)
        if all(other.key != opened.key for other in self._open):
            self._collator.close(opened.key)
        state.finish(opened.lease)

    def _make(self, step: int, parts: list[_Part]) -> NumpyTokens | NumpyRows | None:
        """The batch of these samples; None if a slice is damaged: then they are given back."""
        keys = np.concatenate([np.full(part.stop - part.start, part.opened.key) for part in parts])
        samples = np.concatenate([part.samples for part in parts])
        try:
            arrays = self._collator.make(self._collator.plan(keys, samples), 0, len(keys))
        except DatasetError:
            self._fail_damaged(parts)
            return None
        for part in parts:
            lease = part.opened.lease
            first = lease.grant.start
            assert lease.read_ids is not None
            lease.read_ids[part.start - first : part.stop - first] = lease.grant.sample_base + part.samples
        sources = np.repeat([part.opened.source for part in parts], [part.stop - part.start for part in parts])
        epoch = parts[0].opened.lease.grant.epoch
        self._formed[step] = parts
        return new_batch(
            *arrays, sample_ids=self._first_ids[keys] + samples, epoch=epoch, step=step,
            epoch_step=step - self._epoch_starts.setdefault(epoch, step), weight=len(keys) / self._batch_size,
            _dataset_index=None if self._mixture is None else sources,
        )  # fmt: skip

    def _fail_damaged(self, parts: Sequence[_Part]) -> None:
        self._give_back(parts)
        for part in parts:
            keys = np.full(part.stop - part.start, part.opened.key)
            try:
                self._collator.make(self._collator.plan(keys, part.samples), 0, len(keys))
            except DatasetError as error:
                self._fail(self.sessions.open()[part.opened.source], part.opened.lease, error)
