"""Lock files between processes. The kernel releases a lock when its process dies.

A forked child would share its parent's locks and keep them after the parent's death, so it closes its copies when it
starts, and calls `after_fork` of the objects that registered with `at_fork`.
"""

import fcntl
import logging
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError, UsageError
from forebay.storage.retry import log_while_waiting

log = logging.getLogger("forebay")


class Lock:
    """An acquired lock. `release` may be called twice."""

    __slots__ = ("__weakref__", "descriptor", "path")

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        _locks.add(self)

    def release(self) -> None:
        """Release it, also if a forked child has a copy."""
        descriptor, self.descriptor = self.descriptor, -1
        _locks.discard(self)
        if descriptor >= 0:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def acquire(path: Path) -> Lock:
    """Wait for a lock and acquire it. The file is created if absent."""
    if (lock := try_acquire(path)) is None:
        with log_while_waiting(log, lambda: f"the lock {path}, which {holder(path)} has"):
            lock = _lock_file(path, fcntl.LOCK_EX, os.O_CREAT)
    assert lock is not None
    return lock


def acquire_now(path: Path, what: str) -> Lock:
    """Acquire a lock; raise UsageError if this or another process has it."""
    if (lock := try_acquire(path)) is None:
        raise locked_error(path, what)
    return lock


def locked_error(path: Path, what: str, fault: type[ForebayError] = UsageError) -> ForebayError:
    """Return the error of `what`, which another process writes."""
    return fault(f"{what}: {holder(path)} writes it. Wait for its end, or name another.")


def holder(path: Path) -> str:
    """Return which process has a file locked, for messages.

    The kernel names only processes of this machine and container.
    """
    with suppress(OSError):
        stat = path.stat()
        name = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            if name in (fields := line.split()) and "->" not in fields:
                return f"process {fields[-4]} on {socket.gethostname()}"
    return "another process"


def try_acquire(path: Path) -> Lock | None:
    """Acquire a lock; None if this or another process has it."""
    return _lock_file(path, fcntl.LOCK_EX | fcntl.LOCK_NB, os.O_CREAT)


def is_locked(path: Path) -> bool:
    """Whether this or another process has a lock on this file."""
    try:
        lock = _lock_file(path, fcntl.LOCK_EX | fcntl.LOCK_NB, 0)
    except FileNotFoundError:
        return False
    if lock is None:
        return True
    lock.release()
    return False


def at_fork(owner: Any) -> None:
    """Call `owner.after_fork()` in every forked child, which has one thread only. Refers to `owner` weakly."""
    _owners.add(owner)


def _lock_file(path: Path, operation: int, flags: int) -> Lock | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
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
        os.close(descriptor)  # deleted between the two calls: others would not see the lock


def _after_fork() -> None:
    for lock in list(_locks):
        if lock.descriptor >= 0:
            os.close(lock.descriptor)  # not unlocked: the parent still has it
            lock.descriptor = -1
    _locks.clear()
    for owner in list(_owners):
        owner.after_fork()


os.register_at_fork(after_in_child=_after_fork)
