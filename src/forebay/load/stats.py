"""Where a loader's time goes: each wait for a batch by its cause, and what removing a cause would gain.

Costs less than a microsecond a batch. Causes:

- `scheduler`: a lease or an assignment (workers; never for a Loader).
- `network`: a slice in transfer from its origin.
- `disk`: pages of a slice that were not in memory.
- `decode`: computing the order, gathering, casting and packing, on the processor.
- `queue`: a batch that was ready in a thread or a helper process.
"""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

_ADVICE = {
    "scheduler": "Use a scheduler nearby, or lease larger slices",
    "network": "Use a nearer origin, more connections (connections=…), or a larger cache",
    "disk": "Use a faster disk for the data or the cache, or the RAM tier (cache_dir='ram')",
    "decode": "Make batches ahead (prefetch=2), or in helper processes (num_workers)",
    "queue": "Use fewer helper processes, or none: the loader's own thread is cheaper",
}
CAUSES = tuple(_ADVICE)
_log = logging.getLogger("forebay")


class Bottleneck(NamedTuple):
    """The main cause of waiting in an interval."""

    cause: str  # One of CAUSES.
    wait_share: float  # Fraction of the interval spent waiting for batches.
    cause_share: float  # Fraction of the waiting that this cause has.
    speedup: float  # How many times as fast training would run without this cause.

    def __str__(self) -> str:
        return (
            f"training waits for data {100 * self.wait_share:.0f} % of the time, {100 * self.cause_share:.0f} % of "
            f"that for the {self.cause}: without it, it would run {self.speedup:.2f} times as fast. "
            f"{_ADVICE[self.cause]}."
        )


def find_bottleneck(waits: dict[str, float], elapsed_s: float, min_share: float = 0.05) -> Bottleneck | None:
    """The main cause of waiting in an interval; None if waiting took less than `min_share` of it.

    Args:
        waits: Seconds by cause.
        elapsed_s: Length of the interval.
    """
    total = sum(waits.values())
    if elapsed_s <= 0 or total < min_share * elapsed_s:
        return None
    cause = max(waits, key=lambda name: waits[name])
    speedup = elapsed_s / max(elapsed_s - waits[cause], 1e-3 * elapsed_s)
    return Bottleneck(cause, min(1.0, total / elapsed_s), waits[cause] / total, speedup)


class WaitTimes:
    """Seconds waited for batches, by cause, since the loader was made.

    Logs a bottleneck as a warning of the logger `forebay`, at most every `every_s`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, every_s: float = 30.0) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.busy_s = 0.0  # Between the waits.
        self.started_at = clock()
        self.check_at = self.started_at + every_s
        self._every_s = every_s
        self._checked: dict[str, float] | None = None

    def add(self, wait_s: float, network_s: float, disk_s: float, rest: str) -> None:
        """Record the wait for a batch: its length, the parts for network and disk, and the cause of the rest."""
        seconds = self.seconds
        network_s = min(network_s, wait_s)
        disk_s = min(disk_s, wait_s - network_s)
        seconds["network"] += network_s
        seconds["disk"] += disk_s
        seconds[rest] += wait_s - network_s - disk_s

    def check(self, now: float) -> Bottleneck | None:
        """Log and return the bottleneck since the last call; None in the first interval, which includes the start."""
        last, self._checked = self._checked, dict(self.seconds)
        elapsed_s, self.check_at = now - self.check_at + self._every_s, now + self._every_s
        if last is None:
            return None
        bottleneck = find_bottleneck({cause: self.seconds[cause] - last[cause] for cause in CAUSES}, elapsed_s)
        if bottleneck is not None:
            _log.warning("%s", bottleneck)
        return bottleneck
