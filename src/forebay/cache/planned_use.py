"""When each slice is read next: a run's future, looked at in chunks, kept as intervals of steps.

A slice is read in runs of steps: while a window is open, and again in the next epoch. Consecutive uses become one
interval; in a chunk with more than 2,048 of them, gaps are bridged until there are fewer, so that the far future of
a long run stays small. Inside a bridged gap a slice counts as in use. Where that is too coarse, because the cache
cannot hold the open windows, `exact` bridges nothing and looks less far.

What it costs: 0.15 us a use looked at (NumPy), 100 bytes an interval, 2^18 intervals and 2^25 uses ahead at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forebay.cache.eviction import PlannedUse, part_bytes
from forebay.errors import UsageError

I64 = NDArray[np.int64]
UsesFunction = Callable[[int, int], tuple[I64, I64]]

_FIRST_STEPS = 256
_CHUNK_USES = 1 << 17
_CHUNK_INTERVALS = 2048
_MAX_INTERVALS = 1 << 18
_MAX_USES = 1 << 25


class PlannedUses:
    """The next uses of each slice from a step on; nothing before it counts. For one thread.

    `uses`: run steps [start, stop) to (steps, keys), distinct pairs by step, then in order of first use. `num_steps`:
    where the run ends; None for never. `exact`: bridge no gap.
    """

    def __init__(self, uses: UsesFunction, num_steps: int | None, step: int, *, exact: bool = False) -> None:
        self._uses = uses
        self._num_steps = num_steps
        self._exact = exact
        self._span = _FIRST_STEPS
        self._intervals: dict[int, deque[tuple[int, int]]] = {}
        self._chunks: deque[tuple[int, int]] = deque()  # (first step behind the chunk, uses in it)
        self._last: dict[int, int] = {}
        self._num_intervals = 0
        self._num_uses = 0
        self.known = step  # steps before it were looked at
        self.bridged = False  # some gap was

    @property
    def ended(self) -> bool:
        return self._num_steps is not None and self.known >= self._num_steps

    def is_full(self, now: int) -> bool:
        """Whether there is nothing further to look at, or no room to keep it."""
        while self._chunks and self._chunks[0][0] <= now:
            self._num_uses -= self._chunks.popleft()[1]
        if self._num_intervals >= _MAX_INTERVALS:
            for key in list(self._intervals):
                self.use(key, now)  # forgets what was before
        return self.ended or self._num_intervals >= _MAX_INTERVALS or self._num_uses >= _MAX_USES

    def extend(self) -> list[tuple[int, int]]:
        """Look at another chunk: (first step, key) of the intervals that begin in it, in order."""
        stop = self.known + self._span
        if self._num_steps is not None:
            stop = min(stop, self._num_steps)
        steps, keys = self._uses(self.known, stop)
        self._chunks.append((stop, len(steps)))
        self._num_uses += len(steps)
        found = self._compress(steps, keys)
        begun = []
        for key, first, last in found:
            intervals = self._intervals.setdefault(key, deque())
            if intervals and intervals[-1][1] == first - 1:
                intervals[-1] = (intervals[-1][0], last)
                continue
            intervals.append((first, last))
            self._num_intervals += 1
            begun.append((first, key))
        self.known = stop
        if len(steps) < _CHUNK_USES // 2:
            self._span *= 2
        elif len(steps) > _CHUNK_USES:
            self._span = max(1, self._span // 2)
        return begun

    def use(self, key: int, now: int) -> PlannedUse | None:
        """First and last step of the interval that a slice is in or comes to, and the first step of the one after."""
        intervals = self._intervals.get(key)
        if intervals is None:
            return None
        while intervals and intervals[0][1] < now:
            self._last[key] = intervals.popleft()[1]
            self._num_intervals -= 1
        if not intervals:
            del self._intervals[key]
            return None
        first, last = intervals[0]
        return max(first, now), last, intervals[1][0] if len(intervals) > 1 else None

    def next_use(self, key: int, now: int) -> int | None:
        """The step from `now` on at which a slice is read next; None if not before `known`."""
        use = self.use(key, now)
        return None if use is None else use[0]

    def last_use(self, key: int, now: int) -> int | None:
        """The last step before `now` that read a slice; None if none did since the step that this began with."""
        self.use(key, now)
        return self._last.get(key)

    def _compress(self, steps: I64, keys: I64) -> list[tuple[int, int, int]]:
        """(key, first, last) of the intervals, by first step, then as given."""
        if not len(steps):
            return []
        order = np.argsort(keys, kind="stable")
        by_key, at = keys[order], steps[order]
        other, gaps = by_key[1:] != by_key[:-1], np.diff(at)
        gap = 1
        most = max(_CHUNK_INTERVALS, 1 + int(other.sum()))
        breaks = other | (gaps > gap)
        while not self._exact and 1 + int(breaks.sum()) > most:
            self.bridged = True
            gap *= 2
            breaks = other | (gaps > gap)
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        ends = np.concatenate((starts[1:], [len(steps)])) - 1
        by_first = np.argsort(order[starts])
        starts, ends = starts[by_first], ends[by_first]
        return list(zip(by_key[starts].tolist(), at[starts].tolist(), at[ends].tolist()))


Keep = Literal["budget", "window", "all"]


@dataclass(frozen=True)
class RunSlices:
    """The slices of one run."""

    sha256s: Sequence[str]  # hex, by key
    sizes: Sequence[int]  # bytes, by key
    # Run steps [start, stop) to (steps, keys), by step, then in order of first use; of a slice's keys only the first.
    uses: UsesFunction
    num_steps: int | None  # None: the run never ends
    keys: Mapping[str, int]  # first key of each slice
    same: Sequence[int]  # by key, the first key of its slice

    @classmethod
    def of(
        cls, sha256s: Sequence[str] | NDArray[np.uint8], sizes: I64, uses: UsesFunction, num_steps: int | None
    ) -> RunSlices:
        """From hex or uint8 [S, 32], and int64 [S]. Raises UsageError if their lengths differ."""
        names = [row if isinstance(row, str) else row.tobytes().hex() for row in sha256s]
        lengths: list[int] = np.asarray(sizes, np.int64).tolist()
        if len(names) != len(lengths):
            raise UsageError(f"slices: expected a size for each of {len(names)}, got {len(lengths)}.")
        keys: dict[str, int] = {}
        same = np.array([keys.setdefault(sha256, key) for key, sha256 in enumerate(names)], np.int64)

        def first_keys(start: int, stop: int) -> tuple[I64, I64]:
            steps, used = uses(start, stop)
            return steps, same[used]

        return cls(names, lengths, uses if len(keys) == len(same) else first_keys, num_steps, keys, same.tolist())

    def num_bytes(self) -> int:
        """Of all slices, each once."""
        return sum(self.sizes[key] for key in self.keys.values())

    def check(self, keep: str, budget_bytes: int) -> None:
        """Refuse what could never be brought. Raises UsageError."""
        if keep not in ("budget", "window", "all"):
            raise UsageError(f"keep: expected 'budget', 'window' or 'all', got {keep!r}.")
        largest = max(self.sizes, default=0)
        if part_bytes(largest) > budget_bytes:
            raise UsageError(
                f"cache: the largest slice takes {part_bytes(largest)} bytes as it is fetched, the budget is "
                f"{budget_bytes}. Raise the budget: to two slices at least, to fetch one while another is read."
            )
        whole = self.num_bytes() + part_bytes(largest) - largest
        if keep == "all" and whole > budget_bytes:
            raise UsageError(
                f"cache: to keep all slices takes {whole} bytes, the budget is {budget_bytes}. Raise the budget, or "
                "let the cache evict (keep='budget')."
            )
