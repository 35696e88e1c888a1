"""The verbs that run nodes: what they print while they wait, how a job's end reaches all, what stops them at once."""

import contextlib
import json
import signal
import time
from contextlib import ExitStack

import pytest

from forebay.cli import main
from forebay.coordinator.server import Coordinator
from forebay.errors import NetworkError
from forebay.network.dht import LibtorrentDht, wait_for_bootstrap
from support.ledgers import certified
from support.nodes import HOST, NAME, PACED_READER, Bootstrap, Network, make_dataset, make_network
from support.ports import free_port
from support.processes import Start
from support.waiting import until

# For requests without an answer: a wait is reported after 2.5 s, also by a machine that stands still meanwhile.
NEVER = ("--timeout", 12)


def test_a_dead_bootstrap_node_is_named_by_every_verb(tmp_path, start: Start):
    make_dataset(tmp_path / "d", 2, 20)
    port = free_port()
    node = make_network(tmp_path, ["node"], [(HOST, port)])["node"]
    verbs = (("find", "x"), ("worker", "x"), ("scheduler", "x"), ("serve", tmp_path / "d"))
    for process in [start(*verb, "--identity", node, *NEVER) for verb in verbs]:
        assert process.wait() == 1, process.errors
        refused = f"{HOST}:{port}: Connection refused"
        assert f"waiting for a bootstrap node of the DHT; asked {refused}" in process.errors
        assert f"No bootstrap node answered ({refused}); the DHT cannot be queried." in process.errors


def test_one_bootstrap_node_that_answers_is_enough(stack: ExitStack):
    bootstrap = Bootstrap(1)
    stack.callback(bootstrap.close)
    others = [(HOST, free_port()), ("no-such-host.invalid", 1)]
    wait_for_bootstrap([*others, *bootstrap.addresses], 60)
    with pytest.raises(NetworkError, match="No bootstrap node answered"):
        wait_for_bootstrap(others, 0.5)


def test_an_unknown_name_is_waited_for_aloud_and_not_for_ever(tmp_path, stack: ExitStack, start: Start):
    network = Network(tmp_path, stack, dht_nodes=2)
    for words, line, error in (
        (f"worker ghost --cache-dir {tmp_path}/c".split(), "the scheduler of 'ghost': the DHT names none",
         "expected an answer within 12 s"),
        (f"scheduler ghost --state {tmp_path}/s".split(), "data nodes of 'ghost': the DHT names none",
         "expected a data node of 'ghost'"),
    ):  # fmt: skip
        process = start(*words, "--identity", network.homes["data"], *NEVER)
        assert process.wait() == 1, process.errors
        assert f"waiting for {line}" in process.errors and error in process.messages[-1], process.errors


def test_a_job_with_a_slice_set_aside_is_not_done_and_every_live_worker_hears_of_its_end(
    tmp_path, stack: ExitStack, start: Start
):
    """One of three workers may have all the leases while the others wait; none trains before all have come."""
    workers = ["w0", "w1", "w2"]
    network = Network(tmp_path, stack, *workers, dht_nodes=2)
    network.serve(make_dataset(tmp_path / "d", 12, 400))
    victim = sorted((tmp_path / "d" / "slices").iterdir())[4]
    data = bytearray(victim.read_bytes())
    data[-3] ^= 1
    victim.write_bytes(data)
    words = f"scheduler {NAME} --identity {network.homes['scheduler']} --state {tmp_path}/state --json".split()
    words += ["--seq-len", 8, "--max-failures", 1]
    scheduler = start(*words, "--exit-when-done")
    client, address = network.client("data"), scheduler.ready()["address"]
    own = [f"--identity {network.homes[name]} --cache-dir {tmp_path}/cache-{name}".split() for name in workers]
    started = [start("worker", NAME, *each, "--json", "--", *PACED_READER, 0, tmp_path / "go") for each in own]

    def have_all_come():
        time.sleep(0.2)
        return len(client.request_json(address, "GET", "/v1/status", timeout_s=60)[0]["workers"]) == 3

    until(have_all_come)
    (tmp_path / "go").touch()
    assert [worker.wait() for worker in started] == [0, 0, 0], [worker.errors for worker in started]
    reports = [worker.lines[-1]["report"] for worker in started]
    assert all(report["done"] and report["samples_left_out"] == 50 for report in reports)
    assert sum(report["samples"] - report["wasted_samples"] for report in reports) == 10 * 50
    assert scheduler.wait() == 1
    assert "got 50 unused, of slices set aside: 4" in scheduler.messages[-1]
    result = certified(tmp_path / "state" / "ledger.jsonl", network.homes["data"])
    assert [epoch["set_aside"] for epoch in result.epochs] == [50] and result.epochs[0]["missing"] == 0
    again = start(*words)  # To exit, it would wait for five seconds only.
    status = start(*f"status {again.ready()['address']} --identity {network.homes['w1']} --timeout 60".split())
    assert status.wait() == 0, status.errors
    shown = "".join(status.output)
    assert "incomplete" in shown and "50 samples of slices set aside were not used" in shown
    assert "slice 4 is set" in shown
    assert again.end(signal.SIGTERM) == 0
    assert start(*words, "--exit-when-done").wait() == 1


def test_a_bad_access_list_stops_a_data_node_before_it_starts(tmp_path, capsys):
    make_dataset(tmp_path / "d", 2, 20)
    path = tmp_path / "access.toml"
    path.write_text("[[dataset]\n")
    node = make_network(tmp_path, ["node"], [])["node"]
    assert main(f"serve {tmp_path}/d --identity {node} --access {path}".split()) == 2
    message = capsys.readouterr().err
    assert f"{path}:1: expected TOML" in message and len(message.splitlines()) == 1, message


def test_status_of_nodes_of_every_kind(tmp_path, stack: ExitStack, monkeypatch, capsys):
    """Exit 0 while a node takes requests, else 1; also by the environment, as probes do."""
    network, port = Network(tmp_path, stack, "w0", "w1"), free_port()
    with contextlib.closing(LibtorrentDht(HOST, port, [])):
        assert main(f"status udp://{HOST}:{port} --timeout 60".split()) == 0
    assert main(f"status udp://{HOST}:{port} --timeout 0.5".split()) == 1
    for identity in (None, network.identity("w0")):
        with Coordinator(identity=identity) as coordinator:
            scheme = "https" if identity else "http"
            monkeypatch.setenv("FOREBAY_STATUS", f"{scheme}://{coordinator.address}")
            monkeypatch.setenv("FOREBAY_IDENTITY", str(network.homes["w1"]) if identity else "")
            capsys.readouterr()
            assert main(["status", "--timeout", "60"]) == 0
            assert f"run {coordinator.run_id}  waiting" in capsys.readouterr().out
            assert main(["status", "--timeout", "60", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["healthy"]
        assert main(["status"]) == 1
