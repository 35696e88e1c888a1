"""`LeaseState` for threads: one that uses samples, some that fetch slices, and one that talks to the scheduler.

Hides the lock, the waits and the clock; every rule is in `lease_state`.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from forebay.scheduler.messages import ExchangeReply, ExchangeRequest
from forebay.worker.lease_state import ActiveLease, LeaseState

T = TypeVar("T")
# A wait looks again after this, whatever was signalled.
_LOOK_S = 1.0


class LeaseBuffer:
    """The leases of one worker. Threads share it; reading a single attribute of `state` needs no lock."""

    def __init__(self, state: LeaseState, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = state
        self._clock = clock
        self._changed = threading.Condition()

    def close(self) -> None:
        """Nothing more is taken, fetched or requested; threads that wait return. May be repeated."""
        with self._changed:
            self.state.closed = True
            self._changed.notify_all()

    def clear(self) -> None:
        """As `LeaseState.clear`, once the other threads have ended."""
        with self._changed:
            self.state.clear()

    # The thread that uses samples.

    def next_to_use(self) -> ActiveLease | None:
        """As `LeaseState.next_to_use`, but waits for one. None when closed."""
        return self._wait(self.state.next_to_use, counted=True)

    def take(self, lease: ActiveLease) -> tuple[int, int] | None:
        """The samples [start, stop) of the next step; waits at the horizon. None when there are no more."""
        return self._wait(
            lambda: self.state.take(lease, self._clock()), lambda: lease.over or lease.taken >= lease.stop, True
        )

    def used(self, lease: ActiveLease, step: int) -> None:
        """The samples taken last were used, in this step."""
        with self._changed:
            self.state.used(lease, step, self._clock())
            if lease.used >= lease.stop:
                self._changed.notify_all()

    def finish(self, lease: ActiveLease) -> None:
        """Its slice is not in use any more."""
        self._change(lambda: self.state.finish(lease))

    def describe_wait(self) -> str:
        """What keeps the next step from starting, as text for a log line."""
        with self._changed:
            return self.state.describe_wait()

    # The threads that fetch.

    def next_to_fetch(self) -> ActiveLease | None:
        """As `LeaseState.next_to_fetch`, but waits for one. None when closed."""
        return self._wait(self.state.next_to_fetch)

    def fetched(self, lease: ActiveLease, path: Path, took_s: float, proof: str = "") -> bool:
        """Its slice is in the cache and pinned. Whether it is still needed."""
        return self._change(lambda: self.state.fetched(lease, path, took_s, proof))

    def fail(self, lease: ActiveLease, reason: str) -> None:
        """Its slice cannot be used; the scheduler leases it to others."""
        self._change(lambda: self.state.fail(lease, reason))

    def release(self, lease: ActiveLease) -> None:
        """Another worker may have it; what was used of it stays used."""
        self._change(lambda: self.state.release(lease))

    def report(self, peer_id: str, sha256: str, reason: str, *, wrong: bool, rejected: bool = True) -> None:
        """As `LeaseState.report`."""
        self._change(lambda: self.state.report(peer_id, sha256, reason, wrong=wrong, rejected=rejected))

    # The thread that talks to the scheduler.

    def wait_due(self) -> bool:
        """Wait until a request is due; False when closed."""
        with self._changed:
            while not self.state.closed:
                now = self._clock()
                if (at := self.state.due_at(now)) <= now:
                    return True
                self._changed.wait(min(at - now, _LOOK_S))
        return False

    def request(self, last: bool = False) -> ExchangeRequest:
        """As `LeaseState.request`."""
        with self._changed:
            return self.state.request(self._clock(), last)

    def receive(self, request: ExchangeRequest, reply: ExchangeReply) -> None:
        """As `LeaseState.receive`."""
        self._change(lambda: self.state.receive(request, reply, self._clock()))

    def _change(self, act: Callable[[], T]) -> T:
        with self._changed:
            result = act()
            self._changed.notify_all()
            return result

    def _wait(
        self, get: Callable[[], T | None], never: Callable[[], bool] = lambda: False, counted: bool = False
    ) -> T | None:
        """The first result of `get` that is not None; None when closed or it can never be had."""
        with self._changed:
            started = self._clock()
            while not (self.state.closed or never()):
                if (result := get()) is not None:
                    if counted:
                        self.state.counts.waited_s += self._clock() - started
                    return result
                self._changed.wait(_LOOK_S)
        return None
