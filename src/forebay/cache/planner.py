"""Decides which slices to fetch and which to evict, from what a run will read. No thread, no waiting.

What may push what out: at any time, what no live process will read again goes. For a slice of the step that is next,
or within the horizon behind it, whatever is read later goes, the latest first (Belady); for one within the horizon
nothing that is read again within `window_steps`, as a slice of an open window is. The horizon is what keeps
fetching ahead from eating up what survives for the next epoch: with a budget of b bytes and a horizon of h, about
b - h bytes survive a cyclic pass, where the least recently used would keep none.

What it costs: 250 bytes a slice of the run; a look at every slice held each time the use of one begins or ends.
"""

import heapq
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from forebay.cache.cache import NotReserved, Reservation, SliceCache
from forebay.cache.downloads import Downloads
from forebay.cache.eviction import Evict, part_bytes
from forebay.cache.planned_use import Keep, PlannedUses, RunSlices
from forebay.errors import UsageError
from forebay.storage.transfer_state import Transfer

NEVER = 1 << 62

_MAX_FLIGHTS, _MAX_FLIGHT_BYTES = 16, 1 << 30
_LEAD_S = 30.0
_POLL_S, _EAGER_S, _PUBLISH_S = 0.5, 0.02, 1.0
_TOLD = 256
_WARN_S, _REFETCHED_PART = 30.0, 0.1
_LOST = {
    "room": "made room for another: the cache of {budget} bytes is smaller than what the windows keep open. Give it "
    "more room (cache_bytes), or open fewer windows (lanes, window); `forebay plan` says how many fit.",
    "another process": "was deleted from {directory} by another process. Give the processes that share this cache a "
    "larger budget, or each a directory of its own.",
    "damage": "({name}) was changed or damaged in {directory} after it was verified. Check its disk.",
}
log = logging.getLogger("forebay")


@dataclass
class PlanUpdate:
    """What one look came to."""

    gone: list[int] = field(default_factory=list)  # keys that were here and are no longer
    errors: dict[int, Exception] = field(default_factory=dict)  # of keys that were asked for
    wake_at: int = NEVER  # look again when the consumer stands before this step
    again_s: float = _POLL_S  # look again after so long in any case
    starved: str = ""  # why there is no room for what was asked for


