"""The coordinator's doors: their description in OpenAPI 3.1, and what a request may hold."""

from __future__ import annotations

import re
from typing import Any

from millrace.network.exchange import BadRequestError

MAX_WAIT_S = 30.0
NAME = re.compile(r"[^\x00-\x1f\x7f]{1,200}")
SESSION = re.compile(r"[A-Za-z0-9._-]{8,64}")
ADDRESS = re.compile(r"[^\x00-\x20\x7f]{0,300}")

_TEXT, _COUNT, _FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
_WAIT = {"type": "number", "minimum": 0, "maximum": 30, "description": "Seconds to hold the answer for news."}
_SESSION = {"worker_id": _TEXT, "session": {**_TEXT, "description": "Random, 8 to 64 characters, one a process."}}
_BELIEVED = {**_FLAG, "description": "What the worker believes: answered when it is otherwise."}
_IN = {**_SESSION, "generation": _COUNT, "step": {**_COUNT, "description": "Steps finished."}}

_DOORS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("post", "/v1/config", "What the run does; the first to say settles what the coordinator was not told.",
     {"settings": {"type": "object"}}),
    ("get", "/v1/config", "What the run does.", {}),
    ("post", "/v1/members/join", "Become a member: {generation} once one with it begins, else {waiting}: ask again.",
     {**_SESSION, "address": _TEXT, "step": _COUNT, "samples": _COUNT, "wait_s": _WAIT}),
    ("post", "/v1/members/ready", "Stopped at a boundary: {generation}, {run_to} to catch up, or {waiting}.",
     {**_IN, "broken": _FLAG, "held_step": _COUNT, "held_samples": _COUNT, "wait_s": _WAIT}),
    ("post", "/v1/members/heartbeat", "Alive; {changing} says whether to stop at the next boundary.",
     {**_IN, "changing": _BELIEVED, "broken": _BELIEVED, "wait_s": _WAIT}),
    ("post", "/v1/members/leave", "Not a member any more; `finished` if the last step is done.",
     {**_IN, "finished": _FLAG}),
    ("get", "/v1/generation", "The generation now.", {}),
    ("get", "/v1/status", "What the run has reached, and who is in it.", {}),
    ("get", "/v1/log", "Who trained on what: ?step=N, ?sample=N, or all generations.", {}),
]  # fmt: skip


def describe() -> dict[str, Any]:
    """The document at /openapi.json."""
    paths: dict[str, Any] = {}
    for method, path, about, fields in _DOORS:
        door: dict[str, Any] = {
            "summary": about,
            "responses": {
                "200": {"description": "Done.", "content": {"application/json": {"schema": {"type": "object"}}}},
                "409": {"description": "Refused: {error, message}; error is duplicate, unsure, expelled or bad_step."},
            },
        }
        if fields:
            schema = {"type": "object", "properties": fields}
            door["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(path, {})[method] = door
    return {"openapi": "3.1.0", "info": {"title": "Millrace coordinator", "version": "1"}, "paths": paths}


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
