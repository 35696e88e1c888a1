"""The Loader: batches of a dataset in a reproducible order, resumable at any of them. No framework.

Memory: a batch and what `prefetch_batches` holds, 16 bytes a slice of the table for the order, some thousand sample
numbers, and maps of the slices that are read, which are pages of the page cache. Disk: `cache_bytes`.
"""

from __future__ import annotations

import inspect
import logging
import threading
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np

from forebay.base import Json
from forebay.dataset.reader import Dataset
from forebay.errors import UsageError
from forebay.load import display
from forebay.load.batch import NumpyRows, NumpyTokens
from forebay.load.batch_source import Batches, BatchT, Convert, Opened, RunningSource, Take
from forebay.load.environment import close_at_exit, write_stats
from forebay.load.loader_plan import LoaderPlan, make_lease_state, step_of_lease_state
from forebay.load.options import LoaderArguments, LoaderConfig, changed, refuse_unknown
from forebay.load.prefetch import Prefetcher
from forebay.load.sources import DatasetSource, Mixture
from forebay.load.state import make_state, step_of_state
from forebay.load.stats import Spent
from forebay.order.growth import grow
from forebay.order.step_index import check_integer
from forebay.storage.locks import at_fork

if TYPE_CHECKING:
    from forebay.dataset.documents import Document
    from forebay.load.helpers import HelperPool

_log = logging.getLogger("forebay")
_READY_S = 1e-3  # A prefetched batch that comes sooner than this was ready.


