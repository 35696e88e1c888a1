"""The samples of one shard, and how it arrives: in a thread, tried again until it is there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ForebayError, IntegrityError, NetworkError, UsageError
from forebay.formats.foreign import map_file
from forebay.formats.npy import vector_in
from forebay.load.shard_check import SampleCheck, read_ids
from forebay.store.large import Fetched
from forebay.store.locks import Lock
from forebay.store.shards import Judge, Pair, ShardFolder

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

    def __init__(
        self, index: int, seq_len: int, lock: Lock, *, pair: Pair | None = None, arrival: Arrival | None = None
    ) -> None:
        self.index = index
        self.seq_len = seq_len
        self._lock = lock
        self._arrival = arrival
        self._samples: NDArray[Any] | None = None
        self._closed = False
        if pair is not None:
            self.sample_ids = read_ids(pair.ids)
            self._settle(pair, None)
        else:
            assert arrival is not None and arrival.check is not None
            self.sample_ids = arrival.check.ids

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Tokens of a sample: U16 or U32 [L], a view that must not be written; waits where it is on its way."""
        self._check_open()
        if not -len(self) <= index < len(self):
            raise IndexError(f"shard {self.index}: expected a sample below {len(self)}, got {index}.")
        arrival = self._arrival
        found: NDArray[Any] | None = None
        if self._samples is None and arrival is not None:
            found = arrival.sample(index % len(self))
        if found is None:  # The whole file is there.
            assert self._samples is not None
            found = self._samples[index]
        return found

    def take(self, indexes: NDArray[np.int64]) -> NDArray[Any]:
        """Tokens of samples: U16 or U32 [B, L], a copy."""
        self._check_open()
        if self._samples is not None:
            taken: NDArray[Any] = self._samples[indexes]
            return taken
        return np.stack([self[int(i)] for i in indexes])

    @property
    def is_whole(self) -> bool:
        """Whether all its samples are there."""
        return self._samples is not None

    def close(self) -> None:
        """Drop the maps and let the files be removed: their disk space is free once they are. May be called twice.

        A view that was given out keeps its file's space until it is dropped.
        """
        self._closed = True
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.forget()
        self._samples = None
        self.sample_ids = np.empty(0, np.uint64)
        self._lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"shard {self.index}: it is closed. Read it before the next shard is active.")

    def _settle(self, pair: Pair, kind: np.dtype[Any] | None) -> None:
        """Read from the whole file from now on; the arrival is needed no more."""
        memory = map_file(pair.tokens)
        if kind is None:
            kind = np.dtype("<u2") if len(memory) // (len(self) * self.seq_len) == 2 else np.dtype("<u4")
        vector = vector_in(pair.tokens, len(memory), kind)
        samples = memory[vector.offset :].view(vector.kind).reshape(-1, self.seq_len)
        assert len(samples) == len(self), (len(samples), len(self))
        self._samples = samples
        self._arrival = None


class Arrival:
    """One shard on its way here, in a thread of its own that keeps it from being removed.

    Args:
        before: Called before each attempt; raises what makes it no use.
        after: Not begun before this is set.
        obtain: In place of the folder's.

    Attributes:
        received, total: Bytes of the tokens.
        fetched_bytes, fetched_s: What this process did.
        error: Of the last attempt, if it failed.
    """

    def __init__(
        self,
        folder: ShardFolder,
        index: int,
        before: Callable[[int], object],
        after: threading.Event | None = None,
        obtain: Callable[..., tuple[Pair, Fetched | None]] | None = None,
    ) -> None:
        self.index = index
        self.done = threading.Event()
        self.pair: Pair | None = None
        self.error: ForebayError | None = None
        self.final = False
        self.received = self.total = self.fetched_bytes = 0
        self.fetched_s = 0.0
        self.check: SampleCheck | None = None
        self._before = before
        self._after = after
        self._obtain = obtain or folder.obtain
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._lock: Lock | None = folder.use(index)
        self._dataset: ShardDataset | None = None
        self._thread = threading.Thread(target=self._run, name=f"shard-{index}", daemon=True)
        self._thread.start()

    def wait(self, first: Literal["shard", "slice"], give_up_s: float) -> float:
        """Wait until it is there, or its first samples; how long it took, in seconds.

        Raises:
            ForebayError: Of the last attempt, after `give_up_s`, or at once where no other is of use.
        """
        began = told = time.monotonic()
        with self._changed:
            while self.pair is None:
                if first == "slice" and self.check is not None and self.check.verified:
                    break
                waited = time.monotonic() - began
                if self._stop.is_set():
                    raise UsageError(f"shard {self.index}: was given up. Ask for it again.")
                if self.error is not None and (self.final or waited >= give_up_s):
                    raise self.error
                self._changed.wait(0.05 if first == "slice" else 0.5)
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
            assert self._lock is not None
            lock, self._lock = self._lock, None
            if self.pair is not None:
                return ShardDataset(self.index, seq_len, lock, pair=self.pair)
            self._dataset = ShardDataset(self.index, seq_len, lock, arrival=self)
            return self._dataset

    def forget(self) -> None:
        """Its dataset is closed."""
        with self._changed:
            self._dataset = None

    def sample(self, index: int) -> NDArray[Any] | None:
        """A copy of one sample [L] of what is on its way; waits for it. None once the whole shard is there.

        Raises the error if it will not come.
        """
        while True:
            check = self.check
            if check is None:
                return None
            if (found := check.sample(index, 0.5)) is not None:
                return found
            if self._stop.is_set() or (self.final and self.error is not None):
                raise self.error or UsageError(f"shard {self.index}: was closed while its samples were read.")

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
        while self._after is not None and not self._after.wait(0.1):
            if self._stop.is_set():
                return
        pause_s = _FIRST_RETRY_S
        while not self._stop.is_set():
            try:
                self._before(self.index)
                pair, fetched = self._obtain(
                    self.index, stop=self._stop, on_progress=self._progress, on_judge=self._judging
                )
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
                if fetched is not None:
                    self.fetched_bytes, self.fetched_s = fetched.bytes_fetched, fetched.seconds
                self.pair, self.error = pair, None
                if self._dataset is not None:
                    kind = self.check.vector.kind if self.check is not None and self.check.vector is not None else None
                    self._dataset._settle(pair, kind)
                check, self.check, self._dataset = self.check, None, None
                if check is not None:
                    check.close()
                self.done.set()
                self._changed.notify_all()
            return

    def _fail(self, error: ForebayError, final: bool) -> None:
        with self._changed:
            self.error, self.final = error, final
            self._changed.notify_all()

    def _progress(self, received: int, total: int) -> None:
        self.received, self.total = received, total

    def _judging(self, judge: Judge) -> None:
        assert isinstance(judge, SampleCheck)
        with self._changed:
            self.check = judge
            self._changed.notify_all()
