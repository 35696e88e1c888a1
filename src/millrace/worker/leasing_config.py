"""A worker's settings, checked once when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millrace.errors import UsageError
from millrace.worker.trainer import TRAINERS


@dataclass(frozen=True)
class LeaseSettings:
    """What a worker is told.

    Args:
        name: The dataset's name, by which the scheduler is found.
        cache_dir, cache_bytes: Where verified slices lie and how much they may take, partial ones included.
        batch_size: Samples in a step; the last step of a slice may have fewer.
        scheduler: `host:port`; None finds it in the DHT.
        trainer: auto, gpt, count or none.
        receipt_s: How often used samples are acknowledged within a slice.
        patience_s: How long a scheduler that does not answer is waited for.
    """

    name: str
    cache_dir: Path
    cache_bytes: int
    batch_size: int
    scheduler: str | None = None
    trainer: str = "auto"
    receipt_s: float = 0.5
    patience_s: float = 60.0

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
