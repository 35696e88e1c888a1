"""A whole job over hosts of their own: each node has an address, and the network between them fails in all its ways.

In every scenario the ledger proves that each sample was used once. Skipped, with the reason, where namespaces cannot
be made. FOREBAY_HOSTS=long makes the jobs larger and the outages longer; FOREBAY_HOSTS=all runs all scenarios at
their short size, not only those of the usual suite.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.calibration import scaled

pytest.importorskip("libtorrent")

from forebay.ledger.verify import verify_ledger
from forebay.network.pki.identity import verify
from support.forks import Process
from support.hosts import Host, Lab, lacking
from support.nodes import NAME, make_dataset, make_network

SIZE = os.environ.get("FOREBAY_HOSTS", "")
LONG = SIZE == "long"
MORE = pytest.mark.skipif(not SIZE, reason="FOREBAY_HOSTS=all (or long) runs it")
SEQ_LEN, TOKENS = 8, 330
NUM_SLICES = 48 if LONG else 9
LEASE_S = 1.0
OUTAGE_S = 20.0 if LONG else 2.5

SLOW = """
import sys, time
import forebay
for batch in forebay.Loader(network=forebay.NetworkOptions(receipt_s=0.1, patience_s=30.0)):
    time.sleep(float(sys.argv[1]))
