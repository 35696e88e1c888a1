"""The wording of an exchange: what is right goes through, everything else is refused in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from forebay.errors import LeaseError
from forebay.network.messages import ExchangeRequest
from forebay.schedule.ask import Ask, BadReport, Failed
from forebay.schedule.exchange import ask_of

USE = {"lease_id": "a1", "epoch": 0, "slice": 3, "start": 0, "stop": 8, "step": 5}
BODY: dict[str, Any] = {
    "job": "d", "session": "5e", "attempt": 2, "address": "h:1", "held": ["a1"], "job_id": "1" * 64, "uses": [USE],
    "signature": "ab" * 64, "horizons": {"a1": 8}, "release": ["a2"], "failed": [{"lease_id": "a3", "reason": "x\ny"}],
    "want": 2, "have": {"2" * 64: "0-2,5"}, "bad": [{"peer_id": "p", "sha256": "3" * 64, "reason": "wrong"}],
    "speed": 1.5,
}  # fmt: skip


NUM_SLICES = {"2" * 64: 6}


def parse(body: object) -> Ask:
    """As the server does it: from bytes."""
    return ask_of(ExchangeRequest.model_validate_json(json.dumps(body)), NUM_SLICES)


def test_a_whole_question() -> None:
    ask = parse(BODY)
    assert (ask.job, ask.held, ask.horizons, ask.want, ask.speed) == ("d", ("a1",), {"a1": 8}, 2, 1.5)
    assert (ask.uses[0].slice, ask.uses[0].stop, ask.receipt) == (3, 8, "ab" * 64)
    assert ask.failed == (Failed("a3", "x?y"),) and ask.reports == (BadReport("p", "3" * 64, "wrong", True),)
    assert ask.have["2" * 64].tolist() == [0, 1, 2, 5]
    assert parse({}) == Ask()
    late = {"peer_id": "p", "sha256": "3" * 64, "reason": "late", "wrong": False}
    assert not parse({"bad": [late]}).reports[0].wrong
    assert parse({"bad": [late | {"reason": "\x1b[31m" + "x" * 900}]}).reports[0].reason == "?[31m" + "x" * 295


def test_what_a_worker_has_is_expanded_for_datasets_of_the_jobs_only() -> None:
    """A few bytes of ranges take no memory for an id that is none, and none beyond a dataset's slices."""
    assert parse({"have": {"4" * 64: "0-999999999"}}).have == {}
    with pytest.raises(LeaseError, match="have"):
        parse({"have": {"2" * 64: "0-999999999"}})


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1}, {"want": 17}, {"want": -1}, {"want": True}, {"want": 1.0}, {"held": "a1"}, {"held": ["a/1"]},
        {"held": ["a1"] * 257}, {"session": "\n"}, {"job": "a/b"}, {"address": "h 1"}, {"signature": "a"},
        {"job_id": "x"}, {"uses": [{**USE, "start": -1}]}, {"uses": [{**USE, "step": "5"}]}, {"uses": [[]]},
        {"uses": [{**USE, "digest": "x"}]}, {"horizons": [1]}, {"horizons": {"a1": 1.5}}, {"failed": [{}]},
        {"have": {"d": "1"}}, {"have": {"2" * 64: "1-"}}, {"have": {"2" * 64: 1}}, {"have": {"2" * 64: "1" * 10}},
        {"bad": [{"peer_id": "p", "sha256": "3"}]},
        {"bad": [{"peer_id": "p", "sha256": "3" * 64, "reason": "late", "wrong": 0}]}, {"speed": "fast"},
        {"speed": 1e400}, {"failed": [{"lease_id": "a", "reason": 1}]},
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        parse({**BODY, **change})


@pytest.mark.parametrize("ranges", ["2-1", "1,1", "3,2", "0-2,2-4", "6", "0-6"])
def test_ranges_that_are_none_of_the_dataset(ranges: str) -> None:
    with pytest.raises(LeaseError, match="have"):
        parse({**BODY, "have": {"2" * 64: ranges}})


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(
    st.sampled_from([*BODY, "lease_id", "x"]), x), max_leaves=8))  # fmt: skip
def test_garbage_is_refused_and_nothing_else(body: Any) -> None:
    data = json.dumps({**BODY, **body} if isinstance(body, dict) else body).encode()
    try:
        message = ExchangeRequest.model_validate_json(data)
    except ValidationError:
        return
    try:
        assert isinstance(ask_of(message, NUM_SLICES), Ask)
    except LeaseError as error:
        assert "have" in str(error)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=100))
def test_bytes_that_are_no_json(data: bytes) -> None:
    try:
        ExchangeRequest.model_validate_json(data)
    except ValidationError:
        return
    assert data.strip() == b"{}"
