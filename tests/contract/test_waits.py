"""A server that refuses, is busy or is silent: every way to its bytes says so once, while it waits."""

import json
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from forebay import Loader, SharedShardedDatasetManager, TextStream
from forebay.cli import main
from forebay.coordinator.messages import Rules
from forebay.coordinator.server import Coordinator
from forebay.coordinator.store import RunStore
from forebay.data_node import DataNode
from forebay.dataset.reader import open_dataset
from forebay.errors import ForebayError, NetworkError, StateError, UsageError
from forebay.lease import scheduler_client
from forebay.lease.scheduler_client import SchedulerClient
from forebay.network.client import Client
from forebay.network.dht import wait_for_bootstrap
from forebay.network.join import renew_at
from forebay.network.pki.identity import Identity
from forebay.observe import dashboard
from forebay.observe.sources import Source
from forebay.observe.views import make_view
from forebay.storage import base, retry
from forebay.storage.hosts import parse_address
from forebay.storage.hub import find_repo
from forebay.storage.locks import acquire
from forebay.storage.store import open_store
from forebay.worker.membership import Membership
from support.feeding import make_dataset
from support.nodes import make_network
from support.origin_server import OriginServer
from support.waiting import until

COMMANDS = {
    "prepare": "prepare {url}/a.jsonl --workers 1 --tokenizer bytes --out {here}/out",
    "prepare, a bucket": "prepare s3://bucket/a.jsonl --workers 1 --tokenizer bytes --out {here}/out",
    "prepare, a list": "prepare {url}/x.paths --workers 1 --tokenizer bytes --out {here}/out",
    "convert": "convert {url}/a.jsonl {here}/a.parquet --to parquet",
    "convert, a bucket": "convert s3://bucket/a.jsonl {here}/a.parquet --to parquet",
    "mirror": "mirror {url}/d {here}/out",
    "mirror, a bucket": "mirror s3://bucket/d {here}/out",
    "inspect": "inspect {url}/d",
    "verify, a bucket": "verify s3://bucket/d",
}
CALLS = {
    "Loader": lambda url, _: Loader(f"{url}/d", seq_len=8, batch_size=2),
    "Loader, a bucket": lambda *_: Loader("s3://bucket/d", seq_len=8, batch_size=2),
    "stream": lambda url, _: TextStream(f"{url}/a.jsonl", tokenizer="bytes", seq_len=8, batch_size=1),
    "shards": lambda url, here: SharedShardedDatasetManager(8, 0, 1, None, url=url, folder=here / "s").at_step(0),
    "hub": lambda *_: find_repo("dataset", "a/b"),
    "store": lambda *_: open_store("s3://bucket/d").read("manifest.json"),
}
REASONS = {
    "refused": "refused|error sending request", "unknown": "not known|error sending request|resolve", "busy": "503",
    "silent": "no response yet",
}  # fmt: skip


@pytest.fixture
def server(tmp_path, monkeypatch):
    make_dataset(tmp_path / "origin/d", 1, 4, 8)
    (tmp_path / "origin/a.jsonl").write_text('{"text": "some text"}\n')
    (tmp_path / "origin/x.paths").write_text("a.jsonl\n")
    with OriginServer(tmp_path / "origin") as server:
        for name, value in {**server.s3_environment, "HF_ENDPOINT": server.url}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(retry, "_LOOK_EVERY_S", 0.01)
        monkeypatch.setattr(retry, "FIRST_S", 1e6)  # The first try may be slow: it is told only when the test says so.
        monkeypatch.setattr(retry, "EVERY_S", 1e9)
        yield server


