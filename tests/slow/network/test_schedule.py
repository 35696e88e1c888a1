"""The scheduler as processes: a standby takes over after kill -9, jobs are steered."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import pytest

from support.calibration import scaled

pytest.importorskip("libtorrent")

from forebay.cli import main
from forebay.data_node import DataNode
from forebay.errors import StateError
from forebay.ledger.chain import Used, receipt_message
from forebay.ledger.verify import verify_ledger
from forebay.network.client import Client, RemoteError
from forebay.network.dht import LibtorrentDht
from forebay.network.peer import Scope
from forebay.network.pki.identity import Identity, join, verify
from forebay.scheduler.server import SchedulerService
from support.local_discovery import LocalDiscovery
from support.nodes import HOST, NAME, Bootstrap, make_dataset, make_network
from support.proofs import proof_by_hand

SEQ_LEN = 8


class Process:
    """`forebay scheduler …`, and the lines of JSON that it printed."""

    def __init__(self, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "forebay", "scheduler", *arguments, "--json"], stdout=subprocess.PIPE
        )
        self.lines: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        assert self.popen.stdout is not None
        threading.Thread(target=self._read, args=(self.popen.stdout,), daemon=True).start()

    def _read(self, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                with self._changed:
                    self.lines.append(json.loads(line))
                    self._changed.notify_all()

    def wait_for(self, key: str) -> dict[str, Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: any(key in line for line in self.lines), scaled(40)), self.lines
            return next(line for line in self.lines if key in line)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Hand:
    """A worker's side of the door, as plain JSON."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self.identity = Identity.load(home)
        self.client = Client(self.identity)
        stack.callback(self.client.close)

    def say(self, address: str, leases: list[dict[str, Any]] | None = None, **body: Any) -> dict[str, Any]:
        """One exchange; acknowledges `leases` to their ends."""
        if leases:
            uses = [Used(x["lease_id"], x["epoch"], x["slice"], x["start"], x["stop"], 1) for x in leases]
            job_id = leases[0]["job_id"]
            rows = [{**vars(used), "proof": proof_by_hand(self.client, lease)} for used, lease in zip(uses, leases)]
            signature = self.identity.sign(receipt_message(job_id, uses)).hex()
            body |= {"job_id": job_id, "uses": rows, "signature": signature}
        answer, _ = self.client.request_json(address, "POST", "/v2/exchange", body, timeout_s=30)
        return dict(answer)


@pytest.fixture
def homes(tmp_path: Path, stack: ExitStack) -> dict[str, Path]:
    """Members, of which the data node is up."""
    bootstrap = Bootstrap(2)
    stack.callback(bootstrap.close)
    homes = make_network(tmp_path, ["data", "scheduler", "worker"], bootstrap.at)
    dht = LibtorrentDht(HOST, 0, bootstrap.at)
    stack.callback(dht.close)
    node = DataNode(Identity.load(homes["data"]), [make_dataset(tmp_path / "d", 6, 40)], HOST, 0, dht, ttl_s=30)
    node.start()
    stack.callback(node.stop)
    return homes


def test_a_scheduler_that_stood_still_takes_no_lease_back_for_it(
    tmp_path: Path, stack: ExitStack, homes: dict[str, Path]
) -> None:
    scheduler = Process(
        NAME, "--identity", str(homes["scheduler"]), "--state", str(tmp_path / "state"), "--seq-len", str(SEQ_LEN),
        "--lease-timeout", "5",
    )  # fmt: skip
    stack.callback(scheduler.end)
    address = scheduler.wait_for("ready")["address"]
    worker = Hand(homes["worker"], stack)
    leases = worker.say(address, want=2)["leases"]
    ids = [lease["lease_id"] for lease in leases]
    scheduler.popen.send_signal(signal.SIGSTOP)
    time.sleep(7.0)
    scheduler.popen.send_signal(signal.SIGCONT)
    time.sleep(0.5)  # It looks at the leases before the next message.
    assert list(worker.say(address, known_leases=ids)["active"]) == ids


