"""The wording of an exchange: what is right goes through, everything else is refused in words."""

import json

import pytest
from pydantic import TypeAdapter, ValidationError

from forebay.lease.messages import ExchangeRequest, FailedLease, ProviderReport

USE = json.loads('{"lease_id": "a1", "epoch": 0, "slice": 3, "start": 0, "stop": 8, "step": 5}')
BODY = {
    "job": "d", "session": "5e", "attempt": 2, "address": "h:1", "known_leases": ["a1"], "job_id": "1" * 64,
    "uses": [USE],
    "signature": "ab" * 64, "declared_until": {"a1": 8}, "release": ["a2"],
    "failed": [{"lease_id": "a3", "reason": "x\ny"}],
    "want": 2, "cached": {"2" * 64: "0-2,5"}, "reports": [{"peer_id": "p", "sha256": "3" * 64, "reason": "wrong"}],
}  # fmt: skip
MODEL = TypeAdapter(ExchangeRequest)


def parse(body: object) -> ExchangeRequest:
    """Parse bytes, as the server does."""
    return MODEL.validate_json(json.dumps(body))


def test_a_whole_request():
    request = parse(BODY)
    assert (request.job, request.known_leases, request.declared_until, request.want) == ("d", ("a1",), {"a1": 8}, 2)
    assert (request.uses[0].slice, request.uses[0].stop, request.signature) == (3, 8, "ab" * 64)
    assert request.failed == (FailedLease("a3", "x\\ny"),) and request.reports == (
        ProviderReport("p", "3" * 64, "wrong", True),
    )
    assert request.cached == {"2" * 64: "0-2,5"}
    assert (
        parse({}) == ExchangeRequest()
        and parse(request.to_json()) == request
        and ExchangeRequest(known_leases=()).to_json() == {"known_leases": []}
    )
    late = {"peer_id": "p", "sha256": "3" * 64, "reason": "late", "wrong": False}
    assert not parse({"reports": [late]}).reports[0].wrong
    assert parse({"reports": [late | {"reason": "\x1b[31m" + "x" * 900}]}).reports[0].reason == "\\x1b[31m" + "x" * 292


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1}, {"want": 17}, {"want": True}, {"known_leases": "a1"},
        {"known_leases": ["a/1"]},
        {"known_leases": ["a1"] * 257}, {"session": "\n"}, {"job": "a/b"}, {"address": "h 1"}, {"signature": "a"},
        {"job_id": "x"}, {"uses": [{**USE, "start": -1}]}, {"uses": [{**USE, "step": "5"}]},
        {"uses": [{**USE, "digest": "x"}]}, {"declared_until": {"a1": 1.5}},
        {"cached": {"d": "1"}}, {"cached": {"2" * 64: "1-"}},
        {"cached": {"2" * 64: "1" * 10}},
        {"reports": [{"peer_id": "p", "sha256": "3" * 64, "reason": "late", "wrong": 0}]},
    ],
)  # fmt: skip
def test_a_malformed_request_is_refused(change):
    with pytest.raises(ValidationError):
        parse({**BODY, **change})
