"""How slow this machine is now, so that limits of time in tests are multiples of work, not seconds.

A limit is written for an idle core. `scaled(5.0)` is that limit on this machine at this moment: never less, and as much
more as a fixed piece of work takes more here, be it that its cores are slow or that others use them.
"""

from __future__ import annotations

import os
import time

import numpy as np

REFERENCE_S = 0.004  # what `work_s` is on an idle core of 3 GHz
MEASURED_FOR_S = 2.0  # how long a measurement counts
LARGEST = 50.0
_last = (-MEASURED_FOR_S, 1.0)


def work_s() -> float:
    """Seconds of wall clock for a fixed piece of interpreter, NumPy and memory work."""
    began = time.perf_counter()
    total = sum(i & 7 for i in range(30_000))
    values = np.arange(50_000, dtype=np.uint64)
    for _ in range(4):
        values = values * np.uint64(6364136223846793005) + np.uint64(total)
        values.sort()
    return time.perf_counter() - began


def slowness() -> float:
    """How many times longer than on an idle reference core something takes now, 1.0 at least.

    The larger of two: what the piece of work took (the middle of three), and the processes that want a core for each
    core there is, as other processes slow down what a test starts, too.
    """
    global _last
    if time.monotonic() - _last[0] > MEASURED_FOR_S:
        took = sorted(work_s() for _ in range(3))[1] / REFERENCE_S
        waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
        _last = time.monotonic(), min(max(1.0, took, waiting), LARGEST)
    return _last[1]


def scaled(seconds: float) -> float:
    """`seconds` of an idle reference core, on this machine as busy as it is."""
    return seconds * slowness()
