"""Ranks of one run come, die, return and are cut off: the lineage of the final weights has every sample once."""

import pytest

from forebay.simulate import Scenario
from support.elastic import World


@pytest.mark.parametrize(
    "seed, churn, partitions, lost",
    [(0, 0.0, 0, 0.0), (0, 0.5, 0, 0.0), (1, 0.5, 2, 0.2), (2, 1.0, 1, 0.1), (3, 1.0, 2, 0.2)],
)
def test_each_sample_of_an_epoch_is_read_once_whatever_the_churn(seed, churn, partitions, lost):
    faults = {"seed": seed, "churn": churn, "partitions": partitions, "lost": lost}
    world = World(Scenario(workers=6, slices=24, samples=36, epochs=2, **faults))
    assert world.run_to_end() == []
    assert (len(world.groups) > 1) == (churn > 0)
