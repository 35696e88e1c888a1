"""Batches in the order of steps: many steps are planned at once, their slices opened, and batches made one at a time.

A *plan* has the samples of some hundred steps. A *block* is the longest run of planned steps whose slices are
available: they are opened, and the position of each row is computed at once. A batch is then one gather; no Python code
runs per sample. A late slice delays only steps that read it.
"""

import time
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ForebayError, UsageError
from forebay.load.batch import NumpyRows, NumpyTokens, new_batch
from forebay.load.collate import Collator, ConcatCollator
from forebay.load.documents import DocumentCollator
from forebay.load.rows import RowCollator
from forebay.load.samples import SampleIndex
from forebay.load.slices import SliceReader
from forebay.order.run import Run

I64 = NDArray[np.int64]

PLAN_SAMPLES = 8192
_CACHED_PLAN_STEPS = 64  # With a cache: the slices of a block cannot be evicted until it ends.


def make_collator(
    indexes: Sequence[SampleIndex], *, dtype: Any = np.int64, document_masks: bool = False, pad_id: int | None = None,
    trim_padding: bool = False,
) -> Collator:  # fmt: skip
    """The collator for one index a dataset, all of one layout, seq_len and packing; arguments as the Loader's.

    Packing `best_fit` always has document masks.
    """
    kinds = {(index.layout, index.seq_len, index.packing) for index in indexes}
    if len(kinds) != 1:
        raise UsageError(
            f"datasets of a mixture: expected one layout, seq_len and packing, got {sorted(map(str, kinds))}."
        )
    layout, _, packing = kinds.pop()
    if layout == "rows":
        if document_masks:
            raise UsageError("document_masks: expected a dataset of layout 'tokens', got 'rows'. Leave it out.")
        return RowCollator(indexes, pad_id=pad_id, trim_padding=trim_padding)
    if trim_padding:
        raise UsageError("trim_padding: expected a dataset of layout 'rows', got 'tokens'. Leave it out.")
    if packing == "concat" and not document_masks and all(index.documents is None for index in indexes):
        return ConcatCollator(indexes, dtype=dtype)
    return DocumentCollator(indexes, dtype=dtype, document_masks=document_masks, pad_id=pad_id)


@dataclass(frozen=True)
class _Plan:
    steps: Sequence[int]
    bounds: list[int]  # [n + 1], of each step's samples in the arrays.
    keys: I64
    samples: I64  # Within the slice, as the index counts them.
    ids: I64
    sources: I64 | None
    epochs: list[int]
    steps_in_epoch: list[int]
    weights: list[float]  # As in a batch; 0 for a substitute sample.


