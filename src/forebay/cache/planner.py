"""Decides which slices to download and to evict, from the planned uses of a run. It has no thread and never waits.

Slices that no live process will read are evicted first. For a slice of the next step, or within the horizon, those that
are read later are evicted too, the latest first (Belady); for one within the horizon, none that is read again within
`window_steps`. With a budget of b bytes and a horizon of h, about b - h bytes survive a cyclic pass.
Cost: 250 bytes per slice of the run; a pass over the cached slices each time the use of one begins or ends.
"""

import heapq
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forebay.cache.cache import NotReserved, Reservation, SliceCache
from forebay.cache.eviction import Evict, part_bytes
from forebay.cache.planned_use import I64, PlannedUses, UsesFunction
from forebay.errors import UsageError
from forebay.storage.transfer_state import Transfer

NEVER = 1 << 62
TIMEOUT_S = 10.0  # a wait for room fails if no process can make any for so long

_MAX_DOWNLOADS, _MAX_DOWNLOAD_BYTES = 16, 1 << 30
_POLL_S, _EAGER_POLL_S, _PUBLISH_S = 0.5, 0.02, 1.0
_MAX_PUBLISHED = 256  # queued slices
_CLOSE_S = 0.4
_RETRY_S = 5.0  # after a transfer that failed, which has retried itself


@dataclass
class PlanUpdate:
    """The result of one `Planner.update`."""

    errors: dict[int, Exception] = field(default_factory=dict)  # of requested keys
    wake_at: int = NEVER  # update again before this step
    poll_s: float = _POLL_S  # update again after so long
    no_room: str = ""  # why there is no room for a requested slice


