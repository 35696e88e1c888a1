"""`LeaseState` for threads: one that uses samples, some that fetch slices, and one that talks to the scheduler.

Hides the lock, the waits and the clock; every rule is in `lease.state`.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from forebay.lease.state import ActiveLease, LeaseState

T = TypeVar("T")
_POLL_S = 1.0  # a wait checks its condition at least this often


class LeaseBuffer:
    """The leases of one worker. Threads share it; reading a single attribute of `state` needs no lock."""

    def __init__(self, state: LeaseState) -> None:
        self.state = state
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def locked(self) -> Iterator[LeaseState]:
        """The state, locked for a change; threads that wait check it afterwards."""
        with self._changed:
            yield self.state
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more is taken, fetched or requested; threads that wait return. May be repeated."""
        with self.locked() as state:
            state.closed = True

    # The thread that forms batches, and the one that uses them.

    def wait(self, get: Callable[[], T | None], interrupted: Callable[[], bool] = lambda: False) -> T | None:
        """The first result of `get`, called with the lock, that is not None; None when closed or interrupted."""
        with self._changed:
            while not (self.state.closed or interrupted()):
                if (result := get()) is not None:
                    return result
                self._changed.wait(_POLL_S)
        return None

    def used(self, parts: Sequence[tuple[ActiveLease, int]], step: int) -> None:
        """See `LeaseState.used`."""
        with self._changed:
            self.state.used(parts, step, time.monotonic())
            if any(lease.is_spent for lease, _ in parts):
                self._changed.notify_all()

    # The thread that talks to the scheduler.

    def wait_due(self) -> bool:
        """Wait until a request is due; False when closed."""
        with self._changed:
            while not self.state.closed:
                now = time.monotonic()
                if (due_at := self.state.due_at(now)) <= now:
                    return True
                self._changed.wait(min(due_at - now, _POLL_S))
        return False
