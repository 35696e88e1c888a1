"""The benchmark of cut connections, kills and full disks: one seed that has all of them, and one background task."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.cutting_proxy import Bench, Plan, run_tasks

from support.calibration import scaled

pytest.importorskip("libtorrent")


def test_a_job_with_cuts_kills_and_full_disks_uses_each_sample_once(tmp_path: Path) -> None:
    bench, plan = Bench(tmp_path), Plan.of(4)
    assert None not in (plan.kill_worker, plan.kill_scheduler, plan.full_cache, plan.full_journal)
    try:
        done = bench.run(4, plan, scaled(60.0), 3.0)
    finally:
        bench.close()
    assert done.faults == [] and sum(done.cuts.values()) > 0


def test_the_job_is_done_though_the_schedulers_loop_failed(tmp_path: Path) -> None:
    figures = run_tasks(tmp_path, "scheduler: http-server (running)")
    assert (figures["tasks"], figures["failed"]) == (1, {})
