"""A small GPT in PyTorch: a program of a worker of leases, and a trainer by name for workers of a coordinator.

    python examples/train_gpt.py                                                          text of this program
    forebay worker wiki --identity carol -- python examples/train_gpt.py
    python -m forebay.worker --dataset-name tiny_shakespeare --trainer examples/train_gpt.py:GptTrainer

Pre-norm, learned positions, tied embeddings; the sizes are those of `forebay plan --model-size`. Needs PyTorch 2.4.
Source of the shape: Radford et al. 2019 (GPT-2).
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import forebay
from forebay.worker import WorkerClient, WorkerConfig
from forebay.worker.config import SIZES, Size

# A batch is learnt in pieces, so that the logits take no more than this however large batch and vocabulary are.
LOGITS_BYTES = 256 << 20


class Block(nn.Module):
    """Attention, then a multilayer perceptron, each added to what came in."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, width] to the same."""
        b, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, length, width))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    """Token ids [B, L] to logits [B, L, vocab_size], which depend on each place and those before it."""

    def __init__(self, vocab_size: int, seq_len: int, size: Size) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, size.width), nn.Embedding(seq_len, size.width)
        self.blocks = nn.Sequential(*[Block(size.width, size.num_heads) for _ in range(size.num_layers)])
        self.norm = nn.LayerNorm(size.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


class GptTrainer:
    """Trains a Gpt with AdamW, on the accelerator if there is one.

    `step` and `describe` are what every trainer has (`forebay.worker.trainer.Trainer`);
    `model`, `optimizer`, `device`, `gradients` and `apply` are for workers that train together (`LockstepTrainer`).
    """

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        *,
        model_size: str = "tiny",
        learning_rate: float = 1e-3,
        seed: int = 0,
        device: str | None = None,
    ) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        with torch.random.fork_rng(devices=[]):  # The caller's generator stays as it was.
            torch.manual_seed(seed)
            self.model = Gpt(vocab_size, seq_len, SIZES[model_size]).to(self.device)
        fused = self.device.startswith(("cpu", "cuda"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), learning_rate, fused=fused)
        self._piece_tokens = max(1, LOGITS_BYTES // (4 * vocab_size))

    def step(self, inputs: NDArray[np.integer[Any]], labels: NDArray[np.integer[Any]]) -> float:
        loss, count = self.gradients(inputs, labels)
        if count:  # The mean over nothing is no number, and would stay in the weights.
            self.apply()
        return loss

    def gradients(self, inputs: NDArray[np.integer[Any]], labels: NDArray[np.integer[Any]]) -> tuple[float, int]:
        self.optimizer.zero_grad()
        count, total = int((labels != -100).sum()), 0.0
        if not count:
            return 0.0, 0
        rows = max(1, self._piece_tokens // inputs.shape[1])
        for start in range(0, len(inputs), rows):
            ids, targets = (
                torch.from_numpy(part[start : start + rows].astype(np.int64)).to(self.device)
                for part in (inputs, labels)
            )
            logits = self.model(ids).flatten(0, 1)
            loss = functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum") / count
            loss.backward()
            total += loss.item()
        return total, count

    def apply(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def describe(self) -> str:
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        return f"a GPT of {weights:,} weights on {self.device}"


def train_on_leases() -> None:
    """As the command of `forebay worker`: batches of any number of samples, until nothing is left to lease."""
    loader = forebay.Loader()
    trainer = GptTrainer(loader.dataset.manifest.vocab_size or 1 << 16, loader.seq_len)
    for batch in loader:
        loss = trainer.step(batch.inputs, batch.labels)
        if batch.step % 20 == 0:
            print(json.dumps({"step": batch.step, "loss": round(loss, 3)}), flush=True)


async def main() -> None:
    config = WorkerConfig(
        dataset_name=__file__,
        tokenizer_name="bytes",
        seq_len=64,
        num_steps=30,
        trainer=f"{__file__}:GptTrainer",
    )
    async with WorkerClient(config) as worker:
        report = await worker.run_training()
    print(f"{report.tokens:,} tokens, loss {report.losses[0]:.2f} to {report.losses[-1]:.2f}")


if __name__ == "__main__":
    if "FOREBAY_LOADER" in os.environ:
        train_on_leases()
    else:
        asyncio.run(main())
