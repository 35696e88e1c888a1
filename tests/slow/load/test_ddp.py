"""Training on several ranks: stopped and resumed with other ranks and helpers, it is the run that never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_token_slice
from support.paths import TESTS

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")

SAMPLES = 40  # Batches of 6: the seventh of an epoch has 4, which is less than one each for 5 ranks.


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(1)
    for i in range(4):
        tokens = generator.integers(0, 32, SAMPLES // 4 * 8, dtype=np.uint16)
        write_token_slice(folder / f"{i}.safetensors", tokens, np.array([len(tokens)], np.uint64))
    import_slices(folder, "tiny")
    return folder


def run_all(tmp_path: Path, data: Path, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    outs = [tmp_path / f"out{i}.json" for i in range(len(runs))]
    config = tmp_path / "config.json"
    config.write_text(json.dumps([{"data": str(data), "out": str(out), **run} for run, out in zip(runs, outs)]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(TESTS / "support" / "ranks.py"), str(config)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(out.read_text()) for out in outs]


def test_resumed_on_other_ranks_the_run_is_the_one_that_never_stopped(data: Path, tmp_path: Path) -> None:
    saved = [str(tmp_path / f"saved{i}.pt") for i in range(2)]
    full, *parts, sharded = run_all(
        tmp_path,
        data,
        [
            {"world": 2, "steps": 17},
            {"world": 3, "steps": 5, "save": saved[0]},
            {"world": 2, "helpers": 1, "steps": 6, "load": saved[0], "save": saved[1]},
            {"world": 5, "steps": 6, "load": saved[1]},
            {"world": 2, "steps": 4, "wrap": "fsdp"},  # Fully sharded ranks are fed as any.
        ],
    )
    losses = [loss for part in parts for loss in part["losses"]]
    np.testing.assert_allclose(losses, full["losses"], rtol=1e-9)
    assert full["losses"][-1] < full["losses"][0]

    def batches(run: dict[str, Any]) -> list[list[int]]:
        return [[sample for rank in step for sample in rank] for step in run["ids"]]

    assert [batch for part in parts for batch in batches(part)] == batches(full)
    for epoch in (batches(full)[:7], batches(full)[7:14]):
        assert sorted(sample for batch in epoch for sample in batch) == list(range(SAMPLES))
    # The short batch at an epoch's end: every rank has that step, with one sample or none.
    assert [len(rank) for rank in parts[2]["ids"][13 - 11]] in ([1, 1, 1, 1, 0], [0, 1, 1, 1, 1])

    assert sharded["ids"] == full["ids"][:4]
    np.testing.assert_allclose(sharded["losses"], full["losses"][:4], rtol=1e-9)
