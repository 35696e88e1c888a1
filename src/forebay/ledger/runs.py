"""Run-length form of the samples of each slice: a few bytes, however many slices are alike."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import LedgerError

MAX_SLICES = 100_000_000


def encode_runs(counts: NDArray[np.int64]) -> list[list[int]]:
    """Run-length form [[count, run], …] of an int64 array: equal slices take a few bytes, however many."""
    if len(counts) == 0:
        return []
    edges = np.flatnonzero(np.diff(counts)) + 1
    starts = np.concatenate([[0], edges])
    runs = np.diff(np.concatenate([starts, [len(counts)]]))
    return [[int(counts[i]), int(run)] for i, run in zip(starts, runs)]


def decode_runs(runs: Any) -> NDArray[np.int64]:
    """The array that `encode_runs` encoded, or that a plain list of counts gives.

    Raises:
        LedgerError: If it is neither, a count is negative, or it is beyond any dataset's size.
    """
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
