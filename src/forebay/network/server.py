"""HTTP/1.1 over mutual TLS 1.3: uvicorn's protocol and a FastAPI application, behind limits by member and organisation.

The order of a request: authenticate (a certificate of the network, valid and not revoked, looked at again for each
request), bound (rate and requests in flight, by certificate and organisation), authorize (the role that the route
names), bound the body, parse. Nothing of a request's body is read before its sender is authorized.

Without an identity the server trusts whoever reaches it, over plain HTTP or over TLS that asks for no certificate: for
loopback, or for what its owner opens knowingly. It refuses what a browser sends for a page of another site.

Costs: one thread with one event loop for all connections; some 35 KiB a TLS connection that rests.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import socket
import ssl
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from forebay.errors import NetworkError, ProtocolViolation
from forebay.network import peer as members
from forebay.network.client import Client
from forebay.network.limits import Limits, Throttle
from forebay.network.messages import ErrorReply
from forebay.network.peer import Peer
from forebay.network.tls import SocketTransport, handshake
from forebay.network.trust import CRLS, PEM_TYPE, TrustWatch, receive_crl
from forebay.network.usage import ConnectionTable, ReplyCache, RequestTable
from forebay.threads import FIRST_WAIT_S, MAX_WAIT_S, Supervised
from forebay.threads import failures as thread_failures

if TYPE_CHECKING:
    from forebay.network.discovery import Discovery
    from forebay.network.identity import Identity

__all__ = ["Metric", "Request", "Response"]  # a service needs them with what is here

JSON = "application/json"
BINARY = "application/octet-stream"
BACKLOG = 1024
PIECE_BYTES = 256 << 10
MAX_PIPELINED = 16
MAX_HEAD_BYTES = 32 << 10
ACCEPT_PAUSE_S = 0.1  # without free descriptors: connections that end give some back
THREAD_JOIN_S = 10.0
START_S = 30.0
TRIM_AFTER, TRIM_EVERY_S = 64, 15.0  # connections, seconds
T = TypeVar("T")
log = logging.getLogger("forebay.network")
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of each malformed request: a way to fill a disk


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
        connection: PeerProtocol = scope["state"]["connection"]
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
        buffer = memoryview(bytearray(min(connection.core.throttle.piece_bytes(PIECE_BYTES), self.stop - self.start)))

        async def read(offset: int, most: int) -> memoryview:
            piece = buffer[:most]
            return piece[: await _read_into(descriptor, piece, offset)]

        try:
            await send(head)
            await self._send_pieces(connection, read, send)
        finally:
            os.close(descriptor)

    async def _send_pieces(
        self, connection: PeerProtocol, read: Callable[[int, int], Awaitable[memoryview]], send: Send
    ) -> None:
        core, offset = connection.core, self.start
        most = core.throttle.piece_bytes(PIECE_BYTES)
        payer = connection.peer.peer_id or connection.address
        while offset < self.stop and not connection.is_closing:
            piece = await read(offset, min(most, self.stop - offset))
            length = len(piece)
            if not length:
                log.error("server: %s ends at byte %d of %d", self.source, offset, self.stop)
                connection.abort()  # the length is promised: only a cut tells the client
                return
            await core.throttle.pace(payer, length)
            if (wait_s := core.requests.wait_for_bytes(connection.peer, length, core.loop.time())) > 0:
                await asyncio.sleep(wait_s)
            offset += length
            await send({"type": "http.response.body", "body": piece, "more_body": offset < self.stop})
            await connection.flow.drain()  # the buffer is free again
            core.count(connection.peer, length)
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
    """A whole file, or bytes in memory (200), or the one range which the request asks for (206).

    Args:
        size: The file's length in bytes, as the caller knows it.

    Raises:
        ApiError: 416 if the range is malformed or not in the file.
    """
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
    connection: PeerProtocol = request.state.connection
    return connection.address


async def wait_until(
    request: Request, change: Callable[[], Awaitable[Any]], until: Callable[[], bool], wait_s: float
) -> bool:
    """Wait until a condition holds, for `wait_s` at most. Returns False if the client hung up meanwhile.

    Args:
        change: Returns something to await that ends when the condition may have changed.
    """
    connection: PeerProtocol = request.state.connection
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


# The application.


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

        async def authorized(request: Request) -> Response:
            peer = peer_of(request)
            if needed is not None and not peer.scope.allows(needed):
                text = f"the certificate of {peer.peer_id} lacks the role {needed}, which {request.url.path} needs"
                raise ApiError(403, f"not_{needed}", text)
            return await handle(request)

        return authorized

    async def _handle_message(self, request: Request) -> Response:
        assert self.body_field is not None
        model = self.body_field.field_info.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        try:
            message = model.model_validate_json(await request.body() or b"{}")
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
        except ProtocolViolation as error:
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
        core: _Core = request.state.connection.core
        return PlainTextResponse(exposition([*_visible(metrics(), peer_of(request).scope), *core.metrics()]))

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
        request.state.connection.core.note_refusal(request.state.peer, f"{request.method} {request.url.path}", error)
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


# Connections.


class _Flow:
    """uvicorn's FlowControl in a tenth of its memory: the event for writers is made when one waits."""

    __slots__ = ("_transport", "_writable", "read_paused", "write_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._writable: asyncio.Event | None = None
        self.read_paused = self.write_paused = False

    async def drain(self) -> None:
        if self.write_paused:
            self._writable = self._writable or asyncio.Event()
            await self._writable.wait()

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None


class PeerProtocol(HttpToolsProtocol):
    """One connection. TLS is finished before it begins, so that its peer is known.

    Attributes:
        phase: What it waits for: "idle" (a request), "head", "body". `since`: when that began, by the loop's clock.
        lost: Done once the connection has ended.
        sent_at: When the client last took a piece of an answer.
    """

    def __init__(self, core: _Core, address: str) -> None:
        super().__init__(core.config, core.state, {}, core.loop)
        self.core = core
        self.address = address
        self.peer = Peer("", b"", address)
        self.phase = "idle"
        self.since = self.sent_at = core.loop.time()
        self.body_s = 0.0
        self.head_bytes = self.unfinished_bytes = 0
        self.num_messages = 0  # begun and complete
        self.num_active = 0
        self.lost: asyncio.Future[None] = core.loop.create_future()

    @property
    def is_closing(self) -> bool:
        return self.lost.done() or self.transport.is_closing()

    def abort(self) -> None:
        """End it now."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)  # type: ignore[assignment]
        tls = transport.get_extra_info("ssl_object")
        if not self.core.admit(self, tls.getpeercert(binary_form=True) if tls is not None else None):
            transport.abort()
        self.app_state = {"peer": self.peer, "connection": self}

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self.lost.done():
            self.lost.set_result(None)
        self.core.connections.remove(self)

    def data_received(self, data: bytes) -> None:
        before = self.num_messages
        super().data_received(data)
        if self.phase == "head" or (self.phase == "idle" and self.num_messages == before):
            self.unfinished_bytes += len(data)  # of a head that is not whole yet, or blank lines before one
            if self.unfinished_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"expected a head of at most {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.phase, self.since = "head", self.loop.time()
        self.num_messages += 1
        self.head_bytes = self.unfinished_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")  # the parser stops, the connection gets 400 and ends

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.phase, self.since = "body", self.loop.time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.phase, self.since = "idle", self.loop.time()
        self.num_messages += 1
        self.unfinished_bytes = 0
        super().on_message_complete()

    def _count_head(self, num_bytes: int) -> None:
        self.head_bytes += num_bytes
        if self.head_bytes > MAX_HEAD_BYTES:
            raise ValueError("head too large")  # as above

    def end_if_unread(self) -> None:
        """Ends the connection behind the next answer if a body is still to come: nobody would read it."""
        if self.phase == "body":
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # `is_late` looks at connections that rest

    def forget_request(self) -> None:
        """Release what uvicorn keeps of the last request: 8 KiB of the 33 that a connection would rest with."""
        if self.cycle is not None and self.cycle.response_complete and not self.pipeline:
            self.cycle = None  # type: ignore[assignment]
            self.scope = {}  # type: ignore[typeddict-item]
            self.headers = []

    def is_late(self, now: float, limits: Limits) -> bool:
        """Whether the client makes the server wait for longer than the limits say."""
        if self.num_active and self.phase != "body":
            return self.flow.write_paused and now - self.sent_at > limits.send_s
        allowed_s = {"idle": limits.idle_s, "head": limits.head_s, "body": limits.head_s + limits.body_s}[self.phase]
        return now - self.since > allowed_s


class _Core:
    """What the connections of one server share; everything here runs in the server's loop."""

    def __init__(
        self,
        app: ASGIApp,
        identity: Identity | None,
        limits: Limits,
        throttle: Throttle,
        on_bytes: Callable[[Peer, int], None] | None,
    ) -> None:
        self.app = app
        self.identity = identity
        self.limits = limits
        self.throttle = throttle
        self.on_bytes = on_bytes
        self.is_draining = False
        self.connections = ConnectionTable(limits)
        self.num_bytes = 0
        self.answers: Counter[int] = Counter()
        self.limited: Counter[str] = Counter()
        self.task_failures: Counter[str] = Counter()
        self.config = uvicorn.Config(
            self, http=PeerProtocol, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False,
            server_header=False, date_header=False, interface="asgi3", timeout_keep_alive=max(1, int(limits.idle_s)),
        )  # fmt: skip
        self.config.load()

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin in a loop. What was open in one that failed ends here."""
        self.loop = loop
        for connection in self.connections.all():
            connection.transport.get_extra_info("socket").close()
        self.connections, self.requests = ConnectionTable(self.limits), RequestTable(self.limits)
        self.replies, self.state = ReplyCache(), ServerState()

    def admit(self, connection: PeerProtocol, der: bytes | None) -> bool:
        """Whether a connection whose TLS handshake is finished may stay."""
        if self.identity is not None:
            assert der is not None  # CERT_REQUIRED: no handshake without one
            try:
                connection.peer = self.identity.peer(der)
            except NetworkError as error:
                log.warning("server: refused a connection from %s: %s", connection.address, error)
                self.connections.num_refused += 1
                return False
            log.debug("connected: peer_id=%s from=%s", connection.peer.peer_id, connection.address)
        return not self.is_draining and self.connections.add(connection)

    def count(self, peer: Peer, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.on_bytes is not None:
            self.on_bytes(peer, num_bytes)

    def refusal(self, peer: Peer) -> str | None:
        """Why a peer that is connected may not go on."""
        return self.identity.refusal(peer) if self.identity is not None else None

    def note_refusal(self, peer: Peer, route: str, error: ApiError) -> None:
        if self.identity is not None:
            self.identity.note("refused", peer=peer.peer_id, route=route, code=error.code, reason=str(error))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request: authenticated, bounded, answered from the replies kept or by the application."""
        connection: PeerProtocol = scope["state"]["connection"]
        connection.num_active += 1
        try:
            refused = self._check(scope, connection.peer)
            if refused is not None:
                self.answers[refused.status] += 1
                self.limited[refused.code] += 1
                connection.end_if_unread()
                await refused.response()(scope, receive, send)
                return
            try:
                await self._answer(scope, receive, send, connection)
            finally:
                self.requests.finish(connection.peer)
        except asyncio.CancelledError:  # the server closes; uvicorn would log it as a fault
            connection.abort()
        finally:
            connection.num_active -= 1
            connection.since = self.loop.time()
            connection.forget_request()

    def _check(self, scope: Scope, peer: Peer) -> ApiError | None:
        if self.identity is None and (refused := _refuse_page(scope)) is not None:
            return refused
        if (reason := self.refusal(peer)) is not None:
            error = ApiError(403, "revoked", reason)
            self.note_refusal(peer, f"{scope['method']} {scope['path']}", error)
            return error
        if self.is_draining:
            return ApiError(503, "stopping", "this process is stopping; ask again after its restart", 1.0)
        limited = self.requests.begin(peer, self.loop.time())
        return None if limited is None else ApiError(429, *limited)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, connection: PeerProtocol) -> None:
        started = False
        max_body, num_body = self.limits.body_bytes, 0

        async def bounded_receive() -> Message:
            nonlocal num_body
            declared = _header(scope, b"content-length") or "0"  # digits: the parser saw to that
            if int(declared) <= max_body:
                message = await receive()
                num_body += len(message.get("body", b""))
                if num_body <= max_body:
                    return message
            raise HTTPException(413, f"expected a body of at most {max_body} bytes")

        async def counted_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.answers[message["status"]] += 1
                connection.end_if_unread()
            await send(message)
            connection.sent_at = self.loop.time()

        key = _header(scope, b"idempotency-key") if scope["method"] == "POST" else None
        try:
            if key is None or len(key) > 64:
                await self.app(scope, bounded_receive, counted_send)
            else:
                # Without a certificate the address tells clients apart.
                place = connection.peer.peer_id or connection.address, f"{scope['path']} {key}"
                await self.replies.answer(place, self.app, scope, bounded_receive, counted_send)
        except Exception:
            log.exception("server: %s %s failed", scope["method"], scope["path"][:300])
            if not started:
                await _INTERNAL.response()(scope, receive, counted_send)
            else:
                connection.abort()

    def sweep(self) -> None:
        """Ends connections that are late, expired or revoked."""
        now, refusals = self.loop.time(), dict[str, str | None]()
        for connection in self.connections.all():
            peer = connection.peer
            if peer.peer_id and peer.peer_id not in refusals:
                refusals[peer.peer_id] = self.refusal(peer)
            if (reason := refusals.get(peer.peer_id)) is not None:
                log.warning("server: cut a connection: %s", reason)
                connection.abort()
            elif connection.is_late(now, self.limits):
                log.debug("server: a client of %s was too slow in %s", connection.address, connection.phase)
                connection.abort()
        if num := sum(reason is not None for reason in refusals.values()):
            assert self.identity is not None
            self.identity.note("cut", connections=num, reason="revoked")

    def metrics(self) -> list[Metric]:
        """Its figures for `GET /metrics`."""
        answers = {str(status): float(num) for status, num in self.answers.items()}
        limited = {code: float(num) for code, num in self.limited.items()}
        threads = {name: float(num) for name, num in thread_failures().items()}
        failures = {name: float(num) for name, num in self.task_failures.items()}
        return [
            gauge("forebay_connections", "Connections open now.", len(self.connections)),
            gauge("forebay_requests_in_progress", "Requests being answered.", self.requests.num_active),
            counter("forebay_requests_total", "Requests answered, by status.", answers, "status"),
            counter("forebay_limited_requests_total", "Requests refused before a handler, by code.", limited, "code"),
            counter("forebay_refused_connections_total", "Without certificate or room.", self.connections.num_refused),
            counter("forebay_sent_bytes_total", "Bytes of slices and files sent.", self.num_bytes),
            counter("forebay_task_failures_total", "Background tasks that failed and went on.", failures, "task"),
            counter("forebay_thread_failures_total", "Failures of background threads.", threads, "thread"),
        ]


