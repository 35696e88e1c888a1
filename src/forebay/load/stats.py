"""Where a loader's time goes: each wait for a batch by its cause, and what removing a cause would gain.

Costs less than a microsecond a batch. Causes:

- `scheduler`: a lease; only with `Loader(scheduler=...)`.
- `network`: a slice in transfer from its origin.
- `disk`: pages of a slice that were not in memory.
- `tokenize`: encoding text; only of a TextStream.
- `decode`: computing the order, gathering, casting and packing, on the processor.
- `device`: making tensors, pinning them and starting their copies to a device (`to_torch`, `to_jax`).
- `queue`: a batch that was ready in a thread or a helper process.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from forebay.order.step_index import check_integer

_ADVICE = {
    "scheduler": "`forebay status` of it says why it leases nothing; else use one nearby, or larger slices",
    "network": "Use a nearer origin or a larger cache; in a Loader more connections (NetworkOptions.connections)",
    "disk": "Use a faster disk for the data or the cache, or the RAM tier (cache='ram')",
    "device": "Copy batches ahead (prefetch=2 of to_torch or to_jax), or send fewer bytes (dtype int32)",
    "tokenize": "Use more lanes and processes, or tokenize once (`forebay prepare`)",
    "decode": "Make batches ahead (SampleOptions.prefetch_batches=2), or in helper processes (num_workers)",
    "queue": "Use fewer helper processes, or none: the loader's own thread is cheaper",
}
CAUSES = tuple(_ADVICE)
Spent: TypeAlias = tuple[float, float, float, float, float]
"""Seconds by the first five causes."""
_log = logging.getLogger("forebay")


Callback: TypeAlias = Callable[[dict[str, float], int], object]


class Bottleneck(NamedTuple):
    """The main cause of waiting in an interval."""

    cause: str  # One of CAUSES.
    wait_share: float  # Fraction of the interval spent waiting for batches.
    cause_share: float  # Fraction of the waiting that this cause has.
    speedup: float  # How many times as fast training would run without this cause.

    def __str__(self) -> str:
        gain = f"without it, it would run {self.speedup:.2f} times as fast" if self.speedup < 100 else "it stands still"
        return (
            f"training waits for data {100 * self.wait_share:.0f} % of the time, {100 * self.cause_share:.0f} % of "
            f"that for the {self.cause}: {gain}. {_ADVICE[self.cause]}."
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
        self.asked_at = math.inf  # When the wait in progress began.
        self.spent: Spent = (0.0,) * 5
        self._every_s, self._clock = every_s, clock
        self._checked: dict[str, float] | None = None

    def end(self, spent: Spent, ready_s: float) -> float:
        """Record the wait in progress, and return the present time.

        Args:
            spent: Seconds that making batches took so far, by cause. What is new may be longer than the wait, as it may
                be of a thread that worked ahead.
            ready_s: A batch that came sooner was ready.
        """
        now = self._clock()
        remaining = now - self.asked_at
        self.asked_at, rest = math.inf, "queue" if remaining < ready_s else "decode"
        for cause, after, before in zip(CAUSES, spent, self.spent):
            if after != before:
                part = min(after - before, remaining)
                self.seconds[cause] += part
                remaining -= part
        self.spent = spent
        self.seconds[rest] += remaining
        if now > self.check_at:
            self.check(now)
        return now

    def waiting_s(self) -> float:
        """How long the wait in progress lasts; 0 without one."""
        return max(0.0, self._clock() - self.asked_at)

    def to_dict(self) -> dict[str, float]:
        """Return `wait_s`, of it `CAUSE_s`, `busy_s` and `waiting_s`."""
        by_cause = {f"{cause}_s": seconds for cause, seconds in self.seconds.items()}
        return {"wait_s": sum(by_cause.values()), **by_cause, "busy_s": self.busy_s, "waiting_s": self.waiting_s()}

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


class Callbacks:
    """The functions that a Loader or TextStream calls every some steps; see `Loader.add_callback`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.functions: list[tuple[Callback, int, list[Any]]] = []

    def add(self, fn: Callback, every_steps: int) -> None:
        """Add a function. Raises UsageError unless `every_steps` is an integer of at least 1."""
        check_integer("every_steps", every_steps, 1)
        self.functions.append((fn, every_steps, [time.perf_counter(), self._loader.stats()]))

    def call(self, step: int) -> None:
        """Call the functions that are due after run step `step`, counted from 1."""
        for fn, every_steps, last in self.functions:
            if step % every_steps == 0:
                now, stats = time.perf_counter(), self._loader.stats()
                metrics = _metrics(last[1], stats, now - last[0])
                last[:] = now, stats
                fn({"epoch": float(self._loader.epoch), **metrics}, step)


def rates(
    before: Mapping[str, float], after: Mapping[str, float], elapsed_s: float
) -> tuple[str, float, dict[str, float], float | None]:
    """Of two results of `Loader.stats()`: the unit, how many of it a second, the share of the time by cause, and MFU.

    MFU is None unless it is measured, and where no token came.
    """
    elapsed_s = max(elapsed_s, 1e-9)
    unit = "samples" if after.get("samples") and not after["tokens"] else "tokens"  # Rows have no tokens.
    waits = {cause: after[f"{cause}_s"] - before[f"{cause}_s"] for cause in CAUSES}
    waited_s = max(elapsed_s, sum(waits.values()))  # longer where a wait began earlier
    shares = {cause: s / waited_s for cause, s in waits.items()}
    mfu = (after["ideal_s"] - before["ideal_s"]) / elapsed_s or None
    return unit, (after[unit] - before[unit]) / elapsed_s, shares, mfu


def _metrics(before: dict[str, float], after: dict[str, float], elapsed_s: float) -> dict[str, float]:
    """Rates and shares between two results of `Loader.stats()`, and counts of the run."""
    unit, rate, shares, mfu = rates(before, after, elapsed_s)
    waits = {f"wait_{cause}_share": share for cause, share in shares.items()}
    counts = {name: value for name, value in after.items() if name.partition(".")[0] in ("samples", "tokens")}
    # An earlier state may have been loaded.
    measured = {"mfu": mfu} if mfu else {}
    return {f"{unit}_per_s": max(0.0, rate), **measured, "wait_share": sum(waits.values()), **waits, **counts}
