"""Measurements of the filters in compiled code over Arrow's buffers: a row of numbers a document, linear in the bytes.

Lines, paragraphs and n-grams are counted by 64-bit hashes in an open-addressed table; a collision happens once in about
10^7 documents of a million n-grams. Source of the definitions: Rae et al. 2021, section A.1.1, as in datatrove 0.10.
"""

import numpy as np
import pyarrow as pa

from forebay.arrays import I64
from forebay.prepare.compiled import jit
from forebay.prepare.documents import text_buffers
from forebay.prepare.filters.points import (
    decode,
    hash_points,
    kind,
    look_up,
    next_point,
    room_of,
    table_size,
    trim,
    word_runs,
)
from forebay.prepare.filters.word_tables import BREAK, SPACE, TERMINAL, UNSPACED, character_table
from forebay.prepare.filters.words import HAS_LETTER, IS_DENSE, IS_TEXT

QUALITY = (
    "words", "text_words", "text_chars", "alpha_words", "hashes", "ellipses", "lines", "bullets", "trails", "stops",
    "dense",
)  # fmt: skip
"""Columns of `measure_quality`: words; those that are not all symbols, and their characters; with a letter; # signs;
ellipses; lines; lines that begin with a bullet; that end with an ellipsis; different stop words; words of Hangul
or of scripts without spaces."""
REPETITION = ("chars", "paragraphs", "same_paragraphs", "paragraph_chars", "lines", "same_lines", "line_chars")
"""First columns of `measure_repetition`; then characters in the top n-gram for each n, and in duplicate n-grams."""
FINEWEB = ("lines", "ended", "short", "same_chars", "chars", "newlines", "words")  # Columns of `measure_lines`.

_FACTOR = np.uint64(0xD1342543DE82EF95)
_SHIFT = np.uint64(32)


@jit()
def _trails(points, start, stop):  # type: ignore[no-untyped-def]
    if stop > start and points[stop - 1] == 0x2026:
        return True
    return stop - start > 2 and points[stop - 1] == 46 and points[stop - 2] == 46 and points[stop - 3] == 46


@jit(forceinline=True)
def _insert(slots, h):  # type: ignore[no-untyped-def]
    """Whether the table, of a power of two of slots, holds the hash already; it does then."""
    mask = np.uint64(len(slots) - 1)
    h |= np.uint64(1)
    slot = (h >> _SHIFT ^ h >> np.uint64(1)) & mask
    while slots[slot] != 0:
        if slots[slot] == h:
            return True
        slot = (slot + np.uint64(1)) & mask
    slots[slot] = h
    return False


@jit()
def measure_quality(cut, table, stop_keys, stop_values, languages, out):  # type: ignore[no-untyped-def]
    """`QUALITY` int64 [rows, 11] of documents `data[offsets[i]:stops[i]]`; `languages`: of each the language's hash."""
    points = np.empty(room_of(cut.offsets, cut.stops), np.uint32)
    seen = np.full(len(stop_keys), -1, np.int64)
    for row in range(len(cut.stops)):
        n = decode(cut.data, cut.offsets[row], cut.stops[row], points)
        text_words = text_chars = alpha_words = num_stops = dense = 0
        for w in range(cut.starts[row], cut.starts[row + 1]):
            if cut.flags[w] & IS_TEXT:
                text_words += 1
                text_chars += cut.chars[w]
                dense += cut.flags[w] & IS_DENSE != 0
            alpha_words += cut.flags[w] & HAS_LETTER != 0
            stop = look_up(stop_keys, stop_values, cut.hashes[w] ^ languages[row])
            if stop >= 0 and seen[stop] != row:
                seen[stop] = row
                num_stops += 1
        out[row, 0] = cut.starts[row + 1] - cut.starts[row]
        out[row, 1], out[row, 2], out[row, 3] = text_words, text_chars, alpha_words
        out[row, 9], out[row, 10] = num_stops, dense
        signs = ellipses = lines = bullets = trails = 0
        start, dots = 0, 0
        for i in range(n + 1):
            c = points[i] if i < n else np.uint32(10)
            signs += c == 35
            ellipses += c == 0x2026
            dots = dots + 1 if c == 46 else 0
            if dots == 3:
                ellipses += 1
                dots = 0
            if kind(table, c) & BREAK == 0 or (i == n and start == n):
                continue
            if c == 10 and i > 0 and i < n and points[i - 1] == 13:
                start = i + 1
                continue
            lines += 1
            a, b = trim(points, start, i, table)
            bullets += b > a and (points[a] == 0x2022 or points[a] == 45)
            trails += _trails(points, a, b)
            start = i + 1
        out[row, 4], out[row, 5], out[row, 6], out[row, 7], out[row, 8] = signs, ellipses, lines, bullets, trails


