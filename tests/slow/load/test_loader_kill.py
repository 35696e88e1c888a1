"""Ranks of one machine that share a cache, killed with SIGKILL at random moments and resumed on other world sizes.

FOREBAY_LOADER_KILLS says how often; FOREBAY_LOADER_SEED replays a run's choices.
"""

import os
import random
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from forebay.dataset.reader import open_dataset
from forebay.load.options import OrderOptions
from support.feeding import (
    MIB,
    Watcher,
    check_cache,
    dataset_fixture,
    global_batches,
    join_all,
    kill,
    read_lines,
    read_steps,
    start_rank,
)
from support.origin_server import OriginServer
from support.waiting import until

KILLS = int(os.environ.get("FOREBAY_LOADER_KILLS", "4"))
SEED = int(os.environ.get("FOREBAY_LOADER_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
SLICES, SAMPLES, SEQ_LEN = 12, 96, 1024  # 384 KiB a slice.
BUDGET = 5 * MIB // 2  # Six of them and a little.
ORDER = {
    "seq_len": SEQ_LEN,
    "global_batch_size": 12,
    "order": OrderOptions(lanes=3, window_bytes=SAMPLES * SEQ_LEN * 4),
}


folder = dataset_fixture(SLICES, SAMPLES, SEQ_LEN)


@pytest.fixture
def server(folder: Path) -> Iterator[OriginServer]:
    with OriginServer(folder, seed=SEED) as server:
        yield server


class Run:
    """One run over many starts: its committed steps and its state."""

    def __init__(self, base: Path, url: str):
        self.base, self.url = base, url
        self.cache = base / "cache"
        self.starts = 0
        self.begin(0)

    def begin(self, seed: int):
        """Another epoch, with a seed of its own."""
        self.seed = seed
        self.state = None
        self.committed = []

    def start(self, world: int):
        """Start ranks from the last state that all have reached."""
        self.starts += 1
        self.outs = [self.base / f"{self.starts}-{rank}.jsonl" for rank in range(world)]
        self.ranks = [
            start_rank(
                out, {**ORDER, "dataset": self.url, "seed": self.seed, "rank": rank, "world_size": world,
                      "cache_dir": self.cache, "cache_bytes": BUDGET}, state=self.state, samples=SAMPLES, step_s=0.003,
            )
            for rank, out in enumerate(self.outs)
        ]  # fmt: skip

    def wait_for_steps(self, out: Path, num_steps: int):
        """Wait until a rank has done so many more steps, or has ended."""
        before = len(read_lines(out))

        def is_done():
            read_steps(out)  # Fails if it raised.
            return len(read_lines(out)) >= before + num_steps or "stats" in read_lines(out)[-1]

        until(is_done)

    def commit(self):
        """A checkpoint: of the last step that all ranks have done."""
        steps = [read_steps(out) for out in self.outs]
        while all(len(self.committed) in of_rank for of_rank in steps):
            index = len(self.committed)
            states = [of_rank[index]["state"] for of_rank in steps]
            assert all(state == states[0] for state in states)
            self.state = states[0]
            self.committed.append([sample for of_rank in steps for sample in of_rank[index]["ids"]])


def test_killed_at_any_moment_no_sample_is_lost_or_repeated(folder: Path, server, tmp_path):
    """Within the cache's budget at every look, and every chunk right; a rank's death does not stop the others."""
    chance = random.Random(SEED)
    print(f"replay with FOREBAY_LOADER_SEED={SEED} FOREBAY_LOADER_KILLS={KILLS}")
    server.faults.drop, server.faults.truncate, server.faults.bytes_per_s = 0.1, 0.2, 12 * MIB
    run = Run(tmp_path, server.url)
    run.cache.mkdir()
    watcher = Watcher(run.cache)
    expected, kills = global_batches(dataset=folder, seed=0, **ORDER), 0
    while kills < KILLS or len(run.committed) < len(expected):
        if len(run.committed) == len(expected):
            assert run.committed == expected
            run.begin(run.seed + 1)
            expected = global_batches(dataset=folder, seed=run.seed, **ORDER)
        run.start(chance.choice([1, 2, 3, 4]))
        if kills < KILLS:
            until(lambda: all(read_lines(out) for out in run.outs))
            time.sleep(chance.random() ** 2 * 1.2)
            kills += 1
            if chance.random() < 0.5:
                victim = chance.randrange(len(run.ranks))
                kill([run.ranks[victim]])
                for out in [out for rank, out in enumerate(run.outs) if rank != victim]:
                    run.wait_for_steps(out, 5)
            kill(run.ranks)
        else:
            assert join_all(run.ranks) == [0] * len(run.ranks)
        run.commit()
        check_cache(run.cache)
    assert run.committed == expected
    assert sorted(chain(*run.committed)) == list(range(SLICES * SAMPLES))
    result = watcher.end()
    assert result["most"] <= BUDGET and result["looks"] > 100


def test_four_processes_that_read_the_same_fetch_each_slice_once(folder: Path, server, tmp_path):
    outs = [tmp_path / f"out{seed}" for seed in range(4)]
    arguments = {**ORDER, "dataset": server.url, "epochs": 2, "rank": 0, "world_size": 1}
    arguments |= {"cache_dir": tmp_path / "cache", "cache_bytes": 2 * SLICES * SAMPLES * SEQ_LEN * 4}
    readers = [
        start_rank(out, {**arguments, "seed": seed}, state=None, samples=SAMPLES) for seed, out in enumerate(outs)
    ]
    assert join_all(readers) == [0] * 4
    assert all(len(read_steps(out)) == 2 * SLICES * SAMPLES // 12 for out in outs)
    table = open_dataset(folder).table
    fetched = sum(read_lines(out)[-1]["stats"]["fetched_chunks"] for out in outs)
    assert fetched == sum(-(-table.bytes // table.chunk_bytes))
    assert check_cache(tmp_path / "cache") == SLICES
