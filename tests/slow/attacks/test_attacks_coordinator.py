"""What a worker does to a run: false steps, other members' names, joins and breaks without end."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.coordinator.membership import MAX_SEATS
from forebay.coordinator.messages import Leave, LogLine, PollChange, Rules, Stepped, Tick
from forebay.coordinator.server import Coordinator
from forebay.network.pki.identity import Identity
from support.attackers import answers, ask, issue, request
from support.memberships import CoordinatorHarness
from support.wire import connect

LIE = 2**61


@pytest.fixture
def coordinator(network_dir: Path, tmp_path: Path) -> Iterator[Coordinator]:
    rules = Rules(workers_per_peer=2)
    identity = issue(network_dir, "coordinator")
    with Coordinator(state_dir=tmp_path / "run", rules=rules, config={"batch_size": 2}, identity=identity) as created:
        yield created


def post_as(coordinator: Coordinator, member: Identity, verb: str, **fields: Any) -> tuple[int, Any]:
    body = {"worker_id": member.name, "session": f"{member.name}-session", **fields}
    return ask(member, coordinator.address, "POST", f"/v1/members/{verb}", body)


class Run(CoordinatorHarness):
    """The membership of a run whose workers are of certificates of their own."""

    def __init__(self, *names: str, min_workers: int = 2) -> None:
        super().__init__(Rules(min_workers=min_workers))
        for name in names:
            self.join(name)

    def join(self, worker_id: str, session: str = "", **fields: Any) -> list:
        return super().join(worker_id, session, **{"peer_id": f"peer {worker_id}", **fields})


def test_a_step_that_one_member_alone_says_is_finished_does_not_count(
    coordinator: Coordinator, evil: Identity, honest: Identity
) -> None:
    """Each keeps its connection: one that closes is a process that ended."""
    with connect(honest, coordinator.address) as first, connect(evil, coordinator.address) as second:

        def post(sock, name, verb, **fields):
            body = {"worker_id": name, "session": f"{name}-session", **fields}
            return answers(sock, request("POST", f"/v1/members/{verb}", body))[0].status

        assert post(first, "honest", "join") == post(second, "evil", "join") == 200
        assert post(first, "honest", "ready", generation=1) == 200
        generation = coordinator.status()["generation"]
        assert len(generation["members"]) == 2
        assert post(second, "evil", "heartbeat", generation=generation["number"], step=LIE) == 200
        assert coordinator.status()["step"] == 0
        assert post(first, "honest", "heartbeat", generation=generation["number"], step=3) == 200
        assert coordinator.status()["step"] == 3
        assert post(second, "evil", "leave", generation=generation["number"], step=LIE, finished=True) == 200
        assert coordinator.status()["step"] == 3 and not coordinator.done


def test_weights_beyond_what_counts_are_nobodys_source() -> None:
    run = Run("a", "b", "evil", min_workers=3)
    run.beat("ab", 5)
    run.ready("evil", LIE, broken=True)
    run.ready("a", 6)
    run.ready("b", 5)
    assert run.generation.number == 2 and run.generation.start_step == 6 and run.generation.source == 0
    stepped = [action for action in run.actions if isinstance(action, Stepped)]
    assert max(action.stop for action in stepped) == 6  # the log has the step that one of two finished


def test_a_joiner_takes_no_abandoned_run_to_a_step_that_nobody_reached() -> None:
    run = Run("a", "b", min_workers=1)
    run.ready("a", 0)
    run.beat("ab", 7)
    for name in ("a", "b"):
        run.send(Leave(name, f"{name}/1", 2, 7))
    run.join("evil", step=LIE)
    assert run.generation.number == 3 and run.generation.start_step == 7
    run.join("a", "a/2", step=6)
    run.ready("evil", 0)
    assert run.generation.start_step <= 7 and run.generation.start_sample <= 7 * 2 * 2


def test_a_run_does_not_end_at_the_word_of_one_member() -> None:
    run = Run("a", "b", "evil", min_workers=3)
    run.beat("ab", 5)
    run.send(Leave("evil", "evil/1", 1, LIE, finished=True))
    assert run.state.end is None and run.state.floor == 0
    run.ready("a", 5, broken=True)
    run.ready("b", 5)
    assert run.generation.number == 2 and run.generation.start_step == 5
    for name in ("a", "b"):
        run.send(Leave(name, f"{name}/1", 2, 9, finished=True))
    assert run.state.end == 9 and run.state.done


def test_the_last_of_two_ends_the_run_though_the_other_died() -> None:
    run = Run("a", "b")
    run.beat("b", 8)
    run.send(Leave("a", "a/1", 1, 9, finished=True))
    assert run.state.end is None
    run.now = 1000.0
    run.send(Tick())
    assert run.state.end == 9 and run.state.done


def test_seats_of_who_never_finished_a_step_are_forgotten() -> None:
    """Names that join and leave make no state that grows, nor ranks that no member has."""
    run = Run("a", "b")
    for number in range(20):
        run.join(f"evil{number}")
        run.send(Leave(f"evil{number}", f"evil{number}/1", 0, 0))
    assert len(run.state.seats) <= 2 and len(run.generation.places) <= 3
    run.beat("ab", 3)
    run.send(Leave("b", "b/1", run.generation.number, 3))
    run.join("c")
    run.ready("a", 3)
    run.join("b", "b/2")
    run.ready("a", 3)
    run.ready("c", 3)
    assert run.ranks == ["a", "b", "c"]
    run.state = replace(run.state, seats={f"old{number}": number for number in range(3 * MAX_SEATS)})
    run.beat("a", 9)
    run.send(Leave("b", "b/2", run.generation.number, 9))
    assert len(run.state.seats) == MAX_SEATS and "b" in run.state.seats


def test_who_reports_that_generations_break_is_named_and_nobody_is_removed_for_it() -> None:
    """Either the report is a lie, or another member made it true: the coordinator cannot tell which."""
    run = Run("a", "b", "evil", min_workers=3)
    for number, first in enumerate(["evil", "a"] * 4):
        for name in sorted(["a", "b", "evil"], key=lambda name: name != first):
            run.ready(name, 0, broken=name != "b")
        assert run.generation.number == number + 2 and len(run.state.members) == 3
    lines = [action.text for action in run.actions if isinstance(action, LogLine) and "broken" in action.text]
    assert lines[:2] == [
        f"generation {n} is broken, reports worker {who!r} (peer {who})" for n, who in [(1, "evil"), (2, "a")]
    ]


def test_a_member_of_one_certificate_alone_is_believed() -> None:
    run = Run()
    for name in "ab":
        run.join(name, peer_id="one")
    run.beat("a", 4)
    assert run.state.reached == 4


def test_keys_of_the_rendezvous_have_one_rank_that_sets_them() -> None:
    """As Gloo names them in PyTorch 2.2 and 2.13, and NCCL."""
    from forebay.worker.collective import CoordinatorStore

    asked = []
    store = CoordinatorStore(lambda rank, *_: asked.append(rank) or b"x", 1.0, lambda: True)
    for key in ("0//cpu//0/2", "default_pg/0//cpu//0/rank_12", "0//cuda//0", "0//cuda//3", "init"):
        store.set(key, b"v")
        assert store.get(key) and store.check([key])
    assert asked == [2] * 3 + [12] * 3 + [0] * 9


def test_a_workers_name_is_not_another_members_to_take(
    coordinator: Coordinator, evil: Identity, honest: Identity
) -> None:
    assert post_as(coordinator, honest, "join")[0] == 200
    status, message = post_as(coordinator, evil, "join", worker_id="honest")
    assert (status, message["error"]) == (409, "duplicate")
    late = Run("a", "b")
    late.now = 80.0  # silent for longer than a restart takes
    late.send(PollChange("a", "a/1", -1))
    late.now = 89.0
    assert late.codes(late.join("a", "x", peer_id="peer evil")) == ["duplicate"]


def test_who_joins_and_leaves_without_end_has_to_wait(
    coordinator: Coordinator, evil: Identity, honest: Identity
) -> None:
    """Each join stops all others at the end of a step."""
    statuses = []
    for _ in range(6):
        statuses.append(post_as(coordinator, evil, "join")[0])
        post_as(coordinator, evil, "leave")
    assert statuses == [200] * 4 + [429] * 2
    assert post_as(coordinator, honest, "join")[0] == 200
    assert coordinator._state.seats == {}


def test_the_role_and_the_settings_of_a_run(coordinator: Coordinator, network_dir: Path, evil: Identity) -> None:
    """Members without the role are no workers, and none settles what all train on."""
    assert post_as(coordinator, issue(network_dir, "data", "data"), "join")[0] == 403
    settings = {"settings": {"dataset_name": "/etc", "num_steps": 1}}
    assert ask(evil, coordinator.address, "POST", "/v1/config", settings)[1]["config"] == {"batch_size": 2}
    for number in range(2):
        assert post_as(coordinator, evil, "join", worker_id=f"w{number}", session=f"session-{number}")[0] == 200
    status, message = post_as(coordinator, evil, "join", worker_id="w2", session="session-2")
    assert (status, message["error"]) == (429, "too_many_workers")


def test_news_of_a_member_are_limited_as_each_costs_a_write(coordinator: Coordinator, evil: Identity) -> None:
    limits = coordinator._server._core.limits
    assert limits.requests_per_s <= 16 and limits.requests_per_peer <= 8
    assert post_as(coordinator, evil, "join")[0] == 200
    beats = [{"worker_id": "evil", "session": "evil-session", "generation": 1, "step": step} for step in range(60)]
    began = time.monotonic()
    with connect(evil, coordinator.address) as sock:
        result = [
            item.status for item in answers(sock, *(request("POST", "/v1/members/heartbeat", item) for item in beats))
        ]
    allowed = limits.requests_per_s * (2 + time.monotonic() - began) + 1  # a slow machine asks less often
    assert set(result) <= {200, 429} and result.count(200) <= allowed
