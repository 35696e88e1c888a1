"""Compiled loops over n-grams: which rows have one of an index, and which.

One word of a Bloom filter answers for 98 % of the n-grams that are not in the index, a binary search for the others.
"""

from typing import Any

import numpy as np

from forebay.prepare.compiled import jit
from forebay.prepare.dedup.kernels import hash_ngrams, read_words

_BLOCK = 2048
_U1, _SIX, _LOW = np.uint64(1), np.uint64(6), np.uint64(63)


@jit(forceinline=True)
def _may_have(h, bits):  # type: ignore[no-untyped-def]
    word = bits[(h >> np.uint64(24)) & np.uint64(len(bits) - 1)]
    return (word >> (h & _LOW)) & (word >> ((h >> _SIX) & _LOW)) & _U1


@jit()
def fill_bits(keys: Any, bits: Any) -> None:
    """Set two bits for each key, both in one word of `bits` uint64 [a power of two]."""
    for h in keys:
        slot = (h >> np.uint64(24)) & np.uint64(len(bits) - 1)
        bits[slot] |= (_U1 << (h & _LOW)) | (_U1 << ((h >> _SIX) & _LOW))


@jit()
def find(keys: Any, h: Any) -> int:
    """The place of a hash in sorted keys, or -1."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < h:
            low = middle + 1
        else:
            high = middle
    return low if low < len(keys) and keys[low] == h else -1


@jit()
def flag_rows(data: Any, offsets: Any, table: Any, ngram: int, bits: Any, keys: Any, flags: Any) -> None:
    """Set `flags` bool [rows] of the rows with an n-gram that is one of the sorted `keys`."""
    words = np.empty(_BLOCK + 2, np.uint64)
    hashes = np.empty(_BLOCK + 2, np.uint64)
    for d in range(len(offsets) - 1):
        i, stop = offsets[d], offsets[d + 1]
        have = 0
        while i < stop and not flags[d]:
            i, have = read_words(data, i, stop, table, words, have)
            for j in range(hash_ngrams(words, have, ngram, hashes)):
                if _may_have(hashes[j], bits) and find(keys, hashes[j]) >= 0:
                    flags[d] = True
                    break
            if have >= ngram:
                for j in range(ngram - 1):
                    words[j] = words[have - ngram + 1 + j]
                have = ngram - 1


@jit()
def find_ngrams(hashes: Any, count: int, bits: Any, keys: Any, out: Any) -> None:
    """The place in `keys` of each of the first `count` hashes, or -1, into `out` int64."""
    for j in range(count):
        out[j] = find(keys, hashes[j]) if _may_have(hashes[j], bits) else -1
