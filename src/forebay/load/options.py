"""The settings of a Loader: the rare ones in four frozen objects, and all in one. Each is checked when it is made."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

from forebay.base import Json
from forebay.dataset.reader import Dataset
from forebay.errors import UsageError, did_you_mean
from forebay.load.arguments import batch_sizes, check_choice
from forebay.load.packing import DocumentSubset
from forebay.load.samples import PACKINGS, SPLITS
from forebay.load.sources import DatasetSource, Mixture, as_mixture, named
from forebay.order.footprint import MAX_RATIO
from forebay.order.step_index import check_integer
from forebay.units import parse_sizes

if TYPE_CHECKING:
    from forebay.network.pki.identity import Identity

VARIABLE = "FOREBAY_LOADER"


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
    window_bytes: int | str | None = None
    assignment: Literal["global", "owned"] = "global"
    worker_names: tuple[str, ...] = ()
    max_fetch_ratio: float = MAX_RATIO

    def __post_init__(self) -> None:
        parse_sizes(self)
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
        readahead_bytes: Bytes of samples whose chunks are fetched ahead of their use: a third of them is planned, the
            rest are neighbours that come with the same requests. By default three eighths of the cache, at most 1 GiB,
            of all processes of a machine together.
        verify: `once`: hash a chunk when it arrives, or of a local dataset at its first use. `open`: chunks of local
            slices also at this loader's first use. `never`: check sizes and types of local slices only.

    Raises:
        UsageError: If a value is out of range.
    """

    tier: Literal["disk", "ram"] = "disk"
    keep: Literal["budget", "window", "all"] = "budget"
    readahead_bytes: int | str | None = None
    verify: Literal["once", "open", "never"] = "once"

    def __post_init__(self) -> None:
        parse_sizes(self)
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
    from_urls: Literal["", "public", "any"] = ""
    receipt_s: float = 1.0
    patience_s: float = 60.0
    upload_bytes_per_s: float | str | None = None
    discovery: Any = None

    def __post_init__(self) -> None:
        parse_sizes(self)
        check_integer("connections", self.connections, 1)
        check_choice("from_urls", self.from_urls, ("", "public", "any"))
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
    max_documents: int | None = None
    prefetch_batches: int = 0

    def __post_init__(self) -> None:
        check_integer("prefetch_batches", self.prefetch_batches, 0)
        check_integer("max_documents", self.max_documents, 1)
        check_choice("drop_last", self.drop_last, (True, False))


class LoaderArguments(TypedDict, total=False):
    """The Loader's arguments, but those that decide the type of a batch."""

    packing: Literal["concat", "best_fit"]
    document_masks: bool
    batch_size: int | None
    global_batch_size: int | Sequence[tuple[int, int]] | None
    rank: int | None
    world_size: int | None
    seed: int
    shuffle: bool
    epochs: int | None
    steps: int | None
    split: str | None
    cache_dir: str | Path | None
    cache_bytes: int | str | None
    scheduler: str | Mapping[str, str] | None
    order: OrderOptions | None
    cache: CacheOptions | Literal["disk", "ram"] | None
    network: NetworkOptions | None
    samples: SampleOptions | None


