"""The Loader: batches of a dataset in a reproducible order, resumable at any of them. No framework.

Memory: a batch and what `prefetch_batches` holds, 16 bytes a slice of the table for the order, some thousand sample
numbers, and maps of the slices that are read, which are pages of the page cache. Disk: `cache_bytes`.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np

from forebay import html
from forebay.closing import Closing
from forebay.dataset.documents import Document
from forebay.dataset.reader import Dataset
from forebay.errors import UsageError
from forebay.load import display
from forebay.load.batch import NumpyRows, NumpyTokens
from forebay.load.batch_source import Batches, BatchSource, BatchT, Convert, Take
from forebay.load.environment import LoaderArguments, add_environment, close_at_exit, write_stats
from forebay.load.helpers import HelperPool
from forebay.load.lease_plan import make_lease_state, step_of_lease_state
from forebay.load.loader_plan import LoaderPlan
from forebay.load.options import CacheOptions, NetworkOptions, OrderOptions, SampleOptions
from forebay.load.prefetch import Prefetcher
from forebay.load.sources import DatasetSource, Mixture, portable_source
from forebay.load.state import make_state, step_of_state
from forebay.load.stats import Bottleneck, Callback, Callbacks, WaitTimes, find_bottleneck
from forebay.order.growth import grow
from forebay.order.run import Run
from forebay.order.step_index import check_integer
from forebay.storage.locks import at_fork

_log = logging.getLogger("forebay")
_READY_S = 1e-3  # A prefetched batch that comes sooner than this was ready.


class Loader(Closing, BatchSource[BatchT]):
    """Batches of one rank, as an iterable: of `TokenBatch` with `seq_len`, else of `RowBatch`.

    One `for` gives what remains of the current pass of `epochs` epochs. After a full pass the next `for` begins the
    next epoch; after `break` or `load_state_dict` it continues with the next batch. One iteration at a time. The same
    arguments give the same batches on any machine; the global batch of a step is the same for every world size with the
    same `global_batch_size`.

    Args:
        dataset: A directory or URL, in Forebay's format or one of `docs/reference/formats.md`; an open Dataset; a
            `Mixture`, or a TOML file with one. Without it, it and all arguments that are not given are those of
            the command's environment (`forebay worker -- COMMAND`).
        seq_len: Tokens of a sample, L. For layout `tokens`; layout `rows` has none.
        batch_size: Samples of a rank's batch; the global batch is batch_size * world_size.
        global_batch_size: Samples of all ranks' batches together: a number, or `[(run step, number), ...]` for a batch
            that grows. Exactly one of the two is required. Ranks' shares differ by at most one sample.
        rank, world_size: Of data parallelism. By default those of an initialized `torch.distributed` group, else the
            environment's (torchrun, Slurm, Open MPI, Horovod), else 0 and 1.
        seed: Any integer.
        shuffle: False for the dataset's own order.
        epochs: Epochs of a pass, which is one `for`; None for no end. A mixture has no epochs: leave it out.
        steps: The end of the run, in steps of all passes together; a `for` beyond it gives no batch and warns.
        packing: `concat`: a sample is seq_len consecutive tokens, which may cut documents. `best_fit`: whole documents
            are fitted into samples and padded; only documents longer than seq_len are cut.
        document_masks: Give each batch `position_ids`, `document_ids`, `cu_seqlens` and `max_seqlen`; no label crosses
            a document.
        split: `train` or `validation`, which `SampleOptions.validation_fraction` separates. By default all.
        cache_dir: Directory for fetched chunks, by default one of the user's. A local dataset is read in place, unless
            this is given: then it is fetched like a remote one.
        cache_bytes: Limit of the cache, for all loaders that share it together; by default a quarter of what is free,
            up to 64 GiB.
        order, cache, network, samples: Rare arguments. `cache` may be "disk" or "ram".
        scheduler: `host:port` of the scheduler of a `forebay://NETWORK/NAME` dataset, or "auto" to find it in the DHT;
            of a mixture, by name. Batches are then of the samples that it leases to this process: each is used once by
            all workers together. A batch counts as used when the next one is asked for, or at `commit`.

    Raises:
        UsageError: If an argument is missing, out of range or contradicts another, a chunk does not fit the cache, or
            an epoch would fetch more than `max_fetch_ratio` times the dataset.
        DatasetError: If a dataset is damaged; while iterating, if a slice is missing or damaged.
        NetworkError: If a remote dataset cannot be reached; while iterating, if no origin gives a slice.
    """

    @overload
    def __init__(
        self: Loader[NumpyTokens], dataset: DatasetSource | Mixture, *, seq_len: int,
        packing: Literal["concat", "best_fit"] = "concat", document_masks: bool = False,
        **arguments: Unpack[LoaderArguments],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: Loader[NumpyRows], dataset: DatasetSource | Mixture, *, seq_len: None = None,
        **arguments: Unpack[LoaderArguments],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: Loader[Any], dataset: None = None, *, seq_len: int | None = None,
        packing: Literal["concat", "best_fit"] = "concat", document_masks: bool = False,
        **arguments: Unpack[LoaderArguments],
    ) -> None: ...  # fmt: skip
    def __init__(
        self, dataset: DatasetSource | Mixture | None = None, *, seq_len: int | None = None,
        batch_size: int | None = None, global_batch_size: int | Sequence[tuple[int, int]] | None = None,
        rank: int | None = None, world_size: int | None = None, seed: int = 0, shuffle: bool = True,
        epochs: int | None = 1, steps: int | None = None, packing: str = "concat", document_masks: bool = False,
        split: str | None = None, cache_dir: str | Path | None = None, cache_bytes: int | None = None,
        scheduler: str | Mapping[str, str] | None = None, order: OrderOptions | None = None,
        cache: CacheOptions | Literal["disk", "ram"] | None = None, network: NetworkOptions | None = None,
        samples: SampleOptions | None = None,
    ) -> None:  # fmt: skip
        self.arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        """As they were given, or of the environment."""
        if dataset is None:
            self.arguments = add_environment(self.arguments, Loader.__init__.__kwdefaults__ or {})
        plan = self.plan = LoaderPlan(self.arguments)
        self.rank, self.world_size, self.seq_len = plan.rank, plan.world_size, plan.seq_len
        self.datasets, self.mixture, self.run, self.order = plan.datasets, plan.mixture, plan.run, plan.run.orders[0]
        self._epochs = None if plan.mixture is not None or plan.jobs else self.arguments["epochs"]
        self._step, self._shares, self._identity = 0, True, plan.identity
        factor = self.world_size if plan.is_owned else 1
        self.global_batch_sizes = [(step, size * factor) for step, size in self.run.batches.changes]
        self._reset()
        self._reporting_pid = close_at_exit(self) if dataset is None else 0

    def _reset(self) -> None:
        """Make everything that iterating changes."""
        self.waits = WaitTimes()
        self._iteration = 0
        self._source: Prefetcher[Any] | None = None
        self._pool: HelperPool | None = None
        self._of_parent: object = None
        at_fork(self)
        self._received, self._samples_of = {"batches": 0, "samples": 0}, [0] * len(self.datasets)
        self._callbacks = Callbacks(self)
        self._text = display.TokenText(self.dataset)
        self._make_planner((0, 1))

    def _make_planner(self, every: tuple[int, int]) -> None:
        self._pass, self._every = _Pass(self.run), every
        opened = self.plan.open_slices(self._pass, every, self._shares, self.stats)  # type: ignore[arg-type]
        self._slices, self._planner, self.leases = opened
        """`leases`: the leased samples; None without `scheduler`."""

    def __len__(self) -> int:
        """Batches of a full `for` at the loader's position. Raises TypeError where it has no end."""
        start, stop = self.pass_of(self._step)
        if self.leases is not None:
            raise TypeError("len: expected a loader without scheduler=: how many batches a worker gets is not known.")
        if stop is None:
            raise TypeError("len: expected a loader whose iteration ends, got epochs=None or a mixture. Give steps=.")
        return stop - start

    @property
    def step(self) -> int:
        """Steps of the run so far, over all passes: of batches that iterating returned."""
        return self._step

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0; 0 for a mixture."""
        return self.run.progress(self._step).epoch if self.leases is None else self.leases.epoch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, with the largest batches. Raises TypeError for a mixture or leases, which have none."""
        if self.leases is not None:
            raise TypeError("steps_per_epoch: expected a loader without scheduler=: workers divide an epoch by speed.")
        if self.mixture is not None:
            raise TypeError("steps_per_epoch: expected one dataset, got a mixture, which has no epochs. Use steps=.")
        return self.run.steps_per_epoch

    @property
    def dataset(self) -> Dataset:
        """The dataset, or the first of a mixture."""
        return self.plan.dataset

    @property
    def vocab_size(self) -> int:
        """Ids are below it, by what the datasets record; 0 if none does."""
        return max(dataset.manifest.vocab_size for dataset in self.datasets.values())

    @property
    def tail_tokens(self) -> int:
        """Tokens of an epoch that are in no sample, fewer than seq_len at the end of each slice."""
        return sum(index.tail_tokens for index in self.plan.indexes)

    def _first_step(self, epoch: int) -> int:
        """The first step of an epoch, or the end of the run before it."""
        end = self.run.num_steps
        if end is None:
            end = 1
            while self.run.progress(end).epoch < epoch:
                end *= 2
        return bisect_left(range(end), epoch, key=lambda step: self.run.progress(step).epoch)

    def pass_of(self, step: int) -> tuple[int, int | None]:
        """The steps [start, stop) of the pass that a step belongs to; stop is None without an end."""
        end = self.run.num_steps
        if self._epochs is None:
            return 0, end
        last = step if end is None else min(step, end - 1)
        first = self.run.progress(last).epoch // self._epochs * self._epochs
        return self._first_step(first), self._first_step(first + self._epochs)

    def take(self, n: int | None = None) -> Take[BatchT]:
        """The first `n` batches of the current epoch (None: all of it), as an iterable that gives them each time.

        Iterating it does not move the loader: for fixed validation batches, or to look at one. Raises TypeError for all
        batches of a mixture without `steps`, which has no end.
        """
        check_integer("n", n, 0)
        if self.leases is not None:
            raise UsageError("take: expected a loader without scheduler=: a leased sample is used once, by one worker.")
        other = copy.copy(self)
        other._epochs = None if self.mixture is not None else 1
        start, stop = other.pass_of(self._step)
        if n is None and stop is None:
            raise TypeError("take: expected a number of batches of a mixture without an end. Give n, or steps=.")

        def open_batches(convert: Convert | None, prefetch: int | None) -> Batches:
            view = copy.copy(other)
            view._step, view._shares = start, False
            view._reset()
            with view:
                yield from view.iterate(convert, prefetch)

        batches = [size for size in (n, None if stop is None else stop - start) if size is not None]
        return Take(self, open_batches, min(batches))

    def iterate(self, convert: Convert | None = None, prefetch: int | None = None, num_workers: int = 0) -> Batches:
        leases = self.leases
        if leases is not None and num_workers:
            raise UsageError(
                f"num_workers: expected 0 with scheduler=, got {num_workers}: a batch counts as used in "
                "the process that leases. Use prefetch, or SampleOptions.prefetch_batches."
            )
        self._pause()
        self._iteration += 1
        iteration, depth = self._iteration, self.plan.options.samples.prefetch_batches if prefetch is None else prefetch
        clock, waits, received, callbacks = time.perf_counter, self.waits, self._received, self._callbacks
        never = math.inf  # As a local name it outlives the modules when Python ends within the loop.
        ready_s = _READY_S if depth or num_workers else 0.0
        if self.run.num_steps is not None and self._step >= self.run.num_steps:
            _log.warning(
                "Loader: all %d steps of the run are done: this loop gets no batch. Give more steps=, or load a state.",
                self.run.num_steps,
            )
        maker = self._helpers(num_workers) if num_workers else self._planner
        network_s, disk_s, scheduler_s, device_s = maker.network_s, maker.disk_s, maker.scheduler_s, 0.0
        waits.asked_at = asked_at = clock()
        try:
            while True:
                if iteration != self._iteration:
                    raise UsageError("Loader: this iteration ended when another began. Open another Loader for two.")
                source = self._source
                if source is None:
                    self._pause()  # In a forked child, the plans are still the parent's.
                    source, device_s = self._batches(num_workers, depth, convert), 0.0
                item = next(source, None)
                if leases is not None and item is not None and not leases.deliver(item[0]):
                    self._pause()  # A lease of it was lost: what was formed ahead is formed again.
                    continue
                received_at = clock()
                wait_s = received_at - asked_at
                rest = "queue" if wait_s < ready_s else "decode"
                waits.add(
                    wait_s, maker.network_s - network_s, maker.disk_s - disk_s, source.convert_s - device_s, rest,
                    maker.scheduler_s - scheduler_s,
                )  # fmt: skip
                network_s, disk_s, device_s = maker.network_s, maker.disk_s, source.convert_s
                scheduler_s = maker.scheduler_s
                waits.asked_at = never
                if received_at > waits.check_at:
                    waits.check(received_at)
                if item is None:
                    return
                step, counts, batch = item
                self._step = step + 1
                received["batches"] += 1
                received["samples"] += counts if isinstance(counts, int) else len(counts)
                if not isinstance(counts, int):
                    for index, count in enumerate(np.bincount(counts, minlength=len(self.datasets)).tolist()):
                        self._samples_of[index] += count
                del item
                yield batch
                del batch  # Its memory is free for the next one.
                if leases is not None:
                    leases.commit()
                if callbacks.functions:
                    callbacks.call(self._step)
                waits.asked_at = asked_at = clock()
                waits.busy_s += asked_at - received_at
        finally:
            waits.asked_at = never
            if iteration == self._iteration:
                self._pause()

    def _batches(self, num_workers: int, depth: int, convert: Convert | None) -> Prefetcher[Any]:
        stop = self.pass_of(self._step)[1]
        max_documents, text = self.plan.options.samples.max_documents, self._text

        def finish(batch: Any) -> tuple[int, Any, Any]:
            batch._text = text
            if max_documents is not None:
                batch.pad_documents(max_documents)
            counts = len(batch.sample_ids) if batch._dataset_index is None else batch._dataset_index
            return batch.step, counts, batch if convert is None else convert(batch)

        if num_workers:
            source = self._helpers(num_workers).batches(self._step, stop)
        else:
            self._planner.source.num_steps = self._pass.num_steps = stop
            source = self._planner.batches(self._step)
        self._source = Prefetcher(source, depth, finish, self._slices.pause)
        return self._source

    def commit(self) -> None:
        """Count the last batch as used, before the next one is asked for: before a checkpoint, or a `break`.

        For a loader with `scheduler`; without one nothing is done.
        """
        if self.leases is not None:
            self.leases.commit()

    def raw_batches(self, start: int, stop: int | None, every: tuple[int, int]) -> Batches:
        """In a helper process: the batches of steps start + k, start + k + n, ... below `stop`, for `every` (k, n)."""
        if self._every != every:
            self._make_planner(every)
        self._planner.source.num_steps = self._pass.num_steps = stop
        return self._planner.batches(start)

    @property
    def network_s(self) -> float:
        """Seconds waited for slices in transfer."""
        return self._planner.network_s

    @property
    def disk_s(self) -> float:
        """Seconds waited for pages not in memory."""
        return self._planner.disk_s

    def _helpers(self, num_workers: int) -> HelperPool:
        if self._pool is None or self._pool.num_workers != num_workers:
            if self._pool is not None:
                self._pool.close()
            self._pool = HelperPool(self, num_workers)
        return self._pool

    @property
    def helper_pids(self) -> list[int]:
        """Ids of the helper processes that run; empty before the first iteration with `num_workers`."""
        return [] if self._pool is None else self._pool.pids

    def close(self) -> None:
        """Stop sharing, end all threads and processes and drop prefetched batches; iterating starts them again."""
        self._pause()
        if self.leases is not None:
            self.leases.forget()
        self._slices.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._reporting_pid:
            write_stats(self, self._reporting_pid)

    def after_fork(self) -> None:
        """In a forked child: leave the threads and helper processes to the parent. An iteration goes on by itself."""
        self._of_parent = self._of_parent, self._source, self._pool  # Never closed here.
        self._source = self._pool = None

    def _pause(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()
        self._slices.pause()
        self._planner.close()

    def __reduce__(self) -> Any:
        """Pickled as its arguments and its state: another process opens its own maps and threads."""
        source = portable_source(self.arguments["dataset"])
        arguments = {**self.arguments, "dataset": source, "rank": self.rank, "world_size": self.world_size}
        return _reopen, (arguments, self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that iterating returned. Plain JSON values.

        A loader of any rank and world size with the same global batch can load it. With `scheduler` it has the step and
        the jobs' ids; which samples are used is in the schedulers' ledgers.
        """
        return self.state_at(self._step)

    def state_at(self, step: int) -> dict[str, Any]:
        """The state before run step `step`. A running iteration is not changed."""
        if self.leases is not None:
            return make_lease_state(self.plan.jobs, step)
        return make_state(self._identity, self.run, step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the batch after `state`, also in a running iteration. Nothing is replayed.

        A state of a dataset that this one extends finishes that dataset's epoch; later epochs have all samples. The
        lanes and windows are those of the state, unless `order` names others.

        Raises:
            StateError: If the state is not of this dataset, seed, seq_len, global batch, order, or is malformed.
        """
        plan = self.plan
        if self.leases is not None:
            step = step_of_lease_state(state, plan.jobs)
            self._pause()
            self._step = step
            return
        lineages = [dataset.manifest.lineage for dataset in self.datasets.values()]
        run, identity, own_state = grow(state, plan.identity, plan.run, lineages)
        step = step_of_state(own_state, identity, run)
        if run is self.run:
            self._pause()
        else:
            self.close()
            self.run, self.order, self._identity = run, run.orders[0], identity
            self._make_planner(self._every)
        self._step = step

    def stats(self) -> dict[str, float]:
        """Times in seconds, and counts, since the loader was made.

        `wait_s`: waiting for batches; of it `scheduler_s`, `network_s`, `disk_s`, `decode_s`, `device_s`, `queue_s`, as
        in `forebay.load.stats`. `busy_s`: between the waits. `waiting_s`: the wait in progress. `batches`, `samples`,
        `tokens` received, of a mixture also `tokens.NAME` (or `samples.NAME`) of each dataset; `slices_opened`. With a
        cache also `fetched_chunks`, `fetched_bytes`, `refetched_chunks` and `refetched_bytes` (a second time in one
        epoch), `failed`, `late` and `waited_s` (waits for chunks), `in_flight`, `evicted_bytes`, `wrong_bytes` (their
        hash differed), `cached_bytes` (by all that share the cache). What helper processes open is not counted.
        """
        unit, size = ("samples", 1) if self.seq_len is None else ("tokens", self.seq_len)
        counts = {"tokens": self._received["samples"] * (self.seq_len or 0), "slices_opened": self._planner.num_opened}
        if self.mixture is not None:
            counts |= {f"{unit}.{name}": size * n for name, n in zip(self.datasets, self._samples_of)}
        return {**self.waits.to_dict(), **self._received, **counts, **self._slices.stats()}

    def bottleneck(self) -> Bottleneck | None:
        """The main cause of waiting since the loader was made; None below 5 % of the time."""
        elapsed_s = time.perf_counter() - self.waits.started_at
        return find_bottleneck(self.waits.seconds, elapsed_s)

    def add_callback(self, fn: Callback, every_steps: int = 50) -> None:
        """Call `fn(metrics, step)` every so many steps, in the loop's thread; see `forebay.callbacks` for loggers.

        Metrics are of the steps since the last call: `tokens_per_s` (or `samples_per_s`), `wait_share` (the fraction of
        the time spent waiting for batches) and `wait_CAUSE_share`; and `epoch`, `samples`, `tokens` of the run so far.
        """
        self._callbacks.add(fn, every_steps)

    def documents(self, batch: Any) -> list[list[Document]]:
        """The documents of each sample of a batch of this loader, whole, with their ids and sources, in order.

        Raises:
            UsageError: If the dataset is remote or of layout `rows`.
        """
        return display.documents_of(self, batch)

    def describe(self) -> str:
        """What the loader reads, in lines: datasets, order, bytes that a node fetches and keeps, and defaults."""
        return "\n".join(f"{name + ':':<16} {value}" for name, value in display.describe(self).items())

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.arguments.items() if value not in (None, False)}
        source = self.mixture or self.dataset.url
        shown = {"dataset": source, **{name: value for name, value in shown.items() if name != "dataset"}}
        text = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"Loader({text}) at epoch {self.epoch}, step {self._step}, rank {self.rank} of {self.world_size}"

    def _repr_html_(self) -> str:
        return html.card("Loader", display.describe(self))


class _Pass:
    """A run that ends where a pass does: no slice is fetched for steps after it."""

    def __init__(self, run: Run) -> None:
        self._run, self.num_steps = run, run.num_steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


def _reopen(arguments: dict[str, Any], state: dict[str, Any]) -> Loader[Any]:
    loader: Loader[Any] = Loader(**arguments)
    loader.load_state_dict(state)
    return loader
