"""The worker: leases slices, prefetches them while it trains, acknowledges what it used.

The caller's thread trains. Others prefetch slices into a cache from which other workers are served. One talks to the
scheduler: a request carries signed receipts, the limit up to which samples may be used before the response, released
leases, and the number of leases wanted. So a step waits neither for the network nor for the scheduler, except when
data arrives slower than it is used; that wait is measured.

When a lease is lost, acknowledged samples stay used; the others are leased to another worker. `wasted` counts the
samples that were used here and not acknowledged: at most those of one `receipt_s`, and two steps.
"""

import contextlib
import itertools
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forebay.cache.cache import ChunkCache
from forebay.errors import ForebayError, UsageError
from forebay.lease.buffer import LeaseBuffer
from forebay.lease.fetching import CacheIndex, SliceFetcher
from forebay.lease.messages import ExchangeReply
from forebay.lease.scheduler_client import SchedulerClient, SchedulerUnreachableError
from forebay.lease.state import LeaseState
from forebay.ledger.chain import receipt_message
from forebay.network.client import Client
from forebay.network.discovery import Discovery
from forebay.network.limits import Throttle
from forebay.network.pki.identity import Identity
from forebay.network.reachability import advertised_host
from forebay.network.revocation_sync import TrustWatch
from forebay.storage.locks import Lock, try_acquire
from forebay.storage.peer_source import FromUrls, check_from_urls
from forebay.swarm.share import SliceShare
from forebay.threads import SupervisedThread
from forebay.worker.consumer import Consumer, OnBatch, WorkerReport
from forebay.worker.trainer import check_trainer

STOPPING_S = 3.0  # after a stop, for the last requests and for slices that others are reading
_CONTENT = re.compile(rb"([0-9a-f]{16}) (\d{1,9})\n")


def _open_session(directory: Path) -> tuple[str, int, Lock]:
    """Lock the first unlocked session of the cache directory: its name, and the number before its first attempt's."""
    numbers = itertools.count()
    while (lock := try_acquire(directory / f"session-{next(numbers)}")) is None:
        pass
    match = _CONTENT.fullmatch(os.pread(lock.descriptor, 64, 0))
    name = match[1].decode() if match else secrets.token_hex(8)
    run = int(match[2]) + 1 if match else 0
    content = f"{name} {run}\n".encode()
    os.pwrite(lock.descriptor, content, 0)
    os.ftruncate(lock.descriptor, len(content))
    return name, run << 32, lock


@dataclass(frozen=True)
class LeaseSettings:
    """The settings of a worker.

    Args:
        name: The job's, by which the scheduler is found; "" takes leases of any job of the scheduler at `scheduler`.
        cache_dir, cache_bytes: The directory of verified slices, and how much they may take, partial ones included.
        batch_size: Samples of a step; the last step of a slice may have fewer.
        scheduler: `host:port`; None finds it in the DHT.
        trainer: auto, count, none, or FILE.py:NAME of a class of one's own.
        receipt_s: A lost lease wastes at most the samples used in this time, and two steps; used samples are
            acknowledged twice as often.
        patience_s: How long the worker waits for a scheduler, or for providers, that do not answer. After 2.5 s a
            warning says what it waits for.
        share: `host:port` where other workers get cached slices, 0 for a free port, `0.0.0.0` or no host for every
            address of this machine; None: nowhere.
        upload_bytes_per_s: Limit of what is sent to other workers.
        from_urls: Which URLs that data nodes stand for are read: none, `public` or `any` (see storage.peer_source).
    """

    name: str
    cache_dir: str | Path
    cache_bytes: int
    batch_size: int
    scheduler: str | None = None
    trainer: str = "auto"
    receipt_s: float = 1.0
    patience_s: float = 60.0
    share: str | None = None
    upload_bytes_per_s: float | None = None
    from_urls: FromUrls = ""

    def __post_init__(self) -> None:
        check_from_urls(self.from_urls)
        if min(self.batch_size, self.cache_bytes) < 1:
            raise UsageError(
                f"worker: expected batch_size and cache_bytes from 1, got {self.batch_size} and {self.cache_bytes}."
            )
        check_trainer(self.trainer)
        if self.receipt_s <= 0 or self.patience_s <= 0:
            raise UsageError("worker: expected receipt_s and patience_s above 0.")
        if not self.name and not self.scheduler:
            raise UsageError("worker: expected a job's name or a scheduler's host:port, got neither.")
        if self.share is not None and not re.fullmatch(r".*:\d{1,5}", self.share):
            raise UsageError(f"worker: expected share as HOST:PORT, or none, got {self.share!r}.")


