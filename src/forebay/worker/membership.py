"""A worker's place in a run: its rank and world size come from the coordinator, and stay true while it trains.

membership = Membership("127.0.0.1:8000", "worker-1", settings={"batch_size": 8}, address=meeting.address)
config = membership.agree()                     # what all workers of the run do; then build model and data
generation = membership.join()                  # blocks until enough workers are there
while step < config["num_steps"]:
    ...                                         # samples generation.samples(step, batch_size)
    step += 1
    generation = membership.boundary(step)      # cheap; blocks only while a new generation forms
membership.leave(finished=True)
"""

from __future__ import annotations

import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.errors import LeaseError, NetworkError, ProtocolViolation, UsageError
from forebay.network.client import Client, RemoteError, parse_address

if TYPE_CHECKING:
    from forebay.network.identity import Identity

# How long one question waits for its answer; a worker that is told to stop waits so long at most.
WAIT_S = 2.0
FIRST_WAIT_S = 0.3
MAX_WAIT_S = 20.0
LEAVE_S = 3.0


class CoordinatorGoneError(NetworkError):
    """The coordinator did not answer for as long as the worker was told to wait."""


class DuplicateWorkerError(LeaseError):
    """Another live process is in the run under this worker id."""


class MembershipLostError(LeaseError):
    """This process is no member any more: it was taken for dead, or its id was taken over."""


@dataclass(frozen=True)
class Member:
    """One worker of a generation; `address` is what it gave as the place where its peers meet it, "host:port" or ""."""

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
    members: tuple[Member, ...]
    source: int
    run_id: str

    def first_sample(self, step: int, batch_size: int) -> int:
        """The first global sample of a step: those of the step are the next batch_size * world_size."""
        return self.start_sample + (step - self.start_step) * batch_size * self.world_size

    def samples(self, step: int, batch_size: int) -> range:
        """The global samples of this rank in a step: every world_size-th, from its rank on."""
        first = self.first_sample(step, batch_size)
        return range(first + self.rank, first + batch_size * self.world_size, self.world_size)


