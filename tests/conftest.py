"""What every test may ask for: a network of its own, and members of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.network.identity import Identity, create_network, join
from forebay.worker.trainer import share_processors

share_processors()  # As a worker does: tests that import PyTorch themselves run one a core.


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
