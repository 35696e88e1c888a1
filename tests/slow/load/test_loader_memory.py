"""A dataset twenty times as large as its cache: memory and disk, in one process and in eight that share."""

import os
import time
from pathlib import Path

import pytest

from forebay.load.loader import Loader
from forebay.load.options import NetworkOptions, OrderOptions
from forebay.storage.base import CHUNK_BYTES
from support.feeding import (
    MIB,
    Watcher,
    check_cache,
    dataset_fixture,
    global_batches,
    join_all,
    make_dataset,
    own_memory,
    read_steps,
    small_disk,
    start_rank,
)
from support.origin_server import OriginServer

TIMES = int(os.environ.get("FOREBAY_LOADER_TIMES", "20"))
SAMPLES, SEQ_LEN = 64, 2048  # 512 KiB a slice.
BUFFERS = NetworkOptions().connections * CHUNK_BYTES  # All are in use at once for the first time at any moment.
BUDGET = 13 * MIB // 2  # Twelve of them and a little.
ORDER = {"seq_len": SEQ_LEN, "global_batch_size": 8, "order": OrderOptions(lanes=4, window_bytes=SAMPLES * SEQ_LEN * 4)}


folder = dataset_fixture(12 * TIMES, SAMPLES, SEQ_LEN)


@pytest.mark.parametrize("world", [1, 8])
def test_memory_and_disk_stay_flat(folder: Path, tmp_path, world):
    outs = [tmp_path / f"{rank}.jsonl" for rank in range(world)]
    with small_disk(tmp_path / "disk", 3 * BUDGET) as disk, OriginServer(folder) as server:
        cache = disk / "cache"
        cache.mkdir()
        watcher, most_on_disk = Watcher(cache), 0
        ranks = [
            start_rank(
                out, {**ORDER, "dataset": server.url, "rank": rank, "world_size": world, "cache_dir": cache,
                      "cache_bytes": BUDGET}, state=None, samples=SAMPLES, memory_every=10,
            )
            for rank, out in enumerate(outs)
        ]  # fmt: skip
        while any(rank.is_alive() for rank in ranks):
            result = os.statvfs(disk)
            most_on_disk = max(most_on_disk, (result.f_blocks - result.f_bfree) * result.f_frsize)
            time.sleep(0.002)
        assert join_all(ranks) == [0] * world
        steps = [read_steps(out) for out in outs]
        seen = watcher.end()
        check_cache(cache)
    ids = [[sample for of_rank in steps for sample in of_rank[step]["ids"]] for step in sorted(steps[0])]
    assert ids == global_batches(dataset=folder, **ORDER)
    assert seen["most"] <= BUDGET and seen["looks"] > 50
    for of_rank in steps:
        memory = [line["memory"] for _, line in sorted(of_rank.items()) if "memory" in line]
        early, late = memory[: len(memory) // 4], memory[len(memory) // 4 :]
        grown = max(item["anon"] for item in late) - max(item["anon"] for item in early)
        mapped = max(item["file"] for item in late) - min(item["file"] for item in memory)
        assert grown < 4 * MIB + BUFFERS and mapped < BUDGET + 4 * MIB
    assert most_on_disk <= BUDGET  # Also what was deleted while it was mapped.


def test_memory_is_the_batch_not_the_dataset(tmp_path):
    folder = make_dataset(tmp_path / "large", 12, 2048, 1024)  # 96 MiB; a batch is 128 KiB.
    with Loader(folder, seq_len=1024, batch_size=16) as loader:
        peak = before = own_memory()["anon"]
        for batch in loader:
            if batch.step % 64 == 0:
                peak = max(peak, own_memory()["anon"])
    assert peak - before < 8 << 20
