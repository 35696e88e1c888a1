"""What a member does to data nodes and to readers that share: dials, accusations, slow reading, floods."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.data_node import DataNode
from forebay.dataset.manifest import SliceInfo
from forebay.dataset.reader import Dataset
from forebay.network import peer_source, reachability
from forebay.network.client import Client
from forebay.network.peer import Provider
from forebay.network.pki.identity import Identity
from forebay.network.reachability import ReachabilityChecker
from forebay.swarm import tracker
from forebay.swarm.share import SliceShare
from support.attackers import HOST, answers, ask, issue, organisation, request
from support.nodes import make_dataset
from support.waiting import until
from support.wire import connect

SLICES = 4


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path / "data", SLICES, 20_000)


@pytest.fixture
def node(dataset: Dataset, network_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataNode]:
    monkeypatch.setattr(reachability, "CHECK_S", 60.0)  # Also a machine that stands still answers within it.
    with DataNode(issue(network_dir, "node", "data"), [dataset], HOST, 0, None) as node:
        yield node


@contextlib.contextmanager
def sharing(member: Identity, dataset: Dataset) -> Iterator[SliceShare]:
    """A member that hands on all slices of the dataset."""
    folder, rows = {}, [dataset.table.row(index) for index in range(SLICES)]
    for row in rows:
        folder[row.sha256] = dataset.path / row.name
    with SliceShare(member, folder, {row.sha256: (row.bytes, dataset.name, 0) for row in rows}, f"{HOST}:0") as share:
        yield share


def swarm_path(node: DataNode) -> str:
    return f"/v1/swarm/{node.datasets[0].id}"


def swarm(node: DataNode, member: Identity, message: Any) -> tuple[int, Any]:
    return ask(member, node.address, "POST", swarm_path(node), message)


def until_named(node: DataNode, member: Identity, share: SliceShare) -> None:
    """Wait until the node names a member that says that it has all slices."""
    message = {"address": share.address, "have": f"0-{SLICES - 1}"}
    with Client(member) as client:

        def is_named():
            client.request_json(node.address, "POST", swarm_path(node), message)
            return bool(node.tracker.status()[node.datasets[0].id]["slices_with_copies"] == SLICES)

        until(is_named)


def test_addresses_of_one_member_keep_no_other_from_being_dialled(
    node: DataNode, dataset: Dataset, evil: Identity, honest: Identity
) -> None:
    """Ports that accept and say nothing, named one after another."""
    with contextlib.ExitStack() as stack:
        traps = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(40)]
        with connect(evil, node.address) as sock:
            named = [{"address": f"{HOST}:{trap.getsockname()[1]}"} for trap in traps]
            assert {a.status for a in answers(sock, *(request("POST", swarm_path(node), item) for item in named))} == {
                200
            }
        with sharing(honest, dataset) as share:
            until_named(node, honest, share)
        dialled = 0
        for trap in traps:
            trap.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                trap.accept()[0].close()
                dialled += 1
        assert dialled == 1


def test_after_an_address_without_answer_a_peer_waits_for_its_next(network_dir: Path) -> None:
    now = 1000.0
    with (
        Client(issue(network_dir, "node")) as client,
        contextlib.closing(ReachabilityChecker(client, lambda: now)) as dialer,
        socket.create_server((HOST, 0)) as trap,
    ):
        peer, address = issue(network_dir, "evil").as_peer, f"{HOST}:{trap.getsockname()[1]}"
        dialer.check(peer, f"{HOST}:1", HOST)
        until(lambda: dialer.check(peer, f"{HOST}:1", HOST) is False)
        assert [dialer.check(peer, address, HOST) for _ in range(3)] == [False] * 3
        now += reachability.PAUSE_S + 1
        assert dialer.check(peer, address, HOST) is None
        trap.settimeout(20)
        trap.accept()[0].close()


def test_a_member_that_is_being_dialled_is_served_meanwhile(
    node: DataNode, network_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "GRACE_S", 0.0)
    member = issue(network_dir, "member", "worker")
    with socket.create_server((HOST, 0)) as silent:
        message = {"address": f"{HOST}:{silent.getsockname()[1]}", "want": "0-3", "num": 2}
        swarm(node, member, message)
        assert len(swarm(node, member, message)[1]["assignments"]) == 2


def test_a_member_from_afar_leads_no_node_to_its_own_loopback(network_dir: Path) -> None:
    node, evil = issue(network_dir, "node", "data"), issue(network_dir, "evil").as_peer
    with (
        socket.create_server((HOST, 0)) as inner,
        Client(node) as client,
        contextlib.closing(ReachabilityChecker(client)) as dialer,
    ):
        for host in (HOST, "localhost", "0.0.0.0"):
            address = f"{host}:{inner.getsockname()[1]}"
            dialer.check(evil, address, "10.1.2.3")
            until(lambda address=address: dialer.check(evil, address, "10.1.2.3") is False)
        inner.settimeout(0)
        with pytest.raises(BlockingIOError):
            inner.accept()


def test_names_that_nobody_has_are_not_kept(node: DataNode, evil: Identity) -> None:
    """Failures of invented members."""
    before = node.tracker.status()
    failed = [{"index": 0, "member": f"{i}{'x' * 290}", "wrong": i % 2 == 0} for i in range(1024)]
    assert swarm(node, evil, {"failed": failed})[0] == 200
    after = node.tracker.status()[node.datasets[0].id]
    assert (after["failed"], after["reported"]) == (0, {}) and before[node.datasets[0].id]["failed"] == 0
    node.tracker._tracked.clear()
    status, message = swarm(node, evil, {})
    assert (status, message["error"]) == (404, "unknown_swarm")


@pytest.mark.parametrize("ranges", [",".join(str(i) for i in range(0, 300_000, 2)), "0," * 200_000 + "0"])
def test_more_ranges_than_slices_are_refused_before_they_are_read(ranges: str, node: DataNode, evil: Identity) -> None:
    """A message of ranges that costs more than its bytes."""
    for key in ("have", "want"):
        status, message = swarm(node, evil, {key: ranges})
        assert status == 400 and f"at most {SLICES} ranges" in message["message"]


def test_an_accused_member_is_named_to_all_but_its_accusers(
    node: DataNode, dataset: Dataset, network_dir: Path
) -> None:
    """Of whatever organisations they are; the node asks it for nothing."""
    accusers = [issue(network_dir, name, "worker", by=organisation(network_dir, name)) for name in ("b", "c")]
    honest, reader = issue(network_dir, "a", "worker"), issue(network_dir, "reader", "worker")
    with sharing(honest, dataset) as share:
        until_named(node, honest, share)
        for accuser in accusers:
            swarm(node, accuser, {})
            lie = {"failed": [{"index": index, "member": honest.peer_id, "wrong": True} for index in range(SLICES)]}
            assert swarm(node, accuser, lie)[0] == 200
        assert node.tracker.status()[dataset.id]["reported"] == {honest.peer_id: 2}
        for member, expected in ((reader, honest.peer_id), (accusers[0], node.identity.peer_id)):
            assigned = swarm(node, member, {"want": "0", "num": 1})[1]["assignments"]
            assert [item["peer_id"] for item in assigned] == [expected]
        assert share.bytes_sent == 0


def test_a_check_of_a_peer_that_drips_ends(network_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check holds up those behind it: a peer that gives a little all the time counts as one that does not answer."""
    clock = SimpleNamespace(now=0.0)

    def drip(*_):
        while clock.now < 1000.0:
            clock.now += 1.0
            yield memoryview(b"x")

    monkeypatch.setattr(peer_source, "read_slice", drip)
    monkeypatch.setattr(peer_source, "time", SimpleNamespace(monotonic=lambda: clock.now))
    info, provider = SliceInfo(0, "s", 10_000, "ab" * 32, 1, 1), Provider("p", f"{HOST}:1", False)
    with Client(issue(network_dir, "n")) as client:
        assert peer_source.verify_provider(client, provider, info) is None
    assert clock.now < peer_source.STALL_S + 2.0


