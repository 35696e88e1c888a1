"""Runs on datasets that grow: a state of a dataset continues on one that extends it (`forebay prepare --extend`).

The epoch of the state is finished on the slices that it began with; the next epoch has all samples. A dataset's lineage
names what it extends, so its slices belong to generations; owners are assigned to each generation by itself, and each
is split into training and validation by itself, so that appended data move no slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.reader import Dataset
from forebay.errors import StateError
from forebay.order.epoch import Epoch
from forebay.order.plan import Order
from forebay.order.run import NEVER, Run, Steps, assign_owners
from forebay.order.step_index import BatchSizes, RunProgress, check_range

I64 = NDArray[np.int64]
_ORDER_FIELDS = ("lanes", "window")
"""Fields of a state that depend on the size of the dataset."""


@dataclass(frozen=True)
class Growth:
    """Where a run goes over to a larger dataset. Plain JSON values; part of a state.

    Its steps [first_step, step) are of the first `slices` slices, in the order of the dataset `dataset_id` with these
    lanes and window, from the start of epoch `first_epoch`; at `step` epoch `epoch` of all slices begins.
    """

    dataset_id: str
    slices: int
    lanes: int
    window: int
    first_step: int
    first_epoch: int
    step: int
    epoch: int


def ancestors(lineage: Mapping[str, Any]) -> dict[str, int]:
    """The ids of the datasets that a dataset extends, the first one first, and how many of its slices each has."""
    parent = lineage.get("parent")
    earlier = parent.get("ancestors", []) if isinstance(parent, dict) else []
    entries = [parent, *(earlier if isinstance(earlier, list) else [])]
    return {
        entry["id"]: entry["slices"]
        for entry in reversed(entries)
        if isinstance(entry, dict) and isinstance(entry.get("id"), str) and type(entry.get("slices")) is int
    }


def generations(dataset: Dataset) -> list[tuple[int, int]]:
    """The slices [first, stop) of the first of its ancestors, then those that each descendant added."""
    starts = [size for size in ancestors(dataset.manifest.lineage).values() if 0 <= size <= dataset.num_slices]
    return list(pairwise(sorted({0, dataset.num_slices, *starts})))


def owners_of(dataset: Dataset, workers: Sequence[str], slack: float | None) -> I64:
    """The worker that owns each slice, as `assign_owners` of each generation: appended slices move no others."""
    parts = [assign_owners(dataset.table.sha256[first:stop], workers, slack) for first, stop in generations(dataset)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def grow(
    state: object, identity: dict[str, Any], run: Run, lineage: Mapping[str, Any], *, epochs: int | None = None,
    num_steps: int | None = None,
) -> tuple[Run, dict[str, Any], object]:  # fmt: skip
    """The run, the identity and the state to give to `step_of_state`, for a state of a dataset or of what it extends.

    Args:
        identity, run: Of a run of the dataset alone, from `run_identity`.
        lineage: Of its manifest.
        epochs, num_steps: The limits of `run`.

    Returns:
        The arguments, unless the run of the state went over, or goes over, from a smaller dataset.

    Raises:
        StateError: If the state is of a smaller dataset, but not of such a run.
    """
    if not isinstance(state, dict) or not isinstance(state.get("dataset_id"), str):
        return run, identity, state
    sizes = ancestors(lineage)
    recorded = _growth_of(state)
    if state["dataset_id"] == identity["dataset_id"]:
        growth = recorded
    elif state["dataset_id"] in sizes:
        growth = _going_over(state, sizes, recorded, run, identity)
    else:
        growth = None
    if growth is None:
        return run, identity, state
    order = run.orders[0]
    if run.weights is not None or "workers" in identity:
        raise StateError(
            f"loader state: expected dataset_id {identity['dataset_id']!r}, got {state['dataset_id']!r}, which it "
            "extends. Runs of mixtures and of assignment='owned' do not go over to a larger dataset: open the "
            "smaller one, or start a new run."
        )
    if sizes.get(growth.dataset_id) != growth.slices or growth.slices > len(order.samples_per_slice):
        raise StateError(f"loader state: expected growth from a dataset in {list(sizes)}, got {growth.dataset_id!r}.")
    grown = GrownRun(run, growth, epochs=epochs, num_steps=num_steps)
    changed = {"dataset_id": identity["dataset_id"], "growth": asdict(growth)}
    return grown, identity | changed, state | {name: identity[name] for name in _ORDER_FIELDS} | changed


def _growth_of(state: Mapping[str, Any]) -> Growth | None:
    plain = state.get("growth")
    if plain is None:
        return None
    names = {item.name for item in fields(Growth)}
    numbers = names - {"dataset_id"}
    is_valid = isinstance(plain, dict) and plain.keys() == names and isinstance(plain["dataset_id"], str)
    if not is_valid or not all(type(plain[name]) is int and plain[name] >= 0 for name in numbers):
        raise StateError(f"loader state: expected growth with whole numbers {sorted(numbers)}, got {str(plain)[:300]}.")
    return Growth(**plain)


def _going_over(
    state: Mapping[str, Any], sizes: Mapping[str, int], recorded: Growth | None, run: Run, identity: Mapping[str, Any]
) -> Growth:
    """The growth of a state of a smaller dataset: at the end of its epoch, or at once where an epoch begins."""
    step, first_step, first_epoch = state.get("step"), 0, 0
    if type(step) is not int or step < 0:
        raise StateError(f"loader state: expected step an integer from 0, got {step!r}.")
    if recorded is not None:
        if step < recorded.step:  # It has not gone over yet: it goes over to this dataset.
            return recorded
        first_step, first_epoch = recorded.step, recorded.epoch
    dataset_id, numbers = str(state["dataset_id"]), [state.get(name) for name in _ORDER_FIELDS]
    lanes, window = (number if type(number) is int and number >= 0 else -1 for number in numbers)
    if min(lanes, window) < 0:
        raise StateError(f"loader state: expected numbers {', '.join(_ORDER_FIELDS)}, got {numbers}.")
    growth = Growth(dataset_id, sizes[dataset_id], lanes, window, first_step, first_epoch, step=step, epoch=first_epoch)
    before = _part(_smaller(run.orders[0], growth), run, first_step, first_epoch)
    progress = before.progress(step - first_step)
    if progress.samples_taken == 0:
        return Growth(**{**asdict(growth), "epoch": first_epoch + progress.epoch})
    stop = before.epoch_stop(step - first_step)
    assert stop is not None  # One dataset has epochs.
    return Growth(**{**asdict(growth), "step": first_step + stop, "epoch": first_epoch + progress.epoch + 1})


def _smaller(order: Order, growth: Growth) -> Order:
    return Order(
        order.samples_per_slice[: growth.slices], order.seed, order.global_batch, growth.lanes, growth.window,
        order.shuffle, order.drop_last,
    )  # fmt: skip


class _LaterOrder(Order):
    """An order whose epoch 0 is epoch `first_epoch` of another."""

    def __init__(self, order: Order, first_epoch: int) -> None:
        super().__init__(
            order.samples_per_slice, order.seed, order.global_batch, order.num_lanes, order.window_samples,
            order.shuffle, order.drop_last,
        )  # fmt: skip
        self._first_epoch = first_epoch

    def epoch_at(self, epoch: int) -> Epoch:
        return super().epoch_at(epoch + self._first_epoch)


def _part(
    order: Order, run: Run, step: int, epoch: int, *, epochs: int | None = None, num_steps: int | None = None
) -> Run:
    """The run of an order whose step 0 is run step `step`, at the start of an epoch."""
    started = [change for change in run.batches.changes if change[0] <= step][-1]
    later = [(first - step, size) for first, size in run.batches.changes if first > step]
    sizes = BatchSizes(((0, started[1]), *later))
    return Run([_LaterOrder(order, epoch)], sizes, epochs=epochs, num_steps=num_steps, drop_last=order.drop_last)


class GrownRun(Run):
    """A run that began on the first slices of its dataset; the steps before `growth.first_step` are unknown.

    `run` is one of the whole dataset, `epochs` and `num_steps` its limits.
    """

    def __init__(self, run: Run, growth: Growth, *, epochs: int | None = None, num_steps: int | None = None) -> None:
        super().__init__(run.orders, run.batches, epochs=None, drop_last=run.orders[0].drop_last)
        self.growth = growth
        self._before = _part(_smaller(run.orders[0], growth), run, growth.first_step, growth.first_epoch)
        is_over = (epochs is not None and growth.epoch >= epochs) or (
            num_steps is not None and growth.step >= num_steps
        )
        self._after: Run | None = None
        if not is_over:
            self._after = _part(
                run.orders[0], run, growth.step, growth.epoch,
                epochs=None if epochs is None else epochs - growth.epoch,
                num_steps=None if num_steps is None else num_steps - growth.step,
            )  # fmt: skip
        later = self._after.num_steps if self._after is not None else 0
        self._end = None if later is None else growth.step + later
        if num_steps is not None:
            self._end = num_steps if self._end is None else min(self._end, num_steps)

    @property
    def num_steps(self) -> int | None:
        """Run steps in all, the same for every rank. None: no end."""
        return self._end

    def progress(self, step: int) -> RunProgress:
        run, first, epoch = self._part_of(step)
        progress = run.progress(step - first)
        return RunProgress(progress.epoch + epoch, progress.step_in_epoch, progress.samples_taken)

    def epoch_stop(self, step: int) -> int | None:
        run, first, _ = self._part_of(step)
        stop = run.epoch_stop(step - first)
        limits = [limit for limit in (None if stop is None else stop + first, self._end) if limit is not None]
        return min(limits) if limits else None

    def progress_table(self, start: int, stop: int) -> tuple[I64, I64, I64]:
        parts = [np.empty((3, 0), np.int64)]
        for run, first, epoch, low, high in self._parts(start, stop):
            epochs, steps, taken = run.progress_table(low - first, high - first)
            parts.append(np.stack([epochs + epoch, steps, taken]))
        epochs, steps, taken = np.concatenate(parts, axis=1)
        return epochs, steps, taken

    def batch_lens(self, start: int, stop: int) -> I64:
        parts = [run.batch_lens(low - first, high - first) for run, first, _, low, high in self._parts(start, stop)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def steps(self, start: int, stop: int, rank: int, world_size: int) -> Steps:
        parts = [
            run.steps(low - first, high - first, rank, world_size)
            for run, first, _, low, high in self._parts(start, stop)
        ]
        none, bounds = np.empty(0, np.int64), [np.zeros(1, np.int64)]
        for part in parts:
            bounds.append(part.bounds[1:] + bounds[-1][-1])
        columns = (
            np.concatenate([none, *(getattr(part, name) for part in parts)])
            for name in ("sources", "slices", "samples")
        )
        return Steps(start, np.concatenate(bounds), *columns)

    def window_ends(self, step: int, source: int, slices: I64, samples: I64) -> I64:
        run, first, _ = self._part_of(step)
        return first + run.window_ends(step - first, source, slices, samples)

    def _next_steps(self, end: int, slices: I64, samples: I64, ranks: tuple[int, int], world_size: int) -> I64:
        run, first, _ = self._part_of(end)
        is_known = slices < (self.growth.slices if run is self._before else len(self.orders[0].samples_per_slice))
        steps = np.full(len(slices), self.growth.step)  # of slices that are read for the first time there
        steps[is_known] = run._next_steps(end - first, slices[is_known], samples[is_known], ranks, world_size)
        steps[is_known & (steps != NEVER)] += first
        return steps

    def _part_of(self, step: int) -> tuple[Run, int, int]:
        """The part of the run that a step is in, its first step and its first epoch; its end is in the last part."""
        growth = self.growth
        check_range(step, step, self._end)
        if step < growth.first_step:
            raise StateError(f"run step {step}: expected one from {growth.first_step}, where this dataset's run began.")
        if step < growth.step or self._after is None:
            return self._before, growth.first_step, growth.first_epoch
        return self._after, growth.step, growth.epoch

    def _parts(self, start: int, stop: int) -> list[tuple[Run, int, int, int, int]]:
        """The parts that steps [start, stop) are in, as `_part_of`, each with its steps."""
        check_range(start, stop, self._end)
        edges = [start, *([self.growth.step] if start < self.growth.step < stop else []), stop]
        return [(*self._part_of(low), low, high) for low, high in pairwise(edges) if low < high]
