"""Blocks fetched ahead: exact bytes whatever is read in whatever order, requests at the same time, bounds kept."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.prepare.read import hub_blocks
from forebay.prepare.read.hub_blocks import Blocks


class _File:
    """Bytes, given in pieces; how many requests were under way at once; `refuse` says which starts fail."""

    def __init__(self, size: int, block: int) -> None:
        self.data = bytes(i * 7 % 251 for i in range(size))
        self.block, self.under_way, self.most, self.ranges = block, 0, 0, list[tuple[int, int]]()
        self.refuse: Callable[[int], bool] = lambda start: False
        self.together: threading.Barrier | None = None
        self._lock = threading.Lock()

    def fetch(self, url: str, start: int, stop: int, take: Any) -> None:
        with self._lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            self.ranges.append((start, stop))
        try:
            if self.together is not None and start >= 28 * self.block:
                self.together.wait(10)
            if self.refuse(start):
                raise ConnectionError(f"at {start}")
            for at in range(start, stop, 5):
                take(memoryview(self.data)[at : min(at + 5, stop)])
        finally:
            with self._lock:
                self.under_way -= 1


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_blocks, "BLOCK", 16)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 6000),
    numbers=st.lists(st.integers(0, 400) | st.just(-1), min_size=1, max_size=150),
    most=st.integers(20, 300),
)
def test_any_reading_gives_the_files_bytes_within_the_bounds(size: int, numbers: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_blocks, "_MOST_BLOCKS", most)
        patch.setattr(hub_blocks, "BLOCK", 16)
        file, blocks, at = _File(size, 16), Blocks(), 0
        blocks.opened("url")
        for number in numbers:
            at = at + 1 if number < 0 else number  # -1: read on
            at %= -(-size // 16)
            assert blocks.read("url", size, at, file.fetch) == file.data[at * 16 : at * 16 + 16]
            assert len(blocks._held) <= most and blocks._under_way <= hub_blocks._MOST_FLIGHTS + 1
        blocks.closed("url")
        assert file.most <= hub_blocks._MOST_FLIGHTS + 1 and all(stop <= size for _, stop in file.ranges)


def test_reading_on_has_requests_under_way_at_the_same_time_and_asks_for_no_byte_twice() -> None:
    file, blocks = _File(16 * 600, 16), Blocks()
    file.together = threading.Barrier(4)  # those of the stride: 28 to 44, 44 to 60 …; each waits for three others
    blocks.opened("url")
    for number in range(92):
        assert blocks.read("url", len(file.data), number, file.fetch) == file.data[number * 16 : number * 16 + 16]
        if number == 27:
            assert file.most <= 4
        if number == 28 + 16 * 3:
            file.together.abort()
            file.together = None
    starts = sorted(file.ranges)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(starts))


def test_what_fails_ahead_is_told_when_it_is_wanted_and_may_be_asked_for_again() -> None:
    file, blocks = _File(16 * 200, 16), Blocks()
    file.refuse = lambda start: start >= 60 * 16
    blocks.opened("url")
    for number in range(60):
        blocks.read("url", len(file.data), number, file.fetch)
    with pytest.raises(ConnectionError, match="at"):
        blocks.read("url", len(file.data), 60, file.fetch)
    file.refuse = lambda start: False
    assert blocks.read("url", len(file.data), 60, file.fetch) == file.data[960:976]


def test_after_a_fork_nothing_waits_for_the_parents_threads() -> None:
    file, blocks = _File(16 * 40, 16), Blocks()
    blocks._flights["url", 0] = hub_blocks._Flight(range(1))  # of a thread that this process does not have
    blocks.after_fork()
    assert blocks.read("url", len(file.data), 0, file.fetch) == file.data[:16]
