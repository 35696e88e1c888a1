"""Feeds that share a cache, closed, forgotten or forked."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.cache.cache import SliceCache
from forebay.cache.prefetch import SliceFeed
from forebay.errors import UsageError
from support.calibration import scaled
from support.feed_fakes import CONTENTS, NAMES, SIZE, Origin, feed_of, read, room_for, until


@pytest.fixture
def closing() -> Iterator[list[SliceFeed]]:
    feeds: list[SliceFeed] = []
    yield feeds
    for feed in feeds:
        feed.close()


# Several processes


def test_two_fetch_each_slice_once(tmp_path: Path, closing: list[SliceFeed]) -> None:
    steps = [[key] for key in range(8)]
    origins = [Origin(), Origin()]
    feeds = [feed_of(tmp_path, steps, 10, origin, 8) for origin in origins]
    closing += feeds
    readers = [threading.Thread(target=lambda feed=feed: (feed.seek(0), read(feed, steps))) for feed in feeds]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(20)
        assert not reader.is_alive()
    assert sorted(origins[0].started + origins[1].started) == list(range(8))


def test_two_that_fit_one_at_a_time_take_turns(tmp_path: Path, closing: list[SliceFeed]) -> None:
    runs = [[[0, 1, 2], [3, 4, 5]] * 3, [[6, 7, 8], [9, 10, 11]] * 3]
    failed: list[BaseException] = []

    def consume(steps: list[list[int]]) -> None:
        feed = feed_of(tmp_path, steps, 4, Origin())
        closing.append(feed)
        try:
            feed.seek(0)
            for step, keys in enumerate(steps):
                for path, key in zip(feed.acquire_all(keys, step + 1), keys):
                    assert path.read_bytes() == CONTENTS[key]
                assert feed.cache.used_bytes() <= feed.cache.budget_bytes
                feed.advance(step + 1)
        except (AssertionError, UsageError, OSError) as error:
            failed.append(error)
        finally:
            feed.close()

    readers = [threading.Thread(target=consume, args=(steps,)) for steps in runs]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
        assert not reader.is_alive() and not failed


def test_two_that_hold_what_the_other_needs_do_not_wait_forever(
    tmp_path: Path, closing: list[SliceFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cache.planner.TIMEOUT_S", 0.5)
    feeds = [feed_of(tmp_path, [[key], [key, key + 1]], 2, Origin()) for key in (0, 2)]
    closing += feeds
    for key, feed in zip((0, 2), feeds):
        feed.seek(0)
        feed.acquire(key, 2)
    for feed in feeds:
        feed.advance(1)
    errors: list[Exception] = []

    def ask(feed: SliceFeed, key: int) -> None:
        try:
            feed.acquire(key, 2)
        except UsageError as error:
            errors.append(error)
            feed.close()

    readers = [threading.Thread(target=ask, args=args) for args in zip(feeds, (1, 3))]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(20)
        assert not reader.is_alive()
    assert 1 <= len(errors) <= 2 and "wait for each other" in str(errors[0])


def test_a_slice_evicted_by_another_is_fetched_again(tmp_path: Path, closing: list[SliceFeed]) -> None:
    origin = Origin()
    feed = feed_of(tmp_path, [[0], [1], [0]], 2, origin)
    closing.append(feed)
    feed.seek(0)
    feed.acquire(0, 1)
    until(lambda: feed.is_cached(1), "the next is here")
    feed.advance(1)
    (tmp_path / NAMES[1]).unlink()
    assert feed.acquire(1, 2).read_bytes() == CONTENTS[1]
    assert origin.started == [0, 1, 1]
    until(lambda: feed.stats()["repeated_fetches"] == 1, "it is counted")


# Closing, threads, forks


def test_close_is_quick_and_ends_a_wait(tmp_path: Path) -> None:
    origin = Origin(at_once=False, deaf=True)
    feed = feed_of(tmp_path, [[0, 1]], 3, origin)
    feed.seek(0)
    until(lambda: len(origin.started) == 2, "they are started")
    ended: list[str] = []

    def ask() -> None:
        try:
            feed.acquire(0, 1)
        except UsageError as error:
            ended.append(str(error))

    waiting = threading.Thread(target=ask)
    waiting.start()
    time.sleep(0.05)
    began = time.monotonic()
    feed.close()
    feed.close()
    assert time.monotonic() - began < scaled(1.0)
    waiting.join(10)
    assert ended == ["feed: it is closed. Make another."]
    # Something may still write: nobody else gets the right to until it has ended.
    cache = SliceCache(tmp_path, room_for(2))
    assert cache.try_reserve(NAMES[0], SIZE).reason == "busy"
    origin.end(0)
    # What came whole after all is not thrown away.
    assert cache.try_reserve(NAMES[0], SIZE).reason == "cached"
    assert cache.path_of(NAMES[0]).read_bytes() == CONTENTS[0]
    with pytest.raises(UsageError, match="it is closed"):
        feed.seek(0)


def test_a_forgotten_feed_ends(tmp_path: Path) -> None:
    feed = feed_of(tmp_path, [[0]], 2, Origin())
    feed.seek(0)
    feed.acquire(0, 1)
    thread = feed._thread
    assert thread is not None and thread.daemon
    del feed
    thread.join(5)
    assert not thread.is_alive()
    assert not list((tmp_path / "futures").iterdir())


def test_before_seek(tmp_path: Path) -> None:
    feed = feed_of(tmp_path / "cache", [[0]], 2, Origin())
    with pytest.raises(UsageError, match="expected seek before acquire"):
        feed.acquire(0, 1)
    feed.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_makes_its_own(tmp_path: Path, closing: list[SliceFeed]) -> None:
    steps = [[0], [1], [2]]
    feed = feed_of(tmp_path, steps, 2, Origin())
    closing.append(feed)
    feed.seek(0)
    feed.acquire(0, 1)
    if (child := os.fork()) == 0:
        code = 1
        try:
            signal.alarm(20)
            with pytest.raises(UsageError, match="made before a fork"):
                feed.acquire(0, 1)
            feed.close()
            other = feed_of(tmp_path, steps, 2, Origin())
            other.seek(1)
            read(other, steps, 1)
            other.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert feed.is_cached(0)  # the parent's pin outlived the child
    read(feed, steps)
