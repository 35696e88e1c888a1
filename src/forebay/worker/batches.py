"""The data of a training run: a number of batches of one rank, iterable again, resumed exactly."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import StateError
from forebay.load.arguments import check_choice, rank_of_world
from forebay.load.batch import Batch
from forebay.order.step_index import check_integer


class Batches(ABC):
    """`num_batches` batches of rank `rank` of `world_size`, as (inputs, labels), each int64 [batch_size, seq_len].

    Labels are the next tokens (label i is input i + 1): a model must not shift them again. Both share memory; do not
    write to them. Each iteration begins at the first batch; the first one after `load_state_dict` continues after the
    state's. One iteration at a time. `tensors` is "auto" (PyTorch's if it is installed), "torch" or "numpy".

    `sample_ids` (int64 [batch_size]) are the numbers, over all ranks, of the samples of the last batch; `epoch` is its
    epoch.
    """

    def __init__(
        self, rank: int, world_size: int, num_batches: int, batch_size: int, seq_len: int, tensors: str
    ) -> None:
        for name, value in (("num_batches", num_batches), ("batch_size", batch_size), ("seq_len", seq_len)):
            check_integer(name, value, 1)
        check_choice("tensors", tensors, ("auto", "torch", "numpy"))
        self.rank, self.world_size = rank_of_world(rank, world_size)
        self.num_batches, self.batch_size, self.seq_len = num_batches, batch_size, seq_len
        self.sample_ids: NDArray[np.int64] = np.zeros(0, np.int64)
        self.epoch = 0
        self._as_torch = tensors != "numpy" and (tensors == "torch" or importlib.util.find_spec("torch") is not None)
        self._num_yielded, self._resumes = 0, False
        self._start = self.position()

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Every token id is below it."""

    @property
    def effective_batch_size(self) -> int:
        """Samples of all ranks' batches together."""
        return self.batch_size * self.world_size

    @abstractmethod
    def describe(self) -> str:
        """The data in one line, for logs."""

    @abstractmethod
    def position(self) -> Any:
        """The position after the last batch, for `seek` of this object or of one that `reshard` returned; cheap."""

    @abstractmethod
    def seek(self, position: Any) -> None:
        """Continue at a position."""

    @abstractmethod
    def reshard(self, rank: int, world_size: int) -> Batches:
        """The same samples from the same position on, for a rank of another world. This object is closed."""

    @abstractmethod
    def endless(self) -> Generator[Batch, None, None]:
        """This rank's batches from the position on, without end."""

    @abstractmethod
    def _state(self) -> dict[str, Any]: ...

    @abstractmethod
    def _load(self, state: dict[str, Any]) -> None: ...

    def rewind(self) -> None:
        """Seek the first batch."""
        self.seek(self._start)

    def __len__(self) -> int:
        return self.num_batches

    def batches(self) -> Iterator[Batch]:
        """The batches as NumPy arrays, with `sample_ids`, `epoch` and `step`."""
        if not self._resumes:
            self._num_yielded = 0
            self.rewind()
        self._resumes = False
        with closing(self.endless()) as batches:
            while self._num_yielded < self.num_batches:
                batch = next(batches)
                self._num_yielded += 1
                self.sample_ids, self.epoch = batch.sample_ids, batch.epoch
                yield batch

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self.batches():
            if self._as_torch:
                import torch

                yield torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels)
            else:
                yield batch.inputs, batch.labels

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch, as plain JSON values."""
        return {"given": self._num_yielded, **self._state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the next iteration at `state`. StateError if it is of other data or arguments."""
        count = state.get("given") if isinstance(state, dict) else None
        if type(count) is not int or count < 0:
            raise StateError(f"dataset state: expected what state_dict() gives, got {str(state)[:80]}.")
        self._load(state)
        self._num_yielded, self._resumes = count, True

    def close(self) -> None:  # noqa: B027  # most hold nothing open
        """End threads, close files. May be called twice."""
