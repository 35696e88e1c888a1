"""A member of the test's network that attacks, and another."""

from pathlib import Path

import pytest

from forebay.network.pki.identity import Identity
from support.attackers import issue


@pytest.fixture
def evil(network_dir: Path) -> Identity:
    return issue(network_dir, "evil", "worker")


@pytest.fixture
def honest(network_dir: Path) -> Identity:
    return issue(network_dir, "honest", "worker")
