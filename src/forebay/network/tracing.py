"""Spans of requests for OpenTelemetry, on both sides, where its environment variables ask for them.

`OTEL_EXPORTER_OTLP_ENDPOINT=http://HOST:4318` exports them by OTLP over HTTP, `OTEL_TRACES_EXPORTER=console` prints
them. A provider that the process has set is used as it is. Otherwise OpenTelemetry's SDK is not imported. FastAPI makes
the spans of a server.
"""

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forebay.errors import missing_package
from forebay.network import log

_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
_IDS = re.compile(r"/[0-9a-f]{32,}|\?.*")


@functools.cache
def get_tracer() -> Any:
    """The tracer of this process; None if no variable asks for spans."""
    kind = os.environ.get("OTEL_TRACES_EXPORTER")
    is_disabled = kind == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_disabled or not any(map(os.environ.get, _VARIABLES)):
        return None
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    except ModuleNotFoundError:
        log.info("no spans are exported: %s", missing_package("tracing", "opentelemetry"))
        return None
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider()
        exporter = ConsoleSpanExporter() if kind == "console" else OTLPSpanExporter()
        provider.add_span_processor(BatchSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
    return trace.get_tracer("forebay")


@contextmanager
def client_span(method: str, path: str, address: str, headers: dict[str, str]) -> Iterator[None]:
    """A span while a request is sent; adds the header by which the server's span becomes its child."""
    tracer = get_tracer()
    if tracer is None:
        yield
        return
    from opentelemetry import propagate, trace

    path = _IDS.sub(lambda match: "/{id}" if match[0].startswith("/") else "", path)
    attributes = {"http.request.method": method, "url.path": path, "server.address": address}
    with tracer.start_as_current_span(f"{method} {path}", kind=trace.SpanKind.CLIENT, attributes=attributes):
        propagate.inject(headers)
        yield
