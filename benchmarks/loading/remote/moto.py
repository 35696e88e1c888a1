"""Moto's S3 server, if `moto_server` is on the PATH: an S3 implementation by others, with objects in memory.

It answers a range by copying the whole object, so the server is the limit, not the reader.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from benchmarks.loading.fleet import NotMeasuredError
from benchmarks.measure import process_cpu_s

_START_S = 30.0


class Moto:
    """The interface of `ServerProcess` without limits. Uploads the files of `folder` when it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Moto:
        program = shutil.which("moto_server")
        if program is None:
            raise NotMeasuredError("moto_server is not installed")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.s3_url = f"http://127.0.0.1:{port}", "s3://bucket"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_REGION": "us-east-1",
        }  # fmt: skip
        self._child = subprocess.Popen(
            [program, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._fill()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._child.terminate()
        self._child.wait()

    def limit(self, **faults: float) -> None:
        """Do nothing: moto cannot be throttled."""

    def cpu_s(self) -> float:
        """CPU seconds of the server's process."""
        return process_cpu_s(self._child.pid)

    def _fill(self) -> None:
        import obstore
        from obstore.store import S3Store

        until = time.monotonic() + _START_S
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{self.url}/bucket", method="PUT")).close()
                break
            except OSError as error:
                if time.monotonic() > until or self._child.poll() is not None:
                    raise NotMeasuredError(f"moto_server does not answer: {error}") from error
                time.sleep(0.1)
        os.environ |= self.environment
        store = S3Store("bucket", client_options={"allow_http": True})
        for path in sorted(self.folder.iterdir()):
            obstore.put(store, f"{self.folder.name}/{path.name}", path)
