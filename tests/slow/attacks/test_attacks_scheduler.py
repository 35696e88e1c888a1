"""What a worker does to a scheduler: memory by few bytes, leases that it does not use, false reports."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.cli import main
from forebay.data_node import DataNode
from forebay.lease.messages import ExchangeRequest
from forebay.network.client import Client
from forebay.network.pki.identity import Identity
from forebay.scheduler import proofs, sessions
from forebay.scheduler import server as service
from forebay.scheduler.core import PendingCheck, SchedulerCore
from forebay.scheduler.leases import JobSpec
from forebay.scheduler.server import SchedulerService
from support.attackers import HOST, ask, issue, organisation
from support.exchanges import ExchangeClient
from support.local_discovery import LocalDiscovery
from support.nodes import NAME, make_dataset
from support.waiting import until

SLICES = 6


@pytest.fixture
def scheduler(tmp_path: Path, network_dir: Path) -> Iterator[SchedulerService]:
    table, data = LocalDiscovery(), make_dataset(tmp_path / "data", SLICES, 100)
    identity = issue(network_dir, "scheduler", "scheduler")
    with (
        DataNode(issue(network_dir, "node", "data"), [data], HOST, 0, table),
        Client(identity) as client,
        contextlib.closing(table),
    ):
        created = SchedulerService(identity, NAME, table, client, tmp_path / "state", seq_len=8, steal_s=0.2)
        created.start()
        yield created
        created.stop()


def exchange(scheduler: SchedulerService, member: Identity, message: Any) -> tuple[int, Any]:
    return ask(member, scheduler.address, "POST", "/v2/exchange", message)


def leased(scheduler: SchedulerService, member: Identity, want: int) -> list[dict]:
    return exchange(scheduler, member, {"want": want})[1]["leases"]


def core(scheduler: SchedulerService) -> SchedulerCore:
    return scheduler._open_journal().core


def test_the_role_is_asked_for_before_a_message_is_read(scheduler: SchedulerService, network_dir: Path) -> None:
    """Megabytes of JSON from a member that may not work."""
    status, message = exchange(scheduler, issue(network_dir, "data", "data"), "x" * 1_000_000)
    assert (status, message["error"]) == (403, "not_worker")


def test_slices_of_invented_datasets_are_not_kept(scheduler: SchedulerService, evil: Identity) -> None:
    """64 datasets that no job has, each with millions of slices."""
    assert exchange(scheduler, evil, {"cached": {f"{i:064x}": "0-999999999" for i in range(64)}})[0] == 200
    (session,) = core(scheduler).sessions.all.values()
    assert session.cached_bytes == 0
    status, message = exchange(scheduler, evil, {"cached": {core(scheduler).spec.dataset_id: "0-999999999"}})
    assert status == 409 and f"[0, {SLICES})" in message["message"]


def test_sessions_of_a_certificate_are_bounded(
    scheduler: SchedulerService, evil: Identity, honest: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_SESSIONS_PER_PEER", 4)
    statuses = [exchange(scheduler, evil, {"session": f"s{i}"})[0] for i in range(6)]
    assert statuses == [200] * 4 + [429] * 2
    assert exchange(scheduler, honest, {})[0] == 200


def test_what_an_organisation_says_it_has_is_bounded(
    scheduler: SchedulerService, network_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_CACHED_BYTES_PER_ORGANISATION", 2 * SLICES * 8)
    registered = core(scheduler).spec.dataset_id
    org, message = organisation(network_dir, "acme"), {"cached": {registered: f"0-{SLICES - 1}"}}
    for number in range(4):
        assert exchange(scheduler, issue(network_dir, f"m{number}", "worker", by=org), message)
    state = core(scheduler)
    assert sum(session.cached_bytes for session in state.sessions.all.values()) == 2 * SLICES * 8
    assert exchange(scheduler, issue(network_dir, "of-root", "worker"), message)[0] == 200
    assert sum(session.cached_bytes for session in state.sessions.all.values()) == 3 * SLICES * 8


def test_reports_against_peers_that_are_not_there_are_not_kept(scheduler: SchedulerService, evil: Identity) -> None:
    """Each would be a row of the journal, and memory for as long as the job lasts."""
    (lease, *_) = leased(scheduler, evil, 1)
    invalid = [{"peer_id": f"absent{i}", "sha256": lease["sha256"], "reason": "r" * 300} for i in range(64)]
    for _ in range(3):
        assert exchange(scheduler, evil, {"reports": invalid})[0] == 200
    assert core(scheduler).reports == {}
    node = lease["providers"][0]["peer_id"]
    assert exchange(scheduler, evil, {"reports": [{"peer_id": node, "sha256": lease["sha256"]}]})[0] == 200
    assert [key[0] for key in core(scheduler).reports] == [node]


def test_only_who_is_accused_can_be_pardoned(
    scheduler: SchedulerService, network_dir: Path, honest: Identity, capsys: pytest.CaptureFixture[str]
) -> None:
    boss = issue(network_dir, "boss", "admin")
    (lease, *_) = leased(scheduler, honest, 1)
    node = lease["providers"][0]["peer_id"]
    pardon = f"job pardon {node} --scheduler {scheduler.address} --identity {boss.node_dir}".split()
    status, message = ask(boss, scheduler.address, "POST", f"/v1/peers/{node}/pardon")
    assert (status, message["error"]) == (409, "refused")
    assert main(pardon) == 1
    assert "expected a peer with reports about it" in capsys.readouterr().err
    assert exchange(scheduler, honest, {"reports": [{"peer_id": node, "sha256": lease["sha256"]}]})[0] == 200
    assert main(pardon) == 0 and capsys.readouterr().out == f"pardoned {node}\n"
    assert core(scheduler).reports == {}


def test_many_certificates_of_one_organisation_starve_nobody(scheduler: SchedulerService, network_dir: Path) -> None:
    """Members that used nothing yet get half of the slices, however many they are."""
    org = organisation(network_dir, "acme")
    current = 0
    for number in range(4):
        evil = issue(network_dir, f"m{number}", "worker", by=org)
        current += len(leased(scheduler, evil, 16))
    assert current == SLICES // 2
    for name, by in (("honest", None), ("other", organisation(network_dir, "other-org"))):
        assert len(leased(scheduler, issue(network_dir, name, "worker", by=by), 1)) == 1


def test_who_fails_on_a_slice_that_is_good_is_leased_nothing_for_a_while() -> None:
    """Otherwise three workers have the scheduler fetch slices for as long as they like."""
    core = SchedulerCore(JobSpec("j", "d", np.array([8, 8, 8, 8]), lease_s=10.0, stall_s=40.0), checks=True)
    for worker in "abc":
        core.failures.setdefault(0, {})[worker] = "cannot read"
    (doubt,) = core.pending_checks()
    assert isinstance(doubt, PendingCheck) and core.resolve(doubt, True, 1.0)
    assert core.pending_checks() == []
    for worker, num in (("a", 0), ("b", 0), ("c", 0), ("d", 1)):
        assert len(core.exchange(worker, ExchangeRequest(want=1), 2.0)[0].leases) == num
    assert len(core.exchange("a", ExchangeRequest(want=1), 50.0)[0].leases) == 1


def _use_of(lease, worker):
    """A worker's word that it used a lease to its end."""
    with Client(worker) as client:
        return ExchangeClient(client, "").receipt(lease, proof="00" * 6)


