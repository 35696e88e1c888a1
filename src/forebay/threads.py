"""Background threads that log, count and survive unexpected exceptions.

Use `SupervisedThread` for every loop that must run as long as its owner; the owner starts, stops and joins it.
Cost: a thread, and one lock when a failure is counted.
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
    """Unexpected exceptions of supervised threads since the process started, by thread name."""
    with _lock:
        return dict(_failures)


class SupervisedThread:
    """A thread that runs `target` until it returns, and restarts it after an unexpected exception.

    An exception is logged with its traceback and counted by `name`. The target restarts after `first_wait_s`, doubled
    for each further failure up to 60 s; after a run of more than 60 s the wait is `first_wait_s` again. `stop` sets
    `stopping`, which may be an event of the owner.
    """

    def __init__(
        self, target: Callable[[], object], name: str, *, stopping: threading.Event | None = None,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:  # fmt: skip
        self.stopping = stopping or threading.Event()
        self._target = target
        self._first_wait_s = first_wait_s
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread has started and not ended; True while it waits to restart its target."""
        return self._thread.is_alive()

    def start(self) -> "SupervisedThread":
        """Start the thread, once. RuntimeError if the process cannot start another."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Set `stopping`: the target is expected to return and is not restarted. Does not wait; may be repeated."""
        self.stopping.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread; return whether it has ended. Does not wait if never started or called in the thread."""
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
            except Exception:  # noqa: BLE001  # the purpose of this class: any failure restarts the target
                with _lock:
                    _failures[name] += 1
                if time.monotonic() - started > MAX_WAIT_S:
                    wait_s = self._first_wait_s
                _log.exception("thread failed: name=%s restart_in_s=%.1f", name, wait_s)
            self.stopping.wait(wait_s)
            wait_s = min(MAX_WAIT_S, 2 * wait_s)
