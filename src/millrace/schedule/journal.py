"""The scheduler's memory: a ledger that is the truth, and a SQLite file beside it that saves time.

A use is appended to the ledger (on disk), then applied to SQLite, then answered. Killed between any two
of these, the scheduler reads on start what the ledger has beyond the journal and applies it; what
was never answered is asked again by the worker, and answered as recorded. With the SQLite file gone,
everything but the live leases comes back from the ledger. Live leases lie in SQLite, so that a worker
goes on over a restart as if nothing happened; each gets a whole term again, for the outage is not its fault.

Cost: one fsync a receipt, by the ledger. SQLite runs in WAL mode without fsync of its own (NORMAL).
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.errors import LeaseError, LedgerError, StateError
from millrace.ledger import Entry, Ledger, Signer, encode_runs
from millrace.schedule.leases import Lease, LeaseTable, Use, Waiting

LEDGER_NAME = "ledger.jsonl"
JOURNAL_NAME = "journal.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS offsets (slice INTEGER PRIMARY KEY, reached INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS leases (
    id TEXT PRIMARY KEY, worker TEXT NOT NULL, session TEXT NOT NULL,
    epoch INTEGER NOT NULL, slice INTEGER NOT NULL UNIQUE, start INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS uses (
    lease TEXT PRIMARY KEY, worker TEXT NOT NULL, epoch INTEGER NOT NULL, slice INTEGER NOT NULL,
    start INTEGER NOT NULL, stop INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS bad_providers (
    peer TEXT NOT NULL, sha256 TEXT NOT NULL, reporter TEXT NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (peer, sha256, reporter)) WITHOUT ROWID;
"""
_JOB_IDENTITY = ("name", "dataset_id", "layout", "seq_len", "seed", "samples_per_slice", "scheduler")


