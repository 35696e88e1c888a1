"""What the filters measure, in compiled code over Arrow's buffers: one row of numbers a document.

Hides: how lines, paragraphs and n-grams are counted without a Python object each (hashes in an open-addressed table,
made anew for each document; n-grams by a polynomial over word hashes, so that each costs one multiplication). Every
kernel is linear in the bytes. Two different texts with the same 64-bit hash would be taken for duplicates: with a
million n-grams in a document that happens once in about 10^7 documents.

Source of the definitions: Rae et al. 2021, section A.1.1, as datatrove 0.10 measures them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from millrace.prepare.filters.characters import BREAK, LETTER, SPACE, SYMBOL, TERMINAL
from millrace.prepare.filters.words import cut_words, decode, hash_points, kind, look_up

QUALITY = (
    "words",
    "text_words",
    "text_chars",
    "alpha_words",
    "hashes",
    "ellipses",
    "lines",
    "bullets",
    "trails",
    "stops",
)
"""Columns of `measure_quality`: words; those that are not all symbols, and their characters; with a letter; # signs;
ellipses; lines; lines that begin with a bullet; that end with an ellipsis; different stop words."""
REPETITION = ("chars", "paragraphs", "same_paragraphs", "paragraph_chars", "lines", "same_lines", "line_chars")
"""First columns of `measure_repetition`; then characters in the top n-gram for each n, and in duplicate n-grams."""
FINEWEB = ("lines", "ended", "short", "same_chars", "chars", "newlines", "words")
"""Columns of `measure_lines`."""

_FACTOR = np.uint64(0xD1342543DE82EF95)
_SHIFT = np.uint64(32)


@njit(nogil=True, cache=True)
def _longest(offsets, stops):  # type: ignore[no-untyped-def]
    longest = 0
    for row in range(len(stops)):
        longest = max(longest, stops[row] - offsets[row])
    return longest + 2


@njit(nogil=True, cache=True)
def _trim(points, start, stop, table):  # type: ignore[no-untyped-def]
    while start < stop and kind(table, points[start]) & SPACE:
        start += 1
    while stop > start and kind(table, points[stop - 1]) & SPACE:
        stop -= 1
    return start, stop


@njit(nogil=True, cache=True)
def _trails(points, start, stop):  # type: ignore[no-untyped-def]
    if stop > start and points[stop - 1] == 0x2026:
        return True
    return stop - start > 2 and points[stop - 1] == 46 and points[stop - 2] == 46 and points[stop - 3] == 46


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def _table_size(entries):  # type: ignore[no-untyped-def]
    size = 16
    while size < 2 * entries:
        size *= 2
    return size


@njit(nogil=True, cache=True)
def measure_quality(offsets, stops, data, table, keys, values, stop_keys, stop_values, out):  # type: ignore[no-untyped-def]
    """`QUALITY` int64 [rows, 10] of documents `data[offsets[i]:stops[i]]`."""
    room = _longest(offsets, stops)
    points = np.empty(room, np.uint32)
    begins, ends, tail = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32)
    seen = np.full(len(stop_keys), -1, np.int64)
    for row in range(len(stops)):
        n = decode(data, offsets[row], stops[row], points)
        words = cut_words(points, 0, n, table, keys, values, begins, ends, tail)
        text_words = text_chars = alpha_words = found = 0
        for w in range(words):
            text, alpha = False, False
            for i in range(begins[w], ends[w]):
                k = kind(table, points[i])
                text |= k & SYMBOL == 0
                alpha |= k & LETTER != 0
                if text and alpha:
                    break
            if text:
                text_words += 1
                text_chars += ends[w] - begins[w]
            alpha_words += alpha
            stop = look_up(stop_keys, stop_values, hash_points(points, begins[w], ends[w]))
            if stop >= 0 and seen[stop] != row:
                seen[stop] = row
                found += 1
        out[row, 0], out[row, 1], out[row, 2], out[row, 3], out[row, 9] = (
            words,
            text_words,
            text_chars,
            alpha_words,
            found,
        )
        hashes = ellipses = lines = bullets = trails = 0
        start, dots = 0, 0
        for i in range(n + 1):
            c = points[i] if i < n else np.uint32(10)
            hashes += c == 35
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
            a, b = _trim(points, start, i, table)
            bullets += b > a and (points[a] == 0x2022 or points[a] == 45)
            trails += _trails(points, a, b)
            start = i + 1
        out[row, 4], out[row, 5], out[row, 6], out[row, 7], out[row, 8] = hashes, ellipses, lines, bullets, trails


@njit(nogil=True, cache=True)
def _same_parts(points, start, stop, least, slots):  # type: ignore[no-untyped-def]
    """Parts between runs of at least `least` newlines: how many, how many again, and the characters of those."""
    parts = same = same_chars = 0
    i = begin = start
    while i <= stop:
        if i < stop and points[i] != 10:
            i += 1
            continue
        j = i
        while j < stop and points[j] == 10:
            j += 1
        if j - i >= least or i == stop:
            parts += 1
            if _insert(slots, hash_points(points, begin, i)):
                same += 1
                same_chars += i - begin
            begin = j
            if i == stop:
                break
            if j == stop:
                i = stop
                continue
        elif j == stop:
            i = stop
            continue
        i = j
    return parts, same, same_chars


@njit(nogil=True, cache=True)
def _top_chars(sums, lengths, words, n, slots, counts, firsts):  # type: ignore[no-untyped-def]
    """Characters in all occurrences of the most frequent n-gram, joined by spaces; of several the first."""
    slots[:] = 0
    mask = np.uint64(len(slots) - 1)
    power = np.uint64(1)
    for _ in range(n):
        power *= _FACTOR
    best, first = 0, 0
    for i in range(words - n + 1):
        h = (sums[i + n] - sums[i] * power) | np.uint64(1)
        slot = (h >> _SHIFT ^ h >> np.uint64(1)) & mask
        while slots[slot] != 0 and slots[slot] != h:
            slot = (slot + np.uint64(1)) & mask
        if slots[slot] == 0:
            slots[slot], counts[slot], firsts[slot] = h, 0, i
        counts[slot] += 1
        if counts[slot] > best or (counts[slot] == best and firsts[slot] < first):
            best, first = counts[slot], firsts[slot]
    if best == 0:
        return 0
    return best * (lengths[first + n] - lengths[first] + n - 1)


@njit(nogil=True, cache=True)
def _same_chars(sums, lengths, words, n, slots):  # type: ignore[no-untyped-def]
    """Characters of n-grams that came before, none counted in two of them."""
    slots[:] = 0
    power = np.uint64(1)
    for _ in range(n):
        power *= _FACTOR
    chars, i = 0, 0
    while i + n <= words:
        if _insert(slots, sums[i + n] - sums[i] * power):
            chars += lengths[i + n] - lengths[i]
            i += n
        else:
            i += 1
    return chars


@njit(nogil=True, cache=True)
def measure_repetition(offsets, stops, data, table, keys, values, top, same, out):  # type: ignore[no-untyped-def]
    """`REPETITION` and one column for each n of `top` and of `same`: int64 [rows, 7 + len(top) + len(same)]."""
    room = _longest(offsets, stops)
    points = np.empty(room, np.uint32)
    begins, ends, tail = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32)
    sums, lengths = np.zeros(room, np.uint64), np.zeros(room, np.int32)
    for row in range(len(stops)):
        n = decode(data, offsets[row], stops[row], points)
        breaks = 1
        for i in range(n):
            breaks += points[i] == 10
        size = _table_size(breaks + 1)
        a, b = _trim(points, 0, n, table)
        out[row, 0] = n
        out[row, 1], out[row, 2], out[row, 3] = _same_parts(points, a, b, 2, np.zeros(size, np.uint64))
        out[row, 4], out[row, 5], out[row, 6] = _same_parts(points, 0, n, 1, np.zeros(size, np.uint64))
        words = cut_words(points, 0, n, table, keys, values, begins, ends, tail)
        for w in range(words):
            sums[w + 1] = sums[w] * _FACTOR + hash_points(points, begins[w], ends[w])
            lengths[w + 1] = lengths[w] + ends[w] - begins[w]
        size = _table_size(words + 1)
        slots = np.empty(size, np.uint64)
        counts, firsts = np.empty(size, np.int32), np.empty(size, np.int32)
        for k in range(len(top)):
            out[row, 7 + k] = _top_chars(sums, lengths, words, top[k], slots, counts, firsts)
        for k in range(len(same)):
            out[row, 7 + len(top) + k] = _same_chars(sums, lengths, words, same[k], slots)


@njit(nogil=True, cache=True)
def measure_lines(offsets, stops, data, table, keys, values, short, out):  # type: ignore[no-untyped-def]
    """`FINEWEB` int64 [rows, 7]; a line is short with at most `short` characters."""
    room = _longest(offsets, stops)
    points = np.empty(room, np.uint32)
    begins, ends, tail = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32)
    for row in range(len(stops)):
        n = decode(data, offsets[row], stops[row], points)
        newlines = 0
        for i in range(n):
            newlines += points[i] == 10
        slots = np.zeros(_table_size(newlines + 2), np.uint64)
        lines = ended = shorts = same_chars = 0
        start = 0
        for i in range(n + 1):
            if i < n and points[i] != 10:
                continue
            a, b = _trim(points, start, i, table)
            if b > a:
                lines += 1
                ended += kind(table, points[i - 1]) & TERMINAL != 0
                shorts += i - start <= short
                if _insert(slots, hash_points(points, start, i)):
                    same_chars += i - start
            start = i + 1
        words = cut_words(points, 0, n, table, keys, values, begins, ends, tail)
        out[row, 0], out[row, 1], out[row, 2], out[row, 3] = lines, ended, shorts, same_chars
        out[row, 4], out[row, 5], out[row, 6] = n - newlines, newlines, words


@njit(nogil=True, cache=True)
def measure_length(offsets, data, table, out):  # type: ignore[no-untyped-def]
    """int64 [rows, 2]: characters, and runs of them without white space."""
    for row in range(len(offsets) - 1):
        chars = words = 0
        inside = False
        point = np.zeros(1, np.uint32)
        i = offsets[row]
        while i < offsets[row + 1]:
            b = data[i]
            width = 1 if b < 0x80 else 2 if b < 0xE0 else 3 if b < 0xF0 else 4
            decode(data, i, i + width, point)
            space = kind(table, point[0]) & SPACE != 0
            words += not space and not inside
            inside = not space
            chars += 1
            i += width
        out[row, 0], out[row, 1] = chars, words