def test_proofs_that_are_checked_at_once_count_each(
    scheduler: SchedulerService, honest: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a member with many sessions is checked at every lease for long, at the scheduler's cost."""
    together, checked = threading.Barrier(3), []

    def check(*about):
        checked.append(about)
        together.wait()
        return True

    monkeypatch.setattr(proofs, "is_checked", lambda secret, lease_id, num_proven: num_proven < 3)
    monkeypatch.setattr(scheduler._proofs, "_is_valid", check)
    *first, last = [_use_of(lease, honest) for lease in leased(scheduler, honest, 4)]
    with ThreadPoolExecutor(3) as pool:
        sent = [pool.submit(exchange, scheduler, honest, message) for message in first]
        assert [future.result()[0] for future in sent] == [200] * 3
    assert exchange(scheduler, honest, last)[0] == 200
    assert len(checked) == 3


def test_checks_that_hang_hold_up_no_other_worker(
    scheduler: SchedulerService, evil: Identity, honest: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proofs are checked against a data node, which may not answer; uses of others are written meanwhile."""
    started, gate = threading.Event(), threading.Event()

    def hang(*_):
        started.set()
        gate.wait()

    async def limit_threads():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    scheduler._server.call(limit_threads())
    monkeypatch.setattr(scheduler._proofs, "_is_valid", hang)
    (lease,) = leased(scheduler, evil, 1)
    message = _use_of(lease, evil)
    with ThreadPoolExecutor(1) as pool:
        try:
            waiting = pool.submit(exchange, scheduler, evil, message)
            started.wait()
            assert len(leased(scheduler, honest, 1)) == 1
            assert not waiting.done()
        finally:
            gate.set()
        assert waiting.result()[0] == 200


def test_doubts_that_nobody_answers_are_checked_less_and_less_often(
    scheduler: SchedulerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CHECK_EVERY_S", 0.02)
    checked = []
    monkeypatch.setattr(scheduler._catalog, "check_slice", lambda *_: checked.append(time.monotonic()))
    job = core(scheduler)
    with scheduler._lock:
        job.failures[0] = dict.fromkeys("abc", "cannot read")
    until(lambda: len(checked) >= 4)
    gaps = [after - before for before, after in itertools.pairwise(checked)]
    assert gaps[2] >= 0.15 and gaps[1] >= 0.07
