"""The shards of an origin in a `ChunkCache`, and the fetch of one in a thread, retried until it is complete.

The cache decides which process of the machine fetches, and has what is verified, pinned and reserved; its directory is
the shards' alone. While training runs, a large shard is fetched in a process of the lowest priority: threads beside the
training loop would compete with it for the interpreter's lock, 250 000 times a GB (p99 of NumPy steps: 1.0 to 1.3
times that without a download; 1.6 to 3.7 times with threads). The process is not started by `multiprocessing`, which
would run the user's program again. Cost: 0.4 s of a processor to start, and 60 MB.
"""

import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from forebay.arrays import I64, Array
from forebay.base import Closing
from forebay.dataset.chunks import num_chunks
from forebay.errors import DatasetError, ForebayError, IntegrityError, UsageError
from forebay.fetch.cache import ChunkCache, Group
from forebay.fetch.downloads import Progress, Workers, open_fetcher, plan_download
from forebay.fetch.transfers import ChunkTransfer
from forebay.files import sync_file
from forebay.load.shard_files import (
    SampleCheck,
    ShardDataset,
    ShardInfo,
    ShardObject,
    find_shard,
    list_shards,
    read_layout,
    read_samples,
    verify_pair,
)
from forebay.processes import end_with_parent
from forebay.storage.base import PathOrigin, PinnedOrigin, Timeouts, as_object_origin
from forebay.storage.origins import open_origin
from forebay.storage.retry import backoff_s, log_while_waiting
from forebay.threads import SupervisedThread
from forebay.units import format_rate

MIN_PROCESS_BYTES = 64 << 20  # Smaller shards are fetched in threads.
COMMON_BYTES_PER_S = 125e6  # 1 Gb/s
_MIN_RATED_S = 1.0  # Shorter downloads say nothing about the network.
_FIRST_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_MAX_SAME = 3  # times that a sample is wrong in the same way
_POLL_S = 0.1
_NUM_READERS = 16
log = logging.getLogger("forebay.load")


