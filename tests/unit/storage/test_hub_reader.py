"""Blocks fetched ahead: exact bytes whatever is read in whatever order, requests at the same time, bounds kept."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import PrepareError
from forebay.storage import remote_file
from forebay.storage.remote_file import BlockCache, RemoteStream
from support.waiting import until


class _File:
    """Bytes in blocks of 16; `before` is called with the start of each request.

    Each has a URL of its own: a thread that fetches ahead for one may begin when the next is read already.
    """

    by_url: ClassVar = {}

    def __init__(self, size, before=lambda start: None):
        self.data, self.before = bytes(i * 7 % 251 for i in range(size)), before
        self.ranges = []
        self.blocks = BlockCache()
        url = f"hf://{len(self.by_url)}"
        self.by_url[url] = self
        self.reader = RemoteStream(url, size, "", None, self.blocks)

    def fetch(self, start, stop):
        self.ranges.append((start, stop))
        self.before(start)
        for index in range(start, stop, 5):
            yield memoryview(self.data)[index : min(index + 5, stop)]

    def assert_reads(self, number):
        """Read a block, and check it."""
        self.reader.seek(number * 16)
        assert self.reader.read(16) == self.data[number * 16 : number * 16 + 16]


@pytest.fixture(autouse=True)
def _small(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(remote_file, "BLOCK_BYTES", 16)
    monkeypatch.setattr(remote_file, "fetch_range", lambda url, *range_: _File.by_url[url].fetch(*range_))
    yield
    for thread in threading.enumerate():
        if thread.name == "hub-ahead":  # It looks up what is patched.
            thread.join()
    _File.by_url.clear()


@given(
    size=st.integers(1, 1500),
    numbers=st.lists(st.integers(0, 100) | st.just(-1), min_size=1, max_size=40),
    max_blocks=st.integers(12, 60),
)
def test_any_reading_gives_the_files_bytes_within_the_bounds(size, numbers, max_blocks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_file, "MAX_BLOCKS", max_blocks)
        file, index = _File(size), 0
        for number in numbers:
            index = (index + 1 if number < 0 else number) % -(-size // 16)  # -1: read on
            file.assert_reads(index)
            assert len(file.blocks._blocks) <= max_blocks
        assert all(start < stop <= size and stop - start <= 16 for start, stop in file.ranges)


def test_reading_on_has_eight_requests_under_way_and_fetches_no_byte_twice():
    released = threading.Event()
    file = _File(16 * 600, lambda start: start < 5 * 16 or released.wait())
    for number in range(5):
        file.assert_reads(number)
    until(lambda: len(file.ranges) == 5 + 8)
    released.set()
    for number in range(5, 60):
        file.assert_reads(number)
    starts = sorted(file.ranges)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(starts))
    assert max(stop for _, stop in starts) <= (60 + 8) * 16


def test_a_failure_ahead_is_raised_when_its_block_is_read_and_fetched_again():
    def refuse(start):
        if start >= 20 * 16:
            raise PrepareError(f"at {start}")

    file = _File(16 * 100, refuse)
    for number in range(20):
        file.assert_reads(number)
    with pytest.raises(PrepareError, match="at"):
        file.assert_reads(20)
    file.before = lambda start: None
    file.assert_reads(20)


def test_after_a_fork_nothing_waits_for_the_parents_threads():
    file = _File(16 * 40)
    file.blocks._blocks["url", 0] = Future()  # of a thread that this process does not have
    file.blocks.after_fork()
    file.assert_reads(0)
