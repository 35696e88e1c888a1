"""Takes lines out by what they consist of: symbols, capitals, numbers, counters, one word, no stop word, prompts.

A compiled kernel, linear in the text; a line of more than 1 MiB is kept. Blank lines are left as they are.
Source: Penedo et al. 2023 (RefinedWeb), table G.2, line-wise corrections; Rae et al. 2021, section A.1.1, whose rules
on symbols and stop words are for documents.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from forebay.arrays import I32, U64
from forebay.prepare.compiled import jit
from forebay.prepare.documents import (
    Measure,
    Stage,
    StageResult,
    first_failing,
    replace_column,
    text_buffers,
    text_column,
)
from forebay.prepare.filters.language import (
    all_stop_words,
    language_hash,
    language_hashes,
    stop_word_table,
)
from forebay.prepare.filters.points import copy, decode, find, hash_points, kind, look_up, room_of, trim
from forebay.prepare.filters.word_tables import (
    DIGIT,
    LETTER,
    LOWER,
    SPACE,
    UNSPACED,
    UPPER,
    HashTable,
    hash_word,
    table_of_hashes,
    word_lists,
)
from forebay.prepare.filters.words import cut_words, tables, word_room
from forebay.prepare.settings import Count, Share

RULES = ("numbers", "symbols", "one_word", "counter", "prompt", "uppercase", "no_stop_words")
"""Why a line is taken out, in this order; counted as `lines_symbols`."""
PROMPT_WORDS = 10  # A longer line is not taken for a prompt.
MAX_LINE_BYTES = 1 << 20
SHORT_LINE = 4  # Words of the shortest line that may go for its lack of a stop word.
COMMON = "en de fr es it pt nl pl cs ru uk sv da no fi hu ro tr el ar fa he hi id vi ko zh ja th lo km my"
"""Where no language is known, a stop word of any of these counts."""
_AT_BEGIN, _AT_END, _SOMEWHERE, _PHRASE_WORDS = 1, 2, 4, 5


@dataclass(frozen=True)
class LineRules(Stage):
    """Take out the lines that are no text, and drop documents that lose too much.

    Each rule has its count in the report; the first that a line fails counts. 0 (1 for a share) switches a rule off.

    Args:
        max_symbols: Share of characters, without spaces, that are neither letters nor their marks: 0.5.
        min_words: Take out shorter lines: 2, so those of one word.
        max_uppercase: Share of letters that are capitals: 0.5.
        stop_word_lines: Lines of so many words or more need a stop word: 10. In documents whose column `language` says
            English, a function word; in others a frequent word of any of 32 languages, or of a rarer one its own.
            A line of four words or more without one goes as well if more than half of them are words of menus (`Photo
            video share …`) or have no vowel.
        max_removed_words: Drop a document if a larger share of its words is taken out: 1 (never; RefinedWeb: 0.05).

    Always takes out lines with digits and no letter; lines such as `3 likes` or `1.2k views · 4 comments`; and lines
    of up to 10 words that begin (`Sign in`) or end (`Read more`) as navigation does, or hold such a phrase (`items in
    cart`). Drops a document of which no line is left. Headings in capitals and of one word go too, unless you switch
    these rules off. In 23,279 paragraphs of English books 2 lacked a stop word, in 5,203 of German ones 44.

    Source: Penedo et al. 2023 (RefinedWeb), table G.2, which states no figures but 10 words and 0.05.
    """

    max_symbols: Share = 0.5
    min_words: Count = 2
    max_uppercase: Share = 0.5
    stop_word_lines: Count = 10
    max_removed_words: Share = 1.0

    name = "lines"
    version = 2
    reasons = ("lines_empty", "lines_removed_words")

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        """Texts without those lines; of a dropped document the text stays as it was."""
        offsets, data = text_buffers(batch.column("text"))
        keys, values, listed = _stop_table()
        languages, unlisted = language_hashes(batch, listed)
        # Shares as floats: 1 for 1.0 would compile the kernel again.
        rules = _Rules(
            float(self.max_symbols), float(self.max_uppercase), self.min_words, self.stop_word_lines, keys, values,
            *_phrase_table(),
        )  # fmt: skip
        has_list = ~unlisted
        measures, removed = np.zeros((batch.num_rows, 3), np.int64), np.zeros((batch.num_rows, len(RULES)), np.int64)
        out, stops = np.empty(int(offsets[-1] - offsets[0]), np.uint8), np.zeros(batch.num_rows + 1, np.int64)
        _rewrite(offsets, data, *tables(), rules, languages, has_list, measures, removed, out, stops)
        words, words_removed, remaining = measures.T
        empty = (removed.sum(axis=1) > 0) & (remaining == 0)
        drop = first_failing(empty, words_removed > self.max_removed_words * words)
        column = text_column(stops, out[: stops[-1]].copy())
        if (drop >= 0).any():
            column = pa.compute.if_else(pa.array(drop >= 0), batch.column("text"), column)
        sums = removed[drop < 0].sum(axis=0).tolist()
        counted = {f"lines_{rule}": count for rule, count in zip(RULES, sums)}
        share = Measure(words_removed / np.maximum(words, 1), high=self.max_removed_words)
        return StageResult(
            replace_column(batch, "text", column), drop, counted, measures={"lines_removed_words": share}
        )


class _Rules(NamedTuple):
    """The settings as the kernel takes them, the stop words, and the words of prompts and counters."""

    max_symbols: float
    max_uppercase: float
    min_words: int
    stop_word_lines: int
    stop_keys: U64
    stop_values: I32
    phrase_keys: U64
    positions: I32


@lru_cache(1)
def _stop_table() -> tuple[*HashTable, dict[str, int]]:
    lists = {**all_stop_words(), "en": tuple(word_lists()["lines"]["english"].split())}
    common = [word for code in COMMON.split() for word in lists[code]]
    others = {code: words for code, words in lists.items() if code not in COMMON.split()[1:]}
    return *stop_word_table([("", common), *others.items()]), {
        code: language_hash(code) if code in others else 0 for code in lists
    }


@lru_cache(1)
def _phrase_table() -> HashTable:
    """The hash of a phrase's words in a row: where in a line it counts; of a counter's word 0, a menu's 1."""
    lists = word_lists()["lines"]
    phrases = {hash_word(word): 1 for word in lists["interface"].split()}
    phrases |= {hash_word(word): 0 for word in lists["counters"].split()}
    for position, name in ((_AT_BEGIN, "begin"), (_AT_END, "end"), (_SOMEWHERE, "anywhere")):
        for phrase in lists[name].split("\n"):
            h, words = 0, re.findall(r"\w+", phrase)
            for word in words:
                h = (h * _FACTOR + hash_word(word)) & (1 << 64) - 1
            assert len(words) <= _PHRASE_WORDS
            phrases[h ^ 1] = phrases.get(h ^ 1, 0) | position
    return table_of_hashes(phrases)


