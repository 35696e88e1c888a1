"""Retries and waits: the one back-off rule of the package, Retry-After, and log lines while a process waits."""

import contextlib
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime

FIRST_S = 2.5  # Until the first line about a wait.
EVERY_S = 10.0


def backoff_s(
    tried: int, first_s: float, max_s: float, asked_s: float = 0.0, chance: random.Random | None = None
) -> float:
    """Seconds to wait after `tried` failed attempts: `first_s`, doubled each time up to `max_s`, with jitter.

    The jitter (a factor from 0.5 to 1.5) spreads clients that failed together. `asked_s`, what a server asked for, is
    the least. `chance` draws the jitter, for those who must draw the same again.
    """
    uniform = random.uniform if chance is None else chance.uniform
    doubled_s = first_s * 2.0 ** min(tried - 1, 60)
    return max(asked_s, min(max_s, doubled_s) * uniform(0.5, 1.5))


def retry_after_s(text: str, now: float) -> float | None:
    """Seconds that a Retry-After header asks to wait, given as seconds or as a date (RFC 9110, 10.2.3); None if it is
    neither. `now` is Unix time."""
    if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text, re.ASCII):
        return float(text)
    with contextlib.suppress(ValueError, TypeError, OverflowError, IndexError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    return None


@contextlib.contextmanager
def waiting(log: logging.Logger, what: Callable[[], str]) -> Iterator[None]:
    """While the block runs longer than FIRST_S, log what it waits for: `what`, called in another thread."""
    began, done = time.monotonic(), threading.Event()

    def run() -> None:
        pause_s = FIRST_S
        while not done.wait(pause_s):
            log.warning("waiting for %s (%.0f s so far)", what(), time.monotonic() - began)
            pause_s = EVERY_S

    with contextlib.suppress(RuntimeError):  # no thread can be started now: the wait itself goes on without a line
        threading.Thread(target=run, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        done.set()
