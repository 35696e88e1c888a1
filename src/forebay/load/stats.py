"""Where a loader's time goes: each wait for a batch, by what it waited for; and what removing it would gain.

Hides the bookkeeping, which must cost less than a microsecond a batch. Five causes:

- `scheduler`: for a lease or an assignment (workers; a Loader has none).
- `network`: for a slice on its way from its origin.
- `disk`: for pages of a slice that were not in memory.
- `decode`: computing the order, gathering, casting, packing: the processor's work.
- `queue`: for a batch that was ready elsewhere, in a thread or a helper process.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

CAUSES = ("scheduler", "network", "disk", "decode", "queue")
_log = logging.getLogger("forebay")

_ADVICE = {
    "scheduler": "Put the scheduler nearer, or lease larger slices",
    "network": "Use an origin nearer by, more connections (connections=…), or a larger cache",
    "disk": "Use a faster disk for the data or the cache, or the RAM tier (cache_dir='ram')",
    "decode": "Make batches ahead (prefetch=2), or in helper processes (num_workers)",
    "refetch": "Slices are fetched several times in an epoch: use a larger cache (cache_bytes), or fewer lanes (lanes)",
    "queue": "Use fewer helper processes, or none: the loader's own thread is cheaper",
}


@dataclass(frozen=True)
class Bottleneck:
    """What a trainer waits for most, over a stretch of time.

    Attributes:
        cause: One of CAUSES.
        wait_share: Of the stretch, in [0, 1], that was spent waiting for batches.
        cause_share: Of the waiting, in [0, 1], that was for this cause.
        speedup: How many times as fast training would run without this cause.
        advice: What to do about it.
    """

    cause: str
    wait_share: float
    cause_share: float
    speedup: float
    advice: str

    def __str__(self) -> str:
        return (
            f"training waits for data {100 * self.wait_share:.0f} % of the time, {100 * self.cause_share:.0f} % of "
            f"that for the {self.cause}: without it, it would run {self.speedup:.2f} times as fast. {self.advice}."
        )


def find_bottleneck(
    waits: dict[str, float], elapsed_s: float, least_share: float = 0.05, *, refetching: bool = False
) -> Bottleneck | None:
    """The chief cause of waiting in `elapsed_s` seconds; None if waiting took less than `least_share` of them.

    `waits` are seconds by cause. `refetching`: many slices are fetched twice in an epoch: no faster network is advised.
    """
    total = sum(waits.values())
    if elapsed_s <= 0 or total < least_share * elapsed_s:
        return None
    cause = max(waits, key=lambda name: waits[name])
    most = waits[cause]
    advice = _ADVICE["refetch" if refetching and cause == "network" else cause]
    speedup = elapsed_s / max(elapsed_s - most, 1e-3 * elapsed_s)
    return Bottleneck(cause, min(1.0, total / elapsed_s), most / total, speedup, advice)


class Waits:
    """Seconds waited for batches, by cause, since the loader was made.

    A bottleneck is told at most each `every_s`, as a warning of the logger `forebay`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, every_s: float = 30.0) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        # Of the last batch: the wait; of it for the network, and the disk; and what the rest was for.
        self.last: tuple[float, float, float, str] = (0.0, 0.0, 0.0, "decode")
        self.busy_s = 0.0  # Between the waits.
        self.began_at = self._told_at = clock()
        self.check_at = self.began_at + every_s
        self._every_s = every_s
        self._told = dict(self.seconds)
        self._first = True

    def add(self, wait_s: float, network_s: float, disk_s: float, rest: str) -> None:
        """A batch was waited for: so long in all, of it for network and disk, and for `rest` what is left."""
        network_s = min(network_s, wait_s)
        disk_s = min(disk_s, wait_s - network_s)
        self.seconds["network"] += network_s
        self.seconds["disk"] += disk_s
        self.seconds[rest] += wait_s - network_s - disk_s
        self.last = (wait_s, network_s, disk_s, rest)

    def of_last(self) -> dict[str, float]:
        """Seconds by cause that the last batch was waited for."""
        wait_s, network_s, disk_s, rest = self.last
        return dict.fromkeys(CAUSES, 0.0) | {"network": network_s, "disk": disk_s, rest: wait_s - network_s - disk_s}

    def check(self, now: float, refetching: bool = False) -> Bottleneck | None:
        """Tell the bottleneck of the time since it was last looked for; None if there is none.

        The first stretch is passed over: it waited for its first slice, which is no fault.
        """
        elapsed = now - self._told_at
        waits = {cause: self.seconds[cause] - self._told[cause] for cause in CAUSES}
        self._told_at, self._told = now, dict(self.seconds)
        self.check_at = now + self._every_s
        found = None if self._first else find_bottleneck(waits, elapsed, refetching=refetching)
        self._first = False
        if found is not None:
            _log.warning("%s", found)
        return found
