"""Ranks that train under DistributedDataParallel, each on a Loader; one fails, and others resume the run."""

from importlib.util import find_spec

import pytest

from forebay import Loader
from support.feeding import list_ids
from support.ranks import GLOBAL_BATCH, SEED, SEQ_LEN, batches, run_all, write_data

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")


def test_ranks_train_on_the_global_batches_and_where_one_fails_the_run_ends_and_resumes(tmp_path):
    data, saved = write_data(tmp_path / "data"), str(tmp_path / "saved.pt")
    full, failed, rest = run_all(
        tmp_path,
        data,
        [
            {"world": 2, "steps": 9},
            {"world": 2, "steps": 9, "save": saved, "save_after": 4, "fail_after": 6, "helpers": 1},
            {"world": 5, "steps": 5, "load": saved},
        ],
    )
    loader = Loader(data, seq_len=SEQ_LEN, global_batch_size=GLOBAL_BATCH, seed=SEED, epochs=2)
    assert batches(full) == list_ids(loader, 9)
    # The other rank waits for gradients until it is killed, or its collective fails first.
    assert failed["exit_codes"][1] == 3 and failed["exit_codes"][0] not in (0, None)
    assert batches(rest) == batches(full)[4:]
    assert rest["losses"] == pytest.approx(full["losses"][4:], rel=1e-9)
    # The short batch at an epoch's end: every rank has that step, with one sample or none.
    assert sorted(len(rank) for rank in rest["ids"][6 - 4]) == [0, 1, 1, 1, 1]
