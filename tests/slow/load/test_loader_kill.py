"""Ranks of one machine that share a cache, killed with SIGKILL at random moments and resumed on other world sizes.

FOREBAY_LOADER_KILLS says how often; FOREBAY_LOADER_SEED replays a run's choices.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from forebay.load.options import OrderOptions
from support.feeding import (
    MIB,
    Watcher,
    check_cache,
    ended,
    global_batches,
    lines_of,
    make_dataset,
    start_rank,
    steps_of,
    until,
)
from support.origin_server import OriginServer

KILLS = int(os.environ.get("FOREBAY_LOADER_KILLS", "4"))
SEED = int(os.environ.get("FOREBAY_LOADER_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
SLICES, SAMPLES, SEQ_LEN = 12, 96, 1024  # 384 KiB a slice.
BUDGET = 5 * MIB // 2  # Six of them and a little.
ORDER = {
    "seq_len": SEQ_LEN,
    "global_batch_size": 12,
    "order": OrderOptions(lanes=3, window_bytes=SAMPLES * SEQ_LEN * 4),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("kill") / "data", SLICES, SAMPLES, SEQ_LEN)


@pytest.fixture
def server(folder: Path) -> Iterator[OriginServer]:
    with OriginServer(folder, seed=SEED) as server:
        yield server


class Run:
    """One run over many starts: which steps are committed, by which ranks' words, and its state."""

    def __init__(self, base: Path, url: str, samples: int, step_s: float, budget: int = BUDGET) -> None:
        self.budget = budget
        self.base, self.url, self.samples, self.step_s = base, url, samples, step_s
        self.cache = base / "cache"
        self.starts = 0
        self.begin(0)

    def begin(self, seed: int) -> None:
        """Another epoch, with a seed of its own."""
        self.seed = seed
        self.state: dict[str, Any] | None = None
        self.committed: list[list[int]] = []

    def start(self, world: int) -> None:
        """Start ranks from the last state that all have reached."""
        self.starts += 1
        self.outs = [self.base / f"{self.starts}-{rank}.jsonl" for rank in range(world)]
        self.ranks = [
            start_rank(
                out, {**ORDER, "dataset": self.url, "seed": self.seed, "rank": rank, "world_size": world,
                      "cache_dir": self.cache, "cache_bytes": self.budget}, state=self.state, samples=self.samples,
                step_s=self.step_s,
            )
            for rank, out in enumerate(self.outs)
        ]  # fmt: skip

    def reached(self) -> int:
        """Steps done by all ranks since this start."""
        return min(sum("step" in line for line in lines_of(out)) for out in self.outs)

    def commit(self) -> None:
        """A checkpoint: of the last step that all ranks have done."""
        steps = [steps_of(out) for out in self.outs]
        while all(len(self.committed) in of_rank for of_rank in steps):
            index = len(self.committed)
            states = [of_rank[index]["state"] for of_rank in steps]
            assert all(state == states[0] for state in states)
            self.state = states[0]
            self.committed.append([sample for of_rank in steps for sample in of_rank[index]["ids"]])


def test_killed_at_any_moment_no_sample_is_lost_or_repeated(folder: Path, server: OriginServer, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    print(f"replay with FOREBAY_LOADER_SEED={SEED} FOREBAY_LOADER_KILLS={KILLS}")
    server.faults.drop, server.faults.truncate, server.faults.bytes_per_s = 0.1, 0.2, 12 * MIB
    run = Run(tmp_path, server.url, SAMPLES, step_s=0.003)
    run.cache.mkdir()
    watcher = Watcher(run.cache)
    expected, kills = global_batches(dataset=folder, seed=0, **ORDER), 0
    while kills < KILLS or len(run.committed) < len(expected):
        if len(run.committed) == len(expected):
            assert run.committed == expected
            run.begin(run.seed + 1)
            expected = global_batches(dataset=folder, seed=run.seed, **ORDER)
        run.start(chance.choice([1, 2, 2, 3]))
        if kills < KILLS:
            until(lambda: all(lines_of(out) for out in run.outs), "they begin")
            time.sleep(chance.random() ** 2 * 1.2)
            kills += 1
            if chance.random() < 0.5:
                victim = chance.randrange(len(run.ranks))
                run.ranks[victim].kill()
                run.ranks[victim].join()
                survivors = [out for rank, out in enumerate(run.outs) if rank != victim]
                before = [len(lines_of(out)) for out in survivors]
                for out, count in zip(survivors, before):
                    until(
                        lambda out=out, count=count: (
                            steps_of(out),
                            len(lines_of(out)) >= count + 5 or "stats" in lines_of(out)[-1],
                        )[1],
                        f"{out} goes on without the one that was killed",
                    )
            for rank in run.ranks:
                rank.kill()
            ended(run.ranks)
        else:
            assert ended(run.ranks) == [0] * len(run.ranks)
        run.commit()
        check_cache(run.cache)
    assert run.committed == expected
    assert sorted(chain(*run.committed)) == list(range(SLICES * SAMPLES))
    result = watcher.end()
    assert result["most"] <= BUDGET and result["looks"] > 100
    print(f"{kills} kills, {run.starts} starts, {server.requests.total()} requests, {result}")


def test_four_then_three_then_five_ranks_from_afar(folder: Path, server: OriginServer, tmp_path: Path) -> None:
    run = Run(tmp_path, server.url, SAMPLES, step_s=0.0, budget=4 * MIB)  # Three slices a lane, and a little.
    expected = global_batches(dataset=folder, seed=0, **ORDER)
    for world, stop in ((4, 30), (3, 60), (5, None)):
        run.step_s = 0.004 if stop else 0.0
        run.start(world)
        if stop:
            until(lambda stop=stop: len(run.committed) + run.reached() >= stop, "they go on")
            for rank in run.ranks:
                rank.terminate()
            ended(run.ranks)
        else:
            assert ended(run.ranks) == [0] * world
        run.commit()
        assert run.committed == expected[: len(run.committed)]
    assert run.committed == expected
    fetched = server.bytes_sent.total() - sum(server.bytes_sent[name] for name in ("manifest.json", "slices.parquet"))
    print(f"{fetched / (SLICES * SAMPLES * SEQ_LEN * 4):.2f} times the dataset")
    assert fetched <= 2 * SLICES * SAMPLES * SEQ_LEN * 4