@jit()
def _same_parts(points, start, stop, min_newlines, slots):  # type: ignore[no-untyped-def]
    """Parts between runs of at least `min_newlines` newlines: how many, how many again, and the characters of those."""
    parts = same = same_chars = 0
    i = begin = start
    while i <= stop:
        if i < stop and points[i] != 10:
            i += 1
            continue
        j = i
        while j < stop and points[j] == 10:
            j += 1
        if j - i >= min_newlines or i == stop:
            parts += 1
            if _insert(slots, hash_points(points, begin, i)):
                same += 1
                same_chars += i - begin
            begin = j
        if i == stop:
            break
        i = j
    return parts, same, same_chars


@jit(forceinline=True)
def _gram(sums, i, n, power):  # type: ignore[no-untyped-def]
    return (sums[i + n] - sums[i] * power) | np.uint64(1)


@jit()
def _count(sums, places, num_places, n, power, slots, counts, slot_of):  # type: ignore[no-untyped-def]
    """How often the n-gram at each of the first `num_places` places occurs there: `counts[slot_of[k]]`; the highest."""
    size = table_size(num_places + 1)
    mask = np.uint64(size - 1)
    slots[:size] = 0
    best = 0
    for k in range(num_places):
        h = _gram(sums, places[k], n, power)
        slot = (h >> _SHIFT ^ h >> np.uint64(1)) & mask
        while slots[slot] != 0 and slots[slot] != h:
            slot = (slot + np.uint64(1)) & mask
        if slots[slot] == 0:
            slots[slot], counts[slot] = h, 0
        counts[slot] += 1
        slot_of[k] = slot
        best = max(best, counts[slot])
    return best


@jit()
def _same_chars(sums, lengths, places, num_places, n, power, slots):  # type: ignore[no-untyped-def]
    """Characters of n-grams that came before, none counted in two of them."""
    table = slots[: table_size(num_places + 1)]
    table[:] = 0
    chars = free = 0
    for k in range(num_places):
        i = places[k]
        if i >= free and _insert(table, _gram(sums, i, n, power)):
            chars += lengths[i + n] - lengths[i]
            free = i + n
    return chars


@jit()
def _measure_grams(sums, lengths, words, sizes, places, slots, counts, slot_of, out):  # type: ignore[no-untyped-def]
    """Characters in the top or in the duplicate n-grams, for each (n, column, whether top) of `sizes`, n ascending.

    An n-gram that occurs twice begins with a shorter one that does: only `places` of such are looked at again, few in
    most texts. Those of any other are unique, and change neither measure but where no n-gram occurs twice.
    """
    num_places, narrowed = words, False
    for i in range(words):
        places[i] = i
    for s in range(len(sizes)):
        n, column, is_top = sizes[s, 0], sizes[s, 1], sizes[s, 2]
        power = np.uint64(1)
        for _ in range(n):
            power *= _FACTOR
        while num_places and places[num_places - 1] + n > words:
            num_places -= 1
        if is_top or not narrowed:
            best = _count(sums, places, num_places, n, power, slots, counts, slot_of)
            first, num_retained = 0, 0
            for k in range(num_places - 1, -1, -1):
                first = places[k] if counts[slot_of[k]] == best > 1 else first
            for k in range(num_places):
                if counts[slot_of[k]] > 1:
                    places[num_retained] = places[k]
                    num_retained += 1
            num_places, narrowed = num_retained, True
            if is_top:
                out[column] = max(best, 1) * (lengths[first + n] - lengths[first] + n - 1) if words >= n else 0
        if not is_top:
            out[column] = _same_chars(sums, lengths, places, num_places, n, power, slots)


