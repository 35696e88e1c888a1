"""The yardstick: the least that any loader must do. It makes nothing else, keeps no state and has one order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loading.corpus import SEQ_LEN, Corpus
from benchmarks.loading.peers import Ask

LABEL = "bare NumPy gather and cast"
DETAIL = "one reused buffer, every place known beforehand"
DATA = "bin"


def versions() -> str:
    return f"numpy {np.__version__}"


def write(corpus: Corpus, folder: Path) -> None:
    for i, (start, stop) in enumerate(corpus.shards()):
        corpus.tokens[start * SEQ_LEN : stop * SEQ_LEN + 1].tofile(folder / f"{i:06d}.bin")


class Feed:
    def __init__(self, folder: Path, ask: Ask) -> None:
        maps = [np.memmap(path, "<u2", "r").view(np.ndarray) for path in sorted(folder.glob("*.bin"))]
        positions = [(tokens, start) for tokens in maps for start in range(0, len(tokens) - 1, SEQ_LEN)]
        chosen = np.random.default_rng(ask.seed).permutation(len(positions)).tolist()
        self.steps = [[positions[i] for i in chosen[k : k + ask.batch]] for k in range(0, len(chosen), ask.batch)]
        self.buffer = np.empty((ask.batch, SEQ_LEN + 1), np.int64)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        buffer = self.buffer
        for step in self.steps:
            for row, (tokens, start) in enumerate(step):
                buffer[row] = tokens[start : start + SEQ_LEN + 1]
            yield buffer[: len(step)]

    def rows(self, batch: Any) -> NDArray[Any]:
        return np.asarray(batch)

    def cast(self, batch: Any) -> Any:
        return batch


def open_feed(folder: Path, ask: Ask) -> Feed:
    return Feed(folder, ask)
