"""Membership: ranks, generations and who is refused, in virtual time. Under any churn: tests/sim/test_elastic.py."""

import contextlib
from dataclasses import replace
from typing import Any

from forebay.coordinator.membership import reply
from forebay.coordinator.messages import (
    ANSWER_S,
    HEARTBEAT_WAIT_S,
    RETRY_S,
    Disconnect,
    Gap,
    Heartbeat,
    Leave,
    LogLine,
    PollChange,
    ProposeConfig,
    Ready,
)
from forebay.coordinator.store import RunStore
from support.memberships import RULES, CoordinatorHarness


def four(**config: Any) -> CoordinatorHarness:
    coordinator = CoordinatorHarness(replace(RULES, min_workers=4), **config)
    for name in "abcd":
        coordinator.join(name)
    return coordinator


def test_after_the_coordinators_restart_a_member_has_time_to_notice_that_it_was_gone(tmp_path):
    """Its heartbeat may wait for an answer that never comes, and it pauses before the next."""
    coordinator = four()
    with contextlib.closing(RunStore(tmp_path)) as roster:
        roster.save(coordinator.state, [], "run")
    with contextlib.closing(RunStore(tmp_path)) as roster:
        coordinator.state, _ = roster.load(coordinator.state.rules, coordinator.state.fixed, coordinator.now, "")
    coordinator.send(Disconnect("b", "b/1"))
    coordinator.join("e")
    noticed_s = HEARTBEAT_WAIT_S + ANSWER_S + RETRY_S
    coordinator.tick(noticed_s)
    assert list(coordinator.state.members) == list("acde")
    coordinator.send(Heartbeat("a", "a/1", 1, 3), PollChange("a", "a/1", +1))
    coordinator.tick(RULES.lost_s + 0.1)
    assert list(coordinator.state.members) == list("ae")


def test_who_stays_keeps_its_order_and_who_comes_late_its_old_seat():
    coordinator = four()
    coordinator.send(Disconnect("b", "b/1"))
    for name in "acd":
        coordinator.ready(name, 3, broken=True)
    assert coordinator.generation.number == 1  # b may come back
    assert reply(coordinator.state, Ready("a", "a/1", 1, 3), "")["waiting"] == {"members": 4, "waits_for": ["b"]}
    coordinator.tick(5)
    assert coordinator.generation.number == 2 and coordinator.ranks == list("acd")
    coordinator.join("b", "b/2")
    for name in "acd":
        coordinator.ready(name, 4)
    assert coordinator.ranks == list("abcd") and coordinator.generation.start_sample == 3 * 8 + 1 * 6


def test_a_duplicate_of_a_live_worker_is_refused_and_one_in_doubt_asked_to_wait():
    coordinator = four()
    assert coordinator.codes(coordinator.join("b", "b/2")) == ["duplicate"]
    coordinator.send(PollChange("c", "c/1", -1))
    assert coordinator.codes(coordinator.join("c", "c/2")) == ["unsure"]
    coordinator.now += 6
    assert coordinator.codes(coordinator.join("c", "c/2")) == []
    assert coordinator.state.members["c"].session == "c/2"


def test_the_furthest_is_the_source_and_late_words_of_an_old_generation_change_nothing():
    coordinator = four()
    coordinator.send(Disconnect("d", "d/1"))
    coordinator.ready("a", 4, broken=True)
    coordinator.ready("b", 5, broken=True)
    coordinator.ready("c", 4, broken=True)
    coordinator.tick(6)
    assert (coordinator.generation.source, coordinator.generation.start_step) == (1, 5)
    assert coordinator.ranks == list("abc")
    before = coordinator.state
    assert coordinator.codes(coordinator.send(Ready("d", "d/1", 1, 9))) == ["expelled"]
    coordinator.send(Ready("a", "a/1", 1, 99, broken=True), Heartbeat("a", "a/1", 1, 99))
    assert replace(coordinator.state, members={}) == replace(before, members={})
    assert coordinator.codes(coordinator.ready("a", 4)) == ["bad_step"]


