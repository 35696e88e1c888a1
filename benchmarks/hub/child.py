"""One subject in a process of its own: `python -m benchmarks.hub.child ASK`, ASK an object of JSON; JSON lines out.

The first line comes with the first batch; the second says what was done until the end. What libraries print goes to
stderr.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hub.subjects import SUBJECTS
from benchmarks.measure import cpu_s


def _name(tokens: Any) -> str:
    return hashlib.blake2b(np.ascontiguousarray(np.asarray(tokens), "<i8").tobytes(), digest_size=8).hexdigest()


class _Taken:
    """Batches that were taken, the first included; names of those after `mark`, if asked for."""

    def __init__(self, feed: Any, batches: Iterator[Any], first: Any, ask: dict[str, Any]) -> None:
        self._feed, self._batches, self._ask = feed, batches, ask
        self.number, self.tokens = 0, 0
        self.names: list[str] = []
        self._record(first)

    def take(self, stop: int, until: float) -> bool:
        """Batches up to that number, or until a moment; whether the moment did not come first."""
        while self.number < stop and (batch := next(self._batches, None)) is not None:
            self._record(batch)
            if time.perf_counter() > until:
                return False
        return True

    def _record(self, batch: Any) -> None:
        first, mark = batch[0] if isinstance(batch, tuple | list) else batch, self._ask.get("mark") or 0
        self.number += 1
        self.tokens += int(np.prod(first.shape))
        if self._ask.get("names") and self.number > mark:
            self.names.append(_name(first))
        if self.number == mark:
            Path(self._ask["save"]).write_bytes(pickle.dumps(self._feed.state()))


def main(request_json: str) -> None:
    """Open, load a state if one is named, take batches as asked, write the state at `mark` batches."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ask = json.loads(request_json)

    def send(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")

    feed = SUBJECTS[ask["subject"]].open(ask["tokenizer"], ask["shuffle"], ask.get("rank", 0), ask.get("world", 1))
    opened = time.perf_counter()
    if ask.get("load"):
        feed.load(pickle.loads(Path(ask["load"]).read_bytes()))
    batches = iter(feed)
    batch = next(batches)
    send(first_s=time.perf_counter() - opened, cpu_s=cpu_s())
    taken = _Taken(feed, batches, batch, ask)
    taken.take(ask.get("warm", 0) + 1, math.inf)
    wall, cpu, before = time.perf_counter(), cpu_s(), taken.tokens
    ended = taken.take(ask.get("stop") or 1 << 60, wall + (ask.get("seconds") or math.inf))
    send(
        tokens=taken.tokens - before, all_tokens=taken.tokens, rows=taken.tokens // ask["seq_len"],
        wall_s=time.perf_counter() - wall, cpu_s=cpu_s() - cpu, names=taken.names, ended=ended, batches=taken.number,
    )  # fmt: skip
    out.close()
    os._exit(0)  # Threads that read ahead are not waited for: nothing is lost.


if __name__ == "__main__":
    main(*sys.argv[1:])
