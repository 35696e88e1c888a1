"""Batches for PyTorch: a dataset for any DataLoader, and a DataLoader whose state is exact.

    for batch in dataloader("my-dataset", seq_len=2048, batch_size=8):
        loss = model(batch["inputs"].to(device), batch["labels"].to(device))

Hides: how helper processes share a rank's steps, and that they are ahead of what was consumed. Helper k of n makes
steps k, k + n, … of those left, so that the order is the same for any n, none included; a state counts what the loop
was given, so it may be loaded with another number of helpers, on another number of ranks.

One pass (`for batch in …`) is one epoch, or what is left of it, as trainers expect; a mixture's is the whole run.
Helpers pay where making a batch is dear: one of 8 x 2048 costs the Loader 17 to 28 µs, and 25 to 28 as tensors here;
to receive it from 2 helpers 80 to 110 (PyTorch's DataLoader: 200 to 260, and 1200 for two tensors sent its own way).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
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
from forebay.load import shared_memory as parcels
from forebay.load.adapt import STYLES, named_arrays, state_after, steps_left
from forebay.load.arguments import check_choice
from forebay.load.batch import Batch
from forebay.load.loader import Loader
from forebay.load.sources import Mixture

_BOARD_BYTES = 1 << 16
_BOARD_HEADER = 16  # Mark, length of the state: int64 each.
_BUNDLE_BYTES = 1 << 20
_MOST_BUNDLED = 16  # Batches of a message.


class TokenDataset(IterableDataset):  # type: ignore[misc]  # PyTorch is not checked
    """A Loader's batches as dicts of tensors, for `torch.utils.data.DataLoader(dataset, batch_size=None)`.

    Works in this process, in helper processes however they are started, and in torchdata's StatefulDataLoader. It is
    pickled as arguments and state: a helper opens its own Loader. In this process the tensors are the Loader's own
    arrays, not copies.

    With PyTorch's own DataLoader and helpers every pass takes the next epoch, also if the last one was left early;
    which passes are which it tells by the seed that PyTorch draws for each, so do not set one seed before each pass.
    Forebay's DataLoader needs no such care, and goes on where the loop was left.

    Args:
        dataset: As the Loader's: a path, a URL, an open Dataset.
        style: "plain" or "transformers" (`input_ids`, and `labels` as models of Hugging Face want them); the names are
            those of `forebay.load.adapt.named_arrays`.
        arguments: The Loader's. Rank and world size, if not given, are torch.distributed's if it is initialised when
            the first batch is asked for, else the environment's. `epochs` is None by default: as many as are asked for.
    """

    def __init__(self, dataset: str | Path | Dataset | Mixture | Loader, *, style: str = "plain", **arguments: Any):
        super().__init__()
        check_choice("style", style, STYLES)
        self.style = style
        self.bundles: int | None = None  # Set in helpers of Forebay's DataLoader: batches of a message at most.
        self._board = _Board()
        if isinstance(dataset, Loader):
            if arguments:
                raise UsageError(f"{', '.join(arguments)}: expected none beside a Loader, which has its own.")
            arguments = dataset.portable_arguments()
            self._board.write(dataset.state_dict())
        else:
            arguments = {"epochs": None, **arguments, "dataset": dataset}
        self._arguments = arguments
        self._opened: tuple[int, tuple[int, int], Loader] | None = None  # Process id, stride, loader.
        self._length: int | None = None
        self._running = False
        self._turn = self._passes = 0
        self._place: dict[str, Any] | None = None  # In a helper: where its pass stands.
        self._resumed: dict[str, Any] | None = None  # In a helper: where its next pass begins.

    def __getstate__(self) -> dict[str, Any]:
        kept = {"_opened": None, "_running": False, "_place": None, "_resumed": None, "_passes": 0}
        return {**self.__dict__, **kept, "_arguments": self.loader().portable_arguments()}

    def __len__(self) -> int:
        """Steps of a pass from an epoch's beginning. Raises TypeError if it has no end."""
        self.loader()
        if self._length is None:
            raise TypeError("len: this mixture has no end. Give steps=.")
        return self._length

    def loader(self, every: tuple[int, int] = (0, 1)) -> Loader:
        """This process's Loader, opened when first asked for. It is the dataset's: iterate the dataset instead."""
        opened = self._opened
        if opened is None or opened[:2] != (os.getpid(), every):
            if opened is None:
                self._settle_rank()
            elif opened[0] != os.getpid():
                self._arguments = opened[2].portable_arguments()  # Another process's maps and threads, come by a fork.
            loader = Loader(**{**self._arguments, "every": every})
            self._opened = opened = os.getpid(), every, loader
            self._length = steps_left(loader, loader.state_dict())
        return opened[2]

    def close(self) -> None:
        """Close this process's Loader. Asking for batches opens it again."""
        if self._opened is not None and self._opened[0] == os.getpid():
            self._opened[2].close()

    def state_dict(self) -> dict[str, Any]:
        """After the last batch that was given out: the Loader's state, and in a helper process the helper's place."""
        if self._place is not None:
            return dict(self._place)
        return self.loader().state_dict() if self._running else self.base_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. A helper's state is for the same helper of as many.

        Raises:
            StateError: As the Loader's `load_state_dict`.
        """
        info = get_worker_info()
        helper = None if info is None else [info.id, info.num_workers]
        if helper is not None and "helper" not in state:
            state = {"start": state, "helper": helper, "given": 0}
        if state.get("helper") != helper:
            taken = state.get("helper")
            raise StateError(
                f"loader state: expected one of {_worker(helper)}, got one of {_worker(taken)}. Resume with "
                f"num_workers={taken[1] if isinstance(taken, list) and len(taken) == 2 else 0}, as it was taken. "
                "States of a Loader, or of forebay's own DataLoader, fit any number of workers."
            )
        if helper is not None:
            self._resumed = dict(state)
            return
        self.loader().load_state_dict(state)
        self._turn += 1
        self._running = False
        self._board.write(state)

    def base_state(self) -> dict[str, Any]:
        """Where the next pass begins."""
        return self._board.read() or self.state_after(None, 0)

    def state_after(self, state: dict[str, Any] | None, steps: int) -> dict[str, Any]:
        """The state `steps` batches after `state` (None: the run's beginning), for one who counts steps himself.

        Arithmetic: a pass that is going on is not disturbed.
        """
        loader = self.loader()
        return state_after(loader, {"step": 0} if state is None else state, steps)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:
            return self._in_process()
        return self._in_helper(info.id, info.num_workers, info.seed - info.id)

    def _in_process(self) -> Iterator[dict[str, Any]]:
        self._turn += 1
        turn, loader = self._turn, self.loader()
        state = self.base_state()
        loader.load_state_dict(state)
        steps = steps_left(loader, state)
        self._running = True
        try:
            for batch in islice(loader, steps):
                yield _tensors(named_arrays(batch, self.style))
                if turn != self._turn:
                    raise UsageError("iteration: ended when another began or a state was loaded. Iterate again.")
                del batch  # So that its buffer is free for the next one.
        finally:
            if turn == self._turn:
                self._running = False
                self._board.write(loader.state_dict())

    def _in_helper(self, helper: int, helpers: int, seed: int) -> Iterator[Any]:
        """This helper's part of a pass. Where it stands is known before the first batch is asked for."""
        loader, resumed = self.loader((helper, helpers)), self._resumed
        self._resumed = None
        start = self._start_of_pass(loader, None if resumed is None else resumed["start"], seed)
        self._passes += 1
        given = 0 if resumed is None else int(resumed["given"])
        self._place = {"start": start, "helper": [helper, helpers], "given": given}
        steps = steps_left(loader, start)
        left = None if steps is None else max(0, -(-(steps - helper) // helpers) - given)
        batches: Iterator[Batch] = iter(())
        if left != 0:
            loader.load_state_dict(state_after(loader, start, given * helpers))
            batches = islice(loader, left)
        if self.bundles is None:
            return self._counted(batches)
        named = (named_arrays(batch, self.style) for batch in batches)
        return parcels.bundled(named, self.bundles, _Received)

    def _counted(self, batches: Iterator[Batch]) -> Iterator[_Parcel]:
        for batch in batches:
            assert self._place is not None
            self._place = {**self._place, "given": self._place["given"] + 1}
            yield _Parcel(_tensors(named_arrays(batch, self.style)))
            del batch

    def _start_of_pass(self, loader: Loader, resumed: dict[str, Any] | None, seed: int) -> dict[str, Any]:
        base = self.base_state() if resumed is None else resumed
        loader.load_state_dict(base)  # Which checks it.
        if self.bundles is not None:
            return base  # What Forebay's DataLoader wrote for this pass.
        mark = hash((seed, self._passes)) & 0x7FFF_FFFF
        epoch = self._board.begin_pass(mark, base["epoch"], resumed is not None)
        while base["epoch"] < epoch:
            steps = steps_left(loader, base)
            if not steps:
                break
            base = state_after(loader, base, steps)
        return base

    def _settle_rank(self) -> None:
        """As given; else torch.distributed's, if there is one; else the Loader asks the environment."""
        given, distributed = self._arguments, torch.distributed
        if given.get("rank") is not None or given.get("world_size") is not None:
            return
        if distributed.is_available() and distributed.is_initialized():
            world = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
            self._arguments = {**given, **world}


class DataLoader(TorchDataLoader):  # type: ignore[misc]  # PyTorch is not checked
    """PyTorch's DataLoader over a TokenDataset, with a state that is exact however many helpers run ahead.

    Leaving a loop early and iterating again goes on with the next batch, as the Loader does; so does loading a state.
    The order of batches is the same for any number of helpers. A helper sends several small batches in one message
    (of 1 MiB at most; the first ones alone), and its memory is used again, so that receiving costs little.

    Args:
        dataset: Batches of it are taken as they are.
        num_workers: Helper processes; 0: none, and nothing of PyTorch's machinery between loop and Loader.
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
        self._began: dict[str, Any] | None = None
        self._given = 0
        self._turn = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: after the last batch that it was given. The Loader's own form, for any rank."""
        if self.num_workers == 0:
            return self.dataset.state_dict()
        return self.dataset.state_after(self._began, self._given)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, by a DataLoader or Loader of any rank, world size and number of helpers.

        Raises:
            StateError: As the Loader's `load_state_dict`.
        """
        self.dataset.load_state_dict(state)
        self._began, self._given = dict(state), 0
        self._turn += 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.num_workers == 0:
            return map(_pinned, self.dataset) if self.pin_memory and torch.cuda.is_available() else iter(self.dataset)
        return self._received()

    def _received(self) -> Iterator[dict[str, Any]]:
        self._turn += 1
        turn = self._turn
        self._began, self._given = self.state_dict(), 0
        self.dataset.load_state_dict(self._began)
        for received, index in parcels.in_turn(super().__iter__(), self.num_workers):
            self._given += 1
            yield received.tensors(index)
            if turn != self._turn:
                raise UsageError("iteration: ended when another began or a state was loaded. Iterate again.")

    def _get_iterator(self) -> Any:
        """PyTorch's own, whose helpers know that they bundle."""
        given = self.__dict__["worker_init_fn"]
        if self.num_workers:
            self.worker_init_fn = _Bundling(_batches_of_a_message(self.dataset.loader()), given)
        try:
            return super()._get_iterator()
        finally:
            self.worker_init_fn = given


def dataloader(
    dataset: str | Path | Dataset | Mixture | Loader, *, num_workers: int = 0, style: str = "plain", **arguments: Any
) -> DataLoader:
    """A DataLoader in one line: under torchrun, DDP, FSDP or Horovod each rank gets its part, cached and resumable.

    Args:
        dataset, style: As `TokenDataset`.
        num_workers: As `DataLoader`.
        arguments: Those of the Loader (seq_len, batch_size, cache_dir, …) and PyTorch's options.
    """
    options = {name: arguments.pop(name) for name in _OPTIONS.split() if name in arguments}
    return DataLoader(TokenDataset(dataset, style=style, **arguments), num_workers, **options)


_OPTIONS = "pin_memory prefetch_factor persistent_workers multiprocessing_context timeout worker_init_fn generator"


class _Board:
    """A loader's state, or none; and which pass began last, of which epoch: in memory that helper processes share."""

    def __init__(self) -> None:
        self.__setstate__(torch.zeros(_BOARD_BYTES, dtype=torch.uint8))

    def __getstate__(self) -> Any:
        """The memory itself for a process that is being started; for anything else (a copy) what is in it."""
        return self._memory

    def __setstate__(self, memory: Any) -> None:
        self._memory = memory.share_memory_()
        self._bytes: NDArray[np.uint8] = memory.numpy()
        self._numbers = self._bytes[:_BOARD_HEADER].view(np.int64)

    def read(self) -> dict[str, Any] | None:
        """The state written last, if any was."""
        length = int(self._numbers[1])
        return json.loads(self._bytes[_BOARD_HEADER : _BOARD_HEADER + length].tobytes()) if length else None

    def write(self, state: dict[str, Any]) -> None:
        """The next pass begins at `state`. Raises StateError if it is too long."""
        text, most = json.dumps(state).encode(), _BOARD_BYTES - _BOARD_HEADER
        if len(text) > most:
            raise StateError(f"loader state: expected at most {most} bytes of JSON, got {len(text)}.")
        self._bytes[_BOARD_HEADER : _BOARD_HEADER + len(text)] = np.frombuffer(text, np.uint8)
        self._numbers[:] = 0, len(text)

    def begin_pass(self, mark: int, first_epoch: int, at_first: bool) -> int:
        """The epoch of the pass that all helpers know as `mark`: the one after the last pass's.

        Args:
            mark: In [0, 2**31); the same for all helpers of a pass.
            first_epoch: Of the first pass since a state was written, and of this one if `at_first`.
        """
        value = int(self._numbers[0])
        epoch = first_epoch
        if value and not at_first:
            epoch = (value & 0xFFFF_FFFF) - 1
            epoch += value >> 32 != mark
        self._numbers[0] = mark << 32 | epoch + 1
        return epoch


class _Parcel(dict[str, Any]):
    """A batch in a helper: a dict of tensors; pickled, one piece of shared memory; then a plain dict again."""

    def __copy__(self) -> _Parcel:
        return _Parcel(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _one_received, parcels.write([{name: _array(value) for name, value in self.items()}])


def _one_received(*message: Any) -> dict[str, Any]:
    return _Received(parcels.read(*message)).tensors(0)


class _Received:
    """A bundle of batches in the process that trains."""

    def __init__(self, parcel: parcels.Parcel) -> None:
        self._parcel = parcel

    def __len__(self) -> int:
        return len(self._parcel)

    def tensors(self, index: int) -> dict[str, Any]:
        """Batch `index`, its tensors views of shared (or pinned) memory."""
        return _tensors(self._parcel.unpack(index))

    def pin_memory(self) -> _Received:
        """The same in pinned memory, by one copy; PyTorch calls it in its thread for that."""
        pinned = torch.from_numpy(np.asarray(self._parcel.raw)).pin_memory()
        return _Received(replace(self._parcel, raw=pinned.numpy()))


class _Bundling:
    """What a helper of Forebay's DataLoader runs first."""

    def __init__(self, most: int, then: Callable[[int], None] | None) -> None:
        self._most, self._then = most, then

    def __call__(self, helper: int) -> None:
        get_worker_info().dataset.bundles = self._most
        if self._then is not None:
            self._then(helper)


def _batches_of_a_message(loader: Loader) -> int:
    if loader.seq_len is None:
        return 1  # Rows of any size.
    samples = -(-loader.order.global_batch // loader.world_size)
    return min(_MOST_BUNDLED, max(1, _BUNDLE_BYTES // (samples * loader.seq_len * 8)))


def _array(value: Any) -> Any:
    """A tensor as an array that shares its memory; what is none, or cannot be, as it is."""
    if isinstance(value, torch.Tensor):
        with contextlib.suppress(TypeError, RuntimeError):
            return value.numpy()
    return value


def _tensors(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: _tensor(one) if isinstance(one, np.ndarray) else one for name, one in arrays.items()}


def _tensor(array: NDArray[Any]) -> Any:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _pinned(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: one.pin_memory() if isinstance(one, torch.Tensor) else one for name, one in batch.items()}


def _worker(place: object) -> str:
    """Whose state it is: [which, of how many] workers, or None."""
    return f"worker {place[0]} of {place[1]}" if isinstance(place, list) and len(place) == 2 else "the loader itself"
