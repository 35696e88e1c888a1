"""The leases in a worker's hands: how far each was used, how far it may be used, and what to say of them.

Three parties meet here, under one lock: the caller's thread uses samples, threads that fetch bring slices, and one
that keeps the line to the scheduler tells it what was used and hears what it grants. The promise, on which stealing
rests: while an exchange is under way, nothing is used beyond the horizons that it declares. The scheduler may cut a
lease at that exchange, at its horizon or behind it, and the worker hears of the cut before it could go beyond; so no
sample is used by two workers that live. What is wasted is bounded where a lease is lost: see `receipt_s`.

Neither clock nor network: `clock` is an argument, and `leasing` carries the statements. Memory: some KB a lease.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forebay.ledger.receipts import Used
from forebay.order.shard_windows import receipt
from forebay.schedule.ask import Ask, BadReport, Failed, Refused
from forebay.worker.answers import Answer, Lease


@dataclass(eq=False)
class Held:
    """A lease in hand. Of its samples [start, stop) those before `acked` are on record, those before `used` are used,
    those before `taken` are used or in the step under way, and none from `limit` on may be taken now.

    Attributes:
        path: The verified slice, pinned, once it is here.
        read: int64 [stop - start of the grant], the global ids of the samples that were read, as far as `used`.
        over: Nothing more of it is used: it was lost, failed or given up.
        reason: Why it failed; empty if it did not.
    """

    grant: Lease
    stop: int
    acked: int
    used: int
    taken: int
    limit: int
    step: int = 0
    path: Path | None = None
    read: NDArray[np.int64] | None = None
    fetching: bool = False
    training: bool = False
    over: bool = False
    reason: str = ""
    refusals: int = 0

    @property
    def is_spent(self) -> bool:
        """Whether the worker has no more to use of it."""
        return self.over or self.used >= self.stop

    def use(self) -> Used:
        """What was used and is not on record; its digest is over the samples that were read, not over those due."""
        start, stop, grant = self.acked, min(self.used, self.stop), self.grant
        digest = ""
        if self.read is not None:
            digest = receipt(self.read[start - grant.start : stop - grant.start].view(np.uint64))[0]
        return Used(grant.lease_id, grant.epoch, grant.slice_index, start, stop, self.step, digest)


@dataclass
class Tally:
    """What became of the leases: samples used for nothing, leases lost after they were begun, seconds waited."""

    wasted: int = 0
    lost: int = 0
    waited_s: float = 0.0
    bad: list[BadReport] = field(default_factory=list)


# The scheduler gives a session no more: the one in use, and those ahead.
MAX_LEASES = 16
# Two exchanges are at least so far apart, whatever there is to say.
_LEAST_APART_S = 0.01
# However long the scheduler says to wait.
_MAX_WAIT_S = 10.0
_NEW_WEIGHT = 0.3
_MAX_REFUSALS = 3


class Hand:
    """The leases of one worker. Threads share it.

    Args:
        batch_size: Samples of a step.
        ahead: Leases beyond the one in use, 1 to 15; None: as many as keep the fetching ahead of the use.
        max_bytes: What the slices in hand may take together; one is always allowed.
        receipt_s: Bounds the work that a lost lease wastes: samples used in so many seconds, and a step. Half of it
            passes between two exchanges, half is how far a horizon looks ahead.
        let_go: Called once, under the lock, for each slice that was fetched and is needed no more.
    """

    log = logging.getLogger("forebay.worker")

    def __init__(
        self,
        batch_size: int,
        ahead: int | None,
        max_bytes: int,
        receipt_s: float,
        let_go: Callable[[Lease], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally = Tally()
        self.done = self.paused = False
        self.num_left_out = 0
        self._batch_size = batch_size
        self._ahead = ahead
        self._max_bytes = max_bytes
        self._exchange_s = receipt_s / 2
        self._let_go = let_go
        self._clock = clock
        self._changed = threading.Condition()
        self._held: dict[str, Held] = {}  # in the order they were granted
        self._is_asking = True  # The first question is to come.
        self._bad: list[BadReport] = []
        self._closed = False
        self._asked_at = self._not_before = float("-inf")
        self._lease_s = math.inf
        self.samples_per_s = 0.0
        self._samples_per_lease = 0.0
        self._fetch_s = 0.0
        self._taken_at = 0.0

    def close(self) -> None:
        """Nothing more is taken, fetched or asked for; whoever waits returns. May be repeated."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def held(self) -> list[Held]:
        """The leases in hand, the longest held first."""
        with self._changed:
            return list(self._held.values())

    def __getitem__(self, lease_id: str) -> Held:
        """A lease in hand, by its id; KeyError if it is not."""
        return self._held[lease_id]

    @property
    def is_closed(self) -> bool:
        """Whether all is over."""
        return self._closed

    def empty(self) -> None:
        """Lets go of what is left, once the other threads are gone; what is not on record was for nothing."""
        with self._changed:
            for held in list(self._held.values()):
                self._drop(held)

    # The thread that uses.

    def next_ready(self) -> Held | None:
        """A lease whose slice is here, the longest held first; waits for one. None when all is over."""
        with self._changed:
            began = self._clock()
            while not self._closed:
                for held in self._held.values():
                    if held.path is not None and not held.is_spent and not held.training:
                        held.training = True
                        self.tally.waited_s += self._clock() - began
                        return held
                self._changed.wait(1.0)
        return None

    def take(self, held: Held) -> tuple[int, int] | None:
        """The samples [start, stop) of the next step, which may now be used; waits where a horizon ends.

        None when there are no more.
        """
        with self._changed:
            began = self._clock()
            while not (self._closed or held.over or held.taken >= held.stop):
                stop = min(held.taken + self._batch_size, held.stop)
                if stop <= held.limit:
                    start, held.taken = held.taken, stop
                    self._taken_at = self._clock()
                    self.tally.waited_s += self._taken_at - began
                    return start, stop
                self._changed.wait(1.0)
        return None

    def note_used(self, held: Held, step: int) -> None:
        """The samples taken last were used, in this step."""
        with self._changed:
            took_s, num = max(1e-6, self._clock() - self._taken_at), held.taken - held.used
            rate = num / took_s
            self.samples_per_s += (rate - self.samples_per_s) * (_NEW_WEIGHT if self.samples_per_s else 1.0)
            if held.over:
                self.tally.wasted += num
            held.used, held.step = held.taken, step
            if held.used >= held.stop:
                self._changed.notify_all()

    def note_over(self, held: Held) -> None:
        """The thread that uses lets go of it."""
        with self._changed:
            held.training, held.path = False, None
            self._let_go(held.grant)
            self._changed.notify_all()

    def fail(self, held: Held, reason: str) -> None:
        """Its slice cannot be used: the scheduler is told, and gives it to others."""
        with self._changed:
            held.reason = reason or "failed"
            self._end(held)

    def describe_wait(self) -> str:
        """What the thread that uses waits for, as text."""
        with self._changed:
            if self.paused:
                return "the scheduler's job, which is paused (`forebay schedule resume`)"
            fetching = [held.grant.name for held in self._held.values() if held.path is None and not held.over]
            if fetching:
                return f"{len(fetching)} slices to be fetched: {', '.join(fetching[:3])}"
            if self._is_asking:
                return "an answer of the scheduler"
            return "a lease; the scheduler has none free now, others hold what is left"

    # The threads that fetch.

    def next_to_fetch(self) -> Held | None:
        """A lease whose slice is not here yet; waits for one. None when all is over."""
        with self._changed:
            while not self._closed:
                for held in self._held.values():
                    if held.path is None and not held.fetching and not held.over:
                        held.fetching = True
                        return held
                self._changed.wait(1.0)
        return None

    def note_fetched(self, held: Held, path: Path, took_s: float) -> bool:
        """Its slice is here, pinned. Whether it is still wanted."""
        with self._changed:
            if held.over or self._closed:
                return False
            held.path = path
            self._fetch_s += (took_s - self._fetch_s) * _NEW_WEIGHT
            self._changed.notify_all()
            return True

    def give_back(self, held: Held) -> None:
        """Another may have it; what was used of it stays used."""
        with self._changed:
            self._end(held)

    def note_bad(self, peer_id: str, sha256: str, reason: str, wrong: bool) -> None:
        """A provider gave wrong bytes of a slice, or too few."""
        with self._changed:
            bad = BadReport(peer_id, sha256, reason[:300], wrong)
            self.tally.bad.append(bad)
            self._bad.append(bad)
            self._changed.notify_all()

    def note_away(self, peer_id: str, sha256: str, reason: str) -> None:
        """A provider did not answer, and will be asked again; others had better be sent elsewhere."""
        with self._changed:
            self._bad.append(BadReport(peer_id, sha256, reason[:300], wrong=False))

    # The thread that speaks with the scheduler.

    def wait_due(self) -> bool:
        """Waits until there is something to say or to ask; False when all is over."""
        with self._changed:
            while not self._closed:
                now = self._clock()
                if (at := self.due_at(now)) <= now:
                    return True
                self._changed.wait(min(at - now, 1.0))
        return False

    def state(self, last: bool = False) -> Ask:
        """What there is to say now. From here to `hear`, its horizons bind. `last`: all is given back."""
        with self._changed:
            self._asked_at = self._clock()
            if last:
                for held in list(self._held.values()):
                    held.over = held.over or held.used < held.stop
            job_id, uses = self._uses()
            told = {use.lease: use.stop for use in uses}
            # What was used of a lease is told before it is given back; of another job that takes another exchange.
            ends = {
                lease_id: held
                for lease_id, held in self._held.items()
                if held.over and told.get(lease_id, held.acked) >= min(held.used, held.stop)
            }
            self._is_asking = True
            return Ask(
                held=tuple(self._held),
                job_id=job_id,
                uses=uses,
                horizons=self._declare(),
                release=tuple(lease_id for lease_id, held in ends.items() if not held.reason),
                failed=tuple(Failed(lease_id, held.reason) for lease_id, held in ends.items() if held.reason),
                reports=tuple(self._bad),
                want=0 if last else self._num_wanted(),
            )

    def apply_answer(self, ask: Ask, answer: Answer) -> None:
        """Take over what the scheduler answered to `ask`."""
        with self._changed:
            self._is_asking = False
            now, given_back = self._clock(), {*ask.release, *(failed.lease_id for failed in ask.failed)}
            recorded = {use.lease_id: use for use in answer.uses}
            refused = {use.lease_id: use for use in answer.refused}
            for use in ask.uses:
                held = self._held[use.lease]
                if use.lease in recorded:
                    held.acked, held.stop, held.refusals = recorded[use.lease].offset, recorded[use.lease].stop, 0
                else:
                    self._refused(held, use, refused.get(use.lease))
            for lease_id in ask.held or ():
                held = self._held[lease_id]
                if lease_id in answer.live:
                    held.stop = answer.live[lease_id].stop
                elif held.acked < held.stop and lease_id not in given_back:
                    self._lose(held)
                if held.acked >= held.stop or lease_id in given_back or lease_id not in answer.live:
                    self._drop(held)
            del self._bad[: len(ask.reports)]
            for grant in answer.leases:
                if grant.lease_id not in self._held:
                    self._held[grant.lease_id] = Held(
                        grant, grant.stop, grant.start, grant.start, grant.start, grant.stop
                    )
                    self._lease_s = grant.expires_in_s
                    samples = grant.stop - grant.start
                    weight = _NEW_WEIGHT if self._samples_per_lease else 1.0
                    self._samples_per_lease += (samples - self._samples_per_lease) * weight
            for held in self._held.values():
                held.limit = held.stop
            self.paused, self.num_left_out = answer.paused, answer.num_left_out
            wait_s = 0.0 if len(answer.leases) >= ask.want else min(_MAX_WAIT_S, max(0.02, answer.wait_s))
            self._not_before = now + wait_s
            self.done = self.done or (answer.done and not self._held)
            self._closed = self._closed or self.done
            self._changed.notify_all()

    def due_at(self, now: float) -> float:
        """When the next exchange is due."""
        with self._changed:
            return max(self._due_at(now), self._asked_at + _LEAST_APART_S)

    def _due_at(self, now: float) -> float:
        if self._bad or any(held.over for held in self._held.values()):
            return now
        left = [held for held in self._held.values() if not held.is_spent]
        at = math.inf if left else self._not_before
        if any(held.used > held.acked for held in self._held.values()):
            at = min(at, self._asked_at + self._exchange_s if left else now)
        if self._held:
            at = min(at, self._asked_at + min(self._lease_s / 3, 4 * self._exchange_s))
        if 2 * len(left) <= self._capacity() and self._num_wanted():
            at = min(at, self._not_before)
        return at

    def _capacity(self) -> int:
        """How many leases to have in hand: the one in use, and those ahead."""
        if self._ahead is not None:
            return 1 + self._ahead
        if not self.samples_per_s:
            return 2
        lease_s = max(1e-6, self._samples_per_lease / self.samples_per_s)
        return 1 + min(MAX_LEASES - 1, max(1, math.ceil(2 * (self._exchange_s + self._fetch_s) / lease_s)))

    def _num_wanted(self) -> int:
        left = [held for held in self._held.values() if not held.is_spent]
        fits = 1
        if size := max((held.grant.bytes for held in self._held.values()), default=0):
            fits = (self._max_bytes - sum(held.grant.bytes for held in left)) // size
        return max(0 if left else 1, min(MAX_LEASES, self._capacity() - len(left), fits))

    def _uses(self) -> tuple[str, tuple[Used, ...]]:
        """What is used and not on record, of one job, and that job's id: a receipt is one signature of one job."""
        job_id, uses = "", []
        for held in self._held.values():
            if min(held.used, held.stop) > held.acked and job_id in ("", held.grant.job_id):
                job_id = held.grant.job_id
                uses.append(held.use())
        return job_id, tuple(uses)

    def _declare(self) -> dict[str, int]:
        """How far each lease may be used before the answer: together what is used until the next exchange is due.

        At least the step under way may end, or one step begin.
        """
        steps = int(self._exchange_s * self.samples_per_s / self._batch_size)
        is_idle = all(held.taken == held.used for held in self._held.values())
        left = max(steps, 1 if is_idle else 0) * self._batch_size
        horizons = {}
        for held in sorted(self._held.values(), key=lambda held: (not held.training, held.path is None)):
            horizon = held.taken if held.over or held.path is None else min(held.stop, held.taken + left)
            left = max(0, left - (horizon - held.taken))
            held.limit = horizons[held.grant.lease_id] = horizon
        return horizons

    def _refused(self, held: Held, use: Used, refused: Refused | None) -> None:
        """A use is not on record; `refused` says why, None that nothing was said of it."""
        refused = refused or Refused(use.lease, "unanswered", "no word of it", use.start)
        self.log.warning(
            "use of lease %s, samples [%d, %d): %s: %s", use.lease, use.start, use.stop, refused.code, refused.message
        )
        held.refusals += 1
        lost = refused.code == "lost" or not use.start <= refused.offset <= held.used
        if lost or held.refusals > _MAX_REFUSALS:
            self._lose(held)
        else:
            held.acked = refused.offset  # Signed anew from there.

    def _lose(self, held: Held) -> None:
        if not held.over:
            held.over = True
            self.tally.lost += held.taken > held.grant.start

    def _end(self, held: Held) -> None:
        held.over = True
        self._changed.notify_all()

    def _drop(self, held: Held) -> None:
        """Forgets a lease; what was used and is on nobody's record was for nothing."""
        held.over = True
        self.tally.wasted += max(0, held.used - held.acked)
        del self._held[held.grant.lease_id]
        if held.path is not None and not held.training:
            held.path = None
            self._let_go(held.grant)
