"""Servers for tests that answer by one plain function."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from forebay.network.app import ApiError, make_app, peer_of
from forebay.network.client import Client
from forebay.network.limits import ServerLimits
from forebay.network.peer import Peer
from forebay.network.pki.identity import Identity
from forebay.network.server import Server

FOREVER_S = 3600.0  # Longer than any test may take.


@dataclass(frozen=True)
class Request:
    """A request as received; `query` keeps the last value of a repeated name."""

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


Handler = Callable[[Request], Any]
Make = Callable[[str], Identity]
"""The fixture `make_identity`."""


def application(handle: Handler) -> FastAPI:
    """An application that answers each GET and POST by a function: a coroutine, or a plain one in a thread."""
    app, is_async = make_app("test"), any(map(inspect.iscoroutinefunction, (handle, type(handle).__call__)))

    async def answer(http: HttpRequest) -> Response:
        body, query = await http.body(), dict(http.query_params)
        request = Request(http.method, http.url.path, query, http.headers, body, peer_of(http), http)
        return await (handle(request) if is_async else run_in_threadpool(handle, request))

    for method in ("get", "post"):
        app.add_api_route("/{path:path}", answer, methods=[method.upper()], operation_id=method)
    return app


def patient(**limits: Any) -> ServerLimits:
    """Limits of a server that cuts no peer for being slow."""
    names = ("idle_s", "handshake_s", "head_s", "body_s", "send_s")
    return ServerLimits(**{**dict.fromkeys(names, FOREVER_S), **limits})


def serve(
    identity: Identity | None,
    handle: Handler,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    limits: ServerLimits | None = None,
    **options: Any,
) -> Server:
    """A server of `application(handle)`, not started; patient without `limits`."""
    return Server(application(handle), identity, host, port, limits=limits or patient(), **options)


class PatientClient(Client):
    """A client that waits for as long as the test may take."""

    def request_json(self, *args: Any, timeout_s: float = FOREVER_S, **more: Any) -> tuple[dict, Peer]:
        return super().request_json(*args, timeout_s=timeout_s, **more)

    def read_range(self, *args: Any, timeout_s: float = FOREVER_S, **more: Any) -> None:
        super().read_range(*args, timeout_s=timeout_s, **more)
