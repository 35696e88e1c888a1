"""The simulator's own record of an elastic run: which samples made the weights that it ended with.

Each finished step makes new weights of older ones; what its ranks read is kept with them. A step that is done again,
as all who had its weights died, has two records, and only one of them is an ancestor of the end: the lineage that
counts. Along it every sample of each epoch must have been read once. Nothing here asks the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.simulate.book import Verdict

I64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Weights:
    """What a model has learned after so many steps.

    Args:
        before: Those that the last step began with; None where nothing was learned yet.
        read: Global sample ids of each rank in that step, int64.
        generation: In which it was done.
    """

    step: int = 0
    before: Weights | None = None
    read: tuple[I64, ...] = ()
    generation: int = 0


def ancestors(weights: Weights) -> Iterator[Weights]:
    """These, and all that they were made of, the latest first, but for those that have learned nothing."""
    at: Weights | None = weights
    while at is not None and at.before is not None:
        yield at
        at = at.before


def check(end: Weights, num_samples: int, epoch_of: I64, steps_done: int) -> tuple[Verdict, str]:
    """Counts the samples along a lineage; and says where it is torn, "" for nowhere.

    Args:
        num_samples: Of an epoch.
        epoch_of: int64 [steps], the epoch of each step.
        steps_done: Counting those done in vain too: what these read is `wasted`.
    """
    epochs = int(epoch_of.max()) + 1
    counts = np.zeros((epochs, num_samples), np.int64)
    torn, expected, length = "", end.step, 0
    for one in ancestors(end):
        if one.step != expected:
            torn = f"step {expected} of the lineage is missing before generation {one.generation}."
        expected, length = one.step - 1, length + 1
        counts[epoch_of[one.step - 1]] += np.bincount(np.concatenate(one.read), minlength=num_samples)
    examples = [
        f"epoch {epoch}, sample {sample} read {counts[epoch, sample]} times"
        for epoch, sample in np.argwhere(counts != 1)[:5].tolist()
    ]
    missing, repeated = int((counts == 0).sum()), int(np.maximum(counts - 1, 0).sum())
    wasted = (steps_done - length) * (num_samples * epochs // len(epoch_of))
    if expected != 0:
        torn = f"the lineage begins at step {expected}."
    return Verdict(counts.size, missing, repeated, 0, wasted, tuple(examples)), torn
