"""What a node refused, and why: an append-only log of JSON lines, by the standard library's `RotatingFileHandler`.

Lines are written before `append` returns, so that a killed process loses none. The file is rotated (`FILE`, `FILE.1`,
…) and the oldest part deleted, so that a flood of refusals fills no disk. The same event again within REPEAT_S is only
counted. Whoever may write the file can change it: where that matters, send the lines elsewhere as they come.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import threading
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Any

MAX_PART_BYTES = 8 << 20
NUM_PARTS = 4
REPEAT_S = 10.0
MAX_RECENT = 1024
MAX_TEXT = 500


class AuditLog:
    """Appends events. Safe to share between threads; one process a file. `close` it.

    A line is `{"at", "kind", "facts", "repeats"}`: unix seconds, what happened, the event's own, and how often it was
    left out since it was last written.

    Args:
        part_bytes: A part larger than this is rotated away. `num_parts`: how many are kept, the current one included.

    Raises:
        OSError: If the file cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        part_bytes: int = MAX_PART_BYTES,
        num_parts: int = NUM_PARTS,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.path, self._now = Path(path), now
        self._lock = threading.Lock()
        self._recent: dict[str, tuple[float, int]] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = _Private(self.path, maxBytes=part_bytes, backupCount=num_parts - 1, encoding="utf-8")

    def append(self, kind: str, **facts: Any) -> None:
        """Writes an event; the same one again within REPEAT_S only counts. Texts are cut at MAX_TEXT characters."""
        short = {key: _short(value) for key, value in facts.items()}
        what = json.dumps([kind, short], sort_keys=True)
        with self._lock:
            at = self._now()
            since, left_out = self._recent.get(what, (-1e18, 0))
            if at - since < REPEAT_S:
                self._recent[what] = (since, left_out + 1)
                return
            if len(self._recent) >= MAX_RECENT:
                self._forget(at)
            self._recent[what] = (at, 0)
            self._write(kind, short, at, left_out)

    def close(self) -> None:
        """Writes what was only counted, and closes. May be repeated."""
        with self._lock:
            self._forget(float("inf"))
            self._handler.close()

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _forget(self, at: float) -> None:
        """Drops the memory of events; what was left out of the log is told there."""
        old = [what for what, (since, _) in self._recent.items() if at - since >= REPEAT_S] or list(self._recent)
        for what in old:
            _, left_out = self._recent.pop(what)
            if left_out:
                kind, facts = json.loads(what)
                self._write(kind, facts, self._now(), left_out)

    def _write(self, kind: str, facts: dict[str, Any], at: float, repeats: int) -> None:
        line = json.dumps({"at": round(at, 3), "kind": kind, "facts": facts, "repeats": repeats})
        self._handler.emit(logging.LogRecord("forebay.audit", logging.INFO, "", 0, line, None, None))


class _Private(logging.handlers.RotatingFileHandler):
    """Files for their owner only; an error of the disk is the caller's."""

    def _open(self) -> TextIOWrapper:
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        return open(self.baseFilename, "a", encoding=self.encoding, opener=opener)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Raise what `emit` caught."""
        raise  # noqa: PLE0704  # within its `except`


def _short(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) or value is None else str(value)[:MAX_TEXT]
