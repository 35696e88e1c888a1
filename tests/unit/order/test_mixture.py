"""Weights to samples: all parts of a run are near their quotas, and a node reads its share of each dataset once."""

import json

import numpy as np
import pytest

from forebay.errors import UsageError
from forebay.order.footprint import Footprint
from forebay.order.mixture import PERIOD, MixtureOrder, Weights
from forebay.order.plan import Order, SampleSize, batch_parts, num_streams
from forebay.order.run import BatchSizes, Run
from support.paths import GOLDEN

MIXES = [(1.0,), (3, 1), (4, 2, 1, 1), (0.899, 0.1, 0.001), (0.5, 0.0, 0.5 - 1e-5, 1e-5), (1 / 3, 1 / 3, 1 / 3)]


@pytest.mark.parametrize("batch", [1, 7, 64, 97, 512, 4096, 6000, 8633])
@pytest.mark.parametrize("weights", MIXES)
def test_batches_ranks_and_prefixes_are_near_the_weights(weights, batch):
    """Bounds: one sample for a batch of whole turns, a few for others and for a prefix, 1 % for a rank."""
    quotas, streams = Weights(((0, weights),)).quotas[0], num_streams(batch)
    parts = quotas / PERIOD
    assert int(quotas.sum()) == PERIOD and (np.abs(parts - np.array(weights) / sum(weights)) <= 1.01 / PERIOD).all()
    num_steps = 200_000 // batch + 1
    mixture = MixtureOrder([quotas], [0], streams, [streams] * len(weights))
    sources, _ = mixture.locate(np.arange(batch * num_steps))
    by_source = sources[:, None] == np.arange(len(weights))
    prefixes = np.cumsum(by_source, axis=0) - np.arange(1, len(sources) + 1)[:, None] * parts
    assert np.abs(prefixes).max() <= 20
    batches = by_source.reshape(num_steps, batch, -1).sum(axis=1) - batch * parts
    assert np.abs(batches).max() <= (-(-batch // streams) if batch % streams == 0 else 8)
    for world_size in {1, -(-batch // 5), batch}:
        for rank in {0, world_size // 2, world_size - 1}:
            num_steps = 5000 * world_size // batch + 1
            mine = batch_parts(0, batch, num_steps, streams, rank, world_size).reshape(-1)
            share = np.bincount(mixture.locate(mine)[0], minlength=len(weights)) / len(mine)
            assert np.abs(share - parts).max() <= 0.01


@pytest.mark.parametrize("nodes, batch", [(8, 64), (8, 512), (64, 512), (64, 1024), (512, 2048), (7, 100), (3, 6000)])
@pytest.mark.parametrize("sizes", [(1010e9, 101e9, 1e9), (33.2e6, 4.6e6, 2e6), (1e9, 4096, 50e3)])
def test_a_node_reads_its_share_of_the_lanes_of_each_dataset(sizes, nodes, batch):
    orders = [
        Order(np.full(max(1, int(size / 67e6)), min(int(size), 67e6) // 4096, int), i, batch, size=SampleSize())
        for i, size in enumerate(sizes)
    ]
    run = Run(orders, BatchSizes.of(batch), weights=Weights(((0, (0.899, 0.1, 0.001)),)), epochs=None)
    lanes = np.array([order.num_lanes for order in orders])
    read = np.zeros((3, nodes, lanes.max()), bool)
    for rank in range(nodes):
        for first in (0, 7000, 54321):
            mine = batch_parts(first * batch, batch, 200_000 // batch + 99, run.streams, rank, nodes).reshape(-1)
            sources, own = run.mixture.locate(mine)
            read[sources, rank, own % lanes[sources]] = True  # From epoch to epoch they move on together.
    for number, order in enumerate(orders):
        expected = [node.count * node.num_lanes for node in Footprint(order, nodes, 1, run.streams).nodes]
        assert read[number].sum() <= sum(expected) == lanes[number]


def test_golden_mixture():
    """It changes only with a version of the order."""
    weights = Weights(((0, (4, 2, 1, 1)), (3, (0, 1, 0, 1))))
    orders = [Order(np.array([30, 17 + i]), i, 12, lanes=(None, 4, 5, 24)[i]) for i in range(4)]
    run = Run(orders, BatchSizes.of([(0, 12), (5, 7)]), weights=weights, epochs=None)
    steps = [run.steps(step, step + 1, 0, 1) for step in (0, 4, 9, 10**9)]
    read = [[step.sources.tolist(), step.slices.tolist(), step.samples.tolist()] for step in steps]
    assert read == json.loads((GOLDEN / "order_v5.json").read_text())["mixture"]


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ((1, (1.0,)),),
        ((0, (1.0,)), (0, (1.0,))),
        ((0, ()),),
        ((0, (0.0, 0.0)),),
        ((0, (1.0, float("nan"))),),
        ((0, (1.0, 1e-9)),),
        ((True, (1.0,)),),
    ],
)
def test_wrong_weights(changes):
    with pytest.raises(UsageError):
        Weights(changes)
