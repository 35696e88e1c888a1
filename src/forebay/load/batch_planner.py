"""Batches in the order of steps: many steps are planned at once, their slices opened, and batches made one at a time.

A *plan* has the samples of some hundred steps. Plans are made ahead as far as their chunks may be fetched. A *block* is
the longest run of steps of a plan whose chunks are here: their slices are opened, and the position of each row is
computed at once. A batch is then one gather; no Python code runs per sample. A late chunk delays only the steps that
read it, or come after these.
"""

import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np

from forebay.arrays import I64
from forebay.errors import DatasetError, ForebayError, UsageError
from forebay.fetch.cache import NoSpaceError
from forebay.fetch.needs import PlanNeeds
from forebay.load.batch import NumpyRows, NumpyTokens, new_batch
from forebay.load.collate import Collator
from forebay.load.order_source import OrderSource, StepPlan
from forebay.load.samples import SampleIndex
from forebay.load.slices import RemovedError, SliceReader
from forebay.load.tokens import TokenCollator
from forebay.order.footprint import FIRST_REQUEST_BYTES, MAX_REQUEST_BYTES
from forebay.storage.retry import log_while_waiting

_log = logging.getLogger("forebay")
PLAN_SAMPLES = 8192
_PLANS_AHEAD = 3  # With a cache, so many plans at least are ahead.
_SLOW_S = 1e-3  # A batch that took longer may have waited for the disk: its page faults are counted.
_HEADER_BYTES = 64  # A slice's header begins in its first chunk; that of tokens ends there.


