"""A data node on real sockets: found by name, asked by hash, closed to strangers, drained, killed."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from forebay.data_node import DataNode
from forebay.dataset.import_slices import import_slices
from forebay.dataset.manifest import dataset_id
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import write_token_slice
from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.network import client as peers
from forebay.network.client import Client, RemoteError
from forebay.network.dht import LibtorrentDht
from forebay.network.discovery import MAX_CLAIMS_BYTES, find_providers, parse_claim, record_key
from forebay.network.peer import Peer
from forebay.network.pki.identity import Identity, create_network, join, revoke
from support.calibration import scaled
from support.local_discovery import LocalDiscovery

Make = Callable[[str], Identity]
SLICE_TOKENS = 400_000


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + scaled(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.01)


def make_dataset(folder: Path, name: str, seed: int) -> Dataset:
    rng = np.random.default_rng(seed)
    (folder / "slices").mkdir(parents=True)
    for index in range(3):
        tokens = rng.integers(0, 60000, SLICE_TOKENS, dtype=np.uint16)
        stops = np.array([1000, SLICE_TOKENS], dtype=np.uint64)
        write_token_slice(folder / "slices" / f"{index:06d}.safetensors", tokens, stops)
    return import_slices(folder, name)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path / "tiny", "tiny", 1)


@pytest.fixture
def table() -> LocalDiscovery:
    return LocalDiscovery()


@pytest.fixture
def node(dataset: Dataset, table: LocalDiscovery, make_identity: Make) -> Iterator[DataNode]:
    with DataNode(make_identity("data"), [dataset], "127.0.0.1", 0, table) as node:
        yield node


@pytest.fixture
def client(make_identity: Make) -> Iterator[Client]:
    with Client(make_identity("client")) as client:
        yield client


def test_from_a_name_to_verified_bytes(
    node: DataNode, client: Client, dataset: Dataset, table: LocalDiscovery, tmp_path: Path
) -> None:
    claims = find_providers(table, client, client.identity.network_id, "tiny")
    assert [(c.name, c.dataset_id, c.num_slices, c.peer_id) for c in claims] == [
        ("tiny", dataset.id, 3, node.identity.peer_id)
    ]
    address = claims[0].address
    manifest = client.get_bytes(address, f"/v1/datasets/{dataset.id}/manifest.json", 1 << 20)
    assert dataset_id(manifest) == dataset.id
    listed = client.get_bytes(address, f"/v1/datasets/{dataset.id}/slices.parquet", 1 << 20)
    assert hashlib.sha256(listed).hexdigest() == dataset.manifest.table_sha256
    for index in range(3):
        row = dataset.table.row(index)
        data = bytearray(row.bytes)
        client.read_range(address, f"/v1/slices/{row.sha256}", memoryview(data), 0, claims[0].peer_id)
        assert data == dataset.slice_path(index).read_bytes()
    sent = sum(dataset.table.row(index).bytes for index in range(3))
    until(lambda: node.status()["bytes_sent"] > sent)
    assert list(node.status()["peers"]) == [client.identity.peer_id]


def test_names_that_are_not_served_and_paths_that_climb(
    node: DataNode, client: Client, dataset: Dataset, tmp_path: Path
) -> None:
    (tmp_path / "tiny" / "secret.txt").write_text("secret")
    for path in [
        "/",
        "/v1/slices/",
        f"/v1/slices/{'0' * 64}",
        f"/v1/slices/{dataset.table.row(0).sha256.upper()}",
        "/v1/slices/../../secret.txt",
        "/v1/slices/..%2f..%2fsecret.txt",
        f"/v1/datasets/{dataset.id}/../secret.txt",
        f"/v1/datasets/{dataset.id}/secret.txt",
        f"/v1/datasets/{dataset.id}/slices/000000.safetensors",
        f"/v1/datasets/{dataset.id}/tokenizer.json",
        f"/v1/datasets/{'0' * 64}/manifest.json",
        f"/v1/datasets/../{dataset.id}/manifest.json",
        "//etc/passwd",
        "/v1/claims/..",
        f"/v1/slices/{'a' * 20000}",
    ]:
        with pytest.raises(RemoteError) as caught:
            client.get_bytes(node.address, path, 1 << 20)
        assert caught.value.status == 404, path
    with pytest.raises(RemoteError) as caught:
        client.request_json(node.address, "POST", "/v1/claims", {})
    assert caught.value.status == 405
    assert client.request_json(node.address, "GET", "/v1/status")[0]["datasets"][0]["id"] == dataset.id


@pytest.mark.usefixtures("changes_at_once")
def test_strangers_and_the_revoked_get_nothing(
    node: DataNode, client: Client, dataset: Dataset, tmp_path: Path
) -> None:
    paths = ["/v1/claims", f"/v1/datasets/{dataset.id}/manifest.json", f"/v1/slices/{dataset.table.row(0).sha256}"]
    create_network(tmp_path / "elsewhere", "test-network")
    stranger = join(tmp_path / "elsewhere", tmp_path / "stranger", "x")
    forged = tmp_path / "forged"  # another network's key and certificate, but trusting this network's root
    join(tmp_path / "elsewhere", forged, "x")
    identity = Identity.load(forged)
    (forged / "root-cert.pem").write_bytes((node.identity.node_dir / "root-cert.pem").read_bytes())
    for who in (stranger, identity):
        with Client(who) as other:
            for path in paths:
                with pytest.raises(NetworkError, match="certificate of the same network"):
                    other.get_bytes(node.address, path, 1 << 24)
    assert node.status()["bytes_sent"] == 0
    for path in paths:
        assert client.get_bytes(node.address, path, 1 << 24)
    revoke(node.identity.node_dir, client.identity.peer_id)
    for path in paths:
        with pytest.raises(NetworkError):
            client.get_bytes(node.address, path, 1 << 24)


def test_a_lost_or_changed_file_is_not_handed_out(node: DataNode, client: Client, dataset: Dataset) -> None:
    path = dataset.slice_path(1)
    with path.open("ab") as file:
        file.write(b"more")
    for code in ("slice_changed", "slice_lost"):
        with pytest.raises(RemoteError) as caught:
            client.get_bytes(node.address, f"/v1/slices/{dataset.table.row(1).sha256}", 1 << 24)
        assert caught.value.code == code
        path.unlink(missing_ok=True)
    assert client.get_bytes(node.address, f"/v1/slices/{dataset.table.row(0).sha256}", 1 << 24)


def test_stop_finishes_the_download_in_flight(
    tmp_path: Path, make_identity: Make, client: Client, table: LocalDiscovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "big"
    (folder / "slices").mkdir(parents=True)
    tokens = np.zeros(32_000_000, dtype=np.uint16)  # 64 MB: more than the sockets' buffers hold
    write_token_slice(folder / "slices" / "000000.safetensors", tokens, np.array([tokens.size], dtype=np.uint64))
    big = import_slices(folder, "big")
    row = big.table.row(0)
    node = DataNode(make_identity("data"), [big], "127.0.0.1", 0, table)
    node.start()
    into, reached, opened, receive = bytearray(row.bytes), threading.Event(), threading.Event(), peers._fill

    def wait_amid(*arguments: object) -> None:
        reached.set()
        assert opened.wait()
        receive(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(peers, "_fill", wait_amid)
    path = f"/v1/slices/{row.sha256}"
    fetching = threading.Thread(target=lambda: client.read_range(node.address, path, memoryview(into), 0, timeout_s=60))
    fetching.start()
    assert reached.wait()
    drained: list[bool] = []
    stopping = threading.Thread(target=lambda: drained.append(node.stop(60)))
    stopping.start()
    until(lambda: node.status()["draining"])
    with Client(client.identity) as late, pytest.raises(NetworkError):
        late.request_json(node.address, "GET", "/v1/claims")
    assert not drained
    opened.set()
    fetching.join()
    stopping.join()
    assert drained == [True]
    assert into == big.slice_path(0).read_bytes()


def test_announcements_are_refreshed(dataset: Dataset, make_identity: Make, client: Client) -> None:
    class Counting(LocalDiscovery):
        calls, away = 0, False

        def announce(self, key: bytes, port: int) -> None:
            self.calls += 1
            if self.away:
                raise NetworkError("the network is away for a moment")
            super().announce(key, port)

    table = Counting()
    with DataNode(make_identity("data"), [dataset], "127.0.0.1", 0, table, ttl_s=0.3) as node:
        table.away = True
        until(lambda: "away" in node.status()["announce_error"])
        table.away = False
        until(lambda: node.status()["announce_error"] == "")
        first = node.claims(node.identity.as_peer)[0]["expires_at"]
        until(lambda: node.claims(node.identity.as_peer)[0]["expires_at"] > first + 0.3)
    calls = table.calls
    assert not node._announcer.is_alive and table.calls == calls


def test_claims_are_the_signers_own(node: DataNode, client: Client, make_identity: Make) -> None:
    other = make_identity("other")
    body, peer = client.request_json(node.address, "GET", "/v1/claims")
    good = body["claims"][0]
    assert parse_claim(good, peer).num_slices == 3
    changed = {**good, "num_slices": 4}
    for invalid in (changed, {**good, "peer_id": other.peer_id}, {}, None, [], {**good, "signature": "zz"}):
        with pytest.raises(ProtocolError):
            parse_claim(invalid, peer)
    with pytest.raises(ProtocolError):
        parse_claim(good, Peer(other.peer_id, other.public_key, "other"))


def test_a_node_of_many_datasets_is_found_by_each_name(make_identity: Make, tmp_path: Path) -> None:
    """All its claims together are larger than what a reader takes in one answer."""
    datasets = []
    for i in range(200):
        slices = tmp_path / "many" / f"{i:03}" / "slices"
        slices.mkdir(parents=True)
        write_token_slice(slices / "0.safetensors", np.full(4, i, np.uint16), np.array([4], np.uint64))
        datasets.append(import_slices(slices.parent, f"corpus {i:03} ä&b"))
    table = LocalDiscovery()
    with DataNode(make_identity("data"), datasets, "127.0.0.1", 0, table) as node, Client(make_identity("r")) as client:
        everything = client.get_bytes(node.address, "/v1/claims", 1 << 20)
        assert len(everything) > MAX_CLAIMS_BYTES
        for item in (datasets[0], datasets[199]):
            result = find_providers(table, client, node.identity.network_id, item.name, 5.0)
            assert [(claim.name, claim.dataset_id) for claim in result] == [(item.name, item.id)]


def test_the_same_dataset_twice_is_refused(dataset: Dataset, make_identity: Make) -> None:
    with pytest.raises(UsageError, match="each dataset once"):
        DataNode(make_identity("data"), [dataset, dataset], "127.0.0.1", 0, None)


NODE = """
import sys
from forebay.dataset.reader import open_dataset
from forebay.network.dht import LibtorrentDht
from forebay.network.pki.identity import Identity
from forebay.data_node import DataNode
dht = LibtorrentDht("127.0.0.1", 0, [("127.0.0.1", int(sys.argv[3]))])
node = DataNode(Identity.load(sys.argv[1]), [open_dataset(sys.argv[2])], "127.0.0.1", 0, dht, ttl_s=3)
node.start()
print("ready", flush=True)
sys.stdin.read()
node.stop()
dht.close()
"""


def test_providers_found_through_the_dht_and_a_killed_one_disappears(
    dataset: Dataset, make_identity: Make, client: Client
) -> None:
    identities = [make_identity("data-1"), make_identity("data-2")]
    with contextlib.ExitStack() as stack:
        dht = LibtorrentDht("127.0.0.1", 0)
        stack.callback(dht.close)
        running = []
        for identity in identities:
            command = [sys.executable, "-c", NODE, str(identity.node_dir), str(dataset.path), str(dht.port)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            running.append(process)

        def found() -> set[str]:
            network_id = client.identity.network_id
            return {claim.peer_id for claim in find_providers(dht, client, network_id, "tiny", 2.0)}

        until(lambda: found() == {identity.peer_id for identity in identities})
        running[0].send_signal(signal.SIGKILL)
        running[0].wait()
        until(lambda: found() == {identities[1].peer_id})
        key = record_key(client.identity.network_id, "dataset", "tiny")
        until(lambda: bool(dht.find(key, 2.0)))
