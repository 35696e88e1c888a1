"""The verbs that run nodes: what they say while they wait, how a job's end reaches all, what stops them at once."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.calibration import scaled

pytest.importorskip("libtorrent")

from forebay.cli import main
from forebay.coordinator.server import Coordinator
from forebay.data_node import DataNode
from forebay.errors import NetworkError
from forebay.ledger.verify import verify_ledger
from forebay.network.client import Client
from forebay.network.dht import LibtorrentDht, wait_for_bootstrap
from forebay.network.pki.identity import Identity, verify
from support.nodes import HOST, NAME, Bootstrap, make_dataset, make_network
from support.ports import free_port

Start = Callable[..., "subprocess.Popen[str]"]
# Of what is never answered: what is waited for is said after 2.5 s, also by a machine that stands still meanwhile.
NEVER_S = 12


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `forebay …`; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "forebay", *map(str, arguments)]
        started.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_a_dead_bootstrap_node_is_named_by_every_verb(tmp_path: Path, start: Start) -> None:
    make_dataset(tmp_path / "d", 2, 20)
    port = free_port()
    node = make_network(tmp_path, ["node"], [(HOST, port)])["node"]
    started = [
        start(verb, name, "--identity", node, "--timeout", NEVER_S)
        for verb, name in (("find", "x"), ("worker", "x"), ("scheduler", "x"), ("serve", tmp_path / "d"))
    ]
    for process in started:
        _, message = process.communicate()
        assert process.returncode == 1, message
        assert f"waiting for a bootstrap node of the DHT; asked {HOST}:{port}: Connection refused" in message
        assert f"No bootstrap node answered ({HOST}:{port}: Connection refused); the DHT cannot be queried." in message


def test_one_bootstrap_node_that_answers_is_enough() -> None:
    bootstrap = Bootstrap(1)
    try:
        others = [(HOST, free_port()), ("no-such-host.invalid", 1)]
        wait_for_bootstrap([*others, *bootstrap.at], 20)
        with pytest.raises(NetworkError, match="No bootstrap node answered"):
            wait_for_bootstrap(others, 0.5)
    finally:
        bootstrap.close()


def test_an_unknown_name_is_waited_for_aloud_and_not_for_ever(tmp_path: Path, start: Start) -> None:
    bootstrap = Bootstrap(2)
    node = make_network(tmp_path, ["node"], bootstrap.at)["node"]
    try:
        work = start("worker", "ghost", "--identity", node, "--timeout", NEVER_S, "--cache-dir", tmp_path / "c")
        schedule = start("scheduler", "ghost", "--identity", node, "--timeout", NEVER_S, "--state", tmp_path / "s")
        silent = socket.create_server((HOST, 0))  # accepts, and says nothing
        address = f"{HOST}:{silent.getsockname()[1]}"
        current = start(
            "worker", "--scheduler", address, "--identity", node, "--timeout", NEVER_S, "--cache-dir", tmp_path / "h"
        )
        expected = {
            work: ("the scheduler of 'ghost': the DHT names none", f"expected an answer within {NEVER_S} s"),
            schedule: ("data nodes of 'ghost': the DHT names none", "expected a data node of 'ghost'"),
            current: (f"the scheduler: {address} has not answered yet", address),
        }
        for process, (line, error) in expected.items():
            _, message = process.communicate()
            assert process.returncode == 1, message
            assert f"waiting for {line}" in message and error in message.splitlines()[-1], message
    finally:
        silent.close()
        bootstrap.close()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """A data node that serves the dataset `tiny` of 12 slices, in this process, and members."""
    with ExitStack() as stack:
        bootstrap = Bootstrap(2)
        stack.callback(bootstrap.close)
        homes = make_network(tmp_path, ["data", "scheduler", "w0", "w1", "w2"], bootstrap.at)
        dht = LibtorrentDht(HOST, 0, bootstrap.at)
        stack.callback(dht.close)
        dataset = make_dataset(tmp_path / "d", 12, 400)
        node = DataNode(Identity.load(homes["data"]), [dataset], HOST, 0, dht, ttl_s=30)
        node.start()
        stack.callback(node.stop)
        yield homes


def _schedule(start: Start, network: dict[str, Path], state: Path, *more: object) -> tuple[subprocess.Popen[str], str]:
    scheduler = start(
        "scheduler", NAME, "--identity", network["scheduler"], "--state", state, "--seq-len", 8, "--json", *more,
    )  # fmt: skip
    assert scheduler.stdout is not None
    return scheduler, json.loads(scheduler.stdout.readline())["address"]


def test_every_live_worker_hears_of_the_end(tmp_path: Path, start: Start, network: dict[str, Path]) -> None:
    """Of three, of which one may have all the leases while the others wait; none trains before all were heard of."""
    (tmp_path / "gated.py").write_text(
        "import time\nfrom pathlib import Path\nimport forebay\nfor batch in forebay.Loader():\n"
        f"    while not Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.02)\n"
    )
    scheduler, address = _schedule(start, network, tmp_path / "state", "--exit-when-done")
    workers = [
        start(
            "worker", NAME, "--identity", network[name], "--cache-dir", tmp_path / name, "--json",
            "--", sys.executable, tmp_path / "gated.py",
        )
        for name in ("w0", "w1", "w2")
    ]  # fmt: skip
    with Client(Identity.load(network["data"])) as client:
        deadline = time.monotonic() + scaled(150)
        while len(client.request_json(address, "GET", "/v1/status", timeout_s=scaled(10))[0]["workers"]) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    (tmp_path / "go").touch()
    for worker in workers:
        out, message = worker.communicate()
        assert worker.returncode == 0, message
        assert json.loads(out.splitlines()[-1])["report"]["done"]
    assert scheduler.wait() == 0


def test_a_job_with_a_slice_set_aside_is_not_done(tmp_path: Path, start: Start, network: dict[str, Path]) -> None:
    victim = sorted((tmp_path / "d" / "slices").iterdir())[4]
    data = bytearray(victim.read_bytes())
    data[-3] ^= 1
    victim.write_bytes(data)
    scheduler, address = _schedule(start, network, tmp_path / "state", "--exit-when-done", "--max-failures", 1)
    worker = start("worker", NAME, "--identity", network["w0"], "--cache-dir", tmp_path / "c", "--json")
    out, message = worker.communicate()
    assert worker.returncode == 0, message
    report = json.loads(out.splitlines()[-1])["report"]
    assert report["samples_left_out"] == 50 and report["samples"] == 10 * 50
    _, message = scheduler.communicate()
    assert scheduler.returncode == 1 and address
    assert "got 50 unused, of slices set aside: 4" in message.splitlines()[-1]
    result = verify_ledger(tmp_path / "state" / "ledger.jsonl", verify=verify)
    assert [epoch["set_aside"] for epoch in result.epochs] == [50] and result.epochs[0]["missing"] == 0
    again, address = _schedule(start, network, tmp_path / "state")  # To exit, it would wait for five seconds only.
    status = start("status", address, "--identity", network["w1"], "--timeout", 20)
    out, message = status.communicate()
    assert status.returncode == 0, message
    assert "incomplete" in out and "50 samples of slices set aside were not used" in out and "slice 4 is set" in out
    again.terminate()
    assert again.wait() == 0
    again, _ = _schedule(start, network, tmp_path / "state", "--exit-when-done")
    assert again.wait() == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[dataset]]\nname = "a"\n\n[[dataset]]\nname = "b"\nalow = []\n', ["dataset 2 alow"]),
        ('[[dataset]]\nname = "a"\ndeny = ["everyone"]\n', ["dataset 1 deny 1", "'everyone'"]),
        ('[[dataset]]\nname = "a"\nbytes_per_day = "lots"\n', ["dataset 1 bytes_per_day", "'lots'"]),
        ('[[dataset]]\nname = "a"\nid = "b"\n', ["dataset 1: expected either name or id"]),
        ('[defaults]\nallow = []\n[[dataset]]\nname = "a"\n', ["access list: defaults"]),
        ("[[dataset]\n", ["access.toml:1: expected TOML"]),
    ],
)
def test_a_bad_access_list_stops_a_data_node_before_it_starts(
    text: str, words: list[str], tmp_path: Path, start: Start
) -> None:
    make_dataset(tmp_path / "d", 2, 20)
    path = tmp_path / "access.toml"
    path.write_text(text)
    node = make_network(tmp_path, ["node"], [(HOST, free_port())])["node"]
    began = time.monotonic()
    process = start("serve", tmp_path / "d", "--identity", node, "--access", path, "--timeout", 90)
    _, message = process.communicate()
    assert process.returncode == 2 and time.monotonic() - began < scaled(80)
    assert all(word in message for word in [*words, str(path)]) and len(message.splitlines()) == 1, message


def test_status_of_nodes_of_every_kind(
    tmp_path: Path, network: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 0 while a node takes requests, else 1; also by the environment, as probes do."""
    port = free_port()
    with contextlib.closing(LibtorrentDht(HOST, port, [])):
        assert main(["status", f"udp://{HOST}:{port}", "--timeout", "20"]) == 0
    assert main(["status", f"udp://{HOST}:{port}", "--timeout", "0.5"]) == 1
    for identity in (None, Identity.load(network["w0"])):
        with Coordinator(identity=identity) as coordinator:
            scheme = "https" if identity else "http"
            monkeypatch.setenv("FOREBAY_STATUS", f"{scheme}://{coordinator.address}")
            monkeypatch.setenv("FOREBAY_IDENTITY", str(network["w1"]) if identity else "")
            capsys.readouterr()
            assert main(["status", "--timeout", "20"]) == 0
            assert f"run {coordinator.run_id}  waiting" in capsys.readouterr().out
            assert main(["status", "--timeout", "20", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["healthy"]
        assert main(["status"]) == 1
    monkeypatch.delenv("FOREBAY_STATUS")
    assert main(["status"]) == 2
    assert "expected HOST:PORT, got none" in capsys.readouterr().err
