"""A worker fetches a leased slice from providers that are honest, dead, short, lying, silent or not who they say."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import NetworkError, UsageError
from millrace.network.client import Client
from millrace.network.https import Request, Response, Server, error_response, file_response
from millrace.network.identity import Identity
from millrace.store.cache import SliceCache
from millrace.store.room import part_bytes
from millrace.worker import fetching
from millrace.worker.answers import Answer
from millrace.worker.fetching import Fetcher
from millrace.worker.hand import Hand, Held
from millrace.worker.shelf import Shelf

Make = Callable[[str], Identity]
CONTENT = random.Random(7).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Node:
    """A provider whose faults are set from outside; records the ranges it was asked for."""

    def __init__(self, identity: Identity, file: Path) -> None:
        self.file = file
        self.refuse: Response | None = None
        self.stall_s = 0.0
        self.ranges: list[str] = []
        self.server = Server(identity, "127.0.0.1", 0, self.answer)
        self.server.start()
        self.peer_id = identity.peer_id
        self.is_origin = True

    def answer(self, request: Request) -> Response:
        assert request.path == f"/v1/slices/{SHA256}"
        self.ranges.append(request.headers["range"])
        time.sleep(self.stall_s)
        return self.refuse or file_response(request, self.file, len(CONTENT))

    def provider(self) -> dict[str, Any]:
        return {"peer_id": self.peer_id, "address": self.server.address, "is_origin": self.is_origin}


@pytest.fixture
def make_node(make_identity: Make, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(name: str, content: bytes = CONTENT, origin: bool = True) -> Node:
        file = tmp_path / f"{name}.bin"
        file.write_bytes(content)
        made.append(Node(make_identity(name), file))
        made[-1].is_origin = origin
        return made[-1]

    yield make
    for node in made:
        node.server.close()


class Worker:
    """A hand and what fetches for it."""

    def __init__(self, client: Client, directory: Path, cache_bytes: int = 1_000_000) -> None:
        self.cache = SliceCache(directory, cache_bytes)
        self.hand = Hand(4, None, cache_bytes, 0.1, lambda grant: self.cache.unpin(grant.sha256))
        self.shelf = Shelf(self.cache)
        self.fetcher = Fetcher(client, self.cache, self.shelf, self.hand, 0.2, threads=2)
        self.fetcher.start()

    def lease(self, *nodes: Node, lease_id: str = "1") -> Held:
        lease = {
            "lease_id": lease_id, "job": "j", "job_id": "j", "epoch": 0, "slice": 3, "index": 3, "dataset_id": SHA256,
            "name": "slices/3", "sha256": SHA256, "bytes": len(CONTENT), "count": 9, "start": 0, "stop": 9,
            "sample_base": 0, "seed": 0, "seq_len": 1, "layout": "tokens", "dtype": "U16", "vocab_size": 1,
            "providers": [node.provider() for node in nodes], "expires_in_s": 30.0,
        }  # fmt: skip
        said = self.hand.state()
        live = {held: {"stop": 9, "expires_in_s": 30.0} for held in said.held}
        self.hand.hear(said, answer(leases=[lease], live=live))
        return next(held for held in self.hand.held if held.grant.lease_id == lease_id)

    def fetched(self, held: Held) -> bytes:
        deadline = time.monotonic() + 10
        while held.path is None and time.monotonic() < deadline:
            assert not held.over and self.fetcher.failure is None, (held.reason, self.fetcher.failure)
            time.sleep(0.005)
        assert held.path is not None
        return held.path.read_bytes()

    def lost(self, held: Held) -> str:
        """Waits until it is given back, or failed: then why."""
        deadline = time.monotonic() + 10
        while not held.over and time.monotonic() < deadline:
            time.sleep(0.005)
        assert held.over and held.path is None
        return held.reason

    @property
    def bad(self) -> list[tuple[str, bool]]:
        return [(bad.peer_id, bad.wrong) for bad in self.hand.tally.bad]

    def close(self) -> None:
        self.hand.close()
        self.fetcher.close()
        self.hand.empty()


def answer(**more: Any) -> Answer:
    empty = {
        "uses": [], "refused": [], "live": {}, "lost": [], "leases": [], "wait_s": 0.1, "done": False, "paused": False,
        "tell_have": False,
    }  # fmt: skip
    return Answer.from_json({**empty, **more})


@pytest.fixture
def worker(make_identity: Make, tmp_path: Path) -> Iterator[Worker]:
    with Client(make_identity("client")) as client:
        made = Worker(client, tmp_path / "cache")
        yield made
        made.close()


Nodes = Callable[..., Node]


def test_once_from_the_network_then_from_the_cache(worker: Worker, make_node: Nodes) -> None:
    node = make_node("a")
    held = worker.lease(node)
    assert worker.fetched(held) == CONTENT
    assert worker.fetched(worker.lease(node, lease_id="2")) == CONTENT
    assert node.ranges == [f"bytes=0-{len(CONTENT) - 1}"]
    assert (worker.fetcher.slices, worker.fetcher.bytes) == (1, len(CONTENT))
    assert worker.shelf.news() == {SHA256: "3"} and Shelf(worker.cache).news() == {SHA256: "3"}


def test_other_workers_are_asked_first_and_origins_last(worker: Worker, make_node: Nodes) -> None:
    origin, peer = make_node("origin"), make_node("peer", origin=False)
    assert worker.fetched(worker.lease(origin, peer)) == CONTENT
    assert (origin.ranges, len(peer.ranges)) == ([], 1)
    assert worker.fetcher.bytes_from_workers == len(CONTENT)


def test_a_liar_is_named_and_never_asked_again(worker: Worker, make_node: Nodes) -> None:
    wrong = bytearray(CONTENT)
    wrong[123_456] ^= 1
    liar, honest = make_node("liar", bytes(wrong), origin=False), make_node("honest")
    assert worker.fetched(worker.lease(liar, honest)) == CONTENT
    assert worker.bad == [(liar.peer_id, True)]
    worker.cache.discard(SHA256)
    assert worker.fetched(worker.lease(liar, honest, lease_id="2")) == CONTENT
    assert len(liar.ranges) == 1


def test_a_slice_of_which_nobody_gives_the_right_bytes_has_failed(worker: Worker, make_node: Nodes) -> None:
    liars = [make_node("a", b"x" * len(CONTENT), origin=False), make_node("b", b"y" * len(CONTENT))]
    assert "expected" in worker.lost(worker.lease(*liars))
    assert {who for who, _ in worker.bad} == {liar.peer_id for liar in liars}
    assert worker.cache.get(SHA256) is None


def test_one_that_lies_and_one_that_is_away_do_not_make_it_fail(worker: Worker, make_node: Nodes) -> None:
    liar, away = make_node("a", b"x" * len(CONTENT), origin=False), make_node("b")
    away.server.close()
    assert worker.lost(worker.lease(liar, away)) == ""


def test_a_body_that_breaks_off_is_resumed_elsewhere(worker: Worker, make_node: Nodes) -> None:
    short, whole = make_node("short", CONTENT[:100_000], origin=False), make_node("whole")
    assert worker.fetched(worker.lease(short, whole)) == CONTENT
    assert worker.bad == []


def test_gone_refusing_and_busy_providers_are_passed_over(worker: Worker, make_node: Nodes) -> None:
    gone, absent, busy = (make_node(name, origin=False) for name in ("gone", "absent", "busy"))
    gone.server.close()
    absent.refuse = error_response(404, "unknown_slice", "not here")
    busy.refuse = error_response(503, "busy", "later")
    assert worker.fetched(worker.lease(gone, absent, busy, make_node("origin"))) == CONTENT
    assert len(absent.ranges) == 1 and worker.bad == []


def test_another_peer_at_the_address_is_asked_nothing_and_told_of(worker: Worker, make_node: Nodes) -> None:
    impostor, honest = make_node("impostor", origin=False), make_node("honest")
    impostor.peer_id = "a" * 32
    assert worker.fetched(worker.lease(impostor, honest)) == CONTENT
    assert impostor.ranges == [] and worker.bad == [("a" * 32, False)]


def test_a_whole_file_instead_of_a_range_is_told_of(worker: Worker, make_node: Nodes) -> None:
    rude, honest = make_node("rude", origin=False), make_node("honest")
    rude.refuse = Response(200, CONTENT + b"and more")
    assert worker.fetched(worker.lease(rude, honest)) == CONTENT
    assert worker.bad == [(rude.peer_id, True)]


def test_who_gives_no_bytes_is_left(worker: Worker, make_node: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_PACE_S", 0.3)
    silent, honest = make_node("silent", origin=False), make_node("honest")
    silent.stall_s = 1.5
    began = time.monotonic()
    assert worker.fetched(worker.lease(silent, honest)) == CONTENT
    assert time.monotonic() - began < 1.5 and worker.bad == [(silent.peer_id, False)]


def test_a_lease_that_is_lost_is_not_fetched_to_the_end(worker: Worker, make_node: Nodes) -> None:
    slow = make_node("slow")
    slow.stall_s = 0.5
    held = worker.lease(slow)
    time.sleep(0.1)
    said = worker.hand.state()
    worker.hand.hear(said, answer(lost=[held.grant.lease_id]))
    assert held.over and worker.hand.held == []
    time.sleep(0.6)
    assert held.path is None and worker.cache.drop([SHA256]) in ([], [SHA256])


def test_no_provider_for_long_is_the_end(worker: Worker) -> None:
    for turn in range(8):
        held = worker.lease(lease_id=str(turn))
        assert worker.lost(held) == ""
        said = worker.hand.state()
        worker.hand.hear(said, answer(lost=list(said.held)))
        if worker.fetcher.failure is not None:
            break
    assert isinstance(worker.fetcher.failure, NetworkError) and worker.hand.is_closed


def test_a_slice_larger_than_the_cache_is_the_end(make_identity: Make, make_node: Nodes, tmp_path: Path) -> None:
    with Client(make_identity("client")) as client:
        worker = Worker(client, tmp_path / "small", 1000)
        worker.lease(make_node("a"))
        deadline = time.monotonic() + 5
        while worker.fetcher.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        worker.close()
    assert isinstance(worker.fetcher.failure, UsageError)


def test_a_slice_waits_for_room_until_others_are_used(worker: Worker, make_node: Nodes) -> None:
    """The cache is full of pinned slices: nothing fails, and what is let go makes room."""
    other = hashlib.sha256(b"other").hexdigest()
    with worker.cache.fetching(other, part_bytes(800_000)) as part:
        part.write_bytes(bytes(800_000))
        worker.cache.commit(other)
    worker.cache.pin(other)
    held = worker.lease(make_node("a"))
    time.sleep(0.2)
    assert held.path is None and not held.over
    threading.Timer(0.05, worker.cache.unpin, [other]).start()
    assert worker.fetched(held) == CONTENT
