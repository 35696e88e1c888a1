"""The loader from an object store: `python -m benchmarks.loading.remote [throughput first]`.

    throughput  an epoch through 256 MB of cache beside plain parallel downloads of the same slices
    first       the first shuffled batch of shards of 64 MiB at 100 MB/s, beside the peers' (scripts/peers.sh loaders)

The origin is the tests' server, with S3's dialect, on this machine. Both: a quarter of an hour; 5 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

import forebay
from benchmarks.data import make_dataset
from benchmarks.loading import corpus, fleet
from benchmarks.loading.peers import PEERS
from benchmarks.measure import Figure, cpu_s, show, working_folder
from benchmarks.server_process import ServerProcess

SLICE_TOKENS = 4 << 20  # 8 MiB
CACHE_BYTES = 256_000_000
CONNECTIONS = 16
FIRST_RATE = 100e6
REMOTE_PEERS = {
    "forebay": "",
    "mosaic": "s3 by boto3",
    "litdata": "s3 by obstore",
    "webdataset": "http by curl; it reads a tar from its start on",
}
OURS = "forebay.Loader, one epoch"


def read_epoch(url: str, cache: Path, *_: object) -> dict[str, Any]:
    """All batches, thrown away."""
    order = forebay.OrderOptions(lanes=4)
    with forebay.Loader(
        url, seq_len=2048, batch_size=64, seed=1, order=order, cache_dir=cache, cache_bytes=CACHE_BYTES
    ) as loader:  # fmt: skip
        for _ in loader:
            pass
        return loader.stats()


def read_plain(url: str, cache: Path, names: Sequence[str]) -> dict[str, Any]:
    """All slices, each in one request; written, hashed and synced as ours are, and removed."""
    store = S3Store("bucket", prefix=f"{url.rpartition('/')[2]}/slices", client_options={"allow_http": True})

    def fetch(name: str) -> None:
        data = obstore.get(store, name).bytes()
        with (cache / name).open("wb") as file:
            file.write(data)
            hashlib.sha256(data).digest()
            os.fsync(file.fileno())
        (cache / name).unlink()

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(fetch, names))
    return {}


def run_alone(function: Callable[..., dict[str, Any]], environment: dict[str, str], *arguments: Any) -> dict[str, Any]:
    """Call in this process, a fresh one: the answer, and its wall and CPU seconds."""
    os.environ.update(environment)
    wall, cpu = time.perf_counter(), cpu_s()
    answer = function(*arguments)
    return answer | {"wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu}


def measure_throughput(folder: Path, scratch: Path, rounds: int, rates: Sequence[float]) -> list[Figure]:
    """In turns, each in a fresh process with an empty folder; 0 MB/s: no limit, where the processors are the limit."""
    names = sorted(path.name for path in folder.rglob("*.safetensors"))
    gigabytes = sum((folder / "slices" / name).stat().st_size for name in names) / 1e9
    ways = {OURS: read_epoch, "plain, written, hashed and synced": read_plain}
    figures, cache = [], scratch / "cache"
    with ServerProcess(folder.parent, "bucket") as served:
        for rate in rates:
            turns = fleet.Turns()

            def run(way: str, rate: float = rate) -> dict[str, Any]:
                shutil.rmtree(cache, ignore_errors=True)
                cache.mkdir()
                served.limit(bytes_per_s=rate)
                server_cpu_s = served.cpu_s()
                arguments = (ways[way], served.environment, f"{served.s3_url}/{folder.name}", cache, names)
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    answer = pool.submit(run_alone, *arguments).result()
                return answer | {"server_cpu_s": served.cpu_s() - server_cpu_s}

            for _ in range(rounds):
                for way in ways:
                    turns.run(way, "", run, way)
            for way in ways:
                cpu, server_cpu = (turns.median(way, "", key) / gigabytes for key in ("cpu_s", "server_cpu_s"))
                detail = f"{cpu:5.2f} CPU s/GB, server {server_cpu:.2f}"
                if way == OURS:
                    stats = turns.answers[way, ""][-1]
                    detail += (
                        f"; {stats['refetched_chunks']} chunks fetched again, {stats['evicted_bytes']} bytes evicted"
                    )
                else:
                    wall = turns.ratio(way, OURS, "", lambda answer: answer["wall_s"])
                    cpu = turns.ratio(OURS, way, "", lambda answer: answer["cpu_s"])
                    detail += f"; ours {wall:.2f}x as fast, {cpu:.1f}x its CPU"
                title = f"{rate / 1e6:.0f} MB/s: {way}" if rate else f"no limit: {way}"
                figures.append(Figure(title, 1e3 * gigabytes / turns.median(way, "", "wall_s"), "MB/s", detail))
    return figures


def measure_first(
    folder: Path, scratch: Path, rounds: int, names: Sequence[str], worlds: Sequence[int]
) -> list[Figure]:
    """Caches are empty, libraries are imported. Ranks share a node's cache; the time of the slowest one counts."""
    figures, cache = [], scratch / "cache"
    with ServerProcess(folder, "bucket") as served:

        def run(name: str, world: int) -> dict[str, Any]:
            shutil.rmtree(cache, ignore_errors=True)
            cache.mkdir()
            base = served.url if name == "webdataset" else served.s3_url if name == "forebay" else "s3://bucket"
            remote = f"{base}/{PEERS[name].data}"
            with contextlib.ExitStack() as stack:
                ranks = []
                for more in fleet.rank_environments(world):
                    more |= {**served.environment, "S3_ENDPOINT_URL": served.url}
                    ranks.append(stack.enter_context(fleet.Process(name, folder, **more)))
                for process in ranks:
                    process.ask("ready")
                served.limit(bytes_per_s=FIRST_RATE)
                for rank, process in enumerate(ranks):
                    process.send("restore", rank=rank, world=world, remote=remote, cache=str(cache))
                    process.send("first")
                answers = [process.receive() | process.receive() for process in ranks]
                seconds = max(answer["open_s"] + answer["first_s"] for answer in answers)
                return {"seconds": seconds, "bytes": served.sent()["bytes"]}

        for world in worlds:
            turns = fleet.Turns()
            for _ in range(rounds):
                for name in names:
                    turns.run(name, "", run, name, world)
            for name in names:
                title = f"first batch, {world} process{'es' if world > 1 else ''}: {PEERS[name].label}"
                if name in turns.failed:
                    figures.append(Figure.missing(title, turns.failed[name]))
                    continue
                seconds = turns.median(name, "", "seconds")
                detail = f"{seconds * FIRST_RATE / corpus.SHARD_BYTES:5.2f} slices' time, "
                detail += f"{turns.median(name, '', 'bytes') / 1e6:.0f} MB sent by its end  {REMOTE_PEERS[name]}"
                figures.append(Figure(title, seconds, "s", detail))
    return figures


