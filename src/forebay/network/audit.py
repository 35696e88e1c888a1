"""The audit log: refusals and decisions of a node as JSON lines, rotated by size.

Decisions (bans, new CRLs, admissions, pauses) go to FILE.decisions, each at once. Events that a peer can cause at will
(refusals, strangers, quotas, renewals) go to FILE, one line per kind and peer in a minute, so that a flood cannot
rotate other lines away: a peer that is refused all day writes some 3 MB. Four parts of 8 MiB of each file are kept.
Anyone who can write the files can change them; forward the lines elsewhere if that matters.
"""

import atexit
import json
import logging
import logging.handlers
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from forebay.base import Closing

MAX_PART_BYTES = 8 << 20
NUM_PARTS = 4
COUNT_S = 60.0
MAX_COUNTED = 64  # peers of each kind that are counted separately in COUNT_S; the others are counted together
MAX_TEXT = 500
COUNTED = frozenset({"refused", "stranger", "quota", "unsigned", "bad_provider", "renewed", "cut"})


@dataclass(eq=False)
class AuditLog(Closing):
    """Appends events; a line is written before `append` returns. Thread-safe.

    A line is `{"at", "kind", "facts", "repeats"}`: Unix seconds, event kind, the event's fields, and the number of
    events of this kind and peer that were counted without a line since the last one. OSError if a file cannot be
    written.
    """

    path: Path
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.decisions_path = self.path.with_name(self.path.name + ".decisions")
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], tuple[float, int]] = {}  # time of the last line, events since
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._counted, self._decisions = (
            _PrivateHandler(path, maxBytes=MAX_PART_BYTES, backupCount=NUM_PARTS - 1, encoding="utf-8")
            for path in (self.path, self.decisions_path)
        )

    def append(self, kind: str, **fields: Any) -> None:
        """Write an event, or count it. Texts are cut at MAX_TEXT characters."""
        with self._lock:
            if kind not in COUNTED:
                self._write(self._decisions, kind, fields)
                return
            now = self.now()
            self._write_counts(now - COUNT_S)
            key = (kind, str(fields.get("peer") or fields.get("address") or ""))
            if key not in self._counts and sum(other == kind for other, _ in self._counts) >= MAX_COUNTED:
                key = (kind, "others")
            if key in self._counts:
                since, num = self._counts[key]
                self._counts[key] = (since, num + 1)
                return
            self._counts[key] = (now, 0)
            self._write(self._counted, kind, fields)

    def close(self) -> None:
        """Write pending counts and close the files. May be repeated."""
        with self._lock:
            self._write_counts(float("inf"))
            self._counted.close()
            self._decisions.close()

    def _write_counts(self, before: float) -> None:
        """End counts that started before a time, with a line for each that is not zero."""
        for key in [key for key, (since, _) in self._counts.items() if since <= before]:
            _, num = self._counts.pop(key)
            if num:
                self._write(self._counted, key[0], {"peer": key[1]}, num)

    def _write(self, handler: logging.Handler, kind: str, fields: dict[str, Any], repeats: int = 0) -> None:
        values = {
            key: value if isinstance(value, int | float | None) else str(value)[:MAX_TEXT]
            for key, value in fields.items()
        }
        line = {"at": round(self.now(), 3), "kind": kind, "facts": values, "repeats": repeats}
        handler.handle(logging.makeLogRecord({"msg": json.dumps(line)}))


def open_audit_log() -> AuditLog | None:
    """The audit log at `FOREBAY_AUDIT_LOG`, closed when the process ends; None without that variable."""
    if not (path := os.environ.get("FOREBAY_AUDIT_LOG")):
        return None
    audit = AuditLog(Path(path))
    atexit.register(audit.close)
    return audit


class _PrivateHandler(logging.handlers.RotatingFileHandler):
    """Files with mode 0600; errors of the disk are raised."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=partial(os.open, mode=0o600))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Raise the exception that `emit` caught."""
        raise  # noqa: PLE0704  # called within its `except`
