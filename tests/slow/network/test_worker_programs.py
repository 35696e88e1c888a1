"""Workers with PyTorch: the GPT of the example learns, processes of one machine share it; a list imports none of it."""

import asyncio
import json
import os

import numpy as np
import pytest

from forebay.worker import WorkerClient, WorkerConfig
from forebay.worker.trainer import Trainer, trainer_class
from support.paths import ROOT
from support.processes import Process

GPT = f"{ROOT / 'examples' / 'train_gpt.py'}:GptTrainer"


def losses(trainer: Trainer, steps: int) -> list[float]:
    """On sequences where each token is the one before it plus one."""
    chance, result = np.random.default_rng(0), []
    for _ in range(steps):
        ids = (chance.integers(0, 32, (4, 1)) + np.arange(17)) % 32
        labels = ids[:, 1:].copy()
        labels[:, -1] = -100
        result.append(trainer.step(ids[:, :-1], labels))
    return result


def test_the_gpt_of_the_example_learns():
    """In pieces of a batch, too: the loss is that of the whole, and so is its gradient."""
    pytest.importorskip("torch")
    make = trainer_class(GPT)
    trainer, pieces = (make(vocab_size=32, seq_len=16, learning_rate=3e-3, device="cpu") for _ in range(2))
    assert trainer.step(np.zeros((1, 4), np.int64), np.full((1, 4), -100)) == 0.0
    pieces._piece_tokens = 1  # one row at a time
    result = losses(trainer, 30)
    assert losses(pieces, 3) == pytest.approx(result[:3], rel=1e-4)
    assert result[-1] < result[0] / 2


def test_the_gpt_trains_on_text(tmp_path):
    pytest.importorskip("torch")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"the {i}th line of the text"}) + "\n" for i in range(400)))
    settings = {"dataset_name": str(corpus), "tokenizer_name": "bytes", "seq_len": 16, "num_steps": 30}

    async def run():
        async with WorkerClient(WorkerConfig(**settings, trainer=GPT, device="cpu"), log=print) as worker:
            return list((await worker.run_training()).losses)

    values = asyncio.run(run())
    assert values[-1] < values[0] - 1


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
    code = f"""if True:
        import json, os
        from forebay.worker.trainer import trainer_class
        trainer_class({GPT!r})
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
