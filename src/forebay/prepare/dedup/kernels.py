"""Compiled loops over Arrow's UTF-8 buffers: words and their n-grams; normalise and hash texts; sign with MinHash.

Compiled on the first call (about 6 s for all, then kept by `compiled`); O(1) memory beyond the arguments. A min-wise
hash is `a * x + b mod 2^32` of a well-mixed 32-bit `x`, with `a` odd: a bijection that vectorises in 32-bit lanes.
64-bit moduli cost four times that and give no better curve (docs/explanation/deduplication.md).
"""

import unicodedata
from functools import lru_cache

import numpy as np
import pyarrow as pa

from forebay.arrays import I64, U8, U32, U64
from forebay.prepare.compiled import compiling, jit
from forebay.prepare.documents import text_buffers
from forebay.prepare.filters.points import next_point
from forebay.prepare.filters.word_tables import categories

GAP, IGNORED = 0, 1
ALONE = np.uint32(1 << 31)  # Set for a character that is a word by itself.
_TABLE_SIZE = np.uint32(1 << 17)
_TABLE_BLOCK = 256
_UNSPACED = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF),
)  # fmt: skip
"""Thai, Lao, Burmese, Khmer, kana and Han are written without spaces: each character is a word."""


@lru_cache
@compiling()
def character_table(normalise: str) -> U32:
    """uint32 [2^17]: GAP, IGNORED or a code point (with ALONE set if it is a word by itself) for each character.

    Characters above stay as they are. `words`: lower case, without the accents of Latin, Greek and Cyrillic, width and
    ligature-free compatibility forms folded; punctuation, symbols, spaces and control characters are gaps, invisible
    characters are ignored. `none`: an empty table. `space`: white space is a gap, all else stays.
    """
    size = _TABLE_SIZE if normalise != "none" else 0
    table = np.arange(size, dtype=np.uint32)
    if normalise == "words":
        for start in range(0, size, _TABLE_BLOCK):
            text = "".join(map(chr, range(start, start + _TABLE_BLOCK)))
            if text != unicodedata.normalize("NFKD", text).lower():
                table[start : start + _TABLE_BLOCK] = list(map(_folded, text))
        kinds = categories()[:size]
        table[np.isin(kinds.view("S1")[::2], (b"P", b"S", b"Z")) | np.isin(kinds, (b"Cc", b"Cs"))] = GAP
        table[kinds == b"Cf"] = table[0x0300:0x0370] = table[0xFE00:0xFE10] = IGNORED
        for start, last in _UNSPACED:
            part = table[start : last + 1]
            part[part > IGNORED] = np.arange(start, last + 1, dtype=np.uint32)[part > IGNORED] | ALONE
    elif size:
        # Codes 0 and 1 are the table's own marks; as text they mean nothing, so that they may be gaps.
        table[(table <= IGNORED) | np.char.isspace(table.view("U1"))] = GAP
    table.setflags(write=False)
    return table


def _folded(character: str) -> int:
    folded = character
    if unicodedata.decomposition(character):  # asked first, as most have none, and every process makes this table
        plain = "".join(c for c in unicodedata.normalize("NFKD", character) if not "\u0300" <= c <= "\u036f")
        folded = plain if len(plain) == 1 else character
    folded = folded.lower()
    return ord(folded if len(folded) == 1 else character)


def hash_texts(texts: pa.LargeStringArray, normalise: str) -> U64:
    """128 bits of each document as uint64 [rows, 2]; zeros for an empty one."""
    offsets, data = text_buffers(texts)
    hashes = np.empty((len(texts), 2), np.uint64)
    _hash_documents(data, offsets, character_table(normalise), scratch_for(offsets), hashes)
    return hashes


def scratch_for(offsets: I64) -> U8:
    """Room for the longest text after `normalise`."""
    return np.empty(2 * int(np.diff(offsets).max(initial=0)) + 16, np.uint8)


_BLOCK = 2048  # Words at a time: 16 KiB of word hashes and 8 KiB of shingles stay in the first-level cache.
_LANES = 64
_SEED = np.uint64(0xCBF29CE484222325)
_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_C1, _C2 = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
_U1, _U5 = np.uint64(1), np.uint64(5)
_R27, _R31, _R33 = np.uint64(27), np.uint64(31), np.uint64(33)
_R8, _R40, _B64 = np.uint64(8), np.uint64(40), np.uint64(64)
_N1, _N2 = np.uint64(0x52DCE729), np.uint64(0x38495AB5)


