"""Many connections that move slices from origins to disk, in order of start; verified before anybody hears of them.

A slice is fetched in pieces over all connections at once. Whatever breaks is asked for again from the byte where it
broke, with a back-off that doubles and jitters; a server that says it is too busy gets fewer connections, which grow
again as it answers. The hash runs in threads of its own, as far as bytes are contiguous, so that it ends when the
last byte comes. Whose bytes are wrong is known only of one source that gave them all: a slice that came from several
and is wrong is fetched anew from one alone, and what differs then names the culprit.

Memory: `connections` x 256 KiB (2 MiB where a source is a peer), 256 KiB a hashing thread, 200 bytes a piece.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from bisect import insort
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from millrace.dataset.manifest import SliceInfo
from millrace.errors import IntegrityError, NetworkError, ProtocolViolation, UsageError
from millrace.store.origins import Origin, PassingError, RefusedError
from millrace.store.pieces import EARLIER, PartFile, Span
from millrace.store.sources import Backoff, Source, choose

PIECE_BYTES = 8 << 20
OnBad = Callable[[Origin, str], None]
_HASH_AHEAD = 1 << 20
_REFRESH_S = 15.0
_TURN_TRIES = 3  # of a source that is asked alone, before another is asked alone
_CLOSE_S = 1.0
log = logging.getLogger("millrace.store")


class TransferCancelledError(NetworkError):
    """A transfer was given up by whoever started it."""


class Transfer:
    """One slice on its way. Made by `Transfers.start`.

    Attributes:
        done: Set when it ended, well or not; from then on nothing is written to `part`.
        error: Why it failed, or None. Without one, `part` is whole, verified, synced and exactly `info.bytes` long.
    """

    def __init__(self, info: SliceInfo, part: Path, file: PartFile, origins: Sequence[Origin], on_bad: OnBad | None):
        self.info = info
        self.part = part
        self.done = threading.Event()
        self.error: Exception | None = None
        self._file = file
        self._origins = list(origins)
        self._on_bad = on_bad
        self._callbacks: list[Callable[[Transfer], None]] = []
        # Below: the scheduling of `Transfers`, under its lock.
        self._pending: list[Span] = []
        self._sources: dict[str, Source] = {}
        self._refused: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._liars: set[str] = set()
        self._alone: str | None = None
        self._suspects: list[tuple[int, int, str, bytes]] = []
        self._lookup = Span(0, 0, 0, 0)
        self._looking = False
        self._looked_at = float("-inf")
        self._hashing = False
        self._ended = False
        self._attempts = 0
        self._began_at = 0.0
        self._byte_at = 0.0

    @property
    def received(self) -> int:
        """Bytes on disk so far, those of an earlier run included."""
        return self._file.received

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it ended; whether it did in time."""
        return self.done.wait(timeout)

    def on_done(self, callback: Callable[[Transfer], None]) -> None:
        """Call back once when it ended, from another thread; at once if it has."""
        with self._file.lock:
            if not self.done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def _may_ask(self, url: str) -> bool:
        return url not in self._refused and self._alone in (None, url)

    def _tell(self, origin: Origin, reason: str) -> None:
        log.warning("%s: %s", origin.url, reason)
        if self._on_bad is not None:
            self._on_bad(origin, reason)

    def _told(self) -> str:
        return "; ".join(f"{url}: {why}" for url, why in (self._reasons | self._refused).items())

    def _nobody(self) -> NetworkError:
        kind = IntegrityError if self._liars else NetworkError
        return kind(
            f"slice {self.info.name} ({self.info.sha256[:12]}…): expected {self.info.bytes} bytes that verify, got "
            f"none from {len(self._refused)} sources. {self._told()}. Check the origin, or add one that has it."
        )

    def _unreachable(self, now: float) -> NetworkError:
        return NetworkError(
            f"slice {self.info.name} ({self.info.sha256[:12]}…): got {self.received} of {self.info.bytes} bytes, then "
            f"none for {now - self._byte_at:.1f} s: {self._attempts} failed attempts in "
            f"{now - self._began_at:.1f} s. {self._told()}. Check the network and the endpoint; what was fetched is "
            "kept and resumed."
        )