_FACTOR = 0xD1342543DE82EF95


@jit()
def _lower(points, n, table):  # type: ignore[no-untyped-def]
    """Latin, Greek and Cyrillic capitals as small letters, in position; enough to compare words."""
    for i in range(n):
        c = points[i]
        if 65 <= c <= 90 or 0xC0 <= c <= 0xDE or 0x391 <= c <= 0x3A9 or 0x410 <= c <= 0x42F:
            points[i] = c + 32
        elif 0x400 <= c <= 0x40F:
            points[i] = c + 80
        elif 0x100 <= c < 0x180 and kind(table, c) & (LOWER | UPPER) == UPPER:
            points[i] = c + 1


@jit()
def _is_number(points, start, stop, kinds):  # type: ignore[no-untyped-def]
    """`3`, `1,234`, `1.2k`, `5+`."""
    digits = 0
    for i in range(start, stop):
        c = points[i]
        if kinds[i] & DIGIT:
            digits += 1
        elif not (c == 44 or c == 46 or (i == stop - 1 and digits and (c == 107 or c == 109 or c == 43))):
            return False
    return digits > 0


@jit()
def _has_prompt(points, kinds, begins, stops, words, rules):  # type: ignore[no-untyped-def]
    n = 0
    for w in range(words):  # the words without marks, at the beginning of the arrays
        if kinds[begins[w]] & (LETTER | DIGIT):
            begins[n], stops[n] = begins[w], stops[w]
            n += 1
    if n > PROMPT_WORDS:
        return False
    for first in range(n):
        h = np.uint64(0)
        for last in range(first, min(n, first + _PHRASE_WORDS)):
            h = h * np.uint64(_FACTOR) + hash_points(points, begins[last], stops[last])
            positions = look_up(rules.phrase_keys, rules.positions, h ^ np.uint64(1))
            if positions > 0 and (
                positions & _SOMEWHERE
                or (positions & _AT_BEGIN and first == 0)
                or (positions & _AT_END and last == n - 1)
            ):
                return True
    return False


