"""The messages of `POST /v2/exchange` between worker and scheduler, and the proofs that a worker has a slice.

Frozen dataclasses: `SchedulerCore` and `LeaseState` use them as values; pydantic checks their constraints on what comes
in over the network. Rules for a sender:

- A session sends one exchange at a time, and may repeat it: after a lost response it sends its current state under a
  higher `attempt`. A delayed older attempt is refused and changes nothing.
- `uses` belong to one job, `job_id`; `signature` is over `receipt_message(job_id, uses)`. A use starts where the last
  recorded one of its lease stopped; `epoch` and `slice` repeat the lease's. `digest` is optional:
  `order.shard_windows.receipt` of the sample ids that were read.
- The first use of a lease carries `proof`: `prove` over its slice. The scheduler checks some against a data node; a
  false one bars the peer for a while.
- `declared_until`: the worker uses no sample from there on before it has the response, and does not raise the value
  while a request is unanswered. A lease without one is not cut.
- `active` in the response has every lease that is not lost; its `stop` may have moved to `declared_until`. A lease used
  up to its stop is over: the worker forgets it. A cut is repeated for as long as the lease is in `known_leases`.
- `known_leases` has the leases that the worker knew before the response. Further leases of the session never arrived,
  and are taken back. An empty list releases all; left out: nothing is taken back.
"""

import hashlib
import hmac
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from forebay.base import Json
from forebay.errors import ProtocolError, printable
from forebay.ledger.chain import Used
from forebay.network.messages import Address, Count, Name, Ranges, Sha256
from forebay.network.peer import Provider
from forebay.storage.hosts import check_url, parse_peer_address

MAX_LEASE_IDS = 256
MAX_USES = 4096
MAX_REPORTS = 64
MAX_WANT = 16
RANGE_BYTES = 4 << 10
ALWAYS_CHECKED = 8
CHECKED_OF = 16

log = logging.getLogger("forebay.worker")


Reason = Annotated[str, StringConstraints(max_length=1000), AfterValidator(lambda text: printable(text, 300))]
Cause = Literal["scheduler", "network", "disk", "decode", "device", "queue"]
Seconds = Annotated[float, Field(ge=0, lt=1e9)]
Session = Annotated[str, StringConstraints(pattern="^[A-Za-z0-9._-]{0,64}$")]
LeaseId = Annotated[str, StringConstraints(pattern="^[A-Za-z0-9._-]{1,64}$")]
LeaseIds = Annotated[tuple[LeaseId, ...], Field(max_length=MAX_LEASE_IDS)]


