"""Data nodes, schedulers and workers of a network in this process, and the programs that workers run."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from forebay.data_node import DataNode
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import write_token_slice
from forebay.network.client import Client
from forebay.network.dht import LibtorrentDht
from forebay.network.pki.identity import Identity, create_network, join
from forebay.scheduler.server import SchedulerService
from support.leases import work
from support.ledgers import certified
from support.local_discovery import LocalDiscovery

HOST = "127.0.0.1"
NAME = "tiny"
PACED_READER = (sys.executable, str(Path(__file__).with_name("paced_reader.py")))  # PAUSE_S [GATE]


def make_dataset(directory: Path, num_slices: int, tokens: int, vocab: int = 60) -> Dataset:
    """A dataset of random tokens, each slice one document; the last slice is too short for any sample."""
    (directory / "slices").mkdir(parents=True)
    chance = np.random.default_rng(3)
    for i in range(num_slices):
        length = tokens if i < num_slices - 1 else 3
        ids = chance.integers(0, vocab, length).astype(np.uint16)
        write_token_slice(directory / "slices" / f"{i:06d}.safetensors", ids, np.array([length], np.uint64))
    return import_slices(directory, NAME)


def make_network(directory: Path, names: list[str], bootstrap: list[tuple[str, int]]) -> dict[str, Path]:
    """A network and a directory for each member."""
    create_network(directory / "network", "test", bootstrap=bootstrap)
    for name in names:
        join(directory / "network", directory / name, name)
    return {name: directory / name for name in names}


class Bootstrap:
    """The first nodes of a private DHT; a lookup needs a handful to be quick."""

    def __init__(self, num_nodes: int = 6) -> None:
        first = LibtorrentDht(HOST, 0, [])
        self.addresses = [(HOST, first.port)]
        self._nodes = [first, *(LibtorrentDht(HOST, 0, self.addresses) for _ in range(num_nodes - 1))]

    def close(self) -> None:
        for node in self._nodes:
            node.close()


class Network:
    """A network with nodes in this process, which are closed with `stack`.

    Args:
        members: Names besides data and scheduler.
        dht_nodes: Nodes of a DHT by which all find each other; with 0 they share a table.
    """

    def __init__(self, directory: Path, stack: ExitStack, *members: str, dht_nodes: int = 0) -> None:
        self.directory, self.stack = directory, stack
        self.nodes = []
        self.discovery = LocalDiscovery()
        bootstrap = []
        if dht_nodes:
            dht = Bootstrap(dht_nodes)
            stack.callback(dht.close)
            bootstrap = dht.addresses
            self.discovery = LibtorrentDht(HOST, 0, bootstrap)
            stack.callback(self.discovery.close)
        self.homes = make_network(directory, ["data", "scheduler", *members], bootstrap)

    def identity(self, name: str) -> Identity:
        return Identity.load(self.homes[name])

    def client(self, name: str) -> Client:
        return self.stack.enter_context(Client(self.identity(name)))

    def serve(self, *datasets: Dataset, name: str = "data", **settings: Any) -> DataNode:
        node = DataNode(self.identity(name), datasets, HOST, 0, self.discovery, **{"ttl_s": 30, **settings})
        self.nodes.append(self.stack.enter_context(node))
        return node

    def schedule(self, dataset: str = NAME, state: str = "state", **settings: Any) -> SchedulerService:
        service = SchedulerService(
            self.identity("scheduler"), dataset, self.discovery, self.client("scheduler"), self.directory / state,
            **{"rediscover_s": 0.5, **settings},
        )  # fmt: skip
        self.stack.callback(service.stop)
        service.start()
        return service

    def work(self, name: str, service: SchedulerService, **settings: Any) -> dict[str, float]:
        """Read all that a worker is leased."""
        cache = self.directory / f"cache-{name}"
        return work(self.identity(name), service.name, service.address, cache, **settings)

    def assert_used_once(self, num_samples: int, epochs: int = 1) -> None:
        """The ledger proves that each sample was used once in each epoch."""
        report = certified(self.directory / "state" / "ledger.jsonl", self.directory / "network")
        once = {"samples": num_samples, "missing": 0, "repeated": 0}
        assert report.ok and report.epochs == [{"epoch": epoch, **once} for epoch in range(epochs)], report
