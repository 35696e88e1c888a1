"""`python -m forebay.cli` is `forebay`."""

from forebay.cli import run

run()
