"""WebDataset: tar shards, shuffled by shard and in a buffer of 1000, batched where it reads."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loading.corpus import Corpus
from benchmarks.loading.peers import Ask

LABEL = "WebDataset"
DETAIL = "shuffle(1000); it offers no state"
DATA = "tar"


def versions() -> str:
    return f"webdataset {version('webdataset')}, torch {version('torch')}"


def write(corpus: Corpus, folder: Path) -> None:
    for i, (start, stop) in enumerate(corpus.shards()):
        with tarfile.open(folder / f"{i:06d}.tar", "w") as archive:
            for number, record in enumerate(corpus.records(start, stop), start):
                data = record.tobytes()
                info = tarfile.TarInfo(f"{number:09d}.tokens")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def to_tokens(sample: dict[str, Any]) -> NDArray[np.uint16]:
    return np.frombuffer(sample["tokens"], np.uint16)


class Feed:
    def __init__(self, folder: Path, ask: Ask) -> None:
        import webdataset

        shards = [str(path) for path in sorted(folder.glob("*.tar"))]
        samples = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=ask.seed).shuffle(1000)
        self.source: Any = samples.map(to_tokens).batched(ask.batch, collation_fn=np.stack)
        if ask.workers:
            self.source = webdataset.WebLoader(
                self.source, batch_size=None, num_workers=ask.workers, persistent_workers=True
            )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def rows(self, batch: Any) -> NDArray[Any]:
        return np.asarray(batch)

    def cast(self, batch: Any) -> Any:
        return batch.astype(np.int64) if isinstance(batch, np.ndarray) else batch.long()


def open_feed(folder: Path, ask: Ask) -> Feed:
    return Feed(folder, ask)
