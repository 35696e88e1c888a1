"""A small GPT in PyTorch: pre-norm, learned positions, tied embeddings; the trainer of a `model_size`.

Source of the shape: Radford et al. 2019 (GPT-2).
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from forebay.load.torch import open_device
from forebay.worker.config import SIZES, Size
from forebay.worker.trainer import IGNORE_INDEX, Integers


class Gpt(nn.Module):  # type: ignore[misc]  # PyTorch is not checked
    """Token ids [B, L] to logits [B, L, vocab_size], which depend on each place and those before it."""

    def __init__(self, vocab_size: int, seq_len: int, size: Size) -> None:
        super().__init__()
        width = size.width
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(seq_len, width)
        block = nn.TransformerEncoderLayer(
            width, size.num_heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, size.num_layers, nn.LayerNorm(width), enable_nested_tensor=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Any) -> Any:
        length = ids.shape[1]
        x = self.tokens(ids) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, ids.device, x.dtype)
        return self.blocks(x, mask, is_causal=True) @ self.tokens.weight.T


class GptTrainer:
    """Trains a Gpt with AdamW, on the accelerator if there is one; alone, or in step with others."""

    def __init__(
        self, vocab_size: int, seq_len: int, *, model_size: str = "tiny", learning_rate: float = 1e-3, seed: int = 0,
        device: str | None = None,
    ) -> None:  # fmt: skip
        self.device = str(open_device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
        with torch.random.fork_rng(devices=[]):  # The caller's generator stays as it was.
            torch.manual_seed(seed)
            self.model = Gpt(vocab_size, seq_len, SIZES[model_size]).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), learning_rate)

    def step(self, inputs: Integers, labels: Integers) -> float:
        loss, count = self.gradients(inputs, labels)
        if count:  # The mean over nothing is not a number, and would stay in the weights.
            self.apply()
        return loss

    def gradients(self, inputs: Integers, labels: Integers) -> tuple[float, int]:
        self.optimizer.zero_grad()
        ids, targets = (torch.from_numpy(part.astype(np.int64)).to(self.device) for part in (inputs, labels))
        if not (count := int((targets != IGNORE_INDEX).sum())):
            return 0.0, 0
        loss = functional.cross_entropy(self.model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.item(), count

    def apply(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def describe(self) -> str:
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        return f"a GPT of {weights:,} weights on {self.device}"
