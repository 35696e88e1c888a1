"""`python -m forebay` is `forebay`."""

from forebay.cli import run

run()
