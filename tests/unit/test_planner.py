"""What is fetched equals the fewest possible, by brute force; the next uses are the run's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.cache import planned_use as uses_module
from forebay.cache.cache import Reservation, SliceCache
from forebay.cache.planned_use import PlannedUses
from forebay.cache.planner import Planner
from support.feed_fakes import NAMES, SIZE, Origin, room_for, uses_of


def needed(steps: list[list[int]], ahead: int) -> list[frozenset[int]]:
    """What has to be here before each step: what it reads, and of the rest what is read next, `ahead` slices."""
    sets = []
    for step, keys in enumerate(steps):
        following = {
            key: next(index for index in range(step, len(steps)) if key in steps[index])
            for key in {key for later in steps[step:] for key in later}
        }
        sets.append(
            frozenset(keys)
            | {
                key
                for key, index in following.items()
                if index > step and sum(step < other <= index for other in following.values()) <= ahead
            }
        )
    return sets


def fewest_fetches(sets: list[frozenset[int]], slices: int) -> int:
    """By trying everything: what is kept after each step is any subset that fits."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for expected in sets:
        following: dict[frozenset[int], int] = {}
        for current, fetched in best.items():
            total = fetched + len(expected - current)
            others = current - expected
            for retained in itertools.combinations(sorted(others), min(len(others), slices - len(expected))):
                state = expected | frozenset(retained)
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
            index = max(0, len(steps) - draw(st.integers(0, 1)))
            for step in range(index, index + draw(st.integers(1, 2))):
                if step == len(steps):
                    steps.append([])
                steps[step].append(key)
    widest = max(len(set(keys)) for keys in steps)
    prefetch = draw(st.integers(0, 2))
    return steps, draw(st.integers(widest + prefetch, widest + prefetch + 2)), prefetch


@settings(max_examples=60, deadline=None)
@given(runs())
def test_no_order_of_fetching_needs_fewer(
    tmp_path_factory: pytest.TempPathFactory, run: tuple[list[list[int]], int, int]
) -> None:
    steps, slices, prefetch = run
    origin, ended = Origin(), []
    cache = SliceCache(tmp_path_factory.mktemp("cache"), slices * SIZE + SIZE // 2)
    planner = Planner(
        cache, NAMES[:6], np.full(6, SIZE), uses_of(steps), len(steps), origin.start,
        ended.append, horizon_bytes=prefetch * SIZE, clock=lambda: 0.0,
    )  # fmt: skip
    planner.seek(0)
    sets = needed(steps, prefetch)
    for step, keys in enumerate(steps):
        before = None
        while before != (len(origin.started), len(ended)):
            before = (len(origin.started), len(ended))
            finished = ended.copy()
            ended.clear()
            planner.update(step, keys, finished, [])
        assert sets[step] <= {NAMES.index(name) for name in cache.list_slices()}
        assert cache.used_bytes() <= cache.budget_bytes
    planner.close()
    assert len(origin.started) == fewest_fetches(sets, slices)


def test_what_is_read_again_does_not_go_for_one_that_was_read_before_its_transfer_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, origin, ended = [[0, 1], [], [2], [1]], Origin(), list[int]()
    cache = SliceCache(tmp_path, room_for(2))
    planner = Planner(
        cache, NAMES[:3], np.full(3, SIZE), uses_of(steps), len(steps), origin.start,
        ended.append, horizon_bytes=2 * SIZE, clock=lambda: 0.0,
    )  # fmt: skip
    planner.seek(0)
    later: list[Callable[[], None]] = []
    release = Reservation.release
    monkeypatch.setattr(Reservation, "release", lambda one: later.append(lambda: release(one)))
    planner.update(0, [0, 1], [], [])
    assert cache.list_slices() == {NAMES[0], NAMES[1]} and ended == [0, 1]
    later.pop(1)()
    planner.update(1, [], [1], [])
    assert cache.list_slices() == {NAMES[0], NAMES[1]}
    later.pop()()
    monkeypatch.undo()
    planner.update(1, [], [0], [])
    assert cache.list_slices() == {NAMES[1], NAMES[2]} and origin.started == [0, 1, 2]
    planner.close()


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
        result = PlannedUses(uses_of(steps), len(steps), first, exact=exact)
        started = []
        while not result.is_complete:
            started += result.extend()
        firsts = {key: time_s for time_s, key in reversed(started)}
        assert [time_s for time_s, _ in started] == sorted(time_s for time_s, _ in started)
        for key in range(6):
            true = [time_s for time_s in range(first, len(steps)) if key in steps[time_s]]
            assert firsts.get(key) == (true[0] if true else None)
            for now in range(first, len(steps)):
                reported, remaining = result.next_use(key, now), [time_s for time_s in true if time_s >= now]
                if result.is_bridged and remaining:
                    assert reported is not None and now <= reported <= remaining[0]
                else:
                    assert reported == (remaining[0] if remaining else None)
