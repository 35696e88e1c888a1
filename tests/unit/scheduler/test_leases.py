"""The table of leases: order, affinity, cuts for the idle, stalls, slices set aside, speeds."""

from typing import Any

import numpy as np
import pytest

from forebay.errors import LeaseError, UsageError
from forebay.ledger.chain import Used
from forebay.scheduler.leases import JobSpec, LeaseLostError, LeaseTable
from forebay.scheduler.sessions import LiveLease, SpeedEstimate, WorkerSession


def table(samples: list[int], epochs: int = 1, seed: int = 0, **settings: float) -> LeaseTable:
    settings = {"lease_s": 10.0, "steal_s": 1.0, "stall_s": 40.0, **settings}
    spec = JobSpec("d", "1" * 64, np.array(samples, np.int64), seed=seed, epochs=epochs, **settings)
    return LeaseTable(spec)


def grant(leases: LeaseTable, worker: str, lease_id: str, now: float = 0.0) -> Any:
    part = leases.choose(leases.sessions.touch((worker, ""), now), lambda index: False, now)
    return None if part is None else leases.grant(lease_id, (worker, ""), part, now)


def set_cached(leases: LeaseTable, session: WorkerSession, slices: list[int]):
    session.cached = leases.free.replace_cached(session.cached, np.array(slices))


def use(leases: LeaseTable, lease: LiveLease, num: int, now: float = 0.0) -> bool:
    used = Used(lease.lease_id, lease.epoch, lease.slice_index, lease.position, lease.position + num, 0)
    if not leases.check_use(lease.worker, used):
        return False
    leases.sessions.touch(lease.key, now)
    leases.record(lease.worker, [used], now)
    if leases.is_covered():
        leases.end_epoch()
    return True


def test_cached_slices_come_first_then_returned_ones_then_the_order():
    leases = table([4] * 8)
    first = grant(leases, "a", "1")
    use(leases, first, 3)
    leases.release("1")
    cached = next(i for i in range(8) if i != first.slice_index)
    set_cached(leases, leases.sessions.touch(("b", ""), 0.0), sorted([cached, first.slice_index]))
    assert grant(leases, "b", "2").slice_index == cached
    again = grant(leases, "c", "3")
    assert (again.slice_index, again.start, again.stop) == (first.slice_index, 3, 4)


def test_slices_cached_by_another_worker_are_left_to_it_while_others_remain():
    leases = table([1] * 6)
    owner = leases.sessions.touch(("a", ""), 0.0)
    set_cached(leases, owner, [0, 1, 2])
    taken = [grant(leases, "b", str(i)) for i in range(5)]
    assert {lease.slice_index for lease in taken[:3] if lease} == {3, 4, 5}
    assert {lease.slice_index for lease in taken[3:] if lease} < {0, 1, 2}
    assert {grant(leases, "a", "x").slice_index, *(lease.slice_index for lease in taken if lease)} == set(range(6))
    # One that is gone keeps nothing from others.
    owner.cached = leases.free.replace_cached(owner.cached, None)
    assert leases.free.cached_by.max() == 0


def test_another_seed_and_another_epoch_give_another_order():
    def order(seed):
        leases = table([1] * 50, epochs=2, seed=seed)
        taken = [[], []]
        for i in range(100):
            lease = grant(leases, "a", str(i))
            taken[lease.epoch].append(lease.slice_index)
            use(leases, lease, 1)
        assert leases.done and grant(leases, "a", "x") is None
        return taken

    first, second = order(0), order(1)
    assert sorted(first[0]) == sorted(first[1]) == list(range(50))
    assert first[0] != first[1] and first[0] != second[0] and first == order(0)


def test_a_lost_lease_is_lost_and_the_offset_stays():
    leases = table([5])
    lease = grant(leases, "a", "1")
    use(leases, lease, 2, now=5.0)
    assert leases.overdue_leases(14.0) == []
    assert leases.overdue_leases(15.0) == [("1", "expired")]
    leases.release("1")
    # What was recorded stays recorded: a receipt said twice is answered, a new one is not.
    assert leases.check_use("a", Used("1", 0, 0, 0, 2, 0)) is False
    with pytest.raises(LeaseLostError):
        leases.check_use("a", Used("1", 0, 0, 2, 3, 0))
    assert grant(leases, "b", "2", now=15.0).start == 2
    with pytest.raises(LeaseLostError):
        leases.check_use("a", Used("2", 0, 0, 2, 3, 0))
    for start, stop in [(0, 1), (3, 4), (2, 2), (2, 6)]:
        with pytest.raises(LeaseError, match="from 2 to at most 5"):
            leases.check_use("b", Used("2", 0, 0, start, stop, 0))


