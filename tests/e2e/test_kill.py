"""kill -9 of a worker, the scheduler or a data node at a random moment: every sample is still used once."""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libtorrent")

from nodes import Bootstrap, Node, make_dataset, make_network

from millrace.ledger import verify_ledger
from millrace.network.identity import verify

NUM_SLICES = 12
TOKENS = 330
SEQ_LEN = 8
EPOCHS = 2
# One for each kind of victim; MILLRACE_KILL_SEEDS=20 (or more) goes further.
SEEDS = int(os.environ.get("MILLRACE_KILL_SEEDS", "3"))


def start(directory: Path, homes: dict[str, Path], stack: ExitStack) -> dict[str, Node]:
    """Two data nodes, a scheduler and two workers, each a process."""
    nodes: dict[str, Node] = {}
    for name, home in homes.items():
        settings: dict[str, Any] = {"node": str(home)}
        if name.startswith("data"):
            role, settings = "serve", {**settings, "dataset": str(directory / "dataset"), "ttl_s": 6.0}
        elif name == "scheduler":
            role = "schedule"
            settings |= {"state": str(directory / "state"), "seq_len": SEQ_LEN, "epochs": EPOCHS}
            settings |= {"lease_s": 1.0, "rediscover_s": 0.5, "exit_when_done": False}
        else:
            role = "work"
            settings |= {"cache": str(directory / f"cache-{name}"), "cache_bytes": 5000, "pause_s": 0.008}
            settings |= {"receipt_s": 0.1}
        nodes[name] = Node(role, directory / f"{name}.log", **settings)
    return nodes


@pytest.mark.parametrize("seed", range(SEEDS))
def test_kill_9_anything_at_any_moment(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    victim = ["worker-1", "scheduler", "data-1"][seed % 3]
    members = ["data-1", "data-2", "scheduler", "worker-1", "worker-2"]
    with ExitStack() as stack:
        bootstrap = Bootstrap(4)
        stack.callback(bootstrap.close)
        homes = make_network(tmp_path, members, bootstrap.at)
        make_dataset(tmp_path / "dataset", NUM_SLICES, TOKENS)
        nodes = start(tmp_path, homes, stack)
        stack.callback(lambda: [node.kill() for node in nodes.values()])
        assert nodes["scheduler"].up.wait(40), (tmp_path / "scheduler.log").read_text()
        assert nodes["worker-1"].up.wait(20)
        time.sleep(chance.uniform(0.2, 1.6))
        nodes[victim].kill()
        time.sleep(chance.uniform(0.0, 0.4))
        nodes[victim] = nodes[victim].again()
        for name in ("worker-1", "worker-2"):
            assert nodes[name].wait(60) == 0, (tmp_path / f"{name}.log").read_text()
        nodes["scheduler"].terminate()
        assert nodes["scheduler"].wait(20) == 0, (tmp_path / "scheduler.log").read_text()
    report = verify_ledger(tmp_path / "state" / "ledger.jsonl", verify=verify)
    samples = (NUM_SLICES - 1) * (TOKENS // SEQ_LEN)
    assert report.ok, report
    assert report.epochs == [{"epoch": e, "samples": samples, "missing": 0, "repeated": 0} for e in range(EPOCHS)]
