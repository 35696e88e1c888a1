"""The first entry of a ledger: the dataset of the job, the samples of its slices, and the seed of their order."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import LedgerError
from forebay.ledger.chain import Entry

LEDGER_FORMAT = 2  # In the job entry; absent in format 1, whose samples had another order.


@dataclass(frozen=True, eq=False)
class Job:
    """A job."""

    job_id: str  # The hash of the first entry.
    body: dict[str, Any]
    scheduler: bytes  # The public key, 32 bytes.
    samples: NDArray[np.int64]  # int64 [S], of each slice.
    dataset_id: str

    @classmethod
    def of(cls, entry: Entry) -> Job:
        """The job of a ledger's first entry. Raises LedgerError if it is not one."""
        if entry.kind != "job" or entry.seq != 0:
            raise LedgerError(f"ledger entry {entry.seq}: expected kind job first and once, got {entry.kind}")
        body = entry.body
        if body.get("format") != LEDGER_FORMAT:
            raise LedgerError(
                f"ledger entry 0: expected format {LEDGER_FORMAT}, got {body.get('format', 'none')!r}. It was written "
                "by another version, which orders samples otherwise. Use that version, or start in a new directory."
            )
        if "datasets" in body:
            raise LedgerError("ledger entry 0: expected one dataset, got several. Use the version that wrote it.")
        try:
            scheduler = bytes.fromhex(str(body.get("scheduler", "")))
        except ValueError:
            raise LedgerError("ledger entry 0: expected the scheduler's key in hex") from None
        samples = decode_runs(body.get("samples_per_slice"))
        return cls(entry.hash, body, scheduler, samples, str(body.get("dataset_id", "")))

    @property
    def seed(self) -> int:
        """The seed of the samples' order."""
        return int(self.body.get("seed", 0))


Asides = dict[tuple[int, int], list[tuple[int, int, int]]]
"""(epoch, slice) to the ranges set aside: (slice, start, stop)."""


def apply_aside(entry: Entry, job: Job, aside: Asides, ended: Container[int]) -> None:
    """Apply an entry of kind set_aside or readmitted to `aside`. The latter counts for all epochs but those ended.

    Raises:
        LedgerError: If the samples are not in the job.
    """
    index, epoch = entry.body["slice"], entry.body.get("epoch")
    if type(index) is not int or not 0 <= index < len(job.samples):
        raise LedgerError(f"expected counts, got {entry.body}")
    if entry.kind == "readmitted":
        for key in [k for k in aside if k[1] == index and k[0] not in ended]:
            del aside[key]
        return
    start, stop = entry.body["start"], entry.body["stop"]
    if not (type(epoch) is type(start) is type(stop) is int and 0 <= start < stop <= job.samples[index]):
        raise LedgerError(f"samples [{start}, {stop}) of slice {index} in epoch {epoch} are not in the dataset")
    aside.setdefault((epoch, index), []).append((index, start, stop))


MAX_SLICES = 100_000_000


def encode_runs(counts: NDArray[np.int64]) -> list[list[int]]:
    """The run-length form [[count, run], …] of an int64 array: a few bytes for any number of equal slices."""
    if len(counts) == 0:
        return []
    edges = np.flatnonzero(np.diff(counts)) + 1
    starts = np.concatenate([[0], edges])
    runs = np.diff(np.concatenate([starts, [len(counts)]]))
    return [[int(counts[i]), int(run)] for i, run in zip(starts, runs)]


def decode_runs(runs: Any) -> NDArray[np.int64]:
    """The inverse of `encode_runs`; also accepts a plain list of counts."""
    message = "ledger: expected samples_per_slice as counts or [count, run] pairs"
    if not isinstance(runs, list):
        raise LedgerError(f"{message}, got {type(runs).__name__}.")
    pairs = [r if isinstance(r, list) else [r, 1] for r in runs]
    for pair in pairs:
        if len(pair) != 2 or not all(type(v) is int and 0 <= v < 2**62 for v in pair):
            raise LedgerError(f"{message}, got {pair!r}.")
    if sum(pair[1] for pair in pairs) > MAX_SLICES:
        raise LedgerError(f"{message} of at most {MAX_SLICES} slices, got more.")
    counts = np.array([p[0] for p in pairs], np.int64)
    return np.repeat(counts, np.array([p[1] for p in pairs], np.int64))
