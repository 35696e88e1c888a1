"""Peers with a valid certificate that lie in bytes: each is refused and named, and the honest one is heard."""

from __future__ import annotations

import functools
import io
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.calibration import scaled

pytest.importorskip("libtorrent")

from forebay.data_node import DataNode
from forebay.dataset.manifest import SliceTable
from forebay.dataset.reader import Dataset
from forebay.errors import DatasetError, NetworkError, ProtocolError, UsageError
from forebay.lease import fetching
from forebay.load.samples import ends_reader
from forebay.network import discovery, reachability
from forebay.network.client import Client
from forebay.network.discovery import Claim, find_providers, record_key
from forebay.network.pki.identity import Identity
from forebay.network.reachability import ReachabilityChecker
from forebay.storage.base import Timeouts
from forebay.storage.fetch import RunFetcher
from forebay.storage.origins import open_remote
from forebay.storage.transfers import FileTransfer
from support.leases_by_hand import FetchingWorker
from support.liars import LIES, Liar
from support.local_discovery import LocalDiscovery
from support.nodes import NAME, make_dataset
from support.wire import until

Make = Callable[[str], Identity]
STALL_S = 0.3
WAITED_FOR = {"silent", "stall", "drip", "drip_head"}  # All others are known at once, and the honest one may be slow.
# Wrong beyond doubt, so that the peer is blamed; the others may be slow or unlucky, and are only left.
BLAMED = {
    "wrong_bytes", "endless", "huge", "wrong_range", "short_length", "negative_length", "two_lengths", "chunked",
    "giant_head", "garbage",
}  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "dataset", 3, 2000)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is asked may answer late, as on a machine that stands still."""
    monkeypatch.setattr(discovery, "ASK_TIMEOUT_S", 60.0)
    monkeypatch.setattr(discovery, "read_claims", functools.partial(discovery.read_claims, timeout_s=60.0))


@pytest.fixture
def client(make_identity: Make) -> Iterator[Client]:
    with Client(make_identity("reader")) as client:
        client.read_range = functools.partial(client.read_range, timeout_s=scaled(STALL_S))  # type: ignore[method-assign]
        yield client


@pytest.mark.parametrize("tell", sorted(LIES))
def test_a_leased_slice_comes_from_the_honest_one(
    tell: str, dataset: Dataset, make_identity: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The liar is asked first, as another worker; it is left for what it did, and the origin gives the slice."""
    stall_s = scaled(STALL_S)
    monkeypatch.setattr(fetching, "_STALL_S", stall_s if tell in WAITED_FOR else 60.0)
    if tell in WAITED_FOR:
        monkeypatch.setattr(fetching, "_PACE_S", 2 * stall_s)
    row, alone = dataset.table.row(0), dataset.table.row(1)
    started = time.monotonic()
    with ExitStack() as stack:
        liar = stack.enter_context(Liar(make_identity("liar"), dataset, tell))
        good = stack.enter_context(Liar(make_identity("good"), dataset, "honest"))
        providers = [
            {"peer_id": peer.identity.peer_id, "address": peer.address, "is_origin": peer is good}
            for peer in (liar, good)
        ]
        worker = FetchingWorker(stack.enter_context(Client(make_identity("reader"))), tmp_path / "cache")
        stack.callback(worker.close)
        current = worker.lease(row.sha256, row.bytes, providers, chunk_bytes=row.chunk_bytes)
        assert worker.fetched(current) == dataset.slice_path(0).read_bytes()
        assert liar.asked >= 1
        blamed = [who for who, wrong in worker.bad if wrong]
        assert blamed == ([liar.identity.peer_id] if tell in BLAMED else []), (tell, worker.bad)
        # From the liar alone there is none; only wrong bytes speak against the slice.
        size = alone.chunk_bytes
        reason = worker.lost(worker.lease(alone.sha256, alone.bytes, providers[:1], lease_id="2", chunk_bytes=size))
        # What is endless may also be told by what comes on the same connection before the next head.
        assert tell == "endless" or (liar.identity.peer_id in reason) == (tell == "wrong_bytes"), (tell, reason)
    assert time.monotonic() - started < max(scaled(6.0), 6.0 / STALL_S * stall_s)  # Some waits of `stall_s` each.
    assert worker.cache.list_slices() == {row.sha256}


READ = [(tell, "slices") for tell in ("wrong_bytes", "stall", "huge", "garbage", "truncated")]
READ += [(tell, "datasets") for tell in ("wrong_bytes", "stall", "huge", "chunked", "wrong_range")]


