"""A preparation seen from outside: what `top` and `report` say of an array, a killed job, slow and failed tasks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.dataset.reader import open_dataset
from forebay.files import HOST

STAGE = """
import os, signal, sys, time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
import numpy as np
from forebay.prepare.documents import Stage, StageResult

FOLDER = Path(__file__).parent

@dataclass(frozen=True)
class Steps(Stage):
    name: ClassVar[str] = "steps"
    version: ClassVar[int] = 1
    reasons: ClassVar[tuple] = ()

    def apply(self, batch):
        text = "".join(batch.column("text").to_pylist())
        if "slow" in text:
            while not (FOLDER / "go").exists():
                time.sleep(0.05)
        if "crash" in text and not (FOLDER / "crashed").exists():
            (FOLDER / "crashed").touch()
            self.die()
        if "deadly" in text and not (FOLDER / "fixed").exists():
            self.die()
        if "fatal" in text and not (FOLDER / "fixed").exists():
            raise ValueError("the model refuses this text")
        return StageResult(batch, np.full(batch.num_rows, -1, np.int16))

    def die(self):
        print("a library says why", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""

SCRIPT = """
import sys
from forebay import prepare_dataset
from forebay.errors import ForebayError
from forebay.prepare import inputs
from forebay.prepare.engines import share
from steps import Steps

if __name__ == "__main__":
    inputs.GROUP_BYTES = 1
    share.BEAT_S, share.STALE_S = 0.5, 15.0  # More than a machine stands still.
    source, out, workers, *options = sys.argv[1:]
    try:
        result = prepare_dataset(
            [source], out, tokenizer="bytes", filters=[Steps()], workers=int(workers), name="d",
            **dict(option.split("=") for option in options),
        )
    except ForebayError as error:
        sys.exit(f"forebay: {error}")
    print(f"id {result.id}")
"""


def corpus(folder: Path, files: int, **special: list[int]) -> Path:
    source = folder / "source"
    source.mkdir(parents=True)
    for number in range(files):
        words = [name for name, numbers in special.items() if number in numbers]
        (source / f"{number:02}.txt").write_text(" ".join([f"document {number}", *words]))
    (folder / "run.py").write_text(SCRIPT)
    (folder / "steps.py").write_text(STAGE)
    return source


def start(folder: Path, out: Path, workers: int, **options: str) -> subprocess.Popen[str]:
    """Prepare in a process of its own; its output and errors are in a file."""
    name = options.get("task", "run").replace("/", "-")
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    command = [sys.executable, str(folder / "run.py"), str(folder / "source"), str(out), str(workers)]
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [*command, *(f"{key}={value}" for key, value in options.items())], stdout=log, stderr=log, text=True,
            start_new_session=True, env=environment,
        )  # fmt: skip


