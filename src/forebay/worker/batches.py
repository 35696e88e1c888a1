"""The data of a training run: a number of batches of one rank, iterable again, resumed exactly; and random data.

Random token ids test a model, a machine or a cluster without a download. Sample i is a function of (seed, i) alone, by
our own counter-based generator: any rank makes it at any time, no global generator is used, and no library's version
changes it.
"""

import importlib.util
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from forebay.arrays import I64
from forebay.base import Json
from forebay.errors import StateError
from forebay.load.arguments import rank_of_world
from forebay.load.batch import NumpyTokens, TokenBatch
from forebay.order.bijection import derive_key, permute, random_words
from forebay.order.step_index import check_integer

_log = logging.getLogger("forebay.worker")


@dataclass(eq=False)
class Batches:
    """`num_batches` batches of rank `rank` of `world_size`, as (inputs, labels), each int64 [batch_size, seq_len].

    Labels are the next tokens (label i is input i + 1): a model must not shift them again. Both share memory; do not
    write to them; they are PyTorch's if it is installed, else NumPy's. Each iteration begins at the first batch; the
    first one after `load_state_dict` continues after the state's. One iteration at a time.

    `sample_ids` (int64 [batch_size]) are the numbers, over all ranks, of the samples of the last batch; `epoch` is its
    epoch.

    Args:
        name: For the log; `about`: the data in a line.
        open_stream: Called with rank, world_size and batch_size; returns a `TextStream`, or what has its methods.
    """

    name: str
    about: str
    open_stream: Callable[..., Any]
    rank: int
    world_size: int
    num_batches: int
    batch_size: int

    def __post_init__(self) -> None:
        check_integer("num_batches", self.num_batches, 1)
        check_integer("batch_size", self.batch_size, 1)
        self.rank, self.world_size = rank_of_world(self.rank, self.world_size)
        self.stream = self.open_stream(rank=self.rank, world_size=self.world_size, batch_size=self.batch_size)
        self._num_yielded = 0
        self._resumes = False
        self.seq_len = int(self.stream.seq_len)
        self.vocab_size = int(self.stream.vocab_size)
        self.sample_ids: I64 = np.zeros(0, np.int64)
        self.epoch = self._logged_epoch = 0
        self._start = self.stream.position

    @property
    def effective_batch_size(self) -> int:
        """Samples of all ranks' batches together."""
        return self.batch_size * self.world_size

    def join_world(self, rank: int, world_size: int, samples_taken: int) -> None:
        """Continue at a sample of the run as a rank of another world: the same samples, read by other ranks."""
        self.rank = rank
        self.world_size = world_size
        self.stream.join_world(rank, world_size, self.effective_batch_size, samples_taken)

    def endless(self) -> Generator[NumpyTokens, None, None]:
        """This rank's batches from the position on, without end."""
        with closing(iter(self.stream)) as batches:
            for batch in batches:
                if batch.epoch and not self._logged_epoch:
                    self._logged_epoch = batch.epoch
                    _log.warning(
                        "%s: all of it was read; epoch %d begins, in another order.", self.name, batch.epoch + 1
                    )
                yield batch

    def __len__(self) -> int:
        return self.num_batches

    def batches(self) -> Iterator[NumpyTokens]:
        """The batches as NumPy arrays, with `sample_ids`, `epoch` and `step`."""
        if not self._resumes:
            self._num_yielded = 0
            self.stream.seek(self._start)
        self._resumes = False
        with closing(self.endless()) as batches:
            while self._num_yielded < self.num_batches:
                batch = next(batches)
                self._num_yielded += 1
                self.sample_ids = batch.sample_ids
                self.epoch = batch.epoch
                yield batch

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        as_torch = importlib.util.find_spec("torch") is not None
        for batch in self.batches():
            if as_torch:
                import torch

                yield torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels)
            else:
                yield batch.inputs, batch.labels

    def state_dict(self) -> Json:
        """The position after the last batch, as plain JSON values."""
        return {"given": self._num_yielded, "stream": self.stream.state_dict()}

    def load_state_dict(self, state: Json) -> None:
        """Continue with the next iteration at `state`. StateError if it is of other data or arguments."""
        count, stream = (state.get(name) if isinstance(state, dict) else None for name in ("given", "stream"))
        if type(count) is not int or count < 0 or not isinstance(stream, dict):
            raise StateError(f"dataset state: expected what state_dict() gives, got {str(state)[:80]}.")
        self.stream.load_state_dict(stream)
        self._num_yielded = count
        self._resumes = True

    def close(self) -> None:
        """End threads, close files. May be called twice."""
        self.stream.close()


