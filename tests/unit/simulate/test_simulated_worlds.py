"""Small worlds of every kind hold the laws; set FOREBAY_WORLDS=200 for as many random ones (default 6)."""

from __future__ import annotations

import json
import os
from statistics import median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.cli import main
from forebay.simulate import SimulationSettings, leasing, simulate
from forebay.simulate.faults import draw

_NUM_WORLDS = int(os.environ.get("FOREBAY_WORLDS", "6"))
_SMALL = {"workers": 8, "slices": 24, "samples": 64, "speed": 4.0, "exchange_s": 3.0, "lease_s": 10.0}


@settings(max_examples=_NUM_WORLDS, deadline=None, derandomize=_NUM_WORLDS < 10)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.25, 0.5]),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 2),
    st.integers(0, 1),
    st.sampled_from([0.0, 0.1]),
)
@example(4856, 0.0, 0.3, 2, 1, 0.0)  # One is cut off to the end and does not hear that its lease expired.
def test_every_sample_is_used_exactly_once(
    seed: int, churn: float, liars: float, restarts: int, partitions: int, lost: float
) -> None:
    world = SimulationSettings(
        **_SMALL, seed=seed, churn=churn, liars=liars, restarts=restarts, partitions=partitions, lost=lost,
        partition_s=25.0,
    )  # fmt: skip
    result = simulate(world)
    assert result.ok, result.to_text()
    if not restarts and result.counts["longest_silence_s"] < world.lease_s:  # No live worker loses a lease.
        assert result.counts["wasted_by_living"] == 0, result.to_text()


@pytest.mark.parametrize("seed", range(3))
def test_a_request_that_comes_twice_is_answered_twice(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections close before the reply, and the transport sends the same attempt again. Without the first reply kept
    for it, the scheduler refuses the repeat as late, the workers end, and samples stay unused."""
    world = SimulationSettings(**_SMALL, lost=0.2, seed=seed)
    result = simulate(world)
    assert result.ok, result.to_text()
    monkeypatch.setattr(leasing._Scheduler, "_repeat", lambda *_: None)
    result = simulate(world)
    assert not result.ok and result.usage.missing > 0
    assert "workers ended: exchange: attempt" in result.fault, result.to_text()


def test_as_many_slices_are_fetched_at_once_as_told() -> None:
    """A slow link: with one fetch at a time the first slice is here sooner than with four that share the link."""
    world = {**_SMALL, "workers": 1, "slices": 8, "spread": 0.0, "down": 1e6, "slice_bytes": 16_000_000}
    one, four = (_first_use(SimulationSettings(**world, fetches=fetches)) for fetches in (1, 4))  # type: ignore[arg-type]
    assert 16 < one < 20 and 32 < four < 36  # It asks for two leases before it knows its speed.


def _first_use(settings: SimulationSettings) -> float:
    assert simulate(settings).ok
    world = leasing._World(settings, draw(settings, 1.0))
    assert world.clock.run(lambda: any(worker._step for worker in world.workers.values()), 100.0)
    return world.clock.now


def test_without_faults_nothing_is_wasted_and_the_bound_is_near() -> None:
    results = [simulate(SimulationSettings(**{**_SMALL, "slices": 80, "seed": seed})) for seed in range(5)]
    for result in results:
        assert result.ok
        assert result.usage.wasted == 0
        assert result.origin_ratio == pytest.approx(1.0)
        assert result.time_ratio >= 1.0
    assert median(result.time_ratio for result in results) < 1.2


def test_the_same_seed_gives_the_same_bytes() -> None:
    world = SimulationSettings(**_SMALL, churn=0.5, seed=3)
    one, two = simulate(world), simulate(world)
    assert json.dumps(one.to_json()) == json.dumps(two.to_json())


def test_a_scheduler_that_loses_uses_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is independent: a journal that forgets is seen as samples used again or lost."""
    real = leasing._Scheduler._keep

    def forgets(self: leasing._Scheduler, events: list[object]) -> None:
        real(self, [event for event in events if type(event).__name__ != "UsesRecorded"])  # type: ignore[misc]

    monkeypatch.setattr(leasing._Scheduler, "_keep", forgets)
    result = simulate(SimulationSettings(**_SMALL, restarts=4, outage_s=1.0, seed=1))
    assert not result.ok


def test_the_command_prints_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["simulate", "--workers", "6", "--slices", "12", "--samples", "32", "--churn", "0.2", "--json"]
    assert main(args) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["ok"] and said["missing"] == said["repeated"] == 0


def test_a_sample_after_the_deadline_fails_the_run_and_tells_how_to_see_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["simulate", "--workers", "2", "--slices", "4", "--samples", "32", "--seed", "5", "--deadline-s", "3"]
    assert main(args) == 1
    assert "forebay simulate --workers 2 --slices 4 --seed 5" in capsys.readouterr().out
