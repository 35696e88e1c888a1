"""Slices that a worker owns: they stay with it, whole, and are shuffled inside again each epoch."""

from pathlib import Path

from support.feeding import dataset_fixture, read_owned

SLICES, SAMPLES, SEQ_LEN = 24, 16, 32


data = dataset_fixture(SLICES, SAMPLES, SEQ_LEN)


def test_shards_stay_and_their_insides_are_shuffled_anew(data: Path) -> None:
    """A sample's shard is the same in all epochs; a shard is whole at one worker; orders come from the seed alone."""
    homes = {}
    for rank in range(3):
        first, second, _ = read_owned(data, rank, 3, seq_len=SEQ_LEN)
        assert (first, second) == read_owned(data, rank, 3, seq_len=SEQ_LEN)[:2]
        assert first != read_owned(data, rank, 3, seq_len=SEQ_LEN, seed=1)[0]
        for number in first:
            assert homes.setdefault(number // SAMPLES, rank) == rank
        for shard in {number // SAMPLES for number in first}:
            inside = [[n for n in epoch if n // SAMPLES == shard] for epoch in (first, second)]
            assert len(inside[0]) == SAMPLES and sorted(inside[0]) == sorted(inside[1]) and inside[0] != inside[1]
    assert len(homes) == SLICES