@jit()
def mix(h):  # type: ignore[no-untyped-def]
    """A bijection of 64 bits after which each bit depends on all. Source: MurmurHash3's finalizer."""
    h ^= h >> _R33
    h *= _MIX1
    h ^= h >> _R33
    h *= _MIX2
    h ^= h >> _R33
    return h


@jit()
def decode(data, i, stop):  # type: ignore[no-untyped-def]
    """The code point whose first byte (not ASCII) is at i, and where the next one begins; damage is a gap of 1 byte."""
    first = data[i]
    size = 4 if first >= 0xF0 else 3 if first >= 0xE0 else 2
    if first < 0xC0 or i + size > stop:
        return np.uint32(0), i + 1
    return np.uint32(next_point(data, i)[0]), i + size


@jit()
def read_words(data, i, stop, table, words, have):  # type: ignore[no-untyped-def]
    """Append the hashes of the words from i on to `words[have:]`, until that is full or the text ends: (i, have).

    Up to eight ASCII characters at a time enter a word's hash, so that most words cost one chain of multiplications;
    each other character enters alone.
    """
    capacity = len(words) - 1
    h = _SEED
    pending = np.uint64(0)
    size = 0
    while i < stop:
        byte = data[np.uint64(i)]
        if byte < 128:
            value = table[byte]
            i += 1
        else:
            code, i = decode(data, i, stop)
            value = table[code] if code < _TABLE_SIZE else code | (ALONE if code < np.uint32(0x40000) else np.uint32(0))
            if value > 127 and value < ALONE:
                h = (h ^ pending ^ (np.uint64(value) << _R40)) * _BASE
                h ^= h >> _R33
                pending = np.uint64(0)
                size = 8
                continue
        if value > IGNORED and value < ALONE:
            pending = (pending << _R8) | np.uint64(value)
            size += 1
            if size & 7 == 0:
                h = (h ^ pending) * _BASE
                h ^= h >> _R33
                pending = np.uint64(0)
            continue
        if value == IGNORED:
            continue
        if size:
            words[np.uint64(have)] = mix(h ^ pending)
            have += 1
            h = _SEED
            pending = np.uint64(0)
            size = 0
        if value >= ALONE:
            words[np.uint64(have)] = mix(_SEED ^ np.uint64(value))
            have += 1
        if have >= capacity:
            return i, have
    if size:
        words[np.uint64(have)] = mix(h ^ pending)
        have += 1
    return i, have


@jit()
def locate_words(data, i, stop, table, starts, stops):  # type: ignore[no-untyped-def]
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
            value = table[code] if code < _TABLE_SIZE else code | (ALONE if code < np.uint32(0x40000) else np.uint32(0))
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


@jit()
def hash_ngrams(words, num_words, ngram, out, base=_BASE):  # type: ignore[no-untyped-def]
    """64-bit hashes of all runs of `ngram` of the words into `out`, polynomials of their hashes; how many there are."""
    count = num_words - ngram + 1
    if count <= 0:
        return 0
    power = _U1
    h = np.uint64(0)
    for j in range(ngram):
        h = h * base + words[j]
        if j:
            power *= base
    out[0] = mix(h)
    for j in range(1, count):
        h = (h - words[j - 1] * power) * base + words[j + ngram - 1]
        out[j] = mix(h)
    return count


@jit()
def make_shingles(words, have, ngram, hashes, shingles):  # type: ignore[no-untyped-def]
    """32-bit hashes of all runs of `ngram` of the words (of the fewer that there are), filled up to whole lanes."""
    count = hash_ngrams(words, have, min(ngram, have), hashes)
    for j in range(count):
        shingles[j] = np.uint32(hashes[j] >> np.uint64(32))
    full = (count + _LANES - 1) // _LANES * _LANES
    for j in range(count, full):
        shingles[j] = shingles[0]
    return int(full)


@jit()
def take_lowest(shingles, count, factors, terms, lowest):  # type: ignore[no-untyped-def]
    """Lower each of `lowest` to the least hash of the shingles under its factor and term."""
    for k in range(len(factors)):
        a = factors[k]
        b = terms[k]
        best = lowest[k]
        for j in range(count):
            value = np.uint32(shingles[j] * a + b)
            best = value if value < best else best
        lowest[k] = best


