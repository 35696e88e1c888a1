"""What the benchmarks share: interleaved rounds, CPU seconds, percentiles, one table."""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One line of the table: what was measured, in words, and against what."""

    name: str
    value: float
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Cost:
    """Of one round: seconds of the wall clock and of the processor, children that were waited for included."""

    wall_s: float
    cpu_s: float


def cpu_s() -> float:
    """Processor seconds, user and system, of this process and of its waited-for children."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def process_cpu_s(pid: int) -> float:
    """Processor seconds of another live process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def interleaved(rounds: int, *what: Callable[[], object]) -> list[list[Cost]]:
    """Each function once a round, in turn, so that a slow moment of the machine meets all of them."""
    costs: list[list[Cost]] = [[] for _ in what]
    for _ in range(rounds):
        for mine, function in zip(costs, what):
            wall, cpu = time.perf_counter(), cpu_s()
            function()
            mine.append(Cost(time.perf_counter() - wall, cpu_s() - cpu))
    return costs


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def show(title: str, figures: Sequence[Figure]) -> None:
    """Print a table, and the same as one line of JSON."""
    print(f"\n{title}")
    width = max(len(figure.name) for figure in figures)
    for figure in figures:
        print(f"  {figure.name:<{width}}  {figure.value:>12.4g} {figure.unit:<10} {figure.note}")
    print(json.dumps({figure.name: figure.value for figure in figures}))
