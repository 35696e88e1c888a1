"""Random token ids as data: to test a model, a machine or a cluster without a download.

Sample i is a function of (seed, i) alone, by our own counter-based generator: any rank makes it at any time, no global
generator is used, and no library's version changes it.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import StateError
from forebay.load.arguments import rank_of_world
from forebay.load.batch import Batch
from forebay.order.bijection import derive_key, permute, random_words
from forebay.order.step_index import check_integer
from forebay.worker.batches import Batches

Integers = NDArray[np.int64]


def dummy_samples(sample_ids: Integers, *, seed: int, seq_len: int, vocab_size: int) -> Integers:
    """The tokens of samples, int64 [B, seq_len + 1], each uniform in [0, vocab_size); vocab_size below 2**32."""
    offsets = np.arange(seq_len + 1, dtype=np.uint64)
    counters: NDArray[np.uint64] = sample_ids.astype(np.uint64)[:, None] * np.uint64(seq_len + 1) + offsets
    words = random_words(derive_key(seed, "dummy", seq_len), counters) >> np.uint64(32)
    tokens: Integers = (words * np.uint64(vocab_size) >> np.uint64(32)).astype(np.int64)
    return tokens


class DummyDataset(Batches):
    """Random samples; position k of the run belongs to rank k mod world_size.

    Not distributed, the samples are 0, 1, 2, … without end. Distributed, they are a set of `num_samples`: each epoch
    has each once, in its own order by a keyed permutation, so that the ranks' shares are disjoint and together all.
    """

    def __init__(
        self,
        *,
        num_batches: int = 100,
        batch_size: int = 4,
        seq_len: int = 32,
        vocab_size: int = 1024,
        seed: int = 42,
        rank: int = 0,
        world_size: int = 1,
        distributed: bool = False,
        num_samples: int = 1 << 20,
        tensors: str = "auto",
    ) -> None:
        check_integer("vocab_size", vocab_size, 2)
        check_integer("num_samples", num_samples, 1)
        self._vocab_size, self._seed = vocab_size, int(seed)
        self._num_samples = num_samples if distributed else 0
        self._position = 0
        super().__init__(rank, world_size, num_batches, batch_size, seq_len, tensors)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def describe(self) -> str:
        kind = f"{self._num_samples:,} random samples, dealt" if self._num_samples else "random samples"
        return f"{kind}, ids below {self._vocab_size:,}"

    def position(self) -> int:
        """See Batches: the number of samples of all ranks up to here."""
        return self._position

    def seek(self, position: Any) -> None:
        self._position = int(position)

    def reshard(self, rank: int, world_size: int) -> DummyDataset:
        other = copy.copy(self)
        other.rank, other.world_size = rank_of_world(rank, world_size)
        other._num_yielded, other._resumes = 0, False
        return other

    def endless(self) -> Generator[Batch, None, None]:
        while True:
            start, step = self._position, self.effective_batch_size
            ids = self._ids(start + np.arange(self.rank, step, self.world_size, dtype=np.int64))
            tokens = dummy_samples(ids, seed=self._seed, seq_len=self.seq_len, vocab_size=self._vocab_size)
            self._position = start + step
            epoch = start // self._num_samples if self._num_samples else 0
            yield Batch(tokens[:, :-1], tokens[:, 1:], ids, epoch, start // step, run_step=start // step)

    def _ids(self, positions: Integers) -> Integers:
        if not self._num_samples:
            return positions
        ids = np.empty_like(positions)
        epochs, offsets = np.divmod(positions, self._num_samples)
        for epoch in np.unique(epochs).tolist():
            key = derive_key(self._seed, "dummy order", epoch)
            ids[epochs == epoch] = permute(offsets[epochs == epoch].astype(np.uint64), self._num_samples, key)
        return ids

    def _arguments(self) -> dict[str, Any]:
        return {
            "dataset": "distributed_dummy" if self._num_samples else "dummy",
            "num_samples": self._num_samples,
            "seed": self._seed,
            "seq_len": self.seq_len,
            "vocab_size": self._vocab_size,
        }

    def _state(self) -> dict[str, Any]:
        return {**self._arguments(), "samples_taken": self._position}

    def _load(self, state: dict[str, Any]) -> None:
        for name, value in self._arguments().items():
            if state.get(name) != value:
                raise StateError(
                    f"dummy state: expected {name} {value!r}, got {state.get(name)!r}. Resuming would change the data. "
                    f"Make the dataset with the {name} of the state, or start again."
                )
        position = state.get("samples_taken")
        if type(position) is not int or position < 0:
            raise StateError(f"dummy state: expected samples_taken from 0, got {position!r}.")
        self._position = position
