"""`--log-format json`: every line that a server writes to stderr is an object."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libtorrent")

from support.calibration import scaled
from support.nodes import HOST, NAME, make_dataset, make_network


def run(directory: Path, stack: ExitStack, *arguments: object) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A server that is up, and its ready line; its log is NAME.log, where NAME is the command's."""
    command = [sys.executable, "-m", "forebay", *map(str, arguments), "--json", "--log-format", "json"]
    log = stack.enter_context((directory / f"{arguments[0]}.log").open("w"))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ})
    stack.callback(process.communicate)
    stack.callback(process.kill)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, (directory / f"{arguments[0]}.log").read_text()
    return process, json.loads(line)


def test_every_line_of_every_server_is_an_object(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "dataset", 3, 200)
    with ExitStack() as stack:
        servers = [run(tmp_path, stack, "dht", "--listen", f"{HOST}:0")]
        host, port = servers[0][1]["address"].split(":")
        homes = make_network(tmp_path, ["data", "scheduler", "worker"], [(host, int(port))])

        def node(verb: str, name: str, *options: object) -> dict[str, Any]:
            servers.append(run(tmp_path, stack, verb, *options, "--identity", homes[name], "--listen", f"{HOST}:0"))
            return servers[-1][1]

        data = node("serve", "data", dataset.path)
        state = tmp_path / "state"
        scheduler = node("scheduler", "scheduler", NAME, "--seq-len", 16, "--state", state)
        servers.append(run(tmp_path, stack, "coordinator", "--listen", f"{HOST}:0"))
        command = [sys.executable, "-m", "forebay", "worker", NAME, "--identity", homes["worker"], "--batch-size", "2"]
        cache = ["--cache-dir", tmp_path / "cache", "--scheduler", scheduler["address"], "--log-format", "json", "-v"]
        done = subprocess.run([*command, *cache], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (tmp_path / "worker.log").write_text(done.stderr)
        target = [scheduler["address"], "--identity", homes["scheduler"]]
        servers.append(run(tmp_path, stack, "dashboard", *target, "--listen", f"{HOST}:0"))
        for _, ready in servers[1:]:  # A stranger's bytes, over plain TCP.
            address = ready.get("address") or ready["url"].split("/")[2]
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"\x16\x03nonsense\r\n\r\n")
                stranger.settimeout(scaled(5))
                stranger.recv(100)
        for process, _ in reversed(servers):
            process.terminate()
            process.communicate()
    lines = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("*.log")}
    for name, entries in lines.items():
        assert all({"time", "level", "logger", "message"} <= set(entry) for entry in entries), name
    assert {e["address"] for e in lines["serve"] if e["message"].startswith("data node started")} == {data["address"]}
    assert any("the run's state is in memory" in entry["message"] for entry in lines["coordinator"])
    assert any(entry.get("job") == NAME for entry in lines["scheduler"])
    wrong = [
        sys.executable,
        "-m",
        "forebay",
        "dashboard",
        "nowhere:1",
        "--log-format",
        "json",
        "--identity",
        homes["data"],
    ]
    failed = subprocess.run(wrong, capture_output=True, text=True)
    assert failed.returncode == 1 and json.loads(failed.stderr)["level"] == "error"
