"""Ranks of one run come, die, return and are cut off: the lineage of the final weights has every sample once."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.simulate import Scenario
from support.elastic_ranks import Weights, check
from support.elastic_run import elastic

_SMALL = {"workers": 6, "slices": 24, "samples": 64, "slice_bytes": 4 << 20}


@pytest.mark.parametrize(
    ("seed", "churn", "partitions", "lost", "liars"),
    [(0, 0.5, 0, 0.0, 0.0), (1, 0.5, 2, 0.2, 0.0), (2, 1.0, 1, 0.1, 0.3)],
)
def test_each_sample_of_an_epoch_is_read_once_whatever_the_churn(
    seed: int, churn: float, partitions: int, lost: float, liars: float
) -> None:
    world = Scenario(**_SMALL, seed=seed, churn=churn, partitions=partitions, lost=lost, liars=liars, epochs=2)
    result = elastic(world)
    assert result.ok, result.to_json()
    assert result.counts["generations"] > 1
    assert elastic(world).to_json() == result.to_json()


def test_without_faults_there_is_one_generation_and_the_bound_is_near() -> None:
    result = elastic(Scenario(**{**_SMALL, "slices": 80}))
    assert result.ok, result.to_json()
    assert result.counts["generations"] == 1
    assert 1.0 <= result.time_ratio < 1.15


def test_the_record_sees_samples_read_twice_lost_and_a_torn_lineage() -> None:
    def after(before: Weights, *samples: int, step: int = 0) -> Weights:
        return Weights(step or before.step + 1, before, (np.array(samples, np.int64),))

    epochs = np.zeros(2, np.int64)
    full = after(after(Weights(), 0, 1), 2, 3)
    assert check(full, 4, epochs, steps_done=3)[0].ok
    assert check(full, 4, epochs, steps_done=3)[0].wasted == 2
    verdict, torn = check(after(after(Weights(), 0, 1), 1, 3), 4, epochs, steps_done=2)
    assert (verdict.missing, verdict.repeated, torn) == (1, 1, "")
    assert check(after(Weights(), 0, 1, step=2), 4, epochs, steps_done=2)[1]
