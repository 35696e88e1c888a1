"""A request as a handler sees it, and what it may answer; no sockets here."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from forebay.errors import NetworkError
from forebay.network.peer import Peer

JSON = "application/json"
BINARY = "application/octet-stream"


@dataclass(frozen=True)
class Request:
    """What a peer asks. `query` keeps the last value of a repeated name, `headers` know names in any
    case; `gone`: has the peer hung up meanwhile?"""

    method: str
    path: str
    query: dict[str, str]
    headers: Mapping[str, str]
    body: bytes
    peer: Peer
    gone: Callable[[], bool] = lambda: False

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            BadRequestError: If it is none; the server answers 400.
        """
        try:
            return orjson.loads(self.body) if self.body else None
        except ValueError as error:
            raise BadRequestError(f"body: expected JSON, got {error}") from error


class BadRequestError(NetworkError):
    """A request that a handler cannot make sense of; the server answers it with 400."""


@dataclass(frozen=True)
class FileRange:
    """Bytes [start, stop) of a file, sent in pieces of 1 MiB."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Response:
    """What is answered. A FileRange is streamed; its memory is one buffer, whatever its length."""

    status: int
    body: bytes | FileRange = b""
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pending:
    """An answer that waits for something which others wait for, too, as for a disk; `wait` returns it.

    The server calls it once, after it handed over what else was asked at that moment. What it raises is answered
    as what a handler raises.
    """

    wait: Callable[[], Response]


def json_response(obj: Any, status: int = 200) -> Response:
    """A response with an object as JSON."""
    try:
        data = orjson.dumps(obj, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # an integer beyond 64 bits
        data = json.dumps(obj, separators=(",", ":"), sort_keys=True).encode()
    return Response(status, data)


def error_response(status: int, code: str, message: str) -> Response:
    """A response `{"error": code, "message": message}`; a client raises it as RemoteError."""
    return json_response({"error": code, "message": message}, status)


def file_response(request: Request, path: Path, size: int) -> Response:
    """A whole file (200), or the one range which the request asks for (206), or 416.

    Args:
        size: The file's length in bytes, as the caller knows it.
    """
    wanted = request.headers.get("Range")
    if wanted is None:
        return Response(200, FileRange(path, 0, size), BINARY, {"Accept-Ranges": "bytes"})
    first, dash, last = wanted.removeprefix("bytes=").strip().partition("-")
    digits = first.isascii() and first.isdigit() and (last == "" or (last.isascii() and last.isdigit()))
    if not wanted.startswith("bytes=") or not dash or not digits or len(first) > 18 or len(last) > 18:
        return error_response(416, "bad_range", f"Range: expected bytes=START-[END], got {wanted[:80]!r}")
    start, stop = int(first), min(int(last) + 1, size) if last else size
    if not 0 <= start < stop:
        return error_response(416, "bad_range", f"Range: [{start}, {stop}) is not in [0, {size})")
    headers = {"Content-Range": f"bytes {start}-{stop - 1}/{size}", "Accept-Ranges": "bytes"}
    return Response(206, FileRange(path, start, stop), BINARY, headers)


def refuse_page(request: Request) -> Response | None:
    """Refuses what a web page can make a browser send here; None for a program's request."""
    kind = request.headers.get("Content-Type", JSON).partition(";")[0].strip().lower()
    if "Origin" not in request.headers and (request.method == "GET" or kind == JSON):
        return None
    return error_response(
        403,
        "cross_site",
        f"request: expected Content-Type {JSON} and no Origin, got {kind[:80]!r}. Ask with a program.",
    )
