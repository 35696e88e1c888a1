"""kill -9 of workers, data nodes, the scheduler and DHT nodes at random moments: every sample is still used once.

One job of real processes; each round kills one of them, whoever it is, and starts it again, or another in its place.
FOREBAY_KILL_ROUNDS (2) rounds; FOREBAY_KILL_SEED (0). By hand, 100 rounds and the same job without a kill:
`FOREBAY_KILL_ROUNDS=100 python -m pytest -q -n0 -s tests/slow/network/test_kill.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libtorrent")

from forebay.ledger.verify import verify_ledger
from forebay.network.pki.identity import verify
from support.feeding import has_id
from support.nodes import Bootstrap, Node, make_dataset, make_network

NUM_SLICES = 12
TOKENS = 330
SEQ_LEN = 8
SAMPLES = (NUM_SLICES - 1) * (TOKENS // SEQ_LEN)
LEASE_S = 1.0
PAUSE_S = 0.008
ROUNDS = int(os.environ.get("FOREBAY_KILL_ROUNDS", "2"))
SEED = int(os.environ.get("FOREBAY_KILL_SEED", "0"))
WORKERS = 3
SPARES = 3
MEMBERS = ["data-1", "data-2", "scheduler", *(f"worker-{i}" for i in range(WORKERS + SPARES))]


class Cluster:
    """Two data nodes, a scheduler, three workers and two DHT nodes, each a process, on one job."""

    def __init__(self, directory: Path, stack: ExitStack, epochs: int, chance: random.Random) -> None:
        self.directory = directory
        self.chance = chance
        self.nodes: dict[str, Node] = {}
        self.kills: Counter[str] = Counter()
        bootstrap = Bootstrap(3)
        stack.callback(bootstrap.close)
        stack.callback(lambda: [node.kill() for node in self.nodes.values()])
        others = [port for _, port in bootstrap.at]
        for name in ("dht-1", "dht-2"):
            self.nodes[name] = self.start("dht", name, port=0, others=others)
        self.homes = make_network(directory, MEMBERS, bootstrap.at)
        make_dataset(directory / "dataset", NUM_SLICES, TOKENS)
        for name in ("data-1", "data-2"):
            self.nodes[name] = self.start("serve", name, dataset=str(directory / "dataset"), ttl_s=6.0)
        self.nodes["scheduler"] = self.start(
            "schedule", "scheduler", state=str(directory / "state"), seq_len=SEQ_LEN, epochs=epochs, lease_s=LEASE_S,
            rediscover_s=0.5, exit_when_done=False,
        )  # fmt: skip
        self.others = itertools.cycle(f"worker-{i}" for i in range(WORKERS + SPARES))
        for _ in range(WORKERS):
            self.hire()

    def start(self, role: str, name: str, **settings: Any) -> Node:
        if role != "dht":
            settings["node"] = str(self.homes[name])
        return Node(role, self.directory / f"{name}.log", **settings)

    def hire(self) -> None:
        """A worker that is not there now."""
        name = next(name for name in self.others if name not in self.nodes)
        self.nodes[name] = self.start(
            "work", name, cache=str(self.directory / f"cache-{name}"), cache_bytes=40_000, pause_s=PAUSE_S,
            receipt_s=0.1,
        )  # fmt: skip

    def kill_one(self) -> None:
        """Somebody dies at once; after a moment it is back, or a worker or data node like it."""
        name = self.chance.choice(list(self.nodes))
        node = self.nodes[name]
        if node.popen.poll() is not None:
            return  # its job is done
        node.kill()
        self.kills[node.role] += 1
        time.sleep(self.chance.uniform(0.0, 0.4))
        if node.role == "work" and self.chance.random() < 0.5:
            del self.nodes[name]
            self.hire()
        elif node.role == "dht":
            port = node.lines[0]["port"] if node.lines else node.settings["port"]
            self.nodes[name] = Node("dht", node.log, **(node.settings | {"port": port}))
        else:
            self.nodes[name] = node.again()

    def wait(self, timeout_s: float) -> None:
        """Until the workers have ended, and then the scheduler."""
        for name, node in list(self.nodes.items()):
            if node.role == "work":
                assert node.wait() == 0, self.log(name)
        self.nodes["scheduler"].terminate()
        assert self.nodes["scheduler"].wait() == 0, self.log("scheduler")

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()[-4000:]


def run_job(directory: Path, rounds: int, epochs: int, seed: int) -> tuple[float, Counter[str]]:
    """Seconds from the first worker up to the end, and who was killed how often; all is proved."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        cluster = Cluster(directory, stack, epochs, chance)
        assert cluster.nodes["scheduler"].up.wait(), cluster.log("scheduler")
        assert cluster.nodes["worker-0"].up.wait(), cluster.log("worker-0")
        began = time.monotonic()
        for _ in range(rounds):
            time.sleep(chance.uniform(0.1, 1.0))
            cluster.kill_one()
        cluster.wait(60 + 2 * rounds + 2 * epochs)
        seconds = time.monotonic() - began
    report = verify_ledger(directory / "state" / "ledger.jsonl", verify=verify)
    assert report.ok, report
    reported = [{key: epoch[key] for key in ("epoch", "samples", "missing", "repeated")} for epoch in report.epochs]
    assert reported == [{"epoch": e, "samples": SAMPLES, "missing": 0, "repeated": 0} for e in range(epochs)]
    for cache in directory.glob("cache-*"):
        for path in cache.iterdir():
            if re.fullmatch("[0-9a-f]{64}", path.name):
                assert has_id(path, path.name)
    return seconds, cluster.kills


def test_kill_9_anything_at_any_moment(tmp_path: Path) -> None:
    # Each round is given a second's work of three workers.
    epochs = 2 + int(ROUNDS / (SAMPLES / 2 * PAUSE_S / WORKERS))
    (tmp_path / "kills").mkdir()
    seconds, kills = run_job(tmp_path / "kills", ROUNDS, epochs, SEED)
    if ROUNDS < 10:
        return
    (tmp_path / "none").mkdir()
    quiet_s, _ = run_job(tmp_path / "none", 0, epochs, SEED)
    lost_s = (seconds - quiet_s) / sum(kills.values())
    print(json.dumps({"kills": dict(kills), "seconds": seconds, "without": quiet_s, "lost_s_per_kill": lost_s}))
    assert lost_s <= LEASE_S
