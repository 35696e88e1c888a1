"""`POST /v2/exchange`: what a worker asks its scheduler, and what it is answered.

These are the values of the worker's leases and of the desk, and, as JSON, the messages between them: constraints on
the fields hold for what comes in over the network. What a sender has to know:

- One exchange at a time a session. It is idempotent: if the answer was lost, ask again with what is true then, under
  a higher `attempt`: one that was given up and comes late is refused, so that it cuts and takes back nothing.
- `uses` are of one job: `job_id` says which, and `signature` is over `receipt_message(job_id, uses)`. Uses of two
  jobs go in two exchanges. `epoch` and `slice` repeat the lease's. `digest`, which may be left out, is
  `order.shard_windows.receipt` of the sample ids that were read. A use begins where the last one recorded ended.
- `proof` with the first use of a lease: `prove` over its slice. The scheduler checks some against a data node; a wrong
  one bars the peer for a while.
- `horizons`: the worker uses no sample from there on before it hears an answer to this exchange; it does not raise
  the horizon while an exchange is unanswered, though it may have been lost. A lease without one is not cut.
- `live` has each lease held that is not lost: its `stop` may have moved to the horizon. A lease whose stop is
  reached is over, at once if nothing of it was begun; forget it. A cut is told again for as long as it is `held`.
- `held` is what it knows of before this answer; what the scheduler gave it beyond that never arrived, and is
  taken back. An empty list gives all back. Left out: nothing is taken back.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from forebay.errors import ProtocolViolation
from forebay.ledger.receipts import Used
from forebay.network.addresses import check_url, peer_address
from forebay.network.messages import Address, Count, LeaseId, Name, Ranges, Seconds, Session, Sha256
from forebay.network.peer import Provider

MAX_HELD = 256
MAX_USES = 4096
MAX_REPORTS = 64
MAX_REASON = 300
MAX_WANT = 16
RANGE_BYTES = 4 << 10
ALWAYS_CHECKED = 8
CHECKED_OF = 16

log = logging.getLogger("forebay.worker")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_REASON])


Reason = Annotated[str, StringConstraints(max_length=1000), AfterValidator(_printable)]
_MESSAGE = ConfigDict(extra="forbid", strict=True)
_REPLY = ConfigDict(extra="ignore", strict=True)


@dataclass(frozen=True)
class UseMessage(Used):
    """A use as a worker tells of it. `digest`: see docs/ledger.md. `proof`: with the first use of a lease."""

    lease_id: LeaseId
    epoch: Count
    slice: Count
    start: Count
    stop: Count
    step: Count
    digest: Annotated[str, StringConstraints(pattern="^([0-9a-f]{32})?$")] = ""
    proof: Annotated[str, StringConstraints(pattern="^([0-9a-f]{12})?$")] = ""

    __pydantic_config__ = _MESSAGE


@dataclass(frozen=True)
class FailedLease:
    """A lease given back because its slice could not be fetched or read."""

    lease_id: LeaseId
    reason: Reason = ""

    __pydantic_config__ = _MESSAGE


@dataclass(frozen=True)
class ProviderReport:
    """Who gave wrong bytes of a slice that is or lately was leased to the worker (`wrong`), or came late or refused.

    One that is not `wrong` is avoided for a while, and nobody is banned.
    """

    peer_id: Address
    sha256: Sha256
    reason: Reason = ""
    wrong: bool = True

    __pydantic_config__ = _MESSAGE


@dataclass(frozen=True)
class ExchangeRequest:
    """One exchange of one session of a worker; a session has one at a time under way.

    Args:
        job: The job's name; "" takes whatever job has work.
        session: One process of a peer; its leases are its own.
        attempt: Rises with each attempt of an exchange. 0: not numbered.
        address: host:port where this worker hands on what it cached; "" if it does not.
        held: The lease ids that it knows of; whatever else this session holds is taken back. None: unsaid.
        job_id, uses, signature: What it used, all of one job, and its signature over them in hex.
        horizons: Lease id to the sample that it will not go beyond before it hears an answer.
        release: Leases given back.
        failed: Leases given back because their slice could not be had.
        want: How many more leases.
        have: Dataset id to the slices it has cached, as `index` of a lease counts them, ranges with both ends in; a
            dataset left out is unchanged.
        bad: Providers that served wrong bytes, or none.
        speed: Samples a second, where it knows and the desk does not yet.
    """

    job: Name = ""
    session: Session = ""
    attempt: Count = 0
    address: Address = ""
    known_leases: Annotated[tuple[LeaseId, ...], Field(max_length=MAX_HELD)] | None = None
    job_id: Annotated[str, StringConstraints(pattern="^([0-9a-f]{64})?$")] = ""
    uses: Annotated[tuple[UseMessage, ...], Field(max_length=MAX_USES)] = ()
    signature: Annotated[str, StringConstraints(pattern="^([0-9a-f]{128})?$")] = ""
    declared_until: Annotated[dict[LeaseId, Count], Field(max_length=MAX_HELD)] = field(default_factory=dict)
    release: Annotated[tuple[LeaseId, ...], Field(max_length=MAX_HELD)] = ()
    failed: Annotated[tuple[FailedLease, ...], Field(max_length=MAX_HELD)] = ()
    want: Annotated[int, Field(ge=0, le=MAX_WANT)] = 0
    cached: Annotated[dict[Sha256, Ranges], Field(max_length=64)] = field(default_factory=dict)
    reports: Annotated[tuple[ProviderReport, ...], Field(max_length=MAX_REPORTS)] = ()
    speed: Annotated[float, Field(ge=0, lt=1e15)] | None = None

    __pydantic_config__ = _MESSAGE

    def to_json(self) -> dict[str, Any]:
        """The body of the request: what is not as by default."""
        body: dict[str, Any] = _ASK.dump_python(self, mode="json", exclude_defaults=True)
        return body


@dataclass(frozen=True)
class AcceptedUse:
    """A use on record: the lease got to `offset` and ends at `stop`."""

    lease_id: str
    offset: Count
    stop: Count

    __pydantic_config__ = _REPLY


@dataclass(frozen=True)
class RefusedUse:
    """A use that was not taken: `code` is lost (drop the lease) or range (go on from `offset`)."""

    lease_id: str
    code: str
    message: str
    offset: Count

    __pydantic_config__ = _REPLY


@dataclass(frozen=True)
class LeaseStatus:
    """A lease held: it ends at `stop`, which may be nearer than before; who stands there is done with it."""

    stop: Count
    expires_in_s: Seconds

    __pydantic_config__ = _REPLY


@dataclass(frozen=True)
class LeaseGrant:
    """A new lease: samples [start, stop) of the `count` of a slice in its own shuffled order.

    `slice` counts over the job, as in the ledger; `first` is the dataset's first slice; `index` counts from there,
    as in `have`.
    """

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
    first: Count = field(default=0, kw_only=True)

    __pydantic_config__ = _REPLY

    @property
    def index(self) -> int:
        return self.slice - self.first


@dataclass(frozen=True)
class Lease(LeaseGrant):
    """A grant, and what a worker has to know of its slice; `job_id` is that of the ledger.

    `sample_base` + sample is the global id. `dataset` is not sent where it is the job's name.
    """

    job_id: str
    name: str
    sha256: Sha256
    bytes: Annotated[int, Field(ge=1, le=2**62)]
    sample_base: Count
    seed: int
    seq_len: Count
    layout: str
    dtype: str
    vocab_size: Count
    dataset: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class ExchangeResult:
    """What an exchange is answered.

    Attributes:
        live: Of each lease held that is live or was used to its end.
        lost: Leases held that are somebody else's now.
        wait_s: When to ask again, if fewer leases than wanted were given.
        done: Nothing is left to lease, now or later; `paused`: there may be, but not now.
        num_left_out: Samples that were set aside in epochs that ended, and so are used by nobody.
        report_cached: The desk does not know what this session has cached.
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

    __pydantic_config__ = _REPLY


