"""Batches in the order of steps: planned many steps at once, their slices opened as they come, made one at a time.

Hides three sizes. A *plan* is the samples of some hundred steps, computed in one go (a tenth of the cost of asking
step by step). A *block* is the longest run of planned steps whose slices are all here: they are opened, and where
each row lies is computed at once. A batch is then one gather. So nothing is done per sample in Python, and a slice
that is late delays no step that does not need it.
"""

import time
from collections import OrderedDict
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ForebayError
from forebay.load.batch import Batch
from forebay.load.samples import Maker, View
from forebay.load.slices import Slices
from forebay.order.run import Run

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # Not on Windows: then no wait is counted as the disk's.
    getrusage = None  # type: ignore[assignment]

I64 = NDArray[np.int64]

PLAN_SAMPLES = 8192
_CACHED_PLAN_STEPS = 64  # With a cache: what a block uses cannot be evicted until the block ends.
_MOST_OPEN_BYTES = 1 << 30  # Of maps that stay open: pages of the page cache, not the process's own.


@dataclass(frozen=True)
class _Plan:
    """A rank's samples of some run steps."""

    steps: Sequence[int]
    bounds: list[int]  # [n + 1], into the arrays.
    keys: I64
    samples: I64  # Within the slice, as the view counts.
    ids: I64
    sources: I64 | None
    epochs: list[int]
    steps_in_epoch: list[int]
    weights: list[float]  # As in Batch; 0 where the one row is a stand-in.