def main(argv: Sequence[str]) -> int:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], "throughput", "first"])
    parser.add_argument("--slices", type=int, default=240, help="of 8 MiB, for throughput (240: 2 GB)")
    parser.add_argument("--shards", type=int, default=16, help="of 64 MiB, for first (16)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured, in turns (3)")
    parser.add_argument("--rates", default="0,100,200", help="MB/s of the origin, for throughput; 0: no limit")
    parser.add_argument("--peers", default=",".join(REMOTE_PEERS), help="for first, by commas")
    parser.add_argument("--world", type=int, default=4, help="processes beside one, for first")
    args = parser.parse_args(argv)
    with working_folder(None) as folder:
        scratch = folder / "scratch"
        scratch.mkdir(exist_ok=True)
        for part in args.parts or ("throughput", "first"):
            if part == "throughput":
                rates = [1e6 * float(rate) for rate in args.rates.split(",")]
                figures = measure_throughput(
                    make_dataset(folder / f"slices-{args.slices}", "benchmark", args.slices, SLICE_TOKENS),
                    scratch,
                    args.rounds,
                    rates,
                )
            else:
                large = folder / "first"
                corpus.make(large, args.shards * corpus.SHARD_BYTES // (2 * corpus.SEQ_LEN))
                names = list(fleet.prepare(args.peers.split(","), large))
                figures = measure_first(large, scratch, args.rounds, names, (1, args.world))
            show(f"remote, {part}", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
