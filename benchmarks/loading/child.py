"""One peer in a process of its own: `python -m benchmarks.loading.child NAME CORPUS`; JSON lines in, JSON lines out.

What libraries print goes to stderr. An answer is an object; one with "error" says why there is no figure.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loading import corpus as corpora
from benchmarks.loading import peers
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
    """State of the process: the peer's module, and the feed that is open."""

    def __init__(self, name: str, folder: Path) -> None:
        self.peer, self.folder = peers.find(name), folder
        self.data = folder / self.peer.DATA
        self.feed: Any = None
        self.batches: Iterator[Any] = iter(())
        self.batch = 0

    def write(self) -> dict[str, Any]:
        """The corpus in the peer's format, unless it is there."""
        done = self.data / ".written"
        if not done.exists():
            self.data.mkdir(exist_ok=True)
            self.peer.write(corpora.load(self.folder), self.data)
            done.touch()
        size = sum(path.stat().st_size for path in self.data.rglob("*") if path.is_file())
        return {"versions": self.peer.versions(), "bytes": size, "label": self.peer.LABEL, "detail": self.peer.DETAIL}

    def open(self, **ask: Any) -> dict[str, Any]:
        began = time.perf_counter()
        self.feed = self.peer.open_feed(self.data, peers.Ask(**ask, endless=True))
        self.batches, self.batch = self._forever(), peers.Ask(**ask).batch
        return {"open_s": time.perf_counter() - began}

    def check(self) -> dict[str, Any]:
        """That the first batch's rows are rows of the corpus; how many tokens wide, and of what type."""
        corpus = corpora.load(self.folder)
        names = {int(name): i for i, name in enumerate(corpus.names())}
        rows = self.feed.rows(next(self.batches))
        for row in rows:
            index = names.get(int(corpora.name_rows(row[None])[0]))
            if index is not None:
                expected = corpus.records(index, index + 1)[0][: len(row)]
                assert np.array_equal(row.astype(np.int64), expected), f"sample {index} has other tokens"
        num_known = sum(int(name) in names for name in corpora.name_rows(rows))
        return {"known": num_known, "rows": len(rows), "dtype": str(rows.dtype), "width": int(rows.shape[1])}

    def run(self, seconds: float, cast: bool) -> dict[str, Any]:
        """Batches for so many seconds, after a tenth of them which are not counted (workers have made some ahead)."""
        self._take(seconds / 10, cast)
        wall, cpu = time.perf_counter(), family_cpu_s()
        samples = self._take(seconds, cast)
        wall, cpu = time.perf_counter() - wall, family_cpu_s() - cpu
        return {"tokens": samples * corpora.SEQ_LEN, "wall_s": wall, "cpu_s": cpu}

    def _take(self, seconds: float, cast: bool) -> int:
        samples, until, to_int64 = 0, time.perf_counter() + seconds, self.feed.cast
        while time.perf_counter() < until:
            for _ in range(_LOOK_EVERY):
                batch = next(self.batches)
                if cast:
                    batch = to_int64(batch)
            samples += _LOOK_EVERY * self.batch  # An epoch's last batch may be shorter: one of thousands.
        return samples

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from self.feed

    def first(self, **ask: Any) -> dict[str, Any]:
        """Open and take the first batch; the parent's clock began when it started this process."""
        self.feed = self.peer.open_feed(self.data, peers.Ask(**ask))
        batch = next(iter(self.feed))
        return {"rows": len(self.feed.rows(batch)), "cpu_s": family_cpu_s()}

    def walk(self, marks: list[int], out: str, stop: int | None = None) -> dict[str, Any]:
        """The (rest of the) epoch: the samples of each batch to OUT.npz; states after `marks` batches to OUT.MARK."""
        ids: list[Any] = []
        for batch in self.feed:
            ids.append(corpora.name_rows(self.feed.rows(batch)))
            if len(ids) in marks:
                Path(f"{out}.{len(ids)}").write_bytes(pickle.dumps(self.feed.state()))
            if len(ids) == stop:
                break
        np.savez(f"{out}.npz", ids=np.concatenate(ids or [np.empty(0, np.uint64)]), sizes=[len(names) for names in ids])
        return {"batches": len(ids)}

    def resume(self, state: str | None, **ask: Any) -> dict[str, Any]:
        """Open; then load the state, if there is one, and take a batch: seconds of both, and how large the state is."""
        began = time.perf_counter()
        self.feed = self.peer.open_feed(self.data, peers.Ask(**ask))
        opened, stored = time.perf_counter(), Path(state).read_bytes() if state else b""
        if stored:
            self.feed.load(pickle.loads(stored))
        batch = next(iter(self.feed), None)
        took = time.perf_counter() - opened
        if batch is None:
            raise LookupError("no batch followed the state")
        return {"open_s": opened - began, "first_s": took, "state_bytes": len(stored)}

    def restore(self, state: str | None, **ask: Any) -> dict[str, Any]:
        """Open and load, and leave the rest to `walk`."""
        self.feed = self.peer.open_feed(self.data, peers.Ask(**ask))
        if state:
            self.feed.load(pickle.loads(Path(state).read_bytes()))
        return {}

    def merge(self, states: list[str], out: str) -> dict[str, Any]:
        """The state for another world size to OUT: merged of all ranks' if the peer merges them, else the first."""
        loaded = [pickle.loads(Path(state).read_bytes()) for state in states]
        merge = getattr(self.peer, "merge", lambda states: states[0])
        Path(out).write_bytes(pickle.dumps(merge(loaded)))
        return {}

    def offers(self) -> dict[str, Any]:
        """What the peer's module says of state and elasticity."""
        has_state = hasattr(self.peer.Feed, "state")
        return {"state": has_state, "elastic": getattr(self.peer, "ELASTIC", ""), "label": self.peer.LABEL}


def main(name: str, folder: str) -> None:
    """Answer the lines of stdin until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    child = Child(name, Path(folder))
    for line in sys.stdin:
        ask = json.loads(line)
        try:
            answer = getattr(child, ask.pop("do"))(**ask)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
