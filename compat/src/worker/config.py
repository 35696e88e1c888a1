"""See `forebay.worker.config`."""

from forebay.worker.config import WorkerConfig

__all__ = ["WorkerConfig"]
