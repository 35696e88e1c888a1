"""Processes: commands that an interrupt ends, and child processes that start as a whole and end with their parent."""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1


def run_command(command: Callable[[], int]) -> NoReturn:
    """Run a command and exit with its result, with 130 for an interrupt, also while it imports modules."""
    sys.unraisablehook = _interrupt_again
    try:
        code = command()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # The command has ended.
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(
            f"forebay: interrupted{': the same command continues' * ('prepare' in sys.argv or 'mirror' in sys.argv)}"
            f"{': the output is not complete; run the same command again' * ('convert' in sys.argv)}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(130)  # Threads of libraries are not waited for, which no further interrupt would end.
    gc.freeze()  # Else the exit looks for cycles in all that was imported: 0.2 s.
    sys.exit(code)


def _interrupt_again(unraisable: Any) -> None:
    """Repeat an interrupt that came within a destructor or a weak reference's callback, where Python drops it."""
    if unraisable.exc_type is KeyboardInterrupt:
        # A signal to that thread ends also what it waits for.
        threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


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