class Journal:
    """A job's lease table, kept on disk. One thread at a time; close it, or use it in a `with`.

    `table` is for reading; change it through the methods here only.
    """

    def __init__(self, ledger: Ledger, database: sqlite3.Connection, table: LeaseTable, job: Entry) -> None:
        self.ledger = ledger
        self.table = table
        self.job = job.body
        self.job_id = job.hash
        self._database = database
        self._known_workers: set[str] = set()

    @classmethod
    def open(
        cls,
        state_dir: Path,
        *,
        job: dict[str, Any],
        samples_per_slice: NDArray[np.int64],
        epochs: int,
        lease_s: float,
        signer: Signer,
        now: Callable[[], float] = time.monotonic,
    ) -> Journal:
        """Opens the state of a job, or begins it.

        Args:
            job: name, dataset_id, layout, seq_len, seed and scheduler (public key in hex): what, with the
                samples of each slice, makes it this job and no other.
            now: The clock that deadlines are in; it may start anew with the process.

        Raises:
            StateError: If the directory holds another job.
            LedgerError: If the ledger is broken or open elsewhere.
        """
        state_dir = Path(state_dir)
        state_dir.mkdir(parents=True, exist_ok=True)
        ledger = Ledger.open(state_dir / LEDGER_NAME, signer)
        try:
            job = {**job, "samples_per_slice": encode_runs(samples_per_slice)}
            first = ledger.first or ledger.append("job", job)
            _check_same_job(first, job, ledger.path)
            table = LeaseTable(samples_per_slice, seed=int(job["seed"]), epochs=epochs, lease_s=lease_s)
            database = _open_database(state_dir / JOURNAL_NAME, first.hash, ledger.next_seq)
            journal = cls(ledger, database, table, first)
            journal._recover(now())
        except BaseException:
            ledger.close()
            raise
        return journal

    def _recover(self, now: float) -> None:
        """Loads SQLite, then applies what the ledger has beyond it."""
        meta = dict(self._database.execute("SELECT key, value FROM meta").fetchall())
        applied = int(meta.get("applied", "1"))
        offsets = np.zeros(len(self.table.samples), np.int64)
        for index, reached in self._database.execute("SELECT slice, reached FROM offsets"):
            offsets[index] = reached
        leases = [Lease(a, b, c, d, e, f, 0.0) for a, b, c, d, e, f in self._database.execute("SELECT * FROM leases")]
        uses = [Use(*row) for row in self._database.execute("SELECT * FROM uses")]
        self.table.restore(int(meta.get("epoch", "0")), offsets, leases, uses)
        with self._transaction():
            for entry in self.ledger.entries():
                if entry.kind == "worker":
                    self._known_workers.add(str(entry.body["worker"]))
                elif entry.kind == "use" and entry.seq >= applied:
                    self._apply(_use_of(entry, self.ledger.path), entry.seq + 1, now)
        self.table.extend_all(now)

    @contextlib.contextmanager
    def _transaction(self) -> Any:
        self._database.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def grant(self, worker: str, session: str, lease_id: str, cached: list[int], now: float) -> Lease | Waiting | None:
        """As `LeaseTable.grant`; the lease is on record before it is returned."""
        lease = self.table.grant(worker, session, lease_id, cached, now)
        if isinstance(lease, Lease):
            row = (lease.lease_id, worker, session, lease.epoch, lease.slice_index, lease.start)
            self._database.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?)", row)
        return lease

    def register(self, worker: str, public_key: bytes, name: str) -> None:
        """Enters a worker's key in the ledger, once, so that its receipts can be checked from the ledger alone."""
        if worker not in self._known_workers:
            self.ledger.append("worker", {"worker": worker, "key": public_key.hex(), "name": name})
            self._known_workers.add(worker)

    def use(
        self, worker: str, lease_id: str, start: int, stop: int, step: int, receipt: str, now: float
    ) -> Lease | None:
        """Records that samples [start, stop) were used; the lease if it lives on. Repeating it is harmless.

        Raises:
            LeaseLostError: If the lease is not live.
            LeaseError: If the range does not continue the slice.
        """
        use = self.table.check_use(worker, lease_id, start, stop)
        if use is None:
            return self.table.leases.get(lease_id)
        entry = self.ledger.append(
            "use",
            {
                "worker": worker,
                "lease": lease_id,
                "epoch": use.epoch,
                "slice": use.slice_index,
                "start": start,
                "stop": stop,
                "step": step,
                "receipt": receipt,
            },
        )
        with self._transaction():
            self._apply(use, entry.seq + 1, now)
        return self.table.leases.get(lease_id)

    def _apply(self, use: Use, applied: int, now: float) -> None:
        """One use into the table and SQLite; within a transaction."""
        epoch = self.table.epoch
        try:
            lease = self.table.record_use(use, now)
        except LeaseError as error:
            raise LedgerError(f"ledger {self.ledger.path}, entry {applied - 1}: {error}") from error
        execute = self._database.execute
        row = (use.lease_id, use.worker, use.epoch, use.slice_index, use.start, use.stop)
        execute("INSERT OR REPLACE INTO uses VALUES (?, ?, ?, ?, ?, ?)", row)
        execute("INSERT OR REPLACE INTO offsets VALUES (?, ?)", (use.slice_index, use.stop))
        execute("INSERT OR REPLACE INTO meta VALUES ('applied', ?)", (str(applied),))
        if lease is None and use.stop == int(self.table.samples[use.slice_index]):
            execute("DELETE FROM leases WHERE slice = ?", (use.slice_index,))
        if self.table.epoch != epoch:
            execute("DELETE FROM leases")
            execute("DELETE FROM offsets")
            execute("DELETE FROM uses WHERE epoch < ?", (epoch,))
            execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", (str(self.table.epoch),))

    def renew(self, worker: str, lease_id: str, now: float) -> Lease:
        """As `LeaseTable.renew`; deadlines are not on disk, for a restart grants a whole term again."""
        return self.table.renew(worker, lease_id, now)

    def release(self, worker: str, lease_id: str) -> Lease:
        """As `LeaseTable.release`."""
        lease = self.table.release(worker, lease_id)
        self._database.execute("DELETE FROM leases WHERE id = ?", (lease_id,))
        return lease

    def expire(self, now: float) -> list[Lease]:
        """As `LeaseTable.expire`."""
        late = self.table.expire(now)
        with self._transaction():
            for lease in late:
                self._database.execute("DELETE FROM leases WHERE id = ?", (lease.lease_id,))
        return late

    def report_bad(self, peer: str, sha256: str, reporter: str, reason: str) -> None:
        """Remembers that a provider served wrong bytes for a hash."""
        row = (peer, sha256, reporter, reason)
        self._database.execute("INSERT OR REPLACE INTO bad_providers VALUES (?, ?, ?, ?)", row)

    def bad_providers(self) -> list[tuple[str, str, str, str]]:
        """Every report: peer, sha256, reporter, reason."""
        return self._database.execute("SELECT * FROM bad_providers").fetchall()

    def close(self) -> None:
        """Closes both files; may be called twice."""
        self._database.close()
        self.ledger.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _open_database(path: Path, job_id: str, ledger_entries: int) -> sqlite3.Connection:
    """The SQLite file of this job; begun anew where it is missing, damaged or not of this ledger."""
    for _attempt in range(2):
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            database.executescript(_SCHEMA)
            meta = dict(database.execute("SELECT key, value FROM meta").fetchall())
            if meta.get("job", job_id) == job_id and int(meta.get("applied", "0")) <= ledger_entries:
                database.execute("INSERT OR REPLACE INTO meta VALUES ('job', ?)", (job_id,))
                return database
        except sqlite3.DatabaseError:
            # Nothing in it that the ledger does not have: the next attempt starts from an empty file.
            pass
        database.close()
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    raise StateError(f"journal {path}: cannot be opened or begun anew. Is the directory writable?")


def _check_same_job(first: Entry, job: dict[str, Any], path: Path) -> None:
    if first.kind != "job":
        raise LedgerError(f"ledger {path}: expected a job entry first, got {first.kind}. It is not a ledger of ours.")
    for key in _JOB_IDENTITY:
        if first.body.get(key) != job.get(key):
            ours, theirs = str(job.get(key))[:70], str(first.body.get(key))[:70]
            raise StateError(
                f"ledger {path}: it is of another job: expected {key} {ours}, got {theirs}. Going on would "
                "mix two jobs. Use another state directory, or the settings that began this one."
            )


def _use_of(entry: Entry, path: Path) -> Use:
    body = entry.body
    try:
        numbers = [int(body[key]) for key in ("epoch", "slice", "start", "stop")]
        return Use(str(body["lease"]), str(body["worker"]), *numbers)
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(f"ledger {path}, entry {entry.seq}: not a use: {error!r}.") from error
