"""The plan of a loader's run: its datasets, samples, order and cache, from the Loader's arguments, checked.

Opens the datasets' descriptions, and reads document ends where packing or lengths decide; no slice otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from forebay.dataset.reader import Dataset
from forebay.errors import UsageError
from forebay.fetch.feed import CacheSettings
from forebay.load.arguments import batch_sizes, check_choice, rank_of_world, ranks_per_node, token_dtype
from forebay.load.batch_planner import BatchPlanner, make_collator
from forebay.load.chunk_source import resolve_cache
from forebay.load.lease_plan import check_arguments, check_job, open_jobs, session_settings
from forebay.load.options import OPTIONS, as_options
from forebay.load.order_source import StaticOrder
from forebay.load.samples import PACKINGS, SPLITS, owned_samples, plan_samples
from forebay.load.slices import SliceReader
from forebay.load.sources import as_mixture, open_datasets, subsets_of
from forebay.load.state import run_identity
from forebay.machine import user_cache
from forebay.order.bijection import derive_key
from forebay.order.footprint import Footprint, check_traffic
from forebay.order.plan import Order, SampleSize
from forebay.order.run import OwnedRun, Run
from forebay.order.step_index import check_integer

if TYPE_CHECKING:
    from forebay.lease.job import LeaseJob
    from forebay.load.lease_order import LeaseOrder

_log = logging.getLogger("forebay")


class LoaderPlan:
    """What a run reads; `arguments` and errors are the Loader's.

    Attributes:
        options: The arguments, with options objects in place of None.
        datasets: By name in the mixture; of one dataset, "".
        indexes: The samples of each dataset that the run reads.
        run: The samples of each step; without an end except `steps`.
        identity: What decides the samples; part of a state.
        cached, cache: Whether each dataset is cached, and the settings if one is.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        for name in ("seq_len", "epochs", "steps", "cache_bytes"):
            check_integer(name, arguments[name], 1)
        options = self.options = SimpleNamespace(**arguments)
        vars(options).update({name: as_options(name, arguments[name], kind) for name, kind in OPTIONS.items()})
        _check(options)
        self.jobs: dict[str, LeaseJob] = {}  # By name of the dataset, with `scheduler`.
        if options.scheduler is None:
            self.rank, self.world_size = rank_of_world(options.rank, options.world_size)
        else:
            check_arguments(options)
            self.rank, self.world_size = 0, 1  # Of this worker's own steps.
        self.is_owned = options.order.assignment == "owned"
        self.has_masks = bool(options.document_masks) or options.packing == "best_fit"
        self._open_datasets(options)
        self._plan_run(options)
        self._plan_batches(options)

    @property
    def dataset(self) -> Dataset:
        """The dataset, or the first of a mixture."""
        return next(iter(self.datasets.values()))

    def _open_datasets(self, options: SimpleNamespace) -> None:
        self.mixture = as_mixture(options.dataset)
        sources: Mapping[str, Any] = {"": options.dataset} if self.mixture is None else self.mixture.datasets
        verify: Literal["once", "never"] = "never" if options.cache.verify == "never" else "once"
        network = options.network
        if options.scheduler is not None:
            self.jobs = open_jobs(options, self.mixture)
            sources = {name: job.dataset for name, job in self.jobs.items()}
        self.datasets = open_datasets(
            sources, network.identity, network.from_urls, verify,
            allow_different_tokenizers=self.mixture is not None and self.mixture.allow_different_tokenizers,
        )  # fmt: skip
        is_tokens = self.dataset.manifest.layout == "tokens"
        if is_tokens == (options.seq_len is None):
            raise UsageError(
                f"seq_len: expected a number for a dataset of layout 'tokens' and none for 'rows', got "
                f"{options.seq_len} for {self.dataset.manifest.layout!r} ({self.dataset.url})."
            )
        self.seq_len: int | None = options.seq_len
        if self.mixture is not None and options.epochs not in (1, None):
            raise UsageError(f"epochs: expected none for a mixture, got {options.epochs}. Give steps= instead.")

    def _plan_run(self, options: SimpleNamespace) -> None:
        sizes = batch_sizes(options.batch_size, options.global_batch_size, self.world_size)
        smallest = min(size for _, size in sizes.changes)
        if self.world_size > smallest:
            raise UsageError(
                f"global_batch_size: expected at least a sample for each of {self.world_size} ranks, got {smallest}. "
                "Use larger batches, or fewer ranks."
            )
        drop_last, shuffle, seed = bool(options.samples.drop_last), bool(options.shuffle), int(options.seed)
        self.indexes = [
            plan_samples(
                dataset, self.seq_len, packing=options.packing, documents=documents, split=options.split,
                validation=options.samples.validation_fraction, cache_dir=user_cache() / "counts",
            )
            for dataset, documents in zip(self.datasets.values(), subsets_of(self.mixture, options.samples.documents))
        ]  # fmt: skip
        batch, owner, counts = sizes.largest, {}, self.indexes[0].counts
        if self.is_owned:
            if self.mixture is not None or drop_last or len(sizes.changes) > 1:
                raise UsageError(
                    "assignment='owned': expected one dataset, one batch size and no drop_last, got others. Use "
                    "assignment='global' for these."
                )
            batch = -(-batch // self.world_size)
            self.indexes[0], owners, names = owned_samples(
                self.dataset, self.indexes[0], self.rank, self.world_size, options.order.worker_names or None
            )
            owner = {"rank": self.rank, "workers": names}
        # Datasets of a mixture have seeds of their own: datasets of equal size must not have equal orders.
        seeds = [seed]
        if self.mixture is not None:
            seeds = [int.from_bytes(derive_key(seed, "source", name), "little") for name in self.datasets]
        orders = [
            Order(
                index.counts, key, batch, options.order.lanes, None, shuffle, drop_last,
                SampleSize.of(dataset.table.bytes, index.counts, dataset.table.chunk_bytes), options.order.window_bytes,
            )
            for dataset, index, key in zip(self.datasets.values(), self.indexes, seeds)
        ]  # fmt: skip
        for index, dataset in zip(self.indexes, self.datasets.values()):
            if index.num_samples < (batch if drop_last and self.mixture is None else 1):
                raise UsageError(
                    f"{dataset.url}: expected at least one batch an epoch, got {index.num_samples} samples of "
                    f"{self.seq_len} tokens for a global batch of {batch}. Ask for shorter samples or smaller batches."
                )
        if self.is_owned:
            self.run: Run = OwnedRun(orders[0], batch, owners, counts, epochs=None, num_steps=options.steps)
        else:
            weights = None if self.mixture is None else self.mixture.plan
            self.run = Run(orders, sizes, weights=weights, drop_last=drop_last, epochs=None, num_steps=options.steps)
        for job, index in zip(self.jobs.values(), self.indexes):
            check_job(job, index, options)
        self.identity = owner | run_identity(self.run, self.datasets, self.indexes, seed)

    def _plan_batches(self, options: SimpleNamespace) -> None:
        manifest, samples = self.dataset.manifest, options.samples
        self._collation = {
            "dtype": token_dtype(samples.dtype, manifest.dtype, manifest.vocab_size) if self.seq_len else np.int64,
            "document_masks": options.document_masks, "pad_id": samples.pad_id,
            "trim_padding": bool(samples.trim_padding),
        }  # fmt: skip
        make_collator(self.indexes, **self._collation)  # Checks its arguments.
        listen = options.network.listen
        self.cached, self.cache = resolve_cache(
            list(self.datasets.values()), cache_dir="ram" if options.cache.tier == "ram" else options.cache_dir,
            cache_bytes=options.cache_bytes, connections=options.network.connections,
            readahead_bytes=options.cache.readahead_bytes, keep=options.cache.keep,
            share=not self.jobs and (listen == "auto" or listen or False),
            verify=options.cache.verify == "open",
        )  # fmt: skip
        if self.cache is not None and not self.jobs:
            self.cache = self._check_traffic(self.cache)

    def open_slices(
        self, run: Run, every: tuple[int, int], shares: bool, stats: Callable[[], Mapping[str, float]]
    ) -> tuple[SliceReader, BatchPlanner, LeaseOrder | None]:
        """New readers of slices and batches of `run`: of steps k, k + n, ... from where they start, for `every` (k, n).

        The leased order, too, if schedulers lease the samples.

        Args:
            shares: False: do not serve slices to peers.
            stats: Of the loader, for the schedulers' status.
        """
        cache, verify, leases = self.cache, self.options.cache.verify == "open", None
        datasets, share = list(self.datasets.values()), max(1, run.batches.largest // self.world_size)
        collator = make_collator(self.indexes, **self._collation)
        if self.jobs and cache is not None:
            from forebay.load.lease_order import LeaseOrder, LeaseSlices  # Others need no network packages.

            jobs = list(self.jobs.values())
            leased = LeaseSlices(jobs, run, cache, session_settings(self.options, len(jobs), cache), stats)
            leases = LeaseOrder(leased, self.indexes, share, run.mixture, run.num_steps)
            slices: SliceReader = leased
            planner = BatchPlanner(leases, self.indexes, collator, slices, share)
            leases.close_slice = planner.close_slice
            return slices, planner, leases
        if cache is not None and not shares:
            cache = replace(cache, share=False)
        slices = SliceReader(datasets, self.cached, run, self.rank, self.world_size, cache, verify)
        source = StaticOrder(run, self.indexes, self.rank, self.world_size, every)
        return slices, BatchPlanner(source, self.indexes, collator, slices, share), None

    def footprints(self, settings: CacheSettings) -> list[Footprint]:
        """What nodes read of each dataset that is cached."""
        world_size = 1 if self.is_owned else self.world_size  # Owners have orders of their own.
        return [
            Footprint(
                order, world_size, ranks_per_node(world_size), self.run.streams, bool(settings.share), dataset.name
            )
            for dataset, order, is_cached in zip(self.datasets.values(), self.run.orders, self.cached) if is_cached
        ]  # fmt: skip

    def _check_traffic(self, settings: CacheSettings) -> CacheSettings:
        parts = self.footprints(settings)
        for warning in check_traffic(parts, settings.budget_bytes, self.options.order.max_fetch_ratio):
            _log.warning("%s", warning)
        return replace(settings, open_bytes=sum(part.nodes[0].open_bytes for part in parts))


def _check(options: SimpleNamespace) -> None:
    """Check what needs no dataset. Raises UsageError."""
    check_choice("packing", options.packing, PACKINGS)
    check_choice("split", options.split, SPLITS)
    if isinstance(options.seed, bool) or not isinstance(options.seed, (int, np.integer)):
        raise UsageError(f"seed: expected an integer, got {options.seed!r}.")
    if options.cache.tier == "ram" and options.cache_dir is not None:
        raise UsageError(f"cache_dir: expected none for a cache in memory, got {options.cache_dir}. Leave it out.")
    if str(options.cache_dir) == "ram":
        raise UsageError("cache_dir: expected a directory, got 'ram'. Use cache='ram' for a cache in memory.")
    if options.samples.max_documents and not options.document_masks and options.packing != "best_fit":
        raise UsageError("max_documents: expected document_masks=True with it. Add that, or leave it out.")
