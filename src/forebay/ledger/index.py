"""A ledger to ask questions of: its uses as a table, its other entries, and two files beside it that keep both.

FILE.uses is the table, FILE.index the rest as JSON: how far they go, the workers, all entries that are no uses. Whoever
first asks makes them, 10 us an entry; later only the tail is read, and a million uses are there within 0.1 s. Anybody
may delete them; where they cannot be written, they are not. They answer questions: `verify` never looks at them.
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
from forebay.ledger.job import Asides, Job, note_aside
from forebay.ledger.receipts import USE, UseColumns, uses_of

_VERSION = 2
_WORTH_KEEPING = 4096  # Entries; fewer are read again each time.


@dataclass(frozen=True, eq=False)
class LedgerIndex:
    """What a ledger holds, for reading."""

    path: Path
    job: Job
    uses: NDArray[Any]  # Of dtype USE, in the order of the ledger; within an entry by step. `worker` counts `workers`.
    workers: tuple[str, ...]  # Peer ids, as they first used something.
    sessions: tuple[str, ...]  # Peer id, a space, and a session's name; as they first used something.
    others: tuple[Entry, ...]  # All entries that are no uses, in order; entry 0, the job, too.
    checkpoint: Checkpoint

    @property
    def names(self) -> dict[str, str]:
        """Peer id to the name that the worker goes by."""
        found = [entry.body for entry in self.others if entry.kind == "worker"]
        return {str(body.get("worker")): str(body.get("name", "")) for body in found}

    def lines(self, seqs: list[int]) -> dict[int, bytes]:
        """The lines of these entries, without their newlines: one pass over the file."""
        wanted, found = set(seqs), {}
        with self.path.open("rb", READ_BYTES) as file:
            for seq, line in enumerate(file):
                if seq in wanted:
                    found[seq] = line.rstrip(b"\n")
        return found

    @property
    def aside(self) -> Asides:
        """What is set aside."""
        found: Asides = {}
        ended: set[tuple[int, int]] = set()
        for entry in self.others:
            if entry.kind == "epoch":
                ended.add((int(entry.body.get("dataset", 0)), int(entry.body["epoch"])))
            elif entry.kind in ("set_aside", "readmitted"):
                note_aside(entry, self.job, found, ended)
        return found


def open_index(path: str | Path, *, keep: bool = True) -> LedgerIndex:
    """The index of a ledger, from the files beside it as far as they go; `keep`: write them where it is worth it."""
    path = Path(path)
    try:
        with path.open("rb", READ_BYTES) as file:
            return _read(path, file, keep)
    except OSError as error:
        raise LedgerError(f"ledger {path}: cannot read it: {error}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"ledger {path}: not as a scheduler writes it: {error!r}. Run forebay ledger verify."
        ) from None


def _read(path: Path, file: Any, keep: bool) -> LedgerIndex:
    known = _known(path, file)
    old, workers, sessions, others = known[1:] if known else (np.empty(0, USE), [], [], [])
    checkpoint = known[0] if known else Checkpoint(0, GENESIS, 0, 0, "")
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
    found = LedgerIndex(
        path, Job.of(others[0]), table, tuple(columns.workers), tuple(columns.sessions), tuple(others), checkpoint
    )
    if keep and checkpoint.seq - (known[0].seq if known else 0) >= _WORTH_KEEPING:
        with contextlib.suppress(OSError):
            _keep(found, fresh, len(old))
    return found


def _numbered(names: list[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _files(path: Path) -> tuple[Path, Path]:
    return path.with_name(path.name + ".uses"), path.with_name(path.name + ".index")


def _known(path: Path, file: Any) -> tuple[Checkpoint, NDArray[Any], list[str], list[str], list[Entry]] | None:
    """What the files beside the ledger say; None if there are none of this ledger."""
    uses_path, index_path = _files(path)
    try:
        kept = json.loads(index_path.read_bytes())
        checkpoint = Checkpoint.from_json(kept["checkpoint"])
        if kept["version"] != _VERSION or checkpoint is None or link_before(file, checkpoint, path) is None:
            return None
        table = np.fromfile(uses_path, USE, count=int(kept["uses"]))
        if len(table) != kept["uses"]:
            return None
        workers, sessions = ([str(name) for name in kept[key]] for key in ("workers", "sessions"))
        return checkpoint, table, workers, sessions, [Entry(**entry) for entry in kept["others"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(found: LedgerIndex, fresh: NDArray[Any], num_old: int) -> None:
    """The table first: rows beyond what the JSON says are not there. One process at a time writes them."""
    uses_path, index_path = _files(found.path)
    remove_stale(index_path.parent)
    body = {
        "version": _VERSION,
        "checkpoint": found.checkpoint.to_json(),
        "uses": len(found.uses),
        "workers": found.workers,
        "sessions": found.sessions,
        "others": [asdict(entry) for entry in found.others],
    }
    with os.fdopen(os.open(uses_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.seek(0, os.SEEK_END) < num_old * USE.itemsize:
            return  # Made anew since it was read.
        file.truncate(file.seek(num_old * USE.itemsize))
        file.write(fresh.tobytes())
        file.flush()
        os.fsync(file.fileno())
        atomic_write(index_path, json.dumps(body).encode(), 0o600)
