"""A worker's membership of a run as a state machine: the requests to the coordinator, and what follows from answers.

Pure: no socket, thread or sleep. Each operation is a generator: it yields a `Request` to send or a `Pause` to wait, is
resumed with the answer's JSON object, and returns its result. A refusal (`RemoteError`) or a request without an answer
(any other `NetworkError`) is thrown into it. `Membership` drives these from threads, `tests/sim` in virtual time. Two
operations may be active at once: `heartbeats`, and one of the others; a driver resumes one at a time.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import KW_ONLY, dataclass
from random import Random
from typing import Any, TypeAlias, TypeVar

from pydantic import TypeAdapter

from forebay.base import Json
from forebay.coordinator.messages import HEARTBEAT_WAIT_S, RETRY_S
from forebay.errors import LeaseError, NetworkError, ProtocolError
from forebay.network.client import RemoteError
from forebay.network.messages import REFUSED
from forebay.storage.retry import backoff_s

WAIT_S = 2.0  # how long the coordinator may hold a request of a worker that waits; bounds the time to stop, too
FIRST_WAIT_S = 0.3
NOTICE_S = 2.0  # in which the coordinator hears that a process that was killed has no connection any more
MAX_PAUSE_S = RETRY_S / 1.5  # between two requests without an answer, on average; never more than RETRY_S


class CoordinatorUnreachableError(NetworkError):
    """The coordinator did not answer within the worker's patience."""


class DuplicateWorkerError(LeaseError):
    """Another live process is in the run under this worker id."""


class MembershipLostError(LeaseError):
    """This process is not a member any more: it was removed as dead, or its id was taken over."""


@dataclass(frozen=True)
class Request:
    """A POST to the coordinator. The answer takes about `wait_s`."""

    path: str
    body: Mapping[str, Any]
    wait_s: float = 0.0


@dataclass(frozen=True)
class Pause:
    """A wait without a request."""

    seconds: float


T = TypeVar("T")
Operation: TypeAlias = Generator[Request | Pause, Any, T]


@dataclass(frozen=True)
class Generation:
    """A fixed membership: valid for the steps from `start_step` to the next generation's.

    Args:
        number: Rises with every change; groups and keys of an old number must not be used again.
        rank, world_size: This worker's rank, and the number of workers.
        start_step: The step to continue at, the number of steps that the run has finished.
        start_sample: Samples of the global order that those steps used.
        source: The rank whose weights the others take over at `start_step`.
        run_id: The same for all generations of a run.
    """

    number: int
    rank: int
    world_size: int
    start_step: int
    start_sample: int
    source: int
    run_id: str

    @classmethod
    def from_json(cls, value: Any) -> "Generation":
        """Parse a generation of a response; ProtocolError if it is malformed."""
        try:
            return _GENERATION.validate_python(value)
        except ValueError as error:
            raise ProtocolError(f"coordinator: expected a generation, got {value!r:.200}") from error

    def first_sample(self, step: int, batch_size: int) -> int:
        """The first of the batch_size * world_size global samples of a step."""
        return self.start_sample + (step - self.start_step) * batch_size * self.world_size

    def samples(self, step: int, batch_size: int) -> range:
        """The global samples of this rank in a step: every world_size-th, from its rank on."""
        first = self.first_sample(step, batch_size)
        return range(first + self.rank, first + batch_size * self.world_size, self.world_size)


_GENERATION = TypeAdapter(Generation)


