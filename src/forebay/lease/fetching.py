"""The slices of leases, which a feed fetches: from other workers first, from origins last.

A provider that sends wrong bytes or another range, does not answer, or has another peer's certificate is rejected for
the slice and reported to the scheduler; the slice is then requested from the others. A lease whose slice was received
with a wrong hash only counts as failed; one that no provider sends is released.
"""

import logging
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from forebay.dataset.reader import Dataset
from forebay.errors import ForebayError, IntegrityError, NetworkError, ProtocolError, UsageError
from forebay.fetch.cache import ChunkCache, NoSpaceError
from forebay.fetch.feed import ChunkFeed
from forebay.fetch.needs import PlanNeeds
from forebay.fetch.runs import Providers
from forebay.lease.job import LeaseJob
from forebay.lease.messages import Lease, prove
from forebay.lease.state import ActiveLease, LeaseState
from forebay.network.client import WrongPeerError
from forebay.network.peer_source import PeerSource, open_untrusted_origin
from forebay.storage.base import Origin, PermanentError, TransientError
from forebay.storage.retry import backoff_s
from forebay.swarm.members import format_ranges

log = logging.getLogger("forebay.worker")
_STALL_S = 5.0
_MAX_URLS = 64


class CacheIndex:
    """Which slices of a dataset are in a cache. Threads and processes share it, as they do the cache.

    `sizes` has bytes, dataset name and bytes of a chunk of each slice, by hash: what this worker may serve. Memory: 250
    bytes a slice.
    """

    def __init__(self, cache: ChunkCache, dataset: Dataset) -> None:
        hashes = [row.tobytes().hex() for row in dataset.table.sha256]
        name = dataset.name
        chunk_bytes = dataset.table.chunk_bytes
        self.sizes = {sha256: (size, name, chunk_bytes) for sha256, size in zip(hashes, dataset.table.bytes.tolist())}
        self._indexes = {sha256: index for index, sha256 in enumerate(hashes)}
        self._cache = cache
        self._dataset_id = dataset.id
        self._reported = ""

    def changes(self, everything: bool = False) -> dict[str, str]:
        """Dataset id to the ranges of slices in the cache, if they changed since `mark_reported`, or `everything`."""
        cached = self._indexes.keys() & self._cache.list_slices()
        ranges = format_ranges(np.array(sorted(self._indexes[sha256] for sha256 in cached), np.int64))
        return {self._dataset_id: ranges} if everything or ranges != self._reported else {}

    def mark_reported(self, changes: dict[str, str]) -> None:
        """The scheduler has received these changes."""
        self._reported = changes.get(self._dataset_id, self._reported)


@dataclass(eq=False)
class LeaseProviders:
    """Who sends the slice of a lease, as the scheduler says: other workers, and data nodes last."""

    fetches: "LeaseFetches"
    grant: Lease
    is_steered = True
    is_renamed = False

    def __post_init__(self) -> None:
        self.url = f"the providers of the lease of slice {self.grant.slice}"
        self._sources: dict[str, Origin] = {}  # By peer id or URL.

    def sources(self) -> list[Origin]:
        """The usable providers. Raises PermanentError with the last reason if there is none."""
        reason = "none is known now"
        fetches = self.fetches
        grant = self.grant
        for provider in grant.providers:
            name = provider.peer_id or provider.address
            if name in self._sources:
                continue
            try:
                source: Origin = PeerSource(
                    fetches.job.client, provider.peer_id, provider.address, lambda name: grant.sha256, _STALL_S
                )
                self._sources[name] = source = fetches.open_url(provider.address) if provider.is_url else source
                source.is_last = provider.is_origin
            except (ForebayError, ValueError) as error:  # does not affect the other providers
                reason = str(error)
        faults = fetches.faults.get(grant.sha256, {})
        rejected = {name: fault for name in self._sources if (fault := faults.get(name))}
        if usable := [source for name, source in self._sources.items() if name not in rejected]:
            return usable
        if rejected and all(isinstance(fault, IntegrityError) for fault in rejected.values()):
            raise IntegrityError(f"slice {grant.slice}: {'; '.join(map(str, rejected.values()))}")
        raise PermanentError(f"slice {grant.slice}: none of its providers can be used: {reason}")

    def report(self, source: Origin, error: NetworkError) -> bool:
        """Report a source to the scheduler, once; one at fault is not asked for this slice again."""
        name = next((name for name, other in self._sources.items() if other is source), source.url)
        wrong = isinstance(error, ProtocolError)
        is_final = wrong or isinstance(error.__cause__, WrongPeerError)
        if is_final or (isinstance(error, TransientError) and not error.throttled):
            with self.fetches.leases.locked() as state:
                faults = self.fetches.faults[self.grant.sha256]
                if name not in faults or (is_final and faults[name] is None):
                    faults[name] = error if is_final else None
                    state.report(name, self.grant.sha256, str(error), wrong=wrong, rejected=is_final)
        return is_final

    def verified(self, num_bytes: int) -> None:
        return


class GrantedProviders(Providers):
    """Who sends the slices of leases, by key: the providers of a feed, see `Providers`."""

    passes_on = True

    def __init__(self) -> None:
        self.by_key: dict[int, LeaseProviders] = {}

    def origin(self, key: int) -> LeaseProviders:
        return self.by_key[key]