def dummy_samples(sample_ids: I64, *, seed: int, seq_len: int, vocab_size: int) -> I64:
    """The tokens of samples, int64 [B, seq_len + 1], each uniform in [0, vocab_size); vocab_size below 2**32."""
    offsets = np.arange(seq_len + 1, dtype=np.uint64)
    counters = sample_ids.astype(np.uint64)[:, None] * np.uint64(seq_len + 1) + offsets
    words = random_words(derive_key(seed, "dummy", seq_len), counters) >> np.uint64(32)
    return (words * np.uint64(vocab_size) >> np.uint64(32)).astype(np.int64)


class DummyDataset(Batches):
    """Random samples; position k of the run belongs to rank k mod world_size.

    Not distributed, the samples are 0, 1, 2, … without end. Distributed, they are a set of `num_samples`: each epoch
    has each once, in its own order by a keyed permutation, so that the ranks' shares are disjoint and together all.
    """

    def __init__(
        self, *, num_batches: int = 100, batch_size: int = 4, seq_len: int = 32, vocab_size: int = 1024, seed: int = 42,
        rank: int = 0, world_size: int = 1, distributed: bool = False, num_samples: int = 1 << 20,
    ) -> None:  # fmt: skip
        check_integer("seq_len", seq_len, 1)
        check_integer("vocab_size", vocab_size, 2)
        check_integer("num_samples", num_samples, 1)
        kind = f"{num_samples:,} random samples, dealt" if distributed else "random samples"
        stream = partial(_DummyStream, seq_len, vocab_size, int(seed), num_samples if distributed else 0)
        super().__init__(
            "dummy", f"{kind}, ids below {vocab_size:,}", stream, rank, world_size, num_batches, batch_size
        )


@dataclass(eq=False)
class _DummyStream:
    """The stream of a DummyDataset. `position`: the number of samples of all ranks up to here."""

    seq_len: int
    vocab_size: int
    seed: int
    num_samples: int
    rank: int
    world_size: int
    batch_size: int
    position: int = 0

    def seek(self, position: int) -> None:
        self.position = int(position)

    def join_world(self, rank: int, world_size: int, global_batch_size: int, samples_taken: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.position = samples_taken

    def learn(self, state: Any) -> None:
        """Every rank knows all samples."""

    def read_on(self) -> Iterator[int]:
        return iter(())

    def close(self) -> None:
        """There is nothing to close."""

    def __iter__(self) -> Generator[NumpyTokens, None, None]:
        while True:
            start = self.position
            size = self.world_size * self.batch_size
            ids = self._ids(start + np.arange(self.rank, size, self.world_size, dtype=np.int64))
            tokens = dummy_samples(ids, seed=self.seed, seq_len=self.seq_len, vocab_size=self.vocab_size)
            self.position = start + size
            epoch = start // self.num_samples if self.num_samples else 0
            yield TokenBatch(
                inputs=tokens[:, :-1], labels=tokens[:, 1:], sample_ids=ids, epoch=epoch, step=start // size,
                epoch_step=start // size,
            )  # fmt: skip

    def _ids(self, positions: I64) -> I64:
        if not self.num_samples:
            return positions
        ids = np.empty_like(positions)
        epochs, offsets = np.divmod(positions, self.num_samples)
        for epoch in np.unique(epochs).tolist():
            key = derive_key(self.seed, "dummy order", epoch)
            ids[epochs == epoch] = permute(offsets[epochs == epoch].astype(np.uint64), self.num_samples, key)
        return ids

    def state_dict(self) -> Json:
        return {
            "dataset": "distributed_dummy" if self.num_samples else "dummy", "num_samples": self.num_samples,
            "seed": self.seed, "seq_len": self.seq_len, "vocab_size": self.vocab_size, "samples_taken": self.position,
        }  # fmt: skip

    def load_state_dict(self, state: Json) -> None:
        position = state.get("samples_taken")
        for name, value in {**self.state_dict(), "samples_taken": position}.items():
            if state.get(name) != value:
                raise StateError(
                    f"dummy state: expected {name} {value!r}, got {state.get(name)!r}. Resuming would change the data. "
                    f"Make the dataset with the {name} of the state, or start again."
                )
        if type(position) is not int or position < 0:
            raise StateError(f"dummy state: expected samples_taken from 0, got {position!r}.")
        self.position = position
