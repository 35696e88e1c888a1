"""Batches for JAX: arrays on this process's devices, or global arrays sharded over all processes' devices.

The process index is the rank. The next batch is copied to the devices while this one is used. `sample_ids` stay NumPy
arrays: JAX would cut their 64 bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from forebay.dataset.reader import Dataset
from forebay.errors import UsageError
from forebay.load.loader import Loader
from forebay.load.sources import Mixture

_ON_HOST = ("sample_ids", "sources", "cu_seqlens")  # Of 64 bits, or of another length in each batch.


class JaxLoader:
    """A Loader whose batches are dicts of `jax.Array`, with the names of `Batch.as_dict`.

    Its state is the Loader's, after the last batch received; batches on their way to the devices are not counted.

    Args:
        dataset: As the Loader's.
        sharding: Of arrays [B, ...]: the global batch's first dimension over the mesh's data axes; each process must
            hold an equal part of it, in the order of process indexes. None: the local batch, on the default device.
        arguments: The Loader's. By default rank and world size are `jax.process_index()` and `jax.process_count()`,
            token ids are int32, and a short last batch is left out, so that shapes never change.

    Raises:
        UsageError: If the global batch is not a multiple of the processes; otherwise as the Loader.
    """

    def __init__(
        self, dataset: str | Path | Dataset | Mixture, *, sharding: jax.sharding.Sharding | None = None,
        **arguments: Any,
    ) -> None:  # fmt: skip
        if "rank" not in arguments and "world_size" not in arguments:
            arguments |= {"rank": jax.process_index(), "world_size": jax.process_count()}
        self.loader = Loader(dataset, **{"dtype": np.int32, "drop_last": True, **arguments})
        size = self.loader.order.global_batch
        if sharding is not None and size % self.loader.world_size:
            raise UsageError(
                f"global_batch_size: expected a multiple of {self.loader.world_size} processes, got {size}. The shards "
                "of an array have one size."
            )
        self._sharding = sharding
        self._state: dict[str, Any] | None = None

    def __len__(self) -> int:
        """As the Loader's."""
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch received; a Loader of any rank, world size and framework can load it."""
        return self.loader.state_dict() if self._state is None else dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `state` with the next iteration. Raises StateError as the Loader does."""
        self.loader.load_state_dict(state)
        self._state = None

    def close(self) -> None:
        self.loader.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._state is not None:
            self.load_state_dict(self._state)
        pending: deque[tuple[dict[str, Any], dict[str, Any]]] = deque()
        self._state = self.loader.state_dict()
        for batch in self.loader:
            pending.append((self._to_device(batch.as_dict()), self.loader.state_dict()))
            del batch
            if len(pending) > 1:
                arrays, self._state = pending.popleft()
                yield arrays
        while pending:
            arrays, self._state = pending.popleft()
            yield arrays

    def _to_device(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self._put(value) if isinstance(value, np.ndarray) and name not in _ON_HOST else value
            for name, value in arrays.items()
        }

    def _put(self, array: np.ndarray[Any, Any]) -> Any:
        if self._sharding is None:
            return jax.device_put(array)
        return jax.make_array_from_process_local_data(self._sharding, array)
