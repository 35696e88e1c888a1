"""What a worker trains on: a number of batches of one rank, counted, re-iterable, exact to resume."""

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
    """`num_batches` batches of rank `rank` of `world_size`, as (inputs, labels), each [batch_size, seq_len].

    Labels are the next tokens (label i is input i + 1): a model must not shift them once more. Both share memory; do
    not write to them. Iterating begins with the first batch each time; after `load_state_dict`, once, with the batch
    after those that the state counts. One iteration at a time. `tensors` is "auto" (PyTorch's if it is installed),
    "torch" or "numpy"; int64 in any case.

    `sample_ids` are the numbers (int64 [batch_size]) of the samples given out last, over all ranks, each of its own
    `epoch`.
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
        self._tensors = tensors != "numpy" and (tensors == "torch" or importlib.util.find_spec("torch") is not None)
        self._given = 0
        self._resuming = False
        self._begin = self.mark()

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
        """What these are, for whoever looks on."""

    @abstractmethod
    def mark(self) -> Any:
        """The place after the last batch given out, for `go_to` of this object or one that `dealt` gave; cheap."""

    @abstractmethod
    def go_to(self, mark: Any) -> None:
        """Go on from a mark."""

    @abstractmethod
    def dealt(self, rank: int, world_size: int) -> Batches:
        """The same samples from the same place on, dealt to another number of ranks. This object is closed."""

    @abstractmethod
    def endless(self) -> Generator[Batch, None, None]:
        """This rank's batches from the place on, without end."""

    @abstractmethod
    def _state(self) -> dict[str, Any]: ...

    @abstractmethod
    def _load(self, state: dict[str, Any]) -> None: ...

    def rewind(self) -> None:
        """Back to the first batch."""
        self.go_to(self._begin)

    def __len__(self) -> int:
        return self.num_batches

    def batches(self) -> Iterator[Batch]:
        """The batches with all that is known of them: NumPy arrays, `sample_ids`, `epoch`, `step`."""
        if self._resuming:
            self._resuming = False
        else:
            self._given = 0
            self.go_to(self._begin)
        if self._given >= self.num_batches:
            return
        with closing(self.endless()) as found:
            for batch in found:
                self._given += 1
                self.sample_ids, self.epoch = batch.sample_ids, batch.epoch
                yield batch
                if self._given >= self.num_batches:
                    return

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self.batches():
            if self._tensors:
                import torch

                yield torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels)
            else:
                yield batch.inputs, batch.labels

    def state_dict(self) -> dict[str, Any]:
        """Where this stands: after the last batch given out. Plain JSON values."""
        return {"given": self._given, **self._state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on where `state` was taken. StateError if it is of other data or arguments."""
        given = state.get("given") if isinstance(state, dict) else None
        if type(given) is not int or given < 0:
            raise StateError(f"dataset state: expected what state_dict() gives, got {str(state)[:80]}.")
        self._load(state)
        self._given, self._resuming = given, True

    def close(self) -> None:  # noqa: B027  # most hold nothing open
        """Ends threads, closes files. May be called twice."""
