"""Compiled code for fastText classifiers: tokens, subwords and word n-grams to the mean of their rows, and the losses.

Rows are added in the library's order. Nothing is kept of a word: what most models pruned makes most of its n-grams a
test of one bit, which is faster than finding the word in a cache.
Source: Joulin et al. 2016; the format and the hashes are those of fastText 0.9.2.
"""

from typing import NamedTuple

import numpy as np

from forebay.arrays import F32, I32, I64, U8, U64
from forebay.prepare.compiled import jit

SOFTMAX, HIERARCHICAL, SIGMOID = 0, 1, 2
_LABEL = np.frombuffer(b"__label__", np.uint8)
_END = np.frombuffer(b"</s>", np.uint8)


class Network(NamedTuple):
    """A model's arrays. Rows of the input matrix are `dense`, or product-quantised: `codes` into `centroids`."""

    words: U8  # the file, which holds the words
    starts: I64  # [entries]: words first, then labels
    stops: I64
    slots: I32  # hash table of entries, -1 where empty
    sizes: tuple[int, int, int, int, int, int]  # words, bucket, minn, maxn, word n-grams, width of a sub-quantiser
    present: U64  # a bit for each hashed feature that has a row; empty: all have
    ranks: I32  # how many of them stand in earlier words of `present`: rows are in this order
    dense: F32  # [rows, dim]
    codes: U8  # [rows, sub-quantisers]
    centroids: F32
    norms: F32  # [rows], of quantised rows


@jit()
def _fnv(h, byte):  # type: ignore[no-untyped-def]
    signed = np.uint32(byte) if byte < 128 else np.uint32(byte) | np.uint32(0xFFFFFF00)
    return np.uint32(np.uint32(h ^ signed) * np.uint32(16777619))


@jit()
def hash_bytes(data, start, stop):  # type: ignore[no-untyped-def]
    """The hash of bytes `[start, stop)`, as the library's dictionary has it."""
    h = np.uint32(2166136261)
    for pos in range(start, stop):
        h = _fnv(h, data[pos])
    return h


@jit()
def parse_entries(data, start, starts, stops, counts, types):  # type: ignore[no-untyped-def]
    """Read the dictionary's entries; the position after them, or -1 if the file ends before."""
    pos = start
    for entry in range(len(starts)):
        starts[entry] = pos
        while pos < len(data) and data[pos] != 0:
            pos += 1
        if pos + 10 > len(data):
            return -1
        stops[entry] = pos
        count = np.int64(0)
        for byte in range(8):
            count |= np.int64(data[pos + 1 + byte]) << (8 * byte)
        counts[entry], types[entry] = count, data[pos + 9]
        pos += 10
    return pos


@jit()
def index_entries(data, starts, stops, slots):  # type: ignore[no-untyped-def]
    """Fill the hash table, whose size is a power of two above the number of entries."""
    mask = len(slots) - 1
    for entry in range(len(starts)):
        slot = np.int64(hash_bytes(data, starts[entry], stops[entry])) & mask
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = entry


@jit()
def _starts_with(data, start, stop, prefix):  # type: ignore[no-untyped-def]
    if stop - start < len(prefix):
        return False
    i = 0
    while i < len(prefix) and data[start + i] == prefix[i]:
        i += 1
    return i == len(prefix)


@jit()
def _is_blank(byte):  # type: ignore[no-untyped-def]
    return byte == 32 or 9 <= byte <= 13 or byte == 0


# The functions below take arrays, not the tuple: numba counts the references of all its members at each call.


@jit()
def _find(words, starts, stops, slots, data, start, stop, h):  # type: ignore[no-untyped-def]
    mask = len(slots) - 1
    slot = np.int64(h) & mask
    while slots[slot] >= 0:
        entry = slots[slot]
        first = starts[entry]
        if stops[entry] - first == stop - start:
            i = 0
            while i < stop - start and words[first + i] == data[start + i]:
                i += 1
            if i == stop - start:
                return np.int64(entry)
        slot = (slot + 1) & mask
    return np.int64(-1)


