"""Runs on datasets that grow: a state of a dataset continues on one that extends it (`forebay prepare --extend`).

The epoch of the state is finished on the slices that it began with; the next epoch has all samples. In a mixture that
is so of each dataset by itself: an epoch is a pass through its samples. A dataset's lineage names what it extends, so
its slices belong to generations; owners are assigned to each generation by itself, and each is split into training and
validation by itself, so that appended data move no slice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from forebay.arrays import I64
from forebay.dataset.reader import Dataset
from forebay.errors import StateError
from forebay.order.epoch import Epoch
from forebay.order.plan import Order
from forebay.order.run import NEVER, Run, Steps, assign_owners
from forebay.order.step_index import RunProgress, check_range

State: TypeAlias = dict[str, Any]
Lineage: TypeAlias = Mapping[str, Any]  # What a manifest tells about the origin of its slices.
_ORDER_FIELDS = ("lanes", "window")
"""Fields of a state that depend on the size of the dataset."""


@dataclass(frozen=True)
class Growth:
    """Where a run goes over to a larger dataset. Plain JSON values; part of a state.

    Its steps [first_step, step) are of the first `slices` slices, in the order of the dataset `dataset_id` with these
    lanes and window, from the start of epoch `first_epoch`; at `step` epoch `epoch` of all slices begins. Of a dataset
    in a mixture, `step` and `first_step` count its own samples, not steps of the run.
    """

    dataset_id: str
    slices: int
    lanes: int
    window: int
    first_step: int
    first_epoch: int
    step: int
    epoch: int


def ancestors(lineage: Lineage) -> dict[str, int]:
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
    state: object, identity: State, run: Run, lineages: Sequence[Lineage], *,
    epochs: int | None = None, num_steps: int | None = None,
) -> tuple[Run, State, object]:  # fmt: skip
    """The run, the identity and the state to give to `step_of_state`, for a state of datasets or of what they extend.

    Args:
        identity, run: Of a run of the datasets alone, from `run_identity`.
        lineages: Of the manifest of each dataset.
        epochs, num_steps: The limits of `run`.

    Returns:
        The arguments, unless the run of the state went over, or goes over, from smaller datasets.

    Raises:
        StateError: If the state is of a smaller dataset, but not of such a run.
    """
    if not isinstance(state, dict):
        return run, identity, state
    if run.weights is not None:
        return _grow_mixture(state, identity, run, lineages, num_steps)
    growth = _growth(state, identity["dataset_id"], lineages[0], run, 0)
    if growth is None:
        return run, identity, state
    changed = {"dataset_id": identity["dataset_id"], "growth": asdict(growth)}
    goes_over = state["dataset_id"] != identity["dataset_id"]
    numbers = {key: identity[key] for key in _ORDER_FIELDS if goes_over}
    return GrownRun(run, growth, epochs=epochs, num_steps=num_steps), identity | changed, state | numbers | changed


def _grow_mixture(
    state: State, identity: State, run: Run, lineages: Sequence[Lineage],
    num_steps: int | None,
) -> tuple[Run, State, object]:  # fmt: skip
    ids, own, recorded = state.get("dataset_id"), identity["dataset_id"], state.get("growth", {})
    numbers: State = {key: state.get(key) for key in _ORDER_FIELDS}
    if not isinstance(ids, dict) or ids.keys() != own.keys() or not isinstance(recorded, dict):
        return run, identity, state
    if not recorded.keys() <= own.keys() or not all(
        isinstance(of, list) and len(of) == len(own) for of in numbers.values()
    ):
        return run, identity, state  # `step_of_state` says what differs.
    orders, growths = list(run.orders), dict[str, State]()
    for source, (name, lineage) in enumerate(zip(own, lineages)):
        part = {"step": state.get("step"), "dataset_id": ids[name], "growth": recorded.get(name)}
        part |= {key: numbers[key][source] for key in _ORDER_FIELDS}
        growth = _growth(part, own[name], lineage, run, source)
        if growth is not None:
            growths[name] = asdict(growth)
            orders[source] = _GrownOrder(orders[source], growth)
        if growth is not None and ids[name] != own[name]:
            ids = ids | {name: own[name]}
            numbers = {key: [*of[:source], identity[key][source], *of[source + 1 :]] for key, of in numbers.items()}
    if not growths:
        return run, identity, state
    drop_last = orders[0].drop_last
    grown = Run(orders, run.batches, weights=run.weights, epochs=None, num_steps=num_steps, drop_last=drop_last)
    return grown, identity | {"growth": growths}, state | numbers | {"growth": growths, "dataset_id": ids}


def _growth(state: State, own_id: str, lineage: Lineage, run: Run, source: int) -> Growth | None:
    """The growth of one dataset of a run; None if the state is of this dataset alone, or of no ancestor of it."""
    recorded, sizes, order = _growth_of(state.get("growth")), ancestors(lineage), run.orders[source]
    if state.get("dataset_id") == own_id:
        growth = recorded
    elif isinstance(state.get("dataset_id"), str) and state["dataset_id"] in sizes:
        growth = _going_over(state, sizes, recorded, run, source)
    else:
        growth = None
    if growth is None:
        return None
    if sizes.get(growth.dataset_id) != growth.slices or growth.slices > len(order.samples_per_slice):
        raise StateError(f"loader state: expected growth from a dataset in {list(sizes)}, got {growth.dataset_id!r}.")
    return growth


def _growth_of(plain: Any) -> Growth | None:
    if plain is None:
        return None
    names = {item.name for item in fields(Growth)}
    numbers = names - {"dataset_id"}
    is_valid = isinstance(plain, dict) and plain.keys() == names and isinstance(plain["dataset_id"], str)
    if not is_valid or not all(type(plain[name]) is int and plain[name] >= 0 for name in numbers):
        raise StateError(f"loader state: expected growth with whole numbers {sorted(numbers)}, got {str(plain)[:300]}.")
    return Growth(**plain)


def _going_over(state: State, sizes: Mapping[str, int], recorded: Growth | None, run: Run, source: int) -> Growth:
    """The growth of a smaller dataset's state: at the end of its epoch, or at once where an epoch begins."""
    step, first_step, first_epoch = state.get("step"), 0, 0
    if type(step) is not int or not 0 <= step <= (step if run.num_steps is None else run.num_steps):
        raise StateError(f"loader state: expected step an integer from 0 to the run's end, got {step!r}.")
    if run.mixture is not None:
        step = int(run.mixture.counts(run.progress(step).samples_taken)[source])
    if recorded is not None:
        if step < recorded.step:  # It has not gone over yet: it goes over to this dataset.
            return recorded
        first_step, first_epoch = recorded.step, recorded.epoch
    dataset_id, numbers = str(state["dataset_id"]), [state.get(name) for name in _ORDER_FIELDS]
    lanes, window = (number if type(number) is int and number >= 1 else 0 for number in numbers)
    if min(lanes, window) < 1:
        raise StateError(f"loader state: expected numbers {', '.join(_ORDER_FIELDS)}, got {numbers}.")
    growth = Growth(dataset_id, sizes[dataset_id], lanes, window, first_step, first_epoch, step=step, epoch=first_epoch)
    before = _smaller(run.orders[source], growth)
    if run.mixture is not None:
        passes, taken = divmod(step - first_step, max(1, before.num_samples))
        remaining = before.num_samples - taken if taken else 0
    else:
        of_before = run.of(before, first_step)
        progress = of_before.progress(step - first_step)
        stop = of_before.epoch_stop(step - first_step) if progress.step_in_epoch else step - first_step
        assert stop is not None  # One dataset has epochs.
        passes, remaining = progress.epoch, stop + first_step - step
    return replace(growth, step=step + remaining, epoch=first_epoch + passes + (remaining > 0))


