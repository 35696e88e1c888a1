"""The named subset of a document: a function of its text alone, unchanged by seed, order, tokenizer or other documents.

Specification, version 1: h is the first 8 bytes, little endian, of BLAKE2b with a digest of 8 bytes, over
`forebay-subset-v1;0:;` and the UTF-8 bytes of the text as it leaves the filters, before repeated lines or paragraphs
are cut. The named subsets are side by side from 0 in the given order: a
document with h below the first's fraction * 2**64 (rounded to the nearest integer, ties to even) is in the first, else
if below the sum of the first two in the second, and so on; all others are in `train`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.prepare.documents import text_buffers

TRAIN = "train"


@dataclass(frozen=True)
class Subsets:
    """Named subsets and their shares; in a recipe `validation = 0.01`."""

    fractions: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for name, share in self.fractions:
            if not name.isidentifier() or not name.isascii() or name == TRAIN:
                raise UsageError(f"subset {name!r}: expected a name of letters, digits and _, and not {TRAIN!r}.")
            if not 0 < share < 1:
                raise UsageError(f"subset {name!r}: expected a share between 0 and 1, got {share}.")
        names = [name for name, _ in self.fractions]
        if len(set(names)) != len(names) or sum(Fraction(share) for _, share in self.fractions) >= 1:
            raise UsageError(f"subsets: expected each name once and shares below 1 in all, got {self.fractions}.")

    @classmethod
    def of(cls, fractions: Mapping[str, float]) -> Subsets:
        """Of a table such as `{"validation": 0.01}`."""
        return cls(tuple(fractions.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """`train` first, then the others as given."""
        return (TRAIN, *(name for name, _ in self.fractions))

    def of_texts(self, texts: pa.LargeStringArray) -> NDArray[np.uint8]:
        """The index into `names` of each text; uint8 [rows]."""
        if not self.fractions:
            return np.zeros(len(texts), np.uint8)
        seeded = hashlib.blake2b(b"forebay-subset-v1;0:;", digest_size=8)
        offsets, data = text_buffers(texts)
        view, starts = memoryview(data.data), offsets.tolist()
        hashes = np.empty(len(texts), "<u8")
        for row in range(len(texts)):
            digest = seeded.copy()
            digest.update(view[starts[row] : starts[row + 1]])
            hashes[row] = int.from_bytes(digest.digest(), "little")
        total, bounds = Fraction(0), []
        for _, share in self.fractions:
            total += Fraction(share)
            bounds.append(min(round(total * 2**64), 2**64 - 1))
        index = np.searchsorted(np.array(bounds, np.uint64), hashes, "right")
        return np.where(index < len(bounds), index + 1, 0).astype(np.uint8)
