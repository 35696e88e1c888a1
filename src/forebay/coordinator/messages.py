"""The types of membership: rules, state, events and actions. `membership.apply` maps state and event to the next."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import ConfigDict, Field, StringConstraints

from forebay.network.messages import UNSAFE, Count, Message, Name, ResponseMessage, Text

MAX_WAIT_S = 30.0
CoordinatorSession = Annotated[str, StringConstraints(pattern="^[A-Za-z0-9._-]{8,64}$")]
Plain = Text | Annotated[int, Field(ge=-(2**62), le=2**62)] | Annotated[float, Field(gt=-1e300, lt=1e300)] | bool | None
WorkerId = Annotated[str, StringConstraints(pattern=rf"^[^{UNSAFE}]{{1,200}}$")]
ANSWER_S = 5.0
"""A member repeats a request when no answer came for so long after the time that it was to wait."""
HEARTBEAT_WAIT_S = 20.0
"""The longest time that the coordinator may hold a heartbeat."""
STATE_VERSION = 2
"""Of the stored state; the first ones had no number."""
RETRY_S = 2.0
"""The longest pause of a member between two requests without an answer."""


@dataclass(frozen=True)
class Rules:
    """The coordinator's timeouts and limits.

    Args:
        min_workers: The first generation needs so many.
        heartbeat_s: The longest silence of a live member.
        stale_s: A member that was silent for so long is removed.
        lost_s: Timeout of a member whose connection closed, and of a silent one that others wait for. Silence counts
            from when the member must have noticed that an answer was lost: `wait_s` + `ANSWER_S` after its request.
        grace_s: How long the others wait for a live member in the middle of a step.
        workers_per_peer: Workers of one certificate; over plain HTTP there is no such limit.
    """

    min_workers: int = 1
    heartbeat_s: float = 30.0
    stale_s: float = 90.0
    lost_s: float = 5.0
    grace_s: float = 600.0
    workers_per_peer: int = 8


@dataclass(frozen=True)
class RunMember:
    """A live worker: one process (session) under a worker id.

    Args:
        step: Number of steps that it finished, or those of the generation that it is in.
        weights, samples: Number of steps that its weights were trained for, and the samples of those.
        polling: Its requests that wait for an answer; `returns_at`: when it repeats one if the answer is lost.
    """

    worker_id: str
    session: str
    seat: int
    peer_id: str
    step: int
    weights: int
    samples: int
    seen_at: float
    moved_at: float
    ready: bool = False
    polling: int = 0
    returns_at: float = 0.0
    lost_at: float | None = None
    organisation: str = ""


@dataclass(frozen=True)
class RankSlot:
    """The worker of a rank; its index in the generation is the rank."""

    worker_id: str
    session: str


@dataclass(frozen=True)
class RankGeneration:
    """A membership that is valid from `start_step` on. The other ranks take over the weights of rank `source`."""

    number: int
    places: tuple[RankSlot, ...]
    start_step: int
    start_sample: int
    source: int

    def rank_of(self, session: str) -> int | None:
        """The rank of a session, None if it has none."""
        return self._ranks.get(session)

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {slot.session: rank for rank, slot in enumerate(self.places)}

    def sample_at(self, step: int, batch_size: int) -> int:
        """The first global sample of a step."""
        return self.start_sample + (step - self.start_step) * batch_size * len(self.places)


@dataclass(frozen=True)
class RunState:
    """The coordinator's state. `members` are the live ones; `seats` those of workers that finished a step.

    Args:
        fixed, config: Settings of the workers that the coordinator's owner fixed; the same with those of the first
            worker.
        reached: The highest step finished in this generation: in lockstep by two certificates, else by any member.
        floor: The lowest step at which the next generation may start.
        run_to: The step up to which independent workers continue before they stop; 0 for none.
        end: The step at which the run ended; None before.
        finished: Session to certificate and last step, of members of this generation that left after all steps.
        gone: Rank and last step of the members that were removed in this generation.
        changing_at: Since when another generation is wanted.
    """

    rules: Rules
    fixed: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    generation: RankGeneration | None = None
    members: Mapping[str, RunMember] = field(default_factory=dict)
    seats: Mapping[str, int] = field(default_factory=dict)
    reached: int = 0
    floor: int = 0
    run_to: int = 0
    end: int | None = None
    finished: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    gone: tuple[tuple[int, int], ...] = ()
    broken: bool = False
    changing_at: float | None = None
    version: int = STATE_VERSION

    @property
    def batch_size(self) -> int:
        """Samples of one worker in a step."""
        return int(self.config.get("batch_size") or 1)

    @property
    def lockstep(self) -> bool:
        """Whether workers step together, by a collective operation."""
        return bool(self.config.get("lockstep", True))

    @property
    def done(self) -> bool:
        """Whether the last step is done and all have left."""
        return self.end is not None and not self.members

    @property
    def changing(self) -> bool:
        """Whether another generation is wanted."""
        if self.generation is None:
            return bool(self.members)
        staying = {slot.session for slot in self.generation.places} - self.finished.keys()
        return self.broken or {member.session for member in self.members.values()} != staying


class ProposeConfig(NamedTuple):
    """A worker proposes settings; the first proposal fills in what the coordinator's configuration leaves open."""

    settings: Mapping[str, Any]


