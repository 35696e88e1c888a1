"""Persistence of the scheduler: a ledger, which is authoritative, and a SQLite file that makes restarts fast.

An event that proves something is appended to the ledger, then all are written to SQLite, then the response is
sent. All requests that wait share one fsync. After a kill between any of these, the scheduler loads the last snapshot,
replays the events that SQLite has beyond it, and then the entries that the ledger has beyond that; a worker that got
no response repeats its request, and learns that its uses are recorded. Without the SQLite file everything but the live
leases is restored from the ledger.

After a failed write the core in memory is ahead of the disk: no response is sent until the journal is opened again.
SQLite runs in WAL mode without an fsync of its own: after a loss of power live leases may be missing, nothing else.
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter

from forebay.base import Closing, Json
from forebay.errors import LeaseError, LedgerError, StateError
from forebay.ledger.chain import Checkpoint, Entry, Used
from forebay.ledger.index import Job, encode_runs
from forebay.ledger.writer import Ledger, Signer
from forebay.machine import own_directory
from forebay.scheduler import events
from forebay.scheduler.core import SchedulerCore
from forebay.scheduler.events import Event, from_row, to_row
from forebay.scheduler.leases import JobSpec
from forebay.storage.locks import Lock, holder, try_acquire

LEDGER_NAME = "ledger.jsonl"
JOURNAL_NAME = "journal.sqlite"
LOCK_NAME = "lock"
SNAPSHOT_EVENTS = 20_000  # after so many events a snapshot replaces them
VERSION = 8

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (number INTEGER PRIMARY KEY, events BLOB NOT NULL);
"""
_SET_META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
# Faults of the disk (full, unreadable, read-only): the contents of the file may be intact.
_DISK_FAULTS = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
_IDENTITY = (
    "name",
    "dataset_id",
    "layout",
    "seq_len",
    "seed",
    "samples_per_slice",
    "packing",
    "documents",
    "split",
    "scheduler",
)


def job_body(spec: JobSpec, **fields: Any) -> Json:
    """The body of the first entry of a job's ledger.

    `fields` are seq_len, layout and the scheduler's key; packing unless it is `concat`; the digest of a document
    subset; the split if there is one, and how many sample ids it skips before each slice.
    """
    defaults = {"packing": "concat", "documents": None, "split": None, "skipped_samples": None}
    fields = {name: value for name, value in fields.items() if name not in defaults or value != defaults[name]}
    return {
        "name": spec.name, "dataset_id": spec.dataset_id, "samples_per_slice": encode_runs(spec.samples),
        "seed": spec.seed, "epochs": spec.epochs, **fields,
    }  # fmt: skip


@dataclass
class _PendingWrite:
    """Events to be written, in order, and at most one snapshot, taken after `upto` of them."""

    events: list[Event] = field(default_factory=list)
    snapshot: Json | None = None
    upto: int = 0


