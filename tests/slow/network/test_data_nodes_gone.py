"""Programs of a job whose only data node dies, and comes back with an extended dataset, or not at all."""

import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.nodes import Bootstrap, make_network
from support.processes import Start
from support.waiting import until

READ = "import forebay, time\nfor batch in forebay.Loader(): time.sleep(0.02)"


def prepare(start: Start, directory: Path, texts: int, *options: object) -> Path:
    words = directory / "words"
    words.mkdir(parents=True)
    for number in range(texts):
        text = " ".join(f"{directory.name}{number * i % 997}" for i in range(500))
        (words / f"{number}.txt").write_text(text)
    done = start("prepare", words, "--tokenizer", "bytes", "--out", directory / "data", *options)
    assert done.wait() == 0, done.errors
    return directory / "data"


@pytest.mark.parametrize("is_back", [True, False])
def test_a_job_without_its_data_node(tmp_path, stack: ExitStack, start: Start, is_back):
    """It goes on with an extended dataset; or all say that no data node is left, and the worker ends."""
    monday = prepare(start, tmp_path / "monday", 20, "--slice-bytes", "8000", "--set", "name=monday")
    tuesday = prepare(start, tmp_path / "tuesday", 2, "--extend", monday, "--set", "name=tuesday")
    dht = Bootstrap(2)
    stack.callback(dht.close)
    homes = make_network(tmp_path / "net", ["data", "scheduler", "worker"], dht.addresses)
    node = start("serve", monday, "--identity", homes["data"], "--json")
    node.ready()
    words = ["--identity", homes["scheduler"], "--state", tmp_path / "state", "--seq-len", 16, "--json"]
    scheduler = start("scheduler", "monday", *words, "--exit-when-done")
    address = scheduler.ready("ready")["address"]
    words = ["--identity", homes["worker"], "--cache-dir", tmp_path / "cache", "--cache-bytes", 100_000, "--json"]
    worker = start("worker", "--scheduler", address, *words, "--timeout", 15, "--", sys.executable, "-c", READ)

    def status(*options):
        asked = start("status", address, "--identity", homes["scheduler"], "--timeout", 20, *options)
        return asked.wait(), asked

    def is_used():
        return status("--json")[1].lines[0]["samples_used"] > 100

    until(is_used)
    node.end()
    if is_back:
        start("serve", tuesday, "--identity", homes["data"], "--json").ready()
        assert worker.wait() == 0, worker.errors
        assert scheduler.wait() == 0, scheduler.errors
        return
    assert worker.wait() == 1
    assert "NetworkError: worker: expected slices to use, got none for 15 s" in worker.errors
    assert "waiting for a lease: no data node serves 'monday'; last seen" in worker.errors
    assert "other workers" not in worker.errors
    code, asked = status("--json")
    assert code == 1 and not asked.lines[0]["healthy"] and "last seen" in asked.lines[0]["faults"][0]
    assert status("--json", "--probe")[0] == 0
    code, asked = status()
    assert code == 1 and "no data node serves 'monday'; last seen" in "".join(asked.output)
    start("serve", tuesday, "--identity", homes["data"], "--json").ready()
    until(lambda: "data nodes serve 'monday' again" in scheduler.errors)
    waited_s = re.findall(r"waiting for data nodes: no data node serves 'monday'.*\((\d+) s so far\)", scheduler.errors)
    assert [int(text) // 10 for text in waited_s] == list(range(len(waited_s))) and waited_s