def make_collator(
    indexes: Sequence[SampleIndex], *, dtype: Any = np.int64, document_masks: bool = False, pad_id: int | None = None,
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
        from forebay.load.rows import RowCollator

        return RowCollator(indexes, pad_id=pad_id)
    return TokenCollator(indexes, dtype=dtype, document_masks=document_masks, pad_id=pad_id)


class BatchPlanner:
    """A rank's batches from any step on. Not thread-safe.

    `indexes` has one entry a dataset; `share` are the samples of a step.
    """

    def __init__(
        self, source: OrderSource, indexes: Sequence[SampleIndex], collator: Collator, slices: SliceReader, share: int
    ) -> None:
        self.source, self._collator, self._slices = source, collator, slices
        self._stride = source.every[1]
        self._offsets = np.concatenate([index.offsets for index in indexes])  # By key.
        self._seq_len = indexes[0].seq_len or 1
        num_samples = [index.num_samples for index in indexes]
        # A plan does not span many epochs of a small dataset.
        self._plan_steps = self._stride * max(1, min(PLAN_SAMPLES, max(num_samples)) // share)
        self._sample_bytes = int(slices.chunks.num_bytes.sum() / max(1, sum(num_samples)))
        self._step_bytes = max(1, share * self._sample_bytes)
        self._next_step = self._num_steps = 0  # Where the next plan begins, and its length.
        self._run_bytes = FIRST_REQUEST_BYTES
        self._is_running = False  # A batch was made.
        self._queue: deque[StepPlan] = deque()
        self._current: StepPlan | None = None  # Its batches are being made.
        self._open: set[int] = set()  # Keys.
        self._min_make_s = float("inf")
        self.network_s = self.scheduler_s = self.disk_s = 0.0  # Seconds waited, by cause.
        self.num_opened = 0  # Slices.

    def batches(self, step: int, stop: int | None) -> Generator[NumpyTokens | NumpyRows, None, None]:
        """The batches of run steps [step, stop); None for no end. No slice is fetched for later steps."""
        self.source.num_steps = stop
        self._next_step, self._num_steps = step, self._stride if self._slices.cached else self._plan_steps
        self._run_bytes = FIRST_REQUEST_BYTES
        while True:
            self._plan_ahead()
            if not self._queue:
                break
            plan = self._current = self._queue.popleft()
            start = 0
            while start < len(plan.steps):
                with log_while_waiting(_log, lambda: self._slices.no_room):
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
        self._forget()

    def close(self) -> None:
        """Forget the plans, and close all slices."""
        self._forget()
        self.source.close()

    def _forget(self) -> None:
        self._queue.clear()
        self._current = None
        self._slices.clear()
        self._close_except(())

    def close_slice(self, key: int) -> None:
        """Close a slice if it is open: its chunks may go."""
        self._close_except(self._open - {key})

    def _plan_ahead(self) -> None:
        """Plan the next steps: with a cache, all those whose chunks are to be fetched now, or until a batch is due."""
        while not self._queue or (self.source.is_known and self._slices.planned_bytes < self._slices.ahead_bytes):
            plan = self.source.plan(self._next_step, self._num_steps)
            if plan is None:
                break
            num_bytes = len(plan.keys) * self._sample_bytes
            plan.needs = PlanNeeds(plan.steps[0], plan.stop, num_bytes, self._run_bytes)
            plan.distinct = set(plan.keys.tolist())
            try:
                if self.source.is_known:
                    self._need(plan, tuple(self._queue))
            except NoSpaceError:
                self._slices.release(plan.needs)
                if self._queue or self._current is not None:
                    break
                if self._num_steps == self._stride:
                    raise
                self._plan_fewer()
                continue
            self._next_step = plan.stop
            # The chunks of the first steps come first.
            self._num_steps = min(self._plan_steps, 2 * self._num_steps)
            self._run_bytes = min(4 * self._run_bytes, MAX_REQUEST_BYTES)
            if self._slices.cached:
                steps = max(1, self._slices.ahead_bytes // _PLANS_AHEAD // self._step_bytes)
                self._num_steps = min(self._num_steps, self._stride * steps)
            self._queue.append(plan)
            if len(self._queue) == 1:
                self._slices.fetch()
            elif self._slices.is_ready(self._queue[0].needs, 0):
                break  # The others are planned after it.
        self._slices.fetch()

    def _need(self, plan: StepPlan, earlier: Sequence[StepPlan]) -> None:
        """Say what a plan reads of its slices. Where documents decide, that is known when a slice is open."""
        reader = self._slices
        steps = np.repeat(np.arange(len(plan.steps)), np.diff(plan.bounds))
        distinct, first = np.unique(plan.keys, return_index=True)
        reader.add(plan.needs)
        if isinstance(self._collator, TokenCollator) and self._collator.is_plain:
            starts, stops = self._token_ranges(plan.keys, plan.samples)
            if self._is_running:
                reader.read_ahead(plan.keys, starts, stops)
            waiting = reader.waiting_keys(distinct)
            if waiting is not None:
                rows = np.isin(plan.keys, distinct[waiting])
                waiting &= ~np.isin(distinct, list(self._open.union(*(queued.distinct for queued in earlier))))
                keys, header = (
                    distinct[waiting],
                    np.zeros(int(waiting.sum()), np.int64),
                )  # Slices that are not open need their headers.
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
        sizes = self._num_open_bytes(keys)
        reader.need(plan.needs, keys, np.zeros(len(keys), np.int64), sizes, steps[first[waiting]])
        self._resolve(plan)

    def _token_ranges(self, keys: I64, samples: I64) -> tuple[I64, I64]:
        """The bytes [start, stop) of each sample of consecutive tokens, with the token after it."""
        table, seq_len = self._slices.chunks, self._seq_len
        width = table.token_bytes[keys]
        starts = table.token_starts[keys] + (samples + self._offsets[keys]) * seq_len * width
        return starts, np.minimum(starts + (seq_len + 1) * width, table.num_bytes[keys])

    def _renew(self, plan: StepPlan) -> None:
        """Close the slices of a plan whose files the cache has deleted, and need their headers again."""
        lost = self._slices.renew(plan.needs)
        stale = {key for key in self._open & plan.distinct if key in lost or self._slices.is_stale(key)}
        if not stale:
            return
        self._close_except(self._open - stale)
        self._need_headers(plan, stale)

    def _need_headers(self, plan: StepPlan, required: Collection[int]) -> None:
        """Have a plan wait for the headers of slices again, and for all else that is not here any more."""
        keys = np.array(sorted(required), np.int64)
        self._slices.need(plan.needs, keys, 0 * keys, self._num_open_bytes(keys), 0 * keys)
        self._slices.recheck(plan.needs)

    def _num_open_bytes(self, keys: I64) -> I64:
        """How many bytes of each slice opening it reads."""
        reader = self._slices
        return np.array([self._collator.num_open_bytes(key, *reader.describe(key)) for key in keys.tolist()], np.int64)

    def _resolve(self, plan: StepPlan) -> None:
        """Open the slices whose documents are here, and say what the plan reads of them."""
        for key in list(plan.unresolved):
            if not self._slices.has_bytes(key, plan.needs):
                continue
            if key in self._open and self._slices.is_stale(key):
                self._close_except(self._open - {key})
            if key not in self._open:
                try:
                    self._open_map(plan, key)
                except RemovedError:  # Again when it is here.
                    continue
            starts, stops = self._collator.byte_ranges(key, plan.samples[plan.keys == key])
            steps = np.full(len(starts), plan.unresolved[key], np.int64)
            self._slices.need(plan.needs, np.full(len(starts), key, np.int64), starts, stops, steps)
            del plan.unresolved[key]

    def _block(self, plan: StepPlan, start: int, stop: int) -> Iterator[NumpyTokens | NumpyRows]:
        bounds, ids, sources = plan.bounds, plan.ids, plan.sources
        first = bounds[start]
        clock, faults = time.perf_counter, _major_faults()
        started_at = clock()
        try:
            rows = self._collator.plan(plan.keys[first : bounds[stop]], plan.samples[first : bounds[stop]])
        except DatasetError:
            if not self._replace(plan):
                raise
            return
        for i in range(start, stop):
            low, high = bounds[i], bounds[i + 1]
            try:
                arrays = self._collator.make(rows, low - first, high - first)
            except DatasetError:
                if not self._replace(plan):
                    raise
                return
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

    def _open_block(self, plan: StepPlan, start: int) -> int:
        """Open the slices of the steps from `start` on whose chunks are here; where these end. Waits for one step.

        Returns `start` if there is no space for all of the plan's chunks.
        """
        if start == 0:
            self._close_except(set().union(plan.distinct, *(queued.distinct for queued in self._queue)))
        while True:
            try:
                self._renew(plan)
                self._resolve(plan)
                began = time.perf_counter()
                stop = min([self._slices.available(plan.needs, start), len(plan.steps), *plan.unresolved.values()])
                if not self._slices.cached:  # Local chunks are read to be verified.
                    self.disk_s += time.perf_counter() - began
                if stop > start:
                    return self._open_slices(plan, start, stop)
                began = time.perf_counter()
                has_space = self._slices.wait(plan.needs, start)
                self.network_s += time.perf_counter() - began
            except RemovedError:
                continue
            except NoSpaceError:
                has_space = False
            if has_space:
                continue
            if self._queue:  # Plan less far ahead.
                last = self._queue.pop()
                self._next_step = last.steps[0] - self.source.every[0]
                self._slices.release(last.needs)
            elif len(plan.steps) > 1:
                self._next_step = plan.steps[start] - self.source.every[0]
                self._plan_fewer()
                return start
            else:
                self._slices.wait_for_space(plan.needs)

    def _open_slices(self, plan: StepPlan, start: int, stop: int) -> int:
        """Open the slices of steps [start, stop) of a plan; where those that could be opened end."""
        low = plan.bounds[start]
        keys, rows = np.unique(plan.keys[low : plan.bounds[stop]], return_index=True)
        for row, key in sorted(zip(rows.tolist(), keys.tolist())):
            try:
                if key not in self._open:
                    self._open_map(plan, key)
            except ForebayError as error:
                if row < plan.bounds[start + 1] - low:
                    if isinstance(error, DatasetError) and self._replace(plan):
                        return start
                    raise
                return bisect_right(plan.bounds, row + low) - 1  # The error is raised when that step is read.
        self._slices.check_files(plan.needs, set(keys.tolist()))
        return stop

    def _replace(self, plan: StepPlan) -> bool:
        """A slice of a plan is damaged; return whether other samples are planned in place of the plan's."""
        damaged = {}
        for key in () if self.source.is_known else plan.distinct:
            rows = plan.keys == key
            try:
                if key not in self._open:
                    self._open_map(plan, key)
                self._collator.make(self._collator.plan(plan.keys[rows], plan.samples[rows]), 0, int(rows.sum()))
            except DatasetError as error:
                damaged[key] = str(error)
        self._next_step = plan.steps[0] if damaged else self._next_step
        return self.source.replace(plan, damaged)

    def _close_except(self, used: Collection[int]) -> None:
        for key in self._open.difference(used):
            self._open.remove(key)
            self._collator.close(key)
            self._slices.close_slice(key)

    def _plan_fewer(self) -> None:
        """Plan one step, then more again, at most half as many as until now."""
        step = self._stride
        self._num_steps, self._plan_steps = step, max(step, self._plan_steps // (2 * step) * step)

    def _open_map(self, plan: StepPlan, key: int) -> None:
        started_at = time.perf_counter()
        try:
            index, opened = self._slices.open(key)
        except RemovedError:
            self._need_headers(plan, [key])
            raise
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
