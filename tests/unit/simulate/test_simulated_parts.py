"""Virtual time, fair links, the record and the bounds: what the simulated worlds stand on."""

import numpy as np
import pytest

from forebay.simulate.network import Clock, Links
from forebay.simulate.scenario import Scenario, UsageRecord, UsedRange, draw, lease_bound


def test_a_transfer_gets_what_slow_links_leave_and_speeds_up_when_another_ends():
    clock, ended = Clock(), []
    links = Links(clock)
    origin, item, two = links.add(10.0, 1.0), links.add(1.0, 4.0), links.add(1.0, 100.0)
    links.start(origin, item, 10.0, lambda: ended.append(clock.now))
    links.start(origin, two, 30.0, lambda: ended.append(clock.now))
    clock.run(lambda: False, 100.0)
    assert ended == pytest.approx([2.5, 4.0])
    assert links.sent[origin] == pytest.approx(40.0)


def _use(start, stop, time_s=1.0, worker=0):
    return UsedRange(0, 0, start, stop, time_s, worker)


def test_the_record_distinguishes_lost_repeated_and_wasted_samples():
    samples = np.array([8], np.int64)
    full = [_use(0, 8)]
    assert UsageRecord(samples, 1, full, full).check().ok
    assert UsageRecord(samples, 1, [_use(0, 6)], [_use(0, 6)]).check().missing == 2
    assert UsageRecord(samples, 1, full, [_use(0, 6)]).check().missing == 2  # used, and not on record
    assert UsageRecord(samples, 1, [*full, _use(4, 6, worker=1)], full).check().repeated == 2
    wasted = UsageRecord(samples, 1, [*full, _use(4, 6, worker=1)], full, [_use(4, 6, worker=1)]).check()
    assert wasted.ok and wasted.wasted == 2


def test_bounds_hold_for_worlds_that_can_be_computed_by_hand():
    world = Scenario(
        workers=4, slices=8, samples=10, spread=0.0, speed=1.0, up=1e6, down=1e6, slice_bytes=1_000_000,
        origin_up=1e9, latency_s=1e-6,
    )  # fmt: skip
    assert max(lease_bound(world, draw(world, 1.0).machines).values()) == pytest.approx(
        1 + 20, rel=0.01
    )  # a slice's download, then 20 each
