"""Training on several ranks: stopped and resumed with other ranks and helpers, it is the run that never stopped."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from support.ranks import SAMPLES, batches, run_all, write_data

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")


def test_resumed_on_other_ranks_the_run_is_the_one_that_never_stopped(tmp_path: Path) -> None:
    saved = [str(tmp_path / f"saved{i}.pt") for i in range(2)]
    full, *parts = run_all(
        tmp_path,
        write_data(tmp_path / "data"),
        [
            {"world": 2, "steps": 17},
            {"world": 3, "steps": 5, "save": saved[0]},
            {"world": 2, "helpers": 1, "steps": 6, "load": saved[0], "save": saved[1]},
            {"world": 5, "steps": 6, "load": saved[1]},
        ],
    )
    assert [loss for part in parts for loss in part["losses"]] == pytest.approx(full["losses"], rel=1e-9)
    assert [batch for part in parts for batch in batches(part)] == batches(full)
    for epoch in (batches(full)[:7], batches(full)[7:14]):
        assert sorted(sample for batch in epoch for sample in batch) == list(range(SAMPLES))
    # The short batch at an epoch's end: every rank has that step, with one sample or none.
    assert sorted(len(rank) for rank in parts[2]["ids"][13 - 11]) == [0, 1, 1, 1, 1]