@dataclass(frozen=True)
class LoaderConfig:
    """All settings of a Loader, which says what they mean.

    Without a dataset, settings that have their default are those of `FOREBAY_LOADER` in the environment: JSON of them
    by name, with options objects as objects of their fields. `forebay worker -- COMMAND` sets it for its command.

    Raises:
        UsageError: If a setting is missing, out of range or contradicts another.
    """

    dataset: DatasetSource | Mixture | None = None
    seq_len: int | None = None
    batch_size: int | None = None
    global_batch_size: int | Sequence[tuple[int, int]] | None = None
    rank: int | None = None
    world_size: int | None = None
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = 1
    steps: int | None = None
    packing: str = "concat"
    document_masks: bool = False
    split: str | None = None
    cache_dir: str | Path | None = None
    cache_bytes: int | str | None = None
    scheduler: str | Mapping[str, str] | None = None
    order: OrderOptions = OrderOptions()
    cache: CacheOptions = CacheOptions()
    network: NetworkOptions = NetworkOptions()
    samples: SampleOptions = SampleOptions()

    def __post_init__(self) -> None:
        for field in fields(self):
            if is_dataclass(field.default):
                vars(self)[field.name] = _as_options(field.name, getattr(self, field.name), type(field.default))
        if self.dataset is None:
            vars(self).update(_read_environment(self))
        vars(self)["dataset"] = as_mixture(self.dataset) or named(self.dataset)
        parse_sizes(self)
        for name in ("seq_len", "epochs", "steps", "cache_bytes"):
            check_integer(name, getattr(self, name), 1)
        check_choice("packing", self.packing, PACKINGS)
        check_choice("split", self.split, SPLITS)
        if self.split == "validation" and self.scheduler is None and not self.samples.validation_fraction:
            raise UsageError(
                "split='validation': expected SampleOptions.validation_fraction above 0, got 0. Give "
                "samples=forebay.SampleOptions(validation_fraction=0.01)."
            )
        check_choice("shuffle", self.shuffle, (True, False))
        check_choice("document_masks", self.document_masks, (True, False))
        if isinstance(self.seed, bool) or not isinstance(self.seed, (int, np.integer)):
            raise UsageError(f"seed: expected an integer, got {self.seed!r}.")
        if self.cache.tier == "ram" and self.cache_dir is not None:
            raise UsageError(f"cache_dir: expected none for a cache in memory, got {self.cache_dir}. Leave it out.")
        if str(self.cache_dir) == "ram":
            raise UsageError("cache_dir: expected a directory, got 'ram'. Use cache='ram' for a cache in memory.")
        if self.samples.max_documents and not self.has_masks:
            raise UsageError("max_documents: expected document_masks=True with it. Add that, or leave it out.")
        own = changed(self) | changed(self.cache) | changed(self.samples)
        if self.mixture is not None:
            _refuse(["epochs"] * (self.epochs is not None), own, "a mixture", "Give steps= instead.")
        if self.scheduler is not None:
            _ = self.schedulers  # Checks them.
            wrong = ["rank", "world_size", "global_batch_size", "drop_last", "order", "readahead_bytes", "keep"]
            advice = (
                "Each process takes leases of its own, as they are granted, for batches of batch_size= samples until "
                "none is left; a short batch says so by its weight. Leave it out."
            )
            _refuse(wrong, own, "scheduler=", advice)
            advice = "The job decides this: leave it out, or start another job."
            _refuse(["seed", "epochs", "shuffle"], own, "scheduler=", advice)
        sizes = batch_sizes(self.batch_size, self.global_batch_size, 1)
        if self.is_owned:
            wrong = ["drop_last", *["dataset"] * (self.mixture is not None)]
            wrong += ["global_batch_size"] * (len(sizes.changes) > 1)
            _refuse(wrong, own, "assignment='owned'", "Use assignment='global'.")

    @property
    def mixture(self) -> Mixture | None:
        """None for one dataset."""
        return self.dataset if isinstance(self.dataset, Mixture) else None

    @property
    def sources(self) -> Mapping[str, DatasetSource]:
        """The datasets by name in the mixture; of one dataset, ""."""
        assert self.dataset is not None
        return self.dataset.datasets if isinstance(self.dataset, Mixture) else {"": self.dataset}

    @property
    def schedulers(self) -> Mapping[str, str]:
        """Of each dataset, as `sources`."""
        schedulers = self.scheduler
        if schedulers == "auto" or (isinstance(schedulers, str) and self.mixture is None):
            schedulers = dict.fromkeys(self.sources, schedulers)
        if not isinstance(schedulers, Mapping) or set(schedulers) != set(self.sources):
            each = "'host:port'" if self.mixture is None else "{name: 'host:port'} for each dataset"
            raise UsageError(f"scheduler: expected {each} or 'auto', got {self.scheduler!r:.200}.")
        for source in self.sources.values():
            if not str(source).startswith("forebay://"):
                raise UsageError(f"scheduler: expected a dataset forebay://NETWORK/NAME with it, got {source!s:.200}.")
        return schedulers

    @property
    def is_owned(self) -> bool:
        """Whether each rank owns slices."""
        return self.order.assignment == "owned"

    @property
    def has_masks(self) -> bool:
        """Whether batches have document masks."""
        return self.document_masks or self.packing == "best_fit"

    def for_process(self, rank: int, world_size: int) -> LoaderConfig:
        """Return the settings of another process that reads the same batches: it opens the datasets again."""
        urls = {name: source.url if isinstance(source, Dataset) else source for name, source in self.sources.items()}
        dataset = urls[""] if self.mixture is None else replace(self.mixture, datasets=urls)
        if self.scheduler is not None:  # Each process takes leases of its own.
            return replace(self, dataset=dataset)
        return replace(self, dataset=dataset, rank=rank, world_size=world_size)


