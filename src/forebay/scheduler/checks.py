"""Checks of what workers report, before it changes anything: uses, the leases they know, and faults of others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from forebay.errors import LeaseError
from forebay.ledger.receipts import Used
from forebay.network.peer import Provider
from forebay.scheduler.jobs import SchedulerJob
from forebay.scheduler.leases import LeaseLostError, LeaseTable
from forebay.scheduler.messages import AcceptedUse, LeaseStatus, RefusedUse
from forebay.scheduler.sessions import WorkerSession

Find: TypeAlias = Callable[[str], SchedulerJob | None]
"""The job of which a lease is live, or ended lately."""


@dataclass(frozen=True)
class ProviderFault:
    """A `ProviderReport` about slice `index` of a dataset."""

    peer_id: str
    dataset_id: str
    index: int
    reason: str
    wrong: bool = True


@dataclass(frozen=True)
class PendingCheck:
    """Something that workers report, to be checked: slice `index` of a job's dataset, or a peer that has it."""

    dataset_id: str
    index: int
    job: str = ""
    peer: Provider | None = None


_RESIGN = "the rest of this receipt was not recorded: sign the uses again, from the offsets given here"


def check_uses(
    find: Find, worker: str, uses: Sequence[Used]
) -> tuple[dict[str, SchedulerJob], list[AcceptedUse], list[RefusedUse]]:
    """Check the uses of one receipt, those of a lease in their order.

    Returns:
        The jobs by lease id, if all uses can be recorded: the signature is over all of them. Else none, the uses
        that are on record already, and the others refused.
    """
    new: dict[str, SchedulerJob] = {}
    stops: dict[str, int] = {}
    accepted: dict[str, AcceptedUse] = {}
    refused: list[RefusedUse] = []
    for used in uses:
        lease_id, job = used.lease_id, find(used.lease_id)
        try:
            if job is None:
                raise LeaseLostError(f"lease {lease_id}: it is not live. Drop it and ask for another.")
            if job.table.check_use(worker, used, stops.get(lease_id)):
                new[lease_id], stops[lease_id] = job, used.stop
            else:
                accepted[lease_id] = progress(job.table, lease_id)
        except LeaseLostError as error:
            refused.append(RefusedUse(lease_id, "lost", str(error), 0))
        except LeaseError as error:
            assert job is not None
            refused.append(RefusedUse(lease_id, "range", str(error), job.table.leases[lease_id].position))
    if not accepted and not refused and len({job.name for job in new.values()}) == 1:
        return new, [], []
    refused += [RefusedUse(i, "range", _RESIGN, job.table.leases[i].position) for i, job in new.items()]
    return {}, list(accepted.values()), refused


def progress(table: LeaseTable, lease_id: str) -> AcceptedUse:
    """How far a lease is used that is live or ended lately."""
    lease = table.leases.get(lease_id)
    if lease is not None:
        return AcceptedUse(lease_id, lease.position, lease.stop)
    reached = table.ended[lease_id].reached
    return AcceptedUse(lease_id, reached, reached)


def check_known(
    session: WorkerSession, lease_ids: Sequence[str], find: Find, now: float
) -> tuple[dict[str, LeaseStatus], list[str]]:
    """Of the leases that a session knows: those that are live or were used to their end, and those lost."""
    active: dict[str, LeaseStatus] = {}
    lost: list[str] = []
    for lease_id in lease_ids:
        job = find(lease_id)
        if job is not None and session.find_job(lease_id) is not None:
            expires_in_s = job.table.holders.all[session.key].deadline - now
            active[lease_id] = LeaseStatus(job.table.leases[lease_id].stop, round(expires_in_s, 3))
            continue
        ended = job.table.ended.get(lease_id) if job is not None else None
        if ended is not None and ended.is_complete and ended.worker == session.key[0]:
            active[lease_id] = LeaseStatus(ended.reached, 0.0)
        else:
            lost.append(lease_id)
    return active, lost
