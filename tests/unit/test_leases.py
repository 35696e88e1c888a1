"""Leases: whatever workers do, each sample is used exactly once an epoch, and no slice has two live leases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from millrace.errors import LeaseError, UsageError
from millrace.schedule.leases import Lease, LeaseLostError, LeaseTable, Waiting

WORKERS = ("a", "b", "c")


def table(samples: list[int], epochs: int = 1, seed: int = 0) -> LeaseTable:
    return LeaseTable(np.array(samples, np.int64), seed=seed, epochs=epochs, lease_s=10.0)


def grant(leases: LeaseTable, worker: str, lease_id: str, now: float = 0.0, cached: tuple[int, ...] = ()) -> Lease:
    lease = leases.grant(worker, "", lease_id, cached, now)
    assert isinstance(lease, Lease)
    return lease


def use(leases: LeaseTable, worker: str, lease_id: str, start: int, stop: int, now: float = 0.0) -> None:
    recorded = leases.check_use(worker, lease_id, start, stop)
    if recorded is not None:
        leases.record_use(recorded, now)


def test_affinity_then_partly_used_then_the_order() -> None:
    leases = table([4] * 8)
    first = grant(leases, "a", "1")
    use(leases, "a", "1", 0, 3)
    leases.release("a", "1")
    cached = next(i for i in range(8) if i != first.slice_index)
    assert grant(leases, "b", "2", cached=(99, -1, cached)).slice_index == cached
    again = grant(leases, "b", "3")
    assert (again.slice_index, again.start) == (first.slice_index, 3)
    assert isinstance(leases.grant("b", "", "4", (), 0.0), Waiting)
    assert isinstance(leases.grant("b", "other session", "4", (), 0.0), Lease)


def test_another_seed_and_another_epoch_give_another_order() -> None:
    def order(seed: int) -> list[list[int]]:
        leases = table([1] * 50, epochs=2, seed=seed)
        taken: list[list[int]] = [[], []]
        for i in range(100):
            lease = grant(leases, "a", str(i))
            taken[lease.epoch].append(lease.slice_index)
            use(leases, "a", str(i), 0, 1)
        assert leases.done
        assert leases.grant("a", "", "x", (), 0.0) is None
        return taken

    first, second = order(0), order(1)
    assert sorted(first[0]) == sorted(first[1]) == list(range(50))
    assert first[0] != first[1] and first[0] != second[0] and first == order(0)


def test_a_lost_lease_is_lost_and_the_offset_stays() -> None:
    leases = table([5])
    grant(leases, "a", "1", now=0.0)
    use(leases, "a", "1", 0, 2, now=5.0)
    assert leases.expire(14.0) == []
    assert [lease.lease_id for lease in leases.expire(15.0)] == ["1"]
    # What was recorded stays recorded: a receipt said twice is answered, a new one is not.
    assert leases.check_use("a", "1", 0, 2) is None
    with pytest.raises(LeaseLostError):
        leases.check_use("a", "1", 2, 3)
    assert grant(leases, "b", "2", now=15.0).start == 2
    with pytest.raises(LeaseLostError):
        leases.renew("a", "2", 16.0)
    for start, stop in [(0, 1), (3, 4), (2, 2), (2, 6)]:
        with pytest.raises(LeaseError, match="expected samples from 2"):
            leases.check_use("b", "2", start, stop)


def test_empty_slices_count_as_used_and_an_empty_dataset_is_refused() -> None:
    leases = table([0, 3, 0])
    assert leases.num_used_slices == 2
    assert grant(leases, "a", "1").slice_index == 1
    use(leases, "a", "1", 0, 3)
    assert leases.done
    for samples in ([], [0, 0]):
        with pytest.raises(UsageError, match="sample"):
            table(samples)


class Churn(RuleBasedStateMachine):
    """Workers that lease, use, repeat, release, stall and die, on a clock that jumps."""

    @initialize(
        samples=st.lists(st.integers(0, 6), min_size=1, max_size=7).filter(any),
        seed=st.integers(0, 5),
        epochs=st.integers(1, 3),
    )
    def begin(self, samples: list[int], seed: int, epochs: int) -> None:
        self.leases = table(samples, epochs, seed)
        self.now = 0.0
        self.count = [np.zeros((len(samples), max(samples)), np.int64) for _ in range(epochs)]
        self.known: dict[str, dict[str, Lease]] = {worker: {} for worker in WORKERS}
        self.next_id = 0

    @rule(worker=st.sampled_from(WORKERS), cached=st.lists(st.integers(0, 6), max_size=3))
    def grant(self, worker: str, cached: list[int]) -> None:
        self.next_id += 1
        lease = self.leases.grant(worker, "", str(self.next_id), cached, self.now)
        assert (lease is None) == self.leases.done
        if isinstance(lease, Lease):
            self.known[worker][lease.lease_id] = lease

    @rule(worker=st.sampled_from(WORKERS), pick=st.integers(0, 9), more=st.integers(1, 6), twice=st.booleans())
    def use(self, worker: str, pick: int, more: int, twice: bool) -> None:
        if not self.known[worker]:
            return
        lease = list(self.known[worker].values())[pick % len(self.known[worker])]
        start = int(self.leases.offsets[lease.slice_index]) if lease.epoch == self.leases.epoch else 0
        for _ in range(1 + twice):
            try:
                recorded = self.leases.check_use(worker, lease.lease_id, start, start + more)
            except LeaseLostError:
                assert lease.lease_id not in self.leases.leases
                del self.known[worker][lease.lease_id]
                return
            except LeaseError:
                return
            if recorded is not None:
                self.count[recorded.epoch][recorded.slice_index, start : start + more] += 1
                self.leases.record_use(recorded, self.now)

    @rule(worker=st.sampled_from(WORKERS))
    def crash(self, worker: str) -> None:
        self.known[worker].clear()

    @rule(worker=st.sampled_from(WORKERS))
    def release_all(self, worker: str) -> None:
        for lease in self.leases.live(worker):
            self.leases.release(worker, lease.lease_id)

    @rule(seconds=st.floats(0.0, 30.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.leases.expire(self.now)

    @rule()
    def restart(self) -> None:
        old = self.leases
        new = LeaseTable(old.samples, seed=old.seed, epochs=old.epochs, lease_s=old.lease_s)
        new.restore(old.epoch, old.offsets, list(old.leases.values()), list(old.remembered.values()))
        assert (new.used, new.num_used_slices, new.leases) == (old.used, old.num_used_slices, old.leases)
        self.leases = new

    @invariant()
    def a_slice_has_one_live_lease_and_no_sample_two_uses(self) -> None:
        if not hasattr(self, "leases"):
            return
        held = [lease.slice_index for lease in self.leases.leases.values()]
        assert len(held) == len(set(held))
        for epoch, count in enumerate(self.count):
            assert count.max() <= 1
            if epoch < self.leases.epoch:
                assert count.sum() == self.leases.num_samples

    def teardown(self) -> None:
        """However it stands, one more worker finishes the job."""
        if not hasattr(self, "leases"):
            return
        while not self.leases.done:
            self.now += 11.0
            self.leases.expire(self.now)
            self.next_id += 1
            lease = self.leases.grant("last", "", str(self.next_id), (), self.now)
            assert isinstance(lease, Lease)
            stop = int(self.leases.samples[lease.slice_index])
            recorded = self.leases.check_use("last", lease.lease_id, lease.start, stop)
            assert recorded is not None
            self.count[lease.epoch][lease.slice_index, lease.start : stop] += 1
            self.leases.record_use(recorded, self.now)
        assert all(count.max() == 1 and count.sum() == self.leases.num_samples for count in self.count)


Churn.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestChurn = Churn.TestCase
