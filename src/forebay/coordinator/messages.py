"""The words of membership: rules, state, what may happen, what is to be done. `membership.apply` joins them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, TypeAlias

from pydantic import ConfigDict, Field, StringConstraints

from forebay.network.messages import MAX_WAIT_S, Address, CoordinatorSession, Count, WorkerId

ANSWER_S = 5.0
"""A member takes an answer for lost, and asks again, when none came for so long beyond the time it was to wait."""
HEARTBEAT_WAIT_S = 20.0
"""The longest that a member lets the coordinator hold its heartbeat."""
RETRY_S = 2.0
"""The longest pause of a member between two requests without an answer."""


@dataclass(frozen=True)
class Rules:
    """How patient the coordinator is.

    Args:
        min_workers: So many must be there to begin.
        heartbeat_s: The longest that a live member is silent.
        stale_s: A silent member is given up after this long.
        lost_s: So is one whose connection closed, and one silent while others wait for it, after this. Silence counts
            from when the member must have noticed that an answer was lost: `wait_s` + `ANSWER_S` after its request.
        grace_s: How long the others wait for a live member in the middle of a step.
        workers_per_peer: Workers of one certificate; over plain HTTP there is no such bound.
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
        step: The steps it finished, or those of the generation that it is in.
        weights, samples: The steps that its weights have learned, and the samples of those.
        polling: Its requests that wait for an answer; `returns_at`: when it asks again even if the answer is lost.
    """

    worker_id: str
    session: str
    seat: int
    address: str
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


@dataclass(frozen=True)
class RankSlot:
    """A rank of a generation; its index there is the rank."""

    worker_id: str
    session: str
    address: str


@dataclass(frozen=True)
class RankGeneration:
    """A membership that holds from `start_step` on. `source` is the rank whose weights count."""

    number: int
    places: tuple[RankSlot, ...]
    start_step: int
    start_sample: int
    source: int

    def rank_of(self, session: str) -> int | None:
        """The rank of a session, None for no member."""
        return self._ranks.get(session)

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {place.session: rank for rank, place in enumerate(self.places)}

    def sample_at(self, step: int, batch_size: int) -> int:
        """The first global sample of a step."""
        return self.start_sample + (step - self.start_step) * batch_size * len(self.places)


@dataclass(frozen=True)
class RunState:
    """All that the coordinator knows. `members` are the live ones; `seats` those of workers that finished a step.

    Args:
        told, config: What the coordinator was told that workers do; that, with what the first worker added.
        reached: The highest step finished in this generation: in lockstep as two certificates say, else by anybody.
        floor: The lowest step at which the next generation may begin.
        run_to: Where independent workers catch up to before they stop; 0 for no such place.
        end: The step at which the run ended; None while it goes on.
        finished: Sessions of this generation that left and say they did all steps: whose, and the last step.
        gone: Places given up in this generation: rank, and the step it had reached.
        changing_at: Since when another generation is wanted.
        breakers: Whose members were the first to break a generation before it finished a step, and how often since one
            did; not kept over a restart.
    """

    rules: Rules
    told: Mapping[str, Any] = field(default_factory=dict)
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
    breakers: Mapping[str, int] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """Samples of one worker in a step."""
        return int(self.config.get("batch_size") or 1)

    @property
    def lockstep(self) -> bool:
        """Whether workers step together, by a collective."""
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
        staying = {place.session for place in self.generation.places} - self.finished.keys()
        return self.broken or {member.session for member in self.members.values()} != staying


@dataclass(frozen=True)
class ProposeConfig:
    """A worker says what it would do; the first one settles what the coordinator was not told."""

    settings: Mapping[str, Any]


@dataclass(frozen=True)
class MemberMessage:
    """What a member's process says, an event and a request in one. `session` is random, one a process.

    Constraints on the fields hold for what comes in over the network. `wait_s`: how long to wait for news.
    """

    worker_id: WorkerId
    session: CoordinatorSession
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = field(default=0.0, kw_only=True)

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Join(MemberMessage):
    """Join; `step` and `samples` are where the state that it brings stands.

    `peer_id`: whose certificate it came with, "" over plain HTTP; no member says it itself.
    """

    address: Address = ""
    peer_id: Annotated[str, Field(max_length=0)] = ""
    step: Count = 0
    samples: Count = 0


@dataclass(frozen=True)
class GenerationMessage(MemberMessage):
    """A member's generation, and the steps that it finished."""

    generation: Count = 0
    step: Count = 0


@dataclass(frozen=True)
class Ready(GenerationMessage):
    """Stopped at a boundary with `step` steps finished; `broken`: the step under way cannot be finished.

    `held_step` and `held_samples`: what its weights have learned, where it could not take over the source's.
    """

    broken: bool = False
    held_step: Count | None = None
    held_samples: Count = 0


@dataclass(frozen=True)
class Heartbeat(GenerationMessage):
    """Alive; `changing` and `broken` are what it believes: answered when it is otherwise."""

    changing: bool = False
    broken: bool = False


@dataclass(frozen=True)
class Leave(GenerationMessage):
    """Not a member any more; `finished`: the last step is done."""

    finished: bool = False


@dataclass(frozen=True)
class MeetRequest(MemberMessage):
    """A value for the ranks of a generation under a key, or without one: what is there, once it is.

    `value` is base64. The first value of a key counts.
    """

    generation: Count
    key: Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,300}$")]
    value: Annotated[str, StringConstraints(pattern="^[A-Za-z0-9+/=]{0,65536}$")] | None = None


@dataclass(frozen=True)
class PollChange:
    """A member's long poll of at most `wait_s` begins (+1) or is answered (-1)."""

    worker_id: str
    session: str
    change: int
    wait_s: float = 0.0


@dataclass(frozen=True)
class Disconnect:
    """A member's connection closed while it waited: its process most likely ended."""

    worker_id: str
    session: str


@dataclass(frozen=True)
class Tick:
    """Nothing happened, but time."""


Event: TypeAlias = ProposeConfig | Join | Ready | Heartbeat | Leave | PollChange | Disconnect | Tick


@dataclass(frozen=True)
class Refuse:
    """The event is refused; `code` is one of duplicate, unsure, expelled, bad_step."""

    code: str
    message: str


@dataclass(frozen=True)
class LogLine:
    """A line for the log."""

    text: str


@dataclass(frozen=True)
class Formed:
    """A generation began."""

    generation: RankGeneration


@dataclass(frozen=True)
class Stepped:
    """Steps [start, stop) were finished in a generation, each with `count` samples, the first from `first_sample`."""

    generation: int
    start: int
    stop: int
    first_sample: int
    count: int


@dataclass(frozen=True)
class Gap:
    """A worker died and left its part of steps [start, stop) undone; independent workers only."""

    generation: int
    worker_id: str
    rank: int
    start: int
    stop: int


Action: TypeAlias = Refuse | LogLine | Formed | Stepped | Gap
