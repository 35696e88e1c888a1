"""Hugging Face datasets, streaming: the same arrow files as an IterableDataset with its default shuffle buffer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loading.corpus import Corpus
from benchmarks.loading.peers import Ask
from benchmarks.loading.peers.peer_hf_map import versions as versions
from benchmarks.loading.peers.peer_hf_map import write as _write

LABEL = "HF datasets, streaming"
DETAIL = "shuffle(buffer_size=1000).batch(8)"
DATA = "arrow"


def write(corpus: Corpus, folder: Path) -> None:
    _write(corpus, folder)


class Feed:
    def __init__(self, folder: Path, ask: Ask) -> None:
        from datasets import load_dataset
        from torchdata.stateful_dataloader import StatefulDataLoader

        files = [str(path) for path in sorted(folder.glob("*.arrow"))]
        stream: Any = load_dataset("arrow", data_files=files, split="train", streaming=True)
        stream = stream.shuffle(seed=ask.seed, buffer_size=1000).with_format("torch")
        self.stream, self.epoch = stream.batch(ask.batch), 0
        self.loader = StatefulDataLoader(
            self.stream, batch_size=None, num_workers=ask.workers, persistent_workers=ask.workers > 0
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        self.stream.set_epoch(self.epoch)
        yield from self.loader
        self.epoch += 1

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)

    def rows(self, batch: Any) -> NDArray[Any]:
        return np.asarray(batch["tokens"])

    def cast(self, batch: Any) -> Any:
        return batch["tokens"].long()


def open_feed(folder: Path, ask: Ask) -> Feed:
    return Feed(folder, ask)
