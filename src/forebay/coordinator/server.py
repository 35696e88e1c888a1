"""The coordinator as a FastAPI application: gives workers their rank and world size, and the settings of the run.

HTTP and JSON around `membership.apply` and `RunStore`; the endpoints are in /openapi.json. A worker waits by long poll,
so it learns of a change within milliseconds with two requests a minute, and its closing connection shows the end of its
process. Weights, data and gradients are not sent here.

Over mutual TLS a session also belongs to the certificate that started it, and a member needs the role worker. Over
plain HTTP any client that reaches the port may join: a session's random name is the only protection between workers.

Cost: a connection or two and a waiting task for each worker; one fsync for each change and each heartbeat with news.
"""

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from forebay.coordinator import messages
from forebay.coordinator.membership import REQUESTS, apply, config_reply, generation_reply, is_due, is_member, reply
from forebay.coordinator.messages import (
    ConfigRequest,
    Event,
    Join,
    Leave,
    MeetReply,
    MeetRequest,
    MemberMessage,
    Refuse,
    Rules,
)
from forebay.coordinator.store import RunStore
from forebay.errors import StateError
from forebay.network.app import ApiError, JsonResponse, Metric, gauge, make_app, peer_of, role
from forebay.network.discovery import Discovery
from forebay.network.limits import ServerLimits, TokenBucket
from forebay.network.pki.identity import Identity
from forebay.network.server import Server
from forebay.recent import RecentDict
from forebay.units import numbered

MAX_WORKERS = 1024
REJOIN_S = 600.0
MAX_VALUES = 64
TICK_S = 0.2
STOPPED_S = 1.0  # ticks that are later than this show that this process or its machine was suspended

_SUMMARIES = {
    "join": "Join: {generation} once one with it starts, or {waiting}: ask again.",
    "ready": "Stopped at a boundary: {generation}, {run_to} to catch up, or {waiting}.",
    "heartbeat": "Alive: {changing} says whether to stop at the next boundary.",
    "leave": "Leave the run.",
}


