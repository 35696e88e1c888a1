"""Paragraphs, and documents, most of whose n-grams stood in earlier documents: DCLM's rule, without its Bloom filter.

What a shared Bloom filter holds depends on who writes to it first. Here the n-grams of each document, once each and
ascending, are signatures that are sorted like any other, so that an n-gram is marked if, and only if, an earlier
document has it. With `sample` = s only hashes that s divides are, one in s. Paragraphs are lines.

Source: Li et al. 2024 (DCLM), 4.2 and appendix L: Bloom filter fuzzy deduplication.
"""

import numpy as np
import pyarrow as pa

from forebay.arrays import I64, U8, U64
from forebay.prepare.compiled import jit
from forebay.prepare.dedup.kernels import character_table, hash_ngrams, read_words
from forebay.prepare.dedup.methods import Overlap
from forebay.prepare.documents import text_buffers
from forebay.prepare.filters.points import find

_U0, _U1 = np.uint64(0), np.uint64(1)


def sign_ngrams(texts: pa.LargeStringArray, rule: Overlap) -> tuple[U64, I64]:
    """The n-grams of each text uint64 [*], ascending, each once, and their number int64 [rows]."""
    offsets, data = text_buffers(texts)
    out = np.empty(int(offsets[-1] - offsets[0]) // 2 + len(texts), np.uint64)
    counts = np.empty(len(texts), np.int64)
    n = _sign(data, offsets, character_table("words"), rule.ngram, rule.sample, out, counts)
    return out[:n], counts


def mark_overlap(texts: pa.LargeStringArray, rule: Overlap, seen: U8, removed: U8) -> int:
    """Set `removed`, a byte for each of the texts', in paragraphs and texts of which `rule.share` is `seen`.

    `seen` has an entry for each row of `sign_ngrams`. Returns how many rows there are.
    """
    offsets, data = text_buffers(texts)
    settings = (rule.ngram, rule.sample, rule.share)
    return int(_mark(data, offsets, character_table("words"), *settings, seen, removed))


@jit()
def _unique(hashes):  # type: ignore[no-untyped-def]
    """The hashes ascending, each once."""
    ascending = np.sort(hashes)
    n = 0
    for j in range(len(ascending)):
        if n == 0 or ascending[j] != ascending[n - 1]:
            ascending[n] = ascending[j]
            n += 1
    return ascending[:n]


@jit()
def _ngrams_of(data, i, stop, table, ngram, sample):  # type: ignore[no-untyped-def]
    """The n-grams of each line, in order; where each line ends, and how many it has."""
    capacity, max_lines = (stop - i) // 2 + 4, 1 + np.count_nonzero(data[i:stop] == 10)
    words, hashes, out = np.empty(capacity, np.uint64), np.empty(capacity, np.uint64), np.empty(capacity, np.uint64)
    line_ends, counts = np.empty(max_lines, np.int64), np.empty(max_lines, np.int64)
    lines = n = 0
    while i < stop:
        line_end = find(data, i, stop, 10)
        _, have = read_words(data, i, line_end, table, words, 0)
        before = n
        for j in range(hash_ngrams(words, have, ngram, hashes)):
            if hashes[j] % np.uint64(sample) == _U0:
                out[n] = max(hashes[j], _U1)
                n += 1
        i = min(line_end + 1, stop)
        line_ends[lines], counts[lines] = i, n - before
        lines += 1
    return out[:n], line_ends[:lines], counts[:lines]


@jit()
def _sign(data, offsets, table, ngram, sample, out, counts):  # type: ignore[no-untyped-def]
    n = 0
    for d in range(len(offsets) - 1):
        hashes, _, _ = _ngrams_of(data, offsets[d], offsets[d + 1], table, ngram, sample)
        rows = _unique(hashes)
        out[n : n + len(rows)] = rows
        counts[d] = len(rows)
        n += len(rows)
    return n


@jit()
def _mark(data, offsets, table, ngram, sample, share, seen, removed):  # type: ignore[no-untyped-def]
    row = 0
    for d in range(len(offsets) - 1):
        begin = offsets[d]
        hashes, line_ends, counts = _ngrams_of(data, begin, offsets[d + 1], table, ngram, sample)
        rows = _unique(hashes)
        if row + len(rows) > len(seen):
            return len(seen) + 1
        j = in_text = 0
        for k in range(len(line_ends)):
            in_line = 0
            for _ in range(counts[k]):
                in_line += seen[row + np.searchsorted(rows, hashes[j])]
                j += 1
            in_text += in_line
            if counts[k] and in_line >= share * counts[k]:
                removed[begin - offsets[0] : line_ends[k] - offsets[0]] = 1
            begin = line_ends[k]
        if len(hashes) and in_text >= share * len(hashes):
            removed[offsets[d] - offsets[0] : offsets[d + 1] - offsets[0]] = 1
        row += len(rows)
    return row
