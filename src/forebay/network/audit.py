"""What a node refused, and why: an append-only log of JSON lines, each bound to the one before by its hash.

Lines are written before `append` returns, so that a killed process loses none; an unfinished last line is dropped
when the log is opened again. The file is rotated (`FILE`, `FILE.1`, …) and the oldest part deleted, so that a flood
of refusals fills no disk; the chain goes on across parts. The same event again within REPEAT_S is only counted.

What the choice costs: some 20 µs an event. The chain shows that a line was changed or taken out; who may write the
file can still write all of it anew, so keep the last hash elsewhere if that matters.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.errors import LedgerError, UsageError
from forebay.storage.atomic import commit_files

MAX_PART_BYTES = 8 << 20
NUM_PARTS = 4
REPEAT_S = 10.0
MAX_RECENT = 1024
MAX_TEXT = 500
BEGINNING = "0" * 64


@dataclass(frozen=True)
class Event:
    """One line: `facts` are the event's own; `at` is unix seconds; `repeats`: how often it was left out since."""

    seq: int
    at: float
    kind: str
    facts: dict[str, Any]
    repeats: int
    hash: str


class AuditLog:
    """Appends events. Safe to share between threads; one process a file. `close` it.

    Args:
        part_bytes: A part larger than this is rotated away. `num_parts`: how many are kept, the current one included.

    Raises:
        UsageError: If the file cannot be written, or its last line is of no such log.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        part_bytes: int = MAX_PART_BYTES,
        num_parts: int = NUM_PARTS,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path)
        self._part_bytes, self._num_parts, self._now = part_bytes, num_parts, now
        self._lock = threading.Lock()
        self._recent: dict[str, tuple[float, int]] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._seq, self._prev = _last_of(self.path)
        self._file = self.path.open("ab", buffering=0)
        self.path.chmod(0o600)

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
            if not self._file.closed:
                self._forget(float("inf"))
                os.fsync(self._file.fileno())
                self._file.close()

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
        body = {"seq": self._seq + 1, "at": round(at, 3), "kind": kind, "facts": facts, "repeats": repeats}
        body["prev"] = self._prev
        line, digest = _seal(body)
        if self._file.tell() + len(line) > self._part_bytes and self._file.tell():
            self._rotate()
        at = self._file.tell()
        if self._file.write(line) != len(line):
            self._file.truncate(at)
            raise OSError(errno.ENOSPC, "no room for a line", str(self.path))
        self._seq, self._prev = self._seq + 1, digest

    def _rotate(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        for number in range(self._num_parts - 1, 0, -1):
            older = _part(self.path, number - 1)
            if older.exists():
                commit_files({older: _part(self.path, number)})
        self._file = self.path.open("ab", buffering=0)
        self.path.chmod(0o600)


def read_audit(path: str | Path) -> Iterator[Event]:
    """The events of a log, oldest part first, each checked against the one before.

    Raises:
        LedgerError: If a line was changed, inserted or taken out, or is unfinished amid the log.
        UsageError: If there is no such file.
    """
    first = Path(path)
    if not first.exists():
        raise UsageError(f"audit: no log at {first}. A node writes one with --audit FILE.")
    numbers = [int(p.suffix[1:]) for p in first.parent.glob(f"{first.name}.*") if p.suffix[1:].isdigit()]
    prev: str | None = None
    for number in sorted([0, *numbers], reverse=True):
        for line_number, line in enumerate(_part(first, number).read_bytes().splitlines(keepends=True), 1):
            where = f"{_part(first, number)}:{line_number}"
            if not line.endswith(b"\n") and number == 0:
                return  # being written, or the end of a killed process
            event, before = _open(line, where)
            if prev is not None and before != prev:
                raise LedgerError(f"audit: expected a line behind {prev[:12]}, got one behind {before[:12]} ({where})")
            if prev is None and event.seq == 1 and before != BEGINNING:
                raise LedgerError(f"audit: the first line follows another ({where})")
            prev = event.hash
            yield event


def _seal(body: dict[str, Any]) -> tuple[bytes, str]:
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return json.dumps({**body, "hash": digest}, sort_keys=True, separators=(",", ":")).encode() + b"\n", digest


def _open(line: bytes, where: str) -> tuple[Event, str]:
    try:
        body = json.loads(line)
        digest = body.pop("hash")
        event = Event(
            int(body["seq"]), float(body["at"]), str(body["kind"]), dict(body["facts"]), int(body["repeats"]), digest
        )
        prev = str(body["prev"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LedgerError(f"audit: expected a line of JSON, got {line[:80]!r} ({where}): {error}") from error
    if _seal(body)[1] != digest:
        raise LedgerError(f"audit: line {event.seq} was changed: its hash does not fit ({where})")
    return event, prev


def _last_of(path: Path) -> tuple[int, str]:
    """Number and hash of the last whole line; drops an unfinished one behind it."""
    for number in (0, 1):
        part = _part(path, number)
        data = part.read_bytes() if part.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if number == 0 and len(whole) < len(data):
            os.truncate(part, len(whole))
        if whole:
            event, _ = _open(whole.splitlines()[-1], str(part))
            return event.seq, event.hash
    return 0, BEGINNING


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _short(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) or value is None else str(value)[:MAX_TEXT]