def _smaller(order: Order, growth: Growth) -> Order:
    return _LaterOrder(
        order, growth.first_epoch, samples_per_slice=order.samples_per_slice[: growth.slices],
        lanes=growth.lanes, window=growth.window,
    )  # fmt: skip


class _LaterOrder(Order):
    """An order like another, or of fewer slices, whose epoch 0 is epoch `first_epoch` of it."""

    def __init__(
        self, order: Order, first_epoch: int, *, samples_per_slice: I64 | None = None, lanes: int | None = None,
        window: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            order.samples_per_slice if samples_per_slice is None else samples_per_slice, order.seed,
            order.global_batch, lanes or order.num_lanes, window or order.window_samples, order.shuffle,
            order.drop_last,
        )  # fmt: skip
        self._first_epoch = first_epoch

    def epoch_at(self, epoch: int) -> Epoch:
        return super().epoch_at(epoch + self._first_epoch)


class _GrownOrder(_LaterOrder):
    """The order of a dataset in a mixture that began on its first slices; samples before those are unknown."""

    def __init__(self, order: Order, growth: Growth) -> None:
        super().__init__(order, 0)
        self._growth, self._before = growth, _smaller(order, replace(growth, first_epoch=0))

    def passes(self, positions: I64) -> tuple[I64, I64]:
        growth, size = self._growth, max(1, self._before.num_samples)
        if len(positions) and int(positions.min()) < growth.first_step:
            raise StateError(
                f"sample {positions.min()} of a dataset in the mixture: expected one from {growth.first_step}, where "
                "this dataset's run began."
            )
        is_before = positions < growth.step
        passes, within = np.divmod(
            positions - np.where(is_before, growth.first_step, growth.step), np.where(is_before, size, self.num_samples)
        )
        return passes + np.where(is_before, growth.first_epoch, growth.epoch), within

    def places_of(self, positions: I64) -> I64:
        growth = self._growth
        before, after = self._before.places_of(positions - growth.first_step), super().places_of(positions)
        return np.where(positions < growth.step, before, after)

    def epoch_at(self, epoch: int) -> Epoch:
        return self._before.epoch_at(epoch) if epoch < self._growth.epoch else super().epoch_at(epoch)


class GrownRun(Run):
    """A run that began on the first slices of its dataset; the steps before `growth.first_step` are unknown.

    `run` is one of the whole dataset, `epochs` and `num_steps` its limits.
    """

    def __init__(self, run: Run, growth: Growth, *, epochs: int | None = None, num_steps: int | None = None) -> None:
        super().__init__(run.orders, run.batches, epochs=None, drop_last=run.orders[0].drop_last)
        self.growth = growth
        self._steps_per_epoch = run.steps_per_epoch
        self._before = run.of(_smaller(run.orders[0], growth), growth.first_step)
        is_over = (epochs is not None and growth.epoch >= epochs) or (
            num_steps is not None and growth.step >= num_steps
        )
        self._after: Run | None = None
        if not is_over:
            self._after = run.of(
                _LaterOrder(run.orders[0], growth.epoch), growth.step,
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

    @property
    def steps_per_epoch(self) -> int:
        return self._steps_per_epoch

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

    def read_steps(self, step: int, source: int, slices: I64, samples: I64) -> I64:
        run, first, _ = self._part_of(step)
        return first + run.read_steps(step - first, source, slices, samples)

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
