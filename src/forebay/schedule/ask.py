"""What a worker asks of the desk and what it is answered: plain values, no JSON and no sockets."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forebay.ledger.receipts import Used
from forebay.network.swarm import Holder


@dataclass(frozen=True)
class Failed:
    """A lease whose slice the worker could not fetch or read."""

    lease_id: str
    reason: str


@dataclass(frozen=True)
class BadReport:
    """As `Bad`, by the hash of the slice, as a worker knows it."""

    peer_id: str
    sha256: str
    reason: str
    wrong: bool


@dataclass(frozen=True)
class Bad:
    """A provider of a slice that is left out: `index` within the dataset; `wrong`: it lied, and was not only late."""

    peer_id: str
    dataset_id: str
    index: int
    reason: str
    wrong: bool = True


@dataclass(frozen=True)
class Ask:
    """One exchange of one session of a worker; a session has one at a time under way.

    Args:
        job: The job's name; "" takes whatever job has work.
        session: One process of a peer; its leases are its own.
        attempt: Rises with each attempt of an exchange; one that comes after a later one was heard is refused, so
            that what was given up on its way cuts and takes back nothing. 0: not numbered.
        organisation: Of the worker's certificate; "" if the network's root signed it.
        address: host:port where this worker hands on what it cached; "" if it does not.
        held: The lease ids that it knows of; whatever else this session holds is taken back. None: unsaid.
        job_id, uses, receipt: What it used, all of one job, and its signature over them in hex.
        proofs: Lease id to the proof that its slice is there (`possession`), of the leases in `uses`.
        horizons: Lease id to the sample that it will not go beyond before it hears an answer.
        release: Leases given back.
        failed: Leases given back because their slice could not be had.
        want: How many more leases.
        have: Dataset id to the slices it has cached, int64 indexes, rising; a dataset left out is unchanged.
        reports: Providers that served wrong bytes, or none; `bad`: the same, as the catalogue placed them.
        speed: Samples a second, where it knows and the desk does not yet.
    """

    job: str = ""
    session: str = ""
    attempt: int = 0
    organisation: str = ""
    address: str = ""
    held: tuple[str, ...] | None = None
    job_id: str = ""
    uses: tuple[Used, ...] = ()
    receipt: str = ""
    proofs: Mapping[str, str] = field(default_factory=dict)
    horizons: Mapping[str, int] = field(default_factory=dict)
    release: tuple[str, ...] = ()
    failed: tuple[Failed, ...] = ()
    want: int = 0
    have: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    reports: tuple[BadReport, ...] = ()
    bad: tuple[Bad, ...] = ()
    speed: float | None = None


@dataclass(frozen=True)
class Accepted:
    """A use on record: the lease got to `offset` and ends at `stop`."""

    lease_id: str
    offset: int
    stop: int


@dataclass(frozen=True)
class Refused:
    """A use that was not taken: `code` is lost (drop the lease) or range (go on from `offset`)."""

    lease_id: str
    code: str
    message: str
    offset: int


@dataclass(frozen=True)
class Live:
    """A lease held: it ends at `stop`, which may be nearer than before; who stands there is done with it."""

    stop: int
    expires_in_s: float


@dataclass(frozen=True)
class Grant:
    """A new lease: samples [start, stop) of the `count` of a slice in its own shuffled order.

    `slice_index` counts over the job, as in the ledger; `index` over the dataset, as in `have`.
    """

    lease_id: str
    job: str
    epoch: int
    slice_index: int
    dataset_id: str
    index: int
    start: int
    stop: int
    count: int
    providers: tuple[Holder, ...]
    expires_in_s: float


@dataclass(frozen=True)
class Reply:
    """What an exchange is answered.

    Attributes:
        live: Of each lease held that is live or was used to its end.
        lost: Leases held that are somebody else's now.
        wait_s: When to ask again, if fewer leases than wanted were given.
        done: Nothing is left to lease, now or later; `paused`: there may be, but not now.
        num_left_out: Samples that were set aside in epochs that ended, and so are used by nobody.
        tell_have: The desk does not know what this session has cached.
    """

    uses: tuple[Accepted, ...] = ()
    refused: tuple[Refused, ...] = ()
    live: Mapping[str, Live] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    leases: tuple[Grant, ...] = ()
    wait_s: float = 0.0
    done: bool = False
    paused: bool = False
    tell_have: bool = False
    num_left_out: int = 0
