"""Workers with PyTorch: the GPT learns, processes of one machine share it; a list imports none of it."""

import os

import numpy as np
import pytest

from forebay.worker.trainer import Trainer
from forebay.worker.training import trainer_class
from support.processes import Process


def losses(trainer: Trainer, steps: int) -> list[float]:
    """On sequences where each token is the one before it plus one."""
    chance, result = np.random.default_rng(0), []
    for _ in range(steps):
        ids = (chance.integers(0, 32, (4, 1)) + np.arange(17)) % 32
        labels = ids[:, 1:].copy()
        labels[:, -1] = -100
        result.append(trainer.step(ids[:, :-1], labels))
    return result


def test_the_gpt_learns():
    pytest.importorskip("torch")
    trainer = trainer_class("gpt")(vocab_size=32, seq_len=16, learning_rate=3e-3, device="cpu")
    assert trainer.step(np.zeros((1, 4), np.int64), np.full((1, 4), -100)) == 0.0
    result = losses(trainer, 30)
    assert result[-1] < result[0] / 2


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, ["PASSIVE", None]),
        ({"LOCAL_WORLD_SIZE": "1000"}, ["PASSIVE", "1"]),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"}, [None, "1"]),
    ],
)
def test_workers_of_one_machine_do_not_spin_for_each_other(
    environment: dict[str, str], expected: list[str | None], monkeypatch
):
    pytest.importorskip("torch")
    code = """if True:
        import json, os
        from forebay.worker.training import trainer_class
        trainer_class("gpt")
        import torch
        print(json.dumps([*map(os.environ.get, ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")), torch.get_num_threads()]))"""
    for name in [name for name in os.environ if name.startswith("OMP_")]:
        monkeypatch.delenv(name)
    program = Process("-c", code, **environment)
    *variables, threads = program.ready()
    assert program.wait() == 0
    assert variables == expected and (expected[1] is None or threads == int(expected[1]))


def test_listing_costs_no_framework():
    code = (
        "import sys, forebay.worker as w; w.list_available_datasets(); w.WorkerConfig(dataset_name='pile')\n"
        "assert not {'torch', 'datasets', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    program = Process("-c", code)
    assert program.wait() == 0, program.errors
