"""The Loader's rare arguments, in four frozen objects. Each checks its values when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from forebay.errors import UsageError
from forebay.load.arguments import check_choice
from forebay.load.packing import DocumentSubset
from forebay.order.footprint import MAX_RATIO
from forebay.order.step_index import check_integer

if TYPE_CHECKING:
    from forebay.network.pki.identity import Identity

_T = TypeVar("_T")


@dataclass(frozen=True)
class OrderOptions:
    """How samples are put in order and assigned to ranks.

    Args:
        lanes: As in `Order`; by default a multiple of the global batch (`default_lanes`).
        window_bytes: Bytes of one lane that are shuffled together; by default few (`default_window`).
        assignment: `global`: each epoch assigns all slices to the ranks in a new order. `owned`: each rank owns slices,
            the same in all epochs, and mixes only those. A state then belongs to its rank and world size.
        worker_names: For `owned`, by rank: names that stay with machines; by default the ranks' numbers.
        max_fetch_ratio: Refuse to fetch more than this many times the dataset's bytes in an epoch, over all nodes, by
            the figures of `forebay plan`; from 1.1 times on there is a warning. 0: no limit.

    Raises:
        UsageError: If a value is out of range, or contradicts another.
    """

    lanes: int | None = None
    window_bytes: int | None = None
    assignment: Literal["global", "owned"] = "global"
    worker_names: tuple[str, ...] = ()
    max_fetch_ratio: float = MAX_RATIO

    def __post_init__(self) -> None:
        check_integer("lanes", self.lanes, 1)
        check_integer("window_bytes", self.window_bytes, 1)
        check_choice("assignment", self.assignment, ("global", "owned"))
        if isinstance(self.max_fetch_ratio, bool) or not isinstance(self.max_fetch_ratio, (int, float)):
            raise UsageError(f"max_fetch_ratio: expected a number, got {self.max_fetch_ratio!r}. 0 is no limit.")
        if self.worker_names and self.assignment != "owned":
            raise UsageError("worker_names: expected assignment='owned', got 'global'. Leave the names out.")


@dataclass(frozen=True)
class CacheOptions:
    """Where chunks are cached, and when they are hashed.

    Args:
        tier: `disk`, in `cache_dir`; or `ram`, in the machine's memory.
        keep: `budget`: what was read stays while there is space. `window`: it goes as soon as its window was read, so
            that little disk is used. `all`: all stays, and a cache that is too small for it is refused; without
            `cache_bytes` it is as large as it has to be.
        readahead_bytes: Bytes of samples that are planned, and their chunks fetched, ahead of their use. By default the
            open windows, or a quarter of the cache and at most 1 GiB if that is more; at most a third of the cache; by
            all processes of a machine together.
        verify: `once`: hash a chunk when it arrives, or of a local dataset at its first use. `open`: chunks of local
            slices also at this loader's first use. `never`: check sizes and types of local slices only.

    Raises:
        UsageError: If a value is out of range.
    """

    tier: Literal["disk", "ram"] = "disk"
    keep: Literal["budget", "window", "all"] = "budget"
    readahead_bytes: int | None = None
    verify: Literal["once", "open", "never"] = "once"

    def __post_init__(self) -> None:
        check_choice("tier", self.tier, ("disk", "ram"))
        check_choice("keep", self.keep, ("budget", "window", "all"))
        check_integer("readahead_bytes", self.readahead_bytes, 0)
        check_choice("verify", self.verify, ("once", "open", "never"))


@dataclass(frozen=True)
class NetworkOptions:
    """How chunks are fetched, and slices shared.

    Args:
        identity: For `forebay://` URLs, the node's directory, or what was loaded of it.
        connections: Concurrent requests to an origin.
        listen: For a `forebay://` dataset: serve cached slices to peers of its swarm, from the first batch until
            `close`, at `HOST:PORT`, or at any port with "auto". None: nothing is shared.
        from_urls: For `forebay://` URLs: read also from URLs that data nodes announce: `public` or `any`.
        receipt_s, patience_s, upload_bytes_per_s, discovery: With `scheduler`: a lost lease wastes at most the samples
            used in the first, and two steps; how long to wait for a scheduler, or for providers, that do not answer;
            limit of what is sent to other workers; the DHT, if the caller joined it.

    Raises:
        UsageError: If a value is out of range.
    """

    identity: str | Path | Identity | None = None
    connections: int = 16
    listen: str | None = None
    from_urls: str = ""
    receipt_s: float = 1.0
    patience_s: float = 60.0
    upload_bytes_per_s: float | None = None
    discovery: Any = None

    def __post_init__(self) -> None:
        check_integer("connections", self.connections, 1)
        for name in ("receipt_s", "patience_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name}: expected seconds above 0, got {getattr(self, name)!r}.")
        if self.listen is not None and not isinstance(self.listen, str):
            raise UsageError(f"listen: expected HOST:PORT or 'auto', got {self.listen!r}.")


@dataclass(frozen=True)
class SampleOptions:
    """Which samples are read, and how they are put into batches.

    Args:
        documents: The documents to read; for a mixture, by name of a dataset. By default all.
        validation_fraction: Fraction of the samples in the split `validation`, in [0, 1].
        dtype: int64 or int32, of the batch's token ids.
        drop_last: Leave out the short global batch at an epoch's end. Without it a rank's last batch may be shorter; if
            fewer samples than ranks remain, a rank without one gets one sample of another step, with weight 0 and no
            sample_ids. All ranks have the same number of steps; `batch.weight` corrects for uneven shares.
        pad_id: The padding of rows; by default EOS, or 0.
        trim_padding: Layout `rows`: remove the last columns of a batch that are padding in all its rows.
        max_documents: Pad `cu_seqlens` to [max_documents + 1], for compilers that need fixed shapes.
        prefetch_batches: Batches made ahead by a thread; 0 makes them in the caller's thread. Slices are fetched ahead
            either way.

    Raises:
        UsageError: If a value is out of range.
    """

    documents: DocumentSubset | Mapping[str, DocumentSubset] | None = None
    validation_fraction: float = 0.0
    dtype: Any = np.int64
    drop_last: bool = False
    pad_id: int | None = None
    trim_padding: bool = False
    max_documents: int | None = None
    prefetch_batches: int = 0

    def __post_init__(self) -> None:
        check_integer("prefetch_batches", self.prefetch_batches, 0)
        check_integer("max_documents", self.max_documents, 1)


OPTIONS: dict[str, Any] = {
    "order": OrderOptions, "cache": CacheOptions, "network": NetworkOptions, "samples": SampleOptions,
}  # fmt: skip
"""By the names of the Loader's arguments."""


def as_options(name: str, value: object, kind: type[_T]) -> _T:
    """An argument of the Loader as its options object; None for the defaults. Raises UsageError for others."""
    if value is None:
        return kind()
    if kind is CacheOptions and isinstance(value, str):
        return kind(value)  # type: ignore[call-arg]
    if not isinstance(value, kind):
        raise UsageError(
            f"{name}: expected {kind.__name__}, got {type(value).__name__}. Use {name}=forebay.{kind.__name__}(...)."
        )
    return value
