"""Lock files between processes: the kernel lets go of them when their process dies, however it dies.

A child made by fork would share its parent's locks and keep them alive after the parent's death: it closes its
copies as it starts, and what registered with `at_fork` forgets what it held.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path
from typing import Any

SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX


class Lock:
    """One lock that is held. `release` may be called twice."""

    __slots__ = ("__weakref__", "descriptor", "path")

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        _locks.add(self)

    def release(self) -> None:
        """Let go of it, also where a forked child has a copy."""
        descriptor, self.descriptor = self.descriptor, -1
        _locks.discard(self)
        if descriptor >= 0:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
_forked: weakref.WeakSet[Any] = weakref.WeakSet()


def acquire(path: Path, kind: int = EXCLUSIVE) -> Lock:
    """Hold a lock, waiting for it. The file is made if absent."""
    lock = _lock_file(path, kind, os.O_CREAT)
    assert lock is not None
    return lock


def try_acquire(path: Path, kind: int = EXCLUSIVE) -> Lock | None:
    """Hold a lock if nobody, in this process or another, holds one that excludes it."""
    return _lock_file(path, kind | fcntl.LOCK_NB, os.O_CREAT)


def is_locked(path: Path, kind: int) -> bool:
    """Whether anybody, in this process or another, holds a lock on this file that excludes one of this kind."""
    try:
        lock = _lock_file(path, kind | fcntl.LOCK_NB, 0)
    except FileNotFoundError:
        return False
    if lock is None:
        return True
    lock.release()
    return False


def at_fork(holder: Any) -> None:
    """Have `holder.after_fork()` called in every child, which has one thread only; kept weakly."""
    _forked.add(holder)


def _lock_file(path: Path, operation: int, flags: int) -> Lock | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        try:
            fcntl.flock(descriptor, operation)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        if os.fstat(descriptor).st_nlink:
            return Lock(path, descriptor)
        os.close(descriptor)  # Cleaned away between the two calls: a lock that others would not see.


def _after_fork() -> None:
    for lock in list(_locks):
        if lock.descriptor >= 0:
            os.close(lock.descriptor)  # Not unlocked: the parent still holds it.
            lock.descriptor = -1
    _locks.clear()
    for holder in list(_forked):
        holder.after_fork()


os.register_at_fork(after_in_child=_after_fork)
