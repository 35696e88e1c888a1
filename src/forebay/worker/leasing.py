"""The worker: leases slices, fetches the next while it trains on this one, acknowledges what it used.

The caller's thread trains. Some fetch ahead, into a cache that other workers are served from. One keeps the line to
the scheduler: an exchange carries receipts under one signature, how far it will go on before it hears the answer,
what it gives back and what it wants. So a step waits neither for the network nor for the scheduler, except when data
comes slower than it is used, and that wait is measured.

A lease that is lost costs the rest of its slice here, and nothing twice: what was acknowledged is used, what was
not is somebody else's to use. `wasted` counts those samples: at most what is used in one `receipt_s`, and a step.
"""

import contextlib
import itertools
import os
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.errors import UsageError
from forebay.ledger.receipts import receipt_message
from forebay.network.client import Client
from forebay.network.dialing import named_host
from forebay.network.discovery import Discovery
from forebay.network.identity import Identity
from forebay.network.limits import Throttle
from forebay.network.trust import TrustWatch
from forebay.schedule.ask import Ask
from forebay.store.cache import SliceCache
from forebay.store.locks import Lock, try_take
from forebay.store.share import SliceShare
from forebay.worker.answers import Answer
from forebay.worker.control import Control, SchedulerGone
from forebay.worker.fetching import Fetcher, Shelf
from forebay.worker.hand import MAX_LEASES, Hand
from forebay.worker.trainer import check_trainer
from forebay.worker.using import Consumer, OnBatch, WorkerReport

_CONTENT = re.compile(rb"([0-9a-f]{16}) (\d{1,9})\n")


@dataclass(frozen=True)
class Session:
    """A session's name, and the number before that of its first attempt. Held until `close` or the process's end."""

    name: str
    first_attempt: int
    lock: Lock

    def close(self) -> None:
        """Let another process have it. May be repeated."""
        self.lock.release()


def open_session(directory: Path) -> Session:
    """The first session of a cache's directory that nobody has, begun or gone on with."""
    numbers = itertools.count()
    while (lock := try_take(directory / f"session-{next(numbers)}")) is None:
        pass
    found = _CONTENT.fullmatch(os.pread(lock.descriptor, 64, 0))
    name = found[1].decode() if found else secrets.token_hex(8)
    run = int(found[2]) + 1 if found else 0
    content = f"{name} {run}\n".encode()
    os.pwrite(lock.descriptor, content, 0)
    os.ftruncate(lock.descriptor, len(content))
    return Session(name, run << 32, lock)


@dataclass(frozen=True)
class LeaseSettings:
    """What a worker is told: see `run_worker`. UsageError if a value is out of range."""

    name: str
    cache_dir: Path
    cache_bytes: int
    batch_size: int
    scheduler: str | None = None
    trainer: str = "auto"
    receipt_s: float = 1.0
    patience_s: float = 60.0
    ahead: int | None = None
    share: str | None = None
    upload_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.cache_bytes < 1:
            raise UsageError(
                "worker: expected batch_size and cache_bytes of at least 1, "
                f"got {self.batch_size} and {self.cache_bytes}."
            )
        check_trainer(self.trainer)
        if self.receipt_s <= 0 or self.patience_s <= 0:
            raise UsageError("worker: expected receipt_s and patience_s above 0.")
        if not self.name and not self.scheduler:
            raise UsageError("worker: expected a job's name or a scheduler's host:port, got neither.")
        if self.ahead is not None and not 1 <= self.ahead <= MAX_LEASES - 1:
            raise UsageError(f"worker: expected from 1 to {MAX_LEASES - 1} leases ahead, got {self.ahead}.")
        if self.share is not None and not re.fullmatch(r".*:\d{1,5}", self.share):
            raise UsageError(f"worker: expected share as HOST:PORT, or none, got {self.share!r}.")


__all__ = ["WorkerReport", "run_worker"]

