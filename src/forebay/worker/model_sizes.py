"""The shapes of the models that the worker trains, and the memory that training one takes. No framework is imported.

Memory is a sum of what PyTorch keeps for a step in F32 without recomputation: weights, gradients and AdamW's two
moments (16 bytes a parameter); for each token 17 vectors a layer, and its logits, their softmax and their gradient.
Measured by hooks on what autograd saves, the 17 are 15.4 to 16.1 (tests/unit/test_model_sizes.py).
"""

from __future__ import annotations

from dataclasses import dataclass

_STATE_BYTES = 16
_VECTORS = 17
_LOGITS = 3


@dataclass(frozen=True)
class Size:
    """A model's shape, and the samples of a worker's batch to begin with."""

    width: int
    num_layers: int
    num_heads: int
    batch_size: int

    def num_parameters(self, vocab_size: int, seq_len: int) -> int:
        """Weights, tied embeddings counted once."""
        layer = 12 * self.width**2 + 9 * self.width
        return (vocab_size + seq_len + 2) * self.width + self.num_layers * layer

    def state_bytes(self, vocab_size: int, seq_len: int) -> int:
        """What training takes whatever the batch."""
        return _STATE_BYTES * self.num_parameters(vocab_size, seq_len)

    def sample_bytes(self, vocab_size: int, seq_len: int) -> int:
        """What each sample of a batch takes besides, learnt with the others in one go."""
        return 4 * seq_len * (_VECTORS * self.num_layers * self.width + 4 * self.width + _LOGITS * vocab_size)

    def largest_batch(self, vocab_size: int, seq_len: int, num_bytes: int) -> int:
        """The most samples whose training fits so much memory; 0 if not one does."""
        left = num_bytes - self.state_bytes(vocab_size, seq_len)
        return max(0, left // self.sample_bytes(vocab_size, seq_len))


SIZES = {
    "tiny": Size(128, 3, 4, 32),
    "small": Size(384, 6, 6, 16),
    "medium": Size(768, 12, 12, 4),
}
