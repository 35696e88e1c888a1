"""Removes the lines of a page that are not its text: notices, navigation, share buttons, menus.

One compiled pass looks for phrases in each line of up to `max_line_bytes`, and for runs of short lines. The rules are
for English pages without markup, as in WET files; an extractor that sees the markup does better.
"""

import functools
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.arrays import I64, U8, Array
from forebay.errors import UsageError
from forebay.prepare.clean.spans import Automaton, apart, build, read_lines, splice, word_table
from forebay.prepare.compiled import jit
from forebay.prepare.documents import Stage, StageResult, replace_column, text_buffers
from forebay.prepare.filters.points import find
from forebay.prepare.settings import Count, check_fields

_ENGLISH = resources.files("forebay.prepare.clean") / "english.txt"
ANYWHERE, BEGINNING, WHOLE_LINE = 0, 1, 2
PHRASE, MENU = 0, 1
KINDS = ("phrase_lines", "menu_lines")


@jit()
def _listed(data, a, b, automaton, positions, table):  # type: ignore[no-untyped-def]
    state = 0
    for i in range(a, b):
        state = automaton.steps[state, automaton.columns[data[i]]]
        pos = state
        while automaton.phrase[pos] >= 0:
            match = automaton.phrase[pos]
            first = i + 1 - automaton.lengths[match]
            fits = positions[match] == ANYWHERE or (first == a and (positions[match] == BEGINNING or i + 1 == b))
            if fits and apart(data, a, b, first, i + 1, table):
                return True
            pos = automaton.shorter[pos]
            if pos == 0:
                break
    return False


@jit()
def _short(data, a, b, max_words):  # type: ignore[no-untyped-def]
    """Whether the line `[a, b)` has up to `max_words` words and no punctuation that ends a sentence."""
    last = data[b - 1]
    if last in (33, 34, 46, 58, 59, 63, 44):  # ! " . : ; ? ,
        return False
    if b - a > 2 and last >= 0x80:
        code = int(data[b - 3]) << 16 | int(data[b - 2]) << 8 | int(last)
        if code in (0xE38082, 0xEFBC81, 0xEFBC9F, 0xE2809D, 0xE280A6, 0xE0A5A4):  # 。！？”…।
            return False
    words = 1
    for i in range(a, b):
        words += data[i] == 32
        if i + 2 < b and data[i] == 0xEF and data[i + 1] == 0xB7 and data[i + 2] & 0xFE == 0x90:  # a turn begins
            return False
    return words <= max_words and b - a <= 24 * max_words


@jit()
def _lines(offsets, data, automaton, positions, table, limits, starts, stops, kinds, has_text, counts):  # type: ignore[no-untyped-def]
    """Writes the lines to take out, for each row how many of each kind (int64 [rows, 2]), and whether any other is
    `left` that is not blank; returns how many lines."""
    max_line, min_run, max_words = limits
    n = 0
    for row in range(len(offsets) - 1):
        i, stop = offsets[row], offsets[row + 1]
        lines_left, run, run_first, run_kept, row_first = 0, 0, n, 0, n
        while i < stop:
            line, end = i, find(data, i, stop, 10)
            i = min(end + 1, stop)
            a, b = line, end
            while a < b and data[a] <= 32:
                a += 1
            while b > a and data[b - 1] <= 32:
                b -= 1
            if a == b:
                continue
            kind, lines_left = -1, lines_left + 1
            if b - a <= max_line and _listed(data, a, b, automaton, positions, table):
                kind = PHRASE
            elif min_run > 0 and _short(data, a, b, max_words):
                kind = MENU
            if kind == MENU or (kind == PHRASE and _short(data, a, b, max_words)):
                run += 1
                run_kept += kind == MENU
            elif kind < 0:  # a run ends, but not at a phrase, which goes: it was a menu if it was long
                if run < min_run:
                    n = _drop_menu(starts, stops, kinds, run_first, n)
                else:
                    lines_left -= run_kept
                run, run_kept = 0, 0
                run_first = n
            if kind >= 0:
                starts[n], stops[n], kinds[n] = line, i, kind
                n += 1
                lines_left -= kind == PHRASE
            if run == 0:
                run_first = n
        if run < min_run:
            n = _drop_menu(starts, stops, kinds, run_first, n)
        else:
            lines_left -= run_kept
        has_text[row] = lines_left > 0
        for k in range(row_first, n):
            counts[row, kinds[k]] += 1
    return n