def run_worker(
    identity: Identity, name: str, *, discovery: Discovery | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None, on_batch: OnBatch | None = None,
    stop: threading.Event | None = None, **options: Any,
) -> WorkerReport:  # fmt: skip
    """Work until every sample of the job is used, or until `stop` is set; then acknowledge and release, and return.

    Args:
        discovery: The DHT; not needed with a scheduler's address.
        on_progress: Called every half second with step, samples, tokens, tokens_per_s, wait_share and loss.
        on_batch: Called after each step with the batch (`inputs` and `labels`, or the tensors of a row layout)
            and its global sample ids, int64 [B].
        options: The other fields of `LeaseSettings`, by name; `cache_dir`, `cache_bytes` and `batch_size` are needed.

    Raises:
        NetworkError: If the scheduler, or all providers, do not answer for longer than `patience_s`.
        UsageError: If a slice does not fit the cache, or the trainer does not fit the data.
    """
    settings = LeaseSettings(name, **options)
    stop = stop or threading.Event()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(contextlib.closing(Client(identity)))
        worker = _Worker(identity, client, settings, discovery, stop)
        stack.callback(worker.session_lock.release)
        stack.callback(worker.cache.close)
        trust = TrustWatch(identity, client, peers=worker.scheduler.addresses, discovery=discovery)
        stack.enter_context(contextlib.closing(trust.start()))
        if settings.share is not None:
            worker.share = _open_share(identity, settings, worker)
            stack.callback(worker.share.close, STOPPING_S)
        return worker.run(on_batch, on_progress)


