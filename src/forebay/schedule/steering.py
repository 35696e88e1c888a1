"""The scheduler's doors, described; and what an administrator may say at those that steer a job."""

from __future__ import annotations

import re
from typing import Any

from forebay.network.https import BadRequestError
from forebay.network.openapi import COUNT, DESCRIPTION_DOOR, METRICS_DOOR, OBJECT, TEXT, Door, array, record
from forebay.schedule import exchange
from forebay.schedule.desk import Desk
from forebay.schedule.events import Event

VERB = re.compile(r"/v1/jobs/(?P<name>[^/]{1,200})/(?P<verb>pause|resume|readmit|weights)")
_NAME = {"name": TEXT}
_REFUSALS = {404: "There is no job of this name."}
DOORS = [
    exchange.DOOR,
    Door("GET", "/v1/job", "What a job is; without a name the first.", query=_NAME, refusals=_REFUSALS),
    Door("GET", "/v1/jobs", "How far each job is.", answer=record((), jobs=array(OBJECT))),
    Door("GET", "/v1/status", "How far each job is, who works on it, who serves it."),
    Door("POST", "/v1/jobs/{name}/pause", "Lease nothing new of a job.", body=OBJECT, parts=_NAME, refusals=_REFUSALS),
    Door("POST", "/v1/jobs/{name}/resume", "Go on with a job.", body=OBJECT, parts=_NAME, refusals=_REFUSALS),
    Door("POST", "/v1/jobs/{name}/readmit", "Lease slices again that were set aside; all, if none are named.",
         body=record("all", slices=array(COUNT)), parts=_NAME, refusals=_REFUSALS),
    Door("POST", "/v1/jobs/{name}/weights", "Other weights of datasets by name, now or from a count of samples on.",
         body=record(("at",), weights={"type": "object", "additionalProperties": {"type": "number", "minimum": 0}},
                     at=COUNT), parts=_NAME, refusals=_REFUSALS),
    DESCRIPTION_DOOR,
    METRICS_DOOR,
]  # fmt: skip


def act(desk: Desk, name: str, verb: str, body: dict[str, Any]) -> list[Event]:
    """What an administrator says, checked."""
    if verb in ("pause", "resume"):
        return desk.pause(name, verb == "pause")
    if verb == "readmit":
        slices = body.get("slices")
        if slices is not None and not (isinstance(slices, list) and all(type(i) is int for i in slices)):
            raise BadRequestError("slices: expected a list of slice indexes")
        return desk.readmit(name, slices)
    weights, at = body.get("weights"), body.get("at")
    good = isinstance(weights, dict) and all(type(w) in (int, float) for w in weights.values())
    if not good or not (at is None or (type(at) is int and at >= 0)):
        raise BadRequestError("weights: expected {weights: {dataset: number}, at: samples or nothing}")
    assert isinstance(weights, dict)
    return desk.reweight(name, weights, at)
