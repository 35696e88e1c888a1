"""A real Prometheus, scraping every second, and promtool. Tests skip where Debian's package prometheus is missing."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.calibration import scaled
from support.ports import free_port


def program(name: str) -> str:
    """The path of prometheus or promtool; skips without it."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name}: apt-get install prometheus")
    return path


def lint(exposition: str) -> str:
    """What `promtool check metrics` says of an exposition; empty if it finds nothing."""
    command = [program("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=exposition, capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode or done.stderr else ""


class Prometheus:
    """Queries of a running server."""

    def __init__(self, url: str, log: Path) -> None:
        self._url, self._log = url, log

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}{path}?{query}") as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        return list(self.get("/api/v1/query", query=expression)["result"])

    def wait_for_targets(self, num_targets: int, num_scrapes: int = 3) -> list[dict[str, Any]]:
        """The targets, once each was scraped so often; fails with the reason of one that cannot be."""
        deadline = time.monotonic() + scaled(60)
        while True:
            targets = list(self.get("/api/v1/targets")["activeTargets"])
            counts = self.query(f"min(count_over_time(up[1h])) >= {num_scrapes}")
            if len(targets) == num_targets and counts and all(target["health"] != "unknown" for target in targets):
                return targets
            assert time.monotonic() < deadline, (targets, self._log.read_text())
            time.sleep(0.2)


@contextmanager
def running(config: str, directory: Path) -> Iterator[Prometheus]:
    """Prometheus with a configuration; its paths are relative to `directory`. The configuration is checked first."""
    path = directory / "prometheus.yml"
    path.write_text(config)
    command = [program("promtool"), "check", "config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={path}", f"--storage.tsdb.path={directory / 'tsdb'}", f"--web.listen-address={address}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([program("prometheus"), *options], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + scaled(30)
        while True:
            try:
                with urllib.request.urlopen(f"http://{address}/-/ready"):
                    break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (
                    directory / "prometheus.log"
                ).read_text()
                time.sleep(0.1)
        yield Prometheus(f"http://{address}", directory / "prometheus.log")
    finally:
        process.terminate()
        process.wait()
