"""The rules by which C4 was made from Common Crawl: lines are removed, and pages dropped.

A compiled kernel, linear in the text. Source: Raffel et al. 2020, section 2.2, and c4_utils.py in TensorFlow Datasets,
whose order of rules it keeps; datatrove 0.10 decides the same. Their list of bad words is `toxic`.
"""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from forebay.prepare.compiled import jit
from forebay.prepare.documents import Measure, Stage, StageResult, keep_all, replace_column, text_buffers, text_column
from forebay.prepare.filters.points import copy, decode, encode, kind, room_of, starts_with, trim, word_runs
from forebay.prepare.filters.word_tables import BREAK, PUNCTUATION, TERMINAL
from forebay.prepare.filters.words import cut_words, tables, word_room
from forebay.prepare.settings import Count

LINES = ("long_word", "unended", "few_words", "javascript", "policy")
"""Why a line is taken out, as it is counted: `lines_long_word`."""
_LOREM, _CURLY, _FEW = 0, 1, 2
_SENTENCE_CHARS = 1 << 20
_PHRASES = ("lorem ipsum", "javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies")
_MORE_PHRASES = ("use of cookies", "use cookies")  # Source: c4_utils.py, _POLICY_SUBSTRINGS.


_EDIT, _CITATION = (np.frombuffer(mark, np.uint8) for mark in (b"[edit]", b"[citation needed]"))
_PHRASE_BYTES = np.frombuffer("".join((*_PHRASES, *_MORE_PHRASES)).encode(), np.uint8)
_PHRASE_ENDS = np.cumsum([0, *map(len, (*_PHRASES, *_MORE_PHRASES))])


@dataclass(frozen=True)
class C4(Stage):
    """Keep the lines that are sentences, and the pages that still have enough of them.

    Takes out `[12]`, `[edit]` and `[citation needed]`, and lines that mention JavaScript, cookies or terms of use.
    Drops pages with `lorem ipsum` or a `{`.

    Args:
        terminal_punctuation: Take out lines that do not end with `.`, `!`, `?`, a quotation mark, or a mark that ends
            sentences of another script than Latin; or that end with `...`.
        min_words_per_line: Take out shorter lines (published: "at least 3 words" since version 3.0.0 of C4; 5 before).
        min_sentences: Drop pages with fewer, in the lines that stay: 5; 0 for any.

    Lines with a word of more than 1000 characters go, too.

    Source: Raffel et al. 2020, section 2.2, and c4_utils.py.
    """

    terminal_punctuation: bool = True
    min_words_per_line: Count = 3
    max_word_chars: int = field(default=1000, init=False)
    min_sentences: Count = 5

    name = "c4"
    version = 2
    reasons = ("c4_lorem_ipsum", "c4_curly_bracket", "c4_few_sentences")

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        """Texts without the lines that break a rule; of a dropped page the text stays as it was."""
        offsets, data = text_buffers(batch.column("text"))
        limits = (self.min_words_per_line, self.max_word_chars, self.min_sentences)
        rules = np.array([self.terminal_punctuation, *limits], np.int64)
        drop = keep_all(batch.num_rows)
        counts, sentences = np.zeros(len(LINES), np.int64), np.zeros(batch.num_rows, np.int64)
        out = np.empty(offsets[-1] - offsets[0], np.uint8)
        text_ends = np.zeros(batch.num_rows + 1, np.int64)
        _rewrite(offsets, data, *tables(), _PHRASE_ENDS, _PHRASE_BYTES, rules, drop, counts, sentences, out, text_ends)
        text = text_column(text_ends, out[: text_ends[-1]].copy())
        counted = {f"lines_{kind_}": n for kind_, n in zip(LINES, counts.tolist())}
        measures = {"c4_few_sentences": Measure(sentences, low=self.min_sentences)}
        return StageResult(replace_column(batch, "text", text), drop, counted, measures=measures)


@jit()
def _cite(points, start, stop, line):  # type: ignore[no-untyped-def]
    n = 0
    i = start
    while i < stop:
        if points[i] == 91:
            j = i + 1
            while j < stop and (48 <= points[j] <= 57):
                j += 1
            if j < stop and points[j] == 93:
                i = j + 1
                continue
            if starts_with(points, i, stop, _EDIT):
                i += len(_EDIT)
                continue
            if starts_with(points, i, stop, _CITATION):
                i += len(_CITATION)
                continue
            n = copy(points, i, j, line, n)  # the digits cannot begin a citation: linear
            i = j
            continue
        line[n] = points[i]
        n += 1
        i += 1
    return n


