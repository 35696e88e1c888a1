"""The scheduler as a server: finds the data by name, answers workers at one door, keeps the ledgers.

It carries no payload: a worker gets a slice's hash and the addresses of those who have it. The caller is who the TLS
certificate says; a lease belongs to the peer that got it, and a receipt counts only with that peer's signature.
Everything about leases is the desk's; here is what it needs of the world: time, the disk, the network.

An exchange runs under one lock for as long as the desk takes, a fraction of a millisecond; signatures are checked
before it and the disk is waited for after it, by all who wait at once.
"""

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.errors import LeaseError, LedgerError, NetworkError, ProtocolViolation, StateError, UsageError
from forebay.ledger.receipts import receipt_message
from forebay.network.client import Client
from forebay.network.dialing import Dialer
from forebay.network.discovery import Discovery, record_key
from forebay.network.exchange import BadRequestError, Pending, Request, Response, error_response, json_response
from forebay.network.https import Server
from forebay.network.identity import Identity, Peer, verify
from forebay.network.limits import Bounds
from forebay.network.metrics import Metric, metrics_response
from forebay.network.openapi import (
    COUNT,
    DESCRIPTION_DOOR,
    METRICS_DOOR,
    OBJECT,
    TEXT,
    Door,
    array,
    openapi_response,
    record,
)
from forebay.network.trust import TrustWatch, answer_trust
from forebay.schedule import exchange, status
from forebay.schedule.ask import Ask
from forebay.schedule.catalog import Catalog, Finder, JobPlan, Kept, Wanted, begun, holders
from forebay.schedule.desk import Desk
from forebay.schedule.events import Enlisted, Event, Recorded, Reported
from forebay.schedule.journal import Journal, job_body, ledger_path, lock_state
from forebay.store.tracker import BanNotes

VERB = re.compile(r"/v1/jobs/(?P<name>[^/]{1,200})/(?P<verb>pause|resume|readmit|weights)")
_NAME = {"name": TEXT}
_REFUSALS = {404: "There is no job of this name."}
DOORS = [
    exchange.DOOR,
    Door("GET", "/v1/job", "What a job is; without a name the first.", query=_NAME, refusals=_REFUSALS),
    Door("GET", "/v1/jobs", "How far each job is.", answer=record((), jobs=array(OBJECT))),
    Door("GET", "/v1/status", "How far each job is, who works on it, who serves it."),
    Door("POST", "/v1/jobs/{name}/pause", "Lease nothing new of a job.", body=OBJECT, parts=_NAME, refusals=_REFUSALS),
    Door("POST", "/v1/jobs/{name}/resume", "Go on with a job.", body=OBJECT, parts=_NAME, refusals=_REFUSALS),
    Door("POST", "/v1/jobs/{name}/readmit", "Lease slices again that were set aside; all, if none are named.",
         body=record("all", slices=array(COUNT)), parts=_NAME, refusals=_REFUSALS),
    Door("POST", "/v1/jobs/{name}/weights", "Other weights of datasets by name, now or from a count of samples on.",
         body=record(("at",), weights={"type": "object", "additionalProperties": {"type": "number", "minimum": 0}},
                     at=COUNT), parts=_NAME, refusals=_REFUSALS),
    DESCRIPTION_DOOR,
    METRICS_DOOR,
]  # fmt: skip


def act(desk: Desk, name: str, verb: str, body: dict[str, Any]) -> list[Event]:
    """What an administrator says, checked."""
    if verb in ("pause", "resume"):
        return desk.pause(name, verb == "pause")
    if verb == "readmit":
        slices = body.get("slices")
        if slices is not None and not (isinstance(slices, list) and all(type(i) is int for i in slices)):
            raise BadRequestError("slices: expected a list of slice indexes")
        return desk.readmit(name, slices)
    weights, at = body.get("weights"), body.get("at")
    good = isinstance(weights, dict) and all(type(w) in (int, float) for w in weights.values())
    if not good or not (at is None or (type(at) is int and at >= 0)):
        raise BadRequestError("weights: expected {weights: {dataset: number}, at: samples or nothing}")
    assert isinstance(weights, dict)
    return desk.reweight(name, weights, at)


