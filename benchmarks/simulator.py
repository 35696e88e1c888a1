"""The simulator against reality: the same job by real worker processes and by `forebay simulate`, side by side.

    python -m benchmarks.simulator [--workers 8] [--slices 96] [--origin-up 8e6] [--runs 3] [--seed 0]

A scheduler and a data node with a limited upload serve real workers over mutual TLS; each worker is a process whose
step sleeps for as long as the simulated machine of the same number computes. Speeds, links, leases, requests and
fetches at once are those of the simulated world, so that the completion times may be compared. Loopback has no limit
of its own: links down are wide in both. Two cores are enough: steps sleep, and slices are small.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import make_dataset
from forebay import Loader, NetworkOptions
from forebay.data_node import DataNode
from forebay.dataset.reader import open_dataset
from forebay.network.client import Client
from forebay.network.limits import ServerLimits
from forebay.network.pki.identity import Identity, create_network, join
from forebay.scheduler.server import SchedulerService
from forebay.simulate import Scenario, simulate
from forebay.simulate.scenario import draw
from forebay.storage.hosts import HostPort

HOST, NAME, SEQ_LEN = "127.0.0.1", "bench", 4096
GOAL = 0.15
SHOWN = ("origin", "fetches", "wait_share", "wasted")


class Table:
    """Discovery within this process."""

    host = HOST

    def __init__(self) -> None:
        self._ports: dict[bytes, list[int]] = {}

    def announce(self, key: bytes, port: int) -> None:
        """See Discovery."""
        self._ports.setdefault(key, []).append(port)

    def find(self, key: bytes, timeout_s: float) -> list[HostPort]:
        """See Discovery."""
        return [(HOST, port) for port in dict.fromkeys(self._ports.get(key, ()))]

    def close(self) -> None:
        """See Discovery."""


def work(settings: dict[str, Any]) -> None:
    """One worker: begins when a line comes in."""
    identity = Identity.load(settings["node"])
    print("ready", flush=True)
    sys.stdin.readline()
    network = NetworkOptions(
        identity, receipt_s=2 * settings["exchange_s"], listen=f"{HOST}:0", upload_bytes_per_s=settings["up"]
    )
    with Loader(
        f"forebay://bench/{NAME}", seq_len=SEQ_LEN, batch_size=settings["batch"], scheduler=settings["scheduler"],
        cache_dir=settings["cache"], cache_bytes=settings["cache_bytes"], network=network,
    ) as loader:  # fmt: skip
        for batch in loader:
            time.sleep(len(batch) / settings["speed"])
    stats = loader.stats()
    counts = {"samples": stats["samples"], "fetched": stats["slices_opened"], "wasted": stats["wasted_samples"]}
    print(json.dumps({**counts, "wait_share": stats["wait_s"] / (stats["wait_s"] + stats["busy_s"])}), flush=True)


def run_real(settings: Scenario, folder: Path, data: Path) -> dict[str, float]:
    """The job by processes: seconds from the workers' start to the last acknowledgement, and what they did."""
    create_network(folder / "network", "bench")
    names = ["data", "scheduler", *(f"worker-{i}" for i in range(settings.workers))]
    nodes = {name: join(folder / "network", folder / name, name) for name in names}
    with ExitStack() as stack:
        table = Table()
        limits = ServerLimits(upload_bytes_per_s=settings.origin_up)
        node = DataNode(nodes["data"], [open_dataset(data)], HOST, 0, table, ttl_s=30, limits=limits)
        node.start()
        stack.callback(node.stop)
        client = stack.enter_context(Client(nodes["scheduler"]))
        service = SchedulerService(
            nodes["scheduler"], NAME, table, client, folder / "state", HOST, 0,
            seq_len=SEQ_LEN, epochs=settings.epochs, seed=settings.seed, lease_s=settings.lease_s,
        )  # fmt: skip
        service.start()
        stack.callback(service.stop)
        workers = []
        for machine in draw(settings, 1.0).machines:
            worker_settings = {
                "node": str(folder / f"worker-{machine.index}"), "cache": str(folder / f"cache-{machine.index}"),
                "cache_bytes": settings.cache * settings.slice_bytes, "scheduler": service.address,
                "batch": settings.batch, "exchange_s": settings.exchange_s,
                "speed": machine.speed, "up": machine.up,
            }  # fmt: skip
            command = [sys.executable, "-m", "benchmarks.simulator", "--worker", json.dumps(worker_settings)]
            workers.append(stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ))  # fmt: skip
        for worker in workers:
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        began = time.monotonic()
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        while not service.is_done():
            time.sleep(0.005)
        time_s = time.monotonic() - began
        reports = [json.loads(worker.communicate()[0]) for worker in workers]
        origin_bytes = int(node.status()["bytes_sent"])
    return {
        "time_s": time_s,
        "origin": origin_bytes / (settings.slices * settings.slice_bytes),
        "fetches": sum(report["fetched"] for report in reports),
        "wait_share": sum(report["wait_share"] for report in reports) / len(reports),
        "wasted": sum(report["wasted"] for report in reports),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--slices", type=int, default=96)
    parser.add_argument("--speed", type=float, default=80.0, help="samples a second of the median worker")
    parser.add_argument("--origin-up", type=float, default=8e6, help="bytes a second of the data node")
    parser.add_argument("--up", type=float, default=4e6, help="bytes a second of the median worker")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.worker:
        return work(json.loads(args.worker))
    size = 64 * SEQ_LEN * 2
    settings = Scenario(
        workers=args.workers, slices=args.slices, seed=args.seed, samples=64, batch=8, speed=args.speed, up=args.up,
        down=1e9, origin_up=args.origin_up, latency_s=0.001, exchange_s=0.5, slice_bytes=size,
    )  # fmt: skip
    print(f"{'run':>4}{'real s':>9}{'simulated s':>13}{'ratio':>8}   real (simulated): {', '.join(SHOWN)}")
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "dataset"
        make_dataset(data, NAME, settings.slices, settings.samples * SEQ_LEN)
        result = simulate(settings)
        simulated = {**result.counts, "origin": result.origin_ratio, "wasted": result.usage.wasted}
        for run in range(args.runs):
            real = run_real(settings, Path(name) / f"run-{run}", data)
            ratios.append(real["time_s"] / result.time_s)
            comparison = ", ".join(f"{name} {real[name]:.3g} ({simulated[name]:.3g})" for name in SHOWN)
            print(f"{run:>4}{real['time_s']:>9.2f}{result.time_s:>13.2f}{ratios[-1]:>8.3f}   {comparison}", flush=True)
    median = float(np.median(ratios))
    print(f"median of real / simulated: {median:.3f}; the goal is within {GOAL:.0%} of 1")


if __name__ == "__main__":
    main()