@jit()
def _check_line(points, n, words, kinds, begins, stops, rules, language, has_list):  # type: ignore[no-untyped-def]
    """-1 for a line that stays, else the index of its rule; points and words may be changed."""
    chars = letters = upper = cased = digits = 0
    for i in range(n):
        k = kinds[i]
        if k & SPACE:
            continue
        chars += 1
        digits += k & DIGIT != 0
        if k & (LETTER | UNSPACED) or _is_mark(points[i]):
            letters += 1
            if k & (LOWER | UPPER) == UPPER or k & (LOWER | UPPER) == LOWER:
                cased += 1
                upper += k & UPPER != 0
    if letters == 0 and digits:
        return 0
    if chars - letters > rules.max_symbols * chars:
        return 1
    text_words = numbers = counted = num_stops = no_text = unspoken = 0
    for w in range(words):
        h = hash_points(points, begins[w], stops[w])
        num_stops += look_up(rules.stop_keys, rules.stop_values, h ^ language) >= 0
        if _is_number(points, begins[w], stops[w], kinds):
            numbers += 1
            text_words += 1
        elif kinds[begins[w]] & (LETTER | UNSPACED | DIGIT):
            text_words += 1
            position = look_up(rules.phrase_keys, rules.positions, h)
            counted += position == 0
            no_text += position >= 0
            unspoken += _has_no_vowel(points, begins[w], stops[w])
    if numbers and counted and numbers + counted == text_words:
        return 3
    if text_words < rules.min_words:
        return 2
    if _has_prompt(points, kinds, begins, stops, words, rules):
        return 4
    if upper > rules.max_uppercase * cased:
        return 5
    if rules.stop_word_lines and has_list and num_stops == 0:
        noise = text_words >= SHORT_LINE and (2 * no_text > text_words or 2 * unspoken > text_words)
        if noise or text_words >= rules.stop_word_lines:
            return 6
    return -1


@jit()
def _has_no_vowel(points, start, stop):  # type: ignore[no-untyped-def]
    """Four letters or more of the Latin alphabet without diacritics, and no vowel."""
    for i in range(start, stop):
        c = points[i]
        if c < 97 or c > 122 or c == 97 or c == 101 or c == 105 or c == 111 or c == 117 or c == 121:
            return False
    return stop - start >= 4


@jit()
def _is_mark(c):  # type: ignore[no-untyped-def]
    """Combining marks that belong to letters: of Indic scripts, Arabic, Hebrew, and those for all."""
    return (
        0x300 <= c <= 0x36F
        or 0x591 <= c <= 0x5C7
        or 0x610 <= c <= 0x65F
        or 0x900 <= c <= 0xDFF
        or 0x200C <= c <= 0x200D
    )


@jit()
def _rewrite(offsets, data, table, keys, values, rules, languages, has_list, measures, removed, out, out_stops):  # type: ignore[no-untyped-def]
    capacity = min(room_of(offsets, offsets[1:]), MAX_LINE_BYTES + 2)
    points = np.empty(capacity, np.uint32)
    begins, stops, tail, kinds = word_room(capacity)
    written = 0
    for row in range(len(offsets) - 1):
        start, stop = offsets[row], offsets[row + 1]
        first = True
        while start <= stop:
            end = find(data, start, stop, 10)
            code, words = -1, 0
            if 0 < end - start <= MAX_LINE_BYTES:
                n = decode(data, start, end, points)
                a, b = trim(points, 0, n, table)
                words = cut_words(points, a, b, table, keys, values, begins, stops, tail, kinds)
                for i in range(a):
                    kinds[i] = SPACE
                if words:
                    _lower(points, b, table)
                    code = _check_line(points, b, words, kinds, begins, stops, rules, languages[row], has_list[row])
            measures[row, 0] += words
            if code >= 0:
                removed[row, code] += 1
                measures[row, 1] += words
            else:
                measures[row, 2] += words > 0 or end - start > MAX_LINE_BYTES
                if not first:
                    out[written] = 10
                    written += 1
                first = False
                written = copy(data, start, end, out, written)
            start = end + 1
        out_stops[row + 1] = written
