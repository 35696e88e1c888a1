"""Tokens a second, one process, and with two helper processes; each as the peer gives them, and all as int64.

Every peer has its process all the time and works in its turn; a turn is a window of some seconds, over the ends of
epochs. CPU seconds are those of the peer's whole family of processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.loading.fleet import Entry, NotMeasuredError, Process
from benchmarks.loading.peers import YARDSTICKS
from benchmarks.measure import Figure, median


def measure(corpus: Path, entries: Sequence[Entry], rounds: int, seconds: float, workers: int = 0) -> list[Figure]:
    """The figures, native and int64, beside the bare yardstick of the same rounds."""
    where = f"{workers} workers" if workers else "one process"
    with contextlib.ExitStack() as stack:
        open_ones: dict[str, Process] = {}
        told: dict[str, dict[str, Any]] = {}
        for entry in entries:
            try:
                process = stack.enter_context(Process(entry.name, corpus))
                process.ask("open", workers=0 if entry.name in YARDSTICKS else workers)
                told[entry.name] = process.ask("check")
                open_ones[entry.name] = process
            except NotMeasuredError as error:
                entry.failed[where] = str(error)
        runs: dict[tuple[str, bool], list[dict[str, Any]]] = {}
        for _ in range(rounds):
            for cast in (False, True):
                for entry in entries:
                    if entry.name not in open_ones:
                        continue
                    try:
                        answer = open_ones[entry.name].ask("run", seconds=seconds, cast=cast)
                        runs.setdefault((entry.name, cast), []).append(answer)
                    except NotMeasuredError as error:
                        entry.failed[where] = str(error)
                        del open_ones[entry.name]
    return [figure for cast in (False, True) for figure in _figures(entries, runs, told, cast, where)]


def _figures(
    entries: Sequence[Entry], runs: dict[tuple[str, bool], list[dict[str, Any]]], told: dict[str, dict[str, Any]],
    cast: bool, where: str,
) -> list[Figure]:  # fmt: skip
    wall = {name: median([r["tokens"] / r["wall_s"] for r in mine]) for (name, c), mine in runs.items() if c == cast}
    cpu = {name: median([r["tokens"] / r["cpu_s"] for r in mine]) for (name, c), mine in runs.items() if c == cast}
    ours, bare, figures = wall.get("millrace"), wall.get("bare"), []
    for entry in entries:
        title = f"{where}, {'int64' if cast else 'as given'}: {entry.label}"
        if entry.name not in wall:
            figures.append(Figure(title, float("nan"), "Mtok/s", f"not measured: {_why(entry, where)}"))
            continue
        note = [f"{cpu[entry.name] / 1e6:6.0f} Mtok/CPU s"]
        note += [f"{wall[entry.name] / bare:5.2f} of bare"] if bare else []
        note += [f"ours {ours / wall[entry.name]:6.1f}x"] if ours else []
        note += [told[entry.name]["dtype"] if not cast else "", entry.note]
        figures.append(Figure(title, wall[entry.name] / 1e6, "Mtok/s", "  ".join(filter(None, note))))
    return figures


def _why(entry: Entry, where: str) -> str:
    return entry.failed.get(where) or next(iter(entry.failed.values()), "no answer")
