"""What to do about a failure that a worker's settings can mend."""

from __future__ import annotations

from forebay.errors import UsageError
from forebay.worker.config import WorkerConfig

_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory")


class OutOfMemory(UsageError, RuntimeError):  # noqa: N818 - as PyTorch calls it
    """A step did not fit the memory of its device; also a RuntimeError. The settings that were tried are attributes."""

    def __init__(self, message: str, batch_size: int, seq_len: int) -> None:
        super().__init__(message)
        self.batch_size, self.seq_len = batch_size, seq_len


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step failed as its device's memory was full, however the framework says so."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).casefold() for sign in _SIGNS)


def out_of_memory(error: BaseException, config: WorkerConfig) -> OutOfMemory:
    """The failure in its own words, then the settings that it happened with and the next smaller ones."""
    first = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    batch_size, seq_len = config.batch_size, config.resolved_seq_len()
    advice = []
    if batch_size > 1:
        advice.append(f"batch_size={max(1, batch_size // 2)}")
    if seq_len > 16:
        advice.append(f"seq_len={seq_len // 2}")
    if config.model_size != "tiny":
        advice.append(f"model_size={('tiny' if config.model_size == 'small' else 'small')!r}")
    return OutOfMemory(
        f"{first}. The step was of batch_size={batch_size}, seq_len={seq_len} and model_size={config.model_size!r}. "
        f"Try {', or '.join(advice) or 'a device with more memory'}.",
        batch_size,
        seq_len,
    )
