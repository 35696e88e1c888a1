"""A small job beside an attacker, whose scheduler is killed: two workers, some seconds."""

from slow.network.strangers_day import run_day


def test_a_small_job_beside_an_attacker_is_used_once(tmp_path):
    day = run_day(tmp_path, 0.1, workers=2)
    assert day.faults == []
    assert sum(counts.get("rounds", 0) for counts in day.attacks.values()) > 0
