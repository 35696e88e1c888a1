"""What a server says of itself: its OpenAPI document, its figures; and how it takes messages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

import pytest
from fastapi import Query
from fastapi import Request as HttpRequest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field
from starlette.responses import Response

from forebay.network.app import ApiError, JsonResponse, counter, exposition, gauge, make_app, role
from forebay.network.client import Client, RemoteError
from forebay.network.messages import Message, ResponseMessage
from forebay.network.server import Server
from support.wire import connect, read_answers


class Ask(Message):
    n: Annotated[int, Field(ge=0, le=9)]
    notes: Annotated[tuple[str, ...], Field(max_length=2)] = ()


class Got(ResponseMessage):
    n: int


@pytest.fixture
def server() -> Iterator[Server]:
    """Without an identity: over plain HTTP, for programs on this machine."""
    app = make_app("A node", lambda: [gauge("forebay_things", "Things.", 3)])

    @app.post("/v1/ask/{name}", response_model=Got, summary="Ask.", openapi_extra=role("worker"))
    async def ask(request: HttpRequest, name: str, message: Ask) -> Response:
        if name == "nobody":
            raise ApiError(404, "unknown", "there is nobody", 2.4)
        return JsonResponse({"n": message.n, "name": name})

    @app.get("/v1/log", response_model=Got)
    async def read_log(request: HttpRequest, step: Annotated[int, Query(ge=0)] = 0) -> Response:
        return JsonResponse({"n": step})

    with Server(app, None, "127.0.0.1", 0) as server:
        yield server


@pytest.fixture
def client() -> Iterator[Client]:
    with Client(None) as client:
        yield client


def test_a_document_of_routes(server: Server, client: Client) -> None:
    document, _ = client.request_json(server.address, "GET", "/openapi.json")
    assert document["openapi"].startswith("3.1") and document["info"]["title"] == "A node"
    assert document["paths"].keys() == {"/v1/ask/{name}", "/v1/log", "/metrics"}
    post = document["paths"]["/v1/ask/{name}"]["post"]
    assert post["x-role"] == "worker" and post["summary"] == "Ask."
    assert {"200", "400", "403", "404", "409", "413", "429", "500", "503"} == post["responses"].keys()
    ref = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][ref.rpartition("/")[2]]
    assert (schema["required"], schema["additionalProperties"]) == (["n"], False)
    assert schema["properties"]["notes"]["maxItems"] == 2


def test_messages_and_queries_are_strict(server: Server, client: Client) -> None:
    assert client.request_json(server.address, "POST", "/v1/ask/a", {"n": 3})[0] == {"n": 3, "name": "a"}
    for body in ({}, {"n": 10}, {"n": "3"}, {"n": 3.0}, {"n": True}, {"n": 3, "x": 1}, {"n": 3, "notes": "ab"}, [], 5):
        with pytest.raises(RemoteError) as caught:
            client.request_json(server.address, "POST", "/v1/ask/a", body)
        assert (caught.value.status, caught.value.code) == (400, "bad_request"), body
    for query in ("?step=-1", "?step=x", "?step=", "?step=1e400"):
        with pytest.raises(RemoteError, match="step") as caught:
            client.request_json(server.address, "GET", f"/v1/log{query}")
        assert (caught.value.status, caught.value.code) == (400, "bad_request")
    with pytest.raises(RemoteError, match="there is nobody") as caught:
        client.request_json(server.address, "POST", "/v1/ask/nobody", {"n": 3})
    assert (caught.value.status, caught.value.code) == (404, "unknown")
    with pytest.raises(RemoteError, match="n: Input should be less than or equal to 9"):
        client.request_json(server.address, "POST", "/v1/ask/a", {"n": 10})


def test_figures_over_http_are_those_of_the_service_and_the_server(server: Server, client: Client) -> None:
    client.request_json(server.address, "GET", "/v1/log")
    text = client.get_bytes(server.address, "/metrics", 1 << 16).decode()
    samples = {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert samples["forebay_things",] == 3 and samples["forebay_connections",] == 1
    assert samples["forebay_requests_total", "200"] == 1 and samples["forebay_requests_in_progress",] == 1


def test_figures_as_prometheus_reads_them() -> None:
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
    families = list(text_string_to_metric_families(text))
    assert [(s.name, s.labels, s.value) for f in families for s in f.samples] == [
        ("forebay_sent_bytes_total", {"peer": 'a"\\\n'}, 1.0),
        ("forebay_sent_bytes_total", {"peer": "b"}, 2.0),
        ("forebay_connections", {}, 3.0),
        ("forebay_wait", {}, math.inf),
    ]


@pytest.mark.parametrize("origin", ["Origin: https://page.example\r\n", "Content-Type: text/plain\r\n"])
def test_what_a_page_of_another_site_sends_is_refused(server: Server, origin: str) -> None:
    with connect(server, None) as sock:
        sock.sendall(f'POST /v1/ask/a HTTP/1.1\r\n{origin}Content-Length: 7\r\n\r\n{{"n":3}}'.encode())
        (answer,) = read_answers(sock)
    assert (answer.status, answer.json()["error"]) == (403, "cross_site")
