"""The scheduler as a server: finds the data by name, answers workers at one door, keeps the ledgers.

It carries no payload: a worker gets a slice's hash and the addresses of those who have it. The caller is who the TLS
certificate says; a lease belongs to the peer that got it, and a receipt counts only with that peer's signature.
Everything about leases is the desk's; here is what it needs of the world: time, the disk, the network.

An exchange runs in the server's loop for as long as the desk takes, a fraction of a millisecond; the disk is waited for
after it, by all who wait at once.
"""

import asyncio
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response

from forebay.errors import LeaseError, LedgerError, NetworkError, ProtocolViolation, StateError, UsageError
from forebay.ledger.receipts import receipt_message
from forebay.network.app import ApiError, JsonResponse, Metric, make_app, peer_of, role, source_of
from forebay.network.client import Client
from forebay.network.discovery import Discovery, record_key
from forebay.network.limits import Limits
from forebay.network.messages import STALE_ATTEMPT, ReadmitRequest, WeightsRequest
from forebay.network.pki.identity import Identity, Peer, verify
from forebay.network.reachability import Dialer
from forebay.network.server import Server
from forebay.scheduler import admin_api as status
from forebay.scheduler.catalog import Catalog, DatasetFinder, DatasetRef, JobPlan, ManifestStore, begun, holders
from forebay.scheduler.core import SchedulerCore, StaleAttemptError
from forebay.scheduler.events import Event, PeerBanned, ProviderReported, UsesRecorded, WorkerEnlisted
from forebay.scheduler.journal import Journal, job_body, ledger_path, lock_state
from forebay.scheduler.messages import ExchangeReply, ExchangeRequest, is_checked
from forebay.scheduler.sessions import MAX_SESSIONS_PER_PEER
from forebay.storage.url_policy import FromUrls
from forebay.swarm.tracker import BanNotes

