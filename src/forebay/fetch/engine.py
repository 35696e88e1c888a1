"""Threads that fetch runs of chunks from the sources of a slice, and verify each chunk as it comes.

A chunk with another hash costs its own bytes and names its sender, who is from then on the last to be asked; the rest
of the run comes from the next source. A broken request goes on where it broke, or, from another source, with the chunk
that was broken off. A source that reports overload gets half as many connections, and none before the time that it
asked for; each response adds to its limit. A source that fails is tried after the others, for a time that doubles. A
run whose source is silent or slow goes on from another one, if that would end it much sooner.
Memory: what a source reads ahead (256 KiB of a web server, 2 MiB of a peer or a bucket) for each connection.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Generator
from contextlib import closing
from functools import partial
from typing import cast

import numpy as np

from forebay.base import Closing
from forebay.dataset.chunks import HASH_BYTES, root_of
from forebay.errors import DatasetError, IntegrityError, NetworkError, ProtocolError, UsageError, WrongBytesError
from forebay.fetch.chunk_file import PRESENT, UNVERIFIED
from forebay.fetch.runs import (
    ChunkRun,
    HashesError,
    NoProviderError,
    SourceStats,
    TransferCancelledError,
    choose_source,
    disk_error,
)
from forebay.storage.base import Origin, PermanentError, TransientError, log
from forebay.storage.retry import backoff_s
from forebay.threads import SupervisedThread

_FIRST_BACKOFF_S = 0.2
_CLOSE_S = 1.0
_POLL_S = 0.05
_LOOKUP_INTERVAL_S = 15.0
_WATCH_S, _SLOW_S = 0.5, 2.0  # between two looks at what is slow; no source is slow before
_MUCH = 3  # times as long as another source
_PACE = 5  # times _SLOW_S, until a source that others named counts as too slow
_MIN_STEERED_BYTES_PER_S, _MIN_STEERED_SHARE = 32 << 10, 1 / 8  # of such a source; of the usual speed
_STEP_BYTES = 2 << 20  # at most, in which the bytes of a source come
_USUAL_BYTES_PER_S = 1 << 20  # of a source whose speed is not known


class RunFetcher(Closing):
    """A pool of connections for chunk runs, in the order of their start. Threads share it; a fork cannot use it.

    Args:
        connections: Requests at once, each in a thread.
        timeout_s, tries: A run fails when no byte came for so long and it was tried so often.
        max_backoff_s: Maximum wait before another try, before jitter.
    """

    def __init__(
        self, connections: int = 16, *, timeout_s: float = 300.0, tries: int = 6, max_backoff_s: float = 15.0
    ) -> None:  # fmt: skip
        if connections < 1 or tries < 1:
            raise UsageError(f"fetch: expected at least one connection and try, got {connections=}, {tries=}.")
        self.connections = connections
        self.received_bytes = self.wrong_bytes = self.attempts = self.retries = 0
        self.fault = ""
        """The error of the last attempt, for log lines."""
        self.told_at = float("-inf")
        """When a log line named it."""
        self._timeout_s, self._tries, self._max_backoff_s = timeout_s, tries, max_backoff_s
        self._pid = os.getpid()
        self._changed = threading.Condition()  # guards all below
        self._waiting: list[tuple[float, int, int, ChunkRun]] = []  # (not before, order, number, run): a heap
        self._running = Counter[ChunkRun]()  # their attempts
        self._numbers = itertools.count()
        self._sources: dict[str, SourceStats] = {}  # by URL
        self._parked: list[ChunkRun] = []  # without a source now
        self._threads: list[SupervisedThread] = []
        self._num_abandoned = 0  # attempts that another one took over, and whose threads wait for the source
        self._watch: SupervisedThread | None = None
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
                self._start_thread()
            except RuntimeError as error:
                if not self._threads:
                    self._waiting.clear()
                    raise NetworkError(f"{run.name}: cannot start a thread to fetch it: {error}") from error
                log.warning("%d of %d connections: %s", len(self._threads), self.connections, error)
            self._changed.notify()

    def _start_thread(self) -> None:
        """Start a thread if there is work for one more. RuntimeError if none can be started. With the lock held."""
        limit = self.connections + min(self.connections, self._num_abandoned)
        if len(self._threads) < min(limit, len(self._running) + len(self._waiting)):
            name = f"fetch-{len(self._threads)}"
            self._threads.append(SupervisedThread(self._run_connection, name).start())

    def wake(self) -> None:
        """Ask again for the sources of runs that had none."""
        with self._changed:
            parked, self._parked = self._parked, []
            for run in parked:
                heapq.heappush(self._waiting, (0.0, run.order, next(self._numbers), run))
            self._changed.notify_all()

    def cancel(self, runs: Collection[ChunkRun]) -> None:
        """End runs: nothing more is written, and `on_end` is not called."""
        for run in runs:
            run.end()
        with self._changed:
            self._parked = [run for run in self._parked if not run.has_ended]
            self._waiting = [item for item in self._waiting if not item[3].has_ended]
            heapq.heapify(self._waiting)

    def close(self) -> None:
        """End all runs and the threads; one that waits for a dead peer ends later. May be repeated."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            runs = [item[3] for item in sorted(self._waiting)] + self._parked + list(self._running)
            self._waiting.clear()
            self._parked.clear()
            self._changed.notify_all()
        if self._watch is not None:
            self._watch.stop()
        for run in runs:
            self._end(run, TransferCancelledError(run.name))
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _count(self, stats: SourceStats, num_bytes: int) -> None:
        stats.received += num_bytes
        self.received_bytes += num_bytes

    def bytes_of_last(self) -> int:
        """Bytes received from sources that are the last to be asked."""
        with self._changed:
            return sum(stats.received for stats in self._sources.values() if stats.is_last)

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
                self._running[run] += 1
            try:
                self._attempt(run)
            except Exception as error:  # noqa: BLE001 - the run's consumer gets it
                self._end(run, error)
            with self._changed:
                self._running.subtract({run: 1})
                self._running += Counter()  # Without those of no attempt.
            del run  # A thread that waits must not keep a deleted file open.

    def _attempt(self, run: ChunkRun) -> None:
        """One request, for the rest of a run, and what its failure means."""
        state, began_at = run.state, time.monotonic()
        if not state.began_at:
            state.began_at = state.last_byte_at = began_at
        try:
            stats, source, pause_s = self._choose(run)
        except NoProviderError as error:
            state.reasons[run.origin.url] = str(error)
            return self._park(run)
        if stats is None or source is None:
            return self._again(run, pause_s) if pause_s is not None else self._end(run, self._no_source(run))
        with run.lock:
            run.attempt, run.source, run.began_at, run.began_with = run.attempt + 1, source, began_at, run.received
            attempt, first = run.attempt, run.reached
            if run.paced[0] != source.url:
                run.paced = source.url, began_at, run.received
        fault: Exception | None = None
        try:
            self._receive(run, source, attempt)
        except Exception as error:  # noqa: BLE001 - handled below
            fault = error
        now = time.monotonic()
        with run.lock:
            was_taken, run.source = run.attempt != attempt, None
        with self._changed:
            stats.active -= 1
            self.attempts += not isinstance(fault, HashesError)  # Else nothing was asked for.
            if was_taken:
                self._num_abandoned -= 1
                return None
            progress, num_bytes = run.reached - first, run.received - run.began_with
            self.retries, self.fault = self.retries + (fault is not None), str(fault or "")
            self._count(stats, num_bytes)
            stats.record_speed(num_bytes, now - began_at)
            if progress > 0:
                run.tries, state.last_byte_at = 0, now
            if fault is None:
                stats.record_success(self.connections)
            elif isinstance(fault, HashesError):
                run.tries += 1
            elif isinstance(fault, TransientError) and fault.throttled:
                run.tries += 1
                stats.record_overload(now, began_at, fault.wait_s, self._backoff)
            elif isinstance(fault, NetworkError) and not run.has_ended:
                stats.record_failure(now, self._backoff)
                run.tries += progress <= 0
                state.faults[source.url] += progress <= 0
        if fault is None:
            return self._end(run, None)
        state.attempts += 1
        state.reasons[source.url] = str(fault)
        if isinstance(fault, OSError) and not isinstance(fault, NetworkError):
            raise disk_error(run.entry.path, run.entry.info.bytes, fault) from fault
        if not isinstance(fault, NetworkError):
            raise fault
        if isinstance(fault, ProtocolError):  # Named before it is given up: that may end the transfer.
            log.warning("%s", fault)
        if isinstance(fault, (ProtocolError, PermanentError)):
            state.refused[source.url] = str(fault)
        if not (run.has_ended or isinstance(fault, HashesError)) and run.origin.report(source, fault):
            state.looked_up_at = float("-inf")
        if self._is_timed_out(run, now):
            return self._end(run, self._timed_out(run, now), fault)
        if progress > 0 or (isinstance(fault, TransientError) and fault.throttled):
            return self._again(run, 0.0)
        pause_s = fault.wait_s if isinstance(fault, HashesError) else 0.0
        return self._again(run, max(pause_s, self._backoff(max(1, run.tries))))

    def _take_over(self) -> None:
        """Request the rest of each run again whose source is silent or slow, if another would end it much sooner."""
        while not (self._watch and self._watch.stopping.wait(_WATCH_S)):
            with self._changed:
                runs, now = list(self._running), time.monotonic()
            for run in runs:
                if (source := run.source) is None:
                    continue
                elapsed_s, received = now - run.paced[1], run.received - run.paced[2]
                if elapsed_s >= _PACE * _SLOW_S and run.origin.is_steered:
                    min_bytes = self._least_bytes_per_s(run, source) * elapsed_s
                    if received + _STEP_BYTES < min_bytes:
                        run.state.refused[source.url] = f"sent {received} bytes in {elapsed_s:.0f} s"
                        self._request_elsewhere(run, source, now)
                        continue
                    if received >= min_bytes:
                        run.paced = source.url, now, run.received
                elapsed_s, received = now - run.began_at, run.received - run.began_with
                if elapsed_s >= _SLOW_S and self._has_better(run, source, elapsed_s, received, now):
                    self._request_elsewhere(run, source, now)

    def _least_bytes_per_s(self, run: ChunkRun, source: Origin) -> float:
        """Return the least that a source which others named must send: 1/8 of the median; 32 KiB/s beside another."""
        with self._changed:
            speeds = sorted(s.speed for url, s in self._sources.items() if s.speed and url != source.url)
        usual = speeds[len(speeds) // 2] if speeds else 0.0
        is_alone = all(other.url == source.url for other in run.state.sources)
        return max(0 if is_alone else _MIN_STEERED_BYTES_PER_S, _MIN_STEERED_SHARE * usual)

    def _has_better(self, run: ChunkRun, source: Origin, elapsed_s: float, received: int, now: float) -> bool:
        with self._changed:
            others = [
                stats for other in run.state.sources
                if other.url not in (source.url, *run.state.refused) and (stats := self._sources.get(other.url))
                and not stats.lies and max(stats.avoid_until, stats.wait_until) < now and stats.active < stats.limit
            ]  # fmt: skip
            speeds = [stats.speed for stats in others if stats.speed]
        remaining = min(run.stop * run.entry.chunk_bytes, run.entry.info.bytes) - run.position
        needed_s = remaining / max(speeds, default=_USUAL_BYTES_PER_S)
        is_silent = now - max(run.began_at, run.state.last_byte_at) > _SLOW_S and not received
        return bool(others) and (is_silent or remaining * elapsed_s > _MUCH * (needed_s + _SLOW_S) * max(1, received))

    def _request_elsewhere(self, run: ChunkRun, source: Origin, now: float) -> None:
        received, elapsed_s = run.received - run.began_with, now - run.began_at
        with run.lock:
            if run.has_ended or run.source is not source:
                return
            run.attempt += 1
            run.source = None
        reason = TransientError(
            f"{source.url}: sent {received} bytes of {run.name} in {elapsed_s:.0f} s, others are faster"
        )
        log.info("%s", reason)
        with self._changed:
            stats = self._sources[source.url]
            stats.record_failure(now, self._backoff)
            stats.speed = received / elapsed_s
            self._count(stats, received)
            self._num_abandoned += 1
        run.state.reasons[source.url] = str(reason)
        run.state.faults[source.url] += 1
        if run.origin.report(source, reason):
            run.state.looked_up_at = float("-inf")
        self._again(run, 0.0)
        with contextlib.suppress(RuntimeError), self._changed:
            self._start_thread()

    def _choose(self, run: ChunkRun) -> tuple[SourceStats | None, Origin | None, float | None]:
        """A source with a connection to spare; else how long to wait for one, None if none is left."""
        state, now = run.state, time.monotonic()
        if now - state.looked_up_at >= _LOOKUP_INTERVAL_S or all(s.url in state.refused for s in state.sources):
            try:
                state.sources, state.looked_up_at = list(run.origin.sources()), now
                if run.origin.is_renamed:
                    state.refused.clear()
            except (NoProviderError, PermanentError, IntegrityError):
                raise
            except NetworkError as error:
                state.reasons[run.origin.url] = self.fault = str(error)
                run.tries, state.attempts, now = run.tries + 1, state.attempts + 1, time.monotonic()
                if self._is_timed_out(run, now):
                    raise self._timed_out(run, now) from error
                return None, None, self._backoff(run.tries)
        with self._changed:
            usable = {origin.url: origin for origin in state.sources if origin.url not in state.refused}
            if not usable:
                return None, None, None
            fewest = min(map(state.faults.__getitem__, usable))
            usable = {url: origin for url, origin in usable.items() if state.faults[url] == fewest}
            for url, origin in usable.items():
                self._sources.setdefault(url, SourceStats(url, float(self.connections), origin.is_last))
            stats = [self._sources[url] for url in usable]
            chosen, later = choose_source(stats, time.monotonic())
            if chosen is None:
                return None, None, min(_POLL_S, max(0.001, later - time.monotonic()))
            chosen.active += 1
            if (len(state.sources) > 1 or run.origin.is_steered) and self._watch is None:
                self._watch = SupervisedThread(self._take_over, "fetch-watch")
                with contextlib.suppress(RuntimeError):  # No thread can be started: slow sources are waited for.
                    self._watch.start()
            return chosen, usable[chosen.url], None

    def _receive(self, run: ChunkRun, source: Origin, attempt: int) -> None:
        """Write the rest of a run to its entry, and mark each chunk that has its hash.

        Raises:
            ProtocolError: If a chunk has another hash, or the response was too long.
            TransientError: If it was too short.
        """
        entry, size, offset = run.entry, run.entry.chunk_bytes, run.entry.info.offset
        stop = min(run.stop * size, entry.info.bytes)
        leaves = self._find_leaves(run, source)
        if leaves is not None and run.sender != source.url:  # Each chunk has one sender, who answers for its hash.
            run.position, run.sender, run.digest = run.next * size, source.url, hashlib.sha256()
        with (
            entry.open_file() as file,
            closing(cast(Generator[memoryview], source.read(run.name, offset + run.position, offset + stop))) as body,
        ):
            for data in body:
                with run.lock:
                    if run.has_ended or run.attempt != attempt:
                        raise TransferCancelledError(run.name)
                    if len(data) > stop - run.position:
                        raise ProtocolError(
                            f"{source.url}: expected {stop - run.position} bytes of {run.name}, got more"
                        )
                    run.received += len(data)
                    first = run.next
                    self._write(run, source, data, leaves, file.fileno())
                if run.next > first:
                    run.origin.verified((run.next - first) * size)
                if run.next > first or not run.origin.is_steered:
                    run.state.last_byte_at = time.monotonic()
        if run.position < stop:
            raise TransientError(f"the body of {run.name} ended at byte {run.position}, before {stop}")

    def _find_leaves(self, run: ChunkRun, source: Origin) -> bytes | None:
        """The leaves of a slice's tree; None for an object without one. Raises PermanentError if no source has them."""
        entry, info = run.entry, run.entry.info
        if not info.sha256 or entry.check is not None:
            return None
        with entry.leaves_lock:
            reason = "got none"
            for read in (partial(source.leaves, run.name, info), run.read_leaves) if not entry.has_leaves else ():
                try:
                    leaves = read()
                except TransientError as error:
                    if read is not run.read_leaves:
                        raise  # The source would not send the chunks now, either.
                    raise HashesError(str(error), wait_s=error.wait_s) from error
                except (DatasetError, NetworkError) as error:
                    reason = str(error) if reason == "got none" else f"{reason}; {error}"
                    continue
                if len(leaves) == entry.layout.num_chunks * HASH_BYTES and root_of(leaves) == info.sha256:
                    entry.set_leaves(leaves)
                    break
            else:
                if not entry.has_leaves:
                    raise PermanentError(f"{source.url}: expected the hashes of the chunks of {run.name}: {reason}")
            return entry.leaves()

    def _write(self, run: ChunkRun, source: Origin, data: memoryview, leaves: bytes | None, file: int) -> None:
        entry, size, num_bytes, written = run.entry, run.entry.chunk_bytes, run.entry.info.bytes, 0
        while written < len(data):
            written += os.pwrite(file, data[written:], entry.info.offset + run.position + written)
        if entry.is_lost():  # Another file has its name, and perhaps its map.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(entry.path))
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
        run.position, run.sender = first, ""
        run.state.liars.add(source.url)
        with self._changed:
            self.wrong_bytes += end - first
            self._sources[source.url].lies += 1
        raise WrongBytesError(f"{source.url}: sent wrong bytes in [{first}, {end}) of {run.name}")

    def _park(self, run: ChunkRun) -> None:
        with self._changed:
            if not self._closed and not run.has_ended:
                return self._parked.append(run)
        self._end(run, TransferCancelledError(run.name))

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
        liars = run.state.liars
        kind = IntegrityError if liars and liars >= run.state.refused.keys() else NetworkError
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