def test_a_standby_goes_on_where_a_killed_scheduler_was(
    tmp_path: Path, stack: ExitStack, homes: dict[str, Path]
) -> None:
    arguments = [NAME, "--identity", str(homes["scheduler"]), "--state", str(tmp_path / "state")]
    arguments += ["--seq-len", str(SEQ_LEN), "--lease-timeout", "30", "--standby"]
    first = Process(*arguments)
    stack.callback(first.end)
    address = first.wait_for("ready")["address"]
    second = Process(*arguments)
    stack.callback(second.end)
    second.wait_for("standby")
    worker = Hand(homes["worker"], stack)
    started, waiting = worker.say(address, want=2)["leases"]
    worker.say(address, [started], known_leases=[started["lease_id"], waiting["lease_id"]])
    first.popen.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    address = second.wait_for("ready")["address"]
    # The lease in hand lives on; the receipt whose answer might have been lost is answered as recorded.
    answer = worker.say(address, [started], known_leases=[waiting["lease_id"]])
    assert time.monotonic() - killed < scaled(2.0)
    assert answer["uses"][0]["offset"] == started["stop"] and list(answer["active"]) == [waiting["lease_id"]]
    leases = [waiting]
    while not answer["done"]:
        answer = worker.say(address, leases, want=2, known_leases=[x["lease_id"] for x in leases])
        leases = answer["leases"]
    second.popen.terminate()
    assert second.popen.wait() == 0
    assert verify_ledger(tmp_path / "state" / "ledger.jsonl", verify=verify).ok


def test_a_job_is_steered_by_administrators_and_used_once(
    tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    homes = make_network(tmp_path, ["data", "scheduler", "admin"], [])
    join(tmp_path / "network", tmp_path / "worker", "worker", scope=Scope(frozenset({"worker"})))
    discovery = LocalDiscovery()
    item = make_dataset(tmp_path / "one", 6, 40)
    node = DataNode(Identity.load(homes["data"]), [item], HOST, 0, discovery, ttl_s=30)
    node.start()
    stack.callback(node.stop)
    identity = Identity.load(homes["scheduler"])

    def scheduler() -> SchedulerService:
        return SchedulerService(identity, NAME, discovery, Client(identity), tmp_path / "state", seq_len=SEQ_LEN)

    service = scheduler()
    service.start()
    stack.callback(service.stop)
    with pytest.raises(StateError, match="another process"):
        scheduler().start()
    worker = Hand(tmp_path / "worker", stack)
    with pytest.raises(RemoteError) as refused:
        worker.client.request_json(service.address, "POST", "/v1/job/pause", {})
    assert refused.value.status == 403
    steer = ["--scheduler", service.address, "--identity", str(homes["admin"])]
    assert main(["job", "pause", *steer]) == 0
    assert "paused" in capsys.readouterr().out
    assert worker.say(service.address, job=NAME, want=1, known_leases=[])["paused"]
    assert main(["job", "resume", *steer]) == 0
    answer = worker.say(service.address, want=1, known_leases=[])
    samples = set()
    while not answer["done"]:
        leases = answer["leases"]
        for lease in leases:
            new = {(lease["job"], lease["sample_base"] + i) for i in range(lease["start"], lease["stop"])}
            assert not samples & new
            samples |= new
        answer = worker.say(service.address, leases, want=1, known_leases=[lease["lease_id"] for lease in leases])
    assert samples == {(NAME, i) for i in range(25)}
    assert main(["status", service.address, "--identity", str(homes["admin"])]) == 0
    out = capsys.readouterr().out
    assert f"\n{NAME}  done  " in out and "25 of 25 samples · epoch 1 of 1" in out and "\nworker  " in out
    service.stop()
    report = verify_ledger(service.ledger_path, verify=verify)
    assert report.ok, report
