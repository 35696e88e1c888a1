"""The desk leases what somebody can give; what it hears of providers that are late, or of leases that are over."""

from __future__ import annotations

import numpy as np

from forebay.ledger.receipts import Used
from forebay.network.peer import Provider
from forebay.scheduler.core import Bad, Desk, JobSpec, Source
from forebay.scheduler.messages import Ask, Failed, Grant

SLICES = 600
ORIGIN = Provider("origin", "h:1", True)


def make_desk(num_slices: int = SLICES) -> Desk:
    source = Source("x", "x0", np.full(num_slices, 3, np.int64))
    desk = Desk([JobSpec("x", (source,), max_failures=2)])
    desk.origins("x0", [ORIGIN], 0.0)
    return desk


def ask(desk: Desk, worker: str, now: float, want: int = 1, **said: object) -> list[int]:
    """The slices that a worker gets, which it uses at once."""
    reply, _ = desk.exchange(worker, Ask(want=want, **said), now)  # type: ignore[arg-type]
    uses = tuple(Used(g.lease_id, g.epoch, g.slice, g.start, g.stop, 1) for g in reply.leases)
    desk.exchange(worker, Ask(uses=uses), now)
    return [grant.slice for grant in reply.leases]


def test_while_no_data_node_is_there_only_what_workers_can_give_is_leased() -> None:
    desk = make_desk()
    assert len(ask(desk, "b", 0.0)) == 1
    have = {"x0": "7,300,599"}
    for now in (10.0, 35.0):  # the origin is gone by then
        desk.exchange("a", Ask(address="h:2", have=have), now)
        desk.expire(now)
    found: list[int] = []
    for _ in range(8):
        found += ask(desk, "b", 36.0)
    assert sorted(found) == [7, 300, 599]
    reply, _ = desk.exchange("b", Ask(want=1), 36.0)
    assert not reply.leases and 0 < reply.wait_s <= 15 and not reply.done and not desk.jobs["x"].reasons
    # What it has itself needs nobody.
    assert ask(desk, "c", 37.0, have={"x0": "8-9"}) + ask(desk, "c", 37.0) == [8, 9]
    desk.origins("x0", [ORIGIN], 38.0)
    assert len(ask(desk, "b", 38.0, want=4)) == 4


def test_slices_outlive_an_outage_of_all_their_providers() -> None:
    desk = make_desk(40)
    now, used = 0.0, 0
    for turn in range(400):
        now += 1.0
        if turn % 100 < 30:
            desk.origins("x0", [ORIGIN], now)
        desk.expire(now)
        for worker in ("a", "b", "c"):
            reply, _ = desk.exchange(worker, Ask(want=1, held=()), now)
            for grant in reply.leases:
                assert grant.providers
                if turn % 100 < 30 and turn % 3:
                    use = Used(grant.lease_id, grant.epoch, grant.slice, grant.start, grant.stop, 1)
                    desk.exchange(worker, Ask(uses=(use,)), now)
                    used += 3
                else:  # it is not there, though it was thought to be
                    desk.exchange(worker, Ask(release=(grant.lease_id,)), now)
        if desk.done():
            break
    assert desk.done() and used == 120 and not desk.jobs["x"].reasons


def grant_of(desk: Desk, worker: str, now: float) -> Grant:
    (grant,) = desk.exchange(worker, Ask(want=1), now)[0].leases
    return grant


def test_who_was_only_late_is_avoided_for_a_while_and_banned_for_nobody() -> None:
    desk = make_desk(8)
    desk.origins("x0", [ORIGIN, Provider("other", "h:2", True)], 0.0)
    late = [Bad("origin", "x0", index, "no bytes in 5 s", wrong=False) for index in (1, 2)]
    for worker, bad in (("a", late[0]), ("b", late[1])):
        _, happened = desk.exchange(worker, Ask(), 0.0, bad=[bad])
        assert not happened
        assert [holder.peer_id for holder in grant_of(desk, worker, 0.0).providers] == ["other"]
    assert {holder.peer_id for holder in grant_of(desk, "c", 0.0).providers} == {"origin", "other"}
    assert {holder.peer_id for holder in grant_of(desk, "a", 5.0).providers} == {"origin", "other"}
    assert desk.swarms["x0"].facts()["banned"] == [] and not desk.reports
    desk.exchange("a", Ask(), 5.0, bad=[Bad("nobody", "x0", 1, "late", wrong=False)])


def test_a_session_is_remembered_to_have_had_what_it_gave_back() -> None:
    desk = make_desk(8)
    grant = grant_of(desk, "a", 0.0)
    desk.exchange("a", Ask(held=(grant.lease_id,), failed=(Failed(grant.lease_id, "torn"),)), 0.0)
    session = desk.sessions.all["a", ""]
    assert not session.lease_ids() and ("x", 0, grant.index) in set(session.leased())
