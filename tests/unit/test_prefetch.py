"""A feed and its consumer: waiting, failing, seeking, what is kept, and closing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.cache import planned_use as uses_module
from forebay.cache.cache import SliceCache
from forebay.cache.eviction import part_bytes
from forebay.cache.prefetch import SliceFeed
from forebay.errors import NetworkError, UsageError
from support.feed_fakes import CONTENTS, NAMES, SIZE, FakeTransfer, Origin, feed_of, read, room_for, until, uses_of


@pytest.fixture
def closing() -> Iterator[list[SliceFeed]]:
    feeds: list[SliceFeed] = []
    yield feeds
    for feed in feeds:
        feed.close()


def test_a_cyclic_pass_keeps_what_fits(tmp_path: Path, closing: list[SliceFeed]) -> None:
    steps = [[key] for _ in range(4) for key in range(10) for _ in range(3)]
    origin = Origin()
    feed = feed_of(tmp_path, steps, 6, origin, 10, horizon_bytes=SIZE)
    closing.append(feed)
    feed.seek(0)
    read(feed, steps)
    assert len(origin.started) <= 10 + 3 * 6  # four of ten survive each pass; the least recently used would keep none


# The consumer


def test_a_slice_is_there_before_it_is_needed(tmp_path: Path, closing: list[SliceFeed]) -> None:
    origin = Origin(at_once=False)
    feed = feed_of(tmp_path, [[0, 1, 2], [0], [1], [2]], 4, origin)
    closing.append(feed)
    feed.seek(0)
    until(lambda: len(origin.started) == 3, "all that fits is started")
    assert origin.started == [0, 1, 2]  # the nearest first
    assert not feed.is_cached(0)
    origin.end(0)
    assert feed.acquire(0, 2).read_bytes() == CONTENTS[0]
    assert feed.is_cached(0) and not feed.is_cached(1)
    feed.advance(2)
    origin.end(1)
    origin.end(2)
    assert feed.acquire_all([1, 2], 4) == [tmp_path / NAMES[1], tmp_path / NAMES[2]]
    until(lambda: feed.stats()["held_bytes"] == 3 * SIZE, "it takes note of them")
    stats = feed.stats()
    assert stats["fetched_slices"] == 3 and stats["fetched_bytes"] == 3 * SIZE
    assert stats["repeated_fetches"] == stats["evicted"] == stats["in_flight"] == 0


def test_a_second_run_reads_the_disk(tmp_path: Path) -> None:
    steps = [[0], [1], [2]]
    for fetched in (3, 0):
        origin = Origin()
        feed = feed_of(tmp_path, steps, 3, origin)
        feed.seek(0)
        read(feed, steps)
        feed.close()
        assert len(origin.started) == fetched


def test_a_late_slice_is_waited_for_and_told(
    tmp_path: Path, closing: list[SliceFeed], caplog: pytest.LogCaptureFixture
) -> None:
    origin = Origin(at_once=False)
    feed = feed_of(tmp_path, [[0], [1]], 3, origin)
    closing.append(feed)
    caplog.set_level(logging.WARNING, "forebay")
    feed.seek(0)
    until(lambda: origin.started == [0], "the first is started alone")
    origin.end(0)
    until(lambda: len(origin.started) == 2, "both are started")
    feed.acquire(0, 1)
    feed.advance(1)
    origin.transfers[1].received = 250
    timer = threading.Timer(0.3, origin.end, [1])
    timer.start()
    feed.acquire(1, 2)
    timer.join()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"late: slice 1 ({NAMES[1][:12]}…) needed at step 1, 250 of 1000 bytes here. Waiting; ")
    assert feed.stats()["waited_s"] >= 0.25 and feed.stats()["late"] >= 1


def test_a_failure_is_told_to_who_needs_the_slice_only(tmp_path: Path, closing: list[SliceFeed]) -> None:
    origin = Origin(failing={1})
    feed = feed_of(tmp_path, [[0], [1], [2]], 3, origin)
    closing.append(feed)
    feed.seek(0)
    feed.acquire(0, 1)
    until(lambda: feed.is_cached(2), "the rest comes in spite of it")
    until(lambda: feed.stats()["failed"] == 1, "the first try is over")
    feed.advance(1)
    for _ in range(2):  # tried again each time it is asked for
        tries = origin.started.count(1)
        with pytest.raises(NetworkError, match=rf"slice 1 \({NAMES[1][:12]}…\) was not downloaded: the origin is gone"):
            feed.acquire(1, 2)
        assert origin.started.count(1) == tries + 1
    origin.failing.clear()
    assert feed.acquire(1, 2).read_bytes() == CONTENTS[1]


def test_a_failure_is_tried_again_before_it_is_needed(tmp_path: Path, closing: list[SliceFeed]) -> None:
    now = [0.0]
    origin = Origin(failing={1})
    feed = feed_of(tmp_path, [[0], [1]], 3, origin, clock=lambda: now[0])
    closing.append(feed)
    feed.seek(0)
    until(lambda: feed.stats()["failed"] == 1, "it is tried")
    now[0] = 0.9
    feed.advance(1)
    time.sleep(0.05)
    assert origin.started.count(1) == 1
    origin.failing.clear()
    now[0] = 5.0
    until(lambda: feed.is_cached(1), "it is tried after five seconds")
    assert feed.stats()["late"] == 0


def test_an_error_in_a_start_or_in_the_order_reaches_the_consumer(tmp_path: Path, closing: list[SliceFeed]) -> None:
    def uses(start: int, stop: int) -> tuple[Any, Any]:
        raise UsageError("no such step")

    def start(key: int, part: Path) -> FakeTransfer:
        raise RuntimeError("no more threads")

    cases = ((uses, Origin().start, "no such step"), (uses_of([[0]]), start, "no more threads"))
    for number, (order, begin, reason) in enumerate(cases):
        cache = SliceCache(tmp_path / str(number), room_for(2))
        feed = SliceFeed(cache, NAMES[:1], np.array([SIZE]), order, 1, begin)
        closing.append(feed)
        feed.seek(0)
        with pytest.raises(UsageError, match=reason):
            feed.acquire(0, 1)


def test_seeking_back_and_far_ahead(tmp_path: Path, closing: list[SliceFeed]) -> None:
    steps = [[key] for key in range(10)]
    origin = Origin()
    feed = feed_of(tmp_path, steps, 3, origin)
    closing.append(feed)
    feed.seek(5)
    read(feed, steps, 5)
    feed.seek(0)
    read(feed, steps, 0, 4)
    feed.seek(9)
    read(feed, steps, 9)
    feed.seek(1)
    read(feed, steps, 1)
    with pytest.raises(UsageError, match="Use seek to go back"):
        feed.advance(3)
    assert feed.cache.used_bytes() <= feed.cache.budget_bytes


def test_what_is_needed_now_comes_before_what_is_on_its_way(tmp_path: Path, closing: list[SliceFeed]) -> None:
    steps = [[0, 1], *([key] for key in range(1, 10))]
    origin = Origin(at_once=False)
    feed = SliceFeed(
        SliceCache(tmp_path, 2 * part_bytes(SIZE)), NAMES[:10], np.full(10, SIZE), uses_of(steps), 10, origin.start,
    )  # fmt: skip
    closing.append(feed)
    feed.seek(0)
    until(lambda: origin.started == [0, 1], "the first two are started")
    feed.seek(7)
    waiting = threading.Thread(target=feed.acquire, args=(7, 8))
    waiting.start()
    until(lambda: 7 in origin.started, "others give way")
    assert origin.transfers[0].error is not None and origin.transfers[1].error is not None
    origin.end(7)
    waiting.join(10)
    assert not waiting.is_alive()


def test_exactly_the_slices_of_a_step_fit(tmp_path: Path, closing: list[SliceFeed]) -> None:
    steps = [[0, 1, 2], [2, 3, 4], [0, 4, 5], [5, 1, 3], [3, 2, 0]]
    feed = feed_of(tmp_path, steps, 3, Origin())
    closing.append(feed)
    feed.seek(0)
    for step, keys in enumerate(steps):
        paths = feed.acquire_all(keys, step + 1)
        assert [path.read_bytes() for path in paths] == [CONTENTS[key] for key in keys]
        feed.advance(step + 1)


def test_a_step_that_cannot_fit_says_so(
    tmp_path: Path, closing: list[SliceFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cache.planner.TIMEOUT_S", 0.3)
    feed = feed_of(tmp_path, [[0, 1, 2]], 2, Origin())
    closing.append(feed)
    feed.seek(0)
    with pytest.raises(UsageError, match=r"no room for 1002 bytes .* budget 2002, 2000 in use .* Raise the budget"):
        feed.acquire_all([0, 1, 2], 1)
    assert feed.acquire(0, 1).exists()  # and the feed goes on


def test_windows_bridged_too_coarsely_are_planned_exactly(tmp_path: Path, closing: list[SliceFeed]) -> None:
    steps = [[step % 4] for step in range(60)]
    origin = Origin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uses_module, "_CHUNK_INTERVALS", 1)
        feed = feed_of(tmp_path, steps, 2, origin, 4)
        closing.append(feed)
        feed.seek(0)
        read(feed, steps)  # And the bytes are compared.
    assert set(origin.started) == set(range(4)) and feed.stats()["failed"] == 0


# What is kept


def test_the_same_slice_under_two_keys_is_fetched_once(tmp_path: Path, closing: list[SliceFeed]) -> None:
    origin = Origin()
    names = np.frombuffer(bytes.fromhex("".join([NAMES[0], NAMES[1], NAMES[0]])), np.uint8).reshape(3, 32)
    feed = SliceFeed(
        SliceCache(tmp_path, room_for(2)), names, np.full(3, SIZE), uses_of([[2], [1], [0]]), 3, origin.start,
    )  # fmt: skip
    closing.append(feed)
    feed.seek(0)
    assert feed.acquire(2, 1) == feed.acquire(0, 3) == tmp_path / NAMES[0]
    feed.acquire(1, 2)
    assert sorted(origin.started) == [0, 1] and feed.is_cached(2)
