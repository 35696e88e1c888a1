"""Hugging Face datasets, map-style: arrow files, the torch format, a shuffled sampler, torchdata's StatefulDataLoader.

The column is a list of fixed length, which arrow reads without copying; `__getitems__` reads a batch at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loading.corpus import SEQ_LEN, Corpus
from benchmarks.loading.peers import Ask

LABEL = "HF datasets, map-style"
DETAIL = "torch format, StatefulDataLoader"
DATA = "arrow"


def versions() -> str:
    return f"datasets {version('datasets')}, torchdata {version('torchdata')}, pyarrow {version('pyarrow')}"


def write(corpus: Corpus, folder: Path) -> None:
    import pyarrow as pa
    from datasets import Dataset

    tables = []
    for start, stop in corpus.shards():
        flat = pa.array(np.ascontiguousarray(corpus.records(start, stop)).reshape(-1))
        tables.append(pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, SEQ_LEN + 1)}))
    Dataset(pa.concat_tables(tables)).save_to_disk(str(folder), num_shards=len(tables))


class Feed:
    def __init__(self, folder: Path, ask: Ask) -> None:
        import torch
        from datasets import load_from_disk
        from torchdata.stateful_dataloader import StatefulDataLoader

        dataset: Any = load_from_disk(str(folder)).with_format("torch")
        self.loader = StatefulDataLoader(
            dataset, batch_size=ask.batch, shuffle=True, num_workers=ask.workers,
            generator=torch.Generator().manual_seed(ask.seed), persistent_workers=ask.workers > 0,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

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
