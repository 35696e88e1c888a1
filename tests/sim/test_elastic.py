"""Ranks of one run come, die, return and are cut off: the lineage of the final weights has every sample once."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.simulate import Scenario
from support.elastic import Weights, World, lineage_faults


@pytest.mark.parametrize(
    ("seed", "churn", "partitions", "lost"),
    [(0, 0.0, 0, 0.0), (0, 0.5, 0, 0.0), (1, 0.5, 2, 0.2), (2, 1.0, 1, 0.1), (3, 1.0, 2, 0.2)],
)
def test_each_sample_of_an_epoch_is_read_once_whatever_the_churn(
    seed: int, churn: float, partitions: int, lost: float
) -> None:
    faults = {"seed": seed, "churn": churn, "partitions": partitions, "lost": lost}
    world = World(Scenario(workers=6, slices=24, samples=36, epochs=2, **faults))
    assert world.run_to_end() == []
    assert (len(world.groups) > 1) == (churn > 0)


def test_the_record_sees_samples_read_twice_lost_and_a_torn_lineage() -> None:
    def after(before: Weights, *samples: int, step: int = 0) -> Weights:
        return Weights(step or before.step + 1, before, (np.array(samples, np.int64),))

    epochs, first = np.zeros(2, np.int64), after(Weights(), 0, 1)
    assert lineage_faults(after(first, 2, 3), 4, epochs) == []
    wrong = ["epoch 0, sample 1: read 2 times", "epoch 0, sample 2: read 0 times"]
    assert lineage_faults(after(first, 1, 3), 4, epochs) == wrong
    assert lineage_faults(after(Weights(), 0, 1, 2, 3, step=2), 4, epochs) == ["the lineage begins at step 1"]
