"""Log lines about waits: what a process waits for, after 2.5 s and every 10 s from then on."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

FIRST_S = 2.5
EVERY_S = 10.0


@contextmanager
def waiting(log: logging.Logger, what: Callable[[], str]) -> Iterator[None]:
    """While the block runs longer than FIRST_S, log what it waits for: `what`, called in another thread."""
    began, done = time.monotonic(), threading.Event()

    def run() -> None:
        pause_s = FIRST_S
        while not done.wait(pause_s):
            log.warning("waiting for %s (%.0f s so far)", what(), time.monotonic() - began)
            pause_s = EVERY_S

    with suppress(RuntimeError):  # no thread can be started now: the wait itself goes on without a line
        threading.Thread(target=run, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        done.set()
