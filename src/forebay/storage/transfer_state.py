"""The state of one transfer, and the statistics of the sources that transfers download from.

A source that reports overload gets half as many connections, and none before the time that it asked for; each later
response adds to its limit. A source that fails is tried after the others, for a time that doubles. Pure bookkeeping:
the connections are in `transfers.py`.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from forebay.dataset.manifest import SliceInfo
from forebay.errors import IntegrityError, NetworkError, ProtocolError
from forebay.storage.base import Origin, TransientError
from forebay.storage.part_file import EARLIER_RUN, ByteRange, PartFile

_NEW_WEIGHT = 0.3
_MIN_SAMPLE_BYTES = 64 << 10  # shorter responses say nothing about speed
LOOKUP_INTERVAL_S = 15.0
log = logging.getLogger("forebay.storage")
OnSourceFault = Callable[[Origin, str], None]
Backoff: TypeAlias = Callable[[int], float]  # seconds to wait after so many consecutive faults, from 1


@dataclass(eq=False)
class SourceStats:
    """One source, over all transfers of a pool. `limit` and `active` count connections."""

    origin: Origin
    limit: float
    active: int = 0
    lies: int = 0
    speed: float | None = None  # bytes/s
    failing: int = 0
    throttled: int = 0
    throttled_at: float = float("-inf")
    wait_until: float = 0.0
    avoid_until: float = 0.0

    def record_speed(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= _MIN_SAMPLE_BYTES:
            speed = num_bytes / max(seconds, 1e-6)
            self.speed = speed if self.speed is None else self.speed + _NEW_WEIGHT * (speed - self.speed)

    def record_success(self, max_connections: int) -> None:
        """Record a complete response: more connections are allowed again."""
        self.limit = min(float(max_connections), self.limit + 1 / self.limit)
        self.failing = self.throttled = 0

    def record_overload(self, now: float, began_at: float, wait_s: float, backoff: Backoff) -> None:
        """Record that it reported overload. Requests begun before its last report count once."""
        if began_at >= self.throttled_at:
            self.throttled += 1
            self.throttled_at = now
            self.limit = max(1.0, self.limit / 2)
        self.wait_until = max(self.wait_until, now + max(wait_s, backoff(self.throttled)))

    def record_failure(self, now: float, backoff: Backoff) -> None:
        """Record a failed or broken response. Also a peer that sends one byte per request is then avoided longer."""
        self.failing += 1
        self.avoid_until = now + backoff(self.failing)


def choose_source(sources: Iterable[SourceStats], now: float) -> tuple[SourceStats | None, float]:
    """Return the source to request from; or None, and when to try again (infinity: when a request ends).

    Order: sources that never lied, that do not fail, the fastest per connection. One connection tries a source of
    unknown speed.
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


class TransferCancelledError(NetworkError):
    """A transfer was cancelled by the process that started it."""

    def __init__(self, info: SliceInfo) -> None:
        super().__init__(f"{info.name}: the transfer was cancelled; the downloaded bytes are kept and resumed")


