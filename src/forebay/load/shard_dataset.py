"""The samples of one shard, and how it arrives: in a thread, tried again until it is there."""

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
from forebay.load.shard_folder import Pair
from forebay.storage.locks import Lock

_FIRST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0
_TELL_S = 10.0
log = logging.getLogger("forebay.load")


class ShardDataset:
    """The samples of one shard. Each has been compared with its id before it is given out.

    Attributes:
        index: Of the shard.
        sample_ids: U64 [N], a view of the map of their file.
        seq_len: Tokens of a sample.
    """

    def __init__(self, pair: Pair, seq_len: int, lock: Lock) -> None:
        self.index = pair.index
        self.seq_len = seq_len
        self._lock = lock
        self.sample_ids = read_ids(pair.ids)
        memory = map_file(pair.tokens)
        wide = len(memory) // (len(self) * seq_len) != 2
        vector = vector_in(pair.tokens, len(memory), "<u4" if wide else "<u2")
        self._samples: NDArray[Any] | None = memory[vector.offset :].view(vector.kind).reshape(-1, seq_len)
        assert len(self._samples) == len(self), (len(self._samples), len(self))

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Tokens of a sample: U16 or U32 [L], a view that must not be written."""
        found: NDArray[Any] = self._opened()[index]
        return found

    def take(self, indexes: NDArray[np.int64]) -> NDArray[Any]:
        """Tokens of samples: U16 or U32 [B, L], a copy."""
        taken: NDArray[Any] = self._opened()[indexes]
        return taken

    def close(self) -> None:
        """Drop the maps and let the files be removed: their disk space is free once they are. May be called twice.

        A view that was given out keeps its file's space until it is dropped.
        """
        self._samples = None
        self.sample_ids = np.empty(0, np.uint64)
        self._lock.release()

    def _opened(self) -> NDArray[Any]:
        if self._samples is None:
            raise UsageError(f"shard {self.index}: it is closed. Read it before the next shard is active.")
        return self._samples


class Arrival:
    """One shard on its way here, in a thread of its own, by `obtain` (as `ShardFolder.obtain`).

    `lock` keeps it from being removed, and is released with it.
    """

    def __init__(self, index: int, lock: Lock, obtain: Callable[..., Pair]) -> None:
        self.index = index
        self.pair: Pair | None = None
        self.error: ForebayError | None = None  # Of the last attempt, if it failed.
        self.final = False
        self.received = self.total = 0  # Bytes of the tokens.
        self._obtain = obtain
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._lock: Lock | None = lock
        self._thread = threading.Thread(target=self._run, name=f"shard-{index}", daemon=True)
        self._thread.start()

    def wait(self, give_up_s: float) -> float:
        """Wait until it is there; how long it took, in seconds.

        The error of the last attempt is raised after `give_up_s`, or at once where no other is of use.
        """
        began = told = time.monotonic()
        with self._changed:
            while self.pair is None:
                waited = time.monotonic() - began
                if self._stop.is_set():
                    raise UsageError(f"shard {self.index}: was given up. Ask for it again.")
                if self.error is not None and (self.final or waited >= give_up_s):
                    raise self.error
                self._changed.wait(0.5)
                if time.monotonic() - told >= _TELL_S:
                    told = time.monotonic()
                    log.warning("training waits for %s", self.describe(told - began))
        return time.monotonic() - began

    def describe(self, waited_s: float) -> str:
        """Where it stands, for people."""
        part = f"{self.received / self.total:.0%} of {self.total} bytes" if self.total else "nothing yet"
        fault = f"; the last attempt failed: {self.error}" if self.error is not None else ""
        return f"shard {self.index} since {waited_s:.1f} s: {part} here{fault}"

    def open(self, seq_len: int) -> ShardDataset:
        """Its samples, once `wait` returned; the lock is the dataset's from now on."""
        with self._changed:
            assert self._lock is not None and self.pair is not None
            lock, self._lock = self._lock, None
            return ShardDataset(self.pair, seq_len, lock)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Give it up; what was fetched stays. May be called twice."""
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
                pair = self._obtain(self.index, stop=self._stop, on_progress=self._progress)
            except (NetworkError, UsageError) as error:
                if self._stop.is_set():
                    return
                self._fail(error, isinstance(error, IntegrityError))
                if self.final:
                    return
                log.warning("shard %d did not come, trying again in %.0f s: %s", self.index, pause_s, error)
                self._stop.wait(pause_s)
                pause_s = min(_MOST_RETRY_S, 2 * pause_s)
                continue
            except ForebayError as error:
                return self._fail(error, True)
            except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
                return self._fail(UsageError(f"shard {self.index}: {type(error).__name__}: {error}"), True)
            with self._changed:
                self.pair, self.error = pair, None
                self._changed.notify_all()
            return

    def _fail(self, error: ForebayError, final: bool) -> None:
        with self._changed:
            self.error, self.final = error, final
            self._changed.notify_all()

    def _progress(self, received: int, total: int) -> None:
        self.received, self.total = received, total
