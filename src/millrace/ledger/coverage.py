"""Coverage: how intervals of samples fill an epoch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def count_coverage(starts: NDArray[np.int64], stops: NDArray[np.int64], num_samples: int) -> dict[str, int]:
    """How the intervals [start, stop) cover [0, num_samples).

    Args:
        starts, stops: int64 [N], 0 <= start < stop <= num_samples, in any order.

    Returns:
        samples: the sum of the lengths; missing: how many points no interval covers; repeated: how many
        uses of a point came after its first.

    Cost: one sort, O(N log N), no loop in Python.
    """
    total = int((stops - starts).sum())
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    reached = np.maximum.accumulate(np.concatenate([[0], stops]).astype(np.int64))[:-1]
    covered = int(np.maximum(stops - np.maximum(starts, reached), 0).sum())
    return {"samples": total, "missing": num_samples - covered, "repeated": total - covered}
