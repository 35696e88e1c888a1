"""The DHT on loopback, over real UDP: found from everywhere, quickly, whoever dies or lies.

FOREBAY_DHT_NODES=200 and FOREBAY_DHT_FORGED=1000 make the crowd and the flood larger.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import libtorrent as lt
import pytest

from forebay.data_node import DataNode
from forebay.errors import DatasetError, NetworkError, UsageError
from forebay.network import discovery
from forebay.network.addresses import host_towards
from forebay.network.client import Client
from forebay.network.dht import LibtorrentDht
from forebay.network.discovery import ask_many, find_providers, record_key
from forebay.network.pki.identity import Identity
from forebay.scheduler.server import SchedulerService
from forebay.storage.peer_dataset import PeerOrigin
from support.calibration import scaled
from support.local_discovery import LocalDiscovery
from support.nodes import NAME, make_dataset

KEY = record_key("network", "dataset", "tiny")
CROWD = int(os.environ.get("FOREBAY_DHT_NODES", "50"))
FORGED = int(os.environ.get("FOREBAY_DHT_FORGED", "200"))
Make = Callable[[str], Identity]


@pytest.fixture
def nodes() -> Iterator[list[LibtorrentDht]]:
    with contextlib.ExitStack() as stack:
        first = LibtorrentDht("127.0.0.1", 0)
        stack.callback(first.close)
        created = [first]
        for _ in range(5):
            created.append(LibtorrentDht("127.0.0.1", 0, [("127.0.0.1", first.port)]))
            stack.callback(created[-1].close)
        yield created


def finds(node: LibtorrentDht, key: bytes, expected: set[tuple[str, int]]) -> bool:
    """Whether a node comes to see exactly these addresses, within half a minute."""
    deadline = time.monotonic() + scaled(30)
    while time.monotonic() < deadline:
        if set(node.find(key, 2.0)) == expected:
            return True
    return False


def test_many_providers_of_one_name_are_found_from_everywhere(nodes: list[LibtorrentDht]) -> None:
    for index in (1, 2, 3):
        nodes[index].announce(KEY, 7000 + index)
    expected = {("127.0.0.1", 7000 + index) for index in (1, 2, 3)}
    for node in nodes:
        assert finds(node, KEY, expected)
    assert nodes[5].find(record_key("network", "dataset", "absent"), 1.0) == []
    deadline = time.monotonic() + scaled(30)
    while nodes[0].num_nodes == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert nodes[0].num_nodes > 0


def test_records_outlive_the_node_by_which_one_entered(nodes: list[LibtorrentDht]) -> None:
    deadline = time.monotonic() + scaled(60)
    while min(node.num_nodes for node in nodes) < 2:  # a table of one would die with the node it entered by
        assert time.monotonic() < deadline, [node.num_nodes for node in nodes]
        for node in nodes:
            node.find(KEY, 0.2)
    nodes[1].announce(KEY, 7001)
    assert finds(nodes[4], KEY, {("127.0.0.1", 7001)})
    nodes[0].close()
    assert finds(nodes[5], KEY, {("127.0.0.1", 7001)})


def test_the_first_node_is_found_by_one_who_comes_later() -> None:
    first = LibtorrentDht("127.0.0.1", 0)
    first.announce(KEY, 7001)
    assert finds(first, KEY, {("127.0.0.1", 7001)})
    second = LibtorrentDht("127.0.0.1", 0, [("127.0.0.1", first.port)])
    try:
        assert finds(second, KEY, {("127.0.0.1", 7001)})
        second.announce(KEY, 7002)
        assert finds(first, KEY, {("127.0.0.1", 7001), ("127.0.0.1", 7002)})
    finally:
        second.close()
        first.close()
        first.close()


def test_a_taken_port_is_said() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as current:
        current.bind(("127.0.0.1", 0))
        with pytest.raises(NetworkError, match="cannot listen"):
            LibtorrentDht("127.0.0.1", current.getsockname()[1])


def test_keys_part_networks_kinds_and_names() -> None:
    keys = {
        record_key("a", "dataset", "x"),
        record_key("b", "dataset", "x"),
        record_key("a", "scheduler", "x"),
        record_key("a", "dataset", "y"),
    }
    assert len(keys) == 4 and {len(key) for key in keys} == {20}


def test_fifty_nodes_find_a_name_in_half_a_second() -> None:
    with contextlib.ExitStack() as stack:
        first = LibtorrentDht("127.0.0.1", 0)
        nodes = [first, *(LibtorrentDht("127.0.0.1", 0, [("127.0.0.1", first.port)]) for _ in range(CROWD - 1))]
        for node in nodes:
            stack.callback(node.close)
        nodes[7].announce(KEY, 7001)

        def timed(node: LibtorrentDht) -> float:
            started = time.monotonic()
            assert node.find(KEY, scaled(20)) == [("127.0.0.1", 7001)]
            return time.monotonic() - started

        with ThreadPoolExecutor(4) as pool:
            times = sorted(pool.map(timed, nodes))
    print(f"{CROWD} nodes: find median {statistics.median(times) * 1e3:.0f} ms, worst {times[-1] * 1e3:.0f} ms")
    assert statistics.median(times) < scaled(0.5)
    assert times[-1] < scaled(5.0)  # a node just started may have to ask again after a second


@pytest.mark.skipif(host_towards(("192.0.2.1", 9)) in ("0.0.0.0", "127.0.0.1"), reason="only loopback here")
@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_all_addresses_of_a_host_share_a_port_and_none_of_them_is_the_wildcard(
    late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a busy machine hears of all but the first address after the announcement."""
    real = LibtorrentDht._handle

    def handle(self: LibtorrentDht, alert: object) -> None:
        time.sleep(late_s if type(alert).__name__ == "listen_succeeded_alert" and self._addresses else 0.0)
        real(self, alert)

    monkeypatch.setattr(LibtorrentDht, "_handle", handle)
    first = LibtorrentDht("0.0.0.0", 0)
    try:
        first.announce(KEY, 7001)
        result = first.find(KEY, scaled(30))  # Four seconds, of which the late alerts take two.
        assert result and {port for _, port in result} == {7001}
        hosts = {host for host, _ in result}
        assert not hosts & {"0.0.0.0", "127.0.0.1"}, "an address that others may reach"
        host = min(hosts)
        second = LibtorrentDht("", 0, [(host, first.port)])
        try:
            assert second.host == host
            assert (host, 7001) in second.find(KEY, scaled(30))
        finally:
            second.close()
    finally:
        first.close()


