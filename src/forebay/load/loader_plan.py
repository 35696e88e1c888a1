"""The plan of a loader's run: its datasets, samples, order and cache, from its settings.

Opens the datasets' descriptions, and reads the lengths of documents where packing or a subset needs them; no slice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.dataset.reader import Dataset
from forebay.errors import StateError, UsageError
from forebay.fetch.cache import CacheSettings
from forebay.load.arguments import batch_sizes, rank_of_world, ranks_per_node, token_dtype
from forebay.load.batch_planner import BatchPlanner, make_collator
from forebay.load.chunk_source import MAX_DEFAULT_BYTES, resolve_cache
from forebay.load.options import LoaderConfig
from forebay.load.order_source import StaticOrder
from forebay.load.samples import SampleIndex, owned_samples, plan_samples
from forebay.load.slices import SliceReader
from forebay.load.sources import call_in_threads, open_datasets, subsets_of
from forebay.load.state import run_identity
from forebay.machine import hint_directory
from forebay.order.bijection import derive_key
from forebay.order.footprint import Footprint, check_traffic, footprints
from forebay.order.plan import Order, SampleSize
from forebay.order.run import OwnedRun, Run
from forebay.units import as_size, format_bytes, numbered

if TYPE_CHECKING:
    from forebay.lease.job import LeaseJob
    from forebay.load.lease_order import LeaseOrder

_LEASE_STATE_VERSION = 1


class LoaderPlan:
    """What a run reads; errors are the Loader's.

    Attributes:
        datasets: By name in the mixture; of one dataset, "".
        indexes: The samples of each dataset that the run reads.
        run: The samples of each step; without an end except `steps`.
        identity: What decides the samples; part of a state.
        cached, cache: Whether each dataset is cached, and the settings if one is.
        warnings: For the user. Helper processes, which make the same plan, do not log them again.
    """

    def __init__(self, config: LoaderConfig) -> None:
        self._config, self.mixture, self.seq_len, self.warnings = config, config.mixture, config.seq_len, list[str]()
        self.jobs: dict[str, LeaseJob] = {}  # By name of the dataset, with `scheduler`.
        self.rank, self.world_size = 0, 1  # With it, of this worker's own steps.
        if config.scheduler is None:
            self.rank, self.world_size = rank_of_world(config.rank, config.world_size)
        self._open_datasets(config)
        self._plan_run(config)
        self._plan_batches(config)

    @property
    def dataset(self) -> Dataset:
        """The dataset, or the first of a mixture."""
        return next(iter(self.datasets.values()))

    def _open_datasets(self, config: LoaderConfig) -> None:
        sources, network = config.sources, config.network
        if config.scheduler is not None:
            self.jobs = _open_jobs(config)
            sources = {name: job.dataset for name, job in self.jobs.items()}
        self.datasets = open_datasets(
            sources, network.identity, network.from_urls, "never" if config.cache.verify == "never" else "once",
            allow_different_tokenizers=self.mixture is not None and self.mixture.allow_different_tokenizers,
        )  # fmt: skip
        is_tokens = self.dataset.manifest.layout == "tokens"
        if is_tokens == (self.seq_len is None):
            url = self.dataset.url
            if is_tokens:
                raise UsageError(f"seq_len: expected the tokens of a sample, such as seq_len=2048, got none ({url}).")
            raise UsageError(
                f"seq_len: expected none for rows, which have a length of their own, got {self.seq_len} ({url}). Leave "
                "it out; `forebay prepare --set rows.max_tokens=` makes other rows."
            )

    def _plan_run(self, config: LoaderConfig) -> None:
        sizes = batch_sizes(config.batch_size, config.global_batch_size, self.world_size)
        smallest = min(size for _, size in sizes.changes)
        if self.world_size > smallest:
            raise UsageError(
                f"global_batch_size: expected at least a sample for each of {self.world_size} ranks, got {smallest}. "
                "Use larger batches, or fewer ranks."
            )
        if config.split == "train" and not config.samples.validation_fraction:
            self.warnings.append(
                "split='train': all samples are read, as validation_fraction is 0. Leave the split out, or give "
                "samples=forebay.SampleOptions(validation_fraction=0.01)."
            )
        mixture, owner, seed = self.mixture, dict[str, Any](), int(config.seed)
        drop_last, shuffle = bool(config.samples.drop_last), bool(config.shuffle)
        batch = -(-sizes.largest // self.world_size) if config.is_owned else sizes.largest
        self.indexes, orders = list[SampleIndex](), list[Order]()
        counts_dir = None
        with contextlib.suppress(OSError):
            counts_dir = hint_directory("counts")
        subsets = subsets_of(config.sources, config.samples.documents)
        for (name, dataset), documents in zip(self.datasets.items(), subsets):
            index = plan_samples(
                dataset, self.seq_len, packing=config.packing, documents=documents, split=config.split,
                validation=config.samples.validation_fraction, cache_dir=counts_dir,
            )  # fmt: skip
            if config.is_owned:
                counts = index.counts
                index, owners, names = owned_samples(
                    dataset, index, self.rank, self.world_size, config.order.worker_names
                )
                owner = {"rank": self.rank, "workers": names}
            if mixture is None and index.num_samples < batch:
                length = f" of {self.seq_len} tokens" if self.seq_len else ""
                text = (
                    f"{dataset.url}: expected at least one batch an epoch, got {numbered(index.num_samples, 'sample')}"
                    f"{length} for a global batch of {batch}. Ask for {'shorter samples or ' * bool(length)}smaller "
                    "batches."
                )
                if drop_last:
                    raise UsageError(text)
                self.warnings.append(f"{text} Batches are short.")
            # Datasets of a mixture have seeds of their own: datasets of equal size must not have equal orders.
            key = seed if mixture is None else int.from_bytes(derive_key(seed, "source", name), "little")
            size, options = SampleSize.of(dataset.table.bytes, index.counts, dataset.table.chunk_bytes), config.order
            self.indexes.append(index)
            orders.append(
                Order(
                    index.counts,
                    key,
                    batch,
                    options.lanes,
                    None,
                    shuffle,
                    drop_last,
                    size,
                    as_size(options.window_bytes),
                )
            )
        if config.is_owned:
            self.run: Run = OwnedRun(orders[0], batch, owners, counts, epochs=None, num_steps=config.steps)
        else:
            weights = None if mixture is None else mixture.plan
            self.run = Run(orders, sizes, weights=weights, drop_last=drop_last, epochs=None, num_steps=config.steps)
        for job, index in zip(self.jobs.values(), self.indexes):
            _check_job(job, index)
        self.identity = owner | run_identity(self.run, self.datasets, self.indexes, seed)

    def _plan_batches(self, config: LoaderConfig) -> None:
        manifest, samples = self.dataset.manifest, config.samples
        self._make_collator = partial(
            make_collator, self.indexes,
            dtype=token_dtype(samples.dtype, manifest.dtype, manifest.vocab_size) if self.seq_len else np.int64,
            document_masks=config.document_masks, pad_id=samples.pad_id,
        )  # fmt: skip
        self._make_collator()  # Checks its arguments.
        self.cached, self.cache = resolve_cache(list(self.datasets.values()), config)
        if self.cache is not None and not self.jobs:
            self._check_traffic(self.cache)

    def open_slices(
        self, run: Run, every: tuple[int, int], shares: bool, stats: Callable[[], Mapping[str, float]]
    ) -> tuple[SliceReader, BatchPlanner, LeaseOrder | None]:
        """New readers of slices and batches of `run`: of steps k, k + n, ... from where they start, for `every` (k, n).

        The leased order, too, if schedulers lease the samples.

        Args:
            shares: False: do not serve slices to peers.
            stats: Of the loader, for the schedulers' status.
        """
        cache, verify, leases = self.cache, self._config.cache.verify == "open", None
        datasets, batch = list(self.datasets.values()), max(1, run.batches.largest // self.world_size)
        if self.jobs and cache is not None:
            from forebay.lease.session import SessionSettings  # Others need no network packages.
            from forebay.load.lease_order import LeaseOrder, LeaseSlices

            network, jobs = self._config.network, list(self.jobs.values())
            settings = SessionSettings(
                cache.budget_bytes // len(jobs), batch, network.receipt_s,
                ":0" if network.listen == "auto" else network.listen, as_size(network.upload_bytes_per_s),
            )  # fmt: skip
            leased = LeaseSlices(jobs, run, cache, settings, stats)
            leases = LeaseOrder(leased, self.indexes, batch, run.mixture)
            planner = BatchPlanner(leases, self.indexes, self._make_collator(), leased, batch)
            leases.planner = planner
            return leased, planner, leases
        if cache is not None and not shares:
            cache = replace(cache, share=False)
        slices = SliceReader(datasets, self.cached, run, self.rank, self.world_size, cache, verify)
        source = StaticOrder(run, self.indexes, self.rank, self.world_size, every)
        return slices, BatchPlanner(source, self.indexes, self._make_collator(), slices, batch), None

    def footprints(self, settings: CacheSettings) -> list[Footprint]:
        """What nodes read of each dataset that is cached."""
        world_size = 1 if self._config.is_owned else self.world_size  # Owners have orders of their own.
        names = [dataset.name for dataset in self.datasets.values()]
        parts = footprints(
            self.run, names, world_size, ranks_per_node(world_size), bool(settings.share), self._config.has_masks
        )
        return [part for part, is_cached in zip(parts, self.cached) if is_cached]

    def _check_traffic(self, settings: CacheSettings) -> None:
        parts = self.footprints(settings)
        needed = sum(min(part.nodes[0].open_bytes, part.num_bytes) for part in parts)
        try:
            self.warnings += check_traffic(parts, settings.budget_bytes, self._config.order.max_fetch_ratio)
        except UsageError as error:
            is_default = self._config.cache_bytes is None and str(settings.directory) != "ram"
            if not is_default or settings.budget_bytes >= min(needed, MAX_DEFAULT_BYTES):
                raise
            raise UsageError(
                f"cache: expected {format_bytes(4 * needed)} of free space for {settings.directory}, of which it may "
                f"use a quarter, got {format_bytes(4 * settings.budget_bytes)}. Make room, or give another cache_dir=."
            ) from error


def _open_jobs(config: LoaderConfig) -> dict[str, LeaseJob]:
    """The job of each dataset, by name in the mixture; of one dataset, "". NetworkError if a scheduler is silent."""
    from forebay.lease.job import LeaseJob  # A local dataset needs no network packages.

    network, sources, schedulers = config.network, config.sources, config.schedulers

    def open_one(name: str) -> LeaseJob:
        address = None if schedulers[name] == "auto" else schedulers[name]
        return LeaseJob(
            str(sources[name]), network.identity, address, discovery=network.discovery,
            patience_s=network.patience_s, from_urls=network.from_urls,
        )  # fmt: skip

    return call_in_threads(open_one, sources)


def _check_job(job: LeaseJob, index: SampleIndex) -> None:
    """Raise UsageError for samples that are not the job's: it decides seq_len, packing, documents and split."""
    info = {"packing": "concat", **job.info}
    own = index.describe() | {"seq_len": index.seq_len, "num_samples": index.num_samples}
    for name in ("seq_len", "packing", "documents", "split", "num_samples"):
        if own[name] != info.get(name) and (name != "seq_len" or index.layout == "tokens"):
            raise UsageError(
                f"{name}: expected that of the job {job.name}, {info.get(name)!r}, got {own[name]!r}. Change the "
                "Loader's arguments, or start a job with these (forebay scheduler)."
            )


def make_lease_state(jobs: Mapping[str, LeaseJob], step: int) -> dict[str, Any]:
    """The state of a loader with schedulers: which samples are used stands in their ledgers."""
    return {"version": _LEASE_STATE_VERSION, "jobs": {name: job.job_id for name, job in jobs.items()}, "step": step}


def step_of_lease_state(state: object, jobs: Mapping[str, LeaseJob]) -> int:
    """The step of a state. Raises StateError if it is not one of these jobs."""
    step = state.get("step") if isinstance(state, dict) else None
    if type(step) is not int or step < 0 or state != make_lease_state(jobs, step):
        expected = make_lease_state(jobs, 0)
        raise StateError(
            f"loader state: expected one of the jobs {expected['jobs']} with a step, got {state!r:.300}. Load a "
            "state of a loader with these schedulers, or start without one: they know what is used."
        )
    return step
