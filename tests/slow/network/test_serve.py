"""A data node on real sockets: found by name, asked by hash, drained; announced again and again, and killed."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from forebay.data_node import DataNode
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import write_token_slice
from forebay.errors import NetworkError
from forebay.network.client import Client, RemoteError
from forebay.network.discovery import MAX_CLAIMS_BYTES, find_providers
from forebay.storage.connections import StreamedResponse
from support.local_discovery import LocalDiscovery
from support.nodes import HOST, make_dataset
from support.waiting import until


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    return make_dataset(tmp_path / "tiny", 4, 400_000)


@pytest.fixture
def node(dataset, table: LocalDiscovery, make_identity) -> Iterator[DataNode]:
    with DataNode(make_identity("data"), [dataset], HOST, 0, table) as node:
        yield node


def test_names_that_are_not_served_and_paths_that_climb(node, client: Client, dataset, tmp_path):
    (tmp_path / "tiny" / "secret.txt").write_text("secret")
    files, injected = f"/v1/datasets/{dataset.id}", "manifest.json%0d%0aX-Evil:%201%0d%0a%0d%0a"
    climbing = ["..", "%2e%2e", "..%2f..%2f", "%00", "/etc/passwd", "....//", "x" * 5000, injected]
    for path in [
        "/",
        "/v1/slices/",
        f"/v1/slices/{'0' * 64}",
        f"/v1/slices/{dataset.table.row(0).sha256.upper()}",
        "/v1/slices/../../secret.txt",
        "/v1/slices/..%2f..%2fsecret.txt",
        f"{files}/../secret.txt",
        f"{files}/secret.txt",
        f"{files}/slices/000000.safetensors",
        f"{files}/tokenizer.json",
        f"/v1/datasets/{'0' * 64}/manifest.json",
        f"/v1/datasets/../{dataset.id}/manifest.json",
        "//etc/passwd",
        "/v1/claims/..",
        "/v1/crls/../status",
        *(f"{start}/{name}" for start in ("/v1/slices", files, "") for name in climbing),
        *(f"/v1/datasets/{name}/manifest.json" for name in climbing),
    ]:
        with pytest.raises(RemoteError) as caught:
            client.get_bytes(node.address, path, 1 << 20)
        assert caught.value.status == 404, path
        assert "\n" not in str(caught.value) and "\r" not in str(caught.value)
    with pytest.raises(RemoteError, match="refused with 405"):
        client.request_json(node.address, "POST", "/v1/claims", {})
    assert client.request_json(node.address, "GET", "/v1/status")[0]["datasets"][0]["id"] == dataset.id


def test_stop_finishes_the_download_in_flight(tmp_path, make_identity, client: Client, monkeypatch):
    big = make_dataset(tmp_path / "big", 2, 32_000_000)  # 64 MB: more than the sockets' buffers hold
    row, node = big.table.row(0), DataNode(make_identity("data"), [big], HOST, 0, None)
    node.start()
    into, reached, opened, pace = bytearray(row.bytes), threading.Event(), threading.Event(), StreamedResponse.pace

    def wait_amid(*arguments):
        reached.set()
        opened.wait()
        pace(*arguments)

    monkeypatch.setattr(StreamedResponse, "pace", wait_amid)
    path, drained = f"/v1/slices/{row.sha256}", []
    fetching = threading.Thread(
        target=lambda: client.read_range(node.address, path, memoryview(into), 0, timeout_s=600)
    )
    fetching.start()
    reached.wait()
    stopping = threading.Thread(target=lambda: drained.append(node.stop(600)))
    stopping.start()
    until(lambda: node.status()["draining"])
    with Client(client.identity) as late, pytest.raises(NetworkError):
        late.request_json(node.address, "GET", "/v1/claims")
    assert not drained
    opened.set()
    fetching.join()
    stopping.join()
    assert drained == [True] and into == big.slice_path(0).read_bytes()


def test_announcements_are_refreshed(dataset, make_identity):
    class Counting(LocalDiscovery):
        calls = 0

        def announce(self, key, port):
            self.calls += 1
            super().announce(key, port)

    table = Counting()
    with DataNode(make_identity("data"), [dataset], HOST, 0, table, ttl_s=0.3) as node:
        table.fault = "the DHT: the network went away for a moment"
        until(lambda: "away" in str(node.status()["faults"]))
        table.fault = ""
        until(lambda: not node.status()["faults"])
        first = node.claims(node.identity.as_peer)[0]["expires_at"]
        until(lambda: node.claims(node.identity.as_peer)[0]["expires_at"] > first + 0.3)
    calls = table.calls
    assert not node._announcer.is_alive and table.calls == calls


def test_a_node_of_many_datasets_is_found_by_each_name(make_identity, tmp_path):
    """All its claims together are larger than what a reader takes in one answer."""
    datasets = []
    for i in range(200):
        slices = tmp_path / "many" / f"{i:03}" / "slices"
        slices.mkdir(parents=True)
        write_token_slice(slices / "0.safetensors", np.full(4, i, np.uint16), np.array([4], np.uint64))
        datasets.append(import_slices(slices.parent, f"corpus {i:03} ä&b"))
    table = LocalDiscovery()
    with DataNode(make_identity("data"), datasets, HOST, 0, table) as node, Client(make_identity("r")) as client:
        assert len(client.get_bytes(node.address, "/v1/claims", 1 << 20)) > MAX_CLAIMS_BYTES
        for item in (datasets[0], datasets[199]):
            claims = find_providers(table, client, node.identity.network_id, item.name, 5.0)
            assert [(claim.name, claim.dataset_id) for claim in claims] == [(item.name, item.id)]
