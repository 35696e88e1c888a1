"""A worker's membership of a run as a state machine: what to ask the coordinator, and what follows from its answers.

Pure: no socket, thread or sleep. Each operation is a generator: it yields a `Request` to send or a `Pause` to wait, is
resumed with the answer's JSON object, and returns its result. A refusal (`RemoteError`) or a request without an answer
(any other `NetworkError`) is thrown into it. `Membership` drives these from threads, `tests/sim` in virtual
time. Two may be under way at once: `heartbeats`, and one of the others; a driver resumes one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias, TypeVar

from pydantic import TypeAdapter

from forebay.coordinator.messages import HEARTBEAT_WAIT_S, RETRY_S
from forebay.errors import LeaseError, NetworkError, ProtocolViolation
from forebay.network.client import RemoteError
from forebay.network.retry import backoff_s

# How long the coordinator may hold a request of a worker that waits; one that is told to stop waits so long at most.
WAIT_S = 2.0
FIRST_WAIT_S = 0.3
MAX_PAUSE_S = RETRY_S / 1.5  # between two requests without an answer, on average; never more than RETRY_S


class CoordinatorUnreachableError(NetworkError):
    """The coordinator did not answer for as long as the worker was told to wait."""


class DuplicateWorkerError(LeaseError):
    """Another live process is in the run under this worker id."""


class MembershipLostError(LeaseError):
    """This process is no member any more: it was taken for dead, or its id was taken over."""


@dataclass(frozen=True)
class Request:
    """To be sent to the coordinator: a POST, or a GET where `body` is None. It is answered within `wait_s` or so."""

    path: str
    body: Mapping[str, Any] | None
    wait_s: float = 0.0


@dataclass(frozen=True)
class Pause:
    """Nothing is sent for so long."""

    seconds: float


T = TypeVar("T")
Operation: TypeAlias = Generator[Request | Pause, Any, T]


@dataclass(frozen=True)
class GenerationMember:
    """One worker of a generation; `address` is where its peers meet it, "host:port", or ""."""

    worker_id: str
    rank: int
    address: str


@dataclass(frozen=True)
class Generation:
    """A membership that does not change: it holds for the steps from `start_step` to the next generation's.

    Args:
        number: Rises with every change; groups and keys of an old number must not be used again.
        rank, world_size: This worker's place.
        start_step: The step to go on at, the number of steps that the run has finished.
        start_sample: Samples of the global order that those steps used.
        members: In rank order.
        source: The rank whose weights count at `start_step`; the others take them over.
        run_id: The same for all generations of a run.
    """

    number: int
    rank: int
    world_size: int
    start_step: int
    start_sample: int
    members: tuple[GenerationMember, ...]
    source: int
    run_id: str

    @classmethod
    def from_json(cls, value: Any) -> Generation:
        """A generation as the coordinator must describe it; ProtocolViolation if it does not."""
        try:
            return _GENERATION.validate_python(value)
        except ValueError as error:
            raise ProtocolViolation(f"coordinator: expected a generation, got {value!r:.200}") from error

    def first_sample(self, step: int, batch_size: int) -> int:
        """The first global sample of a step: those of the step are the next batch_size * world_size."""
        return self.start_sample + (step - self.start_step) * batch_size * self.world_size

    def samples(self, step: int, batch_size: int) -> range:
        """The global samples of this rank in a step: every world_size-th, from its rank on."""
        first = self.first_sample(step, batch_size)
        return range(first + self.rank, first + batch_size * self.world_size, self.world_size)


_GENERATION = TypeAdapter(Generation)


class MembershipState:
    """One process's membership of a run; `settings` to `on_note` as of `Membership`.

    `coordinator` is its address, for messages. `clock` gives seconds of which only differences count, `new_session` a
    name that no process had before; `random` spreads the repetitions of requests.
    """

    def __init__(
        self,
        worker_id: str,
        coordinator: str,
        *,
        address: str = "",
        settings: Mapping[str, Any],
        defaults: Mapping[str, Any],
        lockstep: bool,
        step: int,
        samples: int,
        patience_s: float,
        on_note: Callable[[str], None],
        clock: Callable[[], float],
        new_session: Callable[[], str],
        random: Random,
    ) -> None:
        self.worker_id = worker_id
        self.config: dict[str, Any] = {}  # what the run does, once agreed
        self.generation: Generation | None = None  # None before it joined
        self.session = ""
        self.closed = False  # it has left; what is under way ends
        self._coordinator = coordinator
        self._address = address
        self._settings = {**settings, "lockstep": lockstep}
        self._defaults = dict(defaults)
        self._patience_s = patience_s
        self._on_note = on_note
        self._clock = clock
        self._new_session = new_session
        self._random = random
        self._step = step
        self._weights = (step, samples)  # The step and samples that this worker's weights have learned.
        self._run_to = 0
        self._changing = self._broken = False
        self._lost = ""
        self._heartbeat_s = 30.0
        self._lost_s = 5.0

    @property
    def changing(self) -> bool:
        """As of the last answer."""
        return self._changing or bool(self._lost)

    @property
    def broken(self) -> bool:
        """As of the last answer."""
        return self._broken or bool(self._lost)

    def agree(self) -> Operation[dict[str, Any]]:
        """As `Membership.agree`."""
        wanted = {**self._defaults, **self._settings}
        answer = yield from self._call("/v1/config", {"settings": wanted})
        try:
            self._heartbeat_s, self._lost_s = float(answer["heartbeat_s"]), float(answer["lost_s"])
            config = {**wanted, **answer["config"]}
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolViolation(f"coordinator: expected a configuration, got {answer!r:.200}") from error
        for key, value in self._settings.items():
            if value is not None and config[key] != value:
                self._on_note(f"{key}: the run's {config[key]!r} holds, not {value!r} as given to {self.worker_id}")
        self.config = config
        return dict(config)

    def join(self) -> Operation[Generation]:
        """As `Membership.join`."""
        if not self.config:
            yield from self.agree()
        self.session, self._lost, self._run_to = self._new_session(), "", 0
        body = {**self._me(), "address": self._address, "step": self._weights[0], "samples": self._weights[1]}
        unsure_until, noted = self._clock() + self._heartbeat_s + 2 * self._lost_s, ""
        wait_s = FIRST_WAIT_S
        while True:
            try:
                answer = yield from self._call("/v1/members/join", {**body, "wait_s": wait_s}, wait_s)
            except RemoteError as error:
                if error.code == "unsure" and self._clock() < unsure_until and not self.closed:
                    yield Pause(0.5)
                    continue
                if error.code in ("duplicate", "unsure"):
                    raise DuplicateWorkerError(str(error).partition(f"{error.code}: ")[2] or str(error)) from error
                if error.code == "expelled":
                    continue
                raise
            if "generation" in answer:
                return self._enter(answer["generation"])
            waiting = answer.get("waiting", {})
            text = f"waiting for a generation: {waiting.get('members')} here, {waiting.get('waits_for')} waited for"
            if text != noted:
                self._on_note(noted := text)
            wait_s = WAIT_S

    def boundary(
        self, step: int, *, stop: bool | None = None, broken: bool = False, holds: bool = True
    ) -> Operation[Generation]:
        """As `Membership.boundary`."""
        generation = self.generation
        if generation is None:
            raise MembershipLostError(f"worker {self.worker_id!r}: in no generation yet. Call join() first.")
        self._step = step
        if holds:
            self._weights = (step, generation.first_sample(step, int(self.config.get("batch_size") or 1)))
        if self._lost:
            raise MembershipLostError(self._lost)
        stop = (self.changing if stop is None else stop) and step >= self._run_to
        while stop or broken:
            body = {**self._me(), "generation": generation.number, "step": step, "broken": broken, "wait_s": WAIT_S}
            body |= {"held_step": self._weights[0], "held_samples": self._weights[1]}
            try:
                answer = yield from self._call("/v1/members/ready", body, WAIT_S)
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
        return generation

    def generations(self) -> Operation[Any]:
        """All generations of the run, as the coordinator's log has them."""
        return (yield from self._call("/v1/log", None))["generations"]

    def heartbeats(self) -> Operation[None]:
        """Shows the coordinator that this worker lives, and learns of changes, until the session ends."""
        session, pause_s = self.session, 0.1
        wait_s = min(self._heartbeat_s, HEARTBEAT_WAIT_S)
        while not self.closed and self.session == session and self.generation is not None:
            number = self.generation.number
            body = {**self._me(), "generation": number, "step": self._step}
            body |= {"changing": self._changing, "broken": self._broken, "wait_s": wait_s}
            answer: Mapping[str, Any] = {}
            try:
                answer = yield Request("/v1/members/heartbeat", body, wait_s)
                pause_s = 0.1
            except RemoteError as error:
                if error.code == "expelled" and self.session == session:
                    self._lost = str(error)
                    return
            except NetworkError:
                pass  # Training goes on without the coordinator.
            if answer and self.generation.number == number:
                self._changing = answer.get("changing") is True
                self._broken = answer.get("broken") is True
            if not answer or self._changing:
                # While a change is awaited at a boundary, news that it was called off may take this long.
                yield Pause(pause_s)
                pause_s = min(RETRY_S, 2 * pause_s) if not answer else 0.1

    def leave(self, *, finished: bool = False) -> Operation[None]:
        """As `Membership.leave`; raises where the coordinator could not be told."""
        number = self.generation.number if self.generation is not None else 0
        body = {**self._me(), "generation": number, "step": self._step, "finished": finished}
        try:
            if finished:
                yield from self._call("/v1/members/leave", body)
        finally:
            self.closed = True
        if not finished:
            yield Request("/v1/members/leave", body)

    def _me(self) -> dict[str, Any]:
        return {"worker_id": self.worker_id, "session": self.session}

    def _enter(self, value: Any) -> Generation:
        generation = Generation.from_json(value)
        if self.generation is None or self.generation.number != generation.number:
            self._step, self._run_to = generation.start_step, 0
            self._on_note(
                f"generation {generation.number}: rank {generation.rank} of {generation.world_size} "
                f"from step {generation.start_step}"
            )
        self.generation, self._changing, self._broken = generation, False, False
        return generation

    def _call(self, path: str, body: Mapping[str, Any] | None, wait_s: float = 0.0) -> Operation[Any]:
        """One request, repeated with back-off while the coordinator is away."""
        deadline, tried, noted = self._clock() + self._patience_s, 0, False
        while True:
            if self.closed:
                raise MembershipLostError(f"worker {self.worker_id!r}: it has left the run.")
            try:
                return (yield Request(path, body, wait_s))
            except NetworkError as error:
                if isinstance(error, RemoteError) and error.status != 503:
                    raise
                tried += 1
                pause_s = backoff_s(tried, 0.05, MAX_PAUSE_S, chance=self._random)
                if self._clock() + pause_s > deadline:
                    raise CoordinatorUnreachableError(
                        f"coordinator {self._coordinator}: no answer for {self._patience_s:g} s. Start it with "
                        f"`forebay coordinate --listen {self._coordinator}`, or say where it is: --coordinator, "
                        f"FOREBAY_COORDINATOR. Last: {error}"
                    ) from error
                if not noted and tried > 4:
                    self._on_note(
                        f"coordinator {self._coordinator} does not answer, asking for {self._patience_s:g} s. To start "
                        f"one: forebay coordinate --listen {self._coordinator}"
                    )
                    noted = True
            yield Pause(pause_s)
