"""A server of the tests in a process of its own: `ServerProcess(folder, "bucket")` or `(folder, "hub")`.

The parent sets its faults and reads its counters over a pipe. Its CPU seconds are counted apart, because on a machine
of few cores it competes with what is measured.
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

CLASSES = {"bucket": ("support.origin_server", "OriginServer"), "hub": ("support.hub_server", "HubServer")}


class ServerProcess:
    """Serves `folder` within a `with` block at `url`; a bucket also at `s3_url`, with `environment`."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind

    def __enter__(self) -> ServerProcess:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.server_process", str(self.folder), self.kind], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        ready = self._read()
        self.url, self.s3_url, self.environment = ready["url"], ready["s3_url"], ready["environment"]
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait()
        self._child.stdout.close()

    def limit(self, **faults: float) -> None:
        """Set faults of the server (`bytes_per_s`, `delay_s`, …; 0 for no limit), and reset its counters."""
        self._request(**faults)

    def sent(self) -> dict[str, int]:
        """`bytes` of bodies and number of `requests` since `limit`."""
        return self._request()

    def cpu_s(self) -> float:
        """CPU seconds of the server's process."""
        return process_cpu_s(self._child.pid)

    def _request(self, **faults: float) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(faults).encode() + b"\n")
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        answer: dict[str, Any] = json.loads(self._child.stdout.readline())
        return answer


def main(folder: str, kind: str) -> None:
    """Serve until stdin ends."""
    sys.path.insert(0, str(ROOT / "tests"))
    module, name = CLASSES[kind]
    with getattr(importlib.import_module(module), name)(Path(folder)) as server:
        addresses = {"url": server.url, "s3_url": "", "environment": {}}
        if kind == "bucket":
            addresses |= {"s3_url": server.s3_url, "environment": server.s3_environment}
        print(json.dumps(addresses), flush=True)
        for line in sys.stdin:
            if faults := json.loads(line):
                for fault, value in faults.items():
                    setattr(server.faults, fault, value)
                server.reset()
            sent = {"bytes": sum(server.bytes_sent.values()), "requests": sum(server.requests.values())}
            print(json.dumps(sent), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
