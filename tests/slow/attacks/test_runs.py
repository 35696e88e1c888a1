"""What a worker may do to a run: false steps, other ranks' keys, other members' names."""

from forebay.coordinator.messages import Leave, LogLine, PollChange, Stepped, Tick
from support.attacked import Run, post_as
from support.attackers import answers, request
from support.wire import connect

LIE = 2**61


def test_a_step_that_one_member_alone_says_is_finished_does_not_count(coordinator, evil, honest):
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


def test_weights_beyond_what_counts_are_nobodys_source():
    run = Run("a", "b", "evil", min_workers=3)
    run.beat("ab", 5)
    run.ready("evil", LIE, broken=True)
    run.ready("a", 6)
    run.ready("b", 5)
    assert run.generation.number == 2 and run.generation.start_step == 6 and run.generation.source == 0
    stepped = [action for action in run.actions if isinstance(action, Stepped)]
    assert max(action.stop for action in stepped) == 6  # the log has the step that one of two finished


def test_a_joiner_takes_no_abandoned_run_to_a_step_that_nobody_reached():
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


def test_a_run_does_not_end_at_the_word_of_one_member():
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


def test_the_last_of_two_ends_the_run_though_the_other_died():
    run = Run("a", "b")
    run.beat("b", 8)
    run.send(Leave("a", "a/1", 1, 9, finished=True))
    assert run.state.end is None
    run.now = 1000.0
    run.send(Tick())
    assert run.state.end == 9 and run.state.done


def test_who_reports_that_generations_break_is_named_and_nobody_is_removed_for_it():
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


def test_a_member_of_one_certificate_alone_is_believed():
    run = Run()
    for name in "ab":
        run.join(name, peer_id="one")
    run.beat("a", 4)
    assert run.state.reached == 4


def test_keys_of_the_rendezvous_have_one_rank_that_sets_them():
    """As Gloo names them in PyTorch 2.2 and 2.13, and NCCL."""
    from forebay.worker.collective import CoordinatorStore

    asked = []
    store = CoordinatorStore(lambda rank, *_: asked.append(rank) or b"x", 1.0, lambda: True)
    for key in ("0//cpu//0/2", "default_pg/0//cpu//0/rank_12", "0//cuda//0", "0//cuda//3", "init"):
        store.set(key, b"v")
        assert store.get(key) and store.check([key])
    assert asked == [2] * 3 + [12] * 3 + [0] * 9


def test_a_workers_name_is_not_another_members_to_take(coordinator, evil, honest):
    assert post_as(coordinator, honest, "join")[0] == 200
    status, message = post_as(coordinator, evil, "join", worker_id="honest")
    assert (status, message["error"]) == (409, "duplicate")
    late = Run("a", "b")
    late.now = 80.0  # silent for longer than a restart takes
    late.send(PollChange("a", "a/1", -1))
    late.now = 89.0
    assert late.codes(late.join("a", "x", peer_id="peer evil")) == ["duplicate"]
