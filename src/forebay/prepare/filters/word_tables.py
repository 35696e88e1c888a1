"""Tables of the compiled word cutter: the kinds of characters (0.05 s, 0.5 MB a process), and uncut chunks."""

import unicodedata
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

SPACE, LETTER, SYMBOL, BREAK = 1, 2, 4, 8
LOWER, UPPER, DIGIT, EDGE = 16, 32, 64, 128
OPENING, ICON, QUOTE, TERMINAL, PUNCTUATION, CURRENCY = 256, 512, 1024, 2048, 4096, 8192
UNSPACED, FUNCTION = 16384, 32768
"""Bits of an entry: white space; `str.isalpha`; what a word must not consist of to count; what ends a line for
`str.splitlines`; small letter, capital (a letter without case is both); 0 to 9; cut off a word at both ends;
cut off only before it; pictures; quotation marks; ends a sentence; of category P; money; of a script that is written
without spaces; and there mostly a word by itself."""

ROWS = 0x20001

_SYMBOLS = (
    "0-8 b-1f 21-2f 3a-40 5b-60 7b-9f ab b4 bb 2013-2014 2019 201c-201e 2026 2236 2501 25ba 3001-3002 3008-300d "
    "3010-3011 ff01 ff05 ff08-ff09 ff0c ff0e ff11 ff1a-ff1b ff1f ff5e"
)
"""Beside those that end a sentence. Source: the punctuation of CCNet (Wenzek et al. 2020), which datatrove takes over,
with the control characters."""

_TERMINAL = (
    "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 17d4-17d6 "
    "17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 "
    "2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb "
    "fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 "
    "111c5-111c6 111cd 111de-111df 11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 "
    "1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 "
    "16b37-16b38 16b44 16e98 1bc9f 1da88"
)
"""Source: the property Sentence_Terminal of Unicode 15.1, PropList.txt."""

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


def _ranges(text: str) -> list[int]:
    pairs = [part.partition("-") for part in text.split()]
    return [c for first, _, last in pairs for c in range(int(first, 16), int(last or first, 16) + 1)]


@lru_cache(1)
def categories() -> NDArray[np.bytes_]:
    """S2 [ROWS]: the general category of every code point below ROWS."""
    return np.frombuffer("".join(map(unicodedata.category, map(chr, range(ROWS)))).encode(), "S2")


@lru_cache(1)
def character_table() -> NDArray[np.uint16]:
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
        (SYMBOL | TERMINAL, _ranges(_TERMINAL)),
        (SYMBOL, _ranges(_SYMBOLS)),
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

_UNCUT = (
    "Adm. Ak. Ala. Apr. Ariz. Ark. Aug. Bros. Calif. Co. Colo. Conn. Corp. D.C. Dec. Del. Dr. E.G. E.g. Feb. Fla. Ga. "
    "Gen. Gov. I.E. I.e. Ia. Id. Ill. Inc. Ind. Jan. Jr. Jul. Jun. Kan. Kans. Ky. La. Ltd. Mar. Mass. Md. Messrs. "
    "Mich. Minn. Miss. Mo. Mont. Mr. Mrs. Ms. Mt. N.C. N.D. N.H. N.J. N.M. N.Y. Neb. Nebr. Nev. Nov. Oct. Okla. Ore. "
    "Pa. Ph.D. Prof. Rep. Rev. S.C. Sen. Sep. Sept. St. Tenn. Va. Wash. Wis. a.m. co. e.g. i.e. p.m. v.s. vs. and/or "
    "w/o 'S 's ‘S ‘s ’S ’s 're ’re 'Cause 'cause 'cos 'Cos 'coz 'Coz 'cuz 'Cuz 'bout 'em 'll ’ll 'nuff 'd ’d ma'am "
    "Ma'am ma’am Ma’am o'clock O'clock o’clock O’clock lovin' Lovin' havin' doin' goin' nothin' somethin' ol' y'all "
    "'' ’’ (: (; ): :( :(( :() :) :)) :* :-( :-) :-)) :-* :-/ :-D :-P :-p :-| :/ :0 :1 :3 :> :D :O :P :X :o :p :x :| "
    ":} ;) ;-) ;-D ;D <3 <33 </3 =( =) =/ =3 =D =[ =] =| >.< >.> ^_^ @_@ -_- -__- 0.0 0_0 8) 8-) xD XD O.O O_O o_O o.o"
)
_PARTS = (
    "ai|nt are|nt can|not ca|nt could|nt could|ve dare|nt did|nt does|nt do|nt gon|na got|ta had|nt has|nt have|nt "
    "he|d he|s how|d how|ll how|re how|s how|ve i|d i|m is|nt it|d it|ll i|ve may|nt might|nt might|ve must|nt must|ve "
    "need|nt not|ve ought|nt sha|nt she|s should|nt should|ve that|d that|ll that|s there|d there|ll there|re there|s "
    "there|ve these|d these|ll these|re these|ve they|d they|ll they|re they|ve this|d this|ll this|s those|d those|ll "
    "those|re those|ve was|nt we|d were|nt we|ve what|d what|ll what|re what|s what|ve when|d when|ll when|re when|s "
    "when|ve where|d where|ll where|re where|s where|ve who|d who|ll who|s who|ve why|d why|ll why|re why|s why|ve "
    "wo|nt would|nt would|ve y|all you|d you|ll you|re you|ve c'm|on let|'s"
)
_CONTRACTED = (
    "ai|n't are|n't ca|n't could|n't dare|n't did|n't does|n't do|n't had|n't has|n't have|n't is|n't may|n't "
    "might|n't must|n't need|n't ought|n't sha|n't should|n't was|n't were|n't wo|n't would|n't i|'m i|'d i|'ll i|'ve "
    "could|'ve might|'ve must|'ve should|'ve would|'ve not|'ve let|'s"
)
_PRONOUNS = "he she it that there this these they those we who what when where why how you"
"""Source: spaCy's exceptions for English."""


def hash_word(text: str) -> int:
    """The hash that the compiled code gives to a word."""
    h = 0
    for char in text:
        h = ((h ^ ord(char)) * MIX) & _MASK
        h ^= h >> 29
    return (h * MIX) & _MASK or 1


def hash_table(values: dict[str, int], slots: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """An open-addressed table of words for the compiled code: hashes uint64 [slots] (0: free), values int32 [slots]."""
    return table_of_hashes({hash_word(word): value for word, value in values.items()}, slots)


def table_of_hashes(values: dict[int, int], slots: int = 0) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
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
def special_words() -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Chunks that are not cut by rule, and after how many characters they are cut instead (0: not at all)."""
    specials = dict.fromkeys(_UNCUT.split(), 0)
    specials |= dict.fromkeys([f"{letter}." for letter in "abcdefghijklmnopqrstuvwxyzäöü"], 0)
    specials |= {f"{hour}{half}": len(str(hour)) for hour in range(1, 13) for half in ("am", "pm", "a.m.", "p.m.")}
    parts = _PARTS.split() + _CONTRACTED.split()
    parts += [f"{word}|'{end}" for word in _PRONOUNS.split() for end in ("s", "d", "ll", "re", "ve")]
    for part in parts:
        for form in (part, part[0].upper() + part[1:]):
            for variant in (form, form.replace("'", "’")):
                if variant.replace("|", "") not in ("Ill", "ill", "Well", "well", "Shell", "Wed", "wed", "Were"):
                    specials.setdefault(variant.replace("|", ""), variant.index("|"))
    return hash_table(specials, _SPECIAL_SLOTS)
