"""A worker's settings, checked once when they are made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import UsageError
from forebay.worker.hand import MAX_LEASES
from forebay.worker.trainer import TRAINERS


@dataclass(frozen=True)
class LeaseSettings:
    """What a worker is told.

    Args:
        name: The job's name, by which the scheduler is found; "": any job of the scheduler at an address.
        cache_dir, cache_bytes: Where verified slices lie and how much they may take, partial ones included.
        batch_size: Samples in a step; the last step of a slice may have fewer.
        scheduler: `host:port`; None finds it in the DHT.
        trainer: auto, gpt, count or none.
        receipt_s: A lost lease wastes at most the samples used in this time, and a step.
        patience_s: How long a scheduler, or providers, that do not answer are waited for.
        ahead: Leases in hand beyond the one in use; None: as many as keep the fetching ahead.
        share: `host:port` where other workers get what this one cached, host `0.0.0.0` or none: at
            every address of this host, named to others as the scheduler sees it; None: nowhere.
        upload_bytes_per_s: What it sends to them at most.
    """

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
        if self.trainer not in TRAINERS:
            raise UsageError(f"worker: expected trainer one of {', '.join(TRAINERS)}, got {self.trainer!r}.")
        if self.receipt_s <= 0 or self.patience_s <= 0:
            raise UsageError("worker: expected receipt_s and patience_s above 0.")
        if not self.name and not self.scheduler:
            raise UsageError("worker: expected a job's name or a scheduler's host:port, got neither.")
        if self.ahead is not None and not 1 <= self.ahead <= MAX_LEASES - 1:
            raise UsageError(f"worker: expected from 1 to {MAX_LEASES - 1} leases ahead, got {self.ahead}.")
        if self.share is not None and not re.fullmatch(r".*:\d{1,5}", self.share):
            raise UsageError(f"worker: expected share as HOST:PORT, or none, got {self.share!r}.")
