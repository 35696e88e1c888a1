"""Megatron-Energon: a crude WebDataset with a cooker, get_train_dataset, get_savable_loader."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loading.corpus import Corpus
from benchmarks.loading.peers import Ask, peer_webdataset

LABEL = "Energon"
DETAIL = "shuffle buffer of 1000; a state is of one rank"
DATA = "energon"

_DATASET = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


def versions() -> str:
    return f"megatron-energon {version('megatron-energon')}, torch {version('torch')}"


def write(corpus: Corpus, folder: Path) -> None:
    from megatron.energon.flavors import BaseWebdatasetFactory

    peer_webdataset.write(corpus, folder)
    names = sorted(path.name for path in folder.glob("*.tar"))
    BaseWebdatasetFactory.prepare_dataset(folder, names, split_parts_ratio=[("train", 1.0)], workers=1)
    (folder / ".nv-meta" / "dataset.yaml").write_text(_DATASET)


def _encoder() -> Any:
    import torch
    from megatron.energon import Cooker, DefaultTaskEncoder, Sample, basic_sample_keys, edataclass, stateless

    @edataclass
    class Tokens(Sample):
        tokens: torch.Tensor

    @stateless
    def cook(sample: dict[str, Any]) -> Tokens:
        tokens = torch.frombuffer(bytearray(sample["tokens"]), dtype=torch.uint16)
        return Tokens(**basic_sample_keys(sample), tokens=tokens)

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
        cookers = (Cooker(cook),)

        @stateless
        def batch(self, samples: list[Tokens]) -> torch.Tensor:
            return torch.stack([sample.tokens for sample in samples])

        @stateless
        def encode_batch(self, batch: torch.Tensor) -> torch.Tensor:
            return batch

    return Encoder()


class Feed:
    def __init__(self, folder: Path, ask: Ask) -> None:
        from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

        config = WorkerConfig(rank=ask.rank, world_size=ask.world, num_workers=ask.workers, seed_offset=ask.seed)
        dataset = get_train_dataset(
            folder, worker_config=config, batch_size=ask.batch, shuffle_buffer_size=1000, max_samples_per_sequence=100,
            task_encoder=_encoder(), repeat=ask.endless,
        )  # fmt: skip
        self.loader = get_savable_loader(dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.save_state_rank()

    def load(self, state: Any) -> None:
        self.loader.restore_state_rank(state)

    def rows(self, batch: Any) -> NDArray[Any]:
        return np.asarray(batch)

    def cast(self, batch: Any) -> Any:
        return batch.long()


def open_feed(folder: Path, ask: Ask) -> Feed:
    return Feed(folder, ask)
