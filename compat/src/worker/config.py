"""See `millrace.worker.config`."""

from millrace.worker.config import WorkerConfig

__all__ = ["WorkerConfig"]
