"""LitData: optimized chunks, TokensLoader(block_size = seq_len + 1) as its recipe for text, StreamingDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loading.corpus import SEQ_LEN, Corpus, load
from benchmarks.loading.peers import Ask, torch_env

LABEL = "LitData"
DETAIL = "TokensLoader"
DATA = "litdata"
ELASTIC = "elastic resume from the state of a rank"


def versions() -> str:
    return f"litdata {version('litdata')}, torch {version('torch')}"


def shard_records(shard: tuple[int, int], folder: str) -> Iterator[Any]:
    import torch

    for record in load(Path(folder)).records(*shard):
        yield torch.from_numpy(record.copy())


def write(corpus: Corpus, folder: Path) -> None:
    from litdata import TokensLoader, optimize

    optimize(
        fn=partial(shard_records, folder=str(corpus.folder)), inputs=corpus.shards(), output_dir=str(folder),
        chunk_size=corpus.shard_samples * (SEQ_LEN + 1), item_loader=TokensLoader(block_size=SEQ_LEN + 1),
        num_workers=1,
    )  # fmt: skip


class Feed:
    def __init__(self, folder: Path, ask: Ask) -> None:
        torch_env(ask)
        from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

        dataset = StreamingDataset(
            str(folder), item_loader=TokensLoader(block_size=SEQ_LEN + 1), shuffle=True, drop_last=ask.world > 1,
            seed=ask.seed,
        )  # fmt: skip
        self.loader = StreamingDataLoader(
            dataset, batch_size=ask.batch, num_workers=ask.workers, persistent_workers=ask.workers > 0
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)

    def rows(self, batch: Any) -> NDArray[Any]:
        return np.asarray(batch)

    def cast(self, batch: Any) -> Any:
        return batch.long()


def open_feed(folder: Path, ask: Ask) -> Feed:
    return Feed(folder, ask)
