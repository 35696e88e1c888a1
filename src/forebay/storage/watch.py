"""Log lines about requests that take long, for callers that make very many: one thread for all, not one a request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from forebay.network.retry import EVERY_S, FIRST_S

log = logging.getLogger("forebay.storage")


class _Watch:
    """Logs requests that take long, by a thread that runs while this process makes requests."""

    def __init__(self) -> None:
        self._requests: dict[object, tuple[str, float]] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        token = object()
        self._requests[token] = (what, time.monotonic())
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            del self._requests[token]

    def _run(self) -> None:
        logged: dict[object, float] = {}
        while True:
            time.sleep(0.5)
            now, requests = time.monotonic(), dict(self._requests)
            logged = {token: logged_at for token, logged_at in logged.items() if token in requests}
            for token, (what, began) in requests.items():
                if now - began > FIRST_S and now - logged.get(token, -EVERY_S) >= EVERY_S:
                    logged[token] = now
                    log.warning("waiting for %s (%.0f s so far)", what, now - began)


requests_in_flight = _Watch()
