"""`python -m millrace.cli` is `millrace`."""

import signal
import sys

from millrace.cli import main

code = main()
if code == 130:
    # Where Ctrl-C falls into `exec` of a string, as dataclasses are made by, `python -m` remembers it although it was
    # caught, and would end by the signal instead of the code.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
sys.exit(code)
