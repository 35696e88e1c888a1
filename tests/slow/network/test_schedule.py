"""Schedulers that stand still, die, are steered and start again; slices that are set aside."""

import os
import signal
import time
from contextlib import ExitStack

import pytest

from forebay.cli import main
from forebay.errors import StateError
from forebay.ledger.chain import read_entries
from forebay.network.client import RemoteError
from forebay.network.peer import Scope
from forebay.network.pki.identity import Identity, join, revoke
from forebay.observe.ledger_queries import replay
from support.exchanges import ExchangeClient
from support.ledgers import certified
from support.nodes import NAME, Network, make_dataset
from support.processes import Start
from support.waiting import until

SEQ_LEN, SAMPLES = 8, 25
LEASE_S = 15.0


def test_a_standby_goes_on_where_a_killed_scheduler_was(tmp_path, stack: ExitStack, start: Start):
    """The first one stood still before, for longer than a lease: it takes none back for it."""
    network = Network(tmp_path, stack, "worker", dht_nodes=2)
    network.serve(make_dataset(tmp_path / "dataset", 6, 40))
    words = f"scheduler {NAME} --identity {network.homes['scheduler']} --state {tmp_path}/state --json".split()
    words += f"--seq-len {SEQ_LEN} --lease-timeout {LEASE_S} --standby".split()
    first = start(*words)
    worker = ExchangeClient(network.client("worker"), first.ready("ready")["address"])
    second = start(*words)
    second.ready("standby")
    started, waiting = worker.exchange(want=2)["leases"]
    ids = [started["lease_id"], waiting["lease_id"]]
    first.popen.send_signal(signal.SIGSTOP)
    time.sleep(LEASE_S + 2.0)
    first.popen.send_signal(signal.SIGCONT)
    time.sleep(0.5)  # It looks at the leases before the next message.
    assert list(worker.exchange(known_leases=ids)["active"]) == ids
    worker.exchange(started, known_leases=ids)
    first.end()
    worker.address = second.ready("ready")["address"]
    # The other lease lives on; the receipt whose answer might have been lost is answered as recorded.
    answer = worker.exchange(started, known_leases=ids[1:])
    assert answer["uses"][0]["offset"] == started["stop"] and list(answer["active"]) == ids[1:]
    use_all(worker, [waiting])
    assert second.end(signal.SIGTERM) == 0
    network.assert_used_once(SAMPLES)


def use_all(worker: ExchangeClient, leases: list[dict]):
    """Use leases, and then one after the other until the job is done."""
    answer = {"leases": leases, "done": False}
    while not answer["done"]:
        leases = answer["leases"]
        answer = worker.exchange(*leases, want=1, known_leases=[lease["lease_id"] for lease in leases])


def test_a_job_is_steered_by_administrators_and_used_once(tmp_path, stack: ExitStack, capsys):
    network = Network(tmp_path, stack, "admin")
    scope = Scope(frozenset({"worker"}))
    network.homes["worker"] = join(tmp_path / "network", tmp_path / "worker", "worker", scope=scope).node_dir
    network.serve(make_dataset(tmp_path / "dataset", 6, 40))
    service = network.schedule(seq_len=SEQ_LEN)
    with pytest.raises(StateError, match=f"process {os.getpid()} on"):
        network.schedule(seq_len=SEQ_LEN)
    worker = ExchangeClient(network.client("worker"), service.address)
    with pytest.raises(RemoteError, match="refused with 403"):
        worker.client.request_json(service.address, "POST", "/v1/job/pause", {})
    steer = f"--scheduler {service.address} --identity {network.homes['admin']}".split()
    assert main(["job", "pause", *steer]) == 0
    assert "paused" in capsys.readouterr().out
    assert worker.exchange(job=NAME, want=1, known_leases=[])["paused"]
    assert main(["job", "resume", *steer]) == 0
    use_all(worker, worker.exchange(want=1, known_leases=[])["leases"])
    assert main(["status", service.address, *steer[2:]]) == 0
    out = capsys.readouterr().out
    assert f"\n{NAME}  done  " in out and "25 of 25 samples · epoch 1 of 1" in out and "\nworker  " in out
    service.stop()
    network.assert_used_once(SAMPLES)


@pytest.mark.usefixtures("changes_at_once")
def test_a_slice_set_aside_and_a_restart_with_no_data_node(tmp_path, stack: ExitStack, start: Start, capsys):
    """The scheduler reads a slice on which workers fail itself: what they say of a good one sets nothing aside."""
    network = Network(tmp_path, stack, "one", "two", "three", "four", "worker", dht_nodes=1)
    node = network.serve(make_dataset(tmp_path / "dataset", 4, 40))
    service = network.schedule(seq_len=SEQ_LEN, max_failures=2)
    identity = f"--identity {network.homes['scheduler']}".split()

    def fail(*names):
        """Two workers cannot have the same slice, and say so."""
        slices = set()
        for name in names:
            worker = ExchangeClient(network.client(name), service.address)
            (lease,) = worker.exchange(job=NAME, want=1)["leases"]
            slices.add(lease["slice"])
            worker.exchange(job=NAME, failed=[{"lease_id": lease["lease_id"], "reason": "torn"}])
        assert len(slices) == 1

    job = service._journal.core
    fail("three", "four")
    until(lambda: not job.failures)
    assert not service.left_out() and not job.reasons
    slices = tmp_path / "dataset" / "slices"
    slices.rename(slices.with_name("away"))
    fail("one", "two")
    until(lambda: job.reasons)
    slices.with_name("away").rename(slices)
    assert main(["status", service.address, *identity]) == 0
    assert "is set aside: torn" in capsys.readouterr().out
    assert main(["job", "readmit", "--scheduler", service.address, *identity]) == 0
    # Known to the scheduler alone; the worker learns it while it works.
    gone = network.identity("one").peer_id
    revoke(tmp_path / "network", gone, network.homes["scheduler"])
    home = network.homes["worker"]
    assert Identity.load(home).revocations.reason(gone) is None
    words = f"--scheduler {service.address} --identity {home} --cache-dir {tmp_path}/cache".split()
    done = start("worker", *words, "--batch-size", 2, "--listen", ":0", "--json")
    assert done.wait() == 0, done.errors
    report = done.lines[-1]["report"]
    assert report["done"] and report["samples"] == 15
    assert Identity.load(home).revocations.reason(gone) is not None
    service.stop()
    node.stop()  # What the job is about is in the state directory.
    assert network.schedule(seq_len=SEQ_LEN, max_failures=2, wait_s=600.0).is_done()
    assert certified(service.ledger_path, home, replay=replay).ok
    entries = list(read_entries(service.ledger_path))
    uses = [entry.body for entry in entries if entry.kind == "uses"]
    assert uses and all(len(row) == 7 for body in uses for row in body["uses"])
    assert len({body["session"] for body in uses}) == 1
    kinds = [entry.kind for entry in entries]
    assert kinds.count("set_aside") == kinds.count("readmitted") == 1
