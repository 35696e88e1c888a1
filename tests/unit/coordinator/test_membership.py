"""Membership: ranks, generations and who is refused; and its laws under any churn, in virtual time."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.coordinator.membership import apply
from forebay.coordinator.messages import (
    ANSWER_S,
    HEARTBEAT_WAIT_S,
    RETRY_S,
    Disconnect,
    Formed,
    Gap,
    Heartbeat,
    Join,
    Leave,
    LogLine,
    PollChange,
    ProposeConfig,
    RankGeneration,
    Ready,
    Refuse,
    Rules,
    RunState,
    Stepped,
    Tick,
)
from forebay.coordinator.store import RunStore

RULES = Rules(min_workers=1, heartbeat_s=30, stale_s=90, lost_s=5, grace_s=300)


class CoordinatorHarness:
    """A state with a clock, and all actions that it returned."""

    def __init__(self, rules: Rules = RULES, **config: Any) -> None:
        config = {"batch_size": 2, **config}
        self.state = RunState(rules, config, config)
        self.now = 0.0
        self.actions: list[Any] = []

    def send(self, *events: Any, after_s: float = 0.0) -> list[Any]:
        self.now += after_s
        new = []
        for event in events:
            self.state, actions = apply(self.state, event, self.now)
            new += actions
        self.actions += new
        return new

    def tick(self, after_s: float) -> None:
        self.send(Tick(), after_s=after_s)

    def beat(self, names: str, step: int, after_s: float = 0.0) -> None:
        self.send(*(Heartbeat(name, f"{name}/1", 1, step) for name in names), after_s=after_s)

    def finish(self, *names: str) -> None:
        self.send(*(Leave(name, f"{name}/1", 1, 10, finished=True) for name in names))

    def join(self, worker_id: str, session: str = "", **facts: Any) -> list[Any]:
        session = session or f"{worker_id}/1"
        return self.send(Join(worker_id, session, **facts), PollChange(worker_id, session, +1))

    def ready(self, worker_id: str, step: int, *, broken: bool = False) -> list[Any]:
        member = self.state.members[worker_id]
        return self.send(Ready(worker_id, member.session, self.generation.number, step, broken))

    @property
    def generation(self) -> RankGeneration:
        assert self.state.generation is not None
        return self.state.generation

    @property
    def ranks(self) -> list[str]:
        return [position.worker_id for position in self.generation.places]

    def codes(self, actions: list[Any]) -> list[str]:
        return [action.code for action in actions if isinstance(action, Refuse)]


def four(**config: Any) -> CoordinatorHarness:
    coordinator = CoordinatorHarness(replace(RULES, min_workers=4), **config)
    for name in "abcd":
        coordinator.join(name)
    return coordinator


def test_a_run_begins_when_enough_are_there_with_ranks_as_they_came() -> None:
    coordinator = CoordinatorHarness(replace(RULES, min_workers=2))
    coordinator.join("b")
    assert coordinator.state.generation is None and coordinator.state.changing
    coordinator.join("a")
    assert coordinator.ranks == ["b", "a"] and coordinator.generation.start_step == 0 and not coordinator.state.changing


def test_a_restart_in_time_gets_its_rank_back() -> None:
    coordinator = four()
    coordinator.send(Disconnect("b", "b/1"), after_s=1)
    coordinator.join("b", "b/2")
    assert coordinator.generation.number == 1 and coordinator.state.changing
    for name in "acd":
        coordinator.ready(name, 7)
    assert coordinator.generation.number == 2 and coordinator.ranks == list("abcd")
    new = coordinator.generation
    assert (new.start_step, new.start_sample, new.source) == (7, 7 * 4 * 2, 0)


def test_after_the_coordinators_restart_a_member_has_time_to_notice_that_it_was_gone(tmp_path: Path) -> None:
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


def test_who_stays_keeps_its_order_and_who_comes_late_its_old_seat() -> None:
    coordinator = four()
    coordinator.send(Disconnect("b", "b/1"))
    for name in "acd":
        coordinator.ready(name, 3, broken=True)
    assert coordinator.generation.number == 1  # b may come back
    coordinator.tick(5)
    assert coordinator.generation.number == 2 and coordinator.ranks == list("acd")
    coordinator.join("b", "b/2")
    for name in "acd":
        coordinator.ready(name, 4)
    assert coordinator.ranks == list("abcd") and coordinator.generation.start_sample == 3 * 8 + 1 * 6


def test_a_duplicate_of_a_live_worker_is_refused_and_one_in_doubt_asked_to_wait() -> None:
    coordinator = four()
    assert coordinator.codes(coordinator.join("b", "b/2")) == ["duplicate"]
    coordinator.send(PollChange("c", "c/1", -1))
    assert coordinator.codes(coordinator.join("c", "c/2")) == ["unsure"]
    coordinator.now += 6
    assert coordinator.codes(coordinator.join("c", "c/2")) == []
    assert coordinator.state.members["c"].session == "c/2"


def test_the_furthest_is_the_source_and_late_words_of_an_old_generation_change_nothing() -> None:
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


def test_a_change_that_is_called_off_goes_on_in_the_same_generation() -> None:
    coordinator = four()
    coordinator.join("e")
    coordinator.ready("a", 2)
    coordinator.send(Leave("e", "e/1", 0, 0))
    assert coordinator.generation.number == 1
    assert not coordinator.state.changing and not coordinator.state.members["a"].ready


def test_silence_is_borne_while_nobody_waits_and_a_hung_step_only_for_so_long() -> None:
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


def test_a_member_whose_answer_was_lost_stays_until_it_must_have_asked_again() -> None:
    """Its heartbeat is answered with the news that a change is wanted, and the answer does not arrive. It computes on,
    and asks again when its client gives up: after the heartbeat's `wait_s` and ANSWER_S. It is expelled only later."""
    coordinator = four()
    coordinator.send(Heartbeat("b", "b/1", 1, 1), PollChange("b", "b/1", -1), PollChange("b", "b/1", +1, 20.0))
    coordinator.join("e")
    coordinator.send(PollChange("b", "b/1", -1))  # answered: {changing}
    for name in "acd":
        coordinator.ready(name, 2)
    for _ in range(24):
        coordinator.tick(1)
    coordinator.send(Heartbeat("b", "b/1", 1, 2), PollChange("b", "b/1", +1, 20.0), after_s=20 + ANSWER_S - 24)
    coordinator.ready("b", 2)
    assert coordinator.ranks == list("abcde")
    coordinator.send(
        PollChange("c", "c/1", -1), PollChange("c", "c/1", +1, 2.0), PollChange("c", "c/1", -1)
    )  # and one that does not
    coordinator.send(Leave("e", "e/1", 2, 2))
    coordinator.tick(2 + ANSWER_S + RULES.lost_s - 0.1)
    assert "c" in coordinator.state.members
    coordinator.tick(0.2)
    assert "c" not in coordinator.state.members


