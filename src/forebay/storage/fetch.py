"""Threads that fetch runs of chunks from the sources of a slice, and verify each chunk as it comes.

A chunk with another hash costs its own bytes and names its sender, who is from then on the last to be asked; the rest
of the run comes from the next source. A broken request goes on from the first chunk that is missing, with a back-off.
Memory: what a source reads ahead (256 KiB of a web server, 2 MiB of a peer or a bucket) for each connection.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import cast

from forebay.closing import Closing
from forebay.dataset.chunks import HASH_BYTES
from forebay.errors import IntegrityError, NetworkError, ProtocolError, UsageError
from forebay.network.retry import backoff_s
from forebay.storage.base import Origin, PermanentError, TransientError
from forebay.storage.chunk_file import PRESENT, ChunkFile
from forebay.storage.part_file import disk_error
from forebay.storage.transfer_state import LOOKUP_INTERVAL_S, SourceStats, choose_source
from forebay.threads import SupervisedThread

_FIRST_BACKOFF_S = 0.2
_CLOSE_S = 1.0
_POLL_S = 0.05
log = logging.getLogger("forebay.storage")


@dataclass(eq=False)
class ChunkRun:
    """Chunks [first, stop) of an entry to fetch; `on_end` is called once, in a thread of the pool."""

    entry: ChunkFile
    name: str  # of the slice, at its origin
    origin: Origin
    first: int
    stop: int
    read_leaves: Callable[[], bytes]
    on_end: Callable[[ChunkRun, Exception | None], object]
    next: int = field(init=False)  # the first chunk that is missing
    tries: int = 0
    attempts: int = 0
    began_at: float = field(default_factory=time.monotonic)
    last_byte_at: float = field(default_factory=time.monotonic)
    refused: dict[str, str] = field(default_factory=dict)  # reasons of the sources that will not send it, by URL
    reasons: dict[str, str] = field(default_factory=dict)
    has_liar: bool = False

    def __post_init__(self) -> None:
        self.next = self.first


class RunFetcher(Closing):
    """A pool of connections for chunk runs, in the order of their start. Threads share it; a fork cannot use it.

    Args:
        connections: Requests at once, each in a thread.
        timeout_s, tries: A run fails when no byte came for so long and it was tried so often.
        max_backoff_s: Maximum wait before another try, before jitter.
        on_wrong: Called with a source and a reason when it sent wrong bytes.
    """

    def __init__(
        self, connections: int = 16, *, timeout_s: float = 300.0, tries: int = 6, max_backoff_s: float = 15.0,
        on_wrong: Callable[[Origin, str], object] = lambda source, reason: None,
    ) -> None:  # fmt: skip
        if connections < 1:
            raise UsageError(f"connections: expected at least one, got {connections}.")
        self.connections = connections
        self.received_bytes = self.wrong_bytes = self.attempts = 0
        self._timeout_s, self._tries, self._max_backoff_s, self._on_wrong = timeout_s, tries, max_backoff_s, on_wrong
        self._pid = os.getpid()
        self._changed = threading.Condition()  # guards all below
        self._waiting: list[tuple[float, int, ChunkRun]] = []  # (not before, number, run): a heap
        self._numbers = itertools.count()
        self._sources: dict[str, SourceStats] = {}  # by URL
        self._origins: dict[int, tuple[float, list[Origin]]] = {}  # by id of an origin: when looked up, its sources
        self._threads: list[SupervisedThread] = []
        self._num_running = 0
        self._closed = False

    def start(self, run: ChunkRun) -> None:
        """Fetch a run. Returns at once; NetworkError if no thread can be started."""
        if os.getpid() != self._pid:
            raise UsageError("fetcher: expected the process that made it, got a fork of it. Make another one there.")
        with self._changed:
            if self._closed:
                raise UsageError("fetcher: it is closed. Make another.")
            heapq.heappush(self._waiting, (0.0, next(self._numbers), run))
            try:
                if len(self._threads) < min(self.connections, self._num_running + len(self._waiting)):
                    name = f"fetch-{len(self._threads)}"
                    self._threads.append(SupervisedThread(self._run_connection, name).start())
            except RuntimeError as error:
                if not self._threads:
                    self._waiting.pop()
                    raise NetworkError(f"{run.name}: cannot start a thread to fetch it: {error}") from error
                log.warning("%d of %d connections: %s", len(self._threads), self.connections, error)
            self._changed.notify()

    def cancel(self) -> list[ChunkRun]:
        """Forget the runs that wait; returns them, `on_end` is not called for them."""
        with self._changed:
            waiting = [run for _, _, run in self._waiting]
            self._waiting.clear()
        return waiting

    def close(self) -> None:
        """End the threads; one that waits for a dead peer ends later, and writes nothing. May be repeated."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for run in self.cancel():
            run.on_end(run, NetworkError(f"{run.name}: the fetch was cancelled"))
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run_connection(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not (self._waiting and self._waiting[0][0] <= time.monotonic()):
                    pause = self._waiting[0][0] - time.monotonic() if self._waiting else None
                    self._changed.wait(pause if pause is None else max(0.001, pause))
                if self._closed:
                    return
                run = heapq.heappop(self._waiting)[2]
                self._num_running += 1
            try:
                self._attempt(run)
            except Exception as error:  # noqa: BLE001 - the run's consumer gets it
                self._end(run, error)
            with self._changed:
                self._num_running -= 1

    def _attempt(self, run: ChunkRun) -> None:
        """One request, for the rest of a run, and what its failure means."""
        source, pause_s = self._choose(run)
        if source is None:
            return self._again(run, pause_s) if pause_s is not None else self._end(run, self._no_source(run))
        url, began_at, first = source.origin.url, time.monotonic(), run.next
        fault: Exception | None = None
        try:
            self._receive(run, source.origin)
        except Exception as error:  # noqa: BLE001 - handled below
            fault = error
        now, num_bytes = time.monotonic(), (run.next - first) * run.entry.chunk_bytes
        with self._changed:
            source.active -= 1
            self.attempts += 1
            if num_bytes:
                source.record_speed(num_bytes, now - began_at)
                run.tries, run.last_byte_at = 0, now
            if fault is None:
                source.record_success(self.connections)
            elif isinstance(fault, TransientError) and fault.throttled:
                run.tries += 1
                source.record_overload(now, began_at, fault.wait_s, self._backoff)
            elif isinstance(fault, NetworkError):
                source.record_failure(now, self._backoff)
                run.tries += not num_bytes
        if fault is None:
            return self._end(run, None)
        run.attempts += 1
        run.reasons[url] = str(fault)
        if isinstance(fault, OSError) and not isinstance(fault, NetworkError):
            raise disk_error(run.entry.path, run.entry.info.bytes, fault) from fault
        if not isinstance(fault, NetworkError):
            raise fault
        if isinstance(fault, (ProtocolError, PermanentError)):
            run.refused[url] = str(fault)
        if isinstance(fault, ProtocolError):
            log.warning("%s", fault)
            self._on_wrong(source.origin, str(fault))
        if run.tries >= self._tries and now - run.last_byte_at >= self._timeout_s:
            return self._end(run, self._timed_out(run, now), fault)
        throttled = isinstance(fault, TransientError) and fault.throttled
        self._again(run, 0.0 if num_bytes or throttled else self._backoff(max(1, run.tries)))

    def _choose(self, run: ChunkRun) -> tuple[SourceStats | None, float | None]:
        """A source with a connection to spare; else how long to wait for one, None if none is left."""
        looked_up_at, origins = self._origins.get(id(run.origin), (float("-inf"), []))
        usable = [origin for origin in origins if origin.url not in run.refused]
        if time.monotonic() - looked_up_at >= LOOKUP_INTERVAL_S or not usable:
            try:
                origins = list(run.origin.sources())
            except NetworkError as error:
                run.reasons[run.origin.url] = str(error)
                run.tries, run.attempts = run.tries + 1, run.attempts + 1
                now = time.monotonic()
                if run.tries >= self._tries and now - run.last_byte_at >= self._timeout_s:
                    raise self._timed_out(run, now) from error
                return None, self._backoff(run.tries)
            self._origins[id(run.origin)] = time.monotonic(), origins
        with self._changed:
            usable = [origin for origin in origins if origin.url not in run.refused]
            if not usable:
                return None, None
            stats = [self._sources.setdefault(o.url, SourceStats(o, float(self.connections))) for o in usable]
            for source, origin in zip(stats, usable):
                source.origin = origin
            chosen, later = choose_source(stats, time.monotonic())
            if chosen is None:
                return None, min(_POLL_S, max(0.001, later - time.monotonic()))
            chosen.active += 1
            return chosen, None

    def _receive(self, run: ChunkRun, source: Origin) -> None:
        """Write the rest of a run to its entry, and mark each chunk that has its hash.

        Raises:
            ProtocolError: If a chunk has another hash, or the response was too long.
            TransientError: If it was too short.
        """
        entry, size = run.entry, run.entry.chunk_bytes
        if not entry.has_leaves:
            entry.set_leaves(run.read_leaves())
        leaves = entry.leaves()
        position, stop = run.next * size, min(run.stop * size, entry.info.bytes)
        digest, end = hashlib.sha256(), min(position + size, stop)
        with (
            entry.path.open("r+b", buffering=0) as file,
            closing(cast(Generator[memoryview], source.read(run.name, position, stop))) as body,
        ):
            for data in body:
                if self._closed:
                    raise TransientError("the fetch was cancelled")
                if len(data) > stop - position:
                    raise ProtocolError(f"{source.url}: expected {stop - position} bytes of {run.name}, got more")
                written = 0
                while written < len(data):
                    written += os.pwrite(file.fileno(), data[written:], position + written)
                self.received_bytes += len(data)
                while len(data):
                    part, data = data[: end - position], data[end - position :]
                    digest.update(part)
                    position += len(part)
                    if position < end:
                        break
                    if digest.digest() != leaves[run.next * HASH_BYTES : (run.next + 1) * HASH_BYTES]:
                        self._accuse(run, source, end)
                    entry.marks[run.next] = PRESENT
                    run.next += 1
                    digest, end = hashlib.sha256(), min(position + size, stop)
        if position < stop or run.next < run.stop:
            raise TransientError(f"the body of {run.name} ended at byte {position}, before {stop}")

    def _accuse(self, run: ChunkRun, source: Origin, end: int) -> None:
        first = run.next * run.entry.chunk_bytes
        with self._changed:
            self.wrong_bytes += end - first
            self._sources[source.url].lies += 1  # It is asked again only where no other source is.
        run.has_liar = True
        raise ProtocolError(f"{source.url}: sent wrong bytes in [{first}, {end}) of {run.name}")

    def _again(self, run: ChunkRun, pause_s: float) -> None:
        with self._changed:
            if not self._closed:
                not_before = time.monotonic() + pause_s if pause_s else 0.0
                heapq.heappush(self._waiting, (not_before, next(self._numbers), run))
                return self._changed.notify()
        self._end(run, NetworkError(f"{run.name}: the fetch was cancelled"))

    def _end(self, run: ChunkRun, error: Exception | None, cause: Exception | None = None) -> None:
        if error is not None and cause is not None:
            error.__cause__ = cause
        run.on_end(run, error)

    def _backoff(self, times: int) -> float:
        return backoff_s(times, _FIRST_BACKOFF_S, self._max_backoff_s)

    def _no_source(self, run: ChunkRun) -> NetworkError:
        kind = IntegrityError if run.has_liar else NetworkError
        return kind(
            f"{self._describe(run)}: expected bytes that verify, got none. {self._reasons(run)}. Check the origin, or "
            "add one that has it."
        )

    def _timed_out(self, run: ChunkRun, now: float) -> NetworkError:
        return NetworkError(
            f"{self._describe(run)}: no byte for {now - run.last_byte_at:.1f} s: {run.attempts} failed attempts in "
            f"{now - run.began_at:.1f} s. {self._reasons(run)}. Check the network and the endpoint; what was received "
            "is kept."
        )

    def _describe(self, run: ChunkRun) -> str:
        return f"slice {run.name} ({run.entry.info.sha256[:12]}…)"

    def _reasons(self, run: ChunkRun) -> str:
        return "; ".join(f"{url}: {reason}" for url, reason in (run.reasons | run.refused).items())