def test_the_worker_that_would_finish_last_is_cut_after_what_it_declared():
    leases = table([100, 100])
    fast, slow = grant(leases, "fast", "f"), grant(leases, "slow", "s")
    use(leases, fast, 10, now=1.0)  # has more left, and is ten times as fast
    use(leases, slow, 20, now=20.0)
    leases.sessions.touch(fast.key, 20.0)
    assert grant(leases, "idle", "i", now=20.0) is None
    leases.wait(leases.sessions.touch(("idle", ""), 20.0), 20.0)
    assert set(leases.steals) == {"s"}
    # The owner has promised nothing yet: nothing is cut behind its back.
    assert grant(leases, "idle", "i", now=20.5) is None
    stop = leases.declare(slow, 60)
    assert 60 <= stop < 100
    leases.cut("s", stop, 21.0)
    piece = grant(leases, "idle", "i", now=21.0)
    assert (piece.slice_index, piece.start, piece.stop) == (slow.slice_index, stop, 100)
    with pytest.raises(LeaseError, match=f"at most {stop}"):
        leases.check_use("slow", Used("s", 0, slow.slice_index, 20, stop + 1, 0))
    # An old question that comes late does not lower what was promised since.
    assert leases.declare(piece, 90) is None and leases.declare(piece, 70) is None
    assert piece.declared_until == 90


def test_a_worker_that_lives_and_does_nothing_loses_its_leases():
    leases = table([10, 10])
    lease = grant(leases, "hoarder", "1")
    for now, expected in ((39.0, []), (51.0, [("1", "stalled")])):
        leases.sessions.touch(lease.key, now)
        assert leases.overdue_leases(now) == expected


def test_a_lease_that_is_not_started_goes_whole_to_an_idle_worker():
    leases = table([10, 10])
    started, waiting = grant(leases, "a", "1"), grant(leases, "a", "2")
    use(leases, started, 1, now=5.0)
    leases.wait(leases.sessions.touch(("idle", ""), 5.0), 5.0)
    assert leases.declare(started, 3) is None and leases.declare(waiting, 0) == 0
    leases.cut("2", 0, 5.0)
    assert "2" not in leases.leases and leases.ended["2"].is_complete


def test_an_epoch_ends_without_a_slice_set_aside_until_it_is_readmitted():
    leases = table([4, 4], epochs=2)
    lease, other = grant(leases, "a", "1"), grant(leases, "b", "2")
    leases.set_aside(other.slice_index)
    leases.cut("2", 2, 0.0)
    assert grant(leases, "c", "3") is None
    leases.release("2")
    use(leases, lease, 4)
    assert leases.epoch == 1 and leases.num_aside == 4
    leases.readmit(1 - lease.slice_index)
    for lease_id in "23":
        use(leases, grant(leases, "a", lease_id), 4)
    assert leases.done


def test_empty_slices_count_as_used_and_an_empty_dataset_is_refused():
    leases = table([0, 3, 0])
    assert leases.num_used_slices == 2
    lease = grant(leases, "a", "1")
    assert lease.slice_index == 1
    use(leases, lease, 3)
    assert leases.done
    for samples in ([], [0, 0]):
        with pytest.raises(UsageError, match="sample"):
            table(samples)


def test_a_speed_forgets_and_does_not_count_idleness():
    speed = SpeedEstimate()
    speed.start(0.0)
    speed.add(100, 10.0)
    assert speed.value == pytest.approx(10.0)
    for i in range(60):
        speed.add(20, 10.0 + i + 1)
    assert speed.value == pytest.approx(20.0, rel=0.2)
    speed.since = None
    speed.start(1000.0)
    speed.add(20, 1001.0)
    assert speed.value == pytest.approx(20.0, rel=0.2)
