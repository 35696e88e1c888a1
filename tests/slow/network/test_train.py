"""A dataset, data nodes, a scheduler and several workers in one process: trained once, fetched once, proved."""

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from forebay.errors import DatasetError, StateError
from forebay.network.client import RemoteError
from forebay.scheduler import proofs
from forebay.scheduler.server import SchedulerService
from slow.network.cutting_proxy import CuttingProxy
from support.exchanges import ExchangeClient
from support.nodes import Network, make_dataset
from support.proofs import proof_by_hand

NUM_SLICES, TOKENS, SEQ_LEN = 40, 400, 16
SAMPLES = (NUM_SLICES - 1) * (TOKENS // SEQ_LEN)
WORKERS = ["w1", "w2", "w3", "w4"]


@pytest.fixture
def network(tmp_path, stack: ExitStack) -> Network:
    """Nodes that find each other by a DHT, one of which serves the dataset."""
    network = Network(tmp_path, stack, *WORKERS, dht_nodes=6)
    network.serve(make_dataset(tmp_path / "dataset", NUM_SLICES, TOKENS))
    return network


@pytest.fixture
def service(network) -> Iterator[SchedulerService]:
    return network.schedule(seq_len=SEQ_LEN, stall_s=600.0)


def test_four_workers_train_once_and_fetch_once(tmp_path, stack: ExitStack):
    network = Network(tmp_path, stack, "data-2", *WORKERS, dht_nodes=6)
    dataset = make_dataset(tmp_path / "dataset", NUM_SLICES, TOKENS)
    nodes = [network.serve(dataset, name=name) for name in ("data", "data-2")]
    # A lease that a busy machine lets expire, or that is cut for who waits, makes two workers fetch a slice.
    service = network.schedule(seq_len=SEQ_LEN, lease_s=600.0, steal_s=600.0)
    seen = {}
    reports = {}
    all_began, started = threading.Barrier(4), set()

    def remember(batch):
        if threading.current_thread() not in started:  # Else one that starts late finds nothing left.
            started.add(threading.current_thread())
            all_began.wait()
        time.sleep(0.002)
        for sample_id, inputs in zip(batch.sample_ids.tolist(), batch.inputs):
            assert sample_id not in seen
            seen[sample_id] = inputs.copy()

    def work(name):
        reports[name] = network.work(name, service, on_batch=remember, listen="127.0.0.1:0")

    threads = [threading.Thread(target=work, args=(name,)) for name in WORKERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert service.is_done() and reports.keys() == set(WORKERS)
    network.assert_used_once(SAMPLES)
    used_bytes = int(dataset.table.bytes[: NUM_SLICES - 1].sum())
    table_bytes = sum(path.stat().st_size for path in dataset.path.iterdir() if path.is_file())
    assert sum(report["fetched_bytes"] for report in reports.values()) == used_bytes
    assert used_bytes <= sum(node.status()["bytes_sent"] for node in nodes) < used_bytes + 40 * table_bytes
    for name, report in reports.items():
        cached = sum(path.stat().st_size for path in (tmp_path / f"cache-{name}").glob("?" * 64))
        assert report["samples"] > 0 and cached < used_bytes
        assert report["done"] and report["wasted_samples"] == 0 and 0 <= report["wait_share"] <= 1
    assert sorted(seen) == list(range(SAMPLES))
    assert np.array_equal(seen[TOKENS // SEQ_LEN + 2], dataset.open_slice(1).tokens[2 * SEQ_LEN : 3 * SEQ_LEN])


def test_garbage_and_thieves_are_refused(network, service):
    owner, thief = (ExchangeClient(network.client(name), service.address) for name in ("w1", "w2"))
    first = owner.exchange(want=1)["leases"][0]
    lease_id, step = first["lease_id"], {"start": 0, "stop": 1}
    # A thief's own signature counts for the thief, who has no such lease; the owner's is not the thief's.
    assert thief.exchange(**thief.receipt(first, **step))["refused"][0]["code"] == "lost"
    with pytest.raises(RemoteError, match="expected one by key"):
        thief.exchange(**thief.receipt(first, by=owner.identity, **step))
    stolen = thief.exchange(known_leases=[lease_id], release=[lease_id], declared_until={lease_id: 0})
    assert stolen["lost"] == [lease_id]
    refused = owner.exchange(**owner.receipt(first, start=1, stop=2))["refused"]
    assert (refused[0]["code"], refused[0]["offset"]) == ("range", 0)
    accepted = owner.exchange(**owner.receipt(first, **step))["uses"]
    assert accepted == [{"lease_id": lease_id, "offset": 1, "stop": first["stop"]}]
    with pytest.raises(RemoteError, match="refused with 400"):
        owner.exchange(want=-1)
    assert service.status()["samples_used"] == 1
    # An exchange that comes late takes nothing back.
    owner.exchange(want=2, known_leases=[lease_id], attempt=2)
    num_leased = service.status()["slices_leased"]
    with pytest.raises(RemoteError, match="attempt 1 is not newer than the last one, 2"):
        owner.exchange(want=2, known_leases=[], attempt=1)
    assert service.status()["slices_leased"] == num_leased > 1


def test_a_use_needs_proof_that_its_slice_was_there(network, service, monkeypatch):
    monkeypatch.setattr(proofs, "MAX_TOKENS_PER_S", 1.0)
    worker = ExchangeClient(network.client("w1"), service.address)
    first, second = worker.exchange(want=2)["leases"]
    with pytest.raises(RemoteError, match=r"refused with 429 .*too soon") as caught:
        worker.exchange(first)
    assert caught.value.wait_s > 0
    monkeypatch.setattr(proofs, "MAX_TOKENS_PER_S", 1e9)
    with pytest.raises(RemoteError, match="refused with 400 no_proof"):
        worker.exchange(**worker.receipt(first, proof=""))
    assert worker.exchange(first)["uses"][0]["offset"] == first["stop"]
    # Of another lease's range, another worker's, or of other bytes: none is this one's.
    false = proof_by_hand(worker.client, {**second, "lease_id": first["lease_id"]})
    with pytest.raises(RemoteError, match="refused with 403 false_proof"):
        worker.exchange(**worker.receipt(second, proof=false))
    assert worker.exchange(want=1)["leases"] == [], "who lied is leased nothing for a while"
    assert ExchangeClient(network.client("w2"), service.address).exchange(want=1)["leases"]


def test_an_assignment_names_providers_and_a_slice_and_carries_no_payload(network, service):
    """Peer ids and addresses of those who have it, dataset, slice, hash, place: less than a kilobyte."""
    (node,) = network.nodes
    lease = ExchangeClient(network.client("w1"), service.address).exchange(want=1)["leases"][0]
    row = node.datasets[0].table.row(lease["slice"])
    assert lease["providers"] == [{"peer_id": node.identity.peer_id, "address": node.address}]
    assert (lease["dataset_id"], lease["sha256"], lease["bytes"]) == (node.datasets[0].id, row.sha256, row.bytes)
    assert (lease["start"], lease["stop"], lease["count"]) == (0, TOKENS // SEQ_LEN, TOKENS // SEQ_LEN)
    assert lease["expires_in_s"] > 0 and len(json.dumps(lease)) < 1024


def test_less_than_a_kilobyte_a_slice_passes_through_the_scheduler(network, service, stack: ExitStack):
    """All that a worker and the scheduler send each other, TLS included, over the slices used."""
    proxy = CuttingProxy(random.Random(0), 0.0)
    stack.callback(proxy.close)
    proxy.target = service.address
    # Handshakes, some 2,400 bytes each, are once a connection: two or three if threads ask at the same moment.
    # Here they count, with 2,500 bytes for what a job is. Receipts of slices that take long are not measured here.
    assert network.work("w1", service, via=proxy.address, receipt_s=600.0)["samples"] == SAMPLES
    assert proxy.connections <= 3
    assert proxy.carried - 2500 * (proxy.connections + 1) < 1024 * (NUM_SLICES - 1)


def test_a_state_of_another_job_and_a_dataset_nobody_has(network, service):
    service.stop()
    with pytest.raises(StateError, match="seq_len"):
        network.schedule(seq_len=8)
    with pytest.raises(DatasetError, match="'nothing'"):
        network.schedule("nothing", seq_len=8, wait_s=0.5)
