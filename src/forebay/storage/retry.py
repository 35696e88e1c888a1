"""Back-off, Retry-After, and log lines while a process waits."""

import contextlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

FIRST_S = 2.5  # before the first log line about a wait
EVERY_S = 10.0
_LOOK_EVERY_S = 0.25


def backoff_s(
    tried: int, first_s: float, max_s: float, asked_s: float = 0.0, chance: random.Random | None = None
) -> float:
    """Seconds to wait after `tried` failed attempts: `first_s`, doubled each time up to `max_s`, times 0.5 to 1.5.

    The jitter spreads clients that failed together. The result is at least `asked_s` (Retry-After). `chance` makes the
    jitter reproducible.
    """
    uniform = random.uniform if chance is None else chance.uniform
    doubled_s = first_s * 2.0 ** min(tried - 1, 60)
    return max(asked_s, min(max_s, doubled_s) * uniform(0.5, 1.5))


def retry_after_s(text: str, now: float) -> float | None:
    """Seconds of a Retry-After header, given as seconds or as a date; None if malformed. `now` is Unix time.

    Source: RFC 9110, 10.2.3.
    """
    if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text, re.ASCII):
        return float(text)
    with contextlib.suppress(ValueError, TypeError, OverflowError, IndexError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    return None


@contextlib.contextmanager
def log_while_waiting(log: logging.Logger, what: Callable[[], str]) -> Iterator[None]:
    """Log what the block waits for after FIRST_S and every EVERY_S; `what` is called in another thread.

    Where it returns "", something came meanwhile, and the wait begins again. Of nested waits the inner one is told.

    One thread serves all waits of a process, and ends with the last of them: a wait costs a few microseconds.
    """
    wait = _Wait(log, what, time.monotonic(), FIRST_S, threading.get_ident())
    with _waits.lock:
        _waits.all[id(wait)] = wait
        if not _waits.is_watched:
            with contextlib.suppress(RuntimeError):  # the process cannot start a thread: wait without log lines
                threading.Thread(target=_waits.watch, name="waiting", daemon=True).start()
                _waits.is_watched = True
    try:
        yield
    finally:
        with _waits.lock:
            _waits.all.pop(id(wait), None)


@dataclass
class _Wait:
    log: logging.Logger
    what: Callable[[], str]
    began: float
    next_s: float
    thread: int


class _Waits:
    def __init__(self) -> None:
        self.lock, self.is_watched = threading.Lock(), False
        self.all: dict[int, _Wait] = {}

    def watch(self) -> None:
        time.sleep(_LOOK_EVERY_S)
        while self._log_due():
            time.sleep(_LOOK_EVERY_S)

    def _log_due(self) -> bool:
        """Log what is due; return False without waits. In a frame of its own: nothing of a wait is kept meanwhile."""
        with self.lock:
            if not self.all:
                self.is_watched = False
                return False
            waits = list(self.all.values())
        innermost = {wait.thread: wait for wait in waits}
        for wait in waits:
            elapsed_s = time.monotonic() - wait.began
            if elapsed_s < wait.next_s:
                continue
            wait.next_s = elapsed_s + EVERY_S
            inner = innermost[wait.thread]
            if inner is not wait and time.monotonic() - inner.began >= FIRST_S / 2:
                continue  # It tells more.
            try:
                if what := wait.what():
                    wait.log.warning("waiting for %s (%.0f s so far)", what, elapsed_s)
                else:
                    wait.began, wait.next_s = time.monotonic(), FIRST_S
            except Exception:  # What one waits for may be gone; the others still want lines
                wait.log.exception("waiting (%.0f s so far)", elapsed_s)
        return True


_waits = _Waits()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waits.__init__)  # type: ignore[misc]  # the thread does not run there
