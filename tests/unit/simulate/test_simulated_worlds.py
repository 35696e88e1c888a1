"""Small worlds of every kind hold the laws."""

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.cli import main
from forebay.simulate import Scenario, leasing, simulate

_SMALL = {"workers": 8, "slices": 24, "samples": 64, "speed": 4.0, "exchange_s": 3.0, "lease_s": 10.0}


@settings(max_examples=6)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.25, 0.5]),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 2),
    st.integers(0, 1),
    st.sampled_from([0.0, 0.1]),
)
@example(4856, 0.0, 0.3, 2, 1, 0.0)  # One is cut off to the end and does not hear that its lease expired.
def test_every_sample_is_used_exactly_once(seed, churn, liars, restarts, partitions, lost):
    world = Scenario(
        **_SMALL, seed=seed, churn=churn, liars=liars, restarts=restarts, partitions=partitions, lost=lost,
        partition_s=25.0,
    )  # fmt: skip
    result = simulate(world)
    assert result.ok, result.to_json()
    if not restarts and result.counts["longest_silence_s"] < world.lease_s:  # No live worker loses a lease.
        assert result.counts["wasted_by_living"] == 0, result.to_json()


def test_a_request_that_comes_twice_is_answered_twice(monkeypatch):
    """Connections close before the reply, and the transport sends the same attempt again. Without the first reply kept
    for it, the scheduler refuses the repeat as late, the workers end, and samples stay unused."""
    world = Scenario(**_SMALL, lost=0.2, seed=1)
    result = simulate(world)
    assert result.ok, result.to_json()
    monkeypatch.setattr(leasing._Scheduler, "_repeat", lambda *_: None)
    result = simulate(world)
    assert not result.ok and result.usage.missing > 0
    assert "workers ended: exchange: attempt" in result.fault, result.to_json()


def test_the_same_seed_gives_the_same_bytes():
    world = Scenario(**_SMALL, churn=0.5, seed=3)
    assert json.dumps(simulate(world).to_json()) == json.dumps(simulate(world).to_json())


def test_a_scheduler_that_loses_uses_is_caught(monkeypatch):
    """The record is independent: a journal that forgets is seen as samples used again or lost."""
    real = leasing._Scheduler._keep

    def forgets(self, events):
        real(self, [event for event in events if type(event).__name__ != "UsesRecorded"])

    monkeypatch.setattr(leasing._Scheduler, "_keep", forgets)
    assert not simulate(Scenario(**_SMALL, restarts=4, seed=1)).ok


def test_the_command_reads_a_scenario_and_prints_one_line_of_json(tmp_path, capsys):
    file = tmp_path / "scenario.toml"
    file.write_text("workers = 99\nsamples = 32\nliars = 0.2\n")
    args = f"simulate --workers 6 --slices 12 --churn 0.2 --scenario {file} --json".split()
    assert main(args) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ok"] and result["missing"] == result["repeated"] == 0
    assert result["samples"] == 12 * 32 and result["scenario"]["workers"] == 6
    file.write_text("lairs = 0.2\n")
    assert main(args) == 2
    assert "lairs" in capsys.readouterr().err


def test_a_run_that_fails_says_how_to_repeat_it(monkeypatch, capsys):
    monkeypatch.setattr(leasing._Scheduler, "fault", lambda self: "broken")
    assert main(["simulate", "--workers", "2", "--slices", "4", "--seed", "5"]) == 1
    shown = capsys.readouterr()
    assert "broken" in shown.out and "workers = 2, slices = 4, seed = 5" in shown.err
