"""Changing the world size in mid-epoch: four ranks, then three, then five, a third of the epoch each.

Every rank is a process; a phase's ranks run at once and the state of rank 0, or what the peer merges of all ranks'
states, starts the next phase. Against the same
peer's epoch on four ranks that never stopped: samples lost, samples repeated, global batches with the same samples.
"""

from __future__ import annotations

import collections
import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.loading.fleet import Entry, NotMeasuredError, Process
from benchmarks.loading.peers import YARDSTICKS
from benchmarks.measure import Figure

GLOBAL_BATCH = 60  # Divisible by 4, 3 and 5, which most of the peers need.
WORLDS = (4, 3, 5)
NUM_SAMPLES = 6013  # 100 global batches and a rest.


@dataclass(frozen=True)
class Epoch:
    """Samples of each global batch, over all ranks."""

    batches: list[collections.Counter[int]]

    @property
    def samples(self) -> collections.Counter[int]:
        return sum(self.batches, collections.Counter())


def measure(corpus: Path, entries: Sequence[Entry], scratch: Path) -> list[Figure]:
    """Equal global batches, of those of the epoch that never stopped; what was lost and repeated in the note."""
    figures = []
    for entry in entries:
        title = f"elastic 4 -> 3 -> 5 ranks: {entry.label}"
        if entry.name in YARDSTICKS:
            continue
        if not entry.elastic:
            figures.append(Figure(title, float("nan"), "equal", "not offered"))
            continue
        try:
            figures.append(_compare(title, entry, corpus, scratch))
        except NotMeasuredError as error:
            figures.append(Figure.missing(title, error))
    return figures


def _compare(title: str, entry: Entry, corpus: Path, scratch: Path) -> Figure:
    third = NUM_SAMPLES // GLOBAL_BATCH // len(WORLDS)
    unchanged = Epoch(_phase(entry, corpus, scratch, WORLDS[0], None, None))
    batches: list[collections.Counter[int]] = []
    state = None
    for i, world in enumerate(WORLDS):
        stop = third if i < len(WORLDS) - 1 else None
        batches += _phase(entry, corpus, scratch, world, state, stop)
        if stop:
            state = scratch / f"{entry.name}-{world}.{third}"
            states = [f"{scratch / entry.name}-{world}-{rank}.{third}" for rank in range(world)]
            with Process(entry.name, corpus) as process:
                process.ask("merge", states=states, out=str(state))
    changed = Epoch(batches)
    equal = sum(a == b for a, b in zip(unchanged.batches, changed.batches))
    lost = len(unchanged.samples.keys() - changed.samples.keys())
    repeated = (changed.samples - unchanged.samples).total()
    state_file = scratch / f"{entry.name}-{WORLDS[0]}.{third}"
    detail = f"of {len(unchanged.batches)}; {lost} samples lost, {repeated} repeated"
    detail += f"; state {state_file.stat().st_size} bytes pickled"
    num_left_out = NUM_SAMPLES - len(unchanged.samples)
    if num_left_out or unchanged.samples.total() > len(unchanged.samples):
        repeated_unchanged = unchanged.samples.total() - len(unchanged.samples)
        detail += f"; without any change it leaves out {num_left_out} and repeats {repeated_unchanged}"
    return Figure(title, equal, "equal", f"{detail}; {entry.elastic}")


def _phase(
    entry: Entry, corpus: Path, scratch: Path, world: int, state: Path | None, stop: int | None
) -> list[collections.Counter[int]]:
    """Run `world` ranks from `state`, `stop` steps or to the end: the samples of each of their global batches."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(world):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
            environment |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            ranks.append(stack.enter_context(Process(entry.name, corpus, **environment)))
        for rank, process in enumerate(ranks):
            ask = {"batch": GLOBAL_BATCH // world, "rank": rank, "world": world}
            process.send("restore", state=str(state) if state else None, **ask)
            out = str(scratch / f"{entry.name}-{world}-{rank}")
            process.send("walk", marks=[stop] if stop else [], out=out, stop=stop)
        for process in ranks:
            process.receive()
            process.receive()
    batches: list[collections.Counter[int]] = []
    for rank in range(world):
        saved = np.load(scratch / f"{entry.name}-{world}-{rank}.npz")
        for step, ids in enumerate(np.split(saved["ids"], np.cumsum(saved["sizes"])[:-1])):
            if step == len(batches):
                batches.append(collections.Counter())
            batches[step].update(ids.tolist())
    return batches
