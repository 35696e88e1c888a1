"""The scheduler's memory: ledgers that are the truth, and a SQLite file beside them that saves time.

What happened is appended to the job's ledger where it proves something, then written to SQLite, and then answered.
Whoever waits shares one fsync with all who wait meanwhile. Killed between any two of these, the scheduler takes the
last snapshot, replays what SQLite has beyond it and then what the ledgers have beyond that; what was never answered
is said again by the worker, and answered as recorded. With the SQLite file gone, everything but the live leases comes
back from the ledgers.

Where a write fails, the desk in memory is ahead of the disk: nothing more is answered until the journal was opened
again. SQLite runs in WAL mode without fsync of its own: after a loss of power live leases may be missing, no more.
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
from forebay.ledger.coverage import coverage_root
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
# Events after which all of the desk is written, and what came before forgotten.
SNAPSHOT_EVENTS = 20_000
VERSION = 4

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (number INTEGER PRIMARY KEY, events BLOB NOT NULL);
"""
# The disk's faults (full, unreadable, read-only), which say nothing of what is in the file.
_PASSING = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
_IDENTITY = ("name", "dataset_id", "datasets", "layout", "seq_len", "seed", "samples_per_slice", "scheduler")


def job_body(spec: JobSpec, **facts: Any) -> dict[str, Any]:
    """What the first entry of a job's ledger says of it; `facts` are seq_len, layout and the scheduler's key."""
    sources: list[dict[str, Any]] = [
        {"name": s.name, "dataset_id": s.dataset_id, "samples_per_slice": encode_runs(s.samples)} for s in spec.sources
    ]
    body = {"name": spec.name, "seed": spec.seed, "epochs": spec.epochs, **facts}
    if len(sources) == 1:
        return {**sources[0], **body}
    for source, described in zip(spec.sources, sources):
        described["weight"] = source.weight
    return {**body, "datasets": sources}


@dataclass
class _Batch:
    """What waits to be written: events in order, and at most one snapshot, taken after `upto` of them."""

    events: list[Event] = field(default_factory=list)
    snapshot: dict[str, Any] | None = None
    upto: int = 0


