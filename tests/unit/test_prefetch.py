"""What is fetched and evicted, against brute force; waiting, failing, seeking and closing of a feed."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import NetworkError, UsageError
from millrace.store import uses as uses_module
from millrace.store.cache import SliceCache
from millrace.store.planner import Planner
from millrace.store.prefetch import SliceFeed
from millrace.store.room import part_bytes
from millrace.store.run_slices import RunSlices
from millrace.store.uses import Uses

SIZE = 1000
CONTENTS = [bytes([65 + key]) * SIZE for key in range(16)]
NAMES = [hashlib.sha256(content).hexdigest() for content in CONTENTS]


class FakeTransfer:
    """Writes real bytes when it is told to."""

    def __init__(self, key: int, part: Path) -> None:
        self.key, self.part = key, part
        self.done = threading.Event()
        self.error: Exception | None = None
        self.received = 0
        self.callbacks: list[Callable[[Any], None]] = []

    def on_done(self, callback: Callable[[Any], None]) -> None:
        if self.done.is_set():
            callback(self)
        else:
            self.callbacks.append(callback)

    def end(self, error: Exception | None = None) -> None:
        if self.done.is_set():
            return
        self.error = error
        if error is None:
            self.part.write_bytes(CONTENTS[self.key])
            self.received = SIZE
        self.done.set()
        for callback in self.callbacks:
            callback(self)


@dataclass
class Origin:
    """Starts transfers: ended at once, or held until `end`."""

    at_once: bool = True
    failing: set[int] = field(default_factory=set)
    deaf: bool = False  # to being cancelled
    started: list[int] = field(default_factory=list)
    transfers: dict[int, FakeTransfer] = field(default_factory=dict)

    def start(self, key: int, part: Path) -> FakeTransfer:
        transfer = FakeTransfer(key, part)
        self.started.append(key)
        if key in self.failing:
            transfer.end(NetworkError("the origin is gone"))
        elif self.at_once:
            transfer.end()
        self.transfers[key] = transfer
        return transfer

    def cancel(self, transfer: FakeTransfer) -> None:
        if not self.deaf:
            transfer.end(NetworkError("cancelled"))

    def end(self, key: int) -> None:
        self.transfers[key].end()


def uses_of(steps: list[list[int]]) -> Callable[[int, int], tuple[Any, Any]]:
    """Distinct (steps, keys) of a list of what each step reads."""

    def uses(start: int, stop: int) -> tuple[Any, Any]:
        pairs = [(step, key) for step in range(start, stop) for key in dict.fromkeys(steps[step])]
        table = np.array(pairs, np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    return uses


def room_for(slices: int) -> int:
    return slices * SIZE + part_bytes(SIZE) - SIZE


def feed_of(
    directory: Path, steps: list[list[int]], slices: int, origin: Origin, num_keys: int = len(NAMES), **options: Any
) -> SliceFeed[FakeTransfer]:
    return SliceFeed(
        SliceCache(directory, room_for(slices)), NAMES[:num_keys], np.full(num_keys, SIZE), uses_of(steps), len(steps),
        origin.start, origin.cancel, **options,
    )  # fmt: skip


def until(condition: Callable[[], object], what: str, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def read(feed: SliceFeed[Any], steps: list[list[int]], start: int = 0, stop: int | None = None) -> None:
    for step in range(start, len(steps) if stop is None else stop):
        for key in steps[step]:
            assert feed.acquire(key, step + 1).read_bytes() == CONTENTS[key]
        feed.advance(step + 1)


@pytest.fixture
def closing() -> Iterator[list[SliceFeed[Any]]]:
    feeds: list[SliceFeed[Any]] = []
    yield feeds
    for feed in feeds:
        feed.close()


# What is fetched


def needed(steps: list[list[int]], ahead: int) -> list[frozenset[int]]:
    """What has to be here before each step: what it reads, and of the rest what is read next, `ahead` slices."""
    sets = []
    for step, keys in enumerate(steps):
        following = {
            key: next(at for at in range(step, len(steps)) if key in steps[at])
            for key in {key for later in steps[step:] for key in later}
        }
        sets.append(
            frozenset(keys)
            | {
                key
                for key, at in following.items()
                if at > step and sum(step < other <= at for other in following.values()) <= ahead
            }
        )
    return sets


def fewest_fetches(sets: list[frozenset[int]], slices: int) -> int:
    """By trying everything: what is kept after each step is any subset that fits."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for wanted in sets:
        following: dict[frozenset[int], int] = {}
        for held, fetched in best.items():
            total = fetched + len(wanted - held)
            others = held - wanted
            for kept in itertools.combinations(sorted(others), min(len(others), slices - len(wanted))):
                state = wanted | frozenset(kept)
                following[state] = min(following.get(state, total), total)
        best = following
    return min(best.values())


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[list[int]], int, int]:
    """Epochs of slices in some order, read in overlapping runs of steps, a few at a time."""
    num_slices = draw(st.integers(2, 6))
    steps: list[list[int]] = []
    for _ in range(draw(st.integers(1, 3))):
        for key in draw(st.permutations(range(num_slices))):
            at = max(0, len(steps) - draw(st.integers(0, 1)))
            for step in range(at, at + draw(st.integers(1, 2))):
                if step == len(steps):
                    steps.append([])
                steps[step].append(key)
    widest = max(len(set(keys)) for keys in steps)
    ahead = draw(st.integers(0, 2))
    return steps, draw(st.integers(widest + ahead, widest + ahead + 2)), ahead


