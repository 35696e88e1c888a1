"""Trackers that lie: whom a reader asks, and what an answer that makes no sense costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.data_node import DataNode
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import write_token_slice
from forebay.network.client import Client
from forebay.network.peer import Provider
from forebay.network.pki.identity import Identity, create_network, join
from forebay.storage.base import TransientError
from forebay.swarm.reader import SwarmReader
from forebay.swarm.reader_state import TrackerClient
from support.calibration import scaled
from support.local_discovery import LocalDiscovery
from support.rude_peer import Asked, RudePeer, http


def at(name: str, is_origin: bool = False, port: int = 1) -> Provider:
    return Provider(name, f"127.0.0.1:{port}", is_origin)


def ranking(dataset_id: str, day: int, result: list[Provider]) -> list[str]:
    trackers = TrackerClient(_Deaf(), dataset_id, lambda: result, None, now=lambda: day * 86400.0 + 5)  # type: ignore[arg-type]
    assert trackers.request({}, lambda body: None) is None
    return _Deaf.asked


class _Deaf:
    """A client whom nobody answers; it knows whom it asked."""

    asked: ClassVar[list[str]] = []

    def __init__(self) -> None:
        _Deaf.asked = []

    def request_json(self, address: str, method: str, path: str, body: Any, peer_id: str, *more: Any) -> Any:
        _Deaf.asked.append(peer_id)
        raise TransientError("nobody is there")


def test_who_steers_is_not_for_a_key_to_choose() -> None:
    """All members choose alike; another dataset or day has another order; those with everything come first."""
    result = [at(f"peer{i:02}", port=100 + i) for i in range(20)]
    first = ranking("ab" * 32, 1, result)
    assert sorted(first) == [item.peer_id for item in result] != first
    assert ranking("ab" * 32, 1, result[::-1]) == first
    lead = {ranking(f"{i:064x}", day, result)[0] for i in range(10) for day in range(10)}
    assert len(lead) > 10
    full = [*result, at("whole", True, 99)]
    assert all(ranking(f"{i:064x}", 1, full)[0] == "whole" for i in range(10))


def test_sharers_are_bounded() -> None:
    result: list[Provider] = []
    trackers = TrackerClient(_Deaf(), "ab" * 32, lambda: result, None)  # type: ignore[arg-type]
    for answer in range(100):
        trackers.add_sharers([at(f"{answer}-{i}", port=1 + 64 * answer + i) for i in range(64)])
    trackers.request({}, lambda body: None)
    assert len(_Deaf.asked) == 256 and "99-15" in _Deaf.asked and "99-16" not in _Deaf.asked


class World:
    """A data node that is honest, a reader, and the identity of one that is not."""

    def __init__(self, folder: Path) -> None:
        create_network(folder / "network", "net")
        self.reader, self.rude, data = (self._join(folder, name) for name in ("reader", "rude", "data"))
        (folder / "corpus" / "slices").mkdir(parents=True)
        tokens = np.arange(5000, dtype=np.uint16) % 60
        write_token_slice(folder / "corpus" / "slices" / "0.safetensors", tokens, np.array([5000], np.uint64))
        self.dataset: Dataset = import_slices(folder / "corpus", "corpus")
        self.node = DataNode(data, [self.dataset], "127.0.0.1", 0, LocalDiscovery())
        self.parts = (folder / f"part{i}" for i in range(1_000_000))

    @staticmethod
    def _join(folder: Path, name: str) -> Identity:
        return join(folder / "network", folder / name, name)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    created = World(tmp_path_factory.mktemp("world"))
    with created.node:
        yield created


HOLDER = {"index": 7, "member": "m", "peer_id": "p", "address": "127.0.0.1:1", "is_origin": True}
GOOD = {"assignments": [], "sharers": [], "wait_s": 0.02, "tell_have": False}
NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers(max_value=0) | st.floats(max_value=0.5) | st.text(max_size=20)
    | st.sampled_from(["a..b:1", "https://", "file:///etc/passwd", "s3://b/d?endpoint=http://127.0.0.1:1", "nonsense"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*HOLDER, "holders"]), inner, max_size=5)
    ),
    max_leaves=8,
)  # fmt: skip
HOLDERS = st.builds(lambda name, value: {**HOLDER, name: value}, st.sampled_from(list(HOLDER)), NONSENSE)
ANSWERS = st.one_of(
    NONSENSE,
    st.builds(lambda name, value: {**GOOD, name: value}, st.sampled_from(list(GOOD)), NONSENSE),
    st.builds(lambda name, one: {**GOOD, name: [one]}, st.sampled_from(["assignments", "sharers"]), HOLDERS),
)


@settings(max_examples=30)
@given(answers=st.lists(ANSWERS, min_size=1, max_size=3))
def test_a_tracker_that_answers_nonsense_ends_nobody(world: World, answers: list[Any]) -> None:
    """It is asked first, and gone after some answers; the slice comes all the same."""
    remaining = list(answers)

    def answer(asked: Asked) -> bytes | None:
        return http(200, remaining.pop(0)) if remaining and asked.path.startswith("/v1/swarm/") else None

    part = next(world.parts)
    with RudePeer(world.rude, answer) as rude, Client(world.reader) as client:
        result = [
            Provider(world.rude.peer_id, rude.address, True),
            Provider(world.node.identity.peer_id, world.node.address, False),
        ]
        table = world.dataset.table
        flags = np.zeros(1, np.bool_)
        with closing(SwarmReader(client, world.dataset.id, table, lambda: result, lambda: flags)) as reader:
            transfer = reader.fetch(0, part)
            assert transfer.wait() and transfer.error is None
            assert rude.asked
    assert part.read_bytes() == world.dataset.slice_path(0).read_bytes()
    part.unlink()


def test_a_tracker_is_left_for_the_next_on_its_first_answer_without_sense(world: World) -> None:
    """Whoever of the two steers first: each is asked, or the honest one alone."""
    nonsense = http(200, {**GOOD, "assignments": [{**HOLDER, "index": 0, "address": "https://"}]})
    with RudePeer(world.rude, lambda asked: nonsense) as rude, Client(world.reader) as client:
        rude_at = Provider(world.rude.peer_id, rude.address, True)
        honest_at = Provider(world.node.identity.peer_id, world.node.address, False)  # comes second
        flags, part = np.zeros(1, np.bool_), next(world.parts)
        trackers = [rude_at, honest_at]
        with closing(
            SwarmReader(client, world.dataset.id, world.dataset.table, lambda: trackers, lambda: flags)
        ) as reader:
            began = time.monotonic()
            transfer = reader.fetch(0, part)
            assert transfer.wait() and transfer.error is None
            assert len(rude.asked) == 1
            assert time.monotonic() - began < scaled(10)
    part.unlink()
