"""Going on in mid-epoch, in a fresh process: seconds beyond opening, and whether the same samples follow.

Each peer walks one epoch and leaves a state at 10, 50 and 90 %. Then, in turns: a process opens and takes the first
batch of the epoch; another opens, loads a state and takes the next batch. The difference is what resuming costs.
The rest of the epoch after one resume at each mark is compared with the walk's, batch by batch.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.loading import corpus as corpora
from benchmarks.loading.fleet import Entry, NotMeasuredError, Process
from benchmarks.loading.peers import YARDSTICKS
from benchmarks.measure import Figure, median

FRACTIONS = (0.1, 0.5, 0.9)
BATCH = 8


def measure(corpus: Path, entries: Sequence[Entry], rounds: int, scratch: Path) -> list[Figure]:
    """The figures: seconds, and in the note exactness and the size of the state."""
    steps = -(-corpora.load(corpus).num_samples // BATCH)
    marks = [max(1, int(steps * fraction)) for fraction in FRACTIONS]
    took: dict[tuple[str, int], list[float]] = {}
    verdicts: dict[tuple[str, int], str] = {}
    size: dict[tuple[str, int], int] = {}
    stuck: dict[tuple[str, int], str] = {}
    able = [entry for entry in entries if entry.state and "writing" not in entry.failed]
    for entry in able:
        try:
            _walk(corpus, entry, marks, scratch)
            for mark in marks:
                verdicts[entry.name, mark] = _exactness(corpus, entry, mark, scratch)
        except NotMeasuredError as error:
            entry.failed["resume"] = str(error)
    able = [entry for entry in able if "resume" not in entry.failed]
    for turn in range(rounds + 1):  # The first warms the page cache and is not counted.
        for mark in (0, *marks):
            for entry in able:
                if (entry.name, mark) in stuck:
                    continue
                state = str(scratch / f"{entry.name}.{mark}") if mark else None
                try:
                    with Process(entry.name, corpus) as process:
                        answer = process.ask("resume", state=state)
                except NotMeasuredError as error:
                    stuck[entry.name, mark] = str(error)
                    continue
                if turn:
                    took.setdefault((entry.name, mark), []).append(answer["first_s"])
                size[entry.name, mark] = answer["state_bytes"]
    figures = []
    for entry in entries:
        for fraction, mark in zip(FRACTIONS, marks):
            title = f"resume at {fraction:.0%}: {entry.label}"
            mine, fresh = took.get((entry.name, mark)), took.get((entry.name, 0))
            if entry.name in YARDSTICKS:
                continue
            if not mine or not fresh:
                why = stuck.get((entry.name, mark)) or entry.failed.get("resume") or entry.failed.get("writing")
                why = f"not measured: {why}" if why else "not offered"
                if verdict := verdicts.get((entry.name, mark)):
                    why += f"; {verdict}"
                figures.append(Figure(title, float("nan"), "s", why))
                continue
            note = f"{verdicts[entry.name, mark]}; opening {median(fresh):.2f} s, state {size[entry.name, mark]} bytes"
            figures.append(Figure(title, median(mine) - median(fresh), "s beyond", note))
    return figures


def _walk(corpus: Path, entry: Entry, marks: list[int], scratch: Path) -> None:
    with Process(entry.name, corpus) as process:
        process.ask("restore", state=None)
        process.ask("walk", marks=marks, out=str(scratch / entry.name))


def _exactness(corpus: Path, entry: Entry, mark: int, scratch: Path) -> str:
    whole = np.load(scratch / f"{entry.name}.npz")
    with Process(entry.name, corpus) as process:
        process.ask("restore", state=str(scratch / f"{entry.name}.{mark}"))
        process.ask("walk", marks=[], out=str(scratch / f"{entry.name}-rest"))
    rest = np.load(scratch / f"{entry.name}-rest.npz")
    expected = whole["ids"][int(whole["sizes"][:mark].sum()) :]
    if np.array_equal(rest["ids"], expected) and np.array_equal(rest["sizes"], whole["sizes"][mark:]):
        return "exact"
    wanted, got = collections.Counter(expected.tolist()), collections.Counter(rest["ids"].tolist())
    lost, more = (wanted - got).total(), (got - wanted).total()
    return f"{lost} samples lost, {more} repeated" if lost or more else "same samples, another order"