@jit()
def sign(data, offsets, table, factors, terms, ngram, rows, out):  # type: ignore[no-untyped-def]
    """One 64-bit hash a band into `out` uint64 [documents, bands]; a row of zeros for a document without words.

    Source: Broder 1997 (resemblance as the chance of equal minima); Leskovec et al., Mining of Massive Datasets, 3.4
    (bands of rows).
    """
    words, hashes = np.empty(_BLOCK + 2, np.uint64), np.empty(_BLOCK + 2, np.uint64)
    shingles = np.empty(_BLOCK + 2 + _LANES, np.uint32)
    lowest = np.empty(len(factors), np.uint32)
    for d in range(len(offsets) - 1):
        i, stop = offsets[d], offsets[d + 1]
        lowest[:] = np.uint32(0xFFFFFFFF)
        have = 0
        seen = False
        while i < stop:
            i, have = read_words(data, i, stop, table, words, have)
            if have == 0 or (seen and have < ngram):
                continue
            take_lowest(shingles, make_shingles(words, have, ngram, hashes, shingles), factors, terms, lowest)
            seen = True
            if have >= ngram:
                for j in range(ngram - 1):
                    words[j] = words[have - ngram + 1 + j]
                have = ngram - 1
        for band in range(out.shape[1]):
            h = np.uint64(band + 1)
            for k in range(band * rows, (band + 1) * rows):
                h = mix(h * _BASE + np.uint64(lowest[k]))
            out[d, band] = max(h, _U1) if seen else np.uint64(0)


@jit()
def normalise(data, i, stop, table, scratch):  # type: ignore[no-untyped-def]
    """The text with each run of gaps as one space and none at its ends, into `scratch`: (bytes, characters).

    Characters beyond ASCII are written as three bytes, the first with its high bit set: other texts, other bytes. An
    empty table leaves the text as it is.
    """
    n = 0
    characters = 0
    if len(table) == 0:
        for j in range(i, stop):
            scratch[j - i] = data[j]
            characters += (data[j] & 0xC0) != 0x80
        return stop - i, characters
    gap = False
    while i < stop:
        byte = data[np.uint64(i)]
        if byte < 128:
            value = table[byte]
            i += 1
        else:
            code, i = decode(data, i, stop)
            value = table[code] if code < _TABLE_SIZE else code
        if value == GAP:
            gap = n > 0
            continue
        if value == IGNORED:
            continue
        if gap:
            scratch[np.uint64(n)] = 32
            n += 1
            gap = False
        value &= ~ALONE
        characters += 1
        if value < 128:
            scratch[np.uint64(n)] = value
            n += 1
        else:
            scratch[np.uint64(n)] = 0x80 | (value >> 16)
            scratch[np.uint64(n + 1)] = (value >> 8) & 0xFF
            scratch[np.uint64(n + 2)] = value & 0xFF
            n += 3
    return n, characters


@jit()
def _word64(data, i, n):  # type: ignore[no-untyped-def]
    word = np.uint64(0)
    for j in range(n):
        word |= np.uint64(data[i + j]) << np.uint64(8 * j)
    return word


@jit()
def _spread(k, a, r, b):  # type: ignore[no-untyped-def]
    k *= a
    k = (k << r) | (k >> (_B64 - r))
    return k * b


@jit()
def hash128(data, n):  # type: ignore[no-untyped-def]
    """128 bits of the first n bytes, as two uint64. Source: MurmurHash3_x64_128 (Appleby), seed 0."""
    h1 = np.uint64(0)
    h2 = np.uint64(0)
    full = n // 16 * 16
    for i in range(0, full, 16):
        h1 ^= _spread(_word64(data, i, 8), _C1, _R31, _C2)
        h1 = ((h1 << _R27) | (h1 >> (_B64 - _R27))) + h2
        h1 = h1 * _U5 + _N1
        h2 ^= _spread(_word64(data, i + 8, 8), _C2, _R33, _C1)
        h2 = ((h2 << _R31) | (h2 >> (_B64 - _R31))) + h1
        h2 = h2 * _U5 + _N2
    rest = n - full
    if rest > 8:
        h2 ^= _spread(_word64(data, full + 8, rest - 8), _C2, _R33, _C1)
    if rest > 0:
        h1 ^= _spread(_word64(data, full, min(rest, 8)), _C1, _R31, _C2)
    h1 ^= np.uint64(n)
    h2 ^= np.uint64(n)
    h1 += h2
    h2 += h1
    h1 = mix(h1)
    h2 = mix(h2)
    h1 += h2
    h2 += h1
    return h1, h2


@jit()
def _hash_documents(data, offsets, table, scratch, out):  # type: ignore[no-untyped-def]
    for d in range(len(offsets) - 1):
        n, characters = normalise(data, offsets[d], offsets[d + 1], table, scratch)
        out[d] = hash128(scratch, n) if characters else (np.uint64(0), np.uint64(0))
