"""Which samples a rank's steps have: the protocol of all sources of an order, and the one that a `Run` computes.

`static` ranks and those of a coordinator's generation have a `StaticOrder`; samples that schedulers lease come from
`lease_order.LeaseOrder`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from forebay.arrays import I64
from forebay.fetch.needs import PlanNeeds
from forebay.load.samples import SampleIndex
from forebay.order.run import Run


@dataclass(eq=False)
class StepPlan:
    """The samples of some steps of a rank: N steps, K samples."""

    steps: Sequence[int]
    stop: int  # The run step at which the next plan begins.
    bounds: list[int]  # [N + 1], of each step's samples in the arrays.
    keys: I64  # [K], of slices.
    samples: I64  # [K], within the slice, as the index counts them.
    ids: I64  # [K], global numbers.
    sources: I64 | None  # [K], the dataset; None for a single one.
    epochs: list[int]
    steps_in_epoch: list[int]
    weights: list[float]  # As in Batch; 0 for a substitute sample.
    needs: PlanNeeds = field(init=False)
    distinct: set[int] = field(default_factory=set)  # Keys.
    unresolved: dict[int, int] = field(default_factory=dict)  # Keys that must be open to know more; the first step.


class OrderSource(Protocol):
    """The samples of a rank's steps, as they are planned."""

    every: tuple[int, int]
    """(k, n): only the steps k, k + n, ... counted from the start of a plan."""
    is_known: bool
    """Whether it knows the future: plans are made ahead. Else a plan is made when its batch is asked for."""
    num_steps: int | None
    """The end of the run, or of what is read of it now; None: no end."""

    def plan(self, step: int, num_steps: int) -> StepPlan | None:
        """The plan of the next steps from `step` on, some of `num_steps`; None at the end, or if interrupted."""

    def replace(self, plan: StepPlan, damaged: Mapping[int, str]) -> bool:
        """Slices, by key, are damaged; return whether other samples are planned in place of a plan's."""

    def close(self) -> None:
        """Forget all plans that were not used."""


class StaticOrder:
    """The order of a run, for one rank; `indexes` has one entry a dataset."""

    is_known = True

    def __init__(
        self, run: Run, indexes: Sequence[SampleIndex], rank: int, world_size: int, every: tuple[int, int]
    ) -> None:
        self._run, self._rank, self._world_size, self.every = run, rank, world_size, every
        self.num_steps = run.num_steps
        sizes = [len(index.counts) for index in indexes]
        self._first_key = np.cumsum([0, *sizes[:-1]])
        self._first_ids = np.concatenate([index.bases + index.offsets for index in indexes])  # By key.
        self._mixed = len(indexes) > 1

    def plan(self, step: int, num_steps: int) -> StepPlan | None:
        """The plan of this rank's next steps from `step` on, some of `num_steps`; None at the end of the run."""
        k, n = self.every
        stop = step + num_steps
        if self.num_steps is not None:
            stop = min(stop, self.num_steps)
        if step + k >= stop:
            return None
        read = self._run.steps(step, stop, self._rank, self._world_size)
        epochs, steps_in_epoch, positions = self._run.progress_table(step, stop)
        keys = read.slices if not self._mixed else self._first_key[read.sources] + read.slices
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
        bounds = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        return StepPlan(
            range(step, stop)[chosen], step + num_steps, bounds, keys, samples, self._first_ids[keys] + samples,
            sources if self._mixed else None, epochs[chosen].tolist(), steps_in_epoch[chosen].tolist(),
            weights[chosen].tolist(),
        )  # fmt: skip

    def replace(self, plan: StepPlan, damaged: Mapping[int, str]) -> bool:
        return False

    def close(self) -> None:
        pass
