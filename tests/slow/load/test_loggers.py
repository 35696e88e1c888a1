"""Figures of a Loader and a TextStream, read back from the files of W&B, TensorBoard and MLflow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import TESTS

SCRIPT = TESTS / "support" / "loggers.py"


def logged(logger: str, folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    pytest.importorskip(logger, reason=f"pip install {logger}")
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    environment |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    command = [sys.executable, str(SCRIPT), logger, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "logger, name",
    [("wandb", "s3://bucket/a b"), ("tensorboard", "s3://bucket/a b"), ("mlflow", "s3___bucket_a_b")],
)
def test_figures_and_mixture_counts_reach_the_logger(logger, name, tmp_path):
    if logger == "tensorboard":
        pytest.importorskip("torch", reason="pip install torch")
    steps = logged(logger, tmp_path)
    assert set(steps["loader"]) == set(steps["stream"]) == {"10", "20"}
    for step, values in steps["loader"].items():
        assert values["data/tokens"] == 80 * int(step) and values["data/tokens_per_s"] > 0
        assert values[f"data/tokens.{name}"] == 60 * int(step) and values["data/tokens.b"] == 20 * int(step)
        assert values["data/mfu"] == pytest.approx(values["data/tokens_per_s"] * 6e6 / 1e12)
        assert 0 <= values["data/wait_share"] <= 1 and "data/wait_disk_share" in values and "data/epoch" in values
    for values in steps["stream"].values():
        assert values["data/tokens"] > 0 and values["data/mfu"] > 0 and 0 <= values["data/wait_tokenize_share"] <= 1
