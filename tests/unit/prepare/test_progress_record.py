"""The record of a preparation: true rates, bounded samples, and what it has at the end, after a stop and a resume."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from forebay import text_filter
from forebay.errors import PrepareError
from forebay.formats import inputs
from forebay.prepare import progress, rates
from forebay.prepare.progress import FINISHED_FILE, RUNNING_FILE, ProgressRecord, read_progress
from forebay.prepare.rates import Progress, RecentRate
from forebay.prepare.tasks import text
from forebay.storage.store import open_store
from support.paths import ROOT
from support.preparing import prepare, write_jsonl

NO_PROCESS = 1 << 30


@text_filter("tenth", version="1", per_document=True)
def tenth(document: dict[str, Any]) -> bool:
    """Drop the documents whose id ends in 0."""
    return not document["id"].endswith("0")


@pytest.mark.parametrize(("workers", "first_s"), [(1, 0.0), (2, 40.0), (8, 40.0)])
def test_what_is_left_is_true_whatever_the_first_results_took(workers: int, first_s: float) -> None:
    """Half-way between results of tasks of which each worker's first is slow."""
    task_s, tasks = 2.0, 40
    rate, shown = RecentRate(workers), []
    for done in range(1, tasks + 1):
        for worker in range(workers):
            state = Progress("text", (done - 1) * workers + worker + 1, tasks * workers, "B")
            rate.add(state, first_s + task_s * done + worker / 1000)
        now = first_s + task_s * (done + 0.5)
        shown.append((task_s * (tasks - done - 0.5), rate.apply(state, now).remaining_s))
    unknown = [estimate for _, estimate in shown if estimate is None]
    assert len(unknown) in (1, 2, 3) and shown[len(unknown)][1] is not None
    for truth, estimate in shown[len(unknown) :]:
        assert estimate == pytest.approx(max(truth, 0), rel=0.05, abs=1.0)


def test_a_stall_and_a_change_of_speed_show() -> None:
    rate = RecentRate(1)
    for done in range(1, 101):
        rate.add(Progress("text", done, 1000, "B"), float(done))
    last = Progress("text", 100, 1000, "B")
    assert rate.apply(last, 100.0).remaining_s == pytest.approx(900)
    assert (rate.apply(last, 400.0).remaining_s or 0) > 4000  # no result for five minutes
    for done in range(101, 201):  # four times as fast from here
        rate.add(Progress("text", done, 1000, "B"), 100 + (done - 100) / 4)
    assert rate.apply(Progress("text", 200, 1000, "B"), 125.0).remaining_s == pytest.approx(800 / 2.1, rel=0.15)
    steps = Progress("dedup", 3, 9, " steps")
    for _ in range(9):
        rate.add(steps, 1.0)
    assert rate.apply(steps, 2.0) == steps  # its steps are not alike


def test_a_record_has_the_keys_of_its_page_whoever_wrote_it(tmp_path: Path) -> None:
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
    record.complete()
    complete = read_progress(tmp_path / "of0")
    assert complete.keys() == keys
    shown = [message["text"] for message in complete["messages"]]
    assert shown == ["a worker was lost", "there are no CPUs", "a worker was lost"]


def test_the_record_of_a_run_that_fails_and_files_that_are_not_records(tmp_path: Path) -> None:
    path, out = write_jsonl(tmp_path / "a.jsonl", ["a"]), tmp_path / "out"
    with pytest.raises(PrepareError, match="expected documents with text"):
        prepare(path, out, filters=["gopher_quality"])
    record = read_progress(out)
    assert record["state"] == "failed" and "gopher_short" in record["error"] and (out / RUNNING_FILE).exists()
    assert record["funnel"][1]["dropped"] == {"gopher_short": 1} and record["workers"] == []
    with pytest.raises(PrepareError, match="expected the directory of a preparation"):
        read_progress(tmp_path)
    for content in ("{", "[]", '{"version": 9}'):
        (tmp_path / FINISHED_FILE).write_text(content)
        with pytest.raises(PrepareError, match=r"\.progress\.json: expected"):
            read_progress(tmp_path)


def test_a_task_that_runs_counts_before_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (progress, "WRITE_S", 0.0), (rates, "_MIN_LIVE_S", 0.0), (rates, "_MOMENT_S", 0.0),
        (text, "BATCH_BYTES", 2000), (inputs, "_BUFFER_BYTES", 1000),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    path = write_jsonl(tmp_path / "a.jsonl", ({"text": f"document {i}" * 50, "id": str(i)} for i in range(60)))
    seen: list[tuple[Progress, dict[str, Any]]] = []
    out = tmp_path / "out"

    def look(state: Progress) -> None:
        if state.stage == "text":
            seen.append((state, read_progress(out)))

    prepare(path, out, filters=[tenth()], on_progress=look)
    done = [state.done for state, _ in seen]
    assert len(set(done)) > 5 and done == sorted(done) and done[-1] == seen[0][0].total
    half = next(state for state, _ in seen if state.documents >= 30)
    assert 0 < half.documents_kept < half.documents < 60 and half.remaining_s is not None
    assert any(0 < record["documents_out"] < record["documents_in"] < 60 for _, record in seen)
    workers = [worker["pid"] for _, record in seen for worker in record["workers"]]
    assert os.getpid() in workers


def test_the_record_of_a_run_that_is_stopped_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.prepare.inputs.GROUP_BYTES", 1)
    inputs, out = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    for number in range(12):
        rows = ({"text": f"{number} {i} " + "the word and that " * 4 * i, "id": str(i)} for i in range(40))
        write_jsonl(inputs / f"{number:02}.jsonl", rows)
    (inputs / "bad.jsonl").write_text('{"text": "a", "id": "a"}\nbroken\n')
    (inputs / "other.xyz").write_bytes(bytes(range(256)))
    options = {"filters": [tenth(), "gopher_quality"], "settings": {"max_error_rate": 0.5, "dedup": {"exact": True}}}

    def stop(state: Progress) -> None:
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
    assert record["cpu_s"]["read"] >= first["cpu_s"]["read"]
    counts = {stage["stage"]: stage for stage in result.report["funnel"]}
    assert all(stage.items() <= counts[stage["stage"]].items() for stage in record["funnel"])
    assert (record["documents_in"], record["documents_out"]) == (482, result.documents_out)
    assert record["malformed"] == 1 and sum(record["skipped"].values()) == 1 and record["workers"] == []
    assert record["rejects"][0]["where"].endswith("bad.jsonl:2") and record["rejects"][0]["reason"]
    assert all(stage["done"] == stage["total"] and stage["stopped_at"] for stage in record["stages"])
    rules = [(sample["stage"], sample["reason"]) for sample in record["samples"]]
    assert ("gopher_quality", "gopher_short") in rules and max(map(rules.count, rules)) <= 3
    assert all(len(sample["text"]) <= 300 and sample["where"] for sample in record["samples"])
