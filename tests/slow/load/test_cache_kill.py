"""Four loaders share one cache, killed and started again: within the budget at every look, and every chunk right."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from support.feeding import check_cache, disk_bytes, ended, lines_of, make_dataset, start_rank, steps_of, until
from support.origin_server import OriginServer

NUM_SLICES, SAMPLES, SEQ_LEN = 24, 32, 2048  # 256 KiB a slice, in 64 chunks.
BUDGET = 9 * 270_000
ROUNDS = int(os.environ.get("FOREBAY_KILL_SEEDS", "6"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OriginServer]:
    with OriginServer(make_dataset(tmp_path_factory.mktemp("kill") / "data", NUM_SLICES, SAMPLES, SEQ_LEN)) as server:
        yield server


def arguments(server: OriginServer, cache: Path, seed: int, epochs: int, budget: int = BUDGET) -> dict[str, Any]:
    return {
        "dataset": server.url, "seq_len": SEQ_LEN, "batch_size": 4, "seed": seed, "epochs": epochs, "rank": 0,
        "world_size": 1, "cache_dir": cache, "cache_bytes": budget,
    }  # fmt: skip


@contextlib.contextmanager
def stopped(processes: list[ForkServerProcess]) -> Iterator[None]:
    """A moment at which nothing moves, so that a listing is true."""
    alive = [process for process in processes if process.exitcode is None]
    for process in alive:
        _send(process, signal.SIGSTOP)
    for process in alive:
        while process.exitcode is None and not _states(process) <= {"T", "Z", "X"}:
            time.sleep(0.0002)
    yield
    for process in alive:
        _send(process, signal.SIGCONT)


def _send(process: ForkServerProcess, number: int) -> None:
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _states(process: ForkServerProcess) -> set[str]:
    """The states of all threads: each of them stops by itself."""
    states = set()
    for path in Path(f"/proc/{process.pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # The thread has ended.
            states.add(path.read_text().rpartition(")")[2].split()[0])
    return states


def test_four_loaders_within_the_budget_and_killed_at_any_moment(server: OriginServer, tmp_path: Path) -> None:
    chance, cache, outs = random.Random(7), tmp_path / "cache", [tmp_path / f"out{i}" for i in range(4 + ROUNDS)]

    def start(number: int, seed: int) -> ForkServerProcess:
        return start_rank(outs[number], arguments(server, cache, seed, 40), state=None, samples=SAMPLES)

    readers = [start(rank, rank) for rank in range(4)]
    looks, max_value = 0, 0
    try:
        until(lambda: all(len(lines_of(out)) > 5 for out in outs[:4]), "four loaders have batches")
        for round_ in range(ROUNDS):
            deadline = time.monotonic() + chance.uniform(0.2, 0.8)
            while time.monotonic() < deadline:
                with stopped(readers):
                    used = disk_bytes(cache)
                assert used <= BUDGET, f"{used} of {BUDGET} bytes in round {round_}"
                looks, max_value = looks + 1, max(max_value, used)
                time.sleep(chance.uniform(0, 0.02))
            victim = chance.randrange(4)
            readers[victim].kill()
            readers[victim].join()
            readers[victim] = start(4 + round_, victim)
        # The looks stop the readers for most of the rounds.
        until(lambda: sum(len(steps_of(out)) for out in outs) > 100, "a hundred batches")
        assert looks > 5 and max_value > BUDGET // 2
    finally:
        for reader in readers:
            reader.kill()
            reader.join()
    assert sum(len(steps_of(out)) for out in outs) > 100  # Every token of every batch was right.
    # What is left is right, and the next start needs no help.
    check_cache(cache)
    last = start_rank(tmp_path / "last", arguments(server, cache, 9, 1), state=None, samples=SAMPLES)
    assert ended([last]) == [0]
    assert len(steps_of(tmp_path / "last")) == NUM_SLICES * SAMPLES // 4
    assert disk_bytes(cache) <= BUDGET
    check_cache(cache)


def test_four_processes_that_read_the_same_fetch_each_slice_once(server: OriginServer, tmp_path: Path) -> None:
    outs, budget = [tmp_path / f"out{seed}" for seed in range(4)], (NUM_SLICES + 2) * 270_000
    server.reset()
    readers = [
        start_rank(out, arguments(server, tmp_path / "cache", seed, 2, budget), state=None, samples=SAMPLES)
        for seed, out in enumerate(outs)
    ]
    assert ended(readers) == [0] * 4
    assert all(len(steps_of(out)) == 2 * NUM_SLICES * SAMPLES // 4 for out in outs)
    stats = [lines_of(out)[-1]["stats"] for out in outs]
    assert sum(item["fetched_bytes"] for item in stats) == sum(
        path.stat().st_size for path in server.directory.glob("*.safetensors")
    )
    assert check_cache(tmp_path / "cache") == NUM_SLICES
