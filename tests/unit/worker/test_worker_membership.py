"""A worker's membership against a real coordinator: heartbeats outlive any exception, operations any lost answer."""

import json
import threading
from collections.abc import Iterator
from random import Random

import pytest

from forebay.coordinator.messages import Rules
from forebay.coordinator.server import Coordinator
from forebay.errors import NetworkError, UsageError
from forebay.network.client import Client, RemoteError
from forebay.threads import failures
from forebay.worker import membership_state
from forebay.worker.membership import Membership
from forebay.worker.membership_state import CoordinatorUnreachableError, MembershipState, Pause, Request
from support.waiting import until


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with Coordinator(rules=Rules(lost_s=3600.0, stale_s=7200.0), config={"batch_size": 2}) as coordinator:
        yield coordinator


def test_heartbeats_go_on_after_an_unexpected_exception(coordinator, monkeypatch):
    """A broken line in revoked.txt, a descriptor limit: whatever a request raises, news of a change still arrives."""
    real, raised, deaths = Client.request_json, [], []
    monkeypatch.setattr(threading, "excepthook", deaths.append)
    errors = iter([UsageError("revoked.txt: expected a peer id"), OSError(24, "Too many open files")])

    def request_json(self, address, method, path, *args, **more):
        if path.endswith("/heartbeat") and (error := next(errors, None)) is not None:
            raised.append(error)
            raise error
        return real(self, address, method, path, *args, **more)

    monkeypatch.setattr(Client, "request_json", request_json)
    before = failures().get("membership heartbeats", 0)
    with Membership(coordinator.address, "first", lockstep=False) as first:
        first.join()
        with Membership(coordinator.address, "second", lockstep=False) as second:
            joining = threading.Thread(target=second.join)
            joining.start()
            until(lambda: first.changing)
            assert len(raised) == 2
            assert first.boundary(1).world_size == 2
            joining.join()
            assert second.generation.world_size == 2
    assert failures()["membership heartbeats"] == before + 2 and deaths == []


def _state(**more):
    """A state and its clock."""
    now = [0.0]
    value = {
        "settings": {}, "lockstep": False, "step": 0, "samples": 0, "patience_s": 30.0,
        "on_note": lambda text: None, "clock": lambda: now[0], "new_session": lambda: "s", "random": Random(1),
    }  # fmt: skip
    return MembershipState("w", "host:1", **{**value, **more}), now


def test_a_request_without_an_answer_is_repeated_with_longer_pauses_until_patience_ends():
    state, now = _state()
    operation, pauses, effect = state.agreeing(), [], None
    with pytest.raises(CoordinatorUnreachableError, match="no answer for 30 s"):
        effect = next(operation)
        while True:
            assert isinstance(effect, Request) and effect.path == "/v1/config"
            effect = operation.throw(NetworkError("refused"))
            assert isinstance(effect, Pause)
            pauses.append(effect.seconds)
            now[0] += effect.seconds
            effect = operation.send(None)
    assert 25 < now[0] <= 30 and len(pauses) > 10 and max(pauses) <= 2.0


def test_an_expelled_worker_learns_it_by_its_heartbeat_and_joins_under_another_session():
    sessions = iter("ab")
    state, _ = _state(new_session=lambda: next(sessions))
    joining = state.joining()
    assert next(joining).path == "/v1/config"
    request = joining.send({"heartbeat_s": 30, "lost_s": 5, "config": {"batch_size": 2}})
    assert isinstance(request, Request) and request.body["session"] == "a"
    generation = """{"number": 1, "rank": 0, "world_size": 1, "start_step": 0, "start_sample": 0, "source": 0,
        "run_id": "r", "members": [{"worker_id": "w", "rank": 0}]}"""
    joining.send({"waiting": {"members": 3, "waits_for": ["b", "c\x1b"]}})
    assert state.awaited == r"other workers: 3 joined, not ready: 'b', 'c\x1b'"
    with pytest.raises(StopIteration):
        joining.send({"generation": json.loads(generation)})
    beats = state.heartbeats()
    next(beats)
    with pytest.raises(StopIteration):
        beats.throw(RemoteError("given up", 409, "expelled"))
    assert state.changing and state.broken
    assert next(state.joining()).body["session"] == "b"
    assert not state.changing


def test_a_worker_that_is_started_again_before_its_end_was_noticed_is_let_in(coordinator, monkeypatch):
    """Who starts it again, such as a service manager, may be faster than the coordinator."""
    monkeypatch.setattr(membership_state, "NOTICE_S", 3600.0)
    real, refused = Client.request_json, threading.Event()

    def request_json(self, *args, **more):
        try:
            return real(self, *args, **more)
        except RemoteError:
            refused.set()
            raise

    monkeypatch.setattr(Client, "request_json", request_json)
    first, again = Client(None), Membership(coordinator.address, "w")
    # Only the connection's end shows that it has ended.
    body = {"worker_id": "w", "session": "session-1", "wait_s": 30.0}
    first.request_json(coordinator.address, "POST", "/v1/members/join", body)
    thread = threading.Thread(target=again.join)
    thread.start()
    refused.wait()
    first.close()
    thread.join()
    assert again.generation.world_size == 1
    again.leave()