class Loader(RunningSource[BatchT]):
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
        cache_bytes: Limit of the cache, for all loaders that share it together, such as "10GB"; by default a quarter
            of what is free, up to 64 GiB. Every size may be such a text.
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
        **arguments: Unpack[LoaderArguments],
    ) -> None: ...  # fmt: skip
    def __init__(
        self, dataset: DatasetSource | Mixture | None = None, *, seq_len: int | None = None,
        **arguments: Unpack[LoaderArguments],
    ) -> None:  # fmt: skip
        refuse_unknown(arguments)
        config = LoaderConfig(dataset, seq_len, **arguments)  # type: ignore[arg-type]
        self._start(config)
        self._reporting_pid = close_at_exit(self) if dataset is None else 0
        for warning in self.plan.warnings:
            _log.warning("%s", warning)

    __signature__ = inspect.signature(LoaderConfig)

    def _start(self, config: LoaderConfig) -> None:
        self.config, self._reporting_pid = config, 0
        plan = self.plan = LoaderPlan(config)
        self.rank, self.world_size, self.seq_len = plan.rank, plan.world_size, plan.seq_len
        self.datasets, self.mixture, self.run, self.order = plan.datasets, plan.mixture, plan.run, plan.run.orders[0]
        self._epochs = None if plan.mixture is not None or plan.jobs else config.epochs
        self.step, self._shares, self._identity = 0, True, plan.identity
        self.title = "mixture" if plan.mixture is not None else plan.dataset.name
        self.cache_bytes = 0 if plan.cache is None else plan.cache.budget_bytes
        factor = self.world_size if config.is_owned else 1
        self.global_batch_sizes = [(step, size * factor) for step, size in self.run.batches.changes]
        self._reset()

    def _reset(self) -> None:
        super()._reset()
        self._pausing, self._is_reader = threading.RLock(), 0
        self._pool: HelperPool | None = None
        self._of_parent: object = None
        at_fork(self)
        self._num_batches, self._samples_of = 0, [0] * len(self.datasets)
        self._text = display.TokenText(self.dataset)
        self._make_planner((0, 1))

    def _make_planner(self, every: tuple[int, int]) -> None:
        self._every = every
        opened = self.plan.open_slices(self.run, every, self._shares, self.stats)
        self._slices, self.planner, self.leases = opened
        """`leases`: the leased samples; None without `scheduler`."""

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"Loader: expected iteration, got loader[{index!r}]. For a DataLoader of PyTorch: "
            "DataLoader(loader.to_torch(), batch_size=None)."
        )

    def __len__(self) -> int:
        """Batches of a full `for` at the loader's position. Raises TypeError where it has no end."""
        start, stop = self.pass_of(self.step)
        if self.leases is not None:
            raise TypeError("len: expected a loader without scheduler=: how many batches a worker gets is not known.")
        if stop is None:
            raise TypeError("len: expected a loader whose iteration ends, got epochs=None or a mixture. Give steps=.")
        return stop - start

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0; 0 for a mixture."""
        return self.run.progress(self.step).epoch if self.leases is None else self.leases.epoch

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
        return self._epochs_of(step, self._epochs)

    def _epochs_of(self, step: int, epochs: int | None) -> tuple[int, int | None]:
        """The steps of a step's pass of so many epochs; None for the whole run."""
        end = self.run.num_steps
        if epochs is None:
            return 0, end
        last = step if end is None else min(step, end - 1)
        first = self.run.progress(last).epoch // epochs * epochs
        return self._first_step(first), self._first_step(first + epochs)

    def take(self, n: int | None = None) -> Take[BatchT]:
        """The first `n` batches of the current epoch (None: all of it), as an iterable that gives them each time.

        Iterating it does not move the loader: for fixed validation batches, or to look at one. Raises TypeError for all
        batches of a mixture without `steps`, which has no end.
        """
        check_integer("n", n, 0)
        if self.leases is not None:
            raise UsageError("take: expected a loader without scheduler=: a leased sample is used once, by one worker.")
        epochs = None if self.mixture is not None else 1
        start, stop = self._epochs_of(self.step, epochs)
        if n is None and stop is None:
            raise TypeError("take: expected a number of batches of a mixture without an end. Give n, or steps=.")

        def open_batches(convert: Convert | None, prefetch: int | None) -> Batches:
            view: Loader[BatchT] = type(self).__new__(type(self))
            vars(view).update(vars(self), step=start, _epochs=epochs, _shares=False, _reporting_pid=0, readers=None)
            view._reset()
            with view:
                yield from view.iterate(convert, prefetch)

        return Take(self, open_batches, min(size for size in (n, stop and stop - start) if size is not None))

    def _check_iteration(self, num_workers: int) -> None:
        self._check_readers(any(self.readers or ()))
        if self.leases is not None and num_workers:
            raise UsageError(
                f"num_workers: expected 0 with scheduler=, got {num_workers}: a batch counts as used in "
                "the process that leases. Use prefetch, or SampleOptions.prefetch_batches."
            )
        if self.run.num_steps is not None and self.step >= self.run.num_steps:
            _log.warning(
                "Loader: all %d steps of the run are done: this loop gets no batch. Give more steps=, or load a state.",
                self.run.num_steps,
            )

    def _open(self, convert: Convert | None, prefetch: int | None, num_workers: int) -> Opened:
        depth = self.config.samples.prefetch_batches if prefetch is None else prefetch
        maker = self._helpers(num_workers) if num_workers else self.planner
        batches = maker.batches(self.step, self.pass_of(self.step)[1])
        source = Prefetcher(batches, depth, lambda batch: self._finish(convert, batch), self._slices.pause)

        def spent() -> Spent:
            return maker.scheduler_s, maker.network_s, maker.disk_s, source.convert_s, 0.0

        return source, spent, _READY_S if depth or num_workers else 0.0

    def _finish(self, convert: Convert | None, batch: Any) -> tuple[int, Any, Any]:
        batch._text = self._text
        if (max_documents := self.config.samples.max_documents) is not None:
            batch.pad_documents(max_documents)
        counts = len(batch.sample_ids) if batch._dataset_index is None else batch._dataset_index
        return batch.step, counts, batch if convert is None else convert(batch)

    def iterate_share(self, convert: Convert, readers: Any, share: tuple[int, int]) -> Batches:
        """In worker k of n of a DataLoader: its batches of the next pass.

        Args:
            convert: As of `iterate`.
            readers: The loader's, shared between processes.
            share: (k, n).
        """
        self._check_readers(readers[share[0]] != self._is_reader)
        self._pause()
        start, stop = self.step, self.pass_of(self.step)[1]
        self.readers, readers[share[0]] = readers, 1
        self.step, self._is_reader = stop or start, 1 if stop else -1  # A run without an end has no second pass.
        for batch in self.raw_batches(start, stop, share):
            yield self._finish(convert, batch)[2]

    def _check_readers(self, have_read: bool) -> None:
        if have_read:
            raise UsageError(
                "Loader: workers of a DataLoader read on from pass to pass (persistent_workers=True), and only its "
                "loop knows how far it is. Before anything else reads the loader, or saves it, load where the loop is: "
                "loader.load_state_dict(loader.state_at(batch.step + 1)); then make a new DataLoader."
            )

    def _receive(self, item: tuple[int, Any, Any]) -> Any:
        step, counts, batch = item
        if self.leases is not None and not self.leases.deliver(step):
            self._pause()  # A lease of it was lost: what was formed ahead is formed again.
            return None
        self.step = step + 1
        self._num_batches += 1
        if isinstance(counts, int):
            self._samples_of[0] += counts
        else:
            for index, count in enumerate(np.bincount(counts).tolist()):
                self._samples_of[index] += count
        return batch

    def commit(self) -> None:
        if self.leases is not None:
            self.leases.commit()

    def raw_batches(self, start: int, stop: int | None, every: tuple[int, int]) -> Batches:
        """In a helper process: the batches of steps start + k, start + k + n, ... below `stop`, for `every` (k, n)."""
        if self._every != every:
            self._make_planner(every)
        return self.planner.batches(start, stop)

    def _helpers(self, num_workers: int) -> HelperPool:
        if self._pool is None or self._pool.num_workers != num_workers:
            if self._pool is not None:
                self._pool.close()
            from forebay.load.helpers import HelperPool

            self._pool = HelperPool(self, num_workers)
        return self._pool

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
        self._pausing = threading.RLock()

    def _pause(self) -> None:
        with self._pausing:  # A loop in another thread ends, too.
            super()._pause()
            self._slices.pause()
            self.planner.close()

    def __reduce__(self) -> Any:
        """Pickled as its settings and its state: another process opens its own maps and threads."""
        return _reopen, (self.config.for_process(self.rank, self.world_size), self.state_at(self.step))

    def state_dict(self) -> Json:
        """The state after the last batch that iterating returned. Plain JSON values.

        A loader of any rank and world size with the same global batch can load it. With `scheduler` it has the step and
        the jobs' ids; which samples are used is in the schedulers' ledgers.
        """
        self._check_readers(any(self.readers or ()))
        return self.state_at(self.step)

    def state_at(self, step: int) -> Json:
        """The state before run step `step`. A running iteration is not changed."""
        if self.leases is not None:
            return make_lease_state(self.plan.jobs, step)
        return make_state(self._identity, self.run, step)

    def load_state_dict(self, state: Json) -> None:
        """Continue with the batch after `state`, also in a running iteration. Nothing is replayed.

        A state of a dataset that this one extends finishes that dataset's epoch; later epochs have all samples. The
        lanes and windows are those of the state, unless `order` names others.

        Raises:
            StateError: If the state is not of this dataset, seed, seq_len, global batch, order, or is malformed.
        """
        plan = self.plan
        if self.readers:
            self.readers[:] = bytes(len(self.readers))
        if self.leases is not None:
            step = step_of_lease_state(state, plan.jobs)
            self._pause()
            self.step = step
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
        self.step = step

    def stats(self) -> dict[str, float]:
        """Times in seconds, and counts, since the loader was made.

        `wait_s`: waiting for batches; of it `scheduler_s`, `network_s`, `disk_s`, `decode_s`, `device_s`, `queue_s`, as
        in `forebay.load.stats`. `busy_s`: between the waits. `waiting_s`: the wait in progress. `ideal_s`, after
        `measure_mfu`: what the received tokens take at the device's peak. `batches`, `samples`,
        `tokens` received, of a mixture also `tokens.NAME` (or `samples.NAME`) of each dataset; `slices_opened`. With a
        cache also `requests` and `fetched_bytes` (for chunks, their hashes, and the lengths of documents),
        `fetched_chunks`, `refetched_chunks` and `refetched_bytes` (a second time in one epoch), `failed`, `late` and
        `waited_s` (waits for chunks), `in_flight`, `evicted_bytes`, `wrong_bytes` (their hash differed), `cached_bytes`
        (by all that share the cache). What helper processes open is not counted.
        """
        unit, size = ("samples", 1) if self.seq_len is None else ("tokens", self.seq_len)
        samples = sum(self._samples_of)
        counts = {"batches": self._num_batches, "samples": samples, "tokens": samples * (self.seq_len or 0)}
        if self.mixture is not None:
            counts |= {f"{unit}.{name}": size * n for name, n in zip(self.datasets, self._samples_of)}
        opened = {"slices_opened": self.planner.num_opened}
        stats = {**self.waits.to_dict(), "ideal_s": self._ideal_s(), **counts, **opened, **self._slices.stats()}
        for name in {"fetched_bytes", "requests"} & stats.keys():
            stats[name] += sum(getattr(dataset, name) for dataset in self.datasets.values())
        return stats

    def _num_units(self) -> float:
        return sum(self._samples_of) * (self.seq_len or 1)

    def documents(self, batch: Any) -> list[list[Document]]:
        """The documents of each sample of a batch of this loader, whole, with their ids and sources, in order.

        Raises:
            UsageError: If the dataset is remote or of layout `rows`.
        """
        return display.documents_of(self, batch)

    def describe(self) -> str:
        """What the loader reads, in lines: datasets, order, bytes that a node fetches and keeps, and defaults."""
        return "\n".join(f"{name + ':':<16} {value}" for name, value in display.describe(self).items())

    @property
    def settings(self) -> str:  # type: ignore[override]
        urls = {name: dataset.url for name, dataset in self.datasets.items()}
        dataset = self.dataset.url if self.mixture is None else replace(self.mixture, datasets=urls)
        shown = (f"{name}={value!r}" for name, value in (changed(self.config) | {"dataset": dataset}).items())
        return f"Loader({', '.join(shown)})"

    def __repr__(self) -> str:
        return f"{self.settings} at epoch {self.epoch}, step {self.step}, rank {self.rank} of {self.world_size}"

    def _repr_html_(self) -> str:
        from forebay import html

        return html.card("Loader", display.describe(self))


def _reopen(config: LoaderConfig, state: Json) -> Loader[Any]:
    loader: Loader[Any] = Loader.__new__(Loader)
    loader._start(config)
    loader.load_state_dict(state)
    return loader
