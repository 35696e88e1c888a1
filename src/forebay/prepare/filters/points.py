"""Code points of UTF-8 text in compiled code: decoding, their kinds, hashes of words and tables of these."""

import numpy as np

from forebay.prepare.compiled import jit
from forebay.prepare.filters.word_tables import MIX, ROWS, SPACE

_LAST = ROWS - 1


@jit(forceinline=True)
def next_point(data, i):  # type: ignore[no-untyped-def]
    """The code point that begins at byte i of UTF-8, and where the next one begins."""
    first = int(data[i])
    if first < 0x80:
        return first, i + 1
    if first < 0xE0:
        return (first & 0x1F) << 6 | data[i + 1] & 0x3F, i + 2
    if first < 0xF0:
        return (first & 0xF) << 12 | (data[i + 1] & 0x3F) << 6 | data[i + 2] & 0x3F, i + 3
    return (first & 7) << 18 | (data[i + 1] & 0x3F) << 12 | (data[i + 2] & 0x3F) << 6 | data[i + 3] & 0x3F, i + 4


@jit()
def decode(data, start, stop, points):  # type: ignore[no-untyped-def]
    """Code points of UTF-8 `data[start:stop]` into `points` uint32; how many there are."""
    n = 0
    i = start
    while i < stop:
        points[n], i = next_point(data, i)
        n += 1
    return n


@jit(forceinline=True)
def encode_point(c, out, pos):  # type: ignore[no-untyped-def]
    """UTF-8 of a code point into `out` from byte `pos` on; where it ends."""
    if c < 0x80:
        out[pos] = c
        return pos + 1
    width = 1 if c < 0x800 else 2 if c < 0x10000 else 3
    out[pos] = (0xFF00 >> (width + 1) & 0xFF) | (c >> (6 * width))
    for k in range(width - 1, -1, -1):
        out[pos + width - k] = 0x80 | ((c >> (6 * k)) & 0x3F)
    return pos + width + 1


@jit()
def encode(points, start, stop, out, pos):  # type: ignore[no-untyped-def]
    """`encode_point` of `points[start:stop]`, one after the other."""
    for i in range(start, stop):
        pos = encode_point(points[i], out, pos)
    return pos


@jit(forceinline=True)
def find(data, start, stop, value):  # type: ignore[no-untyped-def]
    """The first place in `[start, stop)` with that value, or `stop`."""
    while start < stop and data[start] != value:
        start += 1
    return start


@jit()
def starts_with(data, start, stop, prefix):  # type: ignore[no-untyped-def]
    """Whether `data[start:stop]` begins with `prefix`."""
    if stop - start < len(prefix):
        return False
    for i in range(len(prefix)):  # noqa: SIM110 - numba has no generators here
        if data[start + i] != prefix[i]:
            return False
    return True


@jit(forceinline=True)
def kind(table, point):  # type: ignore[no-untyped-def]
    """The bits of a code point."""
    return table[point] if point < _LAST else table[_LAST]


@jit()
def room_of(offsets, stops):  # type: ignore[no-untyped-def]
    """Room for the characters of the longest row `[offsets[i], stops[i])`, and two more."""
    longest = 0
    for row in range(len(stops)):
        longest = max(longest, stops[row] - offsets[row])
    return longest + 2


@jit()
def trim(points, start, stop, table):  # type: ignore[no-untyped-def]
    """`[start, stop)` without the white space at its ends."""
    while start < stop and kind(table, points[start]) & SPACE:
        start += 1
    while stop > start and kind(table, points[stop - 1]) & SPACE:
        stop -= 1
    return start, stop


@jit(forceinline=True)
def hash_step(h, value):  # type: ignore[no-untyped-def]
    """The hash of a word, uint64, with one more character; `hash_end` ends it."""
    h = (h ^ np.uint64(value)) * np.uint64(MIX)
    return h ^ h >> np.uint64(29)


@jit(forceinline=True)
def hash_end(h):  # type: ignore[no-untyped-def]
    h *= np.uint64(MIX)
    return h if h != 0 else np.uint64(1)


@jit(forceinline=True)
def hash_points(points, start, stop):  # type: ignore[no-untyped-def]
    """`hash_word` of `points[start:stop]`."""
    h = np.uint64(0)
    for i in range(start, stop):
        h = hash_step(h, points[i])
    return hash_end(h)


@jit()
def table_size(entries):  # type: ignore[no-untyped-def]
    """A power of two of slots, at least half of which stay free."""
    size = 16
    while size < 2 * entries:
        size *= 2
    return size


@jit(forceinline=True)
def look_up(keys, values, h):  # type: ignore[no-untyped-def]
    """The value of a hash in a `hash_table`, or -1."""
    mask = np.uint64(len(keys) - 1)
    slot = h & mask
    while keys[slot] != 0:
        if keys[slot] == h:
            return values[slot]
        slot = (slot + np.uint64(1)) & mask
    return np.int32(-1)
