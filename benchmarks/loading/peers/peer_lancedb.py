"""LanceDB: a table of fixed-size lists, StreamingDataset that transforms record batches, StreamingDataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loading.corpus import SEQ_LEN, Corpus
from benchmarks.loading.peers import Ask

LABEL = "LanceDB"
DETAIL = "StreamingDataset; drops what num_splits does not divide"
DATA = "lance"
ELASTIC = "states of all ranks merged, num_splits divisible by each world size"
_SPLITS = 60  # Divisible by each world size of the elastic run.


def versions() -> str:
    return f"lancedb {version('lancedb')}, torch {version('torch')}"


def write(corpus: Corpus, folder: Path) -> None:
    import lancedb
    import pyarrow as pa

    kind = pa.list_(pa.uint16(), SEQ_LEN + 1)
    schema = pa.schema([("tokens", kind)])

    def batches() -> Iterator[pa.RecordBatch]:
        for start, stop in corpus.shards():
            values = pa.array(corpus.records(start, stop).ravel())
            yield pa.RecordBatch.from_arrays([pa.FixedSizeListArray.from_arrays(values, type=kind)], schema=schema)

    lancedb.connect(str(folder)).create_table("tokens", batches(), schema=schema)


def to_rows(batch: Any) -> Any:
    import torch

    return torch.from_numpy(batch.column("tokens").flatten().to_numpy().reshape(-1, SEQ_LEN + 1).copy())


class Feed:
    """Each epoch is a dataset of its own, as `epoch` is an argument of its constructor."""

    def __init__(self, folder: Path, ask: Ask) -> None:
        import lancedb

        self.table, self.ask, self.epoch = lancedb.connect(str(folder)).open_table("tokens"), ask, 0
        self.dataset: Any = None

    def __iter__(self) -> Iterator[Any]:
        from lancedb.streaming import StreamingDataLoader

        workers = self.ask.workers
        yield from StreamingDataLoader(
            self.dataset or self.open(), batch_size=self.ask.batch, num_workers=workers,
            multiprocessing_context="spawn" if workers else None,  # Its threads do not survive a fork.
        )  # fmt: skip
        self.epoch, self.dataset = self.epoch + 1, None

    def open(self) -> Any:
        from lancedb.streaming import StreamingDataset

        splits = _SPLITS if self.ask.world > 1 else max(1, self.ask.workers)
        self.dataset = StreamingDataset(
            self.table, num_splits=splits, shuffle_seed=self.ask.seed, epoch=self.epoch, rank=self.ask.rank,
            world_size=self.ask.world, transform=to_rows,
        )  # fmt: skip
        return self.dataset

    def state(self) -> Any:
        return self.dataset.state_dict()

    def load(self, state: Any) -> None:
        self.open().load_state_dict(state)

    def rows(self, batch: Any) -> NDArray[Any]:
        return np.asarray(batch)

    def cast(self, batch: Any) -> Any:
        return batch.long()


def merge(states: Sequence[Any]) -> Any:
    """The state of all ranks, which another world size loads."""
    from lancedb.streaming import StreamingDataset

    return StreamingDataset.merge_state_dicts(list(states))


def open_feed(folder: Path, ask: Ask) -> Feed:
    return Feed(folder, ask)
