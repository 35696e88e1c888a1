"""Who a worker is to the scheduler beyond its peer id: a session, which a restart on the same cache goes on with.

A worker that was killed and comes back says with its first exchange that it holds nothing, so that the leases of
before go to others at once and not when they expire. Each process on a cache has a session of its own: the first
whose file nobody has locked. Attempts are numbered from what the file counts, so that they rise over restarts.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from forebay.store.locks import Lock, try_take

_CONTENT = re.compile(rb"([0-9a-f]{16}) (\d{1,9})\n")


@dataclass(frozen=True)
class Session:
    """A session's name, and the number before that of its first attempt. Held until `close` or the process's end."""

    name: str
    first_attempt: int
    lock: Lock

    def close(self) -> None:
        """Let another process have it. May be repeated."""
        self.lock.release()


def open_session(directory: Path) -> Session:
    """The first session of a cache's directory that nobody has, begun or gone on with."""
    numbers = itertools.count()
    while (lock := try_take(directory / f"session-{next(numbers)}")) is None:
        pass
    found = _CONTENT.fullmatch(os.pread(lock.descriptor, 64, 0))
    name = found[1].decode() if found else secrets.token_hex(8)
    run = int(found[2]) + 1 if found else 0
    content = f"{name} {run}\n".encode()
    os.pwrite(lock.descriptor, content, 0)
    os.ftruncate(lock.descriptor, len(content))
    return Session(name, run << 32, lock)
