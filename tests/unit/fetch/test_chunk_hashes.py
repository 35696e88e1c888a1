"""The hashes of chunks over a network: read by range, copied by a mirror, refused from a peer that lies."""

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.data_node import DataNode
from forebay.dataset.chunks import CHUNKS_FILE, HASH_BYTES
from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE
from forebay.dataset.reader import Dataset, open_dataset, verify_dataset
from forebay.errors import DatasetError, ProtocolError
from forebay.fetch.engine import RunFetcher
from forebay.fetch.transfers import FileTransfer, map_path_of
from forebay.mirror import mirror
from forebay.network.client import Client
from forebay.network.peer import Provider
from forebay.network.peer_source import PeerSource, verify_provider
from forebay.network.pki.identity import Identity
from forebay.storage.base import PermanentError, TransientError
from forebay.storage.origins import open_remote
from support.local_discovery import LocalDiscovery
from support.origin_server import OriginServer
from support.token_slices import write_tokens
from support.waiting import until

Make = Callable[[str], Identity]
HOST, URL = "127.0.0.1", "forebay://test-network/corpus"


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    return write_tokens(tmp_path / "served" / "corpus", [200, 30_000, 9000])


@pytest.fixture
def server(dataset, monkeypatch) -> Iterator[OriginServer]:
    with OriginServer(dataset.path.parent) as created:
        for key, value in created.s3_environment.items():
            monkeypatch.setenv(key, value)
        yield created


def all_leaves(dataset: Dataset) -> list[bytes]:
    return [dataset.leaves(index) for index in range(dataset.num_slices)]


def as_dataset(folder: Path, like: Dataset) -> Dataset:
    """A directory whose files may not match, served as `like`."""
    return Dataset(folder, like.manifest, like.table, like.id)


def test_damage_at_a_url_is_named(dataset, server):
    remote = open_remote(f"{server.url}/corpus")
    assert remote.verify().ok
    server.faults.corrupt[f"corpus/{CHUNKS_FILE}"] = 100
    with pytest.raises(DatasetError, match=r"chunks.sha256: its hashes are not those of 1.safetensors"):
        remote.leaves(1)
    assert remote.verify().changed == [CHUNKS_FILE]
    server.faults.corrupt.clear()
    data = (dataset.path / CHUNKS_FILE).read_bytes()
    (dataset.path / CHUNKS_FILE).write_bytes(data[:-1])
    assert remote.verify().changed == [CHUNKS_FILE]
    (dataset.path / CHUNKS_FILE).unlink()
    assert remote.verify().missing == [CHUNKS_FILE]
    with pytest.raises(PermanentError, match=CHUNKS_FILE):
        remote.leaves(1)


def test_those_of_a_small_dataset_come_with_one_request(dataset, server):
    remote = open_remote(f"{server.url}/corpus")
    assert [remote.leaves(index) for index in (2, 0, 1)] == [dataset.leaves(index) for index in (2, 0, 1)]
    assert server.requests[f"corpus/{CHUNKS_FILE}"] == 1


def test_the_fetch_of_chunks_asks_for_their_hashes_again(dataset, server):
    remote = open_remote(f"{server.url}/corpus")
    server.faults.drop = 1.0
    for _ in range(2):
        with pytest.raises(TransientError):
            remote.leaves(1)
    server.faults.drop = 0.0
    assert remote.leaves(1) == dataset.leaves(1)


def test_hashes_that_come_late_blame_no_source(dataset, server, tmp_path, monkeypatch):
    remote, faults, reported = open_remote(f"{server.url}/corpus"), [TransientError("busy")], []

    def read_leaves() -> bytes:
        if faults:
            raise faults.pop()
        return remote.leaves(1)

    monkeypatch.setattr(remote.origin, "report", lambda source, error: reported.append(error))
    with RunFetcher(1) as fetcher:
        part = tmp_path / "part"
        transfer = FileTransfer(fetcher, remote.table.row(1), part, remote.origin, read_leaves=read_leaves)
        transfer.run(threading.Event(), lambda received: None)
        assert part.read_bytes() == dataset.slice_path(1).read_bytes()
        assert (faults, reported, fetcher.attempts) == ([], [], 1)


def test_hashes_that_are_cut_off_cost_their_own_slices_alone(dataset, server):
    expected = [dataset.leaves(index) for index in range(3)]
    (dataset.path / CHUNKS_FILE).write_bytes((dataset.path / CHUNKS_FILE).read_bytes()[:-1])
    remote = open_remote(f"{server.url}/corpus")
    assert [remote.leaves(0), remote.leaves(1)] == expected[:2]
    with pytest.raises((DatasetError, PermanentError, TransientError), match=CHUNKS_FILE):
        remote.leaves(2)


def test_a_child_does_not_wait_for_a_request_of_its_parent(dataset, server):
    remote = open_remote(f"{server.url}/corpus")
    remote._leaves_lock.acquire()
    remote.after_fork()
    assert remote.leaves(1) == dataset.leaves(1)


