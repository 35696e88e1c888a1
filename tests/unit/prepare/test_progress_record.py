"""The record of a preparation: true rates, bounded samples, what it has at the end, after a kill and a resume."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from forebay import prepare_dataset
from forebay.errors import PrepareError
from forebay.formats import inputs
from forebay.prepare import progress, rates
from forebay.prepare.documents import Stage, StageResult
from forebay.prepare.progress import FINISHED_FILE, RUNNING_FILE, ProgressRecord, read_progress
from forebay.prepare.rates import Progress, RecentRate
from forebay.prepare.tasks import text
from forebay.storage.store import open_store
from support.calibration import scaled
from support.runner import ROOT

TEXTS = [f"document {i} " + "the word and that of a mill " * (i % 40) for i in range(400)]


def corpus(folder: Path, files: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(files):
        lines = [json.dumps({"text": text, "id": f"{number}-{i}"}) for i, text in enumerate(TEXTS)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def remaining(workers: int, first_s: float, task_s: float, tasks: int) -> list[tuple[float, float | None]]:
    """What is left, truly and by a rate, half-way between results of tasks of which each worker's first is slow."""
    rate, shown, stop = RecentRate(workers), [], first_s + task_s * tasks
    for done in range(1, tasks + 1):
        for worker in range(workers):
            progress = Progress("text", (done - 1) * workers + worker + 1, tasks * workers, "B")
            rate.add(progress, first_s + task_s * done + worker / 1000)
        now = first_s + task_s * (done + 0.5)
        shown.append((stop - now, rate.apply(progress, now).remaining_s))
    return shown


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("first_s", [0.0, 40.0])
def test_what_is_left_is_true_whatever_the_first_results_took(workers: int, first_s: float) -> None:
    shown = remaining(workers, first_s, 2.0, 40)
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


def test_tasks_that_run_give_a_rate_without_results() -> None:
    rate, shown = RecentRate(2), {}
    for now in range(60):  # two processes, of which the first reads from second 20 on, the second from 25
        done = max(0, now - 20) + max(0, now - 25)
        state = Progress("text", done, 1000, "B", done, done, done)
        rate.add_live(state, (now > 20) + (now > 25), float(now))
        shown[now] = rate.apply(state, float(now)).remaining_s
    assert all(shown[now] is None for now in range(35))
    assert shown[50] == pytest.approx((1000 - 55) / 2, rel=0.05)


def test_finished_tasks_of_an_earlier_call_are_no_rate(tmp_path: Path) -> None:
    seen: list[Progress] = []
    record = ProgressRecord(
        open_store(tmp_path), num_workers=1, on_progress=seen.append, clock=iter(range(1000)).__next__
    )
    record.result_of = "earlier"
    for done in range(1, 101):
        record.update(Progress("text", done, 200, "B", done, done, done))
    record.result_of = "task"
    for done in range(101, 103):
        record.update(Progress("text", done, 200, "B", done, done, done))
    assert all(progress == replace(progress, remaining_s=None) for progress in seen)


@pytest.mark.parametrize("to", ["dataset", "parquet", "report"])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_record_of_a_complete_run(tmp_path: Path, to: str, workers: int) -> None:
    source, out = corpus(tmp_path / "in"), tmp_path / "out"
    (source / "bad.jsonl").write_text('{"text": "a"}\nbroken\n')
    (source / "other.xyz").write_bytes(bytes(range(256)))
    result = prepare_dataset(
        [source], out, tokenizer="bytes", filters=["gopher_quality"], workers=workers, to=to,
        settings={"max_error_rate": 0.5, "dedup": {"exact": True}},
    )  # fmt: skip
    record = read_progress(out)
    assert (record["state"], record["error"], record["output"], record["name"]) == ("done", "", to, "out")
    assert not (out / ".work").exists() and (out / FINISHED_FILE).stat().st_size < 200_000
    counts = {stage["stage"]: stage for stage in result.report["funnel"]}
    for stage in record["funnel"]:
        assert stage == {name: counts[stage["stage"]][name] for name in stage}
    assert (record["documents_in"], record["documents_out"]) == (result.documents_in, result.documents_out)
    assert record["malformed"] == 1 and [reject["reason"] for reject in record["rejects"]]
    assert record["rejects"][0]["where"].endswith("bad.jsonl:2") and sum(record["skipped"].values()) >= 1
    assert [stage["stage"] for stage in record["stages"]][:2] == ["text", "dedup"]
    assert all(stage["done"] == stage["total"] and stage["stopped_at"] for stage in record["stages"])
    assert {"read", "gopher_quality", "dedup"} <= set(record["cpu_s"]) and record["workers"] == []
    rules = [(sample["stage"], sample["reason"]) for sample in record["samples"]]
    assert ("gopher_quality", "gopher_short") in rules and max(map(rules.count, rules)) <= 3
    assert all(len(sample["text"]) <= 300 and sample["where"] for sample in record["samples"])
    assert record["started_at"] <= record["updated_at"] <= time.time() and record["wall_s"] >= 0


def test_a_record_has_the_keys_of_its_page_whoever_wrote_it(tmp_path: Path) -> None:
    page = (ROOT / "docs/reference/preparation-record.md").read_text()
    rows = re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    for number, member in enumerate(("", "0")):
        record = ProgressRecord(open_store(tmp_path / str(number)), name="x", member=member)
        record.start("key")
        assert read_progress(tmp_path / str(number)).keys() == keys, member
    record.complete()
    assert read_progress(tmp_path / "1").keys() == keys


