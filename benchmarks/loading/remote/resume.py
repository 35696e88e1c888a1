"""Going on in the middle of an epoch in a fresh process, the origin slowed to 100 MB/s: cold cache and warm.

The first batch needs chunks of its own steps alone. The cache stays as it was where the first process stopped for the
warm one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.loading.remote.task import Task
from benchmarks.measure import Figure, median
from benchmarks.server_process import ServerProcess

RATE = 100e6
LOADER = {"seq_len": 2048, "batch_size": 8, "seed": 1, "cache_bytes": 256_000_000}


def measure(folder: Path, scratch: Path, rounds: int) -> list[Figure]:
    """The figures."""
    cache = scratch / "cache"
    took: dict[str, list[float]] = {"cold": [], "warm": []}
    sent: dict[str, list[float]] = {"cold": [], "warm": []}
    with ServerProcess(folder.parent, "bucket") as served:
        what = {"url": f"{served.s3_url}/{folder.name}", "cache": str(cache), "loader": LOADER}
        for _ in range(rounds):
            shutil.rmtree(cache, ignore_errors=True)
            served.limit(bytes_per_s=0)
            state = Task("first", served.environment, after=4000, **what).ready().begin().result()["state"]
            for name in ("warm", "cold"):
                if name == "cold":
                    shutil.rmtree(cache, ignore_errors=True)
                served.limit(bytes_per_s=RATE)
                answer = Task("first", served.environment, state=state, **what).ready().begin().result()
                took[name].append(answer["first_s"])
                sent[name].append(answer["fetched_bytes"])
    slice_bytes = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    return [
        Figure(
            f"resume in mid-epoch, {name} cache", median(took[name]), "s",
            f"{median(sent[name]) / slice_bytes:.0f} slices fetched by then ({median(sent[name]) / RATE:.2f} s of it)",
        )
        for name in ("warm", "cold")
    ]  # fmt: skip
