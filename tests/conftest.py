"""What every test may ask for: a network of its own, and members of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.network.identity import Identity, create_network, join

# Tests run one a core: PyTorch's threads would spin for each other, at four times the CPU time of small models.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's caches."""
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path_factory.getbasetemp() / "user-cache"))
    monkeypatch.setenv("FOREBAY_HUB_CACHE", str(tmp_path_factory.getbasetemp() / "user-hub-cache"))


@pytest.fixture
def network_dir(tmp_path: Path) -> Path:
    """The directory of a fresh network: root key, root certificate, network.json."""
    directory = tmp_path / "network"
    create_network(directory, "test-network")
    return directory


@pytest.fixture
def make_identity(network_dir: Path, tmp_path: Path) -> Callable[[str], Identity]:
    """Issues members of the test's network: `make_identity("node-1")`; each lives in tmp_path/nodes/NAME."""

    def make(name: str) -> Identity:
        return join(network_dir, tmp_path / "nodes" / name, name)

    return make
