"""What tasks use of the machine: CPU seconds by stage, and memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

R = TypeVar("R")
_compiling_s = 0.0
_LABELS = {
    "driver": "hash", "tasks.percentile": "percentiles", "tasks.encode": "tokenize", "tasks.shuffle": "shuffle",
    "tasks.slicing": "slice", "outputs.text": "write",
}  # fmt: skip
_DETAILED = ("process_split", "process_segment")  # Count the seconds of their stages themselves.


@dataclass
class Usage:
    """CPU seconds by stage, and the largest memory of a process in bytes."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0

    def count(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def add(self, other: Usage) -> None:
        for stage, seconds in other.seconds.items():
            self.count(stage, seconds)
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)


def work_time() -> float:
    """CPU seconds of this process so far, without those in which kernels were compiled or loaded: that happens
    once, whatever the size of the input."""
    return time.process_time() - _compiling_s


@contextmanager
def compiling() -> Iterator[None]:
    """Compile or load a kernel in here."""
    global _compiling_s
    started = work_time()
    try:
        yield
    finally:
        _compiling_s += work_time() - started


def peak_bytes() -> int:
    """The largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def timed(run: Callable[[Any, int], R], task: Any, scale: int) -> tuple[R, Usage]:
    """The result of a task, and what it used in this process."""
    started = work_time()
    result = run(task, scale)
    function: Any = run.func if isinstance(run, partial) else run
    module = function.__module__.removeprefix("forebay.prepare.")
    label = "dedup" if module.startswith("dedup.") else _LABELS.get(module, module)
    seconds = {} if function.__name__ in _DETAILED else {label: work_time() - started}
    return result, Usage(seconds, peak_bytes())
