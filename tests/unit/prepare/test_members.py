"""One record of the records of a job array's members: counts over all, who is silent, what it costs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import UsageError
from forebay.prepare.executions import Execution
from forebay.prepare.failures import Failure, failure_of, read_failures, render_failures, write_failure
from forebay.prepare.members import PRICE_VARIABLE, merge, price_per_core_hour
from forebay.prepare.progress import MEMBERS, ProgressRecord, read_progress
from forebay.prepare.rates import Progress, ResultOf
from forebay.prepare.stats import StageCount, StageStats, Usage
from forebay.storage.store import open_store

KEY = "k"


def member(folder: Path, name: str) -> ProgressRecord:
    record = ProgressRecord(open_store(folder), "d", "dataset", 2, member=name)
    record.step = "process_split"
    record.start(KEY)
    return record


def report(record: ProgressRecord, result_of: ResultOf, done: int) -> None:
    """Report how many bytes of the stage are done; a document has two of them."""
    record.result_of = result_of
    record.update(Progress("text", done, 100, "B", done // 2, done // 2, done))
    if result_of == "task":
        record.add(Usage({"read": 1.0}), None, Execution(f"task {done}", 1.0, "h"))


def test_what_all_members_did_is_counted_once(tmp_path: Path) -> None:
    first, second = member(tmp_path, "0"), member(tmp_path, "1")
    for record in (first, second):
        report(record, "driver", 0)
        report(record, "earlier", 10)  # by a call before the array
    report(first, "task", 30)
    report(second, "task", 50)
    for record in (first, second):
        record.write()
    late = member(tmp_path, "2")
    report(late, "earlier", 70)
    report(late, "task", 80)
    late.write()
    merged = read_progress(tmp_path)
    stage = merged["stages"][0]
    assert (stage["done"], stage["documents_in"], stage["documents_out"]) == (80, 40, 40)  # 10 + 20 + 40 + 10
    assert merged["steps"][0]["tasks"] == 3 and merged["cpu_s"] == {"read": 3.0}
    shown = [(m["member"], m["state"], m["tasks"], m["pid"]) for m in merged["members"]]
    assert shown == [(str(i), "running", 1, os.getpid()) for i in range(3)]
    assert merged["state"] == "running" and merged["num_workers"] == 6
    report(first, "other", 95)  # it reads the results of the others
    report(first, "task", 100)
    first.write()
    assert read_progress(tmp_path)["stages"][0]["done"] == 100


def test_counts_of_all_tasks_are_not_added_and_a_finished_record_wins(tmp_path: Path) -> None:
    stats = StageStats()
    stats.funnel["read"] = StageCount(50, 40)
    for name in ("0", "1"):
        record = member(tmp_path, name)
        record.set_counts(stats)
        record.write()
    merged = read_progress(tmp_path)
    assert merged["documents_in"] == 50 and merged["funnel"][0]["documents_out"] == 40
    record = ProgressRecord(open_store(tmp_path), "d", "dataset", 1)
    record.start(KEY)
    record.complete()
    member(tmp_path, "3").write()
    assert (tmp_path / MEMBERS / "3.json").exists() and read_progress(tmp_path)["state"] == "done"


def member_record(name: str, **fields: Any) -> dict[str, Any]:
    record = ProgressRecord(open_store("unused"), "d", "dataset", 2, member=name, price_per_core_hour=0.5).to_json()
    return {**record, "state": "running", "key": KEY, **fields}


def test_who_is_silent_and_who_is_gone_is_named() -> None:
    records = [
        member_record("0"),
        member_record("1", updated_at=time.time() - 3000, host="elsewhere"),
        member_record("2", pid=1 << 30),
        member_record("10", state="ended", error="all are finished"),
    ]
    merged = merge(records)
    states = [(m["member"], m["state"]) for m in merged["members"]]
    assert states == [("0", "running"), ("1", "silent"), ("2", "lost"), ("10", "ended")]
    assert merged["members"][1]["last_report_s"] >= 3000 and merged["state"] == "running"
    assert merge(records[1:])["state"] == "ended"
    interrupted = merge(records[1:3])
    assert interrupted["state"] == "interrupted" and "2 of 2 processes are gone" in interrupted["error"]
    failed = merge([*records[1:], member_record("4", state="failed", error="line 7 is broken", host="node4")])
    assert failed["state"] == "failed" and failed["error"] == "job 4 (node4): line 7 is broken"


def test_the_cost_is_that_of_all_processes_and_at_the_end_of_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = {"stage": "text", "done": 25, "total": 100, "started_at": 1.0, "stopped_at": None, "remaining_s": 75.0}
    stage |= dict.fromkeys(("cpu_s", "documents_in", "documents_out"), 0)
    stage |= {"documents_per_s": None, "bytes_per_s": None, "own": [25, 0, 0], "before": [0, 0, 0]}
    merged = merge([member_record(name, worker_s=7200.0, stages=[stage]) for name in "01"])
    assert merged["worker_s"] == 14400 and merged["cost"] == pytest.approx(2.0)
    assert merged["stages"][0]["done"] == 50 and merged["stages"][0]["remaining_s"] == pytest.approx(25)
    assert merged["cost_at_stage_end"] == pytest.approx(2.0 + 0.5 * 4 * 25 / 3600, abs=1e-4)
    free = merge([member_record(name, price_per_core_hour=None) for name in "01"])
    assert free["cost"] is None and free["cost_at_stage_end"] is None
    monkeypatch.setenv(PRICE_VARIABLE, "0.04")
    assert price_per_core_hour() == 0.04
    for text in ("cheap", "-1", "nan", "inf"):
        monkeypatch.setenv(PRICE_VARIABLE, text)
        with pytest.raises(UsageError, match="FOREBAY_PRICE_PER_CORE_HOUR: expected a price"):
            price_per_core_hour()


class Piece:
    name, label = "stem/piece-3", "crawl/\x1b[31m3.warc"


def test_a_failure_counts_its_attempts_and_is_listed_until_the_task_is_finished(tmp_path: Path) -> None:
    work = open_store(tmp_path)
    try:
        raise ValueError("row 7")
    except ValueError as error:
        failure = failure_of(error, Piece.label)
    for attempt in (Failure("lost", "x", "its node is gone", host="spot"), failure):
        write_failure(work, "process_split", "piece-3", Piece(), attempt)
    (entry,) = read_failures(work)
    assert (entry["attempt"], entry["kind"], entry["reason"]) == (2, "error", "ValueError: row 7")
    text = render_failures([entry])
    assert 'raise ValueError("row 7")' in text and f"process {os.getpid()} of " in text and "\x1b" not in text
    work.write("done/process_split/piece-3.json", b"1")
    assert read_failures(work) == []
