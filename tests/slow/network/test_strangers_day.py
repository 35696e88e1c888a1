"""The benchmark of a job beside an attacker, at its smallest: two workers, some seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.strangers_day import ATTACKS, BESIDE, LEFT_OUT, TESTS, World

from support.calibration import scaled

pytest.importorskip("libtorrent")


def test_a_small_job_beside_an_attacker_is_used_once(tmp_path: Path) -> None:
    world = World(tmp_path, 0.05, workers=2)
    try:
        day = world.run("beside", True, scaled(90.0), print)
    finally:
        world.close()
    assert day.faults == [] and day.exits["standby"] == day.exits["worker0"] == day.exits["worker1"] == 0
    assert '"missing": 0, "repeated": 0' in day.verified
    assert sum(counts.get("rounds", 0) for counts in day.attacks.values()) > 0


def test_every_test_of_an_attack_is_run_or_said_to_be_left_out() -> None:
    words = [word for _, text in ATTACKS.values() for word in text.split()] + BESIDE.split()
    for path in (TESTS / "attacks").glob("test_*.py"):
        names = [path.stem] if path.stem in LEFT_OUT else re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
        for name in names:
            assert sum(word in name for word in [*words, *LEFT_OUT]) == 1, name
