"""Receipts: signed statements of workers about the samples that they used, one signature for many uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import LedgerError
from forebay.ledger.chain import Entry, canonical_json

MAX_COUNT = 1 << 62


@dataclass(frozen=True)
class Used:
    """Samples [start, stop) of a slice, in the slice's order in an epoch, used under a lease by a worker's `step`.

    `digest`, if not empty, is the receipt of the sample ids that were read (`order.shard_windows.receipt`, 32 hex
    digits): it shows that the worker read in the job's order.
    """

    lease_id: str
    epoch: int
    slice: int
    start: int
    stop: int
    step: int
    digest: str = ""

    def to_row(self) -> list[Any]:
        """The row in a `uses` entry, which the worker signs: 6 values, 7 with a digest."""
        row = [self.lease_id, self.epoch, self.slice, self.start, self.stop, self.step]
        return [*row, self.digest] if self.digest else row

    @classmethod
    def from_row(cls, row: Any) -> Used:
        """The inverse of `to_row`. Raises LedgerError for an invalid row."""
        if not isinstance(row, list) or len(row) not in (6, 7):
            raise LedgerError(f"expected a use of 6 or 7 values, got {str(row)[:100]}")
        lease_id, counts = row[0], row[1:6]
        digest = row[6] if len(row) == 7 else ""
        if not (isinstance(lease_id, str) and isinstance(digest, str) and (len(digest) == 32 or len(row) == 6)):
            raise LedgerError(f"expected a lease and a digest of 32 hex digits, got {str(row)[:100]}")
        if not all(type(n) is int and 0 <= n < MAX_COUNT for n in counts):
            raise LedgerError(f"expected counts from 0, got {str(counts)[:100]}")
        return cls(lease_id, counts[0], counts[1], counts[2], counts[3], counts[4], digest)


def receipt_message(job_id: str, uses: Sequence[Used]) -> bytes:
    """The bytes that a worker signs for these uses, in this order."""
    return b"forebay receipt 3\n" + canonical_json({"job": job_id, "uses": [use.to_row() for use in uses]})


def uses_of(entry: Entry) -> list[Used]:
    """The uses of a `uses` entry. Raises LedgerError if it is not one."""
    try:
        return [Used.from_row(row) for row in entry.body["uses"]]
    except (KeyError, TypeError) as error:
        raise LedgerError(f"expected uses, got {error!r}") from None


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
    _size: int = 0

    def __len__(self) -> int:
        return self._size

    def add(self, entry: Entry, worker: str, use: Used) -> None:
        """Add one use of an entry."""
        number = self.workers.setdefault(worker, len(self.workers))
        name = f"{worker} {entry.body.get('session', '')}"
        session = self.sessions.setdefault(name, len(self.sessions))
        self._rows.append(
            (entry.seq, number, use.epoch, use.slice, use.start, use.stop, use.step, session, entry.recorded_at)
        )
        self._size += 1
        if len(self._rows) == _BLOCK:
            self._blocks.append(np.array(self._rows, USE))
            self._rows = []

    def table(self) -> NDArray[Any]:
        """All uses, of dtype USE, in the order of adding."""
        return np.concatenate([np.empty(0, USE), *self._blocks, np.array(self._rows, USE)])