class ShardCache(Closing):
    """The shards of a URL in a directory, created if absent. Arguments as of SharedShardedDatasetManager.

    A pair that is there under its own names is used in place, and never changed or removed.
    """

    def __init__(
        self, url: str, folder: Path, sequence_length: int = 0, chunk_size: int | None = None,
        max_workers: Workers = None, timeout_s: float = 300.0,
    ) -> None:  # fmt: skip
        plan_download(1, chunk_size, max_workers)  # Checks them.
        self._arguments = url, str(folder), sequence_length, chunk_size, max_workers, timeout_s
        self._seq_len, self._timeout_s = sequence_length, timeout_s
        self._plan = partial(plan_download, chunk_size=chunk_size, max_workers=max_workers)
        self.origin = as_object_origin(open_origin(url, timeouts=Timeouts.within(timeout_s)))
        self.cache, self._here = ChunkCache(folder, 1 << 62), PathOrigin(folder)
        self.fetched_bytes, self.fetch_s, self.reason = 0, 0.0, ""
        self.is_training = False  # Beside a training loop, which threads would slow down.
        self._layouts: dict[ShardInfo, ShardInfo] = {}

    def close(self) -> None:
        """Release all pins. May be called twice."""
        self.cache.close()

    def indexes(self) -> list[int]:
        """The indexes of the shards at the origin, ascending. Raises DatasetError if there are none."""
        return list_shards(self.origin, timeout_s=self._timeout_s)

    def find(self, index: int, stop: threading.Event | None = None) -> ShardInfo:
        """A shard that is here under its own names, else at the origin. Raises DatasetError or NetworkError."""
        with contextlib.suppress(DatasetError):
            return find_shard(self._here, index)
        return find_shard(self.origin, index, timeout_s=self._timeout_s, stop=stop)

    def is_in_place(self, shard: ShardInfo) -> bool:
        return shard.origin is self._here

    def describe(self, index: int, stop: threading.Event | None = None) -> ShardInfo:
        """A shard as `find` finds it, and its layout. Raises DatasetError or NetworkError."""
        shard = self.find(index, stop)
        if shard not in self._layouts:
            self._layouts[shard] = read_layout(shard, self._seq_len)
        return self._layouts[shard]

    def read(self, shard: ShardInfo, positions: I64) -> Array:
        """Tokens [B, L] of samples of a described shard, verified, without storing them. Raises ForebayError."""
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            parts = pool.map(lambda index: read_samples(shard, range(index, index + 1)), positions.tolist())
            return np.concatenate([np.empty((0, shard.seq_len), shard.dtype), *parts])

    def evict(self, keep: Collection[int]) -> None:
        """Remove the shards that no process uses, except these, if they were described."""
        shards = [shard for shard in list(self._layouts.values()) if shard.index in keep]
        self.cache.evict({info.sha256 for shard in shards for info in shard.infos()})

    def obtain(self, index: int, stop: threading.Event, on_progress: Progress) -> ShardDataset:
        """Return the verified samples of a shard, fetched if they are not here; they stay until they are closed.

        Samples that do not have their ids are fetched again; if these are wrong in the same way, the ids too.

        Raises:
            DatasetError: If there is no such shard, or its objects do not fit each other.
            IntegrityError: If samples are wrong in the same way three times.
            NetworkError: If it cannot be fetched.
            UsageError: If the disk is full, or `stop` is set.
        """
        shard = self.describe(index, stop)
        if self.is_in_place(shard):
            return ShardDataset(shard, *verify_pair(self._here.folder, shard))
        fetched_bytes, began = self.fetched_bytes, time.monotonic()
        check = SampleCheck(shard, np.empty(0, np.uint64))
        if self.is_training and shard.num_bytes >= MIN_PROCESS_BYTES:
            self._fetch_in_process(shard, stop, on_progress)
        while (pins := self._fetch_pair(shard, check, stop, on_progress)) is None:
            pass
        seconds, num_bytes = time.monotonic() - began, self.fetched_bytes - fetched_bytes
        self.fetch_s += seconds if num_bytes else 0.0
        if seconds > _MIN_RATED_S and 0 < num_bytes / seconds < COMMON_BYTES_PER_S:
            rate = format_rate(num_bytes / seconds)
            log.warning("shard %d was fetched at %s; runs like this have 1 Gb/s or more", index, rate)
        return ShardDataset(shard, pins[0][0], check.ids, partial(self.cache.unpin, pins))

    def _fetch_in_process(self, shard: ShardInfo, stop: threading.Event, on_progress: Progress) -> None:
        """`obtain` in a process, as far as it comes; it is repeated here, and finds what is complete, or the error."""
        request: bytes | None = json.dumps([shard.index, *self._arguments]).encode()
        path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        pins, output = self._pin(shard), None
        tokens, chunks = pins[0]
        try:
            with subprocess.Popen(
                [sys.executable, "-P", "-m", "forebay.load.shard_cache"], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
            ) as process:  # fmt: skip
                while output is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        output, _ = process.communicate(request, _POLL_S)
                    request = None
                    on_progress(tokens.bytes_of(tokens.stored(chunks)), shard.tokens.num_bytes)
                    if stop.is_set():
                        process.kill()  # What it received stays.
        finally:
            self.cache.unpin(pins)
        self.fetched_bytes += int(output or 0)

    def _fetch_pair(
        self, shard: ShardInfo, check: SampleCheck, stop: threading.Event, on_progress: Progress
    ) -> list[Group] | None:
        """Return the tokens and ids of a shard, complete and pinned; None if that is to be tried again."""
        pins = self._pin(shard)
        with contextlib.ExitStack() as stack:
            stack.callback(self.cache.unpin, pins)
            (tokens, _), (ids, _) = pins
            tokens.check, ids.check, check.ids = check, lambda chunk, data: True, ids.data.view("<u8")
            try:
                for part, group in ((shard.ids, pins[1]), (shard.tokens, pins[0])):
                    self._fetch_object(part, group, stop, on_progress)
            except IntegrityError:
                if not check.wrong:
                    raise
                if (same := max(check.wrong.values())) >= _MAX_SAME:
                    raise check.error() from None
                if same > 1:
                    log.warning("shard %d: samples do not have their ids, fetching the ids again", shard.index)
                    self.cache.discard(ids.info.sha256)
                return None
            except (UsageError, FileNotFoundError):
                if not (tokens.is_lost() or ids.is_lost()):
                    raise
            if not (tokens.is_lost() or ids.is_lost()):
                stack.pop_all()
                return pins
        return None

    def _pin(self, shard: ShardInfo) -> list[Group]:
        """Pin all chunks of a shard, present or not. Raises UsageError if there is no space for their maps."""
        items = [(info, np.arange(num_chunks(info.bytes, info.chunk_bytes))) for info in shard.infos()]
        entries, reason = self.cache.open_pinned(items)
        pins = [(entry, chunks) for entry, (_, chunks) in zip(entries, items)]
        if reason:
            self.cache.unpin(pins)
            raise UsageError(f"shard {shard.index}: {reason}")
        return pins

    def _fetch_object(self, part: ShardObject, group: Group, stop: threading.Event, on_progress: Progress) -> None:
        """Fetch what is missing of a pinned object, or wait for the process that does."""
        (entry, chunks), plan, size = group, self._plan(part.num_bytes), part.num_bytes
        source, info = PinnedOrigin(self.origin, part.etag), replace(entry.info, name=part.name, sha256="")
        while not (entry.is_lost() or entry.is_complete()):
            entry.verify(chunks)
            claimed, reason = self.cache.claim(entry, chunks)
            self.reason = "" if len(claimed) else "; another process fetches it"
            if reason:
                raise UsageError(f"{part.name}: {reason} Free space; what was received is kept and resumed.")
            try:
                if len(claimed):
                    with entry.open_file() as file:
                        file.write(part.header)
                    with open_fetcher(plan, self._timeout_s) as fetcher:
                        ChunkTransfer(
                            fetcher, entry, info, source, chunks=claimed, run_bytes=plan.chunk_bytes
                        ).run(stop, lambda received: on_progress(received, size))  # fmt: skip
                    sync_file(entry.path)
                    self.fetched_bytes += entry.bytes_of(claimed)
                elif stop.wait(_POLL_S):
                    raise UsageError(f"{part.name}: its fetch was cancelled. Request it again.")
                else:
                    on_progress(entry.bytes_of(entry.stored(chunks)), size)
            finally:
                if len(claimed):
                    self.cache.complete(entry, claimed)


