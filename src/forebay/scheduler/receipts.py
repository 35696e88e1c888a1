"""What a worker says of its leases, judged before anything is recorded; and what became of those that it holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.errors import LeaseError
from forebay.ledger.receipts import Used
from forebay.scheduler.jobs import SchedulerJob, at_index
from forebay.scheduler.leases import LeaseLostError, LeaseTable
from forebay.scheduler.messages import AcceptedUse, LeaseStatus, RefusedUse
from forebay.scheduler.sessions import WorkerSession

LeaseLocation = tuple[SchedulerJob, int, LeaseTable]  # The job, which of its datasets, and that one's table.


@dataclass
class CheckedUses:
    """By lease: `known` uses are on record already, `fresh` ones continue their leases."""

    known: dict[str, AcceptedUse] = field(default_factory=dict)
    refused: list[RefusedUse] = field(default_factory=list)
    fresh: dict[str, LeaseLocation] = field(default_factory=dict)

    @property
    def job(self) -> str:
        return next(iter(self.fresh.values()))[0].name

    @property
    def is_whole(self) -> bool:
        """Whether all of it may be recorded: the signature is over all, and the ledger keeps what was signed."""
        of_one_job = len({job.name for job, _, _ in self.fresh.values()}) == 1
        return of_one_job and not self.known and not self.refused

    def put_off(self) -> list[RefusedUse]:
        """The fresh uses of a batch that is not whole."""
        message = "the rest of this receipt was not taken: sign the uses anew, as of the offsets"
        return [RefusedUse(i, "range", message, table.leases[i].position) for i, (_, _, table) in self.fresh.items()]


def judge(find: Callable[[str], LeaseLocation | None], worker: str, uses: Sequence[Used]) -> CheckedUses:
    """What is to be said of each use; nothing is recorded.

    Args:
        find: Where a lease is live or remembered.
        uses: Several of one lease follow each other.
    """
    batch = CheckedUses()
    reached: dict[str, int] = {}
    for used in uses:
        place = find(used.lease_id)
        try:
            if place is None:
                raise LeaseLostError(f"lease {used.lease_id}: it is not live. Drop it and ask for another.")
            job, dataset, table = place
            if table.check_use(worker, at_index(used, used.slice - job.bases[dataset]), reached.get(used.lease_id)):
                batch.fresh[used.lease_id], reached[used.lease_id] = place, used.stop
            else:
                batch.known[used.lease_id] = standing(table, used.lease_id)
        except LeaseLostError as error:
            batch.refused.append(RefusedUse(used.lease_id, "lost", str(error), 0))
        except LeaseError as error:
            assert place is not None
            position = place[2].leases[used.lease_id].position
            batch.refused.append(RefusedUse(used.lease_id, "range", str(error), position))
    return batch


def standing(table: LeaseTable, lease_id: str) -> AcceptedUse:
    """How far a lease got that is live or remembered."""
    lease = table.leases.get(lease_id)
    if lease is not None:
        return AcceptedUse(lease_id, lease.position, lease.stop)
    reached = table.remembered[lease_id].reached
    return AcceptedUse(lease_id, reached, reached)


def tell(
    session: WorkerSession, held: Sequence[str], find: Callable[[str], LeaseLocation | None], now: float
) -> tuple[dict[str, LeaseStatus], list[str]]:
    """Of the leases that a session holds: those that live, or were used or cut to their ends; and those lost."""
    live: dict[str, LeaseStatus] = {}
    lost: list[str] = []
    for lease_id in held:
        own = session.place_of(lease_id)
        if own is not None:
            table = own[2]
            expires_in_s = table.owners.all[session.key].deadline - now
            live[lease_id] = LeaseStatus(table.leases[lease_id].stop, round(expires_in_s, 3))
            continue
        place = find(lease_id)
        ended = place[2].remembered.get(lease_id) if place is not None else None
        if ended is not None and ended.whole and ended.worker == session.key[0]:
            live[lease_id] = LeaseStatus(ended.reached, 0.0)
        else:
            lost.append(lease_id)
    return live, lost