class BatchPlanner:
    """A rank's batches from any step on. Not thread-safe.

    `indexes` has one entry a dataset. `every` (k, n): only the steps k, k + n, ... counted from the start of `batches`.
    """

    def __init__(
        self, run: Run, indexes: Sequence[SampleIndex], collator: Collator, slices: SliceReader, rank: int,
        world_size: int, every: tuple[int, int],
    ) -> None:  # fmt: skip
        self._run, self._collator, self._slices = run, collator, slices
        self._rank, self._world_size, self._every = rank, world_size, every
        self._first_ids = np.concatenate([index.bases + index.offsets for index in indexes])  # By key.
        self._mixed = len(indexes) > 1
        share = max(1, run.batches.largest // world_size)
        # A plan does not span many epochs of a small dataset.
        samples = min(PLAN_SAMPLES, max(order.num_samples for order in run.orders))
        steps = max(1, samples // share)
        self._plan_steps = every[1] * (min(steps, _CACHED_PLAN_STEPS) if slices.cached else steps)
        self._open: set[int] = set()  # Keys.
        self._min_make_s = float("inf")
        self.network_s = self.disk_s = 0.0  # Waited for slices in transfer; for pages not in memory.
        self.num_opened = 0  # Slices.

    def batches(self, step: int) -> Generator[NumpyTokens | NumpyRows, None, None]:
        """The batches from run step `step` to the end of the run."""
        self._slices.seek(step)
        plan = self._plan(step)
        while plan is not None:
            following: _Plan | None = None
            start = 0
            while start < len(plan.steps):
                stop = self._open_block(plan, start)
                yield from self._block(plan, start, stop)
                if start == 0:
                    following = self._plan(plan.steps[0] + self._plan_steps - self._every[0])
                    if following is not None:
                        self._slices.read_ahead(np.unique(following.keys).tolist())
                start, step = stop, plan.steps[stop - 1] + 1
            plan = following
        self.close()
        self._slices.advance(step)

    def close(self) -> None:
        self._close_except(())

    def _block(self, plan: _Plan, start: int, stop: int) -> Iterator[NumpyTokens | NumpyRows]:
        bounds, ids, sources = plan.bounds, plan.ids, plan.sources
        first = bounds[start]
        clock, faults, make_s = time.perf_counter, _major_faults(), 0.0
        started_at = clock()
        rows = self._collator.plan(plan.keys[first : bounds[stop]], plan.samples[first : bounds[stop]])
        for i in range(start, stop):
            low, high = bounds[i], bounds[i + 1]
            arrays = self._collator.make(rows, low - first, high - first)
            end = high if plan.weights[i] else low
            batch = new_batch(
                *arrays, sample_ids=ids[low:end], epoch=plan.epochs[i], step=plan.steps[i],
                epoch_step=plan.steps_in_epoch[i], weight=plan.weights[i],
                _dataset_index=None if sources is None else sources[low:end],
            )  # fmt: skip
            make_s += clock() - started_at
            yield batch
            del batch, arrays  # Memory that the caller drops is free for the next batch.
            started_at = clock()
        make_s /= stop - start
        if _major_faults() == faults:
            self._min_make_s = min(self._min_make_s, make_s)
        elif self._min_make_s < make_s:  # Pages were read: the time above the minimum was spent waiting for the disk.
            self.disk_s += (make_s - self._min_make_s) * (stop - start)

    def _plan(self, step: int) -> _Plan | None:
        """The plan that starts with this rank's next step from `step` on; None at the end of the run."""
        k, n = self._every
        stop = step + self._plan_steps
        if self._run.num_steps is not None:
            stop = min(stop, self._run.num_steps)
        if step + k >= stop:
            return None
        read = self._run.steps(step, stop, self._rank, self._world_size)
        epochs, steps_in_epoch, positions = self._run.progress_table(step, stop)
        keys = read.slices if not self._mixed else self._slices.first_key[read.sources] + read.slices
        samples, sources, lengths = read.samples, read.sources, np.diff(read.bounds)
        weights = lengths * self._world_size / self._run.batch_lens(step, stop)
        # A rank without a sample gets a substitute; never in a mixture, whose batches are all full.
        for i in np.flatnonzero(lengths == 0)[::-1].tolist():
            order, row = self._run.orders[0], int(read.bounds[i])
            position = np.array([min(int(positions[i]), order.num_samples - 1)])
            key, sample = order.samples_at(int(epochs[i]), position)
            keys, samples = np.insert(keys, row, key), np.insert(samples, row, sample)
            sources = np.insert(sources, row, 0)
            lengths[i] = 1
        chosen = slice(k, None, n)
        if n > 1:
            is_chosen = np.zeros(stop - step, bool)
            is_chosen[chosen] = True
            rows = np.repeat(is_chosen, lengths)
            keys, samples, sources, lengths = keys[rows], samples[rows], sources[rows], lengths[chosen]
        return _Plan(
            range(step, stop)[chosen], np.concatenate([[0], np.cumsum(lengths)]).tolist(), keys, samples,
            self._first_ids[keys] + samples, sources if self._mixed else None, epochs[chosen].tolist(),
            steps_in_epoch[chosen].tolist(), weights[chosen].tolist(),
        )  # fmt: skip

    def _open_block(self, plan: _Plan, start: int) -> int:
        """Open the available slices of the steps from `start` on, at least one step's; return where the block stops."""
        low = plan.bounds[start]
        num_required = plan.bounds[start + 1] - low  # Samples of the first step.
        keys, first_use = np.unique(plan.keys[low:], return_index=True)
        order = np.argsort(first_use, kind="stable")
        keys, first_use = keys[order], first_use[order]
        self._fetch(keys[first_use < num_required].tolist(), plan.steps[start])
        used, stop = keys.tolist(), len(plan.steps)
        for i, (key, row) in enumerate(zip(keys.tolist(), first_use.tolist())):
            required, cached = row < num_required, self._slices.is_cached(key)
            if key in self._open and (required or not cached):
                continue
            step = start if required else int(np.searchsorted(plan.bounds, row + low, side="right")) - 1
            try:
                available = required or not cached or self._slices.hold([key], plan.steps[step] + 1)
                if available and key not in self._open:
                    self._open_map(key, plan.steps[step] + 1)
            except ForebayError:
                if required:
                    raise
                available = False  # The error is raised when that step is read.
            if not available:
                used, stop = used[:i], step
                break
        self._close_except(used)
        self._slices.advance(plan.steps[start])
        return stop

    def _fetch(self, keys: Sequence[int], step: int) -> None:
        """Hold the slices that a step needs. While it waits none is mapped: a budget counts no deleted files."""
        if not self._slices.cached or self._slices.hold(keys, step + 1):
            return
        self.close()
        self._slices.advance(step)
        started_at = time.perf_counter()
        try:
            self._slices.fetch(keys, step + 1)
        finally:
            self.network_s += time.perf_counter() - started_at

    def _close_except(self, used: Collection[int]) -> None:
        for key in self._open.difference(used):
            self._open.remove(key)
            self._collator.close(key)

    def _open_map(self, key: int, until: int) -> None:
        started_at = time.perf_counter()
        index, opened = self._slices.open(key, until)
        elapsed_s = time.perf_counter() - started_at
        if self._slices.is_cached(key):
            self.network_s += elapsed_s
        else:
            self.disk_s += elapsed_s
        self._collator.open(key, index, opened)
        self._open.add(key)
        self.num_opened += 1


def _major_faults() -> int:
    return getrusage(RUSAGE_SELF).ru_majflt
