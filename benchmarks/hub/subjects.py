"""What is measured, each opened as its own documentation says. Imports of libraries lie in the functions: each subject
runs in an interpreter that has its own.

A feed yields batches [B, L] (or pairs that begin with one); `state()` and `load(state)` are there where it has a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

NAME = "example/web"

BATCH, SEQ_LEN = 8, 1024


@dataclass(frozen=True)
class Subject:
    """How tables name it, and which of the peers' environments has its library ("": our own)."""

    label: str
    group: str
    open: Any


class TextStreamFeed:
    def __init__(self, tokenizer: str, shuffle: int, rank: int, world: int, lanes: int | None = None) -> None:
        import forebay
        from forebay.stream import StreamOptions

        self.stream = forebay.TextStream(
            f"hf:{NAME}", tokenizer=tokenizer, seq_len=SEQ_LEN, batch_size=BATCH, rank=rank, world_size=world,
            shuffle=shuffle > 0, seed=1, epochs=1 if (lanes or world) == 1 else None,
            options=StreamOptions(lanes=lanes, shuffle_documents=shuffle),
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        for batch in self.stream:
            if batch.epoch:
                return  # of several lanes: this rank's share was read
            yield batch.inputs

    def state(self) -> Any:
        return self.stream.state_dict()

    def load(self, state: Any) -> None:
        self.stream.load_state_dict(state)


class OneLaneFeed(TextStreamFeed):
    def __init__(self, tokenizer: str, shuffle: int, rank: int, world: int) -> None:
        super().__init__(tokenizer, shuffle, rank, world, 1)


class GuideFeed:
    """create_huggingface_dataset; torch tensors."""

    def __init__(self, tokenizer: str, shuffle: int, rank: int, world: int) -> None:
        from forebay.worker import create_huggingface_dataset

        self.dataset = create_huggingface_dataset(
            NAME, rank, world, num_batches=1 << 30, batch_size=BATCH, seq_len=SEQ_LEN, streaming=True,
            tokenizer_name=tokenizer, buffer_size=shuffle,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def state(self) -> Any:
        return self.dataset.state_dict()

    def load(self, state: Any) -> None:
        self.dataset.load_state_dict(state)


class DatasetsFeed:
    """datasets: only the column of text, batched map with a fast tokenizer, packed as its own example for causal
    models does, torch's DataLoader without helper processes.

    The map gives NumPy arrays, of which the DataLoader makes tensors. Of the lists that the documentation's maps give,
    the torch format makes a tensor for every integer: 0.46 MB/s of text where this gives several.
    """

    def __init__(self, tokenizer: str, shuffle: int, rank: int, world: int) -> None:
        from datasets import load_dataset
        from datasets.distributed import split_dataset_by_node
        from torch.utils.data import DataLoader
        from transformers import PreTrainedTokenizerFast

        coder = PreTrainedTokenizerFast(tokenizer_file=f"{tokenizer}/tokenizer.json", eos_token="<|endoftext|>")
        eos = coder.eos_token_id

        def packed(rows: dict[str, list[str]]) -> dict[str, Any]:
            token_ids = coder(rows["text"], return_attention_mask=False)["input_ids"]
            ids = np.fromiter((token for document in token_ids for token in (*document, eos)), np.int64)
            return {"input_ids": list(ids[: len(ids) // SEQ_LEN * SEQ_LEN].reshape(-1, SEQ_LEN))}

        self.dataset = load_dataset(NAME, split="train", streaming=True, columns=["text"])
        if shuffle:
            self.dataset = self.dataset.shuffle(seed=1, buffer_size=shuffle)
        if world > 1:
            self.dataset = split_dataset_by_node(self.dataset, rank, world)
        self.dataset = self.dataset.map(packed, batched=True, batch_size=1000, remove_columns=["text"])
        self.loader = DataLoader(self.dataset, batch_size=BATCH)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch["input_ids"]

    def state(self) -> Any:
        return self.dataset.state_dict()

    def load(self, state: Any) -> None:
        self.dataset.load_state_dict(state)


class CollectedFeed:
    """What the guide's first code did: documents tokenized one by one, cut and padded to the length, and all batches
    (its default: 100) in a list before the first is given."""

    def __init__(self, tokenizer: str, shuffle: int, rank: int, world: int) -> None:
        import torch
        from datasets import load_dataset
        from transformers import PreTrainedTokenizerFast

        coder = PreTrainedTokenizerFast(tokenizer_file=f"{tokenizer}/tokenizer.json", eos_token="<|endoftext|>")
        coder.pad_token = coder.eos_token
        dataset = load_dataset(NAME, split="train", streaming=True).shuffle(seed=42, buffer_size=shuffle)
        rows, self.batches = [], []
        for row in dataset.shard(num_shards=world, index=rank):
            token_ids = coder(row["text"], truncation=True, max_length=SEQ_LEN, padding="max_length")["input_ids"]
            rows.append(torch.tensor(token_ids))
            if len(rows) == BATCH:
                self.batches.append(torch.stack(rows))
                rows = []
            if len(self.batches) == 100:
                break

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


SUBJECTS = {
    "stream": Subject("forebay.TextStream", "", TextStreamFeed),
    "one lane": Subject("forebay.TextStream, lanes=1", "", OneLaneFeed),
    "guide": Subject("create_huggingface_dataset", "", GuideFeed),
    "datasets": Subject("HF datasets, batched map", "hf", DatasetsFeed),
    "collected": Subject("the guide's first code: a list of 100 batches", "hf", CollectedFeed),
}