class Planner:
    """The state of a `SliceFeed` between two updates.

    Args:
        sha256s, sizes, uses, num_steps, start_transfer: As `SliceFeed`.
        on_done: Called with the key of an ended transfer.
        horizon_bytes: How many bytes that are not needed at once may evict slices that are read later. By default a
            quarter of the budget, and at least one slice.
        epoch_of: Maps (step, key) to the epoch of that read, for the counts of slices fetched twice in one.
        window_steps: Prefetching evicts no slice that is read again within so many steps.
    """

    def __init__(
        self, cache: SliceCache, sha256s: Sequence[str] | NDArray[np.uint8], sizes: I64, uses: UsesFunction,
        num_steps: int | None, start_transfer: Callable[[int, Path], Transfer], on_done: Callable[[int], None], *,
        horizon_bytes: int | None = None, epoch_of: Callable[[int, int], int | None] = lambda step, key: 0,
        window_steps: int = 0, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.cache = cache
        self.sha256s = [row if isinstance(row, str) else row.tobytes().hex() for row in sha256s]
        self.sizes: list[int] = np.asarray(sizes, np.int64).tolist()
        self.keys: dict[str, int] = {}  # of several keys of one slice the first
        same = np.array([self.keys.setdefault(sha256, key) for key, sha256 in enumerate(self.sha256s)], np.int64)
        self.same: list[int] = same.tolist()  # by key, the first key of its slice

        def first_keys(start: int, stop: int) -> tuple[I64, I64]:
            steps, used = uses(start, stop)
            return steps, same[used]

        self.cached: set[int] = set()  # keys
        self.downloads = SliceDownloads(self.sizes, start_transfer, on_done, clock)
        self.num_evicted = 0  # by this process
        self._find_uses, self._num_steps = first_keys, num_steps
        self._horizon_bytes, self._epoch_of, self._window_steps = horizon_bytes, epoch_of, window_steps
        self._clock = clock
        self._now = 0
        self._requested: Collection[int] = ()
        self._uses = PlannedUses(first_keys, 0, 0)
        self._first: list[int] = []  # keys of the first step that are not cached yet
        self._queue: list[tuple[int, int, int]] = []  # (next use, tie, key) of slices to download
        self._queued: set[int] = set()
        self._num_pushed = 0
        self._finished: list[int] = []
        self._unread: dict[int, int] = {}  # downloaded slices, and for which step
        self._aims: dict[int, int] = {}  # the same of running downloads
        self._waiting_since = 0.0
        self._listed_at = self._published_at = -math.inf
        self._published: object = None

    def seek(self, step: int, *, exact: bool = False) -> None:
        self._now = step
        self._uses = PlannedUses(self._find_uses, self._num_steps, step, exact=exact)
        self._queue, self._queued, self._aims = [], set(), {}
        self._listed_at = self._published_at = -math.inf
        self._extend()
        self._first = [key for use, _, key in self._queue if use <= step]

    def update(self, now: int, requested: Collection[int], finished: Iterable[int], lost: Iterable[int]) -> PlanUpdate:
        """Process ended downloads, evict, and start downloads.

        Args:
            now: The next step of the consumer.
            requested: Keys that it waits for.
            finished: Keys whose transfers have ended.
            lost: Keys that were believed to be cached and are not.
        """
        result = PlanUpdate()
        self._now, self._requested = now, requested
        self._finished += finished
        while self._finished:
            self._finish(self._finished.pop(), result)
        for key in self.cached.intersection(lost):
            self._record_loss(key)
        self._list_cached()
        self._first = [key for key in self._first if key not in self.cached]
        for key in self.downloads.take_due():
            self._enqueue(key)
        if self._start_requested(result):
            self._prefetch(result)
        self._publish()
        result.wake_at = self._next_change()
        return result

    def close(self) -> None:
        self.downloads.close()
        self.cache.unpublish()

    def steps_to(self, sha256: str) -> float:
        """Return the steps until this run reads a slice; a lower bound if the use is not known yet."""
        key = self.keys.get(sha256)
        if key is None:
            return math.inf
        if key in self._requested:
            return 0.0
        step = self._uses.next_use(key, self._now)
        if step is None:
            return math.inf if self._uses.is_complete else self._uses.known_until - self._now
        return step - self._now

    def _list_cached(self) -> None:
        if self._clock() - self._listed_at < _POLL_S:
            return
        self._listed_at = self._clock()
        cached = {self.keys[sha256] for sha256 in self.cache.list_slices() if sha256 in self.keys}
        for key in self.cached - cached:
            self._record_loss(key)
        self.cached = cached

    def _record_loss(self, key: int) -> None:
        self.cached.discard(key)
        self._unread.pop(key, None)
        self._enqueue(key)

    def _enqueue(self, key: int) -> None:
        step = self._uses.next_use(key, self._now)
        if step is not None and key not in self._queued:
            self._push(step, key)

    def _push(self, step: int, key: int) -> None:
        self._num_pushed += 1
        self._queued.add(key)
        heapq.heappush(self._queue, (step, self._num_pushed, key))

    def _pop(self) -> None:
        self._queued.discard(heapq.heappop(self._queue)[2])

    def _extend(self) -> None:
        for step, key in self._uses.extend():
            if key not in self.cached and key not in self._queued and not self.downloads.is_postponed(key):
                self._push(step, key)

    def _finish(self, key: int, result: PlanUpdate) -> None:
        is_cached, error = self.downloads.finish(key)
        if is_cached:
            self.cached.add(key)
            self._unread[key] = self._aims.pop(key, self._uses.next_use(key, self._now) or 0)  # may be read by now
        elif error is None:
            self._enqueue(key)
        elif key in self._requested:
            result.errors[key] = error

    def _start_requested(self, result: PlanUpdate) -> bool:
        """Start the slices that the consumer waits for; True if there is room to prefetch."""
        missing = [key for key in self._requested if key not in self.cached and key not in result.errors]
        absent = [key for key in missing if key not in self.downloads]
        no_room = ""
        has_started = False
        for key in absent:
            self.downloads.expedite(key)
            refused = self._start(key, 0, result)
            has_started |= refused is None
            if refused is not None and refused.reason == "no room":
                no_room = refused.detail
        result.poll_s = _EAGER_POLL_S if absent else result.poll_s
        if has_started or no_room:
            for key in self.downloads:
                if key not in self._requested and self.steps_to(self.sha256s[key]) > 0:
                    self.downloads.cancel(key)
        if not no_room:
            self._waiting_since = 0.0
            return True
        result.no_room = no_room
        if self._uses.is_bridged:
            self.seek(self._now, exact=True)
            result.poll_s = 0.0
            return False
        self._waiting_since = self._waiting_since or self._clock()
        since = self._clock() - TIMEOUT_S
        if self._waiting_since <= since and not self.downloads and self.cache.is_stuck(since):
            self._waiting_since = 0.0
            for key in missing:
                result.errors[key] = UsageError(
                    f"cache: slice {self.sha256s[key][:12]}… was needed at step {self._now} and found no room in "
                    f"{TIMEOUT_S:.0f} s: {no_room} All processes that share it wait for each other. "
                    "Raise the budget to the slices that they read at once."
                )
        return False

    def _prefetch(self, result: PlanUpdate) -> None:
        has_extended = False
        while len(self.downloads) < _MAX_DOWNLOADS:
            key = self._next_queued()
            if key is None:
                if len(self.cached) + len(self.downloads) >= len(self.keys) or self._uses.is_full(self._now):
                    return
                if has_extended:
                    result.poll_s = min(result.poll_s, _EAGER_POLL_S)
                    return
                has_extended = True
                self._extend()
                continue
            steps = self._queue[0][0] - self._now
            if (steps > 0 and self._first) or (
                len(self.downloads) > 1 and self.downloads.num_bytes() + self.sizes[key] > _MAX_DOWNLOAD_BYTES
            ):
                return
            refused = self._start(key, steps, result)
            if refused is not None and refused.reason == "no room":
                return
            self._pop()
            if refused is not None and refused.reason == "busy":
                self.downloads.postpone(key, _POLL_S)

    def _next_queued(self) -> int | None:
        while self._queue:
            queued_step, _, key = self._queue[0]
            step = self._uses.next_use(key, self._now)
            is_needed = key not in self.cached and key not in self.downloads and not self.downloads.is_postponed(key)
            if step == queued_step and is_needed:
                return key
            self._pop()
            if step is not None and is_needed:
                self._push(step, key)
        return None

    def _start(self, key: int, steps: int, result: PlanUpdate) -> NotReserved | None:
        reserved = self._reserve(key, steps, "unwanted")
        if (
            isinstance(reserved, NotReserved)
            and reserved.reason == "no room"
            and (steps <= 0 or self._is_near(key, steps))
        ):
            self._find_last_read(once=steps <= 0)
            # Prefetching does not evict slices of an open window: they would be downloaded again at once.
            reserved = self._reserve(key, max(steps, self._window_steps) if steps > 0 else steps, "later")
        if isinstance(reserved, NotReserved):
            if reserved.reason == "cached":
                self.cached.add(key)
            return reserved
        self._aims[key] = self._now + steps
        error = self.downloads.start(key, reserved, self._epoch_of(self._now + steps, key))
        if error is not None and key in self._requested:
            result.errors[key] = error
        return None

    def _reserve(self, key: int, steps: int, evict: Evict) -> Reservation | NotReserved:
        reserved = self.cache.try_reserve(
            self.sha256s[key], part_bytes(self.sizes[key]), steps=steps, next_use=self.steps_to, evict=evict
        )
        if isinstance(reserved, Reservation):
            for sha256 in reserved.evicted:
                self.num_evicted += 1
                if sha256 in self.keys:
                    self._record_loss(self.keys[sha256])
        return reserved

    def _find_last_read(self, *, once: bool) -> None:
        while not self._uses.is_full(self._now):
            unknown = sum(self._uses.next_use(key, self._now) is None for key in self.cached)
            if unknown <= 1:
                return
            self._extend()
            if once:
                return

    def _is_near(self, key: int, steps: int) -> bool:
        max_bytes = self._horizon_bytes
        if max_bytes is None:
            self._unread = {key: step for key, step in self._unread.items() if step > self._now}
            if not self.downloads and not self._unread:
                return True
            max_bytes = self.cache.budget_bytes // 4
        num_bytes = self.sizes[key]
        for other in {*self.cached, *self.downloads, *self._queued} - {key}:
            step = self._uses.next_use(other, self._now)
            if step is not None and 0 < step - self._now <= steps:
                num_bytes += self.sizes[other]
        return num_bytes <= max_bytes

    def _publish(self) -> None:
        if self._clock() - self._published_at >= _PUBLISH_S:
            self._published_at = self._clock()
            soon = [key for _, _, key in heapq.nsmallest(_MAX_PUBLISHED, self._queue)]
            keys = (*self.cached, *self.downloads, *soon)
            uses = {self.sha256s[key]: use for key in keys if (use := self._uses.use(key, self._now)) is not None}
            if uses != self._published:
                self._published = uses
                self.cache.publish(uses)
        self.cache.set_position(self._now, self._waiting_since)

    def _next_change(self) -> int:
        if not self._queue:
            return NEVER
        soonest = self._queue[0][0]
        for key in self.cached:
            use = self._uses.use(key, self._now)
            if use is not None:
                soonest = min(soonest, use[0] if use[0] > self._now else use[1] + 1)
        return max(soonest, self._now + 1)


@dataclass(eq=False)
class SliceDownload:
    """A running download. `commit_error`: why the rename failed."""

    transfer: Transfer
    reservation: Reservation
    epoch: int | None
    is_cancelled: bool = False
    commit_error: OSError | None = None


class SliceDownloads(dict[int, SliceDownload]):
    """The running downloads by key. One thread changes it; others may read.

    The thread that ends a transfer commits the slice, so that consumers need not wait for the planner.
    """

    def __init__(
        self, sizes: Sequence[int], start: Callable[[int, Path], Transfer], on_done: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        super().__init__()
        self.counts = {"fetched_slices": 0, "fetched_bytes": 0, "repeated_fetches": 0, "failed": 0}
        self.counts |= {"refetched_slices": 0, "refetched_bytes": 0}
        self._sizes = sizes
        self._start, self._on_done, self._clock = start, on_done, clock
        self._not_before: dict[int, float] = {}
        self._last_epoch: dict[int, int | None] = {}
        self._lock = threading.Lock()  # of the counts and `_last_epoch`

    def num_bytes(self) -> int:
        return sum(self._sizes[key] for key in self)

    def start(self, key: int, reservation: Reservation, epoch: int | None) -> Exception | None:
        """Start a download, which owns the reservation; return the error if it cannot start.

        A second download for one `epoch` is counted; None: for no epoch.
        """
        try:
            transfer = self._start(key, reservation.part)
        except Exception as error:  # noqa: BLE001 - the consumer that waits for the slice gets it
            reservation.release()
            return self._record_failure(key, error)
        self[key] = download = SliceDownload(transfer, reservation, epoch)
        transfer.on_done(lambda _: self._commit(key, download))
        return None

    def cancel(self, key: int) -> None:
        download = self[key]
        if not download.is_cancelled:
            download.is_cancelled = True
            download.transfer.cancel()

    def finish(self, key: int) -> tuple[bool, Exception | None]:
        """Remove an ended download; return whether the slice is cached, and the error unless it was cancelled."""
        download = self.pop(key)
        error = download.transfer.error
        if error is not None:
            return False, None if download.is_cancelled else self._record_failure(key, error)
        if (fault := download.commit_error) is not None:
            text = f"cache: cannot rename {download.reservation.part}: {fault}. Check the directory."
            return False, self._record_failure(key, UsageError(text))
        return True, None

    def postpone(self, key: int, seconds: float) -> None:
        self._not_before[key] = self._clock() + seconds

    def is_postponed(self, key: int) -> bool:
        return key in self._not_before

    def expedite(self, key: int) -> None:
        self._not_before.pop(key, None)

    def take_due(self) -> list[int]:
        now = self._clock()
        keys = [key for key, not_before in self._not_before.items() if not_before <= now]
        for key in keys:
            del self._not_before[key]
        return keys

    def close(self) -> None:
        for key in self:
            self.cancel(key)
        deadline = time.monotonic() + _CLOSE_S
        for download in self.values():
            download.transfer.wait(max(0.0, deadline - time.monotonic()))
        self.clear()

    def _commit(self, key: int, download: SliceDownload) -> None:
        is_complete = download.transfer.error is None
        if is_complete:
            with self._lock:  # Counted before a consumer can see the slice.
                self.counts["fetched_slices"] += 1
                self.counts["fetched_bytes"] += self._sizes[key]
                self.counts["repeated_fetches"] += key in self._last_epoch
                if download.epoch is not None and self._last_epoch.get(key) == download.epoch:
                    self.counts["refetched_slices"] += 1
                    self.counts["refetched_bytes"] += self._sizes[key]
                self._last_epoch[key] = download.epoch
        try:
            if is_complete:
                download.reservation.commit()
            else:
                download.reservation.release()
        except OSError as error:
            download.commit_error = error
        self._on_done(key)

    def _record_failure(self, key: int, error: Exception) -> Exception:
        self.counts["failed"] += 1
        self.postpone(key, _RETRY_S)
        return error
