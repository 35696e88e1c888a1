"""Words of scripts without spaces: Han, kana, Thai, Lao, Khmer, Burmese. By rule, without a dictionary.

The number of words is within 19 % of what ICU 78 counts with its dictionaries in the Declaration of Human Rights, and
within 6 % in articles in Chinese and Japanese; single words often differ.
"""

import numpy as np

from forebay.prepare.compiled import jit
from forebay.prepare.filters.points import kind
from forebay.prepare.filters.word_tables import FUNCTION, PUNCTUATION, SPACE, UNSPACED

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
