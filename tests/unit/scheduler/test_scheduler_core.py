"""The scheduler core under workers that join, crash, stall, lie and repeat themselves: samples are used once."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forebay.errors import LeaseError
from forebay.lease.messages import ExchangeRequest, ExchangeResult, FailedLease
from forebay.ledger.chain import Used
from forebay.network.peer import Provider
from forebay.scheduler import events
from forebay.scheduler.core import ProviderFault, SchedulerCore
from forebay.scheduler.events import Event, from_row, to_row
from forebay.scheduler.leases import JobSpec
from support.lease_worker import DATASET, Worker
from support.scheduling import exchange, full_use

WORKERS = ("a", "b", "c", "d")


def spec(samples: list[int], **settings: object) -> JobSpec:
    settings = {"lease_s": 10.0, "stall_s": 40.0, "steal_s": 0.5, **settings}
    return JobSpec("x", DATASET, np.array(samples, np.int64), **settings)


class Churn(RuleBasedStateMachine):
    """Workers of a scheduler, on a clock that jumps."""

    @initialize(
        samples=st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any),
        epochs=st.integers(1, 2),
    )
    def begin(self, samples: list[int], epochs: int):
        self.spec = spec(samples, epochs=epochs, max_failures=2)
        self.core = SchedulerCore(self.spec)
        self.now = 0.0
        self.events = []
        self.workers = {name: Worker(name, self) for name in WORKERS}
        self.salts = 0
        self.chance, self.renewal = random.Random(0), 0.5
        self.counts = {}

    def keep(self, happened: list[Event]):
        self.events += happened
        for event in happened:
            if isinstance(event, events.UsesRecorded):
                for used in event.uses:
                    for sample in range(used.start, used.stop):
                        counts = self.counts.setdefault((used.epoch, used.slice), {})
                        counts[sample] = counts.get(sample, 0) + 1
                        assert counts[sample] == 1, (event, used)

    def exchange(self, name: str, request: ExchangeRequest) -> ExchangeResult:
        reply, happened = self.core.exchange(name, request, self.now)
        self.keep(happened)
        return reply

    @rule(
        name=st.sampled_from(WORKERS),
        trained=st.integers(0, 4),
        num_ahead=st.integers(0, 3),
        fate=st.sampled_from(["answered", "answered", "answered", "unanswered", "twice"]),
    )
    def exchange_once(self, name: str, trained: int, num_ahead: int, fate: str):
        worker = self.workers[name]
        for _ in range(trained):
            worker.work()
        reply = self.exchange(name, worker.next_request())
        for _ in range(num_ahead):
            worker.work()
        if fate == "twice":
            reply = self.exchange(name, worker.next_request())
        if fate != "unanswered":
            worker.receive(reply)

    @rule(name=st.sampled_from(WORKERS))
    def crash(self, name: str):
        self.salts += 1
        self.workers[name] = Worker(f"{name}{self.salts}", self)

    @rule(name=st.sampled_from(WORKERS), how=st.sampled_from(["release", "fail"]))
    def give_up(self, name: str, how: str):
        worker = self.workers[name]
        for lease in worker.leases.leases:
            if how == "fail":
                worker.leases.fail(lease, "unreadable")
            lease.is_dropped |= how == "release"
        self.exchange_once(name, 0, 0, "answered")

    @rule(name=st.sampled_from(WORKERS), lease=st.integers(0, 40), start=st.integers(0, 7), declared=st.integers(0, 9))
    def lie(self, name: str, lease: int, start: int, declared: int):
        """Somebody else's lease, made up uses, declarations for what it does not have."""
        lease_id = f"{lease:x}"
        live = {x.lease_id: x.worker for x in self.core.table.leases.values()}
        if live.get(lease_id) == name:
            return
        uses = (Used(lease_id, 0, 0, start, start + 2, 1),)
        fields = {"known_leases": (lease_id,), "declared_until": {lease_id: declared}, "release": (lease_id,)}
        request = ExchangeRequest(session="liar", uses=uses, **fields)
        before = set(live.items())
        self.exchange(name, request)
        assert {(x.lease_id, x.worker) for x in self.core.table.leases.values()} == before

    @rule(seconds=st.floats(0.0, 30.0))
    def pass_time(self, seconds: float):
        self.now += seconds
        self.keep(self.core.expire(self.now))

    @rule(verb=st.sampled_from(["pause", "resume", "readmit"]))
    def administer(self, verb: str):
        self.keep(self.core.readmit() if verb == "readmit" else self.core.pause(verb == "pause"))

    @rule(by_snapshot=st.booleans())
    def restart(self, by_snapshot: bool):
        """From a snapshot, or from all that ever happened, by way of the bytes that a journal keeps."""
        self.salts += 1
        again = SchedulerCore(self.spec, salt=f"s{self.salts}-")
        if by_snapshot:
            again.restore(self.core.snapshot(), self.now)
        else:
            for event in self.events:
                again.apply(from_row(to_row(event)), self.now)
        assert again.snapshot() == self.core.snapshot()
        again.table.extend_all(self.now)
        self.core = again

    @invariant()
    def every_sample_is_in_one_place(self):
        for table in (self.core.table,) if hasattr(self, "core") else ():
            if table.done:
                continue
            places = np.zeros((len(table.samples), int(table.samples.max())), np.int64)
            current = [(x.slice_index, x.position, x.stop) for x in table.leases.values()]
            back = [(i, *item) for i, items in table.free.returned.items() for item in items]
            fresh = [(int(i), 0, int(table.samples[i])) for i in np.flatnonzero(table.free.fresh)]
            aside = [(i, *item) for i, items in table.aside.items() for item in items]
            for index, start, stop in [*current, *back, *fresh, *aside]:
                places[index, start:stop] += 1
            for (epoch, index), samples in self.counts.items():
                if epoch == table.epoch:
                    places[index, list(samples)] += 1
            assert places.max() <= 1 and places.sum() == table.num_samples
            assert table.leased == sum(stop - start for _, start, stop in current)

    def teardown(self):
        """However it stands, one more worker finishes the job."""
        if not hasattr(self, "core"):
            return
        self.keep(self.core.pause(False))
        self.keep(self.core.readmit())
        last = Worker("last", self)
        for _ in range(400):
            if self.core.table.done:
                break
            self.now += 41.0
            self.keep(self.core.expire(self.now))
            for _ in range(8):
                last.receive(self.exchange("last", last.next_request()))
                for _ in range(40):
                    last.work()
        assert self.core.table.done
        table = self.core.table
        for ended in [event for event in self.events if isinstance(event, events.EpochEnded)]:
            num_used = sum(len(self.counts.get((ended.epoch, i), ())) for i in range(len(table.samples)))
            assert num_used == ended.samples <= table.num_samples
        assert table.used_before == sum(map(len, self.counts.values()))