class _Message:
    """Sent by a worker: strict types, no further fields."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)


class _Reply:
    """Sent by the scheduler; a worker ignores fields that it does not know."""

    __pydantic_config__ = ConfigDict(extra="ignore", strict=True)


@dataclass(frozen=True)
class UseMessage(_Message, Used):
    """A use of samples. `digest`: see docs/reference/ledger.md. `proof`: with the first use of a lease."""

    lease_id: LeaseId
    epoch: Count
    slice: Count
    start: Count
    stop: Count
    step: Count
    digest: Annotated[str, StringConstraints(pattern="^([0-9a-f]{32})?$")] = ""
    proof: Annotated[str, StringConstraints(pattern="^([0-9a-f]{12})?$")] = ""


@dataclass(frozen=True)
class FailedLease(_Message):
    """A lease returned because its slice could not be fetched or read."""

    lease_id: LeaseId
    reason: Reason = ""


@dataclass(frozen=True)
class ProviderReport(_Message):
    """A provider sent wrong bytes of a slice that is or lately was leased to the worker (`wrong`), or failed otherwise.

    One that is not `wrong` is avoided for a while; it is not banned.
    """

    peer_id: Address
    sha256: Sha256
    reason: Reason = ""
    wrong: bool = True


@dataclass(frozen=True)
class WorkerStats(_Message):
    """What a process of a worker reports of itself, unverified: totals since its loader was made, and its cache now.

    Attributes:
        busy_s, waits_s: Time between batches; time waited for them, by cause (`forebay.load.stats`).
        waiting_s, waiting_for: The wait in progress.
        ideal_s: What the received tokens take at the device's peak; 0 where MFU is not measured.
        origin_bytes, peer_bytes, shared_bytes: Fetched from data nodes; from other workers; sent to those.
    """

    batches: Count = 0
    busy_s: Seconds = 0.0
    waits_s: dict[Cause, Seconds] = field(default_factory=dict)
    waiting_s: Seconds = 0.0
    waiting_for: Cause = "queue"
    ideal_s: Seconds = 0.0
    cached_bytes: Count = 0
    cache_bytes: Count = 0
    origin_bytes: Count = 0
    peer_bytes: Count = 0
    shared_bytes: Count = 0


@dataclass(frozen=True)
class ExchangeRequest(_Message):
    """One exchange of one session of a worker.

    Args:
        job: The job's name, which is its dataset's; "" is the scheduler's.
        session: One process of a peer; leases belong to a session.
        attempt: Rises with each attempt of an exchange. 0: not numbered.
        address: host:port where this worker serves its cached slices; "" if it does not.
        known_leases: Lease ids; other leases of this session are taken back. None: nothing is taken back.
        job_id, uses, signature: Samples used, all of one job, and the worker's signature over them in hex.
        declared_until: Lease id to the sample that the worker does not go beyond before it has the response.
        release: Leases returned.
        failed: Leases returned because their slice could not be read.
        want: Number of further leases.
        cached: Dataset id to the slices in the worker's cache, as ranges with both ends included; a dataset left out is
            unchanged.
        reports: Providers that failed.
        stats: About every two seconds.
    """

    job: Name = ""
    session: Session = ""
    attempt: Count = 0
    address: Address = ""
    known_leases: LeaseIds | None = None
    job_id: Annotated[str, StringConstraints(pattern="^([0-9a-f]{64})?$")] = ""
    uses: Annotated[tuple[UseMessage, ...], Field(max_length=MAX_USES)] = ()
    signature: Annotated[str, StringConstraints(pattern="^([0-9a-f]{128})?$")] = ""
    declared_until: Annotated[dict[LeaseId, Count], Field(max_length=MAX_LEASE_IDS)] = field(default_factory=dict)
    release: LeaseIds = ()
    failed: Annotated[tuple[FailedLease, ...], Field(max_length=MAX_LEASE_IDS)] = ()
    want: Annotated[int, Field(ge=0, le=MAX_WANT)] = 0
    cached: Annotated[dict[Sha256, Ranges], Field(max_length=64)] = field(default_factory=dict)
    reports: Annotated[tuple[ProviderReport, ...], Field(max_length=MAX_REPORTS)] = ()
    stats: WorkerStats | None = None

    def to_json(self) -> Json:
        """The body of the request, without fields that have their default."""
        return dict(_REQUEST.dump_python(self, mode="json", exclude_defaults=True))


@dataclass(frozen=True)
class AcceptedUse(_Reply):
    """A use on record: the lease is used up to `offset` and ends at `stop`."""

    lease_id: str
    offset: Count
    stop: Count


@dataclass(frozen=True)
class RefusedUse(_Reply):
    """A use that was not recorded: `code` is lost (drop the lease) or range (continue from `offset`)."""

    lease_id: str
    code: str
    message: str
    offset: Count


@dataclass(frozen=True)
class LeaseStatus(_Reply):
    """A live lease: it ends at `stop`, which may be nearer than before; a worker that reached it is done with it."""

    stop: Count
    expires_in_s: Seconds


@dataclass(frozen=True)
class LeaseGrant(_Reply):
    """A new lease: samples [start, stop) of the `count` of a slice in its own shuffled order."""

    lease_id: str
    job: str
    epoch: Count
    slice: Count
    dataset_id: Sha256
    start: Count
    stop: Count
    count: Count
    providers: Annotated[tuple[Provider, ...], Field(max_length=64)]
    expires_in_s: Seconds


@dataclass(frozen=True)
class Lease(LeaseGrant):
    """A grant with what a worker has to know of its slice; `job_id` is the ledger's. `GET /v1/job` has the rest.

    `sample_base` + sample is the global id.
    """

    job_id: str
    sha256: Sha256
    bytes: Annotated[int, Field(ge=1, le=2**62)]
    sample_base: Count
    seed: int


@dataclass(frozen=True)
class ExchangeResult(_Reply):
    """What `SchedulerCore` answers an exchange.

    Attributes:
        active: The known leases that are live, or were used to their end.
        lost: The known leases that belong to other workers now.
        wait_s: When to ask again, if fewer leases than wanted were granted.
        done: Nothing is left to lease, now or later. `paused`: there may be, but not now.
        num_left_out: Samples set aside in epochs that ended: no worker used them.
        report_cached: The scheduler does not know what this session has cached.
        cause, reason: Why fewer leases than wanted were granted: paused; barred; leased (to others); unserved (no data
            node has what is left); avoided (this worker failed on it lately). And the same as text.
    """

    uses: tuple[AcceptedUse, ...]
    active: Mapping[str, LeaseStatus]
    leases: tuple[LeaseGrant, ...]
    wait_s: Seconds
    done: bool
    refused: tuple[RefusedUse, ...] = ()
    lost: tuple[str, ...] = ()
    paused: bool = False
    report_cached: bool = False
    num_left_out: Count = 0
    cause: str = ""
    reason: str = ""


def _checked_leases(leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
    """Check the leases' ranges, and drop providers with invalid addresses."""
    for lease in leases:
        if not lease.start < lease.stop <= lease.count:
            raise ValueError(f"expected samples of a slice, got [{lease.start}, {lease.stop}) of {lease.count}")
    return tuple(replace(lease, providers=tuple(_usable(lease.providers))) for lease in leases)