def test_an_organisation_has_so_many_processes_in_a_swarm(
    node: DataNode, network_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs a bit a slice; an organisation issues as many certificates as it likes."""
    monkeypatch.setattr(tracker, "_MAX_SESSIONS_PER_ORGANISATION", 3)
    org = organisation(network_dir, "acme")
    members = [issue(network_dir, f"m{i}", by=org) for i in range(4)]
    assert [swarm(node, item, {})[0] for item in members] == [200, 200, 200, 400]
    assert swarm(node, members[0], {"leave": True})[0] == 200
    assert swarm(node, members[3], {})[0] == 200
    assert swarm(node, issue(network_dir, "of-root"), {})[0] == 200


def test_figures_of_peers_are_for_administrators(node: DataNode, network_dir: Path) -> None:
    reader, admin = issue(network_dir, "reader", "worker"), issue(network_dir, "admin", "admin")
    sha256 = node.datasets[0].table.row(0).sha256
    assert ask(reader, node.address, "GET", f"/v1/slices/{sha256}")[0] == 200
    until(lambda: reader.peer_id.encode() in ask(admin, node.address, "GET", "/metrics")[1])
    status, text = ask(reader, node.address, "GET", "/metrics")
    assert status == 200 and b"forebay_connections" in text and reader.peer_id.encode() not in text
