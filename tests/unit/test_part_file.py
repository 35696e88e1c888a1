"""Partial files, and the choice of a source: without connections."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.network.retry import backoff_s
from forebay.storage.base import Origin
from forebay.storage.part_file import PartFile
from forebay.storage.transfer_state import SourceStats, choose_source

CONTENT = random.Random(7).randbytes(3_500_001)


class Unread(Origin):
    url = "x"

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        raise AssertionError


@settings(deadline=None, max_examples=60)
@given(
    num_bytes=st.integers(1, 5_000_000),
    pieces=st.integers(1, 5),
    power=st.integers(16, 22),
    order=st.randoms(use_true_random=False),
)
def test_a_part_file(
    tmp_path_factory: pytest.TempPathFactory, num_bytes: int, pieces: int, power: int, order: random.Random
) -> None:
    """Spans cover the file once; in any order of writing, broken off anywhere, what is marked is there."""
    path = tmp_path_factory.mktemp("part") / "part"
    data = CONTENT * 2
    file = PartFile(path, num_bytes, 1 << power, range_bytes=pieces << power)
    file.open()
    assert [span.start for span in file.ranges] == [0, *(span.stop for span in file.ranges[:-1])]
    assert file.ranges[-1].stop == num_bytes
    todo = list(file.ranges)
    order.shuffle(todo)
    for span in todo[: order.randint(0, len(todo) - 1)]:
        assert file.write(span, memoryview(data)[span.start : span.stop], "x")
    marked = {index for index, flag in enumerate(path.read_bytes()[num_bytes + 1 :]) if flag}
    file.close()
    assert not file.write(todo[-1], memoryview(b"x"), "x")
    again = PartFile(path, num_bytes, 1 << power)
    again.open()
    assert {span.start >> power for span in again.ranges if span.offset == span.stop} == marked
    for span in again.ranges:
        if span.offset < span.stop:
            assert again.write(span, memoryview(data)[span.start : span.stop], "y")
    assert again.advance_check() and again.received == num_bytes
    again.finish()
    again.close()
    assert path.read_bytes() == data[:num_bytes]
    assert again.check.hexdigest() == hashlib.sha256(data[:num_bytes]).hexdigest()


def test_chunks_of_a_large_shard(tmp_path: Path) -> None:
    """215 GB in chunks of 2 GiB are 101 ranges; sizes are 64 bits wide."""
    file = PartFile(tmp_path / "part", 215_000_000_000, 8 << 20, range_bytes=2 << 30)
    file.open()
    file.close()
    assert len(file.ranges) == 101
    assert file.ranges[-1].stop == 215_000_000_000


def test_backoff_doubles_and_jitters() -> None:
    chance = random.Random(1)
    for times in range(1, 40):
        waits = [backoff_s(times, 0.2, 15, chance=chance) for _ in range(20)]
        middle = min(15, 0.2 * 2 ** (times - 1))
        assert all(0.5 * middle <= wait <= 1.5 * middle for wait in waits)
        assert len(set(waits)) == 20


def test_choice() -> None:
    def source(**known: float) -> SourceStats:
        created = SourceStats(Unread(), 4.0)
        for key, value in known.items():
            setattr(created, key, value)
        return created

    fast, slow = source(speed=9.0), source(speed=1.0)
    assert choose_source([slow, fast], 0)[0] is fast
    assert choose_source([slow, source(speed=9.0, avoid_until=5)], 0)[0] is slow
    assert choose_source([slow, source(speed=9.0, lies=1)], 0)[0] is slow
    assert choose_source([slow, source(speed=9.0, active=4)], 0)[0] is slow
    assert choose_source([new := source(), fast], 0)[0] is new, "one connection tries it"
    assert choose_source([source(active=1), fast], 0)[0] is fast
    assert choose_source([source(wait_until=7.0), source(wait_until=3.0)], 0) == (None, 3.0)
    assert choose_source([source(active=4)], 0) == (None, float("inf"))


def test_a_part_of_other_pieces_starts_over(tmp_path: Path) -> None:
    for power in (16, 17):
        file = PartFile(tmp_path / "part", 1 << 20, 1 << power)
        file.open()
        assert file.received == 0
        assert file.write(file.ranges[0], memoryview(bytes(1 << power)), "x")
        file.close()


def test_a_busy_source_gets_fewer_connections_and_then_more() -> None:
    created, backoff = SourceStats(Unread(), 16.0), partial(backoff_s, first_s=1, max_s=10)
    created.record_overload(10, 9, 5, backoff)
    assert (created.limit, created.wait_until) == (8, 15)
    created.record_overload(10.5, 9, 0, backoff)
    assert created.limit == 8, "what was asked before counts once"
    created.record_overload(20, 19, 0, backoff)
    assert created.limit == 4
    for _ in range(200):
        created.record_success(16)
    assert created.limit == 16
