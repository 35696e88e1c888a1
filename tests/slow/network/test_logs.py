"""`--log-format json`: every line that a server writes to stderr is an object."""

import json
import signal
import socket
from pathlib import Path

from support.nodes import HOST, NAME, make_dataset, make_network
from support.processes import Start

JSON_LOG = ("--log-format", "json")


def test_every_line_of_every_server_is_an_object(tmp_path: Path, start: Start) -> None:
    dataset = make_dataset(tmp_path / "dataset", 3, 200)
    servers = {}

    def run(verb, *options):
        servers[verb] = start(verb, *options, "--listen", f"{HOST}:0", "--json", *JSON_LOG)
        return servers[verb].ready()

    host, port = run("dht")["address"].split(":")
    homes = make_network(tmp_path, ["data", "scheduler", "worker"], [(host, int(port))])
    identity = {name: ("--identity", home) for name, home in homes.items()}
    data = run("serve", dataset.path, *identity["data"])
    state = f"--seq-len 16 --state {tmp_path}/state".split()
    scheduler = run("scheduler", NAME, *identity["scheduler"], *state)["address"]
    run("coordinator")
    run("dashboard", scheduler, *identity["scheduler"])
    words = ["worker", NAME, *identity["worker"], *f"--batch-size 2 --cache-dir {tmp_path}/cache -v".split()]
    worker = start(*words, "--scheduler", scheduler, *JSON_LOG)
    assert worker.wait() == 0, worker.errors
    for verb in ("serve", "scheduler", "coordinator", "dashboard"):  # A stranger's bytes, over plain TCP.
        ready = servers[verb].ready()
        host, _, port = (ready.get("address") or ready["url"].split("/")[2]).rpartition(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"\x16\x03nonsense\r\n\r\n")
            stranger.settimeout(60)
            stranger.recv(100)
    for server in reversed(servers.values()):
        server.end(signal.SIGTERM)
    servers["worker"] = worker
    logs = {verb: [json.loads(line) for line in server.messages] for verb, server in servers.items()}
    for verb, entries in logs.items():
        assert all({"time", "level", "logger", "message"} <= set(entry) for entry in entries), verb
    assert {e["address"] for e in logs["serve"] if e["message"].startswith("data node started")} == {data["address"]}
    assert any("the run's state is in memory" in entry["message"] for entry in logs["coordinator"])
    assert any(entry.get("job") == NAME for entry in logs["scheduler"])
    failed = start("dashboard", "nowhere:1", *identity["data"], *JSON_LOG)
    assert failed.wait() == 1 and json.loads(failed.errors)["level"] == "error"
