"""A worker fetches a leased slice from providers that are honest, dead, short, lying, silent or impostors."""

import errno
import hashlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from starlette.responses import Response

from forebay.dataset.manifest import SliceInfo, SliceTable
from forebay.dataset.reader import open_dataset
from forebay.errors import UsageError
from forebay.lease import fetching
from forebay.lease.fetching import CacheIndex, LeaseFetches
from forebay.lease.state import ActiveLease
from forebay.network.app import ApiError, file_response
from forebay.network.client import Client
from forebay.network.pki.identity import Identity
from support.cached import put_chunks
from support.feeding import make_dataset
from support.handlers import Request, serve
from support.leases_by_hand import DATASET, FetchingWorker, answer, table_of
from support.origin_server import OriginServer
from support.waiting import until

CONTENT = random.Random(7).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
TABLE = table_of(SHA256, len(CONTENT))


class Node:
    """A provider whose faults are set from outside; records the ranges that were requested."""

    def __init__(self, identity: Identity, file: Path, is_origin: bool):
        self.file = file
        self.response = None
        self.gate = threading.Event()
        self.gate.set()
        self.ranges = []
        self.server = serve(identity, self.answer)
        self.server.start()
        self.peer_id = identity.peer_id
        self.is_origin = is_origin

    def answer(self, request: Request) -> Response:
        assert request.path == f"/v1/slices/{SHA256}"
        self.ranges.append(request.headers["range"])
        self.gate.wait()
        return self.response or file_response(request.http, self.file, len(CONTENT))

    def provider(self) -> dict:
        return {"peer_id": self.peer_id, "address": self.server.address, "is_origin": self.is_origin}


Nodes = Callable[..., Node]


