"""The shards of an origin in a `ChunkCache`, and the fetch of one in a thread, retried until it is complete.

The cache decides which process of the machine fetches, and has what is verified, pinned and reserved; its directory is
the shards' alone. While training runs, a large shard is fetched in a process of the lowest priority: threads beside the
training loop would compete with it for the interpreter's lock, 250 000 times a GB, and for the processors. The process
is not started by `multiprocessing`, which would run the user's program again. Cost: 0.4 s of a processor to start, and
60 MB.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.cache.cache import ChunkCache
from forebay.closing import Closing
from forebay.dataset.chunks import num_chunks
from forebay.dataset.manifest import SliceInfo
from forebay.errors import DatasetError, ForebayError, IntegrityError, NetworkError, UsageError
from forebay.load.shard_files import (
    Shard,
    ShardDataset,
    ShardObject,
    ShardReader,
    fetch_pair,
    find_shard,
    list_shards,
    read_layout,
    verify_pair,
)
from forebay.network.retry import log_while_waiting
from forebay.storage.base import PathOrigin, Timeouts, as_object_origin
from forebay.storage.chunk_file import PRESENT, Check, ChunkFile
from forebay.storage.origins import open_origin
from forebay.storage.ranged_download import Workers, plan_download
from forebay.threads import SupervisedThread

MIN_PROCESS_BYTES = 64 << 20  # Smaller shards are fetched in threads.
_FIRST_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_POLL_S = 0.1
_FINAL = (DatasetError, IntegrityError)  # Errors that do not go away.
_PR_SET_PDEATHSIG = 1
log = logging.getLogger("forebay.load")


class ShardCache(Closing):
    """The shards of a URL in a directory, created if absent. Arguments as of SharedShardedDatasetManager.

    A pair that is there under its own names is used in place, and never changed or removed.
    """

    def __init__(
        self, url: str, folder: Path, sequence_length: int = 0, *, keep_shards: bool = False,
        chunk_size: int | None = None, max_workers: Workers = None, timeout_s: float = 300.0,
    ) -> None:  # fmt: skip
        plan_download(1, chunk_size, max_workers)  # Checks them.
        origin = as_object_origin(open_origin(url, timeouts=Timeouts.within(timeout_s)))
        settings: dict[str, Any] = {"chunk_size": chunk_size, "max_workers": max_workers, "timeout_s": timeout_s}
        self.arguments = url, folder, sequence_length, settings  # For another process.
        self._reader = ShardReader(origin, **settings)
        self._here, self._seq_len, self._keep_shards = PathOrigin(folder), sequence_length, keep_shards
        self._layouts: dict[Shard, Shard] = {}
        self.cache = ChunkCache(folder, 1 << 62)

    def close(self) -> None:
        """Release all pins. May be called twice."""
        self.cache.close()

    def indexes(self) -> list[int]:
        """The indexes of the shards here or at the origin, ascending. Raises DatasetError if there are none."""
        origin = self._reader.origin
        indexes = {*list_shards(self._here), *list_shards(origin, timeout_s=self._reader.timeout_s)}
        if not indexes:
            raise DatasetError(f"{origin.url}: expected shards train_000000.npy and on, got none. Check the address.")
        return sorted(indexes)

    def find(self, index: int, stop: threading.Event | None = None) -> Shard:
        """A shard that is here under its own names, else at the origin. Raises DatasetError or NetworkError."""
        with contextlib.suppress(DatasetError):
            return find_shard(self._here, index)
        return find_shard(self._reader.origin, index, timeout_s=self._reader.timeout_s, stop=stop)

    def is_in_place(self, shard: Shard) -> bool:
        return shard.url == self._here.url

    def evict(self, keep: Collection[int]) -> None:
        """Remove the shards that no process uses, unless all are kept, except these that were described."""
        if not self._keep_shards:
            shards = [shard for shard in self._layouts.values() if shard.index in keep]
            self.cache.evict({info.sha256 for shard in shards for info in shard.infos()})

    def describe(self, index: int, stop: threading.Event | None = None) -> Shard:
        """A shard as `find` finds it, and its layout. Raises DatasetError or NetworkError."""
        found = self.find(index, stop)
        if found not in self._layouts:
            origin = self._here if self.is_in_place(found) else self._reader.origin
            self._layouts[found] = read_layout(origin, found, self._seq_len)
        return self._layouts[found]

    def obtain(self, fetch: ShardFetch, is_training: bool) -> ShardDataset:
        """The verified samples of a shard, fetched if they are not here; they stay until they are closed.

        Raises:
            DatasetError, IntegrityError, NetworkError: If it cannot be fetched or verified.
            UsageError: If the disk is full, or `fetch` is stopped.
        """
        shard = self.describe(fetch.index, fetch.stopping)
        if self.is_in_place(shard):
            return ShardDataset(shard, *verify_pair(self._here.folder, shard))
        fetch_missing = fetch_in_process if is_training and shard.num_bytes >= MIN_PROCESS_BYTES else ShardCache.fetch
        while not fetch.stopping.is_set():
            pins = [(self.cache.open_pinned(info, _chunks(info)), _chunks(info)) for info in shard.infos()]
            tokens, ids = (entry for entry, _ in pins)
            try:
                if not (tokens.is_complete() and ids.is_complete()):
                    fetch.entry = tokens
                    fetch.fetched = fetch_missing(self, shard, fetch.stopping)
                if tokens.is_complete() and ids.is_complete() and not (tokens.is_deleted or ids.is_deleted):
                    unpin = partial(self.cache.unpin, [] if self._keep_shards else pins)
                    return ShardDataset(shard, tokens, ids.data.view("<u8"), unpin)
                self.cache.unpin(pins)  # Another process, or the fetch, replaced one of them.
            except BaseException:
                self.cache.unpin(pins)
                raise
            finally:
                fetch.entry = None
        raise _cancelled(fetch.index)

    def fetch(self, shard: Shard, stop: threading.Event) -> tuple[int, float]:
        """Fetch what is missing of a shard, or wait for the process that does; (bytes fetched here, seconds)."""
        started, num_bytes, cache = time.monotonic(), 0, self.cache

        def fetch(part: ShardObject, info: SliceInfo, check: Check) -> ChunkFile:
            nonlocal num_bytes
            chunks = _chunks(info)
            entry = cache.open_pinned(info, chunks)
            entry.check = check
            try:
                while not entry.is_complete():
                    entry.verify(chunks)
                    claimed, reason = cache.claim(entry, chunks)
                    if reason:
                        raise UsageError(f"shard {shard.index}: {reason} Free space; what was received is kept.")
                    if len(claimed):
                        try:
                            self._reader.fetch(part, entry, claimed, stop)
                            num_bytes += entry.bytes_of(claimed)
                        finally:
                            cache.complete(entry, claimed)
                    elif stop.wait(_POLL_S):
                        raise _cancelled(shard.index)
                    if entry.is_deleted:
                        raise NetworkError(f"shard {shard.index}: it was removed while it was fetched. It is retried.")
                return entry
            finally:
                cache.unpin([(entry, chunks)])

        fetch_pair(shard, fetch, lambda: cache.discard(shard.infos()[1].sha256))
        return num_bytes, time.monotonic() - started


class ShardFetch:
    """The fetch of one shard in a thread, until it is complete or closed.

    Attributes:
        dataset: The samples, once they are complete.
        error: Of the last attempt, if it failed.
        fetched: By this process: bytes, and seconds.
    """

    def __init__(self, index: int, shards: ShardCache, is_training: bool) -> None:
        self.index = index
        self.dataset: ShardDataset | None = None
        self.error: ForebayError | None = None
        self.fetched = 0, 0.0
        self.entry: ChunkFile | None = None  # The tokens, while they are fetched.
        self.stopping, self._ended = threading.Event(), threading.Event()
        self._shards, self._is_training = shards, is_training
        self._thread = SupervisedThread(self._run, f"shard-{index}", stopping=self.stopping).start()

    def progress(self) -> tuple[int, int]:
        """Bytes of the tokens that are here, and of all; zeros before and after they are fetched."""
        if (entry := self.entry) is None:
            return 0, 0
        return entry.bytes_of(np.flatnonzero(entry.marks == PRESENT)), entry.info.bytes

    def wait(self, timeout_s: float) -> tuple[ShardDataset, float]:
        """Wait until the shard is complete: its samples, and how long, in seconds.

        Raises:
            ForebayError: Of the last attempt, if it is final, or after `timeout_s`.
        """

        def describe() -> str:
            failed = "" if self.error is None else f"; the last attempt failed: {self.error}"
            return "shard {}: {} of {} bytes received{}".format(self.index, *self.progress(), failed)

        started = time.monotonic()
        with log_while_waiting(log, describe):
            while self.dataset is None:
                if self.stopping.is_set():
                    raise _cancelled(self.index)
                if self.error and (isinstance(self.error, _FINAL) or time.monotonic() - started >= timeout_s):
                    raise self.error
                self._ended.wait(_POLL_S)
        return self.dataset, time.monotonic() - started

    def close(self) -> None:
        """Cancel the fetch and close the samples; what was received stays. May be called twice."""
        self.stopping.set()
        self._thread.join(5.0)
        if self.dataset is not None:
            self.dataset.close()

    def _run(self) -> None:
        pause_s = _FIRST_RETRY_S
        while not self.stopping.is_set():
            try:
                self.dataset, self.error = self._shards.obtain(self, self._is_training), None
                return self._ended.set()
            except Exception as error:  # noqa: BLE001 - `wait` raises it
                other = UsageError(f"shard {self.index}: {type(error).__name__}: {error}. It is retried.")
                self.error = error if isinstance(error, ForebayError) else other
            if isinstance(self.error, _FINAL) or self.stopping.is_set():
                return self._ended.set()
            log.warning("download of shard %d failed, retrying in %.0f s: %s", self.index, pause_s, self.error)
            self.stopping.wait(pause_s)
            pause_s = min(_MAX_RETRY_S, 2 * pause_s)


def fetch_in_process(shards: ShardCache, shard: Shard, stop: threading.Event) -> tuple[int, float]:
    """`ShardCache.fetch` in a process. Raises UsageError, too, if the process dies.

    Credentials are in the environment, which the process inherits.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "forebay.load.shard_cache"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
    ) as process:  # fmt: skip
        message: bytes | None = pickle.dumps((shards.arguments, shard))
        try:
            while True:
                try:
                    data, _ = process.communicate(message, _POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    message = None
                    if stop.is_set():
                        raise _cancelled(shard.index) from None
        finally:
            process.kill()  # What it received stays.
    if process.returncode:
        raise UsageError(
            f"shard {shard.index}: the process that fetched it ended with code {process.returncode} before it was "
            "complete. It is retried."
        )
    result: tuple[int, float] | ForebayError = pickle.loads(data)
    if isinstance(result, ForebayError):
        raise result
    return result


def main() -> None:
    """Fetch the shard that the standard input names, and write the result. Ends with its parent."""
    (*arguments, settings), shard = pickle.load(sys.stdin.buffer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles it.
    with contextlib.suppress(AttributeError, OSError):  # Without prctl, it ends when it is complete.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.nice(19)
    result: tuple[int, float] | ForebayError
    try:
        with ShardCache(*arguments, **settings) as shards:
            result = shards.fetch(shard, threading.Event())
    except ForebayError as error:
        result = error
    sys.stdout.buffer.write(pickle.dumps(result))


def _chunks(info: SliceInfo) -> NDArray[np.int64]:
    return np.arange(num_chunks(info.bytes, info.chunk_bytes))


def _cancelled(index: int) -> UsageError:
    return UsageError(f"shard {index}: its fetch was cancelled. Request it again.")


if __name__ == "__main__":
    main()
