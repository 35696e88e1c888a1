"""The FastAPI applications of Forebay's servers: errors, roles, metrics, files and CRLs in one form.

`make_app` gives an application with `/openapi.json` and `/metrics`; a service adds its routes. `server_connections`
puts into each request's state who asks (`peer`) and by which connection (`connection`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from forebay.errors import ProtocolError
from forebay.network import peer as members
from forebay.network.messages import ErrorReply
from forebay.network.peer import Peer
from forebay.network.revocation_sync import CRLS, PEM_TYPE, receive_crl

if TYPE_CHECKING:
    from forebay.network.pki.identity import Identity

__all__ = ["Metric", "Request", "Response"]  # a service needs them with what is here

JSON = "application/json"
BINARY = "application/octet-stream"
log = logging.getLogger("forebay.network")


class Connection(Protocol):
    """What an application sees of the connection that a request came by."""

    address: str  # the IP address at its other end

    @property
    def lost(self) -> asyncio.Future[None]: ...  # done once it has ended

    @property
    def piece_bytes(self) -> int: ...  # the most that is sent before others have their turn

    @property
    def is_closing(self) -> bool: ...

    def abort(self) -> None: ...

    async def wait_for_turn(self, num_bytes: int) -> None:
        """Wait until the limits of the upload, the peer and its organisation allow so many bytes."""

    async def sent(self, num_bytes: int) -> None:
        """Wait until a piece has left its buffer, and count it."""

    def note_refusal(self, route: str, error: ApiError) -> None:
        """Write into the audit log that the peer was refused."""

    def server_metrics(self) -> list[Metric]: ...


class ApiError(Exception):
    """An error answer: HTTP `status`, `code` for programs, a sentence for people, and when to ask again, if ever."""

    def __init__(self, status: int, code: str, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.wait_s = wait_s

    def response(self) -> Response:
        """The answer: `{"error": code, "message": message}`."""
        headers = {} if self.wait_s is None else {"Retry-After": str(max(1, round(self.wait_s)))}
        return JsonResponse({"error": self.code, "message": str(self)}, self.status, headers)


class JsonResponse(Response):
    """An object as JSON; keys sorted."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SORT_KEYS)


