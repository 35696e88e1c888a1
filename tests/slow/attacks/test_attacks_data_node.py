"""What a member does to data nodes and to readers that share: dials, accusations, slow reading, floods."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from forebay.data_node import DataNode
from forebay.dataset.manifest import SliceInfo
from forebay.dataset.reader import Dataset
from forebay.errors import NetworkError
from forebay.network import reachability as dialing
from forebay.network import server_connections as connections
from forebay.network.client import Client, RemoteError
from forebay.network.limits import ServerLimits
from forebay.network.peer import Provider
from forebay.network.pki.identity import Identity
from forebay.network.reachability import ReachabilityChecker, may_dial
from forebay.storage import peer_source as holders
from forebay.swarm import tracker
from forebay.swarm.share import SharedDataset, SliceShare
from support.attackers import HOST, answers, ask, connection, issue, organisation, request
from support.nodes import make_dataset
from support.rude_peer import RudePeer, http
from support.wire import until

SLICES = 4


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path / "data", SLICES, 20_000)


@pytest.fixture
def node(dataset: Dataset, network_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataNode]:
    monkeypatch.setattr(dialing, "CHECK_S", 60.0)  # Also a machine that stands still answers within it.
    with DataNode(issue(network_dir, "node", "data"), [dataset], HOST, 0, None) as node:
        yield node


@contextlib.contextmanager
def sharing(member: Identity, dataset: Dataset) -> Iterator[SliceShare]:
    """A member that hands on all slices of the dataset."""
    folder, rows = {}, [dataset.table.row(index) for index in range(SLICES)]
    for row in rows:
        folder[row.sha256] = dataset.path / row.name
    hashes = {row.sha256: (row.bytes, dataset.name) for row in rows}
    with SliceShare(member, folder, hashes, HOST, 0) as share:
        yield share


def swarm_path(node: DataNode) -> str:
    return f"/v1/swarm/{node.datasets[0].id}"


def is_reached(client: Client, node: DataNode, message: dict[str, str]) -> bool:
    """Whether the node names a member that has all slices to others; it says so itself again and again."""
    client.request_json(node.address, "POST", swarm_path(node), message)
    return bool(node.tracker.status()[node.datasets[0].id]["slices_with_copies"] == SLICES)


def test_addresses_of_one_member_keep_no_other_from_being_dialled(
    node: DataNode, dataset: Dataset, network_dir: Path
) -> None:
    """Finding 14: ports that accept and say nothing, named one after another."""
    evil, honest = issue(network_dir, "evil", "worker"), issue(network_dir, "honest", "worker")
    with contextlib.ExitStack() as stack:
        traps = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(40)]
        with connection(evil, node.address) as sock:
            named = [{"address": f"{HOST}:{trap.getsockname()[1]}"} for trap in traps]
            assert {a.status for a in answers(sock, *(request("POST", swarm_path(node), item) for item in named))} == {
                200
            }
        with sharing(honest, dataset) as share, Client(honest) as client:
            message = {"address": share.address, "have": f"0-{SLICES - 1}"}
            until(lambda: is_reached(client, node, message))
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
        now += dialing.PAUSE_S + 1
        assert dialer.check(peer, address, HOST) is None
        trap.settimeout(20)
        trap.accept()[0].close()


def test_a_member_that_is_being_dialled_is_served_meanwhile(
    node: DataNode, network_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialing, "GRACE_S", 0.0)
    member = issue(network_dir, "member", "worker")
    with socket.create_server((HOST, 0)) as silent:
        message = {"address": f"{HOST}:{silent.getsockname()[1]}", "want": "0-3", "num": 2}
        ask(member, node.address, "POST", swarm_path(node), message)
        assert len(ask(member, node.address, "POST", swarm_path(node), message)[1]["assignments"]) == 2


@pytest.mark.parametrize(
    ("ip", "source", "allowed"),
    [
        ("8.8.8.8", "9.9.9.9", True),
        ("10.0.0.9", "10.0.0.9", True),
        ("10.0.0.8", "10.9.0.9", True),
        ("10.0.0.8", "9.9.9.9", False),
        ("127.0.0.1", "9.9.9.9", False),
        ("127.0.0.1", "10.0.0.9", False),
        ("::1", "2600::1", False),
        ("::ffff:127.0.0.1", "10.0.0.9", False),
        ("0.0.0.0", "10.0.0.9", False),
        ("169.254.169.254", "10.0.0.9", False),
        ("169.254.169.254", "127.0.0.1", False),
        ("fe80::1%eth0", "fd00::2", False),
        ("127.0.0.2", "127.0.0.1", True),
        ("64:ff9b::7f00:1", "2600::1", False),
        ("nowhere", "10.0.0.9", False),
    ],
)
def test_where_a_member_may_have_a_node_connect_to(ip: str, source: str, allowed: bool) -> None:
    assert may_dial(ip, source) is allowed


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
            until(lambda address=address: dialer.check(evil, address, "10.1.2.3") is False)  # type: ignore[misc]
        inner.settimeout(0)
        with pytest.raises(BlockingIOError):
            inner.accept()


def test_names_that_nobody_has_are_not_kept(node: DataNode, network_dir: Path) -> None:
    """Finding 3: failures of invented members."""
    evil, before = issue(network_dir, "evil", "worker"), node.tracker.status()
    failed = [{"index": 0, "member": f"{i}{'x' * 290}", "wrong": i % 2 == 0} for i in range(1024)]
    assert ask(evil, node.address, "POST", swarm_path(node), {"failed": failed})[0] == 200
    after = node.tracker.status()[node.datasets[0].id]
    assert (after["failed"], after["banned"]) == (0, []) and before[node.datasets[0].id]["failed"] == 0


@pytest.mark.parametrize("ranges", [",".join(str(i) for i in range(0, 300_000, 2)), "0," * 200_000 + "0"])
def test_more_ranges_than_slices_are_refused_before_they_are_read(
    ranges: str, node: DataNode, network_dir: Path
) -> None:
    """Finding 22: a message of ranges that costs more than its bytes."""
    evil = issue(network_dir, "evil", "worker")
    for key in ("have", "want"):
        status, message = ask(evil, node.address, "POST", swarm_path(node), {key: ranges})
        assert status == 400 and f"at most {SLICES} ranges" in message["message"]


def test_a_dataset_without_a_swarm_is_not_found(
    node: DataNode, network_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.tracker, "_tracked", {})
    status, message = ask(issue(network_dir, "m"), node.address, "POST", swarm_path(node), {})
    assert (status, message["error"]) == (404, "unknown_swarm")


def test_small_files_in_memory_are_sent_in_pieces(dataset: Dataset, network_dir: Path) -> None:
    """Finding 24: requests for a large file that nobody reads queue a piece each, not the file."""
    num, size = 8, 32 << 20
    with sharing(issue(network_dir, "sharer"), dataset) as share, contextlib.ExitStack() as stack:
        share.add(SharedDataset("d", "ab" * 32, 1, {"manifest.json": bytes(size)}, lambda: np.zeros(1, np.bool_)))
        evil = issue(network_dir, "evil")
        for _ in range(num):
            sock = stack.enter_context(connection(evil, share.address))
            sock.sendall(request("GET", f"/v1/datasets/{'ab' * 32}/manifest.json"))
        table = share._server._core.connections
        until(lambda: sum(item.flow.write_paused for item in table.all()) == num)
        assert sum(item.transport._queued for item in table.all()) <= num << 20
        with connection(issue(network_dir, "honest"), share.address) as sock:
            (part,) = answers(sock, request("GET", f"/v1/datasets/{'ab' * 32}/manifest.json", Range="bytes=5-9"))
        assert (part.status, part.body) == (206, bytes(5))


def test_accusing_the_honest_again_and_again_costs_one_check(
    node: DataNode, dataset: Dataset, network_dir: Path
) -> None:
    """Two members say that a third gives wrong bytes: the node fetches a slice to find out, once."""
    liars = [issue(network_dir, name, "worker") for name in ("b", "c")]
    honest, path = issue(network_dir, "a", "worker"), swarm_path(node)
    with sharing(honest, dataset) as share, Client(honest) as client:
        message = {"address": share.address, "have": f"0-{SLICES - 1}"}
        until(lambda: is_reached(client, node, message))
        lie = {"failed": [{"index": 0, "member": honest.peer_id, "wrong": True}]}
        size = dataset.table.row(0).bytes
        for round_ in range(4):
            for liar in liars:
                assert ask(liar, node.address, "POST", path, lie)[0] == 200
            if round_ == 0:
                until(lambda: share.bytes_sent >= size)
            until(lambda: not node.tracker._checking)
        assert share.bytes_sent < 2 * size and node.tracker.status()[dataset.id]["banned"] == []


def test_a_check_of_a_peer_that_drips_ends(network_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check holds up those behind it: a peer that gives a little all the time counts as one that does not answer."""

    def drip(*_: object) -> Iterator[memoryview]:
        for _piece in range(10_000):
            time.sleep(0.001)
            yield memoryview(b"x")

    monkeypatch.setattr(holders, "read_slice", drip)
    monkeypatch.setattr(holders, "STALL_S", 0.05)
    info, holder = SliceInfo(0, "s", 10_000, "ab" * 32, 1, 1), Provider("p", f"{HOST}:1", False)
    with Client(issue(network_dir, "n")) as client:
        assert holders.verify_provider(client, holder, info) is None