def test_a_dead_provider_is_gone_and_a_living_one_outlives_its_time_to_live(
    tmp_path: Path, make_identity: Make
) -> None:
    dataset, ttl_s = make_dataset(tmp_path / "dataset", 2, 50), scaled(0.6)
    with contextlib.ExitStack() as stack:
        first = LibtorrentDht("127.0.0.1", 0)
        stack.callback(first.close)
        other = LibtorrentDht("127.0.0.1", 0, [("127.0.0.1", first.port)])
        stack.callback(other.close)
        seeker = make_identity("seeker")
        client = stack.enter_context(Client(seeker))
        nodes = [DataNode(make_identity(name), [dataset], "127.0.0.1", 0, first, ttl_s=ttl_s) for name in ("a", "b")]
        for node in nodes:
            node.start()
            stack.callback(node.stop)

        def until_found(expected: set[str]) -> None:
            """Who is late, or whose claim has expired on its way, is not found; never one who is not expected."""
            deadline, found = time.monotonic() + scaled(20), set[str]()
            while found != expected:
                assert found < expected and time.monotonic() < deadline
                began = time.time()
                claims = find_providers(other, client, seeker.network_id, NAME)
                assert all(began < claim.expires_at <= time.time() + ttl_s for claim in claims)
                found = {claim.peer_id for claim in claims}

        both = {node.identity.peer_id for node in nodes}
        until_found(both)
        time.sleep(1.7 * ttl_s)
        until_found(both)
        nodes[0]._server.close()  # its address stays in the DHT: nobody takes it back for the dead
        until_found({nodes[1].identity.peer_id})


