"""Events of the scheduler: `SchedulerCore` produces them, the journal stores them, replaying them restores the core."""

from typing import Any, NamedTuple, TypeAlias, get_args

from forebay.ledger.chain import Used


class WorkerEnlisted(NamedTuple):
    """A worker uses samples for the first time, or after its last certificate ended. It changes no state.

    `certificate` is DER in base64.
    """

    worker: str
    certificate: str
    name: str


class LeaseGranted(NamedTuple):
    """A worker got samples [start, stop) of a slice."""

    lease_id: str
    worker: str
    session: str
    epoch: int
    slice_index: int
    start: int
    stop: int


class UsesRecorded(NamedTuple):
    """A session of a worker acknowledged uses; `receipt` is its signature over them in hex."""

    worker: str
    uses: tuple[Used, ...]
    receipt: str
    session: str = ""


class LeaseCut(NamedTuple):
    """A lease ends at `stop` from now on; the samples behind it are free."""

    lease_id: str
    stop: int


class LeaseReturned(NamedTuple):
    """A lease ended before its samples did. `reason`: released, unheld, expired, stalled, clutched or failed."""

    lease_id: str
    reason: str


class SliceFailed(NamedTuple):
    """A worker could not read a slice."""

    slice_index: int
    worker: str
    reason: str


class SliceSetAside(NamedTuple):
    """Samples [start, stop), and all that is returned of their slice, are not leased until it is readmitted."""

    epoch: int
    slice: int
    start: int
    stop: int
    reason: str


class SliceReadmitted(NamedTuple):
    """A slice that was set aside is leased again."""

    slice: int


class EpochEnded(NamedTuple):
    """An epoch ended, of which so many samples were used."""

    epoch: int
    samples: int


class JobPaused(NamedTuple):
    """The job grants no new leases; if not `paused`, it does again."""

    paused: bool


class ProviderReported(NamedTuple):
    """A worker reported that a provider sent wrong bytes of a slice."""

    peer_id: str
    slice_index: int
    reporter: str
    reason: str


class SliceCleared(NamedTuple):
    """The scheduler read a slice itself: the workers' failures do not count."""

    slice_index: int


Event: TypeAlias = (
    WorkerEnlisted | LeaseGranted | UsesRecorded | LeaseCut | LeaseReturned | SliceFailed | SliceSetAside
    | SliceReadmitted | EpochEnded | JobPaused | ProviderReported | SliceCleared
)  # fmt: skip
_KINDS: tuple[type[Event], ...] = get_args(Event)  # their numbers on disk are their places here


def to_row(event: Event) -> list[Any]:
    """An event as a list of plain values, for JSON."""
    values = list[Any](event)
    if isinstance(event, UsesRecorded):
        values[1] = [used.to_row() for used in event.uses]
    return [_KINDS.index(type(event)), *values]


def from_row(row: list[Any]) -> Event:
    """The event of a row of `to_row`."""
    number, *values = row
    kind = _KINDS[number]
    if kind is UsesRecorded:
        values[1] = tuple(Used(*used) for used in values[1])
    event: Event = kind(*values)
    return event
