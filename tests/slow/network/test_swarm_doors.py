"""The swarm's door over real sockets: who is dialled back, who never is, who may not come in, and what vanished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from forebay.cache.cache import ChunkCache
from forebay.data_node import DataNode
from forebay.dataset.reader import open_dataset
from forebay.errors import UsageError
from forebay.mirror import mirror_by_swarm
from forebay.network.access import AccessPolicy
from forebay.network.addresses import parse_address
from forebay.network.client import Client, RemoteError
from forebay.network.peer import Scope
from forebay.network.pki.identity import Identity, create_network, join
from forebay.storage.origins import RemoteDataset, open_remote
from forebay.swarm.reader import SwarmMember
from forebay.swarm.share import SliceShare
from support.cached import put
from support.calibration import scaled
from support.feeding import make_dataset
from support.local_discovery import LocalDiscovery

SLICES = 4


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doors")
    make_dataset(folder / "c4", SLICES, 2, 512)
    create_network(folder / "network", "net", bootstrap=[])
    for name in ("node", "a", "b", "c"):
        join(folder / "network", folder / name, name)
    return folder


@pytest.fixture
def node(world: Path) -> Iterator[DataNode]:
    with DataNode(Identity.load(world / "node"), [open_dataset(world / "c4")], "127.0.0.1", 0, None) as node:
        yield node


def remote(world: Path, name: str, *addresses: str, query: str = "", id: str | None = None) -> RemoteDataset:
    registered = LocalDiscovery(known=[parse_address(address) for address in addresses])
    return open_remote(f"forebay://net/c4{query}", identity=world / name, discovery=registered, dataset_id=id)


def member(world: Path, name: str, node: DataNode, folder: dict[str, Path], share: bool) -> SwarmMember:
    dataset = remote(world, name, node.address)
    hashes = [dataset.table.row(index).sha256 for index in range(SLICES)]
    return SwarmMember(dataset, folder, lambda: np.array([folder.get(h) is not None for h in hashes]), share=share)


def take_all(one: SwarmMember, folder: dict[str, Path], out: Path) -> None:
    out.mkdir()
    for index in range(SLICES):
        transfer = one.reader.fetch(index, out / f"{index}.part")
        transfer.on_done(lambda done: folder.__setitem__(done.info.sha256, done.part))
        assert transfer.wait() and transfer.error is None


def until(condition: Callable[[], bool], seconds: float = 8.0) -> None:
    deadline = time.monotonic() + scaled(seconds)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_sharer_is_dialled_back_and_named_and_one_that_only_gets_never_is(
    world: Path, node: DataNode, tmp_path: Path
) -> None:
    shelves: list[dict[str, Path]] = [{} for _ in range(3)]
    swarm = node.tracker._tracked[node.datasets[0].id].swarm
    with member(world, "b", node, shelves[0], share=False) as leech:
        take_all(leech, shelves[0], tmp_path / "leech")
        assert swarm.copies().max() == 0 and swarm.status()["unreachable"] == 1
        with member(world, "a", node, shelves[1], share=True) as sharer:
            take_all(sharer, shelves[1], tmp_path / "sharer")
            assert sharer.reader.stats()["from_origins"] == SLICES
            until(lambda: int(swarm.copies().min()) == 1)
            with member(world, "c", node, shelves[2], share=True) as late:
                take_all(late, shelves[2], tmp_path / "late")
                assert late.reader.stats()["from_peers"] == SLICES
    until(lambda: len(swarm) == 1)  # All left, the node is still there.


def test_an_address_where_somebody_else_stands_is_not_believed(world: Path, node: DataNode) -> None:
    with Client(Identity.load(world / "a")) as client:
        path, body = f"/v1/swarm/{node.datasets[0].id}", {"address": node.address, "have": f"0-{SLICES - 1}"}
        until(lambda: client.request_json(node.address, "POST", path, body)[0]["wait_s"] > 0.05)
    swarm = node.tracker._tracked[node.datasets[0].id].swarm
    assert swarm.copies().max() == 0 and swarm.sharers(9) == []


def test_who_comes_after_the_data_nodes_death_gets_all_from_who_shares(
    world: Path, node: DataNode, tmp_path: Path
) -> None:
    folder: dict[str, Path] = {}
    with member(world, "a", node, folder, share=True) as sharer:
        take_all(sharer, folder, tmp_path / "first")
        node.stop(0.0)
        assert sharer.share is not None
        late = remote(world, "b", node.address, sharer.share.address)
        report, figures = mirror_by_swarm(late, tmp_path / "late", share=True, linger_s=0.0)
        assert report.complete and figures["from_peers"] == SLICES and figures["from_origins"] == 0
    assert open_dataset(tmp_path / "late").verify(workers=1).ok


def test_the_door_keeps_out_whom_the_access_file_does(world: Path, tmp_path: Path) -> None:
    out = Identity.load(world / "b").peer_id
    (tmp_path / "access.toml").write_text(f'[[dataset]]\nname = "c4"\ndeny = ["peer:{out}"]\n')
    access = AccessPolicy(tmp_path / "access.toml")
    data = [open_dataset(world / "c4")]
    with DataNode(Identity.load(world / "node"), data, "127.0.0.1", 0, None, access=access) as node:
        path = f"/v1/swarm/{data[0].id}"
        for name, is_let_in in (("a", True), ("b", False)):
            with Client(Identity.load(world / name)) as client:
                if is_let_in:
                    assert client.request_json(node.address, "POST", path, {"want": "0", "num": 1})[0]["assignments"]
                else:
                    with pytest.raises(RemoteError) as refused:
                        client.request_json(node.address, "POST", path, {"want": "0", "num": 1})
                    assert refused.value.status == 403


def test_a_slice_that_vanished_from_a_cache_is_answered_404(world: Path, tmp_path: Path) -> None:
    row = open_dataset(world / "c4").table.row(0)
    cache = ChunkCache(tmp_path / "cache", 1 << 20)
    assert put(cache, (world / "c4" / row.name).read_bytes(), row.chunk_bytes) == row.sha256
    path = f"/v1/slices/{row.sha256}"
    with (
        SliceShare(Identity.load(world / "a"), cache, {row.sha256: (row.bytes, "c4")}, "127.0.0.1", 0) as share,
        Client(Identity.load(world / "b")) as client,
    ):
        assert len(client.get_bytes(share.address, path, 1 << 20)) == row.bytes
        cache.path_of(row.sha256).unlink()
        with pytest.raises(RemoteError) as lost:
            client.get_bytes(share.address, path, 1 << 20)
        assert lost.value.status == 404


def test_two_versions_of_a_name_are_flagged_and_each_is_had_by_its_id(world: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    make_dataset(tmp_path / "new" / "c4", SLICES + 1, 2, 512)
    both = [open_dataset(world / "c4"), open_dataset(tmp_path / "new" / "c4")]
    with DataNode(Identity.load(world / "node"), both, "127.0.0.1", 0, None) as node:
        with pytest.raises(UsageError, match="Choose one"):
            remote(world, "a", node.address)
        for item in both:
            assert remote(world, "a", node.address, query=f"?id={item.id}").num_slices == item.num_slices
    with pytest.raises(UsageError, match="once"):
        DataNode(Identity.load(world / "node"), [both[0], both[0]], "127.0.0.1", 0, None)


def test_a_sharer_keeps_to_what_certificates_cover(world: Path) -> None:
    row = open_dataset(world / "c4").table.row(0)
    folder: dict[str, Path] = {}
    folder[row.sha256] = world / "c4" / row.name
    join(world / "network", world / "outsider", "outsider", scope=Scope(datasets=("books-*",)))
    with (
        SliceShare(Identity.load(world / "a"), folder, {row.sha256: (row.bytes, "c4")}, "127.0.0.1", 0) as share,
        Client(Identity.load(world / "b")) as member,
        Client(Identity.load(world / "outsider")) as outsider,
    ):
        path = f"/v1/slices/{row.sha256}"
        assert len(member.get_bytes(share.address, path, 1 << 20)) == row.bytes
        with pytest.raises(RemoteError, match="does not cover 'c4'"):
            outsider.get_bytes(share.address, path, 1 << 20)
