"""Messages between Forebay's processes as pydantic models; `/openapi.json` is generated from them.

Every list, text and number is bounded, so that a message costs no more memory than its bytes. Servers refuse unknown
fields.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MAX_SWARM_ITEMS = 1024
STALE_ATTEMPT = "stale_attempt"
"""Error code for an attempt of an exchange that is not newer than the last one."""

REFUSED = REVOKED, EXPIRED = "revoked", "expired"
"""Error codes for a peer whose certificate is revoked, or is not valid now: nothing that it repeats is answered."""

Count = Annotated[int, Field(ge=0, le=2**62)]
Text = Annotated[str, StringConstraints(max_length=1000)]
Address = Annotated[str, StringConstraints(pattern=r"^[!-~]{0,300}$")]
Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
HexSession = Annotated[str, StringConstraints(pattern="^[0-9a-f]{0,32}$")]
UNSAFE = r"\x00-\x1f\x7f-\x{9f}\x{2028}-\x{202e}\x{2066}-\x{2069}"  # as of `printable`
Name = Annotated[str, StringConstraints(pattern=rf"^[^{UNSAFE}/\\]{{0,200}}$")]
Ranges = Annotated[str, StringConstraints(pattern=r"^(?:[0-9]{1,9}(?:-[0-9]{1,9})?(?:,[0-9]{1,9}(?:-[0-9]{1,9})?)*)?$")]
"""Ascending indexes and inclusive ranges: `0-15,17`."""
Indexes = Annotated[tuple[Count, ...], Field(max_length=MAX_SWARM_ITEMS)]


class Message(BaseModel):
    """Base of requests: strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ResponseMessage(BaseModel):
    """Base of responses; clients ignore unknown fields."""

    model_config = ConfigDict(extra="ignore")


class ErrorReply(ResponseMessage):
    """Body of every response that is not 2xx."""

    error: str
    message: str


class ClaimsReply(ResponseMessage):
    """Signed claims of a node; see `network/discovery.py`."""

    claims: Annotated[list[dict[str, object]], Field(max_length=4096)]


class FailedFetch(Message):
    """A slice that a member could not download from another; `wrong`: the bytes had the wrong hash."""

    index: Count
    member: Annotated[str, StringConstraints(max_length=300)]
    wrong: bool = False


class SwarmRequest(Message):
    """State of a swarm member; slices are given by index.

    Attributes:
        address: Where it serves slices; "" if it does not.
        session: The process of its node.
        have: Slices that it has; None: unchanged.
        want, num: Slices that it lacks and is not downloading; how many downloads it can start now.
        finished: Downloaded and verified. `dropped`: downloads given up. `failed`: downloads that failed.
    """

    address: Address = ""
    have: Ranges | None = None
    want: Ranges = ""
    num: Count = 0
    finished: Indexes = ()
    failed: Annotated[tuple[FailedFetch, ...], Field(max_length=MAX_SWARM_ITEMS)] = ()
    dropped: Indexes = ()
    session: HexSession = ""
    leave: bool = False


class ProviderReply(ResponseMessage):
    """A member of the swarm, or a web server or bucket by its URL, that has a slice."""

    member: str
    peer_id: str
    address: str
    is_origin: bool


class AssignmentReply(ProviderReply):
    """Instruction to download slice `index` from this member."""

    index: Count


class SwarmReply(ResponseMessage):
    """A tracker's assignments to a member, and when to ask again."""

    assignments: Annotated[list[AssignmentReply], Field(max_length=4096)] = []
    wait_s: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    tell_have: bool = False
    sharers: Annotated[list[ProviderReply], Field(max_length=4096)] = []


class ReadmitRequest(Message):
    """Excluded slices to lease again; None: all."""

    slices: Annotated[tuple[Count, ...], Field(max_length=100_000)] | None = None


class AdmitRequest(Message):
    """A token, a name for the node, and a request for a certificate in PEM, signed with the node's new key."""

    token: Annotated[str, StringConstraints(max_length=64 << 10)]
    name: Annotated[str, StringConstraints(max_length=200)]
    request: Annotated[str, StringConstraints(max_length=16 << 10)]


class RenewRequest(Message):
    """A certificate request in PEM, by the key of the handshake's certificate, which is renewed."""

    request: Annotated[str, StringConstraints(max_length=16 << 10)]