def test_a_name_of_two_datasets_is_told_and_never_mixed(
    tmp_path: Path, make_identity: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANSWER_AFTER_GOOD_S", "ASK_TIMEOUT_S"):
        monkeypatch.setattr(discovery, name, 60.0)  # Both are heard.
    monkeypatch.setattr(discovery, "read_claims", partial(discovery.read_claims, timeout_s=60.0))
    table = LocalDiscovery()
    datasets = [make_dataset(tmp_path / "one", 2, 50), make_dataset(tmp_path / "two", 3, 60)]
    with contextlib.ExitStack() as stack:
        for index, dataset in enumerate(datasets):
            stack.enter_context(DataNode(make_identity(f"data-{index}"), [dataset], "127.0.0.1", 0, table))
        seeker = make_identity("seeker")
        client = stack.enter_context(Client(seeker))
        claims = find_providers(table, client, seeker.network_id, NAME)
        assert {claim.dataset_id for claim in claims} == {dataset.id for dataset in datasets}
        scheduler = SchedulerService(seeker, NAME, table, client, tmp_path / "state", seq_len=8, wait_s=2.0)
        with pytest.raises(DatasetError, match="stands for 2 datasets") as reported:
            scheduler.start()
        scheduler.stop()
        assert all(dataset.id in str(reported.value) for dataset in datasets)
        with pytest.raises(UsageError, match="expected one dataset of this name"):  # what a Loader reads from
            PeerOrigin(seeker, NAME, discovery=table).sources()
        chosen = PeerOrigin(seeker, NAME, discovery=table, expected_id=datasets[1].id)
        assert [source.dataset_id for source in chosen.sources()] == [datasets[1].id]


def forge(node: LibtorrentDht, key: bytes, ports: range) -> None:
    """Announce many ports to a node, as any stranger may who can send it a packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        door.bind(("127.0.0.1", 0))
        door.connect(("127.0.0.1", node.port))
        door.settimeout(scaled(10.0))
        body = {b"id": b"a-stranger-of-20-byt", b"info_hash": key}
        door.send(lt.bencode({b"t": b"00", b"y": b"q", b"q": b"get_peers", b"a": body}))
        token = lt.bdecode(door.recv(65536))[b"r"][b"token"]
        for port in ports:
            asked = {**body, b"port": port, b"token": token}
            door.send(lt.bencode({b"t": b"01", b"y": b"q", b"q": b"announce_peer", b"a": asked}))
            door.recv(65536)  # its answer: no faster than it takes them


def test_forged_announcements_delay_a_search_by_a_bounded_time(
    tmp_path: Path, nodes: list[LibtorrentDht], make_identity: Make
) -> None:
    dataset = make_dataset(tmp_path / "dataset", 2, 50)
    seeker = make_identity("seeker")
    key = record_key(seeker.network_id, "dataset", NAME)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(seeker))
        traps = [socket.create_server(("127.0.0.1", 0)) for _ in range(24)]  # they accept, and say nothing
        for trap in traps:
            stack.callback(trap.close)
        for node in nodes:
            forge(node, key, range(20_000, 20_000 + FORGED))
            for trap in traps:
                node.announce(key, trap.getsockname()[1])
        provider = stack.enter_context(DataNode(make_identity("data"), [dataset], "127.0.0.1", 0, nodes[2], ttl_s=3.0))
        deadline = time.monotonic() + scaled(40)
        took, result = 0.0, False
        while not result:  # an answer holds 100 addresses by chance, so that a search may miss the one that is true
            assert time.monotonic() < deadline
            started = time.monotonic()
            claims = find_providers(nodes[5], client, seeker.network_id, NAME)
            took, result = time.monotonic() - started, bool(claims)
        assert [claim.peer_id for claim in claims] == [provider.identity.peer_id]
        print(f"{FORGED} forged, {len(traps)} traps: found in {took:.2f} s")
        assert took < scaled(8.0)


def test_many_addresses_of_which_none_accepts_are_no_answer() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        port = taken.getsockname()[1]
        assert (
            ask_many([(f"127.0.0.{i}", port) for i in range(1, 60)], lambda address: address, time.monotonic() + 20)
            == []
        )
