"""Slices that a worker owns: they stay with it, whole, and are shuffled inside again each epoch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay.load.batch import NumpyTokens
from forebay.load.loader import Loader
from forebay.load.options import OrderOptions
from support.feeding import make_dataset

SLICES, SAMPLES, SEQ_LEN = 24, 16, 32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("owned") / "data", SLICES, SAMPLES, SEQ_LEN)


def owned(data: Path, rank: int, world: int, worker_names: Sequence[str] = (), **more: Any) -> Loader[NumpyTokens]:
    order = OrderOptions(assignment="owned", worker_names=tuple(worker_names))
    return Loader(data, seq_len=SEQ_LEN, batch_size=4, rank=rank, world_size=world, order=order, epochs=2, **more)


def read_epochs(loader: Loader[NumpyTokens]) -> list[list[int]]:
    result = [[], []]
    for batch in loader:
        result[batch.epoch].extend(batch.sample_ids.tolist())
    return result


def test_shards_stay_and_their_insides_are_shuffled_anew(data: Path) -> None:
    """A sample's shard is the same in all epochs; a shard is whole at one worker; orders come from the seed alone."""
    homes = {}
    for rank in range(3):
        first, second = read_epochs(owned(data, rank, 3))
        assert [first, second] == read_epochs(owned(data, rank, 3))
        assert first != read_epochs(owned(data, rank, 3, seed=1))[0]
        for number in first:
            assert homes.setdefault(number // SAMPLES, rank) == rank
        for shard in {number // SAMPLES for number in first}:
            inside = [[n for n in epoch if n // SAMPLES == shard] for epoch in (first, second)]
            assert len(inside[0]) == SAMPLES and sorted(inside[0]) == sorted(inside[1]) and inside[0] != inside[1]
    assert len(homes) == SLICES
