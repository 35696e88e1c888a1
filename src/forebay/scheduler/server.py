"""The scheduler as a FastAPI application: finds a dataset by name, answers workers' exchanges, keeps the ledger.

It sends no payload: a lease has a slice's hash and the addresses of its providers. The caller's identity is that of its
TLS certificate; a lease belongs to the peer that got it, and a receipt counts only with that peer's signature. All
rules about leases are in `SchedulerCore`; this module adds time, disk and network.

An exchange occupies the server's loop for a fraction of a millisecond. It then waits for the disk, together with all
others that wait at that time.
"""

import asyncio
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from forebay.base import Json
from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE
from forebay.errors import LeaseError, LedgerError, NetworkError, ProtocolError, StateError, UsageError
from forebay.lease.messages import ExchangeReply, ExchangeRequest
from forebay.ledger.chain import receipt_message
from forebay.load.packing import DocumentSubset
from forebay.network.app import (
    ApiError,
    JsonResponse,
    Metric,
    counter,
    file_response,
    gauge,
    make_app,
    peer_of,
    role,
    source_of,
)
from forebay.network.client import Client
from forebay.network.discovery import Discovery, record_key
from forebay.network.limits import ServerLimits
from forebay.network.messages import STALE_ATTEMPT, ReadmitRequest
from forebay.network.peer import Peer
from forebay.network.peer_dataset import PeerOrigin
from forebay.network.peer_source import FromUrls
from forebay.network.pki.identity import Identity, verify
from forebay.network.reachability import ReachabilityChecker
from forebay.network.server import Server
from forebay.scheduler import status
from forebay.scheduler.activity import Activity
from forebay.scheduler.catalog import Catalog, ManifestStore, started_id
from forebay.scheduler.core import SchedulerCore, StaleAttemptError
from forebay.scheduler.events import Event, ProviderReported, UsesRecorded, WorkerEnlisted
from forebay.scheduler.journal import LEDGER_NAME, Journal, job_body, lock_state
from forebay.scheduler.proofs import ProofChecker
from forebay.scheduler.sessions import MAX_SESSIONS_PER_PEER
from forebay.storage.locks import Lock
from forebay.swarm.share import RANGED

ORIGIN_TTL_S = 20.0  # a data node that died is named for so long
# A worker sends a request at least once a minute, and keeps its connection.
LIMITS = ServerLimits(
    connections=16_384, connections_per_peer=512, connections_per_organisation=8192, requests_per_organisation=4096,
    requests_per_s=1000.0, idle_s=150.0,
)  # fmt: skip
GATHER_S = 0.005  # how long a commit waits for others: about as long as an fsync, and one for many saves CPU
CHECK_EVERY_S = 0.5
MAX_CHECK_WAIT_S = 600.0
QUIET_S = 1.0  # a worker that lost its connection before the response repeats its request within this time
STOPPED_S = 1.0  # looks at leases that are later show that this process or its machine was suspended: no worker is late
END_S = 5.0  # how long a scheduler that starts with finished jobs waits for requests of workers

log = logging.getLogger(__name__)