def _as_options(name: str, value: object, kind: Any) -> object:
    """A setting as its options object; None for the defaults, a name for the tier of a cache."""
    if value is None or (kind is CacheOptions and value in ("disk", "ram")):
        return kind(**({} if value is None else {"tier": value}))
    if not isinstance(value, kind):
        expected, got = kind.__name__, type(value).__name__
        if isinstance(value, str) and kind is CacheOptions:
            raise UsageError(
                f"cache: expected 'disk', 'ram' or CacheOptions, got {value!r}. Give a path as cache_dir=."
            )
        raise UsageError(f"{name}: expected {expected}, got {got}. Use {name}=forebay.{expected}(...).")
    return value


def refuse_unknown(arguments: Mapping[str, object]) -> None:
    """Raise TypeError for arguments that the Loader does not have, with the options object that has them."""
    own = {field.name: field.default for field in fields(LoaderConfig)}
    for name in sorted(arguments.keys() - own.keys()):
        advice = did_you_mean(name, own)
        for group, default in own.items():
            if is_dataclass(default) and hasattr(default, name):
                advice = f" Give it as {group}=forebay.{type(default).__name__}({name}=...)."
        if name == "dtype":
            advice = f" The type of a file's tokens: Loader(forebay.formats.open_external(PATH, dtype=...)).{advice}"
        if name in ("num_workers", "workers"):
            advice = " Give it to loader.to_torch(num_workers=...)."
        raise TypeError(f"Loader: expected no argument {name!r}, got one.{advice}")


def changed(settings: Any) -> Json:
    """Return the fields of settings that do not have their default."""
    values = {field: getattr(settings, field.name) for field in fields(settings)}
    return {
        field.name: value for field, value in values.items() if isinstance(value, np.ndarray) or value != field.default
    }


def _refuse(names: Sequence[str], settings: Mapping[str, Any], excluded_by: str, advice: str) -> None:
    """Raise UsageError if one of these is among the settings, beside one that excludes it."""
    for name in names:
        if name in settings:
            raise UsageError(f"{name}={settings[name]!r:.100} is not supported with {excluded_by}. {advice}")


def _read_environment(config: LoaderConfig) -> Json:
    """The settings that the environment adds to those of a Loader without a dataset; of options objects by field."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        raise UsageError(
            f"Loader: expected a dataset, got none, and no {VARIABLE} in the environment. Give a directory or URL and "
            "batch_size=, for tokens also seq_len=; or start the program by `forebay worker NAME -- COMMAND`."
        )
    own, fields_of_own = changed(config), vars(config)
    try:
        settings = json.loads(text)
        if not isinstance(settings, dict) or not settings.get("dataset") or settings.keys() - fields_of_own.keys():
            raise ValueError("expected an object with `dataset` and other arguments of the Loader")
        for name, value in settings.items():
            settings[name] = own.get(name, value)
            kind: Any = type(fields_of_own[name])
            if is_dataclass(fields_of_own[name]):
                value = {"tier": value} if isinstance(value, str) else value
                settings[name] = kind(**{**value, **changed(fields_of_own[name])})
    except (ValueError, TypeError) as error:
        raise UsageError(f"{VARIABLE}: cannot be read: {error}. Correct it, or unset it.") from error
    return settings
