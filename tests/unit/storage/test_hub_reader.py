"""Blocks fetched ahead: exact bytes whatever is read in whatever order, requests at the same time, bounds kept."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import PrepareError
from forebay.storage import remote_file
from forebay.storage.remote_file import BlockCache, BlockStream


class _File:
    """Bytes, given in pieces; how many requests were under way at once; `refuse` says which starts fail.

    Each has a URL of its own: a thread that fetches ahead for one may begin when the next is read already.
    """

    by_url: ClassVar[dict[str, _File]] = {}

    def __init__(self, size: int) -> None:
        self.data = bytes(i * 7 % 251 for i in range(size))
        self.under_way, self.most, self.ranges = 0, 0, list[tuple[int, int]]()
        self.pause_s = 0.002  # of each request
        self.refuse: Callable[[int], bool] = lambda start: False
        self.blocks = BlockCache()
        url = f"hf://{len(self.by_url)}"
        self.by_url[url] = self
        self.reader = BlockStream(url, size, "", self.blocks)
        self._lock = threading.Lock()

    def fetch(self, start: int, stop: int, take: Any) -> None:
        with self._lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            self.ranges.append((start, stop))
        try:
            if self.refuse(start):
                raise PrepareError(f"at {start}")
            for index in range(start, stop, 5):
                take(memoryview(self.data)[index : min(index + 5, stop)])
            time.sleep(self.pause_s)
        finally:
            with self._lock:
                self.under_way -= 1

    def assert_reads(self, number: int) -> None:
        """Read a block, and check it."""
        self.reader.seek(number * 16)
        assert self.reader.read(16) == self.data[number * 16 : number * 16 + 16]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(remote_file, "BLOCK_BYTES", 16)
    monkeypatch.setattr(remote_file, "fetch_range", lambda url, *range_: _File.by_url[url].fetch(*range_))
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:  # They look up what is patched.
        thread.join()
    _File.by_url.clear()


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 6000),
    numbers=st.lists(st.integers(0, 400) | st.just(-1), min_size=1, max_size=150),
    most=st.integers(80, 300),
)
def test_any_reading_gives_the_files_bytes_within_the_bounds(size: int, numbers: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_file, "MAX_BLOCKS", most)
        patch.setattr(remote_file, "BLOCK_BYTES", 16)
        file, index = _File(size), 0
        for number in numbers:
            index = (index + 1 if number < 0 else number) % -(-size // 16)  # -1: read on
            file.assert_reads(index)
            assert len(file.blocks._blocks) <= most
        assert all(start < stop <= size and stop - start <= 16 for start, stop in file.ranges)


def test_reading_on_has_requests_under_way_at_the_same_time_and_asks_for_no_byte_twice() -> None:
    file = _File(16 * 600)
    file.pause_s = 0.05  # far longer than to start a thread, also on a busy machine
    for number in range(60):
        file.assert_reads(number)
    starts = sorted(file.ranges)
    assert 3 <= file.most <= 9
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(starts))
    assert max(stop for _, stop in starts) <= (60 + 8) * 16


def test_what_fails_ahead_is_told_when_it_is_wanted_and_may_be_asked_for_again() -> None:
    file = _File(16 * 200)
    file.refuse = lambda start: start >= 60 * 16
    for number in range(60):
        file.assert_reads(number)
    with pytest.raises(PrepareError, match="at"):
        file.assert_reads(60)
    file.refuse = lambda start: False
    file.assert_reads(60)


def test_after_a_fork_nothing_waits_for_the_parents_threads() -> None:
    file = _File(16 * 40)
    file.blocks._blocks["url", 0] = Future()  # of a thread that this process does not have
    file.blocks.after_fork()
    file.assert_reads(0)
