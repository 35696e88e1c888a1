"""The coordinator as a server: gives workers their rank and world size, and what the run does.

HTTP and JSON around `membership.apply` and the roster; the routes are in /openapi.json. A worker waits by long poll,
so that it learns of a change within milliseconds though it asks twice a minute, and so that the end of its process
is noticed by the connection that closes. Weights, data and gradients never come here.

Over mutual TLS a session also belongs to the certificate that began it, and a member needs the role worker. Over
plain HTTP whoever reaches the port may join: the session's random name is all that keeps one worker from speaking for
another.

Costs: a connection or two and a waiting task a worker; one fsync for each change and each heartbeat with news.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Query, Request, Response

from forebay.coordinator.membership import REQUESTS, apply, config_reply, generation_reply, is_due, reply
from forebay.coordinator.messages import (
    Disconnect,
    Event,
    Formed,
    Heartbeat,
    Join,
    Leave,
    LogLine,
    MeetRequest,
    MemberMessage,
    PollChange,
    ProposeConfig,
    Ready,
    Refuse,
    Rules,
    Tick,
)
from forebay.coordinator.store import RunStore
from forebay.errors import StateError
from forebay.network.app import ApiError, JsonResponse, Metric, gauge, make_app, peer_of, role, wait_until
from forebay.network.limits import Limits, TokenBucket
from forebay.network.messages import ConfigRequest, MeetReply
from forebay.network.server import Server

if TYPE_CHECKING:
    from forebay.network.discovery import Discovery
    from forebay.network.pki.identity import Identity

MAX_WORKERS = 1024
REJOIN_S = 600.0
MAX_VALUES = 64
TICK_S = 0.2
# Ticks that are later than this mean that this process or its machine was stopped, and could hear nobody.
STOPPED_S = 1.0

_SUMMARIES = {
    "join": "Join: {generation} once one with it begins, or {waiting}: ask again.",
    "ready": "Stopped at a boundary: {generation}, {run_to} to catch up, or {waiting}.",
    "heartbeat": "Alive; {changing} says whether to stop at the next boundary.",
    "leave": "Not a member any more.",
}
Count = Annotated[int | None, Query(ge=0, lt=10**18)]
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
        self._stopping = False
        self._began = self._ran_at = time.monotonic()
        self._stopped_s = 0.0
        self._roster: RunStore | None = None
        # What ranks of a generation tell each other to meet: its number, and (value, session) by key.
        self._values: tuple[int, dict[str, tuple[str, str]]] | None = None
        self._unwritten: deque[Event] = deque()  # what must be applied, once the disk takes it
        self._sessions: dict[asyncio.Future[None], tuple[str, str]] = {}  # who asked last, by connection
        self._is_open = identity is None
        self._joins: OrderedDict[str, TokenBucket] = OrderedDict()  # by certificate
        most = 4 * MAX_WORKERS
        limits = Limits(
            connections=most, connections_per_peer=most if identity is None else 4 * self.rules.workers_per_peer,
            connections_per_organisation=most // 2, requests_per_organisation=most // 2,
            requests_per_peer=most if identity is None else 4 * self.rules.workers_per_peer,
            handshakes_per_address=MAX_WORKERS,
            # What a member says that is new costs an fsync, for which all wait.
            requests_per_s=1e6 if identity is None else 8.0 * self.rules.workers_per_peer,
            organisation_requests_per_s=1e6 if identity is None else 500.0,
        )  # fmt: skip
        self._discovery = _discovery_of(identity)
        self._server = Server(self._app(), identity, host, port, limits=limits, discovery=self._discovery)
        self._server.add_task("coordinator clock", self._run_ticks)

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
        self._roster = RunStore(self.state_dir)
        try:
            self._state, self.run_id = self._roster.load(self.rules, self.told, self._now(), secrets.token_hex(8))
            self._changed = asyncio.Event()
            self._server.start()
        except BaseException:
            self._roster.close()
            raise

    def stop(self) -> None:
        """Answers who waits, then closes everything."""
        self._stopping = True
        self._server.run_soon(self._notify)
        self._server.drain(2.0)
        self._server.close()
        if self._discovery is not None:
            self._discovery.close()
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
        return self._state.done

    def status(self) -> dict[str, Any]:
        """What the run has reached, and who is in it."""
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
            "generation": generation_reply(state, self.run_id),
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
            gauge("forebay_members", "Workers in the run.", len(state.members)),
            gauge("forebay_step", "The last step that all finished.", state.reached),
            gauge("forebay_generation", "Its number.", state.generation.number if state.generation else 0),
        ]

    # The state and its changes, in the server's loop alone; the state is replaced, never changed in place.

    def _open(self) -> RunStore:
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
        kept = [action for action in actions if not isinstance(action, Refuse)]
        if (
            kept
            or not isinstance(event, PollChange | Disconnect | Tick)
            or before.members.keys() != state.members.keys()
        ):
            self._open().save(state, kept, self.run_id)
        self._state = state
        for action in actions:
            if isinstance(action, LogLine):
                self._on_note(action.text)
            elif isinstance(action, Formed):
                formed = action.generation
                names = ", ".join(place.worker_id for place in formed.places)
                self._on_note(
                    f"generation {formed.number} from step {formed.start_step}: {len(formed.places)} workers: {names}"
                )
        old, new = ((s.generation, s.changing, s.broken, s.run_to) for s in (before, state))
        if old != new or before.members.keys() != state.members.keys():
            self._notify()
        return refused

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _change(self) -> Awaitable[Any]:
        return self._changed.wait()

    def _tell_surely(self, event: Event) -> None:
        """Applies an event now, or as soon as it can be written."""
        try:
            self._tell(event)
        except StateError:
            self._unwritten.append(event)

    async def _run_ticks(self) -> None:
        fault = ""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                while self._unwritten:
                    self._tell(self._unwritten[0])
                    self._unwritten.popleft()
                self._tell(Tick())
                fault = ""
            except StateError as error:  # repeated until it can be written
                if str(error) != fault:
                    log.error("%s", error)
                fault = str(error)

    async def _wait(self, request: Request, message: MemberMessage) -> None:
        """Waits until the answer is due, or time is up; notices a peer that hangs up, now or after the answer."""
        worker_id, session = message.worker_id, message.session
        self._note_connection(request, message)
        self._tell(PollChange(worker_id, session, +1, message.wait_s))
        try:
            is_there = await wait_until(
                request, self._change, lambda: self._stopping or is_due(self._state, message), message.wait_s
            )
            if not is_there:
                self._tell_surely(Disconnect(worker_id, session))
        finally:
            if not self._stopping:
                self._tell_surely(PollChange(worker_id, session, -1))

    def _note_connection(self, request: Request, message: MemberMessage) -> None:
        lost: asyncio.Future[None] = request.state.connection.lost
        if lost not in self._sessions:
            lost.add_done_callback(self._hung_up)
        self._sessions[lost] = message.worker_id, message.session

    def _hung_up(self, lost: asyncio.Future[None]) -> None:
        """A connection closed between two requests: its process ended, unless it has another connection."""
        worker_id, session = self._sessions.pop(lost)
        member = self._state.members.get(worker_id)
        if (worker_id, session) in self._sessions.values():
            return
        if member is not None and member.session == session and not self._stopping:
            self._tell_surely(Disconnect(worker_id, session))

    # Answers.

    def _app(self) -> FastAPI:
        app = make_app("Forebay coordinator", self._metrics)
        get, post = app.get, app.post
        get("/v1/config", summary="What the run does.")(self._read_config)
        post("/v1/config", summary="Settle what the coordinator was not told.")(self._agree)
        get("/v1/generation", summary="The generation now.")(self._read_generation)
        get("/v1/status", summary="What the run has reached, and who is in it.")(self._read_status)
        get("/v1/log", summary="Who trained on what: of a step, of a sample, or all generations.")(self._read_log)
        for path, kind in REQUESTS.items():
            post(path, openapi_extra=role("worker"), summary=_SUMMARIES[path.rpartition("/")[2]])(self._endpoint(kind))
        post(
            "/v1/members/meet", openapi_extra=role("worker"), response_model=MeetReply,
            summary="Values for the ranks of a generation, by which they find each other.",
        )(self._meet)  # fmt: skip
        app.add_exception_handler(StateError, _state_error)
        return app

    def _endpoint(self, kind: type[MemberMessage]) -> Callable[..., Awaitable[Response]]:
        async def answer(request: Request, message: Any) -> Response:
            return await self._answer(request, message)

        answer.__annotations__ = {"request": Request, "message": kind, "return": Response}
        return answer

    def _check(self, request: Request, message: MemberMessage) -> None:
        """Refuses what speaks for another's session, or for a step beyond the run's last."""
        if self._stopping:
            raise ApiError(503, "stopping", "the coordinator is stopping; ask again after its restart.", 1.0)
        member = self._state.members.get(message.worker_id)
        if member is not None and member.session == message.session and member.peer_id != peer_of(request).peer_id:
            raise ApiError(403, "not_yours", f"worker {message.worker_id!r}: the session is another peer's.")
        last, step = self._state.config.get("num_steps"), getattr(message, "step", 0)
        if isinstance(message, Join):
            if member is None:
                self._check_room(peer_of(request).peer_id)
        elif type(last) is int and step > last:
            raise ApiError(409, "bad_step", f"step: expected at most {last}, the run's last, got {step}.")

    def _check_room(self, peer_id: str) -> None:
        members, most = self._state.members, self.rules.workers_per_peer
        if len(members) >= MAX_WORKERS:
            raise ApiError(503, "full", f"the coordinator takes {MAX_WORKERS} workers at a time", 10.0)
        if peer_id and sum(member.peer_id == peer_id for member in members.values()) >= most:
            text = f"certificate of {peer_id}: expected at most {most} workers. See --workers-per-member."
            raise ApiError(429, "too_many_workers", text, 10.0)
        if not peer_id:
            return
        # Twice as many joins as it may have workers at once, then each of these in REJOIN_S.
        bucket = self._joins.setdefault(peer_id, TokenBucket(most / REJOIN_S, 2.0 * most))
        self._joins.move_to_end(peer_id)
        if len(self._joins) > 4 * MAX_WORKERS:
            self._joins.popitem(last=False)
        if (wait_s := bucket.try_take(1.0, time.monotonic())) > 0:
            text = f"certificate of {peer_id}: joins too often. Each join stops all workers at the end of a step."
            raise ApiError(429, "joins_too_often", text, wait_s)

    async def _read_config(self, request: Request) -> Response:
        return JsonResponse(config_reply(self._state, self.run_id))

    async def _read_generation(self, request: Request) -> Response:
        return JsonResponse(generation_reply(self._state, self.run_id))

    async def _read_status(self, request: Request) -> Response:
        return JsonResponse(self.status())

    async def _agree(self, request: Request, message: ConfigRequest) -> Response:
        size = message.settings.get("batch_size", 1)
        if type(size) is not int or size < 1:
            raise ApiError(400, "bad_request", f"settings: expected batch_size of at least 1, got {size!r}")
        # What all members train on is not for any one of them to say.
        if self._is_open or peer_of(request).scope.allows("admin"):
            self._tell(ProposeConfig(message.settings))
        return JsonResponse(config_reply(self._state, self.run_id))

    async def _answer(self, request: Request, message: Join | Ready | Heartbeat | Leave) -> Response:
        """Applies a member's request, waits until its answer is due, and answers; see `membership`."""
        self._check(request, message)
        if isinstance(message, Join):
            message = replace(message, peer_id=peer_of(request).peer_id)
        refused = self._tell(message)
        if refused is None:
            if not isinstance(message, Leave):
                await self._wait(request, message)
            answer = reply(self._state, message, self.run_id)
            if isinstance(answer, dict):
                return JsonResponse(answer)
            refused = answer
        raise ApiError(409, refused.code, refused.message)

    async def _meet(self, request: Request, message: MeetRequest) -> Response:
        self._check(request, message)
        state = self._state
        generation, member = state.generation, state.members.get(message.worker_id)
        is_member = member is not None and member.session == message.session
        if (
            generation is None
            or generation.number != message.generation
            or not is_member
            or generation.rank_of(message.session) is None
        ):
            raise ApiError(409, "changed", f"generation {message.generation}: no member of it in this session.")
        self._note_connection(request, message)
        number, values = generation.number, self._values
        if values is None or values[0] != number:
            values = self._values = (number, {})
        if message.value is not None and message.key not in values[1]:
            if sum(session == message.session for _, session in values[1].values()) >= MAX_VALUES:
                raise ApiError(409, "full", f"generation {number}: expected at most {MAX_VALUES} values a rank")
            values[1][message.key] = message.value, message.session
            self._notify()

        def is_over() -> bool:
            now = self._state
            is_changed = now.changing or now.generation is None or now.generation.number != number
            return message.key in values[1] or is_changed or self._stopping

        # Not counted as a wait of the member: the heartbeat beside it says that it is alive.
        await wait_until(request, self._change, is_over, message.wait_s)
        return JsonResponse({"value": values[1].get(message.key, (None,))[0]})

    async def _read_log(self, request: Request, step: Count = None, sample: Count = None) -> Response:
        """Who trained on what: of a step, of a sample, or all generations."""
        roster = self._open()
        if step is None and sample is None:
            log_of_all = {"run_id": self.run_id, "generations": roster.generations(), "gaps": roster.gaps()}
            return JsonResponse(log_of_all)
        found = roster.step(step) if step is not None else roster.sample(sample or 0)
        if found is None:
            what = f"step {step}" if step is not None else f"sample {sample}"
            raise ApiError(404, "not_found", f"{what}: not trained yet")
        return JsonResponse(found)


def _discovery_of(identity: Identity | None) -> Discovery | None:
    """The network's DHT, where others are found that know who is revoked; None for a network without one."""
    if identity is None or not identity.bootstrap:
        return None
    from forebay.network.dht import LibtorrentDht

    return LibtorrentDht("", 0, identity.bootstrap)


async def _state_error(request: Request, error: Exception) -> Response:
    return ApiError(503, "state", str(error), 1.0).response()
