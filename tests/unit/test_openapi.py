"""What a server says of itself: its doors, its figures."""

from __future__ import annotations

import json
import math

import pytest

from forebay.errors import UsageError
from forebay.network.metrics import CONTENT_TYPE, counter, exposition, gauge, metrics_response
from forebay.network.openapi import COUNT, SHA256, TEXT, Door, array, openapi, openapi_response, record

SLICE = Door("GET", "/v1/slices/{sha256}", "A slice.", parts={"sha256": SHA256}, answer=None, ranges=True)
ASK = Door(
    "POST", "/v1/ask", "Ask.", body=record(("note",), n=COUNT, note=TEXT), answer=record(all=array(TEXT, 3)),
    refusals={409: "Not now."},
)  # fmt: skip


def test_a_document_of_doors() -> None:
    document = json.loads(openapi_response("A node", [SLICE, ASK]).body)
    assert document == openapi("A node", [SLICE, ASK])
    assert document["openapi"] == "3.1.0"
    get = document["paths"]["/v1/slices/{sha256}"]["get"]
    assert [parameter["name"] for parameter in get["parameters"]] == ["sha256", "Range"]
    assert "application/octet-stream" in get["responses"]["206"]["content"]
    post = document["paths"]["/v1/ask"]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"]["required"] == ["n"]
    assert {"200", "400", "403", "409", "413", "429", "503"} <= set(post["responses"])


def test_doors_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="schema for each part"):
        Door("GET", "/v1/slices/{sha256}", "A slice.")
    with pytest.raises(UsageError, match="got it twice"):
        openapi("x", [ASK, ASK])


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
        'forebay_sent_bytes_total{peer="a\\"\\\\\\n"} 1\nforebay_sent_bytes_total{peer="b"} 2.0\n'
        "# HELP forebay_connections Now.\\nHere.\n# TYPE forebay_connections gauge\nforebay_connections 3\n"
        "# HELP forebay_wait Endless.\n# TYPE forebay_wait gauge\nforebay_wait +Inf\n"
    )
    assert metrics_response([]).content_type == CONTENT_TYPE


def test_prometheus_own_parser_reads_them() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    text = exposition([counter("a_total", "A.", {"x y": 5.0}, "of"), gauge("b", "B.", -1.5)]).decode()
    families = list(parser.text_string_to_metric_families(text))
    assert [(s.name, s.labels, s.value) for f in families for s in f.samples] == [
        ("a_total", {"of": "x y"}, 5.0),
        ("b", {}, -1.5),
    ]


@pytest.mark.parametrize("name", ["bad name", "1x", "x-y", ""])
def test_names_that_prometheus_does_not_take(name: str) -> None:
    with pytest.raises(UsageError):
        exposition([gauge(name, "?", 1)])
    with pytest.raises(UsageError, match="_total"):
        counter("things", "?", 1)
