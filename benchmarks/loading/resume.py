"""Going on in mid-epoch, in a fresh process: seconds from open to the next batch, and whether the same samples follow.

Each peer walks one epoch and leaves a state at 10, 50 and 90 %. Then, in turns: a process opens and takes the first
batch of the epoch; another opens, loads a state and takes the next batch. Seconds are those after opening. The rest of
the epoch after one resume at each mark is compared with the walk's, batch by batch.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.loading import corpus as corpora
from benchmarks.loading.fleet import Entry, NotMeasuredError, Process
from benchmarks.loading.peers import YARDSTICKS
from benchmarks.measure import Figure, median

FRACTIONS = (0.1, 0.5, 0.9)
BATCH = 8


@dataclass
class Results:
    """By peer and mark; mark 0 is the epoch's begin, with no state."""

    answers: dict[tuple[str, int], list[dict[str, float]]] = field(default_factory=dict)
    verdicts: dict[tuple[str, int], str] = field(default_factory=dict)
    stuck: dict[tuple[str, int], str] = field(default_factory=dict)


def measure(corpus: Path, entries: Sequence[Entry], rounds: int, scratch: Path) -> list[Figure]:
    """The figures: seconds, and in the note exactness and the size of the state."""
    steps = -(-corpora.load(corpus).num_samples // BATCH)
    marks = [max(1, int(steps * fraction)) for fraction in FRACTIONS]
    able, results = [entry for entry in entries if entry.state and "writing" not in entry.failed], Results()
    for entry in able:
        try:
            _walk(corpus, entry, marks, scratch)
            for mark in marks:
                results.verdicts[entry.name, mark] = _exactness(corpus, entry, mark, scratch)
        except NotMeasuredError as error:
            entry.failed["resume"] = str(error)
    _time(corpus, [entry for entry in able if "resume" not in entry.failed], marks, rounds, scratch, results)
    return [
        _figure(f"resume at {fraction:.0%}: {entry.label}", entry, mark, results)
        for entry in entries
        if entry.name not in YARDSTICKS
        for fraction, mark in zip(FRACTIONS, marks)
    ]


def _time(
    corpus: Path, entries: Sequence[Entry], marks: list[int], rounds: int, scratch: Path, results: Results
) -> None:
    for turn in range(rounds + 1):  # The first warms the page cache and is not counted.
        for mark in (0, *marks):
            for entry in entries:
                if (entry.name, mark) in results.stuck:
                    continue
                state = str(scratch / f"{entry.name}.{mark}") if mark else None
                try:
                    with Process(entry.name, corpus) as process:
                        answer = process.ask("resume", state=state)
                except NotMeasuredError as error:
                    results.stuck[entry.name, mark] = str(error)
                    continue
                if turn:
                    results.answers.setdefault((entry.name, mark), []).append(answer)


def _figure(title: str, entry: Entry, mark: int, results: Results) -> Figure:
    resumed, fresh = results.answers.get((entry.name, mark)), results.answers.get((entry.name, 0))
    verdict = results.verdicts.get((entry.name, mark), "")
    if not resumed or not fresh:
        reason = results.stuck.get((entry.name, mark)) or entry.failed.get("resume") or entry.failed.get("writing")
        reason = "; ".join(filter(None, [f"not measured: {reason}" if reason else "not offered", verdict]))
        return Figure(title, float("nan"), "s", reason)
    seconds, first, opening = (
        median([answer[name] for answer in answers])
        for answers, name in ((resumed, "first_s"), (fresh, "first_s"), (fresh, "open_s"))
    )
    detail = f"{verdict}; an epoch's first batch {first:.4f} s, opening {opening:.2f} s"
    detail += f", state {resumed[0]['state_bytes']} bytes"
    return Figure(title, seconds, "s", detail)


def _walk(corpus: Path, entry: Entry, marks: list[int], scratch: Path) -> None:
    with Process(entry.name, corpus) as process:
        process.ask("restore", state=None)
        process.ask("walk", marks=marks, out=str(scratch / entry.name))


def _exactness(corpus: Path, entry: Entry, mark: int, scratch: Path) -> str:
    unbroken = np.load(scratch / f"{entry.name}.npz")
    with Process(entry.name, corpus) as process:
        process.ask("restore", state=str(scratch / f"{entry.name}.{mark}"))
        process.ask("walk", marks=[], out=str(scratch / f"{entry.name}-rest"))
    rest = np.load(scratch / f"{entry.name}-rest.npz")
    expected = unbroken["ids"][int(unbroken["sizes"][:mark].sum()) :]
    if np.array_equal(rest["ids"], expected) and np.array_equal(rest["sizes"], unbroken["sizes"][mark:]):
        return "exact"
    expected_counts, actual_counts = collections.Counter(expected.tolist()), collections.Counter(rest["ids"].tolist())
    lost, repeated = (expected_counts - actual_counts).total(), (actual_counts - expected_counts).total()
    return f"{lost} samples lost, {repeated} repeated" if lost or repeated else "same samples, another order"
