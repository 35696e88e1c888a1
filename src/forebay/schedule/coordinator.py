"""The coordinator as a server: gives workers their rank and world size, and what the run does.

HTTP and JSON around `membership.apply` and the roster; the doors are in /openapi.json. A worker waits by long poll,
so that it hears of a change within milliseconds though it asks twice a minute, and so that the end of its process
is noticed by the connection that closes. Weights, data and gradients never come here.

Over mutual TLS a session also belongs to the certificate that began it. Over plain HTTP whoever reaches the port may
join: the session's random name is all that keeps one worker from speaking for another.

What it costs: a thread and a connection or two a worker; one fsync for each change and each heartbeat with news.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import StateError
from forebay.network.exchange import BadRequestError, Request, Response, error_response, json_response
from forebay.network.https import Server
from forebay.network.metrics import Metric, gauge, metrics_response
from forebay.schedule.doors import ADDRESS, NAME, SESSION, count_of, describe, text_of, wait_of, worker_of
from forebay.schedule.members import (
    Agree,
    Disconnect,
    Event,
    Formed,
    Heartbeat,
    Join,
    Leave,
    Note,
    Ready,
    Refuse,
    Rules,
    Tick,
    Waits,
)
from forebay.schedule.membership import apply
from forebay.schedule.roster import Roster

if TYPE_CHECKING:
    from forebay.network.identity import Identity

MAX_WORKERS = 1024
MAX_SETTINGS = 64
# How often a waiting request looks whether its peer is still there.
LOOK_S = 0.25
TICK_S = 0.2
# Ticks that are later than this mean that this process or its machine was stopped, and could hear nobody.
STOPPED_S = 1.0

log = logging.getLogger(__name__)


class Coordinator:
    """Coordinates one run; `start` it once, `stop` it as often as you like.

    Args:
        host, port: Where it listens; port 0 takes a free one.
        state_dir: Holds the run's state; the same directory resumes the run. None: in memory.
        config: What all workers do, whatever they were told themselves: dataset_name, batch_size, num_steps …
        identity: With one it speaks mutual TLS; None is plain HTTP.
        on_note: Told in a line whatever changes.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        state_dir: str | Path | None = None,
        rules: Rules | None = None,
        config: Mapping[str, Any] | None = None,
        identity: Identity | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self.rules = rules or Rules()
        self.told = dict(config or {})
        self.state_dir = state_dir
        self._on_note = on_note or (lambda text: None)
        self._changed = threading.Condition()
        self._stopping = False
        self._began = self._ran_at = time.monotonic()
        self._stopped_s = 0.0
        self._server = Server(identity, host, port, self._answer, max_connections=2 * MAX_WORKERS)
        self._roster: Roster | None = None
        self._unwritten: deque[Event] = deque()  # What must be applied, once the disk takes it.
        self._ticker = threading.Thread(target=self._run_ticks, name="coordinator-clock", daemon=True)
        self._doors: dict[tuple[str, str], Callable[[Request, dict[str, Any]], Response]] = {
            ("GET", "/v1/config"): lambda request, body: json_response(self._config()),
            ("POST", "/v1/config"): self._agree,
            ("GET", "/v1/generation"): lambda request, body: json_response(self._generation_now()),
            ("GET", "/v1/status"): lambda request, body: json_response(self.status()),
            ("GET", "/v1/log"): self._log_of,
            ("POST", "/v1/members/join"): self._join,
            ("POST", "/v1/members/ready"): self._ready,
            ("POST", "/v1/members/heartbeat"): self._heartbeat,
            ("POST", "/v1/members/leave"): self._leave,
            ("GET", "/openapi.json"): lambda request, body: json_response(describe()),
            ("GET", "/metrics"): lambda request, body: metrics_response(self._metrics()),
        }

    @property
    def address(self) -> str:
        """`host:port` where workers reach it."""
        return self._server.address

    def start(self) -> None:
        """Opens or resumes the run and serves.

        Raises:
            StateError: If the state directory holds a run that was told otherwise, or another coordinator has it.
            NetworkError: If the port cannot be had.
        """
        self._roster = Roster(self.state_dir)
        try:
            self._state, self.run_id = self._roster.load(self.rules, self.told, self._now(), secrets.token_hex(8))
            self._server.start()
        except BaseException:
            self._roster.close()
            raise
        self._ticker.start()

    def stop(self) -> None:
        """Answers who waits, then closes everything."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._server.drain(2.0)
        self._server.close()
        if self._ticker.ident is not None:
            self._ticker.join(5.0)
        with self._changed:
            if self._roster is not None:
                self._roster.close()

    def __enter__(self) -> Coordinator:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def done(self) -> bool:
        """Whether the last step is done and all workers have left."""
        with self._changed:
            return self._state.done

    def status(self) -> dict[str, Any]:
        """What the run has reached, and who is in it."""
        with self._changed:
            state, now = self._state, self._now()
            members = [
                {
                    "worker_id": member.worker_id,
                    "rank": state.generation.rank_of(member.session) if state.generation is not None else None,
                    "step": member.step,
                    "address": member.address,
                    "seen_s": 0.0 if member.polling else round(now - member.seen_at, 3),
                    "ready": member.ready,
                    "lost": member.lost_at is not None,
                }
                for member in sorted(state.members.values(), key=lambda m: m.seat)
            ]
            return {
                "run_id": self.run_id,
                "up_s": round(now - self._began, 3),
                "min_workers": self.rules.min_workers,
                "generation": self._generation_now(),
                "changing": state.changing,
                "step": state.reached,
                "done": state.done,
                "members": members,
                "config": dict(state.config),
                "gaps": self._open().gaps(),
            }

    def _metrics(self) -> list[Metric]:
        state = self._state
        return [
            *self._server.metrics(),
            gauge("forebay_members", "Workers in the run.", len(state.members)),
            gauge("forebay_step", "The last step that all finished.", state.reached),
            gauge("forebay_generation", "Its number.", state.generation.number if state.generation else 0),
        ]

    # The state and its changes; all under the lock.

    def _open(self) -> Roster:
        assert self._roster is not None  # no request comes before start
        return self._roster

    def _now(self) -> float:
        """The time by which members are late: it stands still while the coordinator does, as nobody is heard then."""
        now = time.monotonic()
        if now - self._ran_at > TICK_S + STOPPED_S:
            self._stopped_s += now - self._ran_at
        self._ran_at = now
        return now - self._stopped_s

    def _tell(self, event: Event) -> Refuse | None:
        """Applies an event; what it changes is on disk, and told to who waits, when this returns."""
        before = self._state
        state, actions = apply(before, event, self._now())
        refused = next((action for action in actions if isinstance(action, Refuse)), None)
        self._open().save(state, [action for action in actions if not isinstance(action, Refuse)], self.run_id)
        self._state = state
        for action in actions:
            if isinstance(action, Note):
                self._on_note(action.text)
            elif isinstance(action, Formed):
                formed = action.generation
                names = ", ".join(place.worker_id for place in formed.places)
                self._on_note(
                    f"generation {formed.number} from step {formed.start_step}: {len(formed.places)} workers: {names}"
                )
        old, new = ((s.generation, s.changing, s.broken, s.run_to) for s in (before, state))
        if old != new:
            self._changed.notify_all()
        return refused

    def _tell_surely(self, event: Event) -> None:
        """Applies an event now, or as soon as it can be written."""
        try:
            self._tell(event)
        except StateError:
            self._unwritten.append(event)

    def _run_ticks(self) -> None:
        fault = ""
        with self._changed:
            while not self._stopping:
                self._changed.wait(TICK_S)
                try:
                    while self._unwritten and not self._stopping:
                        self._tell(self._unwritten[0])
                        self._unwritten.popleft()
                    if not self._stopping:
                        self._tell(Tick())
                    fault = ""
                except StateError as error:  # Repeated until it can be written.
                    if str(error) != fault:
                        log.error("%s", error)
                    fault = str(error)

    def _wait(self, request: Request, worker_id: str, session: str, wait_s: float, until: Callable[[], bool]) -> None:
        """Waits under the lock until something is so, or time is up; notices a peer that hangs up."""
        deadline = time.monotonic() + wait_s
        self._tell(Waits(worker_id, session, +1))
        try:
            while not until() and not self._stopping and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, LOOK_S))
                if request.gone():
                    self._tell_surely(Disconnect(worker_id, session))
                    return
        finally:
            if not self._stopping:
                self._tell_surely(Waits(worker_id, session, -1))

    # Answers.

    def _answer(self, request: Request) -> Response:
        door = self._doors.get((request.method, request.path))
        if door is None:
            return error_response(
                404, "not_found", f"{request.method} {request.path}: no such door. See /openapi.json."
            )
        body = request.json() if request.method == "POST" else {}
        if not isinstance(body, dict):
            raise BadRequestError(f"body: expected a JSON object, got {type(body).__name__}")
        with self._changed:
            if self._stopping:
                return error_response(503, "stopping", "the coordinator is stopping; ask again after its restart.")
            worker_id = body.get("worker_id")
            member = self._state.members.get(worker_id) if isinstance(worker_id, str) else None
            if member is not None and member.session == body.get("session") and member.peer_id != request.peer.peer_id:
                return error_response(403, "not_yours", f"worker {worker_id!r}: the session is another peer's.")
            try:
                return door(request, body)
            except StateError as error:
                return error_response(503, "state", str(error))

    def _config(self) -> dict[str, Any]:
        rules = self.rules
        return {
            "run_id": self.run_id,
            "config": dict(self._state.config),
            "told": dict(self._state.told),
            "min_workers": rules.min_workers,
            "heartbeat_s": rules.heartbeat_s,
            "lost_s": rules.lost_s,
        }

    def _agree(self, request: Request, body: dict[str, Any]) -> Response:
        settings = body.get("settings", {})
        plain = (str, int, float, bool, type(None))
        if (
            not isinstance(settings, dict)
            or len(settings) > MAX_SETTINGS
            or not all(isinstance(value, plain) and len(str(value)) <= 1000 for value in settings.values())
        ):
            raise BadRequestError(f"settings: expected an object of at most {MAX_SETTINGS} plain values")
        size = settings.get("batch_size", 1)
        if type(size) is not int or size < 1:
            raise BadRequestError(f"settings: expected batch_size of at least 1, got {size!r}")
        self._tell(Agree(settings))
        return json_response(self._config())

    def _join(self, request: Request, body: dict[str, Any]) -> Response:
        worker_id, session = text_of(body, "worker_id", NAME), text_of(body, "session", SESSION)
        if len(self._state.members) >= MAX_WORKERS and worker_id not in self._state.members:
            return error_response(503, "full", f"the coordinator takes {MAX_WORKERS} workers at a time")
        address = text_of({"address": "", **body}, "address", ADDRESS)
        step, samples = count_of(body, "step"), count_of(body, "samples")
        refused = self._tell(Join(worker_id, session, address, request.peer.peer_id, step, samples))
        if refused is not None:
            return error_response(409, refused.code, refused.message)

        def settled() -> bool:
            member = self._state.members.get(worker_id)
            return member is None or member.session != session or self._place(session) is not None

        self._wait(request, worker_id, session, wait_of(body), settled)
        return self._told(worker_id, session, 0)

    def _ready(self, request: Request, body: dict[str, Any]) -> Response:
        worker_id, session, known = worker_of(body)
        step = count_of(body, "step")
        held = (count_of(body, "held_step"), count_of(body, "held_samples")) if "held_step" in body else None
        refused = self._tell(Ready(worker_id, session, known, step, body.get("broken") is True, held))
        if refused is not None:
            return error_response(409, refused.code, refused.message)

        def settled() -> bool:
            member, generation = self._state.members.get(worker_id), self._state.generation
            if member is None or member.session != session or generation is None:
                return True
            return generation.number != known or not self._state.changing or step < self._state.run_to

        self._wait(request, worker_id, session, wait_of(body), settled)
        return self._told(worker_id, session, known)

    def _heartbeat(self, request: Request, body: dict[str, Any]) -> Response:
        worker_id, session, known = worker_of(body)
        refused = self._tell(Heartbeat(worker_id, session, known, count_of(body, "step")))
        if refused is not None:
            return error_response(409, refused.code, refused.message)
        believed = (body.get("changing") is True, body.get("broken") is True)

        def news() -> bool:
            member, generation = self._state.members.get(worker_id), self._state.generation
            if member is None or member.session != session or generation is None or generation.number != known:
                return True
            return (self._state.changing, self._state.broken) != believed

        self._wait(request, worker_id, session, wait_of(body), news)
        if (member := self._state.members.get(worker_id)) is None or member.session != session:
            return error_response(409, "expelled", f"worker {worker_id!r}: given up or replaced. Join again.")
        return json_response({"changing": self._is_changing(known), "broken": self._is_broken(known)})

    def _leave(self, request: Request, body: dict[str, Any]) -> Response:
        worker_id, session, known = worker_of(body)
        self._tell(Leave(worker_id, session, known, count_of(body, "step"), body.get("finished") is True))
        return json_response({"left": True})

    def _log_of(self, request: Request, body: dict[str, Any]) -> Response:
        """Who trained on what: of a step, of a sample, or all generations."""
        for key, ask in (("step", self._open().step), ("sample", self._open().sample)):
            if key in request.query:
                text = request.query[key]
                if not (text.isascii() and text.isdigit() and len(text) < 19):
                    raise BadRequestError(f"{key}: expected an integer from 0, got {text[:80]!r}")
                found = ask(int(text))
                return (
                    error_response(404, "not_found", f"{key} {text}: not trained yet")
                    if found is None
                    else json_response(found)
                )
        return json_response(
            {"run_id": self.run_id, "generations": self._open().generations(), "gaps": self._open().gaps()}
        )

    def _is_changing(self, known: int) -> bool:
        """Whether a member of generation `known` should stop at its next boundary."""
        generation = self._state.generation
        return self._state.changing or generation is None or generation.number != known

    def _is_broken(self, known: int) -> bool:
        """Whether the step under way in generation `known` cannot be finished."""
        generation = self._state.generation
        return self._state.broken or generation is None or generation.number != known

    def _place(self, session: str) -> int | None:
        return self._state.generation.rank_of(session) if self._state.generation is not None else None

    def _told(self, worker_id: str, session: str, known: int) -> Response:
        """What a member that waits is told: its generation, how far to run on, or to ask again."""
        state, rank = self._state, self._place(session)
        member = state.members.get(worker_id)
        if member is None or member.session != session:
            return error_response(409, "expelled", f"worker {worker_id!r}: given up or replaced. Join again.")
        if rank is not None and state.generation is not None:
            if state.generation.number != known or not state.changing:
                return json_response({"generation": {**self._generation_now(), "rank": rank}})
            if member.step < state.run_to:
                return json_response({"run_to": state.run_to})
        waits_for = sum(not m.ready for m in state.members.values()) if state.generation else self.rules.min_workers
        return json_response({"waiting": {"members": len(state.members), "waits_for": waits_for}})

    def _generation_now(self) -> dict[str, Any]:
        generation = self._state.generation
        if generation is None:
            return {"run_id": self.run_id, "number": 0, "world_size": 0, "members": []}
        return {
            "run_id": self.run_id,
            "number": generation.number,
            "world_size": len(generation.places),
            "start_step": generation.start_step,
            "start_sample": generation.start_sample,
            "source": generation.source,
            "members": [
                {"worker_id": place.worker_id, "rank": rank, "address": place.address}
                for rank, place in enumerate(generation.places)
            ],
        }