def _usable(leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
    """Leases of samples that there are, without providers that make no sense: the others of a lease still count."""
    for lease in leases:
        if not lease.start < lease.stop <= lease.count or lease.first > lease.slice:
            raise ValueError(f"expected samples of a slice, got [{lease.start}, {lease.stop}) of {lease.count}")
    return tuple(
        replace(lease, dataset=lease.dataset or lease.job, providers=tuple(_usable_providers(lease.providers)))
        for lease in leases
    )


def _usable_providers(providers: Iterable[Provider]) -> Iterator[Provider]:
    for provider in providers:
        try:
            if provider.is_url:
                check_url(provider.address)
                yield Provider("", provider.address, True)  # Whoever names it has no part in what it sends.
            else:
                peer_address(provider.address)
                yield provider
        except ProtocolViolation as error:
            log.info("a provider is left out: %s", error)


@dataclass(frozen=True)
class ExchangeReply(ExchangeResult):
    """A reply as a worker gets it."""

    leases: Annotated[tuple[Lease, ...], AfterValidator(_usable)]

    def to_json(self) -> dict[str, Any]:
        """The body of the response: what is not as by default."""
        body: dict[str, Any] = _ANSWER.dump_python(self, mode="json", exclude_defaults=True)
        return body

    @classmethod
    def from_json(cls, value: Any) -> ExchangeReply:
        """An answer as the scheduler must word it; ProtocolViolation if it does not."""
        try:
            return _ANSWER.validate_json(orjson.dumps(value))
        except (ValidationError, TypeError) as error:
            where = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                where = f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.80}"
            raise ProtocolViolation(f"exchange: expected an answer as /v2/exchange words it: {where}") from error


_ASK, _ANSWER = TypeAdapter(ExchangeRequest), TypeAdapter(ExchangeReply)


# Proof that a worker had a slice: a keyed digest over a range of it that the lease and the worker determine.
#
# It comes with the first use of each lease. It shows that this worker read these bytes for this lease, not that it
# trained on them: it cannot be made without the bytes, nor be another worker's. The scheduler checks it against a data
# node: for a worker's first leases each time, later for one lease in 16, which nobody but the scheduler can foretell.


def is_checked(secret: bytes, lease_id: str, num_proven: int) -> bool:
    """Whether the proof of a lease is checked, of a worker that had so many proofs accepted."""
    chance = hmac.digest(secret, lease_id.encode(), "sha256")[0]
    return num_proven < ALWAYS_CHECKED or chance % CHECKED_OF == 0


def range_of(lease_id: str, peer_id: str, num_bytes: int) -> tuple[int, int]:
    """The range [start, stop) of a slice that a worker proves to have under a lease."""
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
