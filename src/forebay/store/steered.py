"""One slice that is wanted of a swarm, from the wish until its bytes are verified."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.dataset.manifest import SliceInfo
from forebay.store.work import Transfer


class SteeredTransfer:
    """One slice that is wanted: waits for its turn, then comes. See `flights.Transfer`.

    Attributes:
        done: Set when it ended, well or not; from then on nothing is written to `part`.
        error: Why it failed, or None: then the file is whole, verified, synced and exactly `info.bytes` long.
    """

    def __init__(self, info: SliceInfo, part: Path, wanted_at: float) -> None:
        self.info = info
        self.part = part
        self.wanted_at = wanted_at
        self.done = threading.Event()
        self.error: Exception | None = None
        self.current: Transfer | None = None
        self.cancelled = False
        self._callbacks: list[Callable[[Any], None]] = []
        self._lock = threading.Lock()

    @property
    def received(self) -> int:
        """Bytes there so far."""
        current = self.current
        return self.info.bytes if self.done.is_set() and self.error is None else current.received if current else 0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it ended; whether it did in time."""
        return self.done.wait(timeout)

    def on_done(self, callback: Callable[[Any], None]) -> None:
        """Call back once when it ended, from another thread; at once, from this one, if it has."""
        with self._lock:
            if not self.done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, error: Exception | None) -> None:
        """It ended. The first end counts."""
        with self._lock:
            if self.done.is_set():
                return
            self.error = error
            self.done.set()
        for callback in self._callbacks:
            callback(self)