class Transfer(ABC):
    """The download of one slice into the partial file `part`; after its end, nothing is written to it."""

    def __init__(self, info: SliceInfo, part: Path) -> None:
        self.info = info
        self.part = part
        self._end_state: Future[None] = Future()

    @property
    @abstractmethod
    def received(self) -> int:
        """Bytes in the partial file, those of earlier runs included."""

    @abstractmethod
    def cancel(self) -> None:
        """End the transfer soon; the partial file is kept. No effect after the end."""

    @property
    def error(self) -> Exception | None:
        """None after the end: `part` is verified, synced and has `info.bytes` bytes."""
        return cast(Exception | None, self._end_state.exception()) if self._end_state.done() else None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False after `timeout` seconds."""
        return bool(futures.wait([self._end_state], timeout).done)

    def on_done(self, callback: Callable[[Transfer], object]) -> None:
        """Call `callback` once at the end, in another thread; at once, in this one, if it has ended."""
        self._end_state.add_done_callback(lambda _: callback(self))

    def finish(self, error: Exception | None) -> None:
        """End the transfer. Only the first call has an effect."""
        with suppress(InvalidStateError):
            self._end_state.set_exception(error) if error is not None else self._end_state.set_result(None)


class PoolTransfer(Transfer):
    """A transfer by the connections of a pool (`Transfers.start`).

    The pool's lock guards all fields, except `file`, which has its own. Dicts are by URL.
    """

    def __init__(
        self, info: SliceInfo, file: PartFile, origins: Sequence[Origin], on_source_fault: OnSourceFault | None,
        end: Callable[[PoolTransfer, Exception], object],
    ) -> None:  # fmt: skip
        super().__init__(info, file.path)
        self.file = file
        self.origins = origins
        self.began_at = self.last_byte_at = time.monotonic()
        self.pending: list[ByteRange] = []  # incomplete ranges without a request, by start
        self.origin_of: dict[str, Origin] = {}  # to read this slice; another transfer may have another origin
        self.sources: dict[str, SourceStats] = {}  # shared with other transfers
        self.refused: dict[str, str] = {}  # reasons of the sources that will not send it
        self.reasons: dict[str, str] = {}  # last fault of each source
        self.liars: set[str] = set()
        self.only_source: str | None = None  # the one allowed after bytes of several sources failed verification
        self.is_looking_up = False
        self.next_lookup_at = 0.0
        self.lookup_tries = 0
        self.has_ended = False
        self.attempts = 0  # that failed
        self._on_source_fault = on_source_fault
        self._end = end
        self._suspects: list[tuple[int, int, str, bytes]] = []

    @property
    def received(self) -> int:
        return self.file.received

    def cancel(self) -> None:
        self._end(self, TransferCancelledError(self.info))

    def remaining_sources(self) -> list[SourceStats]:
        return [source for url, source in self.sources.items() if url not in self.refused]

    def return_range(self, byte_range: ByteRange, not_before: float) -> None:
        """Return a range to the queue after a failed request, unless it was replaced."""
        if self.file.is_current(byte_range):
            byte_range.not_before = not_before
            insort(self.pending, byte_range, key=lambda pending: pending.start)

    def receive(self, byte_range: ByteRange, source: SourceStats, on_data: Callable[[PoolTransfer], object]) -> None:
        """Request the rest of a range and write it to the part file; without the lock.

        Raises:
            TransientError: If the response was too short.
            ProtocolError: If it was too long.
        """
        url, start, stop = source.origin.url, byte_range.offset, byte_range.stop
        with closing(cast(Generator[memoryview], self.origin_of[url].read(self.info.name, start, stop))) as body:
            for data in body:
                if len(data) > stop - byte_range.offset:
                    raise ProtocolError(f"{url}: expected {stop - start} bytes, got more")
                if not self.file.write(byte_range, data, url):
                    return
                byte_range.tries = 0
                self.last_byte_at = time.monotonic()
                if byte_range.offset < stop:
                    on_data(self)
        if byte_range.offset < stop:
            raise TransientError(f"the body ended at byte {byte_range.offset - start} of {stop - start}")

    def report_source(self, url: str, reason: str) -> None:
        """Report a source that lied or broke the protocol; without the lock."""
        log.warning("%s: %s", url, reason)
        if self._on_source_fault is not None:
            self._on_source_fault(self.origin_of[url], reason)

    def find_liar(self) -> str | None:
        """Return the source of the wrong bytes if one sent them all; else None, and remember who sent which."""
        urls = {url for byte_range in self.file.ranges for url in byte_range.sources}
        if len(urls) == 1 and EARLIER_RUN not in urls:
            return urls.pop()
        for byte_range in self.file.ranges:
            start, stop, sources = byte_range.start, byte_range.stop, byte_range.sources
            if len(sources) == 1 and sources[0] != EARLIER_RUN:
                self._suspects.append((start, stop, sources[0], self.file.digest_of(start, stop)))
        return None

    def find_culprits(self) -> dict[str, str]:
        """Return, by URL, how the remembered bytes of a source differ from the verified ones in the file now."""
        return {
            url: f"sent wrong bytes in [{start}, {stop}) of {self.info.name}"
            for start, stop, url, digest in self._suspects
            if digest != self.file.digest_of(start, stop)
        }

    def no_source_error(self) -> NetworkError:
        kind = IntegrityError if self.liars else NetworkError
        return kind(
            f"{self._name()}: expected {self.info.bytes} bytes that verify, got none from {len(self.refused)} sources. "
            f"{self._reasons()}. Check the origin, or add one that has it."
        )

    def timeout_error(self, now: float) -> NetworkError:
        return NetworkError(
            f"{self._name()}: got {self.file.received} of {self.info.bytes} bytes, then none for "
            f"{now - self.last_byte_at:.1f} s: {self.attempts} failed attempts in {now - self.began_at:.1f} s. "
            f"{self._reasons()}. Check the network and the endpoint; the downloaded bytes are kept and resumed."
        )

    def _name(self) -> str:
        return f"slice {self.info.name} ({self.info.sha256[:12]}…)" if self.info.sha256 else self.info.name

    def _reasons(self) -> str:
        return "; ".join(f"{url}: {reason}" for url, reason in (self.reasons | self.refused).items())
