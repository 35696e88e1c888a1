"""The chunks that coming steps need: pinned in the cache, fetched in the order of their first use, and released.

A key is the number of a slice among those of all datasets, one dataset after another. Plans say which chunks the coming
steps need. Neighbours are fetched by one request. A plan's chunks are released when its batches were made, but not
before the windows of the order that they lie in are read to their ends. Local slices are hashed chunk by chunk at their
first use. Cost beside the transfer: 1.7 ms of CPU a request of up to 4 MiB, and 60 bytes a planned chunk.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.arrays import I64
from forebay.dataset.chunks import consecutive_runs
from forebay.dataset.reader import Dataset
from forebay.errors import DatasetError, ForebayError, UsageError
from forebay.fetch.cache import NEIGHBOURS_AHEAD, CacheSettings, ChunkCache, NoSpaceError
from forebay.fetch.chunk_file import ABSENT, PRESENT, UNVERIFIED, MapLayout
from forebay.fetch.needs import ChunkGroup, ChunkTable, PlanNeeds, Refetches
from forebay.fetch.pins import ChunkPins
from forebay.fetch.runs import ChunkRun, Providers
from forebay.order.footprint import MAX_REQUEST_BYTES, REQUESTS_OF_CACHE
from forebay.order.run import NEVER, Run
from forebay.storage.locks import at_fork
from forebay.storage.retry import log_while_waiting

if TYPE_CHECKING:
    from forebay.fetch.engine import RunFetcher


_QUEUED = 4  # fetches that wait for a connection
_RETRY_S = 5.0  # before a failed chunk is fetched again that no step waits for
_POLL_S = 0.02  # for chunks that another process fetches
_ALL_STEPS = 1 << 62
_STUCK_S = 10.0
_CLOSE_S = 2.0
_COUNTS = ("requests", "fetched_bytes", "fetched_chunks", "failed", "late")
_log = logging.getLogger("forebay")


class ChunkFeed:
    """Has the chunks that coming steps need fetched and verified. For one consumer.

    Plans are added in the order of their steps, waited for, and released; threads end with `close`. `cached`: whether
    the slices of each dataset go through the cache, of the settings `cache`. `ranks` [first, stop) are this node's.
    `verify`: hash what is here again. `patience`: arguments of `RunFetcher`.

    Raises:
        UsageError: If the cache is smaller than a chunk.
    """

    def __init__(
        self, datasets: Sequence[Dataset], cached: Sequence[bool], run: Run, ranks: tuple[int, int], world_size: int,
        cache: CacheSettings | None, open_providers: Callable[[ChunkCache, Callable[[], object]], Providers],
        verify: bool = False, **patience: Any,
    ) -> None:  # fmt: skip
        self._verify, self._make_providers, self._patience = verify, open_providers, patience
        self._datasets, self._cached, self._settings, self._run = datasets, cached, cache, run
        self.cached = any(cached)
        self.chunks = ChunkTable(datasets)
        self._pins = ChunkPins(self.chunks, run, ranks, world_size)
        self.after_fork()
        self._counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)
        self._past: dict[str, int] = {}  # Counts of sources and caches that were closed.
        self._waited_s = 0.0
        self._refetches = Refetches(self.chunks, run)
        self._max_running = 0 if cache is None else cache.connections + _QUEUED
        if cache is not None:
            self._check_budget(cache)
        at_fork(self)

    def after_fork(self) -> None:
        """Begin without plans: the threads, the fetches and the pins are the parent's."""
        self._changed = threading.Condition(threading.RLock())  # guards all below
        self._plans: deque[PlanNeeds] = deque()
        self._running: dict[ChunkRun, tuple[ChunkGroup, I64]] = {}  # fetches
        self._errors: dict[tuple[int, int], tuple[Exception, float]] = {}  # by key and chunk; when it failed
        self.no_room, self._num_verified = "", 1  # Steps whose local chunks are verified at once: more each time.
        self._stuck_since: tuple[PlanNeeds, float] | None = None
        self._finalizers: dict[str, weakref.finalize[[], ChunkFeed]] = {}
        self._cache: ChunkCache | None = None
        self._fetcher: RunFetcher | None = None
        self._providers: Providers | None = None
        self._pins.forget()

    def _check_budget(self, settings: CacheSettings) -> None:
        cached = np.repeat(self._cached, np.diff(self.chunks.first_key))
        largest = int(self.chunks.chunk_bytes[cached].max(initial=0))
        key = int((self.chunks.chunk_bytes * cached).argmax())
        needed = largest + MapLayout(int(self.chunks.num_bytes[key]), self.chunks.row(key).chunk_bytes).disk_bytes
        if needed > settings.budget_bytes:
            raise UsageError(
                f"cache_bytes: expected at least {needed:,} for a chunk of {self.chunks.row(key).name}, got "
                f"{settings.budget_bytes:,}. Make the cache larger, or prepare smaller slices (--slice-bytes)."
            )

    def find(self, key: int) -> tuple[Dataset, int]:
        """(dataset, index of the slice in it)."""
        i, index = self.chunks.find(key)
        return self._datasets[i], index

    def is_cached(self, key: int) -> bool:
        return self.cached and self._cached[self.chunks.find(key)[0]]

    @property
    def ahead_bytes(self) -> int:
        """How many bytes of samples are planned ahead, so that their chunks are fetched and stay."""
        cache, settings = self._cache, self._settings
        return 0 if settings is None else settings.ahead_bytes(cache.num_sharers() if cache is not None else 1)

    @property
    def planned_bytes(self) -> int:
        return sum(plan.num_bytes for plan in self._plans)

    # Plans.

    def add(self, plan: PlanNeeds) -> None:
        """Add the plan of the next steps; what is known of its needs is fetched from now on."""
        with self._changed:
            self._plans.append(plan)

    def need(self, plan: PlanNeeds, keys: I64, starts: I64, stops: I64, steps: I64) -> None:
        """Add byte ranges [starts, stops) of slices `keys` to a plan's needs, from `steps` of the plan on; all [N].

        Raises:
            NoSpaceError: If the cache is full of what is pinned.
        """
        groups = self.chunks.groups(keys, starts, stops, steps)
        with self._changed:
            cached = [group for group in groups if self.is_cached(group.key)]
            if cached:
                self._open_entries(cached, plan)
            for group in cached if self._verify else ():
                assert group.entry is not None
                group.entry.doubt(group.chunks[group.entry.refs[group.chunks] == 1])
            plan.add(groups)

    def fetch(self) -> None:
        """Start to fetch what the plans so far need."""
        with self._changed:
            self._start_fetches()

    def renew(self, plan: PlanNeeds) -> set[int]:
        """Have what a plan needs of files that were deleted or replaced fetched again; return the keys of their slices.

        Raises:
            NoSpaceError: If the cache is full of what is pinned.
        """
        with self._changed:
            entries = {group.entry for group in plan.groups if group.entry is not None}
            removed = {entry for entry in entries if entry.is_lost()}
            if lost := [group for group in plan.groups if group.entry in removed]:
                self.recheck(plan)
                self._open_entries(lost)
            return {group.key for group in lost}

    def recheck(self, plan: PlanNeeds) -> None:
        """Have all that a plan needs looked at again: it may not be here any more."""
        with self._changed:
            plan.waiting, plan.position = list(plan.groups), 0

    def take_error(self, plan: PlanNeeds) -> Exception | None:
        """Return the error of a fetch that a plan waits for, once."""
        with self._changed:
            return self._take_error([(group, group.chunks) for group in plan.waiting])

    def is_complete(self, plan: PlanNeeds) -> bool:
        """Return whether all that a plan needs so far is here."""
        with self._changed:
            return all(map(self._is_complete, plan.waiting))

    def is_ready(self, plan: PlanNeeds, step: int) -> bool:
        """Return whether all that a plan needs so far for its steps up to `step` is here."""
        with self._changed:
            return not self._missing(plan, step)

    def has_bytes(self, key: int, plan: PlanNeeds) -> bool:
        """Whether what a plan needs of a slice so far is here."""
        with self._changed:
            return all(group.key != key or self._is_complete(group) for group in plan.waiting)

    def available(self, plan: PlanNeeds, start: int) -> int:
        """The first of a plan's steps from `start` on for which something known is missing; a huge number for none.

        Raises:
            DatasetError: If step `start` needs a local chunk that is damaged.
        """
        with self._changed:
            stop, remaining = _ALL_STEPS, []
            until = start + self._num_verified  # Local chunks of later steps are verified when those are read.
            self._num_verified = min(2 * self._num_verified, _ALL_STEPS // 4)
            for group in plan.waiting:
                try:
                    missing = self._first_missing(group, until)
                except DatasetError:
                    missing = int(group.first_steps.min())
                    if missing <= start:
                        raise  # Else when that step is read.
                stop = min(stop, missing)
                if missing < _ALL_STEPS:
                    remaining.append(group)
            plan.waiting = remaining
            return stop

    def wait(self, plan: PlanNeeds, step: int) -> bool:
        """Wait until something changed for step `step` of a plan; False if there is no space for what it needs.

        Raises:
            NetworkError: If a fetch failed; the next call tries again. IntegrityError likewise.
        """
        with self._changed, log_while_waiting(_log, lambda: self._describe_wait(plan, step)):
            began = time.perf_counter()
            try:
                while True:
                    missing = self._missing(plan, step)
                    if not missing:
                        return True
                    if error := self._take_error(missing):
                        raise error
                    if not self._fetch_now(plan, missing):
                        return False
                    self._start_fetches()
                    if not self._missing(plan, step):
                        return True
                    self._changed.wait(_POLL_S)
            finally:
                self._counts["late"] += 1
                self._waited_s += time.perf_counter() - began

    def wait_for_space(self, plan: PlanNeeds) -> None:
        """Wait while other processes that share the cache need all of it. UsageError after ten seconds."""
        with self._changed:
            now = time.monotonic()
            if self._stuck_since is None or self._stuck_since[0] is not plan:
                self._stuck_since = plan, now
            if now - self._stuck_since[1] > _STUCK_S:
                raise UsageError(f"cache: a step's chunks found no space in {_STUCK_S:.0f} s: {self.no_room}")
            self._changed.wait(_POLL_S)

    def release(self, plan: PlanNeeds) -> None:
        """A plan was used, or is not required any more: its chunks may be evicted."""
        with self._changed:
            if plan in self._plans:
                self._plans.remove(plan)
            if self._cache is not None and plan.on_change is None:
                self._pins.linger(plan)
                self._pins.unpin(plan.next_step)
            elif self._cache is not None:
                self._cache.unpin([(group.entry, group.chunks) for group in plan.groups if group.entry is not None])
            plan.groups, plan.waiting, plan.todo = [], [], []
            self._start_fetches()

    def clear(self) -> None:
        """Release all plans of the run's order."""
        with self._changed:
            for plan in [plan for plan in self._plans if plan.on_change is None]:
                self.release(plan)
            self._pins.unpin(_ALL_STEPS)
            self._errors, self._num_verified = {}, 1

    def open_cache(self) -> ChunkCache:
        """Return the cache, opened unless it is open."""
        with self._changed:
            return self._open_cache(self._settings)

    def bytes_of_last(self) -> int:
        """Bytes received from sources that are the last to be asked."""
        with self._changed:
            return self._past.get("last", 0) + (self._fetcher.bytes_of_last() if self._fetcher is not None else 0)

    def stats(self) -> dict[str, Any]:
        with self._changed:
            if self._settings is None:
                return {}
            cached = 0 if self._cache is None else self._cache.used_bytes()
            now = {"waited_s": self._waited_s, "in_flight": len(self._running), "cached_bytes": cached}
            counts = {**self._counts, **self._refetches.counts, **now, **self._past_and_present()}
            for group, chunks in self._running.values():  # They may have been read before their fetch ends.
                if group.entry is not None:
                    stored = group.entry.stored(chunks)
                    counts["fetched_bytes"] += group.entry.bytes_of(stored)
                    counts["fetched_chunks"] += len(stored)
            return counts

    def _past_and_present(self) -> dict[str, int]:
        """Counts of the cache and the source, and of those that were closed."""
        counts = {"evicted_bytes": 0 if self._cache is None else self._cache.evicted_bytes}
        if self._providers is not None:
            counts |= self._providers.stats()
        if self._fetcher is not None:
            counts |= {"wrong_bytes": self._fetcher.wrong_bytes, "requests": self._fetcher.attempts}
        return {name: self._past.get(name, 0) + counts.get(name, 0) for name in (counts | self._past).keys() - {"last"}}

    def close(self) -> None:
        """End the threads, and leave the swarm and the cache. The next plan starts them again."""
        self.pause()
        self._close_fetcher()
        cache, self._cache, self._pins.cache = self._cache, None, None
        if cache is not None:
            self._past["evicted_bytes"] = self._past.get("evicted_bytes", 0) + cache.evicted_bytes
            self._finalizers.pop("cache")()

    def pause(self) -> None:
        """End the fetches, but continue to share. The next plan starts them again."""
        self.clear()
        if self._providers is None or not self._providers.passes_on:
            self._close_fetcher()

    def _close_fetcher(self) -> None:
        fetcher, self._fetcher, providers, self._providers = self._fetcher, None, self._providers, None
        if fetcher is None or providers is None:
            return
        self._finalizers.pop("providers")()
        self._finalizers.pop("fetcher")()
        with self._changed:  # What was received counts, also of fetches that are cancelled now.
            self._changed.wait_for(lambda: not self._running, _CLOSE_S)
        counts = {
            **providers.stats(), "wrong_bytes": fetcher.wrong_bytes, "requests": fetcher.attempts,
            "last": fetcher.bytes_of_last(),
        }  # fmt: skip
        for name, count in counts.items():
            self._past[name] = self._past.get(name, 0) + count

    # With the lock.

    def _open_cache(self, settings: CacheSettings | None) -> ChunkCache:
        assert settings is not None
        if self._cache is None:
            self._cache = self._pins.cache = ChunkCache(settings.directory, settings.budget_bytes)
            self._pins.drops_read = settings.keep == "window"
            self._finalizers["cache"] = weakref.finalize(self, self._cache.close)
        return self._cache

    def _open_fetcher(self) -> tuple[RunFetcher, Providers]:
        assert self._settings is not None
        if self._fetcher is None or self._providers is None:
            from forebay.fetch.engine import RunFetcher  # A local dataset needs no network packages.

            self._fetcher = fetcher = RunFetcher(self._settings.connections, **self._patience)
            self._providers = self._make_providers(self._open_cache(self._settings), fetcher.wake)
            self._finalizers["fetcher"] = weakref.finalize(self, fetcher.close)
            self._finalizers["providers"] = weakref.finalize(self, self._providers.close)
        return self._fetcher, self._providers

    def _is_complete(self, group: ChunkGroup) -> bool:
        return self._first_missing(group, _ALL_STEPS) == _ALL_STEPS

    def _first_missing(self, group: ChunkGroup, until: int) -> int:
        """The first step for which a chunk is missing, or local and not verified: those of steps < `until` are."""
        if group.entry is None:
            (dataset, index), is_due = self.find(group.key), group.first_steps < until
            for run in consecutive_runs(group.chunks[is_due]) if is_due.any() else ():
                dataset.verify_chunks(index, int(run[0]), int(run[-1]) + 1)
            return int(group.first_steps[~is_due].min(initial=_ALL_STEPS))
        if group.entry.is_deleted:
            self._open_entries([group])  # Another process deleted the file, or replaced it.
        return int(group.first_steps[group.entry.marks[group.chunks] != PRESENT].min(initial=_ALL_STEPS))

    def _open_entries(self, groups: Sequence[ChunkGroup], plan: PlanNeeds | None = None) -> None:
        """Pin the chunks of groups in the files of their slices. Raises NoSpaceError; `plan` has those pinned then."""
        cache, opened, reason = self._open_cache(self._settings), 0, ""
        for last_try in (False, True):
            rest = groups[opened:]
            entries, reason = cache.open_pinned([(self.chunks.row(group.key), group.chunks) for group in rest])
            for group, entry in zip(rest, entries):
                group.entry = entry
            opened += len(entries)
            if not reason:
                return
            if not last_try:
                self._pins.unpin(_ALL_STEPS)
        if plan is not None:
            plan.groups += groups[:opened]  # They are released with the plan.
        raise NoSpaceError(reason)

    def _missing(self, plan: PlanNeeds, step: int) -> list[tuple[ChunkGroup, I64]]:
        missing = []
        for group in plan.waiting:
            required = group.chunks[group.first_steps <= step]
            if group.entry is not None and len(required) and not self._is_complete(group):
                required = required[group.entry.marks[required] != PRESENT]
                if len(required):
                    missing.append((group, required))
        return missing

    def _take_error(self, missing: list[tuple[ChunkGroup, I64]]) -> Exception | None:
        for group, chunks in missing:
            for chunk in chunks.tolist():
                failed = self._errors.pop((group.key, chunk), None)
                if failed is not None:
                    self._errors.clear()
                    for plan in self._plans:  # What failed with it is fetched again: its error is gone, too.
                        plan.position = 0
                    kind = type(failed[0]) if isinstance(failed[0], ForebayError) else UsageError
                    row = self.chunks.row(group.key)
                    error = kind(f"slice {row.name} ({row.sha256[:12]}…) was not fetched: {failed[0]}")
                    error.__cause__ = failed[0]
                    return error
        return None

    def _fetch_now(self, plan: PlanNeeds, missing: Sequence[tuple[ChunkGroup, I64]]) -> bool:
        """Start to fetch what a step of a plan waits for; False if there is no space for it, and none will come."""
        self.no_room = ""
        for group, chunks in missing:
            if len(self._running) >= self._max_running:
                break
            absent = self._fetchable(group, chunks)
            if len(absent) and not self._fetch(group, self._extend(plan, group, int(absent[0]))):
                if self._running:
                    break
                self._pins.unpin(_ALL_STEPS)  # The rest of the windows, and the neighbours.
                if not self._fetch(group, absent[:1]):
                    return False
        return True

    def _start_fetches(self) -> None:
        """Start to fetch what is needed next, as far as connections and space allow."""
        self.no_room = ""
        for plan in self._plans:
            while plan.position < len(plan.todo):
                if len(self._running) >= self._max_running:
                    return
                _, group, chunk = plan.todo[plan.position]
                assert group.entry is not None or not self.is_cached(group.key)
                if group.entry is not None and group.entry.marks[chunk] in (ABSENT, UNVERIFIED):
                    failed = self._errors.get((group.key, chunk))
                    is_due = failed is None or time.monotonic() - failed[1] > _RETRY_S
                    if is_due and not self._fetch(group, self._extend(plan, group, chunk)):
                        return
                plan.position += 1

    def _fetchable(self, group: ChunkGroup, chunks: I64) -> I64:
        assert group.entry is not None
        own = [c for g, claimed in self._running.values() if g.key == group.key for c in claimed.tolist()]
        return np.setdiff1d(chunks, np.array(own, np.int64))

    def _extend(self, plan: PlanNeeds, group: ChunkGroup, chunk: int) -> I64:
        """The chunk and its neighbours that are required, too, for one request. Few at the start of a run."""
        entry = group.entry
        assert entry is not None and self._settings is not None
        if self._open_fetcher()[1].passes_on:
            return self._pins.extend(plan, group, chunk, entry.layout.num_chunks, NEVER)
        max_bytes = min(MAX_REQUEST_BYTES, self._settings.budget_bytes // REQUESTS_OF_CACHE, plan.run_bytes)
        ahead_steps = NEIGHBOURS_AHEAD * self.ahead_bytes * (plan.next_step - plan.first_step) // max(1, plan.num_bytes)
        return self._pins.extend(
            plan, group, chunk, max(1, max_bytes // entry.chunk_bytes), plan.next_step + ahead_steps
        )

    def _fetch(self, group: ChunkGroup, chunks: I64) -> bool:
        """Claim and fetch neighbouring chunks; False if there is no space for them."""
        if group.entry is not None and group.entry.is_lost():
            self._open_entries([group])  # Another process deleted the file, or replaced it.
        entry, cache = group.entry, self._open_cache(self._settings)
        assert entry is not None
        if (entry.marks[chunks] == UNVERIFIED).any():
            cache.verify(entry, chunks)
        dataset, index = self.find(group.key)
        fetcher, providers = self._open_fetcher()
        claimed, self.no_room = cache.claim(entry, chunks)
        if self.no_room:
            return False
        limit = max(1, MAX_REQUEST_BYTES // entry.chunk_bytes)
        for neighbours in consecutive_runs(claimed) if len(claimed) else ():
            for run in np.split(neighbours, range(limit, len(neighbours), limit)):
                job = ChunkRun(
                    entry, dataset.table.row(index).name, providers.origin(group.key), int(run[0]), int(run[-1]) + 1,
                    partial(dataset.leaves, index), self._end_run,
                )  # fmt: skip
                self._running[job] = group, run
                self._count_fetch(group, run)
                try:
                    fetcher.start(job)
                except Exception as error:  # noqa: BLE001 - the consumer that waits for the chunks gets it
                    self._end_run(job, error, notify=False)
        return True

    def _end_run(self, job: ChunkRun, error: Exception | None, notify: bool = True) -> None:
        cache, entry = self._cache, job.entry
        try:
            if cache is not None:
                cache.complete(entry, np.arange(job.first, job.stop))
        except UsageError as fault:  # The run has ended all the same.
            error = error or fault
        with self._changed:
            group, _ = self._running.pop(job, (None, None))
            if group is None:
                return
            if self._providers is not None and all(other.key != group.key for other, _ in self._running.values()):
                self._providers.release(group.key, entry.is_complete())
            fetched = np.arange(job.first, job.next)
            self._counts["fetched_bytes"] += entry.bytes_of(fetched)
            self._counts["fetched_chunks"] += len(fetched)
            if error is not None:
                self._record_failure(group, np.arange(job.next, job.stop), error, entry.is_lost())
            with contextlib.suppress(ForebayError):  # The consumer that waits gets it, too.
                self._start_fetches()
            self._changed.notify_all()
            changed = [plan.on_change for plan in self._plans if plan.on_change and group in plan.groups]
        for on_change in changed if notify else ():
            on_change()

    def _record_failure(self, group: ChunkGroup, chunks: I64, error: Exception, is_lost: bool) -> None:
        # Else it is of an iteration that ended, or fetched again into another file.
        if not is_lost and any(group in plan.groups for plan in self._plans):
            self._counts["failed"] += 1
            self._errors |= dict.fromkeys(((group.key, chunk) for chunk in chunks.tolist()), (error, time.monotonic()))
        for plan in self._plans:
            plan.position = 0

    def _count_fetch(self, group: ChunkGroup, chunks: I64) -> None:
        plan = next((plan for plan in self._plans if group in plan.groups), None)
        if plan is not None and plan.on_change is None:
            is_own = self._cache is not None and self._cache.evicted_bytes > 0
            self._refetches.add(group, chunks, plan.first_step, is_own)

    def _describe_wait(self, plan: PlanNeeds, step: int) -> str:
        with self._changed:
            missing, fault = self._missing(plan, step), self._fetcher.fault if self._fetcher is not None else ""
            first = self.chunks.row(missing[0][0].key).name if missing else "none"
            return (
                f"{sum(len(chunks) for _, chunks in missing)} chunks of {len(missing)} slices, the first of {first}; "
                f"{len(self._running)} fetches are running. {self.no_room or fault}"
            )
