"""The shards of an origin in a `ChunkCache`, and the fetch of one in a thread, retried until it is complete.

The cache decides which process of the machine fetches, and has what is verified, pinned and reserved; its directory is
the shards' alone. While training runs, a large shard is fetched in a process of the lowest priority: threads beside the
training loop would compete with it for the interpreter's lock, 250 000 times a GB, and for the processors. The process
is not started by `multiprocessing`, which would run the user's program again. Cost: 0.4 s of a processor to start, and
60 MB.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from forebay.arrays import I64, Array
from forebay.closing import Closing
from forebay.dataset.chunks import num_chunks
from forebay.dataset.manifest import SliceInfo
from forebay.errors import DatasetError, ForebayError, IntegrityError, NetworkError, UsageError
from forebay.fetch.cache import ChunkCache, Group
from forebay.fetch.chunk_file import PRESENT, Check, ChunkFile
from forebay.fetch.downloads import Workers, open_fetcher, plan_download
from forebay.fetch.engine import disk_error
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
_MAX_SAME, _MAX_ROUNDS = 3, 10
_POLL_S = 0.1
_NUM_READERS = 16
OnProgress = Callable[[int], object]
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
        self.arguments = url, folder, sequence_length, chunk_size, max_workers, timeout_s  # For another process.
        self._seq_len, self._timeout_s = sequence_length, timeout_s
        self._plan = partial(plan_download, chunk_size=chunk_size, max_workers=max_workers)
        self.origin = as_object_origin(open_origin(url, timeouts=Timeouts.within(timeout_s)))
        self.cache, self._here = ChunkCache(folder, 1 << 62), PathOrigin(folder)
        self.fetched_bytes, self.fetch_s = 0, 0.0
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
        return shard.url == self._here.url

    def describe(self, index: int, stop: threading.Event | None = None) -> ShardInfo:
        """A shard as `find` finds it, and its layout. Raises DatasetError or NetworkError."""
        shard = self.find(index, stop)
        if shard not in self._layouts:
            origin = self._here if self.is_in_place(shard) else self.origin
            self._layouts[shard] = read_layout(origin, shard, self._seq_len)
        return self._layouts[shard]

    def read(self, shard: ShardInfo, positions: I64) -> Array:
        """Tokens [B, L] of samples of a described shard, verified, without storing them. Raises ForebayError."""
        origin = self._here if self.is_in_place(shard) else self.origin
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            parts = pool.map(lambda index: read_samples(origin, shard, range(index, index + 1)), positions.tolist())
            return np.concatenate([np.empty((0, shard.seq_len), shard.dtype), *parts])

    def evict(self, keep: Collection[int]) -> None:
        """Remove the shards that no process uses, except these, if they were described."""
        shards = [shard for shard in list(self._layouts.values()) if shard.index in keep]
        self.cache.evict({info.sha256 for shard in shards for info in shard.infos()})

    def obtain(self, fetch: ShardFetch, is_training: bool) -> ShardDataset:
        """The verified samples of a shard, fetched if they are not here; they stay until they are closed.

        Raises:
            DatasetError, IntegrityError, NetworkError: If it cannot be fetched or verified.
            UsageError: If the disk is full, or `fetch` is closed.
        """
        shard = self.describe(fetch.index, fetch.stopping)
        if self.is_in_place(shard):
            return ShardDataset(shard, *verify_pair(self._here.folder, shard))
        while True:
            pins = self._pin(shard.infos())
            with contextlib.ExitStack() as stack:
                stack.callback(self.cache.unpin, pins)
                if not all(entry.is_complete() for entry, _ in pins):
                    fetch.entry, started = pins[0][0], time.monotonic()
                    in_process = is_training and shard.num_bytes >= MIN_PROCESS_BYTES
                    fetch_missing = fetch_in_process if in_process else ShardCache.fetch
                    self._record(shard, fetch_missing(self, shard, fetch.stopping), time.monotonic() - started)
                if all(entry.is_complete() and not entry.is_deleted for entry, _ in pins):
                    return ShardDataset(shard, pins[0][0], pins[1][0].data.view("<u8"), stack.pop_all().close)

    def _pin(self, infos: Sequence[SliceInfo]) -> list[Group]:
        """Pin all chunks of objects, present or not. Raises UsageError if there is no space for their maps."""
        items = [(info, np.arange(num_chunks(info.bytes, info.chunk_bytes))) for info in infos]
        entries, reason = self.cache.open_pinned(items)
        pins = [(entry, chunks) for entry, (_, chunks) in zip(entries, items)]
        if reason:
            self.cache.unpin(pins)
            raise UsageError(f"{infos[0].name}: {reason}")
        return pins

    def _record(self, shard: ShardInfo, num_bytes: int, seconds: float) -> None:
        self.fetched_bytes, self.fetch_s = self.fetched_bytes + num_bytes, self.fetch_s + seconds
        if seconds > _MIN_RATED_S and 0 < num_bytes / seconds < COMMON_BYTES_PER_S:
            rate = format_rate(num_bytes / seconds)
            log.warning("shard %d was fetched at %s; runs like this have 1 Gb/s or more", shard.index, rate)

    def fetch(self, shard: ShardInfo, stop: threading.Event, on_progress: OnProgress = lambda received: None) -> int:
        """Fetch what is missing of a shard, or wait for the process that does; returns the bytes fetched here.

        Samples that do not have their ids are fetched again; if these are wrong in the same way, the ids too.

        Raises:
            IntegrityError: If samples are wrong in the same way three times.
            NetworkError: If it cannot be fetched.
            UsageError: If the disk is full, or `stop` is set.
        """
        tokens, ids = shard.infos()
        seen, num_bytes = Counter[tuple[int, int]](), 0
        for rounds in itertools.count(1):
            entry, fetched = self._fetch_object(shard.ids, ids, lambda chunk, data: True, stop)
            check, num_bytes = SampleCheck(shard, entry.data.view("<u8")), num_bytes + fetched
            try:
                return num_bytes + self._fetch_object(shard.tokens, tokens, check, stop, on_progress)[1]
            except IntegrityError:
                if not check.wrong:
                    raise
                seen.update(check.wrong.items())
                num_same = max(seen[item] for item in check.wrong.items())
                if num_same >= _MAX_SAME or rounds >= _MAX_ROUNDS:
                    raise check.error() from None
                if num_same > 1:
                    log.warning("shard %d: samples do not have their ids, fetching the ids again", shard.index)
                    self.cache.discard(ids.sha256)
        raise AssertionError

    def _fetch_object(
        self, part: ShardObject, info: SliceInfo, check: Check, stop: threading.Event,
        on_progress: OnProgress = lambda received: None,
    ) -> tuple[ChunkFile, int]:  # fmt: skip
        [(entry, chunks)], num_bytes = self._pin([info]), 0
        entry.check = check
        try:
            while not entry.is_complete():
                entry.verify(chunks)
                claimed, reason = self.cache.claim(entry, chunks)
                if reason:
                    raise UsageError(f"{part.name}: {reason} Free space; what was received is kept and resumed.")
                if len(claimed):
                    try:
                        self._transfer(part, entry, claimed, stop, on_progress)
                        num_bytes += entry.bytes_of(claimed)
                    finally:
                        self.cache.complete(entry, claimed)
                elif stop.wait(_POLL_S):
                    raise _cancelled(part.name)
                if entry.is_deleted:
                    raise NetworkError(f"{part.name}: it was removed while it was fetched. It is retried.")
            return entry, num_bytes
        finally:
            self.cache.unpin([(entry, chunks)])

    def _transfer(
        self, part: ShardObject, entry: ChunkFile, chunks: I64, stop: threading.Event,
        on_progress: OnProgress,
    ) -> None:  # fmt: skip
        plan = self._plan(part.num_bytes)
        source, info = PinnedOrigin(self.origin, part.etag), replace(entry.info, name=part.name, sha256="")
        try:
            with entry.path.open("r+b") as file:
                file.write(part.header)
            with open_fetcher(plan, self._timeout_s) as fetcher:
                ChunkTransfer(
                    fetcher, entry, info, source, chunks=chunks, run_bytes=plan.chunk_bytes
                ).run(stop, on_progress)  # fmt: skip
            sync_file(entry.path)
        except ForebayError:  # Some are an OSError, too.
            raise
        except OSError as error:
            raise disk_error(entry.path, part.num_bytes, error) from error


class ShardFetch:
    """The fetch of one shard in a thread, until it is complete or closed.

    Attributes:
        result: The samples.
        error: Of the last attempt, if it failed.
    """

    def __init__(self, index: int, shards: ShardCache, is_training: bool) -> None:
        self.index = index
        self.result: Future[ShardDataset] = Future()
        self.error: ForebayError | None = None
        self.entry: ChunkFile | None = None  # The tokens, while they are fetched.
        self.stopping, self._deadline = threading.Event(), float("inf")
        self._shards, self._is_training = shards, is_training
        self._thread = SupervisedThread(self._run, f"shard-{index}", stopping=self.stopping).start()

    def progress(self) -> dict[str, int]:
        """Bytes of the tokens: `received` and `total`; zeros before and after they are fetched."""
        if (entry := self.entry) is None:
            return {"received": 0, "total": 0}
        return {"received": entry.bytes_of(np.flatnonzero(entry.marks == PRESENT)), "total": entry.info.bytes}

    def wait(self, timeout_s: float) -> ShardDataset:
        """Wait until the shard is complete. Raises the error of an attempt that is final, or ends after `timeout_s`."""

        def describe() -> str:
            failed = "" if self.error is None else f"; the last attempt failed: {self.error}"
            return "shard {}: {received} of {total} bytes received{}".format(self.index, failed, **self.progress())

        self._deadline = time.monotonic() + timeout_s
        with log_while_waiting(log, describe):
            return self.result.result()

    def close(self) -> None:
        """Cancel the fetch and close the samples; what was received stays. May be called twice."""
        self.stopping.set()
        self._thread.join(5.0)
        if self.result.done() and self.result.exception() is None:
            self.result.result().close()

    def _run(self) -> None:
        for attempt in itertools.count():
            try:
                return self.result.set_result(self._shards.obtain(self, self._is_training))
            except Exception as error:  # noqa: BLE001 - `wait` raises it
                other = UsageError(f"shard {self.index}: {type(error).__name__}: {error}. It is retried.")
                self.error = error if isinstance(error, ForebayError) else other
            finally:
                self.entry = None
            is_over = self.stopping.is_set() or time.monotonic() >= self._deadline
            if is_over or isinstance(self.error, (DatasetError, IntegrityError)):  # They do not go away.
                return self.result.set_exception(self.error)
            log.warning("download of shard %d failed, it is retried: %s", self.index, self.error)
            self.stopping.wait(backoff_s(attempt + 1, _FIRST_RETRY_S, _MAX_RETRY_S))


def fetch_in_process(shards: ShardCache, shard: ShardInfo, stop: threading.Event) -> int:
    """`ShardCache.fetch` in a process. Raises UsageError, too, if the process dies.

    Credentials are in the environment, which the process inherits.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "forebay.load.shard_cache"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
    ) as process:  # fmt: skip
        message: bytes | None = pickle.dumps((shards.arguments, shard, os.getpid()))
        try:
            while True:
                try:
                    data, _ = process.communicate(message, _POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    message = None
                    if stop.is_set():
                        raise _cancelled(shard.tokens.name) from None
        finally:
            process.kill()  # What it received stays.
    if process.returncode:
        raise UsageError(
            f"shard {shard.index}: the process that fetched it ended with code {process.returncode} before it was "
            "complete. It is retried."
        )
    result: int | ForebayError = pickle.loads(data)
    if isinstance(result, ForebayError):
        raise result
    return result


def main() -> None:
    """Fetch the shard that the standard input names, and write the result. Ends with its parent."""
    arguments, shard, parent = pickle.load(sys.stdin.buffer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles it.
    end_with_parent()  # Else it ends when it is complete.
    if os.getppid() != parent:  # It ended before.
        return
    os.nice(19)
    result: int | ForebayError
    try:
        with ShardCache(*arguments) as shards:
            result = shards.fetch(shard, threading.Event())
    except ForebayError as error:
        result = error
    sys.stdout.buffer.write(pickle.dumps(result))


def _cancelled(name: str) -> UsageError:
    return UsageError(f"{name}: its fetch was cancelled. Request it again.")


if __name__ == "__main__":
    main()
