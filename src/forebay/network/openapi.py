"""A table of doors, and its OpenAPI 3.1 document: what a stranger's program needs to speak to a server.

A service lists its doors once, beside its handlers; `GET /openapi.json` answers `openapi(title, doors)`. What every
server may answer at any door (400, 403, 413, 429, 500, 503) is added here.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from forebay.errors import UsageError
from forebay.network.exchange import BINARY, JSON, Response, json_response

Schema = Mapping[str, Any]

OBJECT: Schema = {"type": "object"}
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**62}
SECONDS: Schema = {"type": "number", "minimum": 0}
SHA256: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
PEER_ID: Schema = {"type": "string", "pattern": "^[a-z2-7]{32}$"}

_PLACE = re.compile(r"\{([a-z_0-9]+)\}")
_RANGE_HEADER = {
    "name": "Range",
    "in": "header",
    "description": "One range, bytes=START-[END].",
    "schema": {"type": "string", "pattern": "^bytes=[0-9]{1,18}-([0-9]{1,18})?$"},
}
# What the server itself may answer at any door.
_COMMON = {
    400: "The request makes no sense.",
    403: "This peer may not.",
    413: "The body is above 1 MiB.",
    429: "Beyond a quota; ask again another day.",
    500: "A fault of this server's; its log has it.",
    503: "Stopping or full: ask again.",
}


@dataclass(frozen=True)
class Door:
    """One method at one path.

    Attributes:
        path: Its variable parts in braces, each with a schema in `parts`: `/v1/slices/{sha256}`.
        about: What it does, one sentence.
        body: Schema of the JSON body; None: it takes none.
        answer: Schema of the 200 answer; None: bytes of `content_type`.
        query: Schemas of query parameters, all optional. `required_query` names those that are not.
        refusals: Further statuses, and when: each has a body {error, message}.
        ranges: A Range header is honoured (206, 416).
    """

    method: Literal["GET", "POST"]
    path: str
    about: str
    body: Schema | None = None
    answer: Schema | None = field(default_factory=lambda: OBJECT)
    query: Mapping[str, Schema] = field(default_factory=dict)
    required_query: tuple[str, ...] = ()
    parts: Mapping[str, Schema] = field(default_factory=dict)
    refusals: Mapping[int, str] = field(default_factory=dict)
    content_type: str = JSON
    ranges: bool = False

    def __post_init__(self) -> None:
        if set(_PLACE.findall(self.path)) != set(self.parts):
            raise UsageError(f"door {self.path}: expected a schema for each part in braces, got {sorted(self.parts)}")


def record(optional: tuple[str, ...] | Literal["all"] = (), /, **fields: Schema) -> Schema:
    """Schema of an object with these fields; all are there but those named."""
    required = [] if optional == "all" else [name for name in fields if name not in optional]
    return {"type": "object", "properties": fields, **({"required": required} if required else {})}


def array(of: Schema, most: int | None = None) -> Schema:
    """Schema of a list."""
    return {"type": "array", "items": of, **({"maxItems": most} if most is not None else {})}


def choice(*words: str) -> Schema:
    """Schema of one of these words."""
    return {"type": "string", "enum": list(words)}


def openapi(title: str, doors: Iterable[Door]) -> dict[str, Any]:
    """The document that describes the doors.

    Raises:
        UsageError: If two doors have one method and path.
    """
    paths: dict[str, Any] = {}
    for door in doors:
        place = paths.setdefault(door.path, {})
        if door.method.lower() in place:
            raise UsageError(f"door {door.method} {door.path}: expected it once, got it twice")
        place[door.method.lower()] = _operation(door)
    error = record(error=TEXT, message=TEXT)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {"schemas": {"Error": error}},
    }


def openapi_response(title: str, doors: Iterable[Door]) -> Response:
    """The answer to `GET /openapi.json`."""
    return json_response(openapi(title, doors))


DESCRIPTION_DOOR = Door("GET", "/openapi.json", "This document.")
METRICS_DOOR = Door(
    "GET", "/metrics", "Figures for Prometheus.", answer=None, content_type="text/plain; version=0.0.4; charset=utf-8"
)


def _operation(door: Door) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": schema} for name, schema in door.parts.items()
    ]
    parameters += [
        {"name": name, "in": "query", "required": name in door.required_query, "schema": schema}
        for name, schema in door.query.items()
    ]
    operation: dict[str, Any] = {
        "summary": door.about,
        "parameters": [*parameters, *([_RANGE_HEADER] if door.ranges else [])],
        "responses": _responses(door),
    }
    if door.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": door.body}}}
    return operation


def _responses(door: Door) -> dict[str, Any]:
    kind = BINARY if door.answer is None and door.content_type == JSON else door.content_type
    content = {kind: {"schema": door.answer if door.answer is not None else {}}}
    refusals = {**_COMMON, **door.refusals}
    found: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    if door.ranges:
        found["206"] = {"description": "The range.", "content": content}
        refusals[416] = "The range is none of this file's."
    refused = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    return found | {str(code): {"description": about, "content": refused} for code, about in sorted(refusals.items())}
