"""A pool of connections that download slices from origins to disk, in order of start, and verify them.

A slice is downloaded in ranges over all connections at once. A broken request is repeated from the byte where it broke,
with a back-off. The connections hash the bytes as far as they are contiguous, so the hash is ready with the last byte.
If bytes of several sources do not verify, the slice is downloaded again from one of them alone; the difference
then shows which source lied.

Memory: `connections` x 256 KiB (2 MiB for peers), 200 bytes per range.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from forebay.closing import Closing
from forebay.dataset.manifest import SliceInfo
from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.network.retry import backoff_s
from forebay.storage.base import Origin, PermanentError, TransientError
from forebay.storage.part_file import MIN_PIECE_BYTES, ByteRange, Check, PartFile, Sha256Check, disk_error
from forebay.storage.transfer_state import LOOKUP_INTERVAL_S, OnSourceFault, PoolTransfer, SourceStats, choose_source
from forebay.threads import SupervisedThread

PIECE_BYTES = 8 << 20  # the longest request by default
_FIRST_BACKOFF_S = 0.2
_CLOSE_S = 1.0
_MAX_TRIES_ALONE = 3  # of a source that is the only one allowed, before another becomes it
log = logging.getLogger("forebay.storage")
_Job: TypeAlias = tuple[PoolTransfer, ByteRange | None, SourceStats | None]  # without a range: look up sources


class Transfers(Closing):
    """A pool of connections. Threads share it; a fork cannot use it.

    Args:
        connections: Requests at once, each in a thread.
        piece_bytes: Unit of resuming after a kill; a power of two.
        timeout_s, tries: A transfer fails when no byte came for so long and one range was tried so often.
        max_backoff_s: Maximum wait before another try of a range, before jitter.
    """

    def __init__(
        self, connections: int = 16, piece_bytes: int = MIN_PIECE_BYTES, *, timeout_s: float = 300.0, tries: int = 6,
        max_backoff_s: float = 15.0,
    ) -> None:  # fmt: skip
        if connections < 1 or tries < 1:
            raise UsageError(f"transfers: expected at least one connection and try, got {connections=}, {tries=}.")
        if piece_bytes < 1 << 16 or piece_bytes & (piece_bytes - 1):
            raise UsageError(f"piece_bytes: expected a power of two from 65536 on, got {piece_bytes}.")
        self.connections = connections
        self.piece_bytes = piece_bytes
        self._timeout_s, self._tries, self._max_backoff_s = timeout_s, tries, max_backoff_s
        self._pid = os.getpid()
        self._changed = threading.Condition()  # guards all below, and the transfers
        self._active: list[PoolTransfer] = []
        self._num_running = 0
        self._sources: dict[str, SourceStats] = {}  # by URL
        self._threads: list[SupervisedThread] = []
        self._counts = dict.fromkeys(("bytes", "attempts", "retries", "finished", "failed"), 0)
        self._closed = False

    def start(
        self, info: SliceInfo, part: Path, origins: Sequence[Origin], on_source_fault: OnSourceFault | None = None, *,
        range_bytes: int = 0, check: Check | None = None,
    ) -> PoolTransfer:  # fmt: skip
        """Download a slice into `part`, resuming an earlier run. Transfers started earlier have priority.

        Args:
            on_source_fault: Called from another thread with a source that sent wrong bytes or broke the protocol.
            range_bytes, check: See PartFile. With a check, `info.sha256` is ignored.
        """
        if os.getpid() != self._pid:
            raise UsageError("transfers: expected the process that made them, got a fork of it. Make new ones there.")
        if not origins:
            raise UsageError(f"fetch {info.name}: expected at least one origin, got none.")
        if not range_bytes:  # An idle pool downloads one slice over all connections, a busy one a few slices.
            num_ranges = max(1, self.connections // (1 + len(self._active)))
            num_pieces = -(-info.bytes // (num_ranges * self.piece_bytes))
            range_bytes = min(PIECE_BYTES, num_pieces * self.piece_bytes)
        check = check or Sha256Check(info.chunk_bytes)
        file = PartFile(part, info.bytes, self.piece_bytes, range_bytes=range_bytes, check=check)
        transfer = PoolTransfer(info, file, list(origins), on_source_fault, self._end)
        try:
            file.open()
        except OSError as error:
            self._end(transfer, error)
            return transfer
        transfer.pending = [item for item in file.ranges if item.offset < item.stop]
        with self._changed:
            if self._closed:
                file.close()
                raise UsageError("transfers: closed; no more can be started.")
            self._active.append(transfer)
            fault = self._start_threads()
            self._changed.notify_all()
        if fault is not None and not self._threads:
            self._end(transfer, NetworkError(f"{info.name}: cannot start a thread to fetch it: {fault}"), fault)
        return transfer

    def close(self) -> None:
        """Cancel all transfers and end the threads; one that waits for a dead peer ends later. May be repeated."""
        if os.getpid() != self._pid:
            return  # The threads, and what they had locked, stayed in the parent.
        with self._changed:
            self._closed = True
            active = list(self._active)
            self._changed.notify_all()
        for transfer in active:
            transfer.cancel()
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def stats(self) -> dict[str, int]:
        """Return `bytes`, `attempts`, `retries`, `finished` and `failed`."""
        with self._changed:
            return dict(self._counts)

    def _start_threads(self) -> RuntimeError | None:
        """Start the threads that are missing; return the fault if the process cannot have more."""
        needed = self._num_running + sum(max(1, len(transfer.pending)) for transfer in self._active)
        try:
            while len(self._threads) < min(self.connections, needed):
                self._threads.append(SupervisedThread(self._run_connection, f"fetch-{len(self._threads)}").start())
        except RuntimeError as error:
            log.warning("transfers: %d of %d connections: %s", len(self._threads), self.connections, error)
            return error
        return None

    def _run_connection(self) -> None:
        while True:
            with self._changed:
                job = None
                while not self._closed and job is None:
                    now = time.monotonic()
                    job, later = self._next_job(now)
                    if job is None:
                        self._changed.wait(None if later == float("inf") else max(0.001, later - now))
                if self._closed or job is None:
                    return
                self._num_running += 1
            transfer, byte_range, source = job
            try:
                if byte_range is None or source is None:
                    self._look_up(transfer)
                else:
                    self._request(transfer, byte_range, source)
            except Exception as error:  # noqa: BLE001 - the transfer's consumer gets it
                self._end(transfer, error)
            with self._changed:
                self._num_running -= 1
                if any(transfer.pending for transfer in self._active):
                    self._changed.notify_all()

    def _next_job(self, now: float) -> tuple[_Job | None, float]:
        """Return the next job, or when to look for one again. With the lock held."""
        soonest = float("inf")
        for transfer in self._active:
            if not transfer.is_looking_up and (transfer.pending or not transfer.sources):
                if transfer.next_lookup_at <= now:
                    transfer.is_looking_up = True
                    return (transfer, None, None), soonest
                soonest = min(soonest, transfer.next_lookup_at)
            only, remaining = transfer.only_source, transfer.remaining_sources()
            allowed = [source for source in remaining if only in (None, source.origin.url)]
            for index, byte_range in enumerate(transfer.pending if allowed else ()):
                if byte_range.not_before > now:
                    soonest = min(soonest, byte_range.not_before)
                    continue
                source, later = choose_source(allowed, now)
                if source is None:
                    soonest = min(soonest, later)
                    break
                del transfer.pending[index]
                source.active += 1
                return (transfer, byte_range, source), soonest
        return None, soonest

    def _look_up(self, transfer: PoolTransfer) -> None:
        """Check what an earlier run left, and ask the origins for their sources."""
        self._advance_check(transfer)
        if transfer.has_ended:
            return
        origin_of: dict[str, Origin] = {}
        fault: NetworkError | None = None
        for origin in transfer.origins:
            try:
                origin_of |= {source.url: source for source in origin.sources()}
            except NetworkError as error:
                transfer.reasons[origin.url] = str(error)
                fault = error
        with self._changed:
            now = time.monotonic()
            transfer.is_looking_up = False
            for url, origin in origin_of.items():
                stats = self._sources.setdefault(url, SourceStats(origin, float(self.connections)))
                transfer.sources[url] = stats
                transfer.origin_of[url] = stats.origin = origin
            if origin_of:
                transfer.next_lookup_at = now + LOOKUP_INTERVAL_S
                transfer.lookup_tries = 0
                self._changed.notify_all()
                return
            transfer.lookup_tries += 1
            transfer.attempts += 1
            transfer.next_lookup_at = now + self._backoff(transfer.lookup_tries)
        if self._is_timed_out(transfer, transfer.lookup_tries, now):
            self._end(transfer, transfer.timeout_error(now), fault)

    def _request(self, transfer: PoolTransfer, byte_range: ByteRange, source: SourceStats) -> None:
        """Send one request, for the rest of a range, and decide what its failure means."""
        url, began_at, first = source.origin.url, time.monotonic(), byte_range.offset
        fault: Exception | None = None
        try:
            transfer.receive(byte_range, source, self._advance_check)
        except Exception as error:  # noqa: BLE001 - handled below
            fault = error
        if isinstance(fault, ProtocolError):
            transfer.report_source(url, str(fault))
        now, num_bytes = time.monotonic(), byte_range.offset - first
        with self._changed:
            source.active -= 1
            self._counts["attempts"] += 1
            self._counts["bytes"] += num_bytes
            if num_bytes:
                source.record_speed(num_bytes, now - began_at)
            if fault is None:
                source.record_success(self.connections)
        if fault is None:
            return self._advance_check(transfer)
        with self._changed:
            self._counts["retries"] += 1
            transfer.attempts += 1
            transfer.reasons[url] = str(fault)
            not_before = now
            if isinstance(fault, (ProtocolError, PermanentError)):
                transfer.refused[url] = str(fault)
            elif isinstance(fault, TransientError) and fault.throttled:
                byte_range.tries += 1
                source.record_overload(now, began_at, fault.wait_s, self._backoff)
            elif isinstance(fault, NetworkError):
                source.record_failure(now, self._backoff)
                byte_range.tries += not num_bytes
                not_before = now if num_bytes else now + self._backoff(byte_range.tries)
            if isinstance(fault, NetworkError):
                transfer.return_range(byte_range, not_before)
            remaining = transfer.remaining_sources()
            others = [other.origin.url for other in remaining if other is not source]
            is_given_up = source not in remaining or byte_range.tries >= _MAX_TRIES_ALONE
        if not isinstance(fault, NetworkError):
            self._end(transfer, fault)
        elif not remaining:
            self._end(transfer, transfer.no_source_error(), fault)
        elif self._is_timed_out(transfer, byte_range.tries, now):
            self._end(transfer, transfer.timeout_error(now), fault)
        elif others and transfer.only_source == url and is_given_up:
            self._restart(transfer, others[0])

    def _backoff(self, times: int) -> float:
        return backoff_s(times, _FIRST_BACKOFF_S, self._max_backoff_s)

    def _is_timed_out(self, transfer: PoolTransfer, tries: int, now: float) -> bool:
        return tries >= self._tries and now - transfer.last_byte_at >= self._timeout_s

    def _advance_check(self, transfer: PoolTransfer) -> None:
        try:
            if transfer.file.advance_check():
                self._verify(transfer)
        except Exception as error:  # noqa: BLE001 - the transfer's consumer gets it
            self._end(transfer, error)

    def _verify(self, transfer: PoolTransfer) -> None:
        """Verify the complete file; end the transfer, or download the wrong parts again."""
        info, check = transfer.info, transfer.file.check
        if not isinstance(check, Sha256Check):
            if wrong := check.wrong():
                num_bytes = sum(stop - start for start, stop in wrong)
                log.warning("%s: %d bytes did not verify, fetching them again", info.name, num_bytes)
                return self._discard(transfer, wrong)
        elif check.hexdigest() != info.sha256:
            return self._handle_wrong_hash(transfer)
        else:
            for url, reason in transfer.find_culprits().items():
                self._accuse(transfer, url, reason)
        transfer.file.finish()
        self._end(transfer, None)

    def _handle_wrong_hash(self, transfer: PoolTransfer) -> None:
        if (liar := transfer.find_liar()) is not None:
            reason = f"sent {transfer.info.bytes} bytes that do not have the hash {transfer.info.sha256}"
            with self._changed:
                transfer.refused[liar] = reason
            self._accuse(transfer, liar, reason)
        with self._changed:
            remaining = transfer.remaining_sources()
            best = choose_source(remaining, time.monotonic())[0] or (remaining[0] if remaining else None)
        if best is None and transfer.refused:
            return self._end(transfer, transfer.no_source_error())
        self._restart(transfer, best.origin.url if best is not None else None)

    def _accuse(self, transfer: PoolTransfer, url: str, reason: str) -> None:
        with self._changed:
            if url in transfer.liars:
                return
            transfer.liars.add(url)
            self._sources[url].lies += 1
        transfer.report_source(url, reason)

    def _restart(self, transfer: PoolTransfer, only_source: str | None) -> None:
        log.warning("%s did not verify, fetching it again from %s", transfer.info.name, only_source or "all sources")
        with self._changed:
            transfer.only_source = only_source
        self._discard(transfer, [(0, transfer.info.bytes)])

    def _discard(self, transfer: PoolTransfer, ranges: list[tuple[int, int]]) -> None:
        transfer.file.forget(ranges)
        with self._changed:
            transfer.pending = [item for item in transfer.file.ranges if item.offset < item.stop]
            self._changed.notify_all()

    def _end(self, transfer: PoolTransfer, error: Exception | None, cause: Exception | None = None) -> None:
        """End a transfer, once; the errors of the disk become UsageError."""
        with self._changed:
            if transfer.has_ended:
                return
            transfer.has_ended = True
            if transfer in self._active:
                self._active.remove(transfer)
            self._counts["finished" if error is None else "failed"] += 1
            self._changed.notify_all()
        transfer.file.close()
        if isinstance(error, OSError):
            error, cause = disk_error(transfer.part, transfer.info.bytes, error), error
        if error is not None and cause is not None:
            error.__cause__ = cause
        transfer.finish(error)
