"""The DHT on loopback, over real UDP: found from everywhere, although nodes die and lie.

FOREBAY_DHT_NODES=200 and FOREBAY_DHT_FORGED=1000 make the crowd and the flood larger. Chance remains: a search of the
DHT that no node answers in its seconds finds nothing; it is repeated.
"""

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import libtorrent as lt
import pytest

from forebay.data_node import DataNode
from forebay.errors import NetworkError
from forebay.network import dht
from forebay.network.client import Client
from forebay.network.dht import LibtorrentDht
from forebay.network.discovery import ask_many, find_providers, record_key
from forebay.network.pki.identity import revoke
from forebay.storage.hosts import host_towards
from support.calibration import scaled
from support.nodes import HOST, NAME, make_dataset
from support.waiting import until

KEY = record_key("network", "dataset", "tiny")
CROWD = int(os.environ.get("FOREBAY_DHT_NODES", "50"))
FORGED = int(os.environ.get("FOREBAY_DHT_FORGED", "200"))
Start = Callable[..., LibtorrentDht]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a node, which joins by others if there are any."""
    with contextlib.ExitStack() as stack:

        def start(*others, host=HOST):
            node = LibtorrentDht(host, 0, [(other.host, other.port) for other in others])
            return stack.enter_context(contextlib.closing(node))

        yield start


@pytest.fixture
def nodes(start) -> list[LibtorrentDht]:
    first = start()
    return [first, *(start(first) for _ in range(5))]


def until_found(node: LibtorrentDht, *ports: int):
    """Wait until a node finds exactly these ports."""
    until(lambda: set(node.find(KEY, 2.0)) == {(HOST, port) for port in ports})


def test_many_providers_of_one_name_are_found_from_everywhere(nodes):
    for index in (1, 2, 3):
        nodes[index].announce(KEY, 7000 + index)
    for node in nodes:
        until_found(node, 7001, 7002, 7003)
    assert nodes[5].find(record_key("network", "dataset", "absent"), 1.0) == []
    keys = {record_key(*words) for words in ("adx", "bdx", "asx", "ady")}
    assert len(keys) == 4 and {len(key) for key in keys} == {20}


def test_a_bootstrap_node_that_was_away_joins_those_that_came_before_and_after(start, monkeypatch, caplog):
    monkeypatch.setattr(dht, "REJOIN_EVERY_S", 0.5)
    first = start()
    others = [start(first) for _ in range(5)]

    def know_each_other():
        for node in others:
            node.find(KEY, 0.0)
        return min(node.num_nodes for node in others) > 3  # libtorrent then asks the bootstrap node no more

    until(know_each_other)
    others[0].announce(KEY, 7001)
    until_found(others[3], 7001)
    first.close()
    first.close()
    until_found(others[4], 7001)
    until(lambda: all(node.fault for node in others))
    assert re.search(f"no bootstrap node answers .*{first.port}.*forebay dht", others[0].fault)
    with contextlib.closing(LibtorrentDht(HOST, first.port)) as again:
        until_found(start(again), 7001)
        until(lambda: not any(node.fault for node in others))
    assert caplog.text.count("answers again") == len(others)


def test_a_port_in_use_is_said():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as current:
        current.bind((HOST, 0))
        with pytest.raises(NetworkError, match="cannot listen"):
            LibtorrentDht(HOST, current.getsockname()[1])


def test_a_name_is_found_by_fifty_nodes(start):
    first = start()
    nodes = [first, *(start(first) for _ in range(CROWD - 1))]
    nodes[7].announce(KEY, 7001)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda node: node.find(KEY, scaled(20)), nodes))
    assert results == [[(HOST, 7001)]] * CROWD


@pytest.mark.skipif(host_towards(("192.0.2.1", 9)) in ("0.0.0.0", HOST), reason="only loopback here")
@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_all_addresses_of_a_host_share_a_port_and_none_of_them_is_the_wildcard(late_s, start, monkeypatch):
    """Also where a busy machine hears of all but the first address after the announcement."""
    real = LibtorrentDht._handle

    def handle(self, alert):
        time.sleep(late_s if type(alert).__name__ == "listen_succeeded_alert" and self._addresses else 0.0)
        real(self, alert)

    monkeypatch.setattr(LibtorrentDht, "_handle", handle)
    first = start(host="0.0.0.0")
    first.announce(KEY, 7001)
    addresses = first.find(KEY, scaled(30))  # Four seconds, of which the late alerts take two.
    assert addresses and {port for _, port in addresses} == {7001}
    hosts = {host for host, _ in addresses}
    assert not hosts & {"0.0.0.0", HOST}, "an address that others may reach"
    host = min(hosts)
    with contextlib.closing(LibtorrentDht("", 0, [(host, first.port)])) as second:
        assert second.host == host and (host, 7001) in second.find(KEY, scaled(30))


def test_a_dead_provider_is_gone_and_a_living_one_outlives_its_time_to_live(tmp_path, make_identity, start):
    dataset, ttl_s = make_dataset(tmp_path / "dataset", 2, 50), scaled(0.6)
    first, seeker = start(), make_identity("seeker")
    other = start(first)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(seeker))
        nodes = [DataNode(make_identity(name), [dataset], HOST, 0, first, ttl_s=ttl_s) for name in ("a", "b")]
        for node in nodes:
            stack.enter_context(node)
        expected = {node.identity.peer_id for node in nodes}

        def is_found():
            """Who is late, or whose claim has expired on its way, is not found; never one who is not expected."""
            began = time.time()
            claims = find_providers(other, client, seeker.network_id, NAME)
            assert all(began < claim.expires_at <= time.time() + ttl_s for claim in claims)
            peers = {claim.peer_id for claim in claims}
            assert peers <= expected
            return peers == expected

        until(is_found)
        time.sleep(1.7 * ttl_s)
        until(is_found)
        nodes[0]._server.close()  # its address stays in the DHT: no node takes it back for the dead
        expected.remove(nodes[0].identity.peer_id)
        until(is_found)


def forge(node: LibtorrentDht, key: bytes, ports: range, host: str = HOST):
    """Announce many ports of a host to a node, as any stranger may who can send it a packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((host, 0))
        sock.connect((HOST, node.port))
        sock.settimeout(scaled(10.0))
        body = {b"id": b"a-stranger-of-20-byt", b"info_hash": key}
        sock.send(lt.bencode({b"t": b"00", b"y": b"q", b"q": b"get_peers", b"a": body}))
        token = lt.bdecode(sock.recv(65536))[b"r"][b"token"]
        for port in ports:
            message = {**body, b"port": port, b"token": token}
            sock.send(lt.bencode({b"t": b"01", b"y": b"q", b"q": b"announce_peer", b"a": message}))
            sock.recv(65536)  # its answer: no faster than it takes them


