"""Bounds: what few bytes of a member may cost a server, and what many certificates may take from others."""

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from forebay.coordinator.membership import MAX_SEATS
from forebay.coordinator.messages import Leave
from forebay.network import reachability
from forebay.network.client import Client
from forebay.network.reachability import ReachabilityChecker
from forebay.scheduler import proofs, sessions
from forebay.scheduler import server as service
from forebay.swarm import tracker
from support.attacked import (
    NUM_SCHEDULED,
    NUM_SHARED,
    Run,
    core,
    exchange,
    leased,
    post_as,
    sharing,
    swarm,
    swarm_path,
    until_named,
)
from support.attackers import HOST, answers, issue, organisation, request
from support.exchanges import ExchangeClient
from support.waiting import until
from support.wire import connect


def test_addresses_of_one_member_keep_no_other_from_being_dialled(node, dataset, evil, honest):
    """Ports that accept and say nothing, named one after another."""
    with contextlib.ExitStack() as stack:
        traps = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(40)]
        with connect(evil, node.address) as sock:
            named = [{"address": f"{HOST}:{trap.getsockname()[1]}"} for trap in traps]
            assert {a.status for a in answers(sock, *(request("POST", swarm_path(node), item) for item in named))} == {
                200
            }
        with sharing(honest, dataset) as share:
            until_named(node, honest, share)
        dialled = 0
        for trap in traps:
            trap.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                trap.accept()[0].close()
                dialled += 1
        assert dialled == 1


def test_after_an_address_without_answer_a_peer_waits_for_its_next(network_dir):
    now = 1000.0
    with (
        Client(issue(network_dir, "node")) as client,
        contextlib.closing(ReachabilityChecker(client, lambda: now)) as dialer,
        socket.create_server((HOST, 0)) as trap,
    ):
        peer, address = issue(network_dir, "evil").as_peer, f"{HOST}:{trap.getsockname()[1]}"
        dialer.check(peer, f"{HOST}:1", HOST)
        until(lambda: dialer.check(peer, f"{HOST}:1", HOST) is False)
        assert [dialer.check(peer, address, HOST) for _ in range(3)] == [False] * 3
        now += reachability.PAUSE_S + 1
        assert dialer.check(peer, address, HOST) is None
        trap.settimeout(20)
        trap.accept()[0].close()


def test_a_member_that_is_being_dialled_is_served_meanwhile(node, network_dir, monkeypatch):
    monkeypatch.setattr(reachability, "GRACE_S", 0.0)
    member = issue(network_dir, "member", "worker")
    with socket.create_server((HOST, 0)) as silent:
        message = {"address": f"{HOST}:{silent.getsockname()[1]}", "want": "0-3", "num": 2}
        swarm(node, member, message)
        assert len(swarm(node, member, message)[1]["assignments"]) == 2


def test_a_member_from_afar_leads_no_node_to_its_own_loopback(network_dir):
    node, evil = issue(network_dir, "node", "data"), issue(network_dir, "evil").as_peer
    with (
        socket.create_server((HOST, 0)) as inner,
        Client(node) as client,
        contextlib.closing(ReachabilityChecker(client)) as dialer,
    ):
        for host in (HOST, "localhost", "0.0.0.0"):
            address = f"{host}:{inner.getsockname()[1]}"
            dialer.check(evil, address, "10.1.2.3")
            until(lambda address=address: dialer.check(evil, address, "10.1.2.3") is False)
        inner.settimeout(0)
        with pytest.raises(BlockingIOError):
            inner.accept()


def test_names_that_nobody_has_are_not_kept(node, evil):
    """Failures of invented members."""
    before = node.tracker.status()
    failed = [{"index": 0, "member": f"{i}{'x' * 290}", "wrong": i % 2 == 0} for i in range(1024)]
    assert swarm(node, evil, {"failed": failed})[0] == 200
    after = node.tracker.status()[node.datasets[0].id]
    assert (after["failed"], after["reported"]) == (0, {}) and before[node.datasets[0].id]["failed"] == 0
    node.tracker._tracked.clear()
    status, message = swarm(node, evil, {})
    assert (status, message["error"]) == (404, "unknown_swarm")


@pytest.mark.parametrize("ranges", [",".join(str(i) for i in range(0, 300_000, 2)), "0," * 200_000 + "0"])
def test_more_ranges_than_slices_are_refused_before_they_are_read(ranges, node, evil):
    """A message of ranges that costs more than its bytes."""
    for key in ("have", "want"):
        status, message = swarm(node, evil, {key: ranges})
        assert status == 400 and f"at most {NUM_SHARED} ranges" in message["message"]


def test_an_organisation_has_so_many_processes_in_a_swarm(node, network_dir, monkeypatch):
    """Each costs a bit a slice; an organisation issues as many certificates as it likes."""
    monkeypatch.setattr(tracker, "_MAX_SESSIONS_PER_ORGANISATION", 3)
    org = organisation(network_dir, "acme")
    members = [issue(network_dir, f"m{i}", by=org) for i in range(4)]
    assert [swarm(node, item, {})[0] for item in members] == [200, 200, 200, 400]
    assert swarm(node, members[0], {"leave": True})[0] == 200
    assert swarm(node, members[3], {})[0] == 200
    assert swarm(node, issue(network_dir, "of-root"), {})[0] == 200


def test_slices_of_invented_datasets_are_not_kept(scheduler, evil):
    """64 datasets that no job has, each with millions of slices."""
    assert exchange(scheduler, evil, {"cached": {f"{i:064x}": "0-999999999" for i in range(64)}})[0] == 200
    (session,) = core(scheduler).sessions.all.values()
    assert session.cached_bytes == 0
    status, message = exchange(scheduler, evil, {"cached": {core(scheduler).spec.dataset_id: "0-999999999"}})
    assert status == 409 and f"[0, {NUM_SCHEDULED})" in message["message"]


