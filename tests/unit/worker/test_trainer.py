"""Trainers learn, and refuse what they cannot learn from; those of a program are found by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forebay.errors import UsageError
from forebay.worker.trainer import CountTrainer, Trainer, trainer_class
from support.paths import ROOT

GPT = f"{ROOT / 'examples' / 'train_gpt.py'}:GptTrainer"


def losses(trainer: Trainer, steps: int, vocab: int = 32) -> list[float]:
    """On sequences where each token is the one before it plus one."""
    chance = np.random.default_rng(0)
    out = []
    for _ in range(steps):
        ids = (chance.integers(0, vocab, (4, 1)) + np.arange(17)) % vocab
        labels = ids[:, 1:].copy()
        labels[:, -1] = -100
        out.append(trainer.step(ids[:, :-1], labels))
    return out


def test_counts_learn_in_bounded_memory() -> None:
    result = losses(CountTrainer(32), 40)
    assert result[0] == pytest.approx(np.log(32), rel=0.05)
    assert result[-1] < result[0] / 2
    wide = CountTrainer(1 << 20)
    assert wide._pairs.nbytes == 32 << 20
    ids = np.full((1, 3), 1_000_000)
    assert wide.step(ids, ids) > wide.step(ids, ids)
    assert wide.step(ids, np.full((1, 3), -100)) == 0.0


def test_the_gpt_of_the_example_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of a batch, too: the loss is that of the whole, and so is its gradient."""
    pytest.importorskip("torch")
    make = trainer_class(GPT)
    trainer, pieces = (make(vocab_size=32, seq_len=16, learning_rate=3e-3, device="cpu") for _ in range(2))
    assert trainer.step(np.zeros((1, 4), np.int64), np.full((1, 4), -100)) == 0.0
    pieces._piece_tokens = 1  # type: ignore[attr-defined]  # one row at a time
    result = losses(trainer, 30)
    assert losses(pieces, 3) == pytest.approx(result[:3], rel=1e-4)
    assert result[-1] < result[0] / 2


def test_choice_of_trainer() -> None:
    assert trainer_class("count") is CountTrainer
    for name in ("other", "none.py:", "no/such.py:Trainer"):
        with pytest.raises(UsageError, match=r"^trainer"):
            trainer_class(name)


def test_the_trainer_of_a_program(tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text(
        "class Mine:\n    def __init__(self, **settings):\n        self.settings = settings\nimport no_such_package\n"
    )
    with pytest.raises(UsageError, match=r"cannot be loaded: No module named 'no_such_package'\. Give the FILE"):
        trainer_class(f"{program}:Mine")
    program.write_text(program.read_text().replace("import no_such_package", ""))
    with pytest.raises(UsageError, match="has no attribute 'Other'"):
        trainer_class(f"{program}:Other")
    created = trainer_class(f"{program}:Mine")(vocab_size=9, seq_len=4)
    assert created.settings == {"vocab_size": 9, "seq_len": 4}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["PASSIVE", None]),
        ({"LOCAL_WORLD_SIZE": "1000"}, ["PASSIVE", "1"]),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"}, [None, "1"]),
    ],
)
def test_workers_of_one_machine_do_not_spin_for_each_other(given: dict[str, str], expected: list[str | None]) -> None:
    pytest.importorskip("torch")
    code = f"""if True:
        import json, os
        from forebay.worker.trainer import trainer_class
        trainer_class({GPT!r})
        import torch
        print(json.dumps([*map(os.environ.get, ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")), torch.get_num_threads()]))"""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run([sys.executable, "-c", code], env=own | given, capture_output=True, text=True, check=True)
    *variables, threads = json.loads(done.stdout)
    assert variables == expected and (expected[1] is None or threads == int(expected[1]))
