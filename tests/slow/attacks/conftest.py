"""Servers that are attacked, a member that attacks, and another."""

import contextlib
from collections.abc import Iterator

import pytest

from forebay.coordinator.messages import Rules
from forebay.coordinator.server import Coordinator
from forebay.data_node import DataNode
from forebay.dataset.reader import Dataset
from forebay.network import reachability
from forebay.network.client import Client
from forebay.network.pki.identity import Identity
from forebay.scheduler.server import SchedulerService
from support.attacked import (
    NUM_SCHEDULED,
    NUM_SHARED,
)
from support.attackers import HOST, issue
from support.local_discovery import LocalDiscovery
from support.nodes import NAME, make_dataset


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    return make_dataset(tmp_path / "data", NUM_SHARED, 20_000)


@pytest.fixture
def node(dataset, network_dir, monkeypatch) -> Iterator[DataNode]:
    monkeypatch.setattr(reachability, "CHECK_S", 60.0)  # Also a machine that stands still answers within it.
    with DataNode(issue(network_dir, "node", "data"), [dataset], HOST, 0, None) as node:
        yield node


@pytest.fixture
def scheduler(tmp_path, network_dir) -> Iterator[SchedulerService]:
    table, data = LocalDiscovery(), make_dataset(tmp_path / "data", NUM_SCHEDULED, 100)
    identity = issue(network_dir, "scheduler", "scheduler")
    with (
        DataNode(issue(network_dir, "node", "data"), [data], HOST, 0, table),
        Client(identity) as client,
        contextlib.closing(table),
    ):
        created = SchedulerService(identity, NAME, table, client, tmp_path / "state", seq_len=8, steal_s=0.2)
        created.start()
        yield created
        created.stop()


@pytest.fixture
def coordinator(network_dir, tmp_path) -> Iterator[Coordinator]:
    rules = Rules(workers_per_peer=2)
    identity = issue(network_dir, "coordinator")
    with Coordinator(state_dir=tmp_path / "run", rules=rules, config={"batch_size": 2}, identity=identity) as created:
        yield created


@pytest.fixture
def evil(network_dir) -> Identity:
    return issue(network_dir, "evil", "worker")


@pytest.fixture
def honest(network_dir) -> Identity:
    return issue(network_dir, "honest", "worker")