def test_forged_announcements_delay_a_search_by_a_bounded_time(tmp_path, nodes, make_identity):
    dataset, seeker = make_dataset(tmp_path / "dataset", 2, 50), make_identity("seeker")
    key = record_key(seeker.network_id, "dataset", NAME)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(seeker))
        traps = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(24)]  # accept, and say nothing
        for node in nodes:
            forge(node, key, range(20_000, 20_000 + FORGED))
            for trap in traps:
                node.announce(key, trap.getsockname()[1])
        provider = stack.enter_context(DataNode(make_identity("data"), [dataset], HOST, 0, nodes[2], ttl_s=3.0))
        times, peers = [], set()

        def is_found():  # an answer holds 100 addresses by chance, so that a search may miss the true one
            began = time.monotonic()
            peers.update(claim.peer_id for claim in find_providers(nodes[5], client, seeker.network_id, NAME))
            times.append(time.monotonic() - began)
            return bool(peers)

        until(is_found)
        assert peers == {provider.identity.peer_id} and times[-1] < scaled(8.0)


def test_forged_announcements_keep_no_revocation_from_a_node(tmp_path, nodes, make_identity, network_dir):
    """Two data nodes without a dataset or a peer in common, and a crowd under the key by which they find each other."""
    members = [make_identity(name) for name in ("first", "second", "thief")]
    first, second, thief = members
    key = record_key(first.network_id, "revocations", "")
    with contextlib.ExitStack() as stack:
        for node in nodes:
            forge(node, key, range(20_000, 20_000 + FORGED), "127.0.0.9")
        for number, member in enumerate(members[:2]):
            dataset = make_dataset(tmp_path / f"dataset{number}", 2, 50)
            stack.enter_context(DataNode(member, [dataset], HOST, 0, nodes[2 + number]))
        until(lambda: first.contacts.addresses() and second.contacts.addresses())
        revoke(network_dir, thief.peer_id, second.node_dir)
        assert until(lambda: first.revocations.reason(thief.peer_id) is not None)


def test_many_addresses_of_which_none_accepts_are_no_answer():
    with socket.socket() as taken:
        taken.bind((HOST, 0))  # bound and not listening: connections are refused
        addresses = [(f"127.0.0.{i}", taken.getsockname()[1]) for i in range(1, 60)]
        assert ask_many(addresses, lambda address: address, time.monotonic() + 20) == []