def _usable(providers: Iterable[Provider]) -> Iterator[Provider]:
    for provider in providers:
        try:
            if provider.is_url:
                check_url(provider.address)
                yield Provider("", provider.address, True)  # the peer that named the URL did not send its bytes
            else:
                parse_peer_address(provider.address)
                yield provider
        except ProtocolError as error:
            log.info("provider ignored: %s", error)


@dataclass(frozen=True)
class ExchangeReply(ExchangeResult):
    """A result as a worker receives it."""

    leases: Annotated[tuple[Lease, ...], AfterValidator(_checked_leases)]

    def to_json(self) -> Json:
        """The body of the response, without fields that have their default."""
        return dict(_REPLY.dump_python(self, mode="json", exclude_defaults=True))

    @classmethod
    def from_json(cls, value: Any) -> "ExchangeReply":
        """Parse a response body; ProtocolError if it is malformed."""
        try:
            return _REPLY.validate_json(orjson.dumps(value))
        except (ValidationError, TypeError) as error:
            location = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                location = f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.80}"
            raise ProtocolError(f"exchange: expected a response of /v2/exchange: {location}") from error


_REQUEST = TypeAdapter(ExchangeRequest)
_REPLY = TypeAdapter(ExchangeReply)


# Proof that a worker has a slice: a keyed digest over a range of it that lease and worker determine. It cannot be made
# without the bytes, nor copied from another worker; it does not show that the worker trained on them. `proofs.py`
# checks those of a worker's first leases, later of one lease in 16, which only the scheduler can predict.


def is_checked(secret: bytes, lease_id: str, num_proven: int) -> bool:
    """Whether the proof of a lease is checked, for a worker with so many accepted proofs."""
    return num_proven < ALWAYS_CHECKED or hmac.digest(secret, lease_id.encode(), "sha256")[0] % CHECKED_OF == 0


def range_of(lease_id: str, peer_id: str, num_bytes: int) -> tuple[int, int]:
    """The range [start, stop) of a slice that the proof of a lease is over."""
    length = min(RANGE_BYTES, num_bytes)
    key = hashlib.sha256(f"range {lease_id} {peer_id}".encode()).digest()
    start = int.from_bytes(key[:8], "big") % (num_bytes - length + 1)
    return start, start + length


def proof_of(lease_id: str, peer_id: str, data: bytes) -> str:
    """The proof over the bytes of the range: the first 48 bits of an HMAC-SHA256, 12 hex digits."""
    return hmac.digest(f"{lease_id} {peer_id}".encode(), data, "sha256").hex()[:12]


def prove(lease_id: str, peer_id: str, path: Path, num_bytes: int) -> str:
    """The proof for a slice in a file. OSError if it cannot be read."""
    start, stop = range_of(lease_id, peer_id, num_bytes)
    with path.open("rb") as file:
        file.seek(start)
        return proof_of(lease_id, peer_id, file.read(stop - start))
