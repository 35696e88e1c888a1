"""Repeated passages: hashes of 64 tokens that are chosen by their value, and samples by their hash.

Memory is bounded. Passages are found wherever they begin (a 64-token window is kept if its hash ends in
six zero bits, so the same text is kept at both its places); when more than 4 Mi hashes are held, every second is
dropped by its value, in all files alike, so that shares stay right. 32 MiB at most each; about 60 M tokens a second.
Source: the choice by value is that of content-defined sampling (Manber 1994).
"""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.formats.external import U64
from forebay.formats.report import HashSet

PASSAGE_TOKENS = 64
_ANCHOR_BITS = 6
_MIN_CHANGES = 16  # Of 63 neighbours: less is a pattern, not a passage.
_FACTOR = 0x9E3779B97F4A7C15
_MIX = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1


class Passages(HashSet):
    """Hashes of some of the 64-token windows of what is fed."""

    def __init__(self) -> None:
        super().__init__(_ANCHOR_BITS)

    def add_tokens(self, tokens: NDArray[Any]) -> None:
        """Add a run of tokens; windows across two runs are not counted."""
        if len(tokens) <= PASSAGE_TOKENS:
            return
        hashes, width = tokens.astype(np.uint64) + np.uint64(1), 1
        while width < PASSAGE_TOKENS:
            hashes = hashes[:-width] * np.uint64(pow(_FACTOR, width, _MASK + 1)) + hashes[width:]
            width *= 2
        hashes ^= hashes >> np.uint64(32)
        hashes *= np.uint64(_MIX)
        hashes ^= hashes >> np.uint64(29)
        positions = np.flatnonzero(hashes & np.uint64((1 << self.bits) - 1) == 0)
        for apart in (1, 2):
            changes = np.concatenate(([0], np.cumsum(tokens[apart:] != tokens[:-apart])))
            positions = positions[changes[positions + PASSAGE_TOKENS - apart] - changes[positions] >= _MIN_CHANGES]
        self.add(hashes[positions])


def shared(first: HashSet, second: HashSet) -> tuple[int, int]:
    """Return how many different hashes of `second` occur in `first`, of how many."""
    bits = max(first.bits, second.bits)
    distinct = np.unique(second.all(bits))
    return int(np.isin(distinct, first.all(bits)).sum()), len(distinct)


def row_hashes(rows: NDArray[Any]) -> U64:
    """Return the 8-byte BLAKE2b of each row [N, L]; rows of a pattern (padding) are left out."""
    rows = np.ascontiguousarray(rows)
    if rows.shape[1] < 2:
        return np.empty(0, np.uint64)
    varied = (rows[:, 1:] != rows[:, :-1]).sum(axis=1) >= min(_MIN_CHANGES, rows.shape[1] // 2)
    digests = b"".join(hashlib.blake2b(row.data, digest_size=8).digest() for row in rows[varied])
    return np.frombuffer(digests, np.uint64)
