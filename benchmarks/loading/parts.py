"""The parts of `python -m benchmarks.loading`: speed, first batch, resuming, and a change of world size."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loading import corpus as corpora
from benchmarks.loading.fleet import NotMeasuredError, Process, Turns, rank_environments
from benchmarks.loading.peers import PEERS, YARDSTICKS
from benchmarks.measure import Figure, median

BATCH = 8
FRACTIONS = (0.1, 0.5, 0.9)
GLOBAL_BATCH = 60  # Divisible by 4, 3 and 5, which most of the peers need.
WORLDS = (4, 3, 5)
NUM_SAMPLES = 6013  # 100 global batches and a rest.


def measure_speed(corpus: Path, names: Sequence[str], rounds: int, seconds: float, workers: int = 0) -> list[Figure]:
    """Tokens a second as given and as int64. Every peer has its process all the time and works in its turn."""
    turns, setup = Turns(), f"{workers} workers" if workers else "one process"
    with contextlib.ExitStack() as stack:
        processes: dict[str, Process] = {}

        def start(name: str) -> dict[str, Any]:
            processes[name] = stack.enter_context(Process(name, corpus))
            processes[name].ask("restore", endless=True, workers=0 if name in YARDSTICKS else workers)
            return processes[name].ask("check")

        for name in names:
            turns.run(name, "check", start, name)
        for _ in range(rounds):
            for cast in (False, True):
                for name in names:
                    turns.run(name, cast, lambda: processes[name].ask("run", seconds=seconds, cast=cast))  # noqa: B023
    figures = []
    for cast in (False, True):
        for name in names:
            title = f"{setup}, {'int64' if cast else 'as given'}: {PEERS[name].label}"
            if name in turns.failed:
                figures.append(Figure.missing(title, turns.failed[name]))
                continue
            speed, work = (
                median([r["batches"] * BATCH * corpora.SEQ_LEN / r[key] / 1e6 for r in turns.answers[name, cast]])
                for key in ("wall_s", "cpu_s")
            )
            detail = [f"{work:6.0f} Mtok/CPU s", turns.answers[name, "check"][0]["dtype"], PEERS[name].detail]
            if name != "forebay" and turns.answers["forebay", cast]:
                wall, cpu = (
                    turns.ratio("forebay", name, cast, lambda r: r["batches"] / r[key])  # noqa: B023
                    for key in ("wall_s", "cpu_s")
                )
                detail.insert(1, f"ours {wall:6.1f}x ({cpu:.1f}x CPU)")
            figures.append(Figure(title, speed, "Mtok/s", "  ".join(filter(None, detail))))
    return figures


def measure_cold(corpus: Path, names: Sequence[str], rounds: int) -> list[Figure]:
    """From starting an interpreter to the first batch, imports included; the page cache is warm."""
    turns = Turns()

    def run(name: str) -> dict[str, Any]:
        with Process(name, corpus) as process:
            process.ask("restore")
            answer = process.ask("first")
            return answer | {"wall_s": time.perf_counter() - process.began}

    for turn in range(rounds + 1):  # The first warms the page cache and is not counted.
        for name in names:
            turns.run(name, turn > 0, run, name)
    figures = []
    for name in names:
        title = f"cold to first batch: {PEERS[name].label}"
        if name in turns.failed:
            figures.append(Figure.missing(title, turns.failed[name]))
            continue
        detail = f"{turns.median(name, True, 'cpu_s'):6.2f} CPU s"
        if name != "forebay" and turns.answers["forebay", True]:
            detail += f"  ours {turns.ratio(name, 'forebay', True, lambda answer: answer['wall_s']):5.1f}x sooner"
        figures.append(Figure(title, turns.median(name, True, "wall_s"), "s", detail))
    return figures


def measure_resume(corpus: Path, names: Sequence[str], rounds: int, scratch: Path) -> list[Figure]:
    """Seconds from open to the next batch in a fresh process, and whether the samples follow that an epoch had.

    Each peer walks one epoch and leaves a state at 10, 50 and 90 %. The rest after each is compared batch by batch.
    """
    steps = -(-corpora.load(corpus).num_samples // BATCH)
    marks = [max(1, int(steps * fraction)) for fraction in FRACTIONS]
    turns, able = Turns(), [name for name in names if PEERS[name].state]

    def walk(name: str, out: str, mark: int = 0) -> dict[str, Any]:
        with Process(name, corpus) as process:
            process.ask("restore", state=str(scratch / f"{name}.{mark}") if mark else None)
            process.ask("walk", marks=[] if mark else marks, out=str(scratch / out))
        return dict(np.load(scratch / f"{out}.npz"))

    def resume(name: str, mark: int) -> dict[str, Any]:
        with Process(name, corpus) as process:
            answer = process.ask("restore", state=str(scratch / f"{name}.{mark}") if mark else None)
            return answer | {"next_s": answer["load_s"] + process.ask("first")["first_s"]}

    for name in able:
        turns.run(name, "epoch", walk, name, name)
        for mark in marks:
            turns.run(name, ("rest", mark), walk, name, f"{name}-rest", mark)
    for turn in range(rounds + 1):
        for mark in (0, *marks):
            for name in able:
                turns.run(name, (mark, turn > 0), resume, name, mark)
    figures = []
    for name in (name for name in names if name not in YARDSTICKS):
        if name not in able or name in turns.failed:
            reason = turns.failed.get(name, "it offers no state")
            figures.append(Figure.missing(f"resume: {PEERS[name].label}", reason))
            continue
        (epoch,) = turns.answers[name, "epoch"]
        first, opening = (turns.median(name, (0, True), key) for key in ("next_s", "open_s"))
        for fraction, mark in zip(FRACTIONS, marks):
            verdict = compare_rest(epoch, turns.answers[name, ("rest", mark)][0], mark)
            detail = f"{verdict}; an epoch's first batch {first:.4f} s, opening {opening:.2f} s, state "
            detail += f"{turns.median(name, (mark, True), 'state_bytes'):.0f} bytes"
            seconds = turns.median(name, (mark, True), "next_s")
            figures.append(Figure(f"resume at {fraction:.0%}: {PEERS[name].label}", seconds, "s", detail))
    return figures


def compare_rest(epoch: dict[str, Any], rest: dict[str, Any], mark: int) -> str:
    """How the batches after a resume differ from those of the epoch after `mark` batches."""
    expected = epoch["ids"][int(epoch["sizes"][:mark].sum()) :]
    if np.array_equal(rest["ids"], expected) and np.array_equal(rest["sizes"], epoch["sizes"][mark:]):
        return "exact"
    expected_counts, counts = collections.Counter(expected.tolist()), collections.Counter(rest["ids"].tolist())
    lost, repeated = (expected_counts - counts).total(), (counts - expected_counts).total()
    return f"{lost} samples lost, {repeated} repeated" if lost or repeated else "same samples, another order"


def measure_elastic(corpus: Path, names: Sequence[str], scratch: Path) -> list[Figure]:
    """Four ranks, then three, then five, a third of the epoch each, against an epoch on four that never stopped."""
    figures = []
    for name in (name for name in names if name not in YARDSTICKS):
        title = f"elastic 4 -> 3 -> 5 ranks: {PEERS[name].label}"
        try:
            if not PEERS[name].elastic:
                raise NotMeasuredError("not offered")
            figures.append(change_world(title, name, corpus, scratch))
        except NotMeasuredError as error:
            figures.append(Figure.missing(title, error))
    return figures


def change_world(title: str, name: str, corpus: Path, scratch: Path) -> Figure:
    third = NUM_SAMPLES // GLOBAL_BATCH // len(WORLDS)
    unchanged = run_ranks(name, corpus, scratch, WORLDS[0], None, None)
    changed: list[collections.Counter[int]] = []
    state = None
    for world in WORLDS:
        stop = third if world != WORLDS[-1] else None
        changed += run_ranks(name, corpus, scratch, world, state, stop)
        if stop:
            state = scratch / f"{name}-{world}.{third}"
            states = [f"{scratch / name}-{world}-{rank}.{third}" for rank in range(world)]
            with Process(name, corpus) as process:
                process.ask("merge", states=states, out=str(state))
    expected, samples = (sum(batches, collections.Counter()) for batches in (unchanged, changed))
    equal = sum(a == b for a, b in zip(unchanged, changed))
    detail = f"of {len(unchanged)}; {len(expected.keys() - samples.keys())} samples lost, "
    detail += f"{(samples - expected).total()} repeated; without any change it leaves out "
    detail += f"{NUM_SAMPLES - len(expected)} and repeats {expected.total() - len(expected)}; {PEERS[name].elastic}"
    return Figure(title, equal, "equal", detail)


def run_ranks(
    name: str, corpus: Path, scratch: Path, world: int, state: Path | None, stop: int | None
) -> list[collections.Counter[int]]:
    """Run `world` ranks from `state`, `stop` steps or to the end: the samples of each of their global batches."""
    outs = [scratch / f"{name}-{world}-{rank}" for rank in range(world)]
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Process(name, corpus, **more)) for more in rank_environments(world)]
        for rank, process in enumerate(ranks):
            ask = {"batch": GLOBAL_BATCH // world, "rank": rank, "world": world}
            process.send("restore", state=str(state) if state else None, **ask)
            process.send("walk", marks=[stop] if stop else [], out=str(outs[rank]), stop=stop)
        for process in [*ranks, *ranks]:
            process.receive()
    batches: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for out in outs:
        saved = np.load(f"{out}.npz")
        for step, ids in enumerate(np.split(saved["ids"], np.cumsum(saved["sizes"])[:-1])):
            batches[step].update(ids.tolist())
    return [batches[step] for step in sorted(batches)]