# A peer whose certificate expired is found anew; a node that died stays named for so long.
ORIGIN_TTL_S = 20.0
# A worker asks once a minute or more often, and keeps its connection.
LIMITS = Limits(
    connections=16_384, connections_per_peer=512, connections_per_organisation=8192, requests_per_organisation=4096,
    requests_per_s=1000.0, idle_s=150.0,
)  # fmt: skip
GATHER_S = 0.005
"""How long a commit waits for others: an fsync takes about as long, and one for many costs a fraction of the CPU."""
CHECK_EVERY_S, MAX_CHECK_WAIT_S = 0.5, 600.0
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
        limits: Limits = LIMITS,
        from_urls: FromUrls = "",
    ) -> None:
        only = JobPlan(
            name, (DatasetRef(name, 1.0, dataset_id or ""),), seq_len, epochs, seed, lease_s, steal_s=steal_s
        )
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
        kept = ManifestStore(self.state_dir)
        finder = DatasetFinder(identity.network_id, discovery, client, self._stopping, kept, publishers)
        self._catalog = Catalog(jobs or [only], finder, from_urls)
        self.plans = self._catalog.plans
        self.name = next(iter(self.plans))
        self._bans = BanNotes(identity)
        self._workers: dict[str, status.WorkerUsage] = {}
        self._dialer = Dialer(client)
        # The same after a restart, and nobody else's to know.
        self._secret = hashlib.sha256(identity.sign(b"forebay/1 checks of leases")).digest()
        self._proven: dict[str, int] = {}  # by peer: proofs that were checked and right
        self._exchanges, self._core_s = 0, 0.0
        self._over_from = 0.0
        self._journal: Journal | None = None
        self._state_lock = -1  # beside the journal's: no standby has the state while a journal is opened again
        self._commit: asyncio.Task[None] | None = None
        self._disk = ThreadPoolExecutor(1)  # of its own: the loop's threads may all wait for a data node that hangs
        self._server = Server(
            self._app(), identity, host, port, limits=limits, discovery=discovery, known=self._addresses
        )
        self._server.add_task("scheduler expiry", self._run_expiry)
        self._server.add_task("scheduler discovery", self._run_discovery)
        self._server.add_task("scheduler checks", self._run_checks)

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
        return self._open_journal().core.done()

    def is_over(self) -> bool:
        """Whether all jobs are done and every live worker was told so.

        A worker that says nothing for a lease's term is not alive. One that this scheduler took over, and has not
        heard from, gets END_S to ask.
        """
        with self._lock:
            now, core = time.monotonic(), self._open_journal().core
            return core.done() and now >= self._over_from and core.all_told(now, QUIET_S)

    def left_out(self) -> list[str]:
        """What was set aside of each job that has a sample which nobody used, as text."""
        with self._lock:
            found = [status.job_status(job) for job in self._open_journal().core.jobs.values()]
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
        self._state_lock = os.dup(lock)
        try:
            self._journal = self._read_journal(lock)
            if self.is_done():
                self._over_from = time.monotonic() + END_S
            for dataset_id, swarm in self._journal.core.swarms.items():
                self._bans.know(dataset_id, swarm.facts()["banned"])
            self._name_origins()
            self._server.start()
            self._announce()
        except BaseException:
            self.stop()
            raise
        log.info("scheduler started: address=%s jobs=%s", self.address, ",".join(self.plans))

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

    def _read_journal(self, lock: int) -> Journal:
        specs, key = list(self._catalog.specs.values()), self.identity.public_key.hex()
        bodies = {spec.name: job_body(spec, scheduler=key, **self._catalog.facts(spec.name)) for spec in specs}
        # Leases get ids that no earlier life of this scheduler gave.
        return Journal.open(
            self.state_dir, specs, bodies, self.identity.sign, salt=secrets.token_hex(4), lock=lock,
            ttl_s=max(ORIGIN_TTL_S, 3 * self._rediscover_s), checks=True,
        )  # fmt: skip

    def stop(self) -> None:
        """Answers what is under way, then closes everything but discovery and client, which are the caller's."""
        self._stopping.set()
        self._server.drain(5.0)
        self._server.close()
        self._disk.shutdown()
        self._dialer.close()
        with self._lock:
            if self._journal is not None:
                self._journal.close()
            if self._state_lock >= 0:
                os.close(self._state_lock)
                self._state_lock = -1

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
        core, now = self._open_journal().core, time.monotonic()
        for dataset_id, claims in self._catalog.claims.items():
            core.origins(dataset_id, holders(claims), now)

    async def _run_discovery(self) -> None:
        often_s = self._rediscover_s
        while True:
            await asyncio.sleep(often_s if all(self._catalog.claims.values()) else min(0.2, often_s))
            try:
                await asyncio.to_thread(self._announce)
                await asyncio.to_thread(self._catalog.look_again)
            except NetworkError as error:
                log.warning("scheduler %s: looking for providers failed: %s", self.name, error)
            with self._lock:
                self._name_origins()

    async def _run_expiry(self) -> None:
        often_s = min(1.0, min(plan.lease_s for plan in self.plans.values()) / 4)
        while True:
            await asyncio.sleep(often_s)
            try:
                with self._lock:
                    journal = self._open_journal()
                    if journal.broken:
                        self._begin_anew(journal)
                        continue
                happened = await self._change(lambda core: core.expire(time.monotonic()))
            except (LedgerError, StateError) as error:
                log.error("scheduler %s: %s", self.name, error)
                continue
            for event in happened:
                log.info("%s", event)

    async def _run_checks(self) -> None:
        """Reads what several workers could not, before a slice is set aside or a peer banned."""
        put_off: dict[tuple[str, int, str], tuple[float, float]] = {}  # until when, and for how long
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            with self._lock:
                pending_checks = [] if self._open_journal().broken else self._open_journal().core.pending_checks()
            keys = [
                (doubt.dataset_id, doubt.index, doubt.peer.peer_id if doubt.peer else "") for doubt in pending_checks
            ]
            put_off = {key: put_off[key] for key in keys if key in put_off}
            for key, doubt in zip(keys, pending_checks):
                until, wait_s = put_off.get(key, (0.0, CHECK_EVERY_S))
                if time.monotonic() < until:
                    continue
                is_good = await asyncio.to_thread(self._catalog.check_slice, doubt.dataset_id, doubt.index, doubt.peer)
                if is_good is None:
                    wait_s = min(2 * wait_s, MAX_CHECK_WAIT_S)  # nobody answers now: asked again, less and less often
                    put_off[key] = time.monotonic() + wait_s, wait_s
                    continue
                for event in await self._change(
                    partial(SchedulerCore.resolve, doubt=doubt, is_good=is_good, now=time.monotonic())
                ):
                    log.warning("checked: %s", event)
                    if isinstance(event, PeerBanned) and event.banned:
                        self._bans.look(event.dataset_id, [event.peer_id], self.identity.peer_id, "wrong bytes")

    async def _written(self, journal: Journal, ticket: int) -> None:
        """Waits until what was put up to a ticket is on disk: one commit at a time, for all who wait meanwhile.

        Raises:
            LedgerError: If it could not be written.
        """
        while not journal.is_durable(ticket):
            if self._commit is None or self._commit.done():
                self._commit = asyncio.create_task(self._write(journal))
            await asyncio.shield(self._commit)

    async def _write(self, journal: Journal) -> None:
        await asyncio.sleep(GATHER_S)
        await asyncio.get_running_loop().run_in_executor(self._disk, journal.write)

    def _begin_anew(self, journal: Journal) -> None:
        """What could not be written is not true: the desk is read again from the disk."""
        journal.close()
        self._journal = self._read_journal(os.dup(self._state_lock))
        self._name_origins()
        log.warning("scheduler %s: the journal was opened again; workers say again what was not recorded", self.name)

    # Answers.

    def _app(self) -> FastAPI:
        app = make_app("Forebay scheduler", self._metrics)
        get, post, steer = app.get, app.post, partial(app.post, openapi_extra=role("admin"))
        summary = "What a worker used, has and wants; what it has now and gets."
        post("/v2/exchange", openapi_extra=role("worker"), response_model=ExchangeReply, summary=summary)(
            self._exchange
        )
        post("/v1/exchange", include_in_schema=False)(_old_exchange)
        get("/v1/job", summary="What a job is; without a name the first.")(self._read_job)
        get("/v1/jobs", summary="How far each job is.")(self._read_jobs)
        get("/v1/status", summary="How far each job is, who works on it, who serves it.")(self._read_status)
        steer("/v1/jobs/{name}/pause", summary="Lease nothing new of a job.")(self._pause)
        steer("/v1/jobs/{name}/resume", summary="Go on with a job.")(self._resume)
        summary = "Lease slices again that were set aside; all, if none are named."
        steer("/v1/jobs/{name}/readmit", summary=summary)(self._readmit)
        summary = "Other weights of datasets by name, now or from a count of samples on."
        steer("/v1/jobs/{name}/weights", summary=summary)(self._reweight)
        steer("/v1/peers/{peer_id}/pardon", summary="Drop what workers said against a peer.")(self._pardon)
        for error in (LeaseError, UsageError, LedgerError):
            app.add_exception_handler(error, _refused)
        return app

    def _check_running(self) -> None:
        if self._stopping.is_set():
            raise ApiError(503, "stopping", "this scheduler is stopping; ask again after its restart.", 1.0)

    async def _read_job(self, request: Request, name: Annotated[str, Query(max_length=200)] = "") -> Response:
        name = name or next((n for n in self.plans if self._covers(peer_of(request), n)), self.name)
        self._plan(peer_of(request), name)
        return JsonResponse(self._catalog.describe_job(name, self._open_journal().job_ids[name]))

    async def _read_jobs(self, request: Request) -> Response:
        return JsonResponse({"jobs": self._status_for(peer_of(request))["jobs"]})

    async def _read_status(self, request: Request) -> Response:
        return JsonResponse(self._status_for(peer_of(request)))

    def _status_for(self, peer: Peer) -> dict[str, Any]:
        """The status without jobs that a certificate does not cover; other workers are for administrators."""
        full = self.status()
        jobs = [job for job in full["jobs"] if self._covers(peer, job["name"])]
        if not peer.scope.allows("admin"):
            full |= {"workers": {}, "bad_providers": []}
        return full if len(jobs) == len(full["jobs"]) else {"jobs": jobs, "done": full["done"], "workers": {}}

    def _covers(self, peer: Peer, job: str) -> bool:
        return all(peer.scope.covers(wanted.name) for wanted in self.plans[job].datasets)

    def _plan(self, peer: Peer, name: str) -> JobPlan:
        """A job that a peer may see; others are not there for it."""
        plan = self.plans.get(name)
        if plan is None or not self._covers(peer, name):
            names = ", ".join(job for job in self.plans if self._covers(peer, job))
            raise ApiError(404, "not_found", f"job {name[:80]!r}: this scheduler has {names or 'none for you'}.")
        return plan

    async def _exchange(self, request: Request, message: ExchangeRequest) -> Response:
        self._check_running()
        peer, ask = peer_of(request), message
        self._check(peer, ask)
        if ask.uses:
            try:
                verify(peer.public_key, receipt_message(ask.job_id, ask.uses), bytes.fromhex(ask.signature))
            except ProtocolViolation as error:
                raise ApiError(400, "bad_request", f"signature: not this peer's over these uses: {error}") from error
            await self._check_proofs(peer, ask)
        # Named to others only where it was reached: a worker behind NAT takes slices and gives none.
        is_reached = self._dialer.reached(peer, ask.address, source_of(request))
        ask = replace(ask, address=ask.address if is_reached else "")
        now = time.monotonic()
        with self._lock:
            journal = self._open_journal()
            begun = time.perf_counter()
            sessions = journal.core.sessions
            session = sessions.all.get((peer.peer_id, ask.session))
            if session is None and len(sessions.of_peer.get(peer.peer_id, ())) >= MAX_SESSIONS_PER_PEER:
                text = f"certificate of {peer.peer_id}: expected at most {MAX_SESSIONS_PER_PEER} sessions"
                raise ApiError(429, "too_many_sessions", text, 10.0)
            bad = self._catalog.place_reports(session, ask.reports)
            before = self._enlist(journal, peer, ask)
            reply, happened = journal.core.exchange(peer.peer_id, ask, now, organisation=peer.org, faults=bad)
            for event in before:
                journal.core.apply(event)
            ticket = journal.put([*before, *happened])
            self._see(peer, ask, happened, now)
            self._exchanges += 1
            self._core_s += time.perf_counter() - begun
        leases = tuple(self._catalog.describe(grant, journal.job_ids[grant.job]) for grant in reply.leases)
        await self._written(journal, ticket)
        return JsonResponse(ExchangeReply(**{**vars(reply), "leases": leases}).to_json())

    async def _check_proofs(self, peer: Peer, ask: ExchangeRequest) -> None:
        """Refuses the first use of a lease without proof that the worker has its slice, and uses that came too soon."""
        now, core = time.monotonic(), self._open_journal().core
        for use in {use.lease_id: use for use in reversed(ask.uses)}.values():
            place = core.find(use.lease_id)
            lease = place[2].leases.get(use.lease_id) if place is not None else None
            if place is None or lease is None or lease.worker != peer.peer_id or lease.position > lease.start:
                continue  # the desk says what is wrong with it, or its proof was taken before
            job, dataset, _ = place
            plan, what = self.plans[job.name], f"uses of lease {use.lease_id}"
            tokens = (use.stop - use.start) * plan.seq_len
            if (wait_s := tokens / plan.max_tokens_per_s - (now - lease.moved_at)) > 0:
                raise ApiError(429, "too_fast", f"{what}: {tokens:,} tokens too soon (--max-tokens-per-s)", wait_s)
            if not use.proof:
                raise ApiError(400, "no_proof", f"{what}: expected a proof that its slice is there")
            if not is_checked(self._secret, use.lease_id, self._proven.get(peer.peer_id, 0)):
                continue
            dataset_id = job.spec.sources[dataset].dataset_id
            found = await asyncio.to_thread(
                self._catalog.check_proof, dataset_id, lease.slice_index, use.lease_id, peer.peer_id, use.proof
            )
            if found is False:
                with self._lock:
                    core.bar(peer.peer_id, time.monotonic())
                self.identity.note("false_proof", peer=peer.peer_id, lease=use.lease_id)
                raise ApiError(403, "false_proof", f"{what}: the proof is not of its slice's bytes")
            if found:
                self._proven[peer.peer_id] = self._proven.get(peer.peer_id, 0) + 1  # others were checked meanwhile

    def _check(self, peer: Peer, message: ExchangeRequest) -> None:
        if message.job:
            self._plan(peer, message.job)
        for name in self.plans if not message.job else ():
            if not self._covers(peer, name):
                text = f"the certificate of {peer.peer_id} does not cover the datasets of job {name!r}"
                raise ApiError(403, "not_covered", text)
        if message.uses and message.job_id not in self._open_journal().job_ids.values():
            raise ApiError(400, "bad_request", "job_id: expected that of one of this scheduler's jobs")

    def _enlist(self, journal: Journal, peer: Peer, ask: ExchangeRequest) -> list[Event]:
        """The worker's key goes into the ledger before the first receipt, so that the ledger alone proves it."""
        if not ask.uses:
            return []
        name = next(name for name, job_id in journal.job_ids.items() if job_id == ask.job_id)
        job = journal.core.jobs[name]
        own = all(found is None or found[0] is job for found in map(journal.core.find, [u.lease_id for u in ask.uses]))
        if not own:
            text = "uses: expected all of them under leases of the job that job_id names"
            raise ApiError(400, "bad_request", text)
        if peer.peer_id in job.enlisted:
            return []
        return [WorkerEnlisted(name, peer.peer_id, peer.public_key.hex(), peer.name)]

    def _see(self, peer: Peer, ask: ExchangeRequest, happened: Sequence[Event], now: float) -> None:
        if peer.peer_id not in self._workers:
            log.info("worker joined: peer_id=%s name=%s address=%s", peer.peer_id, peer.name, ask.address or "none")
        seen = self._workers.setdefault(peer.peer_id, status.WorkerUsage(peer.name, now))
        seen.seen_at = now
        for event in happened:
            if isinstance(event, UsesRecorded):
                num = sum(used.stop - used.start for used in event.uses)
                seen.used(num, num * self.plans[event.job].seq_len, now)
            elif isinstance(event, ProviderReported):
                sha256 = self._catalog.sha256(event.dataset_id, event.index)
                log.warning("%s reports %s for slice %s: %s", event.reporter, event.peer_id, sha256, event.reason)
                note = {"peer": event.peer_id, "slice": sha256, "by": event.reporter, "reason": event.reason}
                self.identity.note("bad_provider", **note)

    # Administration and status.

    async def _pardon(self, request: Request, peer_id: str) -> Response:
        self._check_running()
        if not await self._change(lambda core: core.pardon(peer_id)):
            raise ApiError(404, "not_found", f"peer {peer_id[:64]!r}: nobody said anything against it here")
        self.identity.note("pardon", peer=peer_id[:64], by=peer_of(request).peer_id)
        return JsonResponse({"pardoned": peer_id})

    async def _pause(self, request: Request, name: str) -> Response:
        return await self._steer(request, name, "pause", lambda core: core.pause(name, True))

    async def _resume(self, request: Request, name: str) -> Response:
        return await self._steer(request, name, "resume", lambda core: core.pause(name, False))

    async def _readmit(self, request: Request, name: str, message: ReadmitRequest) -> Response:
        return await self._steer(request, name, "readmit", lambda core: core.readmit(name, message.slices))

    async def _reweight(self, request: Request, name: str, message: WeightsRequest) -> Response:
        change = partial(SchedulerCore.reweight, name=name, weights=message.weights, at=message.at)
        return await self._steer(request, name, "weights", change)

    async def _steer(
        self, request: Request, name: str, verb: str, change: Callable[[SchedulerCore], list[Event]]
    ) -> Response:
        self._check_running()
        peer = peer_of(request)
        self._plan(peer, name)
        if await self._change(change):
            self.identity.note(verb, job=name, by=peer.peer_id)
        log.warning("job %s: %s by %s", name, verb, peer.peer_id)
        with self._lock:
            return JsonResponse(status.job_status(self._open_journal().core.jobs[name]))

    async def _change(self, change: Callable[[SchedulerCore], list[Event]]) -> list[Event]:
        """Changes the desk; what happened is on disk when this returns."""
        with self._lock:
            journal = self._open_journal()
            happened = change(journal.core)
            ticket = journal.put(happened)
        await self._written(journal, ticket)
        return happened

    def status(self) -> dict[str, Any]:
        """What the jobs have reached; samples count over all epochs. The first job's figures stand at the top, too."""
        journal, now = self._open_journal(), time.monotonic()
        with self._lock:
            core = journal.core
            jobs = [status.job_status(job) for job in core.jobs.values()]
            workers = status.workers_status(self._workers, core, now)
            reports = [
                {"peer_id": peer_id, "sha256": self._catalog.sha256(dataset_id, index), "reports": len(reporters),
                 "reason": next(iter(reporters.values()))[0]}
                for (peer_id, dataset_id, index), reporters in core.reports.items()
            ]  # fmt: skip
        claims = [{"peer_id": claim.peer_id, "address": claim.address} for claim in self._catalog.all_claims()]
        return status.whole(jobs, workers, claims, reports)

    def _metrics(self) -> list[Metric]:
        with self._lock:
            jobs = [status.job_status(job) for job in self._open_journal().core.jobs.values()]
            return status.metrics(jobs, len(self._workers), self._exchanges, self._core_s)


async def _old_exchange(request: Request) -> Response:
    raise ApiError(410, "old_version", "this scheduler takes POST /v2/exchange. Update Forebay on this worker.")


async def _refused(request: Request, error: Exception) -> Response:
    """What the desk or the ledger raises, as an answer."""
    if isinstance(error, LeaseError):
        code = STALE_ATTEMPT if isinstance(error, StaleAttemptError) else "refused"
        return ApiError(409, code, str(error)).response()
    if isinstance(error, UsageError):
        return ApiError(400, "bad_request", str(error)).response()
    log.error("scheduler: %s", error)
    return ApiError(503, "ledger", str(error), 1.0).response()
