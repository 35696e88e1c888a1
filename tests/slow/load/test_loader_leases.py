"""A Loader whose order is that of a scheduler's leases: each sample is used once, as a static Loader has it."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import Loader, Mixture, NetworkOptions
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import write_token_slice
from forebay.network.discovery import record_key
from support.ledgers import certified
from support.liars import Liar
from support.nodes import Network
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


@pytest.fixture
def network(tmp_path) -> Iterator[Network]:
    """A data node of two datasets; workers know the address of their scheduler only."""
    with ExitStack() as stack:
        network = Network(tmp_path, stack, "a", "b", "liar")
        network.serve(make_dataset(tmp_path / "web", 12), make_dataset(tmp_path / "books", 1))
        yield network


def open_loader(
    network: Network, dataset: Any, scheduler: Any, member: str = "a", cache: str = "cache", batch_size: int = BATCH
) -> Loader[Any]:
    return Loader(
        dataset, seq_len=SEQ_LEN, batch_size=batch_size, scheduler=scheduler, cache_bytes=1 << 20,
        cache_dir=network.directory / cache, network=NetworkOptions(network.homes[member]),
    )  # fmt: skip


def sample_ids(dataset: Dataset) -> list[int]:
    """The sample ids of a Loader without a scheduler."""
    return sorted(int(batch.sample_ids[0]) for batch in Loader(dataset, seq_len=SEQ_LEN, batch_size=1))


def test_a_worker_that_waits_for_one_dataset_lets_others_use_the_next(network):
    """Else two workers could deadlock: each has the rest of one dataset, and waits for the other."""
    books, web = (
        network.schedule(name, state=f"state-{name}", seq_len=SEQ_LEN, steal_s=1000.0) for name in ("books", "web")
    )
    names = {"books": "forebay://test/books", "web": "forebay://test/web"}
    expected = sample_ids(network.nodes[0].datasets[0])
    delivered = []

    def read(loader, count, seen):
        for batch in islice(loader, count):
            seen += batch.sample_ids.tolist()
            loader.commit()

    def use_mixture():
        for batch in mixture:
            delivered.extend(zip(batch.dataset_index.tolist(), batch.sample_ids.tolist()))

    addresses = {"books": books.address, "web": web.address}
    with (
        open_loader(network, names["books"], books.address, "a", "cache-books", 1) as holder,
        open_loader(network, names["web"], web.address, "a", "cache-web", 1) as other,
        open_loader(network, Mixture(names, {"books": 1, "web": 1}), addresses, "b", "cache", 2) as mixture,
    ):
        first = []
        read(holder, 1, first)  # It has the only slice of the books.
        waiting = threading.Thread(target=use_mixture)
        waiting.start()
        until(lambda: mixture.stats()["fetched_chunks"] >= 2)
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


def test_proofs_are_not_judged_by_a_data_node_that_lies(network, monkeypatch):
    """The honest data node ends; the worker has all slices in its cache, and its proofs are of the right bytes."""
    monkeypatch.setattr("forebay.scheduler.proofs.is_checked", lambda *_: True)  # Else chance decides which are.
    identity, dataset = network.identity("liar"), network.nodes[0].datasets[0]
    with Liar(identity, dataset, "wrong_bytes") as liar:
        network.discovery.announce(record_key(identity.network_id, "dataset", "web"), liar.port)
        service = network.schedule("web", seq_len=SEQ_LEN, epochs=4)
        epochs = []
        with open_loader(network, "forebay://test/web", service.address) as loader:
            for batch in loader:
                if batch.epoch == 1 and 1 not in epochs:
                    network.nodes[0].stop()
                    liar.requests.clear()
                epochs += [batch.epoch] * len(batch)
        assert any(name == "scheduler" for name, _ in liar.requests)
    num_samples = len(sample_ids(dataset))
    assert [epochs.count(epoch) for epoch in range(4)] == [num_samples] * 4
    report = certified(service.ledger_path, service.identity.node_dir, public_key=service.identity.public_key)
    assert report.ok and [epoch["samples"] for epoch in report.epochs] == [num_samples] * 4
