"""Batches for PyTorch: a dataset for any DataLoader, and a DataLoader whose state is exact.

Helper k of n makes steps k, k + n, ... of those that remain, so the order is the same for any n, also 0. A state counts
the batches that the loop received, not those that helpers made. One pass (`for batch in ...`) is one epoch, or the rest
of it; of a mixture, the whole run. Helpers pay off only where a batch is expensive: one of 8 x 2048 costs the Loader 17
to 28 µs; receiving it from 2 helpers costs 80 to 110.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, get_worker_info

from forebay.dataset.reader import Dataset
from forebay.errors import StateError, UsageError
from forebay.load import shared_memory
from forebay.load.arguments import check_choice
from forebay.load.batch import STYLES, Batch
from forebay.load.loader import Loader
from forebay.load.sources import Mixture

_STATE_BYTES = 1 << 16
_STATE_HEADER = 16  # int64 each: the pass, the length of the state.
_BUNDLE_BYTES = 1 << 20
_MAX_BUNDLED = 16  # Batches of a message.
_TORCH_OPTIONS = (
    "pin_memory", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout", "worker_init_fn",
    "generator",
)  # fmt: skip


class TokenDataset(IterableDataset):  # type: ignore[misc]  # PyTorch is not checked
    """A Loader's batches as dicts of tensors, for `torch.utils.data.DataLoader(dataset, batch_size=None)`.

    Works in this process, in helper processes of any start method, and in torchdata's StatefulDataLoader. It is pickled
    as arguments and state: a helper opens its own Loader. In this process the tensors share the Loader's memory.

    With PyTorch's own DataLoader and helpers every pass takes the next epoch, also if the last one was left early. It
    tells passes apart by the seed that PyTorch draws for each, so do not set one seed before each pass. Forebay's
    DataLoader does not depend on it, and continues where the loop was left.

    Args:
        dataset: As the Loader's: a path, a URL, an open Dataset or a Mixture.
        style: "plain" or "transformers" (`input_ids`, and `labels` as models of Hugging Face expect them); the names
            are those of `Batch.as_dict`.
        arguments: The Loader's. Rank and world size are by default torch.distributed's, if it is initialized when the
            first batch is read, else the environment's. `epochs` is None by default: a pass for each `for`.
    """

    def __init__(self, dataset: str | Path | Dataset | Mixture, *, style: str = "plain", **arguments: Any):
        super().__init__()
        check_choice("style", style, STYLES)
        self.style = style
        self.max_bundled: int | None = None  # Set in helpers of Forebay's DataLoader: batches of a message.
        self._shared = _SharedState()
        self._arguments: dict[str, Any] = {"epochs": None, **arguments, "dataset": dataset}
        self._opened: tuple[int, tuple[int, int], Loader] | None = None  # Process id, `every`, loader.
        self._length: int | None = None
        self._running = False
        self._iteration = self._passes = 0
        self._helper_state: dict[str, Any] | None = None  # In a helper: the state of its pass.
        self._resumed: dict[str, Any] | None = None  # In a helper: the state of its next pass.

    def __getstate__(self) -> dict[str, Any]:
        own = {"_opened": None, "_running": False, "_helper_state": None, "_resumed": None, "_passes": 0}
        return {**self.__dict__, **own, "_arguments": self.loader().portable_arguments()}

    def __len__(self) -> int:
        """Steps of a pass from an epoch's start. Raises TypeError if it has no end."""
        self.loader()
        if self._length is None:
            raise TypeError("len: this mixture has no end. Give steps=.")
        return self._length

    def loader(self, every: tuple[int, int] = (0, 1)) -> Loader:
        """This process's Loader, opened at the first call. Iterate the dataset, not the Loader."""
        opened = self._opened
        if opened is None or opened[:2] != (os.getpid(), every):
            if opened is None:
                self._resolve_rank()
            elif opened[0] != os.getpid():
                self._arguments = opened[2].portable_arguments()  # Its maps and threads belong to the parent process.
            loader = Loader(**{**self._arguments, "every": every})
            self._opened = opened = os.getpid(), every, loader
            self._length = loader.steps_remaining(loader.state_dict()["step"])
        return opened[2]

    def close(self) -> None:
        """Close this process's Loader. Iterating opens it again."""
        if self._opened is not None and self._opened[0] == os.getpid():
            self._opened[2].close()

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch: the Loader's, and in a helper process the helper's."""
        if self._helper_state is not None:
            return dict(self._helper_state)
        return self.loader().state_dict() if self._running else self.base_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `state`. A helper's state is for the same helper of as many.

        Raises:
            StateError: As the Loader's `load_state_dict`.
        """
        info = get_worker_info()
        helper = None if info is None else [info.id, info.num_workers]
        if helper is not None and "helper" not in state:
            state = {"start": state, "helper": helper, "given": 0}
        taken = state.get("helper")
        if taken != helper:
            raise StateError(
                f"loader state: expected one of {_worker_name(helper)}, got one of {_worker_name(taken)}. Resume with "
                f"num_workers={taken[1] if isinstance(taken, list) and len(taken) == 2 else 0}, as it was taken. "
                "States of a Loader, or of forebay's own DataLoader, fit any number of workers."
            )
        if helper is not None:
            self._resumed = dict(state)
            return
        self.loader().load_state_dict(state)
        self._iteration += 1
        self._running = False
        self._shared.write(state)

    def base_state(self) -> dict[str, Any]:
        """The state from which the next pass starts."""
        return self._shared.read() or self.state_after(None, 0)

    def state_after(self, state: dict[str, Any] | None, steps: int) -> dict[str, Any]:
        """The state `steps` batches after `state` (None: the run's start). A running pass is not changed."""
        return self.loader().state_at((0 if state is None else state["step"]) + steps)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:
            return self._iterate()
        return self._iterate_as_helper(info.id, info.num_workers, info.seed - info.id)

    def _iterate(self) -> Iterator[dict[str, Any]]:
        self._iteration += 1
        iteration, loader = self._iteration, self.loader()
        state = self.base_state()
        loader.load_state_dict(state)
        steps = loader.steps_remaining(state["step"])
        self._running = True
        try:
            for batch in islice(loader, steps):
                yield _tensors(batch.as_dict(self.style))
                _check_iteration(iteration, self._iteration)
                del batch  # Its memory is free for the next one.
        finally:
            if iteration == self._iteration:
                self._running = False
                self._shared.write(loader.state_dict())

    def _iterate_as_helper(self, helper: int, helpers: int, seed: int) -> Iterator[Any]:
        loader, resumed = self.loader((helper, helpers)), self._resumed or {}
        self._resumed = None
        start = self._start_of_pass(loader, resumed.get("start"), seed)
        self._passes += 1
        num_sent = int(resumed.get("given", 0))
        self._helper_state = {"start": start, "helper": [helper, helpers], "given": num_sent}
        steps = loader.steps_remaining(start["step"])
        remaining = None if steps is None else max(0, -(-(steps - helper) // helpers) - num_sent)
        batches: Iterator[Batch] = iter(())
        if remaining != 0:
            loader.load_state_dict(loader.state_at(start["step"] + num_sent * helpers))
            batches = islice(loader, remaining)
        if self.max_bundled is None:
            return self._count_sent(batches)
        arrays = (batch.as_dict(self.style) for batch in batches)
        return shared_memory.bundle_batches(arrays, self.max_bundled, _TensorBundle)

    def _count_sent(self, batches: Iterator[Batch]) -> Iterator[_TensorBatch]:
        for batch in batches:
            assert self._helper_state is not None
            self._helper_state = {**self._helper_state, "given": self._helper_state["given"] + 1}
            yield _TensorBatch(_tensors(batch.as_dict(self.style)))
            del batch

    def _start_of_pass(self, loader: Loader, resumed: dict[str, Any] | None, seed: int) -> dict[str, Any]:
        start = self.base_state() if resumed is None else resumed
        loader.load_state_dict(start)  # Checks it.
        if self.max_bundled is not None:
            return start  # Forebay's DataLoader wrote it for this pass.
        pass_id = hash((seed, self._passes)) & 0x7FFF_FFFF
        epoch = self._shared.start_pass(pass_id, start["epoch"], resumed is not None)
        while start["epoch"] < epoch and (steps := loader.steps_remaining(start["step"])):
            start = loader.state_at(start["step"] + steps)
        return start

    def _resolve_rank(self) -> None:
        arguments, distributed = self._arguments, torch.distributed
        if arguments.get("rank") is not None or arguments.get("world_size") is not None:
            return
        if distributed.is_available() and distributed.is_initialized():
            world = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
            self._arguments = {**arguments, **world}


class DataLoader(TorchDataLoader):  # type: ignore[misc]  # PyTorch is not checked
    """PyTorch's DataLoader over a TokenDataset, with a state that is exact for any number of helpers.

    After leaving a loop early, or loading a state, the next loop continues with the next batch. The order of batches is
    the same for any number of helpers. A helper sends several small batches in one message (of 1 MiB at most), through
    shared memory that is used again.

    Args:
        dataset: Its batches are used as they are.
        num_workers: Helper processes; 0: none, and nothing of PyTorch's between loop and Loader.
        options: PyTorch's: pin_memory, prefetch_factor, persistent_workers, multiprocessing_context, timeout,
            worker_init_fn, generator. Batch size, order and shuffling are the dataset's.
    """

    dataset: TokenDataset

    def __init__(self, dataset: TokenDataset, num_workers: int = 0, **options: Any) -> None:
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "collate_fn", "drop_last"):
            if options.pop(name, None):
                raise UsageError(f"{name}: batches are the dataset's. Give its arguments to TokenDataset instead.")
        if not isinstance(dataset, TokenDataset):
            raise UsageError(f"DataLoader: expected a TokenDataset, got {type(dataset).__name__}.")
        super().__init__(dataset, batch_size=None, num_workers=num_workers, **options)
        self._start: dict[str, Any] | None = None
        self._num_received = 0
        self._iteration = 0

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that the loop received; a Loader's state, for any rank."""
        if self.num_workers == 0:
            return self.dataset.state_dict()
        return self.dataset.state_after(self._start, self._num_received)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `state`, taken by a DataLoader or Loader of any rank, world size and number of helpers.

        Raises:
            StateError: As the Loader's `load_state_dict`.
        """
        self.dataset.load_state_dict(state)
        self._start, self._num_received = dict(state), 0
        self._iteration += 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.num_workers:
            return self._receive()
        return map(_pin, self.dataset) if self.pin_memory and torch.cuda.is_available() else iter(self.dataset)

    def _receive(self) -> Iterator[dict[str, Any]]:
        self._iteration += 1
        iteration = self._iteration
        self._start, self._num_received = self.state_dict(), 0
        self.dataset.load_state_dict(self._start)
        for bundle, index in shared_memory.order_bundles(super().__iter__(), self.num_workers):
            self._num_received += 1
            yield bundle.tensors(index)
            _check_iteration(iteration, self._iteration)

    def _get_iterator(self) -> Any:
        """PyTorch's iterator; its helper processes get the dataset as it is now."""
        self.dataset.max_bundled = _batches_of_message(self.dataset.loader()) if self.num_workers else None
        try:
            return super()._get_iterator()
        finally:
            self.dataset.max_bundled = None


def dataloader(
    dataset: str | Path | Dataset | Mixture, *, num_workers: int = 0, style: str = "plain", **arguments: Any
) -> DataLoader:
    """A DataLoader in one call: under torchrun, DDP, FSDP or Horovod each rank reads its part.

    Args:
        dataset, style: As `TokenDataset`.
        num_workers: As `DataLoader`.
        arguments: Those of the Loader (seq_len, batch_size, cache_dir, ...) and PyTorch's options.
    """
    options = {name: arguments.pop(name) for name in _TORCH_OPTIONS if name in arguments}
    return DataLoader(TokenDataset(dataset, style=style, **arguments), num_workers, **options)


class _SharedState:
    def __init__(self) -> None:
        self.__setstate__(torch.zeros(_STATE_BYTES, dtype=torch.uint8))

    def __getstate__(self) -> Any:
        """The memory itself for a process that is being started; its contents for a copy."""
        return self._memory

    def __setstate__(self, memory: Any) -> None:
        self._memory = memory.share_memory_()
        self._bytes: NDArray[np.uint8] = memory.numpy()
        self._numbers = self._bytes[:_STATE_HEADER].view(np.int64)

    def read(self) -> dict[str, Any] | None:
        length = int(self._numbers[1])
        return json.loads(self._bytes[_STATE_HEADER : _STATE_HEADER + length].tobytes()) if length else None

    def write(self, state: dict[str, Any]) -> None:
        """Start the next pass at `state`. Raises StateError if it is too long."""
        text, maximum = json.dumps(state).encode(), _STATE_BYTES - _STATE_HEADER
        if len(text) > maximum:
            raise StateError(f"loader state: expected at most {maximum} bytes of JSON, got {len(text)}.")
        self._bytes[_STATE_HEADER : _STATE_HEADER + len(text)] = np.frombuffer(text, np.uint8)
        self._numbers[:] = 0, len(text)

    def start_pass(self, pass_id: int, first_epoch: int, is_first: bool) -> int:
        """The epoch of a pass, whose id all its helpers share: one more than the last pass's, else `first_epoch`."""
        last = int(self._numbers[0])  # Its id and epoch + 1.
        epoch = first_epoch
        if last and not is_first:
            epoch = (last & 0xFFFF_FFFF) - 1 + (last >> 32 != pass_id)
        self._numbers[0] = pass_id << 32 | epoch + 1
        return epoch


class _TensorBatch(dict[str, Any]):
    """A batch of tensors in a helper of PyTorch's DataLoader: sent through one piece of shared memory, as a dict."""

    def __copy__(self) -> _TensorBatch:
        return _TensorBatch(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_batch, shared_memory.write([{name: _array(value) for name, value in self.items()}])


def _receive_batch(*message: Any) -> dict[str, Any]:
    return _TensorBundle(shared_memory.read(*message)).tensors(0)


class _TensorBundle:
    def __init__(self, bundle: shared_memory.BatchBundle) -> None:
        self._bundle = bundle
        self._batches = bundle.unpack()

    def __len__(self) -> int:
        return len(self._batches)

    def tensors(self, index: int) -> dict[str, Any]:
        """Batch `index`, its tensors views of shared (or pinned) memory."""
        return _tensors(self._batches[index])

    def pin_memory(self) -> _TensorBundle:
        """The same in pinned memory, by one copy; PyTorch calls it in its thread for that."""
        pinned = torch.from_numpy(np.asarray(self._bundle.raw)).pin_memory()
        return _TensorBundle(replace(self._bundle, raw=pinned.numpy()))


def _batches_of_message(loader: Loader) -> int:
    if loader.seq_len is None:
        return 1  # Rows of any size.
    samples = -(-loader.order.global_batch // loader.world_size)
    return min(_MAX_BUNDLED, max(1, _BUNDLE_BYTES // (samples * loader.seq_len * 8)))


def _check_iteration(iteration: int, current: int) -> None:
    if iteration != current:
        raise UsageError("iteration: ended when another began or a state was loaded. Iterate again.")


def _array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        with contextlib.suppress(TypeError, RuntimeError):
            return value.numpy()
    return value


def _tensors(arrays: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.from_numpy(value if value.flags.writeable else value.copy())
        if isinstance(value, np.ndarray)
        else value
        for name, value in arrays.items()
    }


def _pin(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.pin_memory() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _worker_name(helper: object) -> str:
    return (
        f"worker {helper[0]} of {helper[1]}" if isinstance(helper, list) and len(helper) == 2 else "the loader itself"
    )
