"""Fetching a slice from providers that are honest, dead, short, lying or slow to answer."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.errors import IntegrityError, NetworkError, UsageError
from millrace.network.client import Client
from millrace.network.https import Request, Response, Server, error_response, file_response
from millrace.network.identity import Identity
from millrace.store import fetch as fetch_module
from millrace.store.cache import SliceCache
from millrace.store.fetch import Provider, fetch_slice

Make = Callable[[str], Identity]
CONTENT = random.Random(7).randbytes(2_500_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Node:
    """A provider whose faults are set from outside; records the ranges it was asked for."""

    def __init__(self, identity: Identity, file: Path) -> None:
        self.file = file
        self.refuse: Response | None = None
        self.short_from: int | None = None
        self.ranges: list[str] = []
        self.server = Server(identity, "127.0.0.1", 0, self.answer)
        self.server.start()
        self.provider = Provider(identity.peer_id, self.server.address)

    def answer(self, request: Request) -> Response:
        assert request.path == f"/v1/slices/{SHA256}"
        self.ranges.append(request.headers["Range"])
        return self.refuse or file_response(request, self.file, len(CONTENT))


@pytest.fixture
def make_node(make_identity: Make, tmp_path: Path) -> Iterator[Callable[[str, bytes], Node]]:
    made: list[Node] = []

    def make(name: str, content: bytes = CONTENT) -> Node:
        file = tmp_path / f"{name}.bin"
        file.write_bytes(content)
        made.append(Node(make_identity(name), file))
        return made[-1]

    yield make
    for node in made:
        node.server.close()


class Fetcher:
    """fetch_slice with the nodes asked in the order given, no waiting, and a list of who was blamed."""

    def __init__(self, client: Client, cache: SliceCache) -> None:
        self.client, self.cache = client, cache
        self.bad: list[tuple[str, str]] = []
        self.slept: list[float] = []

    def __call__(self, *nodes: Node, rounds: int = 3) -> Path:
        return fetch_slice(
            self.client,
            self.cache,
            SHA256,
            len(CONTENT),
            [node.provider for node in nodes],
            lambda provider, why: self.bad.append((provider.peer_id, why)),
            rounds=rounds,
            sleep=self.slept.append,
            chance=InOrder(1),
        )


class InOrder(random.Random):
    def shuffle(self, x: object) -> None:
        """Leave it as it is."""


@pytest.fixture
def fetch(make_identity: Make, tmp_path: Path) -> Iterator[Fetcher]:
    with Client(make_identity("client")) as client:
        yield Fetcher(client, SliceCache(tmp_path / "cache", 6_000_000))


Nodes = Callable[..., Node]


def test_once_from_the_network_then_from_the_cache(fetch: Fetcher, make_node: Nodes) -> None:
    node = make_node("a")
    path = fetch(node)
    assert path.read_bytes() == CONTENT and path.name == SHA256
    assert fetch(node) == path and fetch() == path
    assert node.ranges == [f"bytes=0-{len(CONTENT) - 1}"]
    assert not list(path.parent.glob("*.part"))


def test_a_liar_is_named_and_not_asked_again(fetch: Fetcher, make_node: Nodes) -> None:
    wrong = bytearray(CONTENT)
    wrong[1_234_567] ^= 1
    liar, honest = make_node("liar", bytes(wrong)), make_node("honest")
    assert fetch(liar, honest).read_bytes() == CONTENT
    assert [who for who, _ in fetch.bad] == [liar.provider.peer_id]
    assert "do not have the hash" in fetch.bad[0][1]
    assert len(liar.ranges) == 1


def test_nothing_but_liars(fetch: Fetcher, make_node: Nodes) -> None:
    liars = [make_node("a", b"x" * len(CONTENT)), make_node("b", b"y" * len(CONTENT))]
    with pytest.raises(IntegrityError, match="got none that verify") as caught:
        fetch(*liars)
    for liar in liars:
        assert liar.provider.peer_id in str(caught.value)
    assert fetch.cache.get(SHA256) is None
    assert len(fetch.bad) == 2


def test_short_body_is_resumed_elsewhere_by_range(fetch: Fetcher, make_node: Nodes) -> None:
    short, whole = make_node("short", CONTENT[:1_000_000]), make_node("whole")
    assert fetch(short, whole).read_bytes() == CONTENT
    assert whole.ranges == [f"bytes=1000000-{len(CONTENT) - 1}"]
    assert fetch.bad == []


def test_half_a_lie_is_not_blamed_on_the_honest(fetch: Fetcher, make_node: Nodes) -> None:
    liar, honest = make_node("liar", b"z" * 1_000_000), make_node("honest")
    assert fetch(liar, honest).read_bytes() == CONTENT
    assert honest.ranges == [f"bytes=1000000-{len(CONTENT) - 1}", f"bytes=0-{len(CONTENT) - 1}"]
    assert fetch.bad == []


def test_a_spoilt_partial_file_costs_one_more_try(fetch: Fetcher, make_node: Nodes) -> None:
    node = make_node("a")
    for spoilt in (b"spoilt", b"x" * len(CONTENT), b"x" * (len(CONTENT) + 1)):
        fetch.cache.path_of(SHA256).with_name(f"{SHA256}.part").write_bytes(spoilt)
        path = fetch(node)
        assert path.read_bytes() == CONTENT
        path.unlink()
    assert fetch.bad == []


def test_gone_refusing_and_busy_providers(fetch: Fetcher, make_node: Nodes) -> None:
    gone, absent, busy = make_node("gone"), make_node("absent"), make_node("busy")
    gone.server.close()
    absent.refuse = error_response(404, "unknown_slice", "not here")
    busy.refuse = error_response(503, "busy", "later")
    with pytest.raises(NetworkError, match=r"cannot reach.*unknown_slice.*busy") as caught:
        fetch(gone, absent, busy)
    assert not isinstance(caught.value, IntegrityError)
    assert len(absent.ranges) == 1 and len(busy.ranges) == 3
    assert len(fetch.slept) == 2 and fetch.slept[1] > fetch.slept[0] > 0
    assert fetch.bad == []
    with pytest.raises(NetworkError, match="none is known"):
        fetch()


def test_another_peer_at_the_address_is_asked_nothing(fetch: Fetcher, make_node: Nodes) -> None:
    node = make_node("a")
    node.provider = Provider("a" * 32, node.provider.address)
    with pytest.raises(NetworkError, match="Nothing was asked"):
        fetch(node)
    assert node.ranges == [] and fetch.bad == []


def test_a_whole_file_instead_of_a_range_is_a_violation(fetch: Fetcher, make_node: Nodes) -> None:
    rude, honest = make_node("rude"), make_node("honest")
    rude.refuse = Response(200, CONTENT + b"and more")
    assert fetch(rude, honest).read_bytes() == CONTENT
    assert [who for who, _ in fetch.bad] == [rude.provider.peer_id]


@pytest.mark.parametrize(
    ("number", "word"),
    [(errno.ENOSPC, "is full: 2500000 bytes did not fit"), (errno.EACCES, "cannot write in")],
)
def test_a_full_disk_is_said(
    fetch: Fetcher, make_node: Nodes, monkeypatch: pytest.MonkeyPatch, number: int, word: str
) -> None:
    class FullDisk:
        def __init__(self, path: Path) -> None:
            self.file = path.open("ab", buffering=0)

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *exc: object) -> None:
            self.file.close()

        def read(self, size: int) -> bytes:
            return b""

        def write(self, data: bytes) -> int:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fetch_module._Attempt, "_open", lambda self: FullDisk(self.part))
    with pytest.raises(UsageError, match=word) as caught:
        fetch(make_node("a"))
    assert str(fetch.cache.directory) in str(caught.value)
    monkeypatch.undo()
    assert fetch(make_node("b")).read_bytes() == CONTENT


def test_killed_amid_a_fetch_and_resumed(fetch: Fetcher, make_node: Nodes, make_identity: Make) -> None:
    first = make_node("a", CONTENT[:1_500_000])  # breaks off there; the process waits for its next round
    victim = make_identity("victim")
    code = (
        "import sys; from millrace.network.client import Client; from millrace.network.identity import Identity\n"
        "from millrace.store.cache import SliceCache; from millrace.store.fetch import *\n"
        "print('begun', flush=True)\n"
        f"fetch_slice(Client(Identity.load({str(victim.node_dir)!r})),\n"
        f"    SliceCache({str(fetch.cache.directory)!r}, 6_000_000), {SHA256!r}, {len(CONTENT)},\n"
        f"    [Provider({first.provider.peer_id!r}, {first.provider.address!r})], print,\n"
        "    sleep=lambda _: (print('half', flush=True), sys.stdin.read()))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["begun\n", "half\n"]
        process.send_signal(signal.SIGKILL)
        assert process.wait(20) == -9
    second = make_node("b")
    assert fetch(second).read_bytes() == CONTENT
    assert second.ranges == [f"bytes=1500000-{len(CONTENT) - 1}"]
    assert fetch.cache.used_bytes() == len(CONTENT)


def test_default_waiting_is_short_and_grows(fetch: Fetcher) -> None:
    begun = time.monotonic()
    with pytest.raises(NetworkError):
        fetch()
    assert time.monotonic() - begun < 5 and fetch.slept == []