# When told to stop: so long for what is still to be said.
SETTLE_S = 3.0


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
    receipt_s: float = 1.0,
    patience_s: float = 60.0,
    ahead: int | None = None,
    share: str | None = None,
    upload_bytes_per_s: float | None = None,
    on_batch: OnBatch | None = None,
) -> WorkerReport:
    """Works until every sample of the job is used, or until `stop` is set: then it settles up and returns.

    Args:
        name: The job's, by which the scheduler is found; "" takes whatever job the scheduler gives, and needs its
            address.
        scheduler: `host:port`; None finds it in the DHT.
        cache_dir, cache_bytes: Where verified slices lie and how much they may take, partial ones included.
        batch_size: Samples in a step; the last step of a slice may have fewer.
        trainer: auto, count, none, or FILE.py:NAME of a program of one's own.
        on_progress: Called every half second with step, samples, tokens, tokens_per_s, wait_share and loss.
        receipt_s: A lost lease wastes at most the samples used in this time, and a step; what was used is acknowledged
            twice as often.
        patience_s: How long a scheduler, or providers, that do not answer are waited for. After 2.5 s a warning is
            logged that says what for.
        ahead: Leases in hand beyond the one in use, 1 to 15; None: as many as keep the fetching ahead.
        share: `host:port` where other workers get what this one cached, 0 for a free port, `0.0.0.0` or no host for
            every address of this machine; None: nowhere.
        upload_bytes_per_s: What it sends to them at most.
        on_batch: Called after each step with the batch (`inputs` and `labels`, or the tensors of a row layout)
            and its global sample ids, int64 [B].

    Raises:
        NetworkError: If the scheduler, or all providers, stay away longer than `patience_s`.
        UsageError: If a slice does not fit the cache, or the trainer does not fit the data.
    """
    settings = LeaseSettings(
        name, Path(cache_dir), cache_bytes, batch_size, scheduler, trainer, receipt_s, patience_s, ahead, share,
        upload_bytes_per_s,
    )  # fmt: skip
    stop = stop or threading.Event()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(contextlib.closing(Client(identity)))
        worker = _Worker(identity, client, settings, discovery, stop)
        stack.callback(worker.session.close)
        trust = TrustWatch(identity, client, known=worker.control.known, discovery=discovery)
        stack.enter_context(contextlib.closing(trust.start()))
        if settings.share is not None:
            worker.share = _open_share(identity, settings, worker)
            stack.callback(worker.share.close, SETTLE_S)
        return worker.run(on_batch, on_progress)


