"""Peers with a valid certificate that lie in bytes: each is refused and named, and the honest one is heard.

Chance remains in the lies that are waited for: an honest peer that answers later than the time-out counts as slow, too.
"""

import functools
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from support.calibration import scaled

pytest.importorskip("libtorrent")

from forebay.data_node import DataNode
from forebay.dataset.manifest import SliceInfo
from forebay.dataset.reader import Dataset
from forebay.errors import ProtocolError, UsageError
from forebay.fetch import engine
from forebay.fetch.cache import ChunkCache
from forebay.lease import fetching
from forebay.network import discovery
from forebay.network.client import Client
from forebay.network.discovery import Claim, find_providers, record_key
from forebay.network.pki.identity import Identity
from forebay.storage.origins import open_remote
from support.leases_by_hand import DATASET, FetchingWorker, answer, lease_of
from support.liars import LIES, Liar
from support.local_discovery import LocalDiscovery
from support.nodes import HOST, NAME, make_dataset
from support.waiting import until

STALL_S = 0.3
WAITED_FOR = {"silent", "stall", "drip", "drip_head"}  # All others are known at once, and the honest one may be slow.
# Wrong beyond doubt, so that the peer is blamed; the others may be slow or unlucky, and are only left.
BLAMED = {
    "wrong_bytes", "endless", "huge", "wrong_range", "short_length", "negative_length", "two_lengths", "chunked",
    "giant_head", "garbage",
}  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "dataset", 3, 2000)


@pytest.fixture
def patient(monkeypatch):
    """All are heard, however late they answer."""
    for name in ("ASK_TIMEOUT_S", "ANSWER_AFTER_GOOD_S"):
        monkeypatch.setattr(discovery, name, 60.0)
    monkeypatch.setattr(discovery, "read_claims", functools.partial(discovery.read_claims, timeout_s=60.0))


@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_leased_slice_comes_from_the_honest_one(lie, dataset, make_identity, tmp_path, monkeypatch):
    """The liar is asked first, as another worker; it is left for what it did, and the origin gives the slice."""
    stall_s = scaled(STALL_S)
    monkeypatch.setattr(fetching, "_STALL_S", stall_s if lie in WAITED_FOR else 60.0)
    if lie in WAITED_FOR:
        monkeypatch.setattr(engine, "_SLOW_S", 2 * stall_s)
    row, alone = dataset.table.row(0), dataset.table.row(1)
    with ExitStack() as stack:
        liar = stack.enter_context(Liar(make_identity("liar"), dataset, lie))
        good = stack.enter_context(Liar(make_identity("good"), dataset, "honest"))
        providers = [
            {"peer_id": peer.identity.peer_id, "address": peer.address, "is_origin": peer is good}
            for peer in (liar, good)
        ]
        worker = FetchingWorker(
            stack.enter_context(Client(make_identity("reader"))), tmp_path / "cache", dataset=dataset
        )
        stack.callback(worker.close)
        current = worker.lease(providers, index=0)
        assert worker.fetched(current) == dataset.slice_path(0).read_bytes()
        assert liar.requests
        blamed = [who for who, wrong in worker.rejected if wrong]
        assert blamed == ([liar.identity.peer_id] if lie in BLAMED else []), (lie, worker.rejected)
        # From the liar alone there is none; only wrong bytes speak against the slice.
        reason = worker.lost(worker.lease(providers[:1], lease_id="2", index=alone.index))
        # What is endless may also be told by what comes on the same connection before the next head.
        assert lie == "endless" or (liar.identity.peer_id in reason) == (lie == "wrong_bytes"), (lie, reason)
    assert worker.cache.list_slices() == {row.sha256}


def announced(stack: ExitStack, table: LocalDiscovery, identity: Identity, *args: Any, **settings: Any) -> Liar:
    """A liar that is found under the dataset's name."""
    liar = stack.enter_context(Liar(identity, *args, **settings))
    table.announce(record_key(identity.network_id, "dataset", NAME), liar.port)
    return liar


@pytest.mark.usefixtures("patient")
def test_document_ends_are_those_of_the_honest_one(dataset, make_identity):
    """They decide which samples a packed job has: a scheduler reads them before the first lease."""
    table, reader = LocalDiscovery(), make_identity("reader")
    peers = sorted((make_identity(f"peer-{i}") for i in range(3)), key=lambda peer: peer.peer_id)
    with ExitStack() as stack:
        liars = [announced(stack, table, peer, dataset, "wrong_bytes", "datasets") for peer in peers[:2]]  # asked first
        stack.enter_context(DataNode(peers[2], [dataset], HOST, 0, table))
        remote = open_remote(f"forebay://{reader.network_name}/{NAME}", identity=reader, discovery=table)
        for index, document_ends in enumerate(remote.all_document_ends()):
            assert document_ends.tolist() == dataset.open_slice(index).document_ends.tolist()
        assert any(liar.requests for liar in liars)


def _claim(identity, **changed):
    claim = Claim(NAME, "0" * 64, 3, identity.peer_id, "127.0.0.1:1", time.time() + 60.0)
    return replace(claim, **changed).to_json(identity)


CLAIMS = {
    "anothers": lambda liar, other: [_claim(other)],
    "unsigned": lambda liar, other: [{**_claim(liar), "signature": "00" * 64}],
    "expired": lambda liar, other: [_claim(liar, expires_at=time.time() - 1.0)],
    "a path for an id": lambda liar, other: [_claim(liar, dataset_id="../../../../etc/passwd")],
    "less than none": lambda liar, other: [_claim(liar, num_slices=-1)],
    "too many": lambda liar, other: [{}] * 5000,
    "no list": lambda liar, other: {"claims": 3},
    "endless expiry": lambda liar, other: [_claim(liar, expires_at=float("inf"))],
    "deep": lambda liar, other: functools.reduce(lambda inner, _: [inner], range(900), []),
}


@pytest.mark.parametrize("lie", ["silent", "huge", "garbage", "wrong_range", "redirect", "hang_up", *CLAIMS])
def test_a_search_hears_the_honest_one_only(lie, dataset, make_identity, request):
    if lie != "silent":
        request.getfixturevalue("patient")
    table, reader, identity = LocalDiscovery(), make_identity("reader"), make_identity("liar")
    claims = CLAIMS[lie](identity, make_identity("other")) if lie in CLAIMS else None
    with ExitStack() as stack:
        client = stack.enter_context(Client(reader))
        good = stack.enter_context(DataNode(make_identity("good"), [dataset], HOST, 0, table))
        liar = announced(stack, table, identity, dataset, lie, about="claims", claims=claims)
        result = find_providers(table, client, reader.network_id, NAME)
        assert [(claim.peer_id, claim.dataset_id) for claim in result] == [(good.identity.peer_id, dataset.id)]
        until(lambda: len(liar.requests) == 1)  # The search waits for a silent one for 1.5 s only.


def test_a_slice_named_by_a_path_is_no_slice(tmp_path):
    cache = ChunkCache(tmp_path / "cache", 1 << 20)
    for name in ("../evil", "/etc/passwd", "a" * 63, "A" * 64, "a" * 64 + "\n", ""):
        with pytest.raises(UsageError, match="sha256"):
            cache.path_of(name)
        with pytest.raises(ProtocolError, match=r"leases\.0\.sha256: "):
            answer(leases=[lease_of(SliceInfo(0, "a", 10, name, 1, 1), DATASET, [])])
    cache.close()
    assert not (tmp_path / "evil").exists() and not (tmp_path / "evil.part").exists()