@jit(forceinline=True)
def _small(c):  # type: ignore[no-untyped-def]
    return c | 32 if 65 <= c <= 90 else c


@jit()
def _phrases(line, n, phrase_ends, chars):  # type: ignore[no-untyped-def]
    bits = 0
    for i in range(n):
        first = _small(line[i])
        for p in range(len(phrase_ends) - 1):
            if first != chars[phrase_ends[p]]:
                continue
            start, size = phrase_ends[p], phrase_ends[p + 1] - phrase_ends[p]
            k = 1
            while k < size and i + k < n and _small(line[i + k]) == chars[start + k]:
                k += 1
            if k == size:
                bits |= 1 << p
    return bits


@jit()
def _sentences(line, n, table, keys, values, begins, word_ends, tail, kinds):  # type: ignore[no-untyped-def]
    """Sentences in a line: a new one begins with the first word that is not punctuation after one that ends it."""
    words = cut_words(line, 0, min(n, _SENTENCE_CHARS), table, keys, values, begins, word_ends, tail, kinds)
    count, over = 1, False
    for w in range(words):
        k = kind(table, line[begins[w]])
        single = word_ends[w] - begins[w] == 1
        if single and k & TERMINAL:
            over = True
        elif over and not (k & PUNCTUATION and kind(table, line[word_ends[w] - 1]) & PUNCTUATION):
            count += 1
            over = False
    return count


@jit()
def _ends_sentence(c, table):  # type: ignore[no-untyped-def]
    """Whether a character ends sentences of another script than Latin."""
    return c >= 0x0589 and (c < 0x2000 or c > 0x2FFF) and kind(table, c) & TERMINAL != 0


@jit()
def _closes(c):  # type: ignore[no-untyped-def]
    return c == 0x300D or c == 0x300F or c == 0x201D or c == 0xFF09


@jit()
def _check_line(line, n, words, longest, table, rules, phrase_ends, chars):  # type: ignore[no-untyped-def]
    """-1 for a line that stays, i for `LINES[i]`, 100 + i for a page that is dropped."""
    if rules[2] and longest > rules[2]:
        return 0
    last = line[n - 1] if n else np.uint32(0)
    if rules[0]:
        dots = n > 2 and last == 46 and line[n - 2] == 46 and line[n - 3] == 46
        if n > 1 and _closes(last) and _ends_sentence(line[n - 2], table):
            last = line[n - 2]
        if dots or not (
            last == 46 or last == 63 or last == 33 or last == 34 or last == 39 or _ends_sentence(last, table)
        ):
            return 1
    if words < rules[1]:
        return 2
    phrases = _phrases(line, n, phrase_ends, chars)
    if phrases & 1:
        return 100 + _LOREM
    if phrases & 2:
        return 3
    for i in range(n):
        if line[i] == 123:
            return 100 + _CURLY
    return 4 if phrases >> 2 else -1


@jit()
def _rewrite(offsets, data, table, keys, values, phrase_ends, phrases, rules, drop, counts, totals, out, stops):  # type: ignore[no-untyped-def]
    capacity = room_of(offsets, offsets[1:])
    points, line = np.empty(capacity, np.uint32), np.empty(capacity, np.uint32)
    begins, word_ends, tail, kinds = word_room(min(capacity, _SENTENCE_CHARS + 2))
    removed = np.zeros(len(counts), np.int64)
    written = 0
    for row in range(len(drop)):
        n = decode(data, offsets[row], offsets[row + 1], points)
        first_out, sentences, start = written, 0, 0
        removed[:] = 0
        for i in range(n + 1):
            if i < n and kind(table, points[i]) & BREAK == 0:
                continue
            a, b = trim(points, start, i, table)
            start = i + 1
            if a == b:
                continue
            words, longest = word_runs(points, a, b, table)
            size = _cite(points, a, b, line)
            code = _check_line(line, size, words, longest, table, rules, phrase_ends, phrases)
            if code >= 100:
                drop[row] = code - 100
                break
            if code >= 0:
                removed[code] += 1
                continue
            sentences += _sentences(line, size, table, keys, values, begins, word_ends, tail, kinds)
            if written > first_out:
                out[written] = 10
                written += 1
            written = encode(line, 0, size, out, written)
        totals[row] = sentences
        if drop[row] < 0 and sentences < rules[3]:
            drop[row] = _FEW
        if drop[row] >= 0:
            written = copy(data, offsets[row], offsets[row + 1], out, first_out)
        else:
            for code in range(len(counts)):
                counts[code] += removed[code]
        stops[row + 1] = written
