"""Words that are not cut by rule: abbreviations, contractions, faces; and hash tables of words for compiled code."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

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
    keys, codes = np.zeros(slots, np.uint64), np.zeros(slots, np.int32)
    for word, value in values.items():
        h = hash_word(word)
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
