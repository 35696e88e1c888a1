"""A Loader whose order is that of a scheduler's leases: each sample is used once, as a static Loader has it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import Loader, Mixture, NetworkOptions
from forebay.data_node import DataNode
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import write_token_slice
from forebay.ledger.verify import verify_ledger
from forebay.network.client import Client
from forebay.network.discovery import record_key
from forebay.network.pki.identity import create_network, join, verify
from forebay.scheduler.server import SchedulerService
from support.liars import Liar
from support.local_discovery import LocalDiscovery
from support.waiting import until

SEQ_LEN, BATCH = 16, 4


def make_dataset(folder: Path, num_slices: int) -> Dataset:
    """Documents of 5 to 40 tokens; every token of all slices is another number."""
    (folder / "slices").mkdir(parents=True)
    chance = np.random.default_rng(0)
    for index in range(num_slices):
        stops = np.cumsum(chance.integers(5, 40, 20)).astype(np.uint64)
        tokens = (1000 * index + np.arange(int(stops[-1]))).astype(np.uint16)
        write_token_slice(folder / "slices" / f"{index:03d}.safetensors", tokens, stops)
    return import_slices(folder)


class Network:
    """A data node and a scheduler in this process; workers know the scheduler's address only."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self._stack = directory, stack
        create_network(directory / "network", "test")
        self.node_a, self.node_b = (join(directory / "network", directory / name, name).node_dir for name in ("a", "b"))
        self.dataset = make_dataset(directory / "web", 12)
        self.books = make_dataset(directory / "books", 1)
        self.discovery = LocalDiscovery()
        identity = join(directory / "network", directory / "data", "data")
        self.data = DataNode(identity, [self.dataset, self.books], "127.0.0.1", 0, self.discovery, ttl_s=30)
        self.data.start()
        stack.callback(self.data.stop)

    def schedule(self, name: str = "web", **settings: Any) -> SchedulerService:
        node = join(self.directory / "network", self.directory / f"scheduler-{name}", "scheduler")
        client = self._stack.enter_context(Client(node))
        settings = {"seq_len": SEQ_LEN, **settings}
        service = SchedulerService(node, name, self.discovery, client, self.directory / f"state-{name}", **settings)
        service.start()
        self._stack.callback(service.stop)
        return service

    def loader(self, service: SchedulerService, **settings: Any) -> Loader[Any]:
        settings = {
            "seq_len": SEQ_LEN, "batch_size": BATCH, "scheduler": service.address, "cache_bytes": 1 << 20,
            "cache_dir": self.directory / "cache", "network": NetworkOptions(self.node_a), **settings,
        }  # fmt: skip
        return Loader("forebay://test/web", **settings)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with ExitStack() as stack:
        yield Network(tmp_path, stack)


def static_samples(dataset: Dataset, **settings: Any) -> dict[int, tuple[list[int], list[int]]]:
    """The inputs and document ids of each sample id of a Loader without a scheduler."""
    loader = Loader(dataset, seq_len=SEQ_LEN, batch_size=1, document_masks=True, **settings)
    return {int(batch.sample_ids[0]): (batch.inputs[0].tolist(), batch.document_ids[0].tolist()) for batch in loader}


def assert_used_once(service: SchedulerService, num_samples: int) -> None:
    report = verify_ledger(service.ledger_path, service.identity.public_key, verify)
    assert report.ok, report
    assert report.epochs == [{"epoch": 0, "samples": num_samples, "missing": 0, "repeated": 0}]


def test_a_worker_that_waits_for_one_dataset_lets_others_use_the_next(network: Network) -> None:
    """Else two workers could deadlock: each has the rest of one dataset, and waits for the other."""
    books, web = (network.schedule(name, steal_s=1000.0) for name in ("books", "web"))
    names = {"books": "forebay://test/books", "web": "forebay://test/web"}
    expected = sorted(static_samples(network.dataset))
    delivered = []

    def loader(dataset, scheduler, node, cache, batch_size):
        return Loader(
            dataset, seq_len=SEQ_LEN, batch_size=batch_size, scheduler=scheduler, cache_bytes=1 << 20,
            cache_dir=network.directory / cache, network=NetworkOptions(node),
        )  # fmt: skip

    def read(loader, count, seen):
        for batch in islice(loader, count):
            seen += batch.sample_ids.tolist()
            loader.commit()

    def use_mixture():
        for batch in mixture:
            delivered.extend(zip(batch.dataset_index.tolist(), batch.sample_ids.tolist()))

    addresses = {"books": books.address, "web": web.address}
    with (
        loader(names["books"], books.address, network.node_a, "books", 1) as holder,
        loader(names["web"], web.address, network.node_a, "web", 1) as other,
        loader(Mixture(names, {"books": 1, "web": 1}), addresses, network.node_b, "mixture", 2) as mixture,
    ):
        first = []
        read(holder, 1, first)  # It has the only slice of the books.
        waiting = threading.Thread(target=use_mixture)
        waiting.start()
        until(lambda: mixture.stats().get("fetched_slices", 0) >= 2)
        seen = []
        reading = threading.Thread(target=read, args=(other, len(expected) - 8, seen))
        reading.start()
        reading.join()
        assert not delivered
        other.close()
        holder.close()
        waiting.join()
        assert mixture.stats()["leases_lost"] == mixture.stats()["wasted_samples"] == 0
    from_books = [sample for source, sample in delivered if source == 0]
    from_web = seen + [sample for source, sample in delivered if source == 1]
    assert sorted(from_web) == expected and len({*first, *from_books}) == 1 + len(from_books) >= 8


def test_proofs_are_not_judged_by_a_data_node_that_lies(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """The honest data node ends; the worker has all slices in its cache, and its proofs are of the right bytes."""
    monkeypatch.setattr("forebay.scheduler.proofs.is_checked", lambda *_: True)  # Else chance decides which are.
    identity = join(network.directory / "network", network.directory / "liar", "liar")
    with Liar(identity, network.dataset, "wrong_bytes") as liar:
        network.discovery.announce(record_key(identity.network_id, "dataset", "web"), liar.port)
        service = network.schedule(epochs=4)
        epochs = []
        with network.loader(service) as loader:
            for batch in loader:
                if batch.epoch == 1 and 1 not in epochs:
                    network.data.stop()
                    liar.requests.clear()
                epochs += [batch.epoch] * len(batch)
        assert any(name == "scheduler" for name, _ in liar.requests)
    num_samples = len(static_samples(network.dataset))
    assert [epochs.count(epoch) for epoch in range(4)] == [num_samples] * 4
    report = verify_ledger(service.ledger_path, service.identity.public_key, verify)
    assert report.ok and [epoch["samples"] for epoch in report.epochs] == [num_samples] * 4