def forebay(*arguments: str | Path, code: int = 0) -> str:
    command = [sys.executable, "-m", "forebay", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout


def top_until(out: Path, reached: Callable[[dict[str, Any]], bool], *runs: subprocess.Popen[str]) -> dict[str, Any]:
    """What `forebay top --json` prints once something is so, while these processes run."""
    while True:
        if (out / ".work" / "members").exists() or (out / ".work" / "progress.json").exists():
            view: dict[str, Any] = json.loads(forebay("top", out, "--json"))
            if reached(view):
                return view
        ended = [run.args for run in runs if run.poll() is not None]
        assert not ended, (ended, [path.read_text()[-2000:] for path in out.parent.glob("*.log")])
        time.sleep(0.2)


def test_an_array_with_a_killed_job_and_slow_tasks(tmp_path: Path) -> None:
    corpus(tmp_path, 24, slow=[10, 14], crash=[3])
    out = tmp_path / "out"
    jobs = [start(tmp_path, out, 1, task=f"{index}/3") for index in range(3)]
    try:
        # Two jobs wait in a slow task; the third has finished all others, one after its process died.
        view = top_until(out, lambda view: view["figures"].get("tasks") == [22, ""] and len(view.get("tasks", ())) == 2)
        assert view["state"] == "running" and view["progress"]["stage"] == "text"
        assert [(m["member"], m["state"], m["host"], m["pid"]) for m in view["members"]] == [
            (str(i), "running", HOST, job.pid) for i, job in enumerate(jobs)
        ]
        assert sum(m["tasks"] for m in view["members"]) == 22
        slow = {Path(task["task"]).name: task for task in view["tasks"]}
        assert set(slow) == {"10.txt", "14.txt"}
        assert all(task["host"] == HOST and task["running_s"] > 0 for task in slow.values())
        (died,) = view["attempts"]
        assert died["kind"] == "died" and died["task"].endswith("03.txt") and "SIGKILL" in died["reason"]
        assert (died["host"], died["attempt"]) == (HOST, 1) and view["figures"]["retries"] == [1, ""]
        printed = forebay("top", out)
        assert "tasks (2)" in printed and "members (3)" in printed and "attempts (1)" in printed

        killed = int(slow["10.txt"]["member"])
        os.killpg(jobs[killed].pid, signal.SIGKILL)
        jobs[killed].wait()
        view = top_until(out, lambda view: view["members"][killed]["state"] == "lost")
        assert any(f"job {killed} on {HOST} is gone" in event["text"] for event in view["events"])
        (tmp_path / "go").touch()
        assert [job.wait() for job in jobs if job is not jobs[killed]] == [0, 0]
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    view = json.loads(forebay("top", out, "--json"))
    assert view["state"] == "ended" and "forebay prepare --finish" in view["message"]
    assert view["stages"][0]["done_share"] == 1 and view["figures"]["documents read"] == [24, ""]
    lost = view["attempts"][0]
    assert (lost["kind"], lost["host"], lost["pid"]) == ("lost", HOST, jobs[killed].pid)
    assert lost["task"].endswith("10.txt") and "no sign" in lost["reason"]

    assert start(tmp_path, out, 1, task="finish").wait() == 0
    assert not (out / ".work").exists() and "failed task" not in forebay("report", out)
    record = json.loads((out / ".progress.json").read_text())
    assert record["tasks"] >= 24 and record["num_retries"] == 2 and record["state"] == "done"
    assert [retry["kind"] for retry in record["retries"]] == ["died", "lost"]
    assert start(tmp_path, tmp_path / "alone", 2).wait() == 0
    assert open_dataset(out).id == open_dataset(tmp_path / "alone").id


@pytest.mark.parametrize(("workers", "how"), [(1, "fatal"), (2, "deadly")])
def test_a_failed_task_and_the_command_for_its_log(tmp_path: Path, workers: int, how: str) -> None:
    corpus(tmp_path, 6, **{how: [4]})
    out = tmp_path / "out"
    assert start(tmp_path, out, workers).wait() == 1
    log = (tmp_path / "run.log").read_text()
    assert log.strip().endswith(f"`forebay report {out}` prints the log of the task.")
    printed = forebay("report", out)
    assert printed.count("failed task") == 1 and f"failed task: {tmp_path}/source/04.txt" in printed
    fields = json.loads(forebay("report", out, "--json"))
    (failure,) = fields["failed"]
    assert failure["pid"] > 0 and failure["step"] == "process_split" and failure["host"] == HOST
    assert fields["record"]["state"] == "failed" and fields["record"]["retries"][-1]["kind"] == failure["kind"]
    if how == "fatal":
        assert "ValueError: the model refuses this text" in log
        assert "raise ValueError" in printed and f" of {HOST}\n" in printed and "attempt 1" in printed
        assert failure["kind"] == "error" and failure["inputs"] == [f"{tmp_path}/source/04.txt"]
        assert failure["peak_bytes"] > 1e6
    else:
        assert log.count("a library says why") == 4  # what workers write is passed on
        assert "also alone and with the smallest batches" in log and "standard error, the last of it:" in printed
        assert failure["kind"] == "died" and failure["attempt"] == 4
        assert failure["log"].strip() == "a library says why"
    (tmp_path / "fixed").touch()
    assert start(tmp_path, out, workers).wait() == 0
    assert not (out / ".work").exists() and "failed task" not in forebay("report", out)