@dataclass(eq=False)
class Journal(Closing):
    """A `SchedulerCore` that is kept on disk; close it, or use it in a `with`.

    Change `core` under a lock of the caller's, `put` the events under the same lock, `wait` outside of it, then send
    the response.
    """

    core: SchedulerCore
    ledger: Ledger
    job_id: str
    database: sqlite3.Connection

    def __post_init__(self) -> None:
        self.broken = ""
        self.enlisted: dict[str, float] = {}  # when the certificate of a worker ends that this process recorded
        self._files = contextlib.ExitStack()
        self._pending = _PendingWrite()
        self._put = 0
        self._durable = 0
        self._since_snapshot = 0
        self._pending_lock = threading.Lock()
        self._commit_lock = threading.Lock()

    @classmethod
    def open(
        cls, state_dir: Path, spec: JobSpec, body: Mapping[str, Any], signer: Signer, *, salt: str = "",
        ttl_s: float = 30.0, checks: bool = False, now: Callable[[], float] = time.monotonic,
    ) -> "Journal":  # fmt: skip
        """Open the state of a job, or create it. The caller has the lock of `lock_state`.

        Args:
            body: From `job_body`; it identifies the job.
            salt, checks, ttl_s: See SchedulerCore.
            now: The clock of deadlines; it may start again with the process.

        Raises:
            StateError: If the directory has another job.
            LedgerError: If the ledger is corrupt, or another scheduler has it open.
        """
        with contextlib.ExitStack() as stack:
            try:
                database = _open_database(state_dir / JOURNAL_NAME)
                stack.callback(database.close)
                checkpoint = Checkpoint.from_json(_read_meta(database, "checkpoint"))
                ledger = Ledger.open(state_dir / LEDGER_NAME, signer, checkpoint=checkpoint)
                stack.callback(ledger.close)
                first = ledger.first or ledger.append("job", dict(body))
                _check_same_job(first, body, ledger.path)
                journal = cls(SchedulerCore(spec, salt=salt, ttl_s=ttl_s, checks=checks), ledger, first.hash, database)
                journal._recover(checkpoint, now())
            except (sqlite3.Error, OSError) as error:
                raise StateError(f"journal in {state_dir}: cannot be opened: {error}. Is the disk full?") from error
            journal._files = stack.pop_all()
        return journal

    # Recovery.

    def _recover(self, checkpoint: Checkpoint | None, now: float) -> None:
        """Apply the snapshot, later events from SQLite, later entries of the ledger, and what is due after them."""
        state = _read_meta(self.database, "state")
        applied = state.get("applied", 0)
        if state.get("job") == self.job_id and applied <= self.ledger.next_seq:
            if snapshot := _read_meta(self.database, "snapshot"):
                self.core.restore(snapshot)
            for (rows,) in self.database.execute("SELECT events FROM batches ORDER BY number"):
                for row in orjson.loads(rows):
                    self.core.apply(from_row(row))
        else:  # the database is of another job, or of another ledger
            self.database.execute("DELETE FROM batches")
            applied = 1
        for entry in self.ledger.entries(applied, checkpoint) if applied < self.ledger.next_seq else ():
            try:
                for event in _events_of(entry):
                    self.core.apply(event, now)
            except (LeaseError, KeyError, TypeError, ValueError) as error:
                raise LedgerError(f"ledger {self.ledger.path}, entry {entry.seq} ({entry.kind}): {error}") from error
        due = self.core.advance(now)
        self.core.table.extend_all(now)
        # A snapshot now: the next start replays little.
        self._pending = _PendingWrite(due, self.core.snapshot(), len(due))
        self._put = 1
        self.write()

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
                    self._pending.snapshot = self.core.snapshot()
                    self._pending.upto = len(self._pending.events)
            return self._put

    def is_durable(self, ticket: int) -> bool:
        """Whether all that was put up to a ticket is on disk.

        LedgerError if a write failed. The core is then ahead of the disk: open the journal again.
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

        LedgerError if it could not be written.
        """
        with self._commit_lock:
            with self._pending_lock:
                if self.broken:
                    raise LedgerError(self.broken)
                pending = self._pending
                self._pending = _PendingWrite()
                upto = self._put
            if self._durable >= upto:
                return
            try:
                self._write(pending)
            except Exception as error:  # whatever it is: these events are not on disk, and no later ones may be
                self.broken = (
                    f"journal of {self.ledger.path}: cannot write: {error}. If the disk is full, free some space."
                )
                raise LedgerError(self.broken) from error
            self._durable = upto

    def _write(self, pending: _PendingWrite) -> None:
        entries = [entry for event in pending.events if (entry := _entry_of(event)) is not None]
        for kind, body in entries:
            self.ledger.append(kind, body, sync=False)
        self.ledger.sync()
        execute = self.database.execute
        with self.database:  # commits, or rolls back: also where the commit fails
            execute("BEGIN")
            if pending.snapshot is not None:
                execute("DELETE FROM batches")
                execute(_SET_META, ("snapshot", orjson.dumps(pending.snapshot)))
            if later := pending.events[pending.upto :]:
                execute("INSERT INTO batches (events) VALUES (?)", (orjson.dumps([to_row(event) for event in later]),))
            if entries or pending.snapshot is not None:
                execute(
                    _SET_META,
                    ("state", orjson.dumps({"version": VERSION, "job": self.job_id, "applied": self.ledger.next_seq})),
                )
                execute(_SET_META, ("checkpoint", orjson.dumps(self.ledger.checkpoint())))

    def close(self) -> None:
        """Write what is pending and close every file. May be repeated."""
        with contextlib.suppress(LedgerError):
            self.wait(self._put)
        self._files.close()


def lock_state(state_dir: Path) -> Lock:
    """Lock a state directory for this process, until its end at most. StateError if another scheduler has it."""
    try:
        own_directory(state_dir)
        lock = try_acquire(state_dir / LOCK_NAME)
    except OSError as error:
        raise StateError(f"state {state_dir}: cannot lock it: {error}. Is it a local disk?") from error
    if lock is None:
        raise StateError(
            f"state {state_dir}: {holder(state_dir / LOCK_NAME)} runs a scheduler on it. Stop it, wait for its end "
            "with --standby, or choose another --state directory."
        )
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


def _read_meta(database: sqlite3.Connection, key: str) -> Json:
    row = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return {} if row is None else dict(orjson.loads(row[0]))


def _check_same_job(first: Entry, body: Mapping[str, Any], path: Path) -> None:
    Job.of(first)
    for key in _IDENTITY:
        ours = body.get(key)
        theirs = first.body.get(key)
        if theirs != ours:
            raise StateError(
                f"ledger {path}: it is of another job: expected {key} {str(ours)[:70]}, got {str(theirs)[:70]}. "
                "Use another state directory, or the settings that created this one."
            )


# The events that are entries as they are.
_KINDS: dict[str, type[Event]] = {
    "worker": events.WorkerEnlisted,
    "epoch": events.EpochEnded,
    "set_aside": events.SliceSetAside,
    "readmitted": events.SliceReadmitted,
}


def _entry_of(event: Event) -> tuple[str, Json] | None:
    """The kind and body of the ledger entry of an event; None for an event that proves nothing."""
    match event:
        case events.UsesRecorded(worker, uses, receipt, session):
            body = {"worker": worker, "uses": [used.to_row() for used in uses], "receipt": receipt}
            return "uses", {**body, "session": session} if session else body
        case events.SliceSetAside():
            return "set_aside", event._asdict() | {"reason": event.reason[:300]}
        case events.JobPaused(paused):
            return "paused" if paused else "resumed", {}
    return next(((kind, event._asdict()) for kind, cls in _KINDS.items() if isinstance(event, cls)), None)


def _events_of(entry: Entry) -> Iterator[Event]:
    body = entry.body
    match entry.kind:
        case "uses":
            uses = tuple(Used.from_row(row) for row in body["uses"])
            yield events.UsesRecorded(str(body["worker"]), uses, str(body["receipt"]), str(body.get("session", "")))
        case "paused" | "resumed":
            yield events.JobPaused(entry.kind == "paused")
        case kind if kind in _KINDS:
            yield TypeAdapter[Event](_KINDS[kind]).validate_python(body)
