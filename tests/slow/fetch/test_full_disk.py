"""State on a disk that fills up and is freed again: an error that names it, then everything goes on.

The coordinator's limits of time are real: if the machine stands still for longer than `stale_s`, its members are
lost too early and a test may fail.
"""

import contextlib
import errno
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.coordinator.messages import Rules
from forebay.coordinator.server import Coordinator
from forebay.data_node import DataNode
from forebay.errors import StateError
from forebay.network.client import Client, RemoteError
from forebay.scheduler.journal import Journal, lock_state
from forebay.scheduler.server import SchedulerService
from support.feeding import small_disk
from support.local_discovery import LocalDiscovery
from support.nodes import NAME, make_dataset
from support.waiting import until


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 512 << 10) as path:
        yield path


def fill(disk: Path) -> Path:
    """A file that takes all that is left."""
    with (disk / "fill").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)
    return disk / "fill"


def post(address: str, path: str, **body: Any) -> tuple[int, dict]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_coordinator_goes_on_once_there_is_space(disk):
    state_dir = disk / "state"
    with Coordinator(
        state_dir=state_dir, rules=Rules(min_workers=1, lost_s=0.3, heartbeat_s=0.6, stale_s=1.5)
    ) as coordinator:
        address = coordinator.address
        assert post(address, "/v1/members/join", worker_id="a", session="a" * 16, wait_s=1)[0] == 200
        filler = fill(disk)
        answers = [
            post(address, "/v1/members/join", worker_id=f"w{i}" + "x" * 150, session=f"{i:016d}", wait_s=0)
            for i in range(12)
        ]
        status, body = answers[-1]
        assert status == 503 and str(state_dir) in str(body) and "full" in str(body)
        filler.unlink()
        until(lambda: not coordinator.status()["members"])
        assert post(address, "/v1/members/join", worker_id="b", session="b" * 16, wait_s=5)[0] == 200
        generation = coordinator.status()["generation"]
    with Coordinator(state_dir=state_dir, rules=Rules(min_workers=1)) as coordinator:
        assert coordinator.status()["generation"] == generation


def test_no_standby_takes_the_state_while_the_disk_is_full(make_identity, tmp_path, monkeypatch):
    """It could not write either, and its end would leave no standby."""
    table, state, failed, real = LocalDiscovery(), tmp_path / "state", [], Journal._write
    full = threading.Event()

    def write(self, batch):
        if full.is_set():
            failed.append(1)
            time.sleep(0.02)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, batch)

    monkeypatch.setattr(Journal, "_write", write)
    identity = make_identity("scheduler")
    with (
        DataNode(make_identity("node"), [make_dataset(tmp_path / "data", 3, 100)], "127.0.0.1", 0, table),
        Client(identity) as client,
        Client(make_identity("worker")) as worker,
    ):
        service = SchedulerService(identity, NAME, table, client, state, seq_len=8, lease_s=1.0)
        service.start()
        full.set()
        with pytest.raises(RemoteError, match="No space left"):
            worker.request_json(service.address, "POST", "/v2/exchange", {"want": 1})
        while len(failed) < 4:
            with pytest.raises(StateError, match=f"process {os.getpid()} on"):
                lock_state(state).release()
        full.clear()

        def is_leased():
            with contextlib.suppress(RemoteError):
                return bool(worker.request_json(service.address, "POST", "/v2/exchange", {"want": 1})[0]["leases"])
            return False

        until(is_leased)
        service.stop()
        lock_state(state).release()