class Coordinator:
    """Coordinates one run. `start` it once; `stop` may be repeated.

    Args:
        host, port: Where it listens; port 0 takes a free one.
        state_dir: Has the run's state; the same directory resumes the run. None: in memory.
        config: Settings for all workers, which override the workers' own: dataset_name, batch_size, num_steps …
        identity: For mutual TLS; None is plain HTTP.
        on_note: Called with a line for each change.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, state_dir: str | Path | None = None,
        rules: Rules | None = None, config: Mapping[str, Any] | None = None, identity: Identity | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.rules = rules or Rules()
        self.fixed = dict(config or {})
        self.state_dir = state_dir
        self._on_note = on_note or (lambda text: None)
        self._stopping = False
        self._started_at = self._ticked_at = time.monotonic()
        self._suspended_s = 0.0
        self._store: RunStore | None = None
        self._values: dict[tuple[int, str], str] = {}  # of the generation, by the rank that set them and key
        self._unwritten: deque[Event] = deque()  # events to apply once the disk has space
        # By connection: (worker id, session) of its last request.
        self._sessions: dict[asyncio.Future[None], tuple[str, str]] = {}
        if identity is not None:
            identity.check_role("coordinator", "scheduler")
        self._identity = identity
        self._joins = RecentDict[str, TokenBucket](4 * MAX_WORKERS)  # by certificate
        max_connections = 4 * MAX_WORKERS
        per_peer = max_connections if identity is None else 4 * self.rules.workers_per_peer
        limits = ServerLimits(
            connections=max_connections, connections_per_peer=per_peer, requests_per_peer=per_peer,
            connections_per_organisation=max_connections // 2, requests_per_organisation=max_connections // 2,
            handshakes_per_address=MAX_WORKERS,
            # A member's news costs an fsync, for which all wait.
            requests_per_s=1e6 if identity is None else 8.0 * self.rules.workers_per_peer,
            refusals_per_s=1e6 if identity is None else 100.0,
            organisation_requests_per_s=1e6 if identity is None else 500.0,
        )  # fmt: skip
        self._discovery: Discovery | None = None  # the network's DHT, to find peers that have revocation lists
        if identity is not None and identity.bootstrap:
            from forebay.network.dht import LibtorrentDht

            self._discovery = LibtorrentDht("", 0, identity.bootstrap)
        self._fault = ""
        self._server = Server(
            self._app(),
            identity,
            host,
            port,
            limits=limits,
            discovery=self._discovery,
            faults=lambda: [self._fault],
        )
        self._server.add_task("coordinator clock", self._run_ticks)

    @property
    def address(self) -> str:
        """`host:port` where workers reach it."""
        return self._server.address

    def start(self) -> None:
        """Open or resume the run and serve.

        Raises:
            StateError: If the state directory has a run with other settings, or another coordinator uses it.
            NetworkError: If the port is taken.
        """
        self._store = RunStore(self.state_dir)
        try:
            self._state, self.run_id = self._store.load(self.rules, self.fixed, self._now(), secrets.token_hex(8))
            self._changed = asyncio.Event()
            self._server.start()
        except BaseException:
            self._store.close()
            raise

    def stop(self) -> None:
        """Answer the requests that wait, then close everything."""
        self._stopping = True
        self._server.run_soon(self._notify)
        self._server.drain(2.0)
        self._server.close()
        if self._discovery is not None:
            self._discovery.close()
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> "Coordinator":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def done(self) -> bool:
        """Whether the last step is done and all workers have left."""
        return self._state.done

    def status(self) -> dict[str, Any]:
        """The progress and members of the run."""
        state = self._state
        now = self._now()
        members = [
            {
                "worker_id": m.worker_id, "rank": state.generation and state.generation.rank_of(m.session),
                "step": m.step, "seen_s": 0.0 if m.polling else round(now - m.seen_at, 3),
                "ready": m.ready, "lost": m.lost_at is not None,
            }
            for m in sorted(state.members.values(), key=lambda m: m.seat)
        ]  # fmt: skip
        return {
            "run_id": self.run_id, "up_s": round(now - self._started_at, 3), "min_workers": self.rules.min_workers,
            "generation": generation_reply(state, self.run_id), "changing": state.changing, "step": state.reached,
            "done": state.done, "members": members, "config": dict(state.config), "gaps": self._open().gaps(),
            "faults": self._server.find_faults(),
        }  # fmt: skip

    def _metrics(self) -> list[Metric]:
        state = self._state
        return [
            gauge("forebay_run_workers", "Workers in the run.", len(state.members)),
            gauge("forebay_run_step", "The last step that all workers finished.", state.reached),
            gauge(
                "forebay_run_generation",
                "The generation: it rises when workers join or leave.",
                state.generation.number if state.generation else 0,
            ),
        ]

    # The state and its changes: in the server's loop only; the state is replaced, never changed in place.

    def _open(self) -> RunStore:
        assert self._store is not None  # requests come after start
        return self._store

    def _now(self) -> float:
        """The time of members' deadlines, without the time in which the coordinator was suspended."""
        now = time.monotonic()
        if now - self._ticked_at > TICK_S + STOPPED_S:
            self._suspended_s += now - self._ticked_at
        self._ticked_at = now
        return now - self._suspended_s

    def _apply(self, event: Event) -> Refuse | None:
        """Apply an event; when this returns the change is on disk, and the requests that wait are notified."""
        before = self._state
        state, actions = apply(before, event, self._now())
        refused = next((action for action in actions if isinstance(action, Refuse)), None)
        logged = [action for action in actions if not isinstance(action, Refuse)]
        is_moved = before.members.keys() != state.members.keys()
        if logged or is_moved or not isinstance(event, messages.PollChange | messages.Disconnect | messages.Tick):
            try:
                self._open().save(state, logged, self.run_id)
            except StateError as error:
                self._fault = f"the disk: {error}"
                raise
            self._fault = ""
        self._state = state
        for action in actions:
            if isinstance(action, messages.LogLine):
                self._on_note(action.text)
            elif isinstance(action, messages.Formed):
                formed = action.generation
                self._values = {}
                names = ", ".join(slot.worker_id for slot in formed.places)
                number = numbered(len(formed.places), "worker")
                self._on_note(f"generation {formed.number} from step {formed.start_step}: {number}: {names}")
        old, new = ((s.generation, s.changing, s.broken, s.run_to) for s in (before, state))
        if old != new or is_moved:
            self._notify()
        return refused

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _apply_or_queue(self, event: Event) -> None:
        """Apply an event now, or as soon as it can be written."""
        try:
            self._apply(event)
        except StateError:
            self._unwritten.append(event)

    async def _run_ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            with contextlib.suppress(StateError):  # the next tick tries again
                while self._unwritten:
                    self._apply(self._unwritten[0])
                    self._unwritten.popleft()
                find, members = self._identity and self._identity.revocations.find, self._state.members.items()
                self._apply(messages.Tick([id for id, m in members if find and find(m.peer_id, m.organisation)]))

    async def _wait_until(self, request: Request, is_over: Callable[[], bool], wait_s: float) -> bool:
        """Wait up to `wait_s` for a condition, checked after each change. False if the client disconnected."""
        connection = request.state.connection
        deadline = asyncio.get_running_loop().time() + wait_s
        while not is_over():
            remaining_s = deadline - asyncio.get_running_loop().time()
            if remaining_s <= 0:
                return True
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({changed, connection.lost}, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            if connection.lost.done():
                return False
        return True

    async def _wait(self, request: Request, message: MemberMessage) -> None:
        """Wait until the answer is due, or time is up; apply a Disconnect if the peer closes the connection."""
        worker_id = message.worker_id
        session = message.session
        self._add_connection(request, message)
        self._apply(messages.PollChange(worker_id, session, +1, message.wait_s))
        try:
            is_connected = await self._wait_until(
                request, lambda: self._stopping or is_due(self._state, message), message.wait_s
            )
            if not is_connected:
                self._apply_or_queue(messages.Disconnect(worker_id, session))
        finally:
            if not self._stopping:
                self._apply_or_queue(messages.PollChange(worker_id, session, -1))

    def _add_connection(self, request: Request, message: MemberMessage) -> None:
        lost: asyncio.Future[None] = request.state.connection.lost
        if lost not in self._sessions:
            lost.add_done_callback(self._on_closed)
        self._sessions[lost] = message.worker_id, message.session

    def _on_closed(self, lost: asyncio.Future[None]) -> None:
        """A connection closed between two requests: the process ended, unless it has another connection."""
        worker_id, session = self._sessions.pop(lost)
        member = self._state.members.get(worker_id)
        if (worker_id, session) in self._sessions.values():
            return
        if member is not None and member.session == session and not self._stopping:
            self._apply_or_queue(messages.Disconnect(worker_id, session))

    # Answers.

    def _app(self) -> FastAPI:
        app = make_app("Forebay coordinator", self._metrics, {StateError: (503, "state")})
        app.post(
            "/v1/config", openapi_extra=role("worker"), summary="Propose settings that the coordinator leaves open."
        )(self._agree)
        app.get("/v1/status", summary="The progress and members of the run.")(self._read_status)
        app.get("/v1/log", summary="All generations, each with its workers.")(self._read_log)
        for path, kind in REQUESTS.items():
            summary = _SUMMARIES[path.rpartition("/")[2]]
            app.post(path, openapi_extra=role("worker"), summary=summary)(self._endpoint(kind))
        app.post(
            "/v1/members/meet", openapi_extra=role("worker"), response_model=MeetReply,
            summary="Set or wait for a value that the ranks of a generation share.",
        )(self._meet)  # fmt: skip
        return app

    def _endpoint(self, kind: type[MemberMessage]) -> Callable[..., Awaitable[Response]]:
        async def answer(request: Request, message: Any) -> Response:
            return await self._answer(request, message)

        answer.__annotations__ = {"request": Request, "message": kind, "return": Response}
        return answer

    def _check(self, request: Request, message: MemberMessage) -> None:
        """Refuse a message for another peer's session, or with a step beyond the run's last."""
        if self._stopping:
            raise ApiError(503, "stopping", "the coordinator is stopping; repeat the request after its restart.", 1.0)
        member = self._state.members.get(message.worker_id)
        if member is not None and member.session == message.session and member.peer_id != peer_of(request).peer_id:
            raise ApiError(403, "not_yours", f"worker {message.worker_id!r}: the session is another peer's.")
        last = self._state.config.get("num_steps")
        step = getattr(message, "step", 0)
        if isinstance(message, Join):
            if member is None:
                self._check_capacity(peer_of(request).peer_id)
        elif type(last) is int and step > last:
            raise ApiError(409, "bad_step", f"step: expected at most {last}, the run's last, got {step}.")

    def _check_capacity(self, peer_id: str) -> None:
        members = self._state.members
        max_workers = self.rules.workers_per_peer
        if len(members) >= MAX_WORKERS:
            raise ApiError(503, "full", f"the coordinator takes {MAX_WORKERS} workers at a time", 10.0)
        if peer_id and sum(member.peer_id == peer_id for member in members.values()) >= max_workers:
            text = f"certificate of {peer_id}: expected at most {max_workers} workers. Use another certificate."
            raise ApiError(429, "too_many_workers", text, 10.0)
        if not peer_id:
            return
        # At once twice as many joins as it may have workers, later one for each of these in REJOIN_S.
        bucket = self._joins.get(peer_id) or TokenBucket(max_workers / REJOIN_S, 2.0 * max_workers)
        self._joins[peer_id] = bucket
        if (wait_s := bucket.try_take(1.0, time.monotonic())) > 0:
            text = f"certificate of {peer_id}: joins too often. Each join stops all workers at the end of a step."
            raise ApiError(429, "joins_too_often", text, wait_s)

    async def _read_status(self, request: Request) -> Response:
        return JsonResponse(self.status())

    async def _agree(self, request: Request, message: ConfigRequest) -> Response:
        size = message.settings.get("batch_size", 1)
        if type(size) is not int or size < 1:
            raise ApiError(400, "bad_request", f"settings: expected batch_size of at least 1, got {size!r}")
        # A single member does not decide what all of them train on.
        if self._identity is None or peer_of(request).scope.allows("admin"):
            self._apply(messages.ProposeConfig(message.settings))
        return JsonResponse(config_reply(self._state, self.run_id))

    async def _answer(self, request: Request, message: Any) -> Response:
        self._check(request, message)
        if isinstance(message, Join):
            peer = peer_of(request)
            message = replace(message, peer_id=peer.peer_id, organisation=peer.org)
        refused = self._apply(message)
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
        generation = self._state.generation
        rank = None
        if generation is not None and generation.number == message.generation and is_member(self._state, message):
            rank = generation.rank_of(message.session)
        if rank is None:
            raise ApiError(409, "changed", f"generation {message.generation}: no member of it in this session.")
        self._add_connection(request, message)
        number = message.generation
        values = self._values
        key = (message.rank, message.key)
        if message.value is not None and message.rank != rank:
            raise ApiError(403, "not_yours", f"rank {rank}: expected a key of its own, got one of rank {message.rank}.")
        if message.value is not None and key not in values:
            if sum(setter == rank for setter, _ in values) >= MAX_VALUES:
                raise ApiError(409, "full", f"generation {number}: expected at most {MAX_VALUES} values a rank")
            values[key] = message.value
            self._notify()

        def is_over() -> bool:
            now = self._state
            is_changed = now.changing or now.generation is None or now.generation.number != number
            return key in values or is_changed or self._stopping

        # Not counted as a poll of the member: its heartbeats show that it is alive.
        await self._wait_until(request, is_over, message.wait_s)
        return JsonResponse({"value": values.get(key)})

    async def _read_log(self, request: Request) -> Response:
        store = self._open()
        return JsonResponse({"run_id": self.run_id, "generations": store.generations(), "gaps": store.gaps()})
