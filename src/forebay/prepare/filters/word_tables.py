"""Tables of the compiled word cutter: the kinds of characters (0.05 s, 0.5 MB a process), and uncut chunks."""

import tomllib
import unicodedata
from functools import cache, lru_cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.arrays import I32, U16, U64

HashTable = tuple[U64, I32]
"""An open-addressed table for compiled code: hashes uint64 [slots] (0: free), values int32 [slots]."""
SPACE, LETTER, SYMBOL, BREAK = 1, 2, 4, 8
LOWER, UPPER, DIGIT, EDGE = 16, 32, 64, 128
OPENING, ICON, QUOTE, TERMINAL, PUNCTUATION, CURRENCY = 256, 512, 1024, 2048, 4096, 8192
UNSPACED, FUNCTION = 16384, 32768
"""Bits of an entry: white space; `str.isalpha`; what a word must not consist of to count; what ends a line for
`str.splitlines`; small letter, capital (a letter without case is both); 0 to 9; cut off a word at both ends;
cut off only before it; pictures; quotation marks; ends a sentence; of category P; money; of a script that is written
without spaces; and there mostly a word by itself."""

ROWS = 0x20001

UNSPACED_SCRIPTS = (
    (0x0E00, 0x0E7F), (0x0E80, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3005, 0x3007), (0x3040, 0x309F),
    (0x30A0, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA9E0, 0xA9FF), (0xAA60, 0xAA7F), (0xF900, 0xFAFF),
)  # fmt: skip
"""Thai, Lao, Burmese, Khmer, kana and Han: first and last code points. Source: Unicode 15.1, Blocks.txt."""
_FUNCTION = (
    "的了在是和我他她它你這那都而與与及或之其於于以为為被把將将對对從从到由但若每各某所者则則并並已很更最太又再还還也就"
    "吗嗎呢吧啊一二三四五六七八九十百千两兩はがをにのともでへ"
)
"""Characters of Chinese and Japanese that are mostly words by themselves: particles, pronouns, numerals."""

_EDGE = "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪—–"
_QUOTES = "'\"”“`‘´’‚„»«「」『』（）〔〕【】《》〈〉〈〉⟦⟧"
_CURRENCY = "$£€¥฿﷼₽₴₠₡₢₣₤₥₦₧₨₩₪₫₭₮₯₰₱₲₳₵₶₷₸₹₺₻₼₾₿"
_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@cache
def word_lists() -> dict[str, Any]:
    """The tables of `word_lists.toml`."""
    return tomllib.loads((resources.files("forebay.prepare.filters") / "word_lists.toml").read_text("utf-8"))


def _ranges(text: str) -> list[int]:
    pairs = [part.partition("-") for part in text.split()]
    return [c for first, _, last in pairs for c in range(int(first, 16), int(last or first, 16) + 1)]


@lru_cache(1)
def categories() -> NDArray[np.bytes_]:
    """S2 [ROWS]: the general category of every code point below ROWS."""
    return np.frombuffer("".join(map(unicodedata.category, map(chr, range(ROWS)))).encode(), "S2")


@lru_cache(1)
def character_table() -> U16:
    """uint16 [ROWS]: the bits of every code point below ROWS - 1; the last entry is that of all others."""
    table = np.zeros(ROWS, np.uint16)
    characters = np.arange(ROWS, dtype=np.uint32).view("U1")
    kinds = categories()
    table[np.char.isspace(characters)] |= SPACE
    table[np.char.isalpha(characters)] |= LETTER
    caseless = np.isin(kinds, (b"Lo", b"Lm"))
    table[caseless | (kinds == b"Ll")] |= LOWER
    table[caseless | np.isin(kinds, (b"Lu", b"Lt"))] |= UPPER
    table[np.char.startswith(kinds, b"P")] |= PUNCTUATION
    table[kinds == b"So"] |= ICON
    for bits, chars in (
        (SYMBOL | TERMINAL, _ranges(word_lists()["points"]["terminal"])),
        (SYMBOL, _ranges(word_lists()["points"]["symbols"])),
        (EDGE, list(map(ord, _EDGE))),
        (EDGE | QUOTE, list(map(ord, _QUOTES))),
        (OPENING | CURRENCY, list(map(ord, _CURRENCY))),
        (OPENING, list(map(ord, "§%="))),
        (BREAK, list(map(ord, _BREAKS))),
        (DIGIT, list(range(48, 58))),
        (FUNCTION, list(map(ord, _FUNCTION))),
    ):
        table[chars] |= bits
    table[table & ICON != 0] |= EDGE
    for first, last in UNSPACED_SCRIPTS:
        written = np.isin(kinds[first : last + 1], (b"Lo", b"Lm", b"Mn", b"Mc"))
        table[first : last + 1][written] |= UNSPACED
    table.flags.writeable = False
    return table


MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_SPECIAL_SLOTS = 2048


def hash_word(text: str) -> int:
    """The hash that the compiled code gives to a word."""
    h = 0
    for char in text:
        h = ((h ^ ord(char)) * MIX) & _MASK
        h ^= h >> 29
    return (h * MIX) & _MASK or 1


def hash_table(values: dict[str, int], slots: int) -> HashTable:
    """A table of words for compiled code."""
    return table_of_hashes({hash_word(word): value for word, value in values.items()}, slots)


def table_of_hashes(values: dict[int, int], slots: int = 0) -> HashTable:
    """`hash_table` by hashes; by default with a power of two of slots that leaves at least half of them free."""
    slots = slots or max(16, 1 << (2 * len(values)).bit_length())
    keys, codes = np.zeros(slots, np.uint64), np.zeros(slots, np.int32)
    for h, value in values.items():
        slot = h & (slots - 1)
        while keys[slot] not in (0, h):
            slot = (slot + 1) & (slots - 1)
        keys[slot], codes[slot] = h, value
    keys.flags.writeable = codes.flags.writeable = False
    return keys, codes


@lru_cache(1)
def special_words() -> HashTable:
    """Chunks that are not cut by rule, and after how many characters they are cut instead (0: not at all)."""
    lists = {name: text.split() for name, text in word_lists()["cut"].items()}
    specials = dict.fromkeys(lists["uncut"], 0)
    specials |= dict.fromkeys([f"{letter}." for letter in "abcdefghijklmnopqrstuvwxyzäöü"], 0)
    specials |= {f"{hour}{half}": len(str(hour)) for hour in range(1, 13) for half in ("am", "pm", "a.m.", "p.m.")}
    parts = lists["parts"] + lists["contracted"]
    parts += [f"{word}|'{end}" for word in lists["pronouns"] for end in ("s", "d", "ll", "re", "ve")]
    for part in parts:
        for form in (part, part[0].upper() + part[1:]):
            for variant in (form, form.replace("'", "’")):
                if variant.replace("|", "") not in ("Ill", "ill", "Well", "well", "Shell", "Wed", "wed", "Were"):
                    specials.setdefault(variant.replace("|", ""), variant.index("|"))
    return hash_table(specials, _SPECIAL_SLOTS)