def test_a_message_that_is_repeated_leaves_the_others_in_the_record(tmp_path: Path) -> None:
    seen: list[str] = []
    record = ProgressRecord(open_store(tmp_path), name="x", on_message=seen.append)
    record.start("key")
    for message in ["a worker was lost", *["the cluster has no CPUs"] * 30, "a worker was lost"]:
        record.notify(message)
    record.write()
    shown = [entry["text"] for entry in read_progress(tmp_path)["messages"]]
    assert shown == ["a worker was lost", "the cluster has no CPUs", "a worker was lost"] and len(seen) == 32


def test_the_record_of_a_run_that_fails(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(PrepareError, match="expected documents with text"):
        prepare_dataset([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes", filters=["gopher_quality"])
    record = read_progress(tmp_path / "out")
    assert (
        record["state"] == "failed" and "gopher_short" in record["error"] and (tmp_path / "out" / RUNNING_FILE).exists()
    )
    assert record["funnel"][1]["dropped"] == {"gopher_short": 1} and record["workers"] == []


def test_a_directory_without_a_record_or_with_another(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="expected the directory of a preparation"):
        read_progress(tmp_path)
    for content in ("{", "[]", '{"version": 9}'):
        (tmp_path / FINISHED_FILE).write_text(content)
        with pytest.raises(PrepareError, match=r"\.progress\.json: expected"):
            read_progress(tmp_path)


@dataclass(frozen=True)
class Slow(Stage):
    """A stage of a tenth of a second a document."""

    name: ClassVar[str] = "slow"
    version: ClassVar[int] = 1
    seconds: ClassVar[float] = 0.1

    @property
    def reasons(self) -> tuple[str, ...]:
        return ("every_tenth",)

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        time.sleep(self.seconds * batch.num_rows)
        tenth = np.array([id == "0" for id in batch.column("id").to_pylist()])
        return StageResult(batch, np.where(tenth, 0, -1).astype(np.int16))


def test_a_task_that_runs_counts_before_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "WRITE_S", 0.0)
    monkeypatch.setattr(rates, "_MIN_LIVE_S", 0.5)
    monkeypatch.setattr(text, "BATCH_BYTES", 2000)
    lines = [json.dumps({"text": f"document {i}" * 50, "id": str(i % 10)}) for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    seen: list[tuple[Progress, dict[str, Any]]] = []
    out = tmp_path / "out"
    monkeypatch.setattr(Slow, "seconds", 0.02)
    monkeypatch.setattr(inputs, "_BUFFER_BYTES", 1000)

    def look(state: Progress) -> None:
        if state.stage == "text":
            seen.append((state, read_progress(out)))

    prepare_dataset([tmp_path / "a.jsonl"], out, tokenizer="bytes", filters=[Slow()], workers=1, on_progress=look)
    done = [state.done for state, _ in seen]
    assert len(set(done)) > 5 and done == sorted(done) and done[-1] == seen[0][0].total
    half = next(state for state, _ in seen if state.documents >= 30)
    assert 0 < half.documents_kept < half.documents < 60 and half.remaining_s is not None
    records = [record["stages"][0]["documents_in"] for _, record in seen if record["stages"]]
    assert any(0 < number < 60 for number in records)  # a reader sees it, too
    assert any(0 < record["documents_out"] < record["documents_in"] < 60 for _, record in seen)
    assert read_progress(out)["documents_in"] == 60


_SCRIPT = """
import sys
from forebay import prepare_dataset
from forebay.prepare import inputs
sys.path.insert(0, sys.argv[3])
from unit.prepare.test_progress_record import Slow

inputs.GROUP_BYTES = 1
if __name__ == "__main__":
    prepare_dataset([sys.argv[1]], sys.argv[2], tokenizer="bytes", filters=[Slow()], workers=2)
"""


def test_a_run_while_it_runs_after_a_kill_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(12):
        lines = (json.dumps({"text": f"document {number} {i}", "id": str(i)}) for i in range(10))
        (tmp_path / "in" / f"{number:02}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "run.py").write_text(_SCRIPT)
    out = tmp_path / "out"

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, tmp_path / "run.py", tmp_path / "in", out, Path(__file__).parent]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(command, start_new_session=True, env=environment)

    def wait_until(reached: Any) -> dict[str, Any]:
        deadline = time.monotonic() + scaled(60)
        while time.monotonic() < deadline:
            record = read_progress(out) if (out / RUNNING_FILE).exists() else None
            if record is not None and reached(record):
                return record
            time.sleep(0.05)
        raise AssertionError("the record does not get there")

    process = start()
    record = wait_until(lambda record: len(record["workers"]) == 2)
    assert all(worker["task"].endswith(".jsonl") and worker["pid"] > 0 for worker in record["workers"])
    assert record["state"] == "running" and record["stage"] == "text" and record["pid"] == process.pid
    record = wait_until(lambda record: record["documents_in"] >= 40)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    record = read_progress(out)
    assert record["state"] == "interrupted" and "process is gone" in record["error"] and record["workers"] == []
    assert record["funnel"][1]["dropped"] == {"every_tenth": record["funnel"][0]["documents_in"] // 10}
    assert record["samples"][0]["reason"] == "every_tenth"
    started_at, wall_s, cpu_s = (record[name] for name in ("started_at", "wall_s", "cpu_s"))

    process = start()
    assert process.wait() == 0
    record = read_progress(out)
    assert record["state"] == "done" and record["started_at"] == started_at and record["wall_s"] > wall_s
    assert record["documents_in"] == 120 and record["documents_out"] == 108
    assert record["cpu_s"]["read"] >= cpu_s["read"] and len(record["samples"]) == 3