class Membership:
    """One process's membership of a run. Call it from one thread; `changing` may be read from any.

    Args:
        coordinator: "host:port" or an http(s):// URL.
        worker_id: The worker's name in the run; generated where None. A restart under the same id gets its rank back.
        address: Where peers meet this worker ("host:port"), handed out to them; "" where they need not.
        settings: What this worker would do (dataset_type, dataset_name, tokenizer_name, batch_size, seq_len,
            num_steps, seed …). The coordinator's own come first; what it does not say, the run's first worker does.
        defaults: The same, as nobody chose it: where the run has another, nothing is said.
        lockstep: Whether workers step together by a collective; then the source's weights count. Without, each
            catches up to the same step before a generation ends.
        step, samples: Where this worker's checkpoint stands, if it has one: both count only where no worker of
            the run's last generation is left.
        identity: For a coordinator with --network; None speaks plain HTTP.
        patience_s: How long a coordinator that does not answer is waited for.
        on_note: Told in a line what a person may want to know.
    """

    def __init__(
        self,
        coordinator: str,
        worker_id: str | None = None,
        *,
        address: str = "",
        settings: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        lockstep: bool = True,
        step: int = 0,
        samples: int = 0,
        identity: Identity | None = None,
        patience_s: float = 120.0,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self.worker_id = worker_id or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self.config: dict[str, Any] = {}
        self._client = Client(identity)
        self._at = _address(coordinator, identity)
        self._address = address
        self._settings = {**(settings or {}), "lockstep": lockstep}
        self._defaults = dict(defaults or {})
        self._patience_s = patience_s
        self._on_note = on_note or (lambda text: None)
        self._lock = threading.Lock()
        self._session = ""
        self._generation: Generation | None = None
        self._step = step
        self._held = (step, samples)
        self._run_to = 0
        self._changing = self._broken = False
        self._lost = ""
        self._heartbeat_s = 30.0
        self._lost_s = 5.0
        self._closing = threading.Event()
        self._beats: threading.Thread | None = None

    @property
    def generation(self) -> Generation:
        """The generation that this worker is in.

        Raises:
            MembershipLostError: Before `join`.
        """
        if self._generation is None:
            raise MembershipLostError(f"worker {self.worker_id!r}: in no generation yet. Call join() first.")
        return self._generation

    @property
    def changing(self) -> bool:
        """Whether a new generation is wanted: stop at the next boundary, all ranks at the same one."""
        return self._changing or bool(self._lost)

    @property
    def broken(self) -> bool:
        """Whether a rank of this generation says that its step cannot be finished."""
        return self._broken or bool(self._lost)

    def agree(self) -> dict[str, Any]:
        """What the run does: this worker's settings, with the coordinator's in their place where it has any.

        Raises:
            CoordinatorGoneError: After `patience_s` without an answer.
        """
        wanted = {**self._defaults, **self._settings}
        answer = self._call("/v1/config", {"settings": wanted})
        self._heartbeat_s, self._lost_s = float(answer["heartbeat_s"]), float(answer["lost_s"])
        config = {**wanted, **answer["config"]}
        for key, given in self._settings.items():
            if given is not None and config[key] != given:
                self._on_note(f"{key}: the run's {config[key]!r} holds, not {given!r} as given to {self.worker_id}")
        self.config = config
        return dict(config)

    def join(self) -> Generation:
        """Becomes a member; returns when a generation with it begins, which may take until enough workers are there.

        Raises:
            DuplicateWorkerError: If another live process has this worker id.
            CoordinatorGoneError: After `patience_s` without an answer.
        """
        if not self.config:
            self.agree()
        self._end_beats()
        self._session, self._lost, self._run_to = secrets.token_hex(16), "", 0
        body = {"address": self._address, "step": self._held[0], "samples": self._held[1]}
        unsure_until, said = time.monotonic() + self._heartbeat_s + 2 * self._lost_s, ""
        wait_s = FIRST_WAIT_S
        while True:
            try:
                answer = self._call("/v1/members/join", {**self._me(), **body, "wait_s": wait_s}, wait_s)
            except RemoteError as error:
                if error.code == "unsure" and time.monotonic() < unsure_until and not self._closing.wait(0.5):
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
            if text != said:
                self._on_note(said := text)
            wait_s = WAIT_S

    def boundary(self, step: int, *, stop: bool | None = None, broken: bool = False, holds: bool = True) -> Generation:
        """To be called between steps, with the number of steps finished. The generation to go on in.

        Where its number is another, go on at its `start_step` and `start_sample`, with its source's weights.
        Without a change it returns at once, no network.

        Args:
            stop: Whether to stop here for a change. None asks `changing`; in lockstep give what all ranks agreed on
                in the step's collective (Collective.average does), so that all stop at the same step.
            broken: The step under way failed, as a peer is gone: stops, and says so.
            holds: False where this worker could not take over the weights of `step`: its own are the last it had.

        Raises:
            MembershipLostError: If this worker was expelled: its steps since do not count. Call `join` again.
            CoordinatorGoneError: After `patience_s` without an answer, where one is needed.
        """
        generation = self.generation
        with self._lock:
            self._step = step
        if holds:
            self._held = (step, generation.first_sample(step, int(self.config.get("batch_size") or 1)))
        if self._lost:
            raise MembershipLostError(self._lost)
        stop = (self.changing if stop is None else stop) and step >= self._run_to
        while stop or broken:
            body = {**self._me(), "generation": generation.number, "step": step, "broken": broken, "wait_s": WAIT_S}
            body |= {"held_step": self._held[0], "held_samples": self._held[1]}
            try:
                answer = self._call("/v1/members/ready", body, WAIT_S)
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

    def past(self) -> list[tuple[int, int, int]]:
        """The steps before this generation as (start, stop, world size), those that count, in order and without a gap.

        Raises:
            CoordinatorGoneError: After `patience_s` without an answer.
        """
        spans: list[tuple[int, int, int]] = []
        for one in self._call("/v1/log", None)["generations"]:
            start = int(one["start_step"])
            spans = [(a, min(b, start), world) for a, b, world in spans if a < start]
            if int(one["number"]) >= self.generation.number:
                break
            spans.append((start, self.generation.start_step, len(one["workers"])))
        return [span for span in spans if span[0] < span[1]]

    def leave(self, *, finished: bool = False) -> None:
        """Ends the membership; never raises for a coordinator that is away. May be called twice, and from any thread.

        Args:
            finished: All steps are done: the others need no new generation.
        """
        if self._closing.is_set():
            return
        number = self._generation.number if self._generation is not None else 0
        body = {**self._me(), "generation": number, "step": self._step, "finished": finished}
        self._closing.set()
        if self._session:
            try:
                self._client.request_json(self._at, "POST", "/v1/members/leave", body, timeout_s=LEAVE_S)
            except NetworkError as error:
                self._on_note(f"leaving unsaid, the coordinator is away: {error}")
        self._end_beats()
        self._client.close()

    def _me(self) -> dict[str, Any]:
        return {"worker_id": self.worker_id, "session": self._session}

    def _enter(self, told: dict[str, Any]) -> Generation:
        """Takes up what the coordinator says; the heartbeat begins with the first."""
        try:
            members = tuple(Member(str(m["worker_id"]), int(m["rank"]), str(m["address"])) for m in told["members"])
            keys = ("number", "rank", "world_size", "start_step", "start_sample", "source")
            counts = {key: int(told[key]) for key in keys}
            generation = Generation(members=members, run_id=str(told["run_id"]), **counts)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolViolation(f"coordinator {self._at}: not a generation: {told!r:.200}") from error
        with self._lock:
            if self._generation is None or self._generation.number != generation.number:
                self._step, self._run_to = generation.start_step, 0
                self._on_note(
                    f"generation {generation.number}: rank {generation.rank} of {generation.world_size} "
                    f"from step {generation.start_step}"
                )
            self._generation, self._changing, self._broken = generation, False, False
        if self._beats is None:
            self._beats = threading.Thread(target=self._beat, args=(self._session,), name="membership", daemon=True)
            self._beats.start()
        return generation

    def _beat(self, session: str) -> None:
        """Tells the coordinator that this worker lives, and hears of changes, until the session ends."""
        pause_s = 0.1
        wait_s = min(self._heartbeat_s, MAX_WAIT_S)
        while not self._closing.is_set() and self._session == session:
            with self._lock:
                number, step, changing, broken = self.generation.number, self._step, self._changing, self._broken
            body = {**self._me(), "session": session, "generation": number, "step": step}
            body |= {"changing": changing, "broken": broken}
            try:
                answer = self._ask("/v1/members/heartbeat", {**body, "wait_s": wait_s}, wait_s)
                pause_s = 0.1
            except RemoteError as error:
                if error.code == "expelled" and self._session == session:
                    self._lost = str(error)
                    return
                answer = {}
            except NetworkError:
                answer = {}  # training goes on without the coordinator
            with self._lock:
                if answer and self.generation.number == number:
                    self._changing = answer.get("changing") is True
                    self._broken = answer.get("broken") is True
            if not answer or self._changing:
                # While a change is awaited at a boundary, news of its being called off may take this long.
                self._closing.wait(pause_s)
                pause_s = min(2.0, 2 * pause_s) if not answer else 0.1

    def _end_beats(self) -> None:
        beats, self._beats, self._session = self._beats, None, ""
        if beats is not None and beats is not threading.current_thread() and self._closing.is_set():
            beats.join(2.0)

    def _ask(self, path: str, body: dict[str, Any] | None, wait_s: float = 0.0) -> dict[str, Any]:
        method = "GET" if body is None else "POST"
        answer, _ = self._client.request_json(self._at, method, path, body, timeout_s=wait_s + 10)
        if not isinstance(answer, dict):
            raise ProtocolViolation(f"coordinator {self._at}{path}: expected an object, got {answer!r:.80}")
        return answer

    def _call(self, path: str, body: dict[str, Any] | None, wait_s: float = 0.0) -> dict[str, Any]:
        """One exchange, repeated with back-off while the coordinator is away."""
        deadline, pause_s, said = time.monotonic() + self._patience_s, 0.05, False
        while True:
            if self._closing.is_set():
                raise MembershipLostError(f"worker {self.worker_id!r}: it has left the run.")
            try:
                return self._ask(path, body, wait_s)
            except NetworkError as error:
                if isinstance(error, RemoteError) and error.status != 503:
                    raise
                if time.monotonic() + pause_s > deadline:
                    raise CoordinatorGoneError(
                        f"coordinator {self._at}: no answer for {self._patience_s:g} s. Start it with "
                        f"`forebay coordinate --listen {self._at}`, or say where it is: --coordinator, "
                        f"FOREBAY_COORDINATOR. Last: {error}"
                    ) from error
                if not said and pause_s > 0.5:
                    self._on_note(
                        f"coordinator {self._at} does not answer, asking for {self._patience_s:g} s. To start one: "
                        f"forebay coordinate --listen {self._at}"
                    )
                    said = True
            self._closing.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2.0, 2 * pause_s)

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.leave()


def _address(coordinator: str, identity: Identity | None) -> str:
    """`host:port` of what a person gave as the coordinator."""
    scheme, mark, rest = coordinator.partition("://")
    wanted = "http" if identity is None else "https"
    if mark and scheme.lower() != wanted:
        how = "it needs this node's directory: --network" if identity is None else "with a network it is https"
        raise UsageError(f"coordinator: expected {wanted}://HOST:PORT, got {coordinator!r}: {how}.")
    address = (rest if mark else coordinator).rstrip("/")
    parse_address(address)
    return address
