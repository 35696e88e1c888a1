"""The loader: batches of a dataset in the order's order, resumable at any of them. No framework, no network.

Hides: which slices are open (by the known future: those of the last few batches' lanes), the thread that makes
batches ahead, and what is consumed as against merely made. State is (seed, epoch, samples taken), and what
must agree for it to mean the same samples; no rank and no world size is in it.

Memory: (prefetch + 2) batches, 16 bytes a slice of the table for the order, and the maps of at most
max(64, 4 lanes) slices, which are the page cache's pages, not the process's own.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.dataset.reader import Dataset, open_dataset
from millrace.dataset.slices import Slice
from millrace.errors import StateError, UsageError
from millrace.load.batch import Batch, BufferPool, gather, gather_rows
from millrace.order.plan import Order, samples_per_slice

STATE_VERSION = 1
_STOP_POLL_S = 0.05
_MOST_WORLD = 4096
_PLAN_SAMPLES = 4096  # Sample numbers found in one go: 32 KiB, and a tenth of the cost of batches of 32.


class Loader:
    """Batches of one rank, as an iterable.

    Iterating goes on from the loader's state and ends after the last epoch; leaving the loop early and
    iterating again goes on with the next batch. One iteration at a time. Same arguments, same batches, on any
    machine; the global batch of a step is the same for every world size with the same `global_batch_size`.

    Args:
        dataset: A directory, a `file://` URL, or an open Dataset.
        seq_len: Tokens of a sample, L. Needed for layout `tokens`; unused for `rows`.
        batch_size: Samples of a rank's batch; the global batch is batch_size * world_size.
        global_batch_size: Samples of all ranks' batches together. Exactly one of the two is given. It need not
            be a multiple of the world size: ranks' shares differ by at most one sample.
        rank: By default the environment's RANK, or 0.
        world_size: By default the environment's WORLD_SIZE, or 1.
        seed: Any integer.
        shuffle: False for the dataset's own order.
        epochs: How many in all; None for no end.
        drop_last: Leave out the short global batch at an epoch's end. Without it a rank's last batch may be
            shorter, or even empty where fewer samples than ranks are left; every rank has as many steps.
        dtype: int64 or int32, of the batch's token ids.
        cache_dir, cache_bytes: Where slices of a remote dataset are kept, and in how many bytes. A directory
            needs neither, and says so.
        prefetch: Batches made ahead by a thread; 0 makes them in the caller's.
        lanes, window: As in `Order`.

    Raises:
        UsageError: If an argument is missing or out of range.
        DatasetError: If the dataset is damaged; while iterating, if a slice is missing or truncated.
    """

    def __init__(
        self,
        dataset: str | Path | Dataset,
        *,
        seq_len: int | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
        drop_last: bool = False,
        dtype: Any = np.int64,
        cache_dir: str | Path | None = None,
        cache_bytes: int | None = None,
        prefetch: int = 2,
        lanes: int | None = None,
        window: int | None = None,
    ) -> None:
        _check_integer("cache_bytes", cache_bytes, 1)
        _check_integer("epochs", epochs, 1)
        _check_integer("prefetch", prefetch, 0)
        self.rank, self.world_size = _rank_of_world(rank, world_size)
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise UsageError(f"seed: expected an integer, got {seed!r}.")
        self.dataset = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
        if cache_dir is not None or cache_bytes is not None:
            raise UsageError(
                f"cache_dir, cache_bytes: expected none for {self.dataset.path}, which is local and is read "
                "in place. Leave them out."
            )
        manifest = self.dataset.manifest
        self._tokens = manifest.layout == "tokens"
        if self._tokens and seq_len is None:
            raise UsageError("seq_len: needed for a dataset of layout 'tokens'. Say how long a sample is.")
        _check_integer("seq_len", seq_len, 1)
        self.seq_len = int(seq_len) if self._tokens and seq_len is not None else None
        self._dtype = _token_dtype(dtype, manifest.dtype, manifest.vocab_size)
        counts = samples_per_slice(self.dataset.table.count, self.seq_len, manifest.layout)
        size = _global_batch(batch_size, global_batch_size, self.world_size)
        self.order = Order(counts, int(seed), size, lanes, window, bool(shuffle), bool(drop_last))
        if self.order.steps_per_epoch == 0:
            raise UsageError(
                f"{self.dataset.path}: expected at least one batch an epoch, got {self.order.num_samples} samples "
                f"of {self.seq_len} tokens for a global batch of {size}. Ask for shorter samples or smaller batches."
            )
        self._epochs = epochs
        self._prefetch = int(prefetch)
        self._epoch, self._step = 0, 0
        self._slices: OrderedDict[int, Slice] = OrderedDict()
        self._most_slices = max(64, min(4 * self.order.num_lanes, 256))
        self._pool = BufferPool(self._prefetch + 3)
        self._plan_steps = max(1, _PLAN_SAMPLES * self.world_size // size)
        self._planned: dict[tuple[int, int], tuple[NDArray[np.int64], list[int], NDArray[np.int64]]] = {}
        self._turn = 0
        self._source: Generator[Batch, None, None] | None = None
        self._seconds = {"wait_s": 0.0, "order_s": 0.0, "open_s": 0.0, "gather_s": 0.0}
        self._done = {"batches": 0, "samples": 0, "slices_opened": 0}

    def __len__(self) -> int:
        """Steps of all epochs (of one epoch, if they have no end)."""
        return self.order.steps_per_epoch * (self._epochs or 1)

    @property
    def tail_tokens(self) -> int:
        """Tokens of an epoch that no sample reads as input, as they are fewer than seq_len at a slice's end."""
        if self.seq_len is None:
            return 0
        return self.dataset.num_tokens - self.order.num_samples * self.seq_len

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        self._turn += 1
        turn = self._turn
        try:
            while True:
                began = time.perf_counter()
                if turn != self._turn:
                    raise UsageError("Loader: this iteration ended when another began. Open another Loader for two.")
                if self._source is None:
                    self._source = self._ahead() if self._prefetch else self._inline()
                batch = next(self._source, None)
                self._seconds["wait_s"] += time.perf_counter() - began
                if batch is None:
                    return
                self._epoch, self._step = self._after(batch.epoch, batch.step)
                self._done["batches"] += 1
                self._done["samples"] += len(batch)
                yield batch
                del batch  # So that its buffer is free for the next one.
        finally:
            if turn == self._turn:
                self.close()

    def close(self) -> None:
        """End the thread that makes batches ahead, and drop what it made. The state stays; iterating starts anew.

        Leaving a loop does it too. May be called twice.
        """
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: after the last batch that iterating gave out. Plain JSON values.

        It may be loaded by a loader of any rank and world size with the same global batch.
        """
        taken = min(self._step * self.order.global_batch, self.order.num_samples)
        return {
            "version": STATE_VERSION,
            **self._identity(),
            "epoch": self._epoch,
            "samples_taken": taken,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken: the next batch is the one that followed it then. Nothing is replayed.

        An iteration that is going on continues from there.

        Raises:
            StateError: If the state is not of this dataset, seed, seq_len, global batch, order, or is malformed.
        """
        expected = {"version": STATE_VERSION, **self._identity()}
        for name, value in expected.items():
            got = state.get(name) if isinstance(state, dict) else None
            if got != value or type(got) is not type(value):
                raise StateError(
                    f"loader state: expected {name} {value!r}, got {got!r}. Resuming would change the order of the "
                    f"data. Open the loader with {name}={got!r}, or start anew."
                )
        epoch, taken = state.get("epoch"), state.get("samples_taken")
        for name, number in (("epoch", epoch), ("samples_taken", taken)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise StateError(f"loader state: expected {name} an integer from 0, got {number!r}.")
        assert isinstance(epoch, int) and isinstance(taken, int)
        step, rest = divmod(taken, self.order.global_batch)
        if rest or step >= self.order.steps_per_epoch:
            raise StateError(
                f"loader state: expected samples_taken a multiple of {self.order.global_batch} below "
                f"{self.order.num_samples}, got {taken}. Take the state from state_dict()."
            )
        self.close()
        self._epoch, self._step = epoch, step

    def stats(self) -> dict[str, float]:
        """Where time went since the loader was made, in seconds and counts.

        `wait_s`: the caller waited for a batch. `order_s`, `open_s`, `gather_s`: the making of batches computed
        sample numbers, opened slices, copied and cast (and read from disk what was not in memory yet); with
        prefetch these run beside the caller. `batches`, `samples`, `tokens` given out; `slices_opened`.
        """
        tokens = self._done["samples"] * (self.seq_len or 0)
        return {**self._seconds, **self._done, "tokens": tokens}

    def _identity(self) -> dict[str, Any]:
        order = self.order
        return {
            "dataset_id": self.dataset.id,
            "seed": order.seed,
            "seq_len": self.seq_len,
            "global_batch_size": order.global_batch,
            "shuffle": order.shuffle,
            "drop_last": order.drop_last,
            "lanes": order.num_lanes,
            "window": order.window_samples,
        }

    def _after(self, epoch: int, step: int) -> tuple[int, int]:
        if step + 1 < self.order.steps_per_epoch:
            return epoch, step + 1
        return epoch + 1, 0

    def _inline(self) -> Generator[Batch, None, None]:
        epoch, step = self._epoch, self._step
        while self._epochs is None or epoch < self._epochs:
            yield self._make(epoch, step)
            epoch, step = self._after(epoch, step)

    def _ahead(self) -> Generator[Batch, None, None]:
        """`_inline`, made by a thread of its own at most `prefetch` batches ahead; closing ends the thread."""
        made: queue.Queue[Batch | BaseException | None] = queue.Queue(self._prefetch)
        stop = threading.Event()

        def put(item: Batch | BaseException | None) -> None:
            while not stop.is_set():
                try:
                    return made.put(item, timeout=_STOP_POLL_S)
                except queue.Full:
                    continue

        def make() -> None:
            try:
                batches = self._inline()
                while not stop.is_set():
                    item = next(batches, None)
                    put(item)
                    if item is None:
                        return
                    del item
            except BaseException as error:  # noqa: BLE001  The caller's thread raises it.
                put(error)

        thread = threading.Thread(target=make, name="millrace-loader", daemon=True)
        thread.start()
        try:
            while True:
                item = made.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
                del item
        finally:
            stop.set()
            thread.join()

    def _make(self, epoch: int, step: int) -> Batch:
        times = [time.perf_counter()]
        if (epoch, step) not in self._planned:
            self._planned = self._plan(epoch, step)
        ids, slice_indexes, samples = self._planned[epoch, step]
        times.append(time.perf_counter())
        slices = {i: self._slice(i) for i in dict.fromkeys(slice_indexes)}
        times.append(time.perf_counter())
        batch: Batch
        if self._tokens:
            assert self.seq_len is not None
            sources = {i: one.tokens for i, one in slices.items()}
            buffer = self._pool.take((len(ids), self.seq_len + 1), self._dtype)
            inputs, labels = gather([sources[i] for i in slice_indexes], samples, buffer)
            batch = Batch(inputs, labels, ids, epoch, step)
        else:
            rows = gather_rows([slices[i].tensors for i in slice_indexes], samples)
            inputs_or_none = rows.get("input_ids", rows.get("images"))
            batch = Batch(inputs_or_none, rows.get("labels"), ids, epoch, step, rows)
        times.append(time.perf_counter())
        for name, began, ended in zip(("order_s", "open_s", "gather_s"), times, times[1:]):
            self._seconds[name] += ended - began
        return batch

    def _plan(
        self, epoch: int, step: int
    ) -> dict[tuple[int, int], tuple[NDArray[np.int64], list[int], NDArray[np.int64]]]:
        """For some steps from this one on: sample ids, the slice of each, and the sample within its slice."""
        stop = min(step + self._plan_steps, self.order.steps_per_epoch)
        shares = self.order.shares(epoch, step, stop, self.rank, self.world_size)
        slices, samples = self.order.locate(np.concatenate(shares))
        planned, start = {}, 0
        for i, ids in enumerate(shares):
            mine = slice(start, start + len(ids))
            planned[epoch, step + i] = (ids, slices[mine].tolist(), samples[mine])
            start += len(ids)
        return planned

    def _slice(self, index: int) -> Slice:
        """Slice `index`, open. Kept among as many as the windows of all lanes need; the map is dropped after."""
        found = self._slices.get(index)
        if found is None:
            found = self.dataset.open_slice(index)
            self._done["slices_opened"] += 1
            self._slices[index] = found
            while len(self._slices) > self._most_slices:
                self._slices.popitem(last=False)
        else:
            self._slices.move_to_end(index)
        return found


def _check_integer(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise UsageError(f"{name}: expected an integer from {least}, got {value!r}.")


def _rank_of_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    found = []
    for name, value, fallback in (("RANK", rank, 0), ("WORLD_SIZE", world_size, 1)):
        text = os.environ.get(name, str(fallback)) if value is None else value
        try:
            if isinstance(text, (bool, float)):
                raise ValueError
            found.append(int(text))
        except (TypeError, ValueError):
            raise UsageError(
                f"{name.lower()}: expected an integer, got {text!r} (the argument, or {name} in the environment)."
            ) from None
    if not 1 <= found[1] <= _MOST_WORLD or not 0 <= found[0] < found[1]:
        raise UsageError(
            f"rank, world_size: expected 0 <= rank < world_size <= {_MOST_WORLD}, got rank {found[0]} of {found[1]} "
            "(arguments, or RANK and WORLD_SIZE in the environment)."
        )
    return found[0], found[1]


def _global_batch(batch_size: int | None, global_batch_size: int | None, world_size: int) -> int:
    if (batch_size is None) == (global_batch_size is None):
        raise UsageError(
            f"batch: expected batch_size (a rank's) or global_batch_size, one of them, got {batch_size!r} and "
            f"{global_batch_size!r}."
        )
    _check_integer("batch_size", batch_size, 1)
    _check_integer("global_batch_size", global_batch_size, 1)
    if batch_size is not None:
        return int(batch_size) * world_size
    assert global_batch_size is not None
    return int(global_batch_size)


def _token_dtype(dtype: Any, stored: str, vocab_size: int) -> NDArray[Any] | Any:
    try:
        wanted = np.dtype(dtype)
    except TypeError as error:
        raise UsageError(f"dtype: expected int64 or int32, got {dtype!r}.") from error
    if wanted not in (np.dtype(np.int64), np.dtype(np.int32)):
        raise UsageError(f"dtype: expected int64 or int32, got {wanted}. Labels of -100 need a sign.")
    if wanted == np.dtype(np.int32) and stored == "U32" and not 0 < vocab_size <= 1 << 31:
        raise UsageError(
            f"dtype: expected int64 for U32 tokens of a vocabulary of {vocab_size or 'unknown size'}, got int32."
        )
    return wanted
