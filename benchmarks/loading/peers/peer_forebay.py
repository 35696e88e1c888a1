"""Forebay, by its public interface."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loading.corpus import SEQ_LEN, Corpus
from benchmarks.loading.peers import Ask

LABEL = "forebay.Loader"
DETAIL = ""
DATA = "forebay"
ELASTIC = "state of any rank, any world size"


def versions() -> str:
    return f"forebay {version('forebay')}, numpy {np.__version__}"


def write(corpus: Corpus, folder: Path) -> None:
    from forebay.dataset.import_slices import import_slices
    from forebay.dataset.slices import write_token_slice

    for i, (start, stop) in enumerate(corpus.shards()):
        tokens = np.array(corpus.tokens[start * SEQ_LEN : stop * SEQ_LEN])
        document_ends = np.append(np.arange(1000, len(tokens), 1000, dtype=np.uint64), np.uint64(len(tokens)))
        write_token_slice(folder / f"{i:06d}.safetensors", tokens, document_ends)
    import_slices(folder, "benchmark")


class Feed:
    def __init__(self, folder: Path, ask: Ask) -> None:
        import forebay

        self.loader = forebay.Loader(
            folder, seq_len=SEQ_LEN, global_batch_size=ask.batch * ask.world, rank=ask.rank, world_size=ask.world,
            seed=ask.seed, epochs=None if ask.endless else 1,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)

    def rows(self, batch: Any) -> NDArray[Any]:
        return np.asarray(batch.inputs)

    def cast(self, batch: Any) -> Any:
        return batch


class TorchFeed(Feed):
    """Tensors, from helper processes."""

    def __init__(self, folder: Path, ask: Ask) -> None:
        super().__init__(folder, ask)
        self.batches = self.loader.to_torch(num_workers=ask.workers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def open_feed(folder: Path, ask: Ask) -> Feed:
    return TorchFeed(folder, ask) if ask.workers else Feed(folder, ask)
