"""Peers are measured by what verified: reports of others, and checks."""

from types import SimpleNamespace

import numpy as np

from forebay.dataset.manifest import SliceInfo
from forebay.lease.messages import ExchangeRequest
from forebay.network import peer_source
from forebay.network.client import Client
from forebay.network.peer import Provider
from forebay.scheduler.core import SchedulerCore
from forebay.scheduler.leases import JobSpec
from support.attacked import NUM_SHARED, core, exchange, leased, sharing, swarm, until_named
from support.attackers import HOST, issue, organisation


def test_an_accused_member_is_named_to_all_but_its_accusers(node, dataset, network_dir):
    """Of whatever organisations they are; the node asks it for nothing."""
    accusers = [issue(network_dir, name, "worker", by=organisation(network_dir, name)) for name in ("b", "c")]
    honest, reader = issue(network_dir, "a", "worker"), issue(network_dir, "reader", "worker")
    with sharing(honest, dataset) as share:
        until_named(node, honest, share)
        for accuser in accusers:
            swarm(node, accuser, {})
            lie = {"failed": [{"index": index, "member": honest.peer_id, "wrong": True} for index in range(NUM_SHARED)]}
            assert swarm(node, accuser, lie)[0] == 200
        assert node.tracker.status()[dataset.id]["reported"] == {honest.peer_id: 2}
        for member, expected in ((reader, honest.peer_id), (accusers[0], node.identity.peer_id)):
            assigned = swarm(node, member, {"want": "0", "num": 1})[1]["assignments"]
            assert [item["peer_id"] for item in assigned] == [expected]
        assert share.bytes_sent == 0


def test_a_check_of_a_peer_that_drips_ends(network_dir, monkeypatch):
    """A check holds up those behind it: a peer that gives a little all the time counts as one that does not answer."""
    clock = SimpleNamespace(now=0.0)

    def drip(*_):
        while clock.now < 1000.0:
            clock.now += 1.0
            yield memoryview(b"x")

    monkeypatch.setattr(peer_source, "read_slice", drip)
    monkeypatch.setattr(peer_source, "time", SimpleNamespace(monotonic=lambda: clock.now))
    info, provider = SliceInfo(0, "s", 10_000, "ab" * 32, 1, 1), Provider("p", f"{HOST}:1", False)
    with Client(issue(network_dir, "n")) as client:
        assert peer_source.verify_provider(client, provider, info) is None
    assert clock.now < peer_source.STALL_S + 2.0


def test_reports_against_peers_that_are_not_there_are_not_kept(scheduler, evil):
    """Each would be a row of the journal, and memory for as long as the job lasts."""
    (lease, *_) = leased(scheduler, evil, 1)
    invalid = [{"peer_id": f"absent{i}", "sha256": lease["sha256"], "reason": "r" * 300} for i in range(64)]
    for _ in range(3):
        assert exchange(scheduler, evil, {"reports": invalid})[0] == 200
    assert core(scheduler).reports == {}
    node = lease["providers"][0]["peer_id"]
    assert exchange(scheduler, evil, {"reports": [{"peer_id": node, "sha256": lease["sha256"]}]})[0] == 200
    assert [key[0] for key in core(scheduler).reports] == [node]


def test_who_fails_on_a_slice_that_is_good_is_leased_nothing_for_a_while():
    """Otherwise three workers have the scheduler fetch slices for as long as they like."""
    core = SchedulerCore(JobSpec("j", "d", np.array([8, 8, 8, 8]), lease_s=10.0, stall_s=40.0), checks=True)
    for worker in "abc":
        core.failures.setdefault(0, {})[worker] = "cannot read"
    (doubt,) = core.pending_checks()
    assert doubt == 0 and core.resolve(doubt, True, 1.0)
    assert core.pending_checks() == []
    for worker, num in (("a", 0), ("b", 0), ("c", 0), ("d", 1)):
        assert len(core.exchange(worker, ExchangeRequest(want=1), 2.0)[0].leases) == num
    assert len(core.exchange("a", ExchangeRequest(want=1), 50.0)[0].leases) == 1
