"""What the processes that share a cache's directory know of each other: a lock, slots, and how much is stored.

`DIR/state` is mapped by all. A process has a slot for as long as it uses the directory; what it reserves is in the
state, by slot, so that it counts until the files were counted again if the process is killed.
"""

import contextlib
import logging
import os
import struct
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from forebay.arrays import U8
from forebay.errors import UsageError
from forebay.fetch.chunk_file import NUM_SLOTS
from forebay.machine import open_own, own_directory
from forebay.maps import map_file
from forebay.storage.locks import Lock, acquire, is_locked, try_acquire

log = logging.getLogger("forebay.cache")
_RAM = Path("/dev/shm")
_STATE = struct.Struct(f"<8sq{NUM_SLOTS}I{NUM_SLOTS}q")  # Magic, stored bytes; generation, reserved bytes by slot.
_MAGIC = b"FBSTATE2"


def cache_directory(directory: str | Path) -> Path:
    """Return the directory of a cache; for `ram` one of this user in /dev/shm."""
    return _RAM / f"forebay-{os.getuid()}" if directory == "ram" else Path(directory).expanduser()


class SharedState(ABC):
    """The state of a cache's directory; `_lock` guards it between threads and processes."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = cache_directory(directory)
        self._locks, self._maps = self.directory / "locks", self.directory / "chunks"

    def after_fork(self) -> None:
        self._threads = threading.RLock()
        self._slot: Lock | None = None
        self._slot_number = self._generation = 0
        self._state: U8 | None = None
        self._state_inode = 0
        self._depth = 0

    @abstractmethod
    def _forget(self) -> None:
        """The directory was deleted or made: what is known of its files is void."""

    @abstractmethod
    def _recount(self, always: bool = False, dead_slot: int | None = None) -> bool:
        """Count the files again if a process died with a reservation; whether it was necessary."""

    def _leave(self) -> None:
        """Give the slot back; the next use of the lock takes one again."""
        slot, self._slot, self._state = self._slot, None, None
        if slot is not None:
            slot.release()

    @property
    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """The lock of the directory, for threads and processes; may be taken again by its thread."""
        with self._threads:
            if self._depth:
                yield
                return
            try:
                if self._state is None:
                    self._make_directories()
                try:
                    lock = acquire(self._locks / "room")
                except FileNotFoundError:
                    log.warning("%s was deleted while it was in use. Created again.", self.directory)
                    self._make_directories()
                    lock = acquire(self._locks / "room")
                self._depth = 1
                try:
                    self._enter()
                    yield
                finally:
                    self._depth = 0
                    lock.release()
            except OSError as error:
                raise UsageError(
                    f"cache: cannot write in {self.directory}: {error.strerror or error}. Check its permissions and "
                    "its disk, or choose another directory."
                ) from error

    def _make_directories(self) -> None:
        for directory in (self.directory, self._locks, self._maps):
            own_directory(directory)

    def _enter(self) -> None:
        """Map the state, and take a slot; again if the directory was deleted meanwhile."""
        path = self.directory / "state"
        try:
            inode = path.stat().st_ino
        except FileNotFoundError:
            inode = 0
        if self._state is None or inode != self._state_inode:
            own_directory(self._maps)  # Again, with the lock: another process may have deleted it.
            is_new = not inode or path.stat().st_size != _STATE.size
            if is_new:
                with open(path, "wb", opener=open_own) as file:
                    file.write(_STATE.pack(_MAGIC, 0, *[0] * (2 * NUM_SLOTS)))
            with open(path, "r+b", opener=open_own) as file:
                self._state_inode = os.fstat(file.fileno()).st_ino
                self._state = map_file(file, is_writable=True)
            numbers = self._state[8:]
            self._totals = numbers[:8].view(np.int64)
            self._generations = numbers[8 : 8 + 4 * NUM_SLOTS].view(np.uint32)
            self._reserved = numbers[8 + 4 * NUM_SLOTS :].view(np.int64)
            self._forget()
            if self._slot is not None:
                self._slot.release()
                self._slot = None
            self._recount(is_new)
        if self._slot is None:
            self._take_slot()

    def _take_slot(self) -> None:
        for number in range(NUM_SLOTS):
            lock = try_acquire(self._locks / f"process-{number}")
            if lock is None:
                continue
            self._slot, self._slot_number = lock, number
            weakref.finalize(self, lock.release)
            if self._reserved[number]:  # A process was killed: its files may be larger than what was counted.
                self._recount(True, number)
            self._generations[number] += 1
            self._generation = int(self._generations[number])
            return
        raise UsageError(
            f"cache: {self.directory} is used by {NUM_SLOTS} processes, as many as can share one. Choose another."
        )

    @property
    def _stored(self) -> int:
        return int(self._totals[0])

    @_stored.setter
    def _stored(self, num_bytes: int) -> None:
        self._totals[0] = max(0, num_bytes)

    def _live(self) -> dict[int, int]:
        """The generation of each slot whose process lives."""
        live = {}
        for number in np.flatnonzero(self._generations).tolist():
            is_own = self._slot is not None and number == self._slot_number
            if is_own or is_locked(self._locks / f"process-{number}"):
                live[number] = int(self._generations[number])
        return live
