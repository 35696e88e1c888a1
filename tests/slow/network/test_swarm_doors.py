"""The swarm over real sockets: who is dialled back, who never is, what vanished, and two versions of a name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from forebay.data_node import DataNode
from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE
from forebay.dataset.reader import open_dataset
from forebay.errors import UsageError
from forebay.fetch.cache import ChunkCache
from forebay.fetch.engine import RunFetcher
from forebay.fetch.transfers import FileTransfer
from forebay.mirror import mirror_by_swarm
from forebay.network.client import Client, RemoteError
from forebay.network.peer import Scope
from forebay.network.pki.identity import Identity, join
from forebay.scheduler.server import SchedulerService
from forebay.storage.hosts import parse_address
from forebay.storage.origins import RemoteDataset, open_remote
from forebay.swarm.reader import SwarmMember
from forebay.swarm.share import SliceShare
from support.cached import put
from support.local_discovery import LocalDiscovery
from support.nodes import HOST, NAME, make_dataset, make_network
from support.waiting import until

SLICES = 4


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("swarm")
    make_dataset(folder / "one", SLICES, 1000)
    make_network(folder, ["node", "a", "b", "c"], [])
    return folder


@pytest.fixture
def node(world) -> Iterator[DataNode]:
    with DataNode(Identity.load(world / "node"), [open_dataset(world / "one")], HOST, 0, None) as node:
        yield node


def remote(world: Path, name: str, *addresses: str, query: str = "") -> RemoteDataset:
    discovery = LocalDiscovery(addresses=[parse_address(address) for address in addresses])
    return open_remote(f"forebay://test/{NAME}{query}", identity=world / name, discovery=discovery)


@pytest.fixture
def fetcher() -> Iterator[RunFetcher]:
    with RunFetcher(4) as fetcher:
        yield fetcher


Member = tuple[SwarmMember, RunFetcher, dict[str, Path]]


@contextmanager
def member(world: Path, name: str, node: DataNode, fetcher: RunFetcher, share: bool) -> Iterator[Member]:
    dataset, folder = remote(world, name, node.address), {}
    hashes = [dataset.table.row(index).sha256 for index in range(SLICES)]
    flags = lambda: np.array([folder.get(h) is not None for h in hashes])  # noqa: E731
    with SwarmMember(dataset, folder, flags, fetcher.wake, share=share) as joined:
        yield joined, fetcher, folder


def take_all(member: Member, out: Path):
    joined, fetcher, folder = member
    out.mkdir()
    for index in range(SLICES):
        row, part = joined.reader.table.row(index), out / f"{index}.part"
        transfer = FileTransfer(fetcher, row, part, joined.origin(index)).start()
        assert transfer.wait() and transfer.error is None
        folder[row.sha256] = part
        joined.reader.release(index, True)


def test_a_sharer_is_dialled_back_and_named_and_one_that_only_gets_never_is(world, node, tmp_path, fetcher):
    swarm = node.tracker._tracked[node.datasets[0].id].swarm
    with member(world, "b", node, fetcher, share=False) as leech:
        take_all(leech, tmp_path / "leech")
        assert swarm.copies().max() == 0 and swarm.status(0.0)["unreachable"] == 1
        with member(world, "a", node, fetcher, share=True) as sharer:
            take_all(sharer, tmp_path / "sharer")
            assert sharer[0].reader.stats()["from_origins"] == SLICES
            until(lambda: int(swarm.copies().min()) == 1)
            with member(world, "c", node, fetcher, share=True) as late:
                take_all(late, tmp_path / "late")
                assert late[0].reader.stats()["from_peers"] == SLICES
    until(lambda: len(swarm) == 1)  # All left, the node is still there.


def test_an_address_where_somebody_else_listens_is_not_believed(world, node):
    with Client(Identity.load(world / "a")) as client:
        path, body = f"/v1/swarm/{node.datasets[0].id}", {"address": node.address, "have": f"0-{SLICES - 1}"}
        until(lambda: client.request_json(node.address, "POST", path, body)[0]["wait_s"] > 0.05)
    swarm = node.tracker._tracked[node.datasets[0].id].swarm
    assert swarm.copies().max() == 0 and swarm.sharers(9) == []


def test_who_comes_after_the_data_nodes_death_gets_all_from_who_shares(world, node, tmp_path, fetcher):
    with member(world, "a", node, fetcher, share=True) as sharer:
        take_all(sharer, tmp_path / "first")
        node.stop(0.0)
        late = remote(world, "b", node.address, sharer[0].share.address)
        assert [name for name, file in sharer[0].files.items() if isinstance(file, bytes)] == [
            TABLE_FILE,
            MANIFEST_FILE,
        ]
        report, figures = mirror_by_swarm(late, tmp_path / "late", share=True, linger_s=0.0)
        assert report.complete and figures["from_peers"] == SLICES and figures["from_origins"] == 0
    assert open_dataset(tmp_path / "late").verify(workers=1).ok


def test_a_sharer_keeps_to_what_certificates_cover(world, tmp_path):
    """And a slice that vanished from its cache is 404."""
    row = open_dataset(world / "one").table.row(0)
    cache = ChunkCache(tmp_path / "cache", 1 << 20)
    assert put(cache, (world / "one" / row.name).read_bytes(), row.chunk_bytes) == row.sha256
    join(world / "network", tmp_path / "outsider", "outsider", scope=Scope(datasets=("books-*",)))
    with (
        SliceShare(
            Identity.load(world / "a"), cache, {row.sha256: (row.bytes, NAME, row.chunk_bytes)}, f"{HOST}:0"
        ) as share,
        Client(Identity.load(world / "b")) as client,
        Client(Identity.load(tmp_path / "outsider")) as outsider,
    ):
        path = f"/v1/slices/{row.sha256}"
        assert len(client.get_bytes(share.address, path, 1 << 20)) == row.bytes
        with pytest.raises(RemoteError, match=f"does not cover '{NAME}'"):
            outsider.get_bytes(share.address, path, 1 << 20)
        cache.path_of(row.sha256).unlink()
        with pytest.raises(RemoteError, match="404"):
            client.get_bytes(share.address, path, 1 << 20)


def test_two_versions_of_a_name_are_flagged_and_each_is_had_by_its_id(world, tmp_path):
    both = [open_dataset(world / "one"), make_dataset(tmp_path / "two", SLICES + 1, 60)]
    identity = Identity.load(world / "node")
    with DataNode(identity, both, HOST, 0, None) as node, Client(Identity.load(world / "a")) as client:
        with pytest.raises(UsageError, match=r"expected one dataset of this name.*Choose one"):
            remote(world, "a", node.address)
        for item in both:
            assert remote(world, "a", node.address, query=f"?id={item.id}").num_slices == item.num_slices
        discovery = LocalDiscovery(addresses=[parse_address(node.address)])
        settings = {"seq_len": 8, "wait_s": 2.0}
        scheduler = SchedulerService(client.identity, NAME, discovery, client, tmp_path / "state", **settings)
        with pytest.raises(UsageError, match="expected one dataset of this name, got 2") as refused:
            scheduler.start()
        scheduler.stop()
        assert all(item.id in str(refused.value) for item in both)
