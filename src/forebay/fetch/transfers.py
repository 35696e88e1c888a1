"""Transfers of whole objects into files, by the runs of chunks of `engine.RunFetcher`.

The hashes of a slice's chunks come from its sources, or from the dataset's `chunks.sha256`. Other objects are verified
by a check of the caller. A killed transfer goes on with the chunks that are complete.
"""

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from forebay.arrays import I64
from forebay.dataset.manifest import SliceInfo
from forebay.errors import ForebayError, UsageError
from forebay.fetch.chunk_file import ABSENT, PRESENT, UNVERIFIED, ChunkFile, create, read_info
from forebay.fetch.engine import RunFetcher
from forebay.fetch.runs import ChunkRun, FetchState, Sources, TransferCancelledError, disk_error
from forebay.files import sync_file
from forebay.storage.base import log
from forebay.storage.retry import FIRST_S, log_while_waiting

Group = tuple[ChunkFile, I64]  # Chunks of a file.
RUN_BYTES = 8 << 20  # the longest request by default
_MIN_RUN_BYTES = 1 << 20
_PROGRESS_S = 0.1


class ChunkTransfer:
    """The absent chunks of a file, from all sources of an origin at once; `start` it.

    After its end nothing is written to the file.

    Args:
        chunks: To fetch, unless they are present: claimed, so that no other process fetches them; by default all.
        read_leaves: Returns the hashes of the chunks where no source has them; raises ForebayError.
        run_bytes: Bytes of a request; by default 1 to 8 MiB.
    """

    def __init__(
        self, fetcher: RunFetcher, entry: ChunkFile, info: SliceInfo, origin: Sources, *,
        chunks: I64 | None = None, read_leaves: Callable[[], bytes] = bytes, run_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.info, self._fetcher, self._entry = info, fetcher, entry
        self._end_state: Future[None] = Future()
        run_bytes = run_bytes or min(RUN_BYTES, max(_MIN_RUN_BYTES, -(-entry.info.bytes // fetcher.connections)))
        count = max(1, run_bytes // entry.chunk_bytes)
        chunks = np.arange(entry.layout.num_chunks) if chunks is None else chunks
        chunks = chunks[~np.isin(entry.marks[chunks], (PRESENT, UNVERIFIED))]
        starts = np.flatnonzero((np.diff(chunks) > 1) | (chunks[1:] % count == 0)) + 1
        state, self._order = FetchState(), -1
        self._lock = threading.RLock()  # guards all below
        self._base = entry.info.bytes - entry.bytes_of(chunks)
        self._runs = [
            ChunkRun(entry, info.name, origin, int(run[0]), int(run[-1]) + 1, read_leaves, self._end_run, state)
            for run in np.split(chunks, starts)
            if len(run)
        ]
        self._todo = self._runs[::-1]
        self._running: set[ChunkRun] = set()
        self._has_ended = False

    @property
    def received(self) -> int:
        """Bytes in the file, those of earlier runs included."""
        return self._base + sum(run.position - run.first * self._entry.chunk_bytes for run in self._runs)

    def start(self) -> Self:
        """Start to fetch; returns at once. Raises UsageError if the fetcher is closed, or of another process."""
        with self._lock:
            is_over = self._start_runs()
        if is_over:
            self._end(None)
        if isinstance(self.error, UsageError):
            raise self.error
        return self

    def run(self, stop: threading.Event, on_progress: Callable[[int], object] = lambda received: None) -> None:
        """Fetch, until `stop` is set; `on_progress` is called with the bytes received. Raises the transfer's error."""
        seen = -1

        def describe() -> str:
            nonlocal seen
            fetcher, now = self._fetcher, time.monotonic()
            before, seen = seen, fetcher.received_bytes
            if seen != before or now - fetcher.told_at < FIRST_S:  # Something came, or another transfer tells.
                return ""
            fetcher.told_at = now
            fault = fetcher.fault or "no response yet"
            return f"{self.info.name}: {self.received} of {self.info.bytes} bytes; {fault}"

        self.start()
        with log_while_waiting(log, describe):
            while not self.wait(_PROGRESS_S):
                on_progress(self.received)
                if stop.is_set():
                    self.cancel()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """End the transfer; what was received is kept. No effect after the end."""
        self._end(TransferCancelledError(self.info.name))

    @property
    def error(self) -> Exception | None:
        """None after the end: the file is complete and verified."""
        return cast(Exception | None, self._end_state.exception()) if self._end_state.done() else None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False after `timeout` seconds."""
        return bool(futures.wait([self._end_state], timeout).done)

    def _start_runs(self) -> bool:
        """Start as many runs as there are connections; return whether all have ended. With the lock held."""
        while self._todo and len(self._running) < self._fetcher.connections:
            run = self._todo.pop()
            run.order = self._order
            self._running.add(run)
            try:
                self._fetcher.start(run)
            except ForebayError as error:  # The fetcher may have been closed since the first run.
                was_closed = isinstance(error, UsageError) and self._order >= 0
                self._end(TransferCancelledError(self.info.name) if was_closed else error)
                return False
            self._order = run.order
        return not self._running

    def _end_run(self, run: ChunkRun, error: Exception | None) -> None:
        with self._lock:
            if self._has_ended or run not in self._running:
                return
            self._running.remove(run)
            is_over = error is None and self._start_runs()
        if is_over or error is not None:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            self._fetcher.cancel(self._running)
            self._base, self._runs, self._todo = self.received, [], []
        if isinstance(error, OSError) and not isinstance(error, ForebayError):
            error = disk_error(self._entry.path, self.info.bytes, error)
        self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        with suppress(InvalidStateError):  # It has ended before.
            self._end_state.set_exception(error) if error is not None else self._end_state.set_result(None)


class FileTransfer(ChunkTransfer):
    """A slice, or another object (`info.sha256` empty), into a file of its own; a map is beside it until its end.

    An existing file is resumed. Raises UsageError if it cannot be written. Arguments as of ChunkTransfer.
    """

    def __init__(self, fetcher: RunFetcher, info: SliceInfo, part: Path, origin: Sources, **settings: Any) -> None:
        try:
            entry = _open(part, info)
            self.part = part
        except OSError as error:
            raise disk_error(part, info.bytes, error) from error
        super().__init__(fetcher, entry, info, origin, **settings)

    def _finish(self, error: Exception | None) -> None:
        if error is None:
            try:
                sync_file(self.part)  # Without a map it counts as complete.
                self._entry.map_path.unlink(missing_ok=True)
            except OSError as fault:
                error = disk_error(self.part, self.info.bytes, fault)
        super()._finish(error)


def map_path_of(part: Path) -> Path:
    """The map of the chunks that a partial file has."""
    return part.with_name(f"{part.name}.map")


def _open(part: Path, info: SliceInfo) -> ChunkFile:
    """Open a partial file, or create it; without a map, one of the right size was complete before a kill."""
    map_path = map_path_of(part)
    has_size, has_map = part.is_file() and part.stat().st_size == info.bytes, map_path.is_file()
    mapped = read_info(map_path) if has_map else None
    if not (has_size and mapped is not None and (mapped.bytes, mapped.chunk_bytes) == (info.bytes, info.chunk_bytes)):
        create(part, map_path, info, UNVERIFIED if has_size and not has_map else ABSENT)
    entry = ChunkFile(part, map_path, info)
    if info.sha256:
        entry.verify(np.arange(entry.layout.num_chunks))
    return entry
