"""A preparation seen from outside: what `report` says of failed tasks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.files import HOST
from support.processes import run_command

STAGE = """
import os, signal, sys
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
from steps import Steps

if __name__ == "__main__":
    inputs.GROUP_BYTES = 1
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
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    command = [sys.executable, str(folder / "run.py"), str(folder / "source"), str(out), str(workers)]
    with (folder / "run.log").open("w") as log:
        return subprocess.Popen(
            [*command, *(f"{key}={value}" for key, value in options.items())], stdout=log, stderr=log, text=True,
            start_new_session=True, env=environment,
        )  # fmt: skip


@pytest.mark.parametrize("workers, how", [(1, "fatal"), (2, "deadly")])
def test_a_failed_task_and_the_command_for_its_log(tmp_path, workers: int, how: str):
    corpus(tmp_path, 6, **{how: [4]})
    out = tmp_path / "out"
    assert start(tmp_path, out, workers).wait() == 1
    log = (tmp_path / "run.log").read_text()
    assert log.strip().endswith(f"`forebay report {out}` prints the log of the task.")
    printed = run_command("report", out).stdout
    assert printed.count("failed task") == 1 and f"failed task: {tmp_path}/source/04.txt" in printed
    fields = json.loads(run_command("report", out, "--json").stdout)
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
    assert not (out / ".work").exists() and "failed task" not in run_command("report", out).stdout
