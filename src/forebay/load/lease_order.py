"""The order of leased samples: that in which schedulers grant them, and how fast workers are decides it.

A batch takes what it lacks from the next lease, if one is here or being fetched, and is short otherwise; its weight
says so. Samples are taken when a batch is planned, and used when the loop asks for the next one, or at `commit`. A
batch made ahead whose lease was lost meanwhile is not given: it is planned again, as are those after it.
"""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.arrays import I64
from forebay.fetch.cache import CacheSettings
from forebay.lease.fetching import GrantedProviders
from forebay.lease.job import LeaseJob
from forebay.lease.session import LeaseSession, SessionSettings
from forebay.lease.state import ActiveLease, LeaseState
from forebay.load.batch_planner import BatchPlanner
from forebay.load.order_source import StepPlan
from forebay.load.samples import SampleIndex
from forebay.load.slices import SliceReader
from forebay.order.mixture import MixtureOrder
from forebay.order.plan import lease_order
from forebay.order.run import Run
from forebay.storage.retry import log_while_waiting

_CONTINUE_S = (
    2.0  # A batch that has samples waits no longer for the next lease; one without releases later datasets' leases.
)
_YIELD = -1
_log = logging.getLogger("forebay.worker")


class LeaseSlices(SliceReader):
    """The slices of leases. A session for each dataset's job is open from the first batch until `close`."""

    def __init__(
        self, jobs: Sequence[LeaseJob], run: Run, cache: CacheSettings, settings: SessionSettings,
        stats: Callable[[], Mapping[str, float]],
    ) -> None:  # fmt: skip
        datasets, self._granted = [job.dataset for job in jobs], GrantedProviders()
        super().__init__(
            datasets, [True] * len(jobs), run, 0, 1, cache, False, self._granted, tries=2, timeout_s=1.0,
            max_backoff_s=1.0,
        )  # fmt: skip
        self.jobs = jobs
        self._session_settings, self._stats_of_loader = settings, stats
        self._sessions: list[LeaseSession] = []
        self._past_sessions = Counter[str]()  # Counts of those that were closed.
        self._opening = threading.Lock()
        self.paused = False

    def sessions(self) -> list[LeaseSession]:
        """The sessions, opened unless they are open."""
        with self._opening:
            if not self._sessions:
                with contextlib.ExitStack() as stack:
                    for job, first in zip(self.jobs, self.chunks.first_key.tolist()):
                        session = LeaseSession(
                            job, self._session_settings, self, self._granted, first, self._stats_of_loader
                        )
                        self._sessions.append(stack.enter_context(session))
                    stack.pop_all()
            return self._sessions

    def pause(self) -> None:
        """End the wait for a batch that is made ahead."""
        self.paused = True
        for session in self._sessions:
            with session.leases.locked():
                pass  # Wakes up what waits.

    def close(self) -> None:
        """Acknowledge what was used, and return the leases."""
        sessions, self._sessions = self._sessions, []
        try:
            for session in sessions:
                session.close()
        finally:
            for session in sessions:
                self._past_sessions.update(session.counts())
            for job in self.jobs:
                job.close()
            super().close()

    def stats(self) -> dict[str, Any]:
        """Counts of the feed and of all sessions; see `LeaseSession.counts`."""
        total, counts = Counter(self._past_sessions), super().stats()
        for session in self._sessions:
            total.update(session.counts())
        return {**counts, "fetched_bytes_of_workers": max(0, counts["fetched_bytes"] - self.bytes_of_last()), **total}


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


