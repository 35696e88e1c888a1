"""What is left to do of one transfer, whom it may ask, and what it knows of who gave wrong bytes.

Of each source: how fast, how busy, how trustworthy; and which to ask next. One that says it is too busy gets half as
many connections and none before the time it asked for; each answer then adds to its limit again. One that fails is
asked after the others, for a time that doubles.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from forebay.dataset.manifest import SliceInfo
from forebay.errors import IntegrityError, NetworkError, ProtocolViolation
from forebay.storage.base import Origin, TransientError
from forebay.storage.part_file import EARLIER, ByteRange, PartFile

_NEW_WEIGHT = 0.3
_LATE = 3.0  # times the usual time between deliveries
_LATE_UNKNOWN = 5.0  # times the least, of a source that has given nothing yet
_LEAST_BYTES = 64 << 10  # fewer say nothing of speed
_REQUEST_S = 0.1  # short enough that slices come one after the other, long enough that asking costs little
LEAST_SPAN_BYTES = 1 << 20
REFRESH_S = 15.0
log = logging.getLogger("forebay.storage")
OnSourceFault = Callable[[Origin, str], None]
Backoff: TypeAlias = Callable[[int], float]
"""Seconds to wait after so many faults in a row, from 1."""


@dataclass(eq=False)
class SourceStats:
    """One source, over all transfers. `limit` and `active` count connections; moments are the pool's clock's.

    `gap_s`: the usual time between a request and its first bytes, and from then on between one delivery and the next.
    """

    origin: Origin
    limit: float
    active: int = 0
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


def choose_source(sources: Iterable[SourceStats], now: float) -> tuple[SourceStats | None, float]:
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

    def rank(source: SourceStats) -> tuple[int, float, float]:
        avoided = source.avoid_until if source.avoid_until > now else 0.0
        unknown = float("-inf") if source.active == 0 else 0.0
        return source.lies, avoided, -source.speed if source.speed is not None else unknown

    return min(free, key=rank), later


def min_range_bytes(sources: Iterable[SourceStats]) -> int:
    """What to ask for in one request at least, where all connections have work: as much as comes in 0.1 s."""
    most = max((source.speed or 0.0 for source in sources), default=0.0) * _REQUEST_S
    return max(LEAST_SPAN_BYTES, 1 << int(most).bit_length() - 1) if most >= 1 else LEAST_SPAN_BYTES


@dataclass(eq=False)
class Work:
    """One transfer as the pool sees it; under the pool's lock, except `file`, which has one of its own."""

    info: SliceInfo
    file: PartFile
    origins: Sequence[Origin]
    on_source_fault: OnSourceFault | None
    began_at: float
    byte_at: float
    finished: Callable[[Exception | None], object] = lambda error: None  # called once
    flying: dict[ByteRange, SourceStats] = field(default_factory=dict)  # spans that somebody fetches, and from whom
    pending: list[ByteRange] = field(default_factory=list)  # the others, by start
    found: dict[str, Origin] = field(default_factory=dict)  # by URL; another transfer's may be of another slice
    sources: dict[str, SourceStats] = field(default_factory=dict)  # by URL, shared by all transfers
    refused: dict[str, str] = field(default_factory=dict)  # by URL, who will not give it, and why
    reasons: dict[str, str] = field(default_factory=dict)  # by URL, who did not give it, and why
    liars: set[str] = field(default_factory=set)
    alone: str | None = None  # the only source to ask, after bytes of several did not verify together
    lookup: ByteRange = field(
        default_factory=lambda: ByteRange(0, 0, 0, 0)
    )  # its tries, and when to look sources up again
    looking: bool = False
    looked_at: float = float("-inf")
    hashing: bool = False
    ended: bool = False
    attempts: int = 0
    _suspects: list[tuple[int, int, str, bytes]] = field(default_factory=list)

    def needs_lookup(self, now: float) -> bool:
        """Whether its sources should be looked up anew, now or at `lookup.not_before`."""
        stale = now - self.looked_at >= REFRESH_S
        return stale and not self.looking and bool(self.pending or not self.sources)

    def allowed(self) -> list[SourceStats]:
        """Whom it may ask."""
        return [source for source in self.left() if self.alone in (None, source.origin.url)]

    def left(self) -> list[SourceStats]:
        """Who has not refused or lied, `alone` or not."""
        return [source for url, source in self.sources.items() if url not in self.refused]

    def stuck(self, now: float, least_s: float) -> ByteRange | None:
        """A span that nobody else took over yet and whose source is late with it, taken over now."""
        for span, source in self.flying.items():
            if now - span.byte_at > source.late_s(least_s) and not span.taken_over:
                span.taken_over = True
                if (rest := self.file.take_over(span)) is not None:
                    return rest
        return None

    def put_back(self, span: ByteRange, not_before: float) -> None:
        """A span that nobody fetches any more; one that was begun anew meanwhile is forgotten."""
        if self.file.is_current(span):
            span.not_before = not_before
            insort(self.pending, span, key=lambda span: span.start)

    def receive(
        self, span: ByteRange, source: SourceStats, clock: Callable[[], float], look: Callable[[Work], object]
    ) -> None:
        """Write a response's bytes into the part file, without the lock. Raises TransientError if it broke off."""
        url, start, stop = source.origin.url, span.at, span.stop
        body = self.found[url].read(self.info.name, start, stop)
        try:
            for data in body:
                if len(data) > stop - span.at:
                    raise ProtocolViolation(f"{url}: gave more than the {stop - start} bytes asked for")
                if not self.file.write(span, data, url):
                    return
                span.tries = 0
                now = clock()
                source.delivered(now - span.byte_at)
                span.byte_at = self.byte_at = now
                look(self)
        finally:
            if isinstance(body, Generator):
                body.close()
        if span.at < stop:
            raise TransientError(f"the body ended at byte {span.at - start} of {stop - start}")

    def tell(self, origin: Origin, reason: str) -> None:
        """Name a bad source, to the log and to whoever asked for it. Without the lock."""
        log.warning("%s: %s", origin.url, reason)
        if self.on_source_fault is not None:
            self.on_source_fault(origin, reason)

    def suspect(self) -> str | None:
        """Who certainly gave the wrong bytes that lie there; None if several did, and then they are remembered."""
        given = {url for span in self.file.spans for url in span.sources}
        if len(given) == 1 and EARLIER not in given:
            return given.pop()
        self._suspects += [
            (span.start, span.stop, span.sources[0], self.file.digest_of(span.start, span.stop))
            for span in self.file.spans
            if len(span.sources) == 1 and span.sources[0] != EARLIER
        ]
        return None

    def culprits(self) -> dict[str, str]:
        """Of those remembered, whose bytes differ from the verified ones that lie there now; and how."""
        return {
            url: f"gave wrong bytes in [{start}, {stop}) of {self.info.name}"
            for start, stop, url, digest in self._suspects
            if digest != self.file.digest_of(start, stop)
        }

    def nobody(self) -> NetworkError:
        """The error if all sources refused or lied."""
        kind = IntegrityError if self.liars else NetworkError
        return kind(
            f"{self._name()}: expected {self.info.bytes} bytes that verify, got none from {len(self.refused)} sources. "
            f"{self._told()}. Check the origin, or add one that has it."
        )

    def unreachable(self, now: float) -> NetworkError:
        """The error if timeouts ran out."""
        return NetworkError(
            f"{self._name()}: got {self.file.received} of {self.info.bytes} bytes, then none for "
            f"{now - self.byte_at:.1f} s: {self.attempts} failed attempts in {now - self.began_at:.1f} s. "
            f"{self._told()}. Check the network and the endpoint; what was fetched is kept and resumed."
        )

    def _name(self) -> str:
        return f"slice {self.info.name} ({self.info.sha256[:12]}…)" if self.info.sha256 else self.info.name

    def _told(self) -> str:
        return "; ".join(f"{url}: {why}" for url, why in (self.reasons | self.refused).items())


