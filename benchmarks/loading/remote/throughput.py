"""An epoch through a small cache beside a plain parallel download of the same slices over as many connections.

Rounds are interleaved, each in a fresh process with an empty directory. The yardsticks: bytes thrown away; written;
written, hashed and synced, which is what ours does besides making batches. A throttled origin is what training
has; without a limit client and server compete for the processors, and CPU seconds say more than the wall clock.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.loading.fleet import NotMeasuredError
from benchmarks.loading.remote.moto import Moto
from benchmarks.loading.remote.task import Task
from benchmarks.loading.remote.watch import Watcher
from benchmarks.measure import Figure, median
from benchmarks.server_process import ServerProcess

CONNECTIONS = 16
BUDGET_BYTES = 256_000_000
LOADER = {"seq_len": 2048, "batch_size": 64, "lanes": 4, "seed": 1, "cache_bytes": BUDGET_BYTES}
PLAIN = {
    "plain, thrown away": (False, False),
    "plain, written": (True, False),
    "plain, written, hashed and synced": (True, True),
}
OURS = "forebay.Loader, one epoch"


@dataclass
class Runs:
    """Of one way to read, over the rounds."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    server_cpu_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    last: dict[str, Any] = field(default_factory=dict)


def measure(folder: Path, scratch: Path, rounds: int, rates: Sequence[float]) -> list[Figure]:
    """The figures. Args: `rates`: bytes a second of the origin, 0 for no limit."""
    with ServerProcess(folder.parent, "bucket") as served:
        return _measure(served, folder, scratch, rounds, rates)


def measure_moto(folder: Path, scratch: Path, rounds: int) -> list[Figure]:
    """The same from a server that is not ours, without a limit."""
    try:
        with Moto(folder) as served:
            return _measure(served, folder, scratch, rounds, [0])
    except NotMeasuredError as error:
        return [Figure.missing("moto", error)]


def _measure(
    served: ServerProcess | Moto, folder: Path, scratch: Path, rounds: int, rates: Sequence[float]
) -> list[Figure]:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    total = sum((folder / name).stat().st_size for name in names)
    figures = []
    for rate in rates:
        ways = [OURS, *PLAIN] if rate == 0 else [OURS, "plain, thrown away"]
        runs = {way: Runs() for way in ways}
        for _ in range(rounds):
            for way, own in runs.items():
                served.limit(bytes_per_s=rate)
                _run(way, own, served, folder.name, names, scratch)
        figures += _figures(runs, total, rate)
    return figures


def _run(way: str, runs: Runs, served: ServerProcess | Moto, prefix: str, names: list[str], scratch: Path) -> None:
    cache = scratch / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    what: dict[str, Any] = {"cache": str(cache)}
    if way == OURS:
        task = Task("epoch", served.environment, url=f"{served.s3_url}/{prefix}", loader=LOADER, **what)
    else:
        written, hashed = PLAIN[way]
        what |= {"names": names, "prefix": prefix, "connections": CONNECTIONS, "written": written, "hashed": hashed}
        task = Task("plain", served.environment, **what)
    with Watcher(cache) as watcher:
        task.ready()
        before = served.cpu_s()
        answer = task.begin().result()
    runs.wall_s.append(answer["wall_s"])
    runs.cpu_s.append(answer["cpu_s"])
    runs.server_cpu_s.append(served.cpu_s() - before)
    runs.peak_bytes = max(runs.peak_bytes, watcher.peak_bytes)
    runs.last = answer


def _figures(runs: dict[str, Runs], total: int, rate: float) -> list[Figure]:
    title = f"{rate / 1e6:.0f} MB/s" if rate else "no limit"
    figures = []
    for way, own in runs.items():
        speeds = [total / wall for wall in own.wall_s]
        gb = total / 1e9
        detail = f"{median(own.cpu_s) / gb:5.2f} CPU s/GB, server {median(own.server_cpu_s) / gb:.2f}"
        if way != OURS:
            ratio = median([plain / ours for plain, ours in zip(own.wall_s, runs[OURS].wall_s)])
            cpu = median([plain / ours for plain, ours in zip(own.cpu_s, runs[OURS].cpu_s)])
            detail += f"; ours {ratio:.2f}x as fast, {1 / cpu:.1f}x its CPU"
        else:
            stats = own.last
            detail += f"; peak {own.peak_bytes / 1e6:.0f} of {BUDGET_BYTES / 1e6:.0f} MB, {stats['refetched_chunks']} "
            detail += f"chunks fetched again, {stats['evicted_bytes']} bytes evicted"
        figures.append(Figure(f"{title}: {way}", median(speeds) / 1e6, "MB/s", detail))
    return figures
