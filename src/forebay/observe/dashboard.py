"""The dashboard: a page that shows a source live, for any browser, with nothing from other hosts and nothing to build.

`page/` has the page, which asks for `/v1/status` (the view now), `/v1/history` (figures over time) and
`/v1/views/MOMENT` (of a record). `/metrics` has the same figures for Prometheus, so that one scrape covers a whole job.
The page is served without TLS and authentication: by default on loopback only. Requests for another host's name are
refused, as a page of another site may have pointed its own name at this address.

Cost: one poll of the source every two seconds, however many browsers look.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import FastAPI, Request, Response

from forebay.base import Closing, Json
from forebay.errors import ForebayError
from forebay.network.app import JSON, ApiError, Metric, make_app
from forebay.network.limits import ServerLimits
from forebay.network.server import Server
from forebay.observe.metrics import view_metrics
from forebay.observe.record import RunRecord
from forebay.observe.sources import LoaderSource, Source
from forebay.observe.views import COLUMNS, View, make_view

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.load.loader import Loader
    from forebay.stream.text_stream import TextStream

POLL_S = 2.0
_NUM_POINTS = 900  # of the charts: half an hour
_MAX_SAMPLES = 200  # Views of a record that are read for its charts.
_FILES = {"/": ("dashboard.html", "text/html"), "/dashboard.css": ("dashboard.css", "text/css"),
          "/dashboard.js": ("dashboard.js", "text/javascript")}  # fmt: skip
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache",
}  # fmt: skip
log = logging.getLogger("forebay.observe")


class Dashboard(Closing):
    """Serves the page of a source from `start` to `close`, which the end of a `with` calls.

    Args:
        record: Where the views are recorded.
    """

    def __init__(
        self, source: Source, host: str = "127.0.0.1", port: int = 0, *, record: RunRecord | None = None,
    ) -> None:  # fmt: skip
        self._source, self._record = source, record
        self._view = make_view("", "", "starting")
        self._points: deque[Json] = deque(maxlen=_NUM_POINTS)
        self._server = Server(self._app(), None, host, port, limits=ServerLimits(connections=256))
        self._server.add_task("dashboard poll", self._run)

    @property
    def url(self) -> str:
        return f"http://{self._server.address}/"

    def start(self) -> "Dashboard":
        """Serve, in a background thread. Raises NetworkError if the port is taken."""
        self._server.start()
        return self

    def close(self) -> None:
        self._server.close()

    async def _run(self) -> None:
        times = self._source.times()
        for moment in times[:: 1 + len(times) // _MAX_SAMPLES]:
            self._points.append(_point(await asyncio.to_thread(self._source.view_at, moment)))
        while True:
            started = time.monotonic()
            try:
                self._view = {**await asyncio.to_thread(self._source.poll), "columns": COLUMNS}
                self._points.append(_point(self._view))
                if self._record is not None:
                    await asyncio.to_thread(self._record.add, self._view)
            except ForebayError as error:
                if self._view.get("error") != str(error):
                    log.warning("dashboard: %s", error)
                self._view = {**self._view, "state": "no answer", "error": str(error)}
            await asyncio.sleep(max(0.1, started + POLL_S - time.monotonic()))

    def _app(self) -> FastAPI:
        app = make_app("Forebay dashboard", self._metrics)

        async def read_file(request: Request) -> Response:
            name, kind = _FILES[request.url.path]
            return Response((files("forebay.observe") / "page" / name).read_bytes(), media_type=kind, headers=_HEADERS)

        async def read_status() -> Response:
            return _in_order(self._view)

        async def read_history() -> Response:
            times = await asyncio.to_thread(self._source.times)
            return _in_order({"points": list(self._points), "times": times})

        async def read_view(moment: float) -> Response:
            try:
                return _in_order({**await asyncio.to_thread(self._source.view_at, moment), "columns": COLUMNS})
            except ForebayError as error:
                raise ApiError(404, "not_found", str(error)) from error

        for path in _FILES:
            app.add_api_route(path, read_file, response_class=Response, include_in_schema=False)
        app.get("/v1/status", summary="The view now.")(read_status)
        app.get("/v1/history", summary="Figures over time, and the moments of the record.")(read_history)
        app.get("/v1/views/{moment}", summary="The view at a moment of the record, Unix seconds.")(read_view)
        return app

    def _metrics(self) -> Iterator[Metric]:
        yield from view_metrics(self._view)
        yield from self._source.metrics()


def _in_order(value: Any) -> Response:
    """A value as JSON, its keys in their order, which is that of columns."""
    return Response(orjson.dumps(value), media_type=JSON, headers={"Cache-Control": "no-store"})


def _point(view: View) -> Json:
    """The figures of a view that are drawn over time."""
    rate, unit = view.get("figures", {}).get("throughput", (None, ""))
    return {"at": view["at"], "rate": rate, "unit": unit, "waits": view.get("waits", {})}


def serve_dashboard(
    loader: "Loader[Any] | TextStream", port: int = 0, host: str = "127.0.0.1", *, record: "str | Path | None" = None
) -> Dashboard:
    """Serve the dashboard of a Loader or TextStream from a thread of this process, with metrics at `/metrics`.

    Args:
        loader: What is shown; the training loop goes on using it.
        port: 0 takes a free port; see `Dashboard.url`. Each rank of a host needs its own.
        record: A folder for the record of the run, one for all ranks; `forebay top --replay FOLDER` opens it.

    Returns:
        The dashboard; `close()` ends it.

    Raises:
        NetworkError: If the port is taken. `UsageError`: If the folder cannot be written.
    """
    into = None if record is None else RunRecord(record, f"rank-{loader.rank:05d}")
    return Dashboard(LoaderSource(loader), host, port, record=into).start()
