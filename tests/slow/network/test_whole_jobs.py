"""A job to its end by a worker that names none: a slice set aside comes back, receipts are over what was read."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.calibration import scaled

pytest.importorskip("libtorrent")

from forebay.cli import main
from forebay.data_node import DataNode
from forebay.ledger.chain import read_entries
from forebay.ledger.verify import verify_ledger
from forebay.network.client import Client
from forebay.network.pki.identity import Identity, revoke, verify
from forebay.observe.ledger_queries import replay
from forebay.scheduler.journal import LEDGER_NAME
from forebay.scheduler.server import SchedulerService
from slow.network.test_schedule import SEQ_LEN, Hand
from support.local_discovery import LocalDiscovery
from support.nodes import HOST, NAME, Bootstrap, make_dataset, make_network


@pytest.mark.usefixtures("changes_at_once")
def test_a_slice_set_aside_and_a_restart_with_no_data_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        bootstrap = Bootstrap(1)
        stack.callback(bootstrap.close)
        homes = make_network(tmp_path, ["data", "scheduler", "one", "two", "three", "four", "worker"], bootstrap.at)
        discovery = LocalDiscovery()
        first = make_dataset(tmp_path / "first", 4, 40)
        node = DataNode(Identity.load(homes["data"]), [first], HOST, 0, discovery, ttl_s=30)
        node.start()
        stack.callback(node.stop)
        identity = Identity.load(homes["scheduler"])

        def start() -> SchedulerService:
            service = SchedulerService(
                identity, NAME, discovery, Client(identity), tmp_path / "state", seq_len=SEQ_LEN, max_failures=2
            )
            stack.callback(service.stop)
            service.start()
            return service

        service = start()
        steer = ["--scheduler", service.address, "--identity", str(homes["scheduler"])]
        liars, hands = ([Hand(homes[name], stack) for name in two] for two in (("three", "four"), ("one", "two")))
        # The scheduler reads it itself: what two workers say of a good slice sets nothing aside.
        job = service._open_journal().core
        fail(service.address, liars, node.address)
        until(lambda: not job.failures)
        assert not service.left_out() and not job.reasons
        slices = tmp_path / "first" / "slices"
        slices.rename(slices.with_name("away"))
        fail(service.address, hands, node.address)
        until(lambda: bool(job.reasons))
        slices.with_name("away").rename(slices)
        assert main(["status", service.address, "--identity", str(homes["scheduler"])]) == 0
        assert "is set aside: torn" in capsys.readouterr().out
        assert main(["job", "readmit", *steer]) == 0
        command = [sys.executable, "-m", "forebay", "worker", "--scheduler", service.address, "--identity"]
        command += [str(homes["worker"]), "--cache-dir", str(tmp_path / "cache"), "--batch-size", "2"]
        command += ["--listen", ":0", "--json"]
        # Known to the scheduler alone; the worker learns it while it works.
        gone = Identity.load(homes["one"]).peer_id
        revoke(tmp_path / "network", gone, homes["scheduler"])
        assert Identity.load(homes["worker"]).revocations.reason(gone) is None
        done = subprocess.run(command, check=True, capture_output=True)
        report = json.loads(done.stdout.splitlines()[-1])["report"]
        assert report["done"] and report["samples"] == 15
        assert Identity.load(homes["worker"]).revocations.reason(gone) is not None
        service.stop()
        # Not one data node: what the job is about is in the state directory.
        node.stop()
        began = time.monotonic()
        assert start().is_done() and time.monotonic() - began < scaled(2.0)
    path = tmp_path / "state" / LEDGER_NAME
    assert verify_ledger(path, verify=verify, replay=replay).ok
    entries = list(read_entries(path))
    uses = [entry.body for entry in entries if entry.kind == "uses"]
    assert uses and all(len(row) == 7 for body in uses for row in body["uses"])
    assert len({body["session"] for body in uses}) == 1
    kinds = [entry.kind for entry in entries]
    assert kinds.count("set_aside") == kinds.count("readmitted") == 1


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + scaled(30.0)
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.01)


def fail(address: str, hands: list[Hand], data_node: str) -> None:
    """Two workers cannot have the same slice, and say so."""
    slices = set()
    for hand in hands:
        (lease,) = hand.say(address, job=NAME, session="5e", want=1)["leases"]
        slices.add(lease["slice"])
        assert [item["address"] for item in lease["providers"]] == [data_node]
        hand.say(address, job=NAME, session="5e", failed=[{"lease_id": lease["lease_id"], "reason": "torn"}])
    assert len(slices) == 1
