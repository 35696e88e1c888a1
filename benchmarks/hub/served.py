"""The hub: the tests' server in a process of its own, told how slow it may be, and asked what it sent."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.loading.fleet import ROOT


class Served:
    """A hub's directory, served from `with` to its end at `url`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Served:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.hub.served", str(self.folder)], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self.url = self._read()["url"]
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait()
        self._child.stdout.close()

    def limit(self, delay_s: float, bytes_per_s: float) -> None:
        """Wait before each answer, and bytes a second of all connections together (0: no limit). Counters from 0."""
        self._ask(delay_s=delay_s, all_bytes_per_s=bytes_per_s)

    def sent(self) -> dict[str, int]:
        """`bytes` of files and `requests` of all kinds since `limit`."""
        return self._ask()

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
    kind = importlib.import_module("support.hub_server").HubServer
    with kind(Path(folder)) as hub:
        print(json.dumps({"url": hub.url}), flush=True)
        for line in sys.stdin:
            if ask := json.loads(line):
                hub.faults.delay_s, hub.faults.all_bytes_per_s = ask["delay_s"], ask["all_bytes_per_s"]
                hub.reset()
            sent = {"bytes": sum(hub.bytes_sent.values()), "requests": sum(hub.requests.values())}
            print(json.dumps(sent), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
