"""Fixtures of tests with nodes and processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from support.processes import Process, forebay


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes with the test what is entered into it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(stack: ExitStack) -> Callable[..., Process]:
    """Start `forebay ARGUMENTS…`; a process that still runs at the end is killed."""

    def run(*argv: object, **environment: str) -> Process:
        process = forebay(*argv, **environment)
        stack.callback(process.end)
        return process

    return run
