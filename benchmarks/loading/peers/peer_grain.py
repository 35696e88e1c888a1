"""Grain over ArrayRecord: `group_size:1` as its tutorial says for random access; processes of its own, no DataLoader.

Its ReadOptions default to 16 threads; for data in memory its documentation says 0, which was also the fastest here,
as was batching before `to_iter_dataset`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loading.corpus import Corpus
from benchmarks.loading.peers import Ask

LABEL = "Grain, ArrayRecord"
DETAIL = "ReadOptions(num_threads=0); with workers mp_prefetch"
DATA = "array_record"
ELASTIC = "experimental.ElasticIterator; the global batch divisible by the world"


def versions() -> str:
    return f"grain {version('grain')}, array_record {version('array_record')}"


def write(corpus: Corpus, folder: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    for i, (start, stop) in enumerate(corpus.shards()):
        writer = ArrayRecordWriter(str(folder / f"{i:06d}.array_record"), "group_size:1")
        for record in corpus.records(start, stop):
            writer.write(record.tobytes())
        writer.close()


def to_tokens(record: bytes) -> NDArray[np.uint16]:
    return np.frombuffer(record, np.uint16)


class Feed:
    def __init__(self, folder: Path, ask: Ask) -> None:
        import grain

        source = grain.sources.ArrayRecordDataSource([str(path) for path in sorted(folder.glob("*.array_record"))])
        samples = grain.MapDataset.source(source).seed(ask.seed).shuffle().map(to_tokens)
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        dataset: Any
        if ask.world > 1:
            from grain.experimental import ElasticIterator
            from grain.sharding import ShardOptions

            shard = ShardOptions(ask.rank, ask.world)
            dataset = ElasticIterator(samples, ask.batch * ask.world, shard, read_options=options)
        else:
            dataset = (samples.repeat() if ask.endless else samples).batch(ask.batch).to_iter_dataset(options)
        if ask.workers:
            dataset = dataset.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=ask.workers))
        self.batches = iter(dataset)

    def __iter__(self) -> Iterator[Any]:
        return self.batches

    def state(self) -> Any:
        return self.batches.get_state()

    def load(self, state: Any) -> None:
        self.batches.set_state(state)

    def rows(self, batch: Any) -> NDArray[Any]:
        return np.asarray(batch)

    def cast(self, batch: Any) -> Any:
        return batch.astype(np.int64)


def open_feed(folder: Path, ask: Ask) -> Feed:
    return Feed(folder, ask)
