"""Sign lists of texts as parts, and deduplicate them."""

import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.prepare.dedup.cutting import Cutter
from forebay.prepare.dedup.deduplicate import DedupResult, deduplicate
from forebay.prepare.dedup.methods import Dedup, Signed
from forebay.prepare.tasks.text import open_documents
from forebay.storage.store import open_store


def serially(run: Callable[[Any, int], Any], tasks: Sequence) -> list:
    """The simplest engine."""
    return [run(task, 0) for task in tasks]


class Bench:
    """Signs and deduplicates under one folder; each call has files of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()

    def sign(self, texts: Any, config: Dedup, batch: int = 1000, **columns: pa.Array) -> Signed:
        """One part of these texts (strings, or an Arrow array)."""
        column = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.large_string())
        prefix = f"part{next(self._numbers)}"
        with open_documents(open_store(self.folder), prefix, config) as documents:
            for start in range(0, len(column), batch):
                few = {name: values.slice(start, batch) for name, values in {"text": column, **columns}.items()}
                documents.add(pa.record_batch(few))
        assert documents.signed is not None
        # An absolute path is a name in any folder.
        return replace(documents.signed, prefix=str(self.folder / prefix))

    def deduplicate(self, parts: Sequence[Signed], config: Dedup, memory_bytes: int = 64 << 20) -> DedupResult:
        """In a fresh folder."""
        folder = self.folder / f"out{next(self._numbers)}"
        return deduplicate(parts, config, open_store(folder), serially, memory_bytes=memory_bytes)

    def codes(self, texts: Any, config: Dedup, memory_bytes: int = 64 << 20) -> list[int]:
        """What becomes of each text of one part."""
        return drop_codes(self.deduplicate([self.sign(texts, config)], config, memory_bytes))

    def remaining(self, pieces: Sequence[list[str]], config: Dedup, memory_bytes: int = 64 << 20) -> list[str]:
        """The texts of several parts after cutting, in steps of three documents."""
        result = self.deduplicate([self.sign(texts, config) for texts in pieces], config, memory_bytes)
        out = []
        for texts, cuts in zip(pieces, result.cut):
            cutter = pickle.loads(pickle.dumps(Cutter(cuts)))
            column = pa.array(texts, pa.large_string())
            for start in range(0, len(texts), 3):
                out += cutter.cut(column.slice(start, 3), start).to_pylist()
        return out


def drop_codes(result: DedupResult) -> list[int]:
    """The drop codes of all parts in order."""
    return [int(code) for flags in result.drop for code in flags.load()]


def make_chains() -> list[str]:
    """Return 700 texts of which some are equal, and some nearly, in chains."""
    rng = np.random.default_rng(8)
    texts = []
    for _ in range(700):
        words = [f"w{i}" for i in rng.integers(0, 100_000, 60)]
        if texts and rng.random() < 0.3:
            words = texts[int(rng.integers(len(texts)))].split()
            for index in rng.integers(0, len(words), int(rng.integers(0, 3))):
                words[index] = "changed"
        texts.append(" ".join(words))
    return texts


def random_words(rng: np.random.Generator, rows: int, words: int) -> NDArray[np.uint8]:
    """Return words of 8 random letters and a space, uint8 [rows, words, 9]: no two are equal by chance."""
    letters = rng.integers(97, 123, (rows, words, 9), dtype=np.uint8)
    letters[:, :, 8] = 32
    return letters


def similar_pairs(
    rng: np.random.Generator, expected: NDArray[np.float64], shingles: int
) -> tuple[pa.LargeStringArray, NDArray[np.float64]]:
    """Return pairs of texts (rows 2i and 2i + 1) whose sets of 5-grams have about the expected Jaccard similarities.

    They share a beginning of s shingles of n, so that the similarity is s / (2n - s): the second result, exactly.
    """
    shared = np.rint(2 * shingles * expected / (1 + expected)).astype(np.int64)
    first = random_words(rng, len(expected), shingles + 4)
    second = first.copy()
    other = np.arange(shingles + 4) >= (shared + 4 * (shared > 0))[:, None]
    second[other] = random_words(rng, 1, int(other.sum()))[0]
    flat = np.ascontiguousarray(np.stack([first, second], axis=1).reshape(2 * len(expected), -1))
    offsets = np.arange(len(flat) + 1, dtype=np.int64) * flat.shape[1]
    texts = pa.LargeStringArray.from_buffers(len(flat), pa.py_buffer(offsets), pa.py_buffer(flat))
    return texts, shared / (2 * shingles - shared)
