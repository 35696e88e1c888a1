"""Batches for JAX: arrays on this process's devices, or global arrays sharded over all processes'.

    for batch in JaxLoader("my-dataset", seq_len=2048, global_batch_size=64, sharding=sharding):
        state, loss = step(state, batch["inputs"], batch["labels"])

Hides: which process reads what (its index is the rank), and that the next batch is on its way to the devices while
this one is computed with. `sample_ids` stay in NumPy: JAX would cut their 64 bits.
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
from forebay.load.adapt import named_arrays
from forebay.load.loader import Loader
from forebay.load.sources import Mixture

_ON_HOST = ("sample_ids", "sources", "cu_seqlens")  # 64 bits wide, or of another length each batch.


class JaxLoader:
    """A Loader whose batches are dicts of `jax.Array`, by the names of `forebay.load.adapt.named_arrays`.

    Its state is the Loader's own, counted where batches are consumed: what is ahead on its way is not in it.

    Args:
        dataset: As the Loader's.
        sharding: Of arrays [B, …], the global batch's first dimension over the mesh's data axes; each process must
            hold an equal part of it, in the order of process indexes. None: the local batch, on the default device.
        ahead: Batches on their way to the devices while one is used.
        arguments: The Loader's. By default rank and world size are `jax.process_index()` and `jax.process_count()`;
            token ids are int32; a last batch that is short is left out, so that shapes never change.

    Raises:
        UsageError: If the global batch is not a multiple of the processes; otherwise as the Loader.
    """

    def __init__(
        self,
        dataset: str | Path | Dataset | Mixture,
        *,
        sharding: jax.sharding.Sharding | None = None,
        ahead: int = 1,
        **arguments: Any,
    ) -> None:
        if "rank" not in arguments and "world_size" not in arguments:
            arguments = {**arguments, "rank": jax.process_index(), "world_size": jax.process_count()}
        self.loader = Loader(dataset, **{"dtype": np.int32, "drop_last": True, **arguments})
        size = self.loader.order.global_batch
        if sharding is not None and size % self.loader.world_size:
            raise UsageError(
                f"global_batch_size: expected a multiple of {self.loader.world_size} processes, got {size}. Shards of "
                "an array are of one size."
            )
        self._sharding, self._ahead = sharding, ahead
        self._state: dict[str, Any] | None = None

    def __len__(self) -> int:
        """As the Loader's."""
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """After the last batch that was given out; it fits a Loader of any rank, world size and framework."""
        return self.loader.state_dict() if self._state is None else dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, with the next iteration. Raises StateError as the Loader does."""
        self.loader.load_state_dict(state)
        self._state = None

    def close(self) -> None:
        """Close the Loader."""
        self.loader.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._state is not None:
            self.load_state_dict(self._state)
        coming: deque[tuple[dict[str, Any], dict[str, Any]]] = deque()
        self._state = self.loader.state_dict()
        for batch in self.loader:
            coming.append((self._place(named_arrays(batch)), self.loader.state_dict()))
            del batch
            if len(coming) > self._ahead:
                arrays, self._state = coming.popleft()
                yield arrays
        while coming:
            arrays, self._state = coming.popleft()
            yield arrays

    def _place(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self._put(value) if isinstance(value, np.ndarray) and name not in _ON_HOST else value
            for name, value in arrays.items()
        }

    def _put(self, array: np.ndarray[Any, Any]) -> Any:
        if self._sharding is None:
            return jax.device_put(array)
        return jax.make_array_from_process_local_data(self._sharding, array)