@settings(max_examples=60, deadline=None)
@given(runs())
def test_no_order_of_fetching_needs_fewer(
    tmp_path_factory: pytest.TempPathFactory, run: tuple[list[list[int]], int, int]
) -> None:
    steps, slices, ahead = run
    origin, ended = Origin(), []
    cache = SliceCache(tmp_path_factory.mktemp("cache"), slices * SIZE + SIZE // 2)
    planner = Planner(
        cache, RunSlices.of(NAMES[:6], np.full(6, SIZE), uses_of(steps), len(steps)), origin.start, origin.cancel,
        ended.append, keep="budget", horizon_bytes=ahead * SIZE, pass_end=None, patience_s=1, clock=lambda: 0.0,
    )  # fmt: skip
    planner.seek(0)
    sets = needed(steps, ahead)
    for step, keys in enumerate(steps):
        before = None
        while before != (len(origin.started), len(ended)):
            before = (len(origin.started), len(ended))
            finished = ended.copy()
            ended.clear()
            planner.look(step, keys, finished, [])
        assert sets[step] <= {NAMES.index(name) for name in cache.held()}
        assert cache.used_bytes() <= cache.budget_bytes
    planner.close()
    assert len(origin.started) == fewest_fetches(sets, slices)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=40),
    st.integers(0, 39),
    st.booleans(),
    st.integers(1, 8),
)
def test_next_uses_are_those_of_the_run(steps: list[list[int]], first: int, exact: bool, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uses_module, "_FIRST_STEPS", chunk)
        patch.setattr(uses_module, "_CHUNK_INTERVALS", 2)
        patch.setattr(uses_module, "_CHUNK_USES", 8)
        first = min(first, len(steps) - 1)
        found = Uses(uses_of(steps), len(steps), first, exact=exact)
        begun = []
        while not found.ended:
            begun += found.extend()
        firsts = {key: at for at, key in reversed(begun)}
        assert [at for at, _ in begun] == sorted(at for at, _ in begun)
        for key in range(6):
            true = [at for at in range(first, len(steps)) if key in steps[at]]
            assert firsts.get(key) == (true[0] if true else None)
            for now in range(first, len(steps)):
                told, left = found.next_use(key, now), [at for at in true if at >= now]
                if found.bridged and left:
                    assert told is not None and now <= told <= left[0]
                else:
                    assert told == (left[0] if left else None)


