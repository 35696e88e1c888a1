"""The coordinator's doors: their description in OpenAPI 3.1, and what a request may hold."""

import re
from typing import Any

from forebay.network.exchange import BadRequestError
from forebay.network.openapi import (
    COUNT,
    DESCRIPTION_DOOR,
    FLAG,
    METRICS_DOOR,
    OBJECT,
    SECONDS,
    TEXT,
    Door,
    Schema,
    openapi,
    record,
)

MAX_WAIT_S = 30.0
NAME = re.compile(r"[^\x00-\x1f\x7f]{1,200}")
SESSION = re.compile(r"[A-Za-z0-9._-]{8,64}")
ADDRESS = re.compile(r"[^\x00-\x20\x7f]{0,300}")

_ID: Schema = {"type": "string", "pattern": "^[^\\x00-\\x1f\\x7f]{1,200}$"}
_WAIT: Schema = {**SECONDS, "maximum": MAX_WAIT_S, "description": "Seconds to hold the answer for news."}
_SESSION: dict[str, Schema] = {
    "worker_id": _ID,
    "session": {"type": "string", "pattern": f"^{SESSION.pattern}$", "description": "Random, one a process."},
}
_BELIEVED: Schema = {**FLAG, "description": "What the worker believes: answered when it is otherwise."}
_IN = {**_SESSION, "generation": COUNT, "step": {**COUNT, "description": "Steps finished."}}
_REFUSED = {409: "error is duplicate, unsure, expelled or bad_step.", 404: "Not trained yet."}
_OPTIONAL = ("generation", "step", "samples", "address", "wait_s", "broken", "changing", "held_step", "held_samples")

DOORS = [
    Door("POST", "/v1/config", "What the run does; the first to say settles what the coordinator was not told.",
         body=record("all", settings=OBJECT), refusals=_REFUSED),
    Door("GET", "/v1/config", "What the run does."),
    Door("POST", "/v1/members/join", "Join: {generation} once one with it begins, or {waiting}: ask again.",
         body=record((*_OPTIONAL, "finished"), **_SESSION, address=TEXT, step=COUNT, samples=COUNT, wait_s=_WAIT),
         refusals=_REFUSED),
    Door("POST", "/v1/members/ready", "Stopped at a boundary: {generation}, {run_to} to catch up, or {waiting}.",
         body=record(_OPTIONAL, **_IN, broken=FLAG, held_step=COUNT, held_samples=COUNT, wait_s=_WAIT),
         refusals=_REFUSED),
    Door("POST", "/v1/members/heartbeat", "Alive; {changing} says whether to stop at the next boundary.",
         body=record(_OPTIONAL, **_IN, changing=_BELIEVED, broken=_BELIEVED, wait_s=_WAIT), refusals=_REFUSED),
    Door("POST", "/v1/members/leave", "Not a member any more; `finished` if the last step is done.",
         body=record((*_OPTIONAL, "finished"), **_IN, finished=FLAG), refusals=_REFUSED),
    Door("GET", "/v1/generation", "The generation now."),
    Door("GET", "/v1/status", "What the run has reached, and who is in it."),
    Door("GET", "/v1/log", "Who trained on what: of a step, of a sample, or all generations.",
         query={"step": COUNT, "sample": COUNT}, refusals=_REFUSED),
    DESCRIPTION_DOOR,
    METRICS_DOOR,
]  # fmt: skip


def describe() -> dict[str, Any]:
    """The document at /openapi.json."""
    return openapi("Forebay coordinator", DOORS)


def worker_of(body: dict[str, Any]) -> tuple[str, str, int]:
    """Who speaks, in which session, and the generation it knows."""
    return text_of(body, "worker_id", NAME), text_of(body, "session", SESSION), count_of(body, "generation")


def text_of(body: dict[str, Any], key: str, pattern: re.Pattern[str]) -> str:
    """A field that must match a pattern; BadRequestError otherwise, as of all here."""
    value = body.get(key)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise BadRequestError(f"{key}: expected text like {pattern.pattern}, got {str(value)[:80]!r}")
    return value


def count_of(body: dict[str, Any], key: str) -> int:
    """A field that counts, 0 where it is missing."""
    value = body.get(key, 0)
    if type(value) is not int or not 0 <= value < 2**62:
        raise BadRequestError(f"{key}: expected an integer from 0, got {str(value)[:80]!r}")
    return value


def wait_of(body: dict[str, Any]) -> float:
    """How long the answer may be held, seconds."""
    value = body.get("wait_s", 0)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= MAX_WAIT_S:
        raise BadRequestError(f"wait_s: expected 0 to {MAX_WAIT_S:g}, got {str(value)[:80]!r}")
    return float(value)