def test_an_organisation_has_so_many_processes_in_a_swarm(
    node: DataNode, network_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs a bit a slice; an organisation issues as many certificates as it likes."""
    monkeypatch.setattr(tracker, "_MAX_SESSIONS_PER_ORGANISATION", 3)
    org = organisation(network_dir, "acme")
    members, path = [issue(network_dir, f"m{i}", by=org) for i in range(4)], swarm_path(node)
    assert [ask(item, node.address, "POST", path, {})[0] for item in members] == [200, 200, 200, 400]
    assert ask(members[0], node.address, "POST", path, {"leave": True})[0] == 200
    assert ask(members[3], node.address, "POST", path, {})[0] == 200
    assert ask(issue(network_dir, "of-root"), node.address, "POST", path, {})[0] == 200


def test_figures_of_peers_are_for_administrators(node: DataNode, network_dir: Path) -> None:
    reader, admin = issue(network_dir, "reader", "worker"), issue(network_dir, "admin", "admin")
    sha256 = node.datasets[0].table.row(0).sha256
    assert ask(reader, node.address, "GET", f"/v1/slices/{sha256}")[0] == 200
    until(lambda: reader.peer_id.encode() in ask(admin, node.address, "GET", "/metrics")[1])
    status, text = ask(reader, node.address, "GET", "/metrics")
    assert status == 200 and b"forebay_connections" in text and reader.peer_id.encode() not in text


def test_slow_readers_make_room(dataset: Dataset, network_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that hold all places by answers which they do not read; finding 4."""
    monkeypatch.setattr(connections, "SLOW_S", 0.05)
    limits = ServerLimits(connections=8, connections_per_peer=4)
    with sharing(issue(network_dir, "sharer"), dataset) as share, contextlib.ExitStack() as stack:
        share.add(SharedDataset("d", "ab" * 32, 1, {"manifest.json": bytes(16 << 20)}, lambda: np.zeros(1, np.bool_)))
        table = share._server._core.connections
        table.limits = limits
        for name in ("b", "c"):
            evil = issue(network_dir, name, "worker")
            for _ in range(4):
                sock = stack.enter_context(connection(evil, share.address))
                sock.sendall(request("GET", f"/v1/datasets/{'ab' * 32}/manifest.json"))
        until(lambda: sum(item.flow.write_paused for item in table.all()) == 8)

        def is_served() -> bool:
            with contextlib.suppress(OSError):
                return (
                    ask(issue(network_dir, f"honest{time.monotonic_ns()}"), share.address, "GET", "/v1/claims")[0]
                    == 200
                )
            return False

        until(is_served)
        assert len(table) <= limits.connections
        assert ask(issue(network_dir, "late"), share.address, "GET", "/v1/claims")[0] == 200


def test_blank_lines_before_a_request_end(node: DataNode, network_dir: Path) -> None:
    with connection(issue(network_dir, "evil"), node.address) as sock:
        assert answers(sock, b"\r\n" * 100 + request("GET", "/v1/claims"))[0].status == 200
        with contextlib.suppress(OSError):
            for _ in range(1000):
                sock.sendall(b"\r\n" * 1000)
        until(lambda: node._server.num_connections == 0)


def test_half_closed_connections_are_over(node: DataNode, network_dir: Path) -> None:
    node._server._core.limits = ServerLimits(head_s=1e6, idle_s=1e6)  # no limit of time ends them
    evil = issue(network_dir, "evil")
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            sock = stack.enter_context(connection(evil, node.address))
            sock.sendall(b"GET /v1/claims HTTP/1.1\r\nHost: x\r\n")  # and never the rest
            socket.socket.shutdown(sock, socket.SHUT_WR)
        until(lambda: node._server.num_connections == 0)
    assert ask(evil, node.address, "GET", "/v1/claims")[0] == 200


def test_a_name_puts_nothing_into_an_answers_head(node: DataNode, network_dir: Path) -> None:
    invalid = "manifest.json%0d%0aX-Evil:%201%0d%0a%0d%0a"
    with connection(issue(network_dir, "evil"), node.address) as sock:
        for path in (f"/v1/datasets/{node.datasets[0].id}/{invalid}", f"/v1/slices/{invalid}", f"/{invalid}"):
            (answer,) = answers(sock, request("GET", path, Idempotency_Key=invalid))
            assert answer.status == 404 and "x-evil" not in answer.headers
            assert b"\r" not in answer.body and b"\n" not in answer.body


def test_a_redirect_of_a_peer_is_not_followed(node: DataNode, network_dir: Path) -> None:
    location = f"https://{node.address}/v1/claims"
    reader = issue(network_dir, "reader")
    with (
        RudePeer(issue(network_dir, "evil"), lambda asked: http(307, b"", Location=location)) as evil,
        Client(reader) as client,
        pytest.raises(NetworkError) as refused,
    ):
        client.request_json(evil.address, "GET", "/v1/claims")
    assert isinstance(refused.value, RemoteError) and refused.value.status == 307 and len(evil.asked) == 1
