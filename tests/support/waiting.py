"""Waiting for what another thread or process does, where there is no event to wait for."""

import threading
from collections.abc import Callable

_never = threading.Event()


def until(condition: Callable[[], object]) -> None:
    """Return once `condition` is true; only the time-out of the whole test limits the wait."""
    while not condition():
        _never.wait(0.002)
