"""A harder yardstick: one array, one fancy index a batch, cast into the reused buffer. No Python for a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loading.corpus import SEQ_LEN, Corpus
from benchmarks.loading.peers import Ask
from benchmarks.loading.peers.peer_bare import versions as versions

LABEL = "bare NumPy, one index"
DETAIL = "one file, one call a batch, one reused buffer"
DATA = "one"


def write(corpus: Corpus, folder: Path) -> None:
    corpus.tokens.tofile(folder / "tokens.bin")


class Feed:
    def __init__(self, folder: Path, ask: Ask) -> None:
        tokens = np.memmap(folder / "tokens.bin", "<u2", "r").view(np.ndarray)
        self.windows = np.lib.stride_tricks.sliding_window_view(tokens, SEQ_LEN + 1)
        chosen = np.random.default_rng(ask.seed).permutation((len(tokens) - 1) // SEQ_LEN) * SEQ_LEN
        self.steps = [chosen[k : k + ask.batch] for k in range(0, len(chosen), ask.batch)]
        self.buffer = np.empty((ask.batch, SEQ_LEN + 1), np.int64)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        buffer, windows = self.buffer, self.windows
        for step in self.steps:
            buffer[: len(step)] = windows[step]
            yield buffer[: len(step)]

    def rows(self, batch: Any) -> NDArray[Any]:
        return np.asarray(batch)

    def cast(self, batch: Any) -> Any:
        return batch


def open_feed(folder: Path, ask: Ask) -> Feed:
    return Feed(folder, ask)
