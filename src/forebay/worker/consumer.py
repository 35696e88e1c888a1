"""Uses the samples of leased slices: opens the slices, makes batches, trains on them, and counts."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.slices import Slice, open_slice
from forebay.errors import DatasetError
from forebay.lease.buffer import LeaseBuffer
from forebay.lease.messages import Lease
from forebay.lease.state import ActiveLease
from forebay.load.batch import make_batch
from forebay.network.retry import log_while_waiting
from forebay.order.plan import lease_order
from forebay.worker.trainer import Trainer, make_trainer

log = logging.getLogger("forebay.worker")
PROGRESS_S = 0.5
MAX_LOSSES = 20
OnBatch: TypeAlias = Callable[[dict[str, NDArray[Any]], NDArray[np.int64]], None]


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


@dataclass(eq=False)
class Consumer:
    """Uses the samples of leases, in the thread that calls `run`."""

    leases: LeaseBuffer
    report: WorkerReport
    trainer: str  # for `make_trainer`; each job has its own
    on_batch: OnBatch | None  # called after each step with the batch and its global sample ids
    on_progress: Callable[[], None]  # called at most every half second, after a step

    def __post_init__(self) -> None:
        self._trainers: dict[tuple[str, str], Trainer | None] = {}
        self._losses: list[float] = []
        self._started_at = self._progress_at = time.monotonic()

    def run(self) -> None:
        """Use lease after lease, until the buffer is closed."""
        while (lease := self._next()) is not None:
            try:
                self._use(lease)
            except DatasetError as error:
                self.report.slices_failed += 1
                with self.leases.locked() as state:
                    state.fail(lease, str(error))
            finally:
                with self.leases.locked() as state:
                    state.finish(lease)

    def _next(self) -> ActiveLease | None:
        def describe() -> str:
            with self.leases.locked() as state:
                return state.describe_wait()

        with log_while_waiting(log, describe):
            return self.leases.next_to_use()

    def _use(self, lease: ActiveLease) -> None:
        grant = lease.grant
        assert lease.path is not None
        opened = open_slice(lease.path)
        _check_size(opened, grant)
        trainer = self._trainer_of(grant)
        lease.read_ids = np.empty(grant.stop - grant.start, np.int64)
        order = lease_order(grant.seed, grant.epoch, grant.slice, grant.count, grant.start, grant.stop)
        while (step := self.leases.take(lease)) is not None:
            start, stop = step
            indexes = order[start - grant.start : stop - grant.start]
            if grant.layout == "tokens":
                inputs, labels = make_batch(opened.tokens, indexes, grant.seq_len, np.int64)
                batch = {"inputs": inputs, "labels": labels}
                if trainer is not None:
                    self._losses.append(trainer.step(inputs, labels))
            else:
                batch = {name: tensor[indexes] for name, tensor in opened.tensors.items()}
            ids = lease.read_ids[start - grant.start : stop - grant.start] = grant.sample_base + indexes
            if self.on_batch is not None:
                self.on_batch(batch, ids)
            self._count(len(indexes), grant.seq_len if grant.layout == "tokens" else 0)
            self.leases.used(lease, self.report.steps)

    def _trainer_of(self, grant: Lease) -> Trainer | None:
        key = (grant.job_id, grant.layout)
        if key not in self._trainers:
            self._trainers[key] = make_trainer(
                self.trainer, vocab_size=grant.vocab_size, dtype=grant.dtype, seq_len=grant.seq_len,
                layout=grant.layout, is_used=self.on_batch is not None,
            )  # fmt: skip
        return self._trainers[key]

    def _count(self, samples: int, seq_len: int) -> None:
        report = self.report
        report.steps += 1
        report.samples += samples
        report.tokens += samples * seq_len
        if self._losses and len(self._losses) <= MAX_LOSSES:
            report.loss_first = float(np.mean(self._losses))
        self._losses = self._losses[-MAX_LOSSES:] if report.steps > MAX_LOSSES else self._losses
        if self._losses:
            report.loss_last = float(np.mean(self._losses))
        self.measure()
        now = time.monotonic()
        if now - self._progress_at >= PROGRESS_S:
            self._progress_at = now
            self.on_progress()

    def measure(self) -> None:
        """Update the rates of the report."""
        elapsed = max(1e-9, time.monotonic() - self._started_at)
        self.report.tokens_per_s = self.report.tokens / elapsed
        self.report.wait_share = min(1.0, self.leases.state.counts.waited_s / elapsed)


def _check_size(opened: Slice, grant: Lease) -> None:
    """Raise DatasetError if a slice does not have its samples: its bytes are right, the job's data about it are not."""
    if opened.layout != grant.layout:
        raise DatasetError(f"slice {grant.name}: expected layout {grant.layout}, got {opened.layout}.")
    count = len(opened.tokens) // grant.seq_len if grant.layout == "tokens" else opened.num_rows
    if count < grant.count:
        raise DatasetError(f"slice {grant.name}: expected {grant.count} samples, got {count}.")
