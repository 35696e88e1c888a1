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


def report(record: ProgressRecord, result_of: ResultOf, done: int, documents: int) -> None:
    """Report to a record how far the stage is."""
    record.result_of = result_of
    record.update(Progress("text", done, 100, "B", documents, documents, done))
    if result_of == "task":
        record.add(Usage({"read": 1.0}), None, Execution(f"task {done}", 1.0, "h"))


def test_what_all_members_did_is_counted_once(tmp_path: Path) -> None:
    first, second = member(tmp_path, "0"), member(tmp_path, "1")
    for record in (first, second):
        report(record, "driver", 0, 0)
        report(record, "earlier", 10, 5)  # by a call before the array
    report(first, "task", 30, 15)
    report(second, "task", 50, 25)
    for record in (first, second):
        record.write()
    late = member(tmp_path, "2")
    report(late, "earlier", 70, 35)
    report(late, "task", 80, 40)
    late.write()
    merged = read_progress(tmp_path)
    stage = merged["stages"][0]
    assert (stage["done"], stage["documents_in"], stage["documents_out"]) == (80, 40, 40)  # 10 + 20 + 40 + 10
    assert merged["steps"][0]["tasks"] == 3 and merged["cpu_s"] == {"read": 3.0}
    assert [(m["member"], m["state"], m["tasks"], m["pid"]) for m in merged["members"]] == [
        (str(i), "running", 1, os.getpid()) for i in range(3)
    ]
    assert merged["state"] == "running" and merged["num_workers"] == 6
    # A member that begins again takes up what it did.
    again = member(tmp_path, "1")
    report(again, "earlier", 80, 40)
    report(again, "task", 95, 48)
    again.write()
    merged = read_progress(tmp_path)
    assert merged["stages"][0]["done"] == 95 and merged["steps"][0]["tasks"] == 4
    report(first, "other", 95, 48)  # it reads the results of the others
    report(first, "task", 100, 50)
    first.write()
    assert read_progress(tmp_path)["stages"][0]["done"] == 100


def test_counts_of_all_tasks_are_not_added_and_a_finished_record_wins(tmp_path: Path) -> None:
    for name in ("0", "1"):
        record = member(tmp_path, name)
        stats = StageStats()
        stats.funnel["read"] = StageCount(50, 40)
        record.set_counts(stats)
        record.write()
    merged = read_progress(tmp_path)
    assert merged["documents_in"] == 50 and merged["funnel"][0]["documents_out"] == 40
    record = ProgressRecord(open_store(tmp_path), "d", "dataset", 1)
    record.start(KEY)
    record.complete()
    member(tmp_path, "3").write()
    assert (tmp_path / MEMBERS / "3.json").exists() and read_progress(tmp_path)["state"] == "done"


def record_with(**fields: Any) -> dict[str, Any]:
    record = ProgressRecord(open_store("unused"), "d", "dataset", 2, price_per_core_hour=0.5).to_json()
    return {**record, "state": "running", "key": KEY, **fields}


def test_who_is_silent_and_who_is_gone_is_named() -> None:
    now = time.time()
    records = [
        record_with(member="0"), record_with(member="1", updated_at=now - 300, host="elsewhere"),
        record_with(member="2", pid=1 << 30), record_with(member="10", state="ended", error="all are finished"),
    ]  # fmt: skip
    merged = merge(records)
    assert [(m["member"], m["state"]) for m in merged["members"]] == [
        ("0", "running"), ("1", "silent"), ("2", "lost"), ("10", "ended"),
    ]  # fmt: skip
    assert merged["members"][1]["last_report_s"] == pytest.approx(300, abs=30) and merged["state"] == "running"
    assert merge(records[1:])["state"] == "ended"
    interrupted = merge(records[1:3])
    assert interrupted["state"] == "interrupted" and "2 of 2 processes are gone" in interrupted["error"]
    failed = merge([*records[1:], record_with(member="4", state="failed", error="line 7 is broken", host="node4")])
    assert failed["state"] == "failed" and failed["error"] == "job 4 (node4): line 7 is broken"


def test_the_cost_is_that_of_all_processes_and_at_the_end_of_the_stage() -> None:
    stage = {"stage": "text", "done": 25, "total": 100, "started_at": 1.0, "stopped_at": None, "remaining_s": 75.0,
             "cpu_s": 1.0, "documents_in": 0, "documents_out": 0, "documents_per_s": None, "bytes_per_s": None,
             "own": [25, 0, 0], "before": [0, 0, 0]}  # fmt: skip
    merged = merge([record_with(member=str(i), worker_s=7200.0, stages=[stage]) for i in range(2)])
    assert merged["worker_s"] == 14400 and merged["cost"] == pytest.approx(2.0)
    assert merged["stages"][0]["done"] == 50 and merged["stages"][0]["remaining_s"] == pytest.approx(25)
    assert merged["cost_at_stage_end"] == pytest.approx(2.0 + 0.5 * 4 * 25 / 3600, abs=1e-4)
    free = merge([record_with(member=str(i), price_per_core_hour=None) for i in range(2)])
    assert free["cost"] is None and free["cost_at_stage_end"] is None


def test_a_price_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
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
    write_failure(work, "process_split", "piece-3", Piece(), Failure("lost", "x", "its node is gone", host="spot"))
    write_failure(work, "process_split", "piece-3", Piece(), failure)
    (entry,) = read_failures(work)
    assert (entry["attempt"], entry["kind"], entry["reason"]) == (2, "error", "ValueError: row 7")
    text = render_failures([entry])
    assert 'raise ValueError("row 7")' in text and f"process {os.getpid()} of " in text and "\x1b" not in text
    work.write("done/process_split/piece-3.json", b"1")
    assert read_failures(work) == []