class _Worker:
    """One run: a thread's requests to the scheduler, for the leases that a fetcher and a consumer work on."""

    def __init__(
        self, identity: Identity, client: Client, settings: LeaseSettings, discovery: Discovery | None,
        stop: threading.Event,
    ) -> None:  # fmt: skip
        self.identity = identity
        self.settings = settings
        self.report = WorkerReport()
        self.cache = ChunkCache(settings.cache_dir, settings.cache_bytes)
        self.index = CacheIndex(self.cache)
        self.share: SliceShare | None = None
        self._stop = stop
        self._session, first_attempt, self.session_lock = _open_session(self.cache.directory)
        self.scheduler = SchedulerClient(
            identity, client, settings.name, discovery, settings.scheduler, settings.patience_s, stop, first_attempt,
        )  # fmt: skip
        state = LeaseState(
            settings.batch_size, settings.cache_bytes, settings.receipt_s,
            lambda grant: self.cache.unpin_slice(grant.sha256),
        )  # fmt: skip
        self._leases = LeaseBuffer(state)
        self._fetcher = SliceFetcher(
            client, self.cache, self.index, self._leases, settings.patience_s, settings.from_urls
        )
        self._failure: Exception | None = None
        self._is_unreachable = False
        self._replied_at = time.monotonic()
        self._reports_all = True  # the next request says all that is cached, not only what changed

    def run(self, on_batch: OnBatch | None, on_progress: Callable[[dict[str, Any]], None] | None) -> WorkerReport:
        """Work in this thread until the job is done or the worker is stopped."""

        def progress() -> None:
            if on_progress is not None:
                on_progress(self._progress())

        settings, leases = self.settings, self._leases
        consumer = Consumer(leases, self.report, settings.trainer, on_batch, progress)
        threads = [SupervisedThread(self._request, "worker requests"), SupervisedThread(self._watch, "worker stop")]
        for thread in threads:
            thread.start()
        self._fetcher.start()
        try:
            consumer.run()
        finally:
            leases.close()
            self._fetcher.close()
            for thread in threads:
                thread.stop()
                thread.join()
            self._release_all()
            with leases.locked() as state:
                state.clear()
        if (failure := self._failure or self._fetcher.failure) is not None:
            raise failure
        self._update_report()
        consumer.measure()
        progress()
        return self.report

    def _watch(self) -> None:
        while not self._leases.state.closed:
            if self._stop.wait(0.1):
                self._leases.close()

    def _request(self) -> None:
        """Send one request after the other, whenever one is due.

        A `ForebayError` ends the work; so does any other exception once there was no reply for `patience_s`.
        """
        try:
            while self._leases.wait_due():
                self._exchange()
        except SchedulerUnreachableError as error:
            self._is_unreachable = True
            self._failure = None if self._stop.is_set() else error
        except Exception as error:
            is_transient = time.monotonic() - self._replied_at < self.settings.patience_s
            if is_transient and not isinstance(error, ForebayError):
                raise  # logged, and run again after a wait: a missing descriptor does not end the work
            self._failure = error
        self._leases.close()

    def _release_all(self) -> None:
        if self._is_unreachable:
            return
        with contextlib.suppress(SchedulerUnreachableError):  # the leases expire without a request
            while self._leases.state.leases:
                self._exchange(STOPPING_S, last=True)

    def _exchange(self, patience_s: float | None = None, last: bool = False) -> None:
        with self._leases.locked() as state:
            request = state.request(time.monotonic(), last)
        share, cached = self.share, dict[str, str]()
        if share is not None:
            cached = self.index.changes(everything=self._reports_all)
        signature = self.identity.sign(receipt_message(request.job_id, request.uses)).hex() if request.uses else ""
        body = replace(
            request, job=self.settings.name, session=self._session, cached=cached, signature=signature,
            address=share.address if share is not None else "",
        ).to_json()  # fmt: skip
        reply = ExchangeReply.from_json(self.scheduler.exchange(body, patience_s))
        self.index.mark_reported(cached)
        self._reports_all = reply.report_cached
        with self._leases.locked() as state:
            state.receive(request, reply, time.monotonic())
        self._replied_at = time.monotonic()

    def _update_report(self) -> None:
        report, state, fetcher = self.report, self._leases.state, self._fetcher
        report.wasted, report.leases_lost, report.done = state.counts.wasted, state.counts.lost, state.done
        report.bytes_fetched, report.slices_fetched = fetcher.bytes, fetcher.slices
        report.bytes_from_workers = fetcher.bytes_from_workers
        report.bytes_shared = self.share.bytes_sent if self.share is not None else 0
        report.num_left_out = state.num_left_out
        report.rejected = [vars(provider) for provider in state.counts.rejected]

    def _progress(self) -> dict[str, Any]:
        self._update_report()
        report = self.report
        names = ("samples", "tokens", "bytes_fetched", "bytes_shared")
        return {
            "step": report.steps, **{name: getattr(report, name) for name in names},
            "tokens_per_s": round(report.tokens_per_s, 1), "wait_share": round(report.wait_share, 4),
            "paused": self._leases.state.paused, "loss": report.loss_last,
        }  # fmt: skip


def _open_share(identity: Identity, settings: LeaseSettings, worker: _Worker) -> SliceShare:
    host, _, port = str(settings.share).rpartition(":")
    # The scheduler's network is the one in which others must reach this worker.
    others = [settings.scheduler] if settings.scheduler else [f"{host}:{port}" for host, port in identity.bootstrap]
    named = advertised_host(host, others[0]) if others else host
    throttle = Throttle(upload_bytes_per_s=settings.upload_bytes_per_s)
    return SliceShare(
        identity, worker.cache, worker.index.sizes, host or "0.0.0.0", int(port), throttle, advertised_host=named
    )
