"""The running downloads of a feed, their reservations, and when to retry the failed ones."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.cache.cache import Reservation
from forebay.errors import ForebayError, UsageError
from forebay.storage.transfer_state import Transfer

_CLOSE_S = 0.4
_FIRST_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


@dataclass(eq=False)
class SliceDownload:
    """A running download. `commit_error`: why the rename failed."""

    transfer: Transfer
    reservation: Reservation
    epoch: int | None
    is_cancelled: bool = False
    commit_error: OSError | None = None


class SliceDownloads(dict[int, SliceDownload]):
    """The running downloads by key. One thread changes it; others may read.

    The thread that ends a transfer commits the slice, so that consumers need not wait for the planner. `sizes` are in
    bytes; `on_done` is called with the key of an ended transfer, from any thread.
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
        self._last_epoch: dict[int, int | None] = {}
        self._lock = threading.Lock()  # of the counts and `_last_epoch`

    def num_bytes(self) -> int:
        """Return the bytes of all slices that are being downloaded."""
        return sum(self._sizes[key] for key in self)

    def start(self, key: int, reservation: Reservation, epoch: int | None) -> Exception | None:
        """Start a download, which owns the reservation; return the error if it cannot start.

        A second download for one `epoch` is counted; None: for no epoch.
        """
        try:
            transfer = self._start(key, reservation.part)
        except Exception as error:  # noqa: BLE001 - the consumer that waits for the slice gets it
            reservation.release()
            return self._record_failure(key, error)
        self[key] = download = SliceDownload(transfer, reservation, epoch)
        transfer.on_done(lambda _: self._commit(key, download))
        return None

    def cancel(self, key: int) -> None:
        """Cancel a download; its partial file is kept."""
        download = self[key]
        if not download.is_cancelled:
            download.is_cancelled = True
            download.transfer.cancel()

    def finish(self, key: int) -> tuple[bool, Exception | None]:
        """Remove an ended download; return whether the slice is cached, and the error unless it was cancelled."""
        download = self.pop(key)
        error = download.transfer.error
        if error is not None:
            return False, None if download.is_cancelled else self._record_failure(key, error)
        if (fault := download.commit_error) is not None:
            text = f"cache: cannot rename {download.reservation.part}: {fault}. Check the directory."
            return False, self._record_failure(key, UsageError(text))
        self._failures.pop(key, None)
        return True, None

    def postpone(self, key: int, seconds: float) -> None:
        """Do not start a slice within so many seconds."""
        self._not_before[key] = self._clock() + seconds

    def is_postponed(self, key: int) -> bool:
        """Whether a slice must not be started yet."""
        return key in self._not_before

    def expedite(self, key: int) -> None:
        """Allow a slice to start now, even after failures."""
        self._not_before.pop(key, None)

    def take_due(self) -> list[int]:
        """Return the postponed slices that may be started from now on, each once."""
        now = self._clock()
        keys = [key for key, not_before in self._not_before.items() if not_before <= now]
        for key in keys:
            del self._not_before[key]
        return keys

    def close(self) -> None:
        """Cancel all. A reservation ends when its transfer no longer writes: at once, or later."""
        for key in self:
            self.cancel(key)
        deadline = time.monotonic() + _CLOSE_S
        for download in self.values():
            download.transfer.done.wait(max(0.0, deadline - time.monotonic()))
        self.clear()

    def _commit(self, key: int, download: SliceDownload) -> None:
        """Commit or release the slice of an ended transfer; from any thread."""
        is_complete = download.transfer.error is None
        if is_complete:
            with self._lock:  # Counted before a consumer can see the slice.
                self.counts["fetched_slices"] += 1
                self.counts["fetched_bytes"] += self._sizes[key]
                self.counts["repeated_fetches"] += key in self._last_epoch
                if download.epoch is not None and self._last_epoch.get(key) == download.epoch:
                    self.counts["refetched_slices"] += 1
                    self.counts["refetched_bytes"] += self._sizes[key]
                self._last_epoch[key] = download.epoch
        try:
            if is_complete:
                download.reservation.commit()
            else:
                download.reservation.release()
        except OSError as error:
            download.commit_error = error
        self._on_done(key)

    def _record_failure(self, key: int, error: Exception) -> Exception:
        """Postpone a failed slice, longer each time."""
        self.counts["failed"] += 1
        self._failures[key] = tries = self._failures.get(key, 0) + 1
        self.postpone(key, min(_MAX_RETRY_S, _FIRST_RETRY_S * 2 ** min(tries - 1, 10)))
        return error


def slice_error(error: Exception, sha256: str, key: int) -> Exception:
    """Return the error of a download for its consumer: of the same class, naming the slice."""
    text = f"slice {key} ({sha256[:12]}…) was not downloaded: {error}"
    return type(error)(text) if isinstance(error, ForebayError) else UsageError(text)
