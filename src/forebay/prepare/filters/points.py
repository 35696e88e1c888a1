"""Code points of UTF-8 text in compiled code: decoding, their kinds, hashes of words and tables of these.

Words of scripts without spaces: Han, kana, Thai, Lao, Khmer, Burmese. By rule, without a dictionary.

The number of words is within 19 % of what ICU 78 counts with its dictionaries in the Declaration of Human Rights, and
within 6 % in articles in Chinese and Japanese; single words often differ.
"""

import numpy as np

from forebay.prepare.compiled import jit
from forebay.prepare.filters.word_tables import FUNCTION, MIX, PUNCTUATION, ROWS, SPACE, UNSPACED

_LAST = ROWS - 1


@jit(forceinline=True)
def next_point(data, i):  # type: ignore[no-untyped-def]
    """The code point that begins at byte i of UTF-8, and where the next one begins."""
    first = int(data[i])
    if first < 0x80:
        return first, i + 1
    if first < 0xE0:
        return (first & 0x1F) << 6 | data[i + 1] & 0x3F, i + 2
    if first < 0xF0:
        return (first & 0xF) << 12 | (data[i + 1] & 0x3F) << 6 | data[i + 2] & 0x3F, i + 3
    return (first & 7) << 18 | (data[i + 1] & 0x3F) << 12 | (data[i + 2] & 0x3F) << 6 | data[i + 3] & 0x3F, i + 4


@jit()
def decode(data, start, stop, points):  # type: ignore[no-untyped-def]
    """Code points of UTF-8 `data[start:stop]` into `points` uint32; how many there are."""
    n = 0
    i = start
    while i < stop:
        points[n], i = next_point(data, i)
        n += 1
    return n


@jit(forceinline=True)
def encode_point(c, out, pos):  # type: ignore[no-untyped-def]
    """UTF-8 of a code point into `out` from byte `pos` on; where it ends."""
    if c < 0x80:
        out[pos] = c
        return pos + 1
    width = 1 if c < 0x800 else 2 if c < 0x10000 else 3
    out[pos] = (0xFF00 >> (width + 1) & 0xFF) | (c >> (6 * width))
    for k in range(width - 1, -1, -1):
        out[pos + width - k] = 0x80 | ((c >> (6 * k)) & 0x3F)
    return pos + width + 1


@jit()
def encode(points, start, stop, out, pos):  # type: ignore[no-untyped-def]
    """`encode_point` of `points[start:stop]`, one after the other."""
    for i in range(start, stop):
        pos = encode_point(points[i], out, pos)
    return pos


@jit(forceinline=True)
def find(data, start, stop, value):  # type: ignore[no-untyped-def]
    """The first place in `[start, stop)` with that value, or `stop`."""
    while start < stop and data[start] != value:
        start += 1
    return start


@jit()
def copy(data, start, stop, out, pos):  # type: ignore[no-untyped-def]
    """Copy `data[start:stop]` into `out` from `pos` on; return the end. Assigning a slice takes seconds to compile."""
    for i in range(start, stop):
        out[pos] = data[i]
        pos += 1
    return pos


@jit()
def starts_with(data, start, stop, prefix):  # type: ignore[no-untyped-def]
    """Whether `data[start:stop]` begins with `prefix`."""
    if stop - start < len(prefix):
        return False
    for i in range(len(prefix)):  # noqa: SIM110 - numba has no generators here
        if data[start + i] != prefix[i]:
            return False
    return True


@jit(forceinline=True)
def kind(table, point):  # type: ignore[no-untyped-def]
    """The bits of a code point."""
    return table[point] if point < _LAST else table[_LAST]


@jit()
def room_of(offsets, stops):  # type: ignore[no-untyped-def]
    """Room for the characters of the longest row `[offsets[i], stops[i])`, and two more."""
    longest = 0
    for row in range(len(stops)):
        longest = max(longest, stops[row] - offsets[row])
    return longest + 2


@jit()
def trim(points, start, stop, table):  # type: ignore[no-untyped-def]
    """`[start, stop)` without the white space at its ends."""
    while start < stop and kind(table, points[start]) & SPACE:
        start += 1
    while stop > start and kind(table, points[stop - 1]) & SPACE:
        stop -= 1
    return start, stop


@jit(forceinline=True)
def hash_step(h, value):  # type: ignore[no-untyped-def]
    """The hash of a word, uint64, with one more character; `hash_end` ends it."""
    h = (h ^ np.uint64(value)) * np.uint64(MIX)
    return h ^ h >> np.uint64(29)


@jit(forceinline=True)
def hash_end(h):  # type: ignore[no-untyped-def]
    h *= np.uint64(MIX)
    return h if h != 0 else np.uint64(1)