class _Worker:
    """One run: the line to the scheduler, in a thread, between a hand, a fetcher and a consumer."""

    def __init__(
        self,
        identity: Identity,
        client: Client,
        settings: LeaseSettings,
        discovery: Discovery | None,
        stop: threading.Event,
    ) -> None:
        self.identity = identity
        self.settings = settings
        self.report = WorkerReport()
        self.cache = SliceCache(settings.cache_dir, settings.cache_bytes)
        self.shelf = Shelf(self.cache)
        self.share: SliceShare | None = None
        self._stop = stop
        self.session = open_session(self.cache.directory)
        self.control = Control(
            identity,
            client,
            settings.name,
            discovery,
            settings.scheduler,
            settings.patience_s,
            stop,
            self.session.first_attempt,
        )
        self._hand = Hand(
            settings.batch_size,
            settings.ahead,
            settings.cache_bytes,
            settings.receipt_s,
            lambda grant: self.cache.unpin(grant.sha256),
        )
        self._fetcher = Fetcher(client, self.cache, self.shelf, self._hand, settings.patience_s)
        self._failure: Exception | None = None
        self._gone = False
        self._must_tell_all = True

    def run(self, on_batch: OnBatch | None, on_progress: Callable[[dict[str, Any]], None] | None) -> WorkerReport:
        """Works in this thread until the job is done or the worker is told to stop."""

        def progress() -> None:
            if on_progress is not None:
                on_progress(self._progress())

        settings, hand = self.settings, self._hand
        consumer = Consumer(hand, self.report, settings.batch_size, settings.trainer, on_batch, progress)
        threads = [
            threading.Thread(target=target, name=f"worker {target.__name__}", daemon=True)
            for target in (self._keep, self._watch)
        ]
        for thread in threads:
            thread.start()
        self._fetcher.start()
        try:
            consumer.run()
        finally:
            hand.close()
            self._fetcher.close()
            threads[0].join()
            self._settle()
            hand.empty()
        if (failure := self._failure or self._fetcher.failure) is not None:
            raise failure
        self._tally()
        consumer.measure()
        progress()
        return self.report

    def _watch(self) -> None:
        """Ends the work when the worker is told to stop."""
        while not self._hand.is_closed:
            if self._stop.wait(0.1):
                self._hand.close()

    def _keep(self) -> None:
        """The line to the scheduler: one exchange after the other, whenever there is something to say."""
        try:
            while self._hand.wait_due():
                self._exchange(self._hand.state())
        except SchedulerGone as error:
            self._gone = True
            self._failure = None if self._stop.is_set() else error
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller of run gets it
            self._failure = error
        finally:
            self._hand.close()

    def _settle(self) -> None:
        """What was used is acknowledged, the rest given back; uses of several jobs take an exchange each."""
        if self._gone:
            return
        with contextlib.suppress(SchedulerGone):  # the leases expire by themselves
            while (said := self._hand.state(last=True)).held:
                self._exchange(said, SETTLE_S)

    def _exchange(self, said: Ask, patience_s: float | None = None) -> None:
        news = self.shelf.news(everything=self._must_tell_all) if self.share is not None else {}
        answer = Answer.from_json(self.control.exchange(self._body(said, news), patience_s))
        self.shelf.told(news)
        self._must_tell_all = answer.tell_have
        self._hand.apply_answer(said, answer)

    def _body(self, said: Ask, news: dict[str, str]) -> dict[str, Any]:
        """A statement as the scheduler's door takes it, with one signature over all receipts."""
        body: dict[str, Any] = {
            "job": self.settings.name,
            "session": self.session.name,
            "address": self.share.address if self.share is not None else "",
            "held": list(said.held or ()),
            "horizons": said.horizons,
            "release": list(said.release),
            "failed": [vars(failed) for failed in said.failed],
            "want": said.want,
            "have": news,
            "bad": [vars(report) for report in said.reports],
        }
        if said.uses:
            body["job_id"] = said.job_id
            body["uses"] = [
                {
                    "lease_id": use.lease, "epoch": use.epoch, "slice": use.slice,
                    "start": use.start, "stop": use.stop, "step": use.step, "digest": use.digest,
                }
                for use in said.uses
            ]  # fmt: skip
            body["signature"] = self.identity.sign(receipt_message(said.job_id, said.uses)).hex()
        return {name: value for name, value in body.items() if value or name == "held"}

    def _tally(self) -> None:
        report, tally, fetcher = self.report, self._hand.tally, self._fetcher
        report.wasted, report.leases_lost, report.done = tally.wasted, tally.lost, self._hand.done
        report.bytes_fetched, report.slices_fetched = fetcher.bytes, fetcher.slices
        report.bytes_from_workers = fetcher.bytes_from_workers
        report.bytes_shared = self.share.bytes_sent if self.share is not None else 0
        report.num_left_out = self._hand.num_left_out
        report.rejected = [vars(bad) for bad in tally.bad]

    def _progress(self) -> dict[str, Any]:
        self._tally()
        report = self.report
        return {
            "step": report.steps,
            "samples": report.samples,
            "tokens": report.tokens,
            "tokens_per_s": round(report.tokens_per_s, 1),
            "wait_share": round(report.wait_share, 4),
            "bytes_fetched": report.bytes_fetched,
            "bytes_shared": report.bytes_shared,
            "paused": self._hand.paused,
            "loss": report.loss_last,
        }


def _open_share(identity: Identity, settings: LeaseSettings, worker: _Worker) -> SliceShare:
    host, _, port = str(settings.share).rpartition(":")
    # The scheduler's network is the one in which others must reach this worker.
    others = [settings.scheduler] if settings.scheduler else [f"{host}:{port}" for host, port in identity.bootstrap]
    named = named_host(host, others[0]) if others else host
    throttle = Throttle(upload_bytes_per_s=settings.upload_bytes_per_s)
    return SliceShare(identity, worker.cache, worker.shelf.sizes, host or "0.0.0.0", int(port), throttle, named=named)