@pytest.fixture
def make_node(make_identity, tmp_path) -> Iterator[Nodes]:
    created = []

    def make(name, content=CONTENT, origin=True):
        file = tmp_path / f"{name}.bin"
        file.write_bytes(content)
        created.append(Node(make_identity(name), file, origin))
        return created[-1]

    yield make
    for node in created:
        node.gate.set()
        node.server.close()


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Iterator[list[float]]:
    """The moment that limits of time in the fetcher see: it stands still unless a test moves it."""
    now = [1000.0]
    monkeypatch.setattr(fetching, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(fetching, "_STALL_S", 3600.0)
    yield now


@pytest.fixture
def worker(make_identity, tmp_path) -> Iterator[FetchingWorker]:
    with Client(make_identity("client")) as client:
        created = FetchingWorker(client, tmp_path / "cache", table=TABLE)
        yield created
        created.close()


def lease(worker: FetchingWorker, *nodes: Node, lease_id: str = "1") -> ActiveLease:
    return worker.lease([node.provider() for node in nodes], lease_id)


def lose_all(worker: FetchingWorker):
    """Let the scheduler answer that no lease is the worker's any more."""
    request = worker.leases.request(time.monotonic())
    worker.leases.receive(request, answer(lost=list(request.known_leases or ())), time.monotonic())


def test_once_from_the_network_then_from_the_cache(worker, make_node):
    origin, peer = make_node("origin"), make_node("peer", origin=False)
    assert worker.fetched(lease(worker, origin, peer)) == CONTENT
    assert worker.fetched(lease(worker, origin, peer, lease_id="2")) == CONTENT
    assert origin.ranges == [] and peer.ranges == [f"bytes=0-{len(CONTENT) - 1}"]
    assert worker.feed.stats()["fetched_bytes"] == len(CONTENT) and worker.feed.bytes_of_last() == 0


def test_changes_of_the_cache_are_reported_once(worker, make_node):
    hashes = [SHA256 if i == 3 else f"{i:064x}" for i in range(5)]
    rows = [SliceInfo(i, f"{i}.safetensors", len(CONTENT), sha256, 9, 1) for i, sha256 in enumerate(hashes)]
    dataset = SimpleNamespace(table=SliceTable.from_rows(rows), name="j", id=DATASET)
    index = CacheIndex(worker.cache, dataset)
    assert index.sizes[SHA256] == (len(CONTENT), "j", 65536) and index.changes() == {}
    worker.fetched(lease(worker, make_node("a")))
    assert index.changes() == {DATASET: "3"}
    index.mark_reported({DATASET: "3"})
    assert index.changes() == {} and index.changes(everything=True) == {DATASET: "3"}
    assert CacheIndex(worker.cache, dataset).changes() == {DATASET: "3"}, "of an earlier run"
    worker.cache.discard(SHA256)
    assert index.changes() == {DATASET: ""}


def spoil(node: Node, fault: str):
    match fault:
        case "wrong byte":
            node.file.write_bytes(CONTENT[:123_456] + b"x" + CONTENT[123_457:])
        case "whole file":
            node.response = Response(CONTENT + b"and more")
        case "impostor":
            node.peer_id = "a" * 32
        case "breaks off":
            node.file.write_bytes(CONTENT[:100_000])
        case "gone":
            node.server.close()
        case "absent":
            node.response = ApiError(404, "unknown_slice", "not here").response()
        case "busy":
            node.response = ApiError(503, "busy", "later").response()


@pytest.mark.parametrize(
    "fault, is_wrong",
    [("wrong byte", True), ("whole file", True), ("impostor", False), ("breaks off", None), ("gone", None),
     ("absent", None), ("busy", None)],
)  # fmt: skip
def test_a_faulty_provider_is_passed_over_and_reported(worker, make_node, fault, is_wrong):
    """A provider that sent wrong bytes or has another certificate is never requested from again."""
    faulty, honest = make_node("faulty", origin=False), make_node("honest")
    spoil(faulty, fault)
    assert worker.fetched(lease(worker, faulty, honest)) == CONTENT
    assert worker.rejected == ([] if is_wrong is None else [(faulty.peer_id, is_wrong)])
    num_requests = len(faulty.ranges)
    assert num_requests == (fault not in ("impostor", "gone"))
    worker.cache.discard(SHA256)
    assert worker.fetched(lease(worker, faulty, honest, lease_id="2")) == CONTENT
    assert is_wrong is None or len(faulty.ranges) == num_requests


def test_a_slice_fails_only_if_all_that_sent_it_sent_wrong_bytes(worker, make_node):
    liars = [make_node("a", b"x" * len(CONTENT), origin=False), make_node("b", b"y" * len(CONTENT))]
    assert "sent wrong bytes" in worker.lost(lease(worker, *liars))
    assert {peer_id for peer_id, _ in worker.rejected} == {liar.peer_id for liar in liars}
    assert worker.cache.get(SHA256) is None
    other, away = make_node("c", b"x" * len(CONTENT), origin=False), make_node("d")
    away.server.close()
    assert worker.lost(lease(worker, other, away, lease_id="2")) == ""


def test_a_wrong_byte_of_a_web_server_costs_a_chunk(make_identity, tmp_path):
    """Where `chunks.sha256` is beside the slices, the rest of the slice is not fetched again from another server."""
    dataset = open_dataset(make_dataset(tmp_path / "data", 2, 32, 2048))
    row = dataset.table.row(1)
    assert row.bytes > 6 * row.chunk_bytes
    with (
        Client(make_identity("client")) as client, OriginServer(dataset.path) as liar,
        OriginServer(dataset.path) as honest,
    ):  # fmt: skip
        liar.faults.corrupt[row.name] = 2 * row.chunk_bytes + 5
        worker = FetchingWorker(client, tmp_path / "cache", dataset=dataset)
        try:
            providers = [{"address": liar.url}, {"address": honest.url}]
            current = worker.lease(providers, index=1)
            assert worker.fetched(current) == (dataset.path / row.name).read_bytes()
            assert honest.bytes_sent[row.name] == row.bytes - 2 * row.chunk_bytes
            assert worker.rejected[0] == (liar.url, True)
        finally:
            worker.close()


def test_a_provider_that_sends_nothing_is_left_for_another(worker, make_node):
    silent, honest = make_node("silent", origin=False), make_node("honest")
    silent.gate.clear()
    assert worker.fetched(lease(worker, silent, honest)) == CONTENT and silent.ranges and worker.rejected == []


def test_a_lost_lease_is_no_longer_fetched(worker, make_node):
    slow = make_node("slow")
    slow.gate.clear()
    current = lease(worker, slow)
    until(lambda: slow.ranges)
    lose_all(worker)
    assert current.ended and worker.leases.leases == []
    worker.fetcher.update()
    assert worker.feed.planned_bytes == 0
    slow.gate.set()
    worker.close()
    assert current.path is None


def test_a_slice_larger_than_the_cache_is_the_end(make_identity, make_node, tmp_path):
    with Client(make_identity("client")) as client:
        worker = FetchingWorker(client, tmp_path / "small", 200_000, table=table_of(SHA256, len(CONTENT), 1 << 16))
        lease(worker, make_node("a"))
        worker.close()
    assert isinstance(worker.fetcher.failure, UsageError)


def test_a_full_disk_ends_the_work_only_once_it_lasts(worker, make_node, monkeypatch, clock):
    node, real, is_full = make_node("a"), os.pwrite, [True]

    def write(*args):
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", write)
    worker.lost(lease(worker, node))
    is_full.clear()
    clock[0] += 4.0
    second = lease(worker, node, lease_id="2")
    assert worker.fetched(second) == CONTENT
    second.is_dropped = True
    is_full.append(True)
    worker.cache.discard(SHA256)
    numbers = itertools.count(3)
    while worker.fetcher.failure is None:
        clock[0] += 4.0  # Longer than the fetcher waits after a failure.
        current = lease(worker, node, lease_id=str(next(numbers)))
        worker.until(lambda: current.ended or worker.fetcher.failure is not None)  # noqa: B023
    assert isinstance(worker.fetcher.failure, UsageError) and "No space left" in str(worker.fetcher.failure)


def test_a_slice_waits_for_space_until_others_are_used(worker, make_node):
    """The cache is full of pinned slices: nothing fails, and what is unpinned makes space."""
    size = 800_000
    entry, pinned = put_chunks(worker.cache, bytes(size), size, [0]), np.arange(1)
    current = lease(worker, make_node("a"))
    for _ in range(3):
        worker.fetcher.update()
    assert current.path is None and not current.ended and worker.feed.stats()["in_flight"] == 0
    assert "last fault: no room for" in worker.leases.describe_wait()
    worker.cache.unpin([(entry, pinned)])
    assert worker.fetched(current) == CONTENT


@pytest.mark.parametrize("cause, is_node, is_end", [("unserved", False, True), ("leased", False, False),
    ("paused", False, False), ("leased", True, False), ("avoided", True, True)])  # fmt: skip
def test_without_a_slice_for_its_patience_a_worker_ends_unless_others_have_them(
    worker, make_node, clock, cause, is_node, is_end
):
    """With a node that is gone, each lease ends with a fault, and another one follows."""
    node = make_node("gone")
    node.server.close()
    for number in range(4):
        if worker.fetcher.failure is not None:
            break
        if is_node and (is_end or not number):
            worker.lost(lease(worker, node, lease_id=f"{number}"))
        request = worker.leases.request(time.monotonic())
        reply = answer(lost=list(request.known_leases or ()), cause=cause, reason=f"since {cause}")
        worker.leases.receive(request, reply, time.monotonic())
        clock[0] += 4.0
        worker.fetcher.update()
        message = worker.leases.describe_wait()
        assert message.startswith(f"a lease: since {cause}") and ("cannot reach" in message) == is_node
    assert (worker.fetcher.failure is not None) == is_end
    assert not is_end or ("cannot reach" if is_node else "since unserved") in str(worker.fetcher.failure)


def test_slices_that_fail_together_are_all_asked_for_again(worker, make_node, monkeypatch):
    """The error of one is told; the other, whose error went with it, does not wait for ever."""
    node = make_node("origin")
    node.server.close()
    with monkeypatch.context() as patch:
        patch.setattr(LeaseFetches, "_check", lambda fetches, lease: None)  # Both fail before either is told.
        leases = [worker.lease([node.provider()], str(index), index) for index in (2, 3)]
        until(lambda: len(worker.feed._errors) == 2)
    worker.until(lambda: all(lease.ended for lease in leases))
