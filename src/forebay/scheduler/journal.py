"""Persistence of the scheduler: ledgers, which are authoritative, and a SQLite file that makes restarts fast.

An event that proves something is appended to its job's ledger, then all are written to SQLite, then the response is
sent. All requests that wait share one fsync. After a kill between any of these, the scheduler loads the last snapshot,
replays the events that SQLite has beyond it, and then the entries that the ledgers have beyond that; a worker that got
no response repeats its request, and learns that its uses are recorded. Without the SQLite file everything but the live
leases is restored from the ledgers.

After a failed write the core in memory is ahead of the disk: no response is sent until the journal is opened again.
SQLite runs in WAL mode without an fsync of its own: after a loss of power live leases may be missing, nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from forebay.errors import LeaseError, LedgerError, StateError
from forebay.ledger.chain import Checkpoint, Entry
from forebay.ledger.job import encode_runs
from forebay.ledger.receipts import Used
from forebay.ledger.writer import Ledger, Signer
from forebay.scheduler import events
from forebay.scheduler.core import SchedulerCore
from forebay.scheduler.events import Event, from_row, to_row
from forebay.scheduler.jobs import JobSpec

LEDGER_NAME = "ledger.jsonl"
JOURNAL_NAME = "journal.sqlite"
LOCK_NAME = "lock"
SNAPSHOT_EVENTS = 20_000  # after so many events a snapshot replaces them
VERSION = 6

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (number INTEGER PRIMARY KEY, events BLOB NOT NULL);
"""
_SET_META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
# Faults of the disk (full, unreadable, read-only): the contents of the file may be intact.
_DISK_FAULTS = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
_IDENTITY = ("name", "dataset_id", "datasets", "layout", "seq_len", "seed", "samples_per_slice", "scheduler")


def job_body(spec: JobSpec, **fields: Any) -> dict[str, Any]:
    """The body of the first entry of a job's ledger; `fields` are seq_len, layout and the scheduler's key."""
    dataset = {"dataset_id": spec.dataset_id, "samples_per_slice": encode_runs(spec.samples)}
    return {"name": spec.name, **dataset, "seed": spec.seed, "epochs": spec.epochs, **fields}


@dataclass
class _PendingWrite:
    """Events to be written, in order, and at most one snapshot, taken after `upto` of them."""

    events: list[Event] = field(default_factory=list)
    snapshot: dict[str, Any] | None = None
    upto: int = 0