@dataclass(frozen=True)
class MemberMessage:
    """A member's message, event and request in one. `session` is random, one for each process.

    Pydantic checks the fields' constraints on messages from the network. `wait_s`: how long to wait for a change.
    """

    worker_id: WorkerId
    session: CoordinatorSession
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = field(default=0.0, kw_only=True)

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Join(MemberMessage):
    """Join with a checkpoint of `step` steps and `samples` samples.

    `peer_id` and `organisation`: of the certificate, "" over plain HTTP; the server sets them.
    """

    peer_id: Annotated[str, Field(max_length=0)] = ""
    organisation: Annotated[str, Field(max_length=0)] = ""
    step: Count = 0
    samples: Count = 0


@dataclass(frozen=True)
class GenerationMessage(MemberMessage):
    """A member's generation, and the number of steps that it finished."""

    generation: Count = 0
    step: Count = 0


@dataclass(frozen=True)
class Ready(GenerationMessage):
    """Stopped at a boundary with `step` steps finished; `broken`: the step under way cannot be finished.

    `held_step` and `held_samples`: the training of its weights, where it could not take over the source's.
    """

    broken: bool = False
    held_step: Count | None = None
    held_samples: Count = 0


@dataclass(frozen=True)
class Heartbeat(GenerationMessage):
    """Alive; `changing` and `broken` are what it knows: answered once they differ."""

    changing: bool = False
    broken: bool = False


@dataclass(frozen=True)
class Leave(GenerationMessage):
    """Leave the run; `finished`: the last step is done."""

    finished: bool = False


@dataclass(frozen=True)
class MeetRequest(MemberMessage):
    """Set a key's value for the ranks of a generation; without `value` wait for it.

    `rank` is the one that sets it: each sets its own keys only, and has a name space of its own. `value` is base64; the
    first value of a rank's key counts.
    """

    generation: Count
    rank: Count
    key: Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,300}$")]
    value: Annotated[str, StringConstraints(pattern="^[A-Za-z0-9+/=]{0,65536}$")] | None = None


class PollChange(NamedTuple):
    """A member's long poll of at most `wait_s` starts (+1) or is answered (-1)."""

    worker_id: str
    session: str
    change: int
    wait_s: float = 0.0


class Disconnect(NamedTuple):
    """A member's connection closed: its process has probably ended."""

    worker_id: str
    session: str


class Tick(NamedTuple):
    """Time has passed; the certificates of the workers in `revoked` are revoked now."""

    revoked: Collection[str] = ()


Event: TypeAlias = ProposeConfig | Join | Ready | Heartbeat | Leave | PollChange | Disconnect | Tick


class Refuse(NamedTuple):
    """The event is refused; `code` is one of duplicate, unsure, expelled, bad_step."""

    code: str
    message: str


class LogLine(NamedTuple):
    """A line for the log."""

    text: str


class Formed(NamedTuple):
    """A generation started."""

    generation: RankGeneration


class Stepped(NamedTuple):
    """Steps [start, stop) were finished, each with `num_samples`, the first step from `first_sample` on."""

    generation: int
    start: int
    stop: int
    first_sample: int
    num_samples: int


class Gap(NamedTuple):
    """A worker died before it did its part of steps [start, stop); independent workers only."""

    generation: int
    worker_id: str
    rank: int
    start: int
    stop: int


Action: TypeAlias = Refuse | LogLine | Formed | Stepped | Gap


class ConfigRequest(Message):
    """Settings that the coordinator's configuration leaves open, from its owner or an administrator."""

    settings: dict[Name, Plain] = Field(default_factory=dict, max_length=64)


class MeetReply(ResponseMessage):
    """The value of a key; None if it is not set yet."""

    value: Annotated[str, StringConstraints(max_length=65536)] | None = None
