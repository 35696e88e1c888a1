"""The record of a preparation: true rates, bounded samples, after a stop and a resume, and of the jobs of an array."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from forebay import text_filter
from forebay.errors import PrepareError
from forebay.prepare.forecast import StageProgress
from forebay.prepare.progress import (
    FINISHED_FILE,
    MEMBERS,
    RUNNING_FILE,
    Failure,
    ProgressRecord,
    TaskCounts,
    failure_of,
    merge,
    read_failures,
    read_progress,
    render_failures,
    write_failure,
)  # fmt: skip
from forebay.prepare.stats import StageCount, StageStats, Usage
from forebay.storage.store import open_store
from support.handlers import FOREVER_S
from support.paths import ROOT
from support.preparing import prepare, write_jsonl

NO_PROCESS = 1 << 30
KEY = "k"


@text_filter("tenth", version="1", per_document=True)
def tenth(document: dict) -> bool:
    """Drop the documents whose id ends in 0."""
    return not document["id"].endswith("0")


def test_a_record_has_the_keys_of_its_page_whoever_wrote_it(tmp_path):
    page = (ROOT / "docs/reference/preparation-record.md").read_text()
    rows = re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    for member in ("", "0"):
        record = ProgressRecord(open_store(tmp_path / f"of{member}"), name="x", member=member)
        record.start("key")
        for message in ["a worker was lost", *["there are no CPUs"] * 30, "a worker was lost"]:
            record.notify(message)
        record.write()
        assert read_progress(tmp_path / f"of{member}").keys() == keys, member
    record.finish("done")
    complete = read_progress(tmp_path / "of0")
    assert complete.keys() == keys
    shown = [message["text"] for message in complete["messages"]]
    assert shown == ["a worker was lost", "there are no CPUs", "a worker was lost"]


def test_the_record_of_a_run_that_fails_and_files_that_are_not_records(tmp_path):
    path, out = write_jsonl(tmp_path / "a.jsonl", ["a"]), tmp_path / "out"
    with pytest.raises(PrepareError, match="expected documents with text"):
        prepare(path, out, filters=["gopher_quality"])
    record = read_progress(out)
    assert record["state"] == "failed" and "gopher_short" in record["error"] and (out / RUNNING_FILE).exists()
    assert record["funnel"][1]["dropped"] == {"gopher_short": 1} and record["workers"] == []
    with pytest.raises(PrepareError, match="got a folder with neither"):
        read_progress(tmp_path)
    for content in ("{", "[]", '{"version": 2}'):
        (tmp_path / FINISHED_FILE).write_text(content)
        with pytest.raises(PrepareError, match=r"\.progress\.json: expected"):
            read_progress(tmp_path)


def test_the_record_of_a_run_that_is_stopped_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.prepare.inputs.GROUP_BYTES", 1)
    monkeypatch.setattr("forebay.prepare.progress.WRITE_S", FOREVER_S)  # Between tasks alone.
    inputs, out = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    for number in range(12):
        rows = ({"text": f"{number} {i} " + "the word and that " * 4 * i, "id": str(i)} for i in range(40))
        write_jsonl(inputs / f"{number:02}.jsonl", rows)
    (inputs / "bad.jsonl").write_text('{"text": "a", "id": "a"}\nbroken\n')
    (inputs / "other.xyz").write_bytes(bytes(range(256)))
    options = {"filters": [tenth(), "gopher_quality"], "settings": {"max_error_rate": 0.5, "dedup": {"exact": True}}}

    def stop(state):
        if state.documents >= 160:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(inputs, out, on_progress=stop, **options)
    first = read_progress(out)
    assert first["state"] == "interrupted" and first["documents_in"] == 160
    dropped = {stage["stage"]: stage["dropped"] for stage in first["funnel"]}
    assert dropped["tenth"] == {"tenth": 12} and "tenth" in {sample["reason"] for sample in first["samples"]}
    running = json.loads((out / RUNNING_FILE).read_text()) | {"state": "running", "pid": NO_PROCESS}
    (out / RUNNING_FILE).write_text(json.dumps(running))
    gone = read_progress(out)
    assert gone["state"] == "interrupted" and "process is gone" in gone["error"] and gone["workers"] == []

    result = prepare(inputs, out, **options)
    record = read_progress(out)
    assert (record["state"], record["error"], record["output"], record["name"]) == ("done", "", "dataset", "out")
    assert record["started_at"] == first["started_at"] and record["wall_s"] > first["wall_s"]
    assert record["cpu_s"]["read"] >= first["cpu_s"]["read"] and record["tasks"] > first["tasks"]
    counts = {stage["stage"]: stage for stage in result.report["funnel"]}
    assert all(stage.items() <= counts[stage["stage"]].items() for stage in record["funnel"])
    assert (record["documents_in"], record["documents_out"]) == (482, result.documents_out)
    assert record["malformed"] == 1 and sum(record["skipped"].values()) == 1 and record["workers"] == []
    assert record["rejects"][0]["where"].endswith("bad.jsonl:2") and record["rejects"][0]["reason"]
    assert all(stage["done"] == stage["total"] and stage["stopped_at"] for stage in record["stages"])
    rules = [(sample["stage"], sample["reason"]) for sample in record["samples"]]
    assert ("gopher_quality", "gopher_short") in rules and max(map(rules.count, rules)) <= 3
    assert all(len(sample["text"]) <= 300 and sample["where"] for sample in record["samples"])


def test_the_remaining_time_knows_kinds_of_tasks_and_never_goes_back():
    stage = StageProgress("text", "B", 0.0)
    stage.add({"jsonl": 1000, "warc gz": 200}, 12)
    for second in range(5):
        stage.advance([100, 10, 5], "jsonl", "task", 1.0, second)
    assert stage.remaining_s(1, 5.0) is None  # nothing is known of WARC
    stage.advance([100, 10, 5], "warc gz", "task", 20.0, 20.0)
    left_s = 500 / 100 * 1.0 + 100 / 100 * 20.0
    assert [stage.remaining_s(1, now) for now in (20.0, 22.0, 900.0)] == pytest.approx(
        [left_s, left_s - 2, left_s / 10]
    )
    assert stage.remaining_s(2, 20.0) == pytest.approx(left_s / 2 * 11 / 12)  # Of two tasks that run, one is half done.
    shown = stage.progress(20.0)
    assert (shown.done, shown.documents, shown.documents_kept) == (600, 60, 30)
    assert shown.bytes_per_s == pytest.approx(600 / 20) and shown.documents_per_s == pytest.approx(60 / 20)
    stage.show(700)  # with what running tasks have read
    stage.advance([50, 1, 1], "jsonl", "task", 1.0, 21.0)
    assert stage.progress(21.0).done == 700


def member(folder: Path, name: str) -> ProgressRecord:
    record = ProgressRecord(open_store(folder), "d", "dataset", 2, member=name)
    record.start(KEY)
    record.begin("text", {"": 100}, "B", 50)
    return record


def report(record: ProgressRecord, result_of: str, done: int):
    """Report a result of some bytes; a document has two of them."""
    record.result_of = result_of
    if result_of == "task":
        record.add(Usage({"read": 1.0}), None, 1.0)
    record.advance(done, "", done // 2, done // 2)


def test_what_all_members_did_is_counted_once(tmp_path):
    first, second = member(tmp_path, "0"), member(tmp_path, "1")
    for record in (first, second):
        report(record, "earlier", 10)  # by a call before the array
    report(first, "task", 20)
    report(second, "task", 40)
    for record in (first, second):
        record.write()
    late = member(tmp_path, "2")
    report(late, "earlier", 70)
    report(late, "task", 10)
    late.write()
    merged = read_progress(tmp_path)
    stage = merged["stages"][0]
    assert (stage["done"], stage["documents_in"], stage["documents_out"]) == (80, 40, 40)  # 10 + 20 + 40 + 10
    assert merged["tasks"] == 3 and merged["cpu_s"] == {"read": 3.0}
    shown = [(m["member"], m["state"], m["tasks"], m["pid"]) for m in merged["members"]]
    assert shown == [(str(i), "running", 1, os.getpid()) for i in range(3)]
    assert merged["state"] == "running" and merged["num_workers"] == 6
    report(first, "other", 65)  # it reads the results of the others
    report(first, "task", 5)
    first.write()
    assert read_progress(tmp_path)["stages"][0]["done"] == 100


def test_counts_of_all_tasks_are_not_added_and_a_finished_record_wins(tmp_path):
    stats = StageStats()
    stats.funnel["read"] = StageCount(50, 40)
    for name in ("0", "1"):
        record = member(tmp_path, name)
        record.add(Usage(), TaskCounts.of(stats), 1.0)
        record.write()
    assert read_progress(tmp_path)["documents_in"] == 100
    record.set_counts(stats)
    record.write()
    merged = read_progress(tmp_path)
    assert merged["documents_in"] == 50 and merged["funnel"][0]["documents_out"] == 40
    record = ProgressRecord(open_store(tmp_path), "d", "dataset", 1)
    record.start(KEY)
    record.finish("done")
    member(tmp_path, "3").write()
    assert (tmp_path / MEMBERS / "3.json").exists() and read_progress(tmp_path)["state"] == "done"


def member_record(name: str, **fields: Any) -> dict:
    record = ProgressRecord(open_store("unused"), "d", "dataset", 2, member=name).to_json()
    return {**record, "state": "running", "key": KEY, **fields}


def test_who_is_silent_and_who_is_gone_is_named():
    records = [
        member_record("0"),
        member_record("1", updated_at=time.time() - 3000, host="elsewhere"),
        member_record("2", pid=NO_PROCESS),
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


class Piece:
    name, label = "stem/piece-3", "crawl/\x1b[31m3.warc"


def test_a_failure_counts_its_attempts_and_is_listed_until_the_task_is_finished(tmp_path):
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
