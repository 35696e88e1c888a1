"""The Loader: batches of a dataset in a reproducible order, resumable at any of them. No framework.

Memory: a batch and what `prefetch` holds, 16 bytes a slice of the table for the order, some thousand sample numbers,
and maps of at most 1 GiB of slices, which are pages of the page cache. Disk: `cache_bytes`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from forebay.closing import Closing
from forebay.dataset.reader import Dataset
from forebay.dataset.verified import user_cache
from forebay.errors import UsageError
from forebay.load.arguments import batch_sizes, check_choice, rank_of_world, ranks_per_node, token_dtype
from forebay.load.batch import Batch
from forebay.load.batch_planner import BatchPlanner, make_collator
from forebay.load.chunk_source import CacheSettings, resolve_cache
from forebay.load.packing import DocumentSubset
from forebay.load.resources import MAX_RATIO, RunSpec, check_traffic, needs_of_nodes, sample_size
from forebay.load.samples import SHARDINGS, owned_samples, plan_samples
from forebay.load.slices import SliceReader
from forebay.load.sources import DatasetSource, Mixture, as_mixture, open_datasets, portable_source, subsets_of
from forebay.load.state import make_state, run_identity, step_of_state
from forebay.load.stats import Bottleneck, WaitTimes, find_bottleneck
from forebay.order.bijection import derive_key
from forebay.order.plan import Order
from forebay.order.run import OwnedRun, Run
from forebay.order.step_index import check_integer

_log = logging.getLogger("forebay")
_STOP_POLL_S = 0.05
_T = TypeVar("_T")
_READY_S = 1e-3  # A prefetched batch that comes sooner than this was ready.
_MINIMA = {
    "cache_bytes": 1, "connections": 1, "epochs": 1, "prefetch": 0, "readahead_bytes": 0, "seq_len": 1, "steps": 1,
}  # fmt: skip


class Loader(Closing):
    """Batches of one rank, as an iterable.

    Iterating continues from the loader's state and ends after the last epoch; a loop after `break` continues with the
    next batch. One iteration at a time. The same arguments give the same batches on any machine; the global batch of a
    step is the same for every world size with the same `global_batch_size`.

    Args:
        dataset: A directory or URL, in Forebay's format or one of `docs/reference/formats.md`; an open Dataset; a
            `Mixture`, or a TOML file with one.
        seq_len: Tokens of a sample, L. Required for layout `tokens`, ignored for `rows`.
        batch_size: Samples of a rank's batch; the global batch is batch_size * world_size.
        global_batch_size: Samples of all ranks' batches together: a number, or `[(run step, number), ...]` for a batch
            that grows. Exactly one of the two is required. Ranks' shares differ by at most one sample.
        rank: By default the environment's (RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK), or 0.
        world_size: By default the environment's, or 1.
        seed: Any integer.
        shuffle: False for the dataset's own order.
        epochs, steps: Limits of the run; None for no end. A mixture has no epochs: it ends by `steps`, or never.
        drop_last: Leave out the short global batch at an epoch's end. Without it a rank's last batch may be shorter;
            if fewer samples than ranks remain, a rank without one gets one sample of another step, with weight 0 and no
            sample_ids. All ranks have the same number of steps; `Batch.weight` corrects for uneven shares.
        dtype: int64 or int32, of the batch's token ids.
        packing: `chunk`: a sample is seq_len consecutive tokens, which may cut documents. `fit`: whole documents are
            fitted into samples and padded; only documents longer than seq_len are cut.
        document_masks: Give each batch `position_ids`, `document_ids` and `cu_seqlens`; no label crosses a document.
        documents: The documents to read; for a mixture, by name of a dataset. By default all.
        split: `train` or `validation`, whose fraction of the samples is `validation`, in (0, 1). By default all.
        pad_id: The padding of rows; by default EOS, or 0.
        trim_padding: Layout `rows`: remove the last columns of a batch that are padding in all its rows.
        cache_dir: Directory for fetched slices; `ram` for memory. By default a directory of the user's. A local dataset
            is read in place, unless this is given: then it is fetched like a remote one.
        cache_bytes: Limit of the cache, for all loaders that share it together; by default a quarter of what is free,
            up to 64 GiB.
        readahead_bytes: How much of what is read later may be evicted for slices fetched ahead. By default a
            quarter of the cache; 0: most slices survive an epoch, and each new one is waited for.
        connections: Concurrent requests to an origin.
        share: For a `forebay://` dataset: join its swarm and serve cached slices to peers, from the first batch until
            `close`, at any port or at `HOST:PORT`.
        verify: Hash each slice when this loader first opens it, also if its file did not change since it was last
            hashed.
        identity: For `forebay://` URLs, the node's directory.
        from_urls: For `forebay://` URLs: read also from URLs that data nodes announce: `public` or `any`.
        prefetch: Batches made ahead by a thread; 0 makes them in the caller's thread. Slices are fetched ahead either
            way.
        lanes, window: As in `Order`.
        max_fetch_ratio: Refuse to fetch more than this many times the dataset's bytes in an epoch, over all nodes, by
            the figures of `forebay plan`; from 1.1 times on there is a warning. None or 0: no limit.
        sharding: `order`: each epoch assigns all slices to the ranks in a new order. `hash`: each rank owns slices, the
            same in all epochs, and mixes only those. A state then belongs to its rank and world size.
        worker_names: For `hash`, by rank: names that stay with machines; by default the ranks' numbers.
        every: (k, n): only steps k, k + n, ... from where iterating starts, for the k-th of n helper processes.

    Raises:
        UsageError: If an argument is missing or out of range, a slice does not fit the cache, or an epoch would fetch
            more than `max_fetch_ratio` times the dataset.
        DatasetError: If a dataset is damaged; while iterating, if a slice is missing or damaged.
        NetworkError: If a remote dataset cannot be reached; while iterating, if no origin gives a slice.
    """

    def __init__(
        self,
        dataset: DatasetSource | Mixture,
        *,
        seq_len: int | None = None,
        batch_size: int | None = None,
        global_batch_size: int | Sequence[tuple[int, int]] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
        steps: int | None = None,
        drop_last: bool = False,
        dtype: Any = np.int64,
        packing: str = "chunk",
        document_masks: bool = False,
        documents: DocumentSubset | Mapping[str, DocumentSubset] | None = None,
        split: str | None = None,
        validation: float = 0.0,
        pad_id: int | None = None,
        trim_padding: bool = False,
        cache_dir: str | Path | None = None,
        cache_bytes: int | None = None,
        readahead_bytes: int | None = None,
        connections: int = 16,
        share: bool | str = False,
        verify: bool = False,
        identity: str | Path | None = None,
        from_urls: str = "",
        prefetch: int = 0,
        lanes: int | None = None,
        window: int | None = None,
        max_fetch_ratio: float | None = MAX_RATIO,
        sharding: str = "order",
        worker_names: Sequence[str] | None = None,
        every: tuple[int, int] | None = None,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        for name, minimum in _MINIMA.items():
            check_integer(name, self._arguments[name], minimum)
        self.rank, self.world_size = rank_of_world(rank, world_size)
        self._prefetch = int(prefetch)
        self._every = every or (0, 1)
        options = SimpleNamespace(**self._arguments)
        self._open_datasets(options)
        self._plan_run(options)
        self._plan_batches(options)
        self.waits = WaitTimes()
        self._step = 0
        self._iteration = 0
        self._source: Generator[Batch, None, None] | None = None
        self._received = {"batches": 0, "samples": 0}

    def _open_datasets(self, options: SimpleNamespace) -> None:
        check_choice("sharding", options.sharding, SHARDINGS)
        if isinstance(options.seed, bool) or not isinstance(options.seed, (int, np.integer)):
            raise UsageError(f"seed: expected an integer, got {options.seed!r}.")
        self.mixture = as_mixture(options.dataset)
        sources: Mapping[str, Any] = {"": options.dataset} if self.mixture is None else self.mixture.datasets
        opened = open_datasets(list(sources.values()), options.identity, options.from_urls)
        self.datasets = dict(zip(sources, opened))
        is_tokens = self.dataset.manifest.layout == "tokens"
        if is_tokens and options.seq_len is None:
            raise UsageError("seq_len: expected a number for a dataset of layout 'tokens', got None. Give seq_len=.")
        self.seq_len = int(options.seq_len) if is_tokens else None

    def _plan_run(self, options: SimpleNamespace) -> None:
        sizes = batch_sizes(options.batch_size, options.global_batch_size, self.world_size)
        smallest = min(size for _, size in sizes.changes)
        if self.world_size > smallest:
            raise UsageError(
                f"global_batch_size: expected at least a sample for each of {self.world_size} ranks, got {smallest}. "
                "Use larger batches, or fewer ranks."
            )
        drop_last, shuffle, seed = bool(options.drop_last), bool(options.shuffle), int(options.seed)
        self._indexes = [
            plan_samples(
                dataset, self.seq_len, packing=options.packing, documents=documents, split=options.split,
                validation=options.validation, cache_dir=user_cache() / "counts",
            )
            for dataset, documents in zip(self.datasets.values(), subsets_of(self.mixture, options.documents))
        ]  # fmt: skip
        batch, owner = sizes.largest, {}
        if options.sharding == "hash":
            if self.mixture is not None or drop_last or len(sizes.changes) > 1:
                raise UsageError("sharding='hash': expected one dataset, one batch size and no drop_last, got others.")
            batch = -(-batch // self.world_size)
            self._indexes[0], num_samples, names = owned_samples(
                self.dataset, self._indexes[0], self.rank, self.world_size, options.worker_names
            )
            owner = {"rank": self.rank, "workers": names}
        # Datasets of a mixture have seeds of their own: datasets of equal size must not have equal orders.
        seeds = [seed]
        if self.mixture is not None:
            seeds = [int.from_bytes(derive_key(seed, "source", name), "little") for name in self.datasets]
        orders = [
            Order(
                index.counts,
                key,
                batch,
                options.lanes,
                options.window,
                shuffle,
                drop_last,
                sample_size(dataset.table.bytes, index.counts, dataset.table.chunk_bytes),
            )
            for dataset, index, key in zip(self.datasets.values(), self._indexes, seeds)
        ]
        self.order = orders[0]
        for index, dataset in zip(self._indexes, self.datasets.values()):
            if index.num_samples < (batch if drop_last and self.mixture is None else 1):
                raise UsageError(
                    f"{dataset.path}: expected at least one batch an epoch, got {index.num_samples} samples of "
                    f"{self.seq_len} tokens for a global batch of {batch}. Ask for shorter samples or smaller batches."
                )
        limits = {"epochs": options.epochs, "num_steps": options.steps}
        if owner:
            self.run: Run = OwnedRun(self.order, batch, num_samples, **limits)
        else:
            weights = None if self.mixture is None else self.mixture.plan
            self.run = Run(orders, sizes, weights=weights, drop_last=drop_last, **limits)
        self._identity = owner | run_identity(self.run, self.datasets, self._indexes, seed, drop_last)

    def _plan_batches(self, options: SimpleNamespace) -> None:
        manifest, datasets = self.dataset.manifest, list(self.datasets.values())
        dtype = token_dtype(options.dtype, manifest.dtype, manifest.vocab_size) if self.seq_len else np.int64
        collator = make_collator(
            self._indexes, dtype=dtype, document_masks=options.document_masks, pad_id=options.pad_id,
            trim_padding=bool(options.trim_padding),
        )  # fmt: skip
        cached, settings = resolve_cache(
            datasets, cache_dir=options.cache_dir, cache_bytes=options.cache_bytes,
            connections=options.connections, readahead_bytes=options.readahead_bytes,
            share=options.share, verify=bool(options.verify),
        )  # fmt: skip
        if settings is not None:
            settings = self._check_traffic(options, cached, settings)
        self._slices = SliceReader(
            datasets, cached, self.run, self.rank, self.world_size, settings, bool(options.verify)
        )
        self._planner = BatchPlanner(
            self.run, self._indexes, collator, self._slices, self.rank, self.world_size, self._every
        )

    def _check_traffic(
        self, options: SimpleNamespace, cached: Sequence[bool], settings: CacheSettings
    ) -> CacheSettings:
        alone = options.sharding == "hash"  # Each node has an order of its own.
        parts = []
        for dataset, index, order, is_cached in zip(self.datasets.values(), self._indexes, self.run.orders, cached):
            spec = RunSpec(
                name=dataset.name, slice_bytes=dataset.table.bytes, slice_samples=index.counts, seq_len=self.seq_len,
                global_batch=order.global_batch, world_size=1 if alone else self.world_size, seed=order.seed,
                ranks_per_node=1 if alone else ranks_per_node(self.world_size), lanes=options.lanes,
                window=options.window, shuffle=order.shuffle, drop_last=order.drop_last,
                chunk_bytes=dataset.table.chunk_bytes, mixture=self.mixture is not None,
                cache_bytes=settings.budget_bytes, max_fetch_ratio=options.max_fetch_ratio, swarm=bool(settings.share),
            )  # fmt: skip
            if is_cached:
                parts.append((spec, order, needs_of_nodes(spec, order)))
        open_bytes = [nodes[0].open_bytes for _, _, nodes in parts]
        for (spec, order, nodes), opened in zip(parts, open_bytes):
            if self.mixture is not None:  # The datasets of a mixture share the cache; ranks read parts of all lanes.
                ratio = spec.max_fetch_ratio if self.world_size == 1 else None
                share = settings.budget_bytes * opened // max(1, sum(open_bytes))
                spec = replace(spec, cache_bytes=share, max_fetch_ratio=ratio)
            warning = check_traffic(spec, order, nodes)
            if warning is not None:
                _log.warning("%s: %s", spec.name, warning)
        return replace(settings, open_bytes=sum(open_bytes))

    def __len__(self) -> int:
        """Steps of the run (of one epoch, if it has no end)."""
        return self.run.steps_per_epoch if self.run.num_steps is None else self.run.num_steps

    @property
    def dataset(self) -> Dataset:
        """The dataset, or the first of a mixture."""
        return next(iter(self.datasets.values()))

    @property
    def tail_tokens(self) -> int:
        """Tokens of an epoch that are in no sample, fewer than seq_len at the end of each slice."""
        return sum(index.tail_tokens for index in self._indexes)

    def __iter__(self) -> Iterator[Batch]:
        self._pause()
        self._iteration += 1
        iteration = self._iteration
        clock, waits, planner, received = time.perf_counter, self.waits, self._planner, self._received
        next_step = self._every[1] - self._every[0]
        network_s, disk_s, ready_s = planner.network_s, planner.disk_s, _READY_S if self._prefetch else 0.0
        if self.run.num_steps is not None and self._step >= self.run.num_steps:
            _log.warning(
                "Loader: all %d steps of the run are done: this loop gets no batch. For more passes give epochs=N (or "
                "None), or load a state.", self.run.num_steps,
            )  # fmt: skip
        asked_at = clock()
        try:
            while True:
                if iteration != self._iteration:
                    raise UsageError("Loader: this iteration ended when another began. Open another Loader for two.")
                if self._source is None:
                    self._source = self._batches()
                batch = next(self._source, None)
                received_at = clock()
                wait_s = received_at - asked_at
                rest = "queue" if wait_s < ready_s else "decode"
                waits.add(wait_s, planner.network_s - network_s, planner.disk_s - disk_s, rest)
                network_s, disk_s = planner.network_s, planner.disk_s
                if received_at > waits.check_at:
                    waits.check(received_at)
                if batch is None:
                    return
                self._step = batch.run_step + next_step
                received["batches"] += 1
                received["samples"] += len(batch.sample_ids)
                yield batch
                del batch  # Its memory is free for the next one.
                asked_at = clock()
                waits.busy_s += asked_at - received_at
        finally:
            if iteration == self._iteration:
                self._pause()

    def _batches(self) -> Generator[Batch, None, None]:
        source = self._planner.batches(self._step)
        return prefetch_in_thread(source, self._prefetch, self._slices.pause) if self._prefetch else source

    def close(self) -> None:
        """Stop sharing, end all threads and drop prefetched batches; iterating starts them again. May be repeated."""
        self._pause()
        self._slices.close()

    def _pause(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()
        self._slices.pause()
        self._planner.close()

    def __reduce__(self) -> Any:
        """Pickled as its arguments and its state: a helper process opens its own maps and threads."""
        return _reopen, (self.portable_arguments(), self._step)

    def portable_arguments(self) -> dict[str, Any]:
        """The arguments as another process can use them: open datasets by their paths or URLs."""
        source = portable_source(self._arguments["dataset"])
        return {**self._arguments, "dataset": source, "rank": self.rank, "world_size": self.world_size}

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that iterating returned. Plain JSON values.

        A loader of any rank and world size with the same global batch can load it.
        """
        return make_state(self._identity, self.run, self._step)

    def state_at(self, step: int) -> dict[str, Any]:
        """The state before run step `step`. A running iteration is not changed."""
        return make_state(self._identity, self.run, step)

    def steps_remaining(self, step: int) -> int | None:
        """Steps from run step `step` to the end of its epoch; of a mixture, to the end of the run. None without end."""
        if self.run.num_steps is not None and step >= self.run.num_steps:
            return 0
        end = self.run.num_steps if self.run.weights is not None else self.run.epoch_of(step, 0)[1]
        return None if end is None else end - step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the batch after `state`, also in a running iteration. Nothing is replayed.

        Raises:
            StateError: If the state is not of this dataset, seed, seq_len, global batch, order, or is malformed.
        """
        step = step_of_state(state, self._identity, self.run)
        self._pause()
        self._step = step

    def stats(self) -> dict[str, float]:
        """Times in seconds, and counts, since the loader was made.

        `wait_s`: waiting for batches; of it `scheduler_s`, `network_s`, `disk_s`, `decode_s`, `queue_s`, as in
        `forebay.load.stats`. `busy_s`: between the waits. `batches`, `samples`, `tokens` received; `slices_opened`.
        With a cache also `fetched_slices`, `fetched_bytes`, `repeated_fetches` (slices fetched before, in any epoch),
        `refetched_slices` and `refetched_bytes` (a second time in one epoch), `evicted`, `late`, `waited_s`,
        `held_bytes`.
        """
        waits = self.waits
        by_cause = {f"{cause}_s": seconds for cause, seconds in waits.seconds.items()}
        counts = {"tokens": self._received["samples"] * (self.seq_len or 0), "slices_opened": self._planner.num_opened}
        times = {"wait_s": sum(by_cause.values()), **by_cause, "busy_s": waits.busy_s}
        return {**times, **self._received, **counts, **self._slices.stats()}

    def bottleneck(self) -> Bottleneck | None:
        """The main cause of waiting since the loader was made; None below 5 % of the time."""
        elapsed_s = time.perf_counter() - self.waits.started_at
        return find_bottleneck(self.waits.seconds, elapsed_s)


def _reopen(arguments: dict[str, Any], step: int) -> Loader:
    loader = Loader(**arguments)
    loader._step = step
    return loader


def prefetch_in_thread(
    source: Generator[_T, None, None], depth: int, interrupt: Callable[[], object] = lambda: None
) -> Generator[_T, None, None]:
    """Yield the items of `source`, which a thread runs at most `depth` items ahead; its exceptions are raised here.

    Closing stops the thread, closes `source` and drops items that were not taken; it calls `interrupt`, which wakes up
    a waiting `source`.
    """
    items: queue.Queue[tuple[_T] | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: tuple[_T] | BaseException | None) -> None:
        while not stop.is_set():
            try:
                return items.put(item, timeout=_STOP_POLL_S)
            except queue.Full:
                continue

    def run() -> None:
        try:
            for item in source:
                put((item,))
                if stop.is_set():
                    return
                del item
            put(None)
        except BaseException as error:  # noqa: BLE001  It is raised in the caller's thread.
            put(error)
        finally:
            source.close()

    thread = threading.Thread(target=run, name="forebay-loader", daemon=True)
    thread.start()
    try:
        while (item := items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
            del item
    finally:
        stop.set()
        interrupt()
        thread.join()
