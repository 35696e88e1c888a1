"""A stage of a preparation: how far it is, at which pace its tasks run by kind, and how long it still takes."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import add

from forebay.base import Json

_DECAY = 0.9  # Each later task lowers a pace's weight by this factor: the first tasks load models.
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
_GROUP_S = 4.0  # Of a process, for a group of kernels.


@dataclass(frozen=True)
class Progress:
    """How far a stage is. `text` and `encode` count bytes, and documents read and kept; others count their own units.

    Args:
        unit: `B`, or a noun in the singular.
        remaining_s: Of all stages; None until the pace of each kind of input (format, compression) is known.
        documents_per_s, bytes_per_s: Of this process in the stage; None before its first result.
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


def expected_s(stage: str, text_bytes: float, num_workers: int) -> float:
    """Return the time of a stage that has not begun, by the text that is kept."""
    if stage == "tokenizer":
        text_bytes, num_workers = min(text_bytes, _TRAINING_BYTES), 1
    return _EXPECTED_S.get(stage, 0.0) * text_bytes / 1e6 / max(1, num_workers)


class StageProgress:
    """A stage of a run: how much is done of its tasks, by kind, and at which pace.

    Counts are done, documents read and documents kept: of all, of this process, and of what was finished before.
    """

    def __init__(self, name: str, unit: str, now: float) -> None:
        self.name, self.unit, self.total, self.tasks = name, unit, 0, 0
        self.started_at, self.stopped_at, self.cpu_s = time.time(), None, 0.0  # type: float, float | None, float
        self.done, self.own, self.earlier = [0, 0, 0], [0, 0, 0], [0, 0, 0]
        self.shown = 0  # It counts what running tasks have read, and never falls.
        self._begun_at = self._last_at = now  # Of the stage, and of the last result.
        self._remaining: Counter[str] = Counter()  # Units of tasks that are not finished, by kind.
        self._paces: dict[str, tuple[float, float]] = {}  # Seconds and units of finished tasks, by kind.
        self._kept_bytes = 0  # Of text, of finished tasks.

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
        self.done, self.tasks, self._last_at = list(map(add, self.done, counts)), self.tasks - 1, now
        if result_of == "task":
            self.own = list(map(add, self.own, counts))
        elif result_of == "earlier":
            self.earlier = list(map(add, self.earlier, counts))
        self.show(self.done[0])
        self._remaining[kind] -= counts[0]
        self._kept_bytes += kept_bytes
        if seconds and counts[0]:  # A file without bytes has no pace.
            pace = self._paces.get(kind, (0.0, 0.0))
            self._paces[kind] = _DECAY * pace[0] + seconds, _DECAY * pace[1] + counts[0]

    def expected_kept_bytes(self) -> float:
        """Return the text that the whole stage keeps, if what is left keeps as much as what is done."""
        return self._kept_bytes * self.total / max(1, self.done[0])

    def remaining_s(self, num_workers: int, now: float, expected_s: float = 0.0) -> float | None:
        """Return how long the stage still takes; None until a task of each kind that is left is finished.

        A pace is that of the last tasks of a kind. A stage whose kinds are not told apart may expect a time before.
        """
        remaining = {kind: units for kind, units in self._remaining.items() if units > 0}
        if self.name == "kernels":
            return _GROUP_S * sum(remaining.values()) / num_workers
        if remaining and not self._paces.keys() >= remaining.keys():
            if not expected_s:
                return None
            left_s = expected_s * (1 - self.shown / self.total)
            if self.shown:  # Its task runs in this process, which tells how far it is.
                left_s = (now - self._begun_at) * (self.total / self.shown - 1)
            return left_s
        total_s = sum(units * self._paces[kind][0] / self._paces[kind][1] for kind, units in remaining.items())
        processes = max(1, min(num_workers, self.tasks))
        # When a task ends the others that run are half done on average.
        left_s = total_s / processes * (1 - (processes - 1) / 2 / max(1, self.tasks))
        return max(left_s / 10, left_s - (now - self._last_at))

    def progress(self, now: float, remaining_s: float | None = None) -> Progress:
        """Return how far the stage is, with the rates of this process."""
        elapsed_s, (_, documents, documents_kept) = max(1e-3, now - self._begun_at), self.done
        bytes_per_s, documents_per_s, _ = (count / elapsed_s or None for count in self.own)
        counts = self.name, self.shown, self.total, self.unit, documents, documents_kept
        return Progress(*counts, remaining_s, documents_per_s, bytes_per_s if self.unit == "B" else None)

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
