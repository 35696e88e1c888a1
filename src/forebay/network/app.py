"""FastAPI applications of Forebay's servers: errors, roles, metrics, files and CRLs.

`make_app` creates an application with `/openapi.json` and `/metrics`; a service adds its routes. The server puts the
sender (`peer`) and its `connection` (`server_connections.PeerProtocol`) into each request's state.
"""

import asyncio
import os
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Self

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from prometheus_client import PROCESS_COLLECTOR, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from forebay.base import Json
from forebay.errors import ProtocolError
from forebay.files import open_below
from forebay.network import log
from forebay.network.crl_exchange import CRLS, receive_crl
from forebay.network.messages import ErrorReply
from forebay.network.peer import Peer
from forebay.network.peer import Scope as CertificateScope
from forebay.network.pki.identity import Identity
from forebay.network.tracing import get_tracer

__all__ = ["Metric", "Request", "Response"]

JSON = "application/json"
BINARY = "application/octet-stream"
CHARGE_BYTES = 4 << 20  # of a quota at once
PEM_TYPE = "application/x-pem-file"


class ApiError(Exception):
    """An error response: HTTP `status`, `code` for programs, a message, and seconds for Retry-After, if any."""

    def __init__(self, status: int, code: str, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.wait_s = wait_s

    def response(self) -> Response:
        """The response: `{"error": code, "message": message}`."""
        headers = {} if self.wait_s is None else {"Retry-After": str(max(1, round(self.wait_s)))}
        return JsonResponse({"error": self.code, "message": str(self)}, self.status, headers)


class JsonResponse(Response):
    """An object as JSON; keys sorted."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SORT_KEYS)


Source = Path | int | bytes | Callable[[], BinaryIO]


class FileRange(Response):
    """Bytes [start, stop) of a file, an open one, or bytes in memory, sent in pieces; its memory is one piece.

    The file is read, not mapped: truncating a mapped file would kill the process by SIGBUS. Bytes in memory are not
    copied, so slow clients share them.

    Attributes:
        source: A callable opens the file; a path that is a link is not opened.
        charge: Counts bytes to be sent, a few MiB at a time, or bytes below 0 that were not sent; the connection ends
            where it returns False. None: nothing counts them.
        num_charged: Bytes that were counted before.
    """

    media_type = BINARY
    charge: Callable[[int], bool] | None = None
    num_charged = 0

    def __init__(self, source: Source, start: int, stop: int, status: int, headers: dict[str, str]) -> None:
        super().__init__(None, status, {**headers, "Accept-Ranges": "bytes", "Content-Length": str(stop - start)})
        self.source = source
        self.start = start
        self.stop = stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope["state"]["connection"]
        source = self.source
        if isinstance(source, Path):
            source = partial(open_below, source.parent, source.name)
        file = None
        try:
            if callable(source):
                try:
                    opening = asyncio.get_running_loop().run_in_executor(None, source)
                    file = await asyncio.shield(opening)
                except asyncio.CancelledError:
                    opening.add_done_callback(_close)
                    raise
                except OSError:
                    log.exception("server: cannot open a file")
                    error = ApiError(500, "unreadable", "the node cannot read this file; see its log")
                    await error.response()(scope, receive, send)
                    return
            descriptor = file.fileno() if file is not None else source if isinstance(source, int) else -1
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_pieces(connection, descriptor, send)
        finally:
            if file is not None:
                file.close()
            if self.charge is not None and self.num_charged:
                self.charge(-self.num_charged)

    def _is_charged(self, length: int, offset: int) -> bool:
        """Count the bytes from an offset unless they were; return whether so many may be sent."""
        if self.charge is not None:
            if self.num_charged < length:
                num_bytes = min(CHARGE_BYTES, self.stop - offset) - self.num_charged
                if not self.charge(num_bytes):
                    return False
                self.num_charged += num_bytes
            self.num_charged -= length
        return True

    async def _send_pieces(self, connection: Any, descriptor: int, send: Send) -> None:
        source = self.source
        offset = self.start
        piece_bytes = connection.piece_bytes
        buffer = memoryview(source if isinstance(source, bytes) else bytearray(min(piece_bytes, self.stop - offset)))
        while offset < self.stop and not connection.transport.is_closing():
            if isinstance(source, bytes):
                piece = buffer[offset : min(self.stop, offset + piece_bytes)]
            else:
                piece = buffer[: self.stop - offset]
                piece = piece[: await _read_into(descriptor, piece, offset)]
            length = len(piece)
            if not length:
                log.error("server: %s ends at byte %d of %d", source, offset, self.stop)
                connection.abort()  # the length was announced: only a cut tells the client
                return
            if not self._is_charged(length, offset):
                connection.abort()
                return
            await connection.wait_for_turn(length)
            offset += length
            await send({"type": "http.response.body", "body": piece, "more_body": offset < self.stop})
            await connection.sent(length)  # the buffer is free again
        if self.start == self.stop:
            await send({"type": "http.response.body"})


def _close(opening: asyncio.Future[BinaryIO]) -> None:
    """Close a file that was opened for a request which had ended."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


async def _read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Read at an offset: directly from the page cache, otherwise in a thread, as a disk may be slow."""
    try:
        return os.preadv(descriptor, [buffer], offset, os.RWF_NOWAIT)
    except (OSError, AttributeError):  # not cached, or a system without the flag
        return await asyncio.get_running_loop().run_in_executor(None, os.preadv, descriptor, [buffer], offset)


def file_response(request: Request, source: Source, size: int) -> FileRange:
    """A file or bytes of `size`: completely (200), or the requested range (206; ApiError 416 if malformed)."""
    header = request.headers.get("Range")
    if header is None:
        return FileRange(source, 0, size, 200, {})
    match = re.fullmatch(r"bytes=\s*([0-9]{1,18})-([0-9]{0,18})\s*", header, re.ASCII)
    if match is None:
        raise ApiError(416, "bad_range", f"Range: expected bytes=START-[END], got {header[:80]!r}")
    start = int(match[1])
    stop = min(int(match[2]) + 1, size) if match[2] else size
    if start >= stop:
        raise ApiError(416, "bad_range", f"Range: [{start}, {stop}) is not in [0, {size})")
    return FileRange(source, start, stop, 206, {"Content-Range": f"bytes {start}-{stop - 1}/{size}"})


def peer_of(request: Request) -> Peer:
    """The peer that sent a request, from its certificate."""
    peer: Peer = request.state.peer
    return peer


def source_of(request: Request) -> str:
    """The IP address of a request's connection."""
    return str(request.state.connection.address)


_ERRORS = {
    400: "The request is malformed.",
    403: "The certificate does not allow it, or is revoked.",
    404: "Not found.",
    409: "It contradicts the current state.",
    413: "The body is too large.",
    429: "Over a limit of this certificate or its organisation: retry after Retry-After.",
    500: "An internal error; see the log of the process.",
    503: "Stopping, full, or the disk cannot be written: retry after Retry-After.",
}


def describe_error(description: str) -> Json:
    """An error for a route's `responses`: JSON, whatever the route returns otherwise."""
    return {"description": description, "content": {JSON: {"schema": {"$ref": "#/components/schemas/ErrorReply"}}}}


def role(name: str) -> Json:
    """The role that a certificate needs, for a route's `openapi_extra`; checked before the body is read."""
    return {"x-role": name}


class _MemberRoute(APIRoute):
    """A route that checks the sender's role before it reads the body.

    A body is parsed from its bytes into the model of the parameter `message`, strictly, without intermediate objects:
    twice as fast.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        needed = (self.openapi_extra or {}).get("x-role")
        handle = super().get_route_handler()
        if self.body_field is not None:
            model: Any = self.body_field.field_info.annotation
            self._adapter = TypeAdapter(model)
            handle = self._handle_message

        async def authorized(request: Request) -> Response:
            peer = peer_of(request)
            if needed is not None and not peer.scope.allows(needed):
                raise ApiError(
                    403,
                    f"not_{needed}",
                    f"the certificate of {peer.peer_id} lacks the role {needed}, which {request.url.path} needs",
                )
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
    return "; ".join(f"{'.'.join(map(str, error['loc'])) or 'body'}: {error['msg']}" for error in errors[:3])[:600]


def add_trust_routes(app: FastAPI, identity: Identity) -> None:
    """Add the routes by which nodes read and send CRLs."""
    revocations = identity.revocations

    async def numbers() -> dict[str, dict[str, int]]:
        return {"crls": await asyncio.to_thread(revocations.numbers)}

    async def read(issuer: str) -> Response:
        crl = (await asyncio.to_thread(revocations.crls)).get(issuer)
        if crl is None:
            raise ApiError(404, "unknown_issuer", "no CRL of this issuer is known here")
        return Response(crl.pem, media_type=PEM_TYPE)

    async def receive(request: Request) -> dict[str, bool]:
        pem = await request.body()
        sender = peer_of(request).peer_id
        try:
            return {"new": await asyncio.to_thread(receive_crl, identity, pem, sender) is not None}
        except ProtocolError as error:
            raise ApiError(403, "bad_crl", str(error)) from error

    pem: Json = {"content": {PEM_TYPE: {"schema": {"type": "string", "maxLength": 1 << 20}}}}
    app.get(CRLS, operation_id="read_crl_numbers", summary="The number of the CRL of each issuer known here.")(numbers)
    app.get(
        CRLS + "/{issuer}", operation_id="read_crl", response_class=Response, summary="The CRL of an issuer.",
        responses={200: {**pem, "description": "The CRL."}},
    )(read)  # fmt: skip
    app.post(
        CRLS, operation_id="bring_crl", openapi_extra={"requestBody": {**pem, "required": True}},
        summary="Send a CRL: it is accepted if it is signed by its issuer and newer.",
    )(receive)  # fmt: skip


def make_app(
    title: str, metrics: Callable[[], Iterable[Metric]] = tuple,
    errors: Mapping[type[Exception], tuple[int, str]] = MappingProxyType({}),
) -> FastAPI:  # fmt: skip
    """An application with `/openapi.json`, `/metrics` and uniform errors.

    `errors`: status and code of the response to an exception of a route.
    """
    responses: dict[int | str, Json] = {status: describe_error(text) for status, text in _ERRORS.items()}
    get_tracer()  # FastAPI makes a span for each request if there is a provider.
    app = FastAPI(
        title=title, version="1", docs_url=None, redoc_url=None, redirect_slashes=False, responses=responses,
        telemetry={"operation_spans": False},
    )  # fmt: skip
    app.router.route_class = _MemberRoute
    for error, (status, code) in errors.items():
        app.add_exception_handler(error, partial(_known_error, status, code))
    for kind in (ApiError, HTTPException, ClientDisconnect, RequestValidationError, Exception):
        app.add_exception_handler(kind, _error_response)  # type: ignore[arg-type]

    def describe() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = schema = get_openapi(title=title, version="1", routes=app.routes)
            schema.setdefault("components", {}).setdefault("schemas", {})["ErrorReply"] = ErrorReply.model_json_schema()
            for methods in schema["paths"].values():
                for operation in methods.values():
                    operation["responses"].pop("422", None)  # the response is 400
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]

    @app.get("/metrics", summary="Figures for Prometheus.", response_class=PlainTextResponse)
    async def read_metrics(request: Request) -> Response:
        visible = _visible(metrics(), peer_of(request).scope)
        own = request.state.connection.core.metrics()
        return PlainTextResponse(exposition([*visible, *own, *PROCESS_COLLECTOR.collect()]))

    return app


def _visible(families: Iterable[Metric], scope: CertificateScope) -> list[Metric]:
    """Remove figures of other peers without the role viewer, and of datasets that the scope does not include."""
    visible = list(families)
    for family in visible:
        family.samples = [
            sample
            for sample in family.samples
            if ("peer" not in sample.labels or scope.allows("viewer"))
            and ("dataset" not in sample.labels or scope.includes(sample.labels["dataset"]))
        ]
    return visible


class _Families(list[Metric]):
    """Metrics, as a registry of the library."""

    def collect(self) -> Self:
        return self


def exposition(families: Iterable[Metric]) -> bytes:
    """Metrics in Prometheus' text format."""
    return generate_latest(_Families(families))


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, description: str,
    value: float | Mapping[str, float], label: str = "",
) -> Metric:  # fmt: skip
    if not isinstance(value, Mapping):
        return kind(name, description, value=value)
    family = kind(name, description, labels=[label])
    for key, number in sorted(value.items()):
        family.add_metric([key], number)
    return family


# A figure that rises and falls, and a total since the start (`name` ends in `_total`): name, description, value or
# values by `label`.
gauge = partial(_family, GaugeMetricFamily)
counter = partial(_family, CounterMetricFamily)


async def _known_error(status: int, code: str, request: Request, error: Exception) -> Response:
    if status >= 500:
        log.error("%s %s: %s", request.method, request.url.path, error)
    return ApiError(status, code, str(error), 1.0 if status == 503 else None).response()


async def _error_response(request: Request, error: Exception) -> Response | None:
    route = f"{request.method} {request.url.path}"[:300]
    match error:
        case ClientDisconnect():
            return None
        case ApiError():
            if error.status == 403:
                request.state.connection.record_refusal(route, error)
            return error.response()
        case HTTPException():
            code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
            return ApiError(error.status_code, code, f"{route}: {error.detail}. See /openapi.json.").response()
        case RequestValidationError():
            return ApiError(400, "bad_request", _describe(error.errors())).response()
    return ApiError(500, "internal", f"{route} failed; see the node's log").response()
