"""Megatron-style: what its GPTDataset and sampler do, written again: index, concatenated pieces, int64, two tensors.

Documents of 1000 tokens lie in one .bin file; a sample's pieces are found by the documents' offsets, read from the map
and concatenated. Its order of documents is left as stored (Megatron shuffles it too, which reads further apart), and
its masks and position ids, which it caches, are left out. Its sampler's state is the number of consumed samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loading.corpus import SEQ_LEN, Corpus
from benchmarks.loading.peers import Ask

LABEL = "Megatron-style"
DETAIL = "its reading path written again, masks left out"
DATA = "megatron"
ELASTIC = "consumed_samples; the global batch divisible by the world"
DOCUMENT_TOKENS = 1000


def versions() -> str:
    import torch

    return f"torch {torch.__version__}"


def write(corpus: Corpus, folder: Path) -> None:
    corpus.tokens.tofile(folder / "tokens.bin")
    lengths = np.full(-(-len(corpus.tokens) // DOCUMENT_TOKENS), DOCUMENT_TOKENS, np.int64)
    lengths[-1] = len(corpus.tokens) - int(lengths[:-1].sum())
    np.save(folder / "starts.npy", np.cumsum(lengths) - lengths)


class Samples:
    """Map-style dataset over the shuffled index."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.bytes = memoryview(np.memmap(folder / "tokens.bin", mode="r", order="C"))
        self.starts = np.load(folder / "starts.npy")
        num_tokens = len(self.bytes) // 2
        self.index = np.stack([np.arange(0, num_tokens - 1, SEQ_LEN), np.arange(SEQ_LEN + 1, num_tokens + 1, SEQ_LEN)])
        self.first = np.searchsorted(self.starts, self.index[0], side="right") - 1
        self.last = np.searchsorted(self.starts, self.index[1] - 1, side="right") - 1
        self.shuffle = np.random.default_rng(seed).permutation(self.index.shape[1])

    def __len__(self) -> int:
        return len(self.shuffle)

    def __getitem__(self, i: int) -> dict[str, Any]:
        import torch

        sample = self.shuffle[i]
        start, stop = self.index[:, sample]
        pieces = []
        for document in range(self.first[sample], self.last[sample] + 1):
            begin = max(self.starts[document], start)
            end = min(self.starts[document] + DOCUMENT_TOKENS, stop)
            pieces.append(np.frombuffer(self.bytes, np.uint16, end - begin, 2 * begin))
        text = torch.from_numpy(np.concatenate(pieces).astype(np.int64)).long()
        return {"tokens": text[:-1].contiguous(), "labels": text[1:].contiguous()}


class Sampler:
    """MegatronPretrainingSampler: each rank's part of every global batch, from the consumed samples on."""

    def __init__(self, total: int, ask: Ask) -> None:
        self.total, self.ask, self.consumed = total, ask, 0

    def __iter__(self) -> Iterator[list[int]]:
        size, mine = self.ask.batch * self.ask.world, self.ask.rank * self.ask.batch
        for start in range(self.consumed, self.total - size + 1, size):
            yield list(range(start + mine, start + mine + self.ask.batch))
        self.consumed = 0


class Feed:
    def __init__(self, folder: Path, ask: Ask) -> None:
        from torch.utils.data import DataLoader

        dataset: Any = Samples(folder, ask.seed)
        self.sampler, self.ask, self.taken = Sampler(len(dataset), ask), ask, 0
        self.loader = DataLoader(
            dataset, batch_sampler=self.sampler, num_workers=ask.workers, persistent_workers=ask.workers > 0
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.taken += self.ask.batch * self.ask.world
            yield batch
        self.taken = 0

    def state(self) -> Any:
        return {"consumed_samples": self.taken}

    def load(self, state: Any) -> None:
        self.sampler.consumed = self.taken = state["consumed_samples"]

    def rows(self, batch: Any) -> NDArray[Any]:
        return np.asarray(batch["tokens"])

    def cast(self, batch: Any) -> Any:
        return batch


def open_feed(folder: Path, ask: Ask) -> Feed:
    return Feed(folder, ask)
