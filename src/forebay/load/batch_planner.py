"""Batches in the order of steps: many steps are planned at once, their slices opened, and batches made one at a time.

A *plan* has the samples of some hundred steps. Plans are made ahead as far as their chunks may be fetched. A *block* is
the longest run of steps of a plan whose chunks are here: their slices are opened, and the position of each row is
computed at once. A batch is then one gather; no Python code runs per sample. A late chunk delays only the steps that
read it, or come after these.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np

from forebay.arrays import I64
from forebay.errors import ForebayError, UsageError
from forebay.fetch.cache import NoSpaceError
from forebay.fetch.needs import PlanNeeds
from forebay.load.batch import NumpyRows, NumpyTokens, new_batch
from forebay.load.collate import Collator
from forebay.load.rows import RowCollator
from forebay.load.samples import SampleIndex
from forebay.load.slices import SliceReader
from forebay.load.tokens import TokenCollator
from forebay.order.run import Run

PLAN_SAMPLES = 8192
_FIRST_RUN_BYTES = 64 << 10  # A request for the first steps; twice as many for each plan after them.
_PLANS_AHEAD = 3  # With a cache, so many plans at least are ahead.
_SLOW_S = 1e-3  # A batch that took longer may have waited for the disk: its page faults are counted.
_HEADER_BYTES = 64  # A slice's header begins in its first chunk; that of tokens ends there.


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
    ((layout, *_),) = kinds
    if layout == "rows":
        if document_masks:
            raise UsageError("document_masks: expected a dataset of layout 'tokens', got 'rows'. Leave it out.")
        return RowCollator(indexes, pad_id=pad_id, trim_padding=trim_padding)
    if trim_padding:
        raise UsageError("trim_padding: expected a dataset of layout 'rows', got 'tokens'. Leave it out.")
    return TokenCollator(indexes, dtype=dtype, document_masks=document_masks, pad_id=pad_id)


@dataclass(eq=False)
class _Plan:
    steps: Sequence[int]
    bounds: list[int]  # [n + 1], of each step's samples in the arrays.
    keys: I64
    samples: I64  # Within the slice, as the index counts them.
    ids: I64
    sources: I64 | None
    epochs: list[int]
    steps_in_epoch: list[int]
    weights: list[float]  # As in Batch; 0 for a substitute sample.
    needs: PlanNeeds
    distinct: set[int] = field(default_factory=set)  # Keys.
    unresolved: dict[int, int] = field(default_factory=dict)  # Keys that must be open to know more; the first step.


class BatchPlanner:
    """A rank's batches from any step on. Not thread-safe.

    `indexes` has one entry a dataset. `every` (k, n): only the steps k, k + n, ... counted from the start of `batches`.
    """

    scheduler_s = 0.0  # No scheduler is waited for.

    def __init__(
        self, run: Run, indexes: Sequence[SampleIndex], collator: Collator, slices: SliceReader, rank: int,
        world_size: int, every: tuple[int, int],
    ) -> None:  # fmt: skip
        self._run, self._collator, self._slices = run, collator, slices
        self._rank, self._world_size, self._every = rank, world_size, every
        self._offsets = np.concatenate([index.offsets for index in indexes])  # By key, as the next.
        self._first_ids = np.concatenate([index.bases for index in indexes]) + self._offsets
        self._mixed = len(indexes) > 1
        share = max(1, run.batches.largest // world_size)
        # A plan does not span many epochs of a small dataset.
        samples = min(PLAN_SAMPLES, max(order.num_samples for order in run.orders))
        steps = max(1, samples // share)
        self._seq_len = indexes[0].seq_len or 1
        self._sample_bytes = int(slices.chunks.num_bytes.sum() / max(1, sum(index.num_samples for index in indexes)))
        self._plan_steps, self._step_bytes = every[1] * steps, max(1, share * self._sample_bytes)
        self._next_step = self._num_steps = 0  # Of the next plan.
        self._is_running = False  # A batch was made.
        self._queue: deque[_Plan] = deque()
        self._current: _Plan | None = None  # Its batches are being made.
        self._open: set[int] = set()  # Keys.
        self._min_make_s = float("inf")
        self.network_s = self.disk_s = 0.0  # Waited for slices in transfer; for pages not in memory.
        self.num_opened = 0  # Slices.

    def batches(self, step: int) -> Generator[NumpyTokens | NumpyRows, None, None]:
        """The batches from run step `step` to the end of the run."""
        self._next_step, self._num_steps = step, self._every[1] if self._slices.cached else self._plan_steps
        self._run_bytes = _FIRST_RUN_BYTES
        while True:
            self._plan_ahead()
            if not self._queue:
                break
            plan = self._current = self._queue.popleft()
            start = 0
            while start < len(plan.steps):
                stop = self._open_block(plan, start)
                if stop == start:
                    break  # No space for it: a smaller one follows.
                yield from self._block(plan, start, stop)
                if start == 0:
                    self._is_running = True
                    self._plan_ahead()
                start = stop
            self._slices.release(plan.needs)
            self._current = None
        self.close()

    def close(self) -> None:
        """Forget the plans, and close all slices."""
        self._queue.clear()
        self._current = None
        self._slices.clear()
        self._close_except(())

    def _plan_ahead(self) -> None:
        """Plan the next steps: with a cache, all those whose chunks are to be fetched now."""
        while not self._queue or self._slices.planned_bytes < self._slices.ahead_bytes:
            plan = self._plan(self._next_step, self._num_steps)
            if plan is None:
                break
            try:
                self._need(plan, tuple(self._queue))
            except NoSpaceError:
                self._slices.release(plan.needs)
                if self._queue or self._current is not None:
                    break
                if self._num_steps == self._every[1]:
                    raise
                self._plan_fewer()
                continue
            self._next_step = plan.steps[0] - self._every[0] + self._num_steps
            # The chunks of the first steps come first.
            self._num_steps = min(self._plan_steps, 2 * self._num_steps)
            self._run_bytes *= 2
            if self._slices.cached:
                steps = max(1, self._slices.ahead_bytes // _PLANS_AHEAD // self._step_bytes)
                self._num_steps = min(self._num_steps, self._every[1] * steps)
            self._queue.append(plan)
            if len(self._queue) == 1:
                self._slices.fetch()
        self._slices.fetch()

    def _need(self, plan: _Plan, earlier: Sequence[_Plan]) -> None:
        """Say what a plan reads of its slices. Where documents decide, that is known when a slice is open."""
        reader = self._slices
        steps = np.repeat(np.arange(len(plan.steps)), np.diff(plan.bounds))
        distinct, first = np.unique(plan.keys, return_index=True)
        plan.distinct = set(distinct.tolist())
        reader.add(plan.needs)
        if isinstance(self._collator, TokenCollator) and self._collator.is_plain:
            starts, stops = self._token_ranges(plan.keys, plan.samples)
            if self._is_running:
                reader.read_ahead(plan.keys, starts, stops)
            waiting = reader.waiting_keys(distinct)
            if waiting is not None:
                rows = np.isin(plan.keys, distinct[waiting])
                waiting &= ~np.isin(distinct, list(self._open.union(*(queued.distinct for queued in earlier))))
                keys, header = distinct[waiting], np.zeros(int(waiting.sum()), np.int64)  # Of slices yet to be opened.
                reader.need(
                    plan.needs, np.concatenate([plan.keys[rows], keys]), np.concatenate([starts[rows], header]),
                    np.concatenate([stops[rows], header + _HEADER_BYTES]),
                    np.concatenate([steps[rows], steps[first[waiting]]]),
                )  # fmt: skip
            return
        waiting = reader.waiting_keys(distinct)
        if waiting is None:
            return
        keys = distinct[waiting]
        plan.unresolved = dict(zip(keys.tolist(), steps[first[waiting]].tolist()))
        sizes = [self._collator.num_open_bytes(key, *reader.describe(key)) for key in keys.tolist()]
        reader.need(plan.needs, keys, np.zeros(len(keys), np.int64), np.array(sizes, np.int64), steps[first[waiting]])
        self._resolve(plan)

    def _token_ranges(self, keys: I64, samples: I64) -> tuple[I64, I64]:
        """The bytes [start, stop) of each sample of consecutive tokens, with the token after it."""
        table, seq_len = self._slices.chunks, self._seq_len
        width = table.token_bytes[keys]
        starts = table.token_starts[keys] + (samples + self._offsets[keys]) * seq_len * width
        return starts, np.minimum(starts + (seq_len + 1) * width, table.num_bytes[keys])

    def _resolve(self, plan: _Plan) -> None:
        """Open the slices whose documents are here, and say what the plan reads of them."""
        for key in list(plan.unresolved):
            if not self._slices.has_bytes(key, plan.needs):
                continue
            if key not in self._open:
                self._open_map(key)
            starts, stops = self._collator.byte_ranges(key, plan.samples[plan.keys == key])
            steps = np.full(len(starts), plan.unresolved[key], np.int64)
            self._slices.need(plan.needs, np.full(len(starts), key, np.int64), starts, stops, steps)
            del plan.unresolved[key]

    def _block(self, plan: _Plan, start: int, stop: int) -> Iterator[NumpyTokens | NumpyRows]:
        bounds, ids, sources = plan.bounds, plan.ids, plan.sources
        first = bounds[start]
        clock, faults = time.perf_counter, _major_faults()
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
            make_s = clock() - started_at
            if make_s < _SLOW_S or (now := _major_faults()) == faults:
                self._min_make_s = min(self._min_make_s, make_s)
            else:  # Pages were read: the time above that of other batches was spent waiting for the disk.
                self.disk_s, faults = self.disk_s + max(0.0, make_s - min(self._min_make_s, _SLOW_S)), now
            yield batch
            del batch, arrays  # Memory that the caller drops is free for the next batch.
            started_at = clock()

    def _plan(self, step: int, num_steps: int) -> _Plan | None:
        """The plan of this rank's next steps from `step` on, some of `num_steps`; None at the end of the run."""
        k, n = self._every
        stop = step + num_steps
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
            PlanNeeds(step + k, stop, len(keys) * self._sample_bytes, self._run_bytes),
        )  # fmt: skip

    def _open_block(self, plan: _Plan, start: int) -> int:
        """Open the slices of the steps from `start` on whose chunks are here; where these end. Waits for one step.

        Returns `start` if there is no space for all of the plan's chunks.
        """
        if start == 0:
            self._close_except(set().union(plan.distinct, *(queued.distinct for queued in self._queue)))
        while True:
            try:
                self._resolve(plan)
                began = time.perf_counter()
                stop = min([self._slices.available(plan.needs, start), len(plan.steps), *plan.unresolved.values()])
                if not self._slices.cached:  # Local chunks are read to be verified.
                    self.disk_s += time.perf_counter() - began
                if stop > start:
                    break
                began = time.perf_counter()
                has_space = self._slices.wait(plan.needs, start)
                self.network_s += time.perf_counter() - began
            except NoSpaceError:
                has_space = False
            if has_space:
                continue
            if self._queue:  # Plan less far ahead.
                last = self._queue.pop()
                self._next_step = last.steps[0] - self._every[0]
                self._slices.release(last.needs)
            elif len(plan.steps) > 1:
                self._next_step = plan.steps[start] - self._every[0]
                self._plan_fewer()
                return start
            else:
                self._slices.wait_for_space(plan.needs)
        low = plan.bounds[start]
        keys, rows = np.unique(plan.keys[low : plan.bounds[stop]], return_index=True)
        for row, key in sorted(zip(rows.tolist(), keys.tolist())):
            try:
                if key not in self._open:
                    self._open_map(key)
            except ForebayError:
                if row < plan.bounds[start + 1] - low:
                    raise
                return bisect_right(plan.bounds, row + low) - 1  # The error is raised when that step is read.
        return stop

    def _close_except(self, used: Collection[int]) -> None:
        for key in self._open.difference(used):
            self._open.remove(key)
            self._collator.close(key)

    def _plan_fewer(self) -> None:
        """Plan one step, then more again, at most half as many as until now."""
        step = self._every[1]
        self._num_steps, self._plan_steps = step, max(step, self._plan_steps // (2 * step) * step)

    def _open_map(self, key: int) -> None:
        started_at = time.perf_counter()
        index, opened = self._slices.open(key)
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
