"""Which files of a cache were verified, as they were then: a text file that all processes append to.

A line is `SHA256 SIZE MTIME_NS INODE`. What cannot be read as such, as a kill or a full disk may leave it, counts as no
record: the slice is hashed again. Once most lines are of slices that are gone, the file is written anew.

Cost: 0.2 KB of memory a slice, a line of 120 bytes a slice fetched; 250,000 lines are read in 0.3 s.
"""

import logging
import os
import threading
import time
from pathlib import Path

from forebay.storage.atomic import atomic_write
from forebay.store.locks import at_fork, take

_MIN_LINES = 4096  # Fewer are not worth writing anew.
log = logging.getLogger("forebay.store")


class VerifiedIndex:
    """The records of one cache directory. Safe between threads and processes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "verified"
        self._marks: dict[bytes, bytes] = {}
        self._inode = self._offset = self._num_lines = 0
        self._max_lines = _MIN_LINES
        self.after_fork()
        at_fork(self)

    def after_fork(self) -> None:
        """A child has a lock of its own."""
        self._lock = threading.Lock()

    def matches(self, sha256: str, found: os.stat_result) -> bool:
        """Whether a file with this status is the one that was verified."""
        name, mark = sha256.encode(), _mark(found)
        if self._marks.get(name) != mark:
            with self._lock:
                self._read()
        return self._marks.get(name) == mark

    def record(self, path: Path) -> None:
        """Record a file that was just verified. Raises FileNotFoundError if it is gone."""
        now = time.time_ns()
        os.utime(path, ns=(now, now - 10**9))  # So that writing to it within this tick of the clock changes the time.
        name, mark = path.name.encode(), _mark(path.stat())
        with self._lock:
            self._marks[name] = mark
            try:
                with take(self._path) as lock:
                    os.lseek(lock.descriptor, 0, os.SEEK_END)
                    os.write(lock.descriptor, name + b" " + mark + b"\n")
                    self._num_lines += 1
                    if self._num_lines > self._max_lines:
                        self._compact()
            except OSError as error:
                log.warning("%s: cannot be written (%s); later processes hash %s again.", self._path, error, path.name)

    def _read(self) -> None:
        """The lines that were added since; all of them, if the file was written anew."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset, self._num_lines, self._marks = found.st_ino, 0, 0, {}
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        data = data[: data.rfind(b"\n") + 1]
        lines = data.splitlines()
        self._offset += len(data)
        self._num_lines += len(lines)
        self._marks.update(line.partition(b" ")[::2] for line in lines)

    def _compact(self) -> None:
        """Write the file anew if most of its lines are of slices that are gone."""
        self._read()
        here = {item.name.encode() for item in os.scandir(self._directory)}
        self._max_lines = _MIN_LINES + 2 * len(here)
        if self._num_lines > self._max_lines:
            atomic_write(self._path, (b"%s %s\n" % item for item in self._marks.items() if item[0] in here))


def _mark(found: os.stat_result) -> bytes:
    return b"%d %d %d" % (found.st_size, found.st_mtime_ns, found.st_ino)