_INTERNAL = ApiError(500, "internal", "the request failed; see the node's log")


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _refuse_page(scope: Scope) -> ApiError | None:
    """Refuses what a web page can make a browser send; None for a program's request."""
    kind = (_header(scope, b"content-type") or JSON).partition(";")[0].strip().lower()
    if _header(scope, b"origin") is None and (scope["method"] == "GET" or kind == JSON):
        return None
    text = f"request: expected Content-Type {JSON} and no Origin, got {kind[:80]!r}. Ask with a program."
    return ApiError(403, "cross_site", text)


class Server:
    """Serves an application to the members of one network; with identity None to whoever asks.

    Owns its thread and sockets from `start` to `close`; both may be called from any thread, `close` more than once.

    Args:
        on_bytes: Called in the server's thread for each piece of a file that was sent.
        throttle: Of the upload; may be shared with other servers.
        tls: Without an identity: speak TLS by this, and ask for no certificate.
        discovery: With an identity: where other nodes are found that know who is revoked.
        known: Their addresses, as far as the caller knows them.
    """

    def __init__(
        self,
        app: FastAPI,
        identity: Identity | None,
        host: str,
        port: int,
        *,
        limits: Limits | None = None,
        throttle: Throttle | None = None,
        on_bytes: Callable[[Peer, int], None] | None = None,
        tls: ssl.SSLContext | None = None,
        discovery: Discovery | None = None,
        known: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.identity = identity
        self.host = host
        self.port = port
        self._tls = tls
        self._core = _Core(app, identity, limits or Limits(), throttle or Throttle(), on_bytes)
        self._discovery = discovery
        self._known = known
        self._trust: TrustWatch | None = None
        if identity is not None:
            add_trust_routes(app, identity)
        self._listener: socket.socket | None = None
        self._thread: Supervised | None = None
        self._tasks: list[tuple[str, Callable[[], Awaitable[None]]]] = []
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """`host:port` where it listens; IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def limits(self) -> Limits:
        return self._core.limits

    @property
    def draining(self) -> bool:
        return self._core.is_draining

    @property
    def num_connections(self) -> int:
        """Connections open now, those in their handshake included."""
        return len(self._core.connections)

    @property
    def refused_connections(self) -> int:
        """Connections that were closed for want of a certificate or of room."""
        return self._core.connections.num_refused

    def metrics(self) -> list[Metric]:
        """Its figures for `GET /metrics`."""
        return self._core.metrics()

    def add_task(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        """A background task of the server's loop, from its start to its close; call it before `start`.

        What it raises is logged with its traceback and counted in the metrics; then it begins again, after 1 s that
        doubles to 60 s with each failure, and is 1 s again after 60 s without one.
        """
        self._tasks.append((name, body))

    def start(self) -> None:
        """Listen and answer in a background thread.

        Raises:
            NetworkError: If the port is taken or the host is none of this machine's.
        """
        if self.identity is not None:
            self._tls = self.identity.server_context()
        self._listener = listen(self.host, self.port)
        self.port = self._listener.getsockname()[1]
        ready = threading.Event()
        self._thread = Supervised(lambda: asyncio.run(self._serve(ready)), "http-server").start()
        if not ready.wait(START_S):
            self.close()
            raise NetworkError(f"server: no event loop within {START_S:g} s on {self.address}; see the log.")
        _servers.add(self)
        if self.identity is not None:
            self._trust = TrustWatch(
                self.identity, Client(self.identity), known=self._known, discovery=self._discovery,
                address=self.address, on_change=lambda: self.run_soon(self._core.sweep),
            ).start()  # fmt: skip
        log.info("listening: address=%s tls=%s", self.address, "yes" if self._tls is not None else "no")

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's loop, from another thread, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def run_soon(self, callback: Callable[[], object]) -> None:
        """Call something in the server's loop, from another thread; nothing where it does not run."""
        if self._is_running():
            with contextlib.suppress(RuntimeError):  # the loop failed and has not begun again
                self._loop.call_soon_threadsafe(callback)

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Take no more requests; let those being answered finish. Returns whether all did in the time given."""
        if not self._is_running() or self._loop.is_closed():
            return True
        return self.call(self._drain(timeout_s))

    def close(self) -> None:
        """Stop at once: end every connection and the thread."""
        if self._trust is not None:
            self._trust.close()
        with self._lock:
            if self._thread is not None:
                self._thread.stop()
                self.run_soon(lambda: self._stop.set())
                self._thread.join(THREAD_JOIN_S)
                assert self._listener is not None
                self._listener.close()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive

    async def _serve(self, ready: threading.Event) -> None:
        """The loop's life. One that fails ends its connections; the next one accepts on the same listener."""
        core = self._core
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        core.bind(self._loop)
        self._accepting = self._loop.create_task(self._supervise("accept", self._accept))
        tasks = [
            self._accepting,
            self._loop.create_task(self._supervise("sweep", self._sweep)),
            *(self._loop.create_task(self._supervise(name, body)) for name, body in self._tasks),
        ]
        ready.set()
        try:
            await self._stop.wait()
            core.is_draining = True
            self._close_listener()
        finally:
            for task in tasks:
                task.cancel()
            for connection in core.connections.all():
                connection.abort()
            core.connections.cancel_handshakes()
            for task in list(core.state.tasks):
                task.cancel()
            await asyncio.gather(*tasks, *core.state.tasks, return_exceptions=True)

    async def _drain(self, timeout_s: float) -> bool:
        core, deadline = self._core, self._loop.time() + timeout_s
        core.is_draining = True
        self._close_listener()
        core.connections.cancel_handshakes()
        for connection in core.connections.all():
            connection.shutdown()
        while core.requests.num_active and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
        return core.requests.num_active == 0

    def _close_listener(self) -> None:
        self._accepting.cancel()
        assert self._listener is not None
        if self._listener.fileno() != -1:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def _supervise(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        pause_s = FIRST_WAIT_S
        while True:
            began = self._loop.time()
            try:
                await body()
                return
            except Exception:
                self._core.task_failures[name] += 1
                if self._loop.time() - began > MAX_WAIT_S:
                    pause_s = FIRST_WAIT_S
                log.exception("server %s: task %s failed; it goes on in %g s", self.address, name, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_WAIT_S, 2 * pause_s)

    async def _sweep(self) -> None:
        limits, connections, trimmed, due_at = self._core.limits, self._core.connections, 0, 0.0
        while True:
            await asyncio.sleep(min(1.0, limits.idle_s / 4, limits.head_s / 4))
            self._core.sweep()
            if connections.num_added >= trimmed + TRIM_AFTER and self._loop.time() >= due_at:
                trimmed, due_at = connections.num_added, self._loop.time() + TRIM_EVERY_S
                await asyncio.to_thread(_trim_heap)

    async def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, address = await self._loop.sock_accept(self._listener)
            except ConnectionAbortedError:
                continue  # it ended before it was accepted
            except OSError as error:
                log.warning("server %s: accept failed, trying again: %s", self.address, error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            with contextlib.suppress(OSError):  # gone again
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host = str(address[0])
            if not self._core.connections.has_room(host):
                sock.close()
                continue
            task = self._loop.create_task(self._handshake(sock, host))
            # One that is cancelled before its first step never runs.
            task.add_done_callback(lambda done, sock=sock: sock.close() if done.cancelled() else None)  # type: ignore[misc]
            self._core.connections.add_handshake(task, host)

    async def _handshake(self, sock: socket.socket, host: str) -> None:
        core, limits = self._core, self._core.limits
        try:
            if self._tls is not None:
                async with asyncio.timeout(limits.handshake_s):
                    sock = await handshake(self._loop, sock, self._tls)
            SocketTransport(self._loop, sock, PeerProtocol(core, host))
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError: strangers, resets
            log.debug("server %s: refused a connection from %s: %s", self.address, host, error)
            core.connections.num_refused += 1
            if isinstance(error, ssl.SSLError) and self.identity is not None:
                self.identity.note("stranger", address=host, reason=str(error))
            sock.close()
        except BaseException:  # cancelled, to make room; or a fault of ours, which the task's owner logs
            sock.close()
            raise


def _trim_heap() -> None:
    """Gives the system what finished handshakes left in fragments: 5 KiB a connection. Only glibc keeps them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that does not block.

    Raises:
        NetworkError: If the port is taken or the host is none of this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise NetworkError(
                f"server: port {port} is in use on {host}. "
                "Stop what holds it, or choose another port (0 takes a free one)."
            ) from error
        raise NetworkError(f"server: cannot listen on {host}:{port}: {error}") from error
    return listener


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _after_fork() -> None:
    """Closes copies of listeners in a child: who connects after the parent's end would wait for nobody."""
    for server in list(_servers):
        if server._listener is not None:
            server._listener.close()
    _servers.clear()


os.register_at_fork(after_in_child=_after_fork)
