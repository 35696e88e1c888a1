"""Benches for the tests of deduplication."""

from collections.abc import Callable

import pytest

from support.dedup_bench import Bench


@pytest.fixture
def bench(tmp_path) -> Bench:
    """A place to sign and deduplicate in."""
    return Bench(tmp_path)


@pytest.fixture(scope="session")
def fresh(tmp_path_factory) -> Callable[[], Bench]:
    """A new place on each call: for properties."""
    return lambda: Bench(tmp_path_factory.mktemp("dedup"))
