"""What gives batches: the Loader, a view of its first batches, a TextStream; and their adapters to frameworks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, overload

from forebay.errors import UsageError
from forebay.load.batch import NumpyRows, NumpyTokens, RowBatch, Style, TokenBatch

if TYPE_CHECKING:
    from forebay.load.jax import JaxBatches
    from forebay.load.torch import TorchBatches, TorchRows, TorchTokens

BatchT = TypeVar("BatchT", covariant=True)
Convert: TypeAlias = Callable[[Any], Any]
Batches: TypeAlias = Generator[Any, None, None]


class BatchSource(ABC, Generic[BatchT]):
    """An iterable of batches of NumPy arrays, which PyTorch and JAX can read as well."""

    world_size: int
    global_batch_sizes: list[tuple[int, int]]
    """(run step, samples of all ranks' batches together) of each change."""

    @abstractmethod
    def iterate(self, convert: Convert | None = None, prefetch: int | None = None, num_workers: int = 0) -> Batches:
        """Iterate with each batch changed by `convert`; what adapters call.

        Args:
            convert: Called by a thread with `prefetch`, so it may run ahead of the loop.
            prefetch: Batches made ahead by a thread; None for the source's own setting.
            num_workers: Helper processes that make the batches.
        """

    def __iter__(self) -> Iterator[BatchT]:
        return self.iterate()

    @overload
    def to_torch(
        self: BatchSource[NumpyTokens], device: Any = None, prefetch: int = 2, num_workers: int = 0,
        style: Literal["batch"] = "batch",
    ) -> TorchBatches[TorchTokens]: ...  # fmt: skip
    @overload
    def to_torch(
        self: BatchSource[NumpyRows], device: Any = None, prefetch: int = 2, num_workers: int = 0,
        style: Literal["batch"] = "batch",
    ) -> TorchBatches[TorchRows]: ...  # fmt: skip
    @overload
    def to_torch(
        self, device: Any = None, prefetch: int = 2, num_workers: int = 0, *, style: Literal["plain", "transformers"]
    ) -> TorchBatches[dict[str, Any]]: ...
    def to_torch(
        self, device: Any = None, prefetch: int = 2, num_workers: int = 0, style: Style = "batch"
    ) -> TorchBatches[Any]:
        """The batches as tensors: an IterableDataset. Needs PyTorch.

        Position and state are those of this object: `state_dict()` counts the batches that the loop received.

        Args:
            device: Where tensors go, such as "cuda": they are copied from pinned memory on a stream of their own, ahead
                of the loop. None: tensors that share the memory of NumPy's arrays.
            prefetch: Batches made, and copied, ahead by a thread while the loop is busy; 0: none.
            num_workers: Helper processes that make batches, which stay until `close`. The order does not depend on it.
                Helps only where a batch costs more than a training step; 0: none.
            style: "batch": TokenBatch or RowBatch. "plain" or "transformers": dicts, as by `batch.as_dict`.
        """
        from forebay.load.torch import TorchBatches

        return TorchBatches(self, device, prefetch, num_workers, style)

    @overload
    def to_jax(
        self: BatchSource[NumpyTokens], sharding: Any = None, prefetch: int = 2
    ) -> JaxBatches[TokenBatch[Any]]: ...
    @overload
    def to_jax(self: BatchSource[NumpyRows], sharding: Any = None, prefetch: int = 2) -> JaxBatches[RowBatch[Any]]: ...
    def to_jax(self: Any, sharding: Any = None, prefetch: int = 2) -> JaxBatches[Any]:
        """The batches as `jax.Array`, of 32 bits and always of one shape. Needs JAX.

        A short last batch is padded with zeros, and with labels of -100. `sample_ids` and `dataset_index` stay NumPy
        arrays, and so does `cu_seqlens`. Position and state are those of this object.

        Args:
            sharding: Of arrays [B, ...]: the global batch's first dimension over the mesh's data axes; each process
                must hold an equal part of it, in the order of ranks. None: the local batch, on the default device.
            prefetch: Batches made, and copied, ahead by a thread while the loop is busy; 0: none.

        Raises:
            UsageError: If a global batch is not a multiple of the processes.
        """
        from forebay.load.jax import JaxBatches

        return JaxBatches(self, sharding, prefetch)


class Take(BatchSource[BatchT]):
    """The first batches of an epoch, given again by each iteration; what they are of does not move.

    Args:
        source: What they are of.
        open_batches: Returns them once more; arguments as of `iterate`.
        num_batches: How many there are; None if that is not known.
    """

    def __init__(
        self, source: BatchSource[BatchT], open_batches: Callable[[Convert | None, int | None], Batches],
        num_batches: int | None,
    ) -> None:  # fmt: skip
        self._open_batches, self._num_batches = open_batches, num_batches
        self.world_size, self.global_batch_sizes = source.world_size, source.global_batch_sizes

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError("len: expected batches of a Loader, got those of a TextStream, which may be fewer.")
        return self._num_batches

    def iterate(self, convert: Convert | None = None, prefetch: int | None = None, num_workers: int = 0) -> Batches:
        if num_workers:
            raise UsageError(f"num_workers: expected 0 for batches of take(), got {num_workers}. Leave it out.")
        with closing(self._open_batches(convert, prefetch)) as batches:
            yield from islice(batches, self._num_batches)
