"""Downloads the slices of a run before they are needed, as its order is known, and keeps those in use.

A thread plans ahead (`planner.py`), starts downloads in order of first use and evicts. The consumer pins what it
acquires, all or none; processes that together need more than the budget take turns, the oldest first, or fail.
Cost: 0.1 us per step at which no use of a slice begins or ends, 30 us per acquired slice.
"""

import logging
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.cache.cache import SliceCache
from forebay.cache.planned_use import I64, UsesFunction
from forebay.cache.planner import NEVER, Planner, PlanUpdate
from forebay.errors import ForebayError, UsageError
from forebay.storage.locks import at_fork
from forebay.storage.transfer_state import Transfer

_MIN_LOGGED_WAIT_S = 0.05
_LOG_INTERVAL_S = 10.0
_CLOSE_S = 0.8
log = logging.getLogger("forebay")


class SliceFeed:
    """The slices of one run, prefetched. It does nothing before `seek`.

    One consumer thread seeks, acquires and advances; the other methods can be called from any thread. A forked child
    cannot use its parent's feed (`pid` is the owner); it makes a new one.

    Args:
        sha256s: Hex, or uint8 [S, 32], by key. A slice with two keys is downloaded once.
        sizes: int64 [S], bytes.
        uses: Run steps [start, stop) to (steps, keys), distinct pairs by step, then in order of first use. Called from
            the feed's thread.
        num_steps: End of the run; None for an endless one.
        start_transfer: Starts to download a slice into its partial file, and returns at once.
        options: As `Planner`.
    """

    def __init__(
        self, cache: SliceCache, sha256s: Sequence[str] | NDArray[np.uint8], sizes: I64, uses: UsesFunction,
        num_steps: int | None, start_transfer: Callable[[int, Path], Transfer], *,
        clock: Callable[[], float] = time.monotonic, **options: Any,
    ) -> None:  # fmt: skip
        self.cache = cache
        self.pid = os.getpid()
        self._clock = clock
        reference = weakref.ref(self)

        def on_done(key: int) -> None:
            if (feed := reference()) is not None:
                feed._record_finished(key)

        self._planner = planner = Planner(
            cache, sha256s, sizes, uses, num_steps, start_transfer, on_done, clock=clock, **options
        )
        self._sha256s, self._sizes, self._same = planner.sha256s, planner.sizes, planner.same
        self._waited_s, self._num_waits = 0.0, 0
        self._logged_at = -math.inf
        self._closed = False
        self._thread: threading.Thread | None = None
        self._reset()
        at_fork(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._now = -1
        self._wake_at = self._plan_at = NEVER
        self._pinned_until: dict[int, int] = {}  # step by key
        self._requested: Counter[int] = Counter()
        self._errors: dict[int, Exception] = {}
        self._finished: list[int] = []
        self._lost: list[int] = []
        self._seek_to: int | None = None
        self._first_step = 0  # of the last seek
        self._no_room = ""  # why there is no room for a requested slice
        self._has_news = False  # for the thread

    def after_fork(self) -> None:
        self._reset()
        self._closed, self._thread = True, None
        self._planner.downloads.clear()

    def seek(self, step: int) -> None:
        """Set the next step of the consumer, forward or back; all acquired slices are released."""
        self._check_open()
        if self._thread is None:
            keys = self._planner.keys
            self.cache.check_space(sum(self._sizes[key] for key in keys.values()))
            self.cache.clean(keys)
        with self._changed:
            self._unpin_until(NEVER)
            self._now = self._seek_to = self._first_step = step
            self._errors.clear()
            self._wake()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(weakref.ref(self), self._changed, self._planner), name="forebay-feed", daemon=True
            )
            self._thread.start()

    def is_cached(self, key: int) -> bool:
        return self.cache.path_of(self._sha256s[key]).exists()

    def acquire(self, key: int, until: int) -> Path:
        """Wait until a slice is cached; return its file, which is kept at least until `advance(until)`.

        Raises:
            NetworkError: If its download failed; the next call tries again. IntegrityError likewise.
        """
        if self._pinned_until.get(self._same[key], -1) >= until > self._now:
            return self.cache.directory / self._sha256s[key]
        return self.acquire_all([key], until)[0]

    def acquire_all(self, keys: Sequence[int], until: int) -> list[Path]:
        """Like `acquire` for several slices, all or none, so that two processes cannot block each other."""
        self._check_open()
        if self._thread is None:
            raise UsageError("feed: expected seek before acquire. Say where the run begins.")
        unique = list(dict.fromkeys(self._same[key] for key in keys))
        if not self._pin(unique, until):
            self._wait_for(unique, until)
        return [self.cache.directory / self._sha256s[key] for key in keys]

    def try_acquire_all(self, keys: Sequence[int], until: int) -> bool:
        """Like `acquire_all` without waiting: False, and no pin, if a slice is not cached."""
        self._check_open()
        return self._pin(list(dict.fromkeys(self._same[key] for key in keys)), until)

    def reject(self, key: int) -> None:
        """Delete an acquired slice whose bytes on disk are wrong; `acquire` downloads it again."""
        key = self._same[key]
        with self._changed:
            if self._pinned_until.pop(key, None) is not None:
                self.cache.unpin(self._sha256s[key])
            self.cache.discard(self._sha256s[key])

    def advance(self, step: int) -> None:
        """Set the next step; slices acquired until then may be evicted.

        Close their maps first: the bytes of a deleted file are not counted while it is mapped.
        """
        if step < self._now:
            raise UsageError(f"feed: expected a step from {self._now} on, got {step}. Use seek to go back.")
        if step < self._wake_at:
            self._now = step
            return
        with self._changed:  # A plan for `step` with the pins of before would evict slices that are needed.
            self._now = step
            self._unpin_until(step)
            self._wake()

    def close(self) -> None:
        """Cancel the downloads and release all slices, within a second. May be called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._unpin_until(NEVER)
            self._changed.notify_all()
        if self._thread is None or self._thread is threading.current_thread():
            self._planner.close()
        else:
            self._thread.join(_CLOSE_S)

    def __del__(self) -> None:
        if hasattr(self, "_changed"):
            self.close()

    def stats(self) -> dict[str, Any]:
        """Return the counters since the start.

        Slices and bytes fetched, fetched again (`repeated_fetches`; in one epoch `refetched_slices`,
        `refetched_bytes`), evicted, failed; waits (`late`) and their seconds; `held_bytes`: slices of the run that are
        cached; `in_flight`: running downloads.
        """
        cached_bytes = sum(self._sizes[key] for key in list(self._planner.cached))
        waits = {"waited_s": self._waited_s, "late": self._num_waits, "held_bytes": cached_bytes}
        counts = self._planner.downloads.counts | {"evicted": self._planner.num_evicted}
        return counts | waits | {"in_flight": len(self._planner.downloads)}

    def _check_open(self) -> None:
        if os.getpid() != self.pid:
            raise UsageError("feed: made before a fork, by another process. Make another in this one.")
        if self._closed:
            raise UsageError("feed: it is closed. Make another.")

    def _wake(self) -> None:
        self._has_news = True
        self._changed.notify_all()

    def _record_finished(self, key: int) -> None:
        with self._changed:
            self._finished.append(key)
            self._wake()

    def _unpin_until(self, step: int) -> None:
        for key in [key for key, until in self._pinned_until.items() if until <= step]:
            del self._pinned_until[key]
            self.cache.unpin(self._sha256s[key])
        self._wake_at = min([self._plan_at, *self._pinned_until.values()])

    def _pin(self, keys: list[int], until: int) -> bool:
        with self._changed:
            unpinned = [key for key in keys if key not in self._pinned_until]
            if unpinned and self.cache.pin_all([self._sha256s[key] for key in unpinned]) is None:
                return False
            for key in keys:
                self._pinned_until[key] = max(until, self._now + 1, self._pinned_until.get(key, 0))
                self._wake_at = min(self._wake_at, self._pinned_until[key])
        return True

    def _wait_for(self, keys: list[int], until: int) -> None:
        with self._changed:
            self._num_waits += 1
            self._requested.update(keys)
            for key in keys:
                self._errors.pop(key, None)
            self._wake()
        began = self._clock()
        try:
            while not self._pin(keys, until):
                with self._changed:
                    for key in keys:
                        if (error := self._errors.get(key)) is not None:
                            kind = type(error) if isinstance(error, ForebayError) else UsageError
                            text = f"slice {key} ({self._sha256s[key][:12]}…) was not downloaded: {error}"
                            raise kind(text) from error
                    self._check_open()
                    lost = [key for key in keys if key in self._planner.cached and not self.is_cached(key)]
                    if lost:  # evicted by another process
                        self._lost += lost
                        self._wake()
                    self._changed.wait(_MIN_LOGGED_WAIT_S)
                self._log_wait(keys, self._clock() - began)
        finally:
            with self._changed:
                self._requested.subtract(keys)
                self._requested += Counter()
                self._waited_s += self._clock() - began

    def _log_wait(self, keys: list[int], waited_s: float) -> None:
        now = self._clock()
        if waited_s < _MIN_LOGGED_WAIT_S or now - self._logged_at < _LOG_INTERVAL_S:
            return
        is_first = self._now == self._first_step
        if not is_first:
            self._logged_at = now
        downloads = [self._planner.downloads.get(key) for key in keys]
        log.log(
            logging.INFO if is_first else logging.WARNING,
            "late: slice %d (%s…) needed at step %d, %d of %d bytes here. Waiting; %d waits and %.1f s so far. %s",
            keys[0], self._sha256s[keys[0]][:12], self._now, sum(d.transfer.received for d in downloads if d),
            sum(self._sizes[key] for key in keys), self._num_waits, self._waited_s + waited_s, self._no_room,
        )  # fmt: skip

    def _update(self) -> float:
        with self._changed:
            seek_to, self._seek_to = self._seek_to, None
            finished, self._finished = self._finished, []
            lost, self._lost = self._lost, []
            now, requested = self._now, list(self._requested)
            self._has_news = False
        try:
            if seek_to is not None:
                self._planner.seek(seek_to)
            result = self._planner.update(now, requested, finished, lost)
        except Exception as error:  # noqa: BLE001 - the waiting consumer gets it; the thread tries again
            result = PlanUpdate(errors=dict.fromkeys(requested, error), wake_at=now + 1)
        else:
            seek_to = None
        with self._changed:
            if self._seek_to is None:
                self._seek_to = seek_to  # repeated after an error
            self._errors |= result.errors
            self._no_room = result.no_room
            self._plan_at = result.wake_at
            self._wake_at = min([self._plan_at, *self._pinned_until.values()])
            if result.poll_s == 0.0 or (self._seek_to is None and self._now >= self._plan_at):
                self._has_news = True
            self._changed.notify_all()
        return result.poll_s


def _run(reference: weakref.ref[SliceFeed], changed: threading.Condition, planner: Planner) -> None:
    while True:
        feed = reference()
        if feed is None or feed._closed:
            break
        poll_s = feed._update()
        with changed:
            is_idle = not feed._has_news and not feed._closed
            del feed
            if is_idle:
                changed.wait(poll_s)
    del feed
    planner.close()
