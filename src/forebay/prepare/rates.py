"""How far a stage of a preparation is, and the rates that follow from its last results."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias

ResultOf: TypeAlias = Literal["driver", "task", "earlier", "other"]  # Tasks of this process, finished ones, others'.
_WINDOW_S = 60.0  # Of recent results, from which rates follow.
_MIN_LIVE_S = 10.0  # So long all processes must have had a task that runs, for a rate without results.
_MOMENT_S = 0.05  # Results so near to each other are at one moment.


@dataclass(frozen=True)
class Progress:
    """How far a stage is. `text` counts bytes of input, and documents read and kept; others count their own units.

    Args:
        documents, documents_kept, bytes: So far, of `text` and `encode`.
        remaining_s: Of this stage; None until enough of it is done.
        documents_per_s, bytes_per_s: Of the last minute, None likewise.
    """

    stage: str
    done: int
    total: int
    unit: str
    documents: int = 0
    documents_kept: int = 0
    bytes: int = 0
    remaining_s: float | None = None
    documents_per_s: float | None = None
    bytes_per_s: float | None = None


class RecentRate:
    """What a stage does in a second, by the results of the last minute.

    Tasks start together, and the first of each process pay for imports and kernels: the first results, one a process,
    do not count, and there is no rate until as many more (three at least) arrived.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers, self._results = num_workers, 0
        self._is_live, self._first_live_at = False, math.inf
        self._points: deque[tuple[float, Progress]] = deque()  # Moments, and what was done by then.

    def add(self, progress: Progress, now: float) -> None:
        """Add a result: what is done with it, at a moment of a monotonic clock."""
        self._results += 1
        if self._results >= self._num_workers and not self._is_live:
            self._add_point(progress, now)

    def add_live(self, progress: Progress, tasks: int, now: float) -> None:
        """Add what is done by results and by `tasks` that run: results alone do not count while there are such."""
        self._is_live = tasks > 0
        if self._is_live and self._results + tasks >= self._num_workers:
            self._first_live_at = min(self._first_live_at, now)
            self._add_point(progress, now)

    def _add_point(self, progress: Progress, now: float) -> None:
        if self._points and now - self._points[-1][0] < _MOMENT_S:
            self._points[-1] = (self._points[-1][0], progress)
        else:
            self._points.append((now, progress))
        while len(self._points) > 3 and self._points[1][0] < now - _WINDOW_S:
            self._points.popleft()

    def apply(self, progress: Progress, now: float) -> Progress:
        """The progress with its rates. They fall where no result arrives for longer than between two before."""
        is_known = self._results >= self._num_workers + max(self._num_workers, 3)
        is_known |= now - self._first_live_at >= _MIN_LIVE_S
        if not is_known or len(self._points) < 2 or progress.unit == " steps":
            return progress
        moments = [moment for moment, _ in self._points]
        (then, first), (last_at, last) = self._points[0], self._points[-1]
        usual_s = max(after - before for before, after in pairwise(moments))
        waited_s = min(now - last_at, usual_s)
        elapsed_s = now - then - waited_s
        done_per_s = (last.done - first.done) / elapsed_s
        return replace(
            progress,
            remaining_s=max(0.0, (progress.total - progress.done) / done_per_s - waited_s) if done_per_s else None,
            documents_per_s=(last.documents - first.documents) / elapsed_s if last.documents else None,
            bytes_per_s=(last.bytes - first.bytes) / elapsed_s if last.bytes else None,
        )


@dataclass
class StageProgress:
    """A stage of a run: its last results, those of this process, and their rate."""

    progress: Progress
    rate: RecentRate
    started_at: float
    timed: Progress  # What was done in this call, from which the rate follows.
    own: Progress  # What tasks of this process have done, in all calls.
    before: Progress  # What was finished when the first call began.
    is_continued: bool
    stopped_at: float | None = None
    cpu_s: float = 0.0
    live: Progress | None = None  # With what running tasks have done, if they tell.

    @property
    def current(self) -> Progress:
        """The last results, or more."""
        live = self.live
        return live if live is not None and live.done >= self.progress.done and live.documents else self.progress

    def add(self, progress: Progress, result_of: ResultOf) -> None:
        """Take how far the stage is with one more result."""
        if result_of in ("driver", "task"):
            self.timed = progress_between(self.timed, progress, self.progress)
        if result_of == "task":
            self.own = progress_between(self.own, progress, self.progress)
        elif result_of == "earlier" and not self.is_continued:
            self.before = progress_between(self.before, progress, self.progress)
        self.progress = progress

    def to_json(self, now: float) -> dict[str, Any]:
        shown = self.rate.apply(self.current, now) if self.stopped_at is None else self.progress
        own = progress_between(self.own, shown, self.progress)
        return {
            "stage": shown.stage, "done": shown.done, "total": shown.total, "unit": shown.unit.strip(),
            "started_at": self.started_at, "stopped_at": self.stopped_at, "cpu_s": round(self.cpu_s, 3),
            "documents_in": shown.documents, "documents_out": shown.documents_kept,
            "documents_per_s": _rounded(shown.documents_per_s), "bytes_per_s": _rounded(shown.bytes_per_s),
            "remaining_s": _rounded(shown.remaining_s), "own": _counts(own), "before": _counts(self.before),
        }  # fmt: skip


def progress_between(counted: Progress, after: Progress, before: Progress) -> Progress:
    """What was counted, and what was done between two moments of a stage."""
    return replace(
        counted, done=counted.done + after.done - before.done,
        documents=counted.documents + after.documents - before.documents,
        documents_kept=counted.documents_kept + after.documents_kept - before.documents_kept,
        bytes=counted.bytes + after.bytes - before.bytes,
    )  # fmt: skip


def _counts(progress: Progress) -> list[int]:
    return [progress.done, progress.documents, progress.documents_kept]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
