"""The reference trainers learn, and refuse what they cannot learn from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forebay.errors import StateError, UsageError
from forebay.worker.leasing import LeaseSettings
from forebay.worker.trainer import CountTrainer, Trainer, make_trainer


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
    found = losses(CountTrainer(32), 40)
    assert found[0] == pytest.approx(np.log(32), rel=0.05)
    assert found[-1] < found[0] / 2
    wide = CountTrainer(1 << 20)
    assert wide._pairs.nbytes == 32 << 20
    ids = np.full((1, 3), 1_000_000)
    assert wide.step(ids, ids) > wide.step(ids, ids)
    assert wide.step(ids, np.full((1, 3), -100)) == 0.0


def test_the_gpt_learns() -> None:
    pytest.importorskip("torch")
    from forebay.worker.gpt import GptTrainer

    trainer = GptTrainer(32, 16, width=32, num_layers=2, num_heads=2, learning_rate=3e-3, device="cpu")
    assert trainer.step(np.zeros((1, 4), np.int64), np.full((1, 4), -100)) == 0.0
    found = losses(trainer, 60)
    assert found[-1] < found[0] / 2


def test_the_loss_and_its_gradients_are_those_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from forebay.worker import cross_entropy

    monkeypatch.setattr(cross_entropy, "_CPU_BYTES", 4 * 100 * 16)  # of the last shape, three pieces
    chance = torch.Generator().manual_seed(0)
    for tokens, vocab in ((1, 1), (5, 3), (40, 100)):
        hidden = torch.randn(tokens, 8, generator=chance).requires_grad_()
        weight = (20 * torch.randn(vocab, 8, generator=chance)).requires_grad_()
        targets = torch.randint(0, vocab, (tokens,), generator=chance)
        targets[tokens // 2] = -100
        found = cross_entropy.summed_cross_entropy(hidden, weight, targets) * 3
        wanted = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, ignore_index=-100, reduction="sum") * 3
        ours = [found.detach(), *torch.autograd.grad(found, (hidden, weight))]
        theirs = [wanted.detach(), *torch.autograd.grad(wanted, (hidden, weight))]
        for mine, other in zip(ours, theirs):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_adamw_is_that_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    from forebay.worker.adamw import AdamW

    # PyTorch 2.13, torch.optim.AdamW(lr=0.1, weight_decay=0.01): three steps with gradients p, p**2 - 1, none.
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.0, 1e-4]))
    ours = AdamW([weight], 0.1)
    for gradient in (lambda p: p, lambda p: p**2 - 1, lambda p: 0 * p):
        ours.zero_grad()
        weight.grad = gradient(weight.detach())
        ours.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.8054742, -1.926533, 0.1318613, 0.03215888]))
    other = AdamW([torch.nn.Parameter(torch.zeros(4))], 0.1)
    other.load_state_dict(ours.state_dict())
    assert other.state_dict()["steps"] == 3 and torch.equal(
        other.state_dict()["means"][0], ours.state_dict()["means"][0]
    )
    for state in ({}, {"steps": 1, "means": [], "squares": []}):
        with pytest.raises(StateError, match="optimizer"):
            other.load_state_dict(state)


def test_choice_of_trainer() -> None:
    kind = {"vocab_size": 9, "dtype": "U16", "seq_len": 4, "layout": "tokens"}
    assert make_trainer("none", **kind) is None  # type: ignore[arg-type]
    assert isinstance(make_trainer("count", **kind), CountTrainer)  # type: ignore[arg-type]
    assert isinstance(make_trainer("auto", **{**kind, "vocab_size": 0, "dtype": "U32"}), CountTrainer)  # type: ignore[arg-type]
    assert make_trainer("auto", **{**kind, "layout": "rows"}) is None  # type: ignore[arg-type]
    for name, change in [("gpt", {"layout": "rows"}), ("other", {}), ("gpt", {"vocab_size": 0, "dtype": "U32"})]:
        with pytest.raises(UsageError):
            make_trainer(name, **{**kind, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"batch_size": 0}, {"cache_bytes": 0}, {"trainer": "x"}, {"receipt_s": 0}])
def test_lease_settings_are_checked(change: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        LeaseSettings(**{"name": "d", "cache_dir": Path("c"), "cache_bytes": 1, "batch_size": 1, **change})  # type: ignore[arg-type]


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
    code = """if True:
        import json, os
        from forebay.worker.trainer import make_trainer
        make_trainer("gpt", vocab_size=16, dtype="U16", seq_len=8, layout="tokens")
        import torch
        print(json.dumps([*map(os.environ.get, ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")), torch.get_num_threads()]))"""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run([sys.executable, "-c", code], env=own | given, capture_output=True, text=True, check=True)
    *variables, threads = json.loads(done.stdout)
    assert variables == expected and (expected[1] is None or threads == int(expected[1]))