Churn.TestCase.settings = settings(stateful_step_count=30)
TestChurn = Churn.TestCase


def test_a_slice_on_which_different_workers_fail_is_set_aside_and_the_epoch_says_so():
    happened = []
    core = SchedulerCore(spec([3], max_failures=2))
    for worker, last in (("a", False), ("b", True)):
        grant = exchange(core, worker, want=1).leases[0]
        reply, now_happened = core.exchange(worker, ExchangeRequest(failed=(FailedLease(grant.lease_id, "torn"),)), 0.0)
        happened += now_happened
        assert core.table.done == last
    (aside,) = [event for event in happened if isinstance(event, events.SliceSetAside)]
    (ended,) = [event for event in happened if isinstance(event, events.EpochEnded)]
    assert (aside.slice, aside.start, aside.stop, aside.reason) == (0, 0, 3, "torn")
    assert ended.samples == 0 and reply.done


def test_where_slices_are_checked_reports_of_workers_set_none_aside():
    core = SchedulerCore(spec([3, 3], max_failures=2), checks=True)
    for worker in ("a", "b", "c"):
        reply = exchange(core, worker, want=2)
        failed = tuple(FailedLease(grant.lease_id, "torn") for grant in reply.leases)
        exchange(core, worker, failed=failed)
    pending_checks = core.pending_checks()
    assert sorted(pending_checks) == [0, 1] and not core.table.done
    (cleared,) = core.resolve(pending_checks[0], True, 1.0)
    assert cleared == events.SliceCleared(pending_checks[0]) and len(core.pending_checks()) == 1
    assert [type(event) for event in core.resolve(pending_checks[1], False, 1.0)] == [events.SliceSetAside]
    assert core.pending_checks() == [] and not core.table.done and core.resolve(pending_checks[1], False, 1.0) == []
    (grant,) = exchange(core, "d", 20.0, want=2).leases
    assert grant.slice == pending_checks[0]
    again = SchedulerCore(spec([3, 3], max_failures=2), checks=True)
    again.restore(core.snapshot())
    assert again.snapshot() == core.snapshot()


def test_reports_of_others_keep_no_worker_from_a_provider():
    """Also after a restart, which knows them."""
    core = SchedulerCore(spec([3] * 8), checks=True)
    origins = [Provider("origin", "h:1", True), Provider("second", "h:2", True)]
    for name in ("a", "b"):
        core.add_origins(origins, 0.0)
        invalid = tuple(ProviderFault("origin", index, "wrong") for index in (0, 1))
        core.exchange(name, ExchangeRequest(), 0.0, organisation=f"of {name}", faults=invalid)
    again = SchedulerCore(spec([3] * 8), checks=True)
    again.restore(core.snapshot())
    again.add_origins(origins, 1.0)
    for each in (core, again):
        assert each.pending_checks() == []
        for name, expected in (("a", {"second"}), ("b", {"second"}), ("c", {"origin", "second"})):
            (grant,) = exchange(each, name, 1.0, want=1).leases
            assert {provider.peer_id for provider in grant.providers} == expected
    assert again.reports == core.reports and len(core.reports) == 2


