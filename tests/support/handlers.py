"""Servers for tests whose answers are those of one plain function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from forebay.network.app import ApiError, make_app, peer_of
from forebay.network.peer import Peer
from forebay.network.pki.identity import Identity
from forebay.network.server import Server


@dataclass(frozen=True)
class Request:
    """What was asked; `query` keeps the last value of a repeated name."""

    method: str
    path: str
    query: dict[str, str]
    headers: Mapping[str, str]
    body: bytes
    peer: Peer
    http: HttpRequest

    def json(self) -> Any:
        try:
            return orjson.loads(self.body) if self.body else None
        except ValueError as error:
            raise ApiError(400, "bad_request", f"body: expected JSON, got {error}") from error


Handler = Callable[[Request], Response]


def app_of(handle: Handler) -> FastAPI:
    """An application that answers every GET and POST by a function, in a thread."""
    app = make_app("test")

    async def answer(request: HttpRequest) -> Response:
        asked = Request(
            request.method, request.url.path, dict(request.query_params), request.headers, await request.body(),
            peer_of(request), request,
        )  # fmt: skip
        return await run_in_threadpool(handle, asked)

    app.add_api_route("/{path:path}", answer, methods=["GET"], operation_id="get")
    app.add_api_route("/{path:path}", answer, methods=["POST"], operation_id="post")
    return app


def serve(identity: Identity | None, handle: Handler, host: str = "127.0.0.1", port: int = 0, **options: Any) -> Server:
    """A server, not started, of `app_of`."""
    return Server(app_of(handle), identity, host, port, **options)
