"""Virtual time, fair links, the record and the bounds: what the simulated worlds stand on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from forebay.simulate.network import Clock, Links, fair_rates
from forebay.simulate.scenario import Scenario, UsageRecord, UsedRange, draw, lease_bound


def test_events_come_in_order_of_their_moment_then_of_their_making() -> None:
    clock, seen = Clock(), list[str]()
    clock.call_at(2.0, lambda: seen.append("late"))
    clock.call_at(1.0, lambda: seen.append("first"))
    clock.call_at(1.0, lambda: seen.append("second"))
    assert not clock.run(lambda: False, 10.0)
    assert seen == ["first", "second", "late"]
    assert clock.now == 2.0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12), st.integers(0, 99))
def test_no_link_is_overfull_and_every_transfer_has_a_full_one(pairs: list[tuple[int, int]], seed: int) -> None:
    chance = np.random.default_rng(seed)
    up, down = chance.uniform(1, 9, 5), chance.uniform(1, 9, 5)
    a, b = (np.array(side) for side in zip(*pairs))
    rates = fair_rates(a, b, up, down)
    used_up, used_down = np.bincount(a, rates, 5), np.bincount(b, rates, 5)
    assert (used_up <= up + 1e-6).all() and (used_down <= down + 1e-6).all()
    assert ((used_up[a] >= up[a] - 1e-6) | (used_down[b] >= down[b] - 1e-6)).all()


def test_a_transfer_speeds_up_when_another_ends() -> None:
    clock, ended = Clock(), list[float]()
    links = Links(clock)
    origin, item, two = links.add(10.0, 1.0), links.add(1.0, 100.0), links.add(1.0, 100.0)
    links.start(origin, item, 10.0, lambda: ended.append(clock.now))
    links.start(origin, two, 30.0, lambda: ended.append(clock.now))
    clock.run(lambda: False, 100.0)
    assert ended == pytest.approx([2.0, 4.0])
    assert links.sent[origin] == pytest.approx(40.0)


def _use(start: int, stop: int, at: float = 1.0, worker: int = 0) -> UsedRange:
    return UsedRange(0, 0, start, stop, at, worker)


def test_the_record_distinguishes_lost_repeated_and_wasted_samples() -> None:
    samples = np.array([8], np.int64)
    full = [_use(0, 8)]
    assert UsageRecord(samples, 1, full, full).check().ok
    assert UsageRecord(samples, 1, [_use(0, 6)], [_use(0, 6)]).check().missing == 2
    assert UsageRecord(samples, 1, full, [_use(0, 6)]).check().missing == 2  # used, and not on record
    assert UsageRecord(samples, 1, [*full, _use(4, 6, worker=1)], full).check().repeated == 2
    wasted = UsageRecord(samples, 1, [*full, _use(4, 6, worker=1)], full, [_use(4, 6, worker=1)]).check()
    assert wasted.ok and wasted.wasted == 2


def test_bounds_hold_for_worlds_that_can_be_computed_by_hand() -> None:
    world = Scenario(
        workers=4, slices=8, samples=10, spread=0.0, speed=1.0, up=1e6, down=1e6, slice_bytes=1_000_000,
        origin_up=1e9, latency_s=1e-6,
    )  # fmt: skip
    machines = draw(world, 1.0).machines
    assert max(lease_bound(world, machines).values()) == pytest.approx(
        1 + 20, rel=0.01
    )  # a slice's download, then 20 each


def test_impossible_scenarios_are_refused() -> None:
    for wrong in ({"churn": 2.0}, {"workers": 0}, {"lost": 1.0}, {"speeed": 1.0}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            Scenario.model_validate(wrong)
