"""Spans of requests: exported by OTLP to a receiver of this test, of both sides."""

import gzip
import http.server
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.nodes import HOST, make_dataset, make_network
from support.processes import Process, Start

READ = """
import sys
from forebay.network.client import Client, RemoteError
from forebay.network.pki.identity import Identity
address, home = sys.argv[1:]
with Client(Identity.load(home)) as client:
    client.request_json(address, "GET", "/v1/status")
    try:
        client.get_bytes(address, "/v1/slices/" + 64 * "a", 10)
    except RemoteError as error:
        assert error.status == 404
"""
IMPORTED = """
import sys
import forebay.network.client, forebay.network.app
forebay.network.app.make_app("A node")
print(sorted(name for name in sys.modules if name.startswith("opentelemetry.sdk")))
"""


@pytest.fixture
def receiver() -> Iterator[tuple[str, list]]:
    """An OTLP/HTTP receiver: its URL, and the spans that it got, each with its resource."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'forebay[otel]'")
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    spans = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            for group in service.ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {a.key: a.value.string_value for a in group.resource.attributes}
                spans.extend((names["service.name"], span) for scope in group.scope_spans for span in scope.spans)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer((HOST, 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://{HOST}:{server.server_port}", spans
    server.shutdown()
    thread.join()
    server.server_close()


def attributes(span: Any) -> dict:
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


def test_spans_of_a_client_and_a_data_node_form_one_trace(receiver, tmp_path, start: Start):
    url, spans = receiver
    listen = ("--listen", f"{HOST}:0", "--json")
    host, port = start("dht", *listen).ready()["address"].split(":")
    homes = make_network(tmp_path, ["data", "reader"], [(host, int(port))])
    dataset, export = make_dataset(tmp_path / "dataset", 2, 50), {"OTEL_EXPORTER_OTLP_ENDPOINT": url}
    words = [*f"serve {dataset.path} --identity {homes['data']}".split(), *listen]
    node = start(*words, **export, OTEL_SERVICE_NAME="data-node")
    reader = Process("-c", READ, node.ready()["address"], homes["reader"], **export, OTEL_SERVICE_NAME="reader")
    assert reader.wait() == 0, reader.errors
    node.end(signal.SIGTERM)
    client = {span.name: span for name, span in spans if name == "reader"}
    server = {span.name: span for name, span in spans if name == "data-node" and span.kind == span.SPAN_KIND_SERVER}
    assert set(client) == {"GET /v1/status", "GET /v1/slices/{id}"}
    for name, theirs in (("GET /v1/status", "GET /v1/status"), ("GET /v1/slices/{id}", "GET /v1/slices/{sha256}")):
        assert server[theirs].trace_id == client[name].trace_id
        assert server[theirs].parent_span_id == client[name].span_id
        assert attributes(server[theirs])["http.route"] and client[name].kind == client[name].SPAN_KIND_CLIENT
    failed = client["GET /v1/slices/{id}"]
    assert failed.status.code == failed.status.STATUS_CODE_ERROR
    assert any("unknown_slice" in attribute.value.string_value for attribute in failed.events[0].attributes)


@pytest.mark.parametrize("variables", [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:1", "OTEL_SDK_DISABLED": "true"}])
def test_the_sdk_is_not_imported_without_need(variables):
    program = Process("-c", IMPORTED, **variables)
    assert (program.wait(), program.output) == (0, ["[]\n"]), program.errors