def test_a_peer_that_uses_nothing_loses_its_leases_whatever_its_sessions_say():
    """40 sessions of one peer, each giving its lease back and taking one again before the time of a stall."""
    core, now, honest = SchedulerCore(spec([4] * 42, stall_s=6.0)), 0.0, 0
    current = {}
    while now < 30.0:
        for number in range(42):
            reply = exchange(core, "thief", now, session=f"s{number}", release=current.get(number, ()), want=1)
            current[number] = tuple(grant.lease_id for grant in reply.leases)
        assert sum(map(len, current.values())) <= 32
        if now == 9.0:
            assert not any(current.values()), "it is barred for a while"
            honest = len(exchange(core, "honest", now, want=16).leases)
        core.expire(now)
        now += 3.0
    assert honest >= 1


def test_leases_of_a_peer_grow_with_its_uses():
    core = SchedulerCore(spec([1] * 400))
    numbers = []
    for now in (0.0, 10.0, 20.0, 30.0):
        grants = []
        for number in range(20):
            reply = exchange(core, "p", now, session=f"s{number}", want=16)
            grants += [(f"s{number}", grant) for grant in reply.leases]
            if len(reply.leases) < 16:
                break
        numbers.append(len(grants))
        for session, grant in grants:
            exchange(core, "p", now + 5, session=session, job_id="j", uses=(full_use(grant),), signature="ab")
    assert numbers == [32, 64, 128, 176]


def test_a_worker_that_failed_on_a_slice_gets_others_first_and_it_again_later():
    core = SchedulerCore(spec([3, 3], max_failures=2))
    first = exchange(core, "a", want=1).leases[0]
    reply = exchange(core, "a", want=2, failed=(FailedLease(first.lease_id, "torn"),))
    assert [grant.slice for grant in reply.leases] == [1 - first.slice]
    reply = exchange(core, "a", 10.0, want=2)
    assert [grant.slice for grant in reply.leases] == [first.slice]


@pytest.mark.parametrize("want, at_once", [(0, 2), (1, 0)])
def test_a_worker_that_ends_and_starts_again_goes_on_at_once(want, at_once):
    """One that goes on, and released slices as it cannot fetch them, leaves them to others first."""
    core = SchedulerCore(spec([3, 3]))
    grants = exchange(core, "a", want=2).leases
    assert not exchange(core, "a", 1.0, release=tuple(grant.lease_id for grant in grants), want=want).leases
    assert len(exchange(core, "a", 1.1, want=2).leases) == at_once
    assert len(exchange(core, "a", 4.0, want=2).leases) == 2 - at_once


def test_a_lease_that_a_request_releases_twice_is_released_once():
    core = SchedulerCore(spec([3]))
    grant = exchange(core, "a", want=1).leases[0]
    exchange(core, "a", release=(grant.lease_id, grant.lease_id))
    assert not core.table.leases and len(exchange(core, "b", want=1).leases) == 1


def test_providers_come_from_the_swarm_and_a_liar_is_left_out_for_who_says_so():
    core = SchedulerCore(spec([3] * 8))
    core.add_origins([Provider("origin", "h:1", True)], 0.0)
    exchange(core, "a", address="h:2", cached={DATASET: "0-7"})
    grant = exchange(core, "b", want=1).leases[0]
    assert [holder.peer_id for holder in grant.providers] == ["a", "origin"]
    invalid = ProviderFault("a", grant.slice, "wrong bytes")
    _, happened = core.exchange("b", ExchangeRequest(), 0.0, faults=[invalid])
    assert [type(event) for event in happened] == [events.ProviderReported]
    assert not core.exchange("b", ExchangeRequest(), 0.0, faults=[invalid])[1]
    for worker, expected in (("b", {"origin"}), ("c", {"a", "origin"})):
        grant = exchange(core, worker, want=1).leases[0]
        assert {holder.peer_id for holder in grant.providers} == expected
    core.exchange("c", ExchangeRequest(), 0.0, faults=[replace(invalid, index=grant.slice)])
    grant = exchange(core, "d", want=1).leases[0]
    assert {holder.peer_id for holder in grant.providers} == {"a", "origin"}


def test_wrong_jobs_and_ranges_are_refused():
    core = SchedulerCore(spec([3]))
    assert not exchange(core, "w", job="x").done
    with pytest.raises(LeaseError, match="this scheduler has the job x"):
        exchange(core, "w", job="y")
    for ranges in ("7", "0-1", "2-1", "0,0", "0-999999999"):
        with pytest.raises(LeaseError, match="cached"):
            exchange(core, "w", cached={DATASET: ranges})
    # A few bytes of ranges take no memory for an id that is none of its datasets'.
    exchange(core, "w", cached={"cd" * 32: "0-999999999"})
    assert core.sessions.all["w", ""].cached is None
