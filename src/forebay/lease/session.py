"""One session of a worker: its leases, and the threads that fetch their slices and talk to the scheduler.

One thread sends requests with signed receipts, the limit up to which samples may be used before the response, released
leases, and the number of leases wanted. Others fetch slices into a cache from which other workers are served. So a step
waits neither for the network nor for the scheduler, except when data arrives slower than it is used.

When a lease is lost, acknowledged samples stay used; the others are leased to another worker. See `LeaseState` for what
is wasted.
"""

import contextlib
import itertools
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from forebay.base import Closing
from forebay.errors import ForebayError
from forebay.fetch.feed import ChunkFeed
from forebay.lease.fetching import CacheIndex, GrantedProviders, LeaseFetches
from forebay.lease.job import LeaseJob
from forebay.lease.messages import Cause, ExchangeReply, ExchangeRequest, WorkerStats
from forebay.lease.scheduler_client import SchedulerClient, SchedulerUnreachableError
from forebay.lease.state import LeaseState
from forebay.ledger.chain import receipt_message
from forebay.network.audit import open_audit_log
from forebay.network.messages import REFUSED
from forebay.network.revocation_sync import TrustWatch
from forebay.storage.locks import Lock, try_acquire
from forebay.swarm.share import SliceShare
from forebay.threads import SupervisedThread

STATS_INTERVAL_S = 2.0
FAULT_S = 10.0  # without work or a reply: its status is not healthy
STOPPING_S = 3.0  # after a stop, for the last requests and for slices that others are reading
_CONTENT = re.compile(rb"([0-9a-f]{16}) (\d{1,9})\n")


@dataclass(frozen=True)
class SessionSettings:
    """The settings of a session.

    Args:
        cache_bytes: How much the slices of the leases may take.
        batch_size: Samples of a step.
        receipt_s: See `LeaseState`.
        share: `host:port` where other workers get cached slices; port 0: any; no host: every address of this machine;
            None: nowhere.
        upload_bytes_per_s: Limit of what is sent to other workers.
    """

    cache_bytes: int
    batch_size: int
    receipt_s: float
    share: str | None
    upload_bytes_per_s: float | None