class LeaseOrder:
    """The samples of a worker's steps. One thread plans, another may call all else.

    Args:
        indexes: One a dataset, as the jobs of `slices`.
        batch_size: Samples of a step.
        mixture: The dataset of each sample of this worker's steps, by the number of samples before; None for one.
    """

    is_known = False
    every = 0, 1
    planner: BatchPlanner
    """Whose waits it counts, and whose slices it closes; set by who makes both."""

    def __init__(
        self, slices: LeaseSlices, indexes: Sequence[SampleIndex], batch_size: int, mixture: MixtureOrder | None
    ) -> None:
        self._slices, self._batch_size, self._mixture = slices, batch_size, mixture
        self.num_steps: int | None = None
        self._first_key = np.cumsum([0, *(len(index.counts) for index in indexes)])
        self._counts = [index.counts for index in indexes]
        self._first_ids = np.concatenate([index.bases + index.offsets for index in indexes])
        self._open: list[_OpenLease] = []  # In the order of their grants; changed by the thread that plans.
        self._formed: dict[int, list[_Part]] = {}  # By step: not used.
        self._delivered: int | None = None  # The step of the batch that the loop has.
        self._epoch_starts: dict[int, int] = {}
        self.epoch = 0

    def plan(self, step: int, num_steps: int) -> StepPlan | None:
        """The samples of a step, until a job has nothing left.

        Raises:
            NetworkError: If a scheduler, or all providers, do not answer for too long.
            UsageError: If a slice does not fit the cache.
        """
        parts = None if self.num_steps is not None and step >= self.num_steps else self._form(step)
        if parts is None:
            for session in self._slices.sessions():
                if session.failure is not None:
                    raise session.failure
            return None
        sizes = [part.stop - part.start for part in parts]
        keys = np.repeat([part.opened.key for part in parts], sizes)
        samples = np.concatenate([part.samples for part in parts])
        for part in parts:
            lease, first = part.opened.lease, part.opened.lease.grant.start
            assert lease.read_ids is not None
            lease.read_ids[part.start - first : part.stop - first] = lease.grant.sample_base + part.samples
        epoch = parts[0].opened.lease.grant.epoch
        self._formed[step] = parts
        return StepPlan(
            [step], step + 1, [0, len(keys)], keys, samples, self._first_ids[keys] + samples,
            None if self._mixture is None else np.repeat([part.opened.source for part in parts], sizes), [epoch],
            [step - self._epoch_starts.setdefault(epoch, step)], [len(keys) / self._batch_size],
        )  # fmt: skip

    def replace(self, plan: StepPlan, damaged: Mapping[int, str]) -> bool:
        parts = self._formed.pop(plan.steps[0], [])
        self._give_back(parts)
        for part in parts:
            if part.opened.key in damaged:
                session = self._slices.sessions()[part.opened.source]
                _fail(session, part.opened.lease, damaged[part.opened.key])
        return True

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
        for source, session in enumerate(self._slices.sessions() if parts else ()):
            mine = [(part.opened.lease, part.stop) for part in parts if part.opened.source == source]
            if mine and step is not None:
                session.leases.used(mine, step + 1, time.monotonic())

    def close(self) -> None:
        """Forget all batches that were planned and not used: their samples are taken again. Nothing may iterate."""
        self._delivered, self._slices.paused = None, False
        steps = sorted(self._formed, reverse=True)
        for step in steps:
            self._give_back(self._formed.pop(step))
        for opened in list(self._open):
            with self._state_of(opened) as state:
                self._close_spent(state, opened)

    def forget(self) -> None:
        """Release all slices; the sessions end."""
        self.close()
        for opened in list(self._open):
            with self._state_of(opened) as state:
                self._finish(state, opened)

    def _state_of(self, opened: _OpenLease) -> contextlib.AbstractContextManager[LeaseState]:
        return self._slices.sessions()[opened.source].leases.locked()

    def _give_back(self, parts: Sequence[_Part]) -> None:
        for part in reversed(parts):
            with self._state_of(part.opened) as state:
                state.give_back(part.opened.lease, part.start)

    def _form(self, step: int) -> list[_Part] | None:
        """Take the samples of a batch; None if there are none left, or the wait was interrupted."""
        requested = [self._batch_size]
        if self._mixture is not None:
            first = step * self._batch_size
            sources = self._mixture.locate(np.arange(first, first + self._batch_size))[0]
            requested = np.bincount(sources, minlength=len(self._counts)).tolist()
        parts: list[_Part] = []
        for source, count in enumerate(requested):
            taken = self._take_of(source, count)
            parts += taken
            if count and not taken:
                self._give_back(parts)
                if self._mixture is not None and self._slices.sessions()[source].leases.done:
                    _log.info("mixture: nothing is left of %s: the run ends", self._slices.jobs[source].name)
                return None
        return parts

    def _take_of(self, source: int, count: int) -> list[_Part]:
        """Take so many samples of a dataset, or fewer at the end of its leases here; none at its end."""
        session = self._slices.sessions()[source]
        parts: list[_Part] = []
        began, deadline, missing = time.perf_counter(), time.monotonic() + _CONTINUE_S, count
        waits_for_fetch = is_yielding = False

        def get() -> _Part | ActiveLease | int | None:
            """With the lock: the next samples, a lease to open, 0 for a short batch, or _YIELD; None to wait."""
            nonlocal waits_for_fetch
            state, now = session.leases, time.monotonic()
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

        with log_while_waiting(_log, describe):
            while missing:
                session.fetches.update()
                item = session.leases.wait(get, lambda: self._slices.paused)
                waited_s, began = time.perf_counter() - began, time.perf_counter()
                self.planner.network_s += waited_s * waits_for_fetch
                self.planner.scheduler_s += waited_s * (not waits_for_fetch)
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
        for session in self._slices.sessions()[source + 1 :]:
            with session.leases.locked() as state:
                state.yield_leases(is_yielding)

    def _open_lease(self, source: int, session: LeaseSession, lease: ActiveLease) -> None:
        grant, expected = lease.grant, self._counts[source][lease.grant.slice]
        if grant.count != expected:
            _fail(session, lease, f"slice {grant.slice}: expected {expected} samples, got {grant.count}.")
            with session.leases.locked() as state:
                state.finish(lease)
            return
        order = lease_order(grant.seed, grant.epoch, grant.slice, grant.count, grant.start, grant.stop)
        lease.read_ids = np.empty(grant.stop - grant.start, np.int64)
        self._open.append(_OpenLease(source, int(self._first_key[source]) + grant.slice, lease, order))

    def _close_spent(self, state: LeaseState, opened: _OpenLease) -> bool:
        """Release a slice of whose lease nothing is left to take or use. With the lock."""
        if opened.lease.is_spent:
            self._finish(state, opened)
            return True
        return False

    def _finish(self, state: LeaseState, opened: _OpenLease) -> None:
        self._open.remove(opened)
        if all(other.key != opened.key for other in self._open):
            self.planner.close_slice(opened.key)
        state.finish(opened.lease)


def _fail(session: LeaseSession, lease: ActiveLease, reason: str) -> None:
    _log.warning("slice %d cannot be used; its lease is returned: %s", lease.grant.slice, reason)
    with session.leases.locked() as state:
        state.fail(lease, reason)
