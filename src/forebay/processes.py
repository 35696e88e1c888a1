"""Child processes that start as a whole, and end with their parent."""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. Does nothing where there is no such request."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Handle SIGINT and SIGTERM after the block: a process that it starts is complete, and known, by then.

    A signal mask is not enough: the kernel hands a signal to any thread, and Python runs its handler in the main one.
    """
    if threading.current_thread() is not threading.main_thread():  # Only the main thread is interrupted.
        yield
        return
    caught: list[int] = []
    own_pid = os.getpid()

    def catch(number: int, frame: object) -> None:
        if os.getpid() == own_pid:
            caught.append(number)
        else:  # A forked child has this handler, too, and never leaves the block.
            signal.signal(number, handlers[signal.Signals(number)])
            signal.raise_signal(number)

    # One that is ignored stays so, also in a process that is started; None: C code handles it.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) not in (None, signal.SIG_IGN)]
    handlers = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield
    finally:
        for handled, handler in handlers.items():
            signal.signal(handled, handler)
        with contextlib.ExitStack() as stack:  # Handles all, also if the first raises.
            for number in reversed(caught):
                stack.callback(signal.raise_signal, number)
