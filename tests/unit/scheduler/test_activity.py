"""What a scheduler shows of its workers and slices: rates, shares of time, bounded memory, coverage."""

from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.lease.messages import Cause, ExchangeRequest, UseMessage, WorkerStats
from forebay.load.stats import CAUSES
from forebay.scheduler.activity import MAX_CELLS, MAX_EVENTS, MAX_PROCESSES, Activity, WorkerUsage, coverage
from forebay.scheduler.core import SchedulerCore
from forebay.scheduler.events import LeaseReturned, SliceSetAside
from forebay.scheduler.leases import JobSpec


def test_workers_report_the_causes_that_loaders_have():
    assert set(get_args(Cause)) == set(CAUSES) - {"tokenize"}


def test_rates_are_of_the_last_half_minute():
    usage = WorkerUsage("w", 0.0)
    for second in range(100):
        usage.add(1, 50, float(second))
    assert usage.rate(100.0) == pytest.approx(50.0, rel=0.05)
    assert usage.rate(115.0) == pytest.approx(25.0, rel=0.15) and usage.rate(131.0) == 0.0
    assert usage.recent_tokens == sum(tokens for _, tokens in usage.recent)


def test_memory_of_a_worker_that_says_much_is_bounded():
    usage = WorkerUsage("w", 0.0)
    for number in range(10_000):
        usage.add(1, 1, number / 1000)
        usage.add_stats(f"session-{number}", WorkerStats(), number / 1000)
    assert len(usage.recent) <= 129 and len(usage.processes) == MAX_PROCESSES
    usage.add_stats("late", WorkerStats(), 1000.0)
    assert list(usage.processes) == ["late"]


def test_shares_are_of_the_last_reports_and_of_a_wait_in_progress():
    usage = WorkerUsage("w", 0.0)
    for second in range(0, 60, 2):
        waits = {"network": 0.5 * second, "scheduler": 0.1 * max(0, second - 40)}
        stats = WorkerStats(busy_s=0.4 * second, waits_s=waits, ideal_s=0.3 * second)
        usage.add_stats("s", stats, float(second))
    assert usage.describe(60.0)["mfu"] == pytest.approx(0.3)
    assert usage.describe(60.0)["wait_shares"] == {"network": pytest.approx(0.5), "scheduler": pytest.approx(0.1)}
    stuck = WorkerStats(busy_s=0.4 * 58, waits_s=waits, waiting_s=8.0, waiting_for="network")
    usage.add_stats("s", stuck, 68.0)
    assert usage.describe(68.0)["wait_shares"]["network"] > 0.6
    late = WorkerStats(busy_s=24.0, waits_s={"network": 45.0, "scheduler": 9.0})  # It ended as of another.
    usage.add_stats("s", late, 69.0)
    assert sum(usage.describe(69.0)["wait_shares"].values()) == pytest.approx(1.0)
    usage.add_stats("s", WorkerStats(busy_s=0.1), 70.0)  # The process started again.
    assert usage.describe(70.0)["wait_shares"] == {} and usage.describe(200.0)["mfu"] is None


def test_a_share_is_of_enough_time():
    usage = WorkerUsage("w", 0.0)
    for second in (0.0, 3.0, 6.0):
        usage.add_stats("s", WorkerStats(waits_s={"network": second}), second)
        assert usage.describe(second)["wait_shares"] == ({"network": 1.0} if second > 5 else {})


def test_processes_that_share_a_cache_count_it_once():
    usage = WorkerUsage("w", 0.0)
    for session in "ab":
        usage.add_stats(session, WorkerStats(cache_bytes=100, cached_bytes=60, origin_bytes=7), 0.0)
    shown = usage.describe(1.0)
    assert (shown["cache_bytes"], shown["cached_bytes"], shown["origin_bytes"]) == (100, 60, 14)


def test_the_last_events_are_logged_and_retained_with_names(caplog):
    caplog.set_level("INFO")
    activity, core = Activity(), SchedulerCore(JobSpec("j", "0" * 64, np.full(3, 10)))
    peer = SimpleNamespace(peer_id="p", name="alice")
    assert activity.notice(peer, 1.0) is activity.notice(peer, 2.0)
    assert activity.notice(SimpleNamespace(peer_id="q", name="alice"), 1.0).name == "alice (q)"
    result, _ = core.exchange("p", ExchangeRequest(session="s", want=1), 0.0)
    lease = result.leases[0]
    activity.record(core.expire(1000.0), core.table)
    activity.record([SliceSetAside(0, 1, 0, 10, "unreadable")] * (2 * MAX_EVENTS), core.table)
    activity.record([LeaseReturned(lease.lease_id, "released")], core.table)  # Of no interest.
    events = activity.describe()["events"]
    assert len(events) == MAX_EVENTS and events[0]["text"] == "slice 1 is set aside, 10 samples: unreadable"
    again = Activity()
    again.notice(peer, 1.0)
    again.record([LeaseReturned(lease.lease_id, "expired")], core.table)
    assert again.describe()["events"][0]["text"] == f"alice sent nothing for too long: slice {lease.slice} is free"
    assert caplog.messages.count("alice joined") == 2 and caplog.messages[-1] == again.describe()["events"][0]["text"]


@given(st.integers(1, 9000), st.data())
def test_coverage_has_every_slice_in_a_cell(num_slices, data):
    core = SchedulerCore(JobSpec("j", "0" * 64, np.full(num_slices, 4)))
    result, _ = core.exchange("p", ExchangeRequest(session="s", want=2), 0.0)
    used = data.draw(st.integers(0, len(result.leases)))
    for lease in result.leases[:used]:
        use = UseMessage(lease.lease_id, 0, lease.slice, 0, 4, 1)
        core.exchange("p", ExchangeRequest(session="s", uses=(use,)), 0.0)
    shown = coverage(core.table, core.reasons)
    per, cells = shown["slices_per_cell"], len(shown["used"])
    assert cells == len(shown["state"]) == -(-num_slices // per) <= MAX_CELLS
    if core.table.done:
        assert set(shown["used"]) == {"f"}
        return
    for number, lease in enumerate(result.leases):
        digit, state = shown["used"][lease.slice // per], shown["state"][lease.slice // per]
        assert (digit != "0") if number < used else state == "L"
        assert per > 1 or digit == ("f" if number < used else "0")
    assert shown["used"].count("0") >= cells - used
