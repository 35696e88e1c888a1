"""The scheduler leases slices that have a provider; its handling of slow providers and of ended leases."""

import numpy as np

from forebay.lease.messages import ExchangeRequest, FailedLease, LeaseGrant
from forebay.network.peer import Provider
from forebay.scheduler.core import ProviderFault, SchedulerCore
from forebay.scheduler.leases import JobSpec
from forebay.scheduler.status import job_status
from support.scheduling import exchange, full_use

ORIGIN = Provider("origin", "h:1", True)


def make_core(num_slices: int) -> SchedulerCore:
    core = SchedulerCore(JobSpec("x", "x0", np.full(num_slices, 3, np.int64), max_failures=2))
    core.add_origins([ORIGIN], 0.0)
    return core


def use_slices(core: SchedulerCore, worker: str, now: float, **fields: object) -> list[int]:
    """Return the slices that a worker gets, which it uses at once."""
    leases = exchange(core, worker, now, **{"want": 1, **fields}).leases
    exchange(core, worker, now, uses=tuple(map(full_use, leases)))
    return [grant.slice for grant in leases]


def test_while_no_data_node_is_announced_only_slices_of_workers_are_leased():
    core = make_core(600)
    assert len(use_slices(core, "b", 0.0)) == 1
    for now in (10.0, 35.0):  # the origin is gone by then
        exchange(core, "a", now, address="h:2", cached={"x0": "7,300,599"})
        core.expire(now)
    assert sorted([index for _ in range(8) for index in use_slices(core, "b", 36.0)]) == [7, 300, 599]
    reply = exchange(core, "b", 36.0, want=1)
    assert not reply.leases and 0 < reply.wait_s <= 15 and not reply.done and not core.reasons
    # Slices in its own cache need no provider.
    assert use_slices(core, "c", 37.0, cached={"x0": "8-9"}) + use_slices(core, "c", 37.0) == [8, 9]
    core.add_origins([ORIGIN], 38.0)
    assert len(use_slices(core, "b", 38.0, want=4)) == 4


def grant_to(core: SchedulerCore, worker: str, now: float) -> LeaseGrant:
    (grant,) = exchange(core, worker, now, want=1).leases
    return grant


def test_a_late_provider_is_avoided_for_a_while_and_not_banned():
    core = make_core(8)
    core.add_origins([ORIGIN, Provider("other", "h:2", True)], 0.0)

    def providers(worker, now):
        return {provider.peer_id for provider in grant_to(core, worker, now).providers}

    for worker, index in (("a", 1), ("b", 2)):
        late = ProviderFault("origin", index, "no bytes in 5 s", wrong=False)
        assert not core.exchange(worker, ExchangeRequest(), 0.0, faults=[late])[1]
        assert providers(worker, 0.0) == {"other"}
    assert providers("c", 0.0) == providers("a", 5.0) == {"origin", "other"}
    assert core.swarm.status(5.0)["reported"] == {} and not core.reports
    core.exchange("a", ExchangeRequest(), 5.0, faults=[ProviderFault("absent", 1, "late", wrong=False)])


def test_a_session_remembers_the_leases_that_it_returned():
    core = make_core(8)
    grant = grant_to(core, "a", 0.0)
    exchange(core, "a", known_leases=(grant.lease_id,), failed=(FailedLease(grant.lease_id, "torn"),))
    session = core.sessions.all["a", ""]
    assert not session.leases and grant.slice in set(session.leased())


def test_a_worker_is_told_why_it_gets_no_lease():
    core = make_core(2)
    (used,) = exchange(core, "a", 0.0, want=1).leases
    assert exchange(core, "a", 0.0).cause == ""
    core.add_origins([], 3.0)

    def cause_of(worker, now, **fields):
        reply = exchange(core, worker, now, want=1, **fields)
        assert not reply.leases and reply.reason
        return reply.cause

    assert cause_of("b", 7.0) == "unserved"
    assert core.unserved(7.0) == exchange(core, "b", 7.0, want=1).reason == "no data node serves 'x'; last seen 7 s ago"
    assert job_status(core, 7.0)["state"] == "running"  # A worker has a lease of what it has cached.
    core.add_origins([], 7.0, ["beef"])
    assert f"of the id {core.spec.dataset_id}, only of beef; last seen" in core.unserved(7.0)
    idle = make_core(2)
    idle.add_origins([], 3.0)
    assert job_status(idle, 7.0)["state"] == "waiting"
    core.add_origins([ORIGIN], 8.0)
    assert not core.unserved(8.0)
    (other,) = exchange(core, "b", 8.0, want=1).leases
    assert cause_of("c", 8.0) == "leased"
    core.pause(True)
    assert cause_of("c", 8.0) == "paused" and exchange(core, "c", 8.0).paused
    core.pause(False)
    assert cause_of("b", 8.0, release=(other.lease_id,)) == "avoided"
    core.bar("b", 8.0)
    assert cause_of("b", 9.0) == "barred"
    core.add_origins([], 9.0)
    exchange(core, "a", 9.0, uses=(full_use(used),))
    exchange(
        core,
        "d",
        9.0,
        cached={"x0": f"{other.slice}"},
        uses=tuple(map(full_use, exchange(core, "d", 9.0, want=1, cached={"x0": f"{other.slice}"}).leases)),
    )
    assert core.table.done and not core.unserved(10.0)
