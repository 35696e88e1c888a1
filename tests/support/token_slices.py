"""Small datasets of random tokens."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import write_token_slice


def write_tokens(folder: Path, lengths: Sequence[int], name: str = "corpus", dtype: DTypeLike = np.uint16) -> Dataset:
    """Write a slice of one document for each length."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, length in enumerate(lengths):
        tokens = np.random.default_rng(index).integers(0, 60_000, length).astype(dtype)
        write_token_slice(folder / f"{index}.safetensors", tokens, np.array([length], np.uint64))
    return import_slices(folder, name)


def check_lengths(dataset: Dataset) -> None:
    """Compare the lengths of documents in their file with the document ends in the slices."""
    document_ends = [dataset.open_slice(index).document_ends.tolist() for index in range(dataset.num_slices)]
    assert [part.tolist() for part in dataset.all_document_ends()] == document_ends