class LeaseSession(Closing):
    """Leases of a job, from construction to `close`, which acknowledges what was used and releases the rest.

    The feed `slices` fetches their slices, of which `first_key` is the dataset's first, from `granted`, its providers.

    `failure` is set when the leases closed because of an error: no scheduler, or no provider, for `patience_s`; a
    slice that does not fit the cache.
    """

    def __init__(
        self, job: LeaseJob, settings: SessionSettings, slices: ChunkFeed, granted: GrantedProviders,
        first_key: int, stats_of_loader: Callable[[], Mapping[str, float]],
    ) -> None:  # fmt: skip
        self.job = job
        self._slices = slices
        self._stats_of_loader = stats_of_loader
        self._stats_at = 0.0
        self._replied_at = time.monotonic()
        with contextlib.ExitStack() as stack:
            self.cache = slices.open_cache()
            # The first session of the cache directory that no process has.
            paths = (self.cache.directory / f"session-{number}" for number in itertools.count())
            self._name, job.scheduler.attempt, lock = next(filter(None, map(_lock_session, paths)))
            stack.callback(lock.release)
            self.index = CacheIndex(self.cache, job.dataset)
            self.leases = LeaseState(
                settings.batch_size, settings.cache_bytes, settings.receipt_s, lambda grant: self.fetches.release(grant)
            )
            self.fetches = LeaseFetches(job, slices, granted, first_key, self.leases)
            trust = TrustWatch(job.identity, job.client, peers=job.scheduler.addresses, discovery=job.discovery)
            stack.enter_context(contextlib.closing(trust.start()))
            self._share: SliceShare | None = None
            if settings.share is not None:
                job.identity.audit = job.identity.audit or open_audit_log()
                # The scheduler's network is the one in which others must reach this worker.
                others = job.scheduler.addresses() or [f"{host}:{port}" for host, port in job.identity.bootstrap]
                self._share = SliceShare(
                    job.identity,
                    self.cache,
                    self.index.sizes,
                    settings.share,
                    settings.upload_bytes_per_s,
                    towards=next(iter(others), ""),
                    find_waits=self._find_waits,
                )
                stack.callback(self._share.close, STOPPING_S)
            self._resources = stack.pop_all()
        self._failure: Exception | None = None
        self._cannot_report = self._is_closed = False
        self._reports_all = True  # the next request says all that is cached, not only what changed
        job.scheduler.stop = threading.Event()
        self._thread = SupervisedThread(self._request, "worker requests").start()

    @property
    def failure(self) -> Exception | None:
        return self._failure or self.fetches.failure

    def close(self) -> None:
        """Acknowledge what was used, release the leases, and end the threads. May be repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        self.job.scheduler.stop.set()
        self.leases.close()
        self._thread.stop()
        self._thread.join()
        try:
            if not self._cannot_report:
                with contextlib.suppress(SchedulerUnreachableError):  # the leases expire without a request
                    while self.leases.leases:
                        self._exchange(STOPPING_S, last=True)
        finally:
            with self.leases.locked() as state:
                state.clear()
            self._resources.close()

    def counts(self) -> dict[str, int]:
        """What was shared, lost and wasted, as numbers."""
        state = self.leases
        return {
            "shared_bytes": self._share.bytes_sent if self._share is not None else 0,
            "leases_lost": state.num_lost, "wasted_samples": state.num_wasted,
            "rejected_providers": len(state.rejected), "samples_left_out": state.num_left_out,
            "done": int(state.done),
        }  # fmt: skip

    def _request(self) -> None:
        """Send one request after the other, whenever one is due.

        A `ForebayError` ends the work; so does any other exception once there was no reply for `patience_s`.
        """
        try:
            while self.leases.wait_due():
                self._exchange()
                self.fetches.update()
        except SchedulerUnreachableError as error:
            self._cannot_report = True
            self._failure = None if self.job.scheduler.stop.is_set() else error
        except Exception as error:
            is_transient = time.monotonic() - self._replied_at < self.job.patience_s
            if is_transient and not isinstance(error, ForebayError):
                raise  # logged, and run again after a wait: a missing descriptor does not end the work
            self._failure, self._cannot_report = error, getattr(error, "code", "") in REFUSED
        self.leases.close()

    def _exchange(self, patience_s: float | None = None, last: bool = False) -> None:
        job = self.job
        with self.leases.locked() as state:
            request = state.request(time.monotonic(), last)
        share = self._share
        cached = self.index.changes(everything=self._reports_all) if share is not None else {}
        signature = job.identity.sign(receipt_message(request.job_id, request.uses)).hex() if request.uses else ""
        is_due = time.monotonic() - self._stats_at >= STATS_INTERVAL_S
        body = replace(
            request, job=job.name, session=self._name, cached=cached, signature=signature,
            address=share.address if share is not None else "", stats=self._stats() if is_due else None,
        ).to_json()  # fmt: skip
        reply = ExchangeReply.from_json(job.scheduler.exchange(body, patience_s))
        self.index.mark_reported(cached)
        self._reports_all = reply.report_cached
        with self.leases.locked() as state:
            state.receive(request, reply, time.monotonic())
        self._replied_at = time.monotonic()

    def _stats(self) -> WorkerStats:
        totals = self._stats_of_loader()
        self._stats_at = time.monotonic()
        origin_bytes = self._slices.bytes_of_last()
        waiting_for: Cause = "network" if self.leases.fetching() else "scheduler"
        return WorkerStats(
            batches=int(totals.get("batches", 0)), busy_s=totals.get("busy_s", 0.0),
            waits_s={cause: totals[f"{cause}_s"] for cause in get_args(Cause) if totals.get(f"{cause}_s")},
            waiting_s=totals.get("waiting_s", 0.0), waiting_for=waiting_for, ideal_s=totals.get("ideal_s", 0.0),
            cached_bytes=self.cache.used_bytes(), cache_bytes=self.cache.budget_bytes,
            origin_bytes=origin_bytes, peer_bytes=max(0, int(totals.get("fetched_bytes", 0)) - origin_bytes),
            shared_bytes=self._share.bytes_sent if self._share is not None else 0,
        )  # fmt: skip

    def _find_waits(self) -> list[str]:
        """Return what kept this worker from its job for FAULT_S or longer."""
        late = time.monotonic() - FAULT_S
        if self._replied_at < late:
            return [self.job.scheduler.describe_wait()]
        with self.leases.locked() as state:
            text = state.describe_wait()
            return [text] if text and (self.fetches.starved_at or late) < late else []


def _lock_session(path: Path) -> tuple[str, int, Lock] | None:
    """Lock an unlocked session: its name, and the number before its first attempt's."""
    if (lock := try_acquire(path)) is None:
        return None
    match = _CONTENT.fullmatch(os.pread(lock.descriptor, 64, 0))
    name = match[1].decode() if match else secrets.token_hex(8)
    run = int(match[2]) + 1 if match else 0
    content = f"{name} {run}\n".encode()
    os.pwrite(lock.descriptor, content, 0)
    os.ftruncate(lock.descriptor, len(content))
    return name, run << 32, lock


def return_leases(directory: Path, scheduler: SchedulerClient) -> None:
    """Return the leases of the sessions of a cache directory whose processes died.

    NetworkError if the scheduler does not answer, or refuses it: the leases expire.
    """
    for path in sorted(directory.glob("session-*")):
        if (opened := _lock_session(path)) is not None:
            name, scheduler.attempt, lock = opened
            with lock:
                body = ExchangeRequest(job=scheduler.name, session=name, known_leases=()).to_json()
                scheduler.exchange(body, STOPPING_S)