@pytest.mark.parametrize(("tell", "about"), READ)
def test_a_remote_dataset_is_read_from_the_honest_one(
    tell: str, about: str, dataset: Dataset, make_identity: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a Loader of forebay://NETWORK/NAME stands on: open_remote and transfers."""
    monkeypatch.setattr(discovery, "ANSWER_AFTER_GOOD_S", 15.0)  # All three are heard.
    table, reader = LocalDiscovery(), make_identity("reader")
    stall_s = scaled(STALL_S)
    url, patience = f"forebay://{reader.network_name}/{NAME}", Timeouts(stall_s=stall_s if tell in WAITED_FOR else 15.0)
    started, invalid = time.monotonic(), list[str]()
    with ExitStack() as stack:
        liars = [stack.enter_context(Liar(make_identity(f"liar-{i}"), dataset, tell, about)) for i in range(2)]
        for liar in liars:
            _announce(table, reader, liar)
        stack.enter_context(DataNode(make_identity("good"), [dataset], "127.0.0.1", 0, table))
        remote = open_remote(url, identity=reader, discovery=table, timeouts=patience)
        assert remote.id == dataset.id and remote.table.to_parquet() == dataset.table.to_parquet()
        transfers = stack.enter_context(RunFetcher())
        part = tmp_path / "slice.part"
        moved = FileTransfer(
            transfers, remote.table.row(0), part, [remote.origin],
            on_wrong=lambda origin, _: invalid.append(origin.url),
        ).start()  # fmt: skip
        assert moved.wait() and moved.error is None
        assert part.read_bytes() == dataset.slice_path(0).read_bytes()
    if about == "slices" and tell in BLAMED:
        assert set(map(_peer_in, invalid)) == {liar.identity.peer_id for liar in liars if liar.asked}, invalid
    assert time.monotonic() - started < max(scaled(6.0), 6.0 / STALL_S * stall_s)


def test_document_ends_are_those_of_the_honest_one(
    dataset: Dataset, make_identity: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They decide which samples a packed job has: a scheduler reads them before the first lease."""
    monkeypatch.setattr(discovery, "ANSWER_AFTER_GOOD_S", 15.0)  # All three are heard.
    table, reader = LocalDiscovery(), make_identity("reader")
    peers = sorted((make_identity(f"peer-{i}") for i in range(3)), key=lambda peer: peer.peer_id)
    with ExitStack() as stack:
        liars = [stack.enter_context(Liar(peer, dataset, "wrong_bytes")) for peer in peers[:2]]  # asked first
        for liar in liars:
            _announce(table, reader, liar)
        stack.enter_context(DataNode(peers[2], [dataset], "127.0.0.1", 0, table))
        remote = open_remote(f"forebay://{reader.network_name}/{NAME}", identity=reader, discovery=table)
        read = ends_reader(remote)
        for index in range(dataset.num_slices):
            assert read(index).tolist() == dataset.open_slice(index).document_ends.tolist()
        assert any(liar.asked for liar in liars)


def _peer_in(url: str) -> str:
    return url.partition("//")[2].partition("@")[0]


def _announce(table: LocalDiscovery, reader: Identity, liar: Liar) -> None:
    table.announce(record_key(reader.network_id, "dataset", NAME), liar.port)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("tell", ["silent", "huge", "garbage", "wrong_range", "redirect", "hang_up"])
def test_a_search_hears_the_honest_one_only(tell: str, dataset: Dataset, make_identity: Make, tmp_path: Path) -> None:
    table = LocalDiscovery()
    reader = make_identity("reader")
    with ExitStack() as stack:
        client = stack.enter_context(Client(reader))
        good = stack.enter_context(DataNode(make_identity("good"), [dataset], "127.0.0.1", 0, table))
        liar = stack.enter_context(Liar(make_identity("liar"), dataset, tell, about="claims"))
        _announce(table, reader, liar)
        started = time.monotonic()
        claims = find_providers(table, client, reader.network_id, NAME)
        assert time.monotonic() - started < scaled(4.0)
        assert [claim.peer_id for claim in claims] == [good.identity.peer_id]
        until(lambda: liar.asked > 0)  # The search waits for it for 1.5 s only.
        assert liar.asked == 1


def _claim(identity: Identity, **changed: Any) -> Any:
    claim = Claim(NAME, "0" * 64, 3, identity.peer_id, "127.0.0.1:1", time.time() + 60.0)
    return replace(claim, **changed).to_json(identity)


CLAIMS: dict[str, Callable[[Identity, Identity], Any]] = {
    "anothers": lambda liar, other: [_claim(other)],
    "unsigned": lambda liar, other: [{**_claim(liar), "signature": "00" * 64}],
    "changed": lambda liar, other: [{**_claim(liar), "num_slices": 7}],
    "expired": lambda liar, other: [_claim(liar, expires_at=time.time() - 1.0)],
    "a path for an id": lambda liar, other: [_claim(liar, dataset_id="../../../../etc/passwd")],
    "less than none": lambda liar, other: [_claim(liar, num_slices=-1)],
    "too many": lambda liar, other: [{}] * 5000,
    "no list": lambda liar, other: {"claims": 3},
    "endless expiry": lambda liar, other: [_claim(liar, expires_at=float("inf"))],
    "deep": lambda liar, other: functools.reduce(lambda inner, _: [inner], range(900), []),
}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("name", sorted(CLAIMS))
def test_false_claims_are_left_out(name: str, dataset: Dataset, make_identity: Make) -> None:
    table, reader, other = LocalDiscovery(), make_identity("reader"), make_identity("other")
    with ExitStack() as stack:
        client = stack.enter_context(Client(reader))
        good = stack.enter_context(DataNode(make_identity("good"), [dataset], "127.0.0.1", 0, table))
        identity = make_identity("liar")
        liar = stack.enter_context(Liar(identity, dataset, "honest", claims=CLAIMS[name](identity, other)))
        _announce(table, reader, liar)
        claims = find_providers(table, client, reader.network_id, NAME)
        assert [(claim.peer_id, claim.dataset_id) for claim in claims] == [(good.identity.peer_id, dataset.id)]


def test_the_peer_at_an_address_is_the_one_that_was_named(
    client: Client, dataset: Dataset, make_identity: Make
) -> None:
    """A member that took another's address, and a stranger with its own root: nothing is asked of either."""
    with Liar(make_identity("thief"), dataset, "honest") as thief:
        with pytest.raises(NetworkError, match=r"expected .*, got .*Nothing was sent"):
            client.get_bytes(thief.address, f"/v1/slices/{dataset.table.row(0).sha256}", 1 << 20, "a" * 32)
        assert thief.asked == 0


def test_a_slice_named_by_a_path_is_no_slice(make_identity: Make, tmp_path: Path) -> None:
    with Client(make_identity("reader")) as client, closing(FetchingWorker(client, tmp_path / "cache")) as worker:
        for name in ("../evil", "/etc/passwd", "a" * 63, "A" * 64, "a" * 64 + "\n", ""):
            with pytest.raises(UsageError, match="sha256"):
                worker.cache.path_of(name)
            with pytest.raises(ProtocolError, match=r"leases\.0\.sha256: "):
                worker.lease(name, 10, [])
    assert not (tmp_path / "evil").exists() and not (tmp_path / "evil.part").exists()


def test_a_table_that_unfolds_is_refused_before_it_is_read() -> None:
    """Some kilobytes of Parquet may stand for gigabytes: runs of one value, or names of a megabyte, told once."""
    rows = 40_000_000
    hashes = pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), 1, [None, pa.py_buffer(bytes(32))])
    item = pa.table({"name": ["a.safetensors"], "bytes": [1], "sha256": hashes, "count": [1], "documents": [1]})
    many = pa.table({name: pa.repeat(item.column(name)[0], rows // 1000) for name in item.column_names})
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, many.schema, compression="zstd", store_schema=False) as writer:
        for _ in range(5):
            writer.write_table(many)
    long_names = many.slice(0, 1000).set_column(
        0, "name", pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0), 1000), ["a" * 1_000_000])
    )
    second = io.BytesIO()
    pq.write_table(long_names, second, compression="zstd", store_schema=False)
    for bomb in (sink.getvalue(), second.getvalue()):
        assert len(bomb) < 200_000
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(DatasetError):
            SliceTable.from_parquet(bomb)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_member_is_named_only_where_it_answered(
    client: Client, dataset: Dataset, make_identity: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "CHECK_S", 60.0)
    with Liar(make_identity("sharer"), dataset, "honest") as sharer, closing(ReachabilityChecker(client)) as dialer:
        peer, here = sharer.identity.as_peer, "127.0.0.1"
        thief = replace(peer, peer_id="a" * 32)
        assert not any(dialer.check(item, sharer.address, here) for item in (peer, thief))
        assert dialer.check(peer, "", here) is not True
        deadline = time.monotonic() + scaled(20.0)
        while dialer.check(peer, sharer.address, here) is not True:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert dialer.check(peer, "127.0.0.1:1", here) is None  # its turn comes
        while dialer.check(peer, "127.0.0.1:1", here) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert (
            dialer.check(peer, "127.0.0.1:1", here) is not True
            and dialer.check(thief, sharer.address, here) is not True
        )
