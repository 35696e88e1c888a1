"""A worker fetches a leased slice from providers that are honest, dead, short, lying, silent or not who they say."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import Response

from forebay.dataset.manifest import SliceInfo, SliceTable
from forebay.dataset.reader import open_dataset
from forebay.errors import NetworkError, UsageError
from forebay.lease import fetching
from forebay.lease.fetching import CacheIndex
from forebay.lease.state import ActiveLease
from forebay.network.app import ApiError, file_response
from forebay.network.client import Client
from forebay.network.pki.identity import Identity
from support.cached import put
from support.calibration import scaled
from support.feeding import make_dataset
from support.handlers import Request, serve
from support.leases_by_hand import DATASET, FetchingWorker, answer
from support.origin_server import OriginServer
from support.wire import until

Make = Callable[[str], Identity]
CONTENT = random.Random(7).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Node:
    """A provider whose faults are set from outside; records the ranges it was asked for."""

    def __init__(self, identity: Identity, file: Path) -> None:
        self.file = file
        self.refuse: Response | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.ranges: list[str] = []
        self.server = serve(identity, self.answer)
        self.server.start()
        self.peer_id = identity.peer_id
        self.is_origin = True

    def answer(self, request: Request) -> Response:
        assert request.path == f"/v1/slices/{SHA256}"
        self.ranges.append(request.headers["range"])
        assert self.gate.wait(20)
        return self.refuse or file_response(request.http, self.file, len(CONTENT))

    def provider(self) -> dict[str, Any]:
        return {"peer_id": self.peer_id, "address": self.server.address, "is_origin": self.is_origin}


@pytest.fixture
def make_node(make_identity: Make, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    created: list[Node] = []

    def make(name: str, content: bytes = CONTENT, origin: bool = True) -> Node:
        file = tmp_path / f"{name}.bin"
        file.write_bytes(content)
        created.append(Node(make_identity(name), file))
        created[-1].is_origin = origin
        return created[-1]

    yield make
    for node in created:
        node.server.close()


@pytest.fixture
def worker(make_identity: Make, tmp_path: Path) -> Iterator[FetchingWorker]:
    with Client(make_identity("client")) as client:
        created = FetchingWorker(client, tmp_path / "cache")
        yield created
        created.close()


Nodes = Callable[..., Node]


def lease(worker: FetchingWorker, *nodes: Node, lease_id: str = "1") -> ActiveLease:
    return worker.lease(SHA256, len(CONTENT), [node.provider() for node in nodes], lease_id)


def wait_for_end(worker: FetchingWorker, current: ActiveLease) -> None:
    """Waits until a lease is given back, or is fetched by nobody: the lease before it was the end of the work."""
    until(lambda: current.ended or worker.fetcher.failure is not None)


def test_once_from_the_network_then_from_the_cache(worker: FetchingWorker, make_node: Nodes) -> None:
    node = make_node("a")
    current = lease(worker, node)
    assert worker.fetched(current) == CONTENT
    assert worker.fetched(lease(worker, node, lease_id="2")) == CONTENT
    assert node.ranges == [f"bytes=0-{len(CONTENT) - 1}"]
    assert (worker.fetcher.slices, worker.fetcher.bytes) == (1, len(CONTENT))


def test_what_is_cached_of_a_dataset_is_reported_when_it_changes(worker: FetchingWorker, make_node: Nodes) -> None:
    hashes = [SHA256 if i == 3 else f"{i:064x}" for i in range(5)]
    table = SliceTable.from_rows(
        [SliceInfo(i, f"{i}.safetensors", len(CONTENT), sha256, 9, 1) for i, sha256 in enumerate(hashes)]
    )
    dataset: Any = SimpleNamespace(table=table, name="j", id=DATASET)
    index = CacheIndex(worker.cache, dataset)
    assert index.sizes[SHA256] == (len(CONTENT), "j") and index.changes() == {}
    worker.fetched(lease(worker, make_node("a")))
    assert index.changes() == {DATASET: "3"}
    index.mark_reported({DATASET: "3"})
    assert index.changes() == {} and index.changes(everything=True) == {DATASET: "3"}
    assert CacheIndex(worker.cache, dataset).changes() == {DATASET: "3"}, "of an earlier run"
    worker.cache.discard(SHA256)
    assert index.changes() == {DATASET: ""}


def test_other_workers_are_asked_first_and_origins_last(worker: FetchingWorker, make_node: Nodes) -> None:
    origin, peer = make_node("origin"), make_node("peer", origin=False)
    assert worker.fetched(lease(worker, origin, peer)) == CONTENT
    assert (origin.ranges, len(peer.ranges)) == ([], 1)
    assert worker.fetcher.bytes_from_workers == len(CONTENT)


def test_a_liar_is_named_and_never_asked_again(worker: FetchingWorker, make_node: Nodes) -> None:
    wrong = bytearray(CONTENT)
    wrong[123_456] ^= 1
    liar, honest = make_node("liar", bytes(wrong), origin=False), make_node("honest")
    assert worker.fetched(lease(worker, liar, honest)) == CONTENT
    assert worker.bad == [(liar.peer_id, True)]
    worker.cache.discard(SHA256)
    assert worker.fetched(lease(worker, liar, honest, lease_id="2")) == CONTENT
    assert len(liar.ranges) == 1


def test_a_slice_of_which_nobody_gives_the_right_bytes_has_failed(worker: FetchingWorker, make_node: Nodes) -> None:
    liars = [make_node("a", b"x" * len(CONTENT), origin=False), make_node("b", b"y" * len(CONTENT))]
    assert "expected" in worker.lost(lease(worker, *liars))
    assert {who for who, _ in worker.bad} == {liar.peer_id for liar in liars}
    assert worker.cache.get(SHA256) is None


def test_one_that_lies_and_one_that_is_away_do_not_make_it_fail(worker: FetchingWorker, make_node: Nodes) -> None:
    liar, away = make_node("a", b"x" * len(CONTENT), origin=False), make_node("b")
    away.server.close()
    assert worker.lost(lease(worker, liar, away)) == ""


def test_a_body_that_breaks_off_is_resumed_elsewhere(worker: FetchingWorker, make_node: Nodes) -> None:
    short, full = make_node("short", CONTENT[:100_000], origin=False), make_node("whole")
    assert worker.fetched(lease(worker, short, full)) == CONTENT
    assert worker.bad == []


def test_a_web_server_gives_it_by_its_name(worker: FetchingWorker, tmp_path: Path) -> None:
    (tmp_path / "web" / "slices").mkdir(parents=True)
    (tmp_path / "web" / "slices" / "3").write_bytes(CONTENT)
    with OriginServer(tmp_path / "web") as server:
        current = worker.lease(SHA256, len(CONTENT), [{"address": server.url}])
        assert worker.fetched(current) == CONTENT and not worker.bad


def test_a_wrong_byte_of_a_web_server_costs_a_chunk(make_identity: Make, tmp_path: Path) -> None:
    """Where `chunks.sha256` lies beside the slices; the rest of the slice is not fetched again from another server."""
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
            where = [{"address": liar.url}, {"address": honest.url}]
            current = worker.lease(row.sha256, row.bytes, where, chunk_bytes=row.chunk_bytes, index=1, name=row.name)
            assert worker.fetched(current) == (dataset.path / row.name).read_bytes()
            assert honest.bytes_sent[row.name] == row.bytes - 2 * row.chunk_bytes
            assert worker.leases.state.counts.rejected[0].peer_id == liar.url and worker.bad[0][1]
        finally:
            worker.close()


def test_gone_refusing_and_busy_providers_are_passed_over(worker: FetchingWorker, make_node: Nodes) -> None:
    gone, absent, busy = (make_node(name, origin=False) for name in ("gone", "absent", "busy"))
    gone.server.close()
    absent.refuse = ApiError(404, "unknown_slice", "not here").response()
    busy.refuse = ApiError(503, "busy", "later").response()
    assert worker.fetched(lease(worker, gone, absent, busy, make_node("origin"))) == CONTENT
    assert len(absent.ranges) == 1 and worker.bad == []


def test_another_peer_at_the_address_is_asked_nothing_and_told_of(worker: FetchingWorker, make_node: Nodes) -> None:
    impostor, honest = make_node("impostor", origin=False), make_node("honest")
    impostor.peer_id = "a" * 32
    assert worker.fetched(lease(worker, impostor, honest)) == CONTENT
    assert impostor.ranges == [] and worker.bad == [("a" * 32, False)]


def test_a_whole_file_instead_of_a_range_is_told_of(worker: FetchingWorker, make_node: Nodes) -> None:
    rude, honest = make_node("rude", origin=False), make_node("honest")
    rude.refuse = Response(CONTENT + b"and more")
    assert worker.fetched(lease(worker, rude, honest)) == CONTENT
    assert worker.bad == [(rude.peer_id, True)]


def test_who_gives_no_bytes_is_left(worker: FetchingWorker, make_node: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_PACE_S", 1.0)
    silent, honest = make_node("silent", origin=False), make_node("honest")
    silent.gate.clear()
    began = time.monotonic()
    assert worker.fetched(lease(worker, silent, honest)) == CONTENT
    assert time.monotonic() - began < scaled(4.0) and worker.bad == [(silent.peer_id, False)]
    silent.gate.set()


def test_a_lease_that_is_lost_is_not_fetched_to_the_end(worker: FetchingWorker, make_node: Nodes) -> None:
    slow = make_node("slow")
    slow.gate.clear()
    current = lease(worker, slow)
    until(lambda: bool(slow.ranges))
    request = worker.leases.state.request(time.monotonic())
    worker.leases.state.receive(request, answer(lost=[current.grant.lease_id]), time.monotonic())
    assert current.ended and worker.leases.state.leases == []
    time.sleep(0.4)  # It looks four times a second.
    slow.gate.set()
    time.sleep(0.2)
    assert current.path is None
    worker.cache.path_of(SHA256).unlink(missing_ok=True)


def test_no_provider_for_long_is_the_end(worker: FetchingWorker) -> None:
    for turn in range(8):
        current = lease(worker, lease_id=str(turn))
        wait_for_end(worker, current)
        assert current.reason == "" and current.path is None
        request = worker.leases.state.request(time.monotonic())
        worker.leases.state.receive(request, answer(lost=list(request.known_leases or ())), time.monotonic())
        if worker.fetcher.failure is not None:
            break
    until(lambda: worker.leases.state.closed)  # The last lease was given back before.
    assert isinstance(worker.fetcher.failure, NetworkError)


def test_a_slice_larger_than_the_cache_is_the_end(make_identity: Make, make_node: Nodes, tmp_path: Path) -> None:
    with Client(make_identity("client")) as client:
        worker = FetchingWorker(client, tmp_path / "small", 1000)
        lease(worker, make_node("a"))
        deadline = time.monotonic() + scaled(5)
        while worker.fetcher.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        worker.close()
    assert isinstance(worker.fetcher.failure, UsageError)


def test_a_passing_fault_of_the_machine_costs_one_lease_and_not_the_worker(
    worker: FetchingWorker, make_node: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, real = make_node("a"), worker.cache.claim_slice

    def full(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(worker.cache, "claim_slice", real)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(worker.cache, "claim_slice", full)
    worker.lost(lease(worker, node))
    assert worker.fetched(lease(worker, node, lease_id="2")) == CONTENT


def test_a_full_disk_ends_the_work_only_once_it_lasts(
    worker: FetchingWorker, make_node: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, real, times = make_node("a"), os.pwrite, [1]

    def full(*args: Any) -> int:
        if times:
            times.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full)
    worker.lost(lease(worker, node))
    assert worker.fetched(lease(worker, node, lease_id="2")) == CONTENT
    times.extend(range(100))
    worker.cache.discard(SHA256)
    for number in range(3, 30):
        if worker.fetcher.failure is None:
            wait_for_end(worker, lease(worker, node, lease_id=str(number)))
    until(lambda: worker.fetcher.failure is not None)  # The last lease was given back before.
    assert isinstance(worker.fetcher.failure, UsageError) and "No space left" in str(worker.fetcher.failure)


def test_a_slice_waits_for_room_until_others_are_used(worker: FetchingWorker, make_node: Nodes) -> None:
    """The cache is full of pinned slices: nothing fails, and what is let go makes room."""
    other = put(worker.cache, bytes(800_000))
    assert worker.cache.get(other, pin=True)
    current = lease(worker, make_node("a"))
    time.sleep(0.2)
    assert current.path is None and not current.ended
    threading.Timer(0.05, worker.cache.unpin_slice, [other]).start()
    assert worker.fetched(current) == CONTENT
