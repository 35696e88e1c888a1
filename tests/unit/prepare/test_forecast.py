"""The time that a preparation still takes: simulated runs by a virtual clock, of inputs whose bytes differ in pace."""

import heapq
import random

import pytest

from forebay.prepare.forecast import expected_s
from forebay.prepare.progress import ProgressRecord
from forebay.prepare.stats import Usage
from forebay.storage.store import open_store

MB = 1_000_000
KINDS = {"jsonl": (0.02, 20, 0.9), "parquet": (0.05, 40, 1.5), "warc gz": (0.6, 15, 0.1), "wikipedia bz2": (1.2, 25, 2)}
"""Seconds for each MB, megabytes of a task, and the share of its bytes that is kept as text."""


class Run:
    """A preparation by a virtual clock; `shown` are moments, and the record's progress."""

    def __init__(self, folder, num_workers):
        self.num_workers, self.now, self.shown = num_workers, 1e9, []
        self.record = ProgressRecord(open_store(folder), num_workers=num_workers)
        self.record.clock = lambda: self.now
        self.record.on_progress = lambda progress: self.shown.append((self.now, progress))
        self.record.start("key")

    def stage(self, name, tasks, unit="B", in_process=False):
        """Run tasks, each a kind, units, seconds and bytes that it keeps, on all workers, with a tick each second."""
        self.record.begin(name, {k: sum(t[1] for t in tasks if t[0] == k) for k, *_ in tasks}, unit, len(tasks))
        waiting, ends = [*enumerate(tasks)], []
        while waiting or ends:
            while waiting and len(ends) < self.num_workers:
                number, task = waiting.pop(0)
                heapq.heappush(ends, (self.now + task[2], number, *task))
            end, _, kind, units, seconds, kept = heapq.heappop(ends)
            while self.now + 1 < end:
                self.now += 1
                self.record.tick(int(units * (1 - (end - self.now) / seconds)) if in_process else 0)
            self.now = end
            self.record.add(Usage(), None, seconds)
            self.record.advance(units, kind, 1, 1, kept)


@pytest.mark.parametrize("num_workers", [1, 8])
@pytest.mark.parametrize("speed", [0.85, 1.2])  # Of the later stages, against what is expected of them.
@pytest.mark.parametrize(
    "counts",
    [{"jsonl": 100}, {"jsonl": 60, "warc gz": 40}, {"jsonl": 200, "parquet": 30, "warc gz": 8, "wikipedia bz2": 60}],
)
def test_one_time_for_all_stages_is_within_30_percent(tmp_path, num_workers, speed, counts):
    chance, tasks = random.Random(f"{num_workers} {counts}"), []
    for kind, count in counts.items():
        pace, size, kept = KINDS[kind]
        for number in range(count):
            units = int(MB * size * chance.uniform(0.7, 1.3))
            task = kind, units, pace * units / MB * chance.uniform(0.85, 1.15), int(kept * units)
            tasks.append((number > 0, -units, task))  # One of each kind comes first, then the largest.
    tasks = [task for *_, task in sorted(tasks)]
    run = Run(tmp_path, num_workers)
    run.record.plan("text", "tokenizer", "encode", "slice")
    run.stage("kernels", [("", 1, 30.0, 0)] * 3, "kernel")
    assert all(progress.remaining_s is None for _, progress in run.shown)  # No input was read.
    began_at, kept = run.now, sum(task[3] for task in tasks)
    run.stage("text", tasks)
    for name, count in (("tokenizer", 1), ("encode", 4 * num_workers), ("slice", 4 * num_workers)):
        seconds = speed * expected_s(name, kept, num_workers) * min(num_workers, count) / count
        run.stage(name, [("", kept // count, seconds, 0)] * count, in_process=count == 1)
    for share in (0.25, 0.5, 0.75):
        at = began_at + share * (run.now - began_at)
        progress = [progress for shown_at, progress in run.shown if shown_at <= at][-1]
        assert progress.remaining_s == pytest.approx(run.now - at, rel=0.3), (share, progress)
    for name in ("kernels", "text", "tokenizer", "encode"):
        done = [progress.done for _, progress in run.shown if progress.stage == name]
        assert done == sorted(done)
