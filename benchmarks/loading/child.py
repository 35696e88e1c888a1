"""One peer in a process of its own: `python -m benchmarks.loading.child NAME FOLDER`; JSON lines in, JSON lines out.

What libraries print goes to stderr. An answer is an object; one with "error" says why there is no figure.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loading import corpus as corpora
from benchmarks.loading.peers import PEERS, TEXT_PEERS, Ask, declare_operators
from benchmarks.measure import cpu_s, process_cpu_s

_LOOK_EVERY = 8  # Batches between two looks at the clock.


def family_cpu_s() -> float:
    """Processor seconds of this process and all that it started, those that still live included."""
    total, pids = cpu_s(), [os.getpid()]
    while pids:
        pid = pids.pop()
        try:
            tasks = list(Path(f"/proc/{pid}/task").iterdir())
            children = [int(child_pid) for task in tasks for child_pid in (task / "children").read_text().split()]
            total += sum(process_cpu_s(child_pid) for child_pid in children)
        except (FileNotFoundError, ProcessLookupError, IndexError):
            continue
        pids += children
    return total


class Child:
    """The peer, and the feed that is open."""

    def __init__(self, name: str, folder: Path) -> None:
        self.peer, self.folder = (PEERS | TEXT_PEERS)[name], folder
        self.data = folder / self.peer.data
        self.feed: Any = None
        self.batches: Iterator[Any] = iter(())

    def ready(self) -> dict[str, Any]:
        """Import the peer's library."""
        if self.peer.data == "mds":
            declare_operators()
        for module in self.peer.modules:
            importlib.import_module(module)
        return {}

    def write(self) -> dict[str, Any]:
        """The corpus in the peer's format, unless it is there; versions and size."""
        self.ready()
        done = self.data / ".written"
        if not done.exists():
            self.data.mkdir(exist_ok=True)
            self.peer.write(corpora.load(self.folder), self.data)
            done.touch()
        distributions = packages_distributions()
        names = [distributions.get(part, [part])[0] for part in (module.split(".")[0] for module in self.peer.modules)]
        size = sum(path.stat().st_size for path in self.data.rglob("*") if path.is_file())
        return {"versions": ", ".join(f"{name} {version(name)}" for name in names), "bytes": size}

    def restore(self, state: str | None = None, **ask: Any) -> dict[str, Any]:
        """Open the feed, and load a state if there is one: seconds of both."""
        began = time.perf_counter()
        self.ready()
        self.feed = self.peer.open(self.data, Ask(**ask))
        opened, stored = time.perf_counter(), Path(state).read_bytes() if state else b""
        if stored:
            self.feed.load(pickle.loads(stored))
        self.batches = self._epochs(ask.get("endless", False))
        return {"open_s": opened - began, "load_s": time.perf_counter() - opened, "state_bytes": len(stored)}

    def _epochs(self, endless: bool) -> Iterator[Any]:
        yield from self.feed.batches()
        while endless:
            yield from self.feed.batches()

    def first(self) -> dict[str, Any]:
        """Take a batch."""
        began = time.perf_counter()
        if next(self.batches, None) is None:
            raise LookupError("no batch followed")
        return {"first_s": time.perf_counter() - began, "cpu_s": family_cpu_s()}

    def check(self) -> dict[str, Any]:
        """That a batch's rows are rows of the corpus; their type."""
        corpus = corpora.load(self.folder)
        names = {int(name): i for i, name in enumerate(corpus.names())}
        rows = self._rows(next(self.batches))
        for row, name in zip(rows, corpora.name_rows(rows).tolist()):
            if name in names:  # nanoGPT-style samples begin anywhere.
                expected = corpus.records(names[name], names[name] + 1)[0][: len(row)]
                assert np.array_equal(row.astype(np.int64), expected), f"sample {names[name]} has other tokens"
        return {"dtype": str(rows.dtype)}

    def _rows(self, batch: Any) -> Any:
        return np.asarray(self.feed.tokens(batch))

    def run(self, seconds: float, cast: bool = False, warm: int = 0) -> dict[str, Any]:
        """Batches for so many seconds, after `warm` batches and a tenth of the seconds that are not counted."""
        for _ in range(warm):
            next(self.batches)
        self._take(seconds / 10, cast)
        wall, cpu = time.perf_counter(), family_cpu_s()
        batches = self._take(seconds, cast)
        return {"batches": batches, "wall_s": time.perf_counter() - wall, "cpu_s": family_cpu_s() - cpu}

    def _take(self, seconds: float, cast: bool) -> int:
        taken, until, to_int64 = 0, time.perf_counter() + seconds, self.feed.cast
        while time.perf_counter() < until:
            for _ in range(_LOOK_EVERY):
                batch = next(self.batches)
                if cast:
                    to_int64(batch)
            taken += _LOOK_EVERY
        return taken

    def walk(self, out: str, marks: tuple[int, ...] = (), stop: int | None = None) -> dict[str, Any]:
        """The (rest of the) epoch: the samples of each batch to OUT.npz; states after `marks` batches to OUT.MARK."""
        ids: list[Any] = []
        cpu = family_cpu_s()
        for batch in self.batches:
            ids.append(corpora.name_rows(self._rows(batch)))
            if len(ids) in marks:
                Path(f"{out}.{len(ids)}").write_bytes(pickle.dumps(self.feed.state()))
            if len(ids) == stop:
                break
        np.savez(f"{out}.npz", ids=np.concatenate(ids or [np.empty(0, np.uint64)]), sizes=[len(names) for names in ids])
        return {"rows": sum(map(len, ids)), "cpu_s": family_cpu_s() - cpu}

    def merge(self, states: list[str], out: str) -> dict[str, Any]:
        """The state for another world size to OUT."""
        self.ready()
        loaded = [pickle.loads(Path(state).read_bytes()) for state in states]
        Path(out).write_bytes(pickle.dumps(self.peer.merge(loaded)))
        return {}


def main(name: str, folder: str) -> None:
    """Answer the lines of stdin until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    child = Child(name, Path(folder))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(child, request.pop("do"))(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
