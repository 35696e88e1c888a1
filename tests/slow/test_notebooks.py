"""The notebooks of examples/ run from a fresh process, and have no outputs."""

import json
import os
import subprocess
import sys

import pytest

from support.notebooks import code_cells
from support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
CARDS = {"look_at_a_dataset": 6, "compare_filters": 2, "loss_spike": 3}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs(path):
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_cells(path))
    assert "metadata" in json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_plain_interpreter(path, tmp_path):
    command = [sys.executable, "-m", "support.notebooks", path]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<div style=") >= CARDS[path.stem] and "<script" not in done.stdout
    if path.stem == "loss_spike":
        assert "noise" in done.stdout.partition("Document ")[2]  # the document that the spike leads to