# A peer whose certificate expired is found anew; a node that died stays named for so long.
ORIGIN_TTL_S = 20.0
MAX_CONNECTIONS = 16_384
# A worker asks once a minute or more often, and keeps its connection; no answer takes long.
BOUNDS = Bounds(busy=64, idle_s=150.0, gather_s=0.04)
QUIET_S = 1.0
"""A worker whose connection broke before the answer asks again within this time."""
END_S = 5.0
"""How long a scheduler that finds its jobs done at its start waits for workers to ask."""

log = logging.getLogger(__name__)


class SchedulerService:
    """Schedules jobs in lease mode; `start` it once, `stop` it as often as you like.

    Args:
        name: The dataset's name in the network, and the job's; `dataset_id` where a name stands for several.
        jobs: Instead of `name` and what belongs to it: several jobs, or mixtures.
        state_dir: Holds the ledgers and the journal; the same directory resumes the jobs.
        port: 0 takes a free port; `address` says which.
        seq_len: Tokens of a sample; without meaning for rows.
        lease_s: How long a lease lives without a sign of its worker.
        steal_s: See JobSpec.
        wait_s: How long `start` looks for a provider.
        rediscover_s: How often providers are sought again.
        publishers: Peer ids; only datasets that one of them signed are scheduled. Without any all are.
        standby: `start` waits for whoever runs on the state directory to stop or die, ready to go on at once.
    """

    def __init__(
        self,
        identity: Identity,
        name: str,
        discovery: Discovery,
        client: Client,
        state_dir: str | Path,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        seq_len: int = 1024,
        epochs: int = 1,
        seed: int = 0,
        lease_s: float = 30.0,
        steal_s: float = 2.0,
        dataset_id: str | None = None,
        jobs: Sequence[JobPlan] = (),
        wait_s: float = 30.0,
        rediscover_s: float = 5.0,
        standby: bool = False,
        publishers: Collection[str] = (),
    ) -> None:
        only = JobPlan(name, (Wanted(name, 1.0, dataset_id or ""),), seq_len, epochs, seed, lease_s, steal_s=steal_s)
        self.identity = identity
        self.state_dir = Path(state_dir)
        self.waiting = threading.Event()
        self._client = client
        self._discovery = discovery
        self._wait_s = wait_s
        self._rediscover_s = rediscover_s
        self._standby = standby
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        kept = Kept(self.state_dir)
        finder = Finder(identity.network_id, discovery, client, self._stopping, kept, publishers)
        self._catalog = Catalog(jobs or [only], finder)
        self.plans = self._catalog.plans
        self.name = next(iter(self.plans))
        self._trust: TrustWatch | None = None
        self._bans = BanNotes(identity)
        self._workers: dict[str, status.Seen] = {}
        self._dialer = Dialer(client)
        self._exchanges, self._desk_s = 0, 0.0
        self._over_from = 0.0
        self._journal: Journal | None = None
        self._server = Server(identity, host, port, self._answer, MAX_CONNECTIONS, bounds=BOUNDS)
        self._routes: dict[tuple[str, str], Callable[[Request], Response | Pending]] = {
            ("GET", "/v1/job"): self._job,
            ("GET", "/v1/jobs"): lambda request: json_response({"jobs": self.status()["jobs"]}),
            ("GET", "/v1/status"): lambda request: json_response(self.status()),
            ("POST", "/v1/exchange"): self._exchange,
            ("GET", "/openapi.json"): lambda request: openapi_response("Forebay scheduler", DOORS),
            ("GET", "/metrics"): lambda request: metrics_response(self._metrics()),
        }

    @property
    def address(self) -> str:
        """`host:port` where workers reach it."""
        return self._server.address

    @property
    def ledger_path(self) -> Path:
        """The ledger of the first job."""
        return ledger_path(self.state_dir)

    def is_done(self) -> bool:
        """Whether every sample of every epoch of every job is used, or set aside."""
        return self._open_journal().desk.done()

    def is_over(self) -> bool:
        """Whether all jobs are done and every live worker was told so.

        A worker that says nothing for a lease's term is not alive. One that this scheduler took over, and has not
        heard from, gets END_S to ask.
        """
        with self._lock:
            now, desk = time.monotonic(), self._open_journal().desk
            return desk.done() and now >= self._over_from and desk.all_told(now, QUIET_S)

    def left_out(self) -> list[str]:
        """What was set aside of each job that has a sample which nobody used, as text."""
        with self._lock:
            found = [status.job_status(job) for job in self._open_journal().desk.jobs.values()]
        return [status.left_out_line(job) for job in found if job["num_left_out"]]

    def start(self) -> None:
        """Finds the datasets, opens or resumes the jobs, serves and announces them.

        Raises:
            DatasetError: If nobody has a dataset, or its name stands for several.
            StateError: If the state directory holds another job, or another scheduler runs on it.
            NetworkError: If the port cannot be had or no provider can be read.
        """
        paths = {name: ledger_path(self.state_dir, name if number else "") for number, name in enumerate(self.plans)}
        self._catalog.find(self._wait_s, begun(paths))
        lock = self._take_state()
        if lock is None:
            return
        self._journal = self._read_journal(lock)
        if self.is_done():
            self._over_from = time.monotonic() + END_S
        for dataset_id, swarm in self._journal.desk.swarms.items():
            self._bans.know(dataset_id, swarm.facts()["banned"])
        self._name_origins()
        try:
            self._server.start()
            self._announce()
        except BaseException:
            self.stop()
            raise
        for target in (self._run_expiry, self._run_discovery):
            thread = threading.Thread(target=target, name=f"scheduler {target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)
        log.info("scheduler started: address=%s jobs=%s", self.address, ",".join(self.plans))
        self._trust = TrustWatch(
            self.identity, self._client, known=self._addresses, discovery=self._discovery, address=self.address
        ).start()

    def _addresses(self) -> list[str]:
        """Of the data nodes known."""
        return [claim.address for claim in self._catalog.all_claims()]

    def _take_state(self) -> int | None:
        """The lock of the state directory; None if told to stop while waiting for it."""
        while True:
            try:
                return lock_state(self.state_dir)
            except StateError:
                if not self._standby:
                    raise
            self.waiting.set()
            if self._stopping.wait(0.05):
                return None

    def _read_journal(self, lock: int | None) -> Journal:
        specs, key = list(self._catalog.specs.values()), self.identity.public_key.hex()
        bodies = {spec.name: job_body(spec, scheduler=key, **self._catalog.facts(spec.name)) for spec in specs}
        # Leases get ids that no earlier life of this scheduler gave.
        return Journal.open(
            self.state_dir, specs, bodies, self.identity.sign, salt=secrets.token_hex(4), lock=lock,
            ttl_s=max(ORIGIN_TTL_S, 3 * self._rediscover_s),
        )  # fmt: skip

    def stop(self) -> None:
        """Answers what is under way, then closes everything but discovery and client, which are the caller's."""
        self._stopping.set()
        self._server.drain(5.0)
        self._server.close()
        self._dialer.close()
        for thread in self._threads:
            thread.join(10.0)
        if self._trust is not None:
            self._trust.close()
        with self._lock:
            if self._journal is not None:
                self._journal.close()

    def _open_journal(self) -> Journal:
        if self._journal is None:
            raise UsageError(f"scheduler of {self.name}: not started. Call start() first.")
        return self._journal

    # Background.

    def _announce(self) -> None:
        for name in self.plans:
            key = record_key(self.identity.network_id, "scheduler", name)
            self._discovery.announce(key, self._server.port)

    def _name_origins(self) -> None:
        desk, now = self._open_journal().desk, time.monotonic()
        for dataset_id, claims in self._catalog.claims.items():
            desk.origins(dataset_id, holders(claims), now)

    def _run_discovery(self) -> None:
        often_s = self._rediscover_s
        while not self._stopping.wait(often_s if all(self._catalog.claims.values()) else min(0.2, often_s)):
            try:
                self._announce()
                self._catalog.look_again()
            except NetworkError as error:
                log.warning("scheduler %s: looking for providers failed: %s", self.name, error)
            with self._lock:
                self._name_origins()

    def _run_expiry(self) -> None:
        often_s = min(1.0, min(plan.lease_s for plan in self.plans.values()) / 4)
        while not self._stopping.wait(often_s):
            try:
                with self._lock:
                    if self._stopping.is_set():
                        return
                    journal = self._open_journal()
                    if journal.broken:
                        self._begin_anew(journal)
                        continue
                    happened = journal.desk.expire(time.monotonic())
                    ticket = journal.put(happened)
                journal.wait(ticket)
            except (LedgerError, StateError) as error:
                log.error("scheduler %s: %s", self.name, error)
                continue
            for event in happened:
                log.info("%s", event)

    def _begin_anew(self, journal: Journal) -> None:
        """What could not be written is not true: the desk is read again from the disk."""
        journal.close()
        self._journal = self._read_journal(None)
        self._name_origins()
        log.warning("scheduler %s: the journal was opened again; workers say again what was not recorded", self.name)

    # Answers.

    def _answer(self, request: Request) -> Response | Pending:
        if (answer := answer_trust(self.identity, request)) is not None:
            return answer
        route = self._routes.get((request.method, request.path))
        verb = VERB.fullmatch(request.path) if request.method == "POST" else None
        if route is None and verb is None:
            return error_response(404, "not_found", f"{request.method} {request.path}: the scheduler has no such door.")
        if self._stopping.is_set():
            return error_response(503, "stopping", "this scheduler is stopping; ask again after its restart.")
        try:
            if verb is not None:
                return self._administer(request, verb["name"], verb["verb"])
            assert route is not None
            return route(request)
        except LeaseError as error:
            return error_response(409, "refused", str(error))
        except UsageError as error:
            return error_response(400, "bad_request", str(error))
        except LedgerError as error:
            log.error("scheduler %s: %s", self.name, error)
            return error_response(503, "ledger", str(error))

    def _job(self, request: Request) -> Response:
        name = request.query.get("name") or self.name
        plan = self.plans.get(name)
        if plan is None:
            return error_response(404, "not_found", f"job {name[:80]!r}: this scheduler has {', '.join(self.plans)}.")
        return json_response(self._catalog.describe_job(name, self._open_journal().job_ids[name]))

    def _exchange(self, request: Request) -> Response | Pending:
        ask = exchange.parse_ask(request.json())
        peer = request.peer
        refused = self._refuse(peer, ask)
        if refused is not None:
            return refused
        if ask.uses:
            # Before the lock: it is most of an exchange's time.
            try:
                verify(peer.public_key, receipt_message(ask.job_id, ask.uses), bytes.fromhex(ask.receipt))
            except ProtocolViolation as error:
                raise BadRequestError(f"signature: not this peer's over these uses: {error}") from error
        # Named to others only where it was reached: a worker behind NAT takes slices and gives none.
        ask = replace(ask, address=ask.address if self._dialer.reached(peer.peer_id, ask.address) else "")
        now = time.monotonic()
        with self._lock:
            journal = self._open_journal()
            begun = time.perf_counter()
            session = journal.desk.sessions.all.get((peer.peer_id, ask.session))
            ask = replace(ask, bad=self._catalog.place_reports(session, ask.reports))
            before = self._enlist(journal, peer, ask)
            reply, happened = journal.desk.exchange(peer.peer_id, ask, now)
            for event in before:
                journal.desk.apply(event)
            ticket = journal.put([*before, *happened])
            self._see(peer, ask, happened, now)
            self._exchanges += 1
            self._desk_s += time.perf_counter() - begun
        leases = [self._catalog.describe(grant, journal.job_ids[grant.job]) for grant in reply.leases]
        body = exchange.reply_json(reply, leases)
        return Pending(lambda: self._settle(journal, ticket, body))

    def _settle(self, journal: Journal, ticket: int, body: dict[str, Any]) -> Response:
        """The answer, once what it says is on disk."""
        try:
            journal.wait(ticket)
        except LedgerError as error:
            log.error("scheduler %s: %s", self.name, error)
            return error_response(503, "ledger", str(error))
        return json_response(body)

    def _refuse(self, peer: Peer, ask: Ask) -> Response | None:
        if not peer.scope.allows("worker"):
            return error_response(403, "not_a_worker", f"the certificate of {peer.peer_id} is none of a worker's")
        if ask.job and ask.job not in self.plans:
            return error_response(404, "not_found", f"job {ask.job!r}: this scheduler has {', '.join(self.plans)}.")
        for plan in [self.plans[ask.job]] if ask.job else self.plans.values():
            for wanted in plan.datasets:
                if not peer.scope.covers(wanted.name):
                    text = f"the certificate of {peer.peer_id} does not cover {wanted.name!r}"
                    return error_response(403, "not_covered", text)
        if ask.uses and ask.job_id not in self._open_journal().job_ids.values():
            raise BadRequestError("job_id: expected that of one of this scheduler's jobs")
        return None

    def _enlist(self, journal: Journal, peer: Peer, ask: Ask) -> list[Event]:
        """The worker's key goes into the ledger before the first receipt, so that the ledger alone proves it."""
        if not ask.uses:
            return []
        name = next(name for name, job_id in journal.job_ids.items() if job_id == ask.job_id)
        job = journal.desk.jobs[name]
        own = all(found is None or found[0] is job for found in map(journal.desk.find, [u.lease for u in ask.uses]))
        if not own:
            raise BadRequestError("uses: expected all of them under leases of the job that job_id names")
        if peer.peer_id in job.enlisted:
            return []
        return [Enlisted(name, peer.peer_id, peer.public_key.hex(), peer.name)]

    def _see(self, peer: Peer, ask: Ask, happened: Sequence[Event], now: float) -> None:
        if peer.peer_id not in self._workers:
            log.info("worker joined: peer_id=%s name=%s address=%s", peer.peer_id, peer.name, ask.address or "none")
        seen = self._workers.setdefault(peer.peer_id, status.Seen(peer.name, now))
        seen.seen_at = now
        for event in happened:
            if isinstance(event, Recorded):
                num = sum(used.stop - used.start for used in event.uses)
                seen.used(num, num * self.plans[event.job].seq_len, now)
            elif isinstance(event, Reported):
                sha256 = self._catalog.sha256(event.dataset_id, event.index)
                log.warning("%s reports %s for slice %s: %s", event.reporter, event.peer_id, sha256, event.reason)
                note = {"peer": event.peer_id, "slice": sha256, "by": event.reporter, "reason": event.reason}
                self.identity.note("bad_provider", **note)
                banned = self._open_journal().desk.swarms[event.dataset_id].facts()["banned"]
                self._bans.look(event.dataset_id, banned, event.reporter, event.reason)

    # Administration and status.

    def _administer(self, request: Request, name: str, verb: str) -> Response:
        if not request.peer.scope.allows("admin"):
            text = (
                f"the certificate of {request.peer.peer_id} lacks the role admin, without which nobody can {verb} a job"
            )
            return error_response(403, "not_an_admin", text)
        body = request.json() or {}
        if not isinstance(body, dict):
            raise BadRequestError(f"body: expected a JSON object, got {type(body).__name__}")
        with self._lock:
            journal = self._open_journal()
            if name not in journal.desk.jobs:
                return error_response(
                    404, "not_found", f"job {name[:80]!r}: this scheduler has {', '.join(self.plans)}."
                )
            happened = act(journal.desk, name, verb, body)
            ticket = journal.put(happened)
        journal.wait(ticket)
        if self.identity.audit is not None and happened:
            self.identity.audit.append(verb, job=name, by=request.peer.peer_id)
        log.warning("job %s: %s by %s", name, verb, request.peer.peer_id)
        with self._lock:
            return json_response(status.job_status(journal.desk.jobs[name]))

    def status(self) -> dict[str, Any]:
        """What the jobs have reached; samples count over all epochs. The first job's figures stand at the top, too."""
        journal, now = self._open_journal(), time.monotonic()
        with self._lock:
            desk = journal.desk
            jobs = [status.job_status(job) for job in desk.jobs.values()]
            workers = status.workers_status(self._workers, desk, now)
            reports = [
                {"peer_id": peer_id, "sha256": self._catalog.sha256(dataset_id, index), "reports": len(reporters),
                 "reason": next(iter(reporters.values()))}
                for (peer_id, dataset_id, index), reporters in desk.reports.items()
            ]  # fmt: skip
        claims = [{"peer_id": claim.peer_id, "address": claim.address} for claim in self._catalog.all_claims()]
        return status.whole(jobs, workers, claims, reports)

    def _metrics(self) -> list[Metric]:
        with self._lock:
            jobs = [status.job_status(job) for job in self._open_journal().desk.jobs.values()]
            found = status.metrics(jobs, len(self._workers), self._exchanges, self._desk_s)
        return [*found, *self._server.metrics()]
