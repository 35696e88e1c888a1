"""Many connections that move slices from origins to disk, in order of start; verified before anybody hears of them.

A slice is fetched in pieces over all connections at once. Whatever breaks is asked for again from the byte where it
broke, with a back-off that doubles and jitters; a server that says it is too busy gets fewer connections, which grow
again as it answers. The hash runs in threads of its own, as far as bytes are contiguous, so that it ends when the
last byte comes. Whose bytes are wrong is known only of one source that gave them all: a slice that came from several
and is wrong is fetched anew from one alone, and what differs then names the culprit.

Memory: `connections` x 256 KiB (2 MiB where a source is a peer), 256 KiB a hashing thread, 200 bytes a piece.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias

from forebay.dataset.manifest import SliceInfo
from forebay.errors import NetworkError, ProtocolViolation, UsageError
from forebay.network.retry import backoff_s
from forebay.storage.base import Origin, PermanentError, TransientError
from forebay.storage.part_file import ByteRange, Check, PartFile, Sha256Check, disk_error
from forebay.storage.transfer_state import (
    Backoff,
    OnSourceFault,
    PoolTransfer,
    SourceStats,
    TransferCancelledError,
    Work,
    choose_source,
    min_range_bytes,
)
from forebay.threads import Supervised

_AHEAD_BYTES = 1 << 20  # less is not worth waking a thread for

PIECE_BYTES = 8 << 20
_CLOSE_S = 1.0
_TURN_TRIES = 3  # of a source that is asked alone, before another is
log = logging.getLogger("forebay.storage")
_Job: TypeAlias = tuple[Work, ByteRange, SourceStats | None]


class Transfers:
    """A pool of connections. Threads share it; it belongs to the process that made it.

    Args:
        connections: Requests under way at once, each a thread.
        piece_bytes: What is resumed after a kill as a whole, and the most asked for in one request; a power of two.
        timeout_s, tries: A transfer fails when no byte came for so long and one place was tried so often.
        first_backoff_s, max_backoff_s: Before the second try of a place, and at most; times 0.5 to 1.5 by chance.
        hedge_s: An idle connection takes over from one that got no byte for so long, and for three times as long as its
            source usually takes, once a place.
        hashers: Threads that hash, each some 1.5 GB/s; by default one a processor, 2 to 4.
    """

    def __init__(
        self,
        connections: int = 16,
        piece_bytes: int = PIECE_BYTES,
        *,
        timeout_s: float = 300.0,
        tries: int = 6,
        first_backoff_s: float = 0.2,
        max_backoff_s: float = 15.0,
        hedge_s: float = 5.0,
        hashers: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        hashers = min(4, max(2, os.cpu_count() or 1)) if hashers is None else hashers
        if connections < 1 or hashers < 1 or tries < 1:
            raise UsageError(f"transfers: expected at least one connection, hasher and try, got {connections=}")
        if piece_bytes < 1 << 16 or piece_bytes & (piece_bytes - 1):
            raise UsageError(f"piece_bytes: expected a power of two from 65536 on, got {piece_bytes}")
        self.connections = connections
        self.piece_bytes = piece_bytes
        self._timeout_s = timeout_s
        self._tries = tries
        self._hedge_s = hedge_s
        self._pid = os.getpid()
        self._clock = clock
        self._backoff: Backoff = partial(backoff_s, first_s=first_backoff_s, max_s=max_backoff_s, chance=chance)
        self._changed = threading.Condition()
        self._active: list[Work] = []
        self._known: dict[str, SourceStats] = {}
        self._to_hash: SimpleQueue[Work | None] = SimpleQueue()
        self._hashers = [Supervised(self._hash, f"hash-{i}") for i in range(hashers)]
        self._threads: list[Supervised] = []
        self._idle = 0
        self._counts = dict.fromkeys(("bytes", "attempts", "retries", "finished", "failed"), 0)
        self._closed = False

    def start(
        self,
        info: SliceInfo,
        part: Path,
        origins: Sequence[Origin],
        on_source_fault: OnSourceFault | None = None,
        *,
        span_bytes: int = 0,
        check: Check | None = None,
    ) -> PoolTransfer:
        """Fetch a slice into `part`; what an earlier run left there is resumed. Earlier transfers go first.

        `on_source_fault` is called from another thread with a source that gave wrong bytes or broke the protocol.
        `span_bytes` and `check` are as of PartFile; with a check, `info.sha256` is not looked at.
        """
        if os.getpid() != self._pid:
            raise UsageError("transfers: expected the process that made them, got a fork of it. Make new ones there.")
        if not origins:
            raise UsageError(f"fetch {info.name}: expected at least one origin, got none.")
        now, least = self._clock(), min_range_bytes(list(self._known.values()) if self._active else ())
        file = PartFile(part, info.bytes, self.piece_bytes, self.connections, least, span_bytes=span_bytes, check=check)
        work = Work(info, file, list(origins), on_source_fault, now, now)
        transfer = PoolTransfer(info, part, work)
        work.finished = transfer.finish
        try:
            file.open()
        except OSError as error:
            self._end(work, error)
            return transfer
        work.pending = [span for span in file.spans if span.at < span.stop]
        with self._changed:
            if self._closed:
                file.close()
                raise UsageError("transfers: closed; no more can be started.")
            self._active.append(work)
            fault = self._grow(len(work.pending))
            self._changed.notify_all()
        if fault is not None and not self._threads:  # nobody would ever ask for it
            self._end(work, NetworkError(f"{info.name}: no thread to fetch it with: {fault}"), fault)
        self._look(work)
        return transfer

    def cancel(self, transfer: PoolTransfer) -> None:
        """Give a transfer up; its part stays for a later run. No harm if it ended."""
        self._end(transfer._work, TransferCancelledError.of(transfer.info))

    def close(self) -> None:
        """Cancel all transfers and end the threads; one that waits for a dead peer ends later. May be repeated."""
        if os.getpid() != self._pid:
            return  # A fork's: the threads stayed behind, and whatever they had locked is locked here for ever.
        with self._changed:
            self._closed = True
            active = list(self._active)
            self._changed.notify_all()
        for work in active:
            self._end(work, TransferCancelledError.of(work.info))
        for _ in self._hashers:
            self._to_hash.put(None)
        until = time.monotonic() + _CLOSE_S
        for thread in [*self._threads, *self._hashers]:
            thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Transfers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def stats(self) -> dict[str, int]:
        """`bytes`, `attempts`, `retries`, `finished` and `failed`."""
        with self._changed:
            return dict(self._counts)

    def _grow(self, wanted: int) -> RuntimeError | None:
        """Start threads as they are needed; why there are fewer, if the process cannot have more now."""
        try:
            for thread in self._hashers if not self._threads else ():
                if not thread.is_alive:
                    thread.start()
            while len(self._threads) < min(self.connections, len(self._threads) - self._idle + max(wanted, 1)):
                self._threads.append(Supervised(self._work, f"fetch-{len(self._threads)}").start())
                self._idle += 1
        except RuntimeError as error:
            log.warning("transfers: %d of %d connections: %s", len(self._threads), self.connections, error)
            return error
        return None

    def _work(self) -> None:
        """A worker: takes the first span that may be asked for, and asks."""
        while True:
            with self._changed:
                while not self._closed:
                    now = self._clock()
                    job, later = self._next(now)
                    if job is not None:
                        break
                    self._changed.wait(None if later == float("inf") else max(0.001, later - now))
                if self._closed:
                    return
                assert job is not None
                self._idle -= 1
            work, span, source = job
            try:
                if source is None:
                    self._look_up(work)
                else:
                    self._ask(work, span, source)
            except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
                self._end(work, error)
            finally:
                with self._changed:
                    self._idle += 1
                    if any(work.pending for work in self._active):
                        self._changed.notify_all()

    def _next(self, now: float) -> tuple[_Job | None, float]:
        """The next thing to do, or when to look again. With the lock held."""
        soonest = float("inf")
        for work in self._active:
            if work.needs_lookup(now):
                if work.lookup.not_before <= now:
                    work.looking = True
                    return (work, work.lookup, None), soonest
                soonest = min(soonest, work.lookup.not_before)
            allowed = work.allowed()
            if not allowed:
                continue
            for index, span in enumerate(work.pending):
                if span.not_before > now:
                    soonest = min(soonest, span.not_before)
                    continue
                source, later = choose_source(allowed, now)
                if source is None:
                    soonest = min(soonest, later)
                    break
                del work.pending[index]
                return self._take(work, span, source, now), soonest
        return self._hedge(now, soonest)

    def _hedge(self, now: float, soonest: float) -> tuple[_Job | None, float]:
        """Nothing else is to do: a span that is stuck, if another request may be sent. With the lock held."""
        for work in self._active:
            for span, source in work.flying.items():
                if not span.taken_over:
                    soonest = min(soonest, span.byte_at + source.late_s(self._hedge_s))
            other, _ = choose_source(work.allowed(), now)
            if other is not None and (rest := work.stuck(now, self._hedge_s)) is not None:
                return self._take(work, rest, other, now), soonest
        return None, soonest

    def _take(self, work: Work, span: ByteRange, source: SourceStats, now: float) -> _Job:
        source.active += 1
        span.byte_at = now
        work.flying[span] = source
        return work, span, source

    def _look_up(self, work: Work) -> None:
        """Find who stands behind the origins."""
        found: dict[str, Origin] = {}
        fault: NetworkError | None = None
        for origin in work.origins:
            try:
                found.update({source.url: source for source in origin.sources()})
            except NetworkError as error:
                work.reasons[origin.url] = str(error)
                fault = error
        with self._changed:
            now = self._clock()
            work.looking = False
            for url, origin in found.items():
                source = self._known.setdefault(url, SourceStats(origin, float(self.connections)))
                source.origin = origin
                work.sources[url], work.found[url] = source, origin
            if found:
                work.looked_at = now
                work.lookup.tries = 0
                self._changed.notify_all()
                return
            work.lookup.tries += 1
            work.attempts += 1
            work.lookup.not_before = now + self._backoff(work.lookup.tries)
        if self._is_hopeless(work, work.lookup, now):
            self._end(work, work.unreachable(now), fault)

    def _ask(self, work: Work, span: ByteRange, source: SourceStats) -> None:
        """One request: from where the span broke off to its end."""
        began_at, first = self._clock(), span.at
        fault: Exception | None = None
        try:
            work.receive(span, source, self._clock, self._look)
        except Exception as error:  # noqa: BLE001 - what follows from it is settled below
            fault = error
        now, got = self._clock(), span.at - first
        with self._changed:
            source.active -= 1
            work.flying.pop(span, None)
            self._counts["attempts"] += 1
            self._counts["bytes"] += got
            if got:
                source.answered(got, now - began_at)
            if fault is None:
                source.finished(self.connections)
                return
            self._counts["retries"] += 1
            work.attempts += 1
        self._settle(work, span, source, fault, began_at, got)

    def _settle(
        self, work: Work, span: ByteRange, source: SourceStats, fault: Exception, began_at: float, got: int
    ) -> None:
        """What follows from a failed request."""
        url, now = source.origin.url, self._clock()
        if not isinstance(fault, NetworkError):
            return self._end(work, fault)
        if isinstance(fault, ProtocolViolation):
            work.tell(work.found[url], str(fault))
        with self._changed:
            work.reasons[url] = str(fault)
            not_before = now
            if isinstance(fault, (ProtocolViolation, PermanentError)):
                work.refused[url] = str(fault)
            elif isinstance(fault, TransientError) and fault.throttled:
                span.tries += 1
                source.throttle(now, began_at, fault.wait_s, self._backoff)
            else:
                source.failed(now, self._backoff)
                span.tries += not got
                not_before = now if got else now + self._backoff(span.tries)
            work.put_back(span, not_before)
            left = work.left()
            others = [other.origin.url for other in left if other is not source]
            turn = bool(others) and work.alone == url and (source not in left or span.tries >= _TURN_TRIES)
            if turn:
                work.alone = others[0]
        if not left:
            self._end(work, work.nobody(), fault)
        elif self._is_hopeless(work, span, now):
            self._end(work, work.unreachable(now), fault)
        elif turn:
            self._restart(work, others[0])

    def _is_hopeless(self, work: Work, span: ByteRange, now: float) -> bool:
        return span.tries >= self._tries and now - work.byte_at >= self._timeout_s

    def _look(self, work: Work) -> None:
        """Have a thread hash on, if none does and there is enough, or the end."""
        file = work.file
        if work.hashing:
            return
        with file.lock:
            ready = file.contiguous() - file.checked
            if work.hashing or (ready < _AHEAD_BYTES and file.checked + ready < file.num_bytes):
                return
            work.hashing = True
        self._to_hash.put(work)

    def _hash(self) -> None:
        """A hashing thread; one at a file."""
        while (work := self._to_hash.get()) is not None:
            try:
                if work.file.check_on():
                    self._judge(work)
            except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
                self._end(work, error)
            finally:
                work.hashing = False
            if work.file.is_open:
                self._look(work)

    def _judge(self, work: Work) -> None:
        """All bytes are there: are they the right ones?"""
        info = work.info
        if not isinstance(work.file.check, Sha256Check):
            return self._judge_checked(work, work.file.check)
        if work.file.check.hexdigest() == info.sha256:
            for url, reason in work.culprits().items():
                self._blame(work, url, reason)
            work.file.finish()
            return self._end(work, None)
        if (liar := work.suspect()) is not None:
            reason = f"gave {info.bytes} bytes that do not have the hash {info.sha256}"
            with self._changed:
                work.refused[liar] = reason
            self._blame(work, liar, reason)
        with self._changed:
            left = work.left()
            best = choose_source(left, self._clock())[0] or (left[0] if left else None)
        if best is None and work.refused:
            return self._end(work, work.nobody())
        self._restart(work, best.origin.url if best is not None else None)

    def _judge_checked(self, work: Work, check: Check) -> None:
        if not (wrong := check.wrong()):
            work.file.finish()
            return self._end(work, None)
        log.warning("%s: %d bytes did not verify, fetching them anew", work.info.name, sum(b - a for a, b in wrong))
        work.file.forget(wrong)
        with self._changed:
            work.pending = [span for span in work.file.spans if span.at < span.stop]
            self._changed.notify_all()

    def _blame(self, work: Work, url: str, reason: str) -> None:
        with self._changed:
            if url in work.liars:
                return
            work.liars.add(url)
            source = self._known[url]
            source.lies += 1
        work.tell(work.found[url], reason)

    def _restart(self, work: Work, alone: str | None) -> None:
        """Fetch all of it anew, from one source if it says which."""
        log.warning("%s: its bytes did not verify, fetching it anew from %s", work.info.name, alone or "all")
        try:
            work.file.restart()
        except OSError as error:
            return self._end(work, error)
        with self._changed:
            work.alone = alone
            work.pending = list(work.file.spans)
            self._changed.notify_all()

    def _end(self, work: Work, error: Exception | None, cause: Exception | None = None) -> None:
        """The one way in which a transfer ends; the first end counts. The disk's errors are told as ours."""
        with self._changed:
            if work.ended:
                return
            work.ended = True
            if work in self._active:
                self._active.remove(work)
            self._counts["finished" if error is None else "failed"] += 1
            self._changed.notify_all()
        work.file.close()
        if isinstance(error, OSError):
            error, cause = disk_error(work.file.path, work.info.bytes, error), error
        if error is not None and cause is not None:
            error.__cause__ = cause
        work.finished(error)
