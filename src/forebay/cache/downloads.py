"""Transfers under way, the room they hold, and when to try again what failed."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.cache.cache import Reservation
from forebay.errors import ForebayError, UsageError
from forebay.storage.transfer_state import Transfer

_CLOSE_S = 0.4
_RETRY_S = 1.0
_MAX_RETRY_S = 60.0


@dataclass(eq=False)
class Download:
    """A transfer under way. `fault`: why a slice that came could not be named; `again`: the second for an epoch."""

    transfer: Transfer
    reservation: Reservation
    epoch: int | None
    cancelled: bool = False
    again: bool = False
    fault: OSError | None = None


class Downloads(dict[int, Download]):
    """The transfers of one run that are under way, by key. One thread changes it; others may look.

    A slice is named by the thread that ended its transfer, so that whoever waits for it need not wait for a look too.
    `sizes` are bytes; `on_done` is told the key of a transfer that ended, from any thread.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        start: Callable[[int, Path], Transfer],
        on_done: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__()
        self.counts = {"fetched_slices": 0, "fetched_bytes": 0, "repeated_fetches": 0, "failed": 0}
        self.counts |= {"refetched_slices": 0, "refetched_bytes": 0}
        self._sizes = sizes
        self._start, self._on_done, self._clock = start, on_done, clock
        self._not_before: dict[int, float] = {}
        self._failures: dict[int, int] = {}
        self._fetched: dict[int, int | None] = {}  # The epoch of the last fetch.
        self._lock = threading.Lock()  # Of the counts, and what was fetched.

    def num_bytes(self) -> int:
        """Of all slices under way."""
        return sum(self._sizes[key] for key in self)

    def start(self, key: int, reservation: Reservation, epoch: int | None) -> Exception | None:
        """Begin a transfer, which takes the reservation over: None, or why it failed at once. A second fetch for one
        `epoch` (any number that names it; None: no epoch) is counted."""
        try:
            transfer = self._start(key, reservation.part)
        except Exception as error:  # noqa: BLE001 - whoever waits for the slice gets it
            reservation.release()
            return self._fail(key, error)
        self[key] = flight = Download(transfer, reservation, epoch)
        transfer.on_done(lambda _: self._ended(key, flight))
        return None

    def cancel(self, key: int) -> None:
        """Make a transfer end soon; what it fetched stays, to go on with."""
        flight = self[key]
        if not flight.cancelled:
            flight.cancelled = True
            flight.transfer.cancel()

    def finish(self, key: int) -> tuple[bool, Exception | None]:
        """Forget a transfer that has ended: whether its slice is here now, and why not unless it was cancelled."""
        flight = self.pop(key)
        error = flight.transfer.error
        if error is not None:
            return False, None if flight.cancelled else self._fail(key, error)
        if flight.fault is not None:
            text = f"cache: cannot name {flight.reservation.part}: {flight.fault}. Check the directory."
            return False, self._fail(key, UsageError(text))
        self._failures.pop(key, None)
        return True, None

    def postpone(self, key: int, seconds: float) -> None:
        """Do not try a slice before so many seconds have passed."""
        self._not_before[key] = self._clock() + seconds

    def is_postponed(self, key: int) -> bool:
        """Whether a slice is to be tried later."""
        return key in self._not_before

    def hurry(self, key: int) -> None:
        """Try a slice now, whatever it did before."""
        self._not_before.pop(key, None)

    def due(self) -> list[int]:
        """Slices that may be tried again from now on; each once."""
        now = self._clock()
        keys = [key for key, at in self._not_before.items() if at <= now]
        for key in keys:
            del self._not_before[key]
        return keys

    def close(self) -> None:
        """Cancel all. A reservation ends when nothing writes to it any more: at once, or later if it must be."""
        for key in self:
            self.cancel(key)
        deadline = time.monotonic() + _CLOSE_S
        for flight in self.values():
            flight.transfer.done.wait(max(0.0, deadline - time.monotonic()))
        self.clear()

    def _ended(self, key: int, flight: Download) -> None:
        """From any thread."""
        if flight.transfer.error is None:
            with self._lock:  # Counted before anybody can see it.
                self.counts["fetched_slices"] += 1
                self.counts["fetched_bytes"] += self._sizes[key]
                self.counts["repeated_fetches"] += key in self._fetched
                flight.again = flight.epoch is not None and self._fetched.get(key) == flight.epoch
                if flight.again:
                    self.counts["refetched_slices"] += 1
                    self.counts["refetched_bytes"] += self._sizes[key]
                self._fetched[key] = flight.epoch
        try:
            if flight.transfer.error is None:
                flight.reservation.commit()
            else:
                flight.reservation.release()
        except OSError as reason:
            flight.fault = reason
        self._on_done(key)

    def _fail(self, key: int, error: Exception) -> Exception:
        """Try again later, longer each time."""
        self.counts["failed"] += 1
        self._failures[key] = tries = self._failures.get(key, 0) + 1
        self.postpone(key, min(_MAX_RETRY_S, _RETRY_S * 2 ** min(tries - 1, 10)))
        return error


def named(error: Exception, sha256: str, key: int) -> Exception:
    """An error of a transfer as the consumer gets it: its kind, naming the slice."""
    text = f"slice {key} ({sha256[:12]}…) did not come: {error}"
    return type(error)(text) if isinstance(error, ForebayError) else UsageError(text)
