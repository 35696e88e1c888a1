"""Text as a language model reads it: small letters, words between single spaces, a line for a line.

Hides: how words are cut; training and scoring share it, so that a model fits what it scores.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from forebay.prepare.compiled import jit
from forebay.prepare.documents import text_buffers
from forebay.prepare.filters.characters import BREAK
from forebay.prepare.filters.words import clip, cut_words, decode, kind, read_only, tables


def spaced(texts: pa.LargeStringArray, limit: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Each text as lines of words, `a word , another .\\n`: offsets int64 [rows + 1], UTF-8 bytes uint8.

    Lines without a word are left out; of a text longer than `limit` bytes the rest is. No word holds white space or a
    control character, and none is `<s>`, `</s>` or `<unk>`.
    """
    offsets, data = text_buffers(pc.utf8_lower(texts))
    stops = clip(offsets, data, limit)
    room = int((stops - offsets[:-1]).sum())
    out = np.empty(2 * room + len(stops), np.uint8)
    ends = np.zeros(len(stops) + 1, np.int64)
    _space(read_only(offsets), read_only(stops), read_only(data), *tables(), out, ends)
    return ends, out[: ends[-1]]


@jit()
def _put(points, start, stop, out, at):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        c = points[i]
        if c < 0x80:
            out[at] = c
            at += 1
            continue
        width = 1 if c < 0x800 else 2 if c < 0x10000 else 3
        out[at] = (0xFF00 >> (width + 1) & 0xFF) | (c >> (6 * width))
        for k in range(width - 1, -1, -1):
            out[at + width - k] = 0x80 | ((c >> (6 * k)) & 0x3F)
        at += width + 1
    return at


@jit()
def _space(offsets, stops, data, table, keys, values, out, out_ends):  # type: ignore[no-untyped-def]
    room = 2
    for row in range(len(stops)):
        room = max(room, stops[row] - offsets[row] + 2)
    points = np.empty(room, np.uint32)
    begins, ends, tail = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32)
    kinds = np.empty(room, np.uint16)
    at = 0
    for row in range(len(stops)):
        n = decode(data, offsets[row], stops[row], points)
        start = 0
        for i in range(n + 1):
            if i < n and kind(table, points[i]) & BREAK == 0:
                if points[i] < 32 or points[i] == 127:
                    points[i] = 32
                continue
            words = cut_words(points, start, i, table, keys, values, begins, ends, tail, kinds)
            for w in range(words):
                at = _put(points, begins[w], ends[w], out, at)
                out[at] = 10 if w + 1 == words else 32
                at += 1
            start = i + 1
        out_ends[row + 1] = at