class Journal:
    """The desk of a state directory, kept on disk. Change `desk` under a lock of yours, `put` what happened under the
    same lock, then `wait` outside of it, and only then answer. Close it, or use it in a `with`.
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
        self._pending = _Batch()
        self._put = 0
        self._durable = 0
        self._since_snapshot = 0
        self._pending_lock = threading.Lock()
        self._commit_lock = threading.Lock()

    @classmethod
    def open(
        cls,
        state_dir: Path,
        specs: Sequence[JobSpec],
        bodies: Mapping[str, dict[str, Any]],
        signer: Signer,
        *,
        salt: str = "",
        ttl_s: float = 30.0,
        checks: bool = False,
        lock: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> Journal:
        """Opens the state of the jobs, or begins it.

        Args:
            bodies: Of each job, from `job_body`: what makes it this job and no other.
            salt, checks: See Desk.
            lock: From `lock_state`, if the caller has it already; the journal gives it up when it closes.
            now: The clock that deadlines are in; it may start anew with the process.

        Raises:
            StateError: If the directory holds another job of that name, or another scheduler runs on it.
            LedgerError: If a ledger is broken.
        """
        state_dir = Path(state_dir)
        lock = lock_state(state_dir) if lock is None else lock
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, lock)
            try:
                database = _open_database(state_dir / JOURNAL_NAME)
                stack.callback(database.close)
                known = orjson.loads(_meta(database, "checkpoints") or b"{}")
                ledgers: dict[str, Ledger] = {}
                for number, spec in enumerate(specs):
                    path = ledger_path(state_dir, spec.name if number else "")
                    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    checkpoint = Checkpoint.from_json(known.get(spec.name))
                    ledger = ledgers[spec.name] = Ledger.open(path, signer, checkpoint=checkpoint)
                    stack.callback(ledger.close)
                    first = ledger.first or ledger.append("job", dict(bodies[spec.name]))
                    _check_same_job(first, bodies[spec.name], path)
                journal = cls(SchedulerCore(specs, salt=salt, ttl_s=ttl_s, checks=checks), ledgers, database, lock)
                journal._recover(now())
            except (sqlite3.Error, OSError) as error:
                raise StateError(f"journal in {state_dir}: cannot be opened: {error}. Is the disk full?") from error
            stack.pop_all()
        return journal

    # Coming back.

    def _recover(self, now: float) -> None:
        """The snapshot, what SQLite has beyond it, what the ledgers have beyond that, what follows from it all."""
        meta = orjson.loads(_meta(self._database, "state") or b"{}")
        if any(meta.get("jobs", {}).get(name, job_id) != job_id for name, job_id in self.job_ids.items()):
            meta = {}
        applied: dict[str, int] = dict(meta.get("applied", {}))
        if any(applied.get(name, 0) > ledger.next_seq for name, ledger in self.ledgers.items()):
            meta, applied = {}, {}  # the database knows more than the ledger: it is of another one
        if meta and set(meta["jobs"]) == set(self.job_ids):
            self._load(meta)
        else:
            self._database.execute("DELETE FROM batches")
            applied = {}
        for name, ledger in self.ledgers.items():
            self._catch_up(name, ledger, applied.get(name, 1), now)
        due = [event for name in self.ledgers for event in self.core.settle_all(name, now)]
        self.core.extend_all(now)
        # Begin with a snapshot: the next start replays little.
        self._pending = _Batch(due, self.core.snapshot(), len(due))
        self._put = 1
        self.wait(self._put)

    def _load(self, meta: dict[str, Any]) -> None:
        snapshot = _meta(self._database, "snapshot")
        if snapshot is not None:
            self.core.restore(orjson.loads(snapshot))
        for (rows,) in self._database.execute("SELECT events FROM batches ORDER BY number"):
            for row in orjson.loads(rows):
                self.core.apply(from_row(row))

    def _catch_up(self, name: str, ledger: Ledger, start: int, now: float) -> None:
        """Applies a ledger's entries from `start` on."""
        job = self.core.jobs[name]
        marks = orjson.loads(_meta(self._database, "checkpoints") or b"{}")
        checkpoint = Checkpoint.from_json(marks.get(name))
        if ledger.next_seq <= start:
            return
        for entry in ledger.entries(start, checkpoint):
            try:
                for event in _events_of(name, entry):
                    if isinstance(event, events.EpochEnded) and job.ended(event.dataset) is None:
                        raise LeaseError(f"epoch {event.epoch} ends before its samples are used")
                    self.core.apply(event, now)
            except (LeaseError, KeyError, TypeError, ValueError) as error:
                raise LedgerError(f"ledger {ledger.path}, entry {entry.seq} ({entry.kind}): {error}") from error

    # Going on.

    def put(self, happened: Sequence[Event]) -> int:
        """Queues what the desk just did; what to `wait` for before answering. Under the lock that guards the desk."""
        with self._pending_lock:
            if self.broken:
                raise LedgerError(self.broken)
            if happened:
                self._pending.events += happened
                self._since_snapshot += len(happened)
                self._put += 1
                if self._since_snapshot >= SNAPSHOT_EVENTS:
                    self._since_snapshot = 0
                    self._pending.snapshot, self._pending.upto = self.core.snapshot(), len(self._pending.events)
            return self._put

    def is_durable(self, ticket: int) -> bool:
        """Whether all that was put up to this ticket is on disk.

        Raises:
            LedgerError: If it never will be. The desk is then ahead of the disk: open the journal again.
        """
        if self._durable >= ticket:
            return True
        if self.broken:
            raise LedgerError(self.broken)
        return False

    def wait(self, ticket: int) -> None:
        """Returns once all that was put up to this ticket is on disk; raises as `is_durable`."""
        while not self.is_durable(ticket):
            self.write()

    def write(self) -> None:
        """Writes all that was put until now. From one thread at a time, or several: then one writes for all.

        Raises:
            LedgerError: If it could not be written.
        """
        with self._commit_lock:
            with self._pending_lock:
                if self.broken:
                    raise LedgerError(self.broken)
                batch, self._pending, upto = self._pending, _Batch(), self._put
            if self._durable >= upto:
                return
            try:
                self._write(batch)
            except Exception as error:  # whatever it is, this batch is not on disk, and the next must not pass for it
                folder = next(iter(self.ledgers.values())).path.parent
                self.broken = f"journal in {folder}: cannot write: {error}. If its disk is full, free some space."
                raise LedgerError(self.broken) from error
            self._durable = upto

    def _write(self, batch: _Batch) -> None:
        touched: set[str] = set()
        for event in batch.events:
            for kind, body in self._entries_of(event):
                name = getattr(event, "job", "")
                self.ledgers[name].append(kind, body, sync=False)
                touched.add(name)
        for name in touched:
            self.ledgers[name].sync()
        execute = self._database.execute
        with self._database:  # Commits, or rolls back: also where the commit fails.
            execute("BEGIN")
            rest = batch.events
            if batch.snapshot is not None:
                execute("DELETE FROM batches")
                execute("INSERT OR REPLACE INTO meta VALUES ('snapshot', ?)", (orjson.dumps(batch.snapshot),))
                rest = batch.events[batch.upto :]
            if rest:
                rows = orjson.dumps([to_row(event) for event in rest])
                execute("INSERT INTO batches (events) VALUES (?)", (rows,))
            if touched or batch.snapshot is not None:
                applied = {name: ledger.next_seq for name, ledger in self.ledgers.items()}
                state = {"version": VERSION, "jobs": self.job_ids, "applied": applied}
                marks = {name: ledger.checkpoint().to_json() for name, ledger in self.ledgers.items()}
                execute("INSERT OR REPLACE INTO meta VALUES ('state', ?)", (orjson.dumps(state),))
                execute("INSERT OR REPLACE INTO meta VALUES ('checkpoints', ?)", (orjson.dumps(marks),))

    def _entries_of(self, event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
        """What of an event the ledger keeps."""
        match event:
            case events.WorkerEnlisted(_, worker, key, name):
                yield "worker", {"worker": worker, "key": key, "name": name}
            case events.UsesRecorded(_, worker, uses, receipt, session):
                body = {"worker": worker, "uses": [used.to_row() for used in uses], "receipt": receipt}
                yield "uses", {**body, "session": session} if session else body
            case events.EpochEnded():
                yield "epoch", self._epoch_body(event)
            case events.SliceSetAside(_, epoch, index, start, stop, reason):
                place = {"epoch": epoch, "slice": index, "start": start, "stop": stop}
                yield "set_aside", {**place, "reason": reason[:300]}
            case events.SliceReadmitted(_, index):
                yield "readmitted", {"slice": index}
            case events.JobPaused(_, paused):
                yield "paused" if paused else "resumed", {}
            case events.WeightsChanged(_, at, weights):
                yield "weights", {"at": at, "weights": list(weights)}

    def _epoch_body(self, event: events.EpochEnded) -> dict[str, Any]:
        job = self.core.jobs[event.job]
        aside: dict[int, list[tuple[int, int]]] = {}
        for index, start, stop in event.aside:
            aside.setdefault(index, []).append((start, stop))
        table, first = job.tables[event.dataset], job.bases[event.dataset]
        root = coverage_root(
            self.job_ids[event.job], event.epoch, table.samples, {i: sorted(p) for i, p in aside.items()}, first
        )
        return {"epoch": event.epoch, "dataset": event.dataset, "samples": event.samples, "root": root}

    def close(self) -> None:
        """Writes what is left and closes every file; may be called twice."""
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
    """Where the ledger of a job lies; "" is the scheduler's first job."""
    return state_dir / "jobs" / job / LEDGER_NAME if job else state_dir / LEDGER_NAME


def lock_state(state_dir: Path) -> int:
    """Takes a state directory for this process; a descriptor, which to close, or to die, is to let go.

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
    """The SQLite file; begun anew where it is missing, damaged or of an older form."""
    for _attempt in range(2):
        path.touch(mode=0o600)  # SQLite's other files get the mode of this one
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            database.executescript(_SCHEMA)
            state = orjson.loads(_meta(database, "state") or b"{}")
            if state.get("version", VERSION) == VERSION:
                return database
        except (sqlite3.DatabaseError, ValueError) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING:
                database.close()  # As it is.
                raise
            # Nothing in it that the ledgers do not have but live leases: the next attempt starts from an empty file.
            pass
        database.close()
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    raise StateError(f"journal {path}: cannot be opened or begun anew. Is the directory writable?")


def _meta(database: sqlite3.Connection, key: str) -> bytes | None:
    row = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else bytes(row[0])


def _check_same_job(first: Entry, body: Mapping[str, Any], path: Path) -> None:
    if first.kind != "job":
        raise LedgerError(f"ledger {path}: expected a job entry first, got {first.kind}. It is not a ledger of ours.")
    for key in _IDENTITY:
        if first.body.get(key) != body.get(key):
            ours, theirs = str(body.get(key))[:70], str(first.body.get(key))[:70]
            raise StateError(
                f"ledger {path}: it is of another job: expected {key} {ours}, got {theirs}. Going on would "
                "mix two jobs. Use another state directory, or the settings that began this one."
            )


def _events_of(job: str, entry: Entry) -> Iterator[Event]:
    """The events that an entry of a ledger stands for."""
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
            yield events.EpochEnded(job, int(body["dataset"]), int(body["epoch"]), int(body["samples"]), ())
        case "set_aside":
            epoch, index, start, stop = (int(body[key]) for key in ("epoch", "slice", "start", "stop"))
            yield events.SliceSetAside(job, epoch, index, start, stop, str(body["reason"]))
        case "readmitted":
            yield events.SliceReadmitted(job, int(body["slice"]))
        case "paused" | "resumed":
            yield events.JobPaused(job, entry.kind == "paused")
        case "weights":
            yield events.WeightsChanged(job, int(body["at"]), tuple(float(w) for w in body["weights"]))
