"""What an attacked server is asked, as a member: a swarm, a scheduler, a coordinator."""

import contextlib
from collections.abc import Iterator
from typing import Any

from forebay.coordinator.messages import Rules
from forebay.coordinator.server import Coordinator
from forebay.data_node import DataNode
from forebay.dataset.reader import Dataset
from forebay.network.client import Client
from forebay.network.pki.identity import Identity
from forebay.scheduler.core import SchedulerCore
from forebay.scheduler.server import SchedulerService
from forebay.swarm.share import SliceShare
from support.attackers import HOST, ask
from support.memberships import CoordinatorHarness
from support.waiting import until

NUM_SHARED, NUM_SCHEDULED = 4, 6  # slices of the data node's dataset, and of the scheduler's


@contextlib.contextmanager
def sharing(member: Identity, dataset: Dataset) -> Iterator[SliceShare]:
    """A member that hands on all slices of the dataset."""
    folder, rows = {}, [dataset.table.row(index) for index in range(NUM_SHARED)]
    for row in rows:
        folder[row.sha256] = dataset.path / row.name
    with SliceShare(member, folder, {row.sha256: (row.bytes, dataset.name, 0) for row in rows}, f"{HOST}:0") as share:
        yield share


def swarm_path(node: DataNode) -> str:
    return f"/v1/swarm/{node.datasets[0].id}"


def swarm(node: DataNode, member: Identity, message: Any) -> tuple[int, Any]:
    return ask(member, node.address, "POST", swarm_path(node), message)


def until_named(node: DataNode, member: Identity, share: SliceShare) -> None:
    """Wait until the node names a member that says that it has all slices."""
    message = {"address": share.address, "have": f"0-{NUM_SHARED - 1}"}
    with Client(member) as client:

        def is_named():
            client.request_json(node.address, "POST", swarm_path(node), message)
            return bool(node.tracker.status()[node.datasets[0].id]["slices_with_copies"] == NUM_SHARED)

        until(is_named)


def exchange(scheduler: SchedulerService, member: Identity, message: Any) -> tuple[int, Any]:
    return ask(member, scheduler.address, "POST", "/v2/exchange", message)


def leased(scheduler: SchedulerService, member: Identity, want: int) -> list[dict]:
    return exchange(scheduler, member, {"want": want})[1]["leases"]


def core(scheduler: SchedulerService) -> SchedulerCore:
    return scheduler._journal.core


def post_as(coordinator: Coordinator, member: Identity, verb: str, **fields: Any) -> tuple[int, Any]:
    body = {"worker_id": member.name, "session": f"{member.name}-session", **fields}
    return ask(member, coordinator.address, "POST", f"/v1/members/{verb}", body)


class Run(CoordinatorHarness):
    """The membership of a run whose workers are of certificates of their own."""

    def __init__(self, *names: str, min_workers: int = 2) -> None:
        super().__init__(Rules(min_workers=min_workers))
        for name in names:
            self.join(name)

    def join(self, worker_id: str, session: str = "", **fields: Any) -> list:
        return super().join(worker_id, session, **{"peer_id": f"peer {worker_id}", **fields})
