"""Transfers of whole objects into files, by the runs of chunks of `engine.RunFetcher`.

The hashes of a slice's chunks come from its sources, or from the dataset's `chunks.sha256`. Where no source has them, a
slice comes from one source at a time, and all of it is verified at the end. Other objects are verified by a check of
the caller. A killed transfer goes on with the chunks that are complete.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from forebay.arrays import I64
from forebay.dataset.chunks import HASH_BYTES, root_of
from forebay.dataset.manifest import SliceInfo
from forebay.errors import ForebayError, NetworkError, UsageError
from forebay.fetch.chunk_file import ABSENT, PRESENT, UNVERIFIED, ChunkFile, create, read_info
from forebay.fetch.engine import ChunkRun, FetchState, RunFetcher, TransferCancelledError, disk_error
from forebay.files import sync_file
from forebay.storage.base import Origin, log

Group = tuple[ChunkFile, I64]  # Chunks of a file.
RUN_BYTES = 8 << 20  # the longest request by default
_MIN_RUN_BYTES = 1 << 20
_PROGRESS_S = 0.1
OnWrong = Callable[[Origin, str], object]


class Transfer(ABC):
    """The download of one slice into the file `part`; after its end, nothing is written to it."""

    def __init__(self, info: SliceInfo, part: Path) -> None:
        self.info = info
        self.part = part
        self._end_state: Future[None] = Future()

    @property
    @abstractmethod
    def received(self) -> int:
        """Bytes in the file, those of earlier runs included."""

    @abstractmethod
    def cancel(self) -> None:
        """End the transfer soon; what was received is kept. No effect after the end."""

    @property
    def error(self) -> Exception | None:
        """None after the end: `part` is complete and verified."""
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


class ChunkTransfer(Transfer):
    """The absent chunks of a file, from several origins at once; `start` it.

    Args:
        chunks: To fetch, unless they are present: claimed, so that no other process fetches them; by default all.
        read_leaves: Returns the hashes of the chunks where no source has them; raises ForebayError.
        on_wrong: Called from another thread with a source that sent wrong bytes or broke the protocol.
        run_bytes: Bytes of a request; by default 1 to 8 MiB.
    """

    def __init__(
        self, fetcher: RunFetcher, entry: ChunkFile, info: SliceInfo, origins: Sequence[Origin], *,
        chunks: I64 | None = None, read_leaves: Callable[[], bytes] | None = None, on_wrong: OnWrong | None = None,
        run_bytes: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(info, entry.path)
        self.url = ", ".join(origin.url for origin in origins)
        self._fetcher, self._entry, self._origins = fetcher, entry, origins
        self._read_leaves, self._on_wrong = read_leaves, on_wrong or (lambda source, reason: None)
        run_bytes = run_bytes or min(RUN_BYTES, max(_MIN_RUN_BYTES, -(-entry.info.bytes // fetcher.connections)))
        self._run_chunks = max(1, run_bytes // entry.chunk_bytes)
        chunks = np.arange(entry.layout.num_chunks) if chunks is None else chunks
        self._chunks = chunks[~np.isin(entry.marks[chunks], (PRESENT, UNVERIFIED))]
        self._mark = int(entry.marks[self._chunks[0]]) if len(self._chunks) else ABSENT
        self._state, self._order = FetchState(), -1
        self._lock = threading.RLock()  # guards all below
        self._only: Origin | None = None  # the source of a slice whose hashes are not available
        self._runs: list[ChunkRun] = []
        self._todo: list[ChunkRun] = []
        self._running: set[ChunkRun] = set()
        self._base = entry.info.bytes - entry.bytes_of(self._chunks)
        self._has_ended = False

    @property
    def received(self) -> int:
        return self._base + sum(run.position - run.first * self._entry.chunk_bytes for run in self._runs)

    def start(self) -> Self:
        """Start to fetch; returns at once. Raises UsageError if the fetcher is closed, or of another process."""
        self._fetch(self._chunks)
        if isinstance(self.error, UsageError):
            raise self.error
        return self

    def run(self, stop: threading.Event, on_progress: Callable[[int], object] = lambda received: None) -> None:
        """Fetch, until `stop` is set; `on_progress` is called with the bytes received. Raises the transfer's error."""
        self.start()
        while not self.wait(_PROGRESS_S):
            on_progress(self.received)
            if stop.is_set():
                self.cancel()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        self._end(TransferCancelledError(self.info.name))

    def sources(self) -> list[Origin]:
        """The sources of all origins that can be reached, or the chosen one. Raises NetworkError if none can be."""
        if self._only is not None:
            return [self._only]
        sources, fault = list[Origin](), None
        for origin in self._origins:
            try:
                sources += origin.sources()
            except NetworkError as error:
                self._state.reasons[origin.url] = str(error)
                fault = error
        if fault is not None and not sources:
            raise fault
        return sources

    def _fetch(self, chunks: I64) -> None:
        entry, count = self._entry, self._run_chunks
        starts = np.flatnonzero((np.diff(chunks) > 1) | (chunks[1:] % count == 0)) + 1
        with self._lock:
            if self._has_ended:
                return
            self._runs = [
                ChunkRun(
                    entry, self.info.name, self, int(run[0]), int(run[-1]) + 1, self._find_leaves,
                    self._end_run, self._on_wrong, self._state, self._order,
                ) for run in np.split(chunks, starts) if len(run)
            ]  # fmt: skip
            self._base = entry.info.bytes - entry.bytes_of(chunks)
            self._todo = self._runs[::-1]
            is_over = self._start_runs()
        if is_over:
            self._conclude()

    def _start_runs(self) -> bool:
        """Start as many runs as there are connections, the first one alone until it has found the hashes.

        Returns whether all have ended. With the lock held.
        """
        has_found = self._entry.has_leaves or self._only is not None or not self.info.sha256
        limit = self._fetcher.connections if has_found else 1
        while self._todo and len(self._running) < limit:
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

    def _find_leaves(self, source: Origin) -> bytes | None:
        """The hashes of the chunks, of the first source that has them; None if none has."""
        if self.info.sha256 and self._only is None and not self._entry.has_leaves:
            leaves = self._ask_for_leaves(source)
            with self._lock:
                if leaves is not None:
                    self._entry.set_leaves(leaves)
                else:
                    self._only, self._state.sources = source, [source]
                self._start_runs()
        return self._entry.leaves() if self._entry.has_leaves else None

    def _ask_for_leaves(self, first: Origin) -> bytes | None:
        count = self._entry.layout.num_chunks
        others = [source for source in self.sources() if source.url not in {first.url, *self._state.refused}]
        readers: list[Callable[[], bytes]] = [
            functools.partial(source.leaves, self.info.name, self.info) for source in (first, *others)
        ]
        for read in [*readers, self._read_leaves or bytes]:
            try:
                leaves: bytes = read()
            except ForebayError as error:
                log.info("hashes of %s: %s", self.info.name, error)
                continue
            if len(leaves) == count * HASH_BYTES and root_of(leaves) == self.info.sha256:
                return leaves
        return None

    def _end_run(self, run: ChunkRun, error: Exception | None) -> None:
        with self._lock:
            if self._has_ended or run not in self._running:
                return
            self._running.remove(run)
            only = self._only
            is_over = error is None and self._start_runs()
        if only is not None and isinstance(error, NetworkError) and not isinstance(error, TransferCancelledError):
            self._state.refused.setdefault(only.url, str(error))
            self._change_source()
        elif error is not None:
            self._end(error)
        elif is_over:
            self._conclude()

    def _conclude(self) -> None:
        """All chunks are here: verify those that were not."""
        entry, chunks = self._entry, np.arange(self._entry.layout.num_chunks)
        try:
            if self.info.sha256 and not entry.verify(chunks):
                reason = f"sent {entry.info.bytes} bytes that do not have the hash {self.info.sha256}"
                if self._only is not None:
                    self._state.refused[self._only.url] = reason
                    self._state.has_liar = True
                    self._fetcher.record_lie(self._only)
                    self._on_wrong(self._only, f"{self._only.url}: {reason}")
                return self._change_source()
            self._end(None)
        except Exception as error:  # noqa: BLE001 - who waits for the transfer gets it
            self._end(error)

    def _change_source(self) -> None:
        """Fetch all again, from another source."""
        with self._lock:
            if self._has_ended:
                return
            self._fetcher.cancel(self._running)
            self._running.clear()
            self._only, self._state.looked_up_at = None, float("-inf")
            self._entry.marks[self._chunks] = self._mark
        self._fetch(self._chunks)

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            self._fetcher.cancel(self._running)
            self._base, self._runs, self._todo = self.received, [], []
            if self.info.sha256 and error is not None:
                marks = self._entry.marks
                marks[self._chunks[marks[self._chunks] == UNVERIFIED]] = self._mark
        if isinstance(error, OSError) and not isinstance(error, ForebayError):
            error = disk_error(self.part, self.info.bytes, error)
        self.finish(error)


class FileTransfer(ChunkTransfer):
    """A slice, or another object (`info.sha256` empty), into a file of its own; a map is beside it until its end.

    An existing file is resumed. Raises UsageError if it cannot be written. Arguments as of ChunkTransfer.
    """

    def __init__(
        self, fetcher: RunFetcher, info: SliceInfo, part: Path, origins: Sequence[Origin], **settings: Any
    ) -> None:
        try:
            entry = _open(part, info)
        except OSError as error:
            raise disk_error(part, info.bytes, error) from error
        super().__init__(fetcher, entry, info, origins, **settings)

    def finish(self, error: Exception | None) -> None:
        """See Transfer."""
        if error is None:
            try:
                sync_file(self.part)  # Without a map it counts as complete.
                self._entry.map_path.unlink(missing_ok=True)
            except OSError as fault:
                error = disk_error(self.part, self.info.bytes, fault)
        super().finish(error)


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
