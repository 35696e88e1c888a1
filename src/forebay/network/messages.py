"""The messages between Forebay's processes, as pydantic models: what a server accepts, what a client may rely on.

The OpenAPI documents at `/openapi.json` are generated from them. Every list, text and number has a bound, so that a
message costs no more memory than its own bytes allow; a field that is not known is refused.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MAX_SWARM_ITEMS = 1024
STALE_ATTEMPT = "stale_attempt"
"""The code of the answer to an attempt of an exchange that was heard before, or given up for a later one."""

Count = Annotated[int, Field(ge=0, le=2**62)]
Seconds = Annotated[float, Field(ge=0, lt=1e9)]
Text = Annotated[str, StringConstraints(max_length=1000)]
Address = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x20\x7f]{0,300}$")]
Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
LeaseId = Annotated[str, StringConstraints(pattern="^[A-Za-z0-9._-]{1,64}$")]
Session = Annotated[str, StringConstraints(pattern="^[A-Za-z0-9._-]{0,64}$")]
HexSession = Annotated[str, StringConstraints(pattern="^[0-9a-f]{0,32}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f/\\]{0,200}$")]
WorkerId = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,200}$")]
Ranges = Annotated[str, StringConstraints(pattern=r"^(?:[0-9]{1,9}(?:-[0-9]{1,9})?(?:,[0-9]{1,9}(?:-[0-9]{1,9})?)*)?$")]
"""Rising indexes, ranges with both ends in: `0-15,17`."""


class Message(BaseModel):
    """What a client sends: strict types, no further fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Reply(BaseModel):
    """What a server answers; a client ignores fields that it does not know."""

    model_config = ConfigDict(extra="ignore")


class ErrorReply(Reply):
    """Every answer that is not 2xx."""

    error: str
    message: str


# Data nodes and workers that share.


class ClaimsReply(Reply):
    """Signed claims of what a node has; see `network/discovery.py`."""

    claims: Annotated[list[dict[str, object]], Field(max_length=4096)]


class FailedFetch(Message):
    """A slice that a member did not get from another; `wrong`: it got wrong bytes."""

    index: Count
    member: Annotated[str, StringConstraints(max_length=300)]
    wrong: bool = False


class SwarmRequest(Message):
    """What a member of a swarm has and wants.

    Attributes:
        address: Where it serves slices; "" if it does not.
        slots: How many it serves at once. `session`: which process of its node it is.
        have: What it has; left out: as before. `lost`: what it has no longer.
        want, num: What it lacks and is not fetching; how many it will begin now.
        must: Those that it cannot do without.
        finished: Fetched and verified. `dropped`: fetched no longer. `failed`: not got.
    """

    address: Address = ""
    slots: Count | None = None
    have: Ranges | None = None
    want: Ranges = ""
    num: Count = 0
    must: Annotated[tuple[Count, ...], Field(max_length=MAX_SWARM_ITEMS)] = ()
    finished: Annotated[tuple[Count, ...], Field(max_length=MAX_SWARM_ITEMS)] = ()
    failed: Annotated[tuple[FailedFetch, ...], Field(max_length=MAX_SWARM_ITEMS)] = ()
    dropped: Annotated[tuple[Count, ...], Field(max_length=MAX_SWARM_ITEMS)] = ()
    lost: Annotated[tuple[Count, ...], Field(max_length=MAX_SWARM_ITEMS)] = ()
    session: HexSession = ""
    leave: bool = False


class ProviderReply(Reply):
    """Who has a slice: a member of the swarm, or a web server or bucket by its URL."""

    member: str
    peer_id: str
    address: str
    is_origin: bool


Holders = Annotated[list[ProviderReply], Field(max_length=4096)]


class AssignmentReply(ProviderReply):
    """Fetch slice `index` from this member."""

    index: Count


class MustReply(Reply):
    """Who has a slice that a member cannot do without."""

    index: Count
    holders: Holders


class SwarmReply(Reply):
    """What a tracker tells a member: what to fetch from whom, and when to ask again."""

    assignments: Annotated[list[AssignmentReply], Field(max_length=4096)] = []
    must: Annotated[list[MustReply], Field(max_length=4096)] = []
    wait_s: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    tell_have: bool = False
    settled: bool = False
    sharers: Holders = []


# The lease scheduler; scheduler/messages.py has its exchange with workers.


class ReadmitRequest(Message):
    """Slices to lease again; left out: all that were set aside."""

    slices: Annotated[tuple[Count, ...], Field(max_length=100_000)] | None = None


class WeightsRequest(Message):
    """Weights of datasets by name, from `at` samples on; left out: from now on."""

    weights: Annotated[dict[str, Annotated[float, Field(ge=0, lt=1e15)]], Field(max_length=1000)]
    at: Count | None = None


# The coordinator of ranks.

MAX_WAIT_S = 30.0
CoordinatorSession = Annotated[str, StringConstraints(pattern="^[A-Za-z0-9._-]{8,64}$")]
Plain = Text | Annotated[int, Field(ge=-(2**62), le=2**62)] | Annotated[float, Field(gt=-1e300, lt=1e300)] | bool | None


class ConfigRequest(Message):
    """Settings that the coordinator was not told, from its owner or an administrator."""

    settings: Annotated[dict[Name, Plain], Field(max_length=64)] = {}


class MeetReply(Reply):
    """The value of a key; none yet."""

    value: Annotated[str, StringConstraints(max_length=65536)] | None = None


# Admission.


class AdmitRequest(Message):
    """A token, a name for the node, and a request for a certificate in PEM, signed with the node's new key."""

    token: Annotated[str, StringConstraints(max_length=64 << 10)]
    name: Annotated[str, StringConstraints(max_length=200)]
    request: Annotated[str, StringConstraints(max_length=16 << 10)]


class RenewRequest(Message):
    """The certificate held now and a request for another, both in PEM."""

    certificate: Annotated[str, StringConstraints(max_length=64 << 10)]
    request: Annotated[str, StringConstraints(max_length=16 << 10)]
