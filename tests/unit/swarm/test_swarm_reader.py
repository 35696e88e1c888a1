"""A reader of a swarm: what it says, what it makes of replies, and that nobody waits for it for ever."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import threads
from forebay.dataset.manifest import SliceInfo, SliceTable
from forebay.errors import NetworkError, ProtocolError
from forebay.network.client import Client
from forebay.network.peer import Provider
from forebay.storage.base import PermanentError
from forebay.swarm.reader import SwarmReader
from forebay.swarm.reader_state import SwarmReaderState

ORIGIN = Provider("origin", "127.0.0.1:1", True)


def assigning(*indexes: int, **more: Any) -> dict[str, Any]:
    holder = {"member": "origin", "peer_id": "origin", "address": "127.0.0.1:1", "is_origin": True}
    return {"assignments": [{"index": index, **holder} for index in indexes], "wait_s": 0.2, **more}


def begun(state: SwarmReaderState, now: float, *indexes: int) -> list[int]:
    state.request(now, None)
    return [index for index, _ in state.receive(assigning(*indexes), now)[0]]


def test_news_is_said_again_until_a_tracker_answers_and_only_wanted_slices_begin() -> None:
    state = SwarmReaderState(0.0, address="127.0.0.1:9", downloads=2)
    state.want(1, 0.0)
    assert state.is_have_due(0.0)
    assert state.request(0.0, np.array([True, False, False]))["have"] == "0"
    assert [index for index, _ in state.receive(assigning(1, 2), 0.0)[0]] == [1]
    assert state.ended(1, ORIGIN, None, 1.0) and state.is_request_due
    body = state.request(1.0, None)
    assert body["finished"] == [1] and body["num"] == 2 and not state.is_request_due
    assert state.unanswered(body) > 0 and state.is_request_due and state.is_have_due(1.0)
    assert state.request(2.0, np.array([True, True, False]))["finished"] == [1]


def test_a_fetch_that_failed_is_wanted_again_and_its_holder_named() -> None:
    state = SwarmReaderState(0.0)
    for index in range(3):
        state.want(index, 0.0)
    assert begun(state, 0.0, 0, 1, 2) == [0, 1, 2]
    assert not state.ended(0, ORIGIN, NetworkError("gone"), 1.0)
    assert not state.ended(1, ORIGIN, ProtocolError("nonsense"), 1.0)
    assert state.ended(2, ORIGIN, NetworkError("given up"), 1.0, cancelled=True)
    body = state.request(1.0, None)
    wrong = {item["index"]: item["wrong"] for item in body["failed"]}
    assert wrong == {0: False, 1: True} and body["dropped"] == [2] and body["want"] == "0-1"


def test_what_nobody_brings_is_given_up() -> None:
    state = SwarmReaderState(0.0, patience_s=30.0)
    state.want(0, 0.0)
    state.want(1, 0.0)
    assert begun(state, 0.0, 0) == [0]
    refusal = PermanentError("a URL that is not opened")
    assert not state.ended(0, ORIGIN, refusal, 1.0)
    assert state.give_up(9.0) == [] and state.give_up(11.0) == [(0, refusal)]
    assert state.give_up(30.0) == [] and state.give_up(31.0) == [(1, None)]
    assert not state.missing and state.give_up(99.0) == []


@pytest.mark.parametrize("reply", [{"wait_s": float("nan")}, {"assignments": 3}, assigning(-1), {"sharers": [{}]}])
def test_a_reply_without_sense_changes_nothing(reply: dict[str, Any]) -> None:
    state = SwarmReaderState(0.0)
    state.want(0, 0.0)
    state.request(0.0, None)
    with pytest.raises(ProtocolError):
        state.receive(reply, 0.0)
    assert state.missing == {0: 0.0} and not state.running


def test_a_reader_whose_thread_fails_goes_on_and_ends_what_is_wanted_in_time(tmp_path: Path) -> None:
    """Whatever fails in its thread, here the look at what is held, a transfer ends within the reader's patience."""
    table = SliceTable.from_rows([SliceInfo(0, "0.safetensors", 100, "ab" * 32, 10, 1)])
    before = threads.failures().get("swarm", 0)
    current = [RuntimeError("unexpected"), RuntimeError("unexpected")]

    def trackers() -> list[Provider]:
        if current:
            raise current.pop()
        return []

    with (
        Client(None) as client,
        closing(SwarmReader(client, "ab" * 32, table, trackers, _never, timeout_s=0.5)) as reader,
    ):
        transfer = reader.fetch(0, tmp_path / "part")
        assert transfer.wait()
        assert isinstance(transfer.error, NetworkError) and "no provider of" in str(transfer.error)
    assert threads.failures()["swarm"] > before


def _never() -> Any:
    raise AssertionError("asked what is held, though it does not share")