class Journal:
    """A `SchedulerCore` that is kept on disk; close it, or use it in a `with`.

    Change `core` under a lock of the caller's, `put` the events under the same lock, `wait` outside of it, then send
    the response.
    """

    def __init__(
        self, core: SchedulerCore, ledgers: dict[str, Ledger], database: sqlite3.Connection, lock: int
    ) -> None:
        self.core = core
        self.ledgers = ledgers
        self.job_ids = {name: ledger.first.hash for name, ledger in ledgers.items() if ledger.first is not None}
        self.broken = ""
        self._database = database
        self._lock = lock
        self._pending = _PendingWrite()
        self._put = 0
        self._durable = 0
        self._since_snapshot = 0
        self._pending_lock = threading.Lock()
        self._commit_lock = threading.Lock()

    @classmethod
    def open(
        cls, state_dir: Path, specs: Sequence[JobSpec], bodies: Mapping[str, dict[str, Any]], signer: Signer, *,
        salt: str = "", ttl_s: float = 30.0, checks: bool = False, lock: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> Journal:  # fmt: skip
        """Open the state of the jobs, or create it.

        Args:
            bodies: Of each job, from `job_body`; they identify the job.
            salt, checks, ttl_s: See SchedulerCore.
            lock: From `lock_state`, if the caller has it already; `close` releases it.
            now: The clock of deadlines; it may start again with the process.

        Raises:
            StateError: If the directory has another job of that name, or another scheduler runs on it.
            LedgerError: If a ledger is corrupt.
        """
        state_dir = Path(state_dir)
        lock = lock_state(state_dir) if lock is None else lock
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, lock)
            try:
                database = _open_database(state_dir / JOURNAL_NAME)
                stack.callback(database.close)
                marks = _read_meta(database, "checkpoints")
                ledgers: dict[str, Ledger] = {}
                for number, spec in enumerate(specs):
                    path = ledger_path(state_dir, spec.name if number else "")
                    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    checkpoint = Checkpoint.from_json(marks.get(spec.name))
                    ledger = ledgers[spec.name] = Ledger.open(path, signer, checkpoint=checkpoint)
                    stack.callback(ledger.close)
                    first = ledger.first or ledger.append("job", dict(bodies[spec.name]))
                    _check_same_job(first, bodies[spec.name], path)
                journal = cls(SchedulerCore(specs, salt=salt, ttl_s=ttl_s, checks=checks), ledgers, database, lock)
                journal._recover(marks, now())
            except (sqlite3.Error, OSError) as error:
                raise StateError(f"journal in {state_dir}: cannot be opened: {error}. Is the disk full?") from error
            stack.pop_all()
        return journal

    # Recovery.

    def _recover(self, marks: Mapping[str, Any], now: float) -> None:
        """Apply the snapshot, later events from SQLite, later entries of the ledgers, and what is due after them."""
        state = _read_meta(self._database, "state")
        applied: dict[str, int] = state.get("applied", {})
        is_ahead = any(applied.get(name, 0) > ledger.next_seq for name, ledger in self.ledgers.items())
        if state.get("jobs") == self.job_ids and not is_ahead:
            if snapshot := _read_meta(self._database, "snapshot"):
                self.core.restore(snapshot)
            for (rows,) in self._database.execute("SELECT events FROM batches ORDER BY number"):
                for row in orjson.loads(rows):
                    self.core.apply(from_row(row))
        else:  # the database is of other jobs, or of another ledger
            self._database.execute("DELETE FROM batches")
            applied = {}
        for name, ledger in self.ledgers.items():
            self._catch_up(name, ledger, applied.get(name, 1), Checkpoint.from_json(marks.get(name)), now)
        due = [event for name in self.ledgers for event in self.core.advance(name, now)]
        self.core.extend_all(now)
        # A snapshot now: the next start replays little.
        self._pending = _PendingWrite(due, self.core.snapshot(), len(due))
        self._put = 1
        self.wait(self._put)

    def _catch_up(self, name: str, ledger: Ledger, start: int, checkpoint: Checkpoint | None, now: float) -> None:
        if ledger.next_seq <= start:
            return
        for entry in ledger.entries(start, checkpoint):
            try:
                for event in _events_of(name, entry):
                    if isinstance(event, events.EpochEnded) and self.core.jobs[name].due_end() is None:
                        raise LeaseError(f"epoch {event.epoch} ends before its samples are used")
                    self.core.apply(event, now)
            except (LeaseError, KeyError, TypeError, ValueError) as error:
                raise LedgerError(f"ledger {ledger.path}, entry {entry.seq} ({entry.kind}): {error}") from error

    # Writing.

    def put(self, new: Sequence[Event]) -> int:
        """Queue events for writing, under the lock that guards the core. Returns the ticket to `wait` for."""
        with self._pending_lock:
            if self.broken:
                raise LedgerError(self.broken)
            if new:
                self._pending.events += new
                self._since_snapshot += len(new)
                self._put += 1
                if self._since_snapshot >= SNAPSHOT_EVENTS:
                    self._since_snapshot = 0
                    self._pending.snapshot, self._pending.upto = self.core.snapshot(), len(self._pending.events)
            return self._put

    def is_durable(self, ticket: int) -> bool:
        """Whether all that was put up to a ticket is on disk.

        Raises:
            LedgerError: If a write failed. The core is then ahead of the disk: open the journal again.
        """
        if self._durable >= ticket:
            return True
        if self.broken:
            raise LedgerError(self.broken)
        return False

    def wait(self, ticket: int) -> None:
        """Return once all that was put up to a ticket is on disk; raises as `is_durable`."""
        while not self.is_durable(ticket):
            self.write()

    def write(self) -> None:
        """Write all that was put until now. May be called by several threads: one writes for all.

        Raises:
            LedgerError: If it could not be written.
        """
        with self._commit_lock:
            with self._pending_lock:
                if self.broken:
                    raise LedgerError(self.broken)
                pending, self._pending, upto = self._pending, _PendingWrite(), self._put
            if self._durable >= upto:
                return
            try:
                self._write(pending)
            except Exception as error:  # whatever it is: these events are not on disk, and no later ones may be
                folder = next(iter(self.ledgers.values())).path.parent
                self.broken = f"journal in {folder}: cannot write: {error}. If its disk is full, free some space."
                raise LedgerError(self.broken) from error
            self._durable = upto

    def _write(self, pending: _PendingWrite) -> None:
        touched: set[str] = set()
        for event in pending.events:
            for kind, body in self._entries_of(event):
                name = getattr(event, "job", "")
                self.ledgers[name].append(kind, body, sync=False)
                touched.add(name)
        for name in touched:
            self.ledgers[name].sync()
        execute = self._database.execute
        with self._database:  # commits, or rolls back: also where the commit fails
            execute("BEGIN")
            if pending.snapshot is not None:
                execute("DELETE FROM batches")
                execute(_SET_META, ("snapshot", orjson.dumps(pending.snapshot)))
            if later := pending.events[pending.upto :]:
                rows = orjson.dumps([to_row(event) for event in later])
                execute("INSERT INTO batches (events) VALUES (?)", (rows,))
            if touched or pending.snapshot is not None:
                applied = {name: ledger.next_seq for name, ledger in self.ledgers.items()}
                state = {"version": VERSION, "jobs": self.job_ids, "applied": applied}
                marks = {name: ledger.checkpoint().to_json() for name, ledger in self.ledgers.items()}
                execute(_SET_META, ("state", orjson.dumps(state)))
                execute(_SET_META, ("checkpoints", orjson.dumps(marks)))

    def _entries_of(self, event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
        """The kind and body of the ledger entry of an event; none for an event that proves nothing."""
        match event:
            case events.WorkerEnlisted(_, worker, key, name):
                yield "worker", {"worker": worker, "key": key, "name": name}
            case events.UsesRecorded(_, worker, uses, receipt, session):
                body = {"worker": worker, "uses": [used.to_row() for used in uses], "receipt": receipt}
                yield "uses", {**body, "session": session} if session else body
            case events.EpochEnded(_, epoch, num_samples, _):
                yield "epoch", {"epoch": epoch, "dataset": 0, "samples": num_samples}
            case events.SliceSetAside(_, epoch, index, start, stop, reason):
                samples_aside = {"epoch": epoch, "slice": index, "start": start, "stop": stop}
                yield "set_aside", {**samples_aside, "reason": reason[:300]}
            case events.SliceReadmitted(_, index):
                yield "readmitted", {"slice": index}
            case events.JobPaused(_, paused):
                yield "paused" if paused else "resumed", {}

    def close(self) -> None:
        """Write what is pending and close every file. May be repeated."""
        if self._lock < 0:
            return
        with contextlib.suppress(LedgerError):
            self.wait(self._put)
        self._database.close()
        for ledger in self.ledgers.values():
            ledger.close()
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def ledger_path(state_dir: Path, job: str = "") -> Path:
    """The file of a job's ledger; "" is the scheduler's first job."""
    return state_dir / "jobs" / job / LEDGER_NAME if job else state_dir / LEDGER_NAME


def lock_state(state_dir: Path) -> int:
    """Lock a state directory for this process. Returns a descriptor; closing it, or the process's end, unlocks.

    Raises:
        StateError: If another scheduler has it.
    """
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(state_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise StateError(f"state {state_dir}: cannot lock it: {error}. Is it a local disk?") from error
        raise StateError(
            f"state {state_dir}: another process runs a scheduler on it. Stop it, wait for its end with --standby, "
            "or choose another --state directory."
        ) from None
    return lock


def _open_database(path: Path) -> sqlite3.Connection:
    """Open the SQLite file; it is created again if it is missing, corrupt or of another version."""
    for _attempt in range(2):
        path.touch(mode=0o600)  # SQLite's other files get the mode of this one
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            database.executescript(_SCHEMA)
            if _read_meta(database, "state").get("version", VERSION) == VERSION:
                return database
        except (sqlite3.DatabaseError, ValueError) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DISK_FAULTS:
                database.close()
                raise
        database.close()  # of its contents only the live leases are not in the ledgers
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    raise StateError(f"journal {path}: cannot be opened or created. Is the directory writable?")


def _read_meta(database: sqlite3.Connection, key: str) -> dict[str, Any]:
    row = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return {} if row is None else dict(orjson.loads(bytes(row[0])))


def _check_same_job(first: Entry, body: Mapping[str, Any], path: Path) -> None:
    if first.kind != "job":
        raise LedgerError(f"ledger {path}: expected a job entry first, got {first.kind}. It is not a ledger of ours.")
    for key in _IDENTITY:
        if first.body.get(key) != body.get(key):
            ours, theirs = str(body.get(key))[:70], str(first.body.get(key))[:70]
            raise StateError(
                f"ledger {path}: it is of another job: expected {key} {ours}, got {theirs}. Use another state "
                "directory, or the settings that created this one."
            )


def _events_of(job: str, entry: Entry) -> Iterator[Event]:
    body = entry.body
    match entry.kind:
        case "worker":
            yield events.WorkerEnlisted(job, str(body["worker"]), str(body["key"]), str(body.get("name", "")))
        case "uses":
            uses = tuple(Used.from_row(row) for row in body["uses"])
            yield events.UsesRecorded(
                job, str(body["worker"]), uses, str(body["receipt"]), str(body.get("session", ""))
            )
        case "epoch":
            yield events.EpochEnded(job, int(body["epoch"]), int(body["samples"]), ())
        case "set_aside":
            epoch, index, start, stop = (int(body[key]) for key in ("epoch", "slice", "start", "stop"))
            yield events.SliceSetAside(job, epoch, index, start, stop, str(body["reason"]))
        case "readmitted":
            yield events.SliceReadmitted(job, int(body["slice"]))
        case "paused" | "resumed":
            yield events.JobPaused(job, entry.kind == "paused")
