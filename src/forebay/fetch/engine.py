"""Threads that fetch runs of chunks from the sources of a slice, and verify each chunk as it comes.

A chunk with another hash costs its own bytes and names its sender, who is from then on the last to be asked; the rest
of the run comes from the next source. A broken request goes on where it broke, or, from another source, with the chunk
that was broken off. A source that reports overload gets half as many connections, and none before the time that it
asked for; each response adds to its limit. A source that fails is tried after the others, for a time that doubles.
Memory: what a source reads ahead (256 KiB of a web server, 2 MiB of a peer or a bucket) for each connection.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, cast

import numpy as np

from forebay.closing import Closing
from forebay.dataset.chunks import HASH_BYTES
from forebay.errors import IntegrityError, NetworkError, ProtocolError, UsageError
from forebay.fetch.chunk_file import PRESENT, UNVERIFIED, ChunkFile
from forebay.network.retry import backoff_s
from forebay.storage.base import Origin, PermanentError, TransientError, log
from forebay.threads import SupervisedThread

_FIRST_BACKOFF_S = 0.2
_CLOSE_S = 1.0
_POLL_S = 0.05
_LOOKUP_INTERVAL_S = 15.0
_NEW_WEIGHT = 0.3
_MIN_SAMPLE_BYTES = 64 << 10  # shorter responses say nothing about speed
Backoff: TypeAlias = Callable[[int], float]  # seconds to wait after so many consecutive faults, from 1


@dataclass(eq=False)
class SourceStats:
    """One source, over all runs of a pool. `limit` and `active` count connections."""

    url: str
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
    unknown speed, unless it failed: then others are better.
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
        unknown = float("-inf") if source.active == source.failing == 0 else 0.0
        return source.lies, avoided, -source.speed if source.speed is not None else unknown

    return min(free, key=rank), later


class TransferCancelledError(NetworkError):
    """A fetch was cancelled by the process that started it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: the fetch was cancelled; what was received is kept and resumed")


class Sources(Protocol):
    """An Origin, or several."""

    url: str

    def sources(self) -> Sequence[Origin]:
        """See Origin."""


@dataclass(eq=False)
class FetchState:
    """The sources of a slice and their faults, over its runs. Dicts are by URL of a source."""

    sources: list[Origin] = field(default_factory=list)
    looked_up_at: float = float("-inf")
    refused: dict[str, str] = field(default_factory=dict)  # reasons of the sources that will not send it
    reasons: dict[str, str] = field(default_factory=dict)  # last fault of each source
    has_liar: bool = False
    attempts: int = 0
    began_at: float = 0.0  # of the first attempt
    last_byte_at: float = 0.0


@dataclass(eq=False)
class ChunkRun:
    """Chunks [first, stop) of an entry to fetch; `on_end` is called once, in a thread of the pool, unless cancelled.

    `read_leaves` is called with a source before the first byte if the entry has no leaves; None: there are none, and
    the chunks are marked as not verified. Runs of one `order` are fetched before those of a later one.
    """

    entry: ChunkFile
    name: str  # of the slice, at its origin
    origin: Sources
    first: int
    stop: int
    read_leaves: Callable[[Origin], bytes | None]
    on_end: Callable[[ChunkRun, Exception | None], object]
    on_wrong: Callable[[Origin, str], object] = lambda source, reason: None  # A source broke the protocol, or lied.
    state: FetchState = field(default_factory=FetchState)
    order: int = -1
    next: int = field(init=False)  # the first chunk that is missing
    position: int = field(init=False)  # of the next byte
    received: int = 0  # bytes, those that were wrong included
    sender: str = ""  # of the bytes of the chunk that is not complete
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)  # of these bytes
    tries: int = 0
    has_ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)  # Guards `has_ended`: nothing is written afterwards.

    def __post_init__(self) -> None:
        self.next = self.first
        self.position = self.first * self.entry.chunk_bytes

    def end(self) -> bool:
        """Whether it had not ended."""
        with self.lock:
            had_ended, self.has_ended = self.has_ended, True
        return not had_ended


