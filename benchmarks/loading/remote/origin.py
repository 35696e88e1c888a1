"""The origin: the tests' server, in a process of its own, told over a pipe how fast it may be and asked what it sent.

Its Python sends by `sendfile` when nothing is to be slowed, and in steps of 64 KiB else. Its CPU seconds are
counted apart: on a machine of few cores it competes with what is measured.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.loading.fleet import ROOT
from benchmarks.measure import process_cpu_s


class Served:
    """A folder, served by http (`url`) and as a bucket (`s3_url`, with `environment`), from `with` to its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Served:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.loading.remote.origin", str(self.folder)], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        told = self._read()
        self.url, self.s3_url, self.environment = told["url"], told["s3_url"], told["environment"]
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait()
        self._child.stdout.close()

    def throttle(self, bytes_per_s: float) -> None:
        """All connections together, from now on; 0 for no limit. The counters start anew."""
        self._ask(bytes_per_s=bytes_per_s)

    def sent(self) -> dict[str, int]:
        """Bytes of bodies and requests since `throttle`."""
        return self._ask()

    def cpu_s(self) -> float:
        """Of the server's process."""
        return process_cpu_s(self._child.pid)

    def _ask(self, **what: float) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(what).encode() + b"\n")
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        answer: dict[str, Any] = json.loads(self._child.stdout.readline())
        return answer


def main(folder: str) -> None:
    """Serve until stdin ends."""
    sys.path.insert(0, str(ROOT / "tests"))
    kind = importlib.import_module("support.origin_server").OriginServer
    with kind(Path(folder)) as server:
        print(
            json.dumps({"url": server.url, "s3_url": server.s3_url, "environment": server.s3_environment}), flush=True
        )
        for line in sys.stdin:
            ask = json.loads(line)
            if ask:
                server.faults.bytes_per_s = ask["bytes_per_s"]
                server.reset()
            sent = {"bytes": sum(server.bytes_sent.values()), "requests": sum(server.requests.values())}
            print(json.dumps(sent), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
