"""Waiting for what another thread or process does, where there is no event to wait for."""

import threading
from collections.abc import Callable

_never = threading.Event()


def until(condition: Callable[[], object]) -> object:
    """Return what is true of `condition`, once it is; only the time-out of the whole test limits the wait."""
    while not (value := condition()):
        _never.wait(0.002)
    return value
