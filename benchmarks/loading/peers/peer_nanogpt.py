"""nanoGPT-style: its `get_batch`, line by line: a new memory map for every batch, positions drawn with replacement."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loading.corpus import SEQ_LEN, Corpus
from benchmarks.loading.peers import Ask

LABEL = "nanoGPT-style"
DETAIL = "draws with replacement: no epoch, no state"
DATA = "nanogpt"


def versions() -> str:
    import torch

    return f"torch {torch.__version__}"


def write(corpus: Corpus, folder: Path) -> None:
    corpus.tokens.tofile(folder / "train.bin")


class Feed:
    def __init__(self, folder: Path, ask: Ask) -> None:
        import torch

        if ask.workers:
            raise ValueError("it uses no helper processes")
        torch.manual_seed(ask.seed)
        self.path, self.batch = folder / "train.bin", ask.batch

    def __iter__(self) -> Iterator[Any]:
        import torch

        while True:
            data = np.memmap(self.path, dtype=np.uint16, mode="r")
            ix = torch.randint(len(data) - SEQ_LEN, (self.batch,))
            x = torch.stack([torch.from_numpy((data[i : i + SEQ_LEN]).astype(np.int64)) for i in ix])
            y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + SEQ_LEN]).astype(np.int64)) for i in ix])
            yield x, y

    def rows(self, batch: Any) -> NDArray[Any]:
        return np.asarray(batch[0])

    def cast(self, batch: Any) -> Any:
        return batch


def open_feed(folder: Path, ask: Ask) -> Feed:
    return Feed(folder, ask)