"""

pytestmark = pytest.mark.skipif(bool(lacking("nft")), reason=lacking("nft") or "can")


@dataclass
class Job:
    """A running job: a DHT of three nodes, data nodes, a scheduler, workers."""

    lab: Lab
    directory: Path
    hosts: dict[str, Host] = field(default_factory=dict)
    nodes: dict[str, Process] = field(default_factory=dict)
    slice_bytes: int = 0

    def used(self) -> int:
        """How many lines the ledger has."""
        path = self.directory / "state" / "ledger.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_begun(self) -> None:
        until(lambda: self.used() > 6, 30.0, self)

    def assert_finishes(self, timeout_s: float = 60.0) -> dict[str, dict[str, Any]]:
        """Wait for the workers; each's report. The ledger must prove that every sample was used once."""
        reports = {}
        for name, process in self.nodes.items():
            if name.startswith("worker"):
                assert process.wait() == 0, f"{name}: {process.wait(0.0)} {process.errors()}"
                reports[name] = process.lines()[-1]["report"]
        self.nodes["scheduler"].kill(signal.SIGTERM)
        assert self.nodes["scheduler"].wait() == 0, self.nodes["scheduler"].errors()
        report = verify_ledger(self.directory / "state" / "ledger.jsonl", verify=verify)
        assert report.ok, report
        epoch = report.epochs[0]
        samples = (NUM_SLICES - 1) * (TOKENS // SEQ_LEN)
        assert (epoch["samples"], epoch["missing"], epoch["repeated"]) == (samples, 0, 0)
        return reports


def until(condition: Callable[[], bool], timeout_s: float, job: Job) -> None:
    deadline = time.monotonic() + scaled(timeout_s)
    while not condition():
        reported = {name: process.errors()[-400:] for name, process in job.nodes.items()}
        assert time.monotonic() < deadline, reported
        time.sleep(0.02)


@contextmanager
def running(
    directory: Path,
    *,
    num_data: int = 1,
    behind_nat: bool = False,
    pause_s: float = 0.008,
    tokens: int = TOKENS,
    before: Callable[[Job], None] = lambda job: None,
) -> Iterator[Job]:
    """A job that has begun; everything ends with the block."""
    data = [f"data-{i + 1}" for i in range(num_data)]
    workers = [f"worker-{i + 1}" for i in range(3)]
    with Lab(directory) as lab:
        job = Job(lab, directory)
        for name in ["dht", *data, "scheduler", *workers]:
            at_home = behind_nat and name == workers[-1]
            job.hosts[name] = lab.nat("home").host(name) if at_home else lab.host(name)
        entry = (job.hosts["dht"].address, 7400)
        homes = make_network(directory, [*data, "scheduler", *workers], [entry])
        make_dataset(directory / "dataset", NUM_SLICES, tokens)
        (directory / "slow.py").write_text(SLOW)
        job.slice_bytes = sum(path.stat().st_size for path in (directory / "dataset" / "slices").iterdir())
        before(job)

        def start(name: str, *words: object) -> None:
            verb, *rest = words
            common = ["--identity", homes[name], "--json"] if name in homes else ["--json"]
            job.nodes[name] = job.hosts[name].forebay(verb, *common, *rest)

        start("dht", "dht", "--listen", f"{entry[0]}:{entry[1]}", "--nodes", 3)
        job.nodes["dht"].ready()
        for name in data:
            start(name, "serve", directory / "dataset", "--ttl", 6)
        for name in data:
            job.nodes[name].ready()
        state = ["--state", directory / "state", "--seq-len", SEQ_LEN, "--lease-timeout", LEASE_S]
        start("scheduler", "scheduler", NAME, *state)
        job.nodes["scheduler"].ready()
        for name in workers:
            cache = ["--cache-dir", directory / f"cache-{name}", "--cache-bytes", 1 << 20]
            start(name, "worker", NAME, *cache, "--batch-size", 2, "--", sys.executable, directory / "slow.py", pause_s)
        job.wait_begun()
        yield job


@MORE
def test_all_on_hosts_of_their_own(tmp_path: Path) -> None:
    with running(tmp_path) as job:
        reported = job.nodes["scheduler"].ready()["address"]
        assert reported.startswith(job.hosts["scheduler"].address), "announced where others reach it"
        reports = job.assert_finishes()
        assert all(report["samples"] > 0 for report in reports.values())
        job.nodes["data-1"].kill(signal.SIGTERM)
        assert job.nodes["data-1"].wait() == 0
        sent = job.nodes["data-1"].lines()[-1]["bytes_sent"]
        assert sent < 2 * job.slice_bytes + 50_000  # the rest came from the other workers
        print(json.dumps({"cpu_s": job.lab.cpu_s(), "sent": sent, "whole": job.slice_bytes}))


def test_all_at_once(tmp_path: Path) -> None:
    """One worker behind NAT, one cut off beyond its lease, a data node gone for good, the scheduler away meanwhile."""
    with running(tmp_path, num_data=2, behind_nat=True, pause_s=0.025) as job:
        reported = job.nodes["scheduler"].ready()["address"]
        assert reported.startswith(job.hosts["scheduler"].address), "announced where others reach it"
        job.lab.vanish(job.hosts["worker-1"])
        job.lab.vanish(job.hosts["data-1"])
        time.sleep(2 * LEASE_S)
        job.lab.vanish(job.hosts["scheduler"])
        job.lab.return_(job.hosts["worker-1"])
        time.sleep(LEASE_S)
        job.lab.return_(job.hosts["scheduler"])
        reports = job.assert_finishes()
        assert reports["worker-2"]["samples"] > 0


@MORE
def test_a_worker_cut_off_for_longer_than_its_lease(tmp_path: Path) -> None:
    with running(tmp_path, pause_s=0.03) as job:
        cut = job.hosts["worker-1"]
        job.lab.vanish(cut)
        time.sleep(OUTAGE_S)
        job.lab.return_(cut)
        reports = job.assert_finishes()
        assert reports["worker-1"]["leases_lost"] + reports["worker-1"]["wasted_samples"] > 0, reports


@MORE
def test_a_scheduler_cut_off_from_all(tmp_path: Path) -> None:
    with running(tmp_path, pause_s=0.02) as job:
        job.lab.vanish(job.hosts["scheduler"])
        time.sleep(OUTAGE_S)
        job.lab.return_(job.hosts["scheduler"])
        job.assert_finishes()


@MORE
def test_a_data_node_that_is_there_no_more(tmp_path: Path) -> None:
    """Its packets are dropped: no reset says that it is gone."""
    with running(tmp_path, num_data=2) as job:
        job.lab.vanish(job.hosts["data-1"])
        gone_at = time.monotonic()
        job.assert_finishes()
        print(f"finished {time.monotonic() - gone_at:.1f} s after a data node had gone")


@MORE
def test_a_worker_behind_a_router_at_home(tmp_path: Path) -> None:
    """It takes and gives nothing: nobody waits for an address that leads nowhere."""
    with running(tmp_path, behind_nat=True, pause_s=0.02) as job:  # Long enough for it to take part.
        started = time.monotonic()
        reports = job.assert_finishes()
        assert reports["worker-3"]["samples"] > 0
        print(f"finished in {time.monotonic() - started:.1f} s")
        for name in ("worker-1", "worker-2"):
            assert "192.168." not in job.nodes[name].errors()


@MORE
@pytest.mark.skipif(bool(lacking("nft", "tun")), reason=lacking("nft", "tun") or "can")
def test_far_apart_and_lossy(tmp_path: Path) -> None:
    """50 ms of round trip and 2 % of loss everywhere."""

    def far(job: Job) -> None:
        hosts = list(job.hosts.values())
        job.lab.delay(hosts, 0.025)
        for host in hosts:
            job.lab.lose(host, 0.02)

    with running(tmp_path, before=far) as job:
        job.assert_finishes(120.0)


@MORE
@pytest.mark.skipif(bool(lacking("nft", "tc")), reason=lacking("nft", "tc") or "can")
def test_a_slow_origin_and_fast_peers(tmp_path: Path) -> None:
    with running(tmp_path, before=lambda job: job.hosts["data-1"].limit_upload(200_000)) as job:
        job.assert_finishes(120.0)
        job.nodes["data-1"].kill(signal.SIGTERM)
        assert job.nodes["data-1"].wait() == 0
        assert job.nodes["data-1"].lines()[-1]["bytes_sent"] < 2 * job.slice_bytes + 50_000
