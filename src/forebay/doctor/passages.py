"""What occurs more than once: samples by their hash, passages by hashes of 64 tokens that are chosen by their value.

Hides: that memory is bounded. Passages are found wherever they begin (a 64-token window is kept if its hash ends in
six zero bits, so the same text is kept at both its places); when more than 4 Mi hashes are held, every second is
dropped by its value, in all files alike, so that shares stay right. 32 MiB at most each; about 60 M tokens a second.
Source: the choice by value is that of content-defined sampling (Manber 1994).
"""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

PASSAGE_TOKENS = 64
_ANCHOR_BITS = 6
_MOST_HELD = 4 << 20
_FEWEST_CHANGES = 16  # Of 63 neighbours: less is a pattern, not a passage.
_FACTOR = 0x9E3779B97F4A7C15
_MIX = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1


class Held:
    """64-bit hashes, at most 4 Mi of them: beyond, those that end in more and more zero bits."""

    def __init__(self, bits: int = 0) -> None:
        self._parts: list[U64] = []
        self._num = 0
        self.bits = bits

    def add(self, hashes: U64) -> None:
        self._parts.append(hashes[hashes & np.uint64((1 << self.bits) - 1) == 0])
        self._num += len(self._parts[-1])
        while self._num > _MOST_HELD:
            self.bits += 1
            self._parts = [self.all(self.bits)]
            self._num = len(self._parts[0])

    def all(self, bits: int | None = None) -> U64:
        """All that are held, or those that end in at least so many zero bits."""
        joined = np.concatenate(self._parts) if self._parts else np.empty(0, np.uint64)
        mask = np.uint64((1 << (self.bits if bits is None else bits)) - 1)
        kept: U64 = joined[joined & mask == 0]
        return kept

    def repeated(self) -> tuple[int, int]:
        """How many of those held stood before, and how many there are."""
        return self._num - len(np.unique(self.all())), self._num


class Passages(Held):
    """Hashes of some of the 64-token windows of what is fed."""

    def __init__(self) -> None:
        super().__init__(_ANCHOR_BITS)

    def feed(self, tokens: NDArray[Any]) -> None:
        """Take a run of tokens; windows across two runs are not seen."""
        if len(tokens) <= PASSAGE_TOKENS:
            return
        hashes, width = tokens.astype(np.uint64) + np.uint64(1), 1
        while width < PASSAGE_TOKENS:
            hashes = hashes[:-width] * np.uint64(pow(_FACTOR, width, _MASK + 1)) + hashes[width:]
            width *= 2
        hashes ^= hashes >> np.uint64(32)
        hashes *= np.uint64(_MIX)
        hashes ^= hashes >> np.uint64(29)
        places = np.flatnonzero(hashes & np.uint64((1 << self.bits) - 1) == 0)
        for apart in (1, 2):
            changes = np.concatenate(([0], np.cumsum(tokens[apart:] != tokens[:-apart])))
            places = places[changes[places + PASSAGE_TOKENS - apart] - changes[places] >= _FEWEST_CHANGES]
        self.add(hashes[places])


def shared(first: Held, second: Held) -> tuple[int, int]:
    """How many different hashes of `second` occur in `first`, of how many."""
    bits = max(first.bits, second.bits)
    ours = np.unique(second.all(bits))
    return int(np.isin(ours, first.all(bits)).sum()), len(ours)


def row_hashes(rows: NDArray[Any]) -> U64:
    """The 8-byte BLAKE2b of each row [N, L]; rows of a pattern (padding) are left out."""
    rows = np.ascontiguousarray(rows)
    if rows.shape[1] < 2:
        return np.empty(0, np.uint64)
    varied = (rows[:, 1:] != rows[:, :-1]).sum(axis=1) >= min(_FEWEST_CHANGES, rows.shape[1] // 2)
    digests = b"".join(hashlib.blake2b(row.data, digest_size=8).digest() for row in rows[varied])
    return np.frombuffer(digests, np.uint64)
