"""A server's description of itself: its OpenAPI document and its metrics; and how it validates messages."""

import math
import socket
from collections.abc import Iterator
from typing import Annotated

import pytest
from fastapi import Query
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from forebay.network.app import ApiError, JsonResponse, counter, exposition, gauge, make_app, role
from forebay.network.messages import Message, ResponseMessage
from support.memory_server import MemoryServer


class Item(Message):
    n: Annotated[int, Field(ge=0, le=9)]
    notes: Annotated[tuple[str, ...], Field(max_length=2)] = ()


class Result(ResponseMessage):
    n: int


@pytest.fixture
def server() -> Iterator[MemoryServer]:
    """Without an identity: over plain HTTP, for programs on this machine."""
    app = make_app("A node", lambda: [gauge("forebay_things", "Things.", 3)])

    @app.post("/v1/item/{name}", response_model=Result, summary="Take one.", openapi_extra=role("worker"))
    async def take(request: HttpRequest, name: str, message: Item) -> Response:
        if name == "absent":
            raise ApiError(404, "unknown", "there is no such item", 2.4)
        return JsonResponse({"n": message.n, "name": name})

    @app.get("/v1/log", response_model=Result)
    async def read_log(request: HttpRequest, step: Annotated[int, Query(ge=0)] = 0) -> Response:
        return JsonResponse({"n": step})

    with MemoryServer(app) as server:
        yield server


def test_a_document_of_routes(server):
    document = server.ask("GET", "/openapi.json").json()
    assert document["openapi"].startswith("3.1") and document["info"]["title"] == "A node"
    assert document["paths"].keys() == {"/v1/item/{name}", "/v1/log", "/metrics"}
    post = document["paths"]["/v1/item/{name}"]["post"]
    assert post["x-role"] == "worker" and post["summary"] == "Take one."
    assert {"200", "400", "403", "404", "409", "413", "429", "500", "503"} == post["responses"].keys()
    ref = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][ref.rpartition("/")[2]]
    assert (schema["required"], schema["additionalProperties"]) == (["n"], False)
    assert schema["properties"]["notes"]["maxItems"] == 2
    lines = server.ask("GET", "/metrics").body.decode().splitlines()
    assert {"forebay_things 3.0", "forebay_connections 1.0", 'forebay_requests_total{status="200"} 1.0'} <= set(lines)


def test_messages_and_queries_are_strict(server):
    assert server.ask("POST", "/v1/item/a", {"n": 3}).json() == {"n": 3, "name": "a"}
    for body in (
        b"{}", b'{"n": 10}', b'{"n": "3"}', b'{"n": 3.0}', b'{"n": true}', b'{"n": 3, "x": 1}', b"[]", b"5",
        b'{"n": 3, "notes": "ab"}',
    ):  # fmt: skip
        refused = server.ask("POST", "/v1/item/a", body)
        assert refused.refusal == (400, "bad_request"), body
    for query in ("?step=-1", "?step=x", "?step=", "?step=1e400"):
        refused = server.ask("GET", f"/v1/log{query}")
        assert refused.refusal == (400, "bad_request") and b"step" in refused.body
    unknown = server.ask("POST", "/v1/item/absent", {"n": 3})
    assert (unknown.status, unknown.headers["retry-after"]) == (404, "2")
    assert unknown.json() == {"error": "unknown", "message": "there is no such item"}
    assert b"n: Input should be less than or equal to 9" in server.ask("POST", "/v1/item/a", {"n": 10}).body


def test_metrics_as_prometheus_reads_them():
    text = exposition(
        [
            counter("forebay_sent_bytes_total", "Bytes.", {"b": 2.0, 'a"\\\n': 1}, "peer"),
            gauge("forebay_connections", "Now.\nHere.", 3),
            gauge("forebay_wait", "Endless.", math.inf),
        ]
    ).decode()
    assert text == (
        "# HELP forebay_sent_bytes_total Bytes.\n# TYPE forebay_sent_bytes_total counter\n"
        'forebay_sent_bytes_total{peer="a\\"\\\\\\n"} 1.0\nforebay_sent_bytes_total{peer="b"} 2.0\n'
        "# HELP forebay_connections Now.\\nHere.\n# TYPE forebay_connections gauge\nforebay_connections 3.0\n"
        "# HELP forebay_wait Endless.\n# TYPE forebay_wait gauge\nforebay_wait +Inf\n"
    )


@pytest.mark.parametrize(
    "host, is_taken, beyond_loopback",
    [("127.0.0.1:80", True, True), ("[::1]:80", True, True), ("10.1.2.3", True, True), ("localhost", True, True),
     ("node7:29400", True, True), ("coordinator.jobs.svc.cluster.local:80", False, True),
     (f"{socket.gethostname()}.lan", False, True), ("attacker.example:80", False, False), ("[::1", False, False),
     ("127.0.0.1.attacker.example", False, False), ("attacker.example.", False, False)],
)  # fmt: skip
def test_a_page_by_another_name_of_this_address_reads_nothing(server, host, is_taken, beyond_loopback):
    for listens_at, expected in (("127.0.0.1", is_taken), ("0.0.0.0", beyond_loopback)):
        server.core.host = listens_at
        answer = server.ask("GET", "/v1/item/a?n=3", Host=host)
        assert (answer.status == 403) is not expected
        if not expected:
            assert answer.refusal == (403, "unknown_host") and host[:80] in answer.json()["message"]


@pytest.mark.parametrize("headers", [{"Origin": "https://page.example"}, {"Content_Type": "text/plain"}])
def test_requests_of_a_page_of_another_site_are_refused(server, headers):
    assert server.ask("POST", "/v1/item/a", {"n": 3}, **headers).refusal == (403, "cross_site")
