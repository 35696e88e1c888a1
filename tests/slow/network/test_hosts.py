"""A whole job over hosts of their own: each node has an address, and the network between them fails in all its ways.

The ledger proves that each sample was used once. Skipped, with the reason, where namespaces cannot be made.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.forks import Process
from support.hosts import Host, Lab, lacking
from support.ledgers import certified
from support.nodes import NAME, PACED_READER, make_dataset, make_network
from support.waiting import until

SEQ_LEN, TOKENS, NUM_SLICES = 8, 330, 9
LEASE_S = 1.0


@dataclass
class Job:
    """A running job: a DHT of three nodes, data nodes, a scheduler, workers."""

    lab: Lab
    directory: Path
    hosts: dict[str, Host]
    nodes: dict[str, Process]

    def assert_finishes(self) -> dict[str, dict]:
        """Wait for the workers; return each's report."""
        workers = {name: process for name, process in self.nodes.items() if name.startswith("worker")}
        for name, process in workers.items():
            assert process.wait(600.0) == 0, f"{name}: {process.wait(0.0)} {process.errors()}"
        self.nodes["scheduler"].kill(signal.SIGTERM)
        assert self.nodes["scheduler"].wait() == 0, self.nodes["scheduler"].errors()
        report = certified(self.directory / "state" / "ledger.jsonl", self.directory / "network")
        samples = (NUM_SLICES - 1) * (TOKENS // SEQ_LEN)
        assert report.ok and report.epochs == [{"epoch": 0, "samples": samples, "missing": 0, "repeated": 0}], report
        return {name: process.lines()[-1]["report"] for name, process in workers.items()}


@contextmanager
def running(directory: Path) -> Iterator[Job]:
    """A job that has begun, whose last worker is behind NAT; everything ends with the block."""
    data, workers = ["data-1", "data-2"], ["worker-1", "worker-2", "worker-3"]
    with Lab(directory) as lab:
        job = Job(lab, directory, {}, {})
        for name in ["dht", *data, "scheduler", *workers]:
            job.hosts[name] = lab.host_behind_nat(name) if name == workers[-1] else lab.host(name)
        entry = (job.hosts["dht"].address, 7400)
        homes = make_network(directory, [*data, "scheduler", *workers], [entry])
        make_dataset(directory / "dataset", NUM_SLICES, TOKENS)

        def start(name, verb, *words):
            identity = ["--identity", homes[name]] if name in homes else []
            job.nodes[name] = job.hosts[name].forebay(verb, *identity, "--json", *words)

        start("dht", "dht", "--listen", f"{entry[0]}:{entry[1]}", "--nodes", 3)
        job.nodes["dht"].ready()
        for name in data:
            start(name, "serve", directory / "dataset", "--ttl", 6)
        for name in data:
            job.nodes[name].ready()
        ledger = directory / "state" / "ledger.jsonl"
        state = f"--state {ledger.parent} --seq-len {SEQ_LEN} --lease-timeout {LEASE_S}".split()
        start("scheduler", "scheduler", NAME, *state)
        announced = job.nodes["scheduler"].ready()["address"]
        assert announced.startswith(job.hosts["scheduler"].address), "announced where others reach it"
        for name in workers:
            cache = f"--cache-dir {directory}/cache-{name} --cache-bytes {1 << 20}".split()
            start(name, "worker", NAME, *cache, "--batch-size", 2, "--", *PACED_READER, 0.025)
        until(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") > 6)
        yield job


@pytest.mark.skipif(bool(lacking()), reason=lacking() or "can")
def test_all_at_once(tmp_path):
    """One worker behind NAT, one cut off beyond its lease, a data node gone for good, the scheduler away meanwhile."""
    with running(tmp_path) as job:
        job.lab.vanish(job.hosts["worker-1"])
        job.lab.vanish(job.hosts["data-1"])
        time.sleep(2 * LEASE_S)
        job.lab.vanish(job.hosts["scheduler"])
        job.lab.return_(job.hosts["worker-1"])
        time.sleep(LEASE_S)
        job.lab.return_(job.hosts["scheduler"])
        assert job.assert_finishes()["worker-2"]["samples"] > 0
        for name in ("worker-1", "worker-2"):  # Nobody waits for an address that leads nowhere.
            assert "192.168." not in job.nodes[name].errors()
