"""The worker: leases slices, fetches the next while it trains on this one, acknowledges what it used.

Three threads. The caller's trains. One fetches: it holds at most two leases, the one in use and the next. One
keeps: it sends receipts for what was used, at least every half second and at a slice's end, and
renews the leases in hand. So a step waits neither for the network nor for the scheduler, except when
data comes slower than it is used, and that wait is measured.

A lease that is lost costs the rest of its slice here, and nothing twice: what was acknowledged is used, what was
not is somebody else's to use. `wasted` counts those samples.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.dataset.slices import open_slice
from millrace.errors import DatasetError, NetworkError, ProtocolViolation
from millrace.ledger import receipt_message
from millrace.load.batch import make_batch
from millrace.network.client import Client, RemoteError
from millrace.network.discovery import Discovery
from millrace.network.identity import Identity
from millrace.order.plan import lease_order
from millrace.store.cache import SliceCache
from millrace.store.fetch import Provider, fetch_slice
from millrace.worker.control import Control, SchedulerGone
from millrace.worker.leasing_config import LeaseSettings
from millrace.worker.trainer import Trainer, make_trainer

PROGRESS_S = 0.5
# When told to stop: this long for a step, and for a fetch, that is under way.
SETTLE_S = 15.0
MAX_LOSSES = 20


@dataclass
class WorkerReport:
    """What a worker did. Losses are means over the first and last steps; `wait_share` is in [0, 1]."""

    samples: int = 0
    tokens: int = 0
    steps: int = 0
    wasted: int = 0
    tokens_per_s: float = 0.0
    loss_first: float | None = None
    loss_last: float | None = None
    wait_share: float = 0.0
    bytes_fetched: int = 0
    slices_fetched: int = 0
    leases_lost: int = 0
    rejected: list[dict[str, str]] = field(default_factory=list)
    done: bool = False

    def to_json(self) -> dict[str, Any]:
        """All of it as a dict of plain values."""
        return asdict(self)


@dataclass
class _Held:
    """A lease in hand and how far its samples got: granted from `acked`, consumed to `used`."""

    lease: dict[str, Any]
    acked: int
    used: int
    contact: float
    step: int = 0
    finished: bool = False
    lost: bool = False
    path: Path | None = None


def run_worker(
    identity: Identity,
    name: str,
    *,
    discovery: Discovery | None = None,
    scheduler: str | None = None,
    cache_dir: str | Path,
    cache_bytes: int,
    batch_size: int,
    trainer: str = "auto",
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    stop: threading.Event | None = None,
    receipt_s: float = 0.5,
    patience_s: float = 60.0,
    on_batch: Callable[[dict[str, NDArray[Any]], NDArray[np.int64]], None] | None = None,
) -> WorkerReport:
    """Works until every sample of the job is used, or until `stop` is set: then it settles up and returns.

    Args:
        on_progress: Called every half second with step, samples, tokens, tokens_per_s, wait_share and loss.
        on_batch: Called after each step with the batch (`inputs` and `labels`, or the tensors of a row layout)
            and its global sample ids, int64 [B].

    Raises:
        NetworkError: If the scheduler stays away longer than `patience_s`.
        UsageError: If two slices (the one in use and the next) do not fit the cache, or the trainer does not
            fit the data.
    """
    config = LeaseSettings(name, Path(cache_dir), cache_bytes, batch_size, scheduler, trainer, receipt_s, patience_s)
    with contextlib.closing(Client(identity)) as client:
        worker = _Worker(identity, client, config, discovery, stop or threading.Event())
        worker.on_progress, worker.on_batch = on_progress, on_batch
        return worker.run()


class _Worker:
    def __init__(
        self,
        identity: Identity,
        client: Client,
        config: LeaseSettings,
        discovery: Discovery | None,
        stop: threading.Event,
    ) -> None:
        self.identity = identity
        self.client = client
        self.config = config
        self.stop = stop
        self.on_progress: Callable[[dict[str, Any]], None] | None = None
        self.on_batch: Callable[[dict[str, NDArray[Any]], NDArray[np.int64]], None] | None = None
        self.report = WorkerReport()
        self.cache = SliceCache(config.cache_dir, config.cache_bytes)
        self._control = Control(identity, client, config.name, discovery, config.scheduler, config.patience_s, stop)
        self._session = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._slots = threading.Semaphore(2)
        self._ready: queue.Queue[_Held | None] = queue.Queue()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._trained = threading.Event()
        self._fetched = threading.Event()
        self._failure: BaseException | None = None
        self._known: dict[int, str] = {}
        self._waited_s = 0.0
        self._losses: list[float] = []

    def run(self) -> WorkerReport:
        self.job = self._control.job()
        self._trainer: Trainer | None = make_trainer(
            self.config.trainer,
            vocab_size=int(self.job["vocab_size"]),
            dtype=str(self.job.get("dtype", "")),
            seq_len=int(self.job["seq_len"]),
            layout=str(self.job.get("layout", "tokens")),
        )
        threads = [
            threading.Thread(target=self._guard, args=(target,), name=f"worker {target.__name__}", daemon=True)
            for target in (self._fetch_all, self._keep)
        ]
        self._begun = self._progress_at = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            self._train_all()
        finally:
            self._closing.set()
            self._wake.set()
            for thread in threads:
                thread.join(3 * SETTLE_S)
            self._unpin_unused()
        if self._failure is not None:
            raise self._failure
        self._progress(last=True)
        return self.report

    def _unpin_unused(self) -> None:
        """Lets go of slices that were fetched and never trained on."""
        with contextlib.suppress(queue.Empty):
            while True:
                held = self._ready.get_nowait()
                if held is not None:
                    self.cache.unpin(held.lease["sha256"])

    def _guard(self, target: Callable[[], None]) -> None:
        """Runs a thread's work; its failure ends the worker and is raised from `run`."""
        try:
            target()
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller of run gets it
            self._failure = self._failure or error
            self._closing.set()
            self._wake.set()
            self._ready.put(None)

    # Fetching.

    def _fetch_all(self) -> None:
        """Keeps one slice ready ahead of the one in use, until the job is done."""
        try:
            self._fetch_until_done()
        finally:
            self._fetched.set()
        self._ready.put(None)

    def _fetch_until_done(self) -> None:
        misses, last_hit = 0, time.monotonic()
        while not self._ending():
            if not self._slots.acquire(timeout=0.1):
                continue
            held = self._next_lease()
            if held is None:
                self._slots.release()
                continue
            try:
                self._fetch(held)
                misses, last_hit = 0, time.monotonic()
            except (NetworkError, DatasetError) as error:
                misses += 1
                self._give_back(held)
                if misses >= 5 and time.monotonic() - last_hit > self.config.patience_s:
                    raise NetworkError(
                        f"worker: no provider gave any slice for {self.config.patience_s:g} s, "
                        f"last {held.lease['name']}: {error}. Is a data node running?"
                    ) from error
                self._closing.wait(min(2.0, 0.1 * 2**misses))
            else:
                self._ready.put(held)

    def _ending(self) -> bool:
        return self._closing.is_set() or self.stop.is_set()

    def _next_lease(self) -> _Held | None:
        """A lease; None after a wait or when the job is done."""
        with self._lock:
            held_ids = list(self._held)
        cached = [index for index, sha256 in list(self._known.items())[-1024:] if self.cache.get(sha256)]
        body = {"cached": cached, "held": held_ids, "session": self._session}
        answer = self._control.call("POST", "/v1/lease", body)
        if answer.get("done"):
            self.report.done = True
            self._closing.set()
            return None
        if "wait_s" in answer:
            self._closing.wait(min(1.0, max(0.02, float(answer["wait_s"]))))
            return None
        lease = _check_lease(answer.get("lease"))
        held = _Held(lease, lease["offset"], lease["offset"], time.monotonic())
        with self._lock:
            self._held[lease["lease_id"]] = held
        return held

    def _fetch(self, held: _Held) -> None:
        lease = held.lease
        sha256 = lease["sha256"]
        cached = self.cache.get(sha256) is not None
        providers = [Provider(p["peer_id"], p["address"]) for p in lease["providers"]]
        if not cached and not providers:
            raise NetworkError(f"slice {lease['name']}: the scheduler knows no provider for it now")
        # Pinned first: another worker on this cache may make room between the fetch and the first step.
        self.cache.pin(sha256)
        try:
            held.path = fetch_slice(
                self.client,
                self.cache,
                sha256,
                lease["bytes"],
                providers,
                lambda provider, reason: self._reject(provider, sha256, reason),
            )
        except BaseException:
            self.cache.unpin(sha256)
            raise
        self._known[lease["slice"]] = sha256
        if not cached:
            self.report.bytes_fetched += lease["bytes"]
            self.report.slices_fetched += 1

    def _reject(self, provider: Provider, sha256: str, reason: str) -> None:
        """Tells the scheduler that a provider served wrong bytes; a scheduler that is away is not waited for."""
        self.report.rejected.append({"peer_id": provider.peer_id, "sha256": sha256, "reason": reason})
        body = {"peer_id": provider.peer_id, "sha256": sha256, "reason": reason[:300]}
        with contextlib.suppress(NetworkError):
            self._control.call("POST", "/v1/bad_provider", body, patience_s=2.0)

    # Keeping.

    def _keep(self) -> None:
        """Sends receipts and renewals until the worker closes, then settles every lease."""
        while not self._closing.is_set():
            self._wake.wait(min(self.config.receipt_s, float(self.job["lease_s"]) / 4))
            self._wake.clear()
            for held in self._in_hand():
                self._settle(held)
        # The others have stopped or are about to: what was used is acknowledged, the rest given back.
        self._trained.wait(SETTLE_S)
        self._fetched.wait(SETTLE_S)
        for held in self._in_hand():
            self._settle(held)
            if not held.finished and not held.lost:
                self._give_back(held)

    def _in_hand(self) -> list[_Held]:
        with self._lock:
            return list(self._held.values())

    def _settle(self, held: _Held) -> None:
        """Acknowledges what was used of a lease, or renews it when that is due."""
        # In this order: once finished is seen, used is final.
        finished, used, step = held.finished, held.used, held.step
        lease_id = held.lease["lease_id"]
        try:
            if used > held.acked:
                self._acknowledge(held, used, step)
            elif time.monotonic() - held.contact > float(self.job["lease_s"]) / 3 and not finished:
                self._control.call("POST", "/v1/renew", {"lease_id": lease_id})
                held.contact = time.monotonic()
        except RemoteError as error:
            if error.status != 409:
                raise
            held.lost = True
            self.report.leases_lost += 1
        if held.lost or (finished and held.acked == used):
            self._drop(held)

    def _acknowledge(self, held: _Held, stop: int, step: int) -> None:
        lease = held.lease
        place = {"start": held.acked, "stop": stop, "step": step}
        message = receipt_message(
            job_id=str(self.job["job_id"]),
            lease_id=lease["lease_id"],
            epoch=lease["epoch"],
            slice_index=lease["slice"],
            **place,
        )
        body = {"lease_id": lease["lease_id"], **place, "signature": self.identity.sign(message).hex()}
        self._control.call("POST", "/v1/use", body)
        held.acked, held.contact = stop, time.monotonic()

    def _give_back(self, held: _Held) -> None:
        try:
            self._control.call("POST", "/v1/release", {"lease_id": held.lease["lease_id"]}, patience_s=3.0)
        except RemoteError as error:
            if error.status != 409:
                raise
        except SchedulerGone:
            held.lost = True  # it expires by itself
        self._drop(held)

    def _drop(self, held: _Held) -> None:
        """Forgets a lease and makes room for another; what was used and not acknowledged is wasted."""
        with self._lock:
            if self._held.pop(held.lease["lease_id"], None) is None:
                return
            self.report.wasted += held.used - held.acked
        self._slots.release()

    # Training.

    def _train_all(self) -> None:
        try:
            while not self.stop.is_set():
                begun = time.monotonic()
                held = self._take()
                if held is None:
                    break
                self._waited_s += time.monotonic() - begun
                try:
                    if not held.lost:
                        self._train(held)
                finally:
                    self.cache.unpin(held.lease["sha256"])
                held.finished = held.finished or held.lost
                self._wake.set()
        finally:
            self._trained.set()

    def _take(self) -> _Held | None:
        while not self.stop.is_set() and self._failure is None:
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=0.1)
        return None

    def _train(self, held: _Held) -> None:
        """Uses a slice's samples from its offset to its end, in the order that every worker would use."""
        lease = held.lease
        assert held.path is not None
        opened = open_slice(held.path)
        seq_len, count = int(self.job["seq_len"]), int(lease["count"])
        order = lease_order(int(self.job["seed"]), lease["epoch"], lease["slice"], count, lease["offset"], count)
        is_tokens = self.job.get("layout", "tokens") == "tokens"
        for at in range(0, len(order), self.config.batch_size):
            if held.lost or self.stop.is_set() or self._failure is not None:
                return
            indexes = order[at : at + self.config.batch_size]
            if is_tokens:
                inputs, labels = make_batch(opened.tokens, indexes, seq_len, np.int64)
                batch = {"inputs": inputs, "labels": labels}
                if self._trainer is not None:
                    self._losses.append(self._trainer.step(inputs, labels))
            else:
                batch = {name: tensor[indexes] for name, tensor in opened.tensors.items()}
            if self.on_batch is not None:
                self.on_batch(batch, lease["sample_base"] + indexes)
            self._count(len(indexes), seq_len if is_tokens else 0)
            held.step = self.report.steps
            held.used += len(indexes)
            self._progress()
        held.finished = True

    def _count(self, samples: int, seq_len: int) -> None:
        report = self.report
        report.steps += 1
        report.samples += samples
        report.tokens += samples * seq_len
        elapsed = max(1e-9, time.monotonic() - self._begun)
        report.tokens_per_s = report.tokens / elapsed
        report.wait_share = min(1.0, self._waited_s / elapsed)
        if self._losses and len(self._losses) <= MAX_LOSSES:
            report.loss_first = float(np.mean(self._losses))
        self._losses = self._losses[-MAX_LOSSES:] if report.steps > MAX_LOSSES else self._losses
        if self._losses:
            report.loss_last = float(np.mean(self._losses))

    def _progress(self, last: bool = False) -> None:
        now = time.monotonic()
        if self.on_progress is None or (not last and now - self._progress_at < PROGRESS_S):
            return
        self._progress_at = now
        report = self.report
        self.on_progress(
            {
                "step": report.steps,
                "samples": report.samples,
                "tokens": report.tokens,
                "tokens_per_s": round(report.tokens_per_s, 1),
                "wait_share": round(report.wait_share, 4),
                "bytes_fetched": report.bytes_fetched,
                "loss": report.loss_last,
            }
        )


def _check_lease(lease: Any) -> dict[str, Any]:
    """A lease as the scheduler must word it."""
    kinds = {
        "lease_id": str, "epoch": int, "slice": int, "name": str, "sha256": str, "bytes": int,
        "count": int, "offset": int, "sample_base": int, "providers": list,
    }  # fmt: skip
    if not isinstance(lease, dict) or not all(type(lease.get(key)) is kind for key, kind in kinds.items()):
        raise ProtocolViolation(f"lease: expected an object with {', '.join(kinds)}, got {lease!r:.200}")
    whole = 0 <= lease["offset"] < lease["count"] and lease["bytes"] > 0
    if not whole or not all(isinstance(p, dict) and {"peer_id", "address"} <= set(p) for p in lease["providers"]):
        raise ProtocolViolation(f"lease: its numbers or providers cannot be: {lease!r:.200}")
    return lease
