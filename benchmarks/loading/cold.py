"""From starting an interpreter to the first batch: imports, opening, order. The page cache is warm.

The parent's clock runs from before the process is made until the child says that it holds the batch. CPU seconds are
the child's own up to there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.loading.fleet import Entry, NotMeasuredError, Process
from benchmarks.measure import Figure, median


def measure(corpus: Path, entries: Sequence[Entry], rounds: int) -> list[Figure]:
    """The figures; one more round before, uncounted, warms the page cache and writes bytecode."""
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for entry in entries:
            if "cold" in entry.failed or "writing" in entry.failed:
                continue
            try:
                with Process(entry.name, corpus) as process:
                    answer = process.ask("first")
                    took = time.perf_counter() - process.began
            except NotMeasuredError as error:
                entry.failed["cold"] = str(error)
                continue
            if turn:
                wall.setdefault(entry.name, []).append(took)
                cpu.setdefault(entry.name, []).append(answer["cpu_s"])
    figures = []
    for entry in entries:
        title = f"cold to first batch: {entry.label}"
        if "cold" in entry.failed or entry.name not in wall:
            reason = entry.failed.get("cold") or entry.failed.get("writing", "no answer")
            figures.append(Figure.missing(title, reason))
            continue
        took, ours = median(wall[entry.name]), wall.get("forebay")
        against = f"  ours {took / median(ours):5.1f}x sooner" if ours and entry.name != "forebay" else ""
        figures.append(Figure(title, took, "s", f"{median(cpu[entry.name]):6.2f} CPU s{against}"))
    return figures
