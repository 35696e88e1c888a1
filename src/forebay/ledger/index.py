"""Queries on a ledger: its uses as a table, by worker and session. Cost: one pass over the file, 15 us an entry."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import LedgerError
from forebay.ledger.chain import Entry, read_entries
from forebay.ledger.job import Job
from forebay.ledger.receipts import Used, uses_of

USE = np.dtype(
    [(name, "<i8") for name in ("seq", "worker", "epoch", "slice", "start", "stop", "step", "session")]
    + [("at", "<f8")]
)
"""A use: `worker` is an index into the workers, `session` into their sessions (each numbers its own steps); `seq` is
the entry; `at` is in unix seconds."""
_BLOCK = 1 << 16


@dataclass
class UseColumns:
    """A growing table of uses. `workers`: peer ids; `sessions`: peer id, a space, name; both numbered by first use."""

    workers: dict[str, int] = field(default_factory=dict)
    sessions: dict[str, int] = field(default_factory=dict)
    _blocks: list[NDArray[Any]] = field(default_factory=list)
    _rows: list[tuple[float, ...]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._blocks) * _BLOCK + len(self._rows)

    def add(self, entry: Entry, worker: str, use: Used) -> None:
        """Add one use of an entry."""
        number = self.workers.setdefault(worker, len(self.workers))
        name = f"{worker} {entry.body.get('session', '')}"
        session = self.sessions.setdefault(name, len(self.sessions))
        self._rows.append(
            (entry.seq, number, use.epoch, use.slice, use.start, use.stop, use.step, session, entry.recorded_at)
        )
        if len(self._rows) == _BLOCK:
            self._blocks.append(np.array(self._rows, USE))
            self._rows = []

    def table(self) -> NDArray[Any]:
        """All uses, of dtype USE, in the order of adding."""
        return np.concatenate([np.empty(0, USE), *self._blocks, np.array(self._rows, USE)])


@dataclass(frozen=True, eq=False)
class LedgerIndex:
    """The contents of a ledger."""

    path: Path
    job: Job
    uses: NDArray[Any]  # Of dtype USE, in the order of the ledger; within an entry by step. `worker` counts `workers`.
    workers: tuple[str, ...]  # Peer ids, in the order of their first uses.
    sessions: tuple[str, ...]  # Peer id, a space, and a session's name; likewise.
    names: dict[str, str]  # Peer id to the worker's name.


def open_index(path: str | Path) -> LedgerIndex:
    """Read a ledger. Raises LedgerError if it cannot be read."""
    path = Path(path)
    job: Job | None = None
    columns, names = UseColumns(), dict[str, str]()
    try:
        for entry in read_entries(path):
            if entry.seq == 0:
                job = Job.of(entry)
            elif entry.kind == "uses":
                for use in sorted(uses_of(entry), key=lambda use: use.step):
                    columns.add(entry, str(entry.body["worker"]), use)
            elif entry.kind == "worker":
                names[str(entry.body.get("worker"))] = str(entry.body.get("name", ""))
    except OSError as error:
        raise LedgerError(f"ledger {path}: cannot read it: {error}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"ledger {path}: expected the entries that a scheduler writes, got {error!r}. Run `forebay ledger verify`."
        ) from None
    if job is None:
        raise LedgerError(f"ledger {path}: expected a job entry first, got none.")
    return LedgerIndex(path, job, columns.table(), tuple(columns.workers), tuple(columns.sessions), names)
