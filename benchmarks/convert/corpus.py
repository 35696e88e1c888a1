"""The tokens that are converted: random U16 from a seed, in documents of 1000 tokens on average (20 to 20 000)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 50_000
_RUN = 32 << 20
TOKENS_FILE, ENDS_FILE = "tokens.u16", "ends.npy"


def make(folder: Path, num_tokens: int) -> Path:
    """TOKENS, headerless, and ENDS, U64 [documents], exclusive; an old one of as many is used again."""
    corpus = folder / f"tokens-{num_tokens}"
    if (corpus / ENDS_FILE).exists():
        return corpus
    corpus.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(0)
    with (corpus / TOKENS_FILE).open("wb") as file:
        for start in range(0, num_tokens, _RUN):
            count = min(_RUN, num_tokens - start)
            file.write(chance.integers(0, VOCABULARY, count, dtype=np.uint16).astype("<u2").tobytes())
    lengths = np.clip(chance.lognormal(6.5, 0.9, num_tokens // 800 + 100), 20, 20_000).astype(np.uint64)
    document_ends = np.cumsum(lengths)
    document_ends = document_ends[document_ends < num_tokens]
    np.save(corpus / ENDS_FILE, np.append(document_ends, np.uint64(num_tokens)))
    return corpus


def load(corpus: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Tokens, mapped, U16 [T]; and document ends, int64 [D]."""
    return np.memmap(corpus / TOKENS_FILE, "<u2", "r").view(np.ndarray), np.load(corpus / ENDS_FILE).astype(np.int64)
