"""A run of chunks that is fetched, the sources that it is fetched from, and the errors that end it."""

from __future__ import annotations

import errno
import hashlib
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from forebay.errors import NetworkError, UsageError
from forebay.fetch.chunk_file import ChunkFile
from forebay.storage.base import Origin, TransientError

_NEW_WEIGHT = 0.3
_MIN_SAMPLE_BYTES = 64 << 10  # shorter responses say nothing about speed
Backoff: TypeAlias = Callable[[int], float]
"""Return the seconds to wait after so many consecutive faults, from 1."""


@dataclass(eq=False)
class SourceStats:
    """One source, over all runs of a pool. `limit` and `active` count connections."""

    url: str
    limit: float
    is_last: bool = False
    active: int = 0
    lies: int = 0
    received: int = 0  # bytes
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

    Order: sources that never lied, that do not fail, that are not the last to be asked, the fastest per connection. One
    connection tries a source of unknown speed, unless it failed: then others are better.
    """
    free, later = [], float("inf")
    for source in sources:
        if source.wait_until > now:
            later = min(later, source.wait_until)
        elif source.active < max(1, int(source.limit)):
            free.append(source)
    if not free:
        return None, later

    def rank(source: SourceStats) -> tuple[int, bool, bool, float, float]:
        avoided = source.avoid_until if source.avoid_until > now else 0.0
        unknown = float("-inf") if source.active == source.failing == 0 else 0.0
        speed = -source.speed if source.speed is not None else unknown
        return source.lies, avoided > 0, source.is_last, avoided, speed

    return min(free, key=rank), later


class TransferCancelledError(NetworkError):
    """A fetch was cancelled by the process that started it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: the fetch was cancelled; what was received is kept and resumed")


class HashesError(TransientError):
    """The hashes of a slice's chunks do not come now; the source of the chunks is not to blame."""


class NoProviderError(NetworkError):
    """An object has no source now: its runs wait until `RunFetcher.wake`."""


class Sources(Protocol):
    """An Origin, or several."""

    url: str
    is_steered: bool
    is_renamed: bool

    def sources(self) -> Sequence[Origin]:
        """See Origin; may raise NoProviderError."""

    def report(self, source: Origin, error: NetworkError) -> bool:
        """See Origin."""

    def verified(self, num_bytes: int) -> None:
        """See Origin."""


class Providers(ABC):
    """Who sends the slices of a run, by key; in the process that made it."""

    passes_on = False
    """True if slices are fetched whole, because this process sends them to other members."""

    @abstractmethod
    def origin(self, key: int) -> Sources:
        """Return the sources of a slice."""

    def release(self, key: int, is_complete: bool) -> None:
        """Nothing more of a slice is fetched now; `is_complete`: all of it is here."""
        return

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """End; no slice is asked for after it. May be repeated."""
        return


@dataclass(eq=False)
class FetchState:
    """The sources of a slice and their faults, over its runs. Dicts are by URL of a source."""

    sources: list[Origin] = field(default_factory=list)
    looked_up_at: float = float("-inf")
    refused: dict[str, str] = field(default_factory=dict)  # reasons of the sources that will not send it
    reasons: dict[str, str] = field(default_factory=dict)  # last fault of each source
    faults: Counter[str] = field(default_factory=Counter)  # those of its requests that sent nothing
    liars: set[str] = field(default_factory=set)
    attempts: int = 0
    began_at: float = 0.0  # of the first attempt
    last_byte_at: float = 0.0


@dataclass(eq=False)
class ChunkRun:
    """Chunks [first, stop) of an entry to fetch; `on_end` is called once, in a thread of the pool, unless cancelled.

    `read_leaves` is called before the first byte if neither the entry nor the source has the leaves of its tree. The
    chunks of an object without a tree, or a check, are marked as not verified. Runs of one `order` are fetched before
    those of a later one.
    """

    entry: ChunkFile
    name: str  # of the slice, at its origin
    origin: Sources
    first: int
    stop: int
    read_leaves: Callable[[], bytes]
    on_end: Callable[[ChunkRun, Exception | None], object]
    state: FetchState = field(default_factory=FetchState)
    order: int = -1
    next: int = field(init=False)  # the first chunk that is missing
    position: int = field(init=False)  # of the next byte
    received: int = 0  # bytes, those that were wrong included
    sender: str = ""  # of the bytes of the chunk that is not complete
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)  # of these bytes
    tries: int = 0
    has_ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)  # Guards `has_ended` and `attempt`, before each write.
    attempt: int = 0  # An earlier one writes nothing more.
    source: Origin | None = None  # of this attempt
    began_at: float = 0.0
    began_with: int = 0  # `received` then
    paced: tuple[str, float, int] = ("", 0.0, 0)  # since when the source is asked, and `received` then

    def __post_init__(self) -> None:
        self.next = self.first
        self.position = self.first * self.entry.chunk_bytes

    @property
    def reached(self) -> int:
        """Up to which byte there was progress: of a source that others named only what was verified counts."""
        return self.next * self.entry.chunk_bytes if self.origin.is_steered else self.position

    def end(self) -> bool:
        """Mark as ended; return True on the first call."""
        with self.lock:
            had_ended, self.has_ended = self.has_ended, True
        return not had_ended


def disk_error(part: Path, num_bytes: int, error: OSError) -> UsageError:
    """Return the UsageError for a disk fault; the written bytes are kept and resumed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UsageError(
            f"{part}: expected room for {num_bytes} bytes, got: {error.strerror}. Free space there, lower the "
            "cache's budget, or choose another directory; the downloaded bytes are kept and resumed."
        )
    return UsageError(f"{part}: cannot be written: {error}. Check the directory and its permissions.")