@pytest.fixture
def refused():
    """An address where nothing listens, and that no other process can take."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("fault", REASONS)
@pytest.mark.parametrize("way", [*COMMANDS, *CALLS])
def test_a_wait_is_told_once_from_outside_of_the_tries(
    server: OriginServer, tmp_path, monkeypatch, caplog,
    way, fault, refused,
):  # fmt: skip
    clock = SimpleNamespace(skipped=0.0)

    def lines() -> list[str]:
        return [line for line in caplog.messages if re.search(f"^waiting for .*({REASONS[fault]})", line)]

    def await_line():
        """All waits under way began long ago."""
        for wait in list(retry._waits.all.values()):
            wait.began -= 1e6
        until(lines)

    def sleep(seconds: float):
        """The pause between two tries: the line comes within the first one."""
        if not lines():
            await_line()
        server.faults.requests_per_s = 0.0
        clock.skipped += seconds

    def end():
        if fault == "silent":
            until(lambda: server.requests)
            await_line()
            server.close()
        until(lines)
        server.faults.requests_per_s = 0.0

    clock.sleep, clock.monotonic = sleep, lambda: time.monotonic() + clock.skipped
    monkeypatch.setattr(base, "time", clock)
    url = server.url
    if fault in ("refused", "unknown"):
        url = f"http://{refused}" if fault == "refused" else "http://no-such-host.invalid"
        for name in (*server.s3_environment, "HF_ENDPOINT"):
            monkeypatch.setenv(name, os.environ[name].replace(server.url, url))
    server.faults.black_hole, server.faults.requests_per_s = fault == "silent", 1e-9 * (fault == "busy")
    ending = threading.Thread(target=end)
    ending.start()
    try:
        if way in CALLS:
            CALLS[way](url, tmp_path)
        else:
            assert (main(COMMANDS[way].format(url=url, here=tmp_path).split()) == 0) == (fault == "busy")
    except ForebayError:
        assert fault != "busy" or way in ("shards", "hub")  # Which are not there.
    ending.join()
    assert len(lines()) == 1


def scheduler(address, home):
    identity = Identity.load(home)
    client = SchedulerClient(identity, Client(identity), "x", None, address, 1e9)
    return client.read_job, client.stop.set


def member(address, home):
    member = Membership(address, patience_s=1e9)
    return member.join, lambda: setattr(member, "closed", True)


def dht(address, home):
    stop = threading.Event()
    return lambda: wait_for_bootstrap([parse_address(address)], 1e9, stop), stop.set


def lock(address, home):
    pending = acquire(home / "lock")
    return lambda: acquire(home / "lock").release(), pending.release


def ledger(address, home):
    pending = threading.Event()

    def call():
        with patch("forebay.observe.ledger_queries.is_roster", lambda path: pending.wait()):
            main(["ledger", "verify", str(home / "node-cert.pem")])

    return call, pending.set


NODES = [
    (ledger, "", "the end of .*node-cert.pem"),
    (scheduler, "refused", "the scheduler of 'x': .*refused"),
    (scheduler, "silent", "the scheduler of 'x': .* has not answered yet"),
    (member, "refused", "coordinator .*refused"),
    (member, "silent", "an answer of coordinator"),
    (member, "alone", "other workers: 1 joined, the run waits for 2"),
    (dht, "refused", "a bootstrap node of the DHT; asked .*refused"),
    (lambda address, home: (lambda: renew_at(address, home), dict), "silent", "admission at .*: no response yet"),
    (lock, "", "the lock .*lock, which process PID on .* has"),
]


@pytest.mark.parametrize("node, fault, line", NODES)
def test_a_node_tells_what_it_waits_for(tmp_path, monkeypatch, caplog, refused, node, fault, line):
    monkeypatch.setattr(retry, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(retry, "EVERY_S", 1e9)
    monkeypatch.setattr(scheduler_client, "STOPPING_S", 0)
    line = line.replace("PID", str(os.getpid()))

    def reported() -> list[str]:
        return [text for text in caplog.messages if re.match(f"waiting for {line}", text)]

    def is_told():
        for wait in list(retry._waits.all.values()):
            wait.began -= 3 * bool(re.match(line, wait.what()))
        return reported()

    with Coordinator("127.0.0.1", 0, rules=Rules(min_workers=2)) as run, socket.create_server(("", 0)) as listener:
        address = {"alone": run.address, "refused": refused}.get(fault, f"127.0.0.1:{listener.getsockname()[1]}")
        call, end = node(address, make_network(tmp_path, ["node"], [])["node"])
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(call)
            until(is_told)
            listener.close()
            end()
            assert waiting.exception() is None or isinstance(waiting.exception(), ForebayError)
    assert len(reported()) == 1


def test_a_status_says_why_a_job_cannot_go_on(tmp_path, monkeypatch, caplog, capsys):
    make_dataset(tmp_path / "d", 1, 4, 8)
    home = make_network(tmp_path, ["node"], [])["node"]

    def read(*words: str) -> tuple[int, list[str]]:
        code, status = main(["status", *words, "--json"]), json.loads(capsys.readouterr().out)
        assert status["healthy"] == (not code)
        return code, status["faults"]

    for url in ("forebay://test/a/b", "forebay://test/a?id=beef"):
        assert main(["inspect", url, "--identity", str(home)]) == 2
    assert re.search("NETWORK/NAME(.|\n)*64 hex digits", capsys.readouterr().err)
    datasets = [open_dataset(tmp_path / "d")]
    with pytest.raises(UsageError, match=f"got d and d of one id, {datasets[0].id}"):
        DataNode(Identity.load(home), 2 * datasets, "127.0.0.1", 0, None)
    with DataNode(Identity.load(home), datasets, "127.0.0.1", 0, None) as node:
        words = node.address, "--identity", str(home)
        assert read(*words) == (0, [])
        (tmp_path / "d").rename(tmp_path / "moved")
        code, (fault,) = read(*words)
        assert code and "files of datasets: those of d are gone" in fault and read(*words, "--probe")[0] == 0
        assert main(["status", *words]) and fault in capsys.readouterr().out
        until(lambda: f"waiting for {fault}" in caplog.text)

    def fail(*_: object):
        raise StateError("database or disk is full")

    with Coordinator("127.0.0.1", 0) as coordinator:
        monkeypatch.setattr(RunStore, "save", fail)
        with pytest.raises(NetworkError, match="503"):
            Membership(coordinator.address, patience_s=0).join()
        assert read(f"http://{coordinator.address}") == (1, ["the disk: database or disk is full"])


def test_a_page_says_that_its_node_does_not_answer_and_logs_it_once(monkeypatch, caplog, capsys):
    polls = []

    class Gone(Source):
        def poll(self):
            polls.append(1)
            if len(polls) > 1:
                raise NetworkError("no peer there")
            return make_view("job", "books", "running")

    monkeypatch.setattr(dashboard, "POLL_S", 0.0)
    with dashboard.Dashboard(Gone()).start() as page:
        until(lambda: len(polls) > 3)
        assert main(["status", page.url.rstrip("/")]) == 1
    monkeypatch.setattr(Gone, "poll", lambda self: make_view("job", "books", "waiting", faults=["no data node"]))
    with dashboard.Dashboard(Gone()).start() as page:
        until(lambda: "no data node" in str(page._view))
        assert main(["status", page.url.rstrip("/")]) == 1
    assert re.search("books  no answer(.|\n)*no peer there", capsys.readouterr().out)
    assert caplog.text.count("no peer there") == 1
