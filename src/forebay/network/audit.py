"""The audit log: what a node refused and decided, as JSON lines, by the standard library's `RotatingFileHandler`.

Decisions (bans, new CRLs, admissions, pauses) go to FILE.decisions, each at once. What a peer can cause at will
(refusals, strangers, quotas, renewals) goes to FILE: one line per kind and peer in a minute, whatever the text, so that
a flood pushes nothing out: a peer that is refused all day writes some 3 MB. Four parts of 8 MiB are kept of each file.
Whoever may write the files can change them: where that matters, send the lines elsewhere as they come.
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
COUNT_S = 60.0
MAX_COUNTED = 64  # peers told apart in COUNT_S, of each kind; the others are counted together
MAX_TEXT = 500
COUNTED = frozenset({"refused", "stranger", "quota", "unsigned", "bad_provider", "renewed"})


class AuditLog:
    """Appends events; a line is on its way to the disk before `append` returns. Safe to share between threads.

    A line is `{"at", "kind", "facts", "repeats"}`: unix seconds, what happened, the event's own fields, and how many
    events of this kind and peer were counted, but not written, since the last line of both. A part larger than
    `part_bytes` is rotated away; `num_parts` are kept, the current one included. OSError if a file cannot be written.
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
        self.decisions_path = self.path.with_name(self.path.name + ".decisions")
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], tuple[float, int]] = {}  # when a line was written, events since
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._counted, self._decisions = (
            _PrivateHandler(path, maxBytes=part_bytes, backupCount=num_parts - 1, encoding="utf-8")
            for path in (self.path, self.decisions_path)
        )
        for handler in (self._counted, self._decisions):
            handler.setFormatter(_JsonFormatter())

    def append(self, kind: str, **facts: Any) -> None:
        """Writes an event, or counts it. Texts are cut at MAX_TEXT characters."""
        with self._lock:
            if kind not in COUNTED:
                _emit(self._decisions, self._now(), kind, facts, 0)
                return
            at = self._now()
            self._report(at - COUNT_S)
            peer = str(facts.get("peer") or facts.get("address") or "")
            key = (kind, peer)
            if key not in self._counts and sum(other == kind for other, _ in self._counts) >= MAX_COUNTED:
                key = (kind, "others")
            if key in self._counts:
                since, num = self._counts[key]
                self._counts[key] = (since, num + 1)
                return
            self._counts[key] = (at, 0)
            _emit(self._counted, at, kind, facts, 0)

    def close(self) -> None:
        """Writes what was only counted, and closes. May be repeated."""
        with self._lock:
            self._report(float("inf"))
            self._counted.close()
            self._decisions.close()

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _report(self, before: float) -> None:
        """Ends the counts that began before a moment, with a line for each that counted something."""
        for key in [key for key, (since, _) in self._counts.items() if since <= before]:
            _, num = self._counts.pop(key)
            if num:
                _emit(self._counted, self._now(), key[0], {"peer": key[1]}, num)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(record.msg)


class _PrivateHandler(logging.handlers.RotatingFileHandler):
    """Files for their owner only; an error of the disk is the caller's."""

    def _open(self) -> TextIOWrapper:
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        return open(self.baseFilename, "a", encoding=self.encoding, opener=opener)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Raise what `emit` caught."""
        raise  # noqa: PLE0704  # within its `except`


def _emit(handler: logging.Handler, at: float, kind: str, facts: dict[str, Any], repeats: int) -> None:
    line = {"at": round(at, 3), "kind": kind, "facts": {key: _short(value) for key, value in facts.items()}}
    handler.handle(logging.makeLogRecord({"msg": {**line, "repeats": repeats}}))


def _short(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) or value is None else str(value)[:MAX_TEXT]