def test_members_read_leaves_by_range_from_a_data_node(dataset, make_identity, monkeypatch):
    monkeypatch.setattr("forebay.dataset.reader.LEAVES_AT_ONCE", 6)
    monkeypatch.setattr("forebay.storage.origins.FREE_HASHES", 0)
    discovery = LocalDiscovery()
    with DataNode(make_identity("node"), [dataset], HOST, 0, discovery) as node:
        reader = make_identity("reader")
        remote = open_remote(URL, identity=reader, discovery=discovery)
        small = sum((dataset.path / name).stat().st_size for name in (MANIFEST_FILE, TABLE_FILE))
        until(lambda: node.status()["bytes_sent"] == small)
        assert remote.leaves(2) == dataset.leaves(2)
        first = dataset.first_chunks
        until(lambda: node.status()["bytes_sent"] == small + int(first[3] - first[2]) * HASH_BYTES)
        assert all_leaves(remote) == list(remote.all_leaves()) == all_leaves(dataset)
        provider = Provider(node.identity.peer_id, node.address, True)
        with Client(reader) as client:
            assert [verify_provider(client, provider, dataset.table.row(index)) for index in range(3)] == [True] * 3


def test_a_peer_gives_the_hashes_of_a_slice_without_the_file_of_all(dataset, make_identity, tmp_path):
    row = dataset.table.row(2)
    leaves = dataset.leaves(2)
    (dataset.path / CHUNKS_FILE).unlink()
    with DataNode(make_identity("node"), [dataset], HOST, 0, None) as node, Client(make_identity("reader")) as client:
        source = PeerSource(client, node.identity.peer_id, node.address, lambda name: row.sha256)
        assert source.leaves(row.name, row) == leaves
        for wrong in (replace(row, chunk_bytes=row.chunk_bytes * 2), replace(row, chunk_bytes=1)):
            with pytest.raises(PermanentError, match="in chunks of this size"):
                source.leaves(row.name, wrong)
        with RunFetcher(2) as fetcher:
            transfer = FileTransfer(fetcher, row, tmp_path / "part", source).start()
            assert transfer.wait() and transfer.error is None
            assert fetcher.stats() == {"bytes": row.bytes, "attempts": 1, "retries": 0}
    assert (tmp_path / "part").read_bytes() == dataset.slice_path(2).read_bytes()
    assert not map_path_of(tmp_path / "part").exists()


def test_a_peer_that_sends_other_hashes_is_not_believed(dataset, make_identity, tmp_path):
    liar = tmp_path / "liar"
    shutil.copytree(dataset.path, liar)
    data = bytearray((liar / CHUNKS_FILE).read_bytes())
    data[50] ^= 1
    (liar / CHUNKS_FILE).write_bytes(data)
    discovery, reader = LocalDiscovery(), make_identity("reader")
    with DataNode(make_identity("liar"), [as_dataset(liar, dataset)], HOST, 0, discovery):
        remote = open_remote(URL, identity=reader, discovery=discovery)
        with pytest.raises(DatasetError, match=r"hashes are not those of 1.safetensors"):
            remote.leaves(1)
        assert remote.leaves(2) == dataset.leaves(2)
        with DataNode(make_identity("honest"), [dataset], HOST, 0, discovery):
            both = open_remote(URL, identity=reader, discovery=discovery)
            assert len(both.origin.sources()) == 2
            assert all_leaves(both) == all_leaves(dataset)
            assert mirror(both, tmp_path / "copy").complete
    assert verify_dataset(tmp_path / "copy").ok and open_dataset(tmp_path / "copy").id == dataset.id


def test_a_directory_gets_the_hashes_where_no_peer_has_them(dataset, make_identity, tmp_path):
    expected = (dataset.path / CHUNKS_FILE).read_bytes()
    (dataset.path / CHUNKS_FILE).unlink()
    discovery = LocalDiscovery()
    with DataNode(make_identity("node"), [dataset], HOST, 0, discovery):
        remote = open_remote(URL, identity=make_identity("reader"), discovery=discovery)
        assert mirror(remote, tmp_path / "copy").complete
    assert (tmp_path / "copy" / CHUNKS_FILE).read_bytes() == expected
    assert verify_dataset(tmp_path / "copy").ok and open_dataset(tmp_path / "copy").id == dataset.id


def test_a_peer_that_sends_another_manifest_is_refused(dataset, make_identity, tmp_path):
    liar, discovery, reader = tmp_path / "liar", LocalDiscovery(), make_identity("reader")
    shutil.copytree(dataset.path, liar)
    changes = {"lineage": {"inputs": "others"}, "chunk_bytes": 1 << 13, "table_sha256": "ab" * 32}
    with DataNode(make_identity("liar"), [as_dataset(liar, dataset)], HOST, 0, discovery) as node:
        for name, other in changes.items():
            node._shared[dataset.id].files[MANIFEST_FILE] = replace(dataset.manifest, **{name: other}).to_json()
            with pytest.raises(ProtocolError, match=f"manifest.json is not that of the dataset {dataset.id}"):
                open_remote(URL, identity=reader, discovery=discovery)
