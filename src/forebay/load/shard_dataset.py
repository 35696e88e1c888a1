"""The samples of one shard, and its download in a thread, retried until it is complete."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ForebayError, IntegrityError, NetworkError, UsageError
from forebay.formats.external import map_file
from forebay.formats.vectors import vector_in
from forebay.load.shard_check import read_ids
from forebay.load.shard_folder import ShardFiles
from forebay.storage.locks import Lock

_FIRST_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_LOG_EVERY_S = 10.0
log = logging.getLogger("forebay.load")


class ShardDataset:
    """The samples of one shard, all verified by their ids.

    Attributes:
        index: Of the shard.
        sample_ids: U64 [N], a view of the mapped file.
        seq_len: Tokens of a sample.
    """

    def __init__(self, files: ShardFiles, seq_len: int, lock: Lock) -> None:
        self.index = files.index
        self.seq_len = seq_len
        self._lock = lock
        self.sample_ids = read_ids(files.ids)
        memory = map_file(files.tokens)
        wide = len(memory) // (len(self) * seq_len) != 2
        vector = vector_in(files.tokens, len(memory), "<u4" if wide else "<u2")
        self._samples: NDArray[Any] | None = memory[vector.offset :].view(vector.kind).reshape(-1, seq_len)
        assert len(self._samples) == len(self), (len(self._samples), len(self))

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Tokens of a sample: U16 or U32 [L], a read-only view."""
        sample: NDArray[Any] = self._open_samples()[index]
        return sample

    def take(self, indexes: NDArray[np.int64]) -> NDArray[Any]:
        """Tokens of samples [B]: U16 or U32 [B, L], a copy."""
        samples: NDArray[Any] = self._open_samples()[indexes]
        return samples

    def close(self) -> None:
        """Unmap the files, so that they can be removed. A view of them keeps its disk space. May be called twice."""
        self._samples = None
        self.sample_ids = np.empty(0, np.uint64)
        self._lock.release()

    def _open_samples(self) -> NDArray[Any]:
        if self._samples is None:
            raise UsageError(f"shard {self.index}: it is closed. Read it before the next shard is active.")
        return self._samples


class ShardDownload:
    """The download of one shard, in a thread, by `obtain` (see `ShardFolder.obtain`).

    `lock` keeps the shard from being removed; it is released by `stop`, or belongs to the opened dataset.
    """

    def __init__(self, index: int, lock: Lock, obtain: Callable[..., ShardFiles]) -> None:
        self.index = index
        self.files: ShardFiles | None = None  # Set when it is complete.
        self.error: ForebayError | None = None  # Of the last attempt, if it failed.
        self.is_final = False  # The error will not go away.
        self.received = self.total = 0  # Bytes of the tokens.
        self._obtain = obtain
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._lock: Lock | None = lock
        self._thread = threading.Thread(target=self._run, name=f"shard-{index}", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> float:
        """Wait until the shard is complete; returns how long, in seconds.

        Raises:
            ForebayError: Of the last attempt, if it is final, or after `timeout_s`.
        """
        started_at = logged_at = time.monotonic()
        with self._changed:
            while self.files is None:
                waited_s = time.monotonic() - started_at
                if self._stop.is_set():
                    raise UsageError(f"shard {self.index}: its download was cancelled. Request it again.")
                if self.error is not None and (self.is_final or waited_s >= timeout_s):
                    raise self.error
                self._changed.wait(0.5)
                if time.monotonic() - logged_at >= _LOG_EVERY_S:
                    logged_at = time.monotonic()
                    log.warning("training waits for %s", self._describe(logged_at - started_at))
        return time.monotonic() - started_at

    def _describe(self, waited_s: float) -> str:
        part = f"{self.received / self.total:.0%} of {self.total} bytes" if self.total else "nothing yet"
        fault = f"; the last attempt failed: {self.error}" if self.error is not None else ""
        return f"shard {self.index} since {waited_s:.1f} s: {part} received{fault}"

    def open(self, seq_len: int) -> ShardDataset:
        """The samples, after `wait`. The lock then belongs to the dataset."""
        with self._changed:
            assert self._lock is not None and self.files is not None
            lock, self._lock = self._lock, None
            return ShardDataset(self.files, seq_len, lock)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Cancel the download; partial files stay. May be called twice."""
        self._stop.set()
        self._thread.join(timeout_s)
        with self._changed:
            if self._lock is not None:
                self._lock.release()
                self._lock = None
            self._changed.notify_all()

    def _run(self) -> None:
        pause_s = _FIRST_RETRY_S
        while not self._stop.is_set():
            try:
                files = self._obtain(self.index, stop=self._stop, on_progress=self._progress)
            except (NetworkError, UsageError) as error:
                if self._stop.is_set():
                    return
                self._set(None, error, isinstance(error, IntegrityError))
                if self.is_final:
                    return
                log.warning("download of shard %d failed, retrying in %.0f s: %s", self.index, pause_s, error)
                self._stop.wait(pause_s)
                pause_s = min(_MAX_RETRY_S, 2 * pause_s)
            except ForebayError as error:
                return self._set(None, error, True)
            except Exception as error:  # noqa: BLE001 - `wait` raises it
                return self._set(None, UsageError(f"shard {self.index}: {type(error).__name__}: {error}"), True)
            else:
                return self._set(files, None, False)

    def _set(self, files: ShardFiles | None, error: ForebayError | None, is_final: bool) -> None:
        with self._changed:
            self.files, self.error, self.is_final = files, error, is_final
            self._changed.notify_all()

    def _progress(self, received: int, total: int) -> None:
        self.received, self.total = received, total