@jit(forceinline=True)
def hash_points(points, start, stop):  # type: ignore[no-untyped-def]
    """`hash_word` of `points[start:stop]`."""
    h = np.uint64(0)
    for i in range(start, stop):
        h = hash_step(h, points[i])
    return hash_end(h)


@jit()
def table_size(entries):  # type: ignore[no-untyped-def]
    """A power of two of slots, at least half of which stay free."""
    size = 16
    while size < 2 * entries:
        size *= 2
    return size


@jit(forceinline=True)
def look_up(keys, values, h):  # type: ignore[no-untyped-def]
    """The value of a hash in a `hash_table`, or -1."""
    mask = np.uint64(len(keys) - 1)
    slot = h & mask
    while keys[slot] != 0:
        if keys[slot] == h:
            return values[slot]
        slot = (slot + np.uint64(1)) & mask
    return np.int32(-1)


_HAN, _HIRAGANA, _KATAKANA, _THAI, _LAO, _KHMER, _BURMESE = range(7)


@jit(forceinline=True)
def _script(c):  # type: ignore[no-untyped-def]
    if (c >= 0x3400 and c < 0xA9E0) or c >= 0xF900 or (c < 0x3040 and c >= 0x3005):
        return _HAN
    if c >= 0x3040 and c < 0x3400:
        return _HIRAGANA if c < 0x30A0 else _KATAKANA
    if c < 0x0E80:
        return _THAI
    if c < 0x0F00:
        return _LAO
    return _KHMER if 0x1780 <= c < 0x1800 else _BURMESE


@jit()
def _begins_syllable(points, i, stop, script):  # type: ignore[no-untyped-def]
    """How surely a syllable of Thai, Lao, Khmer or Burmese begins at i: 0 (no) to 2."""
    c, before = points[i], points[i - 1]
    after = points[i + 1] if i + 1 < stop else np.uint32(0)
    if script == _KHMER:  # a consonant or independent vowel that no sign subscribes
        return 2 if c <= 0x17B3 and before != 0x17D2 else 0
    if script == _BURMESE:  # a letter that is neither stacked nor killed, before or after
        letter_ = c <= 0x102A or c == 0x103F or 0x104C <= c <= 0x104F
        return 2 if letter_ and before != 0x1039 and after != 0x103A and after != 0x1039 else 0
    shift = 0x80 if script == _LAO else 0  # Lao lies so far above Thai, in the same order.
    base, follows = c - shift, after - shift
    if 0x0E40 <= before - shift <= 0x0E44:
        return 0  # a vowel that is written before its consonant
    if 0x0E40 <= base <= 0x0E44:
        return 2
    return 1 if base <= 0x0E2E and 0x0E30 <= follows <= 0x0E3A and follows != 0x0E3A else 0


@jit()
def unspaced_word(points, start, stop, table):  # type: ignore[no-untyped-def]
    """Where the word at `start` ends, in a run `[start, stop)` of characters of scripts without spaces.

    By rule, without a dictionary: Han in pairs and hiragana in threes, but for characters that are mostly words by
    themselves; katakana in one; Thai, Lao, Khmer and Burmese in syllables until a word has the usual length.
    """
    script = _script(points[start])
    alone = kind(table, points[start]) & FUNCTION != 0
    i = start + 1
    if alone or script > _KATAKANA:
        max_chars = 0
    else:
        max_chars = 2 if script == _HAN else 3 if script == _HIRAGANA else 64
    while (
        i < stop and i - start < max_chars and _script(points[i]) == script and kind(table, points[i]) & FUNCTION == 0
    ):
        i += 1
    if script > _KATAKANA:
        syllables = 1
        while i < stop and i - start < 64 and _script(points[i]) == script:
            sure = _begins_syllable(points, i, stop, script)
            syllables += sure > 0
            length = i - start
            if script <= _LAO:
                if (sure == 2 and length >= 2) or (sure == 1 and length >= 3):
                    break
            elif sure and (syllables > 3 if script == _KHMER else length >= 4):
                break
            i += 1
    return i


@jit()
def word_runs(points, start, stop, table):  # type: ignore[no-untyped-def]
    """How many runs without white space there are, and the longest; scripts without spaces are cut into words."""
    words = longest = run = 0
    i = start
    while i < stop:
        bits = kind(table, points[i])
        if bits & SPACE or (bits & PUNCTUATION and (0x3000 <= points[i] < 0x3040 or points[i] >= 0xFF00)):
            run = 0
            i += 1
            continue
        if bits & UNSPACED:
            end = i
            while end < stop and kind(table, points[end]) & UNSPACED:
                end += 1
            while i < end:
                run = unspaced_word(points, i, end, table) - i
                i += run
                words += 1
                longest = max(longest, run)
            run = 0
            continue
        words += run == 0
        run += 1
        longest = max(longest, run)
        i += 1
    return words, longest