def test_independent_workers_catch_up_first_and_the_dead_leave_named_gaps() -> None:
    coordinator = four(lockstep=False)
    coordinator.send(Heartbeat("d", "d/1", 1, 4), Disconnect("d", "d/1"))
    coordinator.tick(6)
    coordinator.ready("a", 6)
    coordinator.ready("b", 2)
    coordinator.ready("c", 3)
    assert coordinator.state.run_to == 6
    assert coordinator.state.members["a"].ready and not coordinator.state.members["b"].ready
    coordinator.ready("b", 6)
    coordinator.ready("c", 6)
    assert coordinator.generation.start_step == 6 and coordinator.ranks == list("abc")
    assert Gap(1, "d", 3, 4, 6) in coordinator.actions


def test_a_run_that_is_done_stays_done_and_who_comes_back_does_not_wait_for_others() -> None:
    coordinator = four()
    for name in "abc":
        coordinator.finish(name)
        assert not coordinator.state.changing
    coordinator.finish("d")
    assert coordinator.state.done
    coordinator.join("b", "b/2")
    assert coordinator.ranks == ["b"]
    assert (coordinator.generation.start_step, coordinator.generation.start_sample) == (10, 80)


def test_with_nobody_left_a_checkpoint_counts_and_without_one_the_run_begins_again() -> None:
    coordinator = CoordinatorHarness()
    coordinator.join("a")
    coordinator.send(Heartbeat("a", "a/1", 1, 50), Disconnect("a", "a/1"))
    coordinator.tick(6)
    coordinator.join("a", "a/2", step=40, samples=80)
    assert (coordinator.generation.start_step, coordinator.generation.start_sample) == (40, 80)
    assert any(isinstance(action, LogLine) and "redone" in action.text for action in coordinator.actions)


def test_the_first_worker_settles_what_the_coordinator_has_no_value_for() -> None:
    coordinator = CoordinatorHarness(batch_size=8)
    coordinator.send(ProposeConfig({"batch_size": 4, "seq_len": 64}))
    coordinator.join("a")
    coordinator.send(ProposeConfig({"batch_size": 2, "seq_len": 32}))
    assert coordinator.state.config == {"batch_size": 8, "seq_len": 64}


