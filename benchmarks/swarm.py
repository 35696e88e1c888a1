"""One data node and many worker processes that all want everything: `python -m benchmarks.swarm`.

What leaves the origin, in times the dataset; with the origin's upload capped, how long until all have all, in times
what sending the data out once takes; the same without steering (each asks a random holder of a slice); and with the
data node killed as soon as every slice is out. All on loopback, over mutual TLS.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import data
from forebay.data_node import DataNode
from forebay.dataset.reader import open_dataset
from forebay.mirror import mirror_by_swarm
from forebay.network.client import Client
from forebay.network.limits import ServerLimits
from forebay.network.peer import Provider
from forebay.network.pki.identity import Identity, create_network, join
from forebay.storage.hosts import parse_address
from forebay.storage.origins import open_remote
from forebay.swarm.steering import Swarm

HOST = "127.0.0.1"
NAME = "swarmed"


@dataclass(frozen=True)
class Round:
    """What one round came to.

    Attributes:
        origin_ratio: Bytes that left the origin, in times the dataset; the node's answers included.
        complete_s: From the start until the last member had all.
        time_ratio: That, in times what sending the data out once takes; None without a cap.
        from_origins, from_peers: Slices, over all members. `most_of_one`: what one member got from the origin.
        whole: Members whose copy verified.
    """

    members: int
    dataset_bytes: int
    origin_ratio: float
    complete_s: float
    time_ratio: float | None
    from_origins: int
    from_peers: int
    max_from_origin: int
    failed: int
    num_verified: int


class FreeForAll(Swarm):
    """No steering, for comparison: any slice that the asker lacks, from anybody who has it."""

    chance = random.Random(0)

    def assign(self, asker: str, missing: NDArray[np.int64], num: int, now: float) -> list[tuple[int, Provider]]:
        """See Swarm."""
        assignments = []
        for index in self.chance.sample(missing.tolist(), min(num, len(missing))):
            others = [member for member in self._providers.values() if member.peer_id != asker and member.address]
            have, rows = self._members.holders_of(index), self._members.rows
            providers = [member for member in others if member.is_origin or have[rows[member.peer_id]]]
            assignments += [(index, self.chance.choice(providers))] if providers else []
        return assignments


def make_dataset(folder: Path, num_slices: int, slice_bytes: int) -> None:
    """A dataset of random tokens."""
    data.make_dataset(folder, NAME, num_slices, slice_bytes // 2)


def run_round(
    folder: Path,
    *,
    members: int,
    num_slices: int,
    slice_bytes: int,
    cap: float | None = None,
    steered: bool = True,
    kill: bool = False,
    timeout_s: float = 300.0,
    origin: str = "",
) -> Round:
    """One swarm in `folder`, which must be empty.

    Args:
        cap: Of the origin's upload, bytes a second.
        kill: Send SIGKILL to the data node when every slice has left it.
        origin: A URL of the dataset, which the node stands for; "" serves it from `folder / "data"`, made if absent.
    """
    if not origin:
        make_dataset(folder / "data", num_slices, slice_bytes)
    create_network(folder / "network", "bench", bootstrap=[])
    for name in ["origin", *(f"member{i}" for i in range(members))]:
        join(folder / "network", folder / name, name)
    settings = {"folder": str(folder), "members": members, "cap": cap, "steered": steered, "origin": origin}
    nest = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.swarm", "--nest", json.dumps(settings)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert nest.stdin is not None and nest.stdout is not None
    try:
        return _watch(nest, folder, kill, cap, time.monotonic() + timeout_s)
    finally:
        nest.stdin.close()
        nest.wait(30.0)
        nest.stdout.close()


def _watch(nest: subprocess.Popen[str], folder: Path, kill: bool, cap: float | None, deadline: float) -> Round:
    assert nest.stdin is not None and nest.stdout is not None
    up = json.loads(nest.stdout.readline() or "null")
    if up is None:
        raise RuntimeError("swarm: expected a data node, got none; the error is above")
    nest.stdin.write("go\n")
    nest.stdin.flush()
    status: dict[str, Any] = {}
    with Client(Identity.load(folder / "origin")) as client:
        while kill and time.monotonic() < deadline:
            status = client.request_json(up["address"], "GET", "/v1/status")[0]
            if next(iter(status["swarms"].values()))["least_copies"] > 0:
                os.kill(up["pid"], signal.SIGKILL)
                break
            time.sleep(0.02)
        reports = [json.loads(nest.stdout.readline() or "null") for _ in range(up["members"])]
        if None in reports:
            raise RuntimeError("swarm: expected a report of each member; the first that fell says why above")
        if not kill:
            status = client.request_json(up["address"], "GET", "/v1/status")[0]
    num_bytes = up["bytes"]
    complete_s = max(report["complete_s"] for report in reports)
    origins = [report["swarm"]["from_origins"] for report in reports]
    return Round(
        members=len(reports), dataset_bytes=num_bytes, origin_ratio=round(status["bytes_sent"] / num_bytes, 4),
        complete_s=round(complete_s, 3), time_ratio=round(complete_s * cap / num_bytes, 3) if cap else None,
        from_origins=sum(origins), from_peers=sum(report["swarm"]["from_peers"] for report in reports),
        max_from_origin=max(origins), failed=sum(report["swarm"]["failed"] for report in reports),
        num_verified=sum(report["complete"] and report["verified"] for report in reports),
    )  # fmt: skip


def _nest(settings: dict[str, Any]) -> None:
    """Forks the node and the members, before there is any thread: one start of the interpreter for all."""
    folder = Path(settings["folder"])
    reader, writer = os.pipe()
    node_pid = os.fork()
    if node_pid == 0:
        try:
            _be_node(folder, settings, writer)
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    up = json.loads(os.read(reader, 4096))
    waiting, go = os.pipe()
    # Who has everything while nobody else has asked yet may leave, and takes its copies along.
    all_joined = multiprocessing.get_context("fork").Barrier(settings["members"])
    pids = []
    for i in range(settings["members"]):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.close(go)
            try:
                _be_member(folder, i, up["address"], waiting, lambda: all_joined.wait(60.0))
            finally:
                traceback.print_exc()
                os._exit(1)  # never on into the nest's own work
    print(json.dumps({**up, "pid": node_pid, "members": settings["members"]}), flush=True)
    sys.stdin.readline()
    os.close(go)
    fallen = [status for status in (os.waitpid(pid, 0)[1] for pid in pids) if status]
    print("null\n" * len(fallen), end="", flush=True)
    sys.stdin.read()  # until whoever started this has asked the node
    os.kill(node_pid, signal.SIGKILL)


def _be_node(folder: Path, settings: dict[str, Any], writer: int) -> None:
    limits = ServerLimits(upload_bytes_per_s=settings["cap"]) if settings["cap"] else None
    dataset = open_remote(settings["origin"]) if settings["origin"] else open_dataset(folder / "data")
    node = DataNode(Identity.load(folder / "origin"), [dataset], HOST, 0, None, limits=limits)
    node.start()
    if not settings["steered"]:
        node.tracker._tracked[dataset.id].swarm.__class__ = FreeForAll
    os.write(writer, json.dumps({"address": node.address, "bytes": int(dataset.table.bytes.sum())}).encode())
    signal.pause()


class FixedDiscovery:
    """A Discovery of one address."""

    def __init__(self, address: str) -> None:
        self._address = parse_address(address)

    def announce(self, key: bytes, port: int) -> None:
        """See Discovery."""

    def find(self, key: bytes, timeout_s: float) -> list[tuple[str, int]]:
        """See Discovery."""
        return [self._address]

    def close(self) -> None:
        """See Discovery."""


def _be_member(folder: Path, number: int, address: str, waiting: int, wait_for_all: Callable[[], object]) -> None:
    out = folder / f"out{number}"
    dataset = open_remote(
        f"forebay://bench/{NAME}", identity=folder / f"member{number}",
        discovery=FixedDiscovery(address), from_urls="any",
    )  # fmt: skip
    os.read(waiting, 1)
    began, received, complete_s = time.monotonic(), 0, 0.0

    def advance(num_bytes: int) -> None:
        nonlocal received, complete_s
        if not received:
            wait_for_all()
        received, complete_s = received + num_bytes, time.monotonic() - began

    report, figures = mirror_by_swarm(dataset, out, share=True, on_progress=advance, linger_s=30.0)
    verified = open_dataset(out).verify(workers=1).ok
    message = {**asdict(report), "complete_s": complete_s, "verified": verified, "swarm": figures}
    os.write(1, (json.dumps(message) + "\n").encode())
    os._exit(0)


def main() -> int:
    """All rounds, one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nest", help=argparse.SUPPRESS)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--slices", type=int, default=128)
    parser.add_argument("--slice-bytes", type=int, default=1 << 20)
    parser.add_argument("--cap", type=float, default=8e6, help="of the origin's upload, bytes a second")
    args = parser.parse_args()
    if args.nest:
        _nest(json.loads(args.nest))
        return 0
    rounds = {
        "steered": {},
        "steered, capped": {"cap": args.cap},
        "free for all, capped": {"cap": args.cap, "steered": False},
        "killed when every slice was out, capped": {"cap": args.cap, "kill": True},
    }  # fmt: skip
    for name, settings in rounds.items():
        with tempfile.TemporaryDirectory() as folder:
            result = run_round(
                Path(folder), members=args.members, num_slices=args.slices, slice_bytes=args.slice_bytes, **settings
            )
        print(f"{name:42} {json.dumps(asdict(result))}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
