"""Batches for PyTorch: an IterableDataset over a Loader, whose tensors may be on a device already.

Integers are int64, but `cu_seqlens`, which attention kernels take as int32. Host memory is pinned and copied on a CUDA
stream of its own; the loop's stream waits for the copy, not its thread. Inputs and labels that are views of one array
cross as that array. Cost without a device: 10 us a batch.
"""

from collections.abc import Iterator
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from forebay.arrays import Array
from forebay.base import Json
from forebay.errors import UsageError
from forebay.load.arguments import check_choice
from forebay.load.batch import STYLES, RowBatch, TokenBatch, owner_of
from forebay.load.rows import float_types
from forebay.order.step_index import check_integer

BatchT = TypeVar("BatchT", covariant=True)
TorchTokens: TypeAlias = TokenBatch[torch.Tensor]
TorchRows: TypeAlias = RowBatch[torch.Tensor]


class TorchBatches(IterableDataset, Generic[BatchT]):  # type: ignore[misc]  # PyTorch is not checked
    """A loader's batches as tensors; made by `Loader.to_torch`, which says what the arguments mean.

    Also for `torch.utils.data.DataLoader(batches, num_workers=3)`, whose workers make every third batch each; its
    batch_size is None, or 1: one of these batches. It has no position of its own: `loader.state_dict()` counts what the
    loop received; with workers of a DataLoader only the loop knows it, and the state is
    `loader.state_at(batch.step + 1)`.

    Raises:
        UsageError: If an argument is wrong.
    """

    def __init__(self, loader: Any, device: Any, prefetch: int, num_workers: int, style: str) -> None:
        super().__init__()
        check_choice("style", style, STYLES)
        check_integer("prefetch", prefetch, 0)
        check_integer("num_workers", num_workers, 0)
        self.device = None if device is None else open_device(device)
        self.loader, self.style = loader, style
        self._prefetch, self._num_workers, self._floats = prefetch, num_workers, float_types(loader)
        loader.readers = self._readers = loader.readers or RawArray("b", 1024)  # Worker processes at most.

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled with the counts of readers for a DataLoader's worker only; other copies have counts of their own."""
        if get_spawning_popen() is not None:
            return object.__reduce_ex__(self, protocol)
        return type(self), (self.loader, self.device, self._prefetch, self._num_workers, self.style)

    def __len__(self) -> int:
        """As the loader's."""
        return len(self.loader)

    def state_dict(self) -> Json:
        """The loader's, for trainers that save what they iterate."""
        return self.loader.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: Json) -> None:
        """The loader's."""
        self.loader.load_state_dict(state)

    def __iter__(self) -> Iterator[BatchT]:
        info = get_worker_info()
        if info is not None:
            if getattr(self.loader, "leases", self) is not None:
                raise UsageError(
                    "DataLoader: expected num_workers=0 around leased samples, a TextStream or take(), got "
                    f"{info.num_workers}: one process makes their batches. Leave num_workers out."
                )
            return self.loader.iterate_share(  # type: ignore[no-any-return]
                self._to_host, self._readers, (info.id, info.num_workers)
            )
        device = self.device
        if device is None or device.type != "cuda":
            return self.loader.iterate(self._to_host, self._prefetch, self._num_workers)  # type: ignore[no-any-return]
        index = torch.cuda.current_device() if device.index is None else device.index
        return self._iterate_cuda(torch.device("cuda", index))

    def _iterate_cuda(self, device: torch.device) -> Iterator[BatchT]:
        copies = _CudaCopies(device)
        for batch, event, tensors in self.loader.iterate(
            lambda batch: copies.start(batch, self._styled), self._prefetch, self._num_workers
        ):
            stream = torch.cuda.current_stream(device)
            stream.wait_event(event)
            for tensor in tensors:
                tensor.record_stream(stream)  # Its memory is not used again before the loop's work with it is done.
            del tensors
            yield batch
            del batch

    def _to_host(self, batch: Any) -> Any:
        if self.device is None or self.device.type == "cpu":
            return self._styled(batch, _tensors)
        return self._styled(batch, lambda arrays: {k: v.to(self.device) for k, v in _tensors(arrays).items()})

    def _styled(self, batch: Any, copy: Any) -> Any:
        def convert(arrays: dict[str, Array]) -> Json:
            bits: Json = copy(arrays)
            return bits | {k: bits[k].view(getattr(torch, kind)) for k, kind in self._floats.items() if k in bits}

        if self.style == "batch":
            return batch.with_arrays(convert(batch.arrays()))
        fields = batch.as_dict(self.style)
        arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
        return _Fields(fields, **convert(arrays))


class _Fields(Json):
    """A batch as a dictionary, which a DataLoader does not collate again."""


def _collate(batches: list[Any], **_: Any) -> Any:
    if len(batches) > 1:
        raise UsageError(
            f"DataLoader: expected batch_size=None, as these are batches, got {len(batches)}. The size of a batch is "
            "the Loader's batch_size."
        )
    return batches[0]


default_collate_fn_map.update(dict.fromkeys((TokenBatch, RowBatch, _Fields), _collate))


def open_device(device: Any) -> Any:
    """Return the device of PyTorch that a name stands for. UsageError if there is none."""
    try:
        opened = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device: expected a device of PyTorch, got {device!r}: {error}") from error
    if opened.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device: expected one of this machine, got {device!r} and no CUDA. Use device='cpu'.")
    return opened


class _CudaCopies:
    """Copies batches to a CUDA device on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def start(self, batch: Any, styled: Any) -> tuple[Any, Any, list[Any]]:
        """(the batch on the device, the event after which it is there, the tensors that own its memory)."""
        if isinstance(batch, TokenBatch):
            _ = batch.num_labels  # Counting on the device would wait for it.
        owners: list[Any] = []
        with torch.cuda.stream(self._stream):
            result = styled(batch, lambda arrays: self._copy(arrays, owners))
            event = torch.cuda.Event()
            event.record(self._stream)
        return result, event, owners

    def _copy(self, arrays: dict[str, Array], owners: list[Any]) -> Json:
        on_device: dict[int, Any] = {}
        tensors = {}
        for name, array in arrays.items():
            owner = owner_of(array)
            if id(owner) not in on_device:
                dtype = torch.from_numpy(np.empty(0, owner.dtype)).dtype
                host = torch.empty(owner.shape, dtype=dtype, pin_memory=True)
                np.copyto(host.numpy(), owner)  # `pin_memory` would occupy a thread of each processor.
                on_device[id(owner)] = host.to(self._device, non_blocking=True)
                owners.append(on_device[id(owner)])
            tensor = on_device[id(owner)]
            if owner is not array:
                size = array.itemsize
                offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
                tensor = tensor.as_strided(array.shape, [stride // size for stride in array.strides], offset // size)
            tensors[name] = tensor
        return tensors


def _tensors(arrays: dict[str, Array]) -> Json:
    return {name: torch.from_numpy(array if array.flags.writeable else array.copy()) for name, array in arrays.items()}
