"""The words of a batch, cut once for all filters that look at them.

Hides: that the last batch's words are remembered, so that filters that follow each other on one batch (Gopher's two and
FineWeb's) cut it once: cutting is more than half of what each of them costs. Memory: 13 bytes a word of one batch.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.prepare.compiled import jit
from forebay.prepare.documents import text_buffers
from forebay.prepare.filters.characters import LETTER, SYMBOL
from forebay.prepare.filters.words import clip, cut_words, decode, hash_points, read_only, room_of, tables

IS_TEXT, HAS_LETTER = 1, 2
"""Flags of a word: not all of its characters are symbols; one is a letter."""


@dataclass(frozen=True, eq=False)
class WordTable:
    """The words of each row: word i of row r is entry `starts[r] + i` of the others; none of it can be written.

    Args:
        offsets, stops, data: The texts: row r is `data[offsets[r]:stops[r]]`, a long one only in part (`clip`).
        starts: int64 [rows + 1].
        hashes: uint64 [words]: `hash_points` of each.
        chars: int32 [words]: how long each is.
        flags: uint8 [words].
    """

    offsets: NDArray[np.int64]
    stops: NDArray[np.int64]
    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    chars: NDArray[np.int32]
    flags: NDArray[np.uint8]

    @property
    def texts(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
        """What a kernel that looks at characters is given."""
        return self.offsets, self.stops, self.data

    @property
    def words(self) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int32], NDArray[np.uint8]]:
        """What a kernel that looks at words is given."""
        return self.starts, self.hashes, self.chars, self.flags


_last: tuple[tuple[int, ...], pa.Array, WordTable] | None = None


def word_table(column: pa.LargeStringArray) -> WordTable:
    """The words of a column of texts; taken from memory if it is the column of the last call."""
    global _last
    offsets, data = text_buffers(column)
    key = (offsets.ctypes.data, data.ctypes.data, len(offsets))
    held = _last
    if held is not None and held[0] == key:
        return held[2]
    held = _last = None  # the old one's memory goes first
    stops = clip(offsets, data)
    room = int((stops - offsets[:-1]).sum())
    starts = np.zeros(len(offsets), np.int64)
    hashes, chars, flags = np.empty(room, np.uint64), np.empty(room, np.int32), np.empty(room, np.uint8)
    offsets, stops, data = (read_only(array) for array in (offsets, stops, data))
    n = _cut_all(offsets, stops, data, *tables(), starts, hashes, chars, flags)
    found = WordTable(
        offsets, stops, data, read_only(starts), read_only(hashes[:n]), read_only(chars[:n]), read_only(flags[:n])
    )
    _last = key, column, found  # the column too: while it is held, no other can lie at its address
    return found


@jit()
def _cut_all(offsets, stops, data, table, keys, values, starts, hashes, chars, flags):  # type: ignore[no-untyped-def]
    room = room_of(offsets, stops)
    points, kinds = np.empty(room, np.uint32), np.empty(room, np.uint16)
    begins, ends, tail = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32)
    at = 0
    for row in range(len(stops)):
        n = decode(data, offsets[row], stops[row], points)
        words = cut_words(points, 0, n, table, keys, values, begins, ends, tail, kinds)
        for w in range(words):
            flag = 0
            for i in range(begins[w], ends[w]):
                flag |= IS_TEXT if kinds[i] & SYMBOL == 0 else 0
                flag |= HAS_LETTER if kinds[i] & LETTER else 0
                if flag == IS_TEXT | HAS_LETTER:
                    break
            hashes[at], chars[at], flags[at] = hash_points(points, begins[w], ends[w]), ends[w] - begins[w], flag
            at += 1
        starts[row + 1] = at
    return at
