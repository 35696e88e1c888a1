"""The scheduler as a server: finds the data by name, leases its slices, keeps the ledger.

It carries no payload: a worker gets a slice's hash and the addresses of those who have it. The caller is
who the TLS certificate says; a lease belongs to the peer that got it, and a receipt counts only with that
peer's signature. Providers are sought again every few seconds; one that a worker reports for serving wrong
bytes is not named again for that hash.

What it costs: a receipt is one signature check and one fsync under one lock, some hundreds a second.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.dataset.manifest import Manifest, SliceTable, dataset_id
from millrace.errors import (
    DatasetError,
    IntegrityError,
    LeaseError,
    LedgerError,
    NetworkError,
    ProtocolViolation,
    UsageError,
)
from millrace.ledger import receipt_message
from millrace.network.client import Client
from millrace.network.discovery import Claim, Discovery, find_providers, record_key
from millrace.network.https import BadRequestError, Request, Response, Server, error_response, json_response
from millrace.network.identity import Identity, Peer, verify
from millrace.order.plan import samples_per_slice
from millrace.schedule.journal import LEDGER_NAME, Journal
from millrace.schedule.leases import Lease, LeaseLostError, Waiting

MAX_MANIFEST_BYTES = 16 << 20
MAX_TABLE_BYTES = 1 << 30
MAX_CACHED = 4096
MAX_REASON = 300
MAX_REPORTS_PER_WORKER = 10_000
# A peer runs several workers (sessions), but none may hold the whole dataset back.
MAX_LEASES_PER_PEER = 64
# The span over which a worker's rate is stated.
RATE_SPAN_S = 30.0

log = logging.getLogger(__name__)
_SESSION = re.compile(r"[A-Za-z0-9._-]{0,64}")


@dataclass
class _Worker:
    """What status says of a worker since this scheduler began."""

    name: str
    seen_at: float
    samples: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=512))

    def rate(self, now: float) -> float:
        """Samples a second over the last RATE_SPAN_S."""
        recent = [(at, samples) for at, samples in self.recent if at > now - RATE_SPAN_S]
        if len(recent) < 2:
            return 0.0
        return sum(samples for _, samples in recent[1:]) / max(0.1, now - recent[0][0])


class SchedulerService:
    """Schedules one dataset's lease-mode job; `start` it once, `stop` it as often as you like.

    Args:
        name: The dataset's name in the network; `dataset_id` is needed where a name stands for several.
        state_dir: Holds the ledger and the journal; the same directory resumes the job.
        port: 0 takes a free port; `address` says which.
        seq_len: Tokens of a sample; without meaning for rows.
        lease_s: How long a lease lives without a sign of its worker.
        wait_s: How long `start` looks for a provider.
        rediscover_s: How often providers are sought again.
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
        seq_len: int,
        epochs: int = 1,
        seed: int = 0,
        lease_s: float = 30.0,
        dataset_id: str | None = None,
        wait_s: float = 30.0,
        rediscover_s: float = 5.0,
    ) -> None:
        self.identity = identity
        self.name = name
        self.epochs = epochs
        self.seed = seed
        self.seq_len = seq_len
        self.lease_s = lease_s
        self.dataset_id = dataset_id or ""
        self.state_dir = Path(state_dir)
        self._discovery = discovery
        self._client = client
        self._wait_s = wait_s
        self._rediscover_s = rediscover_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._claims: list[Claim] = []
        self._workers: dict[str, _Worker] = {}
        self._bad: dict[tuple[str, str], dict[str, str]] = {}
        self._journal: Journal | None = None
        self._server = Server(identity, host, port, self._answer)
        self._routes: dict[tuple[str, str], Callable[[Request, dict[str, Any]], Response]] = {
            ("GET", "/v1/job"): self._job,
            ("GET", "/v1/status"): lambda request, body: json_response(self.status()),
            ("POST", "/v1/lease"): self._lease,
            ("POST", "/v1/use"): self._use,
            ("POST", "/v1/renew"): self._renew,
            ("POST", "/v1/release"): self._release,
            ("POST", "/v1/bad_provider"): self._bad_provider,
        }

    @property
    def address(self) -> str:
        """`host:port` where workers reach it."""
        return self._server.address

    @property
    def ledger_path(self) -> Path:
        return self.state_dir / LEDGER_NAME

    def is_done(self) -> bool:
        """Whether every sample of every epoch is used."""
        return self._open_journal().table.done

    def start(self) -> None:
        """Finds the dataset, opens or resumes the job, serves and announces it.

        Raises:
            DatasetError: If nobody has the dataset, or its name stands for several.
            StateError: If the state directory holds another job.
            NetworkError: If the port cannot be had or no provider can be read.
        """
        manifest, table = self._find_dataset()
        self._manifest, self._table = manifest, table
        samples = samples_per_slice(table.count, self.seq_len, manifest.layout)
        job = {
            "name": self.name,
            "dataset_id": self.dataset_id,
            "layout": manifest.layout,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "scheduler": self.identity.public_key.hex(),
        }
        self._journal = Journal.open(
            self.state_dir,
            job=job,
            samples_per_slice=samples,
            epochs=self.epochs,
            lease_s=self.lease_s,
            signer=self.identity.sign,
        )
        self._sample_base = samples.cumsum() - samples
        for peer, sha256, reporter, reason in self._journal.bad_providers():
            self._bad.setdefault((peer, sha256), {})[reporter] = reason
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

    def stop(self) -> None:
        """Answers what is under way, then closes everything but discovery and client, which are the caller's."""
        self._stopping.set()
        self._server.drain(5.0)
        self._server.close()
        for thread in self._threads:
            thread.join(10.0)
        with self._lock:
            if self._journal is not None:
                self._journal.close()

    def _open_journal(self) -> Journal:
        if self._journal is None:
            raise UsageError(f"scheduler of {self.name}: not started. Call start() first.")
        return self._journal

    # Finding the data.

    def _find_claims(self, timeout_s: float) -> list[Claim]:
        claims = find_providers(self._discovery, self._client, self.identity.network_id, self.name, timeout_s=timeout_s)
        return [claim for claim in claims if claim.dataset_id == self.dataset_id or not self.dataset_id]

    def _find_dataset(self) -> tuple[Manifest, SliceTable]:
        deadline = time.monotonic() + self._wait_s
        claims: list[Claim] = []
        while not claims and not self._stopping.is_set():
            claims = self._find_claims(min(5.0, self._wait_s))
            if not claims and time.monotonic() >= deadline:
                raise DatasetError(
                    f"scheduler: nobody in network {self.identity.network_id} serves dataset {self.name!r}"
                    + (f" with id {self.dataset_id}" if self.dataset_id else "")
                    + f" (asked for {self._wait_s:g} s). Start a data node with `millrace serve`, "
                    "or check the name with `millrace find`."
                )
            if not claims:
                self._stopping.wait(0.2)
        ids = sorted({claim.dataset_id for claim in claims})
        if len(ids) != 1:
            raise DatasetError(
                f"scheduler: dataset {self.name!r} stands for {len(ids)} datasets: {', '.join(ids)}. "
                "Mixing them would train on either; say which by its id (--id)."
            )
        self.dataset_id = ids[0]
        self._claims = claims
        failures = []
        for claim in claims:
            try:
                return self._fetch_manifest(claim)
            except (NetworkError, DatasetError) as error:
                failures.append(f"{claim.address}: {error}")
        raise NetworkError(f"scheduler: no provider gave the manifest of {self.name!r}: " + "; ".join(failures))

    def _fetch_manifest(self, claim: Claim) -> tuple[Manifest, SliceTable]:
        """The manifest and table from one provider, checked down to the last byte against the dataset id."""
        base = f"/v1/datasets/{claim.dataset_id}"
        data = self._client.get_bytes(
            claim.address, f"{base}/manifest.json", MAX_MANIFEST_BYTES, expect_peer=claim.peer_id
        )
        if dataset_id(data) != claim.dataset_id:
            raise IntegrityError(
                f"manifest of {claim.dataset_id}: expected that hash, got {dataset_id(data)} (peer {claim.peer_id})."
            )
        manifest = Manifest.from_json(data)
        raw = self._client.get_bytes(
            claim.address, f"{base}/slices.parquet", MAX_TABLE_BYTES, expect_peer=claim.peer_id
        )
        if dataset_id(raw) != manifest.table_sha256:
            raise IntegrityError(
                f"slice table of {claim.dataset_id}: expected sha256 {manifest.table_sha256}, "
                f"got {dataset_id(raw)} (peer {claim.peer_id})."
            )
        return manifest, SliceTable.from_parquet(raw)

    # Background.

    def _announce(self) -> None:
        key = record_key(self.identity.network_id, "scheduler", self.name)
        self._discovery.announce(key, self._server.port)

    def _run_discovery(self) -> None:
        while not self._stopping.wait(self._rediscover_s):
            try:
                self._announce()
                claims = self._find_claims(5.0)
            except NetworkError as error:
                log.warning("scheduler %s: looking for providers failed: %s", self.name, error)
                continue
            with self._lock:
                self._claims = claims or self._claims

    def _run_expiry(self) -> None:
        while not self._stopping.wait(min(1.0, self.lease_s / 4)):
            with self._lock:
                if self._stopping.is_set():
                    return
                for lease in self._open_journal().expire(time.monotonic()):
                    log.info(
                        "lease %s of %s expired: slice %d returns", lease.lease_id, lease.worker, lease.slice_index
                    )

    # Answers.

    def _answer(self, request: Request) -> Response:
        route = self._routes.get((request.method, request.path))
        if route is None:
            return error_response(404, "not_found", f"{request.method} {request.path}: the scheduler has no such door.")
        body = request.json() if request.method == "POST" else {}
        if not isinstance(body, dict):
            raise BadRequestError(f"body: expected a JSON object, got {type(body).__name__}")
        with self._lock:
            if self._stopping.is_set():
                return error_response(503, "stopping", "this scheduler is stopping; ask again after its restart.")
            self._seen(request.peer)
            try:
                return route(request, body)
            except LeaseLostError as error:
                return error_response(409, "lease_lost", str(error))
            except LeaseError as error:
                return error_response(409, "bad_range", str(error))
            except LedgerError as error:
                log.error("scheduler %s: %s", self.name, error)
                return error_response(503, "ledger", str(error))

    def _seen(self, peer: Peer) -> _Worker:
        worker = self._workers.setdefault(peer.peer_id, _Worker(peer.name, time.monotonic()))
        worker.seen_at = time.monotonic()
        return worker

    def _job(self, request: Request, body: dict[str, Any]) -> Response:
        journal, manifest = self._open_journal(), self._manifest
        return json_response(
            {
                "job_id": journal.job_id,
                "name": self.name,
                "dataset_id": self.dataset_id,
                "layout": manifest.layout,
                "seq_len": self.seq_len,
                "seed": self.seed,
                "epochs": self.epochs,
                "num_slices": len(self._table),
                "vocab_size": manifest.vocab_size,
                "dtype": manifest.dtype,
                "num_samples": journal.table.num_samples,
                "lease_s": self.lease_s,
            }
        )

    def _lease(self, request: Request, body: dict[str, Any]) -> Response:
        """Grants; with `held` (what this session knows it holds) whatever else it has is given back first."""
        journal, peer = self._open_journal(), request.peer.peer_id
        session = _text(body, "session", "", _SESSION)
        cached = body.get("cached", [])
        held = body.get("held")
        if not isinstance(cached, list) or len(cached) > MAX_CACHED or not all(type(i) is int for i in cached):
            raise BadRequestError(f"cached: expected a list of at most {MAX_CACHED} slice indexes")
        if held is not None and not (isinstance(held, list) and all(isinstance(i, str) for i in held)):
            raise BadRequestError("held: expected a list of lease ids")
        now = time.monotonic()
        if held is not None:
            for lease in journal.table.live(peer, session):
                if lease.lease_id not in held:
                    journal.release(peer, lease.lease_id)
        if len(journal.table.live(peer)) >= MAX_LEASES_PER_PEER:
            return json_response({"wait_s": 1.0})
        journal.register(peer, request.peer.public_key, request.peer.name)
        granted = journal.grant(peer, session, secrets.token_hex(12), cached, now)
        if granted is None:
            return json_response({"done": True})
        if isinstance(granted, Waiting):
            return json_response({"wait_s": round(granted.wait_s, 3)})
        return json_response({"lease": self._describe(granted, now)})

    def _describe(self, lease: Lease, now: float) -> dict[str, Any]:
        info = self._table.row(lease.slice_index)
        providers = [
            {"peer_id": claim.peer_id, "address": claim.address}
            for claim in self._claims
            if (claim.peer_id, info.sha256) not in self._bad
        ]
        return {
            "lease_id": lease.lease_id,
            "epoch": lease.epoch,
            "slice": lease.slice_index,
            "name": info.name,
            "sha256": info.sha256,
            "bytes": info.bytes,
            "count": int(self._open_journal().table.samples[lease.slice_index]),
            "offset": lease.start,
            "sample_base": int(self._sample_base[lease.slice_index]),
            "dataset_id": self.dataset_id,
            "providers": providers,
            "expires_in_s": lease.deadline - now,
        }

    def _use(self, request: Request, body: dict[str, Any]) -> Response:
        journal, peer = self._open_journal(), request.peer
        lease_id = _text(body, "lease_id")
        start, stop, step = (_count(body, key) for key in ("start", "stop", "step"))
        signature = _text(body, "signature", pattern=re.compile(r"[0-9a-f]{128}"))
        use = journal.table.check_use(peer.peer_id, lease_id, start, stop)
        known = use or journal.table.remembered[lease_id]
        message = receipt_message(
            job_id=journal.job_id,
            lease_id=lease_id,
            epoch=known.epoch,
            slice_index=known.slice_index,
            start=start,
            stop=stop,
            step=step,
        )
        try:
            verify(peer.public_key, message, bytes.fromhex(signature))
        except ProtocolViolation as error:
            raise BadRequestError(f"signature: not this peer's over this receipt: {error}") from error
        now = time.monotonic()
        lease = journal.use(peer.peer_id, lease_id, start, stop, step, signature, now)
        if use is not None:
            worker = self._seen(peer)
            worker.samples += stop - start
            worker.recent.append((now, stop - start))
        return json_response({"offset": stop, "expires_in_s": lease.deadline - now if lease else 0.0})

    def _renew(self, request: Request, body: dict[str, Any]) -> Response:
        now = time.monotonic()
        lease = self._open_journal().renew(request.peer.peer_id, _text(body, "lease_id"), now)
        return json_response({"expires_in_s": lease.deadline - now})

    def _release(self, request: Request, body: dict[str, Any]) -> Response:
        self._open_journal().release(request.peer.peer_id, _text(body, "lease_id"))
        return json_response({"released": True})

    def _bad_provider(self, request: Request, body: dict[str, Any]) -> Response:
        """Takes a report; only a worker that is now leased a slice of that hash is heard."""
        journal, reporter = self._open_journal(), request.peer.peer_id
        peer, sha256 = _text(body, "peer_id"), _text(body, "sha256", pattern=re.compile(r"[0-9a-f]{64}"))
        reason = _text(body, "reason", "")[:MAX_REASON]
        leased = {self._table.row(lease.slice_index).sha256 for lease in journal.table.live(reporter)}
        if sha256 not in leased:
            raise BadRequestError("bad_provider: expected the hash of a slice that you are leased")
        if sum(reporter in reports for reports in self._bad.values()) < MAX_REPORTS_PER_WORKER:
            self._bad.setdefault((peer, sha256), {})[reporter] = reason
            journal.report_bad(peer, sha256, reporter, reason)
            log.warning("worker %s reports provider %s for slice %s: %s", reporter, peer, sha256, reason)
        return json_response({"reported": True})

    def status(self) -> dict[str, Any]:
        """What the job has reached; samples count over all epochs."""
        journal = self._open_journal()
        table, now = journal.table, time.monotonic()
        return {
            "name": self.name,
            "dataset_id": self.dataset_id,
            "epoch": table.epoch,
            "epochs": self.epochs,
            "num_slices": len(table.samples),
            "slices_used": len(table.samples) if table.done else table.num_used_slices,
            "slices_leased": len(table.leases),
            "samples_used": table.epoch * table.num_samples + table.used,
            "num_samples": self.epochs * table.num_samples,
            "workers": {
                peer: {
                    "name": worker.name,
                    "samples": worker.samples,
                    "last_seen_s": round(now - worker.seen_at, 3),
                    "tokens_per_s": round(worker.rate(now) * self.seq_len, 1),
                }
                for peer, worker in list(self._workers.items())
            },
            "providers": [{"peer_id": c.peer_id, "address": c.address} for c in self._claims],
            "bad_providers": [
                {"peer_id": peer, "sha256": sha256, "reports": len(reports), "reason": next(iter(reports.values()))}
                for (peer, sha256), reports in list(self._bad.items())
            ],
            "done": table.done,
        }


_ANY = re.compile(r"[^\x00-\x1f]{0,2000}")


def _text(body: dict[str, Any], key: str, default: str | None = None, pattern: re.Pattern[str] = _ANY) -> str:
    value = body.get(key, default)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise BadRequestError(f"{key}: expected text like {pattern.pattern}, got {str(value)[:80]!r}")
    return value


def _count(body: dict[str, Any], key: str) -> int:
    value = body.get(key)
    if type(value) is not int or not 0 <= value < 2**62:
        raise BadRequestError(f"{key}: expected an integer from 0, got {str(value)[:80]!r}")
    return value
