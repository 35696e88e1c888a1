"""What a character is to the comparison of texts: part of a word, a word of its own, nothing, or a gap between words.

Hides: Unicode. The compiled loops see one table of 2^17 entries (512 KiB, of which English touches the first 512
bytes), made once a process in about 0.05 s. It follows Python's Unicode tables: another version of them may see
characters that are new to it in another way, and nothing else.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

GAP, IGNORED = 0, 1
ALONE = 1 << 31
"""Set for a character that is a word by itself."""
TABLE_SIZE = 1 << 17

_ALONE = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF))
"""Thai, Lao, Burmese, Khmer, kana and Han are written without spaces: a character is the only unit that is there."""


@lru_cache
def character_table(normalise: str) -> NDArray[np.uint32]:
    """What each character below 2^17 becomes; those above stay as they are.

    Args:
        normalise: `words`: lower case, without the accents of Latin, Greek and Cyrillic, width and ligature-free
            compatibility forms folded; punctuation, symbols, spaces and control characters are gaps, invisible
            characters are ignored. `space`: white space is a gap, all else stays.

    Returns:
        uint32 [2^17]: GAP, IGNORED, or a code point, with ALONE set if it is a word by itself.
    """
    entry = _word_entry if normalise == "words" else _space_entry
    table = np.fromiter(map(entry, range(TABLE_SIZE)), np.uint32, TABLE_SIZE)
    if normalise == "words":
        for start, stop in _ALONE:
            codes = np.arange(start, stop + 1, dtype=np.uint32)
            part = table[start : stop + 1]
            part[:] = np.where(part > IGNORED, codes | np.uint32(ALONE), part)
    table.setflags(write=False)
    return table


def _space_entry(code: int) -> int:
    # Codes 0 and 1 are the table's own marks; as text they mean nothing, so that they may be gaps.
    return GAP if code <= 1 or chr(code).isspace() else code


def _word_entry(code: int) -> int:
    character = chr(code)
    category = unicodedata.category(character)
    if category == "Cf" or 0x0300 <= code <= 0x036F or 0xFE00 <= code <= 0xFE0F:
        return IGNORED
    if category[0] in "PSZ" or category in ("Cc", "Cs"):
        return GAP
    if not unicodedata.decomposition(character):  # of most: a table that is made in every process is to be made fast
        lower = character.lower()
        return ord(lower) if len(lower) == 1 else code
    plain = "".join(c for c in unicodedata.normalize("NFKD", character) if not "\u0300" <= c <= "\u036f")
    lower = (plain if len(plain) == 1 else character).lower()
    return ord(lower) if len(lower) == 1 else code
