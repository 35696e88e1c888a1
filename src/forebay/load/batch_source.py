"""What gives batches: the Loader, a view of its first batches, a TextStream; and their adapters to frameworks."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, overload

from forebay.base import Closing
from forebay.errors import UsageError, package_for
from forebay.load.batch import NumpyRows, NumpyTokens, RowBatch, Style, TokenBatch
from forebay.load.prefetch import Prefetcher
from forebay.load.stats import Bottleneck, Callback, Callbacks, Spent, WaitTimes, find_bottleneck

if TYPE_CHECKING:
    from forebay.load.jax import JaxBatches
    from forebay.load.torch import TorchBatches, TorchRows, TorchTokens

BatchT = TypeVar("BatchT", covariant=True)
Convert: TypeAlias = Callable[[Any], Any]
Batches: TypeAlias = Generator[Any, None, None]
Opened: TypeAlias = "tuple[Prefetcher[Any], Callable[[], Spent], float]"
"""A source of batches, what it spent so far, and how soon a batch comes that was ready; see `WaitTimes.end`."""


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

    readers: Any = None  # Shared with the workers of a DataLoader of PyTorch: 1 for each that has begun.

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
        with package_for("to_torch"):
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
        with package_for("to_jax"):
            from forebay.load.jax import JaxBatches

        return JaxBatches(self, sharding, prefetch)


class RunningSource(Closing, BatchSource[BatchT]):
    """Batches that are made while a loop asks for them: a Loader, a TextStream. One iteration at a time."""

    step: int
    """Steps of the run so far, over all passes: of batches that iterating returned."""
    title: str
    cache_bytes = 0  # Limit of the cache; 0 without one.
    settings = ""
    """The settings that are not their default, as text."""
    _mfu = 0.0, 0.0  # Seconds of a token at the device's peak, and the tokens before they were counted.

    def _reset(self) -> None:
        """Make everything that iterating changes."""
        self.waits, self._callbacks = WaitTimes(), Callbacks(self)
        self._iteration = 0
        self._source: Prefetcher[Any] | None = None

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Times in seconds, and counts, since this object was made."""

    @abstractmethod
    def _num_units(self) -> float:
        """Tokens received since this object was made, or samples where they have no length."""

    @abstractmethod
    def pass_of(self, step: int) -> tuple[int, int | None]:
        """The steps [start, stop) of the pass that a step belongs to; stop is None without an end."""

    @abstractmethod
    def _open(self, convert: Convert | None, prefetch: int | None, num_workers: int) -> Opened:
        """Begin to make batches at the present step."""

    @abstractmethod
    def _receive(self, item: Any) -> Any:
        """Count an item of the source as received, and return its batch; None if it cannot be used any more."""

    @abstractmethod
    def _check_iteration(self, num_workers: int) -> None:
        """Raise UsageError if the next iteration cannot be; warn if it gives nothing."""

    def _pause(self) -> None:
        """End the thread that makes batches ahead. An iteration goes on from the present step."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def iterate(self, convert: Convert | None = None, prefetch: int | None = None, num_workers: int = 0) -> Batches:
        self._check_iteration(num_workers)
        self._pause()
        self._iteration += 1
        iteration, waits, callbacks, clock = self._iteration, self.waits, self._callbacks, time.perf_counter
        never = math.inf  # As a local name it outlives the modules when Python ends within the loop.
        waits.asked_at = clock()
        try:
            while True:
                if iteration != self._iteration:
                    name = type(self).__name__
                    raise UsageError(f"{name}: this iteration ended when another began. Open another {name} for two.")
                source = self._source
                if source is None:
                    self._pause()  # In a forked child, the plans are still the parent's.
                    source, spent, ready_s = self._open(convert, prefetch, num_workers)
                    self._source, waits.spent = source, spent()
                item = next(source, None)
                batch = None if item is None else self._receive(item)
                if batch is None and item is not None:
                    continue
                received_at = waits.end(spent(), ready_s)
                if item is None:
                    return
                del item
                yield batch
                del batch  # Its memory is free for the next one.
                self.commit()
                if callbacks.functions:
                    callbacks.call(self.step)
                waits.asked_at = asked_at = clock()
                waits.busy_s += asked_at - received_at
        finally:
            waits.asked_at = never
            if iteration == self._iteration:
                self._pause()

    def commit(self) -> None:
        """Count the last batch as used, before the next one is asked for: before a checkpoint, or a `break`.

        For a loader with `scheduler`; without one nothing is done.
        """

    def bottleneck(self) -> Bottleneck | None:
        """The main cause of waiting since this object was made; None below 5 % of the time."""
        return find_bottleneck(self.waits.seconds, time.perf_counter() - self.waits.started_at)

    def add_callback(self, fn: Callback, every_steps: int = 50) -> None:
        """Call `fn(metrics, step)` every so many steps, in the loop's thread; see `forebay.callbacks` for loggers.

        Metrics are of the steps since the last call: `tokens_per_s` (or `samples_per_s`), `wait_share` (the fraction of
        the time spent waiting for batches), `wait_CAUSE_share`, and after `measure_mfu` `mfu`; and `epoch`, `samples`,
        `tokens` of the run so far.
        """
        self._callbacks.add(fn, every_steps)

    def measure_mfu(self, flops: float, peak_flops: float | str = "") -> None:
        """Report model FLOPs utilization, in [0, 1], as `mfu` beside `wait_share`; `stats()` has it as `ideal_s`.

        It is this rank's: of its tokens, and of the devices that train them. Ranks take their steps together: for all
        of them it is the mean.

        Args:
            flops: Operations that training takes for a token, of rows for a sample; see `forebay.load.mfu`.
            peak_flops: Dense FLOP/s of this rank's devices together, or a device's name, for its products in bfloat16:
                by default that of the current CUDA device of PyTorch, or of the first device of JAX.

        Raises:
            UsageError: If a number is not above 0, or the device is not known.
        """
        from forebay.load import mfu  # A loader that measures nothing does not need it.

        if not flops > 0:
            raise UsageError(f"measure_mfu: expected flops above 0, got {flops!r}.")
        peak = mfu.peak_flops(peak_flops) if isinstance(peak_flops, str) else peak_flops
        if not peak > 0:
            raise UsageError(f"measure_mfu: expected peak_flops above 0, got {peak!r}.")
        self._mfu = flops / peak, self._num_units()

    def _ideal_s(self) -> float:
        token_s, start = self._mfu
        return token_s * (self._num_units() - start)


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
