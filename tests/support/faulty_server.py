"""HTTP servers of tests, in threads, on ports that the system chooses, with faults that are set from outside."""

from __future__ import annotations

import contextlib
import http.server
import random
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_STEP = 64 << 10


@dataclass
class Faults:
    """Faults of a server; change them while it runs.

    Attributes:
        drop: Part of the requests whose connection is closed before an answer.
        truncate: Part of the bodies that are cut at a random place.
        corrupt: Names whose bytes have the byte at `corrupt[name]` flipped.
        black_hole: Requests are read and never answered, bodies under way stop.
        delay_s: Before each answer.
        bytes_per_s, connection_bytes_per_s: Of all connections together, and of each. 0: no limit.
    """

    drop: float = 0.0
    truncate: float = 0.0
    corrupt: dict[str, int] = field(default_factory=dict)
    black_hole: bool = False
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    connection_bytes_per_s: float = 0.0


class CuttableServer(http.server.ThreadingHTTPServer):
    """Knows its open connections, and is quiet about clients that leave."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, *args: Any) -> None:
        self.open = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is not an error of the server."""


class FaultyServer:
    """Serves a directory within a `with` block; one port for each class of `handlers`.

    Attributes:
        requests: Counter of requests, by a key of the subclass (one that a fault hits counts).
        bytes_sent: Counter of body bytes by name; `statuses` of answers.
        paths, authorizations: Of each request, in order.
        ranges: (name, start, stop) of each body, in order.
        at_once, most_at_once: Requests under way now, and the most together.
        connections: How many were opened.
        stopping: Set when the server closes.
    """

    def __init__(self, directory: Path, *, seed: int = 1, host: str = "127.0.0.1") -> None:
        self.directory, self.chance = directory, random.Random(seed)
        self.faults = Faults()
        self.requests = Counter()
        self.bytes_sent = Counter()
        self.statuses = Counter()
        self._struck = Counter()
        self.paths = []
        self.authorizations = []
        self.ranges = []
        self.at_once = self.most_at_once = self.connections = 0
        self.lock, self.stopping, self._sent_until = threading.Lock(), threading.Event(), 0.0
        bound = [type(handler.__name__, (handler,), {"owner": self}) for handler in self.handlers]
        self._servers = [CuttableServer((host, 0), handler) for handler in bound]
        self.ports = [server.server_address[1] for server in self._servers]
        self.url = f"http://{host}:{self.ports[0]}"
        self._threads = [
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in self._servers
        ]

    def __enter__(self) -> Any:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop; connections are cut. May be called twice."""
        if not self.stopping.is_set():
            self.stopping.set()
            for server, thread in zip(self._servers, self._threads):
                server.shutdown()
                for connection in list(server.open):
                    with contextlib.suppress(OSError):  # closed by the other side
                        connection.shutdown(socket.SHUT_RDWR)
                server.server_close()
                thread.join()

    @property
    def num_open(self) -> int:
        """Connections that are open now; one that the client closed, until that was seen."""
        return sum(len(server.open) for server in self._servers)

    def reset(self) -> None:
        """Forget what was counted."""
        with self.lock:
            for counted in (
                self.requests,
                self.bytes_sent,
                self.statuses,
                self.paths,
                self.authorizations,
                self.ranges,
            ):
                counted.clear()
            self.most_at_once = 0

    def happens(self, part: float) -> bool:
        with self.lock:
            return part > 0 and self.chance.random() < part

    def strikes(self, part: float, request: Handler) -> bool:
        """Return True if a fault hits a request; a part below 1 hits equal ones thrice at most: retries succeed."""
        if not self.happens(part):
            return False
        key = request.command, request.path, request.headers.get("Range", "")
        with self.lock:
            self._struck[key] += 1
        return part >= 1 or self._struck[key] <= 3

    def pace(self, num_bytes: int) -> None:
        """Wait until all connections together may have sent so many more bytes."""
        if self.faults.bytes_per_s:
            with self.lock:
                self._sent_until = max(self._sent_until, time.monotonic()) + num_bytes / self.faults.bytes_per_s
                wait_s = self._sent_until - time.monotonic()
            self.stopping.wait(max(0.0, wait_s))


class Handler(http.server.BaseHTTPRequestHandler):
    """Counts requests; a subclass has `answer`, which calls `has_fault` with the key of the request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        with self.owner.lock:
            self.owner.connections += 1

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def send_response(self, code: int, message: str | None = None) -> None:
        self.owner.statuses[code] += 1
        super().send_response(code, message)

    def do_GET(self) -> None:
        owner = self.owner
        with owner.lock:
            owner.at_once += 1
            owner.most_at_once = max(owner.most_at_once, owner.at_once)
        try:
            self.answer()
        finally:
            with owner.lock:
                owner.at_once -= 1

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def answer(self) -> None:
        raise NotImplementedError

    def has_fault(self, key: Any) -> bool:
        """Count the request; return True if it is not to be answered."""
        owner = self.owner
        with owner.lock:
            owner.requests[key] += 1
            owner.paths.append(self.path)
            owner.authorizations.append(self.headers.get("Authorization", ""))
        if owner.faults.black_hole:
            owner.stopping.wait()
        owner.stopping.wait(owner.faults.delay_s)
        if owner.faults.black_hole or owner.strikes(owner.faults.drop, self):
            self.close_connection = True
            return True
        return False

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_range(self, path: Path, name: str, version: str, headers: dict[str, str], shift: int = 0) -> None:
        """Send the range of a file that the request names, or all of it."""
        size, requested = path.stat().st_size, self.headers.get("Range", "")
        first, _, last = requested.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, size - int(last)) if requested else 0
        stop = min(size, int(last) + 1 if first and last else size)
        start, stop = start + shift, min(size, stop + shift)
        if requested and start >= stop:
            return self.reply(416, b"", {"Content-Range": f"bytes */{size}"})
        with self.owner.lock:
            self.owner.ranges += [(name, start, stop)] if self.command != "HEAD" else []
        self.send_response(206 if requested else 200)
        ranges = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if requested else {}
        fixed = {"ETag": f'"{version}"', "Accept-Ranges": "bytes", "Content-Length": str(stop - start)}
        for key, value in (fixed | ranges | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            with path.open("rb") as source:
                source.seek(start)
                self.send_body(name, source, stop - start, self.owner.faults.corrupt.get(name, -1) - start)

    def send_body(self, name: str, source: Any, num_bytes: int, flip: int = -1) -> None:
        """Send bytes of a file or response; the one at `flip` has another bit."""
        owner, faults = self.owner, self.owner.faults
        cut = num_bytes
        if owner.strikes(faults.truncate, self):
            cut = max(1, int(owner.chance.random() * num_bytes))
        began, sent = time.monotonic(), 0
        while sent < cut and not owner.stopping.is_set():
            data = bytearray(source.read(min(_STEP, cut - sent)))
            if not data:
                break
            if faults.black_hole:
                owner.stopping.wait()
            if 0 <= flip - sent < len(data):
                data[flip - sent] ^= 1
            owner.pace(len(data))
            if faults.connection_bytes_per_s:
                ahead_s = (sent + len(data)) / faults.connection_bytes_per_s - (time.monotonic() - began)
                owner.stopping.wait(max(0.0, ahead_s))
            with owner.lock:  # Before it is sent: who has received it may look at once.
                owner.bytes_sent[name] += len(data)
            try:
                self.wfile.write(data)
            except BaseException:
                with owner.lock:
                    owner.bytes_sent[name] -= len(data)
                raise
            sent += len(data)
        self.close_connection = self.close_connection or sent < num_bytes