class TransferCancelledError(NetworkError):
    """A transfer was given up by whoever started it."""

    @classmethod
    def of(cls, info: SliceInfo) -> TransferCancelledError:
        """The error of a transfer of this."""
        return cls(f"{info.name}: the transfer was cancelled; what was fetched is kept and resumed")


class Transfer(ABC):
    """One slice on its way into a partial file."""

    def __init__(self, info: SliceInfo, part: Path) -> None:
        self.info = info
        self.part = part
        self.done = threading.Event()  # set when it ended; from then on nothing is written to `part`
        self.error: Exception | None = None  # None at the end: `part` is verified, synced, exactly `info.bytes` long
        self.needed = False  # set by whoever waits for it
        self._callbacks: list[Callable[[Any], object]] = []
        self._lock = threading.Lock()

    @property
    @abstractmethod
    def received(self) -> int:
        """Bytes there so far, those of an earlier run included."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it ended; whether it did in time."""
        return self.done.wait(timeout)

    def on_done(self, callback: Callable[[Any], object]) -> None:
        """Call back once when it ended, from another thread; at once, from this one, if it has."""
        with self._lock:
            if not self.done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, error: Exception | None) -> None:
        """It ended. The first end counts."""
        with self._lock:
            if self.done.is_set():
                return
            self.error = error
            self.done.set()
        for callback in self._callbacks:
            try:
                callback(self)
            except Exception:
                log.exception("%s: what was to be called when it ended failed", self.info.name)


class PoolTransfer(Transfer):
    """A slice that a pool of connections fetches. Made by `Transfers.start`."""

    def __init__(self, info: SliceInfo, part: Path, work: Work) -> None:
        super().__init__(info, part)
        self._work = work

    @property
    def received(self) -> int:
        return self._work.file.received


class SwarmTransfer(Transfer):
    """A slice that a swarm brings: waits for its turn, then comes by `current`, or one transfer after the other."""

    def __init__(self, info: SliceInfo, part: Path) -> None:
        super().__init__(info, part)
        self.current: PoolTransfer | None = None
        self.cancelled = False

    @property
    def received(self) -> int:
        current = self.current
        return self.info.bytes if self.done.is_set() and self.error is None else current.received if current else 0
