"""When each slice of a run is read next: the run's uses, read in chunks and stored as intervals of steps.

A slice is read in consecutive steps while a window is open, and again in the next epoch. Consecutive uses are one
interval. In a chunk of more than 2,048 intervals, gaps are bridged until there are fewer, so that the far future of a
long run stays small; inside a bridged gap a slice counts as in use. With `exact`, for a cache that cannot hold the open
windows, no gap is bridged, and fewer steps are known.

Cost: 0.15 us per use (NumPy), 100 bytes per interval, at most 2^18 intervals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.cache.eviction import PlannedUse, part_bytes
from forebay.errors import UsageError

I64 = NDArray[np.int64]
UsesFunction = Callable[[int, int], tuple[I64, I64]]
"""Run steps [start, stop) to (steps, keys): distinct pairs by step, then in order of first use."""

_FIRST_STEPS = 256
_CHUNK_USES = 1 << 17
_CHUNK_INTERVALS = 2048
_MAX_INTERVALS = 1 << 18


class PlannedUses:
    """The next uses of each slice from `step` on. For one thread.

    `num_steps`: the end of the run; None for an endless one. `exact`: bridge no gap.
    """

    def __init__(self, uses: UsesFunction, num_steps: int | None, step: int, *, exact: bool = False) -> None:
        self._uses = uses
        self._num_steps = num_steps
        self._exact = exact
        self._chunk_steps = _FIRST_STEPS
        self._intervals: dict[int, deque[tuple[int, int]]] = {}
        self._num_intervals = 0
        self.known_until = step  # the uses of earlier steps are known
        self.is_bridged = False  # a gap was bridged

    @property
    def is_complete(self) -> bool:
        """Whether the uses of all steps are known."""
        return self._num_steps is not None and self.known_until >= self._num_steps

    def is_full(self, now: int) -> bool:
        """Whether all uses are known, or no more can be stored."""
        if self._num_intervals >= _MAX_INTERVALS:
            for key in list(self._intervals):
                self.use(key, now)  # removes the intervals before `now`
        return self.is_complete or self._num_intervals >= _MAX_INTERVALS

    def extend(self) -> list[tuple[int, int]]:
        """Read another chunk; return (first step, key) of the intervals that begin in it, in order."""
        stop = self.known_until + self._chunk_steps
        if self._num_steps is not None:
            stop = min(stop, self._num_steps)
        steps, keys = self._uses(self.known_until, stop)
        started = []
        for key, first, last in self._compress(steps, keys):
            intervals = self._intervals.setdefault(key, deque())
            if intervals and intervals[-1][1] == first - 1:
                intervals[-1] = (intervals[-1][0], last)
                continue
            intervals.append((first, last))
            self._num_intervals += 1
            started.append((first, key))
        self.known_until = stop
        if len(steps) < _CHUNK_USES // 2:
            self._chunk_steps *= 2
        elif len(steps) > _CHUNK_USES:
            self._chunk_steps = max(1, self._chunk_steps // 2)
        return started

    def use(self, key: int, now: int) -> PlannedUse | None:
        """Return first and last step of the current or next interval of a slice, and the first of the one after."""
        intervals = self._intervals.get(key)
        if intervals is None:
            return None
        while intervals and intervals[0][1] < now:
            intervals.popleft()
            self._num_intervals -= 1
        if not intervals:
            del self._intervals[key]
            return None
        first, last = intervals[0]
        return max(first, now), last, intervals[1][0] if len(intervals) > 1 else None

    def next_use(self, key: int, now: int) -> int | None:
        """Return the first step from `now` on that reads a slice; None if none before `known_until` does."""
        use = self.use(key, now)
        return None if use is None else use[0]

    def _compress(self, steps: I64, keys: I64) -> list[tuple[int, int, int]]:
        """Return (key, first, last) of the intervals, by first step, then as given."""
        if not len(steps):
            return []
        order = np.argsort(keys, kind="stable")
        keys_by_key, steps_by_key = keys[order], steps[order]
        is_other, gaps = keys_by_key[1:] != keys_by_key[:-1], np.diff(steps_by_key)
        max_gap = 1
        max_intervals = max(_CHUNK_INTERVALS, 1 + int(is_other.sum()))
        breaks = is_other | (gaps > max_gap)
        while not self._exact and 1 + int(breaks.sum()) > max_intervals:
            self.is_bridged = True
            max_gap *= 2
            breaks = is_other | (gaps > max_gap)
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        stops = np.concatenate((starts[1:], [len(steps)]))
        by_first = np.argsort(order[starts])
        starts, stops = starts[by_first], stops[by_first]
        firsts, lasts = steps_by_key[starts], steps_by_key[stops - 1]
        return list(zip(keys_by_key[starts].tolist(), firsts.tolist(), lasts.tolist()))


class RunSlices:
    """The slices of one run.

    Attributes:
        sha256s, sizes: Hex and bytes, by key.
        uses: Of several keys of one slice only the first.
        num_steps: None: the run never ends.
        keys: First key of each slice. `same`: by key, the first key of its slice.
    """

    def __init__(
        self, sha256s: Sequence[str] | NDArray[np.uint8], sizes: I64, uses: UsesFunction, num_steps: int | None
    ) -> None:
        """From hex or uint8 [S, 32], and int64 [S]. Raises UsageError if their lengths differ."""
        self.sha256s = [row if isinstance(row, str) else row.tobytes().hex() for row in sha256s]
        self.sizes: list[int] = np.asarray(sizes, np.int64).tolist()
        if len(self.sha256s) != len(self.sizes):
            raise UsageError(f"slices: expected a size for each of {len(self.sha256s)}, got {len(self.sizes)}.")
        self.keys: dict[str, int] = {}
        same = np.array([self.keys.setdefault(sha256, key) for key, sha256 in enumerate(self.sha256s)], np.int64)
        self.same: list[int] = same.tolist()
        self.num_steps = num_steps

        def first_keys(start: int, stop: int) -> tuple[I64, I64]:
            steps, used = uses(start, stop)
            return steps, same[used]

        self.uses = first_keys

    def num_bytes(self) -> int:
        """Return the bytes of all slices, each counted once."""
        return sum(self.sizes[key] for key in self.keys.values())

    def check(self, budget_bytes: int) -> None:
        """Raise UsageError if the slices can never fit into the budget."""
        largest = max(self.sizes, default=0)
        if part_bytes(largest) > budget_bytes:
            raise UsageError(
                f"cache: the largest slice takes {part_bytes(largest)} bytes as it is fetched, the budget is "
                f"{budget_bytes}. Raise the budget: to two slices at least, to fetch one while another is read."
            )
