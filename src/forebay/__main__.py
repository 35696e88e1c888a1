"""The process of the command `forebay`, and of `python -m forebay`."""

import gc
import signal
import sys
import threading
from importlib import import_module
from typing import Any, NoReturn


def run(module: str = "forebay.cli") -> NoReturn:
    """Run a module's `main` and exit with its result, with 130 for an interrupt, also while modules are imported."""
    sys.unraisablehook = _interrupt_again
    try:
        code = import_module(module).main()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # The command has ended.
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        more = ": the same command continues" if "prepare" in sys.argv[1:] else ""
        print(f"forebay: interrupted{more}", file=sys.stderr)
        code = 130
    # An interrupt during `exec` of a string (which creates dataclasses) makes Python exit by the signal although it
    # was caught, unless another string is executed after it.
    exec("")
    gc.freeze()  # Else the exit looks for cycles in all that was imported: 0.2 s.
    sys.exit(code)


def _interrupt_again(unraisable: Any) -> None:
    """Repeat an interrupt that came within a destructor or a weak reference's callback, where Python drops it."""
    if unraisable.exc_type is KeyboardInterrupt:
        # A signal to that thread ends also what it waits for.
        threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    run()