def test_a_cyclic_pass_keeps_what_fits(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
    steps = [[key] for _ in range(4) for key in range(10) for _ in range(3)]
    origin = Origin()
    feed = feed_of(tmp_path, steps, 6, origin, 10, horizon_bytes=SIZE)
    closing.append(feed)
    feed.seek(0)
    read(feed, steps)
    assert len(origin.started) <= 10 + 3 * 6  # four of ten survive each pass; the least recently used would keep none


# The consumer


def test_a_slice_is_there_before_it_is_needed(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
    origin = Origin(at_once=False)
    feed = feed_of(tmp_path, [[0], [0], [1], [2]], 4, origin)
    closing.append(feed)
    feed.seek(0)
    until(lambda: len(origin.started) == 3, "all that fits is started")
    assert origin.started == [0, 1, 2]  # the nearest first
    assert not feed.held(0)
    origin.end(0)
    assert feed.acquire(0, 2).read_bytes() == CONTENTS[0]
    assert feed.held(0) and not feed.held(1)
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
    tmp_path: Path, closing: list[SliceFeed[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    origin = Origin(at_once=False)
    feed = feed_of(tmp_path, [[0], [1]], 3, origin)
    closing.append(feed)
    caplog.set_level(logging.WARNING, "millrace")
    feed.seek(0)
    until(lambda: len(origin.started) == 2, "both are started")
    origin.end(0)
    feed.acquire(0, 1)
    feed.advance(1)
    origin.transfers[1].received = 250
    timer = threading.Timer(0.3, origin.end, [1])
    timer.start()
    feed.acquire(1, 2)
    timer.join()
    name = f"late: slice 1 ({NAMES[1][:12]}…) needed, "
    begin, end = [record.getMessage() for record in caplog.records]
    assert begin == name + "250 of 1000 bytes here (25%) at step 1. Waiting."
    assert end.startswith(name + "1000 of 1000 bytes here (100%) after 0.")
    assert feed.stats()["waited_s"] >= 0.25 and feed.stats()["late"] >= 1


def test_a_failure_is_told_to_who_needs_the_slice_only(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
    origin = Origin(failing={1})
    feed = feed_of(tmp_path, [[0], [1], [2]], 3, origin)
    closing.append(feed)
    feed.seek(0)
    feed.acquire(0, 1)
    until(lambda: feed.held(2), "the rest comes in spite of it")
    feed.advance(1)
    for _ in range(2):  # tried again each time it is asked for
        tries = origin.started.count(1)
        with pytest.raises(NetworkError, match=rf"slice 1 \({NAMES[1][:12]}…\) did not come: the origin is gone"):
            feed.acquire(1, 2)
        assert origin.started.count(1) == tries + 1
    origin.failing.clear()
    assert feed.acquire(1, 2).read_bytes() == CONTENTS[1]


def test_a_failure_is_tried_again_before_it_is_needed(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
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
    now[0] = 1.0
    until(lambda: feed.held(1), "it is tried after a second")
    assert feed.stats()["late"] == 0


def test_an_error_in_a_start_or_in_the_order_reaches_the_consumer(
    tmp_path: Path, closing: list[SliceFeed[Any]]
) -> None:
    def uses(start: int, stop: int) -> tuple[Any, Any]:
        raise UsageError("no such step")

    def start(key: int, part: Path) -> FakeTransfer:
        raise RuntimeError("no more threads")

    cases = ((uses, Origin().start, "no such step"), (uses_of([[0]]), start, "no more threads"))
    for number, (order, begin, reason) in enumerate(cases):
        cache = SliceCache(tmp_path / str(number), room_for(2))
        feed = SliceFeed(cache, NAMES[:1], np.array([SIZE]), order, 1, begin, Origin().cancel)
        closing.append(feed)
        feed.seek(0)
        with pytest.raises(UsageError, match=reason):
            feed.acquire(0, 1)


def test_seeking_back_and_far_ahead(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
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


def test_what_is_needed_now_comes_before_what_is_on_its_way(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
    steps = [[key] for key in range(10)]
    origin = Origin(at_once=False)
    feed = SliceFeed(
        SliceCache(tmp_path, 2 * part_bytes(SIZE)), NAMES[:10], np.full(10, SIZE), uses_of(steps), 10, origin.start,
        origin.cancel,
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


def test_exactly_the_slices_of_a_step_fit(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
    steps = [[0, 1, 2], [2, 3, 4], [0, 4, 5], [5, 1, 3], [3, 2, 0]]
    feed = feed_of(tmp_path, steps, 3, Origin())
    closing.append(feed)
    feed.seek(0)
    for step, keys in enumerate(steps):
        paths = feed.acquire_all(keys, step + 1)
        assert [path.read_bytes() for path in paths] == [CONTENTS[key] for key in keys]
        feed.advance(step + 1)


def test_a_step_that_cannot_fit_says_so(
    tmp_path: Path, closing: list[SliceFeed[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    feed = feed_of(tmp_path, [[0, 1, 2]], 2, Origin(), patience_s=0.3)
    closing.append(feed)
    feed.seek(0)
    with pytest.raises(UsageError, match=r"no room for 1002 bytes .* budget 2002, 2000 in use .* Raise the budget"):
        feed.acquire_all([0, 1, 2], 1)
    assert feed.acquire(0, 1).exists()  # and the feed goes on


def test_windows_bridged_too_coarsely_are_planned_exactly(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
    steps = [[step % 4] for step in range(60)]
    origin = Origin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uses_module, "_CHUNK_INTERVALS", 1)
        feed = feed_of(tmp_path, steps, 2, origin, 4, patience_s=0.5)
        closing.append(feed)
        feed.seek(0)
        read(feed, steps)


# What is kept


def test_window_deletes_what_the_epoch_has_read(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
    steps = [[key] for _ in range(2) for key in range(4) for _ in range(2)]
    gone: list[int] = []
    feed = feed_of(
        tmp_path, steps, 4, Origin(), 4, keep="window", horizon_bytes=SIZE, on_evict=gone.append,
        pass_end=lambda step: 8 if step < 8 else 16,
    )  # fmt: skip
    closing.append(feed)
    feed.seek(0)
    for step, keys in enumerate(steps):
        feed.acquire(keys[0], step + 1)
        feed.advance(step + 1)
        ahead = [key for later in steps[step + 1 :] for key in later]
        lean = set(ahead[:1] + [key for key in ahead if key != ahead[0]][:1])
        until(lambda lean=lean: {NAMES.index(name) for name in feed.cache.held()} <= lean, f"step {step}")
    assert gone == [0, 1, 2, 3] * 2 and feed.stats()["repeated_fetches"] == 4


def test_window_waits_for_the_other_processes(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
    steps = [[0], [1], [2], [3]]
    fast, slow = (
        feed_of(tmp_path, steps, 4, Origin(), 4, keep="window", horizon_bytes=0, pass_end=lambda step: 4)
        for _ in range(2)
    )
    closing += [fast, slow]
    slow.seek(0)
    slow.acquire(0, 1)
    until(lambda: list((tmp_path / "futures").iterdir()), "it is told")
    fast.seek(0)
    read(fast, steps)
    time.sleep(0.7)
    assert fast.cache.held() == set(NAMES[:4])
    slow.close()
    until(lambda: not fast.cache.held(), "nobody wants them any more")


def test_all_is_never_evicted_and_refused_if_it_does_not_fit(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
    with pytest.raises(UsageError, match=r"to keep all slices takes 4002 bytes, the budget is 3002"):
        feed_of(tmp_path, [[0]], 3, Origin(), 4, keep="all")
    with pytest.raises(UsageError, match="expected 'budget', 'window' or 'all', got 'some'"):
        feed_of(tmp_path, [[0]], 3, Origin(), 4, keep="some")
    with pytest.raises(UsageError, match="the largest slice takes 1002 bytes as it is fetched, the budget is 1000"):
        SliceFeed(SliceCache(tmp_path, 1000), NAMES[:1], np.array([1000]), uses_of([]), 0, *[lambda *_: None] * 2)
    with pytest.raises(UsageError, match="a size for each of 1, got 2"):
        SliceFeed(SliceCache(tmp_path, 5000), NAMES[:1], np.array([9, 9]), uses_of([]), 0, *[lambda *_: None] * 2)
    steps = [[key] for _ in range(3) for key in range(4)]
    origin = Origin()
    feed = feed_of(tmp_path, steps, 4, origin, 4, keep="all")
    closing.append(feed)
    feed.seek(0)
    read(feed, steps)
    assert origin.started == [0, 1, 2, 3]


def test_the_same_slice_under_two_keys_is_fetched_once(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
    origin = Origin()
    names = np.frombuffer(bytes.fromhex("".join([NAMES[0], NAMES[1], NAMES[0]])), np.uint8).reshape(3, 32)
    feed = SliceFeed(
        SliceCache(tmp_path, room_for(2)), names, np.full(3, SIZE), uses_of([[2], [1], [0]]), 3, origin.start,
        origin.cancel,
    )  # fmt: skip
    closing.append(feed)
    feed.seek(0)
    assert feed.acquire(2, 1) == feed.acquire(0, 3) == tmp_path / NAMES[0]
    feed.acquire(1, 2)
    assert sorted(origin.started) == [0, 1] and feed.held(2)


# Several processes


def test_two_fetch_each_slice_once(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
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


def test_two_that_fit_one_at_a_time_take_turns(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
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


def test_two_that_hold_what_the_other_needs_do_not_wait_forever(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
    feeds = [feed_of(tmp_path, [[key], [key, key + 1]], 2, Origin(), patience_s=0.5) for key in (0, 2)]
    closing += feeds
    for key, feed in zip((0, 2), feeds):
        feed.seek(0)
        feed.acquire(key, 2)
    for feed in feeds:
        feed.advance(1)
    errors: list[Exception] = []

    def ask(feed: SliceFeed[Any], key: int) -> None:
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


def test_a_slice_evicted_by_another_is_fetched_again(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
    gone: list[int] = []
    origin = Origin()
    feed = feed_of(tmp_path, [[0], [1], [0]], 2, origin, on_evict=gone.append)
    closing.append(feed)
    feed.seek(0)
    feed.acquire(0, 1)
    until(lambda: feed.held(1), "the next is here")
    feed.advance(1)
    (tmp_path / NAMES[1]).unlink()
    assert feed.acquire(1, 2).read_bytes() == CONTENTS[1]
    assert gone == [1] and origin.started == [0, 1, 1] and feed.stats()["repeated_fetches"] == 1


# Closing, threads, forks


def test_close_is_quick_and_ends_a_wait(tmp_path: Path) -> None:
    origin = Origin(at_once=False, deaf=True)
    feed = feed_of(tmp_path, [[0], [1]], 3, origin)
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
    assert time.monotonic() - began < 1.0
    waiting.join(10)
    assert ended == ["feed: it is closed. Make another."]
    # Something may still write: nobody else gets the right to until it has ended.
    cache = SliceCache(tmp_path, room_for(2))
    assert cache.try_reserve(NAMES[0], SIZE).why == "busy"
    origin.end(0)
    reserved = cache.try_reserve(NAMES[0], SIZE)
    reserved.release()
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
def test_a_forked_child_makes_its_own(tmp_path: Path, closing: list[SliceFeed[Any]]) -> None:
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
    assert feed.held(0)  # the parent's pin outlived the child
    read(feed, steps)