class LeaseFetches:
    """The slices of a worker's leases, fetched by a feed from their grant until they are released.

    If no provider sends any slice for the job's `patience_s`, `failure` is set and the leases are closed.

    Args:
        granted: The feed's providers, which get those of the leases.
        first_key: Of slice 0 of the job's dataset in the feed.
    """

    def __init__(
        self, job: LeaseJob, feed: ChunkFeed, granted: GrantedProviders, first_key: int, leases: LeaseState
    ) -> None:
        self.failure: Exception | None = None
        self._feed = feed
        self._granted = granted
        self._first_key = first_key
        self.job = job
        self.leases = leases
        self._dataset = job.dataset
        self._needs: dict[str, tuple[ActiveLease, PlanNeeds, float]] = {}  # by lease id; since when
        self.open_url = lru_cache(_MAX_URLS)(lambda url: open_untrusted_origin(url, job.from_urls))
        # The keys are a slice, and a peer id or URL. None: the source was reported, and is still asked.
        self.faults = defaultdict[str, dict[str, NetworkError | None]](dict)
        self._num_misses = 0
        self._not_before = 0.0
        self.starved_at: float | None = None

    def update(self) -> None:
        """Fetch the slices of new leases, and forget those of leases that ended: after each exchange, and later."""
        self._check_supply(None)
        for started, _, _ in list(self._needs.values()):
            if started.ended and started.path is None:
                self.release(started.grant)
            else:
                self._check(started)
        self._feed.fetch()  # There may be space now.
        if self._feed.no_room:
            with self.leases.locked() as state:
                state.fault = self._feed.no_room
        while time.monotonic() >= self._not_before:
            with self.leases.locked() as state:
                lease = state.next_to_fetch()
            if lease is None or not self._start(lease):
                return

    def release(self, grant: Lease) -> None:
        """A slice that was fetched is not needed any more."""
        if (entry := self._needs.pop(grant.lease_id, None)) is not None:
            self._feed.release(entry[1])
            key = self._first_key + grant.slice
            by_key = self._granted.by_key
            if key in by_key and by_key[key].grant is grant:
                del by_key[key]

    def _start(self, lease: ActiveLease) -> bool:
        """Return whether there was space for it."""
        grant = lease.grant
        table = self._dataset.table
        row = table.row(grant.slice) if grant.slice < len(table) else None
        if row is None or (grant.dataset_id, grant.sha256) != (self._dataset.id, row.sha256):
            reason = (
                f"slice {grant.slice}: expected a slice of the dataset {self._dataset.id}, got a slice of another one."
            )
            self._fail(lease, IntegrityError(reason))
            return True
        budget = self._feed.open_cache().budget_bytes
        if grant.bytes > budget:
            self._end(
                UsageError(f"cache: slice {grant.slice} has {grant.bytes} bytes, the budget is {budget}. Raise it.")
            )
            return False
        key = self._first_key + grant.slice
        needs = PlanNeeds(0, 1, grant.bytes, sys.maxsize, on_change=lambda: self._check(lease))
        self._granted.by_key[key] = LeaseProviders(self, grant)
        self._feed.add(needs)
        zero = np.zeros(1, np.int64)
        try:
            self._feed.need(needs, zero + key, zero, zero + grant.bytes, zero)
        except NoSpaceError:
            self._feed.release(needs)
            with self.leases.locked():
                lease.is_fetching = False
            return False
        self._needs[grant.lease_id] = lease, needs, time.monotonic()
        self._feed.fetch()
        self._check(lease)
        return True

    def _check(self, lease: ActiveLease) -> None:
        """Say that the slice of a lease is here, or that it cannot be fetched."""
        grant = lease.grant
        _, needs, since = self._needs.get(grant.lease_id, (lease, None, 0.0))
        if needs is None or lease.path is not None:
            return
        if not self._feed.is_complete(needs):
            if (error := self._feed.take_error(needs)) is not None:
                self._fail(lease, error)
            return
        entry = needs.groups[0].entry
        assert entry is not None
        self._num_misses = 0
        proof = prove(grant.lease_id, self.job.identity.peer_id, entry.path, grant.bytes)
        with self.leases.locked() as state:
            if lease.path is not None or state.fetched(lease, entry.path, time.monotonic() - since, proof):
                return
        self.release(grant)

    def _fail(self, lease: ActiveLease, error: Exception) -> None:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, (NetworkError, OSError)):  # A full disk may have space again.
            cause = cause.__cause__
        with self.leases.locked() as state:
            if isinstance(error, IntegrityError):
                state.fail(lease, str(error))
            else:
                lease.is_dropped = True
                state.fault = str(error)
        self.release(lease.grant)
        if isinstance(error, IntegrityError):
            return
        self._num_misses += 1
        self._not_before = time.monotonic() + backoff_s(self._num_misses, 0.1, 2.0)
        if cause is None:
            self._end(error)
        else:
            self._check_supply(error)

    def _check_supply(self, error: Exception | None) -> None:
        """End the work once there was nothing to use for too long, as no provider sends it: for `error`, if given."""
        now = time.monotonic()
        with self.leases.locked() as state:
            is_fed = any(lease.path is not None and not lease.is_spent for lease in state.leases)
            waits = state.cause in ("paused", "barred", "leased") and not (error or state.fetching())
            is_missed = self._num_misses > 0 and not waits
            is_unserved = state.cause == "unserved"
            is_starved = not is_fed and (is_unserved or is_missed)
            reason = "; ".join(filter(None, (state.reason, state.fault)))
        if not is_starved:
            self.starved_at = None
        elif self.starved_at is None:
            self.starved_at = now
        elif now - self.starved_at > self.job.patience_s and (error is not None or is_unserved):
            if error is None or isinstance(error, NetworkError):
                error = NetworkError(
                    f"worker: expected slices to use, got none for {self.job.patience_s:g} s: {reason.rstrip('.')}. "
                    "Start a data node that has them (forebay serve)."
                )
            self._end(error)

    def _end(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.leases.close()
