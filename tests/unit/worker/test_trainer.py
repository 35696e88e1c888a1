"""Trainers learn, and refuse what they cannot learn from; those of a program are found by its name."""

import numpy as np
import pytest

from forebay.errors import UsageError
from forebay.worker.trainer import CountTrainer
from forebay.worker.training import trainer_class


def test_counts_learn_in_bounded_memory():
    trainer, ids, losses = CountTrainer(32), np.arange(17)[None] % 32, []
    for shift in range(40):
        labels = (ids[:, 1:] + shift) % 32
        labels[:, -1] = -100
        losses.append(trainer.step((ids[:, :-1] + shift) % 32, labels))
    assert losses[0] == pytest.approx(np.log(32), rel=0.05)
    assert losses[-1] < losses[0] / 2
    wide = CountTrainer(1 << 20)
    assert wide._pairs.nbytes == 32 << 20
    ids = np.full((1, 3), 1_000_000)
    assert wide.step(ids, ids) > wide.step(ids, ids)
    assert wide.step(ids, np.full((1, 3), -100)) == 0.0


def test_the_trainer_of_a_program(tmp_path):
    assert trainer_class("count") is CountTrainer
    program, text = tmp_path / "mine.py", "class Mine:\n    def __init__(self, **settings): self.settings = settings\n"
    program.write_text(f"{text}import no_such_package\n")
    for name, message in (
        ("other", "^trainer"), ("none.py:", "^trainer"), ("no/such.py:Trainer", "^trainer"),
        (f"{program}:Mine", r"cannot be loaded: No module named 'no_such_package'\. Give the FILE"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            trainer_class(name)
    program.write_text(text)
    with pytest.raises(UsageError, match="has no attribute 'Other'"):
        trainer_class(f"{program}:Other")
    created = trainer_class(f"{program}:Mine")(vocab_size=9, seq_len=4)
    assert created.settings == {"vocab_size": 9, "seq_len": 4}