class RunFetcher(Closing):
    """A pool of connections for chunk runs, in the order of their start. Threads share it; a fork cannot use it.

    Args:
        connections: Requests at once, each in a thread.
        timeout_s, tries: A run fails when no byte came for so long and it was tried so often.
        max_backoff_s: Maximum wait before another try, before jitter.
    """

    def __init__(
        self, connections: int = 16, *, timeout_s: float = 300.0, tries: int = 6, max_backoff_s: float = 15.0
    ) -> None:
        if connections < 1 or tries < 1:
            raise UsageError(f"fetch: expected at least one connection and try, got {connections=}, {tries=}.")
        self.connections = connections
        self.received_bytes = self.wrong_bytes = self.attempts = self.retries = 0
        self._timeout_s, self._tries, self._max_backoff_s = timeout_s, tries, max_backoff_s
        self._pid = os.getpid()
        self._changed = threading.Condition()  # guards all below
        self._waiting: list[tuple[float, int, int, ChunkRun]] = []  # (not before, order, number, run): a heap
        self._running: set[ChunkRun] = set()
        self._numbers = itertools.count()
        self._sources: dict[str, SourceStats] = {}  # by URL
        self._threads: list[SupervisedThread] = []
        self._closed = False

    def start(self, run: ChunkRun) -> None:
        """Fetch a run. Returns at once; NetworkError if no thread can be started."""
        if os.getpid() != self._pid:
            raise UsageError("fetcher: expected the process that made it, got a fork of it. Make another one there.")
        with self._changed:
            if self._closed:
                raise UsageError("fetcher: it is closed. Make another.")
            run.order = next(self._numbers) if run.order < 0 else run.order
            heapq.heappush(self._waiting, (0.0, run.order, next(self._numbers), run))
            try:
                if len(self._threads) < min(self.connections, len(self._running) + len(self._waiting)):
                    name = f"fetch-{len(self._threads)}"
                    self._threads.append(SupervisedThread(self._run_connection, name).start())
            except RuntimeError as error:
                if not self._threads:
                    self._waiting.clear()
                    raise NetworkError(f"{run.name}: cannot start a thread to fetch it: {error}") from error
                log.warning("%d of %d connections: %s", len(self._threads), self.connections, error)
            self._changed.notify()

    def cancel(self, runs: Collection[ChunkRun]) -> None:
        """End runs: nothing more is written, and `on_end` is not called."""
        for run in runs:
            run.end()
        with self._changed:
            self._waiting = [item for item in self._waiting if not item[3].has_ended]
            heapq.heapify(self._waiting)

    def close(self) -> None:
        """End all runs and the threads; one that waits for a dead peer ends later. May be repeated."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            runs = [item[3] for item in sorted(self._waiting)] + list(self._running)
            self._waiting.clear()
            self._changed.notify_all()
        for run in runs:
            self._end(run, TransferCancelledError(run.name))
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def stats(self) -> dict[str, int]:
        """Bytes received and requests: `bytes`, `attempts`, `retries`."""
        return {"bytes": self.received_bytes, "attempts": self.attempts, "retries": self.retries}

    def _run_connection(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not (self._waiting and self._waiting[0][0] <= time.monotonic()):
                    pause = self._waiting[0][0] - time.monotonic() if self._waiting else None
                    self._changed.wait(pause if pause is None else max(0.001, pause))
                if self._closed:
                    return
                run = heapq.heappop(self._waiting)[3]
                self._running.add(run)
            try:
                self._attempt(run)
            except Exception as error:  # noqa: BLE001 - the run's consumer gets it
                self._end(run, error)
            with self._changed:
                self._running.discard(run)
            del run  # A thread that waits must not keep a deleted file open.

    def _attempt(self, run: ChunkRun) -> None:
        """One request, for the rest of a run, and what its failure means."""
        state, began_at = run.state, time.monotonic()
        if not state.began_at:
            state.began_at = state.last_byte_at = began_at
        stats, source, pause_s = self._choose(run)
        if stats is None or source is None:
            return self._again(run, pause_s) if pause_s is not None else self._end(run, self._no_source(run))
        url, first, received = source.url, run.position, run.received
        fault: Exception | None = None
        try:
            self._receive(run, source)
        except Exception as error:  # noqa: BLE001 - handled below
            fault = error
        now, progress, num_bytes = time.monotonic(), run.position - first, run.received - received
        with self._changed:
            stats.active -= 1
            self.attempts += 1
            self.retries += fault is not None
            self.received_bytes += num_bytes
            stats.record_speed(num_bytes, now - began_at)
            if progress > 0:
                run.tries, state.last_byte_at = 0, now
            if fault is None:
                stats.record_success(self.connections)
            elif isinstance(fault, TransientError) and fault.throttled:
                run.tries += 1
                stats.record_overload(now, began_at, fault.wait_s, self._backoff)
            elif isinstance(fault, NetworkError) and not run.has_ended:
                stats.record_failure(now, self._backoff)
                run.tries += progress <= 0
        if fault is None:
            return self._end(run, None)
        state.attempts += 1
        state.reasons[url] = str(fault)
        if isinstance(fault, OSError) and not isinstance(fault, NetworkError):
            raise disk_error(run.entry.path, run.entry.info.bytes, fault) from fault
        if not isinstance(fault, NetworkError):
            raise fault
        if isinstance(fault, ProtocolError):  # Named before it is given up: that may end the transfer.
            log.warning("%s", fault)
            run.on_wrong(source, str(fault))
        if isinstance(fault, (ProtocolError, PermanentError)):
            state.refused[url] = str(fault)
        if self._is_timed_out(run, now):
            return self._end(run, self._timed_out(run, now), fault)
        throttled = isinstance(fault, TransientError) and fault.throttled
        self._again(run, 0.0 if progress > 0 or throttled else self._backoff(max(1, run.tries)))

    def _choose(self, run: ChunkRun) -> tuple[SourceStats | None, Origin | None, float | None]:
        """A source with a connection to spare; else how long to wait for one, None if none is left."""
        state, now = run.state, time.monotonic()
        if now - state.looked_up_at >= _LOOKUP_INTERVAL_S or all(s.url in state.refused for s in state.sources):
            try:
                state.sources, state.looked_up_at = list(run.origin.sources()), now
            except NetworkError as error:
                state.reasons[run.origin.url] = str(error)
                run.tries, state.attempts, now = run.tries + 1, state.attempts + 1, time.monotonic()
                if self._is_timed_out(run, now):
                    raise self._timed_out(run, now) from error
                return None, None, self._backoff(run.tries)
        with self._changed:
            usable = {origin.url: origin for origin in state.sources if origin.url not in state.refused}
            if not usable:
                return None, None, None
            stats = [self._sources.setdefault(url, SourceStats(url, float(self.connections))) for url in usable]
            chosen, later = choose_source(stats, time.monotonic())
            if chosen is None:
                return None, None, min(_POLL_S, max(0.001, later - time.monotonic()))
            chosen.active += 1
            return chosen, usable[chosen.url], None

    def _receive(self, run: ChunkRun, source: Origin) -> None:
        """Write the rest of a run to its entry, and mark each chunk that has its hash.

        Raises:
            ProtocolError: If a chunk has another hash, or the response was too long.
            TransientError: If it was too short.
        """
        entry, size, offset = run.entry, run.entry.chunk_bytes, run.entry.info.offset
        stop = min(run.stop * size, entry.info.bytes)
        leaves = entry.leaves() if entry.has_leaves else run.read_leaves(source)
        if leaves is not None and not entry.has_leaves:
            entry.set_leaves(leaves)
        if leaves is not None and run.sender != source.url:  # Each chunk has one sender, who answers for its hash.
            run.position, run.sender, run.digest = run.next * size, source.url, hashlib.sha256()
        with (
            entry.path.open("r+b", buffering=0) as file,
            closing(cast(Generator[memoryview], source.read(run.name, offset + run.position, offset + stop))) as body,
        ):
            for data in body:
                if len(data) > stop - run.position:
                    raise ProtocolError(f"{source.url}: expected {stop - run.position} bytes of {run.name}, got more")
                with run.lock:
                    if run.has_ended:
                        raise TransferCancelledError(run.name)
                    run.received += len(data)
                    self._write(run, source, data, leaves, file.fileno())
                run.state.last_byte_at = time.monotonic()
        if run.position < stop:
            raise TransientError(f"the body of {run.name} ended at byte {run.position}, before {stop}")

    def _write(self, run: ChunkRun, source: Origin, data: memoryview, leaves: bytes | None, file: int) -> None:
        entry, size, num_bytes, written = run.entry, run.entry.chunk_bytes, run.entry.info.bytes, 0
        while written < len(data):
            written += os.pwrite(file, data[written:], entry.info.offset + run.position + written)
        while len(data):
            end = min((run.next + 1) * size, num_bytes)
            part, data = data[: end - run.position], data[end - run.position :]
            run.position += len(part)
            if leaves is not None:
                run.digest.update(part)
            if run.position < end:
                return
            is_verified = True
            if leaves is not None:
                is_right = run.digest.digest() == leaves[run.next * HASH_BYTES : (run.next + 1) * HASH_BYTES]
                run.digest = hashlib.sha256()
            elif entry.check is not None:
                start = run.next * size
                is_right = entry.check(run.next, memoryview(os.pread(file, end - start, entry.info.offset + start)))
            else:
                is_right, is_verified = True, False
            if not is_right:
                self._accuse(run, source)
            entry.marks[run.next] = PRESENT if is_verified else UNVERIFIED
            run.next += 1

    def _accuse(self, run: ChunkRun, source: Origin) -> None:
        first, end = run.next * run.entry.chunk_bytes, run.position
        run.position, run.sender, run.state.has_liar = first, "", True
        with self._changed:
            self.wrong_bytes += end - first
        self.record_lie(source)
        raise ProtocolError(f"{source.url}: sent wrong bytes in [{first}, {end}) of {run.name}")

    def record_lie(self, source: Origin) -> None:
        """A source sent wrong bytes: it is asked again only where no other source is."""
        with self._changed:
            self._sources[source.url].lies += 1

    def _again(self, run: ChunkRun, pause_s: float) -> None:
        with self._changed:
            if not self._closed and not run.has_ended:
                not_before = time.monotonic() + pause_s if pause_s else 0.0
                heapq.heappush(self._waiting, (not_before, run.order, next(self._numbers), run))
                return self._changed.notify()
        self._end(run, TransferCancelledError(run.name))

    def _end(self, run: ChunkRun, error: Exception | None, cause: Exception | None = None) -> None:
        if error is not None and cause is not None:
            error.__cause__ = cause
        if run.end():
            run.on_end(run, error)

    def _is_timed_out(self, run: ChunkRun, now: float) -> bool:
        return run.tries >= self._tries and now - run.state.last_byte_at >= self._timeout_s

    def _backoff(self, times: int) -> float:
        return backoff_s(times, _FIRST_BACKOFF_S, self._max_backoff_s)

    def _no_source(self, run: ChunkRun) -> NetworkError:
        kind = IntegrityError if run.state.has_liar else NetworkError
        return kind(
            f"{self._describe(run)}: expected bytes that verify, got none. {self._reasons(run)}. Check the origin, or "
            "add one that has it."
        )

    def _timed_out(self, run: ChunkRun, now: float) -> NetworkError:
        state, info = run.state, run.entry.info
        num_chunks = int(np.isin(run.entry.marks, (PRESENT, UNVERIFIED)).sum())
        return NetworkError(
            f"{self._describe(run)}: got {min(info.bytes, num_chunks * run.entry.chunk_bytes)} of {info.bytes} bytes, "
            f"then none for {now - state.last_byte_at:.1f} s: {state.attempts} failed attempts in "
            f"{now - state.began_at:.1f} s. {self._reasons(run)}. Check the network and the endpoint; what was "
            "received is kept."
        )

    def _describe(self, run: ChunkRun) -> str:
        sha256 = run.entry.info.sha256
        return f"slice {run.name} ({sha256[:12]}…)" if sha256 else run.name

    def _reasons(self, run: ChunkRun) -> str:
        return "; ".join(f"{url}: {reason}" for url, reason in (run.state.reasons | run.state.refused).items())


def disk_error(part: Path, num_bytes: int, error: OSError) -> UsageError:
    """Return the UsageError for a disk fault; the written bytes are kept and resumed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UsageError(
            f"{part}: expected room for {num_bytes} bytes, got: {error.strerror}. Free space there, lower the "
            "cache's budget, or choose another directory; the downloaded bytes are kept and resumed."
        )
    return UsageError(f"{part}: cannot be written: {error}. Check the directory and its permissions.")
