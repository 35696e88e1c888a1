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
        expected = float(np.quantile(seconds, share))
        assert times.quantile(share) == pytest.approx(expected, rel=0.06)
    assert len(times.bins) < 200 and len(json.dumps(times.to_json())) < 6000
    parts = [step_times(seconds[:1700]), step_times(seconds[1700:1701]), step_times(seconds[1701:]), step_times([])]
    merged = merged_steps(json.loads(json.dumps([part.to_json() for part in parts])))[KEY]
    names = ("tasks", "p50_s", "p95_s", "max_s", "histogram")
    assert {n: merged.to_json()[n] for n in names} == {n: times.to_json()[n] for n in names}
    assert merged.task_s == pytest.approx(sum(seconds), abs=0.01)
    assert [entry["seconds"] for entry in merged.slowest] == [round(s, 3) for s in sorted(seconds)[:-6:-1]]
    assert merged.slowest[0]["host"] == "node7"


def test_a_task_of_three_times_the_median_is_a_straggler_once_enough_are_finished() -> None:
    assert step_times([10.0] * 6 + [100.0]).stragglers == 0
    times = step_times([90.0] + [10.0] * 8 + [27.0, 34.0])
    assert times.stragglers == merged_steps([times.to_json()])[KEY].stragglers == 2
    assert step_times([0.01] * 20 + [4.0, 6.0]).stragglers == 1  # not below five seconds
    now = time.time()
    tasks = [
        {"task": str(age_s), "host": "node3", "pid": 5, "step": step, "started_at": now - age_s}
        for age_s, step in ((20, "process_split"), (40, "process_split"), (70, "process_split"), (400, "other"))
    ]
    listed = find_stragglers(tasks, {KEY: times})
    assert [entry["task"] for entry in listed] == ["70", "40"]
    assert listed[0]["host"] == "node3" and listed[0]["running_s"] >= 70
    assert listed[0]["median_s"] == pytest.approx(10, rel=0.05)


def test_failed_attempts_count_by_what_ended_them() -> None:
    times = step_times([])
    for kind in ("died", "memory", "lost", "lost"):
        times.add_failure(kind)
    entry = times.to_json()
    assert (entry["retries"], entry["losses"], entry["smaller_batches"]) == (4, 2, 2)
    assert entry["p50_s"] is None and entry["tasks"] == 0
