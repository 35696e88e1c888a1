"""Six nodes of the DHT on loopback, over real UDP."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from millrace.errors import NetworkError
from millrace.network.dht import LibtorrentDht
from millrace.network.discovery import record_key

KEY = record_key("network", "dataset", "tiny")


@pytest.fixture
def nodes() -> Iterator[list[LibtorrentDht]]:
    with contextlib.ExitStack() as stack:
        first = LibtorrentDht("127.0.0.1", 0)
        stack.callback(first.close)
        made = [first]
        for _ in range(5):
            made.append(LibtorrentDht("127.0.0.1", 0, [("127.0.0.1", first.port)]))
            stack.callback(made[-1].close)
        yield made


def finds(node: LibtorrentDht, key: bytes, expected: set[tuple[str, int]]) -> bool:
    """Whether a node comes to see exactly these addresses, within half a minute."""
    deadline = time.monotonic() + 30
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
    deadline = time.monotonic() + 30
    while nodes[0].nodes() == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert nodes[0].nodes() > 0


def test_records_outlive_the_node_by_which_one_entered(nodes: list[LibtorrentDht]) -> None:
    deadline = time.monotonic() + 60
    while min(node.nodes() for node in nodes) < 2:  # a table of one would die with the node it entered by
        assert time.monotonic() < deadline, [node.nodes() for node in nodes]
        for node in nodes:
            node.find(KEY, 0.2)
    nodes[1].announce(KEY, 7001)
    assert finds(nodes[4], KEY, {("127.0.0.1", 7001)})
    nodes[0].close()
    assert finds(nodes[5], KEY, {("127.0.0.1", 7001)})


def test_the_first_node_is_found_by_one_who_comes_later() -> None:
    first = LibtorrentDht("127.0.0.1", 0)
    first.announce(KEY, 7001)
    assert first.find(KEY, 5.0) == [("127.0.0.1", 7001)]
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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(NetworkError, match="cannot listen"):
            LibtorrentDht("127.0.0.1", held.getsockname()[1])


def test_keys_part_networks_kinds_and_names() -> None:
    keys = {
        record_key("a", "dataset", "x"),
        record_key("b", "dataset", "x"),
        record_key("a", "scheduler", "x"),
        record_key("a", "dataset", "y"),
    }
    assert len(keys) == 4 and {len(key) for key in keys} == {20}
