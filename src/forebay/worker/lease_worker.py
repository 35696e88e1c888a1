"""The worker of a lease job: trains on a Loader's batches, in the caller's thread, and reports what it did."""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.lease.job import LeaseJob
from forebay.lease.scheduler_client import SchedulerUnreachableError
from forebay.load.batch import TokenBatch
from forebay.load.loader import Loader
from forebay.load.options import NetworkOptions, SampleOptions
from forebay.network.discovery import Discovery
from forebay.network.pki.identity import Identity
from forebay.storage.peer_source import FromUrls, check_from_urls
from forebay.threads import SupervisedThread
from forebay.worker.trainer import check_trainer, make_trainer

PROGRESS_S = 0.5
MAX_LOSSES = 20
OnBatch: TypeAlias = Callable[[dict[str, NDArray[Any]], NDArray[np.int64]], None]


@dataclass(frozen=True)
class LeaseSettings:
    """The settings of a worker.

    Args:
        name: The job's, by which the scheduler is found; "" takes leases of any job of the scheduler at `scheduler`.
        cache_dir, cache_bytes: The directory of verified slices, and how much they may take, partial ones included.
        batch_size: Samples of a step; a step has fewer where no other lease is here.
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


@dataclass
class WorkerReport:
    """What a worker did. Losses are means over the first and last steps; `wait_share` is in [0, 1]."""

    samples: int = 0
    tokens: int = 0
    steps: int = 0
    wasted: int = 0  # samples used here and not acknowledged in time: other workers use them again
    tokens_per_s: float = 0.0
    loss_first: float | None = None
    loss_last: float | None = None
    wait_share: float = 0.0
    bytes_fetched: int = 0
    bytes_from_workers: int = 0
    bytes_shared: int = 0
    slices_fetched: int = 0
    slices_failed: int = 0
    leases_lost: int = 0  # lost after their first sample
    rejected: list[dict[str, Any]] = field(default_factory=list)  # providers rejected for a slice
    done: bool = False  # nothing is left to lease
    num_left_out: int = 0  # samples of slices set aside: no worker used them


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
    waiting = threading.Event()  # ends the waits of the start, and those of the loader

    def watch() -> None:
        while not stop.wait(0.1):
            if ended.is_set():
                return
        waiting.set()
        if loaders:
            loaders[0].leases.sessions.stop()

    ended, loaders = threading.Event(), list[Any]()
    watcher = SupervisedThread(watch, "worker stop")
    watcher.start()
    try:
        with _open_loader(identity, settings, discovery, waiting) as loader:
            loaders.append(loader)
            if waiting.is_set():
                loaders[0].leases.sessions.stop()
            return _Worker(loader, settings.trainer, on_batch, on_progress).run(stop)
    except SchedulerUnreachableError:
        if not stop.is_set():
            raise
        return WorkerReport()
    finally:
        ended.set()
        watcher.stop()
        watcher.join()


def _open_loader(
    identity: Identity, settings: LeaseSettings, discovery: Discovery | None, stop: threading.Event
) -> Loader[Any]:
    """A loader of the job's samples, whatever their settings."""
    job = LeaseJob(
        identity, settings.name, settings.scheduler, discovery=discovery, patience_s=settings.patience_s,
        from_urls=settings.from_urls, stop=stop,
    )  # fmt: skip
    info = job.info
    split, fraction = info.get("split") or (None, 0.0)
    network = NetworkOptions(
        listen=settings.share, receipt_s=settings.receipt_s, upload_bytes_per_s=settings.upload_bytes_per_s
    )
    seq_len: Any = int(info["seq_len"]) if info["layout"] == "tokens" else None
    return Loader(
        job.dataset.origin.url, seq_len=seq_len, batch_size=settings.batch_size,
        packing=info.get("packing", "concat"), split=split, samples=SampleOptions(validation_fraction=fraction),
        cache_dir=settings.cache_dir, cache_bytes=settings.cache_bytes, network=network,
        scheduler=job,
    )  # fmt: skip


class _Worker:
    """One run: steps of a trainer over the batches of a loader."""

    def __init__(
        self, loader: Loader[Any], trainer: str, on_batch: OnBatch | None,
        on_progress: Callable[[dict[str, Any]], None] | None,
    ) -> None:  # fmt: skip
        assert loader.leases is not None
        self._loader, self._leases = loader, loader.leases
        self._on_batch, self._on_progress = on_batch, on_progress or (lambda progress: None)
        manifest = loader.dataset.manifest
        self._trainer = make_trainer(
            trainer, vocab_size=manifest.vocab_size, dtype=manifest.dtype, seq_len=loader.seq_len or 0,
            layout=manifest.layout, is_used=on_batch is not None,
        )  # fmt: skip
        self._report = WorkerReport()
        self._losses: list[float] = []
        self._started_at = self._progress_at = time.monotonic()

    def run(self, stop: threading.Event) -> WorkerReport:
        """Work in this thread until the job is done or the worker is stopped."""
        report = self._report
        try:
            for batch in self._loader:
                if self._trainer is not None:
                    assert isinstance(batch, TokenBatch)
                    self._losses.append(self._trainer.step(batch.inputs, batch.labels))
                if self._on_batch is not None:
                    arrays = dict(batch.arrays())
                    self._on_batch(arrays, batch.sample_ids)
                self._count(len(batch))
        finally:
            self._update()
            self._loader.close()
        report.done = self._is_done
        self._update()
        self._on_progress(self._progress())
        return report

    def _count(self, samples: int) -> None:
        report = self._report
        report.steps += 1
        report.samples += samples
        report.tokens += samples * (self._loader.seq_len or 0)
        if self._losses and len(self._losses) <= MAX_LOSSES:
            report.loss_first = float(np.mean(self._losses))
        self._losses = self._losses[-MAX_LOSSES:] if report.steps > MAX_LOSSES else self._losses
        if self._losses:
            report.loss_last = float(np.mean(self._losses))
        now = time.monotonic()
        if now - self._progress_at >= PROGRESS_S:
            self._progress_at = now
            self._update()
            self._on_progress(self._progress())

    def _update(self) -> None:
        report, stats, sessions = self._report, self._loader.stats(), self._leases.sessions
        self._is_done = sessions.is_done
        elapsed = max(1e-9, time.monotonic() - self._started_at)
        report.tokens_per_s, report.wait_share = report.tokens / elapsed, min(1.0, stats["wait_s"] / elapsed)
        report.wasted, report.leases_lost = int(stats["wasted_samples"]), int(stats["leases_lost"])
        report.bytes_fetched, report.slices_fetched = int(stats["fetched_bytes"]), int(stats["fetched_slices"])
        report.bytes_from_workers = int(stats["fetched_bytes_of_workers"])
        report.bytes_shared = int(stats["shared_bytes"])
        report.num_left_out, report.slices_failed = int(stats["samples_left_out"]), self._leases.num_failed
        report.rejected = [asdict(provider) for provider in sessions.rejected]

    def _progress(self) -> dict[str, Any]:
        report = self._report
        names = ("samples", "tokens", "bytes_fetched", "bytes_shared")
        return {
            "step": report.steps, **{name: getattr(report, name) for name in names},
            "tokens_per_s": round(report.tokens_per_s, 1), "wait_share": round(report.wait_share, 4),
            "paused": self._leases.sessions.is_paused, "loss": report.loss_last,
        }  # fmt: skip
