"""Helpers of all benchmarks: interleaved rounds, CPU seconds, percentiles, one table of figures."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One line of a table. A value of NaN: not measured, `detail` is the reason."""

    name: str
    value: float
    unit: str
    detail: str = ""

    @classmethod
    def missing(cls, name: str, reason: object) -> Figure:
        """A figure that could not be measured."""
        return cls(name, math.nan, "", f"not measured: {reason}")


@dataclass(frozen=True)
class Cost:
    """Wall and processor seconds of one round, including child processes that were waited for."""

    wall_s: float
    cpu_s: float


def cpu_s() -> float:
    """Processor seconds, user and system, of this process and of its waited-for children."""
    usages = (resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def process_cpu_s(pid: int) -> float:
    """Processor seconds of another live process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes() -> int:
    """Resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def interleaved(rounds: int, *functions: Callable[[], object]) -> list[list[Cost]]:
    """Call each function once a round, in turn, so that a slow moment of the machine affects all of them."""
    costs: list[list[Cost]] = [[] for _ in functions]
    for _ in range(rounds):
        for own_costs, function in zip(costs, functions):
            wall, cpu = time.perf_counter(), cpu_s()
            function()
            own_costs.append(Cost(time.perf_counter() - wall, cpu_s() - cpu))
    return costs


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


@contextlib.contextmanager
def working_folder(folder: Path | None) -> Iterator[Path]:
    """`folder`, created if needed and kept; or, for None, a temporary one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
        yield Path(name)


def show(title: str, figures: Sequence[Figure]) -> None:
    """Print a table, the same as one line of JSON, and a line for each figure that was not measured."""
    measured = [figure for figure in figures if not math.isnan(figure.value)]
    if measured:
        print(f"\n{title}")
        width = max(len(figure.name) for figure in measured)
        for figure in measured:
            print(f"  {figure.name:<{width}}  {figure.value:>12.4g} {figure.unit:<10} {figure.detail}".rstrip())
        print(json.dumps({figure.name: figure.value for figure in measured}))
    for figure in figures:
        if math.isnan(figure.value):
            print(f"  {figure.name}: {figure.detail}", flush=True)
