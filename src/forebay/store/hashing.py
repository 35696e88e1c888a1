"""Threads that hash partial files as far as they are contiguous, beside the connections that fill them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from forebay.store.pieces import PartFile

_AHEAD_BYTES = 1 << 20  # less is not worth waking a thread for


class Hashed(Protocol):
    """What a hasher needs: the file, and a place to remember that one is at it."""

    @property
    def file(self) -> PartFile: ...

    hashing: bool


H = TypeVar("H", bound=Hashed)


class Hashers(Generic[H]):
    """Hash whatever they are told to look at; one thread at a file.

    Args:
        whole: Called when a file's hash is complete, from a hashing thread; it may begin the file anew.
        failed: Called with whatever went wrong.
    """

    def __init__(
        self, num_threads: int, whole: Callable[[H], object], failed: Callable[[H, Exception], object]
    ) -> None:
        self._whole = whole
        self._failed = failed
        self._queue: SimpleQueue[H | None] = SimpleQueue()
        self.threads = [threading.Thread(target=self._run, name=f"hash-{i}", daemon=True) for i in range(num_threads)]

    def start(self) -> None:
        """Start the threads, once."""
        for thread in self.threads:
            thread.start()

    def look(self, work: H) -> None:
        """Have a thread hash on, if none does and there is enough, or the end."""
        file = work.file
        if work.hashing:
            return
        with file.lock:
            ready = file.contiguous() - file.hashed
            if work.hashing or (ready < _AHEAD_BYTES and file.hashed + ready < file.num_bytes):
                return
            work.hashing = True
        self._queue.put(work)

    def stop(self) -> None:
        """End the threads after what they are at."""
        for _ in self.threads:
            self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                if work.file.hash_on():
                    self._whole(work)
            except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
                self._failed(work, error)
            work.hashing = False
            if work.file.is_open:
                self.look(work)
