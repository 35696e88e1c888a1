"""Coverage of an epoch: which samples were used, are missing or were used twice.

Counting uses sorted arrays, without a loop over uses: O(N log N).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Coverage:
    """The uses of an epoch's samples."""

    counts: dict[str, int]  # samples (repeated uses included), missing, repeated; set_aside if any.
    missing: I64  # (slice, start, stop): neither used nor set aside. int64 [M, 3].
    repeated: I64  # (slice, start, stop, which use): used before by another. int64 [R, 4].


def cover(samples: I64, slices: I64, starts: I64, stops: I64, aside: Iterable[tuple[int, int, int]] = ()) -> Coverage:
    """The coverage of slices with `samples` [S] by non-empty uses [N] in any order.

    `aside` has (slice, start, stop), in any order. All must lie within their slices.
    """
    base = np.concatenate([[0], np.cumsum(samples)]).astype(np.int64)
    order = np.argsort(base[slices] + starts, kind="stable")
    low, high = (base[slices] + starts)[order], (base[slices] + stops)[order]
    reached = _reached(high)
    num_used = int(np.maximum(high - np.maximum(low, reached), 0).sum())
    again = np.flatnonzero(low < reached)
    twice = slices[order[again]]
    twice_stops = np.minimum(high[again], reached[again])
    repeated = np.stack([twice, low[again] - base[twice], twice_stops - base[twice], order[again]], axis=1)
    rows = np.array(list(aside), np.int64).reshape(-1, 3)
    missing = _gaps(
        np.concatenate([low, base[rows[:, 0]] + rows[:, 1]]),
        np.concatenate([high, base[rows[:, 0]] + rows[:, 2]]),
        base,
    )
    num_missing = int((missing[:, 2] - missing[:, 1]).sum())
    total = int((high - low).sum())
    counts = {"samples": total, "missing": num_missing, "repeated": total - num_used}
    if num_aside := int(base[-1]) - num_used - num_missing:  # samples that were set aside and used count as used
        counts["set_aside"] = num_aside
    return Coverage(counts, missing, repeated)


def _reached(stops: I64) -> I64:
    """For intervals sorted by start: the largest stop of all intervals before each."""
    return np.maximum.accumulate(np.concatenate([[0], stops]).astype(np.int64))[:-1]


def _gaps(starts: I64, stops: I64, base: I64) -> I64:
    """(slice, start, stop) of the samples outside of intervals; slice i has the samples [base[i], base[i + 1])."""
    # An empty interval at each end of a slice cuts the gaps there.
    starts, stops = np.concatenate([starts, base]), np.concatenate([stops, base])
    order = np.argsort(starts, kind="stable")
    low, high = _reached(stops[order]), starts[order]
    low, high = low[low < high], high[low < high]
    of = np.searchsorted(base, low, "right") - 1
    return np.stack([of, low - base[of], high - base[of]], axis=1)