class FileRange(Response):
    """Bytes [start, stop) of a file, read and sent in pieces of 1 MiB; its memory is one piece.

    The file is read, not mapped: one that is truncated under a mapping would kill the process by SIGBUS. Bytes in
    memory are sent likewise, and not copied: however many clients read them slowly, they are there once.
    """

    media_type = BINARY

    def __init__(
        self, source: Path | bytes, start: int, stop: int, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(None, status, {**(headers or {}), "Content-Length": str(stop - start)})
        self.source, self.start, self.stop = source, start, stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"]["connection"]
        head: Message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        if isinstance(self.source, bytes):
            data = memoryview(self.source)

            async def cut(offset: int, most: int) -> memoryview:
                return data[offset : offset + most]

            await send(head)
            await self._send_pieces(connection, cut, send)
            return
        try:
            descriptor = await asyncio.get_running_loop().run_in_executor(None, os.open, self.source, os.O_RDONLY)
        except OSError:
            log.exception("server: cannot open %s", self.source)
            await ApiError(500, "unreadable", "the node cannot read this file; see its log").response()(
                scope, receive, send
            )
            return
        buffer = memoryview(bytearray(min(connection.piece_bytes, self.stop - self.start)))

        async def read(offset: int, most: int) -> memoryview:
            piece = buffer[:most]
            return piece[: await _read_into(descriptor, piece, offset)]

        try:
            await send(head)
            await self._send_pieces(connection, read, send)
        finally:
            os.close(descriptor)

    async def _send_pieces(
        self, connection: Connection, read: Callable[[int, int], Awaitable[memoryview]], send: Send
    ) -> None:
        offset = self.start
        while offset < self.stop and not connection.is_closing:
            piece = await read(offset, min(connection.piece_bytes, self.stop - offset))
            length = len(piece)
            if not length:
                log.error("server: %s ends at byte %d of %d", self.source, offset, self.stop)
                connection.abort()  # the length is promised: only a cut tells the client
                return
            await connection.wait_for_turn(length)
            offset += length
            await send({"type": "http.response.body", "body": piece, "more_body": offset < self.stop})
            await connection.sent(length)  # the buffer is free again
        if self.start == self.stop:
            await send({"type": "http.response.body"})


async def _read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Bytes read at an offset: at once where they are in the page cache, else by a thread, as a disk may be slow."""
    try:
        return os.preadv(descriptor, [buffer], offset, os.RWF_NOWAIT)
    except (OSError, AttributeError):  # not cached, or a system without the flag
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, os.preadv, descriptor, [buffer], offset)


def file_response(request: Request, source: Path | bytes, size: int) -> FileRange:
    """A file of `size` bytes, or bytes in memory: all (200), or the one range asked for (206; 416 if malformed)."""
    wanted = request.headers.get("Range")
    if wanted is None:
        return FileRange(source, 0, size, 200, {"Accept-Ranges": "bytes"})
    first, dash, last = wanted.removeprefix("bytes=").strip().partition("-")
    digits = first.isascii() and first.isdigit() and (last == "" or (last.isascii() and last.isdigit()))
    if not wanted.startswith("bytes=") or not dash or not digits or len(first) > 18 or len(last) > 18:
        raise ApiError(416, "bad_range", f"Range: expected bytes=START-[END], got {wanted[:80]!r}")
    start, stop = int(first), min(int(last) + 1, size) if last else size
    if not 0 <= start < stop:
        raise ApiError(416, "bad_range", f"Range: [{start}, {stop}) is not in [0, {size})")
    return FileRange(
        source, start, stop, 206, {"Content-Range": f"bytes {start}-{stop - 1}/{size}", "Accept-Ranges": "bytes"}
    )


def peer_of(request: Request) -> Peer:
    """Who asks, as its certificate says."""
    peer: Peer = request.state.peer
    return peer


def source_of(request: Request) -> str:
    """The IP address that a request's connection comes from."""
    connection: Connection = request.state.connection
    return connection.address


async def wait_until(
    request: Request, change: Callable[[], Awaitable[Any]], until: Callable[[], bool], wait_s: float
) -> bool:
    """Wait until a condition holds, up to `wait_s`; `change` ends when it may have. False if the client hung up."""
    connection: Connection = request.state.connection
    deadline = asyncio.get_running_loop().time() + wait_s
    while not until():
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            return True
        changed = asyncio.ensure_future(change())
        try:
            await asyncio.wait({changed, connection.lost}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if connection.lost.done():
            return False
    return True


_ERRORS = {
    400: "The request is malformed.",
    403: "The certificate does not allow it, or is revoked.",
    404: "There is no such thing here.",
    409: "It contradicts what is so now.",
    413: "The body is too large.",
    429: "Over a limit of this certificate or its organisation: ask again after Retry-After.",
    500: "A fault of this process; its log has it.",
    503: "Stopping, full, or the disk cannot be written: ask again after Retry-After.",
}


def describe_error(about: str) -> dict[str, Any]:
    """For a route's `responses`: an error answer. It is JSON, whatever the route answers otherwise."""
    return {"description": about, "content": {JSON: {"schema": {"$ref": "#/components/schemas/ErrorReply"}}}}


def role(name: str) -> dict[str, Any]:
    """For a route's `openapi_extra`: the role that a certificate needs. Checked before anything of the body is read."""
    return {"x-role": name}


class _MemberRoute(APIRoute):
    """A route that looks at the caller's role before anything of the body is read.

    A body is parsed straight from its bytes into the model of the parameter `message`, strictly: twice as fast as
    through Python objects, and an integer is no float, a list no text.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        needed = (self.openapi_extra or {}).get("x-role")
        handle = super().get_route_handler() if self.body_field is None else self._handle_message
        model: Any = self.body_field.field_info.annotation if self.body_field is not None else None
        self._adapter = TypeAdapter(model)

        async def authorized(request: Request) -> Response:
            peer = peer_of(request)
            if needed is not None and not peer.scope.allows(needed):
                text = f"the certificate of {peer.peer_id} lacks the role {needed}, which {request.url.path} needs"
                raise ApiError(403, f"not_{needed}", text)
            return await handle(request)

        return authorized

    async def _handle_message(self, request: Request) -> Response:
        try:
            message = self._adapter.validate_json(await request.body() or b"{}")
        except ValidationError as error:
            raise ApiError(400, "bad_request", _describe(error.errors(include_url=False))) from error
        response = await self.endpoint(request=request, message=message, **request.path_params)
        assert isinstance(response, Response)
        return response


def _describe(errors: Sequence[Any]) -> str:
    texts = (f"{'.'.join(str(part) for part in one['loc']) or 'body'}: {one['msg']}" for one in errors[:3])
    return "; ".join(texts)[:600]


def add_trust_routes(app: FastAPI, identity: Identity) -> None:
    """The routes of every node that has an identity: the CRLs that it knows; it takes newer ones from anybody."""

    async def numbers() -> dict[str, dict[str, int]]:
        return {"crls": await asyncio.to_thread(identity.revocations.numbers)}

    async def read(issuer: str) -> Response:
        pem = await asyncio.to_thread(identity.revocations.pem, issuer)
        if pem is None:
            raise ApiError(404, "unknown_issuer", "no CRL of this issuer is known here")
        return Response(pem, media_type=PEM_TYPE)

    async def bring(request: Request) -> dict[str, bool]:
        pem, sender = await request.body(), peer_of(request).peer_id
        try:
            return {"new": await asyncio.to_thread(receive_crl, identity, pem, sender) is not None}
        except ProtocolError as error:
            raise ApiError(403, "bad_crl", str(error)) from error

    pem: dict[str, Any] = {"content": {PEM_TYPE: {"schema": {"type": "string", "maxLength": 1 << 20}}}}
    found: dict[int | str, dict[str, Any]] = {200: {**pem, "description": "The CRL."}}
    app.get(CRLS, operation_id="read_crl_numbers", summary="The number of the CRL of each issuer known here.")(numbers)
    app.get(
        CRLS + "/{issuer}", operation_id="read_crl", response_class=Response, responses=found,
        summary="The CRL of an issuer.",
    )(read)  # fmt: skip
    app.post(
        CRLS, operation_id="bring_crl", openapi_extra={"requestBody": {**pem, "required": True}},
        summary="Bring a CRL: it is kept if it is signed by its issuer and newer.",
    )(bring)  # fmt: skip


def make_app(title: str, metrics: Callable[[], Iterable[Metric]] = tuple) -> FastAPI:
    """An application with `/openapi.json`, `/metrics` and errors of one form; a service adds its routes."""
    errors: dict[int | str, dict[str, Any]] = {status: describe_error(about) for status, about in _ERRORS.items()}
    app = FastAPI(title=title, version="1", docs_url=None, redoc_url=None, redirect_slashes=False, responses=errors)
    app.router.route_class = _MemberRoute
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _hung_up)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _internal_error)

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = schema = get_openapi(title=title, version="1", routes=app.routes)
            schema.setdefault("components", {}).setdefault("schemas", {})["ErrorReply"] = ErrorReply.model_json_schema()
            for methods in schema["paths"].values():
                for operation in methods.values():
                    operation["responses"].pop("422", None)  # it is a 400 here
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]

    @app.get("/metrics", summary="Figures for Prometheus.", response_class=PlainTextResponse)
    async def read_metrics(request: Request) -> Response:
        connection: Connection = request.state.connection
        own = connection.server_metrics()
        return PlainTextResponse(exposition([*_visible(metrics(), peer_of(request).scope), *own]))

    return app


def _visible(families: Iterable[Metric], scope: members.Scope) -> list[Metric]:
    """Figures of other peers are for the role admin, those of datasets and jobs for who may read them."""
    found = list(families)
    for family in found:
        family.samples = [
            sample
            for sample in family.samples
            if ("peer" not in sample.labels or scope.allows("admin"))
            and all(scope.covers(sample.labels[label]) for label in ("job", "dataset") if label in sample.labels)
        ]
    return found


def exposition(families: Iterable[Metric]) -> bytes:
    """The text that Prometheus reads."""

    class Collector:
        def collect(self) -> Iterable[Metric]:
            return families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    return generate_latest(registry)


def gauge(name: str, about: str, value: float | dict[str, float], label: str = "") -> Metric:
    """A figure that goes up and down; with `label` one for each of its values."""
    return _family(GaugeMetricFamily, name, about, value, label)


def counter(name: str, about: str, value: float | dict[str, float], label: str = "") -> Metric:
    """A total since the start. `name` ends in `_total`."""
    return _family(CounterMetricFamily, name, about, value, label)


def _family(kind: Any, name: str, about: str, value: float | dict[str, float], label: str) -> Metric:
    family: Metric = kind(name, about, labels=[label] if isinstance(value, dict) else None)
    for key, each in sorted(value.items()) if isinstance(value, dict) else [("", value)]:
        family.add_metric([key] if isinstance(value, dict) else [], each)  # type: ignore[attr-defined]
    return family


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if error.status == 403:
        request.state.connection.note_refusal(f"{request.method} {request.url.path}", error)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"[:300]
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return ApiError(error.status_code, code, f"{where}: {error.detail}. See /openapi.json.").response()


async def _hung_up(request: Request, error: Exception) -> None:
    """No answer: the client ended the connection before its request was whole."""


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return ApiError(400, "bad_request", _describe(error.errors())).response()


async def _internal_error(request: Request, error: Exception) -> Response:
    return ApiError(500, "internal", f"{request.method} {request.url.path} failed; see the node's log").response()
