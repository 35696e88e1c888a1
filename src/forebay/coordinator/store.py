"""The coordinator's SQLite file: the state of the run, and a log of which worker trained on which samples.

A change is written (WAL, synchronous) before the response is sent: after a kill the coordinator continues with the same
generation, and no number is given twice. What members report again anyway is not written: which are ready, when each
was seen. So after a restart each member has its whole timeout again, counted from when it must have noticed that the
coordinator was down.

The log only grows. A row says that steps [start, stop) were finished in a generation, each of `count` samples from
`first_sample` on; of several rows for a step that of the highest generation counts, the others were redone.
"""

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from forebay.base import Json
from forebay.coordinator import messages
from forebay.coordinator.messages import STATE_VERSION, Action, Formed, Gap, Rules, RunState, Stepped
from forebay.errors import StateError
from forebay.machine import own_directory
from forebay.storage.locks import locked_error

ROSTER_NAME = "roster.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS state (one INTEGER PRIMARY KEY CHECK (one = 1), run_id TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS generations (
    number INTEGER PRIMARY KEY, at REAL NOT NULL, start_step INTEGER NOT NULL, start_sample INTEGER NOT NULL,
    batch_size INTEGER NOT NULL, workers TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS steps (
    generation INTEGER NOT NULL, start INTEGER NOT NULL, stop INTEGER NOT NULL,
    first_sample INTEGER NOT NULL, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS gaps (
    generation INTEGER NOT NULL, worker TEXT NOT NULL, rank INTEGER NOT NULL,
    start INTEGER NOT NULL, stop INTEGER NOT NULL);
"""
_STATE = TypeAdapter(RunState)
# Live members report these again, so they are not worth a write.
_TRANSIENT = {"seen_at", "moved_at", "ready", "polling", "returns_at", "lost_at"}
_EXCLUDED: Json = {"rules": True, "changing_at": True, "members": {"__all__": _TRANSIENT}}


class RunStore:
    """A run's state on disk. One thread at a time; close it.

    Args:
        state_dir: The run's directory; None stores in memory, for a run that may be lost.
    """

    def __init__(self, state_dir: str | Path | None) -> None:
        self.path = Path(state_dir) / ROSTER_NAME if state_dir is not None else None
        if self.path is not None:
            own_directory(self.path.parent)
            self.path.touch(mode=0o600)  # SQLite's other files get the mode of this one
        try:
            self._database = sqlite3.connect(
                self.path or ":memory:", isolation_level=None, check_same_thread=False, timeout=2.0
            )
            self._database.row_factory = sqlite3.Row
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            # One coordinator for a run: a second one fails at its first write.
            self._database.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._database.executescript(_SCHEMA)
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            if self.path is not None and error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise locked_error(self.path, f"coordinator's state {self.path}", StateError) from error
            raise StateError(
                f"coordinator's state: cannot open {self.path}: {error}. Choose another --state directory."
            ) from error
        self._written = ""

    def load(self, rules: Rules, fixed: Mapping[str, Any], now: float, run_id: str) -> tuple[RunState, str]:
        """The stored state, or a new run under `run_id`; and the run's id.

        StateError if the stored run has other settings, or is of another version of this program.
        """
        row = self._database.execute("SELECT run_id, body FROM state").fetchone()
        if row is None:
            state = RunState(rules, dict(fixed), dict(fixed))
            self.save(state, [], run_id)
            return state, run_id
        body = json.loads(row[1])
        for key, value in fixed.items():
            if body["config"].get(key) != value:
                raise StateError(
                    f"coordinator's state: the run in {self.path} has {key} {body['config'].get(key)!r}, "
                    f"this start says {value!r}. Start it as it was, or choose another --state directory."
                )
        returns_at = now + min(rules.heartbeat_s, messages.HEARTBEAT_WAIT_S) + messages.ANSWER_S + messages.RETRY_S
        times = {"seen_at": now, "moved_at": now, "returns_at": returns_at}
        try:
            if body["version"] != STATE_VERSION:
                raise ValueError(f"expected {STATE_VERSION}, got {body['version']}")
            members = {name: {**member, **times} for name, member in body["members"].items()}
            state = _STATE.validate_python({**body, "rules": rules, "members": members})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(
                f"coordinator's state: {self.path} is of another version, or damaged: {type(error).__name__}: {error}. "
                "End the run with the version that began it, or choose another --state directory."
            ) from error
        self._written = row[1]
        return state, str(row[0])

    def save(self, state: RunState, actions: Sequence[Action], run_id: str) -> None:
        """Write what changed, all or nothing; it is on disk when this returns.

        StateError if it cannot be written; the stored state stays, and a later call may succeed.
        """
        body = _STATE.dump_json(state, exclude=_EXCLUDED).decode()
        if body == self._written and not actions:
            return
        now = time.time()
        try:
            with self._database as database:  # commits, or rolls back: also where the commit fails
                database.execute("BEGIN IMMEDIATE")
                database.execute("INSERT OR REPLACE INTO state VALUES (1, ?, ?)", (run_id, body))
                for action in actions:
                    self._log(action, state, now)
        except sqlite3.Error as error:
            raise StateError(
                f"coordinator's state: cannot write {self.path}: {error}. If its disk is full, free some space: the "
                "coordinator then continues."
            ) from error
        self._written = body

    def _log(self, action: Action, state: RunState, now: float) -> None:
        execute = self._database.execute
        match action:
            case Formed(generation):
                workers = json.dumps([slot.worker_id for slot in generation.places])
                steps = (generation.start_step, generation.start_sample, state.batch_size)
                execute("INSERT INTO generations VALUES (?, ?, ?, ?, ?, ?)", (generation.number, now, *steps, workers))
            case Stepped(generation, start, stop, first_sample, count):
                execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", (generation, start, stop, first_sample, count))
            case Gap(generation, worker, rank, start, stop):
                execute("INSERT INTO gaps VALUES (?, ?, ?, ?, ?)", (generation, worker, rank, start, stop))

    def generations(self) -> list[Json]:
        """Every generation so far, oldest first."""
        rows = self._database.execute("SELECT * FROM generations ORDER BY number")
        return [{**row, "workers": json.loads(row["workers"])} for row in map(dict, rows)]

    def rows(self) -> list[tuple[int, int, int, int, int]]:
        """Every row of the log: generation, start, stop, first_sample, count."""
        query = "SELECT generation, start, stop, first_sample, count FROM steps ORDER BY generation, start"
        return self._database.execute(query).fetchall()

    def gaps(self) -> list[Json]:
        """Parts of steps that dead workers did not do; none where workers step together."""
        query = "SELECT generation, worker AS worker_id, rank, start, stop FROM gaps"
        return list(map(dict, self._database.execute(query)))

    def close(self) -> None:
        """Close the file. May be repeated."""
        self._database.close()
