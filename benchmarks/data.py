"""A dataset of random tokens from a seed, for the benchmarks that need one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_token_slice


def make_dataset(folder: Path, name: str, num_slices: int, slice_tokens: int, document_tokens: int = 1000) -> Path:
    """`num_slices` slices of U16 tokens below `folder`; a dataset that is there already is used again."""
    if not (folder / "manifest.json").exists():
        (folder / "slices").mkdir(parents=True, exist_ok=True)
        chance = np.random.default_rng(0)
        document_ends = np.append(np.arange(document_tokens, slice_tokens, document_tokens), slice_tokens).astype(
            np.uint64
        )
        for index in range(num_slices):
            tokens = chance.integers(0, 50_000, slice_tokens).astype(np.uint16)
            write_token_slice(folder / "slices" / f"{index:06d}.safetensors", tokens, document_ends)
        import_slices(folder, name)
    return folder