@jit()
def _rank(present, ranks, index):  # type: ignore[no-untyped-def]
    """The row of a hashed feature among all hashed ones; -1 if it was pruned."""
    if len(present) == 0:
        return index
    bits = present[index >> 6]
    bit = np.uint64(1) << np.uint64(index & 63)
    if bits & bit == 0:
        return np.int64(-1)
    bits &= bit - np.uint64(1)  # of which the number of ones is the rank in this word
    bits -= bits >> np.uint64(1) & np.uint64(0x5555555555555555)
    bits = (bits & np.uint64(0x3333333333333333)) + (bits >> np.uint64(2) & np.uint64(0x3333333333333333))
    bits = (bits + (bits >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64(ranks[index >> 6]) + np.int64(bits * np.uint64(0x0101010101010101) >> np.uint64(56))


@jit()
def _add_row(dense, codes, centroids, norms, width, row, out):  # type: ignore[no-untyped-def]
    dim, parts = len(out), codes.shape[1]
    if parts == 0:
        for i in range(dim):
            out[i] += dense[row, i]
        return
    for part in range(parts):
        size = min(width, dim - part * width)
        offset = part * 256 * width + np.int64(codes[row, part]) * size
        for i in range(size):
            out[part * width + i] += norms[row] * centroids[offset + i]


@jit()
def average_rows(net, offsets, stops, data, out):  # type: ignore[no-untyped-def]
    """Writes the mean of the rows of each text's features, float32 [texts, dim]; NaN for a text without words."""
    num_words, bucket, minn, maxn, ngrams, width = net.sizes
    words, starts, word_stops, slots, _, present, ranks, dense, codes, centroids, norms = net
    inverse, dim, end_size = 1.0 / max(1, bucket), out.shape[1], len(_END)
    longest = 0
    for row in range(len(stops)):
        longest = max(longest, stops[row] - offsets[row])
    hashes = np.empty(longest // 2 + 3 if ngrams > 1 else 1, np.int32)
    total = np.empty(dim, np.float32)
    end_hash = hash_bytes(_END, 0, end_size)
    end_word = _find(words, starts, word_stops, slots, _END, 0, end_size, end_hash)
    for row in range(len(stops)):
        total[:] = 0
        features = num_hashes = tokens = 0
        pos, stop = offsets[row], stops[row]
        at_end = False
        while not at_end:
            while pos < stop and _is_blank(data[pos]):
                pos += 1
            start = pos
            h = np.uint32(2166136261)
            while pos < stop and not _is_blank(data[pos]):
                h = _fnv(h, data[pos])
                pos += 1
            tokens += pos > start
            at_end = pos == start or (pos - start == end_size and _starts_with(data, start, pos, _END))
            if at_end:
                h, word = end_hash, end_word
            else:
                word = _find(words, starts, word_stops, slots, data, start, pos, h)
            if word >= num_words or (word < 0 and not at_end and _starts_with(data, start, pos, _LABEL)):
                continue
            if word >= 0:
                _add_row(dense, codes, centroids, norms, width, word, total)
                features += 1
            if ngrams > 1:
                hashes[num_hashes] = np.int32(h)
                num_hashes += 1
            if maxn == 0 or at_end:
                continue
            # The character n-grams of `<word>`: those that begin at each character, by their lengths.
            for first in range(start - 1, pos + 1):
                if first >= start and first < pos and data[first] & 0xC0 == 0x80:
                    continue
                h, i, n = np.uint32(2166136261), first, 0
                while i <= pos and n < maxn:
                    h = _fnv(h, np.uint8(60) if i == start - 1 else np.uint8(62) if i == pos else data[i])
                    i += 1
                    while i < pos and i > start and data[i] & 0xC0 == 0x80:
                        h = _fnv(h, data[i])
                        i += 1
                    n += 1
                    if n < minn or (n == 1 and (first == start - 1 or i == pos + 1)):
                        continue
                    index = np.int64(h) - np.int64(np.float64(h) * inverse) * bucket  # h % bucket without a division
                    index += bucket if index < 0 else -bucket if index >= bucket else 0
                    index = _rank(present, ranks, index)
                    if index >= 0:
                        _add_row(dense, codes, centroids, norms, width, num_words + index, total)
                        features += 1
        for i in range(num_hashes):
            gram = np.uint64(np.int64(hashes[i]))
            for j in range(i + 1, min(num_hashes, i + ngrams)):
                gram = gram * np.uint64(116049371) + np.uint64(np.int64(hashes[j]))
                index = _rank(present, ranks, np.int64(gram % np.uint64(bucket)))
                if index >= 0:
                    _add_row(dense, codes, centroids, norms, width, num_words + index, total)
                    features += 1
        if features == 0 or tokens == 0:
            out[row] = np.nan
        else:
            scale = np.float32(1.0 / features)
            for i in range(dim):
                out[row, i] = total[i] * scale


@jit()
def _log(x):  # type: ignore[no-untyped-def]
    return np.float32(np.log(np.float64(x) + 1e-5))


@jit()
def score_labels(loss, hidden, output, tree, out):  # type: ignore[no-untyped-def]
    """Writes the probability of each label, float32 [texts, labels], at most 1, as `predict` of the library says it.

    `tree`: int64 [nodes, 2], the children of each inner node of a hierarchical softmax, whose root is last.
    """
    labels, dim = out.shape[1], hidden.shape[1]
    scores = np.empty(max(1, 2 * labels - 1), np.float32)
    for row in range(len(hidden)):
        if np.isnan(hidden[row, 0]):
            out[row] = np.nan
            continue
        for label in range(labels):
            value = np.float32(0)
            if loss != HIERARCHICAL:
                for i in range(dim):
                    value += output[label, i] * hidden[row, i]
            scores[label] = value
        if loss == HIERARCHICAL:
            scores[2 * labels - 2] = 0
            for node in range(2 * labels - 2, labels - 1, -1):
                value = np.float32(0)
                for i in range(dim):
                    value += output[node - labels, i] * hidden[row, i]
                right = np.float32(1.0 / np.float64(np.float32(1) + np.exp(np.float32(-value))))
                scores[tree[node, 0]] = scores[node] + _log(np.float32(1.0 - np.float64(right)))
                scores[tree[node, 1]] = scores[node] + _log(right)
        elif loss == SOFTMAX:
            largest = scores[0]
            for label in range(labels):
                largest = max(largest, scores[label])
            total = np.float32(0)
            for label in range(labels):
                scores[label] = np.exp(np.float32(scores[label] - largest))
                total += scores[label]
            for label in range(labels):
                scores[label] = _log(scores[label] / total)
        else:
            for label in range(labels):
                value = scores[label]
                if value < -8:
                    scores[label] = _log(np.float32(0))
                elif value > 8:
                    scores[label] = _log(np.float32(1))
                else:  # in the steps of the library's table
                    step = np.float32(np.int64((value + 8) * 512 / 8 / 2) * 16) / np.float32(512) - np.float32(8)
                    scores[label] = _log(np.float32(1.0 / (1.0 + np.float64(np.exp(np.float32(-step))))))
        for label in range(labels):
            out[row, label] = min(np.float32(1), np.exp(scores[label]))


@jit()
def clip_chars(offsets, data, limit, stops):  # type: ignore[no-untyped-def]
    """Writes where the first `limit` characters of each text end."""
    for row in range(len(stops)):
        pos, stop = offsets[row], offsets[row + 1]
        if stop - pos > limit:
            chars = 0
            while pos < stop:
                if data[pos] & 0xC0 != 0x80:
                    chars += 1
                    if chars > limit:
                        break
                pos += 1
            stop = pos
        stops[row] = stop