@dataclass(eq=False)
class MembershipState:
    """One process's membership of a run; `settings` to `on_note` as of `Membership`.

    `coordinator` is its address, for messages. `clock` gives seconds of which only differences count, `new_session` a
    name that no other process has; `random` spreads the retries of requests.
    """

    worker_id: str
    coordinator: str
    _: KW_ONLY
    settings: Mapping[str, Any]
    lockstep: bool
    step: int
    samples: int
    patience_s: float
    on_note: Callable[[str], None]
    clock: Callable[[], float]
    new_session: Callable[[], str]
    random: Random

    def __post_init__(self) -> None:
        self.config: Json = {}  # the settings of the run, after `agree`
        self._generation: Generation | None = None  # None before `join`
        self.session = ""
        self.awaited = ""  # by the operation that runs, for a log line
        self.closed = False  # it has left; active operations end
        self.settings = {**self.settings, "lockstep": self.lockstep}
        self._weights = (self.step, self.samples)  # what this worker's weights were trained for
        self._run_to = 0
        self._changing = self._broken = False
        self._lost = ""
        self._heartbeat_s = 30.0
        self._lost_s = 5.0

    @property
    def generation(self) -> Generation:
        """The current generation; MembershipLostError before `join`."""
        if self._generation is None:
            raise MembershipLostError(f"worker {self.worker_id!r}: in no generation yet. Call join() first.")
        return self._generation

    @property
    def changing(self) -> bool:
        """Whether a new generation is wanted: stop at the next boundary, all ranks at the same one."""
        return self._changing or bool(self._lost)

    @property
    def broken(self) -> bool:
        """Whether a rank of this generation reports that its step cannot be finished."""
        return self._broken or bool(self._lost)

    def agreeing(self) -> Operation[Json]:
        answer = yield from self._call("/v1/config", {"settings": self.settings})
        try:
            self._heartbeat_s = float(answer["heartbeat_s"])
            self._lost_s = float(answer["lost_s"])
            config = {**self.settings, **answer["config"]}
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"coordinator: expected a configuration, got {answer!r:.200}") from error
        for key, value in self.settings.items():
            if value is not None and config[key] != value:
                self.on_note(f"{key}: the run has {config[key]!r}, which overrides {value!r} of {self.worker_id}")
        self.config = config
        return dict(config)

    def joining(self) -> Operation[Generation]:
        if not self.config:
            yield from self.agreeing()
        self.session = self.new_session()
        self._lost = ""
        self._run_to = 0
        body = {**self._me(), "step": self._weights[0], "samples": self._weights[1]}
        now = self.clock()
        wait_s, awaited = FIRST_WAIT_S, ""
        ask_until = {"duplicate": now + NOTICE_S, "unsure": now + self._heartbeat_s + 2 * self._lost_s}
        while True:
            try:
                answer = yield from self._call("/v1/members/join", {**body, "wait_s": wait_s}, wait_s, awaited)
            except RemoteError as error:
                if self.clock() < ask_until.get(error.code, 0.0) and not self.closed:
                    yield Pause(0.5)
                    continue
                if error.code in ask_until:
                    raise DuplicateWorkerError(str(error).partition(f"{error.code}: ")[2] or str(error)) from error
                if error.code == "expelled":
                    continue
                raise
            if "generation" in answer:
                return self._enter(answer["generation"])
            awaited = _describe(answer)
            wait_s = WAIT_S

    def crossing(self, step: int, *, stop: bool | None, broken: bool, holds: bool) -> Operation[Generation]:
        generation = self.generation
        self.step = step
        if holds:
            self._weights = (step, generation.first_sample(step, int(self.config.get("batch_size") or 1)))
        if self._lost:
            raise MembershipLostError(self._lost)
        stop = (self.changing if stop is None else stop) and step >= self._run_to
        awaited = ""
        while stop or broken:
            body = {**self._me(), "generation": generation.number, "step": step, "broken": broken, "wait_s": WAIT_S}
            body |= {"held_step": self._weights[0], "held_samples": self._weights[1]}
            try:
                answer = yield from self._call("/v1/members/ready", body, WAIT_S, awaited)
            except RemoteError as error:
                if error.code == "expelled":
                    self._lost = str(error)
                    raise MembershipLostError(str(error)) from error
                raise
            if "generation" in answer:
                return self._enter(answer["generation"])
            if "run_to" in answer:
                self._run_to = int(answer["run_to"])
                break
            awaited = _describe(answer)
        return generation

    def heartbeats(self) -> Operation[None]:
        """Send heartbeats and receive changes, until the session ends."""
        session = self.session
        pause_s = 0.1
        wait_s = min(self._heartbeat_s, HEARTBEAT_WAIT_S)
        while not self.closed and self.session == session and self._generation is not None:
            number = self._generation.number
            body = {**self._me(), "generation": number, "step": self.step}
            body |= {"changing": self._changing, "broken": self._broken, "wait_s": wait_s}
            answer = {}
            try:
                answer = yield Request("/v1/members/heartbeat", body, wait_s)
                pause_s = 0.1
            except RemoteError as error:
                if error.code in ("expelled", *REFUSED) and self.session == session:
                    self._lost = str(error)
                    return
            except NetworkError:
                pass  # training continues without the coordinator
            if answer and self._generation.number == number:
                self._changing = answer.get("changing") is True
                self._broken = answer.get("broken") is True
            if not answer or self._changing:
                # While a change waits for a boundary, its cancellation may arrive this late.
                yield Pause(pause_s)
                pause_s = min(RETRY_S, 2 * pause_s) if not answer else 0.1

    def leaving(self, *, finished: bool) -> Operation[None]:
        """Leave; raises if the coordinator is unreachable."""
        number = self._generation.number if self._generation is not None else 0
        body = {**self._me(), "generation": number, "step": self.step, "finished": finished}
        try:
            if finished:
                yield from self._call("/v1/members/leave", body)
        finally:
            self.closed = True
        if not finished:
            yield Request("/v1/members/leave", body)

    def _me(self) -> Json:
        return {"worker_id": self.worker_id, "session": self.session}

    def _enter(self, value: Any) -> Generation:
        generation = Generation.from_json(value)
        if self._generation is None or self._generation.number != generation.number:
            self.step = generation.start_step
            self._run_to = 0
            self.on_note(
                f"generation {generation.number}: rank {generation.rank} of {generation.world_size} "
                f"from step {generation.start_step}"
            )
        self._generation = generation
        self._changing = False
        self._broken = False
        return generation

    def _call(self, path: str, body: Mapping[str, Any], wait_s: float = 0.0, awaited: str = "") -> Operation[Any]:
        """One request, repeated with back-off while the coordinator is unreachable."""
        self.awaited = awaited or f"an answer of coordinator {self.coordinator}"
        start = f"Start it with `forebay coordinator --listen {self.coordinator}`"
        deadline = self.clock() + self.patience_s
        tried = 0
        while True:
            if self.closed:
                raise MembershipLostError(f"worker {self.worker_id!r}: it has left the run.")
            try:
                return (yield Request(path, body, wait_s))
            except NetworkError as error:
                if isinstance(error, RemoteError) and error.status != 503:
                    raise
                tried += 1
                pause_s = backoff_s(tried, 0.05, MAX_PAUSE_S, chance=self.random)
                if self.clock() + pause_s > deadline:
                    raise CoordinatorUnreachableError(
                        f"coordinator {self.coordinator}: no answer for {self.patience_s:g} s. {start}, or give its "
                        f"address: --coordinator, FOREBAY_COORDINATOR. Last: {error}"
                    ) from error
                cause = getattr(error.__cause__, "strerror", "") or error
                self.awaited = f"coordinator {self.coordinator}, up to {self.patience_s:g} s: {cause}. {start}"
            yield Pause(pause_s)


def _describe(answer: Mapping[str, Any]) -> str:
    waiting = answer.get("waiting", {})
    waits_for = waiting.get("waits_for")
    awaited = f"the run waits for {waits_for!r}"
    if isinstance(waits_for, list):
        awaited = f"not ready: {', '.join(map(repr, waits_for))}"
    return f"other workers: {waiting.get('members')!r} joined, {awaited:.200}"
