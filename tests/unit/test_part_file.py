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
from forebay.storage.transfer_state import SourceStats, choose_source, min_range_bytes

MIB = 1 << 20
CONTENT = random.Random(7).randbytes(3_500_001)


class Unread(Origin):
    url = "x"

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        raise AssertionError


@settings(deadline=None, max_examples=60)
@given(
    num_bytes=st.integers(1, 5_000_000),
    spans=st.integers(1, 40),
    power=st.integers(16, 22),
    order=st.randoms(use_true_random=False),
)
def test_a_part_file(
    tmp_path_factory: pytest.TempPathFactory, num_bytes: int, spans: int, power: int, order: random.Random
) -> None:
    """Spans cover the file once; in any order of writing, broken off anywhere, what is marked is there."""
    path = tmp_path_factory.mktemp("part") / "part"
    data = CONTENT * 2
    file = PartFile(path, num_bytes, 1 << power, spans)
    file.open()
    assert [span.start for span in file.ranges] == [0, *(span.stop for span in file.ranges[:-1])]
    assert file.ranges[-1].stop == num_bytes
    todo = list(file.ranges)
    order.shuffle(todo)
    for span in todo[: order.randint(0, len(todo) - 1)]:
        assert file.write(span, memoryview(data)[span.start : span.stop], "x")
    marked = [index for index, flag in enumerate(path.read_bytes()[num_bytes + 1 :]) if flag]
    file.close()
    assert not file.write(todo[-1], memoryview(b"x"), "x")
    again = PartFile(path, num_bytes, 1 << power, 1)
    again.open()
    assert sorted({span.start // again.piece_bytes for span in again.ranges if span.offset == span.stop}) == marked
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
    file = PartFile(tmp_path / "part", 215_000_000_000, 2 << 30, 16)
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
        made = SourceStats(Unread(), 4.0)
        for key, value in known.items():
            setattr(made, key, value)
        return made

    fast, slow = source(speed=9.0), source(speed=1.0)
    assert choose_source([slow, fast], 0)[0] is fast
    assert choose_source([slow, source(speed=9.0, avoid_until=5)], 0)[0] is slow
    assert choose_source([slow, source(speed=9.0, lies=1)], 0)[0] is slow
    assert choose_source([slow, source(speed=9.0, active=4)], 0)[0] is slow
    assert choose_source([new := source(), fast], 0)[0] is new, "one connection tries it"
    assert choose_source([source(active=1), fast], 0)[0] is fast
    assert choose_source([source(wait_until=7.0), source(wait_until=3.0)], 0) == (None, 3.0)
    assert choose_source([source(active=4)], 0) == (None, float("inf"))


def test_requests_are_as_long_as_a_connection_is_fast(tmp_path: Path) -> None:
    def fastest(*speeds: float | None) -> int:
        made = [SourceStats(Unread(), 16.0) for _ in speeds]
        for one, speed in zip(made, speeds):
            one.speed = speed
        return min_range_bytes(made)

    assert fastest() == fastest(None) == fastest(6e6) == fastest(0.0, 1e3) == MIB
    assert fastest(6e6, 90e6) == 8 * MIB
    assert fastest(50e6, None) == 4 * MIB
    alone = PartFile(tmp_path / "alone", 8 * MIB, 8 * MIB, 16)
    one_of_many = PartFile(tmp_path / "many", 8 * MIB, 8 * MIB, 16, fastest(50e6))
    endless = PartFile(tmp_path / "fast", 20 * MIB, 8 * MIB, 16, fastest(9e9))
    for file, spans in ((alone, 8), (one_of_many, 2), (endless, 3)):
        file.open()
        file.close()
        assert len(file.ranges) == spans


def test_a_busy_source_gets_fewer_connections_and_then_more() -> None:
    made, backoff = SourceStats(Unread(), 16.0), partial(backoff_s, first_s=1, max_s=10)
    made.record_overload(10, 9, 5, backoff)
    assert (made.limit, made.wait_until) == (8, 15)
    made.record_overload(10.5, 9, 0, backoff)
    assert made.limit == 8, "what was asked before counts once"
    made.record_overload(20, 19, 0, backoff)
    assert made.limit == 4
    for _ in range(200):
        made.record_success(16)
    assert made.limit == 16
