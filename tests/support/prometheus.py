"""A real Prometheus, scraping every second, and promtool. Tests skip where Debian's package prometheus is missing."""

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port
from support.waiting import until


def program(name: str) -> str:
    """The path of prometheus or promtool; skips without it."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name}: apt-get install prometheus")
    return path


def lint(exposition: str) -> str:
    """Return the output of `promtool check metrics`; empty if it finds nothing."""
    command = [program("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=exposition, capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode or done.stderr else ""


class Prometheus:
    """Queries of a running server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}{path}?{query}") as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict]:
        return list(self.get("/api/v1/query", query=expression)["result"])

    def targets(self, num_targets: int, num_scrapes: int = 3) -> list[dict]:
        """Return the targets, once each was scraped so often."""
        current = []

        def are_scraped():
            current[:] = self.get("/api/v1/targets")["activeTargets"]
            counts = self.query(f"min(count_over_time(up[1h])) >= {num_scrapes}")
            return len(current) == num_targets and bool(counts) and "unknown" not in {t["health"] for t in current}

        until(are_scraped)
        return current


def is_ready(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/-/ready"):
        return True
    return False


@contextmanager
def running(config: str, directory: Path) -> Iterator[Prometheus]:
    """Prometheus with a configuration; its paths are relative to `directory`. The configuration is checked first."""
    path = directory / "prometheus.yml"
    path.write_text(config)
    done = subprocess.run([program("promtool"), "check", "config", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={path}", f"--storage.tsdb.path={directory / 'tsdb'}", f"--web.listen-address={address}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([program("prometheus"), *options], stdout=log, stderr=log)
    try:
        until(lambda: process.poll() is not None or is_ready(address))
        assert process.poll() is None, (directory / "prometheus.log").read_text()
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait()