def test_a_change_that_is_called_off_goes_on_in_the_same_generation():
    coordinator = four()
    coordinator.join("e")
    coordinator.ready("a", 2)
    coordinator.send(Leave("e", "e/1", 0, 0))
    assert coordinator.generation.number == 1
    assert not coordinator.state.changing and not coordinator.state.members["a"].ready


def test_silence_is_borne_while_nobody_waits_and_a_hung_step_only_for_so_long():
    coordinator = four()
    coordinator.send(PollChange("b", "b/1", -1))
    coordinator.tick(80)
    assert "b" in coordinator.state.members
    coordinator.beat("acd", 1)
    coordinator.tick(10)
    assert "b" not in coordinator.state.members and coordinator.state.changing
    for name in "ac":
        coordinator.ready(name, 1)
    for _ in range(31):
        coordinator.beat("acd", 1, after_s=10)
    assert coordinator.ranks == list("ac")


def test_a_member_whose_answer_was_lost_stays_until_it_must_have_asked_again():
    """Its heartbeat is answered with the news that a change is wanted, and the answer does not arrive. It computes on,
    and asks again when its client gives up: after the heartbeat's `wait_s` and ANSWER_S. It is expelled only later."""
    coordinator = four()
    coordinator.join("e")
    coordinator.send(PollChange("c", "c/1", -1), PollChange("c", "c/1", +1, 2.0), PollChange("c", "c/1", -1))
    coordinator.tick(2 + ANSWER_S + RULES.lost_s - 0.1)
    assert "c" in coordinator.state.members
    coordinator.tick(0.2)
    assert "c" not in coordinator.state.members


def test_independent_workers_catch_up_first_and_the_dead_leave_named_gaps():
    coordinator = four(lockstep=False)
    coordinator.send(Heartbeat("d", "d/1", 1, 4), Disconnect("d", "d/1"))
    coordinator.send(Leave("c", "c/1", 1, 6))
    coordinator.tick(6)
    coordinator.ready("a", 6)
    coordinator.ready("b", 2)
    assert coordinator.state.run_to == 6
    assert coordinator.state.members["a"].ready and not coordinator.state.members["b"].ready
    coordinator.ready("b", 6)
    assert coordinator.generation.start_step == 6 and coordinator.ranks == list("ab")
    assert [action for action in coordinator.actions if isinstance(action, Gap)] == [Gap(1, "d", 3, 4, 6)]


def test_a_run_that_is_done_stays_done_and_who_comes_back_does_not_wait_for_others():
    coordinator = four()
    for name in "abc":
        coordinator.finish(name)
        assert not coordinator.state.changing
    coordinator.finish("d")
    assert coordinator.state.done
    coordinator.join("b", "b/2")
    assert coordinator.ranks == ["b"]
    assert (coordinator.generation.start_step, coordinator.generation.start_sample) == (10, 80)


def test_with_nobody_left_a_checkpoint_counts_and_without_one_the_run_begins_again():
    coordinator = CoordinatorHarness()
    coordinator.join("a")
    coordinator.send(Heartbeat("a", "a/1", 1, 50), Disconnect("a", "a/1"))
    coordinator.tick(6)
    coordinator.join("a", "a/2", step=40, samples=80)
    assert (coordinator.generation.start_step, coordinator.generation.start_sample) == (40, 80)
    assert any(isinstance(action, LogLine) and "redone" in action.text for action in coordinator.actions)


def test_the_first_worker_settles_what_the_coordinator_has_no_value_for():
    coordinator = CoordinatorHarness(batch_size=8)
    coordinator.send(ProposeConfig({"batch_size": 4, "seq_len": 64}))
    coordinator.join("a")
    coordinator.send(ProposeConfig({"batch_size": 2, "seq_len": 32}))
    assert coordinator.state.config == {"batch_size": 8, "seq_len": 64}
