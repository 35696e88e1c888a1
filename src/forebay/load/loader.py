"""The loader: batches of a dataset in the order's order, resumable at any of them. No framework.

Hides the joints between its parts: what is opened (sources), which samples there are (samples), their order (the run),
where slices come from (slices), how batches are made (blocks), what they waited for (stats), and what is consumed as
against merely made. State is (epoch, samples taken, step), and what must agree for it to mean the same samples.

Memory: a batch and what `prefetch` holds, 16 bytes a slice of the table for the order, some thousand sample numbers,
and maps of at most 1 GiB of slices, which are the page cache's pages, not the process's own. Disk: `cache_bytes`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.dataset.reader import Dataset
from forebay.dataset.verified import user_cache
from forebay.errors import UsageError
from forebay.load.arguments import (
    batch_sizes,
    check_choice,
    rank_of_world,
    ranks_per_node,
    token_dtype,
)
from forebay.load.background import run_ahead
from forebay.load.batch import Batch
from forebay.load.batch_planner import Blocks
from forebay.load.collate import make_maker
from forebay.load.packing import DocumentFilter
from forebay.load.resources import MAX_RATIO, WARN_RATIO, Job, check_traffic, nodes_of, worst_of
from forebay.load.samples import SHARDINGS, plan_samples, share_of
from forebay.load.slices import CacheSettings, Slices, cache_place, check_hashes, comes_by_cache, settings_for
from forebay.load.sources import Given, Mixture, filters_of, open_all, places_of, read_mixture
from forebay.load.state import identity_of, make_state, step_of_state
from forebay.load.stats import Bottleneck, Waits, find_bottleneck
from forebay.order.bijection import derive_key
from forebay.order.plan import Order
from forebay.order.run import BatchSizes, OwnedRun, Run
from forebay.order.step_index import check_integer
from forebay.order.windows import window_steps

if TYPE_CHECKING:
    from forebay.cache.planned_use import Keep

_log = logging.getLogger("forebay")
_READY_S = 1e-3  # A batch that a thread made ahead comes sooner than this, if it was ready.
KEEPS = ("budget", "window", "all")
_LEAST = {"ahead_bytes": 0, "cache_bytes": 1, "connections": 1, "epochs": 1, "prefetch": 0, "seq_len": 1, "steps": 1}


class Loader:
    """Batches of one rank, as an iterable.

    Iterating goes on from the loader's state and ends after the last epoch; leaving the loop early and
    iterating again goes on with the next batch. One iteration at a time. Same arguments, same batches, on any
    machine; the global batch of a step is the same for every world size with the same `global_batch_size`.

    Args:
        dataset: A directory or URL, in Forebay's format or one of `docs/formats.md`; an open Dataset; a `Mixture`, or
            a TOML file that holds one.
        seq_len: Tokens of a sample, L. Needed for layout `tokens`; unused for `rows`.
        batch_size: Samples of a rank's batch; the global batch is batch_size * world_size.
        global_batch_size: Samples of all ranks' batches together: a number, or `[(run step, number), …]` for a batch
            that grows. Exactly one of the two is given. It need not be a multiple of the world size: ranks' shares
            differ by at most one sample.
        rank: By default the environment's (RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK), or 0.
        world_size: By default the environment's, or 1.
        seed: Any integer.
        shuffle: False for the dataset's own order.
        epochs: How many in all; None for no end. A mixture has no epochs: it ends by `steps`, or never.
        steps: At most this many, of the whole run.
        drop_last: Leave out the short global batch at an epoch's end. Without it a rank's last batch may be shorter;
            where fewer samples than ranks are left, a rank without one gets one sample of another step, with weight 0
            and no sample_ids. Every rank has as many steps; `Batch.weight` makes up for uneven ones.
        dtype: int64 or int32, of the batch's token ids.
        packing: `chunk`: seq_len consecutive tokens are a sample, documents are cut where they fall. `fit`: whole
            documents are fitted into samples, none cut unless longer than seq_len; what is left over is padding.
        document_masks: Give each batch `position_ids`, `document_ids` and `cu_seqlens`; no label crosses a document.
        documents: What to leave out. In a mixture, by the name of a dataset.
        split: `train` or `validation`, of which `validation` is the part, in (0, 1). By default all is one.
        pad_id: What pads rows; by default EOS, or 0.
        trim: Layout `rows`: cut the columns at a batch's end that are padding in all its rows.
        cache_dir: Where slices that are fetched are kept; `ram` for memory. By default a directory of the user's.
            A local dataset is read in place, unless this is given: then it is fetched like a remote one.
        cache_bytes: What the cache may take, all loaders that share it together; by default a quarter of what is free,
            up to 64 GiB.
        cache: In short for cache_dir: `disk` for the user's directory, `ram` for memory.
        keep: Slices are deleted: `budget`: when room is needed; `window`: after their last use in this epoch; `all`:
            never; refused unless all fits.
        ahead_bytes: How much that is fetched ahead may push out what is read later. By default what comes in 30 s, up
            to a quarter of the cache; 0: most slices survive an epoch, and each new one is waited for.
        connections: Requests at once to an origin.
        share: Of a `forebay://` dataset: take part in its swarm, and give others what lies in the cache, from the
            first batch until `close`: at any port, or at `HOST:PORT`. Slices then come from others as they can.
        verify: Hash each slice when this loader first opens it, also one whose file did not change since it was last
            hashed. Without it a local slice is hashed at its first use; what is fetched is always verified.
        identity: For `forebay://` URLs, the node's directory.
        from_urls: For `forebay://` URLs: read also from URLs that data nodes stand for: `public` or `any`.
        prefetch: Batches made ahead by a thread; 0 makes them in the caller's, which is faster for whole tokens
            (a batch costs microseconds): slices are fetched ahead either way.
        lanes, window, head: As in `Order`.
        max_fetch_ratio: Refuse to fetch more than so many times the dataset's bytes in an epoch, over all nodes, by the
            figures of `forebay plan`; from 1.1 times there is a warning. None or 0: fetch any number of times. Ranks
            that share a machine, and its cache, are those of LOCAL_WORLD_SIZE (Slurm, Open MPI: theirs), else 1. What
            several nodes read alike is refused from 1 GiB an epoch on.
        sharding: `order`: an epoch deals all slices to the ranks anew. `hash`: each rank owns slices, the same in all
            epochs, so that a cache of 1/W of the data suffices, and mixes those alone. Its batches are at most
            batch_size, ranks take equally many steps, and a state is its rank's and that world's.
        worker_names: For `hash`, by rank: names that stay with machines; by default the ranks' numbers.
        every: (k, n): only steps k, k + n, … from where iterating begins: the k-th of n helper processes'.

    Raises:
        UsageError: If an argument is missing or out of range, a slice does not fit the cache, or an epoch would fetch
            more than `max_fetch_ratio` times the dataset.
        DatasetError: If a dataset is damaged; while iterating, if a slice is missing or damaged.
        NetworkError: If a remote one cannot be reached; while iterating, if a slice cannot be had of any origin.
    """

    def __init__(
        self,
        dataset: Given | Mixture,
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
        documents: DocumentFilter | Mapping[str, DocumentFilter] | None = None,
        split: str | None = None,
        validation: float = 0.0,
        pad_id: int | None = None,
        trim: bool = False,
        cache_dir: str | Path | None = None,
        cache_bytes: int | None = None,
        cache: str | None = None,
        keep: Keep = "budget",
        ahead_bytes: int | None = None,
        connections: int = 16,
        share: bool | str = False,
        verify: bool = False,
        identity: str | Path | None = None,
        from_urls: str = "",
        prefetch: int = 0,
        lanes: int | None = None,
        window: int | None = None,
        head: int | None = None,
        max_fetch_ratio: float | None = MAX_RATIO,
        sharding: str = "order",
        worker_names: Sequence[str] | None = None,
        every: tuple[int, int] | None = None,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        for name, least in _LEAST.items():
            check_integer(name, self._arguments[name], least)
        check_choice("keep", keep, KEEPS)
        check_choice("sharding", sharding, SHARDINGS)
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise UsageError(f"seed: expected an integer, got {seed!r}.")
        self.rank, self.world_size = rank_of_world(rank, world_size)
        sizes = batch_sizes(batch_size, global_batch_size, self.world_size)
        least = min(size for _, size in sizes.changes)
        if self.world_size > least:
            raise UsageError(
                f"global_batch_size: expected at least a sample for each of {self.world_size} ranks, got {least}. Use "
                "larger batches, or fewer ranks."
            )
        self._open(dataset, seq_len, identity, from_urls)
        chosen: dict[str, Any] = {"packing": packing, "split": split, "validation": validation}
        self._views = [
            plan_samples(one, self.seq_len, **chosen, documents=left_out, remember=user_cache() / "counts")
            for one, left_out in zip(self.datasets.values(), filters_of(self.mixture, documents))
        ]
        owned: dict[str, Any] = {}
        if sharding == "hash":
            owned = self._own(sizes, worker_names, bool(drop_last))
        self._owns = bool(owned)
        batch = sizes.largest if not owned else -(-sizes.largest // self.world_size)
        orders = [
            Order(view.counts, one_seed, batch, lanes, window, bool(shuffle), bool(drop_last), head)
            for view, one_seed in zip(self._views, self._seeds(int(seed)))
        ]
        self.order = orders[0]
        self._check_samples(batch, bool(drop_last))
        weights = None if self.mixture is None else self.mixture.plan
        if owned:
            self.run: Run = OwnedRun(self.order, batch, owned.pop("num_samples"), epochs=epochs, num_steps=steps)
        else:
            self.run = Run(orders, sizes, weights=weights, epochs=epochs, num_steps=steps, drop_last=bool(drop_last))
        self._identity = owned | identity_of(self.run, self.datasets, self._views, int(seed), bool(drop_last))
        manifest = self.dataset.manifest
        kind = token_dtype(dtype, manifest.dtype, manifest.vocab_size) if self.seq_len else np.int64
        maker = make_maker(self._views, dtype=kind, document_masks=document_masks, pad_id=pad_id, trim=trim)
        place = cache_place(cache, cache_dir)
        self._slices = self._open_slices(place, cache_bytes, (keep, int(connections), ahead_bytes, share), bool(verify))
        self._blocks = Blocks(self.run, self._views, maker, self._slices, self.rank, self.world_size, every)
        self.waits = Waits()
        self._prefetch = int(prefetch)
        self._every = every or (0, 1)
        self._step = self._began_step = 0
        self._turn = 0
        self._source: Generator[Batch, None, None] | None = None
        self._done = {"batches": 0, "samples": 0}

    def _open(self, dataset: Given | Mixture, seq_len: int | None, identity: str | Path | None, from_urls: str) -> None:
        self.mixture = read_mixture(dataset)
        given: Mapping[str, Any] = {"": dataset} if self.mixture is None else self.mixture.datasets
        self.datasets = dict(zip(given, open_all(list(given.values()), identity, from_urls)))
        tokens = self.dataset.manifest.layout == "tokens"
        if tokens and seq_len is None:
            raise UsageError("seq_len: needed for a dataset of layout 'tokens'. Say how long a sample is.")
        self.seq_len = int(seq_len) if tokens and seq_len is not None else None

    def _own(self, sizes: BatchSizes, names: Sequence[str] | None, drop_last: bool) -> dict[str, Any]:
        """Leave in the view what this rank owns. What a state must agree in besides, and all ranks' samples."""
        if self.mixture is not None or drop_last or len(sizes.changes) > 1:
            raise UsageError("sharding='hash': expected one dataset, one batch size and no drop_last, got others.")
        view, num_samples, workers = share_of(self.dataset, self._views[0], self.rank, self.world_size, names)
        self._views = [view]
        return {"rank": self.rank, "workers": workers, "num_samples": num_samples}

    def _open_slices(
        self, cache_dir: str | Path | None, cache_bytes: int | None, rest: tuple[Any, ...], verify: bool
    ) -> Slices:
        opened = list(self.datasets.values())
        cached = [comes_by_cache(one, cache_dir) for one in opened]
        if verify:
            check_hashes(opened)
        settings = settings_for(opened, any(cached), cache_dir, cache_bytes, *rest)
        if settings is not None:
            self._check_traffic(cached, settings)
        steps = max(map(window_steps, self.run.orders))
        return Slices(opened, cached, self.run, self.rank, self.world_size, settings, verify, steps)

    def _check_traffic(self, cached: Sequence[bool], settings: CacheSettings) -> None:
        """Warn of a run that would fetch slices several times in an epoch, or refuse it."""
        mine, parts = self._arguments, []
        alone = self._owns or self.mixture is not None  # A mixture's nodes share no lanes of one dataset.
        for one, view, order, comes in zip(self.datasets.values(), self._views, self.run.orders, cached):
            job = Job(
                name=one.name, slice_bytes=one.table.bytes, slice_samples=view.counts, global_batch=order.global_batch,
                seq_len=self.seq_len, world_size=1 if alone else self.world_size, seed=order.seed,
                ranks_per_node=1 if alone else ranks_per_node(self.world_size), lanes=mine["lanes"],
                window=mine["window"], head=mine["head"], shuffle=order.shuffle, drop_last=order.drop_last,
                cache_bytes=settings.budget_bytes, max_fetch_ratio=mine["max_fetch_ratio"], swarm=bool(settings.share),
            )  # fmt: skip
            if comes:
                parts.append((job, order, nodes_of(job, order)))
        open_bytes = [worst_of(nodes)[0].open_bytes for _, _, nodes in parts]
        for (job, order, nodes), opened in zip(parts, open_bytes):
            if len(parts) > 1:  # Each dataset of a mixture gets its part of the cache; ranks read parts of its lanes.
                most = job.max_fetch_ratio if self.world_size == 1 else None
                room = settings.budget_bytes * opened // max(1, sum(open_bytes))
                job = replace(job, cache_bytes=room, max_fetch_ratio=most)
            warning = check_traffic(job, order, nodes)
            if warning is not None:
                _log.warning("%s: %s", job.name, warning)

    def __len__(self) -> int:
        """Steps of the run (of one epoch, if it has no end)."""
        if self.run.num_steps is not None:
            return self.run.num_steps
        return self.run.steps_per_epoch

    @property
    def dataset(self) -> Dataset:
        """The dataset, or the first of a mixture."""
        return next(iter(self.datasets.values()))

    @property
    def tail_tokens(self) -> int:
        """Tokens of an epoch that no sample reads as input, as they are fewer than seq_len at a slice's end."""
        return sum(view.tail_tokens for view in self._views)

    def __iter__(self) -> Iterator[Batch]:
        self._pause()
        self._turn += 1
        turn = self._turn
        clock, waits, blocks, done = time.perf_counter, self.waits, self._blocks, self._done
        seconds, after = waits.seconds, self._every[1] - self._every[0]
        network_s, disk_s, ahead = blocks.network_s, blocks.disk_s, self._prefetch > 0
        if self.run.num_steps is not None and self._step >= self.run.num_steps:
            _log.warning(
                "Loader: all %d steps of the run are done: this loop gets no batch. For more passes give epochs=N (or "
                "None), or load a state.", self.run.num_steps,
            )  # fmt: skip
        asked = clock()
        try:
            while True:
                if turn != self._turn:
                    raise UsageError("Loader: this iteration ended when another began. Open another Loader for two.")
                if self._source is None:
                    self._source = self._batches()
                batch = next(self._source, None)
                got = clock()
                # Almost every batch waits for nothing but its making: no more than one sum then.
                if network_s == blocks.network_s and disk_s == blocks.disk_s:
                    rest = "queue" if ahead and got - asked < _READY_S else "decode"
                    seconds[rest] += got - asked
                    waits.last = (got - asked, 0.0, 0.0, rest)
                else:
                    waits.add(got - asked, blocks.network_s - network_s, blocks.disk_s - disk_s, "decode")
                    network_s, disk_s = blocks.network_s, blocks.disk_s
                if got > waits.check_at:
                    waits.check(got, self._refetching())
                if batch is None:
                    return
                self._step = batch.run_step + after
                done["batches"] += 1
                done["samples"] += len(batch.sample_ids)
                yield batch
                del batch  # So that its memory is free for the next one.
                asked = clock()
                waits.busy_s += asked - got
        finally:
            if turn == self._turn:
                self._pause()

    def close(self) -> None:
        """End the threads that fetch and make ahead, drop what they made, and share no more. The state stays.

        Leaving a loop does it too, but for the sharing. Iterating starts anew. May be called twice.
        """
        self._pause()
        self._slices.close()

    def _pause(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()
        self._slices.pause()
        self._blocks.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        """Pickled as its arguments and its state: a helper process opens its own maps and threads."""
        return _open_again, (self.portable_arguments(), self._step)

    def portable_arguments(self) -> dict[str, Any]:
        """What it was made of, as another process can use it: open datasets by their paths or URLs."""
        given = places_of(self._arguments["dataset"])
        return {**self._arguments, "dataset": given, "rank": self.rank, "world_size": self.world_size}

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: after the last batch that iterating gave out. Plain JSON values.

        It may be loaded by a loader of any rank and world size with the same global batch.
        """
        return make_state(self._identity, self.run, self._step)

    def state_at(self, steps: int) -> dict[str, Any]:
        """The state as it will be `steps` steps after where this loader began: at 0, or at the state it loaded."""
        return make_state(self._identity, self.run, self._began_step + steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken: the next batch is the one that followed it then. Nothing is replayed.

        An iteration that is going on continues from there.

        Raises:
            StateError: If the state is not of this dataset, seed, seq_len, global batch, order, or is malformed.
        """
        step = step_of_state(state, self._identity, self.run)
        self._pause()
        self._step = self._began_step = step

    def stats(self) -> dict[str, float]:
        """Where time went since the loader was made, in seconds and counts.

        `wait_s`: the caller waited for a batch; of it `scheduler_s`, `network_s`, `disk_s`, `decode_s`, `queue_s`, as
        in `forebay.load.stats`. `busy_s`: the caller did something else. `batches`, `samples`, `tokens` given out;
        `slices_opened`. With a cache also `fetched_slices`, `fetched_bytes`, `repeated_fetches` (slices fetched
        before, in whatever epoch), `refetched_slices` and `refetched_bytes` (a second time in one epoch), `evicted`,
        `late`, `waited_s`, `held_bytes`.
        """
        by_cause = {f"{cause}_s": seconds for cause, seconds in self.waits.seconds.items()}
        return {
            "wait_s": sum(by_cause.values()),
            **by_cause,
            "busy_s": self.waits.busy_s,
            **self._done,
            "tokens": self._done["samples"] * (self.seq_len or 0),
            "slices_opened": self._blocks.opened,
            **self._slices.stats(),
        }

    def bottleneck(self) -> Bottleneck | None:
        """What the caller waited for most since the loader was made; None if it hardly waited."""
        elapsed_s = time.perf_counter() - self.waits.began_at
        return find_bottleneck(self.waits.seconds, elapsed_s, refetching=self._refetching())

    def _refetching(self) -> bool:
        """Whether a tenth of the bytes fetched came a second time in their epoch."""
        stats = self._slices.stats()
        return bool(stats.get("refetched_bytes", 0) > (WARN_RATIO - 1) * stats.get("fetched_bytes", 0))

    def _seeds(self, seed: int) -> list[int]:
        """Of each dataset's order. In a mixture one of its own for each name: equal counts are no equal orders."""
        if self.mixture is None:
            return [seed]
        return [int.from_bytes(derive_key(seed, "source", name), "little") for name in self.datasets]

    def _check_samples(self, batch: int, drop_last: bool) -> None:
        for view, dataset in zip(self._views, self.datasets.values()):
            if view.num_samples < (batch if drop_last and self.mixture is None else 1):
                raise UsageError(
                    f"{dataset.path}: expected at least one batch an epoch, got {view.num_samples} samples of "
                    f"{self.seq_len} tokens for a global batch of {batch}. Ask for shorter samples or smaller batches."
                )

    def _batches(self) -> Generator[Batch, None, None]:
        source = self._blocks.batches(self._step)
        return run_ahead(source, self._prefetch, self._slices.pause) if self._prefetch else source


def _open_again(arguments: dict[str, Any], step: int) -> Loader:
    loader = Loader(**arguments)
    loader._step = loader._began_step = step
    return loader