def test_sessions_of_a_certificate_are_bounded(scheduler, evil, honest, monkeypatch):
    monkeypatch.setattr(service, "MAX_SESSIONS_PER_PEER", 4)
    statuses = [exchange(scheduler, evil, {"session": f"s{i}"})[0] for i in range(6)]
    assert statuses == [200] * 4 + [429] * 2
    assert exchange(scheduler, honest, {})[0] == 200


def test_what_an_organisation_says_it_has_is_bounded(scheduler, network_dir, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_CACHED_BYTES_PER_ORGANISATION", 2 * NUM_SCHEDULED * 8)
    registered = core(scheduler).spec.dataset_id
    org, message = organisation(network_dir, "acme"), {"cached": {registered: f"0-{NUM_SCHEDULED - 1}"}}
    for number in range(4):
        assert exchange(scheduler, issue(network_dir, f"m{number}", "worker", by=org), message)
    state = core(scheduler)
    assert sum(session.cached_bytes for session in state.sessions.all.values()) == 2 * NUM_SCHEDULED * 8
    assert exchange(scheduler, issue(network_dir, "of-root", "worker"), message)[0] == 200
    assert sum(session.cached_bytes for session in state.sessions.all.values()) == 3 * NUM_SCHEDULED * 8


def test_many_certificates_of_one_organisation_starve_nobody(scheduler, network_dir):
    """Members that used nothing yet get half of the slices, however many they are."""
    org = organisation(network_dir, "acme")
    current = 0
    for number in range(4):
        evil = issue(network_dir, f"m{number}", "worker", by=org)
        current += len(leased(scheduler, evil, 16))
    assert current == NUM_SCHEDULED // 2
    for name, by in (("honest", None), ("other", organisation(network_dir, "other-org"))):
        assert len(leased(scheduler, issue(network_dir, name, "worker", by=by), 1)) == 1


def _use_of(lease, worker):
    """A worker's word that it used a lease to its end."""
    with Client(worker) as client:
        return ExchangeClient(client, "").receipt(lease, proof="00" * 6)


def test_proofs_that_are_checked_at_once_count_each(scheduler, honest, monkeypatch):
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


def test_checks_that_hang_hold_up_no_other_worker(scheduler, evil, honest, monkeypatch):
    """Proofs are checked against a data node, which may not answer; uses of others are written meanwhile."""
    started, gate = threading.Event(), threading.Event()

    def hang(*_):
        started.set()
        gate.wait()

    async def limit_threads():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    asyncio.run_coroutine_threadsafe(limit_threads(), scheduler._server._loop).result()
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


def test_doubts_that_nobody_answers_are_checked_less_and_less_often(scheduler, monkeypatch):
    monkeypatch.setattr(service, "CHECK_EVERY_S", 0.02)
    checked = []
    monkeypatch.setattr(scheduler._catalog, "check_slice", lambda *_: checked.append(time.monotonic()))
    job = core(scheduler)
    with scheduler._lock:
        job.failures[0] = dict.fromkeys("abc", "cannot read")
    until(lambda: len(checked) >= 4)
    gaps = [after - before for before, after in itertools.pairwise(checked)]
    assert gaps[2] >= 0.15 and gaps[1] >= 0.07


def test_seats_of_who_never_finished_a_step_are_forgotten():
    """Names that join and leave make no state that grows, nor ranks that no member has."""
    run = Run("a", "b")
    for number in range(20):
        run.join(f"evil{number}")
        run.send(Leave(f"evil{number}", f"evil{number}/1", 0, 0))
    assert len(run.state.seats) <= 2 and len(run.generation.places) <= 3
    run.beat("ab", 3)
    run.send(Leave("b", "b/1", run.generation.number, 3))
    run.join("c")
    run.ready("a", 3)
    run.join("b", "b/2")
    run.ready("a", 3)
    run.ready("c", 3)
    assert run.ranks == ["a", "b", "c"]
    run.state = replace(run.state, seats={f"old{number}": number for number in range(3 * MAX_SEATS)})
    run.beat("a", 9)
    run.send(Leave("b", "b/2", run.generation.number, 9))
    assert len(run.state.seats) == MAX_SEATS and "b" in run.state.seats


def test_who_joins_and_leaves_without_end_has_to_wait(coordinator, evil, honest):
    """Each join stops all others at the end of a step."""
    statuses = []
    for _ in range(6):
        statuses.append(post_as(coordinator, evil, "join")[0])
        post_as(coordinator, evil, "leave")
    assert statuses == [200] * 4 + [429] * 2
    assert post_as(coordinator, honest, "join")[0] == 200
    assert coordinator._state.seats == {}


def test_news_of_a_member_are_limited_as_each_costs_a_write(coordinator, evil):
    limits = coordinator._server._core.limits
    assert limits.requests_per_s <= 16 and limits.requests_per_peer <= 8
    assert post_as(coordinator, evil, "join")[0] == 200
    beats = [{"worker_id": "evil", "session": "evil-session", "generation": 1, "step": step} for step in range(60)]
    began = time.monotonic()
    with connect(evil, coordinator.address) as sock:
        result = [
            item.status for item in answers(sock, *(request("POST", "/v1/members/heartbeat", item) for item in beats))
        ]
    allowed = limits.requests_per_s * (2 + time.monotonic() - began) + 1  # a slow machine asks less often
    assert set(result) <= {200, 429} and result.count(200) <= allowed
