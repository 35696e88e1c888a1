"""A threading HTTP server for tests whose open connections can be cut, and which is quiet about clients that leave."""

from __future__ import annotations

import contextlib
import http.server
import socket
from collections.abc import Iterator
from typing import Any


class CuttableServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, *args: Any) -> None:
        self.open: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def cut(self) -> None:
        for connection in list(self.open):
            with contextlib.suppress(OSError):  # closed by the other side
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the server's."""


@contextlib.contextmanager
def counted(owner: Any, name: str, num_bytes: int) -> Iterator[None]:
    """Count body bytes as sent before they are: who has received them may look at once. Not if sending fails."""
    with owner.lock:
        owner.bytes_sent[name] += num_bytes
    try:
        yield
    except BaseException:
        with owner.lock:
            owner.bytes_sent[name] -= num_bytes
        raise