@jit()
def _drop_menu(starts, stops, kinds, first, n):  # type: ignore[no-untyped-def]
    """Forgets the lines of a run that was too short from `first` on, but not those with a phrase; how many remain."""
    pos = first
    for i in range(first, n):
        if kinds[i] == PHRASE:
            starts[pos], stops[pos], kinds[pos] = starts[i], stops[i], kinds[i]
            pos += 1
    return pos


@dataclass(frozen=True)
class Boilerplate(Stage):
    """Takes lines out, and drops a document of which nothing is left.

    Args:
        patterns: A file of phrases beside ours (`english.txt`), one a line in the same form; lines that begin with `#`
            are comments. Letters of ASCII are compared without case.
        menu_lines: So many short lines after one another, or more, are a menu; 0 for never. Blank lines do not count.
            A line is short with up to three words, and no punctuation at its end.

    In a line of more than 200 bytes no phrase is looked for: it has other text too.

    A list of names, a poem of very short lines or a table of one column is taken for a menu: set `menu_lines = 0` for
    such corpora, and for code. Source: the rules are ours; C4's line rules are a filter of their own.
    """

    name = "boilerplate"
    version = 2
    reasons = ("empty",)
    patterns: str = ""
    max_line_bytes: int = field(default=200, init=False)
    menu_lines: Count = 5
    menu_words: int = field(default=3, init=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.patterns and not Path(self.patterns).is_file():
            raise UsageError(f"patterns: expected a file of phrases, got {self.patterns!r}, which is no file")

    def files(self) -> tuple[str, ...]:
        return (self.patterns,) if self.patterns else ()

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        """The batch without those lines; counts `phrase_lines` and `menu_lines` of the documents kept."""
        column = batch.column("text")
        offsets, data = text_buffers(pc.ascii_lower(column))  # as long as it was
        real, _ = text_buffers(column)
        rows = int(np.count_nonzero(data[offsets[0] : offsets[-1]] == 10)) + len(batch)
        index_type = np.int32 if offsets[-1] < 1 << 31 else np.int64  # a giant of very short lines has millions
        starts, stops, kinds = np.empty(rows, index_type), np.empty(rows, index_type), np.empty(rows, np.int8)
        has_text, counts = np.zeros(len(batch), bool), np.zeros((len(batch), len(KINDS)), np.int64)
        automaton, positions = _automaton(self.patterns)
        limits = (self.max_line_bytes, self.menu_lines, self.menu_words)
        n = _lines(offsets, data, automaton, positions, word_table(), limits, starts, stops, kinds, has_text, counts)
        drop = np.where(has_text, -1, 0).astype(np.int16)
        first, after = _spans(offsets, starts[:n], stops[:n])
        moved = real[0] - offsets[0]
        column = splice(column, first + moved, after + moved, (b"",), np.zeros(len(first), np.int64))
        totals = dict(zip(KINDS, counts[has_text].sum(axis=0).tolist()))
        return StageResult(replace_column(batch, "text", column), drop, totals)


def _spans(offsets: I64, starts: Array, stops: Array) -> tuple[I64, I64]:
    """Where runs of lines without another between them begin and end; none reaches from one row into the next."""
    opens = np.ones(len(starts), bool)
    opens[1:] = starts[1:] != stops[:-1]
    first_of_row = np.searchsorted(starts, offsets[1:-1].astype(starts.dtype))
    opens[first_of_row[first_of_row < len(starts)]] = True
    return starts[opens].astype(np.int64), stops[np.append(opens[1:], opens[:1])].astype(np.int64)


@functools.lru_cache(maxsize=16)
def _automaton(patterns: str) -> tuple[Automaton, U8]:
    sources = [_ENGLISH] + [Path(patterns)] * bool(patterns)
    phrases: dict[str, int] = {}
    for line in (line for source in sources for line in read_lines(source, "patterns")):
        rule = {"^": BEGINNING, "=": WHOLE_LINE}.get(line.strip()[:1], ANYWHERE)
        text = line.strip()[rule > 0 :].strip().encode().lower().decode()  # bytes.lower is ASCII's
        if text and not line.startswith("#"):
            phrases[text] = min(rule, phrases.get(text, rule))
    return build(list(phrases)), np.array(list(phrases.values()), np.uint8)