class Blocks:
    """A rank's batches from any step on; `views` has one for each dataset of the run. For one thread at a time.

    `every` (k, n): only the steps k, k + n, … counted from where `batches` begins.
    """

    def __init__(
        self,
        run: Run,
        views: Sequence[View],
        maker: Maker,
        slices: Slices,
        rank: int,
        world_size: int,
        every: tuple[int, int] | None = None,
    ) -> None:
        self._run, self._maker, self._slices = run, maker, slices
        self._rank, self._world_size, self._every = rank, world_size, every or (0, 1)
        self._first_ids = np.concatenate([view.bases + view.offsets for view in views])  # By key.
        self._mixed = len(views) > 1
        share = max(1, run.batches.largest // world_size)
        # No plan reaches over many epochs of a small dataset.
        samples = min(PLAN_SAMPLES, max(order.num_samples for order in run.orders))
        steps = max(1, samples // share)
        self._plan_steps = self._every[1] * (min(steps, _CACHED_PLAN_STEPS) if slices.cached else steps)
        self._open: OrderedDict[int, int] = OrderedDict()  # Key to bytes, least recently used first.
        self._open_bytes = 0
        self._least_make_s = float("inf")
        self.network_s = self.disk_s = 0.0  # Spent waiting for slices on their way; for pages not in memory.
        self.opened = 0  # Slices.

    def batches(self, step: int) -> Generator[Batch, None, None]:
        """The batches from run step `step` on, to the end of the run."""
        self._slices.seek(step)
        plan = self._plan(step)
        while plan is not None:
            following: _Plan | None = None
            at = 0
            while at < len(plan.steps):
                stop = self._open_block(plan, at)
                yield from self._block(plan, at, stop)
                if at == 0:
                    following = self._plan(plan.steps[0] + self._plan_steps - self._every[0])
                    if following is not None:
                        self._slices.read_ahead(np.unique(following.keys).tolist())
                at, step = stop, plan.steps[stop - 1] + 1
            plan = following
        self._close_but(())
        self._slices.advance(step)

    def close(self) -> None:
        """Close all maps."""
        for key in list(self._open):
            self._close_map(key)

    def _block(self, plan: _Plan, at: int, stop: int) -> Iterator[Batch]:
        """The batches of planned steps [at, stop), whose slices are open."""
        bounds, ids, sources = plan.bounds, plan.ids, plan.sources
        first = bounds[at]
        clock, faults, spent = time.perf_counter, _major_faults(), 0.0
        began = clock()
        made = self._maker.plan(plan.keys[first : bounds[stop]], plan.samples[first : bounds[stop]])
        for i in range(at, stop):
            low, high = bounds[i], bounds[i + 1]
            fields = self._maker.make(made, low - first, high - first)
            mine = high if plan.weights[i] else low
            batch = Batch(
                fields[0], fields[1], ids[low:mine], plan.epochs[i], plan.steps_in_epoch[i], fields[2], fields[3],
                fields[4], fields[5], None if sources is None else sources[low:mine], plan.steps[i], plan.weights[i],
            )  # fmt: skip
            spent += clock() - began
            yield batch
            del batch, fields  # The caller's now: what it drops is free for the next.
            began = clock()
        self._attribute(spent / (stop - at), stop - at, _major_faults() - faults)

    def _attribute(self, make_s: float, steps: int, faults: int) -> None:
        """What batches took beyond the least that they ever took is the disk's, if pages were read meanwhile."""
        if faults == 0:
            self._least_make_s = min(self._least_make_s, make_s)
        elif self._least_make_s < make_s:
            self.disk_s += (make_s - self._least_make_s) * steps

    def _plan(self, step: int) -> _Plan | None:
        """The plan that begins with this rank's next step from `step` on; None at the end of the run."""
        k, n = self._every
        stop = step + self._plan_steps
        if self._run.num_steps is not None:
            stop = min(stop, self._run.num_steps)
        if step + k >= stop:
            return None
        taken = self._run.steps(step, stop, self._rank, self._world_size)
        epochs, steps_in_epoch, places = self._run.progress_table(step, stop)
        keys = taken.slices if not self._mixed else self._slices.first_key[taken.sources] + taken.slices
        samples, sources, lengths = taken.samples, taken.sources, np.diff(taken.bounds)
        weights = lengths * self._world_size / self._run.batch_lens(step, stop)
        for at in np.flatnonzero(lengths == 0)[::-1].tolist():  # Only without a mixture, whose batches are all full.
            order, row = self._run.orders[0], int(taken.bounds[at])
            place = np.array([min(int(places[at]), order.num_samples - 1)])
            key, sample = order.samples_at(int(epochs[at]), place)
            keys, samples, sources = (
                np.insert(keys, row, key),
                np.insert(samples, row, sample),
                np.insert(sources, row, 0),
            )
            lengths[at] = 1
        chosen = slice(k, None, n)
        if n > 1:
            mine = np.zeros(stop - step, bool)
            mine[chosen] = True
            rows = np.repeat(mine, lengths)
            keys, samples, sources, lengths = keys[rows], samples[rows], sources[rows], lengths[chosen]
        return _Plan(
            range(step, stop)[chosen],
            np.concatenate([[0], np.cumsum(lengths)]).tolist(),
            keys,
            samples,
            self._first_ids[keys] + samples,
            sources if self._mixed else None,
            epochs[chosen].tolist(),
            steps_in_epoch[chosen].tolist(),
            weights[chosen].tolist(),
        )

    def _open_block(self, plan: _Plan, at: int) -> int:
        """Open the slices of as many steps from `at` on as are here: at least one step's. Where the block stops.

        What a block uses is kept until its end: where slices are to go as soon as they were read, another one ends it.
        """
        low, must = plan.bounds[at], plan.bounds[at + 1] - plan.bounds[at]
        keys, first_use = np.unique(plan.keys[low:], return_index=True)
        turn = np.argsort(first_use, kind="stable")
        keys, first_use = keys[turn], first_use[turn]
        self._bring(keys[first_use < must].tolist(), plan.steps[at])
        for i, (key, row) in enumerate(zip(keys.tolist(), first_use.tolist())):
            if key in self._open and (row < must or not self._slices.is_cached(key)):
                continue
            step = at if row < must else int(np.searchsorted(plan.bounds, row + low, side="right")) - 1
            try:
                later = row >= must and self._slices.is_cached(key)
                if later and (self._slices.lean or not self._slices.hold([key], plan.steps[step] + 1)):
                    return self._begin_block(plan, at, keys[:i].tolist(), step)
                if key not in self._open:
                    self._open_map(key, plan.steps[step] + 1)
            except ForebayError:
                if row < must:
                    raise
                # Raised when that step is asked for, not before.
                return self._begin_block(plan, at, keys[:i].tolist(), step)
        return self._begin_block(plan, at, keys.tolist(), len(plan.steps))

    def _begin_block(self, plan: _Plan, at: int, used: Sequence[int], stop: int) -> int:
        """Let go of what the block before kept, and close the least recently used maps beyond the bound."""
        if self._slices.cached:
            self._close_but(used)
            self._slices.advance(plan.steps[at])
        for key in used:
            self._open.move_to_end(key)
        while self._open_bytes > _MOST_OPEN_BYTES and len(self._open) > len(used):
            self._close_map(next(iter(self._open)))
        return stop

    def _bring(self, keys: Sequence[int], step: int) -> None:
        """Keep the slices that a step needs: waiting for them with nothing kept and nothing mapped.

        A file that another process deletes while it is mapped takes its bytes all the same, and nobody counts them.
        """
        if not self._slices.cached or self._slices.hold(keys, step + 1):
            return
        self._close_but(())
        self._slices.advance(step)
        began = time.perf_counter()
        try:
            self._slices.bring(keys, step + 1)
        finally:
            self.network_s += time.perf_counter() - began

    def _close_but(self, used: Collection[int]) -> None:
        """Close the maps of slices that came by way of the cache, but for `used`."""
        kept = set(used)
        for key in [key for key in self._open if key not in kept and self._slices.is_cached(key)]:
            self._close_map(key)

    def _open_map(self, key: int, until: int) -> None:
        began = time.perf_counter()
        index, found = self._slices.open(key, until)
        spent = time.perf_counter() - began
        if self._slices.is_cached(key):
            self.network_s += spent
        else:
            self.disk_s += spent
        self._maker.open(key, index, found)
        self._open[key] = size = sum(array.nbytes for array in found.tensors.values())
        self._open_bytes += size
        self.opened += 1

    def _close_map(self, key: int) -> None:
        size = self._open.pop(key, None)
        if size is not None:
            self._open_bytes -= size
            self._maker.close(key)


def _major_faults() -> int:
    """Pages that this process waited for the disk to bring."""
    return 0 if getrusage is None else getrusage(RUSAGE_SELF).ru_majflt
