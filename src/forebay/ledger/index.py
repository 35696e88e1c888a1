"""Queries on a ledger: its uses as a table and its other entries, cached in two files beside it.

FILE.uses has the table, FILE.index the rest as JSON: the position they cover, the workers, all entries other than uses.
The first query creates them, 10 us an entry; later only the tail of the ledger is read, and a million uses load within
0.1 s. They may be deleted, and are skipped where they cannot be written. `verify` never reads them.
"""

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import LedgerError
from forebay.files import atomic_write, remove_stale
from forebay.ledger.chain import GENESIS, READ_BYTES, Checkpoint, Entry, link_before, read_links
from forebay.ledger.job import Asides, Job, apply_aside
from forebay.ledger.receipts import USE, UseColumns, uses_of

_VERSION = 3
_MIN_CACHED = 4096  # Entries; shorter ledgers are read again each time.


@dataclass(frozen=True, eq=False)
class LedgerIndex:
    """The contents of a ledger."""

    path: Path
    job: Job
    uses: NDArray[Any]  # Of dtype USE, in the order of the ledger; within an entry by step. `worker` counts `workers`.
    workers: tuple[str, ...]  # Peer ids, in the order of their first uses.
    sessions: tuple[str, ...]  # Peer id, a space, and a session's name; likewise.
    others: tuple[Entry, ...]  # All entries other than uses, in order, with entry 0, the job.
    checkpoint: Checkpoint

    @property
    def names(self) -> dict[str, str]:
        """Peer id to the worker's name."""
        workers = [entry.body for entry in self.others if entry.kind == "worker"]
        return {str(body.get("worker")): str(body.get("name", "")) for body in workers}

    def lines(self, seqs: list[int]) -> dict[int, bytes]:
        """The lines of these entries, without their newlines: one pass over the file."""
        requested, lines = set(seqs), {}
        with self.path.open("rb", READ_BYTES) as file:
            for seq, line in enumerate(file):
                if seq in requested:
                    lines[seq] = line.rstrip(b"\n")
        return lines

    @property
    def aside(self) -> Asides:
        """The samples set aside."""
        asides: Asides = {}
        ended: set[tuple[int, int]] = set()
        for entry in self.others:
            if entry.kind == "epoch":
                ended.add((int(entry.body.get("dataset", 0)), int(entry.body["epoch"])))
            elif entry.kind in ("set_aside", "readmitted"):
                apply_aside(entry, self.job, asides, ended)
        return asides


def open_index(path: str | Path, *, keep: bool = True) -> LedgerIndex:
    """The index of a ledger, from the cache files as far as they go; `keep`: write them for long ledgers.

    Raises:
        LedgerError: If the ledger cannot be read.
    """
    path = Path(path)
    try:
        with path.open("rb", READ_BYTES) as file:
            return _read(path, file, keep)
    except OSError as error:
        raise LedgerError(f"ledger {path}: cannot read it: {error}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"ledger {path}: expected the entries that a scheduler writes, got {error!r}. Run `forebay ledger verify`."
        ) from None


def _read(path: Path, file: Any, keep: bool) -> LedgerIndex:
    saved = _read_saved(path, file)
    old, workers, sessions, others = saved[1:] if saved else (np.empty(0, USE), [], [], [])
    checkpoint = saved[0] if saved else Checkpoint(0, GENESIS, 0, 0, "")
    columns = UseColumns(_numbered(workers), _numbered(sessions))
    others = list(others)
    size, last = checkpoint.size, None
    file.seek(size)
    for link in read_links(file, path, checkpoint.seq, checkpoint.prev):
        last, size = link, size + len(link.line) + 1
        entry = link.entry(path)
        if entry.kind == "uses":
            for use in sorted(uses_of(entry), key=lambda use: use.step):
                columns.add(entry, str(entry.body["worker"]), use)
        else:
            others.append(entry)
    if not others:
        raise LedgerError(f"ledger {path}: expected a job entry first, got none.")
    if last is not None:
        checkpoint = Checkpoint(last.seq + 1, last.hash, size, len(last.line) + 1, others[0].hash)
    fresh = columns.table()
    table = np.concatenate([old, fresh]) if len(fresh) else old
    index = LedgerIndex(
        path, Job.of(others[0]), table, tuple(columns.workers), tuple(columns.sessions), tuple(others), checkpoint
    )
    if keep and checkpoint.seq - (saved[0].seq if saved else 0) >= _MIN_CACHED:
        with contextlib.suppress(OSError):
            _keep(index, fresh, len(old))
    return index


def _numbered(names: list[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _files(path: Path) -> tuple[Path, Path]:
    return path.with_name(path.name + ".uses"), path.with_name(path.name + ".index")


def _read_saved(path: Path, file: Any) -> tuple[Checkpoint, NDArray[Any], list[str], list[str], list[Entry]] | None:
    """The contents of the cache files; None if they are missing or belong to another ledger."""
    uses_path, index_path = _files(path)
    try:
        body = json.loads(index_path.read_bytes())
        checkpoint = Checkpoint.from_json(body["checkpoint"])
        if body["version"] != _VERSION or checkpoint is None or link_before(file, checkpoint, path) is None:
            return None
        table = np.fromfile(uses_path, USE, count=int(body["uses"]))
        if len(table) != body["uses"]:
            return None
        workers, sessions = ([str(name) for name in body[key]] for key in ("workers", "sessions"))
        return checkpoint, table, workers, sessions, [Entry(**entry) for entry in body["others"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(index: LedgerIndex, fresh: NDArray[Any], num_old: int) -> None:
    """Write the table first: rows beyond the JSON's count are ignored. One process at a time writes."""
    uses_path, index_path = _files(index.path)
    remove_stale(index_path.parent)
    body = {
        "version": _VERSION,
        "checkpoint": index.checkpoint.to_json(),
        "uses": len(index.uses),
        "workers": index.workers,
        "sessions": index.sessions,
        "others": [asdict(entry) for entry in index.others],
    }
    with os.fdopen(os.open(uses_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.seek(0, os.SEEK_END) < num_old * USE.itemsize:
            return  # Another process has replaced it.
        file.truncate(file.seek(num_old * USE.itemsize))
        file.write(fresh.tobytes())
        file.flush()
        os.fsync(file.fileno())
        atomic_write(index_path, json.dumps(body).encode(), 0o600)