@dataclass
class Process:
    """A worker as the simulation sees it. `weights` are the steps in them: (generation, step)."""

    name: str
    session: str
    known: int = 0
    step: int = 0
    training: bool = False
    alive: bool = True
    weights: list[tuple[int, int]] = field(default_factory=list)
    holds: bool = True


class Churn(RuleBasedStateMachine):
    """Workers join, step, die, come back and leave as they like; what was trained must be one clean run."""

    names = st.sampled_from("abcde")

    @initialize(crowd=st.integers(1, 4), min_workers=st.integers(1, 3), lockstep=st.booleans())
    def begin(self, crowd: int, min_workers: int, lockstep: bool) -> None:
        self.lockstep = lockstep
        self.coordinator = CoordinatorHarness(replace(RULES, min_workers=min_workers), lockstep=lockstep)
        self.processes: dict[str, Process] = {}
        self.generations: dict[int, RankGeneration] = {}
        self.source_weights: dict[int, list[tuple[int, int]]] = {}
        self.parts: dict[tuple[int, int, int], str] = {}
        self.sessions = 0
        for name in "abcd"[:crowd]:
            self.start(name)
        self.all_stop()

    def all_stop(self, *, broken: bool = False) -> None:
        for process in list(self.processes.values()):
            self.stop(process.name, broken)
        for process in list(self.processes.values()):
            self.receive(process.name)

    def send(self, *events: Any) -> list[Any]:
        actions = []
        for event in events:
            before = self.coordinator.state
            for action in (new := self.coordinator.send(event)):
                if isinstance(action, Formed):
                    self.formed(before, action.generation)
            actions += new
        return actions

    def formed(self, before: RunState, new: RankGeneration) -> None:
        old = before.generation
        sessions = [position.session for position in new.places]
        assert len(set(sessions)) == len({position.worker_id for position in new.places}) == len(sessions) > 0
        assert new.number == (1 if old is None else old.number + 1)
        seats = [self.coordinator.state.members[position.worker_id].seat for position in new.places]
        assert seats == sorted(seats)
        by_session = {process.session: process for process in self.processes.values()}
        for process in self.processes.values():
            # Nobody of the old generation trains on, unless it was given up.
            assert not (process.alive and process.training and process.session in sessions)
        survivors = [s for s in sessions if old is not None and old.rank_of(s) is not None]
        source = by_session[sessions[new.source]]
        if survivors and not self.lockstep:
            assert new.start_step == max(by_session[s].step for s in survivors)
        if self.lockstep:
            holders = [by_session[s] for s in survivors if by_session[s].holds]
            if holders:
                assert source in holders and new.start_step >= old.start_step  # type: ignore[union-attr]
                assert new.start_step == max(len(process.weights) for process in holders)
            self.source_weights[new.number] = list(source.weights)
            assert len(source.weights) == new.start_step and self.samples(source) == new.start_sample
        elif old is not None:
            # Everybody's part of every step that counts was done, by somebody or as a named gap; none beyond.
            assert new.start_sample == old.sample_at(new.start_step, 2)
            gaps = {(g.rank, s) for g in self.coordinator.actions if isinstance(g, Gap) and g.generation == old.number
                    for s in range(g.start, g.stop)}  # fmt: skip
            for step in range(old.start_step, new.start_step):
                for rank in range(len(old.places)):
                    assert ((old.number, rank, step) in self.parts) or (rank, step) in gaps
            for number, rank, step in self.parts:
                if number == old.number and old.places[rank].session in sessions:
                    assert step < new.start_step
        self.generations[new.number] = new

    def samples(self, process: Process) -> int:
        """Return the number of samples that its weights have learned."""
        if not process.weights:
            return 0
        number, step = process.weights[-1]
        return self.generations[number].sample_at(step + 1, 2)

    @rule(name=names)
    def start(self, name: str) -> None:
        """A new process under a name; refused if its other process lives."""
        old = self.processes.get(name)
        self.sessions += 1
        session = f"{name}/{self.sessions}"
        self.processes[name] = Process(name, session)
        before = self.coordinator.state.members[name].session if name in self.coordinator.state.members else ""
        actions = self.send(Join(name, session))
        if any(isinstance(action, Refuse) for action in actions):
            assert old is not None
            self.processes[name] = old
            member = self.coordinator.state.members[name]
            assert member.polling or self.coordinator.now - member.seen_at <= RULES.lost_s
            return
        assert old is None or not old.alive or old.session != before
        self.send(PollChange(name, session, +1))
        self.receive(name)

    def receive(self, name: str, *, takes_over: bool = True) -> None:
        """A waiting process receives a generation; it may fail to take over the source's weights."""
        process, generation = self.processes.get(name), self.coordinator.state.generation
        if process is None or not process.alive or process.training or generation is None:
            return
        if process.known >= generation.number:
            process.training = not self.coordinator.state.changing or process.step < self.coordinator.state.run_to
        elif generation.rank_of(process.session) is not None:
            process.known, process.step, process.training = generation.number, generation.start_step, True
            if self.lockstep and (process.weights == self.source_weights[generation.number] or takes_over):
                process.weights, process.holds = list(self.source_weights[generation.number]), True
            elif self.lockstep:
                process.holds = False

    @rule(name=names, takes_over=st.booleans())
    def listen(self, name: str, takes_over: bool) -> None:
        self.receive(name, takes_over=takes_over)

    @rule(apart=st.booleans(), names=st.sets(names))
    def step_together(self, apart: bool, names: set[str]) -> None:
        """All ranks finish a step; or, as one dies amid it, only some learn that it is finished."""
        generation = self.coordinator.state.generation
        if generation is None or not self.lockstep:
            return
        group = [self.processes[position.worker_id] for position in generation.places]
        full = all(
            p.alive and p.training and p.holds and (p.known, p.session) == (generation.number, position.session)
            for p, position in zip(group, generation.places)
        )
        if not full or len({p.step for p in group}) != 1:
            return
        for process in group:
            if not apart or process.name in names:
                process.weights.append((generation.number, process.step))
                process.step += 1

    @rule(names=st.sets(names), victim=names)
    def fall_apart(self, names: set[str], victim: str) -> None:
        """One dies amid a step; whoever is left stops, and in time goes on without it."""
        for _ in range(2):
            self.step_together(False, set())
        self.step_together(True, names)
        self.kill(victim, True)
        self.all_stop(broken=True)
        self.wait(6.0)
        self.all_stop()

    @rule(name=names, steps=st.integers(1, 3))
    def step_alone(self, name: str, steps: int) -> None:
        process = self.processes.get(name)
        if self.lockstep or process is None or not (process.alive and process.training):
            return
        rank = self.generations[process.known].rank_of(process.session)
        for _ in range(steps):
            assert rank is not None
            self.parts[process.known, rank, process.step] = process.session
            process.step += 1

    @rule(name=names, broken=st.booleans())
    def stop(self, name: str, broken: bool) -> None:
        """At a boundary: a change is wanted, or the collective broke."""
        process = self.processes.get(name)
        if process is None or not (process.alive and process.training):
            return
        process.training = False
        current = (len(process.weights), self.samples(process)) if self.lockstep and not process.holds else ()
        broken = self.lockstep and (broken or not process.holds)
        actions = self.send(Ready(name, process.session, process.known, process.step, broken, *current))
        if any(isinstance(action, Refuse) and action.code == "expelled" for action in actions):
            process.alive = False
        self.receive(name)

    @rule(name=names)
    def beat(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None and process.alive:
            self.send(Heartbeat(name, process.session, process.known, process.step))

    @rule(name=names, noticed=st.booleans())
    def kill(self, name: str, noticed: bool) -> None:
        process = self.processes.get(name)
        if process is None or not process.alive:
            return
        process.alive = process.training = False
        if noticed:
            self.send(Disconnect(name, process.session))
        self.send(PollChange(name, process.session, -1))

    @rule(name=names)
    def leave(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None and process.alive:
            process.alive = process.training = False
            self.send(Leave(name, process.session, process.known, process.step))

    @rule(seconds=st.sampled_from([1.0, 6.0, 40.0]))
    def wait(self, seconds: float) -> None:
        for process in list(self.processes.values()):
            self.beat(process.name)
        self.coordinator.now += seconds
        self.send(Tick())

    @precondition(lambda self: hasattr(self, "processes"))
    @invariant()
    def one_clean_run(self) -> None:
        """The weights of whoever trains now hold each step once, and each sample once, from 0 without a hole."""
        generation = self.coordinator.state.generation
        for process in self.processes.values():
            is_in = generation is not None and process.known == generation.number and process.training
            if not (self.lockstep and is_in and process.holds):
                continue
            assert [step for _, step in process.weights] == list(range(process.step))
            used: list[int] = []
            for number, step in process.weights:
                current = self.generations[number]
                first, width = current.sample_at(step, 2), len(current.places)
                shares = [range(first + rank, first + 2 * width, width) for rank in range(width)]
                used += [sample for share in shares for sample in share]
            assert sorted(used) == list(range(len(used)))
        stepped = [action for action in self.coordinator.actions if isinstance(action, Stepped)]
        for before, after in itertools.pairwise(stepped):
            assert after.generation > before.generation or after.start == before.stop


Churn.TestCase.settings = settings(stateful_step_count=40)
TestChurn = Churn.TestCase
