"""A dataset by name alone: the network's own DHT leads from forebay://NETWORK/NAME to verified slices."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.data_node import DataNode
from forebay.network.dht import LibtorrentDht
from forebay.network.pki.identity import Identity
from forebay.storage.fetch import RunFetcher
from forebay.storage.origins import open_remote
from forebay.storage.transfers import FileTransfer
from support.nodes import HOST, NAME, Bootstrap, make_dataset, make_network


def test_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap = Bootstrap()
    members = make_network(tmp_path, ["node", "test"], bootstrap.at)
    dataset = make_dataset(tmp_path / "data", 3, 50_000)
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path))
    dht = LibtorrentDht(HOST, 0, bootstrap.at)
    try:
        with DataNode(Identity.load(members["node"]), [dataset], HOST, 0, dht), RunFetcher() as transfers:
            remote = open_remote(f"forebay://test/{NAME}", dataset_id=dataset.id)
            for index in range(3):
                part = tmp_path / f"{index}.part"
                moved = FileTransfer(transfers, remote.table.row(index), part, [remote.origin]).start()
                assert moved.wait() and moved.error is None
                assert part.read_bytes() == dataset.slice_path(index).read_bytes()
    finally:
        dht.close()
        bootstrap.close()
