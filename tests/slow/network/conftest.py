"""Fixtures of tests with nodes and processes."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from forebay.network.client import Client
from support.local_discovery import LocalDiscovery
from support.processes import Start, forebay


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes with the test what is entered into it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(stack) -> Start:
    """Start `forebay ARGUMENTS…`; a process that still runs at the end is killed."""

    def run(*argv, **environment):
        process = forebay(*argv, **environment)
        stack.callback(process.end)
        return process

    return run


@pytest.fixture
def client(make_identity) -> Iterator[Client]:
    with Client(make_identity("client")) as client:
        yield client


@pytest.fixture
def table() -> LocalDiscovery:
    return LocalDiscovery()
