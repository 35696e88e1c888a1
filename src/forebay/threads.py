"""Supervised background threads: none ends on an exception without a log line, a count and a restart.

Use `Supervised` instead of `threading.Thread` for every loop that must go on for as long as its owner lives. The owner
starts it, stops it and joins it. Cost: a thread, and one lock when a failure is counted.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

FIRST_WAIT_S = 1.0
MAX_WAIT_S = 60.0

_log = logging.getLogger("forebay.threads")
_lock = threading.Lock()
_failures: Counter[str] = Counter()


def failures() -> dict[str, int]:
    """Unexpected exceptions of supervised threads since the process began, by thread name; for metrics and status."""
    with _lock:
        return dict(_failures)


class Supervised:
    """A thread that runs `target` until it returns, and runs it again after an unexpected exception.

    An exception is logged with its traceback and counted by `name`. The next run starts after `first_wait_s`, doubled
    for each further failure up to 60 s; a run of more than 60 s without a failure starts at `first_wait_s` again.
    `stop` sets `stopping`, an event of the owner's, if it has one.
    """

    def __init__(
        self,
        target: Callable[[], object],
        name: str,
        *,
        stopping: threading.Event | None = None,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self.stopping = stopping or threading.Event()
        self._target = target
        self._first_wait_s = first_wait_s
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread has started and not ended; also while it waits to run its body again."""
        return self._thread.is_alive()

    def start(self) -> "Supervised":
        """Start the thread, once; RuntimeError if the process cannot have another now."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Set `stopping`: the body is expected to return, and is not run again. Does not wait; may be repeated."""
        self.stopping.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the thread; whether it has ended. Never started, or called in the thread: no wait."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        name, wait_s = self._thread.name, self._first_wait_s
        while not self.stopping.is_set():
            started = time.monotonic()
            try:
                self._target()
                return
            except Exception:  # noqa: BLE001  # the reason of this class: whatever it is, the work goes on
                with _lock:
                    _failures[name] += 1
                if time.monotonic() - started > MAX_WAIT_S:
                    wait_s = self._first_wait_s
                _log.exception("thread failed: name=%s restart_in_s=%.1f", name, wait_s)
            self.stopping.wait(wait_s)
            wait_s = min(MAX_WAIT_S, 2 * wait_s)
