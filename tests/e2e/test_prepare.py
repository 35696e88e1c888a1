"""A preparation with two processes that is killed between two of its tasks: run again, it does the rest alone."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from forebay import open_dataset, prepare_dataset
from support.waiting import until

STAGE = """
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from forebay.prepare.documents import Stage, StageResult


@dataclass(frozen=True)
class Gate(Stage):
    name: ClassVar[str] = "gate"
    version: ClassVar[int] = 1

    def apply(self, batch):
        gate = Path(os.environ.get("GATE", ""))
        if gate.name and "held back" in "".join(batch.column("text").to_pylist()):
            gate.open("rb").read()  # Ends when the test does.
        return StageResult(batch, np.full(batch.num_rows, -1, np.int16))
"""
SCRIPT = """
import sys

from forebay import prepare_dataset
from forebay.prepare import inputs
from gate import Gate

inputs.GROUP_BYTES = 1  # a task for each file
if __name__ == "__main__":
    source, out = sys.argv[1:]
    settings = {"dedup": {"exact": True}}
    result = prepare_dataset([source], out, tokenizer="bytes", filters=[Gate()], settings=settings, workers=2, name="d")
    print(result.id, result.documents_out)
"""


def start(folder: Path, out: Path, gate: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "GATE": gate}
    return subprocess.Popen(
        [sys.executable, str(folder / "run.py"), str(folder / "in"), str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment,
    )  # fmt: skip


def test_a_killed_preparation_is_resumed(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for number in range(8):
        (tmp_path / f"in/{number}.txt").write_text(f"document {number % 7}" + " held back" * (number == 6))
    (tmp_path / "gate.py").write_text(STAGE)
    (tmp_path / "run.py").write_text(SCRIPT)
    os.mkfifo(tmp_path / "fifo")

    killed = start(tmp_path, tmp_path / "out", str(tmp_path / "fifo"))
    marks = tmp_path / "out/.work/done/process_split"
    with (tmp_path / "fifo").open("wb"):  # Opens once a task waits at the gate; the other process does all others.
        until(lambda: len(list(marks.glob("*.json"))) == 7)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate()
    assert not (tmp_path / "out/manifest.json").exists()
    done = {path: path.stat().st_ino for path in marks.glob("*.json")}

    seen = start(tmp_path, tmp_path / "out", str(tmp_path / "fifo"))
    with (tmp_path / "fifo").open("wb"):
        assert {path: path.stat().st_ino for path in done} == done  # Finished tasks are not run again.
    shown, errors = seen.communicate()
    assert seen.returncode == 0, errors
    monkeypatch.syspath_prepend(tmp_path)
    gate = importlib.import_module("gate").Gate()
    undisturbed = prepare_dataset(
        [tmp_path / "in"], tmp_path / "undisturbed", tokenizer="bytes", filters=[gate],
        settings={"dedup": {"exact": True}}, workers=1, name="d",
    )  # fmt: skip
    assert shown.split() == [undisturbed.id, "7"] == [undisturbed.id, str(undisturbed.documents_out)]
    dataset = open_dataset(tmp_path / "out")
    assert dataset.id == undisturbed.id and dataset.verify().ok and not (tmp_path / "out/.work").exists()
