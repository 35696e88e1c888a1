"""`python -m forebay` is `forebay`."""

import signal
import sys

from forebay.cli import main

code = main()
# All is done: a Ctrl-C from here on changes nothing but the exit code. And where one fell into `exec` of a string, as
# dataclasses are made by, `python -m` remembers it although it was caught, and would end by the signal.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
sys.exit(code)
