"""From opening a dataset of 64 MiB slices to the first shuffled batch of 8, the origin slowed to 100 MB/s.

A slice then takes 0.67 s, the minimum for a reader of whole slices. Caches are empty; libraries are imported. Four
processes share a node's cache; the time of the slowest one counts.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.loading.corpus import SEQ_LEN, SHARD_BYTES
from benchmarks.loading.fleet import NotMeasuredError
from benchmarks.loading.remote import peers
from benchmarks.loading.remote.task import Task
from benchmarks.measure import Figure, median
from benchmarks.server_process import ServerProcess

RATE = 100e6
BATCH = 8
OURS = "forebay.Loader"


def measure(corpus: Path, scratch: Path, rounds: int, names: Sequence[str], worlds: Sequence[int]) -> list[Figure]:
    """The figures, in seconds."""
    figures = []
    with ServerProcess(corpus, "bucket") as served:
        for world in worlds:
            took: dict[str, list[float]] = {}
            sent: dict[str, list[float]] = {}
            failed: dict[str, str] = {}
            for _ in range(rounds):
                for name in ["", *names]:
                    if name in failed:
                        continue
                    try:
                        seconds, num_bytes = _first(name, served, corpus, scratch, world)
                    except NotMeasuredError as error:
                        failed[name] = str(error)
                        continue
                    took.setdefault(name, []).append(seconds)
                    sent.setdefault(name, []).append(num_bytes)
            figures += _figures(world, took, sent, failed)
    return figures


def _first(name: str, served: ServerProcess, corpus: Path, scratch: Path, world: int) -> tuple[float, float]:
    """(seconds to the first batch of the slowest rank, bytes that the server had sent by then)."""
    cache = scratch / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    served.limit(bytes_per_s=RATE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tasks = []
    for rank in range(world):
        environment = dict(served.environment, S3_ENDPOINT_URL=served.url)
        if world > 1:
            ranks = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
            environment |= {key: str(value) for key, value in ranks.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        what: dict[str, Any] = {"cache": str(cache)}
        if name:
            prefix = peers.find(name).DATA
            if not (corpus / prefix / ".written").exists():
                raise NotMeasuredError("its format was not written; see above")
            shards = sorted(path.name for path in (corpus / prefix).iterdir() if not path.name.startswith("."))
            what |= {"peer": name, "prefix": prefix, "names": shards, "http": served.url, "batch": BATCH}
            tasks.append(Task("peer", environment, name, **what))
        else:
            loader = {"seq_len": SEQ_LEN, "global_batch_size": BATCH * world, "seed": 1}
            tasks.append(Task("first", environment, url=f"{served.s3_url}/forebay", loader=loader, **what))
    for task in tasks:
        task.ready()
    for task in tasks:
        task.begin()
    answers = []
    for task in tasks:
        answers.append(task.result(120.0))
    return max(answer["first_s"] for answer in answers), served.sent()["bytes"]


def _figures(
    world: int, took: dict[str, list[float]], sent: dict[str, list[float]], failed: dict[str, str]
) -> list[Figure]:
    slice_s = SHARD_BYTES / RATE
    title = f"first batch, {world} process{'es' if world > 1 else ''}"
    figures = []
    for name in ["", *peers.NAMES]:
        label = peers.find(name).LABEL if name else OURS
        if name in failed:
            figures.append(Figure.missing(f"{title}: {label}", failed[name]))
        elif name in took:
            seconds = median(took[name])
            detail = f"{seconds / slice_s:5.2f} slices' time, {median(sent[name]) / 1e6:.0f} MB sent by its end"
            if name:
                detail += f"; ours {seconds / median(took['']):.2g}x sooner; {peers.NOTES[name]}"
            figures.append(Figure(f"{title}: {label}", seconds, "s", detail))
    return figures