class Transfers:
    """A pool of connections. Threads share it; it belongs to the process that made it.

    Args:
        connections: Requests under way at once, each a thread.
        piece_bytes: What is resumed after a kill as a whole, and the most asked for in one request; a power of two.
        patience_s, tries: A transfer fails when no byte came for so long and one place was tried so often.
        backoff_s, max_backoff_s: Before the second try of a place, and at most; times 0.5 to 1.5 by chance.
        hashers: Threads that hash.
        clock, chance: Time and chance, as arguments.
    """

    def __init__(
        self,
        connections: int = 16,
        piece_bytes: int = PIECE_BYTES,
        *,
        patience_s: float = 300.0,
        tries: int = 6,
        backoff_s: float = 0.2,
        max_backoff_s: float = 15.0,
        hashers: int = 2,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        if connections < 1 or hashers < 1 or tries < 1:
            raise UsageError(f"transfers: expected at least one connection, hasher and try, got {connections=}")
        if piece_bytes < 1 << 16 or piece_bytes & (piece_bytes - 1):
            raise UsageError(f"piece_bytes: expected a power of two from 65536 on, got {piece_bytes}")
        self.connections = connections
        self.piece_bytes = piece_bytes
        self._patience_s = patience_s
        self._tries = tries
        self._num_hashers = hashers
        self._clock = clock
        self._backoff = Backoff(backoff_s, max_backoff_s, chance or random.Random())
        self._changed = threading.Condition()
        self._active: list[Transfer] = []
        self._known: dict[str, Source] = {}
        self._to_hash: SimpleQueue[Transfer | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_workers = 0
        self._idle = 0
        self._counts = {"bytes": 0, "attempts": 0, "retries": 0, "finished": 0, "failed": 0}
        self._closed = False

    def start(self, info: SliceInfo, part: Path, origins: Sequence[Origin], on_bad: OnBad | None = None) -> Transfer:
        """Fetch a slice into `part`; what an earlier run left there is resumed. Earlier transfers go first.

        Args:
            on_bad: Told, from another thread, of a source that gave wrong bytes or broke the protocol, and why.

        Raises:
            UsageError: If the pool is closed or there is no origin.
        """
        if not origins:
            raise UsageError(f"fetch {info.name}: expected at least one origin, got none.")
        file = PartFile(part, info.bytes, self.piece_bytes, self.connections)
        transfer = Transfer(info, part, file, origins, on_bad)
        try:
            file.open()
        except OSError as error:
            self._end(transfer, disk_error(part, info.bytes, error))
            return transfer
        transfer._pending = [span for span in file.spans if span.at < span.stop]
        transfer._began_at = transfer._byte_at = self._clock()
        with self._changed:
            if self._closed:
                file.close()
                raise UsageError("transfers: closed; no more can be started.")
            self._active.append(transfer)
            self._grow(len(transfer._pending))
            self._changed.notify_all()
        self._hash(transfer)
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """Give a transfer up; its part stays for a later run. No harm if it ended."""
        self._end(transfer, TransferCancelledError(f"{transfer.info.name}: the transfer was cancelled"))

    def close(self) -> None:
        """Cancel all transfers and end the threads; one that waits for a dead peer ends later. May be repeated."""
        with self._changed:
            self._closed = True
            active = list(self._active)
            self._changed.notify_all()
        for transfer in active:
            self.cancel(transfer)
        for _ in range(self._num_hashers):
            self._to_hash.put(None)
        until = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Transfers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """`bytes`, `attempts`, `retries`, `finished`, `failed`, and of each source by URL what it gave and how fast."""
        with self._changed:
            return {**self._counts, "sources": {url: source.to_json() for url, source in self._known.items()}}

    def _grow(self, wanted: int) -> None:
        if not self._threads:
            for i in range(self._num_hashers):
                self._spawn(self._hash_loop, f"hash-{i}")
        while self._num_workers < min(self.connections, self._num_workers - self._idle + max(wanted, 1)):
            self._spawn(self._work, f"fetch-{self._num_workers}")
            self._num_workers += 1
            self._idle += 1

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # A worker: takes the first span that may be asked for, and asks.

    def _work(self) -> None:
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
            transfer, span, source = job
            try:
                if source is None:
                    self._look_up(transfer)
                else:
                    self._ask(transfer, span, source)
            except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
                self._end(transfer, error)
            with self._changed:
                self._idle += 1
                self._changed.notify_all()

    def _next(self, now: float) -> tuple[tuple[Transfer, Span, Source | None] | None, float]:
        """The next thing to do, or when to look again. With the lock held."""
        soonest = float("inf")
        for transfer in self._active:
            stale = now - transfer._looked_at >= _REFRESH_S and (transfer._pending or not transfer._sources)
            if stale and not transfer._looking:
                if transfer._lookup.not_before <= now:
                    transfer._looking = True
                    return (transfer, transfer._lookup, None), soonest
                soonest = min(soonest, transfer._lookup.not_before)
            allowed = [source for url, source in transfer._sources.items() if transfer._may_ask(url)]
            if not allowed:
                continue
            for index, span in enumerate(transfer._pending):
                if span.not_before > now:
                    soonest = min(soonest, span.not_before)
                    continue
                source, later = choose(allowed, now)
                if source is None:
                    soonest = min(soonest, later)
                    break
                del transfer._pending[index]
                source.active += 1
                return (transfer, span, source), soonest
        return None, soonest

    def _look_up(self, transfer: Transfer) -> None:
        """Find who stands behind the origins."""
        found: dict[str, Origin] = {}
        fault: NetworkError | None = None
        for origin in transfer._origins:
            try:
                found.update({source.url: source for source in origin.sources()})
            except ProtocolViolation as error:
                transfer._reasons[origin.url] = str(error)
            except NetworkError as error:
                transfer._reasons[origin.url] = str(error)
                fault = error
        with self._changed:
            now = self._clock()
            transfer._looking = False
            for url, origin in found.items():
                source = self._known.setdefault(url, Source(origin, float(self.connections)))
                source.origin = origin
                transfer._sources[url] = source
            if found:
                transfer._looked_at = now
                transfer._lookup.tries = 0
                return
            transfer._lookup.tries += 1
            transfer._attempts += 1
            transfer._lookup.not_before = now + self._backoff.after(transfer._lookup.tries)
            failed = self._is_hopeless(transfer, transfer._lookup, now)
        if failed:
            self._end(transfer, transfer._unreachable(self._clock()), fault)

    def _ask(self, transfer: Transfer, span: Span, source: Source) -> None:
        """One request: from where the span broke off to its end."""
        began_at, first = self._clock(), span.at
        fault: Exception | None = None
        try:
            self._receive(transfer, span, source)
        except (NetworkError, OSError) as error:
            fault = error
        now, got = self._clock(), span.at - first
        with self._changed:
            source.active -= 1
            source.attempts += 1
            source.bytes += got
            self._counts["attempts"] += 1
            self._counts["bytes"] += got
            if got:
                source.answered(got, now - began_at)
            if fault is None:
                source.finished(self.connections)
                return
            source.failures += 1
            self._counts["retries"] += 1
            transfer._attempts += 1
        self._settle(transfer, span, source, fault, began_at, got)

    def _receive(self, transfer: Transfer, span: Span, source: Source) -> None:
        file, url, start = transfer._file, source.origin.url, span.at
        body = source.origin.read(transfer.info.name, span.at, span.stop)
        try:
            for data in body:
                if len(data) > span.stop - span.at:
                    raise ProtocolViolation(f"{url}: gave more than the {span.stop - start} bytes asked for")
                if not file.write(span, data, url):
                    return
                span.tries = 0
                transfer._byte_at = self._clock()
                if not transfer._hashing:
                    self._hash(transfer)
        finally:
            if isinstance(body, Generator):
                body.close()
        if span.at < span.stop:
            raise PassingError(f"the body ended at byte {span.at - start} of {span.stop - start}")

    def _settle(
        self, transfer: Transfer, span: Span, source: Source, fault: Exception, began_at: float, got: int
    ) -> None:
        """What follows from a failed request."""
        url, now = source.origin.url, self._clock()
        if isinstance(fault, OSError):
            return self._end(transfer, disk_error(transfer.part, transfer.info.bytes, fault), fault)
        if isinstance(fault, ProtocolViolation):
            transfer._tell(source.origin, str(fault))
        with self._changed:
            transfer._reasons[url] = str(fault)
            wait_s = 0.0
            if isinstance(fault, (ProtocolViolation, RefusedError)):
                transfer._refused[url] = str(fault)
            elif isinstance(fault, PassingError) and fault.throttled:
                source.throttle(now, began_at, fault.wait_s, self._backoff)
                span.tries += 1
            elif not got:
                span.tries += 1
                source.failed(now, self._backoff)
                wait_s = self._backoff.after(span.tries)
            if not transfer._file.is_current(span):
                return  # begun anew meanwhile
            span.not_before = now + wait_s
            insort(transfer._pending, span, key=lambda span: span.start)
            hopeless = self._is_hopeless(transfer, span, now)
            others = [url for url in transfer._sources if url not in transfer._refused]
            turn = transfer._alone == url and (url in transfer._refused or span.tries >= _TURN_TRIES)
            if turn and others and others != [url]:
                transfer._alone = next(other for other in others if other != url)
        if not others:
            self._end(transfer, transfer._nobody(), fault)
        elif hopeless:
            self._end(transfer, transfer._unreachable(now), fault)
        elif turn and transfer._alone != url:
            self._restart(transfer, transfer._alone)

    def _is_hopeless(self, transfer: Transfer, span: Span, now: float) -> bool:
        return span.tries >= self._tries and now - transfer._byte_at >= self._patience_s

    # Hashing, and what follows from the hash.

    def _hash(self, transfer: Transfer) -> None:
        """Have a hasher look at it, if there is enough to hash and none does."""
        file = transfer._file
        with file.lock:
            ready = file.contiguous() - file.hashed
            if transfer._hashing or (ready < _HASH_AHEAD and file.hashed + ready < file.num_bytes):
                return
            transfer._hashing = True
        self._to_hash.put(transfer)

    def _hash_loop(self) -> None:
        while (transfer := self._to_hash.get()) is not None:
            try:
                whole = transfer._file.hash_on()
                if whole:
                    self._judge(transfer)
            except OSError as error:
                self._end(transfer, disk_error(transfer.part, transfer.info.bytes, error), error)
            except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
                self._end(transfer, error)
            transfer._hashing = False
            if not transfer._ended:
                self._hash(transfer)

    def _judge(self, transfer: Transfer) -> None:
        """All bytes are there: are they the right ones?"""
        file, info = transfer._file, transfer.info
        if file.hexdigest() == info.sha256:
            for start, stop, url, digest in transfer._suspects:
                if digest != file.digest_of(start, stop):
                    self._blame(transfer, url, f"gave wrong bytes in [{start}, {stop}) of {info.name}")
            file.finish()
            return self._end(transfer, None)
        given = {url for span in file.spans for url in span.sources}
        if len(given) == 1 and EARLIER not in given:
            (url,) = given
            transfer._refused[url] = f"gave {info.bytes} bytes that do not have the hash {info.sha256}"
            self._blame(transfer, url, transfer._refused[url])
        else:
            transfer._suspects += [
                (span.start, span.stop, span.sources[0], file.digest_of(span.start, span.stop))
                for span in file.spans
                if len(span.sources) == 1 and span.sources[0] != EARLIER
            ]
        with self._changed:
            left = [source for url, source in transfer._sources.items() if url not in transfer._refused]
            best = choose(left, self._clock())[0] or (left[0] if left else None)
        if best is None:
            return self._end(transfer, transfer._nobody())
        self._restart(transfer, best.origin.url)

    def _blame(self, transfer: Transfer, url: str, reason: str) -> None:
        if url in transfer._liars:
            return
        with self._changed:
            transfer._liars.add(url)
            source = self._known[url]
            source.lies += 1
        transfer._tell(source.origin, reason)

    def _restart(self, transfer: Transfer, alone: str | None) -> None:
        """Fetch all of it anew, from one source."""
        log.warning("%s: fetched anew, from %s alone", transfer.info.name, alone)
        try:
            transfer._file.restart()
        except OSError as error:
            return self._end(transfer, disk_error(transfer.part, transfer.info.bytes, error), error)
        with self._changed:
            transfer._alone = alone
            transfer._pending = list(transfer._file.spans)
            self._changed.notify_all()

    def _end(self, transfer: Transfer, error: Exception | None, cause: Exception | None = None) -> None:
        """The one way in which a transfer ends; the first end counts."""
        with self._changed:
            if transfer._ended:
                return
            transfer._ended = True
            if transfer in self._active:
                self._active.remove(transfer)
            self._counts["finished" if error is None else "failed"] += 1
            self._changed.notify_all()
        transfer._file.close()
        if error is not None and cause is not None:
            error.__cause__ = cause
        transfer.error = error
        with transfer._file.lock:
            transfer.done.set()
            callbacks = transfer._callbacks
        for callback in callbacks:
            try:
                callback(transfer)
            except Exception:
                log.exception("%s: what was to be called when it ended failed", transfer.info.name)


def disk_error(part: Path, num_bytes: int, error: OSError) -> UsageError:
    """A fault of the disk as ours; what was written stays for a later run."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UsageError(
            f"{part}: expected room for {num_bytes} bytes, got: {error.strerror}. Free space there, lower the "
            "cache's budget, or choose another directory; what was fetched is kept and resumed."
        )
    return UsageError(f"{part}: cannot be written: {error}. Check the directory and its permissions.")
