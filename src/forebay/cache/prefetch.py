"""Brings the slices of a run before they are needed, as its order is known, and keeps those in use.

A thread looks ahead, starts transfers in order of first use, names what is verified and evicts (`planner.py`). The
consumer holds what it acquired, by pins that other processes respect, and nothing else. Processes that need more
than their budget at once take turns where they can, the elder first (`acquire_all` holds all or nothing); where
they cannot, waiting ends with an error that says so, never in silence.

What it costs: 0.1 us a step at which no use of a slice begins or ends, 20 us for a slice that is acquired.
"""

import logging
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.cache.cache import SliceCache
from forebay.cache.downloads import named
from forebay.cache.planned_use import I64, Keep, RunSlices, UsesFunction
from forebay.cache.planner import NEVER, Planner, PlanUpdate
from forebay.errors import UsageError
from forebay.storage.locks import at_fork
from forebay.storage.transfer_state import Transfer

__all__ = ["Keep", "SliceFeed"]

_GRACE_S = 0.05  # A shorter wait is not worth a line.
_TELL_S = 10.0  # Between lines of waits.
_CLOSE_S = 0.8
_MAX_LEAD_S = 480.0
log = logging.getLogger("forebay")


@dataclass
class _Wait:
    began: float
    level: int
    told_starved: bool = False


