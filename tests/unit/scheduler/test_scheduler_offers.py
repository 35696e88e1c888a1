"""The scheduler leases slices that have a provider; its handling of slow providers and of ended leases."""

from __future__ import annotations

import numpy as np

from forebay.lease.messages import ExchangeRequest, FailedLease, LeaseGrant
from forebay.ledger.chain import Used
from forebay.network.peer import Provider
from forebay.scheduler.core import ProviderFault, SchedulerCore
from forebay.scheduler.leases import JobSpec

SLICES = 600
ORIGIN = Provider("origin", "h:1", True)


def make_desk(num_slices: int = SLICES) -> SchedulerCore:
    core = SchedulerCore(JobSpec("x", "x0", np.full(num_slices, 3, np.int64), max_failures=2))
    core.add_origins([ORIGIN], 0.0)
    return core


def ask(core: SchedulerCore, worker: str, now: float, want: int = 1, **said: object) -> list[int]:
    """The slices that a worker gets, which it uses at once."""
    reply, _ = core.exchange(worker, ExchangeRequest(want=want, **said), now)  # type: ignore[arg-type]
    uses = tuple(Used(g.lease_id, g.epoch, g.slice, g.start, g.stop, 1) for g in reply.leases)
    core.exchange(worker, ExchangeRequest(uses=uses), now)
    return [grant.slice for grant in reply.leases]


def test_while_no_data_node_is_there_only_what_workers_can_give_is_leased() -> None:
    core = make_desk()
    assert len(ask(core, "b", 0.0)) == 1
    have = {"x0": "7,300,599"}
    for now in (10.0, 35.0):  # the origin is gone by then
        core.exchange("a", ExchangeRequest(address="h:2", cached=have), now)
        core.expire(now)
    result: list[int] = []
    for _ in range(8):
        result += ask(core, "b", 36.0)
    assert sorted(result) == [7, 300, 599]
    reply, _ = core.exchange("b", ExchangeRequest(want=1), 36.0)
    assert not reply.leases and 0 < reply.wait_s <= 15 and not reply.done and not core.reasons
    # What it has itself needs nobody.
    assert ask(core, "c", 37.0, cached={"x0": "8-9"}) + ask(core, "c", 37.0) == [8, 9]
    core.add_origins([ORIGIN], 38.0)
    assert len(ask(core, "b", 38.0, want=4)) == 4


def test_slices_outlive_an_outage_of_all_their_providers() -> None:
    core = make_desk(40)
    now, used = 0.0, 0
    for turn in range(400):
        now += 1.0
        if turn % 100 < 30:
            core.add_origins([ORIGIN], now)
        core.expire(now)
        for worker in ("a", "b", "c"):
            reply, _ = core.exchange(worker, ExchangeRequest(want=1, known_leases=()), now)
            for grant in reply.leases:
                assert grant.providers
                if turn % 100 < 30 and turn % 3:
                    use = Used(grant.lease_id, grant.epoch, grant.slice, grant.start, grant.stop, 1)
                    core.exchange(worker, ExchangeRequest(uses=(use,)), now)
                    used += 3
                else:  # it is not there, though it was thought to be
                    core.exchange(worker, ExchangeRequest(release=(grant.lease_id,)), now)
        if core.table.done:
            break
    assert core.table.done and used == 120 and not core.reasons


def grant_of(core: SchedulerCore, worker: str, now: float) -> LeaseGrant:
    (grant,) = core.exchange(worker, ExchangeRequest(want=1), now)[0].leases
    return grant


def test_who_was_only_late_is_avoided_for_a_while_and_banned_for_nobody() -> None:
    core = make_desk(8)
    core.add_origins([ORIGIN, Provider("other", "h:2", True)], 0.0)
    late = [ProviderFault("origin", index, "no bytes in 5 s", wrong=False) for index in (1, 2)]
    for worker, invalid in (("a", late[0]), ("b", late[1])):
        _, happened = core.exchange(worker, ExchangeRequest(), 0.0, faults=[invalid])
        assert not happened
        assert [holder.peer_id for holder in grant_of(core, worker, 0.0).providers] == ["other"]
    assert {holder.peer_id for holder in grant_of(core, "c", 0.0).providers} == {"origin", "other"}
    assert {holder.peer_id for holder in grant_of(core, "a", 5.0).providers} == {"origin", "other"}
    assert core.swarm.status()["banned"] == [] and not core.reports
    core.exchange("a", ExchangeRequest(), 5.0, faults=[ProviderFault("nobody", 1, "late", wrong=False)])


def test_a_session_is_remembered_to_have_had_what_it_gave_back() -> None:
    core = make_desk(8)
    grant = grant_of(core, "a", 0.0)
    core.exchange(
        "a", ExchangeRequest(known_leases=(grant.lease_id,), failed=(FailedLease(grant.lease_id, "torn"),)), 0.0
    )
    session = core.sessions.all["a", ""]
    assert not session.leases and grant.slice in set(session.leased())
