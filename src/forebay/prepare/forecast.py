"""A stage of a preparation: how far it is, at which pace its tasks run by kind, and how long it still takes."""

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from forebay.prepare.settings import Json

MIN_READ_BYTES = 32 << 20  # A reader may be so far ahead of its task: fewer bytes do not tell its pace.
_WINDOW_S = 60.0  # The rates follow from the results of this time.
_DECAY = 0.9  # Each later task lowers a pace's weight by this factor: the first tasks load models.
_MIN_LEFT = 0.1  # The share of its time that a task which runs still takes, at least.
_TRAINING_BYTES = 64 << 20  # No more text is used.
_EXPECTED_S = {
    "dedup": 0.01,
    "tokenizer": 0.25,
    "encode": 0.02,
    "shuffle": 0.01,
    "slice": 0.005,
    "text out": 0.02,
    "tokens out": 0.005,
}
"""Seconds of a process for each MB of text, on a server's core: of stages of which no task is finished yet."""


@dataclass(frozen=True)
class Progress:
    """How far a stage is. `text` and `encode` count bytes, and documents read and kept; others count their own units.

    Args:
        unit: `B`, or a noun in the singular.
        remaining_s: Of all stages; None until the pace of each kind of input (format, compression) is known.
        documents_per_s, bytes_per_s: Of the last minute; None until two results arrived.
    """

    stage: str
    done: int
    total: int
    unit: str
    documents: int = 0
    documents_kept: int = 0
    remaining_s: float | None = None
    documents_per_s: float | None = None
    bytes_per_s: float | None = None


class RunningTask(NamedTuple):
    """A task that runs: its units (0: not known), for how long, and what it has read of them (0: not known)."""

    kind: str
    units: int
    elapsed_s: float
    read: int = 0


def expected_s(stage: str, text_bytes: float, num_workers: int) -> float:
    """Return the time of a stage that has not begun, by the text that is kept."""
    if stage == "tokenizer":
        text_bytes, num_workers = min(text_bytes, _TRAINING_BYTES), 1
    return _EXPECTED_S.get(stage, 0.0) * text_bytes / 1e6 / max(1, num_workers)


class StageProgress:
    """A stage of a run: how much is done of its tasks, by kind, and at which pace.

    Counts are done, documents read and documents kept: of all, of this process, and of what was finished before.
    """

    def __init__(self, name: str, unit: str, now: float = 0.0) -> None:
        self.name, self.unit, self.total, self.tasks = name, unit, 0, 0
        self.started_at, self.stopped_at, self.cpu_s = time.time(), None, 0.0  # type: float, float | None, float
        self.done, self.own, self.earlier = [0, 0, 0], [0, 0, 0], [0, 0, 0]
        self.begun = now  # By the clock of the record.
        self.shown = 0  # It counts what running tasks have read, and never falls.
        self._remaining: Counter[str] = Counter()  # Units of tasks that are not finished, by kind.
        self._paces: dict[str, tuple[float, float]] = {}  # Seconds and units of finished tasks, by kind.
        self._kept_bytes = 0  # Of text, of finished tasks.
        self._points: deque[tuple[float, list[int]]] = deque()  # Moments of the last minute, and `done` at each.

    def add(self, remaining: Mapping[str, int], tasks: int) -> None:
        """Add tasks: how many, and their units by kind."""
        self._remaining.update(remaining)
        self.total, self.tasks = self.total + sum(remaining.values()), self.tasks + tasks

    def show(self, done: int) -> None:
        """Show that running tasks are so far; what was shown never falls."""
        self.shown = max(self.shown, min(self.total, done))

    def advance(
        self, counts: list[int], kind: str, result_of: str, seconds: float, now: float, kept_bytes: int = 0
    ) -> None:
        """Count a task that is finished."""
        self.done = list(map(add, self.done, counts))
        if result_of == "task":
            self.own = list(map(add, self.own, counts))
        elif result_of == "earlier":
            self.earlier = list(map(add, self.earlier, counts))
        self.shown, self.tasks = max(self.shown, self.done[0]), self.tasks - 1
        self._remaining[kind] -= counts[0]
        self._kept_bytes += kept_bytes
        if seconds:
            pace = self._paces.get(kind, (0.0, 0.0))
            self._paces[kind] = _DECAY * pace[0] + seconds, _DECAY * pace[1] + counts[0]
        if result_of != "earlier":
            self._points.append((now, self.done))
            while len(self._points) > 2 and self._points[1][0] < now - _WINDOW_S:
                self._points.popleft()

    def expected_kept_bytes(self) -> float:
        """Return the text that the whole stage keeps, if what is left keeps as much as what is done."""
        return self._kept_bytes * self.total / max(1, self.done[0])

    def remaining_s(self, num_workers: int, running: Sequence[RunningTask]) -> float | None:
        """Return how long the stage still takes; None until the pace of each kind that is left is known.

        A pace is that of the last tasks of a kind, or of a running one that has read much.
        """
        remaining = {kind: units for kind, units in self._remaining.items() if units > 0}
        paces = {kind: seconds / units for kind, (seconds, units) in self._paces.items() if units}
        paces = {task.kind: task.elapsed_s / task.read for task in running if task.read} | paces
        if not remaining or not paces.keys() >= remaining.keys():
            return None if remaining else 0.0
        waiting_s = total_s = sum(units * paces[kind] for kind, units in remaining.items())
        lefts = []
        for task in running:
            units = task.units or self._remaining.total() / max(1, self.tasks)
            task_s = units * paces.get(task.kind, total_s / self._remaining.total())
            waiting_s -= task_s
            lefts.append(max(task_s - task.elapsed_s, _MIN_LEFT * task_s))
        return max((max(0.0, waiting_s) + sum(lefts)) / max(1, min(num_workers, self.tasks)), *lefts, 0.0)

    def progress(self, now: float, remaining_s: float | None = None) -> Progress:
        """Return how far the stage is, with its rates."""
        rates: list[float | None] = [None, None]
        if len(self._points) > 1 and (elapsed_s := now - self._points[0][0]) > 0:
            rates = [(last - first) / elapsed_s or None for last, first in zip(self.done, self._points[0][1])]
        per_s, bytes_per_s = rates[1], rates[0] if self.unit == "B" else None
        documents, documents_kept = self.done[1:]
        counts = self.name, self.shown, self.total, self.unit, documents, documents_kept
        return Progress(*counts, remaining_s, per_s, bytes_per_s)

    def to_json(self, now: float) -> Json:
        """Return the stage as it is in a record."""
        shown = self.progress(now)
        return {
            "stage": self.name, "done": shown.done, "total": self.total,
            "unit": self.unit if self.unit == "B" or self.total == 1 else f"{self.unit}s",
            "documents_in": shown.documents, "documents_out": shown.documents_kept,
            "started_at": self.started_at, "stopped_at": self.stopped_at, "cpu_s": round(self.cpu_s, 3),
            **{name: None if self.stopped_at else getattr(shown, name) for name in ("documents_per_s", "bytes_per_s")},
            "own": self.own, "earlier": self.earlier,
        }  # fmt: skip
