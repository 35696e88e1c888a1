"""The leases of one worker: how far each was used, how far it may be used, and the requests to the scheduler.

No clock or network. Threads that share it lock it, `forebay simulate` drives it in virtual time. The guarantee on
which stealing rests: from a request until its reply is received, no sample is taken at or beyond the limits that the
request declares. The scheduler may cut a lease at its limit or behind it; the worker learns of the cut before it could
take a sample beyond, so no sample is used by two live workers. Samples are taken when a batch is formed, maybe
ahead of its use, and used when the caller says so. What a lost lease wastes is bounded: see `receipt_s`.
Memory: some KB a lease.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from forebay.arrays import I64
from forebay.lease.messages import (
    ExchangeReply,
    ExchangeRequest,
    FailedLease,
    Lease,
    ProviderReport,
    RefusedUse,
    UseMessage,
)
from forebay.ledger.chain import Used
from forebay.order.shard_windows import receipt
from forebay.units import numbered

MAX_LEASES = 16  # the scheduler grants a session no more: the lease in use, and prefetched ones
MAX_FETCHES = 4  # slices that a worker fetches at once
_MIN_INTERVAL_S = 0.01  # between two requests
_MAX_WAIT_S = 10.0  # the longest wait that the scheduler may impose
_NEW_WEIGHT = 0.3  # of the latest value in moving averages
_MAX_REFUSALS = 3
_POLL_S = 1.0  # a wait checks its condition at least this often
T = TypeVar("T")


@dataclass
class LeaseUse:
    """Samples up to `stop`, used up to `step`: of steps one after the other, with whole batches of this lease.

    Unless it `is_whole`, the last batch has samples of other leases, too, or is short: nothing is added.
    """

    stop: int
    step: int
    is_whole: bool


@dataclass(eq=False)
class ActiveLease:
    """A lease of this worker. Of its samples [start, stop) those before `acknowledged` are on record, those before
    `used` are used, those before `started` are used or in formed batches, and none from `allowed_until` on may be
    taken now.
    """

    grant: Lease
    stop: int
    acknowledged: int
    used: int
    started: int
    allowed_until: int
    uses: list[LeaseUse] = field(default_factory=list)  # one after the other, up to `used`
    path: Path | None = None  # the verified slice, pinned in the cache; None until it is fetched
    proof: str = ""  # that the slice is in the cache
    read_ids: I64 | None = None  # [stop - start of the grant], ids of the samples read, up to `used`
    is_fetching: bool = False  # a fetch of its slice was started
    in_use: bool = False
    is_dropped: bool = False  # it was lost, or is released with the next request: what was used of it stays used
    reason: str = ""  # why it failed; empty if it did not
    num_refusals: int = 0

    @property
    def ended(self) -> bool:
        """True if it was dropped or has failed, and all samples that were taken before are used."""
        return self.is_dropped or (bool(self.reason) and self.used == self.started)

    @property
    def is_spent(self) -> bool:
        """Whether no further sample of it will be used."""
        return self.ended or self.used >= self.stop

    def add_use(self, stop: int, step: int, batch_size: int, is_alone: bool) -> None:
        """Samples up to `stop` were used in a step; `is_alone`: its batch has no others."""
        is_whole = stop - self.used == batch_size
        last = self.uses[-1] if self.uses else None
        if last is not None and last.is_whole and last.step == step - 1 and (is_whole or is_alone or stop == self.stop):
            last.stop = stop
            last.step = step
            last.is_whole = is_whole
        else:
            self.uses.append(LeaseUse(stop, step, is_whole))
        self.used = stop

    def unacknowledged(self) -> list[UseMessage]:
        """What was used and is not on record; the digests cover the samples that were read, not those expected."""
        messages = []
        start = self.acknowledged
        grant = self.grant
        self.uses = [use for use in self.uses if use.stop > start]
        for use in self.uses:
            digest = ""
            stop = min(use.stop, self.stop)
            if self.read_ids is not None:
                digest = receipt(self.read_ids[start - grant.start : stop - grant.start].view(np.uint64))[0]
            proof = self.proof if start == grant.start else ""
            messages.append(UseMessage(grant.lease_id, grant.epoch, grant.slice, start, stop, use.step, digest, proof))
            start = stop
        return messages


@dataclass(eq=False)
class LeaseState:
    """The leases of one worker, as a state machine. Safe for threads that change it `locked`.

    Args:
        batch_size: Samples of a step.
        max_bytes: Of the slices of all leases together; one slice is always allowed.
        receipt_s: When leases are lost, at most the samples used in this time, and two steps, are wasted: requests that
            acknowledge uses are half of it apart, and limits reach half of it ahead; a step may end between two
            requests, and another one is in progress. Where batches formed ahead last longer than half of it, their
            samples are wasted in its place, unless they are dropped before their use.
        on_release: Called once for each slice that was fetched and is not needed any more.
    """

    log = logging.getLogger("forebay.worker")

    batch_size: int
    max_bytes: int
    receipt_s: float
    on_release: Callable[[Lease], object]

    def __post_init__(self) -> None:
        self.num_wasted = self.num_lost = 0  # samples used and never acknowledged; leases lost after their first sample
        self.rejected: list[ProviderReport] = []
        self._changed = threading.Condition()
        self.done = self.closed = self.is_yielding = False
        self.cause = self.reason = self.fault = ""  # why there is no lease, as the scheduler says; of the last fetch
        self.num_left_out = 0
        self.samples_per_s = 0.0
        self._request_s = self.receipt_s / 2
        self._leases: dict[str, ActiveLease] = {}  # in the order in which they were granted
        self._reports: list[ProviderReport] = []
        self._awaits_reply = True  # the first request is still to be sent
        self._requested_at = self._not_before = float("-inf")
        self._lease_s = math.inf
        self._samples_per_lease = 0.0
        self._fetch_s = 0.0
        self._started_at = 0.0
        self._num_outstanding = 0  # samples taken and not used

    @property
    def leases(self) -> list[ActiveLease]:
        """All active leases, the one granted first in front."""
        return list(self._leases.values())

    def describe_wait(self) -> str:
        """Return why the next step cannot start, for a log line; "" while the request to a scheduler says it."""
        fault = f"; the last fault: {self.fault}" if self.fault else ""
        if slices := self.fetching():
            return f"{numbered(len(slices), 'slice')} to be fetched: {', '.join(map(str, slices[:3]))}{fault}"
        if self._awaits_reply:
            return ""
        return f"a lease: {self.reason or 'the scheduler has none free now'}{fault}"

    def fetching(self) -> list[int]:
        """The slices of leases of which nothing was taken, as they are still to be fetched."""
        return [
            lease.grant.slice
            for lease in self.leases
            if lease.path is None and not lease.ended and lease.started < lease.stop
        ]

    # Threads: one that forms batches, some that fetch slices, one that talks to the scheduler.

    @contextlib.contextmanager
    def locked(self) -> Iterator[Self]:
        """Itself, locked for a change; threads that wait check it afterwards."""
        with self._changed:
            yield self
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more is taken, fetched or requested; threads that wait return. May be repeated."""
        with self.locked():
            self.closed = True

    def wait(self, get: Callable[[], T | None], interrupted: Callable[[], bool] = lambda: False) -> T | None:
        """The first result of `get`, called with the lock, that is not None; None when closed or interrupted."""
        with self._changed:
            while not (self.closed or interrupted()):
                if (result := get()) is not None:
                    return result
                self._changed.wait(_POLL_S)
        return None

    def wait_due(self) -> bool:
        """Wait until a request is due; False when closed."""
        with self._changed:
            while not self.closed:
                now = time.monotonic()
                if (due_at := self.due_at(now)) <= now:
                    return True
                self._changed.wait(min(due_at - now, _POLL_S))
        return False

    # Use.

    def next_to_use(self) -> ActiveLease | None:
        """The first lease whose slice is fetched and that is neither used up nor in use; it is in use from now on."""
        for lease in self.leases:
            if lease.path is not None and not lease.is_spent and not lease.in_use and not lease.reason:
                lease.in_use = True
                return lease
        return None

    def take(self, lease: ActiveLease, now: float, max_samples: int | None = None) -> tuple[int, int] | None:
        """The samples [start, stop) of the next step, or at most `max_samples`, for a batch.

        None if there are no more, or not all of them before the limit.
        """
        stop = min(lease.started + (self.batch_size if max_samples is None else max_samples), lease.stop)
        is_over = self.closed or lease.ended or lease.reason or lease.started >= lease.stop
        if is_over or stop > lease.allowed_until:
            return None
        start = lease.started
        lease.started = stop
        if not self._num_outstanding:
            self._started_at = now
        self._num_outstanding += stop - start
        return start, stop

    def used(self, parts: Sequence[tuple[ActiveLease, int]], step: int, now: float) -> None:
        """A batch was used, in this step: of each of its leases the samples up to a stop, in the order of `take`."""
        num_samples = 0
        with self._changed:
            for lease, stop in parts:
                num_samples += stop - lease.used
                if lease.grant.lease_id not in self._leases:
                    self.num_wasted += stop - lease.used
                lease.add_use(stop, step, self.batch_size, len(parts) == 1)
            self._num_outstanding -= num_samples
            rate = num_samples / max(1e-6, now - self._started_at)
            self._started_at = now
            self.samples_per_s += (rate - self.samples_per_s) * (_NEW_WEIGHT if self.samples_per_s else 1.0)
            if any(lease.is_spent for lease, _ in parts):
                self._changed.notify_all()

    def give_back(self, lease: ActiveLease, start: int) -> None:
        """Samples from `start` on were taken, and will not be used before they are taken again."""
        self._num_outstanding -= max(0, lease.started - start)
        lease.started = min(lease.started, start)

    def finish(self, lease: ActiveLease) -> None:
        """Its slice is not in use any more."""
        lease.in_use = False
        lease.path = None
        self.on_release(lease.grant)

    # Fetching.

    def next_to_fetch(self) -> ActiveLease | None:
        """The first lease whose slice is neither fetched nor being fetched; its fetch counts as started."""
        for lease in self.leases:
            if lease.path is None and not lease.is_fetching and not lease.ended:
                lease.is_fetching = True
                return lease
        return None

    def fetched(self, lease: ActiveLease, path: Path, took_s: float, proof: str = "") -> bool:
        """Its slice is in the cache and pinned; `proof` is for the scheduler. Whether the slice is still needed."""
        if lease.ended or self.closed:
            return False
        lease.path = path
        lease.proof = proof
        self.fault = ""
        self._fetch_s += (took_s - self._fetch_s) * _NEW_WEIGHT
        return True

    def fail(self, lease: ActiveLease, reason: str) -> None:
        """Its slice cannot be used; the next request says so, and the scheduler leases it to others.

        What was taken before is used first.
        """
        lease.reason = reason or "failed"

    def yield_leases(self, is_yielding: bool) -> None:
        """While the worker waits for another job: release leases without outstanding samples, and request none."""
        self.is_yielding = is_yielding
        self._release_unused()

    def _release_unused(self) -> None:
        for lease in self.leases if self.is_yielding else ():
            lease.is_dropped |= lease.started == lease.used

    def report(self, peer_id: str, sha256: str, reason: str, *, wrong: bool, rejected: bool = True) -> None:
        """Report a provider of a slice that failed, with the next request.

        `wrong`: it sent wrong bytes, and was not only late or unreachable. `rejected`: it is not asked for it again.
        """
        self.fault = reason
        report = ProviderReport(peer_id, sha256, reason[:300], wrong)
        self._reports.append(report)
        if rejected:
            self.rejected.append(report)

    # Requests to the scheduler, one at a time.

    def request(self, now: float, last: bool = False) -> ExchangeRequest:
        """The next request, or one for a lost one; its limits bind until its reply. The `last` releases all."""
        self._requested_at = now
        if last:
            for lease in self.leases:
                lease.is_dropped |= lease.used < lease.stop
        used = [lease for lease in self.leases if lease.acknowledged < min(lease.used, lease.stop)]
        ended = {lease_id: lease for lease_id, lease in self._leases.items() if lease.ended}
        declared_until = self._declare()
        self._awaits_reply = True
        return ExchangeRequest(
            known_leases=tuple(self._leases),
            job_id=used[0].grant.job_id if used else "",
            uses=tuple(use for lease in used for use in lease.unacknowledged()),
            declared_until=declared_until,
            release=tuple(lease_id for lease_id, lease in ended.items() if not lease.reason),
            failed=tuple(FailedLease(lease_id, lease.reason) for lease_id, lease in ended.items() if lease.reason),
            reports=tuple(self._reports),
            want=0 if last else self._num_wanted(),
        )

    def receive(self, request: ExchangeRequest, reply: ExchangeReply, now: float) -> None:
        """Apply the scheduler's reply to the latest request."""
        self._awaits_reply = False
        released = {*request.release, *(failed.lease_id for failed in request.failed)}
        recorded = {use.lease_id: use for use in reply.uses}
        refused = {use.lease_id: use for use in reply.refused}
        for use in {use.lease_id: use for use in reversed(request.uses)}.values():  # the first of each lease
            lease = self._leases[use.lease_id]
            if use.lease_id in recorded:
                accepted = recorded[use.lease_id]
                lease.acknowledged = accepted.offset
                lease.stop = accepted.stop
                lease.num_refusals = 0
            elif self._refuse(lease, use, refused.get(use.lease_id)):
                released.discard(use.lease_id)  # it is released once its uses are acknowledged
        for lease_id in request.known_leases or ():
            lease = self._leases[lease_id]
            if lease_id in reply.active:
                lease.stop = reply.active[lease_id].stop
            elif lease.acknowledged < lease.stop and lease_id not in released:
                self._lose(lease)
            if lease.acknowledged >= lease.stop or lease_id in released or lease_id not in reply.active:
                self._drop(lease)
        del self._reports[: len(request.reports)]
        for grant in reply.leases:
            if grant.lease_id not in self._leases:
                start = grant.start
                stop = grant.stop
                self._leases[grant.lease_id] = ActiveLease(grant, stop, start, start, start, stop)
                self._lease_s = grant.expires_in_s
                weight = _NEW_WEIGHT if self._samples_per_lease else 1.0
                self._samples_per_lease += (stop - start - self._samples_per_lease) * weight
        for lease in self.leases:
            lease.allowed_until = lease.stop
        self._release_unused()
        self.cause = reply.cause
        self.reason = reply.reason
        self.num_left_out = reply.num_left_out
        wait_s = 0.0 if len(reply.leases) >= request.want else min(_MAX_WAIT_S, max(0.02, reply.wait_s))
        self._not_before = now + wait_s
        self.done = self.done or (reply.done and not self._leases)
        self.closed = self.closed or self.done

    def clear(self) -> None:
        """Drop all leases at the end of the work; uses that are not on record count as wasted."""
        for lease in self.leases:
            self._drop(lease)

    def due_at(self, now: float) -> float:
        """When the next request is due; infinity for never, as things stand."""
        return max(self._due_at(now), self._requested_at + _MIN_INTERVAL_S)

    def _due_at(self, now: float) -> float:
        if self._reports or any(lease.ended for lease in self.leases):
            return now
        unspent = [lease for lease in self.leases if not lease.is_spent]
        due_at = math.inf if unspent else self._not_before
        if any(lease.used > lease.acknowledged for lease in self.leases):
            due_at = min(due_at, self._requested_at + self._request_s if unspent else now)
        if self._leases:
            due_at = min(due_at, self._requested_at + min(self._lease_s / 3, 4 * self._request_s))
        if 2 * len(unspent) <= self._capacity() and self._num_wanted():
            due_at = min(due_at, self._not_before)
        return due_at

    def _capacity(self) -> int:
        if not self.samples_per_s:
            return 2
        use_s = max(1e-6, self._samples_per_lease / self.samples_per_s)
        return 1 + min(MAX_LEASES - 1, max(1, math.ceil(2 * (self._request_s + self._fetch_s) / use_s)))

    def _num_wanted(self) -> int:
        if self.is_yielding:
            return 0
        unspent = [lease for lease in self.leases if not lease.is_spent]
        num_fitting = 1
        if size := max((lease.grant.bytes for lease in self.leases), default=0):
            num_fitting = (self.max_bytes - sum(lease.grant.bytes for lease in unspent)) // size
        return max(0 if unspent else 1, min(MAX_LEASES, self._capacity() - len(unspent), num_fitting))

    def _declare(self) -> dict[str, int]:
        """How far each lease may be used before the reply: together, what is used until the next request is due.

        The current step may always end, or one step begin. While an earlier request has no reply, no limit is raised
        that it declared: the scheduler may have received it.
        """
        num_started = sum(lease.started - lease.used for lease in self.leases)
        steps = int(self._request_s * self.samples_per_s / self.batch_size)
        remaining = max(steps, 0 if num_started else 1) * self.batch_size
        remaining = max(0, remaining - max(0, num_started - self.batch_size))  # batches formed ahead count
        limits = {}
        for lease in sorted(self._leases.values(), key=lambda lease: (not lease.in_use, lease.path is None)):
            limit = lease.started
            if not lease.ended and lease.path is not None:
                max_limit = min(lease.stop, lease.allowed_until) if self._awaits_reply else lease.stop
                limit = max(limit, min(max_limit, lease.started + remaining))
            remaining = max(0, remaining - (limit - lease.started))
            lease.allowed_until = limits[lease.grant.lease_id] = limit
        return limits

    def _refuse(self, lease: ActiveLease, use: Used, refused: RefusedUse | None) -> bool:
        """A use is not on record; `refused` has the reason, None if the reply did not mention it.

        Returns whether the use will be sent again, with a new receipt; else the lease is lost.
        """
        refused = refused or RefusedUse(use.lease_id, "unanswered", "the reply does not mention it", use.start)
        self.log.warning(
            "use refused: lease=%s samples=[%d, %d) code=%s: %s",
            use.lease_id, use.start, use.stop, refused.code, refused.message,
        )  # fmt: skip
        lease.num_refusals += 1
        is_lost = refused.code == "lost" or not use.start <= refused.offset <= lease.used
        if is_lost or lease.num_refusals > _MAX_REFUSALS:
            self._lose(lease)
            return False
        lease.acknowledged = refused.offset  # the rest is signed again from there
        return True

    def _lose(self, lease: ActiveLease) -> None:
        if not lease.ended:
            lease.is_dropped = True
            self.num_lost += lease.started > lease.grant.start

    def _drop(self, lease: ActiveLease) -> None:
        lease.is_dropped = True
        self.num_wasted += max(0, lease.used - lease.acknowledged)
        del self._leases[lease.grant.lease_id]
        if lease.path is not None and not lease.in_use:
            lease.path = None
            self.on_release(lease.grant)
