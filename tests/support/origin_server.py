"""A web server and a small S3 over a directory, on real sockets, with faults that are set from outside.

    with OriginServer(directory) as server:
        server.faults.drop = 0.2
        open_remote(server.url)            # http://127.0.0.1:PORT
        open_remote(server.s3_url)         # s3://bucket/...; see `s3_environment`

GET and HEAD with one range. Under `/bucket/` a request must carry a valid AWS signature (version 4), and objects may
be put there, whole or in parts (`uploads.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import http.server
import random
import threading
import time
import urllib.parse
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import uploads
from support.cuttable import CuttableServer, counted

ACCESS_KEY = "test-key"
SECRET_KEY = "test-secret"
BUCKET = "bucket"
_STEP = 64 << 10


@dataclass
class Faults:
    """What goes wrong; change it while the server runs.

    Attributes:
        drop: Part of the requests whose connection is closed before an answer.
        truncate: Part of the bodies that are cut at a random place.
        corrupt: Names whose bytes have the byte at `corrupt[name]` flipped.
        missing, forbidden: Names answered with 404, 403.
        requests_per_s: Above so many, 503 with `Retry-After: retry_after` (if not None).
        bytes_per_s: Of all connections together. 0: no limit.
        connection_bytes_per_s: Of each connection. 0: no limit.
        black_hole: Requests are read and never answered.
        delay_s: Before each answer.
        ignore_ranges: Answers 200 with the whole object.
    """

    drop: float = 0.0
    truncate: float = 0.0
    corrupt: dict[str, int] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    forbidden: set[str] = field(default_factory=set)
    requests_per_s: float = 0.0
    retry_after: str | None = None
    bytes_per_s: float = 0.0
    connection_bytes_per_s: float = 0.0
    black_hole: bool = False
    delay_s: float = 0.0
    ignore_ranges: bool = False


class OriginServer:
    """Serves a directory from `with` to its end.

    Attributes:
        requests: Counter of names asked for (a throttled or dropped request counts).
        bytes_sent: Counter of body bytes by name.
        ranges: (name, start, stop) of each answered request, in order.
        statuses: Counter of statuses.
        most_at_once: The largest number of requests under way together.
        connections: How many were opened.
        paths, authorizations: Of each request, in order.
        uploads: What was put, and is being put in parts.
        auth: If set, the Authorization header that plain requests must carry (else 401).
    """

    def __init__(self, directory: Path, *, seed: int = 1) -> None:
        self.directory = directory
        self.faults = Faults()
        self.auth: str | None = None
        self.uploads = uploads.Uploads()
        self.redirect: str | None = None  # a base URL: plain requests are sent on to it with 302
        self.requests: Counter[str] = Counter()
        self.bytes_sent: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.ranges: list[tuple[str, int, int]] = []
        self.paths: list[str] = []
        self.authorizations: list[str] = []
        self.connections = 0
        self.shift_ranges = 0  # answers with a range that begins so much later than was asked for
        self.most_at_once = 0
        self._now = 0
        self.chance = random.Random(seed)
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self._arrivals: deque[float] = deque()
        self._sent_until = 0.0
        outer = self

        class Bound(_Handler):
            owner = outer

        self._server = CuttableServer(("127.0.0.1", 0), Bound)
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.s3_url = f"s3://{BUCKET}"
        self.s3_environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> OriginServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop; connections are cut. May be called twice."""
        if not self.stopping.is_set():
            self.stopping.set()
            self._server.shutdown()
            self._server.cut()
            self._server.server_close()
            self._thread.join()

    @property
    def num_open(self) -> int:
        """Connections that are open now; one that the client closed, until that was seen."""
        return len(self._server.open)

    def reset(self) -> None:
        """Forget the counters."""
        with self.lock:
            self.requests.clear()
            self.bytes_sent.clear()
            self.statuses.clear()
            self.ranges.clear()
            self.paths.clear()
            self.authorizations.clear()
            self.most_at_once = 0

    def happens(self, part: float) -> bool:
        with self.lock:
            return part > 0 and self.chance.random() < part

    def too_many(self) -> bool:
        """Whether this request is above the limit of the last second."""
        if not self.faults.requests_per_s:
            return False
        now = time.monotonic()
        with self.lock:
            while self._arrivals and self._arrivals[0] < now - 1:
                self._arrivals.popleft()
            if len(self._arrivals) + 1 > self.faults.requests_per_s:
                return True
            self._arrivals.append(now)
            return False

    def pace(self, size: int) -> None:
        """Wait until all connections together may have sent so many more bytes."""
        if self.faults.bytes_per_s:
            with self.lock:
                self._sent_until = max(self._sent_until, time.monotonic()) + size / self.faults.bytes_per_s
                wait_s = self._sent_until - time.monotonic()
            self.stopping.wait(max(0.0, wait_s))

    def entered(self, by: int) -> None:
        with self.lock:
            self._now += by
            self.most_at_once = max(self.most_at_once, self._now)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: OriginServer

    def setup(self) -> None:
        super().setup()
        with self.owner.lock:
            self.owner.connections += 1

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.owner.entered(1)
        try:
            self._answer()
        finally:
            self.owner.entered(-1)

    def _answer(self) -> None:
        owner, faults = self.owner, self.owner.faults
        path = urllib.parse.urlsplit(self.path).path
        signed = path.startswith(f"/{BUCKET}/")
        name = urllib.parse.unquote(path).removeprefix(f"/{BUCKET}" if signed else "").lstrip("/")
        with owner.lock:
            owner.requests[name] += 1
            owner.paths.append(self.path)
            owner.authorizations.append(self.headers.get("Authorization", ""))
        if faults.black_hole:
            owner.stopping.wait()
            self.close_connection = True
            return
        owner.stopping.wait(faults.delay_s)
        if owner.happens(faults.drop):
            self.close_connection = True
            return
        if owner.too_many():
            return self._refuse(503, {"Retry-After": faults.retry_after} if faults.retry_after is not None else {})
        if signed and not _signature_fits(self):
            return self._refuse(403)
        if not signed and owner.redirect is not None:
            return self._refuse(302, {"Location": owner.redirect + self.path})
        if not signed and owner.auth is not None and self.headers.get("Authorization") != owner.auth:
            return self._refuse(401)
        if name in faults.forbidden:
            return self._refuse(403)
        file = owner.directory / name
        if name in faults.missing or ".." in name or not file.is_file():
            return self._refuse(404)
        self._send(name, file)

    def do_PUT(self) -> None:
        uploads.answer(self, _signature_fits(self))

    do_POST = do_DELETE = do_PUT

    def _refuse(self, status: int, headers: dict[str, str] | None = None) -> None:
        with self.owner.lock:
            self.owner.statuses[status] += 1
        body = b"" if self.command == "HEAD" else b"<Error><Code>Refused</Code></Error>"
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, name: str, file: Path) -> None:
        owner, faults = self.owner, self.owner.faults
        size = file.stat().st_size
        asked = "" if faults.ignore_ranges else self.headers.get("Range", "")
        start, stop = _range(asked, size) if asked else (0, size)
        start, stop = start + owner.shift_ranges, min(size, stop + owner.shift_ranges)
        if start >= stop and asked:
            return self._refuse(416)
        with owner.lock:
            owner.statuses[206 if asked else 200] += 1
            owner.ranges.append((name, start, stop))
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{size:x}"')
        for key, value in owner.uploads.metadata.get(name, {}).items():
            self.send_header(key, value)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = stop
        if owner.happens(faults.truncate):
            cut = start + int(owner.chance.random() * (stop - start))
        self._send_body(name, file, start, cut)
        self.close_connection = self.close_connection or cut < stop

    def _send_body(self, name: str, file: Path, start: int, stop: int) -> None:
        owner, faults = self.owner, self.owner.faults
        began, sent = time.monotonic(), 0
        paced = faults.bytes_per_s or faults.connection_bytes_per_s or name in faults.corrupt
        with file.open("rb") as source:
            if not paced:
                self.wfile.flush()
                with counted(owner, name, stop - start):
                    self.connection.sendfile(source, start, stop - start) if stop > start else None
                return
            source.seek(start)
            while sent < stop - start and not owner.stopping.is_set():
                data = bytearray(source.read(min(_STEP if paced else 1 << 20, stop - start - sent)))
                index = faults.corrupt.get(name, -1) - start - sent
                if 0 <= index < len(data):
                    data[index] ^= 1
                owner.pace(len(data))
                if faults.connection_bytes_per_s:
                    prefetch = (sent + len(data)) / faults.connection_bytes_per_s - (time.monotonic() - began)
                    owner.stopping.wait(max(0.0, prefetch))
                with counted(owner, name, len(data)):
                    self.wfile.write(data)
                sent += len(data)


