"""Receipts: signed statements of workers about the samples that they used, one signature for many uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        is_valid = (
            isinstance(row, list)
            and len(row) in (6, 7)
            and isinstance(row[0], str)
            and all(type(number) is int and 0 <= number < MAX_COUNT for number in row[1:6])
            and all(isinstance(digest, str) and len(digest) == 32 for digest in row[6:])
        )
        if not is_valid:
            raise LedgerError(f"expected a lease, 5 counts from 0 and maybe a digest, got {str(row)[:100]}")
        return cls(*row)


def receipt_message(job_id: str, uses: Sequence[Used]) -> bytes:
    """The bytes that a worker signs for these uses, in this order."""
    return b"forebay receipt 3\n" + canonical_json({"job": job_id, "uses": [use.to_row() for use in uses]})


def uses_of(entry: Entry) -> list[Used]:
    """The uses of a `uses` entry. Raises LedgerError if it is not one."""
    try:
        return [Used.from_row(row) for row in entry.body["uses"]]
    except (KeyError, TypeError) as error:
        raise LedgerError(f"expected uses, got {error!r}") from None
