"""Events of the scheduler: `SchedulerCore` produces them, the journal stores them, replaying them restores the core."""

from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from forebay.ledger.receipts import Used


@dataclass(frozen=True, slots=True)
class WorkerEnlisted:
    """A worker uses samples of a job for the first time; `key` is its public key in hex."""

    job: str
    worker: str
    key: str
    name: str


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """A worker got samples [start, stop) of a slice."""

    job: str
    lease_id: str
    worker: str
    session: str
    epoch: int
    slice_index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class UsesRecorded:
    """A session of a worker acknowledged uses; `receipt` is its signature over them in hex."""

    job: str
    worker: str
    uses: tuple[Used, ...]
    receipt: str
    session: str = ""


@dataclass(frozen=True, slots=True)
class LeaseCut:
    """A lease ends at `stop` from now on; the samples behind it are free."""

    job: str
    lease_id: str
    stop: int


@dataclass(frozen=True, slots=True)
class LeaseReturned:
    """A lease ended before its samples did. `reason`: released, unheld, expired, stalled, clutched or failed."""

    job: str
    lease_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SliceFailed:
    """A worker could not read a slice."""

    job: str
    slice_index: int
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class SliceSetAside:
    """Samples [start, stop), and all that is returned of their slice, are not leased until it is readmitted."""

    job: str
    epoch: int
    slice_index: int
    start: int
    stop: int
    reason: str


@dataclass(frozen=True, slots=True)
class SliceReadmitted:
    """A slice that was set aside is leased again."""

    job: str
    slice_index: int


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """An epoch ended: `samples` were used, and `aside` (slice, start, stop) set aside."""

    job: str
    epoch: int
    samples: int
    aside: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class JobPaused:
    """A job grants no new leases; if not `paused`, it does again."""

    job: str
    paused: bool


@dataclass(frozen=True, slots=True)
class ProviderReported:
    """A worker reported that a provider sent wrong bytes of a slice of a dataset."""

    peer_id: str
    dataset_id: str
    index: int
    reporter: str
    reason: str
    accuser: str = ""


@dataclass(frozen=True, slots=True)
class SliceCleared:
    """The scheduler read a slice itself: the workers' failures do not count."""

    job: str
    slice_index: int


@dataclass(frozen=True, slots=True)
class PeerBanned:
    """The scheduler got wrong bytes of a dataset from a peer; if not `banned`: reports about the peer are void."""

    peer_id: str
    dataset_id: str
    banned: bool = True


Event: TypeAlias = (
    WorkerEnlisted | LeaseGranted | UsesRecorded | LeaseCut | LeaseReturned | SliceFailed | SliceSetAside
    | SliceReadmitted | EpochEnded | JobPaused | ProviderReported | SliceCleared | PeerBanned
)  # fmt: skip
_KINDS: tuple[type[Event], ...] = get_args(Event)  # their numbers on disk are their places here
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def to_row(event: Event) -> list[Any]:
    """An event as a list of plain values, for JSON."""
    if isinstance(event, UsesRecorded):
        rows = [used.to_row() for used in event.uses]
        return [_NUMBERS[UsesRecorded], event.job, event.worker, rows, event.receipt, event.session]
    return [_NUMBERS[type(event)], *(getattr(event, name) for name in event.__slots__)]


def from_row(row: list[Any]) -> Event:
    """The event of a row of `to_row`."""
    kind, *values = row
    if _KINDS[kind] is UsesRecorded:
        values[2] = (Used(*used) for used in values[2])
    elif _KINDS[kind] is EpochEnded:
        values[3] = map(tuple, values[3])
    event: Event = _KINDS[kind](*(value if isinstance(value, str | int) else tuple(value) for value in values))
    return event
