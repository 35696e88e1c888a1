"""What is known of each source of bytes: how fast, how busy, how trustworthy; and which to ask next.

A source that says it is too busy gets half as many connections and none before the time it asked for; each answer
then adds to its limit again. One that fails is asked after the others, for a time that doubles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from forebay.store.origins import Origin

_NEW_WEIGHT = 0.3
_LATE = 3.0  # times the usual time between deliveries
_LATE_UNKNOWN = 5.0  # times the least, of a source that has given nothing yet
_LEAST_BYTES = 64 << 10  # fewer say nothing of speed
_REQUEST_S = 0.1  # short enough that slices come one after the other, long enough that asking costs little
LEAST_SPAN_BYTES = 1 << 20
Backoff: TypeAlias = Callable[[int], float]
"""Seconds to wait after so many faults in a row, from 1."""


@dataclass(eq=False)
class Source:
    """One source, over all transfers. `limit` and `active` count connections; moments are the pool's clock's.

    `gap_s`: the usual time between a request and its first bytes, and from then on between one delivery and the next.
    """

    origin: Origin
    limit: float
    active: int = 0
    bytes: int = 0
    attempts: int = 0
    failures: int = 0
    lies: int = 0
    speed: float | None = None
    failing: int = 0
    throttled: int = 0
    throttled_at: float = float("-inf")
    wait_until: float = 0.0
    avoid_until: float = 0.0
    gap_s: float | None = None

    def answered(self, num_bytes: int, seconds: float) -> None:
        """It gave bytes, so fast."""
        if num_bytes >= _LEAST_BYTES:
            speed = num_bytes / max(seconds, 1e-6)
            self.speed = speed if self.speed is None else self.speed + _NEW_WEIGHT * (speed - self.speed)

    def delivered(self, gap_s: float) -> None:
        """Bytes of a request came, so long after those before them."""
        self.gap_s = gap_s if self.gap_s is None else self.gap_s + _NEW_WEIGHT * (gap_s - self.gap_s)

    def late_s(self, least_s: float) -> float:
        """A request without a byte for so long is late: `least_s`, or more where this source is always that slow."""
        return max(least_s, _LATE * self.gap_s) if self.gap_s is not None else _LATE_UNKNOWN * least_s

    def finished(self, most: int) -> None:
        """It gave all that was asked for: it may have more connections again."""
        self.limit = min(float(most), self.limit + 1 / self.limit)
        self.failing = self.throttled = 0

    def throttle(self, now: float, began_at: float, wait_s: float, backoff: Backoff) -> None:
        """It said that it is too busy. What was asked before it last said so counts once."""
        if began_at >= self.throttled_at:
            self.throttled += 1
            self.throttled_at = now
            self.limit = max(1.0, self.limit / 2)
        self.wait_until = max(self.wait_until, now + max(wait_s, backoff(self.throttled)))

    def failed(self, now: float, backoff: Backoff) -> None:
        """It gave nothing, or broke off: others are asked first for a while, and longer each time.

        A peer that gives one byte a request and then stalls would else be asked again and again.
        """
        self.failing += 1
        self.avoid_until = now + backoff(self.failing)

    def to_json(self) -> dict[str, Any]:
        """As it stands in `Transfers.stats`."""
        return {
            "bytes": self.bytes,
            "attempts": self.attempts,
            "failures": self.failures,
            "lies": self.lies,
            "connection_bytes_per_s": round(self.speed or 0.0),
            "limit": round(self.limit, 1),
        }


def choose(sources: Iterable[Source], now: float) -> tuple[Source | None, float]:
    """Whom to ask now, or None and when to look again (infinity: when a request ends).

    Those that told the truth come first, then those that do not fail, then the fastest a connection; one of
    unknown speed is tried by one connection.
    """
    free, later = [], float("inf")
    for source in sources:
        if source.wait_until > now:
            later = min(later, source.wait_until)
        elif source.active < max(1, int(source.limit)):
            free.append(source)
    if not free:
        return None, later

    def rank(source: Source) -> tuple[int, float, float]:
        avoided = source.avoid_until if source.avoid_until > now else 0.0
        unknown = float("-inf") if source.active == 0 else 0.0
        return source.lies, avoided, -source.speed if source.speed is not None else unknown

    return min(free, key=rank), later


def least_span_bytes(sources: Iterable[Source]) -> int:
    """What to ask for in one request at least, where all connections have work: as much as comes in 0.1 s."""
    most = max((source.speed or 0.0 for source in sources), default=0.0) * _REQUEST_S
    return max(LEAST_SPAN_BYTES, 1 << int(most).bit_length() - 1) if most >= 1 else LEAST_SPAN_BYTES
