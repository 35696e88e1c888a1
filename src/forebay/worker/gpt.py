"""A small GPT to train for real with: decoder-only, in PyTorch.

Pre-norm, learned positions, tied embeddings; by default 3 layers of 128, about 0.6 M weights
without the vocabulary; size "small" has 11 M, "medium" 85 M. Meant to show a falling loss in seconds on a CPU, not to
win a benchmark.

A batch is learnt in pieces of about 4096 tokens, so that memory does not grow with it.
Source of the shape: Radford et al. 2019 (GPT-2).
"""

import importlib.util
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import StateError, UsageError
from forebay.extras import install_command

if importlib.util.find_spec("torch") is None:
    raise UsageError(f"trainer gpt: PyTorch is not installed. Run: {install_command('torch')}, or use trainer 'count'.")

import torch
import torch.nn.functional as functional
from torch import nn

from forebay.worker.adamw import AdamW
from forebay.worker.cross_entropy import summed_cross_entropy

Tensor = Any
_PIECE_TOKENS = 4096


class Block(nn.Module):  # type: ignore[misc]  # PyTorch is not checked
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


class Gpt(nn.Module):  # type: ignore[misc]  # PyTorch is not checked
    """Token ids [B, L] to logits [B, L, vocab_size]."""

    def __init__(self, vocab_size: int, seq_len: int, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList([Block(width, num_heads) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits that at each place depend on that place and those before it."""
        return self.hidden(ids) @ self.tokens.weight.T

    def hidden(self, ids: Tensor) -> Tensor:
        """[B, L] to [B, L, width]: what logits are made of."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class GptTrainer:
    """Trains a Gpt with AdamW, on the accelerator if there is one."""

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        *,
        width: int = 128,
        num_layers: int = 3,
        num_heads: int = 4,
        learning_rate: float = 1e-3,
        seed: int = 0,
        device: str | None = None,
    ) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        with torch.random.fork_rng(devices=[]):  # The caller's generator stays as it was.
            torch.manual_seed(seed)
            model = Gpt(vocab_size, seq_len, width, num_layers, num_heads)
        self.model = model.to(self.device)
        self._optimizer = AdamW(self.model.parameters(), learning_rate)

    def step(self, inputs: NDArray[np.integer[Any]], labels: NDArray[np.integer[Any]]) -> float:
        """See Trainer."""
        loss, count = self.gradients(inputs, labels)
        if count:  # The mean over nothing is no number, and would stay in the weights.
            self.apply()
        return loss

    def gradients(self, inputs: NDArray[np.integer[Any]], labels: NDArray[np.integer[Any]]) -> tuple[float, int]:
        """The mean loss and the labels it is of; its gradient is left in the parameters, for `apply`."""
        self._optimizer.zero_grad()
        count = int((labels != -100).sum())
        if not count:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            return 0.0, 0
        total = 0.0
        rows = max(1, _PIECE_TOKENS // inputs.shape[1])
        for start in range(0, len(inputs), rows):
            ids = torch.from_numpy(inputs[start : start + rows].astype(np.int64)).to(self.device)
            targets = torch.from_numpy(labels[start : start + rows].astype(np.int64)).to(self.device)
            hidden = self.model.hidden(ids).flatten(0, 1)
            loss = summed_cross_entropy(hidden, self.model.tokens.weight, targets.flatten()) / count
            loss.backward()
            total += float(loss.detach())
        return total, count

    def describe(self) -> str:
        """See Trainer."""
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        return f"a GPT of {weights:,} weights on {self.device}"

    def apply(self) -> None:
        """One step of the optimizer by the gradient in the parameters, of a norm of 1 at most."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    @property
    def optimizer(self) -> AdamW:
        """What steps the weights."""
        return self._optimizer

    def to_bytes(self) -> bytes:
        """See Trainer."""
        buffer = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}, buffer)
        return buffer.getvalue()

    def from_bytes(self, data: bytes) -> None:
        """See Trainer."""
        try:
            state = torch.load(io.BytesIO(data), map_location=self.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        except Exception as error:  # whatever a file of another model or a damaged one makes of it
            first = str(error).strip().partition("\n")[0]
            raise StateError(
                f"checkpoint: expected weights of this model, got others: {first} Set model_size, seq_len and the "
                "tokenizer as they were, or take another checkpoint_dir."
            ) from error
