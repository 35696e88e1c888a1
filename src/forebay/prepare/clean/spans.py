"""Replaces spans of bytes in a text column, and finds many phrases, each in one compiled pass.

Phrases: an Aho-Corasick automaton as a table, one step a byte whatever the text. Bytes that no phrase has share one
column, so that the table of 400 phrases is some 0.5 MB. Word characters are letters, digits, `_` and combining marks,
which Python's `\\w` leaves out. Source: Aho and Corasick 1975.
"""

import functools
import unicodedata
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from forebay.arrays import BOOL, I32, I64, U8
from forebay.errors import UsageError
from forebay.prepare.compiled import jit
from forebay.prepare.documents import text_buffers, text_column
from forebay.prepare.filters.points import copy, next_point


@jit()
def _splice(offsets, data, starts, stops, which, puts, put_offsets, out, out_offsets):  # type: ignore[no-untyped-def]
    written, span = 0, 0
    for row in range(len(offsets) - 1):
        i, stop = offsets[row], offsets[row + 1]
        while i < stop:
            mine = span < len(starts) and starts[span] < stop
            end = starts[span] if mine else stop
            written = copy(data, i, end, out, written)
            i = end
            if mine:
                written = copy(puts, put_offsets[which[span]], put_offsets[which[span] + 1], out, written)
                i = stops[span]
                span += 1
        out_offsets[row + 1] = written


def splice(
    column: pa.LargeStringArray, starts: I64, stops: I64, puts: Sequence[bytes], which: I64
) -> pa.LargeStringArray:
    """The column, without nulls, with `puts[which[i]]` (UTF-8) in place of bytes `[starts[i], stops[i])` of its buffer.

    `starts`, `stops`, `which`: int64 [spans]; spans ascend, do not overlap, and none is empty or across two rows.
    """
    if not len(starts):
        return column
    offsets, data = text_buffers(column)
    put_offsets = np.zeros(len(puts) + 1, np.int64)
    np.cumsum([len(put) for put in puts], out=put_offsets[1:])
    size = int(offsets[-1] - offsets[0] - (stops - starts).sum() + np.diff(put_offsets)[which].sum())
    out, out_offsets = np.empty(size, np.uint8), np.zeros(len(offsets), np.int64)
    joined = np.frombuffer(b"".join(puts), np.uint8)
    _splice(offsets, data, starts, stops, which, joined, put_offsets, out, out_offsets)
    return text_column(out_offsets, out)


def replace_rows(column: pa.LargeStringArray, texts: Mapping[int, str]) -> pa.LargeStringArray:
    """The column with other texts in those rows, which must not be empty."""
    if not texts:
        return column
    offsets, _ = text_buffers(column)
    rows = np.array(sorted(texts), np.int64)
    assert (offsets[rows + 1] > offsets[rows]).all()
    puts = [texts[row].encode() for row in rows.tolist()]
    return splice(column, offsets[rows], offsets[rows + 1], puts, np.arange(len(rows)))


def read_lines(path: Path | Traversable, setting: str) -> list[str]:
    """The lines of a file of phrases, which a setting names."""
    try:
        return path.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{setting}: expected UTF-8, got {error} ({path})") from error


WORD_TABLE = 0x20000  # Characters from here on are ideographs (words), but for a few that no text has.


class Automaton(NamedTuple):
    """The phrases as a table, which compiled functions take.

    Args:
        columns: uint8 [256]: the column of each byte; 0 for those in no phrase.
        steps: int32 [states, columns]: where a byte leads.
        phrase: int32 [states]: the longest phrase that ends here, or -1.
        shorter: int32 [states]: the state of the next shorter phrase that ends here, or 0.
        lengths: int64 [phrases]: in bytes.
    """

    columns: U8
    steps: I32
    phrase: I32
    shorter: I32
    lengths: I64


def build(phrases: Sequence[str]) -> Automaton:
    """The automaton of those phrases; none may be empty. Of equal ones the first is found."""
    words = [text.encode() for text in phrases]
    columns = np.zeros(256, np.uint8)
    used = sorted(set(b"".join(words)))
    columns[used] = np.arange(1, len(used) + 1)
    children: list[dict[int, int]] = [{}]
    phrase = [-1]
    for index, word in enumerate(words):
        state = 0
        for column in columns[np.frombuffer(word, np.uint8)].tolist():
            if column not in children[state]:
                children[state][column] = len(children)
                children.append({})
                phrase.append(-1)
            state = children[state][column]
        phrase[state] = index if phrase[state] < 0 else phrase[state]
    steps = np.zeros((len(children), len(used) + 1), np.int32)
    fallback, shorter, queue = [0] * len(children), [0] * len(children), [0]
    for state in queue:  # by depth: a fallback is shallower, and its row is done
        back = fallback[state]
        if state:
            steps[state] = steps[back]
            shorter[state] = back if phrase[back] >= 0 else shorter[back]
            phrase_here = phrase[state]
            if phrase_here < 0 and shorter[state]:  # so that one look says whether anything ends here
                phrase[state] = phrase[shorter[state]]
                shorter[state] = shorter[shorter[state]]
        for column, child in children[state].items():
            fallback[child] = int(steps[back, column]) if state else 0
            queue.append(child)
        for column, child in children[state].items():
            steps[state, column] = child
    lengths = np.array([len(word) for word in words], np.int64)
    return Automaton(columns, steps, np.array(phrase, np.int32), np.array(shorter, np.int32), lengths)


@functools.cache
def word_table() -> BOOL:
    """bool [WORD_TABLE]: whether a character is part of a word."""
    characters = map(chr, range(WORD_TABLE))
    return np.array([c.isalnum() or c == "_" or unicodedata.category(c) in ("Mn", "Mc") for c in characters])


@jit()
def word_at(data, i, table):  # type: ignore[no-untyped-def]
    """Whether the character that begins at byte i is part of a word."""
    code, _ = next_point(data, i)
    return code >= len(table) or bool(table[code])


@jit()
def apart(data, start, stop, a, b, table):  # type: ignore[no-untyped-def]
    """Whether `[a, b)` in the row `[start, stop)` touches no word character on either side."""
    if b < stop and word_at(data, b, table):
        return False
    if a == start:
        return True
    a -= 1
    while a > start and data[a] & 0xC0 == 0x80:
        a -= 1
    return not word_at(data, a, table)