class Planner:
    """What a `SliceFeed` does between two waits; its arguments are explained there."""

    def __init__(
        self,
        cache: SliceCache,
        slices: RunSlices,
        start_transfer: Callable[[int, Path], Transfer],
        on_done: Callable[[int], None],
        *,
        keep: Keep,
        horizon_bytes: int | None,
        epoch_of: Callable[[int, int], tuple[int | None, int | None]] | None,
        timeout_s: float,
        clock: Callable[[], float],
        first_alone: bool = False,
        window_steps: int = 0,
    ) -> None:
        self.cache = cache
        self.here: set[int] = set()  # keys known to be in the cache
        self.flights = Downloads(slices.sizes, start_transfer, on_done, clock)
        self.evicted = 0  # slices, by this process
        self.lost_to: dict[int, str] = {}  # why a slice is here no longer: `room`, `another process` or `damage`
        self._refetched_for: Counter[str] = Counter()
        self.lead_s = _LEAD_S
        self._slices = slices
        self._sha256s, self._sizes, self._keys = slices.sha256s, slices.sizes, slices.keys
        self._keep, self._horizon_bytes = keep, horizon_bytes
        self._epoch_of = epoch_of or (lambda step, key: (0, None))
        self._timeout_s, self._clock, self._first_alone = timeout_s, clock, first_alone
        self._window_steps = window_steps
        self._first: list[int] = []  # What the first step reads, until it is here.
        self._now = 0
        self._asked: Collection[int] = ()
        self._uses = PlannedUses(slices.uses, 0, 0)
        self._queue: list[tuple[int, int, int]] = []  # (next use, tie, key) of what is not here
        self._queued: set[int] = set()
        self._finished, self._gone, self._released = list[int](), list[int](), list[str]()
        self._unread, self._aims = dict[int, int](), dict[int, int]()  # fetched, under way: for which step
        self._ties, self._waiting_since = 0, 0.0
        self._listed_at = self._published_at = -math.inf
        self._told: object = None
        self._warned_at = -math.inf
        self._rate: tuple[float, int, float] = (clock(), 0, math.inf)  # at, step, steps per second before

    def seek(self, step: int, *, exact: bool = False) -> None:
        """The consumer stands before `step`: plan anew from there."""
        self._now = step
        self._uses = PlannedUses(self._slices.uses, self._slices.num_steps, step, exact=exact)
        self._queue, self._queued, self._aims = [], set(), {}
        self._rate = (self._clock(), step, math.inf)
        self._listed_at = self._published_at = -math.inf
        self._extend()
        self._first = [key for at, _, key in self._queue if at <= step and self._first_alone]

    def look(self, now: int, asked: Collection[int], finished: Iterable[int], lost: Iterable[int]) -> PlanUpdate:
        """Name what has arrived, evict, start what can be started. The consumer stands before step `now` and waits for
        `asked`; the transfers of `finished` have ended; `lost` were thought to be here and are not."""
        outcome = PlanUpdate()
        began = time.perf_counter()
        self._now, self._asked = now, asked
        at, step, _ = self._rate
        if (elapsed := self._clock() - at) >= 1.0:
            self._rate = (self._clock(), now, max(0, now - step) / elapsed)
        self._finished += finished
        while self._finished:
            self._finish(self._finished.pop(), outcome)
        for key in self.here.intersection(lost):
            self._forget(key, "another process")
        self._list()
        self._first = [key for key in self._first if key not in self.here]
        for key in self.flights.due():
            self._want(key)
        if self._keep == "window":
            self._drop_read()
        if self._bring_asked(outcome):
            self._bring_wanted(outcome)
        self._publish()
        outcome.gone, self._gone = self._gone, []
        outcome.wake_at = self._next_change()
        if 0.0 < outcome.again_s < _POLL_S:  # a long look, in a large cache, less often
            outcome.again_s = min(_POLL_S, max(outcome.again_s, 10 * (time.perf_counter() - began)))
        return outcome

    def close(self) -> None:
        """Cancel what is under way, and take back what other processes were told."""
        self.flights.close()
        self.cache.unpublish()

    def steps_to(self, sha256: str) -> float:
        """Steps from now until this run reads a slice; of one not seen ahead, at least."""
        key = self._keys.get(sha256)
        if key is None:
            return math.inf
        if self._keep == "all" or key in self._asked:
            return 0.0
        step = self._uses.next_use(key, self._now)
        if step is None:
            return math.inf if self._uses.ended else self._uses.known - self._now
        return step - self._now

    def _list(self) -> None:
        """What is here, of all that processes do in this directory."""
        if self._clock() - self._listed_at < _POLL_S:
            return
        self._listed_at = self._clock()
        here = {self._keys[sha256] for sha256 in self.cache.list_slices() if sha256 in self._keys}
        for key in self.here - here:
            self._forget(key, "another process")
        self.here = here

    def _forget(self, key: int, why: str) -> None:
        self.here.discard(key)
        self.lost_to.setdefault(key, why)
        self._unread.pop(key, None)
        self._gone.append(key)
        self._want(key)

    def _want(self, key: int) -> None:
        """Put a key that is not here into the queue, if it is seen to be read again."""
        step = self._uses.next_use(key, self._now)
        if step is not None and key not in self._queued:
            self._push(step, key)

    def _push(self, step: int, key: int) -> None:
        self._ties += 1
        self._queued.add(key)
        heapq.heappush(self._queue, (step, self._ties, key))

    def _extend(self) -> None:
        """Look further ahead."""
        for step, key in self._uses.extend():
            if key not in self.here and key not in self._queued and not self.flights.is_postponed(key):
                self._push(step, key)

    def _finish(self, key: int, outcome: PlanUpdate) -> None:
        again = self.flights[key].again
        is_here, error = self.flights.finish(key)
        if is_here:
            why = self.lost_to.pop(key, "room")
            if again:
                self._warn_of_refetch(key, why)
            self.here.add(key)
            self._unread[key] = self._aims.pop(key, self._uses.next_use(key, self._now) or 0)  # Maybe read by now.
        elif error is None:
            self._want(key)
        elif key in self._asked:
            outcome.errors[key] = error

    def _warn_of_refetch(self, key: int, why: str) -> None:
        """Say why slices come a second time in an epoch: each damaged one; others if they are a tenth of all bytes."""
        self._refetched_for[why] += 1
        counts = self.flights.counts
        few = counts["refetched_bytes"] <= _REFETCHED_PART * counts["fetched_bytes"] and why != "damage"
        if few or self._clock() - self._warned_at < _WARN_S:
            return
        self._warned_at = self._clock()
        times = ", ".join(f"{number} by {cause}" for cause, number in self._refetched_for.most_common())
        log.warning(
            "%d slices (%d of %d bytes) were fetched a second time in an epoch (lost by: %s). The last one %s",
            counts["refetched_slices"], counts["refetched_bytes"], counts["fetched_bytes"], times,
            _LOST[why].format(budget=self.cache.budget_bytes, directory=self.cache.directory, name=self._sha256s[key]),
        )  # fmt: skip

    def _bring_asked(self, outcome: PlanUpdate) -> bool:
        """Start what the consumer waits for; whether there is room to go on with what it will want."""
        missing = [key for key in self._asked if key not in self.here and key not in outcome.errors]
        absent = [key for key in missing if key not in self.flights]
        starved = ""
        started = False
        for key in absent:
            self.flights.hurry(key)
            refusal = self._start(key, 0, outcome)
            started |= refusal is None
            if refusal is not None and refusal.reason == "no room":
                starved = refusal.detail
        outcome.again_s = _EAGER_S if absent else outcome.again_s
        if started or starved:
            for key in self.flights:
                if key not in self._asked and self.steps_to(self._sha256s[key]) > 0:
                    self.flights.cancel(key)
        if not starved:
            self._waiting_since = 0.0
            return True
        outcome.starved = starved
        if self._uses.bridged:
            self.seek(self._now, exact=True)
            outcome.again_s = 0.0
            return False
        self._waiting_since = self._waiting_since or self._clock()
        since = self._clock() - self._timeout_s
        if self._waiting_since <= since and not self.flights and self.cache.is_stuck(since):
            self._waiting_since = 0.0
            for key in missing:
                outcome.errors[key] = UsageError(
                    f"cache: slice {self._sha256s[key][:12]}… was needed at step {self._now} and found no room in "
                    f"{self._timeout_s:.0f} s: {starved} All processes that share it wait for each other. Raise the "
                    "budget to the slices that they read at once."
                )
        return False

    def _bring_wanted(self, outcome: PlanUpdate) -> None:
        """Start what is read next, the nearest first, while there is room."""
        extended = False
        while len(self.flights) < _MAX_FLIGHTS:
            key = self._next_wanted()
            if key is None:
                if len(self.here) + len(self.flights) >= len(self._keys) or self._uses.is_full(self._now):
                    return
                if extended:
                    outcome.again_s = min(outcome.again_s, _EAGER_S)
                    return
                extended = True
                self._extend()
                continue
            steps = self._queue[0][0] - self._now
            if steps > 0 and self._first:
                return
            if len(self.flights) > 1 and self.flights.num_bytes() + self._sizes[key] > _MAX_FLIGHT_BYTES:
                return
            if self._keep == "window" and not self._is_near(key, steps):
                return
            refusal = self._start(key, steps, outcome)
            if refusal is not None and refusal.reason == "no room":
                return
            heapq.heappop(self._queue)
            self._queued.discard(key)
            if refusal is not None and refusal.reason == "busy":
                self.flights.postpone(key, _POLL_S)

    def _next_wanted(self) -> int | None:
        """The key at the head of the queue, which is put right first."""
        while self._queue:
            step, _, key = self._queue[0]
            at = self._uses.next_use(key, self._now)
            is_wanted = key not in self.here and key not in self.flights and not self.flights.is_postponed(key)
            if at == step and is_wanted:
                return key
            heapq.heappop(self._queue)
            self._queued.discard(key)
            if at is not None and is_wanted:
                self._push(at, key)
        return None

    def _start(self, key: int, steps: int, outcome: PlanUpdate) -> NotReserved | None:
        """Begin to fetch a slice, evicting what may go; None, or why it could not be begun."""
        reserved = self._reserve(key, steps, "unwanted")
        is_full = isinstance(reserved, NotReserved) and reserved.reason == "no room" and self._keep != "all"
        if is_full and (steps <= 0 or (self._is_near(key, steps) and not self._is_ending_unwanted())):
            self._know_held(once=steps <= 0)
            # What is fetched ahead pushes out nothing of a window that is open: it would come back at once.
            reserved = self._reserve(key, max(steps, self._window_steps) if steps > 0 else steps, "later")
        if isinstance(reserved, NotReserved):
            if reserved.reason == "cached":
                self.here.add(key)
            return reserved
        self._aims[key] = self._now + steps
        epoch, _ = self._epoch_of(self._now + steps, key)
        error = self.flights.start(key, reserved, epoch)
        if error is not None and key in self._asked:
            outcome.errors[key] = error
        return None

    def _is_ending_unwanted(self) -> bool:
        """Whether a slice came and was read before its transfer let go of its room: it goes first, in a moment."""
        unwanted = [key for key in self.flights if self._uses.next_use(key, self._now) is None]
        return any(self.cache.path_of(self._sha256s[key]).exists() for key in unwanted)

    def _reserve(self, key: int, steps: int, evict: Evict) -> Reservation | NotReserved:
        reserved = self.cache.try_reserve(
            self._sha256s[key], part_bytes(self._sizes[key]), steps=steps, next_use=self.steps_to, evict=evict
        )
        if isinstance(reserved, Reservation):
            for sha256 in reserved.evicted:
                self.evicted += 1
                if sha256 in self._keys:
                    self._forget(self._keys[sha256], "room")
        return reserved

    def _know_held(self, *, once: bool) -> None:
        """Look ahead until it is known which of the slices held is read last."""
        while not self._uses.is_full(self._now):
            unknown = sum(self._uses.next_use(key, self._now) is None for key in self.here)
            if unknown <= 1:
                return
            self._extend()
            if once:
                return

    def _is_near(self, key: int, steps: int) -> bool:
        """Whether a slice that is needed in so many steps lies within the horizon."""
        if self._horizon_bytes is None:
            self._unread = {key: at for key, at in self._unread.items() if at > self._now}
            if not self.flights and not self._unread:
                return True
            if steps > self._rate[2] * self.lead_s:
                return False
        most = self._horizon_bytes
        if most is None:
            most = self.cache.budget_bytes // (4 if self.lead_s == _LEAD_S else 2)
        ahead = self._sizes[key]
        for other in {*self.here, *self.flights, *self._wanted_until(self._now + steps)} - {key}:
            at = self._uses.next_use(other, self._now)
            if at is not None and 0 < at - self._now <= steps:
                ahead += self._sizes[other]
        return ahead <= most

    def _wanted_until(self, step: int) -> list[int]:
        """The keys in the queue that are read at this step or before: as far down the heap as there are such."""
        found, at = [], [0]
        while at:
            place = at.pop()
            if place < len(self._queue) and self._queue[place][0] <= step:
                found.append(self._queue[place][2])
                at += (2 * place + 1, 2 * place + 2)
        return found

    def _drop_read(self) -> None:
        """Delete what was read and is not read again in the epoch that read it, unless it is near."""
        read = [key for key in self.here if key not in self._asked and self._is_read(key)]
        released = [self._sha256s[key] for key in read]
        if released != self._released:
            self._released, self._published_at = released, -math.inf
        for sha256 in self.cache.drop(released) if released else ():
            self.evicted += 1
            self._forget(self._keys[sha256], "room")

    def _is_read(self, key: int) -> bool:
        if self._unread.get(key, -1) > self._now:
            return False  # fetched ahead
        last = self._uses.last_use(key, self._now)
        _, end = self._epoch_of(self._now if last is None else last, key)
        step = self._uses.next_use(key, self._now)
        while step is None and (end is None or self._uses.known < end) and not self._uses.is_full(self._now):
            self._extend()
            step = self._uses.next_use(key, self._now)
        if step is None:
            return self._uses.ended or (end is not None and self._uses.known >= end)
        return step > self._now and end is not None and step >= end and not self._is_near(key, step - self._now)

    def _publish(self) -> None:
        """Tell the other processes what this one will read, and where it stands."""
        if self._clock() - self._published_at >= _PUBLISH_S:
            self._published_at = self._clock()
            soon = [key for _, _, key in heapq.nsmallest(_TOLD, self._queue)]
            uses = {self._sha256s[key]: self._uses.use(key, self._now) for key in (*self.here, *self.flights, *soon)}
            told = {sha256: use for sha256, use in uses.items() if use is not None}
            if (told, self._released) != self._told:
                self._told = (told, self._released)
                self.cache.publish(told, self._released)
        self.cache.set_position(self._now, self._waiting_since)

    def _next_change(self) -> int:
        """The first step at which the use of a slice that is here begins or ends, if that matters."""
        if not self._queue and self._keep != "window":
            return NEVER
        soonest = self._queue[0][0] if self._queue else NEVER
        for key in self.here:
            use = self._uses.use(key, self._now)
            if use is not None:
                soonest = min(soonest, use[0] if use[0] > self._now else use[1] + 1)
        return max(soonest, self._now + 1)