def _range(text: str, size: int) -> tuple[int, int]:
    first, _, last = text.removeprefix("bytes=").partition("-")
    return int(first), min(size, int(last) + 1 if last else size)


def _signature_fits(request: http.server.BaseHTTPRequestHandler) -> bool:
    """Whether the request carries AWS's signature, version 4, of our secret over what it says was signed."""
    reported = request.headers.get("Authorization", "")
    if not reported.startswith("AWS4-HMAC-SHA256 "):
        return False
    parts = dict(part.strip().split("=", 1) for part in reported.removeprefix("AWS4-HMAC-SHA256 ").split(","))
    key_id, *scope = parts["Credential"].split("/")
    names = parts["SignedHeaders"].split(";")
    if key_id != ACCESS_KEY or "host" not in names:
        return False
    url = urllib.parse.urlsplit(request.path)
    query = sorted(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    canonical = "\n".join(
        [
            request.command,
            url.path,
            "&".join(f"{urllib.parse.quote(k, safe='')}={urllib.parse.quote(v, safe='')}" for k, v in query),
            *(f"{name}:{' '.join((request.headers.get(name) or '').split())}" for name in names),
            "",
            parts["SignedHeaders"],
            request.headers.get("x-amz-content-sha256", ""),
        ]
    )
    date = request.headers.get("x-amz-date", "")
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", date, "/".join(scope), digest])
    key = f"AWS4{SECRET_KEY}".encode()
    for part in scope:
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return hmac.compare_digest(hmac.new(key, text.encode(), hashlib.sha256).hexdigest(), parts["Signature"])
