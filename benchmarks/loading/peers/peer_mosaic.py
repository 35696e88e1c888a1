"""MosaicML Streaming over MDS: StreamingDataset and StreamingDataLoader, the shards local, default shuffle (py1e)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loading.corpus import SEQ_LEN, Corpus
from benchmarks.loading.peers import Ask, torch_env

LABEL = "MosaicML Streaming, MDS"
DETAIL = ""
DATA = "mds"
ELASTIC = "the global batch and num_canonical_nodes fixed, divisible by the world"
_LIBRARIES: list[Any] = []


def _import() -> Any:
    """`streaming` imports torchvision, whose wheels for GPUs do not import beside a PyTorch for processors alone.

    Two operators that are then missing, and are not called here, are declared for it.
    """
    import torch

    if not torch.cuda.is_available() and not _LIBRARIES:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
    import streaming

    return streaming


def versions() -> str:
    return f"mosaicml-streaming {version('mosaicml-streaming')}, torch {version('torch')}"


def write(corpus: Corpus, folder: Path) -> None:
    columns = {"tokens": f"ndarray:uint16:{SEQ_LEN + 1}"}
    with _import().MDSWriter(out=str(folder), columns=columns, size_limit=1 << 26) as writer:
        for start, stop in corpus.shards():
            for record in corpus.records(start, stop):
                writer.write({"tokens": record})


class Feed:
    def __init__(self, folder: Path, ask: Ask) -> None:
        streaming = _import()
        torch_env(ask)
        dataset = streaming.StreamingDataset(
            local=str(folder), shuffle=True, shuffle_seed=ask.seed, batch_size=ask.batch, num_canonical_nodes=1
        )  # fmt: skip
        self.loader = streaming.StreamingDataLoader(
            dataset, batch_size=ask.batch, num_workers=ask.workers, persistent_workers=ask.workers > 0
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
