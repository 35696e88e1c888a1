"""Times of tasks in bounded memory: quantiles within 5 %, the same of parts as of all, stragglers."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from forebay.prepare.executions import Execution, StepTimes, find_stragglers, merged_steps

KEY = ("text", "process_split")


def step_times(seconds: list[float]) -> StepTimes:
    times = StepTimes(*KEY)
    for number, value in enumerate(seconds):
        times.add(Execution(f"task {number}", value, "node7", 12))
    return times


def test_quantiles_are_true_and_parts_add_up() -> None:
    seconds = np.random.default_rng(7).lognormal(2.0, 1.5, 5000).tolist()
    times = step_times(seconds)
    for share in (0.05, 0.5, 0.95, 0.999):
        assert times.quantile(share) == pytest.approx(np.quantile(seconds, share), rel=0.06)
    assert len(times.bins) < 200 and len(json.dumps(times.to_json())) < 6000
    parts = [step_times(seconds[:1700]), step_times(seconds[1700:1701]), step_times(seconds[1701:]), step_times([])]
    merged = merged_steps(json.loads(json.dumps([part.to_json() for part in parts])))[KEY]
    for name in ("tasks", "p50_s", "p95_s", "max_s", "histogram"):
        assert merged.to_json()[name] == times.to_json()[name]
    assert merged.task_s == pytest.approx(sum(seconds), abs=0.01)
    assert [entry["seconds"] for entry in merged.slowest] == [round(s, 3) for s in sorted(seconds)[:-6:-1]]
    assert merged.slowest[0]["host"] == "node7"
    for kind in ("died", "memory", "lost", "lost"):
        times.add_failure(kind)
    entry = times.to_json()
    assert (entry["retries"], entry["losses"], entry["smaller_batches"]) == (4, 2, 2)
    assert step_times([]).to_json()["p50_s"] is None


def test_a_task_of_three_times_the_median_is_a_straggler_once_enough_are_finished() -> None:
    assert step_times([10.0] * 6 + [100.0]).stragglers == 0
    times = step_times([90.0] + [10.0] * 8 + [27.0, 34.0])
    assert times.stragglers == merged_steps([times.to_json()])[KEY].stragglers == 2
    assert step_times([0.01] * 20 + [4.0, 6.0]).stragglers == 1  # not below five seconds
    now = time.time()
    tasks = [
        {"task": str(age_s), "host": "node3", "step": step, "started_at": now - age_s}
        for age_s, step in ((5, "process_split"), (40, "process_split"), (70, "process_split"), (400, "other"))
    ]
    longest, other = find_stragglers(tasks, {KEY: times})
    assert (longest["task"], other["task"], longest["host"]) == ("70", "40", "node3")
    assert longest["running_s"] >= 70 and longest["median_s"] == pytest.approx(10, rel=0.05)
