"""The first entry of a ledger: the datasets of the job, the samples of their slices, and the seed of their order."""

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
    """A job. Its slices are numbered through all its datasets; dataset d has those in [bounds[d], bounds[d + 1])."""

    job_id: str  # The hash of the first entry.
    body: dict[str, Any]
    scheduler: bytes  # The public key, 32 bytes.
    samples: NDArray[np.int64]  # int64 [S], of each slice.
    dataset_ids: tuple[str, ...]
    bounds: tuple[int, ...]

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
        listed = body.get("datasets") or [body]
        if not isinstance(listed, list) or not all(isinstance(dataset, dict) for dataset in listed):
            raise LedgerError("ledger entry 0: expected datasets as a list of objects")
        parts = [decode_runs(dataset.get("samples_per_slice")) for dataset in listed]
        try:
            scheduler = bytes.fromhex(str(body.get("scheduler", "")))
        except ValueError:
            raise LedgerError("ledger entry 0: expected the scheduler's key in hex") from None
        bounds = tuple(np.cumsum([0, *map(len, parts)]).tolist())
        ids = tuple(str(dataset.get("dataset_id", "")) for dataset in listed)
        return cls(entry.hash, body, scheduler, np.concatenate(parts), ids, bounds)

    @property
    def seed(self) -> int:
        """The seed of the samples' order."""
        return int(self.body.get("seed", 0))

    def dataset_of(self, slice_index: int) -> int:
        """The index of the dataset that a slice belongs to."""
        return int(np.searchsorted(self.bounds, slice_index, "right")) - 1

    def slices_of(self, dataset: int) -> slice:
        """The slices of a dataset."""
        return slice(self.bounds[dataset], self.bounds[dataset + 1])


Asides = dict[tuple[int, int], list[tuple[int, int, int]]]
"""(epoch, slice) to the ranges set aside: (slice, start, stop)."""


def apply_aside(entry: Entry, job: Job, aside: Asides, ended: Container[tuple[int, int]]) -> None:
    """Apply an entry of kind set_aside or readmitted to `aside`. The latter has an epoch, or means all not ended.

    Args:
        ended: (dataset, epoch) of the epochs that have ended.

    Raises:
        LedgerError: If the samples are not in the job.
    """
    index, epoch = entry.body["slice"], entry.body.get("epoch")
    if type(index) is not int or not 0 <= index < len(job.samples) or type(epoch) not in (int, type(None)):
        raise LedgerError(f"expected counts, got {entry.body}")
    if entry.kind == "readmitted":
        dataset = job.dataset_of(index)
        for key in [k for k in aside if k[1] == index and epoch in (None, k[0]) and (dataset, k[0]) not in ended]:
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
