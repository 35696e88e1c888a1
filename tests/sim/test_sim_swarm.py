"""Readers that all want everything: each living one gets every slice, and the origin sends each about once."""

from __future__ import annotations

import pytest

from forebay.simulate import Scenario
from forebay.simulate.scenario import draw
from support.swarm_readers import broadcast, swarm_bound


@pytest.mark.parametrize("seed", range(6))
def test_a_broadcast_reaches_all_and_the_origin_sends_again_only_what_was_given_up_for_lost(seed: int) -> None:
    """A download of more than a minute, over a slow link, is taken for lost: its slice may be sent again."""
    result = broadcast(Scenario(workers=8, slices=20, churn=0.0, seed=seed))
    assert result.ok
    assert 1.0 - 1e-9 <= result.origin_ratio <= 1.0 + result.counts["overdue"] / 20 + 1e-9
    assert seed == 0 or result.counts["overdue"] == 0


def test_the_bound_holds_for_a_world_that_can_be_computed_by_hand() -> None:
    world = Scenario(
        workers=4, slices=8, samples=10, spread=0.0, speed=1.0, up=1e6, down=1e6, slice_bytes=1_000_000,
        origin_up=1e9, latency_s=1e-6,
    )  # fmt: skip
    assert max(swarm_bound(world, draw(world, 1.0).machines).values()) == pytest.approx(8.0, rel=0.01)  # the link down