@jit()
def measure_repetition(cut, table, sizes, out):  # type: ignore[no-untyped-def]
    """`REPETITION`, then what `sizes` asks for: int64 [rows, 7 + len(sizes)]."""
    capacity = room_of(cut.offsets, cut.stops)
    points = np.empty(capacity, np.uint32)
    sums, lengths = np.zeros(capacity, np.uint64), np.zeros(capacity, np.int32)
    places, slot_of = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
    slots, counts = np.empty(0, np.uint64), np.empty(0, np.int32)
    for row in range(len(cut.stops)):
        n = decode(cut.data, cut.offsets[row], cut.stops[row], points)
        breaks = 1
        for i in range(n):
            breaks += points[i] == 10
        words = cut.starts[row + 1] - cut.starts[row]
        size = table_size(max(breaks, words) + 1)
        if size > len(slots):
            slots, counts = np.empty(size, np.uint64), np.empty(size, np.int32)
        parts = slots[: table_size(breaks + 1)]
        a, b = trim(points, 0, n, table)
        out[row, 0] = n
        parts[:] = 0
        out[row, 1], out[row, 2], out[row, 3] = _same_parts(points, a, b, 2, parts)
        parts[:] = 0
        out[row, 4], out[row, 5], out[row, 6] = _same_parts(points, 0, n, 1, parts)
        for w in range(words):
            sums[w + 1] = sums[w] * _FACTOR + cut.hashes[cut.starts[row] + w]
            lengths[w + 1] = lengths[w] + cut.chars[cut.starts[row] + w]
        _measure_grams(sums, lengths, words, sizes, places, slots, counts, slot_of, out[row])


@jit()
def measure_lines(cut, table, short, out):  # type: ignore[no-untyped-def]
    """`FINEWEB` int64 [rows, 7]; a line is short with at most `short` characters."""
    points = np.empty(room_of(cut.offsets, cut.stops), np.uint32)
    for row in range(len(cut.stops)):
        n = decode(cut.data, cut.offsets[row], cut.stops[row], points)
        newlines = 0
        for i in range(n):
            newlines += points[i] == 10
        slots = np.zeros(table_size(newlines + 2), np.uint64)
        lines = ended = shorts = same_chars = 0
        start = 0
        for i in range(n + 1):
            if i < n and points[i] != 10:
                continue
            a, b = trim(points, start, i, table)
            if b > a:
                lines += 1
                ended += kind(table, points[i - 1]) & TERMINAL != 0
                shorts += i - start <= short
                if _insert(slots, hash_points(points, start, i)):
                    same_chars += i - start
            start = i + 1
        words = cut.starts[row + 1] - cut.starts[row]
        out[row, 0], out[row, 1], out[row, 2], out[row, 3] = lines, ended, shorts, same_chars
        out[row, 4], out[row, 5], out[row, 6] = n - newlines, newlines, words


def text_lengths(column: pa.LargeStringArray) -> I64:
    """What `_measure_length` writes about each text, int64 [2, rows]: characters and words."""
    out = np.zeros((len(column), 2), np.int64)
    _measure_length(*text_buffers(column), character_table(), out)
    return out.T


@jit()
def _measure_length(offsets, data, table, out):  # type: ignore[no-untyped-def]
    """int64 [rows, 2]: characters; runs of them without white space, those of scripts without spaces cut into words."""
    points = np.empty(0, np.uint32)
    for row in range(len(offsets) - 1):
        chars = words = 0
        inside, cut = False, False
        i = offsets[row]
        while i < offsets[row + 1]:
            point, i = next_point(data, i)
            bits = kind(table, point)
            space = bits & SPACE != 0
            words += not space and not inside
            inside = not space
            cut = cut or bits & UNSPACED != 0
            chars += 1
        if cut:
            if len(points) < chars + 2:
                points = np.empty(chars + 2, np.uint32)
            words, _ = word_runs(points, 0, decode(data, offsets[row], offsets[row + 1], points), table)
        out[row, 0], out[row, 1] = chars, words
