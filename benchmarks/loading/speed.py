"""Tokens a second, one process, and with two helper processes; each as the peer gives them, and all as int64.

Every peer has its process all the time and works in its turn; a turn is a window of some seconds, over the ends of
epochs. CPU seconds are those of the peer's whole family of processes. Ratios are medians over the rounds' own ratios.
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
    setup = f"{workers} workers" if workers else "one process"
    with contextlib.ExitStack() as stack:
        open_ones: dict[str, Process] = {}
        checks: dict[str, dict[str, Any]] = {}
        for entry in entries:
            try:
                process = stack.enter_context(Process(entry.name, corpus))
                process.ask("open", workers=0 if entry.name in YARDSTICKS else workers)
                checks[entry.name] = process.ask("check")
                open_ones[entry.name] = process
            except NotMeasuredError as error:
                entry.failed[setup] = str(error)
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
                        entry.failed[setup] = str(error)
                        del open_ones[entry.name]
    return [figure for cast in (False, True) for figure in _figures(entries, runs, checks, cast, setup)]


def _figures(
    entries: Sequence[Entry], runs: dict[tuple[str, bool], list[dict[str, Any]]], checks: dict[str, dict[str, Any]],
    cast: bool, setup: str,
) -> list[Figure]:  # fmt: skip
    speeds = {name: [r["tokens"] / r["wall_s"] for r in mine] for (name, c), mine in runs.items() if c == cast}
    work = {name: [r["tokens"] / r["cpu_s"] for r in mine] for (name, c), mine in runs.items() if c == cast}
    figures = []
    for entry in entries:
        title, mine = f"{setup}, {'int64' if cast else 'as given'}: {entry.label}", speeds.get(entry.name)
        if not mine or entry.name not in checks:
            figures.append(Figure.missing(title, _reason(entry, setup)))
            continue
        detail = [f"{median(work[entry.name]) / 1e6:6.0f} Mtok/CPU s"]
        if "bare" in speeds:
            detail.append(
                f"{_ratio(mine, speeds['bare']):5.2f} of bare ({_ratio(work[entry.name], work['bare']):.2f} CPU)"
            )
        if "forebay" in speeds and entry.name != "forebay":
            ours = _ratio(speeds["forebay"], mine), _ratio(work["forebay"], work[entry.name])
            detail.append(f"ours {ours[0]:6.1f}x ({ours[1]:.1f}x CPU)")
        detail += [checks[entry.name]["dtype"] if not cast else "", entry.detail]
        figures.append(Figure(title, median(mine) / 1e6, "Mtok/s", "  ".join(filter(None, detail))))
    return figures


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios: a slow round slows both."""
    return median([mine / other for mine, other in zip(ours, theirs)])


def _reason(entry: Entry, setup: str) -> str:
    return entry.failed.get(setup) or next(iter(entry.failed.values()), "no answer")