class SliceFeed:
    """The slices of one run, fetched ahead. Nothing is touched before `seek`.

    One consumer thread seeks, acquires and advances; the other methods may be called from any thread. A child made
    by fork cannot use its parent's feed (`pid` says whose it is): make another there.

    Args:
        sha256s: Hex, or uint8 [S, 32], by key. The same slice under two keys is fetched once.
        sizes: int64 [S], bytes.
        uses: Run steps [start, stop) to (steps, keys), distinct pairs by step, then in order of first use. Called
            from the feed's thread.
        num_steps: Where the run ends; None for never.
        start_transfer: Begins to fetch a slice into its partial file, and returns at once.
        keep: `budget` evicts when room is needed; `window` fetches ahead within the horizon only, and deletes a
            slice once this process and the others have read it in their epochs, unless it lies within the horizon;
            `all` never evicts a slice of the run.
        horizon_bytes: Of slices not needed at once, how much may push out what is read later. By default what the
            next 30 s of training read (twice as much after each late slice), one slice at least, a quarter of the
            budget at most (half after a late slice).
        on_evict: Told the key of a slice that is here no longer; from the feed's thread.
        epoch_of: (step, key) to the epoch that reads the slice then, and the run step at which it ends, which `window`
            goes by; None where there is none or it is not known.
        first_alone: Begin with what the first step after a seek reads, and with nothing else before that is here:
            where the way is narrow, it would share it with what is needed later.
        window_steps: What is read again within so many steps is not evicted for what is fetched ahead.
        timeout_s: How long to wait for room when nobody can make any.
    """

    def __init__(
        self,
        cache: SliceCache,
        sha256s: Sequence[str] | NDArray[np.uint8],
        sizes: I64,
        uses: UsesFunction,
        num_steps: int | None,
        start_transfer: Callable[[int, Path], Transfer],
        *,
        keep: Keep = "budget",
        horizon_bytes: int | None = None,
        on_evict: Callable[[int], object] | None = None,
        epoch_of: Callable[[int, int], tuple[int | None, int | None]] | None = None,
        first_alone: bool = False,
        window_steps: int = 0,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.pid = os.getpid()
        self._slices = RunSlices.of(sha256s, sizes, uses, num_steps)
        self._slices.check(keep, cache.budget_bytes)
        self._sha256s, self._sizes, self._same = self._slices.sha256s, self._slices.sizes, self._slices.same
        self._clock, self._on_evict, self._timeout_s = clock, on_evict, timeout_s
        self._planner = Planner(
            cache, self._slices, start_transfer, _weakly(self),
            keep=keep, horizon_bytes=horizon_bytes, epoch_of=epoch_of, timeout_s=timeout_s, clock=clock,
            first_alone=first_alone, window_steps=window_steps,
        )  # fmt: skip
        self._waited_s, self._late = 0.0, 0
        self._told_at = -math.inf
        self._closed = False
        self._thread: threading.Thread | None = None
        self._begin()
        at_fork(self)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        # Below: under the condition.
        self._now = -1
        self._wake_at = self._plan_at = NEVER
        self._pins: dict[int, int] = {}  # until which step
        self._asked: Counter[int] = Counter()
        self._errors: dict[int, Exception] = {}
        self._finished: list[int] = []
        self._lost: list[int] = []
        self._seek_to: int | None = None
        self._began_at = 0  # the step of the last seek
        self._starved = ""  # why there is no room for what is asked for
        self._dirty = False  # whether the thread has something to look at

    def after_fork(self) -> None:
        """The thread and the transfers stay with the parent."""
        self._begin()
        self._closed, self._thread = True, None
        self._planner.flights.clear()

    def seek(self, step: int) -> None:
        """The consumer stands before `step`, forward or back: lets go of all that it acquired."""
        self._check_open()
        if self._thread is None:
            self.cache.check_space(self._slices.num_bytes())
            self.cache.clean(self._slices.keys)
        with self._changed:
            self._let_go(NEVER)
            self._now = self._seek_to = self._began_at = step
            self._errors.clear()
            self._wake()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(weakref.ref(self), self._changed, self._planner), name="forebay-feed", daemon=True
            )
            self._thread.start()

    def is_cached(self, key: int) -> bool:
        """Whether a slice is here, at this moment and without waiting; `acquire` may yet find it evicted."""
        return self.cache.path_of(self._sha256s[key]).exists()

    def acquire(self, key: int, until: int) -> Path:
        """The file of a slice, kept at least until `advance(until)`; waits until it is here and verified.

        NetworkError or IntegrityError, naming the slice, if its transfer failed after the tries that it had; asked
        again, it is tried again.
        """
        if self._pins.get(self._same[key], -1) >= until > self._now:
            return self.cache.directory / self._sha256s[key]
        return self.acquire_all([key], until)[0]

    def acquire_all(self, keys: Sequence[int], until: int) -> list[Path]:
        """As `acquire`, for several slices: all or none, so that nobody waits with the half of what it needs.

        Two processes whose budget cannot hold what both need at once then take turns, instead of waiting forever.
        """
        self._check_open()
        if self._thread is None:
            raise UsageError("feed: expected seek before acquire. Say where the run begins.")
        wanted = list(dict.fromkeys(self._same[key] for key in keys))
        if not self._hold(wanted, until):
            self._await(wanted, until)
        return [self.cache.directory / self._sha256s[key] for key in keys]

    def try_acquire_all(self, keys: Sequence[int], until: int) -> bool:
        """As `acquire_all`, but without waiting: False, and nothing more is kept, if one is not here."""
        self._check_open()
        return self._hold(list(dict.fromkeys(self._same[key] for key in keys)), until)

    def reject(self, key: int) -> None:
        """A slice that was acquired has wrong bytes on disk: delete it. `acquire` has it fetched again."""
        key = self._same[key]
        with self._changed:
            if self._pins.pop(key, None) is not None:
                self.cache.unpin(self._sha256s[key])
            self.cache.discard(self._sha256s[key])
            self._planner.lost_to[key] = "damage"

    def advance(self, step: int) -> None:
        """All before `step` is consumed: what was acquired until then may be evicted from now on.

        Close its maps first: a deleted file takes its bytes until it is unmapped, and nobody counts them.
        """
        if step < self._now:
            raise UsageError(f"feed: expected a step from {self._now} on, got {step}. Use seek to go back.")
        if step < self._wake_at:
            self._now = step
            return
        with self._changed:  # At once: planned at `step` with its pins of before, slices to come would be evicted.
            self._now = step
            self._let_go(step)
            self._wake()

    def close(self) -> None:
        """Cancel what is under way and let go of everything; under a second, and may be called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._let_go(NEVER)
            self._changed.notify_all()
        if self._thread is None or self._thread is threading.current_thread():
            self._planner.close()
        else:
            self._thread.join(_CLOSE_S)

    def __del__(self) -> None:
        if hasattr(self, "_changed"):
            self.close()

    def stats(self) -> dict[str, Any]:
        """Counters since the start: slices and bytes fetched, fetched again (`repeated_fetches`; for one epoch
        `refetched_slices`, `refetched_bytes`), evicted, failed; waits and their seconds.

        `held_bytes` are the run's slices that are here, `in_flight` the transfers under way.
        """
        held = sum(self._sizes[key] for key in list(self._planner.here))
        waits = {"waited_s": self._waited_s, "late": self._late, "held_bytes": held}
        counts = self._planner.flights.counts | {"evicted": self._planner.evicted}
        return counts | waits | {"in_flight": len(self._planner.flights)}

    def _check_open(self) -> None:
        if os.getpid() != self.pid:
            raise UsageError("feed: made before a fork, by another process. Make another in this one.")
        if self._closed:
            raise UsageError("feed: it is closed. Make another.")

    def _wake(self) -> None:
        self._dirty = True
        self._changed.notify_all()

    def _ended(self, key: int) -> None:
        """A transfer ended; from any thread."""
        with self._changed:
            self._finished.append(key)
            self._wake()

    def _let_go(self, step: int) -> None:
        """Unpin what was acquired until this step or one before it; under the condition."""
        for key in [key for key, until in self._pins.items() if until <= step]:
            del self._pins[key]
            self.cache.unpin(self._sha256s[key])
        self._wake_at = min([self._plan_at, *self._pins.values()])

    def _hold(self, keys: list[int], until: int) -> bool:
        """Pin slices, all or none; False if one is not here."""
        with self._changed:
            fresh = [key for key in keys if key not in self._pins]
            if fresh and self.cache.pin_all([self._sha256s[key] for key in fresh]) is None:
                return False
            for key in keys:
                self._pins[key] = max(until, self._now + 1, self._pins.get(key, 0))
                self._wake_at = min(self._wake_at, self._pins[key])
        return True

    def _await(self, keys: list[int], until: int) -> None:
        """Have the thread bring slices, and pin them."""
        with self._changed:
            self._late += 1
            self._asked.update(keys)
            for key in keys:
                self._errors.pop(key, None)
            self._wake()
        wait = _Wait(self._clock(), logging.INFO if self._now == self._began_at else logging.WARNING)
        try:
            while not self._hold(keys, until):
                with self._changed:
                    for key in keys:
                        if key in self._errors:
                            error = self._errors[key]
                            raise named(error, self._sha256s[key], key) from error
                    self._check_open()
                    for key in keys:
                        if (flight := self._planner.flights.get(key)) is not None:
                            flight.transfer.needed = True
                    lost = [key for key in keys if key in self._planner.here and not self.is_cached(key)]
                    if lost:  # evicted by another process
                        self._lost += lost
                        self._wake()
                    self._changed.wait(_GRACE_S)
                self._say(wait, keys)
        finally:
            waited_s = self._clock() - wait.began
            with self._changed:
                self._asked.subtract(keys)
                self._asked += Counter()
                self._waited_s += waited_s
        if self._now > self._began_at:
            self._planner.lead_s = min(_MAX_LEAD_S, 2 * self._planner.lead_s)

    def _say(self, wait: _Wait, keys: list[int]) -> None:
        """A line for a wait, one in 10 s for all of them, and another when it is for room."""
        now = self._clock()
        waited_s = now - wait.began
        if waited_s >= _GRACE_S and now - self._told_at >= _TELL_S:
            if wait.level == logging.WARNING:
                self._told_at = now
            log.log(
                wait.level, "%s at step %d. Waiting; %d waits and %.1f s so far.", self._progress(keys), self._now,
                self._late, self._waited_s + waited_s,
            )  # fmt: skip
        if not wait.told_starved and waited_s >= self._timeout_s / 2 and (starved := self._starved):
            wait.told_starved = True
            log.warning("waiting for room in the cache: %s", starved)

    def _progress(self, keys: list[int]) -> str:
        """How much of what is waited for is here."""
        total = sum(self._sizes[key] for key in keys)
        received = 0
        for key in keys:
            flight = self._planner.flights.get(key)
            if self.is_cached(key):
                received += self._sizes[key]
            elif flight is not None:
                received += min(flight.transfer.received, self._sizes[key])
        name = f"slice {keys[0]} ({self._sha256s[keys[0]][:12]}…)" if len(keys) == 1 else f"{len(keys)} slices"
        return f"late: {name} needed, {received} of {total} bytes here ({received / max(1, total):.0%})"

    def _look(self) -> float:
        """One look of the thread's: how long it may wait before the next."""
        with self._changed:
            seek_to, self._seek_to = self._seek_to, None
            finished, self._finished = self._finished, []
            lost, self._lost = self._lost, []
            now, asked = self._now, list(self._asked)
            self._dirty = False
        try:
            if seek_to is not None:
                self._planner.seek(seek_to)
            outcome = self._planner.look(now, asked, finished, lost)
        except Exception as error:  # noqa: BLE001 - who waits for a slice gets it; the thread tries again
            outcome = PlanUpdate(errors=dict.fromkeys(asked, error), wake_at=now + 1)
        else:
            seek_to = None
        with self._changed:
            if self._seek_to is None:
                self._seek_to = seek_to  # what went wrong is done again
            if outcome.again_s == 0.0:
                self._dirty = True
            self._errors |= outcome.errors
            self._starved = outcome.starved
            self._plan_at = outcome.wake_at
            self._wake_at = min([self._plan_at, *self._pins.values()])
            if self._seek_to is None and self._now >= self._plan_at:
                self._dirty = True
            self._changed.notify_all()
        if self._on_evict is not None and outcome.gone:
            gone = set(outcome.gone)
            for key, same in enumerate(self._same):
                if same in gone:
                    self._on_evict(key)
        return outcome.again_s


def _run(reference: weakref.ref[SliceFeed], changed: threading.Condition, planner: Planner) -> None:
    """The feed's thread: looks, waits, and ends with the feed, also with one that was forgotten."""
    while True:
        feed = reference()
        if feed is None or feed._closed:
            break
        wait_s = feed._look()
        with changed:
            idle = not feed._dirty and not feed._closed
            del feed
            if idle:
                changed.wait(wait_s)
    del feed
    planner.close()


def _weakly(feed: SliceFeed) -> Callable[[int], None]:
    """Tells a feed of a transfer's end, if it is still there."""
    reference = weakref.ref(feed)

    def ended(key: int) -> None:
        if (there := reference()) is not None:
            there._ended(key)

    return ended
