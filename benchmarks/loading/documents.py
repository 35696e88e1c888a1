"""Tokens a second of our loader with document masks, packing and a document filter, beside those of its default.

Documents of some 600 tokens (log-normal) in slices of 64 MiB; each loader works in its turn, over the ends of epochs.
Ratios are medians over the rounds' own ratios.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loading.corpus import SEQ_LEN, SHARD_BYTES, VOCABULARY
from benchmarks.measure import Figure, median
from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_token_slice
from forebay.load.batch import NumpyTokens
from forebay.load.loader import Loader
from forebay.load.options import DocumentSubset, SampleOptions

BATCH_SIZE = 8
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "document_masks=True": {"document_masks": True},
    "document_masks=True, all of them read": {"document_masks": True},
    'packing="best_fit"': {"packing": "best_fit"},
    "documents=, a fiftieth left out": {
        "samples": SampleOptions(documents=DocumentSubset(exclude=np.arange(0, 1 << 20, 50)))
    },
}


def write(folder: Path, num_tokens: int) -> Path:
    """The dataset of a seed, in `folder`; an old one is used again."""
    if not folder.exists():
        folder.mkdir(parents=True)
        rng = np.random.default_rng(0)
        for i, start in enumerate(range(0, num_tokens, SHARD_BYTES // 2)):
            size = min(SHARD_BYTES // 2, num_tokens - start)
            document_ends = np.cumsum(
                np.maximum(1, rng.lognormal(5.9, 1, size // 300).astype(np.uint64)), dtype=np.uint64
            )
            tokens = rng.integers(0, VOCABULARY, size, dtype=np.uint16)
            write_token_slice(folder / f"{i:05d}.safetensors", tokens, document_ends[document_ends <= size])
        import_slices(folder, "documents")
    return folder


def measure(dataset: Path, rounds: int, seconds: float) -> list[Figure]:
    """A figure for each option, after a first epoch of each."""
    batches = {
        name: iter(Loader(dataset, seq_len=SEQ_LEN, batch_size=BATCH_SIZE, epochs=None, **options))
        for name, options in OPTIONS.items()
    }
    for each in batches.values():  # Sections are packed in the first epoch.
        while next(each).epoch == 0:
            pass
    speeds: dict[str, list[float]] = {name: [] for name in OPTIONS}
    for _ in range(rounds):
        for name, each in batches.items():
            speeds[name].append(_speed(each, seconds, "read" in name))
    figures = []
    for name, mine in speeds.items():
        ratio = median([speed / default for speed, default in zip(mine, speeds["default"])])
        figures.append(Figure(name, median(mine) / 1e6, "Mtok/s", f"{ratio:.2f} of the default"))
    return figures


def _speed(batches: Iterator[NumpyTokens], seconds: float, reads: bool) -> float:
    """Tokens a second of so many seconds."""
    started_at, tokens = time.perf_counter(), 0
    while time.perf_counter() - started_at < seconds:
        for _ in range(16):
            batch = next(batches)
            tokens += batch.inputs.size
            if reads:
                batch.arrays()  # Computes position_ids and document_ids, which are computed when they are read.
    return tokens / (time.perf_counter() - started_at)
