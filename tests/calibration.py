"""How slow this machine is now, so that limits of time in tests are multiples of work, not seconds.

A limit is written for an idle core of 2024. `scaled(5.0)` is that limit on this machine at this moment: never less,
and as much more as a fixed piece of work takes more here, be it that cores are slow or that others use them.
"""

from __future__ import annotations

import time

import numpy as np

REFERENCE_S = 0.010  # the piece of work below on an idle core of 3 GHz
_LARGEST = 30.0  # beyond this a machine is too busy to tell anything


def work_s() -> float:
    """Seconds of wall clock for a fixed piece of interpreter, NumPy and memory work: some 10 ms."""
    began = time.perf_counter()
    total = sum(i & 7 for i in range(100_000))
    values = np.arange(200_000, dtype=np.uint64)
    for _ in range(4):
        values = values * np.uint64(6364136223846793005) + np.uint64(total)
        values.sort()
    return time.perf_counter() - began


def slowness() -> float:
    """How many times longer than on an idle reference core work takes now, 1.0 at least: the middle of three."""
    return min(max(1.0, sorted(work_s() for _ in range(3))[1] / REFERENCE_S), _LARGEST)


def scaled(seconds: float) -> float:
    """`seconds` of an idle reference core, on this machine as busy as it is."""
    return seconds * slowness()
