"""A Loader whose order is that of a scheduler's leases: each sample is used once, as a static Loader has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import Loader, Mixture, NetworkOptions, OrderOptions, SampleOptions
from forebay.data_node import DataNode
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import write_token_slice
from forebay.errors import StateError, UsageError
from forebay.lease.scheduler_client import SchedulerClient
from forebay.ledger.index import open_index
from forebay.ledger.verify import verify_ledger
from forebay.network.client import Client
from forebay.network.pki.identity import create_network, join, verify
from forebay.scheduler.server import SchedulerService
from support.calibration import scaled
from support.local_discovery import LocalDiscovery

SEQ_LEN, BATCH = 16, 4
REPOSITORY = Path(__file__).parents[2]


def make_dataset(folder: Path, name: str, num_slices: int, first: int) -> Dataset:
    """Documents of 5 to 40 tokens; every token of all slices is another number."""
    (folder / "slices").mkdir(parents=True)
    chance = np.random.default_rng(first)
    for index in range(num_slices):
        ends = np.cumsum(chance.integers(5, 40, 20)).astype(np.uint64)
        tokens = (first + 1000 * index + np.arange(int(ends[-1]))).astype(np.uint16)
        write_token_slice(folder / "slices" / f"{index:03d}.safetensors", tokens, ends)
    return import_slices(folder, name)


class Network:
    """A data node with two datasets, and schedulers, in this process; workers know a scheduler's address only."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self._stack = directory, stack
        create_network(directory / "network", "test")
        self.node_a, self.node_b = (join(directory / "network", directory / name, name).node_dir for name in ("a", "b"))
        self.datasets = {
            "web": make_dataset(directory / "web", "web", 12, 0),
            "books": make_dataset(directory / "books", "books", 3, 30_000),
        }
        self.discovery = LocalDiscovery()
        identity = join(directory / "network", directory / "data", "data")
        node = DataNode(identity, list(self.datasets.values()), "127.0.0.1", 0, self.discovery, ttl_s=30)
        node.start()
        stack.callback(node.stop)

    def schedule(self, name: str = "web", **settings: Any) -> SchedulerService:
        node = join(self.directory / "network", self.directory / f"scheduler-{name}", f"scheduler-{name}")
        client = self._stack.enter_context(Client(node))
        settings = {"seq_len": SEQ_LEN, "lease_s": scaled(2.0), **settings}
        service = SchedulerService(node, name, self.discovery, client, self.directory / f"state-{name}", **settings)
        service.start()
        self._stack.callback(service.stop)
        return service

    def loader(self, service: SchedulerService, **settings: Any) -> Loader[Any]:
        settings = {
            "seq_len": SEQ_LEN, "batch_size": BATCH, "scheduler": service.address, "cache_bytes": 1 << 20,
            "cache_dir": self.directory / "cache", "network": NetworkOptions(self.node_a), **settings,
        }  # fmt: skip
        return Loader(settings.pop("dataset", f"forebay://test/{service.name}"), **settings)

    def start(self, name: str, node: Path, service: SchedulerService, **settings: Any) -> subprocess.Popen[str]:
        settings = {
            "url": f"forebay://test/{service.name}", "node": str(node), "scheduler": service.address,
            "cache": str(self.directory / f"cache-{name}"), "seq_len": SEQ_LEN, "batch_size": BATCH,
            "receipt_s": 0.2, **settings,
        }  # fmt: skip
        path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])
        process = subprocess.Popen(
            [sys.executable, "-m", "support.leasing_loader", json.dumps(settings)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert process.stdout is not None
        self._stack.callback(process.stdout.close)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


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


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_two_processes_use_each_sample_once_as_a_static_loader_has_it(network: Network, packing: str) -> None:
    service = network.schedule(packing=packing)
    nodes = {"one": network.node_a, "two": network.node_b}
    workers = [network.start(name, node, service, packing=packing, pause_s=0.02) for name, node in nodes.items()]
    expected = static_samples(network.datasets["web"], packing=packing)
    seen: dict[int, tuple[list[int], list[int]]] = {}
    lens = []
    for worker in workers:
        assert worker.stdout is not None
        *lines, last = map(json.loads, worker.stdout)
        assert last == "done" and lines
        for ids, inputs, document_ids in lines:
            lens.append(len(ids))
            for sample, row, documents in zip(ids, inputs, document_ids):
                assert sample not in seen
                seen[sample] = row, documents
    assert seen == expected
    assert sum(size == BATCH for size in lens) > 0.7 * len(lens)
    assert_used_once(service, len(expected))


def test_a_killed_worker_holds_up_no_other_and_each_sample_is_used_once(network: Network) -> None:
    service = network.schedule()
    workers = [
        network.start(name, node, service, pause_s=0.05)
        for name, node in (("one", network.node_a), ("two", network.node_b))
    ]
    victim, other = (worker.stdout for worker in workers)
    assert victim is not None and other is not None
    for _ in range(5):
        victim.readline()
    workers[0].kill()
    assert json.loads(list(other)[-1]) == "done"
    assert service.is_done()
    assert_used_once(service, len(static_samples(network.datasets["web"])))


def used_ids(service: SchedulerService) -> int:
    uses = open_index(service.ledger_path).uses
    return int((uses["stop"] - uses["start"]).sum())


def test_the_last_batch_before_a_break_counts_if_it_is_committed(network: Network) -> None:
    service = network.schedule()
    for commits, num_counted in ((False, 2), (True, 3)):
        before = used_ids(service)
        with network.loader(service) as loader:
            for count, _batch in enumerate(loader, 1):
                if count == 3:
                    if commits:
                        loader.commit()
                    break
        assert used_ids(service) - before == num_counted * BATCH
    with network.loader(service) as loader:
        rest = sum(len(batch) for batch in loader)
        assert loader.stats()["wasted_samples"] == 0
    num_samples = len(static_samples(network.datasets["web"]))
    assert rest == num_samples - 5 * BATCH
    assert_used_once(service, num_samples)


def test_batches_formed_ahead_are_given_or_formed_again(network: Network) -> None:
    """A break in the middle drops what was formed ahead; the next loop begins with it."""
    service = network.schedule()
    seen: list[int] = []
    with network.loader(service, samples=SampleOptions(prefetch_batches=3)) as loader:
        for _ in range(4):
            for count, batch in enumerate(loader, 1):
                seen += batch.sample_ids.tolist()
                time.sleep(0.02)
                loader.commit()
                if count == 5:
                    break
        assert loader.step == 20
        for batch in loader:
            seen += batch.sample_ids.tolist()
        assert loader.stats()["scheduler_s"] >= 0 and "job" in loader.describe() and "scheduler" in repr(loader)
    assert sorted(seen) == sorted(static_samples(network.datasets["web"]))
    assert_used_once(service, len(seen))


def test_lost_leases_are_counted_and_what_was_formed_ahead_is_not_given(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the worker's requests do not arrive, its leases expire: what it used meanwhile counts as wasted."""
    service = network.schedule(lease_s=0.5)
    real, is_cut = SchedulerClient.exchange, threading.Event()

    def exchange(self: SchedulerClient, *args: Any) -> dict[str, Any]:
        if is_cut.is_set():
            time.sleep(2.0)
            is_cut.clear()
        return real(self, *args)

    monkeypatch.setattr(SchedulerClient, "exchange", exchange)
    num_given = 0
    samples = SampleOptions(prefetch_batches=4)
    options = NetworkOptions(network.node_a, receipt_s=0.2)
    with network.loader(service, samples=samples, network=options) as loader:
        for count, batch in enumerate(loader, 1):
            num_given += len(batch)
            if count == 10:
                is_cut.set()
            time.sleep(0.03)
        stats = loader.stats()
    num_samples = len(static_samples(network.datasets["web"]))
    assert stats["leases_lost"] > 0
    assert num_given == num_samples + stats["wasted_samples"]
    assert stats["wasted_samples"] <= (4 + 2) * BATCH + 0.2 / 0.03 * BATCH
    assert_used_once(service, num_samples)


def test_a_mixture_of_two_jobs_changes_its_weights_at_a_step(network: Network) -> None:
    web, books = network.schedule("web"), network.schedule("books")
    changes = [(0, {"web": 1.0}), (10, {"web": 1.0, "books": 1.0})]
    mixture = Mixture({"web": "forebay://test/web", "books": "forebay://test/books"}, changes)
    addresses = {"web": web.address, "books": books.address}
    counts = []
    with network.loader(web, dataset=mixture, scheduler=addresses) as loader:
        for batch in loader:
            counts.append(np.bincount(batch.dataset_index, minlength=2).tolist())
            for source, row in zip(batch.dataset_index, batch.inputs):
                assert (row[0] >= 30_000) == (source == 1)
        state = loader.state_dict()
        assert state["step"] == loader.step == len(counts)
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="expected one of the jobs"):
            loader.load_state_dict({**state, "jobs": {"web": "another", "books": "another"}})
    assert all(books == 0 for _, books in counts[:10])
    assert sum(b for _, b in counts[10:]) >= 0.4 * sum(map(sum, counts[10:]))
    assert books.is_done() and not web.is_done()
    assert_used_once(books, len(static_samples(network.datasets["books"])))


def test_what_leases_make_no_sense_of_is_refused(network: Network) -> None:
    service = network.schedule(split="train", validation_fraction=0.25)
    split = {"split": "train", "samples": SampleOptions(validation_fraction=0.25)}
    for settings, match in [
        ({"epochs": 2}, "epochs: expected none"), ({"shuffle": False}, "shuffle: expected none"),
        ({"seed": 3}, "seed: expected none"), ({"rank": 0, "world_size": 2}, "rank, world_size: expected none"),
        ({"samples": SampleOptions(drop_last=True)}, "drop_last"), ({"order": OrderOptions(lanes=2)}, "order: "),
        ({"batch_size": None, "global_batch_size": 4}, "global_batch_size"),
        ({"dataset": network.datasets["web"]}, "forebay://NETWORK/NAME"),
        ({"scheduler": {"x": service.address}}, "scheduler: expected 'host:port'"),
        ({**split, "seq_len": 8}, "seq_len: expected that of the job web, 16, got 8"),
        ({**split, "packing": "best_fit"}, "packing: expected that of the job"),
        ({}, "split: expected that of the job"),
    ]:  # fmt: skip
        with pytest.raises(UsageError, match=match):
            network.loader(service, **settings)
    with network.loader(service, **split) as loader:
        with pytest.raises(TypeError, match="len: expected a loader without scheduler"):
            len(loader)
        with pytest.raises(TypeError, match="steps_per_epoch"):
            _ = loader.steps_per_epoch
        with pytest.raises(UsageError, match="take: expected a loader without scheduler"):
            loader.take(1)
        with pytest.raises(UsageError, match="num_workers: expected 0 with scheduler"):
            next(loader.iterate(num_workers=1))
        ids = [sample for batch in loader for sample in batch.sample_ids.tolist()]
    assert sorted(ids) == sorted(static_samples(network.datasets["web"], **split))
