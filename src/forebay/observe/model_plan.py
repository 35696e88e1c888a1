"""What training one of the worker's models takes of a device's memory, and the batch to begin with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from forebay.sizes import words_of_bytes
from forebay.worker.model_sizes import SIZES


@dataclass(frozen=True)
class ModelPlan:
    """The figures of a model.

    Attributes:
        parameters: Of the model.
        state_bytes: Weights, gradients and the optimizer's moments.
        sample_bytes: For each sample of a batch besides.
        largest_batch: The most samples that fit; 0 if none does.
        batch_size: To begin with: the size's own, or as many as fit.
    """

    model_size: str
    seq_len: int
    vocab_size: int
    device_bytes: int
    parameters: int
    state_bytes: int
    sample_bytes: int
    largest_batch: int
    batch_size: int

    @property
    def ok(self) -> bool:
        return self.largest_batch > 0

    def to_json(self) -> dict[str, Any]:
        """Plain values, by name."""
        return asdict(self)

    def words(self) -> str:
        """For people."""
        state, sample, device = map(words_of_bytes, (self.state_bytes, self.sample_bytes, self.device_bytes))
        lines = [
            f"{'model':<18} {self.model_size}, {self.parameters / 1e6:,.1f} M weights, vocabulary {self.vocab_size:,}",
            f"{'its memory':<18} {state}, and {sample} a sample of {self.seq_len:,} tokens",
        ]
        if self.ok:
            lines.append(f"{'batch':<18} batch_size={self.batch_size}; at most {self.largest_batch:,} fit {device}")
        else:
            lines.append(
                f"refused: {self.model_size} does not fit {device} with one sample of {self.seq_len} tokens. Choose a "
                "smaller model or shorter samples."
            )
        return "\n".join(lines)


def plan_model(model_size: str, seq_len: int, vocab_size: int, device_bytes: int) -> ModelPlan:
    """The figures of one of `SIZES` on a device."""
    size = SIZES[model_size]
    most = size.largest_batch(vocab_size, seq_len, device_bytes)
    return ModelPlan(
        model_size,
        seq_len,
        vocab_size,
        device_bytes,
        size.num_parameters(vocab_size, seq_len),
        size.state_bytes(vocab_size, seq_len),
        size.sample_bytes(vocab_size, seq_len),
        most,
        min(size.batch_size, most),
    )
