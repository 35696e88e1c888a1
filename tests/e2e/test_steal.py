"""Idle workers take from the slowest: a job of real processes ends when all of them together could end it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.calibration import scaled, stood_still_s

pytest.importorskip("libtorrent")

from forebay.data_node import DataNode
from forebay.dataset.reader import open_dataset
from forebay.ledger.verify import verify_ledger
from forebay.network.client import Client
from forebay.network.dht import LibtorrentDht
from forebay.network.pki.identity import Identity, verify
from forebay.scheduler.server import SchedulerService
from support.nodes import HOST, NAME, Bootstrap, Node, make_dataset, make_network

NUM_SLICES = 12
TOKENS = 2000
SEQ_LEN = 8
SAMPLES = (NUM_SLICES - 1) * (TOKENS // SEQ_LEN)
PAUSES_S = [0.2, 0.02, 0.02, 0.02]


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + scaled(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.02)


def test_a_worker_ten_times_slower_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Without stealing the slow one alone would need 25 s for one slice, and the job takes 9 s."""
    names = [f"worker-{i}" for i in range(len(PAUSES_S))]
    with ExitStack() as stack:
        bootstrap = Bootstrap(3)
        stack.callback(bootstrap.close)
        homes = make_network(tmp_path, ["data-1", "scheduler", *names], bootstrap.at)
        make_dataset(tmp_path / "dataset", NUM_SLICES, TOKENS)
        dht = LibtorrentDht(HOST, 0, bootstrap.at)
        stack.callback(dht.close)
        dataset = open_dataset(tmp_path / "dataset")
        node = stack.enter_context(DataNode(Identity.load(homes["data-1"]), [dataset], HOST, 0, dht, ttl_s=30.0))
        identity = Identity.load(homes["scheduler"])
        client = stack.enter_context(Client(identity))
        service = SchedulerService(
            identity,
            NAME,
            dht,
            client,
            tmp_path / "state",
            seq_len=SEQ_LEN,
            lease_s=60.0,
            rediscover_s=1.0,
            steal_s=0.2,
        )
        service.start()
        stack.callback(service.stop)
        assert node.address in {provider["address"] for provider in service.status()["providers"]}
        # Paused until all are there, so that only the work is measured.
        client.request_json(service.address, "POST", "/v1/job/pause", {})
        workers = [
            Node("work", tmp_path / f"{name}.log", node=str(homes[name]), cache=str(tmp_path / f"cache-{name}"),
                 cache_bytes=1 << 20, pause_s=pause_s, receipt_s=0.1)
            for name, pause_s in zip(names, PAUSES_S)
        ]  # fmt: skip
        stack.callback(lambda: [worker.kill() for worker in workers])
        until(lambda: len(service.status()["workers"]) == len(names))
        assert service.status()["samples_used"] == 0
        client.request_json(service.address, "POST", "/v1/job/resume", {})
        began = time.monotonic()
        until(service.is_done)
        seconds = time.monotonic() - began - stood_still_s(began)
        for name, worker in zip(names, workers):
            assert worker.wait(30) == 0, (tmp_path / f"{name}.log").read_text()
        reports = [worker.lines[-1] for worker in workers]
    # What each did a second while it had something to do, on this machine, now; together that is the ideal.
    speeds = [r["samples"] / r["busy_s"] for r in reports]
    ideal_s = SAMPLES / sum(speeds)
    print(f"{seconds:.2f} s, ideal {ideal_s:.2f} s; samples {[report['samples'] for report in reports]}, {speeds}")
    proof = verify_ledger(tmp_path / "state" / "ledger.jsonl", verify=verify)
    assert proof.ok and proof.epochs[0]["samples"] == SAMPLES
    assert sum(report["samples"] for report in reports) == SAMPLES
    assert all(report["wasted_samples"] == 0 and report["leases_lost"] == 0 for report in reports)
    assert reports[0]["samples"] < SAMPLES / 8
    # The wait after the pause, of up to a second, is not the stealing's.
    assert seconds < 1.3 * ideal_s + 1.0