class ShardFetch:
    """The fetch of one shard in a thread, until it is complete or closed.

    Attributes:
        result: The samples.
        received, total: Bytes of the object that is fetched: the ids, then the tokens. Of a shard that is here, 0.
    """

    def __init__(self, index: int, shards: ShardCache) -> None:
        self.index, self.received, self.total = index, 0, 0
        self.result: Future[ShardDataset] = Future()
        self._shards, self._error, self._deadline = shards, "", float("inf")
        self._stopping = threading.Event()
        self._thread = SupervisedThread(self._run, f"shard-{index}", stopping=self._stopping).start()

    def wait(self, timeout_s: float) -> ShardDataset:
        """Wait until the shard is complete. Raises the error of an attempt that is final, or ends after `timeout_s`."""
        self._deadline = time.monotonic() + timeout_s

        def describe() -> str:
            reason = self._error or self._shards.reason
            return f"shard {self.index}: {self.received} of {self.total} bytes received{reason}"

        with log_while_waiting(log, describe):
            return self.result.result()

    def close(self) -> None:
        """Cancel the fetch and close the samples; what was received stays. May be called twice."""
        self._stopping.set()
        self._thread.join(5.0)
        if self.result.done() and self.result.exception() is None:
            self.result.result().close()

    def _run(self) -> None:
        for attempt in itertools.count(1):
            try:
                return self.result.set_result(self._shards.obtain(self.index, self._stopping, self._record))
            except Exception as error:  # noqa: BLE001 - `wait` raises it
                is_over = self._stopping.is_set() or time.monotonic() >= self._deadline
                passes = isinstance(error, (ForebayError, OSError))
                if is_over or not passes or isinstance(error, (DatasetError, IntegrityError)):  # It does not go away.
                    return self.result.set_exception(error)
                self._error = f"; the last attempt failed: {error}"
                log.warning("download of shard %d failed, it is retried: %s", self.index, error)
            self._stopping.wait(backoff_s(attempt, _FIRST_RETRY_S, _MAX_RETRY_S))

    def _record(self, received: int, total: int) -> None:
        self.received, self.total = received, total


def main() -> None:
    """Fetch the shard that the standard input names, and print the bytes fetched. Ends with its parent."""
    index, url, folder, *settings = json.load(sys.stdin)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles it.
    end_with_parent()  # Else it ends when it is complete.
    os.nice(19)
    with contextlib.suppress(ForebayError), ShardCache(url, Path(folder), *settings) as shards:  # The parent finds it.
        shards.obtain(index, threading.Event(), lambda received, total: None)
        print(shards.fetched_bytes)


if __name__ == "__main__":
    main()
