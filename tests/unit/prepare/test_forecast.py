"""The time that a preparation still takes: simulated runs by a virtual clock, of inputs whose bytes differ in pace."""

import random

import pytest

from forebay.prepare.forecast import expected_s
from forebay.prepare.progress import ProgressRecord
from forebay.storage.store import open_store

MB = 1_000_000
KINDS = {"jsonl": (0.02, 20, 0.9), "parquet": (0.05, 40, 1.5), "warc gz": (0.6, 15, 0.1), "wikipedia bz2": (1.2, 25, 2)}
"""Seconds for each MB, megabytes of a task, and the share of its bytes that is retained as text."""


@pytest.mark.parametrize("num_workers", [1, 8])
@pytest.mark.parametrize("speed", [0.85, 1.2])  # Of the later stages, against what is expected of them.
@pytest.mark.parametrize(
    "counts",
    [{"jsonl": 100}, {"jsonl": 60, "warc gz": 40}, {"jsonl": 200, "parquet": 30, "warc gz": 8, "wikipedia bz2": 60}],
)
def test_one_time_for_all_stages_is_within_30_percent(tmp_path, num_workers, speed, counts):
    now, shown, chance, tasks = 1e9, [], random.Random(f"{num_workers} {counts}"), []
    record = ProgressRecord(open_store(tmp_path), num_workers=num_workers, clock=lambda: now)
    record.on_progress = lambda progress: shown.append((now, progress))
    record.start("key")

    def run(name, tasks, unit="B"):
        """Run tasks on all workers, each a kind, units, seconds and bytes that it keeps."""
        nonlocal now
        record.begin(name, {k: sum(t[1] for t in tasks if t[0] == k) for k, *_ in tasks}, unit, len(tasks))
        stops, events = [now] * num_workers, []
        for task in tasks:
            stops[0] += task[2]
            events.append((stops[0], *task))
            stops.sort()
        for stop, kind, units, seconds, retained in sorted(events):
            now, record.task_s = stop, seconds
            record.advance(units, kind, 1, 1, retained)

    for kind, count in counts.items():
        pace, size, retained = KINDS[kind]
        for number in range(count):
            units = int(MB * size * chance.uniform(0.7, 1.3))
            task = kind, units, pace * units / MB * chance.uniform(0.85, 1.15), int(retained * units)
            tasks.append((number > 0, -units, task))  # One of each kind comes first, then the largest.
    record.plan("text", "tokenizer", "encode", "slice")
    run("kernels", [("", 1, 30.0, 0)] * 3, "kernel")
    assert all(progress.remaining_s is None for _, progress in shown)  # No input was read.
    began_at, retained = now, sum(task[3] for *_, task in tasks)
    run("text", [task for *_, task in sorted(tasks)])
    record.begin("tokenizer", {"": 100}, "B", 1)
    for done in range(0, 100, 10):
        now += speed * expected_s("tokenizer", retained, 1) / 10
        record.tick(done + 10)
    record.advance(100)
    for name in ("encode", "slice"):
        run(name, [("", 100, speed * expected_s(name, retained, num_workers) / 4, 0)] * 4 * num_workers)
    for share in (0.25, 0.5, 0.75):
        shown_s, progress = [pair for pair in shown if pair[0] <= began_at + share * (now - began_at)][-1]
        assert progress.remaining_s == pytest.approx(now - shown_s, rel=0.3), (share, progress)
    for name in ("kernels", "text", "tokenizer", "encode"):
        done = [progress.done for _, progress in shown if progress.stage == name]
        assert done == sorted(done) and done[-1] > done[0]
