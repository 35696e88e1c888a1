"""Compiled loops over words: hashes of n-grams, rows that have one of an index, and where each word stands.

Words and their hashes are those of MinHash (`dedup.kernels.read_words`). An n-gram's hash is a polynomial of its words'
modulo 2^64, rolled along the text. One cache line of a Bloom filter answers for most n-grams that are not in the index.
"""

from typing import Any

import numpy as np

from forebay.prepare.compiled import jit
from forebay.prepare.dedup.kernels import ALONE, GAP, IGNORED, decode, mix, read_words

_TABLE_SIZE = np.uint32(1 << 17)
_BASE = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 2048
_U1, _SIX, _LOW = np.uint64(1), np.uint64(6), np.uint64(63)
_ALONE_LIMIT = np.uint32(0x40000)


@jit()
def hash_ngrams(words: Any, num_words: int, ngram: int, out: Any) -> int:
    """The hashes of all runs of `ngram` of the words into `out` uint64; how many there are."""
    count = num_words - ngram + 1
    if count <= 0:
        return 0
    power = _U1
    h = np.uint64(0)
    for j in range(ngram):
        h = h * _BASE + words[j]
        if j:
            power *= _BASE
    out[0] = mix(h)
    for j in range(1, count):
        h = (h - words[j - 1] * power) * _BASE + words[j + ngram - 1]
        out[j] = mix(h)
    return count


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


@jit()
def locate_words(data: Any, i: int, stop: int, table: Any, starts: Any, stops: Any) -> int:
    """The bytes `[starts[w], stops[w])` of each word that `read_words` finds; how many there are."""
    n = 0
    inside = False
    while i < stop:
        begin = i
        byte = data[i]
        if byte < 128:
            value = table[byte]
            i += 1
        else:
            code, i = decode(data, i, stop)
            value = table[code] if code < _TABLE_SIZE else code | (ALONE if code < _ALONE_LIMIT else np.uint32(0))
        if value == IGNORED:
            continue
        if value == GAP or value >= ALONE:
            inside = False
        if value == GAP:
            continue
        if not inside:
            starts[n] = begin
            n += 1
            inside = value < ALONE
        stops[n - 1] = i
    return n
