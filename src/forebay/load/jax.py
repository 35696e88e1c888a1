"""Batches for JAX: arrays on this process's devices, or global arrays sharded over all processes' devices.

Shapes never change: a short last batch is padded. Integers are of 32 bits, JAX's default. `sample_ids` and
`dataset_index` stay NumPy arrays, as JAX would cut their 64 bits; so does `cu_seqlens`, whose length changes.
"""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from forebay.arrays import Array
from forebay.errors import UsageError
from forebay.load.batch import IGNORE_INDEX, TokenBatch
from forebay.load.rows import float_types
from forebay.order.step_index import check_integer

BatchT = TypeVar("BatchT", covariant=True)
_FILL = {"labels": IGNORE_INDEX, "document_ids": -1}


class JaxBatches(Generic[BatchT]):
    """A loader's batches of `jax.Array`; made by `Loader.to_jax`, which says what the arguments mean.

    It has no position of its own: `loader.state_dict()` counts what the loop received.
    """

    def __init__(self, loader: Any, sharding: jax.sharding.Sharding | None, prefetch: int) -> None:
        check_integer("prefetch", prefetch, 0)
        self.loader, self._sharding, self._prefetch = loader, sharding, prefetch
        self._floats = float_types(loader)
        for _, size in loader.global_batch_sizes if sharding is not None else ():
            if size % loader.world_size:
                raise UsageError(
                    f"global_batch_size: expected a multiple of {loader.world_size} processes, got {size}. The shards "
                    "of an array have one size."
                )

    def __len__(self) -> int:
        """As the loader's."""
        return len(self.loader)

    def __iter__(self) -> Iterator[BatchT]:
        return self.loader.iterate(self._to_device, self._prefetch)  # type: ignore[no-any-return]

    def _to_device(self, batch: Any) -> Any:
        loader = self.loader
        size = [size for step, size in loader.global_batch_sizes if step <= batch.step][-1]
        rows = -(-size // loader.world_size)
        arrays = batch.arrays()
        arrays |= {k: arrays[k].view(getattr(jax.numpy, kind)) for k, kind in self._floats.items() if k in arrays}
        arrays = {
            name: array if name == "cu_seqlens" else self._put(_padded(array, rows, _FILL.get(name, 0)))
            for name, array in arrays.items()
        }
        if isinstance(batch, TokenBatch):
            _ = batch.num_labels  # Counting on the device would wait for it.
        return batch.with_arrays(arrays)

    def _put(self, array: Array) -> Any:
        if self._sharding is None:
            return jax.device_put(array)
        return jax.make_array_from_process_local_data(self._sharding, array)


def _padded(array: Array, rows: int, fill: int) -> Array:
    dtype = np.dtype(np.int32) if array.dtype == np.int64 else array.dtype
    if len(array) >= rows:
        return array.astype(dtype, copy=False)
    padded = np.full((rows, *array.shape[1:]), fill, dtype)
    padded[: len(array)] = array
    return padded
