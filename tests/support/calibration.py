"""How slow this machine is now, so that limits of time in tests are multiples of work, not seconds.

A limit is written for an idle core. `scaled(5.0)` is that limit on this machine at this moment: never less, and as much
more as a fixed piece of work takes more here, be it that its cores are slow or that others use them; and by what the
machine has stood still of late, as virtual ones do for seconds, all processes at once.
"""

import atexit
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

REFERENCE_S = 0.004  # what `work_s` is on an idle core of 3 GHz
MEASURED_FOR_S = 2.0  # how long a measurement counts
LARGEST = 50.0
STILL_S = 0.25  # a sleeper that wakes later than this by itself was stopped, not only behind others
STILL_COUNTS_FOR_S = 120.0
_last = (-MEASURED_FOR_S, 1.0)

# A process of its own, as a thread would also be late where a test keeps the interpreter to itself. It ends with us.
WATCHER = f"""
import os, sys, time
parent = os.getppid()
while os.getppid() == parent:
    before = time.monotonic()
    time.sleep(0.05)
    late = time.monotonic() - before - 0.05
    if late > {STILL_S}:
        os.write(1, f"{{before}} {{late}}\\n".encode())
"""
_watched = None


def watch() -> None:
    """Begins to note when the machine stands still."""
    global _watched
    file, name = tempfile.mkstemp(prefix="still-")
    _watched = Path(name)
    watcher = subprocess.Popen([sys.executable, "-S", "-c", WATCHER], stdout=file, stdin=subprocess.DEVNULL)
    os.close(file)
    atexit.register(lambda: (watcher.kill(), watcher.wait(), Path(name).unlink()))


def stood_still_s(since: float | None = None) -> float:
    """Seconds for which the machine stood still since a time of `time.monotonic`, by default two minutes ago."""
    if _watched is None:
        return 0.0
    since = time.monotonic() - STILL_COUNTS_FOR_S if since is None else since
    time.sleep(0.02)  # What is over now is written by then.
    rows = [tuple(map(float, line.split())) for line in _watched.read_text().splitlines()]
    return sum(late for began, late in rows if began + late > since)


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
    """`seconds` of an idle reference core, on this machine as busy as it is and has stood still."""
    return seconds * slowness() + stood_still_s()