class SchedulerService:
    """Schedules one job in lease mode. `start` it once; `stop` may be repeated.

    Args:
        name: The name of the dataset, and of the job.
        state_dir: Has the ledger and the journal; the same directory resumes the job.
        port: 0 takes a free port; see `address`.
        dataset_id: The dataset's, where the name stands for several.
        seq_len: Tokens of a sample; not used for rows.
        wait_s: How long `start` waits for a provider of the dataset.
        rediscover_s: Interval at which providers are looked up.
        publishers: Peer ids; a dataset is only scheduled if one of them signed it. Without any all are.
        standby: `start` waits until the scheduler that runs on the state directory stops or dies; called once it waits.
        stopping: Ends the waits of `start`.
        packing, documents, split, validation_fraction: Which samples are leased, as of the Loader.
        settings: Further fields of `JobSpec`: epochs, seed, lease_s, stall_s, steal_s, max_failures.
    """

    def __init__(
        self, identity: Identity, name: str, discovery: Discovery, client: Client, state_dir: str | Path,
        host: str = "127.0.0.1", port: int = 0, *, dataset_id: str = "", seq_len: int = 1024, wait_s: float = 30.0,
        rediscover_s: float = 5.0, standby: Callable[[], object] | None = None, publishers: Collection[str] = (),
        limits: ServerLimits = LIMITS, from_urls: FromUrls = "", packing: str = "concat", split: str | None = None,
        documents: DocumentSubset | None = None, validation_fraction: float = 0.0,
        stopping: threading.Event | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        identity.check_role("scheduler", "scheduler", name)
        self.name = name
        self.identity = identity
        self.state_dir = Path(state_dir)
        self._discovery = discovery
        self._wait_s = wait_s
        self._rediscover_s = rediscover_s
        self._standby = standby
        self._lock = threading.Lock()
        self._stopping = stopping or threading.Event()
        origin = PeerOrigin(
            identity, name, client, dataset_id or None, discovery, publishers=publishers, from_urls=from_urls,
        )  # fmt: skip
        self._catalog = Catalog(
            origin, seq_len, settings, self._stopping, ManifestStore(self.state_dir),
            {"packing": packing, "documents": documents, "split": split, "validation": validation_fraction},
        )  # fmt: skip
        self._activity = Activity()
        self._dialer = ReachabilityChecker(client)
        self._proofs = ProofChecker(identity, self._catalog, self._lock)
        self._num_exchanges = 0
        self._disk_fault = ""
        self._core_s = 0.0
        self._over_from = 0.0
        self._trust_stamp: object = None
        self._opened: Journal | None = None
        self._state_lock: Lock | None = None  # also while the journal is opened again
        self._commit: asyncio.Task[None] | None = None
        self._disk = ThreadPoolExecutor(1)  # its own: the loop's threads may all wait for a data node that hangs
        self._server = Server(
            self._app(), identity, host, port, limits=limits, discovery=discovery,
            peers=lambda: [claim.address for claim in self._catalog.claims], faults=self._find_faults,
        )  # fmt: skip
        self._server.add_task("scheduler expiry", self._run_expiry)
        self._server.add_task("scheduler discovery", self._run_discovery)
        self._server.add_task("scheduler checks", self._run_checks)

    @property
    def address(self) -> str:
        """`host:port` where workers reach it."""
        return self._server.address

    @property
    def ledger_path(self) -> Path:
        """The file of the ledger."""
        return self.state_dir / LEDGER_NAME

    def is_done(self) -> bool:
        """Whether every sample of every epoch is used, or set aside."""
        return self._journal.core.table.done

    def is_over(self) -> bool:
        """Whether the job is done and every live worker knows it.

        A worker that sends nothing for a lease's term is not alive. Workers of which this scheduler learnt from the
        journal only have END_S to send a request.
        """
        with self._lock:
            now = time.monotonic()
            core = self._journal.core
            return core.table.done and now >= self._over_from and core.all_know_done(now, QUIET_S)

    def left_out(self) -> str:
        """A line about unused samples and what was set aside; "" if all are used."""
        job = self._job_status()
        asides = job["set_aside"]
        slices = ", ".join(str(aside["slice"]) for aside in asides[:20]) + (", …" if len(asides) > 20 else "")
        reasons = "; ".join(dict.fromkeys(aside["reason"] for aside in asides[:20]))
        line = f"job {self.name!r}: expected every sample to be used, got {job['num_left_out']:,} unused"
        line += f", of slices set aside: {slices} ({reasons})" if asides else ""
        return line if job["num_left_out"] else ""

    def start(self) -> None:
        """Find the dataset, open or resume the job, serve and announce it.

        Raises:
            DatasetError: If no node serves the dataset.
            UsageError: If its name stands for several.
            StateError: If the state directory holds another job, or another scheduler runs on it.
            NetworkError: If the port is taken or no provider can be read.
        """
        self._catalog.find(self._wait_s, started_id(self.ledger_path))
        self._state_lock = self._lock_state()
        if self._state_lock is None:
            return
        try:
            self._opened = self._read_journal()
            if self.is_done():
                self._over_from = time.monotonic() + END_S
            self._add_origins()
            self._server.start()
            self._announce()
        except BaseException:
            self.stop()
            raise
        log.info("scheduler started: address=%s job=%s", self.address, self.name)

    def _lock_state(self) -> Lock | None:
        """The lock of the state directory; None if stopped while waiting for it."""
        try:
            return lock_state(self.state_dir)
        except StateError as error:
            if self._standby is None or error.__cause__ is not None:
                raise
        self._standby()
        while not self._stopping.wait(0.05):
            try:
                return lock_state(self.state_dir)
            except StateError as error:
                if error.__cause__ is not None:
                    raise
        return None

    def _read_journal(self) -> Journal:
        catalog = self._catalog
        body = job_body(
            catalog.spec, seq_len=catalog.seq_len, layout=catalog.manifest.layout,
            scheduler=self.identity.public_key.hex(), **catalog.identity, skipped_samples=catalog.skipped_samples,
        )  # fmt: skip
        # The salt: lease ids differ from those of earlier processes.
        return Journal.open(
            self.state_dir, catalog.spec, body, self.identity.sign, salt=secrets.token_hex(4),
            ttl_s=max(ORIGIN_TTL_S, 3 * self._rediscover_s), checks=True,
        )  # fmt: skip

    def stop(self) -> None:
        """Answer the requests in progress, then close all but discovery and client, which belong to the caller."""
        self._stopping.set()
        self._server.drain(5.0)
        self._server.close()
        self._disk.shutdown()
        self._dialer.close()
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            if self._state_lock is not None:
                self._state_lock.release()

    @property
    def _journal(self) -> Journal:
        assert self._opened is not None  # After `start`.
        return self._opened

    # Background tasks.

    def _announce(self) -> None:
        self._discovery.announce(record_key(self.identity.network_id, "scheduler", self.name), self._server.port)

    def _add_origins(self) -> None:
        catalog = self._catalog
        self._journal.core.add_origins(catalog.origins(), time.monotonic(), catalog.origin.others)

    async def _run_discovery(self) -> None:
        interval_s = self._rediscover_s
        while True:
            await asyncio.sleep(interval_s if self._catalog.claims else min(0.2, interval_s))
            try:
                await asyncio.to_thread(self._announce)
                await asyncio.to_thread(self._catalog.refresh)
            except NetworkError as error:
                log.warning("scheduler %s: looking for data nodes: %s", self.name, error)
            with self._lock:
                unserved = self._unserved()
                self._add_origins()
                is_over = unserved and not self._unserved()
                for usage in self._activity.workers.values() if is_over else ():
                    usage.processes.clear()  # Their shares are of the outage.
            if is_over and "last seen" in unserved:
                log.warning("scheduler %s: data nodes serve %r again", self.name, self.name)

    def _unserved(self) -> str:
        return self._journal.core.unserved(time.monotonic())

    def _find_faults(self) -> list[str]:
        with self._lock:
            unserved = self._unserved()
        return [unserved and f"data nodes: {unserved}; start one (forebay serve)", self._disk_fault]

    async def _run_expiry(self) -> None:
        interval_s = min(1.0, self._catalog.spec.lease_s / 4)
        while True:
            due = time.monotonic() + interval_s
            await asyncio.sleep(interval_s)
            try:
                with self._lock:
                    journal = self._journal
                    if time.monotonic() - due > STOPPED_S:
                        journal.core.table.extend_all(time.monotonic())
                    if journal.broken:  # what could not be written did not happen: restore the core from the disk
                        journal.close()
                        self._opened = self._read_journal()
                        self._add_origins()
                        self._disk_fault = ""
                        log.warning("journal opened again: scheduler=%s; workers repeat unrecorded uses", self.name)
                        continue
                await self._change(self._expire)
            except (LedgerError, StateError) as error:
                self._disk_fault = f"the disk: {error}"

    def _expire(self, core: SchedulerCore) -> list[Event]:
        revocations = self.identity.revocations
        if (stamp := revocations.stamp()) != self._trust_stamp:
            self._trust_stamp = stamp
            for session in core.sessions.all.values():
                if revocations.find(session.worker, session.organisation) is not None:
                    session.deadline = -math.inf
                    session.fault = "revoked"
                    self._activity.mark_revoked(session.worker)
        return core.expire(time.monotonic())

    async def _run_checks(self) -> None:
        """Read slices that several workers could not, before one is set aside."""
        retries: dict[int, tuple[float, float]] = {}  # when, and after how long a wait
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            with self._lock:
                checks = [] if self._journal.broken else self._journal.core.pending_checks()
            retries = {index: retries[index] for index in checks if index in retries}
            for index in checks:
                retry_at, wait_s = retries.get(index, (0.0, CHECK_EVERY_S))
                if time.monotonic() < retry_at:
                    continue
                is_good = await asyncio.to_thread(self._catalog.check_slice, index, None)
                if is_good is None:
                    wait_s = min(2 * wait_s, MAX_CHECK_WAIT_S)
                    retries[index] = time.monotonic() + wait_s, wait_s
                    continue
                change = partial(SchedulerCore.resolve, index=index, is_good=is_good, now=time.monotonic())
                await self._change(change)

    async def _wait_written(self, journal: Journal, ticket: int) -> None:
        """Wait until all that was put up to a ticket is on disk: one commit at a time, for all that wait meanwhile.

        LedgerError if it could not be written.
        """
        while not journal.is_durable(ticket):
            if self._commit is None or self._commit.done():
                self._commit = asyncio.create_task(self._write(journal))
            await asyncio.shield(self._commit)

    async def _write(self, journal: Journal) -> None:
        await asyncio.sleep(GATHER_S)
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, journal.write)
            self._disk_fault = ""
        except LedgerError as error:
            self._disk_fault = f"the disk: {error}"
            raise

    async def _change(self, change: Callable[[SchedulerCore], list[Event]]) -> list[Event]:
        """Change the core; its events are on disk when this returns."""
        with self._lock:
            journal = self._journal
            new = change(journal.core)
            self._activity.record(new, journal.core.table)
            ticket = journal.put(new)
        await self._wait_written(journal, ticket)
        return new

    # Exchanges.

    def _app(self) -> FastAPI:
        app = make_app("Forebay scheduler", self._metrics, {
            LeaseError: (409, "refused"), StaleAttemptError: (409, STALE_ATTEMPT), UsageError: (400, "bad_request"),
            ProtocolError: (400, "bad_request"), LedgerError: (503, "ledger"),
        })  # fmt: skip
        app.post(
            "/v2/exchange", openapi_extra=role("worker"), response_model=ExchangeReply,
            summary="Report uses and cached slices, and get leases.",
        )(self._exchange)  # fmt: skip
        app.get("/v1/job", summary="The job's data and settings.")(self._read_job)
        app.get(
            "/v1/datasets/{dataset_id}/{name}", openapi_extra=role("worker"), response_class=Response, responses=RANGED,
            summary="manifest.json or slices.parquet of the job's dataset, for workers that no data node sends it.",
        )(self._read_file)  # fmt: skip
        app.get("/v1/status", summary="The progress of the job, its workers and providers.")(self._read_status)
        admin = partial(app.post, openapi_extra=role("admin"))
        admin("/v1/job/pause", summary="Grant no new leases.")(self._pause)
        admin("/v1/job/resume", summary="Grant leases again.")(self._resume)
        admin("/v1/job/readmit", summary="Lease slices again that were set aside; all, if none are named.")(
            self._readmit
        )
        return app

    def _member(self, request: Request) -> Peer:
        """The peer that sent a request; ApiError if its certificate does not cover this job."""
        peer = peer_of(request)
        if not peer.scope.includes(self.name):
            raise ApiError(
                403, "not_covered", f"the certificate of {peer.peer_id} does not cover this scheduler's dataset"
            )
        return peer

    async def _exchange(self, request: Request, message: ExchangeRequest) -> Response:
        peer = self._member(request)
        if message.uses:
            if message.job_id != self._journal.job_id:
                raise ApiError(400, "bad_request", "job_id: expected that of this scheduler's job")
            verify(peer.public_key, receipt_message(message.job_id, message.uses), bytes.fromhex(message.signature))
            await self._proofs.check(peer, message.uses, self._journal.core)
        # Only an address where the worker answered is given to others: behind NAT it fetches slices and serves none.
        if self._dialer.check(peer, message.address, source_of(request)) is not True:
            message = replace(message, address="")
        now = time.monotonic()
        with self._lock:
            journal = self._journal
            started = time.perf_counter()
            sessions = journal.core.sessions
            session = sessions.all.get((peer.peer_id, message.session))
            if session is None and len(sessions.of_peer.get(peer.peer_id, ())) >= MAX_SESSIONS_PER_PEER:
                text = f"certificate of {peer.peer_id}: expected at most {MAX_SESSIONS_PER_PEER} sessions"
                raise ApiError(429, "too_many_sessions", text, 10.0)
            faults = self._catalog.faults_of(session, message.reports)
            result, new = journal.core.exchange(peer.peer_id, message, now, organisation=peer.org, faults=faults)
            if message.uses and journal.enlisted.get(peer.peer_id, 0.0) < time.time():  # the ledger alone is a proof
                journal.enlisted[peer.peer_id] = peer.valid_until
                new = [WorkerEnlisted(peer.peer_id, peer.certificate, peer.name), *new]
            ticket = journal.put(new)
            self._count(peer, message, new, now)
            self._num_exchanges += 1
            self._core_s += time.perf_counter() - started
        leases = tuple(self._catalog.describe(grant, journal.job_id) for grant in result.leases)
        await self._wait_written(journal, ticket)
        return JsonResponse(ExchangeReply(**{**vars(result), "leases": leases}).to_json())

    def _count(self, peer: Peer, message: ExchangeRequest, new: Sequence[Event], now: float) -> None:
        usage = self._activity.notice(peer, now)
        if message.stats is not None:
            usage.add_stats(message.session, message.stats, now)
        self._activity.record(new, self._journal.core.table)
        for event in new:
            if isinstance(event, UsesRecorded):
                num = sum(used.stop - used.start for used in event.uses)
                usage.add(num, num * self._catalog.seq_len, now)
            elif isinstance(event, ProviderReported):
                sha256 = self._catalog.table.row(event.slice_index).sha256
                self.identity.record_event(
                    "bad_provider", peer=event.peer_id, slice=sha256, by=event.reporter, reason=event.reason
                )

    # Status and administration.

    async def _read_job(self, request: Request) -> Response:
        self._member(request)
        return JsonResponse(self._catalog.describe_job(self._journal.job_id))

    async def _read_file(self, request: Request, dataset_id: str, name: str) -> Response:
        self._member(request)
        if dataset_id != self._catalog.spec.dataset_id or name not in (MANIFEST_FILE, TABLE_FILE):
            raise ApiError(404, "unknown_file", f"this scheduler has no {name[:80]!r} of {dataset_id[:80]}")
        path = self._catalog.store.path(dataset_id, name)
        return file_response(request, path, path.stat().st_size)

    async def _read_status(self, request: Request) -> Response:
        """The status; workers, events and reports are for viewers."""
        peer = self._member(request)
        hidden: Json = {"workers": {}, "bad_providers": [], "events": [], "uses": []}
        return JsonResponse(self.status() | ({} if peer.scope.allows("viewer") else hidden))

    def status(self) -> Json:
        """The progress of the job; samples count over all epochs."""
        faults = self._server.find_faults()
        with self._lock:
            journal = self._journal
            return status.full_status(
                journal.core, self._activity, self._catalog, journal.ledger.next_seq, time.monotonic()
            ) | {"faults": faults}

    def _metrics(self) -> list[Metric]:
        job = self._job_status()

        def of_job(name: str, about: str, value: int) -> Metric:
            return gauge(f"forebay_job_{name}", about, {self.name: value}, "dataset")

        return [
            of_job("samples_used", "Samples used, over all epochs.", job["samples_used"]),
            of_job("samples", "Samples of all epochs.", job["num_samples"]),
            of_job("epoch", "The epoch, counted from 1.", min(job["epoch"] + 1, job["epochs"])),
            of_job("leases", "Leases of slices that are in use.", job["slices_leased"]),
            of_job("idle_workers", "Workers that wait for a lease.", job["idle"]),
            of_job(
                "slices_set_aside", "Slices that no worker could read, which are not leased.", len(job["set_aside"])
            ),
            gauge(
                "forebay_scheduler_workers", "Workers that sent a request since the start.", len(self._activity.workers)
            ),
            counter("forebay_scheduler_exchanges_total", "Exchanges answered.", self._num_exchanges),
            counter("forebay_scheduler_core_seconds_total", "Time spent in the scheduler's core.", self._core_s),
        ]

    def _job_status(self) -> Json:
        with self._lock:
            return status.job_status(self._journal.core, time.monotonic())

    async def _administer(
        self, request: Request, verb: str, change: Callable[[SchedulerCore], list[Event]]
    ) -> Response:
        peer = self._member(request)
        if await self._change(change):
            self.identity.record_event(verb, job=self.name, by=peer.peer_id)
        elif verb == "readmit":
            raise LeaseError(f"job {self.name}: expected slices that are set aside, got none. See `forebay status`.")
        log.warning("job %s: %s by %s", self.name, verb, peer.peer_id)
        return JsonResponse(self._job_status())

    async def _pause(self, request: Request) -> Response:
        return await self._administer(request, "pause", lambda core: core.pause(True))

    async def _resume(self, request: Request) -> Response:
        return await self._administer(request, "resume", lambda core: core.pause(False))

    async def _readmit(self, request: Request, message: ReadmitRequest) -> Response:
        return await self._administer(request, "readmit", lambda core: core.readmit(message.slices))
